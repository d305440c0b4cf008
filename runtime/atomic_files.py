"""Files, folders and rows that exist completely or not at all, whenever the machine stops."""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from runtime.errors import RunLost, UserError

CHECKSUMS = "SHA256SUMS"
LAST = "megatron/.metadata"  # a save writes it last: checksums that lack it were cut off
PARTIAL = ".partial-"  # marks the name of a folder that is being written or removed


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(folder: Path, rank: int = 0, size: int = 1) -> str:
    """Return what is wrong with a checkpoint, or "". Each of `size` ranks reads a part of it."""
    checksums = {}
    try:
        if (folder / CHECKSUMS).is_file():
            for line in (folder / CHECKSUMS).read_text(errors="replace").splitlines():
                checksum, _, name = line.partition("  ")
                checksums[name] = checksum
        missing = [name for name in checksums if not (folder / name).is_file()]
        if missing or LAST not in checksums:
            return f"{min(missing, default=CHECKSUMS)} is missing or was changed"
        largest_first = sorted(checksums, key=lambda name: -(folder / name).stat().st_size)
        for name in largest_first[rank::size]:
            if sha256(folder / name) != checksums[name]:
                return f"{name} is missing or was changed"
    except OSError as error:
        return f"it can't be read: {error}"
    return ""


def step_of(folder: Path) -> int | None:
    """Return the step in a checkpoint's name; None for another folder, or one still being written."""
    number = folder.name.removeprefix("step_")
    return int(number) if folder.name != number and number.isdecimal() and folder.is_dir() else None


def steps_in(checkpoints: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, newest first."""
    steps = map(step_of, checkpoints.glob("step_*"))
    return sorted((step for step in steps if step is not None), reverse=True)


def remove_atomically(folder: Path) -> None:
    """Remove a checkpoint: rename it before the first file is removed."""
    if folder.exists():
        gone = folder.with_name(f"{folder.name}{PARTIAL}{os.getpid()}.old")
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def append(path: Path, rows: Iterable[Any]) -> None:
    """Append all rows or none to a JSONL file that ranks may share. Raises RunLost if the disk is full."""
    left = memoryview("".join(json.dumps(finite(row)) + "\n" for row in rows).encode())
    with writing(path), path.open("ab", buffering=0) as file:
        with contextlib.suppress(OSError):  # the disk has no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        end = file.seek(0, os.SEEK_END)
        try:
            while left:  # an almost full disk accepts a part and refuses only the rest
                left = left[file.write(left) :]
        except OSError:
            with contextlib.suppress(OSError):  # report only the first error
                file.truncate(end)
            raise


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Wrap a block that writes a file or folder. Raises RunLost if the disk is full."""
    try:
        yield path
    except OSError as error:
        raise RunLost(f"{path} can't be written: {error.strerror}") from None


def finite(value: Any) -> Any:
    """Return `value` with None for each float that isn't finite, as JSON has none."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def keep_rows(path: Path, keep: Callable[[Any], bool]) -> None:
    """Drop the rows of a JSONL file that `keep` rejects, and an incomplete last one."""
    if path.exists():
        new = path.with_name(f"{path.name}.new")
        new.write_text("".join(json.dumps(row) + "\n" for row in whole_rows(path) if keep(row)))
        new.replace(path)


def whole_rows(path: Path) -> Iterator[Any]:
    """Yield a JSONL file's rows, except an incomplete last one. Raises UserError if one isn't JSON."""
    for number, line in enumerate(path.open() if path.exists() else (), 1):
        if line.endswith("\n"):
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{path}:{number}: not valid JSON: {error}") from None
