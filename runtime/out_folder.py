"""OUT, the folder of a run: the lock on it, and how an earlier run's files are moved out of the way.

One program at a time writes there: it holds the kernel's lock on OUT/lock, also between machines where their
disk knows such locks. The file stays: to remove it would let two in.
"""

import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from filelock import AsyncFileLock, Timeout

from runtime.errors import UserError

LOCK = "lock"
ENDING_S = 5.0  # for a process that was killed to be gone
WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@contextlib.asynccontextmanager
async def held(out: Path, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Make a run's folder and hold the lock on it. UserError if that can't be, or somebody else does."""
    lock = AsyncFileLock(out / LOCK, ENDING_S, run_in_executor=False, fallback_to_soft=False)
    try:
        out.mkdir(parents=True, exist_ok=True)
        await lock.acquire()
        (out / LOCK).write_text(f"process {os.getpid()} on {socket.gethostname()}")
    except Timeout:
        problem = f"{(out / LOCK).read_text()} is at work there: stop it, or choose another"
        raise UserError(f"--out {out}: {problem}") from None
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise UserError(f"--out {out} can't be used: {error}") from None
        say(f"--out {out} is on a disk without locks: nothing keeps another run from writing there")
    try:
        yield
    finally:
        await lock.release()


class NoSaves:
    """Stands in for checkpoint.Checkpoints where nothing is saved."""

    point = None  # that the run continues from
    newest = None
    saving = None

    async def save(self, c: object) -> None: ...
    async def save_now(self, c: object) -> None: ...
    async def finish(self, c: object) -> None: ...
    async def close(self, c: object) -> None: ...
    async def restore(self, c: object) -> None: ...


def make_ready(out: Path, say: Callable[[str], None]) -> NoSaves:
    """Move an earlier run aside, and make the folders of a new one. UserError."""
    archive(out, say)
    for name in ("spans", "logs"):
        (out / name).mkdir(parents=True, exist_ok=True)
    return NoSaves()


def archive(out: Path, say: Callable[[str], None]) -> None:
    """Move what an earlier run left, if there is anything. UserError where it can't be moved."""
    left = ("metrics.jsonl", "checkpoints", "answers.jsonl", "spans/rank*", "hf*")
    if not any(any(out.glob(name)) for name in left):
        return
    there = out.resolve()  # behind a link: files stay on their disk
    try:
        # relative paths would lead to what was moved
        if Path.cwd().is_relative_to(there) or there.is_mount():
            raise OSError(errno.EBUSY, "it is the working directory, or a disk's own")
        target = next_free(there)
        target.mkdir()
        for path in sorted(there.iterdir()):  # `checkpoints` early: without them nothing goes on
            if path.name != LOCK:
                path.rename(target / path.name)
    except OSError as error:
        why = f"the earlier run there can't be moved aside ({error.strerror})"
        raise UserError(f"--out {out}: {why}: name a folder in it, or another") from None
    say(f"moved the earlier run in {out} to {target}")


def next_free(path: Path) -> Path:
    """Return the path with the first number behind it that isn't taken."""
    numbered = (path.with_name(f"{path.name}-{i}") for i in range(1, 10**6))
    return next(path for path in numbered if not path.exists())
