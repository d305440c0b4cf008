"""Engines that take the seconds that a cost model says: continuous batching on the virtual clock.

All sequences of an engine gain tokens together. Between two events the batch is fixed and contexts grow with
every token, so that time is a quadratic in the tokens gained, with a closed inverse (Decode): there are
events where a sequence ends or comes, none for a token.
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
from simulation.clock import VirtualClock
from simulation.costs import Decode

LOGPROB = -0.5  # of every token
LEAST = 1e-6  # part of a decode step; smaller ones are rounding errors
FULL = 16  # sequences from which an engine doesn't read prompts between any two decode steps


class Reply(NamedTuple):
    """The text that an engine writes, if nobody aborts it, or the score that it gives."""

    tokens: list[int]
    score: float | None = None


class Moves(NamedTuple):
    """Seconds that it takes to hand a device over."""

    sleep_s: float = 0.0
    wake_s: float = 0.0
    push_s: float = 0.0  # an engine takes weights


@dataclass(eq=False, slots=True)
class Sequence:
    """One answer in a batch."""

    index: int  # of its request
    context: int  # tokens of the prompt
    unread: int  # of these, not in the KV cache
    length: int  # tokens of the answer
    ended: asyncio.Queue[tuple[Sequence, int, str]]  # takes it with its tokens and how it finished
    begun: float = 0.0  # tokens that the batch had gained then
    first_token: float = math.inf  # when its prompt is read
    name: str = ""  # of its request

    @property
    def room(self) -> int:
        return self.context + self.length


class Batch:
    """The sequences of one engine, first come, first served, in the room that it has.

    Sequences join between two decode steps, and keep room for all of their tokens. Then their prompts are
    read in one pass, for which all wait; a scorer's sequence has no tokens, and ends there.
    """

    def __init__(self, costs: Decode, clock: VirtualClock):
        self.costs = costs
        # heap of (tokens gained at its end, number against ties, itself)
        self.live: list[tuple[float, int, Sequence]] = []
        self.waiting: deque[Sequence] = deque()
        self.gained = 0.0  # tokens of a sequence that was there from the start
        self.context = 0.0  # tokens of all live sequences
        self.unread_s = 0.0  # until the prompts that have joined are read
        self.read_at = -math.inf  # tokens that the batch had gained when it read prompts last
        self.room_used = 0  # tokens
        self.busy_s = 0.0
        self._joined = 0  # sequences
        self._clock = clock
        self._now = clock.now  # when `_elapsed_s` was asked last
        self._timer: asyncio.TimerHandle | None = None  # for the next event

    def submit(self, sequences: list[Sequence]) -> None:
        """Add sequences to those that wait."""
        longest = max(sequence.room for sequence in sequences)
        assert longest <= self.costs.kv_tokens, f"{longest} tokens don't fit the engine"
        self._advance()
        self.waiting.extend(sequences)
        self._go_on()

    def cut_off(self, is_meant: Callable[[Sequence], bool]) -> None:
        """End the sequences that are meant, with the whole tokens that they have."""
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
        """Gain the tokens up to now, between two events."""
        elapsed = self._elapsed_s()
        if self.live:
            read_s = min(elapsed, self.unread_s)
            self.unread_s -= read_s
            self._gain(self.costs.tokens(elapsed - read_s, len(self.live), self.context))

    def _reach(self, gained: float) -> None:
        """Handle the timer's event: that many tokens are gained."""
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
        """End and join sequences if the batch is between two steps. Set the timer for the next event."""
        steps = self.costs.steps
        between = math.ceil(self.gained * steps - LEAST) / steps  # the end of the step that runs
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
        """Tokens gained from which on prompts may be read."""
        apart = self.costs.apart if len(self.live) >= FULL else 0
        return self.read_at + apart / self.costs.steps

    def _has_room(self) -> bool:
        """Tell whether there is room for the first sequence that waits; False if none waits."""
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
    """A stand-in for engines.engine.Engine: one handle for all controllers, and it never dies."""

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
        """Yield the answers as they end. The part that the prompts of a group share is read once."""
        assert self.awake, f"a request came to the {self.name} while it slept"
        sent = self.clock.now
        version = self.version
        ended = asyncio.Queue()
        replies = [self.write(request) for request in requests]
        shared = min(len(request.prompt) for request in requests)  # behind it: begun elsewhere
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
        assert self.awake, "told to abort while it slept"
        self.batch.cut_off(lambda sequence: True)

    async def abort_request(self, name: str) -> None:
        self.batch.cut_off(lambda sequence: sequence.name == name)

    async def sleep(self) -> None:
        in_flight = self.batch.live or self.batch.waiting
        assert not in_flight, "put to sleep while answers were in flight"
        await asyncio.sleep(self.moves.sleep_s)
        self.awake = False

    async def wake_weights(self) -> None:
        await asyncio.sleep(self.moves.wake_s)

    async def wake_kv_cache(self) -> None:
        self.awake = True

    async def load_weights(self, named_weights: Iterator, version: int) -> None:
        await asyncio.sleep(self.moves.push_s)
        self.version = version
