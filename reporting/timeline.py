"""Timeline: what every rank did when, on one clock.

A stage being open is not an engine being busy: while rollout and genrm serve side by side, both stages are
open all the time. So a span of an engine is one request, from sent to finished, and an engine is busy while
requests are in flight. Spans of the controller itself (train, switch, sync) are opened around the work.
Beside the spans stand the life of every answer, in stretches (queued, decoding, judging, ...), and marks: a
wave of prompts, a push of weights, a change of the split.

Every rank appends what it saw to its own file under OUT/spans; trace.json and figure.py's picture are made
from those files.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

COLORS = {"rollout": "#2a78b8", "genrm": "#e08a1e", "train": "#3c9d4e"}
COLORS |= {"sync": "#8a4fb0", "switch": "#9a9a9a"}
STATES = {  # of an answer, in the order of its life
    "queued": "#dcdfe3",
    "decoding": COLORS["rollout"],
    "aborted": "#d62f2f",
    "resumed": "#123f69",  # decoding what an earlier step began
    "judging": COLORS["genrm"],
    "done": COLORS["train"],
}
INSTANTS = ("aborted", "done")  # the other states last


class Span(NamedTuple):
    """`name` was at work on `rank` in training step `step`. Times in seconds since the run's start."""

    name: str
    rank: int
    start: float
    end: float
    step: int


class SampleSpan(NamedTuple):
    """Answer `index` to prompt `prompt_id` was in `state`, on the engine of `rank`."""

    state: str
    prompt_id: int
    index: int
    rank: int
    start: float
    end: float
    step: int


class Mark(NamedTuple):
    """`rank` saw something happen: a wave (`wave 2`), a push of weights (`v3`), a new split (`3|1`)."""

    kind: str  # wave, weights, split
    text: str
    rank: int
    time: float
    step: int


@dataclass(frozen=True)
class Records:
    spans: list[Span] = field(default_factory=list)
    samples: list[SampleSpan] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)


KINDS = {"span": Span, "sample": SampleSpan, "mark": Mark}  # first entry of a row in a file; order of Records


class Timeline:
    """What one controller sees: its own work, the requests that it sent, and how its answers fared."""

    def __init__(
        self, rank: int, clock: Callable[[], float], folder: Path | None = None,
        on_open: Callable[[str, int], None] = lambda name, step: None,
    ):  # fmt: skip
        """clock: the event loop's; folder: of the rank's file; on_open(name, step): as a span opens."""
        self.rank, self._clock, self._zero, self._on_open = rank, clock, clock(), on_open
        self.step = 0
        self.spans: list[Span] = []
        self.samples: list[SampleSpan] = []
        self.marks: list[Mark] = []
        self._file = folder and folder / f"rank{rank}.jsonl"

    def start(self, ran_s: float = 0.0) -> None:
        """The clock's zero, or where a resumed run's stood. Every rank calls it right after a barrier."""
        self._zero = self._clock() - ran_s

    def now(self) -> float:
        return self._clock() - self._zero

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time the block on this rank."""
        start = self.now()
        self._on_open(name, self.step)
        try:
            yield
        finally:
            self.spans.append(Span(name, self.rank, start, self.now(), self.step))

    def request(self, role: str, rank: int, start: float, end: float) -> None:
        """One request to the engine of `role` on `rank`; times of the event loop's clock."""
        self.spans.append(Span(role, rank, start - self._zero, end - self._zero, self.step))

    def sample(self, state: str, prompt_id: int, index: int, rank: int, start: float, end: float) -> None:
        """One stretch in the life of an answer, on the engine of `rank`; times of the event loop's clock."""
        times = (start - self._zero, end - self._zero)
        self.samples.append(SampleSpan(state, prompt_id, index, rank, *times, self.step))

    def mark(self, kind: str, text: str) -> None:
        """Something happened on every rank, now."""
        self.marks.append(Mark(kind, text, self.rank, self.now(), self.step))

    def drain(self) -> list[Span]:
        """The spans since the last call. All that was recorded goes to this rank's file and is forgotten."""
        drained = (self.spans, self.samples, self.marks)
        self.spans, self.samples, self.marks = [], [], []
        rows = [[kind, *record] for kind, records in zip(KINDS, drained, strict=True) for record in records]
        if self._file and rows:
            with self._file.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        return drained[0]


def read(folder: Path) -> Records:
    """What every rank saw."""
    found = {kind: [] for kind in KINDS}
    for path in sorted(folder.glob("rank*.jsonl")):
        for line in path.open():
            kind, *fields = json.loads(line)
            found[kind].append(KINDS[kind](*fields))
    return Records(*found.values())


def busy(spans: Iterable[Span]) -> list[tuple[float, float, float]]:
    """(start, end, mean number in flight) of every stretch with a span in flight."""
    spans = [s for s in spans if s.end > s.start]  # what began and ended in one instant kept nobody busy
    edges = sorted([(s.start, 1) for s in spans] + [(s.end, -1) for s in spans])
    stretches, in_flight, work, opened, last = [], 0, 0.0, 0.0, 0.0
    for time, change in edges:
        if in_flight == 0 and change == 1:
            opened, work = time, 0.0
        work += in_flight * (time - last)
        in_flight, last = in_flight + change, time
        if in_flight == 0:
            stretches.append((opened, time, work / (time - opened)))
    return stretches


def seconds(spans: Iterable[Span], name: str) -> float:
    """Wall-clock seconds with at least one span called `name` open."""
    return sum(end - start for start, end, _ in busy([s for s in spans if s.name == name]))


def lanes(spans: Iterable[Span]) -> dict[tuple[int, str], list[tuple[float, float, float]]]:
    """(rank, name) -> the lane's busy stretches; requests of all controllers to one engine fall together."""
    grouped = defaultdict(list)
    for span in spans:
        grouped[span.rank, span.name].append(span)
    return {key: busy(group) for key, group in sorted(grouped.items())}


def write_trace(records: Records, path: Path) -> None:
    """A Chrome/Perfetto trace, in microseconds: a process per rank, a thread per role, tracks of answers."""
    events = [*_lane_events(records.spans), *_answer_events(records.samples), *_mark_events(records.marks)]
    for rank in sorted({event["pid"] for event in events}):
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
        for row, name in enumerate(COLORS):
            events.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": {"name": name}})
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _lane_events(spans: list[Span]) -> Iterator[dict]:
    """A complete event (X) per busy stretch of a lane."""
    for (rank, name), stretches in lanes(s for s in spans if s.name in COLORS).items():
        lane = {"name": name, "ph": "X", "pid": rank, "tid": list(COLORS).index(name)}
        for start, end, in_flight in stretches:
            times = {"ts": _microseconds(start), "dur": _microseconds(end) - _microseconds(start)}
            yield lane | times | {"args": {"in_flight": round(in_flight, 2)}}


def _answer_events(samples: list[SampleSpan]) -> Iterator[dict]:
    """An asynchronous slice (b, e) or instant (n) per stretch. An id, so a track, is an answer."""
    for s in sorted(samples, key=lambda s: (s.start, s.end)):  # readers keep the file's order at one time
        event = {"name": s.state, "cat": "sample", "id": f"{s.prompt_id}.{s.index}", "pid": s.rank, "tid": 0}
        begin = event | {"ts": _microseconds(s.start), "args": {"step": s.step}}
        yield begin | {"ph": "n" if s.state in INSTANTS else "b"}
        if s.state not in INSTANTS:
            yield event | {"ph": "e", "ts": _microseconds(s.end)}


def _mark_events(marks: list[Mark]) -> Iterator[dict]:
    for mark in marks:
        name = mark.text if mark.kind in mark.text else f"{mark.kind} {mark.text}"  # wave 2; weights v3
        yield {"name": name, "ph": "i", "s": "p", "pid": mark.rank, "tid": 0, "ts": _microseconds(mark.time)}


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
