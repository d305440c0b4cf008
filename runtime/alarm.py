"""A timer of the process beside the one that `signal.alarm` and `signal.setitimer` share."""

import ctypes
import os
import struct
import time

SIGEV_SIGNAL = 0


class Alarm:
    """Sends a signal to this process when its time is over (POSIX timer_create)."""

    def __init__(self, number: int):
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._timer = ctypes.c_void_p()
        event = struct.pack("qii48x", 0, number, SIGEV_SIGNAL)
        self._call("timer_create", time.CLOCK_MONOTONIC, event, ctypes.byref(self._timer))

    def set(self, seconds: float) -> None:
        """Start the time again, from now."""
        nanoseconds = round(seconds * 1e9)
        times = struct.pack("4q", 0, 0, *divmod(nanoseconds, 10**9))  # the first two: once only
        self._call("timer_settime", self._timer, 0, times, None)

    def _call(self, name: str, *arguments) -> None:
        if self._libc[name](*arguments) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
