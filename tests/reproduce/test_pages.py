"""The papers' pages: computed sentences and verdicts; every number is drawn exactly once."""

import re
import tomllib

import pytest

from reproduce.papers import drawing, pages
from reproduce.papers.pages import PAGES, section, strips_of
from reproduce.papers.tables import DOCS, ROOT, read_rows

PROSE = {page: tomllib.loads((ROOT / "prose" / f"{page}.toml").read_text()) for page in PAGES}
ROWS = {page: read_rows(DOCS / "rows" / f"{page}.csv") for page in PAGES}


@pytest.mark.parametrize("page", PAGES)
def test_every_number_has_its_place(page):
    """Each must be once on the page, and in the strip chart if it has an error; every strip draws it."""
    strips = [row for own in strips_of(PROSE[page], ROWS[page]).values() for row in own]
    expected = [row for row in ROWS[page] if row.error is not None]
    assert len(strips) == len(expected) > 10 and {*strips} == {*expected}
    shown = [row for row in ROWS[page] if row.figure == "claims"]
    for name, about in PROSE[page]["figures"].items():
        shown += pages.rows_of(name, about, ROWS[page])
    assert sorted(map(str, shown)) == sorted(map(str, ROWS[page]))
    figure = drawing.strip_chart({"all": strips})
    x = [line.get_xdata()[0] for line in figure.axes[0].lines]
    assert sorted(x[:-1]) == sorted(100 * row.error for row in strips)  # the last is the zero


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_that_of_its_rows(page):
    """The committed page must be the one that these rows make, and its pictures must exist."""
    text = (DOCS / f"{page}.md").read_text()
    for name, about in PROSE[page]["figures"].items():
        lines, figure, _ = section(page, name, about, PROSE[page]["published"], ROWS[page])
        assert "\n".join(lines) in text
        assert (DOCS / pages.picture_of(page, name)).exists() == bool(figure)
    assert not {"theirs", "ours"} & {*text.split()}


def test_one_rule_gives_every_verdict():
    """90% of the cases give a yes, 70% a mostly; both need 5 cases. README must follow its counts."""
    cases = {
        (9, 10): "yes",
        (5, 5): "yes",
        (89, 100): "mostly",
        (7, 10): "mostly",
        (4, 5): "mostly",
    }
    cases |= {(69, 100): "no", (3, 5): "no", (2, 3): "no", (0, 1): "no"}
    cases |= dict.fromkeys([(4, 4), (3, 4), (1, 1), (0, 0)], "too few cases")
    assert {case: pages.verdict(*case) for case in cases} == cases
    number = r"(\d+) of (\d+) predicted"
    found = re.findall(rf"\*\*([\w ]+)\*\*[.:]\s[^*]*?{number}", (DOCS / "README.md").read_text())
    assert [word for word, *_ in found] == [pages.verdict(*map(int, case)) for _, *case in found]
    assert len(found) == 12
