"""docs/walkthrough.md against its template, the source, and a run of the demo."""

from string import Formatter

import pytest

from reproduce.bench import walkthrough
from tests.support.launched import free_ports

WORDS = walkthrough.TEMPLATE.read_text()
PAGE = walkthrough.PAGE.read_text()
AGAIN = "run `make walkthrough`: docs/walkthrough.md lacks"


@pytest.mark.parametrize("where", walkthrough.CODE.findall(WORDS))
def test_each_excerpt_is_the_source_now(where):
    code = walkthrough.excerpt(where)
    assert code in PAGE, f"{AGAIN}\n{code}"
    assert code.count("\n") <= 12, "read that in the file"


def test_the_words_are_those_of_the_template():
    place = 0
    for part in walkthrough.CODE.split(WORDS)[::2]:
        for words, *_ in Formatter().parse(part):
            place = PAGE.find(words, place)
            assert place >= 0, f"{AGAIN} {words}"
            place += len(words)


@pytest.mark.slow
def test_a_run_gives_the_same_page(tmp_path):
    walkthrough.make_run(tmp_path / "run", "--port", free_ports())
    blank = walkthrough.SECONDS.sub
    assert blank("", walkthrough.page_of(tmp_path / "run")) == blank("", PAGE)
