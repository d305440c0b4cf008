"""The papers' pages: sentences that are computed, and that every number is drawn, once."""

import tomllib

import pytest

from papers import drawing, pages
from papers.pages import PAGES, band, best, gains, section, strips_of
from papers.tables import DOCS, ROOT, read_rows
from tests.test_papers import row_of

PROSE = {page: tomllib.loads((ROOT / "prose" / f"{page}.toml").read_text()) for page in PAGES}
ROWS = {page: read_rows(DOCS / "rows" / f"{page}.csv") for page in PAGES}


def placements(**simulated):
    """Two cases; published, split is the fastest in 7B, colocate in 13B."""
    published = {"7B": (1.0, 2.0), "13B": (2.0, 1.0)}
    rows = []
    for setting, values in published.items():
        own = simulated.get(f"at_{setting}", values)
        for system, one, other in zip(("colocate", "split"), values, own, strict=True):
            rows.append(row_of(one, other, setting=setting, system=system))
    return rows


def test_the_fastest_of_each_case():
    """One as good to 2 % agrees; stars are where each side's best is."""
    asked = dict(case="{setting}", named="{system}", what="fastest placement")
    rows = placements()
    text, marks = best(rows, **asked)
    agreed = "on the fastest placement, give or take 2 %"
    assert text == f"The simulation agrees in 2 of 2 cases {agreed}."
    assert {(row.setting, row.system) for row, _ in marks} == {("7B", "split"), ("13B", "colocate")}
    text, _ = best(placements(at_7B=(3.0, 2.0), at_13B=(2.0, 2.02)), **asked)
    elsewhere = "but not in (simulated last) 7B: split and colocate, 50 % better"
    assert text == f"The simulation agrees in 1 of 2 cases {agreed}, {elsewhere}."
    text, _ = best(rows, least=True, **asked)
    assert "in 2 of 2" in text
    assert "in 0 of 0" in best(rows, of=["split"], **asked)[0]


def test_the_gain_over_others():
    """Also where less is better, and where others are a sum or aren't simulated."""
    rows = [row_of(1.0, 1.0, system="Base"), row_of(1.3, 1.2, system="RLHFuse")]
    asked = dict(case="{setting}", who="{system}", of="RLHFuse", what="gain")
    text, marks = gains(rows, over=["Base"], how="max", **asked)
    assert text.startswith(
        "The simulation agrees in 1 of 1 cases on the gain, give or take 10 %. It is "
    )
    assert marks == {(rows[1], "published"): "×1.30", (rows[1], "simulated"): "×1.20"}
    text, _ = gains([rows[0]._replace(simulated=None), rows[1]], over=["Base"], how="min", **asked)
    assert text.endswith("It is ×0.77 to ×0.77 published and ×0.83 to ×0.83 simulated.")
    other = row_of(2.0, 3.0, system="Other")
    text, _ = gains([*rows, other], over=["Base", "Other"], how="sum", **asked)
    assert "in 0 of 1 cases" in text and "×2.31 and ×3.33" in text


def test_how_much_of_a_claim_is_gained():
    rows = [row_of(None, simulated) for simulated in (0.5, 0.8, 0.9, 1.1)]
    text = "Simulated it is 0.5 to 1.1: of 4 cells 1 gain more than claimed, 2 less, 1 as much."
    assert band(rows, [0.838, 0.759]) == text


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
        lines, figure = section(page, name, about, PROSE[page]["published"], ROWS[page])
        assert "\n".join(lines) in text
        assert (DOCS / pages.picture_of(page, name)).exists() == bool(figure)
    assert not {"theirs", "ours"} & {*text.split()}


def test_how_bars_are_drawn():
    """Published hollow, simulated full, or hatched where a constant was fitted; parts on each other."""
    rows = [row_of(1.0, 2.0, setting="a"), row_of(3.0, 4.0, "fitted", setting="b")]
    about = dict(how="bars", panel="", group="", bar="{system}", part="{setting}", x="", y="")
    figure = drawing.draw(rows, {(rows[1], "simulated"): "★"}, "published", [5.0], about)
    bars = figure.axes[0].containers
    spans = [(each[0].get_y(), each[0].get_height(), each[0].get_fill()) for each in bars]
    assert spans == [(0, 1, False), (1, 3, False), (0, 2, True), (2, 4, True)]
    assert [bool(each[0].get_hatch()) for each in bars] == [False, False, False, True]
    assert [text.get_text() for text in figure.axes[0].texts] == ["", "★"]
