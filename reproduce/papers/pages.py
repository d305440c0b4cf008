"""Make the pages, README and pictures in docs/papers from docs/papers/rows, without simulating.

    python reproduce/papers/pages.py

reproduce/papers/prose holds the texts: claims of the papers, what was simulated, and why points miss. The
simulation's
numbers and the verdicts are computed here, from the rows.
"""

from __future__ import annotations

import sys
import textwrap
import tomllib
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[2]))

from reproduce.papers import own_runs
from reproduce.papers.drawing import (
    FITTED,
    FORMULA,
    SIDES,
    Marks,
    draw,
    grouped,
    strip_chart,
    words,
)
from reproduce.papers.tables import (
    DOCS,
    ROOT,
    Row,
    errors,
    number,
    percent,
    read_constants,
    read_rows,
    table_of,
)

PAGES = ("hybridflow", "rlhfuse", "wechat_yatt", "measured")
TIE = 0.02  # a smaller lead, published and simulated, counts as a tie
APART = 0.05  # pairs whose published numbers are closer aren't compared
PLACED = ("12", "13")  # figures that compare placements
CLOSE = 0.1  # largest relative error of a number or gain that agrees with the published one
VERDICTS = {
    "yes": 90,
    "mostly": 70,
    "no": 0,
}  # word -> least percentage of predicted cases that agree
FEWEST = 5  # predicted cases that a "yes" or "mostly" needs
TOO_FEW = "too few cases"
Prose = dict[str, Any]  # reproduce/papers/prose/NAME.toml, or one of its figures


class Finding(NamedTuple):
    """The result of a question about a figure's rows."""

    sentences: list[str]
    marks: Marks  # for the picture
    right: int = 0  # predicted cases that agree
    count: int = 0  # predicted cases


def verdict(right: int, count: int) -> str:
    """Return the word in README for `right` of `count` predicted cases that agree."""
    word = next(word for word, least in VERDICTS.items() if 100 * right >= least * count)
    return word if word == "no" or count >= FEWEST else TOO_FEW


def agreement(what: str, cases: dict[str, tuple[str, bool, bool]], marks: Marks) -> Finding:
    """Count the cases in which `what` holds. cases: (text of both sides, whether it holds, is predicted)."""
    fitted = [agrees for _, agrees, predicted in cases.values() if not predicted]
    wrong = [f"{name} ({both})" for name, (both, ok, new) in cases.items() if new and not ok]
    count = len(cases) - len(fitted)
    right = count - len(wrong)
    sentences = [f"{what} in {right} of {count} predicted cases."]
    sentences += [f"Exceptions: {'; '.join(wrong)}."] if wrong else []
    sentences += [f"In fitted cases: {sum(fitted)} of {len(fitted)}."] if fitted else []
    return Finding(sentences, marks, right, count)


def best(
    rows: list[Row], case: str, named: str, what: str, of: Sequence[str] = (), least: bool = False
) -> Finding:
    """Ask whether the best of each case is the same. case, named: templates. of: systems; default: all."""
    choose = min if least else max
    marks = {}
    cases = {}
    for name, own in grouped(rows, case).items():
        compared = [r for r in own if r.error is not None and r.system in (of or [r.system])]
        if len(compared) < 2:
            continue
        first, second = (choose(compared, key=lambda row: row.at(side)) for side in SIDES)
        marks |= {(first, "published"): "★", (second, "simulated"): "★"}
        ratios = [first.at(side) / second.at(side) for side in SIDES]
        leads = [max(ratio, 1 / ratio) - 1 for ratio in ratios]
        texts = [words(named, each) for each in (first, second)]
        both = f"published: {texts[0]} {percent(leads[0])} ahead of {texts[1]}; "
        both += f"simulated: {texts[1]} {percent(leads[1])} ahead"
        predicted = any(row.kind == "predicted" for row in compared)
        cases[name] = (both, max(leads) < TIE, predicted)
    return agreement(f"The simulation finds the {what}", cases, marks)


def gains(
    rows: list[Row], case: str, who: str, of: str, over: Sequence[str], what: str, how: str
) -> Finding:
    """Ask whether the gain of the row `of` over the rows `over` agrees in each case. case, who: templates.

    how: compare with the `max` of those, or, if less is better, with their `min` or `sum`. Rows that aren't
    simulated count with their published number.
    """
    marks = {}
    cases = {}
    found = {side: [] for side in SIDES}
    for name, own in grouped(rows, case).items():
        mine = [row for row in own if words(who, row) == of and row.error is not None]
        compared = [row for row in own if words(who, row) in over]
        for row in mine if compared else ():
            for side in SIDES:
                others = [other.at(side) or other.published for other in compared]
                ratio = row.at(side) / {"max": max, "min": min, "sum": sum}[how](others)
                found[side].append(ratio if how == "max" else 1 / ratio)
                marks[row, side] = f"×{found[side][-1]:.2f}"
            agrees = abs(found["simulated"][-1] / found["published"][-1] - 1) < CLOSE
            both = "; ".join(f"{side} {marks[row, side]}" for side in SIDES)
            predicted = any(each.kind == "predicted" for each in (row, *compared))
            cases[name] = (both, agrees, predicted)
    finding = agreement(f"The {what} is within {percent(CLOSE)} of the published one", cases, marks)
    ranges = [f"×{min(own):.2f} to ×{max(own):.2f} {side}" for side, own in found.items()]
    finding.sentences.append(f"Over all cases it is {' and '.join(ranges)}.")
    return finding


def band(rows: list[Row], claimed: list[float]) -> Finding:
    """Ask how many rows save as much as claimed."""
    own = [row.simulated for row in rows]
    more = sum(each < min(claimed) for each in own)
    less = sum(each > max(claimed) for each in own)
    same = len(own) - more - less
    text = f"The simulated ratio is {min(own):.2f} to {max(own):.2f}. It beats the claim in {more}"
    rest = f"of {len(own)} settings, matches it in {same} and falls short in {less}."
    return Finding([f"{text} {rest}"], {})


def saved(rows: list[Row], case: str, what: str) -> Finding:
    """Ask how much time rows save whose numbers are ratios of times. case: a template."""
    texts = []
    for name, own in grouped(rows, case).items():
        least, most = (1 - end(row.simulated for row in own) for end in (max, min))
        texts.append(f"{percent(least, '.1f')} to {percent(most, '.1f')} {name}")
    return Finding([f"Simulated {what}: {', '.join(texts)}."], {})


def order(rows: list[Row], case: str, of: Sequence[str] = ()) -> Finding:
    """Ask how many pairs of predicted rows are in the published order. case: a template."""
    right = []
    compared = [r for r in rows if r.kind == "predicted" and r.system in (of or [r.system])]
    for own in grouped(compared, case).values():
        for one, two in combinations(own, 2):
            if abs(one.published / two.published - 1) > APART:
                right.append((one.published < two.published) == (one.simulated < two.simulated))
    pairs = f"{len(right)} predicted pairs that are more than {percent(APART)} apart"
    return Finding([f"{sum(right)} of {pairs} are in the right order."], {}, sum(right), len(right))


QUESTIONS = {"best": best, "gains": gains, "order": order, "saved": saved}


def paragraph(*sentences: str) -> list[str]:
    text = " ".join(sentence.strip() for sentence in sentences if sentence)
    return [textwrap.fill(text, 110, break_long_words=False, break_on_hyphens=False), ""]


def rows_of(name: str, about: Prose, rows: list[Row]) -> list[Row]:
    """Return a figure's rows, without systems that have their own section."""
    own = [row for row in rows if row.figure in about.get("rows", [name])]
    own = [row for row in own if row.system in about.get("systems", [row.system])]
    assert own, f"no rows of figure {name}: run its paper's command with --write"
    return [row for row in own if row.system not in about.get("apart", ())]


def section(
    page: str, name: str, about: Prose, published: str, rows: list[Row]
) -> tuple[list[str], Figure | None, list[Finding]]:
    """Return a figure's section (claim, findings, picture, misses, rows), its picture and its findings."""
    own = rows_of(name, about, rows)
    # systems with their own section are drawn as published
    apart = [r for r in rows if r.figure == name and r.system in about.get("apart", ())]
    shown = own + [row._replace(simulated=None) for row in apart]
    claims = about.get("claims")
    claimed = [row.published for row in rows if claims and row.setting.startswith(claims)]
    findings = [band(shown, claimed)] if claimed else []
    marks = {}
    for question, asked in about.get("ask", {}).items():
        findings.append(QUESTIONS[question.split("_")[0]](shown, **asked))
        marks |= findings[-1].marks
    sentences = [sentence for finding in findings for sentence in finding.sentences]
    lines = [f"## {about['title']}", "", *paragraph(about["claim"], *sentences)]
    figure = None
    if "draw" in about:
        figure = draw(shown, marks, published, claimed, about["draw"])
        lines += [f"![{about['title']}]({picture_of(page, name)})", ""]
    fitted = sum(row.kind in FITTED for row in own)
    count = f"Points that were fitted or follow from fitted ones: {fitted}." if fitted else ""
    parts = grouped(own, about.get("apiece", "")).items()
    far = [f"{part}{errors(each)}." for part, each in parts if errors(each)]
    without = grouped([row for row in own if row.kind == "not modelled"], "{note}").items()
    template = about.get("left_out", "{system}")
    reasons = [
        f"{', '.join(grouped(each, template))} ({note})" for note, each in without if template
    ]
    left_out = f"Not simulated: {'; '.join(reasons)}." if reasons else ""
    lines += paragraph(about.get("set_up", ""), count, *far, about.get("misses", ""), left_out)
    listed = [row._replace(note="") if row.kind == "not modelled" else row for row in own]
    lines += [
        f"<details><summary>The {len(own)} numbers</summary>",
        "",
        *table_of(listed, published),
    ]
    figures = " ".join(f'"{each}"' if " " in each else each for each in about.get("rows", [name]))
    lines += ["</details>", "", f"    python reproduce/papers/{page}.py --figure {figures}", ""]
    return lines, figure, findings


def own_gpus(page: str, rows: list[Row]) -> list[str]:
    """Return the commands that measure points of a page on your GPUs, and results. See
    reproduce/papers/own_runs.py."""
    points = {f"{r.figure}:{r.system}:{r.setting}@{r.gpus}:{r.metric}": r for r in rows}
    lines = []
    for name, about in read_constants(own_runs.COMMANDS).items():
        if about["paper"] != page:
            continue
        found = [points[each] for each in about["points"]]
        beside = "; ".join(f"{row.name} ({number(row.published)} {row.unit})" for row in found)
        lines += paragraph(f"**{name}** compares with {beside}.", about["assumed"])
        folders = " ".join(["RUN", "BASE"][: len(about["lines"])])
        for line in (*about["lines"], f"python reproduce/papers/own_runs.py {name} {folders}"):
            parts = textwrap.wrap(line, 100, break_long_words=False, break_on_hyphens=False)
            code = "    " + " \\\n      ".join(parts)
            lines += [code, ""] if code not in lines else []
        if found := own_runs.own_rows().get(name):
            numbers = [f"{number(found[each])} {each}" for each in (*SIDES, "measured")]
            lines += paragraph(f"{found['run']}: {', '.join(numbers)} ({found['unit']}).")
    text = (ROOT / "prose" / "own_gpus.md").read_text(encoding="utf-8")
    return [*text.splitlines(), "", *lines] if lines else []


def picture_of(page: str, name: str) -> str:
    return f"{page}_{name.replace(' ', '_')}.png"


def strips_of(prose: Prose, rows: list[Row]) -> dict[str, list[Row]]:
    """Return the rows with an error, by their label in the strip chart."""
    strips = {}
    for name, about in prose["figures"].items():
        own = [row for row in rows_of(name, about, rows) if row.error is not None]
        for label, each in grouped(own, about.get("strip", "")).items():
            strips[f"{prose['short']}, {label}"] = each
    return strips


def far(rows: list[Row]) -> list[float]:
    """Return how far predicted points are from their published numbers."""
    return [abs(r.error) for r in rows if r.kind == "predicted" and r.error is not None]


def exact(rows: list[Row]) -> Finding:
    """Ask how many predicted points are close to their published numbers."""
    right = [error < CLOSE for error in far(rows)]
    text = f"{sum(right)} of {len(right)} predicted points within {percent(CLOSE)}"
    all_errors = errors(rows).split(": ")[1].split(" (")[0]
    return Finding([f"{text} ({all_errors})"], {}, sum(right), len(right))


def readme_of(template: str, index: list[str], found: dict[str, Finding], rows: list[Row]) -> str:
    """Fill in the README's template. index: a line for each page; found: by page and figure."""
    placed = [row for row in rows if row.figure in PLACED]
    places = grouped(placed, "{system}") | grouped(placed, "{system} on {gpus}")
    found = found | {name: exact(own) for name, own in places.items()}
    tenths = [percent(part, ".1f") for part in quantiles(far(rows), n=10, method="inclusive")]
    return template.format(
        pages="\n".join(index),
        said={name: finding.sentences[0] for name, finding in found.items()},
        verdict={name: verdict(finding.right, finding.count) for name, finding in found.items()},
        least=VERDICTS,
        fewest=FEWEST,
        too_few=TOO_FEW,
        count=len(far(rows)),
        half=tenths[4],
        most=tenths[8],
        formula=len(far([row for row in rows if row.figure == "h20"])),
        without=sum(row.kind == "not modelled" for row in rows),
    )


def main() -> None:
    strips = {}
    every = []
    index = []
    found = {}  # "page figure" -> its first finding
    for page in PAGES:
        prose = tomllib.loads((ROOT / "prose" / f"{page}.toml").read_text(encoding="utf-8"))
        rows = read_rows(DOCS / "rows" / f"{page}.csv")
        strips |= strips_of(prose, rows)
        every += rows
        index.append(f"- [{prose['title']}]({page}.md): {prose['of']}{errors(rows)}")
        all_errors = f"All {errors(rows)}{prose['which']}."
        lines = [f"# {prose['title']}", "", *paragraph(prose["intro"]), all_errors, ""]
        for name, about in prose["figures"].items():
            text, figure, findings = section(page, name, about, prose["published"], rows)
            lines += text
            found |= {f"{page} {name}": finding for finding in findings[:1]}
            if figure:
                figure.savefig(DOCS / picture_of(page, name), metadata={"Software": None})
        lines += own_gpus(page, rows)
        (DOCS / f"{page}.md").write_text("\n".join(lines), encoding="utf-8")
    order = sorted(strips.items(), key=lambda strip: FORMULA in strip[0])
    strip_chart(dict(order)).savefig(DOCS / "errors.png", metadata={"Software": None})
    text = (ROOT / "prose" / "README.md").read_text(encoding="utf-8")
    (DOCS / "README.md").write_text(readme_of(text, index, found, every), encoding="utf-8")


if __name__ == "__main__":
    main()
