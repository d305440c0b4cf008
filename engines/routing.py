"""Routing: choose the next request's engine by how many tokens each one has outstanding."""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engines.engine import Answer, Engine, Request
from runtime.world import World
from scheduling.measured import total


class Load:
    """The engines' outstanding tokens: this controller's as of now, the others' as of the last meeting."""

    def __init__(self, world: World):
        self.outstanding: Counter[int] = Counter()  # engine's rank -> tokens this controller awaits
        self.waiting: Counter[int] = Counter()  # model -> requests here that wait for an engine
        # name of a call's first request -> this controller's open call, oldest first
        self.calls: dict[str, tuple[Engine, list[Request]]] = {}
        self._assigned: dict[int, deque[Engine]] = {}  # model -> engines for those, in order
        self._world = world
        self.forget()

    def tokens(self, rank: int) -> int:
        """Return how many tokens the engine of `rank` has outstanding."""
        of_others = self._all[rank] - self._own[rank]
        return self.outstanding[rank] + of_others

    @contextmanager
    def awaiting(
        self, engine: Engine, requests: list[Request]
    ) -> Iterator[Callable[[Answer], None]]:
        """Count these requests' tokens as outstanding until the block passes each part to `note`."""
        left = [len(request.prompt) + request.limit for request in requests]
        self.outstanding[engine.rank] += sum(left)
        self.calls[requests[0].name] = (engine, requests)

        def note(part: Answer) -> None:
            done = left[part.index] if part.finish else len(part.tokens)
            left[part.index] -= done
            self.outstanding[engine.rank] -= done
            self._parts[engine.rank] += 1

        try:
            yield note
        finally:
            self.outstanding[engine.rank] -= sum(left)
            del self.calls[requests[0].name]

    def choose(self, engines: list[Engine]) -> Engine | None:
        """Return the engine that `assign_waiting` chose, else the less loaded of two; None without engines.

        The two are the next in turn and a random other one: until the next meeting, all controllers would
        choose the same least loaded engine. With four engines, two controllers begin with 0 and 2.
        """
        if not engines:
            return None
        count = len(engines)
        model = engines[0].model
        if assigned := self._assigned.get(model):
            engine = assigned.popleft()
            if engine in engines:
                return engine
        turn = self._world.index * count // self._world.size + self._asked[model]
        self._asked[model] += 1
        other = turn + self._random.randrange(1, max(2, count))
        pair = (engines[turn % count], engines[other % count])
        return min(pair, key=lambda engine: self.tokens(engine.rank))

    def report(self) -> tuple[Counter[int], Counter[int]]:
        """Return this controller's outstanding tokens, and the parts received since the last report."""
        parts = self._parts
        self._parts = Counter()
        self._reported = +self.outstanding
        return self._reported, parts

    def update(self, of_all: Counter[int]) -> None:
        """Note all controllers' outstanding tokens at a meeting, which include this one's last report."""
        self._all = of_all
        self._own = self._reported

    def forget(self) -> None:
        """Reset: a resumed run can't know what routed the previous step's requests."""
        self._parts = Counter()  # engine's rank -> parts of answers
        self._reported = Counter()
        self.update(Counter())
        self._asked = Counter()  # model -> requests so far
        self._random = random.Random(self._world.rank)

    async def assign_waiting(
        self, engines: list[Engine], coming: Counter[int], world: World
    ) -> None:
        """Assign waiting requests in turns, to the least loaded engine first (collective: ranks that serve).

        coming: by model, requests about to be aborted, which will wait soon. Example: ranks 0 and 1 have
        3 and 2 requests waiting for engines A and B. Rank 0 uses A, B, A; rank 1 continues with B, A.
        """
        own = self.waiting + coming  # a copy: ranks in one process would share later changes
        waiting, outstanding = await world.reduce([own, +self.outstanding], total)
        self._reported = +self.outstanding
        self.update(outstanding)
        self._assigned = {}
        if not +waiting:
            return
        waiting_by_rank = await world.gather(own)
        for model in +waiting:
            serving = [engine for engine in engines if engine.model == model]
            serving.sort(key=lambda engine: (outstanding[engine.rank], engine.rank))
            first = sum(there[model] for there in waiting_by_rank[: world.index])
            turns = range(first, first + waiting_by_rank[world.index][model])
            self._assigned[model] = deque(serving[turn % len(serving)] for turn in turns if serving)


class Silence:
    """Measures, from meeting to meeting, how long nothing has come although something is awaited."""

    def __init__(self):
        self._since: float | None = None  # the first meeting of the silence

    def is_too_long(self, most_s: float, awaited: bool, came: bool) -> bool:
        """Note a meeting's result; return True if the silence has lasted longer than `most_s`."""
        now = asyncio.get_running_loop().time()
        if came or not awaited:
            self._since = None
        elif self._since is None:
            self._since = now
        return self._since is not None and now - self._since > most_s
