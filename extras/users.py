"""The process in which a rank's users' code runs: rules, and the objects of an environment.

Rules, files that are loaded and `async` methods run in the main thread, where alarms work; an environment's
other methods run in threads, where they may block. What crosses is (number of the call, what, value):

    to this process, pickled:   load, rule, begin, step, score, close: a call of Users, its arguments
                                image: its digest, and its bytes, or why they can't be read
    to the rank, as JSON:       began: the call runs, and so does its time
                                image: the digest of one that a rule reads
                                done: the result as plain values
                                failed, lost: the error's line; the run ends, or the episode is lost

Between this process and the rank is a watcher, which outlives both by a moment: it ends all that is left.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import math
import os
import pickle
import reprlib
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection
from numbers import Real
from os import _exit, getpid  # the user's code may replace those of os
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NamedTuple, NoReturn

import psutil

from runtime.errors import UserError
from runtime.parent import adopt_orphans, die_with_parent
from runtime.shutdown import SIGNALS
from sample import REWARD_LIMIT, Image, Key, TextSample

THREADS = 10_000  # for an environment's methods; the rank limits how many run at once
KINDS = {"function {}(sample)": callable, "class {}": inspect.isclass}  # what a file has to have
# part of the error if a thread calls `signal`, and what follows it
IN_THREAD = {"only works in main thread": ": make `step` async, then it runs there"}


@dataclass(frozen=True)
class UserCode(AbstractContextManager):
    """A block that runs a user's code: an error in it becomes one line with its title, file and line.

    Raises UserError, or ConnectionError if the error isn't a mistake and loses only an episode.
    """

    title: str  # as the user named it: --rule my.py:score
    file: str
    found: Any = None  # the function or class
    is_mistake: Callable[[BaseException], bool] = lambda error: True
    hint: str = ""  # follows a mistake's line
    pid: int = field(default_factory=getpid)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None):
        if getpid() != self.pid:
            # this is a child that the code forked: it must not continue as this process
            status = error.code if isinstance(error, SystemExit) else error
            _exit(status if isinstance(status, int) else int(status is not None))
        if error is None or isinstance(error, UserError):
            return
        error = max(leaves(error), key=self.is_mistake)  # a group's first mistake, if it has one
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == self.file]
        where = f" ({self.file}:{lines[-1]})" if lines else ""
        # unlike str(error), this can't fail: the user's class may define its text
        text = " ".join(str(traceback.TracebackException.from_exception(error)).split())
        if not self.is_mistake(error):
            raise ConnectionError(f"{type(error).__name__}{where}: {text}") from None
        hint = next((IN_THREAD[part] for part in IN_THREAD if part in text), self.hint)
        raise UserError(f"{self.title}{where}: {type(error).__name__}: {text}{hint}") from None


def leaves(error: BaseException) -> list[BaseException]:
    """Return the errors in a group of errors, or the error."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return list(chain.from_iterable(map(leaves, error.exceptions)))


def module_of(path: Path) -> ModuleType:
    """Import a file under its own name if that is free, as processes that its code starts will do."""
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    found = importlib.util.find_spec(path.stem) if path.stem.isidentifier() else None
    if found and found.origin == str(path):
        return importlib.import_module(path.stem)
    found = importlib.util.spec_from_file_location(f"user_{path.stem}", path)
    module = sys.modules[found.name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


class Call(NamedTuple):
    """A call to make. read: turns its result into a plain value, or raises UserError."""

    code: UserCode
    function: Callable[[], Any]
    read: Callable[[Any], Any] = lambda result: None
    in_thread: bool = False

    def make(self) -> Any:
        with self.code:
            return self.function()


class Users:
    """The user's functions, classes and objects. Each method returns a call of one of them."""

    def __init__(self, read_image: Callable[[bytes], bytes]):
        self._read_image = read_image  # its digest -> its bytes
        self.codes: dict[str, UserCode] = {}  # title -> code
        self._objects: dict[Key, Any] = {}  # episodes

    def load(self, title: str, file: str, name: str, kind: str) -> Call:
        """Run a file. The result is all names of its function or class.

        Raises UserError if there is none, or if another folder's file has the name of one beside this file.
        """
        code = UserCode(title, file)
        folder = os.path.dirname(file)
        others = {os.path.dirname(code.file) for code in self.codes.values()} - {folder}
        for beside in Path(folder).glob("*.py"):  # `import` would find another folder's
            spec = sys.modules[beside.stem].__spec__ if beside.stem in sys.modules else None
            origin = spec and spec.origin
            if origin and str(beside) != file and os.path.dirname(origin) in others:
                raise UserError(f"{title}: {origin} has been imported: rename {beside}")

        def read(module: ModuleType) -> list[str]:
            found = vars(module).get(name)
            if not KINDS[kind](found):
                raise UserError(f"{title}: {file} has no {kind.format(name)}")
            self.codes[title] = replace(code, found=found)
            return dir(found)

        return Call(code, partial(module_of, Path(file)), read)

    def rule(self, title: str, sample: TextSample) -> Call:
        code = self.codes[title]
        read = self._read_image
        sample.media = tuple(Image(*image, partial(read, image[0])) for image in sample.media)
        return Call(code, partial(code.found, sample), partial(read_number, title))

    def begin(self, title: str, sample: TextSample, seed: int) -> Call:
        """Make an episode's object. If the first one fails, that is a mistake, whatever the error."""
        from extras.environment import RULE, is_mistake

        code = self.codes[title]  # later objects' errors may lose only an episode
        self.codes[title] = replace(code, is_mistake=is_mistake, hint=RULE)
        make = partial(code.found, sample, seed=seed)
        keep = partial(self._objects.__setitem__, sample.key)
        return Call(code, make, keep, in_thread=True)

    def step(self, title: str, key: Key, text: str) -> Call:
        with self.codes[title]:  # `step` may be a property, which is also the user's code
            step = self._objects[key].step
        return self._call(title, step, partial(read_reply, title), text)

    def score(self, title: str, key: Key) -> Call:
        with self.codes[title]:
            score = self._objects[key].score
        return self._call(title, score, partial(read_score, title))

    def close(self, title: str, key: Key) -> Call:
        """Forget an object. Its class need not have a `close`."""
        object_ = self._objects.pop(key)
        with self.codes[title]:
            close = object_.close if "close" in dir(object_) else lambda: None
        return self._call(title, close, lambda result: None)

    def _call(self, title: str, method: Callable, read: Callable[[Any], Any], *given: Any) -> Call:
        in_thread = not inspect.iscoroutinefunction(method)
        return Call(self.codes[title], partial(method, *given), read, in_thread)


CALLS = {"load": Users.load, "rule": Users.rule, "begin": Users.begin}
CALLS |= {"step": Users.step, "score": Users.score, "close": Users.close}


def shown(value: Any) -> str:
    short = reprlib.Repr()
    short.maxstring = short.maxother = 60
    return " ".join(short.repr(value).split())[:60]


def read_number(title: str, value: Any) -> float | None:
    """Read what a rule returned. Raises UserError unless it is None or a number within REWARD_LIMIT."""
    if value is None:
        return None
    numpy = sys.modules.get("numpy")  # if nothing has imported it, the value isn't its bool
    is_number = isinstance(value, Real) or (numpy and isinstance(value, numpy.bool_))
    number = float(value) if is_number else math.nan
    if not abs(number) <= REWARD_LIMIT:  # nan isn't
        raise UserError(
            f"{title} returned {shown(value)}: a number or None is needed, at most {REWARD_LIMIT:g}"
        )
    return number


def read_reply(title: str, value: Any) -> tuple:
    """Read what a step returned, as the fields of a Step. Raises UserError if it is invalid."""
    from extras.environment import read_step

    try:
        step = read_step(value)
    except ValueError as error:
        raise UserError(f"{title}: step returned {shown(value)}: {error}") from None
    metrics = {name: float(number) for name, number in step.metrics.items()}
    return step.reply, float(step.reward), step.done, metrics


def read_score(title: str, value: Any) -> float:
    from extras.environment import is_number

    if not is_number(value):
        raise UserError(
            f"{title}: score returned {shown(value)}: a number is needed, at most {REWARD_LIMIT:g}"
        )
    return float(value)


class Server:
    """Answers the rank's calls, in this thread's event loop and in threads."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._users = Users(self._read_image)
        self._sending = threading.Lock()
        self._images: dict[str, Future] = {}  # asked for, by digest
        self._calls: set[Future] = set()  # otherwise they may be garbage-collected while they run
        self._threads = ThreadPoolExecutor(THREADS)
        self._loop = asyncio.new_event_loop()

    def serve(self) -> NoReturn:
        threading.Thread(target=self._listen, daemon=True).start()
        while True:
            with suppress(BaseException):  # a user's signal handler raised it while no call ran
                self._loop.run_forever()

    def _listen(self) -> None:
        with suppress(EOFError, OSError):  # the rank has ended: so will this process
            while True:
                number, what, value = self._connection.recv()
                value = pickle.loads(value)
                if what == "image":
                    digest, content = value
                    if asked := self._images.pop(digest, None):
                        asked.set_result(content)
                else:
                    work = self._answer(number, what, value)
                    call = asyncio.run_coroutine_threadsafe(work, self._loop)
                    self._calls.add(call)
                    call.add_done_callback(self._forget)

    def _forget(self, call: Future) -> None:
        """Forget a call that is answered. One that failed by itself never will be: end this process."""
        self._calls.discard(call)
        if error := call.exception():
            traceback.print_exception(error)
            _exit(1)

    async def _answer(self, number: int, what: str, given: Sequence) -> None:
        self._send(number, "began", None)
        try:
            self._send(number, "done", await self._result(what, given))
        except UserError as error:
            self._send(number, "failed", str(error))
        except ConnectionError as error:
            self._send(number, "lost", str(error))

    async def _result(self, what: str, given: Sequence) -> Any:
        call = CALLS[what](self._users, *given)
        if call.in_thread:
            found = await self._loop.run_in_executor(self._threads, call.make)
        else:
            found = call.make()
        with call.code:
            return call.read(await found if inspect.isawaitable(found) else found)

    def _read_image(self, digest: bytes) -> bytes:
        """Ask the rank for an image's bytes. Raises OSError if it can't read them."""
        asked = self._images.setdefault(digest.hex(), Future())
        self._send(0, "image", digest.hex())
        if isinstance(content := asked.result(), str):
            raise OSError(content)
        return content

    def _send(self, number: int, what: str, value: Any) -> None:
        message = json.dumps((number, what, value)).encode()
        with self._sending, suppress(OSError):  # the rank has ended
            self._connection.send_bytes(message)


# ---------------------------------------------------------------- signals, and the end

FORKING = threading.local()  # mask: signals blocked before a fork
DEFAULTS = {number: signal.getsignal(number) for number in SIGNALS}


def ignore(number: int, frame: object) -> None:
    """Handle a signal to the whole job, which is for ranks. SIG_IGN would pass on to users' programs."""


def before_fork() -> None:
    """Block signals to a forked process until it has its own handlers."""
    FORKING.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, FORKING.mask)


def after_fork() -> None:
    for number, handler in DEFAULTS.items():
        if signal.getsignal(number) is ignore:
            signal.signal(number, handler)
    unblock()


def watch(worker: int, connection: Connection) -> NoReturn:
    """Wait until the worker or the rank has ended; then end all that the user's code left running."""

    def end_with_rank() -> None:
        gone = select.poll()
        gone.register(connection.fileno(), 0)  # only the other side's end
        gone.poll()
        os.kill(worker, signal.SIGKILL)

    threading.Thread(target=end_with_rank, daemon=True).start()
    status = None
    while status is None:  # orphans of the user's code end before
        pid, how = os.wait()
        status = os.waitstatus_to_exitcode(how) if pid == worker else None
    with suppress(ChildProcessError):  # none is left
        while True:
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            os.wait()
    _exit(status if status >= 0 else 128 - status)


def main(descriptor: int) -> NoReturn:
    """Serve the rank at the other end of this socket. Signals are blocked at the start."""
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    adopt_orphans()
    if worker := os.fork():
        watch(worker, connection)
    die_with_parent(signal.SIGKILL)
    for number in SIGNALS:
        signal.signal(number, ignore)
    os.register_at_fork(before=before_fork, after_in_parent=unblock, after_in_child=after_fork)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    Server(connection).serve()
