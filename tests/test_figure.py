"""The figure: what is drawn of a run, in which row, and whether that is what was seen."""

import json
from argparse import Namespace

import matplotlib.image
from matplotlib.colors import to_hex

from bench import modes
from reporting import figure
from reporting import timeline as tl
from tests.test_timeline import MIXED, spans_of


def life(prompt_id, *stretches):
    """The stretches (state, start, end, step) of answer 0 to a prompt."""
    answer = {"answer": f"{prompt_id}.0"}
    return [tl.Event("sample", state, 0, *times, answer) for state, *times in stretches]


CUT = life(  # in step 0, and written to its end in step 1
    7,
    *[("queued", 0.0, 1.0, 0), ("decoding", 1.0, 3.0, 0), ("aborted", 3.0, 3.0, 0)],
    *[("queued", 5.0, 5.5, 1), ("resumed", 5.5, 6.0, 1), ("judging", 6.0, 7.0, 1)],
)
WHOLE = life(8, ("queued", 0.0, 0.5, 0), ("decoding", 0.5, 2.0, 0), ("done", 2.0, 2.0, 0))
LATER = life(9, ("queued", 5.0, 5.25, 1), ("decoding", 5.25, 8.0, 1), ("done", 8.0, 8.0, 1))


def lines(axes):
    """(colour, row, start, end) of every stretch of an answer, and of the instants, which have no length."""
    found = []
    for collection in axes.collections:
        color = to_hex(collection.get_colors()[0]) if len(collection.get_colors()) else ""
        for (x0, y0), (x1, y1) in collection.get_segments():
            found.append((color, (y0 + y1) / 2, x0, x1))
    return sorted(found)


def test_the_answers_are_drawn_as_they_lived():
    """A row in each step, coloured by state, on the clock of the lanes."""
    spans = spans_of([(-1.0, 5.0), (9.0, 0.5)])
    picture = figure.Picture("t", [*spans, *LATER, *CUT, *WHOLE], 4)
    lanes, answers = figure.make_figure(picture).axes
    # (answer, step): 8 left the queue before 7, and 9 in step 1
    rows = {("8.0", 0): 0, ("7.0", 0): 1, ("9.0", 1): 0, ("7.0", 1): 1}
    stretches = [*CUT, *WHOLE, *LATER]
    drawn = [s for s in stretches if s.name != "done"]
    expected = [
        (figure.LOOKS[s.name][0], rows[s.args["answer"], s.step], s.start, s.end) for s in drawn
    ]
    assert lines(answers) == sorted(expected)
    assert lanes.get_shared_x_axes().joined(lanes, answers)
    assert lanes.get_position().y0 > answers.get_position().y0


def write_run(out, mode, spans):
    """What a run leaves for the figure."""
    (out / "spans").mkdir(parents=True)
    config = {"placement": "colocate", "mode": mode, "ranks": 2, "max_running_requests": 4}
    (out / "config.json").write_text(json.dumps(config))
    for span in spans:
        with (out / "spans" / f"rank0.{span.step}.jsonl").open("a") as file:
            file.write(json.dumps(span) + "\n")


def bars(axes):
    """(colour, start, width, alpha) of every bar of the lanes."""
    boxes = [(p.get_facecolor(), p.get_bbox()) for p in axes.patches]
    return sorted((to_hex(color), box.x0, round(box.width, 9), color[3]) for color, box in boxes)


def test_steps_of_a_run_are_drawn(tmp_path, monkeypatch):
    """By the command, from what the run left; steps are counted from 1."""
    write_run(tmp_path / "a", "full", MIXED)
    command = ["figure.py", f"{tmp_path}/a", "--steps", "2", "2", "--figure", f"{tmp_path}/a.png"]
    monkeypatch.setattr("sys.argv", command)
    figure.main()
    picture = matplotlib.image.imread(tmp_path / "a.png")
    assert picture.std() > 0 and picture.shape[1] > 1000
    picture = figure.read_run(tmp_path / "a", 1, 1)
    (axes,) = figure.make_figure(picture).axes
    assert [text.get_text() for text in axes.texts] == [" step 2"]


def legend_of(drawn):
    (legend,) = drawn.legends
    return [text.get_text() for text in legend.get_texts()]


def test_the_bars_are_the_spans():
    """Of 12 steps the last three, on the run's clock. Shade is occupancy; each model has its colour."""
    spans = [tl.Event("span", "rollout", 1, 10.0 * i, 10.0 * i + 4, i) for i in range(12)]
    for rank in (0, 1):  # rank 0 has no model
        spans += [tl.Event("span", "train", rank, 10.0 * i + 5, 10.0 * i + 8, i) for i in range(12)]
    for at, model in ((5, "reward critic"), (6, "actor")):
        times = [10.0 * i + at for i in range(12)]
        spans += [tl.Event("pass", model, 1, t, t + 1, i) for i, t in enumerate(times)]
    drawn = figure.make_figure(figure.Picture("t", figure.of_steps(spans, -3, -1), 2))
    half = figure.PALEST + (1 - figure.PALEST) / 2  # one request where two have room
    expected = []
    for start in (90.0, 100.0, 110.0):
        expected.append((figure.LOOKS["rollout"][0], start, 4.0, half))
        expected.append((figure.LOOKS["train"][0], start + 5, 3.0, 1.0))
        expected.append((figure.LOOKS["reward critic"][0], start + 5, 1.0, 1.0))
        expected.append((figure.LOOKS["actor"][0], start + 6, 1.0, 1.0))
    assert bars(drawn.axes[0]) == sorted(expected)
    models = ["actor trains", "reward critic trains"]
    shades = "shade: few requests ... all that an engine can decode at once"
    assert legend_of(drawn) == ["rollout writes", *models, "rest of training", "rank waits", shades]


def test_a_wave_that_nothing_was_written_of_is_not_marked():
    marks = [tl.Event("wave", f"wave {n}", 0, at, at, 1) for n, at in ((1, 5), (2, 5.2), (3, 5.4))]
    picture = figure.Picture("t", [*spans_of([(5.0, 3.0)], step=1), *LATER, *marks], 4)
    assert [mark.name for mark in picture.marks] == ["wave 2"]


def test_sides_of_a_bench_are_drawn_on_one_clock(tmp_path, monkeypatch):
    """The middle step of each side, from 0 on; where engines of a role give way, a swap."""
    monkeypatch.setattr(modes, "OUT", tmp_path)
    figures = []
    monkeypatch.setattr(modes, "add_legend", lambda drawn, names: figures.append((drawn, names)))
    sides = spans_of([(100, 2), (110, 2)], step=1) + spans_of([(104, 2)], "genrm", step=1)
    sides += spans_of([(102.5, 0.1), (102.7, 0.1)], "switch", step=1)
    sides += spans_of([(111, 2)], "genrm", step=1)
    write_run(tmp_path / "modes-2", "full", sides)
    label = {"workload": "tail", "repeat": 0, "step": 1, "metrics": {"time/serve_s": 6.04}}
    rows = [label | {"side": "full", "from_to": (99.0, 109.0)}]
    rows += [label | {"side": "1|1", "from_to": (109.0, 119.0)}]
    given = Namespace(workloads=["tail"], ranks=2, steps=3, compare=tmp_path / "a.png")
    modes.compare(rows, given)
    ((drawn, names),) = figures
    full, partial = drawn.axes
    assert names == {"rollout", "genrm", "switch"} and given.compare.stat().st_size > 1000
    assert full.get_title(loc="left").startswith("full: training begins after 6.0 s")
    assert partial.get_title(loc="left").startswith("partial 1|1: ")
    swaps = [
        [t.get_position()[0] for t in axes.texts if t.get_text() == "swap"] for axes in drawn.axes
    ]
    assert swaps == [[3.5], []]
    assert [start for _, start, _, _ in bars(partial)] == [1.0, 2.0]
