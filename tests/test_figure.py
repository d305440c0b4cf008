"""The figure: what is drawn of a run, in which row, and whether that is what was seen."""

import json

from matplotlib.colors import to_hex

from reporting import figure
from reporting import timeline as tl
from tests.test_timeline import spans_of


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
