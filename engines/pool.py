"""Pool: one controller's view of a role's engines: send requests, wake, push weights, abort."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

from config import Config
from engines.engine import Answer, Engine, Request
from engines.routing import Load, Silence
from runtime.world import World
from scheduling.measured import RequestStats, total

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.timeline import Event, Timeline

QUEUED = 2  # open requests per slot of an engine's batch; each takes a connection and an open file
WAIT_S = 0.05  # interval between checks that engines have finished and can sleep

Verb = Callable[[Engine], Awaitable[None]]
Call = tuple[Engine, list[Request]]  # requests of one `generate`, and the engine that has them
# (pool, staying ranks, joining ranks) -> this controller's calls that leave engines which stay awake
Choose = Callable[["Pool", set[int], set[int]], list[Call]]


class EngineStatus(NamedTuple):
    """One controller's knowledge about a role's engines, or all controllers' `total`."""

    outstanding: Counter[int]  # rank -> tokens awaited from its engine
    parts: Counter[int]  # rank -> parts of answers received from it since the last meeting
    waiting: int = 0  # requests that find no engine awake


class Pool:
    """Handles on a role's engines; one of them may be this rank's own.

    Collective methods act on each rank's own engine if the split has it (`use_only`), and return on all ranks
    together, so that no request reaches a sleeping engine. A lost engine ends the run. In a step,
    Devices.push calls `wake_weights`, `load_weights`, `wake_kv_cache`; then the mode calls `set_awake`.
    """

    def __init__(self, engines: list[Engine], world: World, timeline: Timeline, config: Config):
        self.role = engines[0].role if engines else ""
        self.world = world
        self.timeline = timeline
        self.config = config
        self.all_engines = engines
        # full-length requests that fit in an engine at once
        self.capacity = min((engine.capacity for engine in engines), default=1)
        self.engines: list[Engine] = []  # the split's engines
        self.own: Engine | None = None  # this rank's, if the split has it
        self.awake: tuple[int, ...] = ()  # ranks of the engines that accept requests
        self.woke_at = 0.0  # event loop's time when the first of them woke
        self._serving: dict[int, list[Engine]] = {}  # awake engines by model
        self._changed = asyncio.Event()  # set when they change or requests are aborted
        self._load = Load(world)
        self._silence = Silence()  # how long this rank's engine has sent nothing
        self._aborts = 0  # calls of `abort`
        self._served: list[Event] = []  # requests since `pop_stats`
        self._wakes = 0
        counts = Counter(engine.model for engine in engines)
        most = QUEUED * config.max_running_requests  # per engine
        self._turns = {model: asyncio.Semaphore(most * count) for model, count in counts.items()}
        self.use_only(tuple(engine.rank for engine in engines))

    def use_only(self, leads: tuple[int, ...]) -> None:
        """Use only the engines of these ranks, the split's."""
        assert not self.awake, "the split can change only while every engine sleeps"
        chosen = set(leads)
        self.engines = [engine for engine in self.all_engines if engine.rank in chosen]
        self.own = next((engine for engine in self.engines if engine.rank == self.world.rank), None)

    async def generate(self, requests: list[Request], model: int = 0) -> AsyncIterator[Answer]:
        """Yield the answers as they finish. All requests go to one engine, which caches the prompt.

        Aborted answers are incomplete or even empty, with finish "abort"; the caller requests the rest (see
        the head of rollout.py). After `Pool.abort` an empty answer may be missing. Raises EngineLost if the
        engine breaks off.
        """
        requests = [request._replace(name=uuid4().hex) for request in requests]
        written: dict[int, list[Answer]] = {}  # index -> the parts so far
        aborts = self._aborts
        async with self._turns[model]:  # wait first: a chosen engine might fall asleep
            engine = await self._engine_for(model, aborts)
            if engine is None:
                return
            with self._load.awaiting(engine, requests) as note:
                async with aclosing(engine.generate(requests)) as parts:
                    async for part in parts:
                        note(part)
                        parts_so_far = written.setdefault(part.index, [])
                        parts_so_far.append(part)
                        if part.finish:
                            first, *others = parts_so_far
                            answer = first.extended(*others)
                            yield self._record(answer, requests[part.index])

    async def _engine_for(self, model: int, aborts: int) -> Engine | None:
        """Return the next request's engine; wait until one is awake. None if `abort` is called meanwhile."""
        self._load.waiting[model] += 1
        try:
            while model not in self._serving and self._aborts == aborts:
                await self._changed.wait()
        finally:
            self._load.waiting[model] -= 1
        return self.route(model) if self._aborts == aborts else None

    def route(self, model: int = 0) -> Engine | None:
        """Return the next request's engine, or None if all of them sleep."""
        return self._load.choose(self._serving.get(model, []))

    def _mark_awake(self, leads: tuple[int, ...]) -> None:
        """Set which engines accept requests, and wake the requests that wait for one."""
        chosen = set(leads)  # thousands, in a simulation
        self.awake = leads
        self._serving = {}
        for engine in self.engines:
            if engine.rank in chosen:
                self._serving.setdefault(engine.model, []).append(engine)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _record(self, answer: Answer, request: Request) -> Answer:
        """Keep the answer's times and sizes for `pop_stats`, and return it."""
        begun = request.sampling.max_new_tokens - request.limit  # already in the prompt
        prompt = len(request.prompt) - begun
        sizes = {"tokens": begun + len(answer.tokens), "begun": begun, "prompt": prompt}
        sizes["cached"] = min(answer.cached_tokens, prompt)
        kind = "part" if answer.finish == "abort" else "span"
        place = (kind, self.role, answer.rank, answer.sent, answer.end)
        self._served.append(self.timeline.event(*place, **sizes))
        return answer

    def pop_stats(self) -> RequestStats:
        """Return statistics of the requests since the last call, and add these to the timeline."""
        stats = RequestStats.of(self._served, self._wakes)
        self.timeline.events += self._served
        self._served = []
        self._wakes = 0
        return stats

    async def abort(self) -> None:
        """Abort this controller's waiting requests and all on this rank's engine. Not collective."""
        self._aborts += 1
        self._notify()
        if self.world.rank in self.awake:
            await self._on_own(lambda engine: engine.abort())

    def status(self) -> EngineStatus:
        """Return this controller's status for a meeting; `apply_status` takes the sum over all."""
        return EngineStatus(*self._load.report(), self._load.waiting.total())

    def apply_status(self, status: EngineStatus) -> None:
        """Take the sum. Raises EngineLost if this rank's engine has long sent no outstanding tokens."""
        self._load.update(status.outstanding)
        owed = status.outstanding[self.world.rank]
        most_s = self.config.engine_lost_s
        if self._silence.is_too_long(most_s, owed > 0, status.parts[self.world.rank] > 0):
            raise self.own.lost(f"has {owed} tokens outstanding and sent none for {most_s:g} s")

    async def wake(self) -> None:
        """Bring weights and KV cache of all engines back to the devices (collective: ranks that serve)."""
        await self.set_awake(tuple(engine.rank for engine in self.engines))

    async def sleep(self) -> None:
        """Put this rank's engine to sleep. Not collective, but every rank must call it before they meet."""
        assert not +self._load.outstanding, "an engine with outstanding tokens can't sleep"
        is_awake = self.world.rank in self.awake
        self._mark_awake(())
        self._load.forget()
        if is_awake:
            with self.timeline.span("switch"):
                await self._on_own(lambda engine: engine.sleep())

    async def set_awake(self, leads: tuple[int, ...], choose: Choose | None = None) -> None:
        """Have only the engines of these ranks awake (collective: ranks that serve).

        A leaving engine first finishes its answers, or with `choose` aborts them: then callers request the
        rest from engines that are awake. If engines join busy ones, `choose` also returns the calls on the
        busy ones to abort: their callers then turn to the joining ones.
        """
        leaving = set(self.awake) - set(leads)
        staying = set(self.awake) & set(leads)
        joining = set(leads) - set(self.awake)
        if not leaving and not joining:
            return
        was_asleep = not self.awake
        self._mark_awake(())  # no request goes out while engines change hands
        await self._finish_and_sleep(leaving, aborts=choose is not None)
        if joining:
            self._wakes += 1
            await self._on_each(lambda engine: engine.wake_weights(), joining)
            await self._on_each(lambda engine: engine.wake_kv_cache(), joining)
        moving = []  # this controller's calls that go from a staying engine to a joining one
        takers = set(leads)  # the engines that get the waiting requests
        if choose and staying and joining:
            moving = choose(self, staying, joining)
            takers = joining
        if leads:
            engines = [engine for engine in self.engines if engine.rank in takers]
            coming = Counter(engine.model for engine, _ in moving)
            await self._load.assign_waiting(engines, coming, self.world)
        else:
            self._load.forget()
        self._mark_awake(leads)
        names = [(engine, request.name) for engine, requests in moving for request in requests]
        await asyncio.gather(*(engine.abort_request(name) for engine, name in names))
        if was_asleep:
            self.woke_at = asyncio.get_running_loop().time()

    async def _finish_and_sleep(self, leaving: set[int], aborts: bool) -> None:
        """Put engines to sleep when their answers are finished or aborted (collective: ranks that serve)."""
        while await self._have_outstanding(leaving):
            if aborts and self.world.rank in leaving:
                await self._on_own(lambda engine: engine.abort())
            await asyncio.sleep(WAIT_S)
        if leaving:
            await self._on_each(lambda engine: engine.sleep(), leaving)

    def calls_on(self, ranks: set[int]) -> list[Call]:
        """Return this controller's open calls on the engines of these ranks, oldest first."""
        return [call for call in self._load.calls.values() if call[0].rank in ranks]

    async def _have_outstanding(self, leads: set[int]) -> bool:
        """True if one has tokens outstanding (collective: ranks that serve). Raises like `apply_status`."""
        status = await self.world.reduce(self.status(), total)
        self.apply_status(status)
        return any(status.outstanding[rank] for rank in leads)

    async def wake_weights(self) -> None:
        """Allocate only the weights: the actor still holds its own memory. Not collective."""
        with self.timeline.span("switch"):
            await self._on_own(lambda engine: engine.wake_weights())

    async def load_weights(self, named_weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Push the actor's weights into this rank's engine (collective: ranks of the iterator).

        The iterator gathers each tensor when it is asked for the next one, so every rank must reach its end:
        also a rank without an engine, or one that lost its engine halfway. A rank with an engine gathers on
        the event loop, the others in the World's thread.
        """
        with self.timeline.span("sync"):
            try:
                await self._on_own(lambda engine: engine.load_weights(named_weights, version))
            finally:
                await self.world.run(exhaust, named_weights)

    async def wake_kv_cache(self) -> None:
        """Allocate the KV cache; requests may come from then on (collective: ranks that serve)."""
        await self._on_each(lambda engine: engine.wake_kv_cache())
        self._mark_awake(tuple(engine.rank for engine in self.engines))

    async def _on_each(self, verb: Verb, ranks: set[int] | None = None) -> None:
        """Await `verb` on the split's engines, or on those of `ranks` (collective: ranks that serve)."""
        with self.timeline.span("switch"):
            if ranks is None or self.world.rank in ranks:
                await self._on_own(verb)
            await self.world.barrier()

    async def _on_own(self, verb: Verb) -> None:
        """Await `verb` on this rank's engine, if the split has it."""
        if self.own:
            await verb(self.own)


def exhaust(iterator: Iterator) -> None:
    """Ask for every item that is left, and drop it."""
    for _ in iterator:
        pass
