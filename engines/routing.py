"""Routing: which engine of a role is asked next: how much each has to write, and which are up."""

import asyncio
import math
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable

from config import UserError
from engines.engine import Engine, EngineLost
from runtime.world import World

Verb = Callable[[Engine], Awaitable[None]]


class Load:
    """The tokens that engines still have to write: for this controller now, for others when all last met."""

    def __init__(self, world: World):
        self.outstanding: Counter[int] = Counter()  # engine's rank -> tokens this controller awaits
        self.waiting: Counter[int] = Counter()  # model -> requests here that no engine can take
        self._dealt: dict[int, deque[Engine]] = {}  # model -> the engines that those ask next
        self._world = world
        self.forget()

    def tokens(self, rank: int) -> int:
        """Return the tokens that the engine of `rank` still has to write."""
        of_others = self._all[rank] - self._own[rank]
        return self.outstanding[rank] + of_others

    def choose(self, engines: list[Engine]) -> Engine | None:
        """Return the less loaded of two engines, whose turn it is and another; None if there is none.

        Until they meet, controllers don't know what others ask. By turns, engines of equal load get as much
        of all that ask as often. Example: of controllers 0 and 1, who have four engines, 0 asks engines
        0, 2, then 1, 3; 1 asks 1, 3, then 2, 0.
        """
        if not engines:
            return None
        # the least loaded of all would be the same for all controllers until they meet
        count = len(engines)
        size = self._world.size
        asked = self._asked[engines[0].model]
        self._asked[engines[0].model] += 1
        rounds = asked // (count // math.gcd(count, size))  # each begins one engine further
        turn = self._world.place + asked * size + rounds
        other = turn + self._random.randrange(1, max(2, count))
        pair = (engines[turn % count], engines[other % count])
        return min(pair, key=lambda engine: self.tokens(engine.rank))

    def update(self, of_all: Counter[int], of_own: Counter[int]) -> None:
        """Note what all controllers awaited when they met, and this one's part of it."""
        self._all = of_all
        self._own = of_own

    def forget(self) -> None:
        """Start anew: a resumed run can't know what steered the requests of the step before."""
        self.update(Counter(), Counter())
        self._asked = Counter()  # model -> requests so far
        self._random = random.Random(self._world.rank)

    async def deal(self, engines: list[Engine], world: World) -> None:
        """Deal the waiting requests to `engines` in turns, the least loaded first (collective).

        By themselves all would choose alike until they meet. Example: ranks 0 and 1 have 3 and 2
        requests waiting for engines A and B. Rank 0 asks A, B, A; rank 1 continues with B, A.
        """
        queues = (self.waiting, +self.outstanding)
        waiting, outstanding = await world.reduce(queues, sum_counters)
        self.update(outstanding, +self.outstanding)
        self._dealt = {}
        if not +waiting:
            return
        waiting_by_rank = await world.gather(self.waiting)
        for model in +waiting:
            serving = [engine for engine in engines if engine.model == model]
            serving.sort(key=lambda engine: (outstanding[engine.rank], engine.rank))
            first = sum(there[model] for there in waiting_by_rank[: world.place])
            turns = range(first, first + waiting_by_rank[world.place][model])
            self._dealt[model] = deque(serving[turn % len(serving)] for turn in turns if serving)

    def next_dealt(self, model: int) -> Engine | None:
        dealt = self._dealt.get(model)
        return dealt.popleft() if dealt else None


def sum_counters(rows: list[tuple[Counter, ...]]) -> tuple[Counter, ...]:
    """Return the sum of each column. `update` takes a fraction of the time of `+`."""
    sums = tuple(map(Counter, rows[0]))
    for row in rows[1:]:
        for total, counter in zip(sums, row, strict=True):
            total.update(counter)
    return sums


class Health:
    """The engines that may be asked, as one controller knows it; it kills this rank's own once it is down."""

    def __init__(self, own: Engine | None):
        self._own = own
        self._watch: asyncio.Task | None = None  # while its own is awake: ends when that is down
        self.own_loss = ""  # how its own was lost, whether the others know it or not
        self.lost: dict[int, str] = {}  # rank -> how its engine was lost, as told in a meeting
        self.stalled: frozenset[int] = frozenset()  # ranks whose engine stalled in this step
        self.progress: Counter[int] = Counter()  # rank -> grows when its engine writes for anybody
        self.new_parts: Counter[int] = Counter()  # rank -> parts that came here since a meeting
        # model -> the engines to ask, and what they were found by
        self._askable: dict[int, tuple[tuple, list[Engine]]] = {}

    def is_up(self, engine: Engine) -> bool:
        return engine.rank not in self.lost and not (self.own_loss and engine is self._own)

    def askable(self, model: int, engines: list[Engine], awake: tuple[int, ...]) -> list[Engine]:
        """Return the engines of `model` that are awake and up; stalled ones only if all are."""
        # a list is kept while nothing is replaced that it follows from: of thousands of engines,
        # to look at each would take longer than all else that a request costs
        found_by = (engines, awake, self.lost, self.own_loss, self.stalled)
        known_by, found = self._askable.get(model, ((), []))
        if known_by != found_by:
            chosen = set(awake)
            serving = [e for e in engines if e.model == model and e.rank in chosen]
            up = [engine for engine in serving if self.is_up(engine)]
            found = [engine for engine in up if engine.rank not in self.stalled] or up
            self._askable[model] = (found_by, found)
        return found

    async def call(self, verb: Verb) -> None:
        """Await `verb` of this rank's engine if it is up. One that doesn't answer is lost."""
        if self.own_loss:
            return
        try:
            await verb(self._own)
        except EngineLost as error:
            await self._lose(str(error))

    async def _lose(self, how: str) -> None:
        if not self.own_loss:  # else two found it at once
            self.own_loss = how
            await self._own.kill()
            self.own_loss += f"; {self._own.log_end()}"

    def watch(self) -> None:
        """Watch this rank's engine, which is awake, until it is down or `unwatch`."""
        self._watch = asyncio.create_task(self._lose_when_down())

    async def _lose_when_down(self) -> None:
        await self._lose(await self._own.until_down())

    async def unwatch(self) -> None:
        self.close()
        await asyncio.wait([self._watch])
        self._watch = None

    def close(self) -> None:
        if self._watch:
            self._watch.cancel()

    def loss_to_tell(self) -> dict[int, str]:
        """Return the rank of this rank's engine and how it was lost, if it was."""
        if self._watch and self._watch.done():
            self._watch.result()  # raises an error of our own
        return {self._own.rank: self.own_loss} if self.own_loss else {}

    async def restart(self, deadline_s: float) -> None:
        """Start this rank's engine again, asleep, if it was lost. UserError if it doesn't start."""
        own = self._own
        if own and not self.own_loss and (status := own.exit_status()):  # asleep, it wasn't watched
            self.own_loss = f"died ({status})"
            await own.kill()
        if self.own_loss:
            try:
                await own.restart(deadline_s)
            except (EngineLost, UserError) as error:
                lost = f"the {own.name} {self.own_loss}"
                raise UserError(f"{lost}; it didn't start again: {error}") from None

    def reset(self) -> int:
        """Count all engines as up; return how many of this rank's were lost."""
        restarted = 1 if self.own_loss else 0
        self.own_loss = ""
        self.lost = {}
        self.stalled = frozenset()
        return restarted
