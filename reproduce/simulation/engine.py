"""Simulated engines: continuous batching on the virtual clock, with times from a cost model.

All sequences of an engine gain tokens together. Between two events the batch is fixed and each token makes
contexts longer. Time is therefore quadratic in the tokens gained, and Decode can invert it: the loop needs
events only where a sequence joins or ends, not for each token.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from itertools import filterfalse
from typing import NamedTuple

from engines.engine import Answer, Request
from reproduce.simulation.clock import VirtualClock
from reproduce.simulation.costs import Decode

LOGPROB = -0.5  # the logprob of every token
LEAST = 1e-6  # smaller fractions of a decode step are rounding errors
FULL = 16  # from this many sequences on, prompts are read only every Decode.apart decode steps


class Reply(NamedTuple):
    """An engine's whole text, or its score. An abort cuts the text."""

    tokens: list[int]
    score: float | None = None


class Moves(NamedTuple):
    """Seconds to hand a device over."""

    sleep_s: float = 0.0
    wake_s: float = 0.0
    push_s: float = 0.0  # to load pushed weights into an engine


@dataclass(eq=False, slots=True)
class Sequence:
    """One answer in a batch."""

    index: int  # position of its request
    context: int  # prompt tokens
    unread: int  # prompt tokens that aren't in the KV cache
    length: int  # answer tokens
    ended: asyncio.Queue[
        tuple[Sequence, int, str]
    ]  # receives (self, tokens written, finish reason)
    begun: float = 0.0  # tokens that the batch had gained when it joined
    first_token: float = math.inf  # time at which its prompt has been read
    name: str = ""  # name of its request

    @property
    def room(self) -> int:
        return self.context + self.length


class Batch:
    """The sequences of one engine: first come, first served, as its KV cache has room.

    Sequences join between two decode steps and reserve room for all of their tokens. Their prompts are then
    read in one pass, while the whole batch waits. A scorer's sequence has no tokens, so it ends there.
    """

    def __init__(self, costs: Decode, clock: VirtualClock):
        self.costs = costs
        # heap of (tokens gained when it ends, number to break ties, sequence)
        self.live: list[tuple[float, int, Sequence]] = []
        self.waiting: deque[Sequence] = deque()
        self.gained = 0.0  # tokens that a sequence present from the start would have gained
        self.context = 0.0  # total tokens of the live sequences
        self.unread_s = 0.0  # seconds left to read the prompts that have joined
        self.read_at = -math.inf  # value of `gained` at the last read of prompts
        self.room_used = 0  # tokens
        self.busy_s = 0.0
        self._joined = 0  # sequences so far
        self._clock = clock
        self._now = clock.now  # time of the last call of `_elapsed_s`
        self._timer: asyncio.TimerHandle | None = None  # fires at the next event

    def submit(self, sequences: list[Sequence]) -> None:
        """Add sequences to the queue."""
        longest = max(sequence.room for sequence in sequences)
        assert longest <= self.costs.kv_tokens, f"{longest} tokens don't fit the engine"
        self._advance()
        self.waiting.extend(sequences)
        self._go_on()

    def cut_off(self, is_meant: Callable[[Sequence], bool]) -> None:
        """Abort the sequences that `is_meant` selects. They keep the whole tokens written so far."""
        self._advance()
        for *_, sequence in sorted(self.live):
            if is_meant(sequence):
                self._leave(sequence, int(self.gained - sequence.begun + LEAST), "abort")
        self.live = [entry for entry in self.live if not is_meant(entry[-1])]
        heapq.heapify(self.live)
        for sequence in filter(is_meant, self.waiting):
            sequence.ended.put_nowait((sequence, 0, "abort"))
        self.waiting = deque(filterfalse(is_meant, self.waiting))
        self._go_on()

    def _advance(self) -> None:
        """Gain the tokens since the last event or call."""
        elapsed = self._elapsed_s()
        if self.live:
            read_s = min(elapsed, self.unread_s)
            self.unread_s -= read_s
            self._gain(self.costs.tokens(elapsed - read_s, len(self.live), self.context))

    def _reach(self, gained: float) -> None:
        """Handle the timer: the batch has now gained this many tokens."""
        self._elapsed_s()
        self.unread_s = 0.0
        self._gain(gained - self.gained)
        self.gained = gained
        self._go_on()

    def _elapsed_s(self) -> float:
        elapsed = self._clock.now - self._now
        self._now = self._clock.now
        if self.live:
            self.busy_s += elapsed
        return elapsed

    def _gain(self, tokens: float) -> None:
        self.context += len(self.live) * tokens
        self.gained += tokens

    def _go_on(self) -> None:
        """End and join sequences if the batch is between two steps, then set the timer."""
        steps = self.costs.steps
        between = math.ceil(self.gained * steps - LEAST) / steps  # the end of the current step
        if not self.live or between - self.gained <= LEAST / steps:
            self.gained = between
            while self.live and self.live[0][0] <= between and not self.unread_s:
                sequence = heapq.heappop(self.live)[-1]
                self._leave(sequence, sequence.length, "stop")
            if not self.live:
                self.context = self.unread_s = 0.0
            if self._has_room() and not self.unread_s and self._reads_at() <= self.gained + LEAST:
                self.unread_s = self.costs.read
                self.read_at = self.gained
                while self._has_room():
                    self._join(self.waiting.popleft())
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self.live:
            at = self.live[0][0]
            if self._has_room():
                at = min(at, max(between, self._reads_at()))
            seconds = self.costs.seconds(at - self.gained, len(self.live), self.context)
            self._timer = self._clock.call_at(self._now + self.unread_s + seconds, self._reach, at)

    def _reads_at(self) -> float:
        """Return the value of `gained` from which prompts may be read."""
        apart = self.costs.apart if len(self.live) >= FULL else 0
        return self.read_at + apart / self.costs.steps

    def _has_room(self) -> bool:
        """Return whether the first waiting sequence fits; False if the queue is empty."""
        if not self.waiting or len(self.live) == self.costs.most:
            return False
        return self.room_used + self.waiting[0].room <= self.costs.kv_tokens

    def _join(self, sequence: Sequence) -> None:
        self.room_used += sequence.room
        self.context += sequence.context
        self.unread_s += sequence.unread * self.costs.prefill
        sequence.begun = self.gained
        sequence.first_token = self._now + self.unread_s
        self._joined += 1
        heapq.heappush(self.live, (self.gained + sequence.length, self._joined, sequence))

    def _leave(self, sequence: Sequence, written: int, finish: str) -> None:
        self.room_used -= sequence.room
        self.context -= sequence.context + self.gained - sequence.begun
        sequence.ended.put_nowait((sequence, written, finish))


@dataclass(eq=False)
class SimulatedEngine:
    """A stand-in for engines.engine.Engine. All controllers share one handle, and it never dies."""

    role: str
    rank: int
    model: int
    costs: Decode
    moves: Moves
    capacity: int
    write: Callable[[Request], Reply]
    clock: VirtualClock
    awake: bool = False
    version: int | None = None

    def __post_init__(self):
        self.name = f"{self.role} engine of rank {self.rank}"
        self.batch = Batch(self.costs, self.clock)

    async def generate(self, requests: list[Request]) -> AsyncIterator[Answer]:
        """Yield answers as they end. The common part of a group's prompts is read once."""
        assert self.awake, f"a request came to the {self.name} while it slept"
        sent = self.clock.now
        version = self.version
        ended = asyncio.Queue()
        replies = [self.write(request) for request in requests]
        shared = min(len(request.prompt) for request in requests)  # any more was written elsewhere
        sequences = []
        for index, request in enumerate(requests):
            context = len(request.prompt)
            cached = shared if index else 0
            length = len(replies[index].tokens)
            own = Sequence(index, context, context - cached, length, ended, name=request.name)
            sequences.append(own)
        self.batch.submit(sequences)
        left = len(requests)
        try:
            while left:
                sequence, written, finish = await ended.get()
                left -= 1
                reply = replies[sequence.index]
                end = self.clock.now
                yield Answer(
                    sequence.index,
                    reply.tokens[:written],
                    logprobs=[LOGPROB] * written,
                    finish=finish,
                    versions=[version] * written,
                    cached_tokens=sequence.context - sequence.unread,
                    sent=sent,
                    first_token=min(sequence.first_token, end),
                    end=end,
                    score=reply.score,
                    rank=self.rank,
                )
        finally:
            if left:
                self.batch.cut_off(lambda sequence: sequence.ended is ended)

    async def abort(self) -> None:
        assert self.awake, "an abort came to a sleeping engine"
        self.batch.cut_off(lambda sequence: True)

    async def abort_request(self, name: str) -> None:
        self.batch.cut_off(lambda sequence: sequence.name == name)

    async def sleep(self) -> None:
        in_flight = self.batch.live or self.batch.waiting
        assert not in_flight, "the engine went to sleep with answers in flight"
        await asyncio.sleep(self.moves.sleep_s)
        self.awake = False

    async def wake_weights(self) -> None:
        await asyncio.sleep(self.moves.wake_s)

    async def wake_kv_cache(self) -> None:
        self.awake = True

    async def load_weights(self, named_weights: Iterator, version: int) -> None:
        await asyncio.sleep(self.moves.push_s)
        self.version = version
