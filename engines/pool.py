"""Pool: the engines of one role as one controller sees them: who is asked next, who is lost, who sleeps."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import starmap
from typing import TYPE_CHECKING, NamedTuple

from config import Config
from engines.engine import Answer, Engine, EngineLost, Request, Sampling
from runtime.world import World, raise_on_all
from scheduling.rebalance import RequestStats

if TYPE_CHECKING:
    from torch import Tensor

    from reporting.timeline import Timeline

MAX_STALLS = 3  # in a row, of one prompt or group
RECONNECT_S = 3.0  # after a connection broke; meanwhile the owner tells whether its engine is down
WAIT_S = 0.05  # between two looks for an engine that is up


class EngineStatus(NamedTuple):
    """What one controller tells the others of a role, in each of their meetings; `total`: what all tell."""

    outstanding: Counter[int]  # tokens that it awaits from the engine of each rank
    parts: Counter[int]  # of answers, that came from it since the meeting before
    trouble: dict[int, str]  # how the controller's own engine was lost, if it was, by rank

    @staticmethod
    def total(statuses: list[EngineStatus]) -> EngineStatus:
        outstanding, parts, troubles = zip(*statuses, strict=True)
        trouble = {rank: text for each in troubles for rank, text in each.items()}
        return EngineStatus(sum(outstanding, Counter()), sum(parts, Counter()), trouble)


class Pool:
    """A handle on each engine of a role, of which at most one is this controller's own, to wake and to watch.

    Collective calls act on each rank's own engine of the plan (`assign`), and all leave together: nobody asks
    one that sleeps. An engine that dies or hangs is ended by its owner. From the next meeting on others do
    its work, until `restart_lost`, once all sleep, starts it again.
    """

    def __init__(self, engines: list[Engine], world: World, timeline: Timeline, config: Config):
        self.role = engines[0].role if engines else ""
        self.all_engines, self.engines = engines, engines  # the latter: of the plan
        self.world, self.timeline, self.config = world, timeline, config
        self.awake = False  # an engine sleeps once it is ready
        self._outstanding: Counter[int] = Counter()  # rank -> tokens that this controller awaits
        self._elsewhere: Counter[int] = Counter()  # the same of all others, when they last met
        self._parts: Counter[int] = Counter()  # rank -> parts of answers that came from its engine to anybody
        self._told = EngineStatus(Counter(), Counter(), {})  # in the newest meeting
        self._new_parts: Counter[int] = Counter()  # came here since
        self._deprioritized: set[int] = set()  # ranks whose engine stalled in this step
        self._lost: dict[int, str] = {}  # rank -> how its engine was lost, as told in a meeting
        self._trouble = ""  # how this rank's engine was lost
        self._watch: asyncio.Task | None = None
        self._finished: list[tuple] = []  # since `pop_stats`: the engine's rank, then as RequestStats.of
        self._wakes = self._stalls = self._aborts = 0

    def assign(self, leads: tuple[int, ...]) -> None:
        """Take the engines of these ranks and no others."""
        assert not self.awake, "the split moves only while every engine sleeps"
        self.engines = [engine for engine in self.all_engines if engine.rank in leads]

    @property
    def own(self) -> Engine | None:
        """The plan's engine on this rank."""
        return next((engine for engine in self.engines if engine.rank == self.world.rank), None)

    async def generate(
        self, prompts: list[list[int]], sampling: Sampling, *, limits: Sequence[int] = (),
        seeds: Sequence[int] = (), greedy: Sequence[bool] = (), model: int = 0,
    ) -> AsyncIterator[Answer]:  # fmt: skip
        """An answer to each prompt, as they finish, all of one engine while it lives: they share its cache.

        limits: the most new tokens of each, default sampling.max_new_tokens. greedy: which are, whatever
        `sampling` says. model: which of the role's models. If an engine is lost or stalls, another goes on
        with the tokens so far. What was aborted comes with finish "abort", if anything came of it, and isn't
        asked again. ValueError after MAX_STALLS stalls.
        """
        owed, begun, stalls = make_requests(prompts, sampling, limits, seeds, greedy), {}, 0
        aborts = self._aborts
        while owed:
            if self._aborts > aborts:  # while it waited, or what it had asked was lost
                for index in begun.keys() & owed.keys():
                    yield self._note(replace(begun[index], index=index, finish="abort"), len(prompts[index]))
                return
            if (engine := self.route(model)) is None:
                await asyncio.sleep(WAIT_S)
                continue
            indices = list(owed)
            try:
                async with aclosing(self._ask(engine, list(owed.values()))) as parts:
                    async for part in parts:
                        index, stalls = indices[part.index], 0
                        owed[index] = owed[index].after(part.tokens)
                        begun[index] = begun[index].extended(part) if index in begun else part
                        if part.finish:
                            del owed[index]
                            yield self._note(replace(begun[index], index=index), len(prompts[index]))
            except (EngineLost, TimeoutError) as error:
                stalls = await self._failed(engine, error, stalls)

    async def _failed(self, engine: Engine, error: EngineLost | TimeoutError, stalls: int) -> int:
        """An engine gave nothing more; returns the stalls in a row. ValueError after MAX_STALLS of them."""
        if isinstance(error, EngineLost):
            await asyncio.sleep(RECONNECT_S)
        if not self._is_up(engine):
            return stalls
        self._deprioritized.add(engine.rank)
        self._stalls += 1
        if stalls + 1 == MAX_STALLS:
            raise ValueError(
                f"the {engine.name} {error}, the third failure in a row to go on with an answer: "
                f"--timeout-s {self.config.timeout_s:g} may be too short for it"
            ) from None
        return stalls + 1

    def route(self, model: int = 0) -> Engine | None:
        """The engine of `model` with the fewest outstanding tokens, stalled ones last; None if none is up."""
        first = self.world.rank % len(self.engines)  # ties go round by rank, so that controllers differ
        ring = self.engines[first:] + self.engines[:first]
        up = [engine for engine in ring if engine.model == model and self._is_up(engine)]
        tokens = self._outstanding + self._elsewhere
        return min(up, key=lambda e: (e.rank in self._deprioritized, tokens[e.rank]), default=None)

    def _is_up(self, engine: Engine) -> bool:
        return engine.rank not in self._lost and not (self._trouble and engine.rank == self.world.rank)

    async def _ask(self, engine: Engine, requests: list[Request]) -> AsyncIterator[Answer]:
        """What one engine writes, as it comes. EngineLost if it breaks off, TimeoutError if it stalls."""
        assert self.awake, f"the {engine.name} was asked while it sleeps"
        owed = [len(request.prompt) + request.limit for request in requests]
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
        """The next part, None at the end. TimeoutError if the engine wrote for nobody in stalled_s."""
        coming = asyncio.ensure_future(anext(parts, None))
        coming.add_done_callback(lambda task: task.cancelled() or task.exception())  # else asyncio complains
        try:
            while not coming.done():
                before = self._parts[engine.rank]
                await asyncio.wait([coming], timeout=self.config.stalled_s)
                if not coming.done() and self._parts[engine.rank] == before:
                    raise TimeoutError(f"wrote nothing for {self.config.stalled_s:g} s")
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.wait([coming])  # a generator that still runs can't be closed
        self._parts[engine.rank] += 1
        self._new_parts[engine.rank] += 1
        return coming.result()

    def _note(self, answer: Answer, prompt_tokens: int) -> Answer:
        sizes = (len(answer.tokens), prompt_tokens, answer.cached_tokens)
        self._finished.append((answer.rank, answer.sent, answer.end, *sizes))
        return answer

    def pop_stats(self) -> RequestStats:
        """What this controller's requests came to since the last call. The timeline is told of them, too."""
        requests, wakes, stalls = self._finished, self._wakes, self._stalls
        self._finished, self._wakes, self._stalls = [], 0, 0
        for rank, sent, end, *_ in requests:
            self.timeline.request(self.role, rank, sent, end)
        return RequestStats.of((request[1:] for request in requests), wakes, stalls)

    def status(self) -> EngineStatus:
        """What this controller has to tell the others, in a meeting that `apply_status` ends."""
        if self._watch and self._watch.done():
            self._watch.result()  # an error of our own
        trouble = {self.world.rank: self._trouble} if self._trouble else {}
        self._told = EngineStatus(+self._outstanding, self._new_parts, trouble)
        self._new_parts = Counter()
        return self._told

    def apply_status(self, status: EngineStatus) -> list[str]:
        """Act on all controllers' total; a line on each new loss. ValueError: a model has no engine left."""
        known = self._lost
        self._elsewhere = status.outstanding - self._told.outstanding
        self._parts += status.parts - self._told.parts
        down = [engine for engine in self.engines if engine.rank in status.trouble]
        self._lost = {engine.rank: f"the {engine.name} {status.trouble[engine.rank]}" for engine in down}
        served = {engine.model for engine in self.engines if engine not in down}
        if dead := [self._lost[engine.rank] for engine in down if engine.model not in served]:
            raise ValueError(f"no {self.role} engine is left to ask: {'; '.join(dead)}")
        return [f"{self._lost[rank]}: others go on with its work" for rank in self._lost if rank not in known]

    async def restart_lost(self) -> int:
        """Start every lost engine again and put it to sleep (collective, while all sleep); how many here.

        Those that stalled get another chance. ValueError with the end of its log if one doesn't come up.
        """
        assert not self.awake, "an engine that starts takes the devices"
        restarts = int(bool(self._trouble))
        await raise_on_all(self.world, self._restart_own())
        self._lost, self._trouble, self._deprioritized = {}, "", set()
        return restarts

    async def _restart_own(self) -> None:
        if self._trouble:  # maybe of an engine that isn't of the plan: all come up awake
            own = next(engine for engine in self.all_engines if engine.rank == self.world.rank)
            try:
                await own.restart(self.config.engine_start_s)
                await own.sleep()
            except (EngineLost, ValueError) as error:
                lost = f"the {own.name} {self._trouble}"
                raise ValueError(f"{lost} and didn't start again: {error}") from None

    async def _on_own(self, call: Callable[[Engine], Awaitable[None]]) -> None:
        """Await `call` of this rank's engine, if it is up. If it doesn't answer, it is lost."""
        if self.own and not self._trouble:
            try:
                await call(self.own)
            except EngineLost as lost:
                await self._lose(str(lost))

    async def _lose(self, trouble: str) -> None:
        """This rank's engine is down: what is left of it is ended."""
        if not self._trouble:  # else two found it at once
            self._trouble = trouble
            await self.own.kill()

    async def _watch_own(self) -> None:
        await self._lose(await self.own.until_down())

    def close(self) -> None:
        """Watch no more. Not collective."""
        if self._watch:
            self._watch.cancel()

    async def wake(self) -> None:
        """Weights and KV cache back on the device, if the engines sleep (collective)."""
        if not self.awake:
            self._wakes += 1
            await self.wake_weights()
            await self.wake_kv_cache()

    async def wake_weights(self) -> None:
        """Room for the weights alone (collective): for a push while the actor still holds its own memory."""
        await self._each(lambda engine: engine.wake_weights())

    async def wake_kv_cache(self) -> None:
        """The KV cache back, requests may come, and each rank watches its engine (collective)."""
        await self._each(lambda engine: engine.wake_kv_cache())
        self.awake = True
        if self.own and not self._trouble:
            self._watch = asyncio.create_task(self._watch_own())

    async def sleep(self) -> None:
        """Weights and KV cache leave the device, if the engines are awake, once nobody asks (collective)."""
        if not self.awake:
            return
        await self.world.barrier()
        if self._watch:
            self.close()
            await asyncio.wait([self._watch])
            self._watch = None
        self.awake = False
        self._elsewhere.clear()  # it would steer the next step's requests, which a resumed run can't know
        await self._each(lambda engine: engine.sleep())

    async def load_weights(self, named_weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Push the actor's weights into this rank's engine (collective: the iterator gathers them)."""
        with self.timeline.span("sync"):
            await self._on_own(lambda engine: engine.load_weights(named_weights, version))
            await self.world.run(deque, named_weights, 0)  # to its end: others need this rank's shards
            await self.world.barrier()

    async def abort(self) -> None:
        """Abort what this controller asked for, and what this rank's engine is writing. Not collective."""
        self._aborts += 1
        if self.awake:
            await self._on_own(lambda engine: engine.abort())

    async def _each(self, call: Callable[[Engine], Awaitable[None]]) -> None:
        with self.timeline.span("switch"):
            await self._on_own(call)
            await self.world.barrier()


def make_requests(prompts: list, sampling: Sampling, limits: Sequence, seeds: Sequence, greedy: Sequence):
    """Index of the prompt -> what is asked; arguments as of `Pool.generate`."""
    size, greedily = len(prompts), replace(sampling, temperature=0.0)
    rules = [greedily if is_greedy else sampling for is_greedy in greedy or [False] * size]
    limits, seeds = limits or [sampling.max_new_tokens] * size, seeds or [None] * size
    return dict(enumerate(starmap(Request, zip(prompts, rules, limits, seeds, strict=True))))
