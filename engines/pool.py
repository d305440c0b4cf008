"""Pool: the engines of one role as one controller sees them: who is asked next, who is lost, who sleeps."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from config import Config, UserError
from engines.engine import Answer, Engine, EngineLost, Request
from runtime.world import World, raise_on_all
from scheduling.rebalance import RequestStats

if TYPE_CHECKING:
    from torch import Tensor

    from reporting.timeline import Timeline

MAX_STALLS = 3  # in a row, of one prompt or group
MAX_SILENCES = 5  # of stalled_s each, so --timeout-s: a healthy engine lost the request
QUEUED = 2  # open requests for each that an engine decodes; each is a connection, an open file
RECONNECT_S = 3.0  # after a connection broke; meanwhile the owner tells whether its engine is down
WAIT_S = 0.05  # between two looks for an engine that is up


class EngineStatus(NamedTuple):
    """What one controller tells the others of a role, in each of their meetings; `total`: what all tell."""

    outstanding: Counter[int]  # tokens that it awaits from the engine of each rank
    parts: Counter[int]  # of answers, that came from it since the meeting before
    trouble: dict[int, str]  # how the controller's own engine was lost, if it was, by rank
    stalled: tuple[int, ...] = ()  # ranks of engines of which nothing came to it in this step

    @staticmethod
    def total(statuses: list[EngineStatus]) -> EngineStatus:
        *_, troubles, stalled = zip(*statuses, strict=True)
        trouble = {rank: text for each in troubles for rank, text in each.items()}
        slow = tuple(sorted({*sum(stalled, ())}))
        return EngineStatus(*totals([status[:2] for status in statuses]), trouble, slow)


class Pool:
    """A handle on each engine of a role, of which at most one is this controller's own, to wake and to watch.

    Collective calls act on each rank's own engine of the plan (`assign`), and all leave together: nobody asks
    one that sleeps. An engine that dies or hangs is ended by its owner. From the next meeting on others do
    its work, until `restart_lost`, once all sleep, starts it again.
    """

    def __init__(self, engines: list[Engine], world: World, timeline: Timeline, config: Config):
        self.role = engines[0].role if engines else ""
        self.world, self.timeline, self.config = world, timeline, config
        self.all_engines = engines  # `engines`: of the plan; `own`: of these, this rank's
        self.awake: tuple[int, ...] = ()  # ranks of engines that may be asked
        self.woke_at = 0.0  # when the first of them did, by the event loop's clock
        self._outstanding: Counter[int] = Counter()  # rank -> tokens that this controller awaits
        # the same of all when they last met; its part
        self._owed, self._mine = Counter(), Counter()
        self._wrote: dict[int, object] = {}  # rank -> another one whenever parts came
        self._told = EngineStatus(Counter(), Counter(), {})  # in the newest meeting
        self._new_parts: Counter[int] = Counter()  # came here since
        self._random = random.Random(world.rank)
        self._waiting: Counter[int] = Counter()  # model -> requests that no engine can be asked
        self._dealt: dict[int, deque[Engine]] = {}  # model -> the engines that they are to ask
        self._deprioritized: frozenset[int] = frozenset()  # ranks whose engine stalled in this step
        self._lost: dict[int, str] = {}  # rank -> how its engine was lost, as told in a meeting
        self._trouble = ""  # how this rank's engine was lost
        self._watch: asyncio.Task | None = None
        self._finished: list[tuple] = []  # since `pop_stats`: rank, then as RequestStats.of
        self._wakes = self._stalls = self._aborts = 0
        # model -> by what, who may be asked
        self._askable: dict[int, tuple[tuple, list[Engine]]] = {}
        counts = Counter(engine.model for engine in engines)
        most = QUEUED * config.max_running_requests  # of each engine
        self._turns = {model: asyncio.Semaphore(most * count) for model, count in counts.items()}
        self.assign(tuple(engine.rank for engine in engines))

    def assign(self, leads: tuple[int, ...]) -> None:
        """Take the engines of these ranks and no others."""
        assert not self.awake, "the split moves only while every engine sleeps"
        chosen = {*leads}
        self.engines = [engine for engine in self.all_engines if engine.rank in chosen]
        self.own = next((engine for engine in self.engines if engine.rank == self.world.rank), None)

    @property
    def up(self) -> list[Engine]:
        """The plan's engines that weren't lost, as all controllers know since they last met."""
        return [engine for engine in self.engines if engine.rank not in self._lost]

    async def generate(self, requests: list[Request], model: int = 0) -> AsyncIterator[Answer]:
        """An answer to each request, as they finish, all of one engine while it lives: they share its cache.

        If an engine is lost or stalls, another goes on with the tokens so far. What was aborted comes with
        finish "abort", if anything came of it. UserError after MAX_STALLS stalls.
        """
        owed, begun, stalls, aborts = dict(enumerate(requests)), {}, 0, self._aborts
        async with self._turns[model]:  # first: an engine that was chosen before might fall asleep
            while owed:
                if self._aborts > aborts:  # while it waited, or what it had asked was lost
                    for index in begun.keys() & owed.keys():
                        aborted = replace(begun[index], finish="abort")
                        yield self._note(aborted, index, requests[index])
                    return
                if (engine := self.route(model)) is None:
                    await self._wait(model)
                    continue
                indices = list(owed)
                try:
                    async with aclosing(self._ask(engine, list(owed.values()))) as parts:
                        async for part in parts:
                            index = indices[part.index]
                            # a first token is no progress: it comes of every new request
                            if part.finish or len(part.tokens) > 1:
                                stalls = 0
                            owed[index] = owed[index].after(part.tokens)
                            begun[index] = begun[index].extended(part) if index in begun else part
                            if part.finish:
                                del owed[index]
                                yield self._note(begun[index], index, requests[index])
                except (EngineLost, TimeoutError) as error:
                    stalls = await self._failed(engine, error, stalls)

    async def _failed(self, engine: Engine, error: EngineLost | TimeoutError, stalls: int) -> int:
        """An engine gave nothing more; returns the stalls in a row. UserError after MAX_STALLS of them."""
        if isinstance(error, EngineLost):
            await asyncio.sleep(RECONNECT_S)
        if not self._is_up(engine):
            return stalls
        self._deprioritized |= {engine.rank}
        self._stalls += 1
        if stalls + 1 == MAX_STALLS:
            failure = (
                f"the {engine.name} {error}, the third failure in a row to go on with an answer"
            )
            hint = f"--timeout-s {self.config.timeout_s:g} may be too short for it"
            raise UserError(f"{failure}: {hint}") from None
        return stalls + 1

    async def _wait(self, model: int) -> None:
        self._waiting[model] += 1
        try:
            await asyncio.sleep(WAIT_S)
        finally:
            self._waiting[model] -= 1

    def route(self, model: int = 0) -> Engine | None:
        """Of two random engines of `model` that with fewer outstanding tokens; None if none is up."""
        dealt = self._dealt[model].popleft() if self._dealt.get(model) else None
        if dealt and dealt.rank in self.awake and self._is_up(dealt):
            return dealt
        state = (self.engines, self.awake, self._lost, self._trouble, self._deprioritized)
        known, engines = self._askable.get(model, ((), []))
        if known != state:
            awake = {*self.awake}
            up = [
                e for e in self.engines if e.model == model and e.rank in awake and self._is_up(e)
            ]
            engines = [e for e in up if e.rank not in self._deprioritized] or up
            self._askable[model] = state, engines
        # the least loaded of all would be the same for all controllers until they meet
        pair, own = self._random.sample(engines, min(2, len(engines))), self._outstanding
        return min(
            pair, key=lambda e: own[e.rank] + self._owed[e.rank] - self._mine[e.rank], default=None
        )

    def _is_up(self, engine: Engine) -> bool:
        return engine.rank not in self._lost and not (
            self._trouble and engine.rank == self.world.rank
        )

    async def _ask(self, engine: Engine, requests: list[Request]) -> AsyncIterator[Answer]:
        """What one engine writes, as it comes. EngineLost if it breaks off, TimeoutError if it stalls."""
        assert engine.rank in self.awake, f"the {engine.name} was asked while it sleeps"
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
        """The next part, None at the end.

        TimeoutError if the engine wrote for nobody in stalled_s and isn't healthy, or MAX_SILENCES times.
        """
        coming = asyncio.ensure_future(anext(parts, None))
        # else asyncio complains
        coming.add_done_callback(lambda task: task.cancelled() or task.exception())
        silences = 0
        wait_s = self.config.engine_silence_s  # for a word on its health
        try:
            while not coming.done():
                before = self._wrote.get(engine.rank)
                await asyncio.wait([coming], timeout=self.config.stalled_s)
                is_silent = not coming.done() and self._wrote.get(engine.rank) == before
                silences = silences + 1 if is_silent else 0
                # healthy, it writes: it tells of tokens STREAM_INTERVAL at a time, which may take long
                if silences == MAX_SILENCES or (silences and not await engine.is_healthy(wait_s)):
                    raise TimeoutError(f"wrote nothing for {silences * self.config.stalled_s:g} s")
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.wait([coming])  # a generator that still runs can't be closed
        self._wrote[engine.rank] = object()
        self._new_parts[engine.rank] += 1
        return coming.result()

    def _note(self, answer: Answer, index: int, request: Request) -> Answer:
        sizes = (len(answer.tokens), len(request.prompt), answer.cached_tokens)
        self._finished.append((answer.rank, answer.sent, answer.end, *sizes))
        return replace(answer, index=index)

    def pop_stats(self) -> RequestStats:
        """What this controller's requests came to since the last call. The timeline is told of them, too."""
        for rank, sent, end, *_ in self._finished:
            self.timeline.request(self.role, rank, sent, end)
        stats = RequestStats.of(
            (request[1:] for request in self._finished), self._wakes, self._stalls
        )
        self._finished, self._wakes, self._stalls = [], 0, 0
        return stats

    def status(self) -> EngineStatus:
        """What this controller has to tell the others, in a meeting that `apply_status` ends."""
        if self._watch and self._watch.done():
            self._watch.result()  # an error of our own
        trouble = {self.world.rank: self._trouble} if self._trouble else {}
        self._told = EngineStatus(
            +self._outstanding, self._new_parts, trouble, tuple(self._deprioritized)
        )
        self._new_parts = Counter()
        return self._told

    def apply_status(self, status: EngineStatus) -> list[str]:
        """Act on all controllers' total; a line on each new loss. UserError: a model has no engine left."""
        known = self._lost
        self._owed, self._mine, own = status.outstanding, self._told.outstanding, self._told.parts
        to_others = status.parts.keys() - {rank for rank in own if own[rank] == status.parts[rank]}
        self._wrote |= dict.fromkeys(to_others, object())
        self._deprioritized |= {*status.stalled}
        if not status.trouble:
            return []
        down = [engine for engine in self.engines if engine.rank in status.trouble]
        self._lost = {
            engine.rank: f"the {engine.name} {status.trouble[engine.rank]}" for engine in down
        }
        served = {engine.model for engine in self.engines if engine not in down}
        if dead := [self._lost[engine.rank] for engine in down if engine.model not in served]:
            raise UserError(f"no {self.role} engine is left to ask: {'; '.join(dead)}")
        new = [self._lost[rank] for rank in self._lost if rank not in known]
        return [f"others go on with its work: {loss}" for loss in new]

    async def restart_lost(self) -> int:
        """Start lost engines again, asleep (collective, while all sleep). How many here; or UserError."""
        assert not self.awake, "an engine that starts takes the devices"
        await raise_on_all(self.world, self._restart_own())
        restarts, self._trouble = int(bool(self._trouble)), ""
        self._lost, self._deprioritized = {}, frozenset()
        return restarts

    async def _restart_own(self) -> None:
        own = next((engine for engine in self.all_engines if engine.rank == self.world.rank), None)
        if own and not self._trouble and (status := own.exit_status()):  # asleep, it wasn't watched
            self._trouble = f"died ({status})"
            await own.kill()
        if self._trouble:
            try:
                await own.restart(self.config.engine_start_s)
            except (EngineLost, UserError) as error:
                lost = f"the {own.name} {self._trouble}"
                raise UserError(f"{lost}; it didn't start again: {error}") from None

    async def _on_own(self, call: Callable[[Engine], Awaitable[None]]) -> None:
        """Await `call` of this rank's engine, if it is up. If it doesn't answer, it is lost."""
        if self.own and not self._trouble:
            try:
                await call(self.own)
            except EngineLost as lost:
                await self._lose(str(lost))

    async def _lose(self, trouble: str) -> None:
        if not self._trouble:  # else two found it at once
            self._trouble = trouble
            await self.own.kill()
            self._trouble += f"; {self.own.log_end()}"

    async def _watch_own(self) -> None:
        await self._lose(await self.own.until_down())

    def close(self) -> None:
        """Watch no more. Not collective."""
        if self._watch:
            self._watch.cancel()

    async def wake(self) -> None:
        """Weights and KV cache of all engines back on the devices (collective)."""
        await self.use(tuple(engine.rank for engine in self.engines))

    async def sleep(self) -> None:
        """Weights and KV cache of all engines leave the devices (collective)."""
        await self.use(())

    async def use(self, leads: tuple[int, ...], move: bool = False) -> None:
        """Have these ranks' engines awake alone (collective); what others owe is waited for, or moves on."""
        leaves, joins = set(self.awake) - set(leads), set(leads) - set(self.awake)
        if not leaves and not joins:
            return
        self._wakes += bool(joins)
        asleep, self.awake = not self.awake, ()
        while await self.world.reduce(sum(self._outstanding[rank] for rank in leaves), sum):
            if move and self.world.rank in leaves:
                await self._on_own(lambda engine: engine.abort())
            await asyncio.sleep(WAIT_S)
        if leaves:
            await self._each(self._sleep_own, leaves)
        if joins:
            await self._each(lambda engine: engine.wake_weights(), joins)
            await self._each(self._wake_own, joins)
        if leads:
            await self._deal(leads)
        else:  # what steered requests would steer the next step's, and a resumed run can't know it
            self._owed, self._mine = Counter(), Counter()
            self._random = random.Random(self.world.rank)
        self.awake = leads
        if asleep:
            self.woke_at = asyncio.get_running_loop().time()

    async def wake_weights(self) -> None:
        """Room for the weights alone (collective): for a push while the actor still holds its own memory."""
        await self._each(lambda engine: engine.wake_weights())

    async def wake_kv_cache(self) -> None:
        """The KV cache back, requests may come, and each rank watches its engine (collective)."""
        await self._each(self._wake_own)
        self.awake = tuple(engine.rank for engine in self.engines)

    async def _wake_own(self, engine: Engine) -> None:
        await engine.wake_kv_cache()
        self._watch = asyncio.create_task(self._watch_own())

    async def _sleep_own(self, engine: Engine) -> None:
        self.close()
        await asyncio.wait([self._watch])
        self._watch = None
        await engine.sleep()

    @property
    def capacity(self) -> int:
        """Requests of full length that an engine holds at once."""
        return min((engine.capacity for engine in self.all_engines), default=1)

    async def _deal(self, leads: tuple[int, ...]) -> None:
        """Give those who wait engines in turns, the least busy first, or all choose alike (collective)."""
        waiting, owed = await self.world.reduce((self._waiting, +self._outstanding), totals)
        self._dealt, self._owed, self._mine = {}, owed, +self._outstanding
        parts, chosen = await self.world.gather(self._waiting) if +waiting else [], {*leads}
        for model in +waiting:
            engines = [e for e in self.up if e.model == model and e.rank in chosen]
            engines.sort(key=lambda e: (owed[e.rank], e.rank))
            first = sum(part[model] for part in parts[: self.world.rank])
            places = range(first, first + parts[self.world.rank][model])
            self._dealt[model] = deque(engines[place % len(engines)] for place in places if engines)

    async def load_weights(self, named_weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Push the actor's weights into this rank's engine (collective: the iterator gathers them)."""
        with self.timeline.span("sync"):
            await self._on_own(lambda engine: engine.load_weights(named_weights, version))
            # to its end: others need this rank's shards
            await self.world.run(deque, named_weights, 0)
            await self.world.barrier()

    async def abort(self) -> None:
        """Abort what this controller asked for, and what this rank's engine is writing. Not collective."""
        self._aborts += 1
        if self.world.rank in self.awake:
            await self._on_own(lambda engine: engine.abort())

    async def _each(
        self, call: Callable[[Engine], Awaitable[None]], ranks: set[int] | None = None
    ) -> None:
        """`call` of each engine of the plan, or of these ranks."""
        with self.timeline.span("switch"):
            if ranks is None or self.world.rank in ranks:
                await self._on_own(call)
            await self.world.barrier()


def totals(parts: list[tuple[Counter, ...]]) -> tuple[Counter, ...]:
    """Of each column. `update` takes a fraction of the time of a sum."""
    result = tuple(map(Counter, parts[0]))
    for counter, other in (pair for part in parts[1:] for pair in zip(result, part, strict=True)):
        counter.update(other)
    return result
