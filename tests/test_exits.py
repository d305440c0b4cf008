"""Signals: what a rank does with the first one, with torchrun's echo of it, and with a second one."""

import asyncio
import os
import signal

import pytest

from runtime import shutdown


async def signalled(stop, times, seconds, cleaned):
    """A rank's program of so many seconds, with a cleanup, that gets signals after `times`: {seconds: number}."""

    async def work():
        try:
            await asyncio.sleep(seconds)
            return "done"
        finally:
            await asyncio.sleep(0.1)
            cleaned.append(True)

    for after, number in times.items():
        asyncio.get_running_loop().call_later(after, os.kill, os.getpid(), number)
    return await shutdown.until_told(work(), stop)


@pytest.mark.parametrize(
    "gently,times,ends",
    [
        (True, {0.05: signal.SIGTERM}, "done"),  # asked to stop, and does so by itself
        (True, {0.05: signal.SIGINT, 0.1: signal.SIGINT}, "done"),  # torchrun passes it on again
        (True, {0.05: signal.SIGINT, 0.3: signal.SIGINT}, "cancelled"),  # somebody means it
        (True, {0.05: shutdown.LEAVE}, "cancelled"),
        (False, {0.05: signal.SIGTERM}, "cancelled"),
        (False, {0.05: signal.SIGINT, 0.1: signal.SIGTERM}, "cancelled"),  # the echo doesn't cut the cleanup short
    ],
)
def test_signals(monkeypatch, gently, times, ends):
    """Whatever comes, the cleanup runs to its end; the first signal is remembered."""
    monkeypatch.setattr(shutdown, "ECHO_S", 0.15)
    stop, cleaned = shutdown.Stop(gently=gently), []
    if ends == "done":
        assert asyncio.run(signalled(stop, times, 0.5, cleaned)) == "done"
    else:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(signalled(stop, times, 0.5, cleaned))
    assert cleaned == [True] and stop.asked == next(iter(times.values()))
