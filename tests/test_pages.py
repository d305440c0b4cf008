"""The papers' pages: sentences that are computed, and that every number is drawn, once."""

import tomllib

import pytest

from papers import drawing, pages
from papers.pages import PAGES, section, strips_of
from papers.tables import DOCS, ROOT, read_rows

PROSE = {page: tomllib.loads((ROOT / "prose" / f"{page}.toml").read_text()) for page in PAGES}
ROWS = {page: read_rows(DOCS / "rows" / f"{page}.csv") for page in PAGES}


@pytest.mark.parametrize("page", PAGES)
def test_every_number_has_its_place(page):
    """On the page once, and in the strip chart if it has an error, which each strip draws."""
    strips = [row for own in strips_of(PROSE[page], ROWS[page]).values() for row in own]
    expected = [row for row in ROWS[page] if row.error is not None]
    assert len(strips) == len(expected) > 10 and {*strips} == {*expected}
    figures = PROSE[page]["figures"].items()
    shown = [row for name, about in figures for row in pages.rows_of(name, about, ROWS[page])]
    claims = [row for row in ROWS[page] if row.figure == "claims"]
    assert sorted(map(str, shown + claims)) == sorted(map(str, ROWS[page]))
    figure = drawing.strip_chart({"all": strips})
    x = [line.get_xdata()[0] for line in figure.axes[0].lines]
    assert sorted(x[:-1]) == sorted(100 * row.error for row in strips)  # the last is the zero


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_that_of_its_rows(page):
    """What is committed is what these rows make; its pictures are there."""
    text = (DOCS / f"{page}.md").read_text()
    for name, about in PROSE[page]["figures"].items():
        lines, figure, _ = section(page, name, about, PROSE[page]["published"], ROWS[page])
        assert "\n".join(lines) in text
        assert (DOCS / pages.picture_of(page, name)).exists() == bool(figure)
    assert not {"theirs", "ours"} & {*text.split()}
