"""Spans to seconds and lanes."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from extras import figure
from runtime import timeline as tl

# quarters are exact in binary, so brute force and busy() may be compared to the last bit
QUARTERS = st.integers(0, 40).map(lambda n: n / 4)
LENGTHS = st.integers(1, 20).map(lambda n: n / 4)
INTERVALS = st.lists(st.tuples(QUARTERS, LENGTHS), max_size=12)


def spans_of(intervals, name="rollout", rank=0, step=0):
    return [tl.Event("span", name, rank, at, at + length, step) for at, length in intervals]


NAMES = st.sampled_from(["rollout", "genrm"])


@settings(deadline=None)
@given(st.lists(st.tuples(NAMES, st.integers(0, 2), INTERVALS), max_size=6))
def test_lanes_against_a_sampler(groups):
    """Each rank and name has one lane; requests of all controllers to one engine share it."""
    spans = [span for name, rank, intervals in groups for span in spans_of(intervals, name, rank)]
    found = tl.lanes(spans)
    assert set(found) == {(span.rank, span.name) for span in spans} and list(found) == sorted(found)
    for (rank, name), stretches in found.items():
        mine = [span for span in spans if (span.rank, span.name) == (rank, name)]
        flying = [sum(s.start * 4 <= tick < s.end * 4 for s in mine) for tick in range(100)]
        assert sum(end - start for start, end, _ in stretches) * 4 == sum(map(bool, flying))
        work = sum((end - start) * flying for start, end, flying in stretches)
        assert work * 4 == pytest.approx(sum(flying))


def test_a_timeline_on_a_clock(tmp_path):
    """Times must count from `start`; a span also closes when its block raises; all is in the rank's file."""
    now, opened = [100.0], []
    line = tl.Timeline(3, lambda: now[0], tmp_path, lambda name, step: opened.append((name, step)))
    now[0] = 110.0
    line.start()
    line.start(ran_s=5.0)
    assert line.now() == 5, "a resumed run goes on where it was"
    line.start()
    assert line.now() == 0
    line.step = 2
    with line.span("serve"):
        now[0] = 112.5
        line.add("span", "rollout", 1, 111.0, 112.0)
    with pytest.raises(KeyError), line.span("train"):
        now[0] = 113.0
        raise KeyError
    expected = spans_of([(1.0, 1.0)], "rollout", 1, 2) + spans_of([(0.0, 2.5)], "serve", 3, 2)
    expected += spans_of([(2.5, 0.5)], "train", 3, 2)
    assert line.drain() == expected and line.drain() == []
    assert opened == [("serve", 2), ("train", 2)]
    line.add("span", "genrm", 0, 113.0, 114.0)
    line.drain()
    assert tl.read(tmp_path) == expected + spans_of([(3.0, 1.0)], "genrm", 0, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["rank3.2.jsonl"]


def test_steps_are_read_without_all_others(tmp_path):
    """Only requested steps must be read; -1 is the last, which may only have been evaluated."""
    line = tl.Timeline(0, lambda: 0.0, tmp_path)
    for line.step in range(43):
        line.mark("wave", "wave 2")
        line.drain()
    cases = {(0, -1): (0, 43), (12, 14): (12, 15), (12, -1): (12, 43), (-4, -1): (38, 43)}
    for asked, found in cases.items():
        assert [mark.step for mark in tl.read(tmp_path, *asked)] == list(range(*found))


def test_files_of_a_long_run_are_bounded(tmp_path, monkeypatch):
    """Each rank must keep only the last steps' files, after a resume too; older steps can't be drawn."""
    monkeypatch.setattr(tl, "STEPS_KEPT", 5)
    lines = [tl.Timeline(rank, lambda: 0.0, tmp_path) for rank in range(2)]
    for resumed, first, last in ((0.0, 0, 12), (8.5, 9, 14)):
        assert tl.truncate(tmp_path, first) == resumed
        for line, step in itertools.product(lines, range(first, last)):
            line.step = step
            line.add("span", "train", line.rank, step, step + 0.5)
            line.drain()
    assert [step for step, _ in tl.files_in(tmp_path)] == sorted([*range(9, 14)] * 2)
    assert len(tl.read(tmp_path, -10)) == 10 and tl.truncate(tmp_path, 8) == 0.0


@pytest.mark.parametrize(
    "drawn, text", [({"judging"}, "answer is judged"), ({"judging", "genrm"}, "genrm judges")]
)
def test_the_legend_explains_judging_once_with_a_judge_or_rules_only(drawn, text):
    picture = Figure()
    figure.add_legend(picture, drawn)
    (legend,) = picture.legends
    color = figure.LOOKS["judging"][0]
    patches = zip(legend.get_patches(), legend.get_texts(), strict=False)
    assert [t.get_text() for p, t in patches if p.get_facecolor() == to_rgba(color)] == [text]


def test_an_engine_is_busy_with_what_it_has_to_leave():
    """A critique begins on one engine and ends on another: each must have its part, and one is a span."""
    begun, ended = spans_of([(0.0, 4.0), (4.5, 5.0)], "genrm", 0)
    events = [begun._replace(kind="part"), ended._replace(rank=1)]
    assert tl.seconds(events, "genrm") == 9
    picture = figure.Picture("t", figure.of_steps(events, 0, 0), 4)
    stretches = {lane: len(found) for lane, found in picture.lanes.items()}
    assert stretches == {(0, "genrm"): 1, (1, "genrm"): 1}
    assert picture.idle == pytest.approx(1 - 9 / (2 * 9.5))
