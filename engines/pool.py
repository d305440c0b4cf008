"""Pool: the engines of one role as one controller sees them: who is asked, what was asked, who is lost, who sleeps."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from config import Config
from engines.engine import Answer, Engine, EngineLost, Request, Sampling
from reporting.timeline import Timeline
from runtime.world import World
from scheduling.rebalance import RequestStats

if TYPE_CHECKING:
    from torch import Tensor

MAX_STALLS = 3  # of one request
RECONNECT_S = (1.0, 5.0)  # after a connection broke, and after it broke again; the third time is a stall
WAIT_S = 0.05  # between two looks for an engine that is up


class EngineStatus(NamedTuple):
    """What one controller tells the others of a role, in each of their meetings."""

    outstanding: dict[int, int]  # tokens that it awaits from the engine of each rank
    up: bool = True  # whether its own engine answers; True if it has none
    trouble: str = ""  # how its own engine was lost


class Asked(NamedTuple):
    """A finished request, as RequestStats.of takes it but for the rank of its engine."""

    rank: int
    sent: float
    end: float
    tokens: int
    prompt_tokens: int
    cached_tokens: int


class Pool:
    """A handle on each engine of a role, of which at most one is this controller's own to wake and put to sleep.

    `wake`, `sleep` and their like are collective: every controller calls them, each acts on the engine of its own
    rank, and all leave together, so that nobody sends a request to an engine that sleeps. `wake` and `sleep` do
    nothing when already there. Only the engines of the plan take part (`assign`); the others sleep.

    An engine that dies or hangs is noticed by its owner and ended. From the next meeting on everybody passes it over;
    what it owed is asked of another. When all sleep again, `restart_lost` starts it again.
    """

    def __init__(self, engines: list[Engine], world: World, timeline: Timeline, config: Config):
        self.role = engines[0].role if engines else ""
        self.all_engines, self.engines = engines, engines  # the latter: of the plan
        self.world, self.timeline, self.config = world, timeline, config
        self.awake = True  # an engine comes up awake
        self._outstanding: Counter[int] = Counter()  # tokens that may still come from a rank's engine: asked here,
        self._elsewhere: Counter[int] = Counter()  # and by the other controllers when they last met
        self._progress: Counter[int] = Counter()  # signs that a rank's engine writes
        self._deprioritized: set[int] = set()  # ranks whose engine stalled
        self._lost: dict[int, str] = {}  # rank -> how its engine was lost, as far as known here
        self._reported: set[int] = set()  # lost ones that people know of
        self._watch: asyncio.Task | None = None
        self._asked: list[Asked] = []  # since `pop_stats`
        self._wakes = self._stalls = 0

    def assign(self, leads: tuple[int, ...]) -> None:
        """Take the engines of these ranks and no others; all are asleep."""
        assert not self.awake, "the split moves only while every engine sleeps"
        self.engines = [engine for engine in self.all_engines if engine.rank in leads]
        self._deprioritized.clear()

    @property
    def own(self) -> Engine | None:
        """The plan's engine on this rank."""
        return next((engine for engine in self.engines if engine.rank == self.world.rank), None)

    # ---- asking

    async def generate(
        self,
        prompts: list[list[int]],
        sampling: Sampling,
        *,
        limits: Sequence[int] = (),
        seeds: Sequence[int] = (),
        greedy: Sequence[bool] = (),
        model: int = 0,
    ) -> AsyncIterator[Answer]:
        """An answer to each prompt, as they finish, all by one engine if it lives: they share its KV cache.

        limits: the most new tokens of each, default sampling.max_new_tokens. greedy: which are, whatever `sampling`
        says. model: whose answers. Where an engine is lost or stalls, another goes on with the tokens so far; with
        --deterministic the answer is the same. What was aborted comes with finish "abort" and isn't asked again.
        ValueError after MAX_STALLS stalls.
        """
        owed = dict(enumerate(make_requests(prompts, sampling, limits, seeds, greedy)))
        begun: dict[int, Answer] = {}
        stalls = breaks = 0
        while owed:
            engine = self.route(model)
            if engine is None:  # they are lost, which others may know in the next meeting
                await asyncio.sleep(WAIT_S)
                continue
            indices = list(owed)
            try:
                asked = [rest_of(owed[index], begun.get(index)) for index in indices]
                async with aclosing(self._ask(engine, asked)) as parts:
                    async for part in parts:
                        index, breaks = indices[part.index], 0
                        so_far = begun.get(index)
                        begun[index] = so_far.extended(part) if so_far else replace(part, index=index)
                        if part.finish:
                            yield self._note(owed.pop(index), replace(begun[index], stalls=stalls))
                continue
            except EngineLost:
                breaks += 1
                if breaks <= len(RECONNECT_S):
                    await asyncio.sleep(RECONNECT_S[breaks - 1])  # meanwhile its owner tells whether it is down
                    continue
            except TimeoutError:
                pass
            if engine.rank not in self._lost:
                stalls, breaks = stalls + 1, 0
                self._stalls += 1
                self._deprioritized.add(engine.rank)
            if stalls == MAX_STALLS:
                raise ValueError(
                    f"nothing came of an answer in {stalls} attempts of {self.config.stalled_s:g} s each, at last by the "
                    f"{engine.name}: it is too slow for --timeout-s {self.config.timeout_s:g}"
                )

    def route(self, model: int = 0) -> Engine | None:
        """The engine of `model` with the fewest outstanding tokens, None if none is up.

        Outstanding are those that this controller awaits, and those of the others when they last met; ties go round
        by rank, so that controllers differ. An engine that stalled comes last, until the plan changes.
        """
        first = self.world.rank % len(self.engines)
        best, least = None, None
        for engine in self.engines[first:] + self.engines[:first]:
            tokens = self._outstanding[engine.rank] + self._elsewhere[engine.rank]
            load = (engine.rank in self._deprioritized, tokens)
            if engine.model == model and engine.rank not in self._lost and (best is None or load < least):
                best, least = engine, load
            if least == (False, 0):
                break
        return best

    async def _ask(self, engine: Engine, requests: list[Request]) -> AsyncIterator[Answer]:
        """What one engine writes. Raises EngineLost, or TimeoutError if it stalls."""
        assert self.awake, f"the {engine.name} was asked while it sleeps"
        owed = [len(request.prompt) + request.sampling.max_new_tokens for request in requests]
        self._outstanding[engine.rank] += sum(owed)
        try:
            async with aclosing(engine.generate(requests)) as parts:
                while part := await self._next(engine, parts):
                    came = owed[part.index] if part.finish else len(part.tokens)
                    owed[part.index] -= came
                    self._outstanding[engine.rank] -= came
                    yield part
        finally:
            self._outstanding[engine.rank] -= sum(owed)

    async def _next(self, engine: Engine, parts: AsyncIterator[Answer]) -> Answer | None:
        """The next part, None at the end. TimeoutError if the engine wrote nothing for so long, for nobody.

        An answer that waits in a queue isn't late while the engine writes others: here, or for other controllers, as
        their outstanding tokens show.
        """
        coming = asyncio.ensure_future(anext(parts, None))
        try:
            while not coming.done():
                seen = self._progress[engine.rank]
                await asyncio.wait([coming], timeout=self.config.stalled_s)
                if not coming.done() and self._progress[engine.rank] == seen:
                    raise TimeoutError
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.wait([coming])  # a generator that still runs can't be closed
        self._progress[engine.rank] += 1
        return coming.result()

    def _note(self, request: Request, answer: Answer) -> Answer:
        """Remember a finished request; returns its answer."""
        sizes = len(answer.tokens), len(request.prompt), answer.cached_tokens
        self._asked.append(Asked(answer.rank, answer.sent, answer.end, *sizes))
        return answer

    def pop_stats(self) -> RequestStats:
        """What this controller's requests came to since the last call."""
        asked, wakes, stalls = self._asked, self._wakes, self._stalls
        self._asked, self._wakes, self._stalls = [], 0, 0
        for request in asked:
            self.timeline.request(self.role, request.rank, request.sent, request.end)
        return RequestStats.of((request[1:] for request in asked), wakes, stalls)

    # ---- who is up

    def status(self) -> EngineStatus:
        """What this controller has to tell the others."""
        if self._watch and self._watch.done():
            self._watch.result()  # an error of our own
        trouble = self._lost.get(self.world.rank, "") if self.own else ""
        return EngineStatus(dict(+self._outstanding), not trouble, trouble)

    def apply_status(self, statuses: list[EngineStatus]) -> list[str]:
        """What every controller told, by its rank; the same on all. Returns a line for people on each newly lost
        engine. ValueError if the role, or one judge of it, has no engine left."""
        elsewhere = Counter()
        for rank, status in enumerate(statuses):
            if rank != self.world.rank:
                elsewhere.update(status.outstanding)
        self._progress.update(rank for rank in elsewhere | self._elsewhere if elsewhere[rank] != self._elsewhere[rank])
        self._elsewhere = elsewhere
        self._set_lost(statuses)
        lines = {e.rank: f"the {e.name} {self._lost[e.rank]}" for e in self.engines if e.rank in self._lost}
        models = {engine.model for engine in self.engines}
        for model in sorted(models - {engine.model for engine in self.engines if engine.rank not in lines}):
            which = f"{self.role} engine" + f" of judge {model}" * (len(models) > 1)
            raise ValueError(f"no {which} is left: {'; '.join(lines.values())}")
        new, self._reported = lines.keys() - self._reported, set(lines)
        return [f"{lines[rank]}: others do its work until the next hand-over" for rank in sorted(new)]

    def _set_lost(self, statuses: list[EngineStatus]) -> None:
        told = {engine.rank: statuses[engine.rank].trouble for engine in self.engines}
        self._lost = {rank: trouble for rank, trouble in told.items() if trouble}

    async def _on_own(self, call: Callable[[Engine], Awaitable[None]]) -> None:
        """Await `call` of this rank's engine, if it is up. If it doesn't answer, it is lost."""
        if self.own and self.world.rank not in self._lost:
            try:
                await call(self.own)
            except EngineLost as lost:
                await self._lose(self.own, str(lost))

    async def _lose(self, engine: Engine, trouble: str) -> None:
        """An engine of this rank is down: what is left of it is ended."""
        if engine.rank not in self._lost:  # else two found it at once
            self._lost[engine.rank] = trouble
            await engine.kill()

    async def _watch_own(self, engine: Engine) -> None:
        await self._lose(engine, await engine.until_down())

    async def restart_lost(self) -> int:
        """Start every lost engine again and put it to sleep (collective, while everything sleeps).

        Returns how many were started on this rank. ValueError with the end of its log if one doesn't come up.
        """
        assert not self.awake, "an engine that starts takes the devices"
        lost, error = [e for e in self.engines if e.rank == self.world.rank and e.rank in self._lost], ""
        for engine in lost:
            try:
                await engine.restart(self.config.engine_start_s)
                await engine.sleep()
            except (EngineLost, ValueError) as failure:
                error = f"the {engine.name} {self._lost[engine.rank]} and can't be started again: {failure}"
        errors = [error for error in await self.world.gather(error) if error]
        if errors:
            raise ValueError(errors[0])
        self._lost.clear()
        self._reported.clear()
        return len(lost)

    # ---- memory

    async def wake(self) -> None:
        """Weights and KV cache back on the device (collective)."""
        if not self.awake:
            self._wakes += 1
            await self.wake_weights()
            await self.wake_kv_cache()

    async def wake_weights(self) -> None:
        """Room for the weights alone (collective): for a push while the actor still holds its own memory."""
        await self._each(lambda engine: engine.wake_weights())

    async def wake_kv_cache(self) -> None:
        """The KV cache back, requests may come (collective). From now on this rank's engine is watched."""
        await self._each(lambda engine: engine.wake_kv_cache())
        self.awake = True
        if self.own and self.world.rank not in self._lost:
            self._watch = asyncio.create_task(self._watch_own(self.own))

    async def sleep(self) -> None:
        """All requests have ended on every controller, then weights and KV cache leave the device (collective)."""
        if not self.awake:
            return
        await self.world.barrier()
        if self._watch:
            self.close()
            await asyncio.wait([self._watch])
            self._watch = None
        self.awake = False
        await self._each(lambda engine: engine.sleep())

    async def load_weights(self, named_weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Push the actor's weights into this rank's engine (collective: the iterator gathers over its group)."""
        with self.timeline.span("sync"):
            await self._on_own(lambda engine: engine.load_weights(named_weights, version))
            await self.world.run(_drain, named_weights)  # other ranks of the group still need this rank's shards
            await self.world.barrier()

    async def abort(self) -> None:
        """Abort every answer that the engine of this rank is writing, whoever asked. Not collective."""
        if self.awake:
            await self._on_own(lambda engine: engine.abort())

    def close(self) -> None:
        """Watch no more. Not collective."""
        if self._watch:
            self._watch.cancel()

    async def _each(self, call: Callable[[Engine], Awaitable[None]]) -> None:
        """Every rank awaits `call` of its own engine, then all tell who is up (collective)."""
        with self.timeline.span("switch"):
            await self._on_own(call)
            self._set_lost(await self.world.gather(self.status()))


def make_requests(
    prompts: list[list[int]], sampling: Sampling, limits: Sequence[int], seeds: Sequence[int], greedy: Sequence[bool]
) -> list[Request]:
    """What is asked for each prompt, as `Pool.generate` takes it."""
    size = len(prompts)
    rows = zip(prompts, limits or [sampling.max_new_tokens] * size, seeds or [None] * size, greedy or [False] * size, strict=True)
    return [
        Request(prompt, replace(sampling, max_new_tokens=limit, temperature=0.0 if is_greedy else sampling.temperature), seed)
        for prompt, limit, seed, is_greedy in rows
    ]


def rest_of(request: Request, begun: Answer | None) -> Request:
    """What is left to ask for: the tokens so far are part of the prompt."""
    if begun is None:
        return request
    limit = request.sampling.max_new_tokens - len(begun.tokens)
    return request._replace(
        prompt=request.prompt + begun.tokens, sampling=replace(request.sampling, max_new_tokens=limit)
    )


def _drain(iterator: Iterator) -> None:
    for _ in iterator:
        pass
