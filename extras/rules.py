"""User rules: rewards and costs from functions in users' files, --rule FILE.py and --cost-rule FILE.py.

Their code may start processes and threads, set alarms, or never return; it can't harm the rank.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import math
import os
import signal as signals
import struct
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field, replace
from numbers import Real
from types import FrameType

import numpy

from genrm import Judgement
from rewards import TextSample
from runtime import shutdown
from runtime.errors import UserError
from runtime.user_code import UserCode, load

LATE = signals.SIGRTMIN  # signals that a rule's time is up; SIGALRM is left to the user
# the current rule's deadline (time.monotonic), and the error if it misses it
DUE: ContextVar[tuple[float, UserError | None]] = ContextVar("due", default=(math.inf, None))


@dataclass(frozen=True)
class AlarmInRules:
    """A SIGALRM handler that calls the user's own while a rule runs, and otherwise does nothing."""

    handler: Callable | signals.Handlers

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if DUE.get()[1] and callable(self.handler):
            self.handler(number, frame)


def keep_alarm_in_rules() -> None:
    """Make sure that an alarm set by a rule never fires in the rank's own code."""
    handler = signals.getsignal(signals.SIGALRM)
    if not isinstance(handler, AlarmInRules):
        signals.signal(signals.SIGALRM, AlarmInRules(handler))


def leave_overdue(*_: object) -> None:
    """End the run if the current rule is late. The rule could swallow an exception, so don't raise one."""
    due_s, late = DUE.get()
    if time.monotonic() >= due_s:
        shutdown.exit_on_error(2, f"error: {late}")


class Alarm:
    """A POSIX timer independent of the one that `signal.alarm` and `signal.setitimer` share."""

    def __init__(self):
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._timer = ctypes.c_void_p()
        event = struct.pack("qii48x", 0, LATE, 0)  # SIGEV_SIGNAL
        self._call("timer_create", time.CLOCK_MONOTONIC, event, ctypes.byref(self._timer))

    def set(self, seconds: float) -> None:
        """Restart the timer. When it expires, this process receives LATE."""
        left = divmod(round(seconds * 1e9), 10**9)
        times = struct.pack("4q", 0, 0, *left)  # the zeros: don't repeat
        self._call("timer_settime", self._timer, 0, times, None)

    def _call(self, name: str, *arguments) -> None:
        if self._libc[name](*arguments) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@dataclass(frozen=True)
class UserRule:
    """A function in a user's file, `reward(sample)`, which may be `async`."""

    function: Callable[[TextSample], float | Awaitable[float | None] | None]
    code: UserCode
    limit_s: float
    alarm: Alarm = field(default_factory=Alarm)  # for the most recent answer

    async def judge(self, sample: TextSample) -> Judgement | None:
        """Call the function on a copy of the sample. Returns None if the function does.

        Raises UserError if it fails, is late, or returns anything else but a finite number.
        """
        late = UserError(
            f"{self.code.title} returned nothing for {self.limit_s:g} s (0.9 --timeout-s) "
            f"on the prompt {sample.question[:60]!r}"
        )
        DUE.set((time.monotonic() + self.limit_s, late))
        # a rule that awaits is cancelled in time; one that blocks the event loop gets a signal
        signals.signal(LATE, leave_overdue)
        self.alarm.set(self.limit_s)
        try:
            async with asyncio.timeout(self.limit_s):
                with self.code:
                    value = self.function(copied(sample))
                    if inspect.isawaitable(value):
                        value = await value
                    number = float(value) if isinstance(value, Real | numpy.bool_) else math.nan
        except TimeoutError:
            raise late from None
        finally:
            keep_alarm_in_rules()
        if value is None:
            return None
        if not math.isfinite(number):
            raise UserError(
                f"{self.code.title} returned {' '.join(repr(value).split())[:60]}: "
                "a finite number or None is needed"
            )
        return Judgement(f"{self.code.title}: {number}", number)


def copied(sample: TextSample) -> TextSample:
    """Copy all that a rule could modify. Long lists of numbers get a fast, shallow copy."""
    numbers = ("prompt", "response", "logprobs", "versions", "earned")
    copies = {name: list(vars(sample)[name]) for name in numbers}
    for name in ("turns", "row", "replies", "noted"):
        copies[name] = deepcopy(vars(sample)[name])
    return replace(sample, **copies)


def load_file(title: str, spec: str, name: str, timeout_s: float) -> UserRule:
    """Run a file; return its function `my.py:other`, or `name`. Raises UserError if there is none."""
    specs = "FILE.py, FILE.py:name, right, number, length:40 or forbidden:7"
    try:
        function, code = load(title, spec, name, "function {}(sample)", callable, specs)
    finally:
        keep_alarm_in_rules()
    return UserRule(function, code, 0.9 * timeout_s)  # other ranks wait for the whole timeout
