"""Figure: the paper's picture from measured spans, and below it the life of every answer.

Above, a lane per rank and a colour per role; shade is occupancy. Below, a thin row per answer from queued to done: the long tail and
what over-dispatch aborts are to be seen there. Waves, pushes of weights and changes of the split are marked over the lanes.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from reporting.timeline import COLORS, INSTANTS, STATES, Mark, Records, SampleSpan, lanes, read

MOST_ROWS = 250  # of answers; of more in a step every second, third ... is drawn
ALIKE = 0.002  # of the picture's length: answers that start closer together than this are sorted by their ends
INK, PALE = "#333333", "#c4c8cd"
UPPER, LOWER = -0.87, -0.6  # where the two rows of texts stand over the lanes; lane 0 lies at 0
LABELS = {  # kind of mark -> how it is named, where, on which side of its time, in which colour
    "weights": ("{} ", UPPER, "right", COLORS["sync"]),  # the next step begins right behind it
    "split": ("split {} ", LOWER, "right", INK),
    "wave": (" {}", LOWER, "left", "#6b7178"),
}


@dataclass(frozen=True)
class Picture:
    """What one part of the figure shows. capacity: answers that one engine holds at once, which is full shade."""

    title: str
    records: Records
    capacity: int

    @property
    def zero(self) -> float:
        """When the first span begins, which is 0 in the figure."""
        return min((s.start for s in self.records.spans), default=0.0)

    @property
    def begins(self) -> dict[int, float]:
        """Step -> when it begins."""
        steps = sorted({s.step for s in self.records.spans})
        return {step: min(s.start for s in self.records.spans if s.step == step) for step in steps}


# ---------------------------------------------------------------- what is to be drawn


def of_steps(records: Records, first: int, last: int) -> Records:
    """What was done for the steps `first` to `last`; negative numbers count back from the last trained step, which is -1."""
    spans = [s for s in records.spans if s.name in COLORS]
    end = max((s.step for s in spans if s.name == "train"), default=-1) + 1  # an evaluation after it belongs to no step
    first, last = (number + end if number < 0 else number for number in (first, last))
    chosen = range(max(first, 0), min(last + 1, end))
    return Records(*([record for record in kind if record.step in chosen] for kind in (spans, records.samples, records.marks)))


def lives(samples: list[SampleSpan]) -> list[list[SampleSpan]]:
    """The stretches of each answer's life in order; the lives in the order in which they left the queue, those alike by their ends.

    An answer that was aborted and resumed in a later step has one life. One whose prompt came again is another answer.
    """
    grouped = defaultdict(list)
    for sample in sorted(samples, key=lambda s: (s.start, s.end)):
        grouped[sample.prompt_id, sample.index].append(sample)
    found = []
    for stretches in grouped.values():
        begins = [i for i in range(len(stretches)) if i == 0 or _begins_anew(stretches[i - 1], stretches[i:])]
        found += [stretches[i:j] for i, j in zip(begins, [*begins[1:], None], strict=True)]
    unit = ALIKE * (max(s.end for s in samples) - min(s.start for s in samples)) if samples else 0.0
    return sorted(found, key=lambda life: (_left_queue(life) // (unit or 1.0), life[-1].end))


def _left_queue(life: list[SampleSpan]) -> float:
    return next((s.start for s in life if s.state != "queued"), life[-1].end)


def _begins_anew(before: SampleSpan, after: list[SampleSpan]) -> bool:
    """Whether an answer is written from its first token on after another has ended."""
    written = next((s.state for s in after if s.state != "queued"), "decoding")
    return before.state in INSTANTS and after[0].state in ("queued", "decoding") and written == "decoding"


def rows_of(lives: list[list[SampleSpan]]) -> list[int]:
    """The row of each life: the first that is free. A row is free again in the step after the last one of the life that has it.

    So every step begins at the top and stays in order, except that an answer of an earlier step is resumed in its own row.
    """
    rows, busy_until = [], []
    for life in lives:
        row = next((row for row, step in enumerate(busy_until) if step < life[0].step), len(busy_until))
        busy_until[row : row + 1] = [life[-1].step]
        rows.append(row)
    return rows


def thinned(lives: list[list[SampleSpan]]) -> tuple[list[list[SampleSpan]], int]:
    """Every n-th life, with the least n that leaves a step about MOST_ROWS of them at most; and n."""
    of_step = defaultdict(int)
    for life in lives:
        for step in range(life[0].step, life[-1].step + 1):
            of_step[step] += 1
    every = max(1, -(-max(of_step.values(), default=0) // MOST_ROWS))
    return lives[::every], every


def once(marks: list[Mark]) -> list[Mark]:
    """Marks of each kind by the lowest rank that made any: all ranks make them at once."""
    lowest = {}
    for mark in marks:
        lowest[mark.kind] = min(mark.rank, lowest.get(mark.kind, mark.rank))
    return [mark for mark in marks if mark.rank == lowest[mark.kind]]


def read_run(out: Path, first: int, last: int) -> Picture:
    """The picture of a run's steps. Raises ValueError when `out` is no run, or has no span of these steps."""
    if not (out / "config.json").is_file():
        raise ValueError(f"{out} is not what a run left behind: it has no config.json")
    config = json.loads((out / "config.json").read_text())
    records = of_steps(read(out / "spans"), first, last)
    if not records.spans:
        raise ValueError(f"{out} has no steps {first} to {last}")
    return Picture(f"{out}: {config['mode']} colocation, {config['ranks']} ranks", records, config["max_running_requests"])


# ---------------------------------------------------------------- drawing


def draw(pictures: list[Picture], path: Path) -> None:
    """A PNG of one or several runs, above each other on one clock, each from its first span on."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    heights = []  # inches, of the lanes and, where there are any, of the answers of each picture
    answers = [thinned(lives(picture.records.samples)) for picture in pictures]
    for picture, (shown, _) in zip(pictures, answers, strict=True):
        heights.append((1.0 if picture.records.marks else 0.8) + 0.52 * max(1, len({s.rank for s in picture.records.spans})))
        if shown:
            heights.append(0.6 + 0.011 * max(rows_of(shown)))
    layout = dict(sharex=True, squeeze=False, constrained_layout={"hspace": 0.0, "h_pad": 0.03}, height_ratios=heights)
    figure, axes = plt.subplots(len(heights), figsize=(13, 0.4 + sum(heights)), **layout)
    panels = iter(axes[:, 0])
    for picture, (shown, every) in zip(pictures, answers, strict=True):
        _draw_lanes(picture, next(panels), f" (1 of {every} answers drawn)" if every > 1 else "")
        if shown:
            _draw_answers(picture, shown, next(panels))
    _finish(figure, axes[:, 0], any(shown for shown, _ in answers))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_lanes(picture: Picture, axes, note: str) -> None:
    """A lane per rank, never paler than 0.35; over them where steps begin, and the marks."""
    spans, ranks, zero = picture.records.spans, sorted({s.rank for s in picture.records.spans}), picture.zero
    for (rank, name), stretches in lanes(spans).items():
        for start, end, flying in stretches:
            full = min(1.0, flying / picture.capacity) if name in ("rollout", "genrm") else 1.0
            axes.barh(ranks.index(rank), end - start, left=start - zero, height=0.72, color=COLORS[name], alpha=0.35 + 0.65 * full)
    _draw_verticals(picture, axes)
    for step, begin in picture.begins.items():
        axes.text(begin - zero, UPPER if picture.records.marks else LOWER, f" step {step}", fontsize=8.5, color=INK, va="center")
    for mark in once(picture.records.marks):
        _label(mark, mark.time - zero, 0.03 * (max((s.end for s in spans), default=zero) - zero), axes)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(max(1, len(ranks)) - 0.5, -1.05 if picture.records.marks else -0.8)
    axes.set_title(picture.title + note, fontsize=10, loc="left", color=INK)


def _label(mark: Mark, x: float, near: float, axes) -> None:
    """The mark's text over the lanes, and a tick. One less than `near` to 0 would stand on the first step's name: it goes to 0."""
    text, y, side, color = LABELS[mark.kind]
    x = 0 if side == "right" and x < near else x
    axes.text(x, y, text.format(mark.text), fontsize=7.5, color=color, ha=side, va="center")
    axes.vlines(x, y - 0.09, y + 0.09, color=color, linewidth=1.0)


def _draw_answers(picture: Picture, shown: list[list[SampleSpan]], axes) -> None:
    """A thin row per answer, coloured by state; a hair line where it waits between an abort and its resumption."""
    rows, zero = rows_of(shown), picture.zero
    begins, ends = [life[0].start - zero for life in shown], [life[-1].end - zero for life in shown]
    axes.hlines(rows, begins, ends, color=PALE, linewidth=0.4, zorder=0)
    drawn = [(row, s) for life, row in zip(shown, rows, strict=True) for s in life]
    for state, color in STATES.items():
        y = [row for row, s in drawn if s.state == state]
        left = [s.start - zero for _, s in drawn if s.state == state]
        width = [s.end - s.start for _, s in drawn if s.state == state]
        if state in INSTANTS:
            axes.vlines(left, [row - 0.6 for row in y], [row + 0.6 for row in y], color=color, linewidth=1.6, zorder=3)
        else:
            axes.barh(y, width, left=left, height=1.0, color=color)
    _draw_verticals(picture, axes)
    axes.set_ylim(max(rows) + 1.5, -1.5)
    axes.set_yticks([])
    axes.set_ylabel("answers", fontsize=8.5, color=INK)


def _draw_verticals(picture: Picture, axes) -> None:
    """A line where a step begins, a dotted one where a wave does."""
    for begin in picture.begins.values():
        axes.axvline(begin - picture.zero, color=INK, linewidth=0.8)
    for mark in once(picture.records.marks):
        if mark.kind == "wave":
            axes.axvline(mark.time - picture.zero, color=INK, linewidth=0.6, linestyle=(0, (1, 2.5)))


def _finish(figure, panels, with_answers: bool) -> None:
    """One legend for the roles and one for the states, and the axis that all panels share."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    style = dict(fontsize=8, frameon=False, handlelength=1.4, columnspacing=1.4, borderaxespad=0.1)
    roles = [Patch(color=color, label=name) for name, color in COLORS.items()]
    panels[0].legend(handles=roles, ncols=len(roles), loc="lower right", bbox_to_anchor=(1, 1), **style)
    panels[-1].set_xlabel("seconds", fontsize=9, color=INK)
    if with_answers:
        tick = dict(linestyle="", marker="|", markersize=9, markeredgewidth=2)
        states = [Line2D([], [], color=c, label=n, **tick) if n in INSTANTS else Patch(color=c, label=n) for n, c in STATES.items()]
        figure.legend(handles=states, ncols=len(states), loc="lower right", **style)
    for axes in panels:
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.spines["left"].set_color(PALE)
        axes.tick_params(axis="x", length=0 if axes is not panels[-1] else 3, color=PALE)
        axes.tick_params(labelcolor=INK, labelsize=8.5)
        axes.margins(x=0.004)
    panels[-1].spines["bottom"].set(visible=True, color=PALE)
