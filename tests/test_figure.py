"""The figure: what is drawn of a run, in which row, and whether that is what was seen."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex

from reporting import figure
from reporting import timeline as tl


def spans_of(intervals, name="rollout", rank=0, step=0):
    return [tl.Span(name, rank, start, start + length, step) for start, length in intervals]


MIXED = [
    *spans_of([(0, 2), (1, 2)], "rollout", 0),
    *spans_of([(0.5, 1), (3, 0.5)], "genrm", 1),
    *[tl.Span(name, rank, 4.0, 5.0, 0) for name in ("train", "switch", "sync") for rank in (0, 1)],
    *[tl.Span("train", rank, 9.0, 9.5, 1) for rank in (0, 1)],
]


def life(prompt_id, *stretches):
    """The stretches (state, start, end, step) of answer 0 to a prompt."""
    return [tl.SampleSpan(state, prompt_id, 0, 0, start, end, step) for state, start, end, step in stretches]


CUT = life(  # in step 0, and written to its end in step 1
    7, ("queued", 0.0, 1.0, 0), ("decoding", 1.0, 3.0, 0), ("aborted", 3.0, 3.0, 0),
    ("queued", 5.0, 5.5, 1), ("resumed", 5.5, 6.0, 1), ("judging", 6.0, 7.0, 1), ("done", 7.0, 7.0, 1),
)  # fmt: skip
WHOLE = life(8, ("queued", 0.0, 0.5, 0), ("decoding", 0.5, 2.0, 0), ("judging", 2.0, 2.5, 0), ("done", 2.5, 2.5, 0))
LATER = life(9, ("queued", 5.0, 5.25, 1), ("decoding", 5.25, 8.0, 1), ("judging", 8.0, 8.5, 1), ("done", 8.5, 8.5, 1))
MARKS = [
    tl.Mark(kind, text, rank, time + rank / 8, step)
    for rank in (1, 2)
    for kind, text, time, step in (
        ("wave", "wave 1", 0.0, 0), ("wave", "wave 2", 2.0, 0), ("weights", "v1", 4.75, 0), ("split", "1|1", 5.0, 1),
    )
]  # fmt: skip


def drawn(pictures, path, monkeypatch):
    """`draw`, and the figure that it drew."""
    import matplotlib.pyplot as plt

    figures, close = [], plt.close
    monkeypatch.setattr(plt, "close", lambda one: (figures.append(one), close(one)))
    figure.draw(pictures, path)
    return figures[0]


# ---------------------------------------------------------------- the lives of answers


@pytest.mark.parametrize(
    "states,ends",
    [
        ("queued decoding judging done", [4]),
        ("decoding aborted resumed judging done", [5]),
        ("decoding aborted queued resumed aborted queued resumed done", [8]),
        ("queued aborted queued resumed", [4]),  # cut before its first token
        ("decoding aborted queued decoding done", [2, 3]),  # over-dispatch: thrown away, and its prompt drawn again
        ("decoding judging done queued decoding judging done", [3, 4]),  # a surplus group's prompt comes again
        ("decoding queued judging done", [4]),  # it waits for the judge
        ("done judging", [2]),
        ("decoding aborted queued", [2, 1]),
    ],
)
def test_a_life_ends_where_an_answer_is_written_anew(states, ends):
    """Lengths of the lives that the states of one answer's number make, one a second."""
    instants = itertools.count()
    stretches = life(3, *((state, i, i + (state not in tl.INSTANTS), i) for state, i in zip(states.split(), instants, strict=False)))
    assert [len(one) for one in figure.lives(stretches[::-1])] == ends


def test_lives_are_in_the_order_in_which_they_left_the_queue():
    """Those that left it as good as together by their ends; one cut in the queue left it then."""
    early = [life(i, ("queued", 0.0, 1.0 + i / 1e6, 0), ("decoding", 1.0 + i / 1e6, 9.0 - i, 0)) for i in range(4)]
    cut = life(5, ("queued", 0.0, 4.0, 0), ("aborted", 4.0, 4.0, 0))
    late = life(6, ("queued", 0.0, 7.0, 0), ("decoding", 7.0, 8.0, 0))
    found = figure.lives([*late, *cut, *itertools.chain(*early)])
    assert found == [*early[::-1], cut, late]
    assert figure.lives([]) == []


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=30))
def test_rows_hold_one_answer_a_step(steps):
    """No two lives share a row in one step, a step's new lives are in order from the top, and there are as few rows as can be."""
    lives = [
        life(i, ("decoding", first, first, first), ("done", first + more, first + more, first + more))
        for i, (first, more) in enumerate(sorted(steps))
    ]
    rows = figure.rows_of(lives)
    held = [(row, step) for row, one in zip(rows, lives, strict=True) for step in range(one[0].step, one[-1].step + 1)]
    assert len(held) == len(set(held))
    for step in range(6):
        new = [row for row, one in zip(rows, lives, strict=True) if one[0].step == step]
        assert new == sorted(new)
    assert len(set(rows)) == max((sum(at == step for _, at in held) for step in range(8)), default=0)


@pytest.mark.parametrize("answers,every", [(0, 1), (1, 1), (250, 1), (251, 2), (500, 2), (501, 3)])
def test_of_too_many_answers_every_nth_is_drawn(answers, every):
    """Evenly over the step, so that the shape stays; how many steps there are plays no part."""
    lives = [life(i, ("decoding", i, i + 1.0, step)) for step in (0, 1) for i in range(answers)]
    assert figure.thinned(lives) == (lives[::every], every)


def test_each_kind_of_mark_once():
    """By the lowest rank that made any."""
    waves = [tl.Mark("wave", "w", 2, 1.0, 0), tl.Mark("wave", "w", 1, 1.1, 0), tl.Mark("wave", "x", 1, 5.0, 0)]
    marks = [*waves, tl.Mark("split", "s", 3, 0.0, 0)]
    assert figure.once(marks) == marks[1:] and figure.once([]) == []


# ---------------------------------------------------------------- what is drawn


def bars(axes):
    """(colour, row, start, end) of every bar."""
    boxes = [(to_hex(p.get_facecolor()), p.get_bbox()) for p in axes.patches]
    return sorted((color, (box.y0 + box.y1) / 2, box.x0, box.x1) for color, box in boxes)


def ticks(axes, state):
    """(time, row) of the ticks of one state."""
    found = [c for c in axes.collections if len(c.get_colors()) and to_hex(c.get_colors()[0]) == tl.STATES[state]]
    return sorted((line[0][0], (line[0][1] + line[1][1]) / 2) for c in found for line in c.get_segments())


def test_the_answers_are_drawn_as_they_lived(tmp_path, monkeypatch):
    """One row through abort and resumption over two steps, coloured by state, on the clock of the lanes; rows are used again."""
    spans = [tl.Span("rollout", 0, -1.0, 4.0, 0), tl.Span("train", 0, 4.0, 4.5, 0), tl.Span("train", 0, 9.0, 9.5, 1)]
    picture = figure.Picture("t", tl.Records(spans, [*LATER, *CUT, *WHOLE]), 4)
    lanes, answers = drawn([picture], tmp_path / "x.png", monkeypatch).axes
    rows = {8: 0, 7: 1, 9: 0}  # 8 left the queue before 7, and is done before 9 begins
    slices = [s for s in CUT + WHOLE + LATER if s.state not in tl.INSTANTS]
    assert bars(answers) == sorted((tl.STATES[s.state], rows[s.prompt_id], s.start + 1, s.end + 1) for s in slices)
    assert ticks(answers, "aborted") == [(4.0, 1)] and ticks(answers, "done") == [(3.5, 0), (8.0, 1), (9.5, 0)]
    assert lanes.get_shared_x_axes().joined(lanes, answers) and lanes.get_position().y0 > answers.get_position().y0


def test_marks_are_drawn_once_and_named(tmp_path, monkeypatch):
    """By the lowest rank, at its time; waves go through the answers as dotted lines, steps as whole ones."""
    picture = figure.Picture("t", tl.Records(MIXED, CUT + WHOLE, MARKS), 4)
    panels = drawn([picture], tmp_path / "x.png", monkeypatch).axes
    texts = sorted((text.get_text().strip(), text.get_position()[0]) for text in panels[0].texts)
    assert texts == [("split 1|1", 5.125), ("step 0", 0), ("step 1", 9), ("v1", 4.875), ("wave 1", 0.125), ("wave 2", 2.125)]
    for axes in panels:
        lines = sorted((line.get_xdata()[0], line.get_linestyle() == "-") for line in axes.lines)
        assert lines == [(0.0, True), (0.125, False), (2.125, False), (9.0, True)]


def test_weights_at_the_very_start_are_named_before_it(tmp_path, monkeypatch):
    """Where their text would stand on the first step's name; a wave's stands behind its time anyway."""
    marks = [tl.Mark("weights", "v0", 0, 0.1, 0), tl.Mark("wave", "wave 1", 0, 0.1, 0)]
    axes = drawn([figure.Picture("t", tl.Records(MIXED, [], marks), 4)], tmp_path / "x.png", monkeypatch).axes
    places = {text.get_text().strip(): (text.get_position()[0], text.get_ha()) for text in axes[0].texts}
    assert places["v0"] == (0, "right") and places["wave 1"] == (0.1, "left")


def test_without_answers_there_is_no_panel_for_them(tmp_path, monkeypatch):
    """Marks alone make none. Of several runs those with answers get one each; the legend of their states comes once."""
    bare, full = (figure.Picture("t", tl.Records(MIXED, samples, MARKS), 4) for samples in ([], WHOLE))
    for pictures, labels in (([bare], [""]), ([full, bare, full], ["", "answers", "", "", "answers"])):
        with monkeypatch.context() as patch:
            whole = drawn(pictures, tmp_path / "x.png", patch)
        assert [axes.get_ylabel() for axes in whole.axes] == labels
        assert len(whole.legends) == ("answers" in labels)


def test_the_title_says_when_answers_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(figure, "MOST_ROWS", 3)
    samples = [tl.SampleSpan("decoding", i, 0, 0, i / 10, 1.0, 0) for i in range(8)]
    lanes, answers = drawn([figure.Picture("a title", tl.Records(MIXED, samples), 4)], tmp_path / "x.png", monkeypatch).axes
    assert lanes.get_title(loc="left") == "a title (1 of 3 answers drawn)"
    assert [(row, start) for _, row, start, _ in bars(answers)] == [(0, 0.0), (1, pytest.approx(0.3)), (2, pytest.approx(0.6))]


@pytest.mark.parametrize(
    "records",
    [tl.Records(MIXED), tl.Records(MIXED[:1]), tl.Records(), tl.Records(MIXED, CUT + WHOLE, MARKS), tl.Records([], WHOLE[:1], MARKS)],
    ids=["mixed", "one", "none", "all", "spanless"],
)
def test_the_figure_is_a_picture(tmp_path, records):
    """A PNG that isn't blank, whatever there is to draw."""
    import matplotlib.image

    figure.draw([figure.Picture("a title", records, 4)], tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    picture = matplotlib.image.imread(tmp_path / "timeline.png")
    assert picture.std() > 0 and picture.shape[1] > 1000


@pytest.mark.parametrize(
    "first,last,steps",
    [(-3, -1, {9, 10, 11}), (0, 0, {0}), (2, 4, {2, 3, 4}), (10, 99, {10, 11}), (-99, 1, {0, 1}), (5, 4, set()), (50, 60, set())],
)
def test_steps_of_a_run(first, last, steps):
    """Of 12 steps; the evaluation after the last belongs to none, and what has no colour isn't drawn. Samples and marks follow."""
    spans = [tl.Span("train", 1, 10.0 * i + 5, 10.0 * i + 6, i) for i in range(12)]
    spans += [tl.Span("rollout", 1, 120.0, 121.0, 12), tl.Span("evaluate", 0, 0.0, 9.0, 3)]
    samples = [tl.SampleSpan("decoding", 0, 0, 0, 10.0 * i, 10.0 * i + 4, i) for i in range(13)]
    marks = [tl.Mark("wave", "wave 1", 0, 10.0 * i, i) for i in range(13)]
    chosen = figure.of_steps(tl.Records(spans, samples, marks), first, last)
    assert {s.name for s in chosen.spans} <= {"train"}
    assert all({record.step for record in kind} == steps for kind in (chosen.spans, chosen.samples, chosen.marks))


def write_run(out, mode, spans):
    """What a run leaves for the figure."""
    (out / "spans").mkdir(parents=True)
    (out / "config.json").write_text(json.dumps({"mode": mode, "ranks": 2, "max_running_requests": 4}))
    for rank in (0, 1):
        (out / "spans" / f"rank{rank}.jsonl").write_text("".join(json.dumps(["span", *s]) + "\n" for s in spans if s.rank == rank))


def test_two_runs_on_one_clock(tmp_path, monkeypatch):
    """Both runs start at 0, whenever they began, share the axis, and say which is which."""
    import matplotlib.axes
    import matplotlib.image

    bars = []
    plain = matplotlib.axes.Axes.barh

    def barh(self, y, width, left, **style):
        bars.append((self, left))
        return plain(self, y, width, left=left, **style)

    monkeypatch.setattr(matplotlib.axes.Axes, "barh", barh)
    write_run(tmp_path / "a", "full", MIXED)
    write_run(tmp_path / "b", "partial", [s._replace(start=s.start + 100, end=s.end + 100) for s in MIXED])
    path, runs = tmp_path / "both.png", [str(tmp_path / "a"), str(tmp_path / "b")]
    monkeypatch.setattr("sys.argv", ["timeline.py", *runs, "--steps", "0", "1", "--figure", str(path)])
    tl.main()
    top, bottom = dict.fromkeys(axes for axes, _ in bars)
    first, second = ([left for axes, left in bars if axes is row] for row in (top, bottom))
    assert min(first) == 0 and first == pytest.approx(second)
    assert top.get_shared_x_axes().joined(top, bottom) and top.get_position().y0 > bottom.get_position().y0
    assert [axes.get_title(loc="left") for axes in (top, bottom)] == [
        f"{tmp_path}/a: full colocation, 2 ranks", f"{tmp_path}/b: partial colocation, 2 ranks",
    ]  # fmt: skip
    assert matplotlib.image.imread(path).shape[1] > 1000


@pytest.mark.parametrize("steps,message", [(("7", "9"), "has no steps 7 to 9"), (("0", "1"), "is not what a run left behind")])
def test_nothing_to_draw_is_said_in_one_line(tmp_path, monkeypatch, steps, message):
    run = tmp_path / "run"
    if steps[0] == "7":
        write_run(run, "full", MIXED)
    monkeypatch.setattr("sys.argv", ["timeline.py", str(run), "--steps", *steps, "--figure", str(tmp_path / "x.png")])
    with pytest.raises(SystemExit, match=message) as error:
        tl.main()
    assert "\n" not in str(error.value) and not (tmp_path / "x.png").exists()


def test_the_figure_starts_at_its_first_span(tmp_path, monkeypatch):
    """Of 12 steps the last three."""
    import matplotlib.axes

    bars = []
    monkeypatch.setattr(matplotlib.axes.Axes, "barh", lambda self, y, width, left, alpha, **style: bars.append((y, width, left, alpha)))
    spans = [tl.Span("rollout", 1, 10.0 * i, 10.0 * i + 4, i) for i in range(12)]
    spans += [tl.Span("train", 1, 10.0 * i + 5, 10.0 * i + 6, i) for i in range(12)]
    spans.append(tl.Span("rollout", 1, 120.0, 121.0, 12))  # the evaluation at the end belongs to no step
    figure.draw([figure.Picture("t", figure.of_steps(tl.Records(spans), -3, -1), 2)], tmp_path / "timeline.png")
    drawn = {(10.0 * i + offset, width) for i in range(3) for offset, width in ((0, 4.0), (5, 1.0))}
    assert {(left, width) for _, width, left, _ in bars} == drawn
    assert {y for y, *_ in bars} == {0}
    assert {alpha for *_, alpha in bars} == {1.0, 0.35 + 0.65 / 2}  # training; one request where two have room
