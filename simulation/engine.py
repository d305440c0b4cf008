"""Engines that take what a cost model says: continuous batching on the virtual clock.

All sequences of an engine gain tokens together. Between two events the batch is fixed and contexts grow with
every token, so that time is a quadratic in the tokens gained, with a closed inverse (costs.Decode): there are
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

from config import UserError
from engines.engine import Answer, Request
from scheduling.costs import FULL, Decode
from simulation.clock import VirtualClock

LOGPROB = -0.5  # of every token
LEAST = 1e-6  # of a decode step: less is rounding


class Reply(NamedTuple):
    """What an engine will have written, if nobody aborts it."""

    tokens: list[int]
    score: float | None = None


class Moves(NamedTuple):
    """Seconds of the hand-overs of an engine or a trainer."""

    sleep_s: float = 0.0
    wake_s: float = 0.0
    push_s: float = 0.0  # an engine takes weights


@dataclass(eq=False, slots=True)
class Sequence:
    """One answer in a batch: `length` tokens behind a prompt of `context`, of which `unread` are new.

    ended: where it goes, with how many of its tokens and how it finished.
    """

    index: int
    context: int
    unread: int
    length: int
    ended: asyncio.Queue[tuple[Sequence, int, str]]
    begun: float = 0.0  # tokens that the batch had gained then
    first_token: float = math.inf  # when its prompt is read

    @property
    def room(self) -> int:
        return self.context + self.length


class Batch:
    """The sequences of one engine, first come, first served, in the room that it has.

    Sequences join between two decode steps, and keep room for all of their tokens. Then their prompts are
    read in one pass, for which all wait; a scorer's sequence has no tokens, and ends there.
    """

    def __init__(self, costs: Decode, clock: VirtualClock):
        self.costs, self._clock = costs, clock
        # heap of (tokens gained at its end, against ties)
        self.live: list[tuple[float, int, Sequence]] = []
        self.waiting: deque[Sequence] = deque()
        self.gained = self.context = self.unread_s = 0.0  # unread: of prompts that have joined
        self.read_at = -math.inf  # tokens that the batch had gained when it read prompts last
        self.room_used = self._joined = 0
        self.busy_s, self._now, self._timer = 0.0, clock.now, None

    def submit(self, sequences: list[Sequence]) -> None:
        """UserError for one that the engine has no room for."""
        longest = max(sequence.room for sequence in sequences)
        if longest > self.costs.kv_tokens:
            raise UserError(
                f"{longest} tokens don't fit an engine with room for {self.costs.kv_tokens:.0f}"
            )
        self._advance()
        self.waiting.extend(sequences)
        self._go_on()

    def cut_off(self, is_meant: Callable[[Sequence], bool]) -> None:
        """End what is meant, with the whole tokens that it has."""
        self._advance()
        for sequence in [sequence for *_, sequence in sorted(self.live) if is_meant(sequence)]:
            self._leave(sequence, int(self.gained - sequence.begun + LEAST), "abort")
        self.live = [entry for entry in self.live if not is_meant(entry[-1])]
        heapq.heapify(self.live)
        for sequence in filter(is_meant, self.waiting):
            sequence.ended.put_nowait((sequence, 0, "abort"))
        self.waiting = deque(filterfalse(is_meant, self.waiting))
        self._go_on()

    def _advance(self) -> None:
        """Up to now, between two events."""
        elapsed = self._elapsed_s()
        if self.live:
            read_s = min(elapsed, self.unread_s)
            self.unread_s -= read_s
            self._gain(self.costs.tokens(elapsed - read_s, len(self.live), self.context))

    def _reach(self, gained: float) -> None:
        """The event of the timer."""
        self._elapsed_s()
        self.unread_s = 0.0
        self._gain(gained - self.gained)
        self.gained = gained
        self._go_on()

    def _elapsed_s(self) -> float:
        elapsed, self._now = self._clock.now - self._now, self._clock.now
        self.busy_s += elapsed if self.live else 0.0
        return elapsed

    def _gain(self, tokens: float) -> None:
        self.context += len(self.live) * tokens
        self.gained += tokens

    def _go_on(self) -> None:
        """Between two steps sequences end and others join. Set the timer for the next event."""
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
                self._read()
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

    def _read(self) -> None:
        """The prompts of all that there is room for, in one pass."""
        self.unread_s, self.read_at = self.costs.read, self.gained
        while self._has_room():
            self._join(self.waiting.popleft())

    def _has_room(self) -> bool:
        """For the first that waits; not if nobody does."""
        if not self.waiting or len(self.live) == self.costs.most:
            return False
        return self.room_used + self.waiting[0].room <= self.costs.kv_tokens

    def _join(self, sequence: Sequence) -> None:
        self.room_used += sequence.room
        self.context += sequence.context
        self.unread_s += sequence.unread * self.costs.prefill
        sequence.begun, sequence.first_token = self.gained, self._now + self.unread_s
        self._joined += 1
        heapq.heappush(self.live, (self.gained + sequence.length, self._joined, sequence))

    def _leave(self, sequence: Sequence, written: int, finish: str) -> None:
        self.room_used -= sequence.room
        self.context -= sequence.context + self.gained - sequence.begun
        sequence.ended.put_nowait((sequence, written, finish))


class SimulatedEngine:
    """As engines.engine.Engine, but one handle does for all controllers, and it never dies.

    write: what comes of a request. moves: seconds of its hand-overs.
    """

    def __init__(
        self,
        role: str,
        rank: int,
        model: int,
        costs: Decode,
        moves: Moves,
        capacity: int,
        write: Callable[[Request], Reply],
        clock: VirtualClock,
    ):
        self.role, self.rank, self.model, self.capacity = role, rank, model, capacity
        self.name = f"{role} engine of rank {rank}"
        self.batch, self.awake, self.version = Batch(costs, clock), False, None
        self._moves, self._write, self._clock = moves, write, clock

    async def generate(self, requests: list[Request]) -> AsyncIterator[Answer]:
        """What the prompts of a group share is read once."""
        assert self.awake, f"a request came to the {self.name} while it slept"
        sent, version, ended, left = self._clock.now, self.version, asyncio.Queue(), len(requests)
        replies = [self._write(request) for request in requests]
        lengths = [len(request.prompt) for request in requests]
        cached = [0] + [min(lengths)] * (left - 1)  # behind it stands what was begun elsewhere
        sizes = zip(lengths, cached, replies, strict=True)
        self.batch.submit(
            [
                Sequence(i, n, n - c, len(reply.tokens), ended)
                for i, (n, c, reply) in enumerate(sizes)
            ]
        )
        try:
            while left:
                sequence, written, finish = await ended.get()
                left, index, end = left - 1, sequence.index, self._clock.now
                tokens, score = replies[index]
                what = (
                    tokens[:written],
                    [LOGPROB] * written,
                    finish,
                    [version] * written,
                    cached[index],
                )
                yield Answer(
                    index, *what, sent, min(sequence.first_token, end), end, score, self.rank
                )
        finally:
            if left:
                self.batch.cut_off(lambda sequence: sequence.ended is ended)

    async def abort(self) -> None:
        assert self.awake, "told to abort while it slept"
        self.batch.cut_off(lambda sequence: True)

    async def sleep(self) -> None:
        assert not self.batch.live and not self.batch.waiting, (
            "put to sleep while answers were in flight"
        )
        await asyncio.sleep(self._moves.sleep_s)
        self.awake = False

    async def wake_weights(self) -> None:
        await asyncio.sleep(self._moves.wake_s)

    async def wake_kv_cache(self) -> None:
        self.awake = True

    async def load_weights(self, named_weights: Iterator, version: int) -> None:
        await asyncio.sleep(self._moves.push_s)
        self.version = version

    async def until_down(self) -> str:
        return await asyncio.get_running_loop().create_future()

    def exit_status(self) -> str:
        return ""
