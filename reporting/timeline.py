"""Timeline: spans of every rank, where the work is, from one clock -> seconds, occupancy, a Chrome trace and a figure.

A stage being open is not an engine being busy: while rollout and genrm serve side by side, both stages are open all the time. So a
span of an engine is one request, from sent to finished, and an engine is busy while requests are in flight; occupancy is in-flight
over capacity, drawn as shade. Spans of the controller itself (train, switch, sync) are opened around the work.

Beside the spans stand the life of every answer, in stretches (queued, decoding, judging, ...), and marks: a wave of prompts, a push
of weights, a change of the split. Every rank appends what it saw to its own file under OUT/spans, a row a record; the merged trace
and the picture are made from those files.

    python timeline.py RUN --steps 10 14      the picture of any steps of a run
    python timeline.py RUN_A RUN_B            two runs above each other on one clock
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

COLORS = {"rollout": "#2a78b8", "genrm": "#e08a1e", "train": "#3c9d4e", "sync": "#8a4fb0", "switch": "#9a9a9a"}
STATES = {  # of an answer, in the order of its life
    "queued": "#dcdfe3",
    "decoding": COLORS["rollout"],
    "aborted": "#d62f2f",
    "resumed": "#123f69",  # decoding what an earlier step began
    "judging": COLORS["genrm"],
    "done": COLORS["train"],
}
INSTANTS = ("aborted", "done")  # the other states last
MARKS = ("weights", "wave", "split")


class Span(NamedTuple):
    """`name` was at work on `rank` from `start` to `end` (seconds since the run's start); `step` is the training step it served."""

    name: str
    rank: int
    start: float
    end: float
    step: int


class SampleSpan(NamedTuple):
    """Answer `index` to prompt `prompt_id` was in `state` from `start` to `end`, on the engine of `rank`, in training step `step`."""

    state: str
    prompt_id: int
    index: int
    rank: int
    start: float
    end: float
    step: int


class Mark(NamedTuple):
    """`rank` saw something happen at `time`; a kind of MARKS and a few letters: weights v3, wave 2, split 3|1."""

    kind: str
    text: str
    rank: int
    time: float
    step: int


@dataclass(frozen=True)
class Records:
    """What any number of ranks saw."""

    spans: list[Span] = field(default_factory=list)
    samples: list[SampleSpan] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)


KINDS = {"span": Span, "sample": SampleSpan, "mark": Mark}  # the first entry of a row in a file; in the order of Records


class Timeline:
    """What one controller sees: its own work, the requests that it sent to engines on any rank, and how its answers fared."""

    def __init__(self, rank: int, clock: Callable[[], float], folder: Path | None = None, on_open=lambda name, step: None):
        self.rank, self._clock, self._zero = rank, clock, clock()
        self._on_open = on_open  # told the name and step of each span that opens
        self.step = 0
        self.spans: list[Span] = []
        self.samples: list[SampleSpan] = []
        self.marks: list[Mark] = []
        self._file = folder and folder / f"rank{rank}.jsonl"

    def start(self, ran_s: float = 0.0) -> None:
        """Zero of the clock, or where a resumed run's stood. Called by every rank right after a barrier, which lines the clocks up."""
        self._zero = self._clock() - ran_s

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

    def sample(self, state: str, prompt_id: int, index: int, rank: int, start: float, end: float) -> None:
        """One stretch in the life of one answer, on the engine of `rank`; times are those of the event loop's clock.

        state: of STATES; those of INSTANTS have start == end.
        """
        assert state in STATES, f"an answer has no state {state}"
        assert start == end if state in INSTANTS else start <= end, f"an answer was {state} from {start} to {end}"
        self.samples.append(SampleSpan(state, prompt_id, index, rank, start - self._zero, end - self._zero, self.step))

    def mark(self, kind: str, text: str) -> None:
        """Something happened on this rank, now; kind: of MARKS. Marks that every rank makes at once are drawn once."""
        assert kind in MARKS, f"there are no marks for {kind}"
        self.marks.append(Mark(kind, text, self.rank, self.now(), self.step))

    def take(self) -> list[Span]:
        """The spans since the last call. They, the samples' stretches and the marks are written to this rank's file and forgotten."""
        taken = (self.spans, self.samples, self.marks)
        self.spans, self.samples, self.marks = [], [], []
        rows = [row_of(kind, record) for kind, records in zip(KINDS, taken, strict=True) for record in records]
        if self._file and rows:
            with self._file.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        return taken[0]


def row_of(kind: str, record: Span | SampleSpan | Mark) -> list:
    """A record as it stands in a file: its kind, then its fields, times to the microsecond."""
    return [kind, *(round(value, 6) if isinstance(value, float) else value for value in record)]


def read(folder: Path) -> Records:
    """What every rank saw, from their files."""
    found = {kind: [] for kind in KINDS}
    for path in sorted(folder.glob("rank*.jsonl")):
        for line in path.open():
            kind, *fields = json.loads(line)
            found[kind].append(KINDS[kind](*fields))
    return Records(*found.values())


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


def lanes(spans: Iterable[Span]) -> dict[tuple[int, str], list[tuple[float, float, float]]]:
    """(rank, name) -> the busy stretches of that lane: requests of all controllers to one engine fall together."""
    grouped = defaultdict(list)
    for span in spans:
        grouped[span.rank, span.name].append(span)
    return {key: busy(group) for key, group in sorted(grouped.items())}


def write_trace(records: Records, path: Path) -> None:
    """One Chrome/Perfetto trace of all ranks, in microseconds: a process per rank, a thread per role, the answers beside them."""
    ranks = {record.rank for record in (*records.spans, *records.samples, *records.marks)}
    events = [*_lane_events(records.spans), *_answer_events(records.samples), *_mark_events(records.marks)]
    for rank in sorted(ranks):
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
        for row, name in enumerate(COLORS):
            events.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": name}})
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _lane_events(spans: list[Span]):
    """A complete event per busy stretch of a lane."""
    rows = {name: row for row, name in enumerate(COLORS)}
    for (rank, name), stretches in lanes(s for s in spans if s.name in rows).items():
        for start, end, flying in stretches:
            times = {"ts": _microseconds(start), "dur": _microseconds(end) - _microseconds(start)}
            yield {"name": name, "ph": "X", "pid": rank, "tid": rows[name], **times, "args": {"in_flight": round(flying, 2)}}


def _answer_events(samples: list[SampleSpan]):
    """An asynchronous slice (b, e) or instant (n) per stretch. An id is one answer, so its life lies on one track, over steps, too."""
    for s in sorted(samples, key=lambda s: (s.start, s.end)):  # a reader takes events of one time in the order of the file
        event = {"name": s.state, "cat": "sample", "id": f"{s.prompt_id}.{s.index}", "pid": s.rank, "tid": 0}
        if s.state in INSTANTS:
            yield event | {"ph": "n", "ts": _microseconds(s.start), "args": {"step": s.step}}
        else:
            yield event | {"ph": "b", "ts": _microseconds(s.start), "args": {"step": s.step}}
            yield event | {"ph": "e", "ts": _microseconds(s.end)}


def _mark_events(marks: list[Mark]):
    """An instant of the whole process per mark."""
    for mark in marks:
        name = mark.text if mark.kind in mark.text else f"{mark.kind} {mark.text}"  # wave 2; weights v3
        yield {"name": name, "ph": "i", "s": "p", "pid": mark.rank, "tid": 0, "ts": _microseconds(mark.time)}


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def main() -> None:
    """Exit status 1 after one line on stderr when there is nothing to draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder that a run left behind")
    parser.add_argument("--steps", type=int, nargs=2, default=(-4, -1), metavar=("FIRST", "LAST"), help="-1: the last [-4 -1]")
    parser.add_argument("--figure", type=Path, default=Path("timeline.png"), help="[timeline.png]")
    given = parser.parse_args()
    from reporting.figure import draw, read_run  # which imports this file

    try:
        draw([read_run(out, *given.steps) for out in given.runs], given.figure)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(f"wrote {given.figure}")


if __name__ == "__main__":
    main()
