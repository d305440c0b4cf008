"""docs/walkthrough.md against its words, the source, and a run of the demo."""

from string import Formatter

import pytest

from bench import walkthrough
from tests.support.launched import free_ports

WORDS = walkthrough.TEMPLATE.read_text()
AGAIN = "run `make walkthrough`: docs/walkthrough.md lacks"


@pytest.mark.parametrize("where", walkthrough.CODE.findall(WORDS))
def test_each_excerpt_is_the_source_now(where):
    code = walkthrough.excerpt(where)
    assert f"```python\n{code}\n```" in walkthrough.PAGE.read_text(), f"{AGAIN}\n{code}"
    assert code.count("\n") <= 10, "read that in the file"


def test_an_excerpt_that_is_gone_is_named():
    assert walkthrough.excerpt("sample.py: Sample.key").endswith(
        "return self.prompt_id, self.index"
    )
    with pytest.raises(AssertionError, match=r"sample.py has no Sample.keys"):
        walkthrough.excerpt("sample.py: Sample.keys")
    with pytest.raises(AssertionError, match="no line begins with `return 1`"):
        walkthrough.excerpt("sample.py: Sample.key: def ... return 1")


def test_the_words_are_those_of_the_template():
    text = walkthrough.PAGE.read_text()
    assert text.count("\n") <= 250, "half an hour of reading"
    page = " ".join(text.split())
    place = 0
    for part in walkthrough.CODE.split(WORDS)[::2]:
        for literal, *_ in Formatter().parse(part):
            words = " ".join(literal.split())
            place = page.find(words, place)
            assert place >= 0, f"{AGAIN} {words}"
            place += len(words)


@pytest.mark.slow
def test_a_run_gives_the_same_numbers(tmp_path):
    """But for the times."""
    walkthrough.make_run(tmp_path / "run", "--port", free_ports())
    made = walkthrough.page_of(tmp_path / "run")
    committed = walkthrough.PAGE.read_text()
    assert walkthrough.TIMES.sub("", made) == walkthrough.TIMES.sub("", committed)
