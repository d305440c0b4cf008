"""The papers' pages: computed sentences and verdicts; every number is drawn exactly once."""

import tomllib

import pytest

from reproduce.papers import drawing, pages
from reproduce.papers.pages import PAGES, section, strips_of
from reproduce.papers.tables import DOCS, ROOT, Row, read_rows

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
        lines, figure = section(page, name, about, PROSE[page]["published"], ROWS[page])
        assert "\n".join(lines) in text
        assert (DOCS / pages.picture_of(page, name)).exists() == bool(figure)
    assert not {"theirs", "ours"} & {*text.split()}


def row_of(system, published, simulated, setting="", kind="predicted", gpus="8", trivial=None):
    what = ("9", system, setting, gpus, "time", published, simulated, "s", kind)
    return Row(*what, trivial=trivial)


def test_the_table_has_every_predicted_row_and_a_headline_without_repeats():
    """README's counts must add up to the predicted rows; a headline has no bar twice, and its page has it."""
    text = (DOCS / "README.md").read_text()
    for page in PAGES:
        lines = pages.skills_of(PROSE[page], ROWS[page])
        assert all(line in text for line in lines)
        counts = [int(line.split(" | ")[1]) for line in lines if "repeated bars |" not in line]
        *parts, whole = counts
        predicted = [r for r in ROWS[page] if r.kind == "predicted" and r.trivial is not None]
        assert sum(parts) == len(predicted) and 10 < whole <= len(predicted)
        assert pages.headline_of(PROSE[page], ROWS[page]) in (DOCS / f"{page}.md").read_text()
    hybridflow = pages.without_repeats(ROWS["hybridflow"], PROSE["hybridflow"]["headline"])
    runs = [(row.setting, row.gpus, f"{row.simulated:.4g}") for row in hybridflow]
    assert len(runs) == len({*runs}) < sum(bool(r.simulated) for r in ROWS["hybridflow"])


def test_pairs_beside_one_order_for_all():
    """Of three pairs, the simulation has two right; `a > b` everywhere has the other and one more."""
    rows = [row_of("a", 9.0, 9.0, "x"), row_of("b", 5.0, 5.0, "x")]
    rows += [row_of("a", 5.0, 4.0, "y"), row_of("b", 9.0, 9.0, "y")]
    rows += [row_of("a", 9.0, 4.0, "z"), row_of("b", 5.0, 5.0, "z")]
    rows += [row_of("a", 9.0, 4.0, "w"), row_of("b", 5.0, 5.0, "w", "fitted")]
    (text,) = pages.order(rows, "{setting}", ["a", "b"]).sentences
    assert text.startswith("2 of 3 predicted pairs") and text.endswith("always a > b: 2.")


def test_the_best_beside_one_choice_for_all():
    rows = [row_of("a", 9.0, 9.0, "x"), row_of("b", 5.0, 5.0, "x")]
    rows += [row_of("a", 5.0, 9.0, "y"), row_of("b", 9.0, 5.0, "y")]
    found = pages.best(rows, "{setting}", "{system}", "best", "b")
    assert found.sentences[0] == (
        "The prediction finds the best in 1 of 2 predicted cases; `b` is it: in 1."
    )
    assert "Exceptions: y (published: b 80 % ahead of a" in found.sentences[1]
    assert found.marks[rows[3], "published"] == found.marks[rows[2], "simulated"] == "★"


def test_gains_beside_a_constant():
    """Gains of 2 and 4 are found as 2.2 and 4: nearer than a constant 3 in both cases."""
    rows = [row_of("slow", 8.0, 8.8, "x"), row_of("fast", 4.0, 4.0, "x")]
    rows += [row_of("slow", 8.0, 8.0, "y"), row_of("fast", 2.0, 2.0, "y")]
    (text,) = pages.gains(rows, "{setting}", "{system}", "fast", ["slow"], "gain", 3).sentences
    assert "×2.00 to ×4.00 as published and ×2.20 to ×4.00 simulated" in text
    assert "median error 5.0 %, largest +10.0 %" in text
    assert "a constant ×3: median error 37.5 %, largest +50.0 %" in text
    assert text.endswith("2 of 2 predicted cases.")
