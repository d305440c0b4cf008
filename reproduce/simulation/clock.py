"""A virtual clock: an event loop that skips ahead when nothing can run. Minutes take milliseconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable

LONGEST_RUN_S = 20_000.0  # virtual seconds; controllers that meet forever are also a deadlock


class VirtualClock(asyncio.SelectorEventLoop):
    """The event loop. Raises RuntimeError at a deadlock, and AssertionError in an endless run.

    look: called before each jump.
    """

    def __init__(self, look: Callable[[], None] = lambda: None):
        self.now = 0.0
        self.look = look
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self.now


class _Jump(selectors.SelectSelector):
    """A selector that never polls. No other thread wakes this loop, and a poll costs a system call."""

    def __init__(self, loop: VirtualClock):
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list:
        if timeout is None:
            raise RuntimeError("deadlock: every task waits for another")
        if timeout > 0:
            self._loop.look()
            self._loop.now += timeout
            assert self._loop.now < LONGEST_RUN_S, "the run never ends"
        return []


def end_all(clock: VirtualClock) -> None:
    """Cancel the tasks that are still running: engine watchers, and those left by a failed run."""
    left = asyncio.all_tasks(clock)
    for task in left:
        task.cancel()
    if left:
        clock.run_until_complete(asyncio.wait(left))
    clock.close()
