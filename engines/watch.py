"""Watch: an engine that dies or hangs is ended, started again on its rank, and takes part again.

Every rank watches its own engines, while they are awake; one that dies asleep is found when it is next woken. What it owed breaks
and is asked of others. The other controllers learn of it in their meetings (`News`), and only then does a server start in its
place: nobody asks it for answers by mistake. A genrm engine is then welcome at once, for its weights come from disk. A rollout
engine sits out until the next hand-over pushes the actor's weights to all, or, if no other is up, to it (placement.revive).
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from engines.server import EngineLost

MOST_FAILURES = 3  # of one engine, without a step between at whose end it ran


class News(NamedTuple):
    """What one controller tells the others about a role, in each of their meetings."""

    awaited: dict[int, int]  # tokens that it awaits from the engine of each rank
    state: str = ""  # of its own engine: up | fresh (it runs with the weights of the model directory) | down; empty if it has none
    trouble: str = ""  # how its engine failed last
    error: str = ""  # what stops the run


class Watch:
    """One controller's eye on its own engine of a role, which stays the same through all its servers."""

    def __init__(self, engine, deadline_s: float):
        """deadline_s: for a server to come up."""
        self.engine, self._deadline_s = engine, deadline_s
        self.runs, self.fresh = True, False
        self.failures = 0  # in a row
        self.restarts = 0  # in this step
        self.trouble = self.error = ""
        self._task: asyncio.Task | None = None
        self._everyone_knows, self._leaving = asyncio.Event(), False

    @property
    def state(self) -> str:
        """As in News."""
        return "down" if not self.runs else "fresh" if self.fresh else "up"

    def begin(self) -> None:
        """The engine is awake from now on; if it is down, it is started again once everyone knows."""
        assert self._task is None, f"the {self.engine.name} is watched already"
        self._leaving = False
        self._everyone_knows.clear()
        self._task = asyncio.create_task(self._run())

    async def pause(self) -> None:
        """The engine is to sleep. Returns when nothing is being started: a server that comes up takes memory that others will need."""
        if self._task is None:
            return
        task, self._task, self._leaving = self._task, None, True
        if self.runs or not self._everyone_knows.is_set():  # it waits, and starts nothing
            task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    def close(self) -> None:
        """Watch no more: the run is over."""
        if self._task is not None:
            self._task.cancel()

    def heard(self, state: str) -> None:
        """Every controller has heard that the engine is in `state`."""
        if state == "down":
            self._everyone_knows.set()
        if self._task is not None and self._task.done():
            self._task.result()  # an error of our own

    def end_step(self) -> int:
        """A step is finished: an engine that runs is forgiven its failures. Returns how many servers were started again in it."""
        restarts, self.restarts, self.failures = self.restarts, 0, 0 if self.runs else self.failures
        return restarts

    async def guard(self, call) -> None:
        """Await `call(engine)` if the engine runs. If it doesn't answer, it is down from then on."""
        if self.runs:
            try:
                await call(self.engine)
            except EngineLost as lost:
                await self._lose(str(lost))

    async def _run(self) -> None:
        while not self._leaving and not self.error:
            if self.runs:
                await self._lose(await self.engine.until_down())
            await self._everyone_knows.wait()
            await self._start_again()

    async def _start_again(self) -> None:
        try:
            await self.engine.restart(self._deadline_s)
        except (EngineLost, ValueError) as error:
            await self._fail(f"didn't start again: {error}")
            return
        self.runs, self.fresh = True, self.engine.role == "rollout"
        self.restarts += 1
        self._everyone_knows.clear()

    async def _lose(self, trouble: str) -> None:
        if self.runs:  # else it was found by two at once
            await self._fail(trouble)

    async def _fail(self, trouble: str) -> None:
        """The engine is down: what is left of it is ended."""
        self.runs = self.engine.up = False
        self.failures, self.trouble = self.failures + 1, trouble
        if self.failures == MOST_FAILURES:
            self.error = f"the {self.engine.name} failed {self.failures} times in a row: it {trouble}{self.engine.log_tail()}"
        await self.engine.kill()
