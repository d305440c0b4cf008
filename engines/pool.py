"""Pool: the engines of one role as one controller sees them: who is asked next, what was asked, who sleeps and who is awake."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from engines.watch import News, Watch


@dataclass(frozen=True)
class RoleLoad:
    """What one role did in a serving phase, as one controller saw it, or all of them together (`total`)."""

    tokens: int = 0  # written
    longest: int = 0  # tokens of the longest answer
    request_s: float = 0.0  # seconds of every request, from sent to finished, summed
    in_flight: float = 0.0  # requests in flight, as a request sees them: the mean over request-seconds
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts, found in the KV cache
    wakes: int = 0  # times that its engines woke up while serving

    @staticmethod
    def of(requests: Iterable[tuple[float, float, int, int, int]], wakes: int = 0) -> RoleLoad:
        """From (sent, end, tokens, prompt tokens, cached tokens) of each request."""
        requests = list(requests)
        edges = sorted([(sent, 1) for sent, *_ in requests] + [(end, -1) for _, end, *_ in requests])
        flying, last, first_moment, second_moment = 0, 0.0, 0.0, 0.0
        for time, change in edges:
            first_moment += flying * (time - last)
            second_moment += flying**2 * (time - last)
            flying, last = flying + change, time
        tokens = [tokens for _, _, tokens, _, _ in requests]
        prompt, cached = (sum(request[column] for request in requests) for column in (3, 4))
        in_flight = second_moment / max(first_moment, 1e-9)
        return RoleLoad(sum(tokens), max(tokens, default=0), first_moment, in_flight, prompt, cached, wakes)

    @staticmethod
    def total(parts: list[RoleLoad]) -> RoleLoad:
        """All controllers' requests together: each sees its own part of what is in flight."""
        tokens, longest = sum(part.tokens for part in parts), max(part.longest for part in parts)
        prompt, cached = sum(part.prompt_tokens for part in parts), sum(part.cached_tokens for part in parts)
        seconds, in_flight = sum(part.request_s for part in parts), sum(part.in_flight for part in parts)
        return RoleLoad(tokens, longest, seconds, in_flight, prompt, cached, parts[0].wakes)


class Pool:
    """The engines of one role, as one controller sees them: a handle on each, of which at most one is its own to wake and put to sleep.

    `wake`, `wake_weights`, `wake_kv_cache` and `sleep` are collective: every controller calls them, each acts on the engine of its own
    rank, and all leave together, so that nobody sends a request to an engine that sleeps. `wake` and `sleep` are no-ops when already
    there. Only the engines of the plan take part (`assign`); the others sleep. An engine that is down is passed over until it is
    back (see watch.py); who leaves a collective call knows which are.

    stranded: the pool is awake, but no engine is up, and one waits for the actor's weights.
    notes: a line for people on each engine that went down.
    """

    def __init__(self, engines: list, world, timeline, deadline_s: float = 300.0):
        """deadline_s: for an engine that is started again to come up."""
        self.all_engines, self.world, self.timeline = engines, world, timeline
        self.engines = engines  # of the plan
        self.awake = True  # an engine comes up awake
        self._wakes = 0
        self._requests: list[tuple[float, float, int, int, int]] = []  # of this step, as RoleLoad.of takes them
        for engine in engines:
            engine.on_request = self._note
        self._elsewhere: Counter[int] = Counter()  # tokens that the other controllers await from a rank's engine, when last heard of
        self._late: set[int] = set()  # ranks whose engine this controller asks only if there is no other
        self._watch = next((Watch(engine, deadline_s) for engine in engines if engine.rank == world.rank), None)
        self._missing: set[int] = set()  # ranks whose engine is down or has old weights, as all controllers heard
        self._held = self.stranded = False
        self.notes: list[str] = []

    def assign(self, leads: tuple[int, ...]) -> None:
        """Take the engines of these ranks and no others. All must be asleep: what is awake must be put to sleep by its owner first."""
        assert not self.awake, "the split moves only while every engine sleeps"
        self.engines = [engine for engine in self.all_engines if engine.rank in leads]
        self._late.clear()

    @property
    def own(self) -> list:
        """The plan's engine on this rank: none or one."""
        return [engine for engine in self.engines if engine.rank == self.world.rank]

    # ---- routing

    def route(self, model: int = 0):
        """The engine of `model` with the fewest outstanding tokens; ties go round by rank, so that controllers differ. None: wait.

        Outstanding are those that this controller awaits, and those of the others when the controllers last met.
        """
        if self._held:
            return None
        first = self.world.rank % len(self.engines)
        best, least = None, None
        for engine in self.engines[first:] + self.engines[:first]:
            load = (engine.rank in self._late, engine.outstanding + self._elsewhere[engine.rank])
            if engine.model == model and engine.up and (best is None or load < least):
                best, least = engine, load
            if least == (False, 0):
                break
        return best

    def outstanding(self) -> dict[int, int]:
        """Tokens that this controller awaits from the engine of each rank, where it awaits any."""
        return {engine.rank: engine.outstanding for engine in self.engines if engine.outstanding}

    def news(self) -> News:
        """What this controller has to tell the others."""
        watch = self._watch
        return News(self.outstanding(), watch.state, watch.trouble, watch.error) if self.own else News(self.outstanding())

    def hear(self, news: list[News]) -> None:
        """What every controller has told, by its rank. Raises ValueError if an engine failed too often."""
        errors = [told.error for told in news if told.error]
        if errors:
            raise ValueError(errors[0])
        self._elsewhere = Counter()
        for rank, told in enumerate(news):
            if rank != self.world.rank:
                self._elsewhere.update(told.awaited)
        states = {engine.rank: news[engine.rank].state for engine in self.engines}
        for engine in self.engines:
            engine.up = states[engine.rank] == "up"
        if self.own:
            self._watch.heard(states[self.world.rank])
        self.stranded = self.awake and "up" not in states.values() and "fresh" in states.values()
        down = {rank for rank, state in states.items() if state == "down"}
        self._late -= down  # a new server takes its place
        gone, self._missing = down - self._missing, {rank for rank, state in states.items() if state != "up"}
        self.notes += [f"the {e.name} {news[e.rank].trouble}: it is started again" for e in self.engines if e.rank in gone]

    def hold(self) -> None:
        """Nobody is asked until the engines wake again."""
        self._held = True

    def end_step(self) -> int:
        """A step is finished. Returns how often this rank's engine was started again in it."""
        return self._watch.end_step() if self._watch else 0

    def close(self) -> None:
        """Watch no more. Not collective."""
        if self._watch:
            self._watch.close()

    def avoid(self, engine) -> None:
        """It was late: until the plan changes, ask this engine only if there is no other."""
        self._late.add(engine.rank)

    def take_load(self) -> RoleLoad:
        """What this controller's requests came to since the last call."""
        requests, self._requests, wakes, self._wakes = self._requests, [], self._wakes, 0
        return RoleLoad.of(requests, wakes)

    def _note(self, engine, prompt_tokens: int, answer) -> None:
        self._requests.append((answer.sent, answer.end, len(answer.tokens), prompt_tokens, answer.cached_tokens))
        self.timeline.request(engine.role, engine.rank, answer.sent, answer.end)

    # ---- memory

    async def wake(self) -> None:
        """Weights and KV cache back on the device (collective)."""
        if self.awake:
            return
        self._wakes += 1
        await self.wake_weights()
        await self.wake_kv_cache()

    async def wake_weights(self) -> None:
        """Room for the weights alone (collective): what a weight push needs while the actor still holds its own memory."""
        await self._each(lambda engine: engine.wake_weights())

    async def wake_kv_cache(self) -> None:
        """The KV cache back, requests may come (collective). An engine that died asleep is started again from now on."""
        await self._each(lambda engine: engine.wake_kv_cache())
        self._mark(awake=True)
        self._held = False
        if self.own:
            self._watch.begin()

    async def sleep(self) -> None:
        """All requests have ended on every controller, then weights and KV cache leave the device (collective)."""
        if not self.awake:
            return
        await self.world.barrier()
        if self.own:
            await self._watch.pause()
        self._mark(awake=False)
        await self._each(lambda engine: engine.sleep())

    async def abort(self) -> None:
        """Abort every answer that the engine of this rank is writing, whoever asked. Not collective."""
        if self.own and self.awake:
            await self._watch.guard(lambda engine: engine.abort())

    async def load_weights(self, named_weights, version: int) -> None:
        """Push the actor's weights into this rank's engine (collective: the iterator gathers over the model-parallel group)."""
        with self.timeline.span("sync"):
            if self.own:
                await self._watch.guard(lambda engine: engine.load_weights(named_weights, version))
                self._watch.fresh = False  # pushed, or down
            await self.world.run(_drain, named_weights)  # other ranks of the group still need this rank's shards
            await self.world.barrier()

    def _mark(self, awake: bool) -> None:
        self.awake = awake
        for engine in self.engines:
            if engine.rank != self.world.rank:  # its own engine keeps the flag itself
                engine.awake = awake

    async def _each(self, call) -> None:
        """Every rank awaits `call` of its own engine, if that runs; then all tell each other who is up (collective)."""
        with self.timeline.span("switch"):
            if self.own:
                await self._watch.guard(call)
            self.hear(await self.world.gather(self.news()))


def _drain(iterator) -> None:
    for _ in iterator:
        pass
