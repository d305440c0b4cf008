"""Figure: the paper's picture from measured spans, and below it the life of every answer.

Above, a lane per rank and a colour per role; shade is occupancy: requests in flight over those that the
engine can decode. Below, a thin row per answer of a step, from queued to done: the long tail and what
over-dispatch aborts are to be seen there. Waves, pushes of weights and changes of the split are marked over
the lanes.

    python -m reporting.figure RUN --steps 10 14      any steps of a run
    python -m reporting.figure RUN_A RUN_B            two runs above each other on one clock
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from reporting.timeline import COLORS, INSTANTS, STATES, Mark, Records, SampleSpan, lanes, read

MOST_ROWS = 250  # of answers a step; of more, every second, third ... is drawn
TOGETHER = 0.002  # part of the shown time: answers that leave the queue within it are sorted by their ends
INK, GREY, PALE = "#333333", "#6b7178", "#c4c8cd"
UPPER, LOWER = -0.87, -0.6  # where two rows of texts stand over the lanes; lane 0 lies at 0
LABELS = {  # kind of mark -> its height, the side of its time that it stands on, its colour
    "weights": (UPPER, "right", COLORS["sync"]),  # the next step begins right behind it
    "split": (LOWER, "right", INK),
    "wave": (LOWER, "left", GREY),
}


@dataclass(frozen=True)
class Picture:
    """What one part of the figure shows. capacity: answers that one engine holds at once, which is full shade."""

    title: str
    records: Records
    capacity: int

    @property
    def begins(self) -> dict[int, float]:
        """Step -> when its first span begins."""
        steps = sorted({s.step for s in self.records.spans})
        return {step: min(s.start for s in self.records.spans if s.step == step) for step in steps}

    @property
    def zero(self) -> float:
        """What is 0 in the figure."""
        return min(self.begins.values(), default=0.0)

    @property
    def marks(self) -> list[Mark]:
        """Each kind by the lowest rank that made any: all ranks make them at once. Wave 1 is where its step begins."""
        marks, lowest = self.records.marks, {}
        for mark in marks:
            lowest[mark.kind] = min(mark.rank, lowest.get(mark.kind, mark.rank))
        return [mark for mark in marks if mark.rank == lowest[mark.kind] and mark.text != "wave 1"]


def of_steps(records: Records, first: int, last: int) -> Records:
    """What was done for the steps `first` to `last`; negative numbers count back from the last step, which is -1.

    Of a run that trains, that is the last trained step: an evaluation after it belongs to none.
    """
    spans = [s for s in records.spans if s.name in COLORS]
    steps = {s.step for s in spans if s.name == "train"} or {s.step for s in spans}
    end = max(steps, default=-1) + 1
    first, last = (number + end if number < 0 else number for number in (first, last))
    shown = range(max(first, 0), min(last + 1, end))
    return Records(
        *([r for r in kind if r.step in shown] for kind in (spans, records.samples, records.marks))
    )


def read_run(out: Path, first: int, last: int) -> Picture:
    """The picture of a run's steps. Raises ValueError when `out` is no run, or has no span of these steps."""
    if not (out / "config.json").is_file():
        raise ValueError(f"{out} is not what a run left behind: it has no config.json")
    config = json.loads((out / "config.json").read_text())
    records = of_steps(read(out / "spans"), first, last)
    if not records.spans:
        raise ValueError(f"{out} has no steps {first} to {last}")
    title = f"{out}: {config['mode']} colocation, {config['ranks']} ranks"
    return Picture(title, records, config["max_running_requests"])


def rows_of(samples: list[SampleSpan]) -> tuple[list[tuple[int, SampleSpan]], int]:
    """(row, stretch) of every stretch that is drawn, and n where only every n-th answer is.

    In each step every answer has a row, from the top in the order in which they left the queue.
    """
    answers = defaultdict(list)
    for s in sorted(samples, key=lambda s: (s.start, s.end)):
        answers[s.step, s.prompt_id, s.index].append(s)
    shown_s = max((s.end for s in samples), default=0.0) - min((s.start for s in samples), default=0.0)

    def order(answer: list[SampleSpan]) -> tuple[int, float, float]:
        left_queue = answer[0].end if answer[0].state == "queued" else answer[0].start
        return answer[0].step, left_queue // (TOGETHER * shown_s or 1.0), [s.end for s in answer[1:]]

    in_order = sorted(answers.values(), key=order)
    steps = [list(step) for _, step in groupby(in_order, key=lambda answer: answer[0].step)]
    every = -(-max(map(len, steps), default=1) // MOST_ROWS)
    rows = [(row, s) for step in steps for row, answer in enumerate(step[::every]) for s in answer]
    return rows, every


# ---------------------------------------------------------------- drawing


def draw(pictures: list[Picture], path: Path) -> None:
    """A PNG of one or several runs, above each other on one clock, each from its first span on."""
    make_figure(pictures).savefig(path, dpi=150)


def make_figure(pictures: list[Picture]) -> Figure:
    """For each picture a panel of its lanes and, where there are any, one of its answers."""
    heights, answers = [], [rows_of(picture.records.samples) for picture in pictures]  # heights in inches
    for picture, (rows, _) in zip(pictures, answers, strict=True):
        heights.append(1.0 + 0.52 * max(1, len({s.rank for s in picture.records.spans})))
        heights += [0.6 + 0.011 * max(row for row, _ in rows)] if rows else []
    figure = Figure(figsize=(13, 0.4 + sum(heights)), layout="constrained")
    figure.get_layout_engine().set(hspace=0.0, h_pad=0.03)
    panels = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    unused = iter(panels)
    for picture, (rows, every) in zip(pictures, answers, strict=True):
        _draw_lanes(picture, next(unused), f" (1 of {every} answers drawn)" if every > 1 else "")
        if rows:
            _draw_answers(picture, rows, next(unused))
    _finish(figure, panels, with_answers=any(rows for rows, _ in answers))
    return figure


def _draw_lanes(picture: Picture, axes: Axes, note: str) -> None:
    """A lane per rank, never paler than 0.35; over them where steps begin, and the marks."""
    ranks, zero = sorted({s.rank for s in picture.records.spans}), picture.zero
    for (rank, name), stretches in lanes(picture.records.spans).items():
        for start, end, in_flight in stretches:
            full = min(1.0, in_flight / picture.capacity) if name in ("rollout", "genrm") else 1.0
            style = dict(height=0.72, color=COLORS[name], alpha=0.35 + 0.65 * full)
            axes.barh(ranks.index(rank), end - start, left=start - zero, **style)
    _draw_verticals(picture, axes)
    for step, begin in picture.begins.items():
        axes.text(begin - zero, UPPER, f" step {step}", fontsize=8.5, color=INK, va="center")
    for mark in picture.marks:
        y, side, color = LABELS[mark.kind]
        text = f"split {mark.text}" if mark.kind == "split" else mark.text
        axes.text(mark.time - zero, y, f" {text} ", fontsize=7.5, color=color, ha=side, va="center")
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(max(1, len(ranks)) - 0.5, -1.05)
    axes.set_title(picture.title + note, fontsize=10, loc="left", color=INK)


def _draw_answers(picture: Picture, rows: list[tuple[int, SampleSpan]], axes: Axes) -> None:
    """A thin row per answer, coloured by state."""
    for state, color in STATES.items():
        found = [(row, s.start - picture.zero, s.end - s.start) for row, s in rows if s.state == state]
        y, left, width = zip(*found, strict=True) if found else ((), (), ())
        if state in INSTANTS:
            axes.vlines(left, [row - 0.6 for row in y], [row + 0.6 for row in y], color=color, linewidth=1.6)
        else:
            axes.barh(y, width, left=left, height=1.0, color=color)
    _draw_verticals(picture, axes)
    axes.set_ylim(max(row for row, _ in rows) + 1.5, -1.5)
    axes.set_yticks([])
    axes.set_ylabel("answers", fontsize=8.5, color=INK)


def _draw_verticals(picture: Picture, axes: Axes) -> None:
    """A line where a step begins, a dotted one where a wave does."""
    for begin in picture.begins.values():
        axes.axvline(begin - picture.zero, color=INK, linewidth=0.8)
    for mark in picture.marks:
        if mark.kind == "wave":
            axes.axvline(mark.time - picture.zero, color=INK, linewidth=0.6, linestyle=(0, (1, 2.5)))


def _finish(figure: Figure, panels: list[Axes], with_answers: bool) -> None:
    """One legend for the roles and one for the states, and the axis that all panels share."""
    style = dict(fontsize=8, frameon=False, handlelength=1.4, columnspacing=1.4, borderaxespad=0.1)
    roles = [Patch(color=color, label=name) for name, color in COLORS.items()]
    panels[0].legend(handles=roles, ncols=len(roles), loc="lower right", bbox_to_anchor=(1, 1), **style)
    if with_answers:
        tick = dict(linestyle="", marker="|", markersize=9, markeredgewidth=2)
        states = [
            Line2D([], [], color=color, label=state, **tick)
            if state in INSTANTS
            else Patch(color=color, label=state)
            for state, color in STATES.items()
        ]
        figure.legend(handles=states, ncols=len(states), loc="lower right", **style)
    for axes in panels:
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.spines["left"].set_color(PALE)
        axes.tick_params(axis="x", length=0 if axes is not panels[-1] else 3, color=PALE)
        axes.tick_params(labelcolor=INK, labelsize=8.5)
        axes.margins(x=0.004)
    panels[-1].set_xlabel("seconds", fontsize=9, color=INK)
    panels[-1].spines["bottom"].set(visible=True, color=PALE)


def main() -> None:
    """Exit status 1 after one line on stderr when there is nothing to draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder that a run left behind")
    steps = dict(default=(-4, -1), metavar=("FIRST", "LAST"), help="-1: the last [-4 -1]")
    parser.add_argument("--steps", type=int, nargs=2, **steps)
    parser.add_argument("--figure", type=Path, default=Path("timeline.png"), help="[timeline.png]")
    given = parser.parse_args()
    try:
        draw([read_run(out, *given.steps) for out in given.runs], given.figure)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"wrote {given.figure}")


if __name__ == "__main__":
    main()
