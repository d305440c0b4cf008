"""Files that are there whole or not at all, whenever the machine stops, and folders of them that say so themselves.

A checkpoint is whole when its name says that it was finished (`step_<n>`) and every file is as its manifest has it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
PARTIAL = ".partial-"  # in the name of a folder that is being written or removed


def digest(path: Path) -> list:
    """Put a file on the disk; returns its size in bytes and its SHA-256."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def sync_folder(folder: Path) -> None:
    """Put a folder's entries on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def write_whole(path: Path, value: Any) -> None:
    """Write JSON that is there whole or not at all, whenever the machine stops."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(canonical(value))
    digest(new)
    new.replace(path)
    sync_folder(path.parent)


def canonical(value: Any) -> str:
    """The one way in which our JSON files are written, so that any changed byte of them shows."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")) + "\n"


def read_canonical(path: Path) -> dict | None:
    """What `write_whole` wrote; None if the file isn't there or isn't as it was written."""
    try:
        text = path.read_bytes().decode("ascii")
        value = json.loads(text)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) and canonical(value) == text else None


def damage(folder: Path) -> str:
    """What is wrong with a checkpoint: the first file that isn't as it was written, empty when all are. Reads every byte."""
    manifest = read_canonical(folder / MANIFEST)
    if manifest is None:
        return f"{MANIFEST} is missing or was changed"
    for name, expected in manifest.items():
        path = folder / name
        if not path.is_file() or digest(path) != expected:
            return f"{name} is missing or was changed"
    return ""


def step_of(folder: Path) -> int | None:
    """The step of a folder by its name, None if it isn't a checkpoint's: one that is being written has another name."""
    number = folder.name.removeprefix("step_")
    return int(number) if folder.name != number and number.isdecimal() and folder.is_dir() else None


def steps_in(checkpoints: Path) -> list[int]:
    """The steps of the checkpoints in a folder, newest first."""
    return sorted((step for folder in checkpoints.glob("step_*") if (step := step_of(folder)) is not None), reverse=True)


def put_away(folder: Path) -> None:
    """Remove a checkpoint, which is no checkpoint any more before its first file goes."""
    if folder.exists():
        gone = folder.with_name(f"{folder.name}{PARTIAL}{os.getpid()}.old")
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
