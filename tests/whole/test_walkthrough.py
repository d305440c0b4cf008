"""docs/walkthrough.md against its template, the source, and a run of the demo."""

import re
from string import Formatter

import pytest

from reproduce.bench import walkthrough
from tests.support.launched import free_ports
from tests.support.rounding import apart
from tests.whole.test_one_file import terms_of_a_logit

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


NUMBER = re.compile(r"\d+\.\d+(?:e-\d+)?")


@pytest.mark.slow
def test_a_run_gives_the_same_page(tmp_path):
    """Words and counts must be equal; numbers but for the order in which a CPU adds a logit's terms."""
    walkthrough.make_run(tmp_path / "run", "--port", free_ports())
    pages = [
        walkthrough.SECONDS.sub("", page) for page in (walkthrough.page_of(tmp_path / "run"), PAGE)
    ]
    words, expected_words = (NUMBER.split(page) for page in pages)
    assert words == expected_words
    numbers, expected = ([float(number) for number in NUMBER.findall(page)] for page in pages)
    assert numbers == pytest.approx(expected, rel=0, abs=apart(terms_of_a_logit()))
