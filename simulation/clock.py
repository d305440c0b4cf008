"""A virtual clock: an event loop whose time jumps when nothing can run, so that minutes take milliseconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable

LONGEST_RUN_S = 20_000.0  # of virtual time: controllers that meet for ever are a deadlock, too


class VirtualClock(asyncio.SelectorEventLoop):
    """An event loop whose time stands still while anything can run, and jumps when nothing can.

    A deadlock is an error at once, a run of more than longest_s in the end. look: called before each jump.
    """

    def __init__(self, longest_s: float = LONGEST_RUN_S, look: Callable[[], None] = lambda: None):
        self.now, self.longest_s, self.look = 0.0, longest_s, look
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self.now


class _Jump(selectors.SelectSelector):
    """Polls nothing, which would cost a system call an event: there is no other thread to hear of."""

    def __init__(self, loop: VirtualClock):
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list:
        if timeout is None:
            raise RuntimeError("deadlock: every task waits for another")
        if timeout > 0:
            self._loop.look()
            self._loop.now += timeout
            assert self._loop.now < self._loop.longest_s, "the run never ends"
        return []


def end_all(clock: VirtualClock) -> None:
    """Cancel what still runs: engines are watched to the end; and what is left of a run that failed."""
    left = asyncio.all_tasks(clock)
    for task in left:
        task.cancel()
    if left:
        clock.run_until_complete(asyncio.wait(left))
    clock.close()
