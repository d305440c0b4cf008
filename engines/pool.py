"""Pool: the engines of one role, as one controller uses them: ask, wake, push weights, abort."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from config import Config, UserError
from engines.engine import Answer, Engine, EngineLost, Request
from engines.routing import Health, Load, Verb, sum_counters
from runtime.world import World, raise_on_all
from scheduling.rebalance import RequestStats

if TYPE_CHECKING:
    from torch import Tensor

    from reporting.timeline import Timeline

MAX_STALLS = 3  # in a row, of one prompt or group
MAX_SILENCES = 5  # of stalled_s each, so --timeout-s: a healthy engine lost the request
QUEUED = 2  # open requests for each that an engine decodes; each is a connection, an open file
RECONNECT_S = 3.0  # after a connection broke, for the owner to tell whether its engine is down
WAIT_S = 0.05  # between two looks for an engine that is up


class EngineStatus(NamedTuple):
    """The facts that one controller tells about a role's engines; `total`: what all told."""

    outstanding: Counter[int]  # rank -> tokens that are awaited from its engine
    parts: Counter[int]  # rank -> parts of answers that came from it since the last meeting
    lost: dict[int, str]  # rank -> how its engine was lost, told by its owner
    stalled: tuple[int, ...] = ()  # ranks of engines that stalled in this step

    @staticmethod
    def total(statuses: list[EngineStatus]) -> EngineStatus:
        outstanding, parts = sum_counters([(each.outstanding, each.parts) for each in statuses])
        lost = {rank: how for each in statuses for rank, how in each.lost.items()}
        stalled = {rank for each in statuses for rank in each.stalled}
        return EngineStatus(outstanding, parts, lost, tuple(sorted(stalled)))


class Pool:
    """A handle on each engine of a role; one of them may be this rank's own, to wake and to watch.

    Collective verbs act on each rank's own engine, if the plan has it (`assign`). All ranks leave
    them together, so that nobody asks an engine that sleeps. One that dies or hangs is killed by
    its owner; others do its work until `restart_lost` starts it again, once all sleep.
    """

    def __init__(self, engines: list[Engine], world: World, timeline: Timeline, config: Config):
        self.role = engines[0].role if engines else ""
        self.world = world
        self.timeline = timeline
        self.config = config
        self.all_engines = engines
        # requests of full length that an engine holds at once
        self.capacity = min((engine.capacity for engine in engines), default=1)
        self.engines: list[Engine] = []  # of the plan
        self.own: Engine | None = None  # of these, this rank's
        self.awake: tuple[int, ...] = ()  # ranks of engines that may be asked; none at first
        self.woke_at = 0.0  # when the first of them woke, by the event loop's clock
        self._load = Load(world)
        self._health = Health(next((e for e in engines if e.rank == world.rank), None))
        self._told = EngineStatus(Counter(), Counter(), {})  # in the last meeting
        self._aborts = 0  # calls of `abort`
        self._served: list[tuple[int, tuple]] = []  # an engine's rank, a row for RequestStats.of
        self._wakes = 0
        self._stalls = 0
        counts = Counter(engine.model for engine in engines)
        most = QUEUED * config.max_running_requests  # of each engine
        self._turns = {model: asyncio.Semaphore(most * count) for model, count in counts.items()}
        self.assign(tuple(engine.rank for engine in engines))

    def assign(self, leads: tuple[int, ...]) -> None:
        """Use the engines of these ranks and no others."""
        assert not self.awake, "the split moves only while every engine sleeps"
        chosen = set(leads)
        self.engines = [engine for engine in self.all_engines if engine.rank in chosen]
        self.own = next((engine for engine in self.engines if engine.rank == self.world.rank), None)

    @property
    def up(self) -> list[Engine]:
        """The plan's engines that weren't lost, as all controllers know since they last met."""
        return [engine for engine in self.engines if engine.rank not in self._health.lost]

    async def generate(self, requests: list[Request], model: int = 0) -> AsyncIterator[Answer]:
        """Yield an answer to each request, as they finish. One engine's cache serves them all.

        An answer whose engine is lost or stalls is continued here, by another engine, from its
        tokens. If its engine was told to abort, it comes with finish "abort", maybe without a token,
        and the caller requests the rest (see the head of rollout.py). After `Pool.abort` an answer
        without a token may not come at all. UserError after MAX_STALLS stalls in a row.
        """
        remaining = dict(enumerate(requests))  # index -> what is left to request
        written: dict[int, Answer] = {}  # index -> what came so far
        stalls = 0  # in a row
        aborts = self._aborts  # if it grows, these requests are aborted, too
        async with self._turns[model]:  # first: an engine that was chosen before might fall asleep
            while remaining:
                if self._aborts > aborts:  # while it waited, or when its engine was lost
                    for index in written.keys() & remaining.keys():
                        aborted = replace(written[index], finish="abort")
                        yield self._record(aborted, requests[index])
                    return
                engine = self.route(model)
                if engine is None:
                    await self._wait(model)
                    continue
                indices = list(remaining)  # an engine counts those that it is asked now
                try:
                    async with aclosing(self._ask(engine, list(remaining.values()))) as parts:
                        async for part in parts:
                            index = indices[part.index]
                            # a first token is no progress: it comes of every new request
                            if part.finish or len(part.tokens) > 1:
                                stalls = 0
                            remaining[index] = remaining[index].after(part.tokens)
                            if index in written:
                                written[index] = written[index].extended(part)
                            else:
                                written[index] = replace(part, index=index)
                            if part.finish:
                                del remaining[index]
                                yield self._record(written[index], requests[index])
                except (EngineLost, TimeoutError) as error:
                    stalls = await self._failed(engine, error, stalls)

    async def _failed(self, engine: Engine, error: EngineLost | TimeoutError, stalls: int) -> int:
        """Pass over an engine that wrote no more; return the stalls in a row, or UserError."""
        if isinstance(error, EngineLost):
            # as seen here: the owner has time to say so, or it stalled
            await asyncio.sleep(RECONNECT_S)
        if not self._health.is_up(engine):
            return stalls
        self._health.stalled |= {engine.rank}
        self._stalls += 1
        if stalls + 1 == MAX_STALLS:
            failure = f"the {engine.name} {error}, the third failure in a row"
            hint = f"--timeout-s {self.config.timeout_s:g} may be too short for it"
            raise UserError(f"{failure} to go on with an answer: {hint}") from None
        return stalls + 1

    async def _wait(self, model: int) -> None:
        """Wait a moment for an engine of `model`."""
        self._load.waiting[model] += 1
        try:
            await asyncio.sleep(WAIT_S)
        finally:
            self._load.waiting[model] -= 1

    def route(self, model: int = 0) -> Engine | None:
        """Return the engine to ask next, the less loaded of two; None if none is up."""
        dealt = self._load.next_dealt(model)
        if dealt and dealt.rank in self.awake and self._health.is_up(dealt):
            return dealt
        return self._load.choose(self._health.askable(model, self.engines, self.awake))

    async def _ask(self, engine: Engine, requests: list[Request]) -> AsyncIterator[Answer]:
        """Yield what one engine writes. EngineLost if it breaks off, TimeoutError if it stalls."""
        assert engine.rank in self.awake, f"the {engine.name} was asked while it sleeps"
        outstanding = self._load.outstanding
        tokens_left = [len(request.prompt) + request.limit for request in requests]
        outstanding[engine.rank] += sum(tokens_left)
        try:
            async with aclosing(engine.generate(requests)) as parts:
                while part := await self._next_part(engine, parts):
                    done = tokens_left[part.index] if part.finish else len(part.tokens)
                    tokens_left[part.index] -= done
                    outstanding[engine.rank] -= done
                    yield part
        finally:
            outstanding[engine.rank] -= sum(tokens_left)

    async def _next_part(self, engine: Engine, parts: AsyncIterator[Answer]) -> Answer | None:
        """Return the next part or None. TimeoutError: it is silent, and unhealthy or long so."""
        stalled_s = self.config.stalled_s
        health_s = self.config.engine_silence_s  # for a word on its health
        progress = self._health.progress
        coming = asyncio.ensure_future(anext(parts, None))
        # look at its exception, or asyncio complains that nobody did
        coming.add_done_callback(lambda task: task.cancelled() or task.exception())
        silences = 0
        try:
            while not coming.done():  # while it writes for others, ours may stand in its queue
                before = progress[engine.rank]
                await asyncio.wait([coming], timeout=stalled_s)
                is_silent = not coming.done() and progress[engine.rank] == before
                silences = silences + 1 if is_silent else 0
                # a healthy engine may be silent for long: it tells STREAM_INTERVAL tokens at a time
                if silences == MAX_SILENCES or (silences and not await engine.is_healthy(health_s)):
                    raise TimeoutError(f"wrote nothing for {silences * stalled_s:g} s")
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.wait([coming])  # a generator that still runs can't be closed
        progress[engine.rank] += 1
        self._health.new_parts[engine.rank] += 1
        return coming.result()

    def _record(self, answer: Answer, request: Request) -> Answer:
        """Keep the answer's times and sizes for `pop_stats`, and return it."""
        sizes = (len(answer.tokens), len(request.prompt), answer.cached_tokens)
        self._served.append((answer.rank, (answer.sent, answer.end, *sizes)))
        return answer

    def pop_stats(self) -> RequestStats:
        """Return the figures of the requests since the last call; the timeline gets them, too."""
        for rank, (sent, end, *_) in self._served:
            self.timeline.add("span", self.role, rank, sent, end)
        stats = RequestStats.of([row for _, row in self._served], self._wakes, self._stalls)
        self._served = []
        self._wakes = 0
        self._stalls = 0
        return stats

    async def abort(self) -> None:
        """Abort what this controller asked for and this rank's engine writes. Not collective."""
        self._aborts += 1
        if self.world.rank in self.awake:
            await self._on_own(lambda engine: engine.abort())

    def status(self) -> EngineStatus:
        """Return what this controller tells the others in a meeting, which `apply_status` ends."""
        health = self._health
        lost = health.loss_to_tell()
        stalled = tuple(health.stalled)
        self._told = EngineStatus(+self._load.outstanding, health.new_parts, lost, stalled)
        health.new_parts = Counter()
        return self._told

    def apply_status(self, status: EngineStatus) -> list[str]:
        """Act on what all told; return a line on each new loss. UserError: no engine is left."""
        health = self._health
        self._load.update(status.outstanding, self._told.outstanding)
        # its own parts counted when they came: counted again, they would hide a stall since then
        own_parts = self._told.parts
        only_own = {rank for rank, parts in own_parts.items() if parts == status.parts[rank]}
        health.progress.update(status.parts.keys() - only_own)
        health.stalled |= set(status.stalled)
        if not status.lost:
            return []
        known = health.lost
        down = [engine for engine in self.engines if engine.rank in status.lost]
        health.lost = {e.rank: f"the {e.name} {status.lost[e.rank]}" for e in down}
        served = {engine.model for engine in self.up}
        unserved = [health.lost[engine.rank] for engine in down if engine.model not in served]
        if unserved:
            raise UserError(f"no {self.role} engine is left to ask: {'; '.join(unserved)}")
        new = [loss for rank, loss in health.lost.items() if rank not in known]
        return [f"others go on with its work: {loss}" for loss in new]

    async def restart_lost(self) -> int:
        """Restart lost engines, asleep, while all sleep (collective); return how many here. UserErrors."""
        assert not self.awake, "an engine that starts takes the devices"
        await raise_on_all(self.world, self._health.restart(self.config.engine_start_s))
        return self._health.reset()

    async def wake(self) -> None:
        """Bring weights and KV cache of all engines back to the devices (collective)."""
        await self.use(tuple(engine.rank for engine in self.engines))

    async def sleep(self) -> None:
        """Free the devices of weights and KV cache of all engines (collective)."""
        await self.use(())

    async def use(self, leads: tuple[int, ...], move: bool = False) -> None:
        """Have the engines of these ranks awake and no others (collective).

        Those that are to sleep finish their answers first; with `move` others continue them.
        """
        leaving = set(self.awake) - set(leads)
        joining = set(leads) - set(self.awake)
        if not leaving and not joining:
            return
        if joining:
            self._wakes += 1
        was_asleep = not self.awake
        self.awake = ()  # nobody asks while engines change hands
        while await self.world.reduce(sum(self._load.outstanding[rank] for rank in leaving), sum):
            if move and self.world.rank in leaving:
                await self._on_own(lambda engine: engine.abort())
            await asyncio.sleep(WAIT_S)
        if leaving:
            await self._on_each(self._sleep_own, leaving)
        if joining:
            await self._on_each(lambda engine: engine.wake_weights(), joining)
            await self._on_each(self._wake_own, joining)
        if leads:
            chosen = set(leads)
            await self._load.deal([e for e in self.up if e.rank in chosen], self.world)
        else:
            self._load.forget()
        self.awake = leads
        if was_asleep:
            self.woke_at = asyncio.get_running_loop().time()

    async def wake_weights(self) -> None:
        """Make room for the weights alone (collective): the actor still holds its own memory."""
        await self._on_each(lambda engine: engine.wake_weights())

    async def load_weights(self, named_weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Push the actor's weights into this rank's engine (collective, as the iterator is)."""
        with self.timeline.span("sync"):
            await self._on_own(lambda engine: engine.load_weights(named_weights, version))
            # to the iterator's end, even if the engine is lost: others need this rank's shards
            await self.world.run(deque, named_weights, 0)
            await self.world.barrier()

    async def wake_kv_cache(self) -> None:
        """Bring the KV cache back: requests may come, each rank watches its engine (collective)."""
        await self._on_each(self._wake_own)
        self.awake = tuple(engine.rank for engine in self.engines)

    async def _wake_own(self, engine: Engine) -> None:
        await engine.wake_kv_cache()
        self._health.watch()

    async def _sleep_own(self, engine: Engine) -> None:
        await self._health.unwatch()
        await engine.sleep()

    async def _on_each(self, verb: Verb, ranks: set[int] | None = None) -> None:
        """Await `verb` of each engine of the plan, or of these ranks (collective)."""
        with self.timeline.span("switch"):
            if ranks is None or self.world.rank in ranks:
                await self._on_own(verb)
            await self.world.barrier()

    async def _on_own(self, verb: Verb) -> None:
        """Await `verb` of this rank's engine, if the plan has one and it is up."""
        if self.own:
            await self._health.call(verb)

    def close(self) -> None:
        """Watch no more. Not collective."""
        self._health.close()
