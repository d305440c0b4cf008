"""OUT, a run's folder: its lock, and moving an earlier run's files out of the way.

Only one program at a time writes there. It holds the kernel's lock on OUT/lock, which works across machines
if their disk supports it. The file stays, as removing it would let two programs in.
"""

import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from filelock import AsyncFileLock, Timeout

from runtime.errors import UserError

LOCK = "lock"
# where a run has weights
WEIGHTS = ("checkpoints/step_*", "hf/config.json", "hf/step_*", "hf_critic_*/step_*")
ENDING_S = 5.0  # time that a killed process takes to be gone
WITHOUT_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@contextlib.asynccontextmanager
async def held(out: Path, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Make a run's folder and hold its lock. Raises UserError if that fails or another program holds it."""
    lock = AsyncFileLock(out / LOCK, ENDING_S, run_in_executor=False, fallback_to_soft=False)
    try:
        out.mkdir(parents=True, exist_ok=True)
        await lock.acquire()
        (out / LOCK).write_text(f"process {os.getpid()} on {socket.gethostname()}")
    except Timeout:
        holder = (out / LOCK).read_text()
        raise UserError(
            f"--out {out}: {holder} is at work there: stop it, or choose another"
        ) from None
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise UserError(f"--out {out} can't be used: {error}") from None
        say(f"--out {out} is on a disk without locks: nothing keeps another run from writing there")
    try:
        yield
    finally:
        await lock.release()


class ResumePoint(NamedTuple):
    """A complete checkpoint that the run continues from."""

    folder: Path
    step: int
    ended_s: float = 0.0  # when its record ends, on the run's own clock
    newest: int | None = None  # step of this run's own newest checkpoint


class NoSaves:
    """Stands in for checkpoint.Checkpoints when nothing is saved."""

    point: ResumePoint | None = None  # the checkpoint that the run resumes from
    newest = None
    saving = None

    async def save(self, c: object) -> None: ...
    async def save_now(self, c: object) -> None: ...
    async def finish(self, c: object) -> None: ...
    async def close(self, c: object) -> None: ...
    async def restore(self, c: object) -> None: ...


def start_over(out: Path, say: Callable[[str], None], settings: Mapping[str, Any]) -> NoSaves:
    """Move an earlier run aside, and make a new one's folders. Raises UserError as `archive`."""
    archive(out, say, settings)
    for name in ("spans", "logs"):
        (out / name).mkdir(parents=True, exist_ok=True)
    return NoSaves()


def archive(out: Path, say: Callable[[str], None], settings: Mapping[str, Any]) -> None:
    """Move all files of a folder in which an earlier run was.

    settings: the new run's. Raises UserError if one of them names such a file, or if the move fails.
    """
    left = ("metrics.jsonl", "answers.jsonl", "spans/rank*", *WEIGHTS)
    if not any(any(out.glob(name)) for name in left):
        return
    there = out.resolve()  # follow a link, so that files stay on their disk
    for name, path in paths_in(settings):
        if path.resolve().is_relative_to(there):
            raise UserError(
                f"--{name} {path} would be moved aside with the earlier run in {out}: "
                "name another --out"
            )
    try:
        # relative paths would lead into the moved files
        if Path.cwd().is_relative_to(there) or there.is_mount():
            raise OSError(errno.EBUSY, "it is the working directory or a mount point")
        target = next_free(there)
        target.mkdir()
        for path in sorted(there.iterdir()):  # `checkpoints` goes early: no run resumes without it
            if path.name != LOCK:
                path.rename(target / path.name)
    except OSError as error:
        raise UserError(
            f"--out {out}: the earlier run there can't be moved aside ({error.strerror}): "
            "name a folder in it, or another"
        ) from None
    say(f"moved the earlier run in {out} to {target}")


def paths_in(settings: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """Yield (setting, file or folder that it names), without --out."""
    for name, value in settings.items():
        for each in value if isinstance(value, tuple) else (value,):
            path = Path(str(each).partition(":")[0])  # my.py:function
            if name != "out" and each and os.path.exists(path):
                yield name.replace("_", "-"), path


def next_free(path: Path) -> Path:
    """Return `path` with the first free number appended."""
    numbered = (path.with_name(f"{path.name}-{i}") for i in range(1, 10**6))
    return next(path for path in numbered if not path.exists())
