"""OUT, the folder of a run: the lock on it, and how the run before is moved out of the way.

One program at a time writes there, on whatever machine. Two hidden files beside OUT, which may itself be
renamed, see to that. The kernel's lock on the first tells of processes of this machine, and goes with its
holder. Not every shared disk tells other machines of it, and some know no locks: so the second names the
holder, and gets a new time while that lives. The first stays behind: to remove it would let two in.
"""

import contextlib
import errno
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from filelock import AsyncFileLock, AsyncSoftFileLease, Timeout

from config import UserError

ENDING_S = 5.0  # for a process that was killed to be gone
WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
LEASE_S = 20.0  # without a sign of life a holder is gone; there is one in a third of that


@contextlib.asynccontextmanager
async def held(out: Path, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Make a run's folder and hold the lock on it. UserError if that can't be, or somebody else does."""
    how = {"run_in_executor": False, "poll_interval": 0.1}
    warning = f"LOCK LOST on --out {out}: another run may write there"
    async with contextlib.AsyncExitStack() as locks:
        try:
            out.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=out).close()  # an error if nothing can be written there
            folder = out.resolve()  # whatever it is called here
            # its locks' files lie beside it; in it where it can't be renamed
            stays = folder.is_mount() or not os.access(folder.parent, os.W_OK)
            path = folder / ".out" if stays else folder.with_name(f".{folder.name}")
            lock = AsyncFileLock(f"{path}.lock", timeout=ENDING_S, fallback_to_soft=False, **how)
            how |= {"lease_duration": LEASE_S, "timeout": 1.5 * LEASE_S}
            # its heart is a thread, which beats while weights are pushed and the event loop stands still
            lease = AsyncSoftFileLease(f"{path}.lease", on_compromise=lambda _: say(warning), **how)
            try:
                await locks.enter_async_context(lock)
            except OSError as error:
                if error.errno not in WITHOUT_LOCKS:
                    raise
                trouble = "is on a disk without locks: who is suspended there is taken for gone"
                say(f"--out {out} {trouble}")
            await locks.enter_async_context(lease)
        except Timeout:
            who = f"a run, unless {path}.lease is left of a crash,"  # empty: it is kept for ever
            if owner := lease.owner:
                who = f"process {owner.pid} on {owner.hostname.partition('?')[0]}"
            why = f"{who} is at work there: stop it, or choose another"
            raise UserError(f"--out {out}: {why}") from None
        except OSError as error:
            raise UserError(f"--out {out} can't be used: {error}") from None
        yield


def archive(out: Path, say: Callable[[str], None]) -> None:
    """Move what an earlier run left, if there is anything. UserError where it can't be moved."""
    left = ("metrics.jsonl", "replay.jsonl", "checkpoints", "eval*.json", "spans/rank*.jsonl")
    if not any(any(out.glob(name)) for name in (*left, "hf*")):
        return
    there = out.resolve()  # behind a link, which stays: the new run has to write to the same disk
    try:
        # relative paths would lead to the folder that was moved
        if Path.cwd().is_relative_to(there):
            raise OSError(errno.EBUSY, "it is the working directory")
        target = there.rename(next_free(there))
        there.mkdir(exist_ok=True)  # who waits for the lock may have made it
    except OSError as error:  # a mount point, too, is busy
        why = f"the earlier run there can't be moved aside ({error.strerror})"
        raise UserError(f"--out {out}: {why}: name a folder in it, or another") from None
    say(f"moved the earlier run in {out} to {target}")


def next_free(path: Path) -> Path:
    """Return the path with the first number behind it that isn't taken."""
    numbered = (path.with_name(f"{path.name}-{i}") for i in range(1, 10**6))
    return next(path for path in numbered if not path.exists())
