"""Figure: the paper's picture drawn from measured spans, and below it the life of every answer.

Above, a lane per rank and a color per model; an engine's shade is occupancy: requests in flight / requests
that it can decode at once. Below, a thin row per answer of a step shows the long tail, and what over-dispatch
cuts off. Waves, weight pushes and changes of the split are marked above the lanes.

    python -m extras.figure RUN --steps 10 14      counted from 1, as in the log
"""

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch

from runtime.errors import UserError, printable
from runtime.timeline import (
    INSTANTS,
    LANES,
    MARKS,
    WORK,
    Event,
    Stretch,
    busy,
    lanes,
    of_kind,
    read,
)

ROW = 0.011  # inches per answer's row
MOST = 2.75  # inches for all rows: with more answers, rows get thinner
INK = "#333333"
GREY = "#6b7178"
PALEST = 0.3  # lightest shade of an engine
UPPER = -1.14  # the highest of three rows of texts above the lanes; lane 0 is at 0
LOOKS = {  # name of a span, a pass or an answer's state -> its color and its text in the legend
    "rollout": ("#2a78b8", "rollout writes"),
    "decoding": ("#2a78b8", ""),
    "genrm": ("#e08a1e", "genrm judges"),
    "judging": ("#e08a1e", "answer is judged"),
    "actor": ("#3c9d4e", "actor trains"),
    "reward critic": ("#d9689f", "reward critic trains"),
    "cost critic": ("#8c564b", "cost critic trains"),
    "train": ("#bfe0c5", "rest of training"),
    "sync": ("#8a4fb0", "weights go to the engine"),
    "switch": ("#9a9a9a", "engine or trainer wakes or sleeps"),
    "queued": ("#dcdfe3", "answer waits"),
    "environment": ("#d8c48a", "environment answers"),
    "moved": ("#5f3a8c", "answer moves to another engine"),
    "aborted": ("#d62f2f", "answer is cut off"),
    "resumed": ("#123f69", "answer goes on"),
}
LABELS = {  # kind of mark -> its text's height, side of the mark, and color
    "weights": (UPPER, "right", LOOKS["sync"][0]),  # the next step begins right after it
    "split": (-0.87, "right", INK),
    "tail": (-0.87, "left", INK),
    "wave": (-0.6, "left", GREY),
}


class Picture(NamedTuple):
    """The events that a figure shows. capacity: answers that an engine decodes at once, in full shade."""

    title: str
    events: list[Event]
    capacity: int

    @property
    def spans(self) -> list[Event]:
        return of_kind(self.events, *WORK)

    @property
    def lanes(self) -> dict[tuple[int, str], list[Stretch]]:
        """(rank, name) -> stretches. Training is only drawn for ranks that had passes."""
        passes = of_kind(self.events, "pass")
        trained = {each.rank for each in passes}
        spans = [span for span in self.spans if span.name != "train" or span.rank in trained]
        return lanes([*spans, *passes])

    @property
    def idle(self) -> float:
        """The share of the ranks' time in which none of their engines and trainers worked."""
        of_ranks = defaultdict(list)
        for span in self.spans:
            of_ranks[span.rank].append(span)
        begin = min((span.start for span in self.spans), default=0.0)
        end = max((span.end for span in self.spans), default=0.0)
        worked = 0.0
        for spans in of_ranks.values():
            worked += sum(stretch.end - stretch.start for stretch in busy(spans))
        return 1 - worked / max(1e-9, (end - begin) * len(of_ranks))

    @property
    def begins(self) -> dict[int, float]:
        """Step -> the time at which it begins."""
        last_first = sorted(self.spans, key=lambda span: span.start, reverse=True)
        return {span.step: span.start for span in last_first}

    @property
    def marks(self) -> list[Event]:
        """The lowest rank's marks, as all ranks make them at once; a tail only if both roles have ranks.

        Leaves out wave 1, and a wave that began no answer because the batch was decided.
        """
        marks = of_kind(self.events, *MARKS)
        lowest = min((mark.rank for mark in marks), default=0)
        shared = [mark for mark in marks if mark.kind != "tail" or "0" not in mark.name.split("|")]
        written = [s for s in of_kind(self.events, "sample") if s.name in ("decoding", "resumed")]
        begun = {s.step: s.start for s in sorted(written, key=lambda s: s.start)}  # the last start
        shared = [m for m in shared if m.kind != "wave" or m.start <= begun.get(m.step, m.start)]
        return [mark for mark in shared if mark.rank == lowest and mark.name != "wave 1"]


def of_steps(events: list[Event], first: int, last: int) -> list[Event]:
    """Return the events to draw of steps `first` to `last`; negative numbers count back from the last, -1."""
    events = [event for event in events if event.kind != "span" or event.name in LANES]
    trained = [span.step for span in of_kind(events, "span") if span.name == "train"]
    # an evaluation after the last trained step belongs to none
    end = 1 + max(trained or [span.step for span in of_kind(events, "span")], default=-1)
    first, last = (number + end if number < 0 else number for number in (first, last))
    shown = range(max(first, 0), min(last + 1, end))
    return [event for event in events if event.step in shown]


def read_run(out: Path, first: int, last: int) -> Picture:
    """Return the picture of these steps of a run. Raises UserError if `out` isn't a run's folder."""
    if not (out / "config.json").is_file():
        raise UserError(f"{out} is not a run's folder: it has no config.json")
    config = json.loads((out / "config.json").read_text())
    events = of_steps(read(out / "spans", first, last), first, last)
    title = f"{out}: {config['mode']} mode, {config['placement']}, {config['ranks']} ranks"
    return Picture(title, events, config["max_running_requests"])


def rows_of(samples: list[Event]) -> list[tuple[int, Event]]:
    """Return every stretch with its row. In each step an answer has a row, the first to end at the top."""
    steps = defaultdict(dict)  # step -> answer -> its row
    rows = []
    for sample in sorted(samples, key=lambda s: s.end):
        row_of = steps[sample.step]
        rows.append((row_of.setdefault(sample.args["answer"], len(row_of)), sample))
    return rows


def make_figure(picture: Picture) -> Figure:
    """Draw a panel of the lanes and, if there are answers, one of these."""
    ranks = {span.rank for span in picture.spans}
    rows = rows_of(of_kind(picture.events, "sample"))
    answers_height = min(MOST, ROW * (1 + max((row for row, _ in rows), default=0)))
    heights = [1.0 + 0.52 * max(1, len(ranks))]  # inches
    if rows:
        heights.append(0.75 + answers_height)
    figure = Figure(figsize=(13, 0.6 + sum(heights)), dpi=150, layout="constrained")
    figure.get_layout_engine().set(hspace=0.0, h_pad=0.03)
    panels = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    draw_lanes(panels[0], picture)
    if rows:
        _draw_answers(panels[1], rows, answers_height)
        _draw_begins(panels[1], picture)
    panels[-1].tick_params(axis="x", length=3, color=GREY)
    panels[-1].set_xlabel("seconds since the run's start", fontsize=9, color=INK, loc="left")
    drawn = {name for _, name in picture.lanes} | {sample.name for _, sample in rows}
    add_legend(figure, drawn)
    return figure


def add_legend(figure: Figure, drawn: set[str]) -> None:
    """Explain below the panels the colors that were drawn, white, and an engine's shades."""
    if "genrm" in drawn:  # which explains the color
        drawn = drawn - {"judging"}
    said = {text: Patch(color=color) for name, (color, text) in LOOKS.items() if name in drawn}
    said.pop("", None)
    said["rank waits"] = Patch(facecolor="white", edgecolor=GREY)
    shades = [Patch(color=LOOKS["rollout"][0], alpha=alpha) for alpha in (PALEST, 0.6, 1.0)]
    said["shade: few requests ... all that an engine can decode at once"] = tuple(shades)
    style = dict(fontsize=8, frameon=False, ncols=6, handler_map={tuple: HandlerTuple(None, pad=0)})
    figure.legend(said.values(), said.keys(), loc="outside lower left", **style)


def draw_lanes(axes: Axes, picture: Picture) -> None:
    """Draw a lane for each rank; above them the steps' beginnings and the marks."""
    ranks = sorted({span.rank for span in picture.spans})
    _draw_begins(axes, picture)
    for (rank, name), stretches in picture.lanes.items():
        for start, end, in_flight in stretches:
            full = min(1.0, in_flight / picture.capacity) if name in ("rollout", "genrm") else 1.0
            style = dict(height=0.72, color=LOOKS[name][0], alpha=PALEST + (1 - PALEST) * full)
            style["zorder"] = 1 if name == "train" else 2  # under its passes
            axes.barh(ranks.index(rank), end - start, left=start, **style)
    for step, begin in picture.begins.items():
        axes.text(begin, UPPER, f" step {step + 1}", fontsize=8.5, color=INK, va="center")
    for mark in picture.marks:
        y, side, color = LABELS[mark.kind]
        text = mark.name if mark.kind == "wave" else f"{mark.kind} {mark.name}"
        axes.text(mark.start, y, f" {text} ", fontsize=7.5, color=color, ha=side, va="center")
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set_ylim(max(1, len(ranks)) - 0.5, -1.32)
    title = f"{picture.title}; ranks wait {picture.idle:.0%} of the time"
    axes.set_title(title, fontsize=10, loc="left", color=INK)


def _draw_begins(axes: Axes, picture: Picture) -> None:
    """Draw a line where a step begins, and a dotted one where a wave does; drop the frame."""
    axes.set_frame_on(False)
    axes.tick_params(length=0, labelcolor=INK, labelsize=8.5)
    axes.margins(x=0.004)
    for begin in picture.begins.values():
        axes.axvline(begin, color=INK, linewidth=0.8)
    for wave in (mark for mark in picture.marks if mark.kind == "wave"):
        axes.axvline(wave.start, color=INK, linewidth=0.6, linestyle=(0, (1, 2.5)))


def _draw_answers(axes: Axes, rows: list[tuple[int, Event]], height: float) -> None:
    """Draw a thin row for each answer, colored by state; all rows are `height` inches high."""
    count = 1 + max(row for row, _ in rows)
    for state, (color, _) in LOOKS.items():
        shown = [(row, sample.start, sample.end) for row, sample in rows if sample.name == state]
        y, start, end = numpy.array(shown).reshape(-1, 3).T
        if state in INSTANTS:
            axes.vlines(start, y - 0.6, y + 0.6, color=color, linewidth=1.6)
        else:  # width in points, 72 per inch: rows touch
            axes.hlines(y, start, end, color=color, linewidth=max(0.5, 130 * height / count))
    axes.set_ylim(count + 0.5, -1.5)
    axes.set_yticks([])
    axes.set_ylabel("answers", fontsize=8.5, color=INK)


def last_steps(run: Path) -> Figure:
    """Draw the last steps of a run."""
    return make_figure(read_run(run, -4, -1))


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    steps = dict(type=int, nargs=2, default=(-4, -1), help="first and last, from 1; -1: the last")
    parser.add_argument("--steps", **steps)
    parser.add_argument("--figure", type=Path, default=Path("timeline.png"), help="[timeline.png]")
    given = parser.parse_args()
    try:
        picture = read_run(given.run, *(step - (step > 0) for step in given.steps))
        if not picture.spans:
            first, last = given.steps
            raise UserError(f"{given.run} has no steps {first} to {last}")
        make_figure(picture).savefig(given.figure)
    except UserError as error:
        sys.exit(f"error: {error}")
    print(printable(f"wrote {given.figure}"))


if __name__ == "__main__":
    main()
