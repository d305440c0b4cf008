"""Timeline: what every rank did when, on one clock.

While rollout and genrm serve side by side, both stages are open all the time. So a span of an engine is one
request, from sent to finished, and an engine is busy while requests are in flight. Spans of the controller
itself (train, switch, sync) are opened around the work. Beside them stand the life of every answer, in
stretches (queued, decoding, judging, ...), marks (a wave of prompts, a push of weights, a change of the
split), and the passes of the pipelines.

Every rank appends what it saw to files of its own, OUT/spans/rank<r>.<first step>.jsonl: trace.json and
the pictures come from these.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from runtime import atomic_files

if TYPE_CHECKING:
    from training.executor import Phase

STEPS_PER_FILE = 10  # what a resume reads and rewrites at most
COLORS = dict(rollout="#2a78b8", genrm="#e08a1e", train="#3c9d4e", sync="#8a4fb0", switch="#9a9a9a")
STATES = {  # of an answer, in the order of its life
    "queued": "#dcdfe3",
    "decoding": COLORS["rollout"],
    "moved": "#5f3a8c",  # cut off, to go on elsewhere
    "aborted": "#d62f2f",
    "resumed": "#123f69",  # decoding what another engine, or an earlier step, began
    "judging": COLORS["genrm"],
    "done": COLORS["train"],
}
INSTANTS = ("moved", "aborted", "done")  # the other states last


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
    """`rank` saw a wave (`wave 2`), a push of weights (`v3`), a new split or a tail's (`3|1`)."""

    kind: str  # wave, weights, split, tail
    text: str
    rank: int
    time: float
    step: int


class PassSpan(NamedTuple):
    """`rank` ran a stage's forward or backward pass over a micro-batch of `model`."""

    model: str
    stage: int
    backward: bool
    micro_batch: int
    rank: int
    start: float
    end: float
    step: int


@dataclass(frozen=True)
class Records:
    spans: list[Span] = field(default_factory=list)
    samples: list[SampleSpan] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    passes: list[PassSpan] = field(default_factory=list)
    problem: str = ""  # why they could not be written


# first entry of a row in a file; in the order of Records
KINDS = {"span": Span, "sample": SampleSpan, "mark": Mark, "pass": PassSpan}


class Timeline:
    """What one controller sees: its own work, the requests that it sent, and how its answers fared."""

    def __init__(
        self,
        rank: int,
        clock: Callable[[], float],
        folder: Path | None = None,
        on_open: Callable[[str, int], None] = lambda name, step: None,
    ):
        """clock: the event loop's; folder: of the rank's files; on_open(name, step): as a span opens."""
        self.rank, self._clock, self._zero, self._on_open = rank, clock, clock(), on_open
        self.spans, self.samples, self.marks, self.passes, self.step = [], [], [], [], 0
        self._folder = folder

    def start(self, ran_s: float = 0.0) -> None:
        """The clock's zero, or where a resumed run's stood. Every rank calls it right after a barrier."""
        self._zero = self._clock() - ran_s

    def now(self) -> float:
        return self._clock() - self._zero

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = self.now()
        self._on_open(name, self.step)
        try:
            yield
        finally:
            self.spans.append(Span(name, self.rank, start, self.now(), self.step))

    def request(self, role: str, rank: int, start: float, end: float) -> None:
        """One request to the engine of `role` on `rank`; times of the event loop's clock."""
        self.spans.append(Span(role, rank, start - self._zero, end - self._zero, self.step))

    def sample(
        self, state: str, prompt_id: int, index: int, rank: int, start: float, end: float
    ) -> None:
        """One stretch in the life of an answer, on the engine of `rank`; times of the event loop's clock."""
        times = (start - self._zero, end - self._zero)
        self.samples.append(SampleSpan(state, prompt_id, index, rank, *times, self.step))

    def mark(self, kind: str, text: str) -> None:
        """Something happened on every rank, now."""
        self.marks.append(Mark(kind, text, self.rank, self.now(), self.step))

    def ran(self, phases: Iterable[Phase]) -> None:
        """Tables of passes that this rank ran; times of the event loop's clock."""
        for phase in phases:
            self.request("pipeline", self.rank, phase.start, phase.end)
            for title, task, start, end in phase.passes:
                place = (title, task.stage, task.backward, task.micro_batch, self.rank)
                times = (start - self._zero, end - self._zero)
                self.passes.append(PassSpan(*place, *times, self.step))

    def drain(self) -> Records:
        """What was recorded since the last call. It goes to a file, if it can, and is forgotten."""
        drained = (self.spans, self.samples, self.marks, self.passes)
        self.spans, self.samples, self.marks, self.passes = [], [], [], []
        rows = []
        for kind, records in zip(KINDS, drained, strict=True):
            rows += [[kind, *record] for record in records]
        problem = ""
        if self._folder and rows:
            try:
                first = self.step // STEPS_PER_FILE * STEPS_PER_FILE
                atomic_files.append(self._folder / f"rank{self.rank}.{first}.jsonl", rows)
            except OSError as error:  # a full disk: pictures will lack them
                problem = str(error)
        return Records(*drained, problem)


def files_in(folder: Path) -> list[tuple[int, Path]]:
    """All ranks' files, in order, each with the first step that it is for."""
    return sorted((int(path.stem.split(".")[1]), path) for path in folder.glob("rank*.*.jsonl"))


def records_in(path: Path) -> Iterator[tuple[str, NamedTuple]]:
    """The lines of a file, and what they say; but for those that a crash of the machine spoiled."""
    for line in path.open(errors="replace"):
        with suppress(ValueError, LookupError, TypeError):
            kind, *fields = json.loads(line)
            yield line, KINDS[kind](*fields)


def read(folder: Path, first: int = 0, last: int = -1) -> Records:
    """What all ranks recorded of these steps, and of others in the same files. -1: the last step."""
    found = {kind: [] for kind in KINDS.values()}
    files = files_in(folder)
    newest = files[-1][0] if files else 0  # the last step is this one, or one of the next few
    low = first if first >= 0 else newest + first
    for start, path in files:
        if low - STEPS_PER_FILE < start and (last < 0 or start <= last):
            for _, record in records_in(path):
                found[type(record)].append(record)
    return Records(*found.values())


def truncate(folder: Path, step: int) -> float:
    """Drop what is recorded of `step` and later ones. Returns when the one before ended (s)."""
    for first, path in files_in(folder):
        if first >= step:
            path.unlink()
        elif first + STEPS_PER_FILE > step:
            lines = [line for line, record in records_in(path) if record.step < step]
            path.write_text("".join(lines))
    return max((span.end for span in read(folder, step - 1, step - 1).spans), default=0.0)


def busy(spans: Iterable[Span]) -> list[tuple[float, float, float]]:
    """(start, end, mean number in flight) of every stretch with a span in flight."""
    # what began and ended in one instant kept nobody busy
    spans = [s for s in spans if s.end > s.start]
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
    events = list(_events(records))
    for rank in sorted({event["pid"] for event in events}):
        event = {"ph": "M", "pid": rank}
        events.append(event | {"name": "process_name", "args": {"name": f"rank {rank}"}})
        for row, name in enumerate((*COLORS, "passes")):
            events.append(event | {"name": "thread_name", "tid": row, "args": {"name": name}})
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _events(records: Records) -> Iterator[dict]:
    """Busy stretches and passes (X: complete), marks (i: instant), answers by id (b, e: slice; n: mark)."""

    def complete(name: str, rank: int, row: int, start: float, end: float, args: dict) -> dict:
        times = {"ts": _microseconds(start), "dur": _microseconds(end) - _microseconds(start)}
        return {"name": name, "ph": "X", "pid": rank, "tid": row} | times | {"args": args}

    for (rank, name), stretches in lanes(s for s in records.spans if s.name in COLORS).items():
        for start, end, number in stretches:
            args = {"in_flight": round(number, 2)}
            yield complete(name, rank, list(COLORS).index(name), start, end, args)
    # readers keep this order at one time
    for s in sorted(records.samples, key=lambda s: (s.start, s.end)):
        name = f"{s.prompt_id}.{s.index}"
        event = {"name": s.state, "cat": "sample", "id": name, "pid": s.rank, "tid": 0}
        begin = event | {"ts": _microseconds(s.start), "args": {"step": s.step}}
        yield begin | {"ph": "n" if s.state in INSTANTS else "b"}
        if s.state not in INSTANTS:
            yield event | {"ph": "e", "ts": _microseconds(s.end)}
    for mark in records.marks:
        # wave 2; weights v3
        name = mark.text if mark.kind in mark.text else f"{mark.kind} {mark.text}"
        event = {"name": name, "ph": "i", "s": "p", "pid": mark.rank, "tid": 0}
        yield event | {"ts": _microseconds(mark.time)}
    for p in records.passes:
        name = f"{p.model} {'B' if p.backward else 'F'}{p.micro_batch}"
        yield complete(name, p.rank, len(COLORS), p.start, p.end, {"stage": p.stage})


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
