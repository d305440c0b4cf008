"""Timeline: spans of every rank, where the work is, from one clock -> seconds, occupancy, a Chrome trace and a figure.

A stage being open is not an engine being busy: while rollout and genrm serve side by side, both stages are open all the time. So a
span of an engine is one request, from sent to finished, and an engine is busy while requests are in flight; occupancy is in-flight
over capacity, drawn as shade. Spans of the controller itself (train, switch, sync) are opened around the work.

Every rank appends its spans to its own file under OUT/spans; the merged trace and the picture are made from those files.

    python timeline.py RUN --steps 10 14      the picture of any steps of a run
    python timeline.py RUN_A RUN_B            runs above each other on one clock
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

COLORS = {"rollout": "#2a78b8", "genrm": "#e08a1e", "train": "#3c9d4e", "sync": "#8a4fb0", "switch": "#9a9a9a"}


class Span(NamedTuple):
    """`name` was at work on `rank` from `start` to `end` (seconds since the run's start); `step` is the training step it served."""

    name: str
    rank: int
    start: float
    end: float
    step: int


class Timeline:
    """The spans that one controller sees: its own work, and the requests that it sent to engines on any rank."""

    def __init__(self, rank: int, clock: Callable[[], float], folder: Path | None = None, on_open=lambda name, step: None):
        self.rank, self._clock, self._zero = rank, clock, clock()
        self._on_open = on_open  # told the name and step of each span that opens
        self.step = 0
        self.spans: list[Span] = []
        self._file = folder and folder / f"rank{rank}.jsonl"

    def start(self) -> None:
        """Zero of the clock. Called by every rank right after a barrier, which lines the ranks' clocks up."""
        self._zero = self._clock()

    def now(self) -> float:
        """Seconds since the run's start."""
        return self._clock() - self._zero

    @contextmanager
    def span(self, name: str):
        """Time the block on this rank."""
        start = self.now()
        self._on_open(name, self.step)
        try:
            yield
        finally:
            self.spans.append(Span(name, self.rank, start, self.now(), self.step))

    def request(self, role: str, rank: int, start: float, end: float) -> None:
        """One request to the engine of `role` on `rank`; times are those of the event loop's clock."""
        self.spans.append(Span(role, rank, start - self._zero, end - self._zero, self.step))

    def take(self) -> list[Span]:
        """The spans since the last call, written to this rank's file and forgotten."""
        spans, self.spans = self.spans, []
        if self._file and spans:
            with self._file.open("a") as file:
                file.writelines(json.dumps([s.name, s.rank, round(s.start, 6), round(s.end, 6), s.step]) + "\n" for s in spans)
        return spans


def busy(spans: Iterable[Span]) -> list[tuple[float, float, float]]:
    """Merge overlapping spans: (start, end, mean number in flight) of every stretch with at least one in flight."""
    spans = [s for s in spans if s.end > s.start]  # what began and ended in one instant kept nobody busy
    edges = sorted([(s.start, 1) for s in spans] + [(s.end, -1) for s in spans])
    stretches, flying, work, opened, last = [], 0, 0.0, 0.0, 0.0
    for time, change in edges:
        if flying == 0 and change == 1:
            opened, work = time, 0.0
        work += flying * (time - last)
        flying, last = flying + change, time
        if flying == 0:
            stretches.append((opened, time, work / (time - opened)))
    return stretches


def seconds(spans: Iterable[Span], name: str) -> float:
    """Wall-clock seconds with at least one span called `name` open."""
    return sum(end - start for start, end, _ in busy([s for s in spans if s.name == name]))


def read_spans(folder: Path) -> list[Span]:
    """The spans of every rank, from their files."""
    return [Span(*json.loads(line)) for path in sorted(folder.glob("rank*.jsonl")) for line in path.open()]


def lanes(spans: Iterable[Span]) -> dict[tuple[int, str], list[tuple[float, float, float]]]:
    """(rank, name) -> the busy stretches of that lane: requests of all controllers to one engine fall together."""
    grouped = defaultdict(list)
    for span in spans:
        grouped[span.rank, span.name].append(span)
    return {key: busy(group) for key, group in sorted(grouped.items())}


def write_trace(spans: list[Span], path: Path) -> None:
    """One Chrome/Perfetto trace of all ranks: a process per rank, a thread per role, times in microseconds."""
    events = []
    rows = {name: row for row, name in enumerate(COLORS)}
    for (rank, name), stretches in lanes(spans).items():
        for start, end, flying in stretches:
            args = {"in_flight": round(flying, 2)}
            times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
            events.append({"name": name, "ph": "X", "pid": rank, "tid": rows.get(name, len(rows)), **times, "args": args})
    for rank in sorted({s.rank for s in spans}):
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
        for name, row in rows.items():
            events.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": name}})
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


@dataclass(frozen=True)
class Picture:
    """What one row of the figure shows. capacity: answers that one engine holds at once, which is full shade."""

    title: str
    spans: list[Span]
    capacity: int


def of_steps(spans: Iterable[Span], first: int, last: int) -> list[Span]:
    """What was done for the steps `first` to `last`; negative numbers count back from the last trained step, which is -1."""
    spans = [s for s in spans if s.name in COLORS]
    end = max((s.step for s in spans if s.name == "train"), default=-1) + 1  # an evaluation after it belongs to no step
    first, last = (number + end if number < 0 else number for number in (first, last))
    return [s for s in spans if first <= s.step <= min(last, end - 1)]


def draw(pictures: list[Picture], path: Path) -> None:
    """The paper's figure from measured spans: a lane per rank, a colour per role, shade by occupancy, never paler than 0.35.

    Several runs are drawn above each other on one clock, each from its first span on.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    heights = [0.9 + 0.7 * max(1, len({s.rank for s in picture.spans})) for picture in pictures]
    layout = dict(sharex=True, squeeze=False, constrained_layout=True, height_ratios=heights)
    figure, axes = plt.subplots(len(pictures), figsize=(13, sum(heights)), **layout)
    for picture, ax in zip(pictures, axes[:, 0], strict=True):
        _draw_run(picture, ax)
    axes[-1, 0].set_xlabel("seconds")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    axes[0, 0].legend(handles, list(COLORS), ncols=len(COLORS), fontsize=8, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_run(picture: Picture, axes) -> None:
    """A lane per rank, a line where a step begins."""
    spans, ranks = picture.spans, sorted({s.rank for s in picture.spans})
    zero = min((s.start for s in spans), default=0.0)
    for (rank, name), stretches in lanes(spans).items():
        for start, end, flying in stretches:
            full = min(1.0, flying / picture.capacity) if name in ("rollout", "genrm") else 1.0
            axes.barh(ranks.index(rank), end - start, left=start - zero, height=0.7, color=COLORS[name], alpha=0.35 + 0.65 * full)
    for step in sorted({s.step for s in spans}):
        begin = min(s.start for s in spans if s.step == step) - zero
        axes.axvline(begin, color="black", linewidth=0.6)
        axes.text(begin, -0.45, f" step {step}", fontsize=8, va="bottom")
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set_ylim(max(1, len(ranks)) - 0.5, -0.75)
    axes.set_title(picture.title, fontsize=10, loc="left")


def read_run(out: Path, first: int, last: int) -> Picture:
    """The picture of a run's steps. Raises ValueError when `out` is no run, or has no span of these steps."""
    if not (out / "config.json").is_file():
        raise ValueError(f"{out} is not what a run left behind: it has no config.json")
    config = json.loads((out / "config.json").read_text())
    spans = of_steps(read_spans(out / "spans"), first, last)
    if not spans:
        raise ValueError(f"{out} has no steps {first} to {last}")
    return Picture(f"{out}: {config['mode']} colocation, {config['ranks']} ranks", spans, config["max_running_requests"])


def main() -> None:
    """Exit status 1 after one line on stderr when there is nothing to draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder that a run left behind")
    parser.add_argument("--steps", type=int, nargs=2, default=(-4, -1), metavar=("FIRST", "LAST"), help="-1: the last [-4 -1]")
    parser.add_argument("--figure", type=Path, default=Path("timeline.png"), help="[timeline.png]")
    given = parser.parse_args()
    try:
        draw([read_run(out, *given.steps) for out in given.runs], given.figure)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"wrote {given.figure}")


if __name__ == "__main__":
    main()
