"""Timeline: what every rank did when, on one clock.

An engine's span is one request, from sent to finished: the engine is busy while requests are in flight. An
engine that a request leaves unfinished has a part, and the one that finishes it the span. Controllers open
spans (train, switch, sync) around their work. Every rank writes a step's events to
OUT/spans/rank<r>.<step>.jsonl, and keeps those of the last STEPS_KEPT steps.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from runtime import atomic_files

LANES = ("rollout", "genrm", "train", "sync", "switch")  # names of the spans that are drawn
INSTANTS = ("moved", "aborted", "done")  # states of an answer without a duration
MARKS = ("wave", "weights", "split", "tail")
WORK = ("span", "part")  # kinds that keep a lane busy
STEPS_KEPT = 100


class Pass(NamedTuple):
    """Passes of a model that this rank ran; times in seconds, from time.monotonic."""

    title: str  # the model's
    label: str  # F2: the forward pass over micro-batch 2
    stage: int
    start: float
    end: float


class Event(NamedTuple):
    """Something that a rank saw in a training step. Times are in seconds since the run's start.

    kind             name                                         args
    span             a role, for its engine, or `train` etc.      an engine's: as a part's
    part             a role, for its engine                       tokens so far; begun: earlier ones; its
                                                                  prompt's tokens; cached: of these
    sample           state of an answer                           answer: `12.3`, number 3 to prompt 12
    pass             model                                        label, stage: see Pass
    wave, weights    `wave 2`, `v3`; ends when it starts
    split, tail      the two roles' ranks from then on: `3|1`
    """

    kind: str
    name: str
    rank: int  # owner of the engine or trainer that worked
    start: float
    end: float
    step: int
    args: dict[str, Any] | None = None


class Stretch(NamedTuple):
    """A time, in seconds, during which at least one span of a lane was open."""

    start: float
    end: float
    in_flight: float  # mean number of open spans


def of_kind(events: Iterable[Event], *kinds: str) -> list[Event]:
    return [event for event in events if event.kind in kinds]


@dataclass
class Timeline:
    """The events that one controller sees: its own work, the requests it sent, its answers' states."""

    rank: int
    clock: Callable[[], float]  # the event loop's
    folder: Path | None = None  # the rank writes its files there
    on_open: Callable[[str, int], None] = lambda name, step: None  # called when a span opens
    step: int = 0
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._zero = self.clock()

    def start(self, ran_s: float = 0.0) -> None:
        """Set the clock to 0, or to a resumed run's time. All ranks call it right after a barrier."""
        self._zero = self.clock() - ran_s

    def now(self) -> float:
        return self.clock() - self._zero

    def event(
        self, kind: str, name: str, rank: int, start: float, end: float, **args: Any
    ) -> Event:
        """Return an event. Here and in all methods below, times are the event loop's."""
        times = (start - self._zero, end - self._zero)
        return Event(kind, name, rank, *times, self.step, args or None)

    def add(self, *event: Any, **args: Any) -> None:
        self.events.append(self.event(*event, **args))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = self.clock()
        self.on_open(name, self.step)
        try:
            yield
        finally:
            self.add("span", name, self.rank, start, self.clock())

    def sample(
        self, state: str, prompt_id: int, index: int, rank: int, start: float, end: float
    ) -> None:
        """Add one stretch of an answer's life, on the engine of `rank`."""
        self.add("sample", state, rank, start, end, answer=f"{prompt_id}.{index}")

    def mark(self, kind: str, text: str) -> None:
        """Add an event that happens on every rank now. kind: one of MARKS."""
        now = self.clock()
        self.add(kind, text, self.rank, now, now)

    def ran(self, passes: Iterable[Pass]) -> None:
        for model, label, stage, start, end in passes:
            self.add("pass", model, self.rank, start, end, label=label, stage=stage)

    def drain(self) -> list[Event]:
        """Return the events since the last call; write them to a file and drop them here."""
        events = self.events
        self.events = []
        if self.folder and events:
            old = self.folder / f"rank{self.rank}.{self.step - STEPS_KEPT}.jsonl"
            old.unlink(missing_ok=True)
            atomic_files.append(self.folder / f"rank{self.rank}.{self.step}.jsonl", events)
        return events


def files_in(folder: Path) -> list[tuple[int, Path]]:
    """Return all ranks' (step, file), in the order of steps."""
    return sorted((int(path.stem.split(".")[1]), path) for path in folder.glob("rank*.*.jsonl"))


def events_in(path: Path) -> Iterator[Event]:
    """Yield the events of a file, except for lines that a machine's crash damaged."""
    for line in path.open(errors="replace"):
        with suppress(ValueError, LookupError, TypeError):
            yield Event(*json.loads(line))


def read(folder: Path, first: int = 0, last: int = -1) -> list[Event]:
    """Return all ranks' events of these steps. last < 0: the newest; first < 0: counts back from it."""
    files = files_in(folder)
    newest = files[-1][0] if files else 0
    first = first if first >= 0 else newest + first
    last = last if last >= 0 else newest
    return [e for step, path in files if first <= step <= last for e in events_in(path)]


def truncate(folder: Path, step: int) -> float:
    """Drop the events of `step` and later ones. Return when the previous step ended, in seconds."""
    for number, path in files_in(folder):
        if number >= step:
            path.unlink()
    spans = of_kind(read(folder, step - 1, step - 1), "span")
    return max((span.end for span in spans), default=0.0)


def in_flight(spans: Iterable[Event]) -> Iterator[Stretch]:
    """Yield each stretch with a constant number of open spans, if there are any."""
    edges = []
    for span in spans:
        if span.end > span.start:  # otherwise nothing was busy
            edges += [(span.start, 1), (span.end, -1)]
    count = 0
    last = 0.0
    for time, change in sorted(edges):
        if count and time > last:
            yield Stretch(last, time, count)
        count += change
        last = time


def busy(spans: Iterable[Event]) -> list[Stretch]:
    """Return every stretch during which a span was open."""
    stretches = []
    for start, end, count in in_flight(spans):
        work = count * (end - start)
        if stretches and stretches[-1].end == start:
            before = stretches.pop()
            work += before.in_flight * (before.end - before.start)
            start = before.start
        stretches.append(Stretch(start, end, work / (end - start)))
    return stretches


def seconds(events: Iterable[Event], name: str) -> float:
    """Return the wall-clock seconds with at least one span called `name` open."""
    spans = [span for span in of_kind(events, *WORK) if span.name == name]
    return sum(stretch.end - stretch.start for stretch in busy(spans))


def lanes(spans: Iterable[Event]) -> dict[tuple[int, str], list[Stretch]]:
    """Return (rank, name) -> busy stretches, which merge all controllers' requests to an engine."""
    grouped = defaultdict(list)
    for span in spans:
        grouped[span.rank, span.name].append(span)
    return {key: busy(group) for key, group in sorted(grouped.items())}
