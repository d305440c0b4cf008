"""A checkpoint's files: each rank writes its own; once all have, the folder gets its name."""

import json
from collections.abc import Callable
from pathlib import Path

from runtime import atomic_files
from runtime.atomic_files import steps_in, sync

# a rank's written files: descriptions of its shards by folder, SHA-256 by file
Part = tuple[dict[str, list], dict[str, str]]


def write_part(folder: Path, rank: int, state: dict, shards: dict, hf: dict) -> Part:
    """Write one rank's files: `state` by file, `shards` by folder, `hf` exports by path."""
    described = {name: write() for name, write in shards.items()}
    for name, value in state.items():
        (folder / name).write_text(json.dumps(value))
    for path, write in hf.items():
        write(path)
        for written in (*path.rglob("*"), path):
            sync(written)
    patterns = [*state, *(f"{name}/__{rank}_*" for name in shards)]
    return described, sync_and_hash(folder, patterns)


def sync_and_hash(folder: Path, patterns: list[str]) -> dict[str, str]:
    """Flush a checkpoint's files to disk; return their SHA-256 by name."""
    checksums = {}
    for pattern in patterns:
        for path in folder.glob(pattern):
            sync(path)
            checksums[str(path.relative_to(folder))] = atomic_files.sha256(path)
    return checksums


def make_folders(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)


def name_folders(
    folder: Path, step: int, write_index: dict[str, Callable], parts: list[Part], keep: int
) -> None:
    """Name the folders once their files are on disk. Rank 0 may die between any two lines."""
    checkpoints = folder.parent
    checksums = {}
    for _, of_rank in parts:
        checksums |= of_rank
    for name, write in write_index.items():
        write([described[name] for described, _ in parts])
        checksums |= sync_and_hash(folder, [f"{name}/.metadata"])
    lines = [f"{checksum}  {name}\n" for name, checksum in checksums.items()]
    (folder / atomic_files.CHECKSUMS).write_text("".join(lines))
    for path in (folder / atomic_files.CHECKSUMS, *{(folder / name).parent for name in checksums}):
        sync(path)
    for unnamed in (*checkpoints.parent.glob(f"hf*/{folder.name}"), folder):
        target = unnamed.with_name(f"step_{step}")
        atomic_files.remove_atomically(target)  # damaged, or left by a save that failed later
        unnamed.rename(target)
        sync(target.parent)
    older = [each for each in steps_in(checkpoints) if each < step]
    for each in reversed(older[keep - 1 :]):  # oldest first
        atomic_files.remove_atomically(checkpoints / f"step_{each}")
