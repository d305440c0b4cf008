"""A rank's process for all users' code, from the rank's side; extras/users.py runs in it.

The code can only harm that process, which starts with the first file that is loaded. It and what it starts
end with the rank, even by kill -9.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from itertools import count
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from runtime.errors import UserError
from runtime.shutdown import starting_deaf
from sample import Image

PROGRAM = "import sys; sys.path[:] = {}; from extras import users; users.main({})"
# messages that end a call -> the error that it raises
END_OF_CALL = {"done": None, "failed": UserError, "lost": ConnectionError}


class Asked(NamedTuple):
    """A call that isn't answered yet."""

    answer: Future
    what: str  # for errors
    limit_s: float | None


class Worker:
    """The process. Threads send and listen, so that no event loop waits for it."""

    def __init__(self):
        self.images = WeakValueDictionary[str, Image]()  # digest -> image of a sample
        self._numbers = count()
        self._asked: dict[int, Asked] = {}
        self._end = ""  # which call ended the process, and how
        self._connection, theirs = multiprocessing.Pipe()
        descriptor = theirs.fileno()
        command = [sys.executable, "-u", "-c", PROGRAM.format(sys.path, descriptor)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": own_device()}
        # in its own session signals to the rank's group don't reach it, and it may read the terminal
        how = dict(env=environment, pass_fds=[descriptor], start_new_session=True)
        with starting_deaf(), theirs:
            self._process = subprocess.Popen(command, **how)
        self._sender = ThreadPoolExecutor(1)  # sending waits while code there holds the GIL
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, verb: str, *given: Any, what: str, limit_s: float | None = None) -> Future:
        """Send a call of class Users. Its answer may be a UserError or a ConnectionError."""
        number = next(self._numbers)
        asked = self._asked[number] = Asked(Future(), what, limit_s)
        self._sender.submit(self._send, number, verb, pickle.dumps(given))
        if self._end:
            self._finish(number, UserError, self._end)
        return asked.answer

    def _send(self, number: int, what: str, value: bytes) -> None:
        with suppress(OSError):  # the process has ended: `_listen` reports that
            self._connection.send((number, what, value))

    def _send_image(self, digest: str) -> None:
        try:
            content = self.images[digest].read()
        # KeyError: the sample isn't needed any more
        except (KeyError, OSError, UserError) as error:
            content = str(error)
        self._send(0, "image", pickle.dumps((digest, content)))

    def _listen(self) -> None:
        due: dict[int, float] = {}  # calls that have begun -> when their time is over
        with suppress(EOFError, OSError):
            while True:
                number, end = min(due.items(), key=itemgetter(1), default=(None, None))
                left_s = None if end is None else max(0.0, end - time.monotonic())
                if self._connection.poll(left_s):
                    self._take(due, *json.loads(self._connection.recv_bytes()))
                    continue
                _, what, limit_s = self._asked[number]
                late = f"{what} returned nothing for {limit_s:g} s (0.9 --timeout-s)"
                self._finish(number, UserError, late)
                del due[number]
        status = self._process.wait()
        how = signal.Signals(status - 128).name if status > 128 else f"status {status}"
        # calls that run are the first suspects
        calls = [self._asked[number].what for number in (*due, *self._asked)]
        what = calls[0] if calls else "users' code"
        self._end = f"{what} ended its process: {how}"
        for number in [*self._asked]:
            self._finish(number, UserError, self._end)

    def _take(self, due: dict[int, float], number: int, what: str, value: Any) -> None:
        """Take a message: see extras/users.py."""
        if what == "began" and (limit_s := self._asked[number].limit_s):
            due[number] = time.monotonic() + limit_s
        elif what == "image":
            self._sender.submit(self._send_image, value)
        elif what in END_OF_CALL:
            due.pop(number, None)
            self._finish(number, END_OF_CALL[what], value)

    def _finish(self, number: int, error: type[Exception] | None, value: Any) -> None:
        asked = self._asked.pop(number, None)  # None: it was late
        with suppress(InvalidStateError):  # nobody waits for it any more
            if asked and error:
                asked.answer.set_exception(error(value))
            elif asked:
                asked.answer.set_result(value)


@cache
def worker() -> Worker:
    """Return this rank's process, and start it if there is none."""
    return Worker()


def own_device() -> str:
    """Return CUDA_VISIBLE_DEVICES for this rank's GPU only, which is also what "cuda" means in the rank."""
    rank = os.environ.get("LOCAL_RANK", "0")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return rank if visible is None else "".join(visible.split(",")[int(rank) :][:1])


class UserCode(NamedTuple):
    """A user's function or class, which is in the process."""

    title: str
    names: Sequence[str]  # all names in the function or class
    limit_s: float
    process: Worker

    async def call(self, verb: str, *given: Any, what: str, images: Sequence[Image] = ()) -> Any:
        """Make a call of class Users. Not collective.

        what: the call, for errors. images: those that it may read. Raises UserError if it fails, is late, or
        ends the process, and ConnectionError if the error loses only an episode.
        """
        self.process.images.update({image.digest.hex(): image for image in images})
        asked = self.process.ask(verb, self.title, *given, what=what, limit_s=self.limit_s)
        return await asyncio.wrap_future(asked)


def load(title: str, spec: str, name: str, kind: str, specs: str, timeout_s: float) -> UserCode:
    """Run a file; find its `name`, or `other` for `my.py:other`. Raises UserError if it has none.

    title: the setting. kind: a key of users.KINDS. specs: valid forms of spec. Blocks; not collective.
    """
    named = f"{spec}:{name}" if spec.endswith(".py") else spec
    path, _, name = named.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise UserError(f"{title}: no such file; use {specs}")
    file = str(Path(path).resolve())
    limit_s = 0.9 * timeout_s  # others wait for the whole timeout
    names = worker().ask("load", title, file, name, kind, what=title, limit_s=limit_s).result()
    return UserCode(title, names, limit_s, worker())
