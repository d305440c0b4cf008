"""The English of comments, docstrings, messages and pages: ten patterns that no American engineer writes."""

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

from tests import ROOT
from tests.house.test_size import CHECKED

pytestmark = pytest.mark.slow

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
COMMENT, DOCSTRING, TEXT, PAGE = "comment", "docstring", "text", "page"
EVERYWHERE = (COMMENT, DOCSTRING, TEXT, PAGE)
# name: where it counts, the pattern, and what to write instead
PATTERNS = {
    "a comment without a noun": ((COMMENT,), r"\A(of|by) ", "name what is described"),
    "a docstring without a verb": (
        (DOCSTRING,),
        r"\A(Of|What|Whom|Whose)\b",
        "begin with a verb or a noun",
    ),
    "a machine that talks": (
        EVERYWHERE,
        r"\b(says?|said|tells?|told|hears?|heard|owes?|owed|speaks?|spoke)\b",
        "it returns, sends, reports, receives, has left",
    ),
    "alone": (EVERYWHERE, r"\balone\b", "only, or by itself"),
    ", too": (EVERYWHERE, r", too\b", "also, inside the sentence"),
    "so many": (EVERYWHERE, r"\bso (many|much)\b", "as many as, that many"),
    "anew": (EVERYWHERE, r"\banew\b", "again"),
    "behind": (EVERYWHERE, r"\bbehind\b", "after"),
    "a clause far from its noun": (
        EVERYWHERE,
        r", (whose|of which|by which|to which|of whom)\b",
        "a sentence of its own",
    ),
    "an error without a verb": (
        (DOCSTRING,),
        r"(?<=[.:] )(Raises )?\w+Error\.|(?<=[.:] )\w+Error (if|for|that|when)\b",
        "Raises ... if",
    ),
}
# what is left: prompts for models, true solitude, and clauses that are clear
MOST = {"a machine that talks": 4, "alone": 2, "a clause far from its noun": 3}


def texts_of(path: Path) -> list[tuple[str, int, str]]:
    """Return (kind, line, text) of all that people read in a file of code."""
    source = path.read_text()
    tree = ast.parse(source)
    found = []
    docstrings = set()
    for node in ast.walk(tree):
        has_docstring = isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        )
        if has_docstring and (text := ast.get_docstring(node)):
            docstrings.add(id(node.body[0].value))
            found.append((DOCSTRING, node.body[0].lineno, " ".join(text.split())))
    for node in ast.walk(tree):
        is_text = (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
        )
        if is_text and id(node) not in docstrings:
            found.append((TEXT, node.lineno, node.value))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found.append((COMMENT, token.start[0], token.string.strip("# ")))
    return found


def paragraphs_of(page: Path) -> list[tuple[str, int, str]]:
    """Return (kind, line, text) of a page's paragraphs, without code."""
    prose = re.sub(
        r"(?m)^```.*?^```|^    .*$|`[^`]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    return [(PAGE, 0, " ".join(part.split())) for part in prose.split("\n\n")]


def test_patterns_do_not_come_back():
    texts = [(path, *text) for path in CHECKED for text in texts_of(path)]
    texts += [(path, *text) for path in PAGES for text in paragraphs_of(path)]
    counts = Counter()
    for path, kind, line, text in texts:
        for name, (where, pattern, instead) in PATTERNS.items():
            for match in re.finditer(pattern, text) if kind in where else ():
                counts[name] += 1
                near = text[max(0, match.start() - 40) : match.end() + 40]
                print(f"{path.relative_to(ROOT)}:{line}: {name} (write {instead}): {near}")
    print(dict(counts))
    assert counts <= Counter(MOST)
