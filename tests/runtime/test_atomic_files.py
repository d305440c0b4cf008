"""Checkpoints that reveal whether they are complete, and JSONL files that were cut short."""

import errno
import io
import json
import math
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import atomic_files
from runtime.atomic_files import CHECKSUMS
from runtime.errors import RunLost

SIZES = {"common.json": 10, "controllers/rank_0.json": 20, "hf/model.safetensors": 2000}
SIZES |= {"megatron/__0_0.distcp": 1000, "megatron/__1_0.distcp": 900, "megatron/.metadata": 5}


def make_folder(folder):
    for name, size in SIZES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode() * size)
    lines = [f"{atomic_files.sha256(folder / name)}  {name}\n" for name in SIZES]
    (folder / CHECKSUMS).write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("whole") / "step_1")


NAMES = st.sampled_from([CHECKSUMS, CHECKSUMS, *SIZES])


@given(name=NAMES, where=st.integers(0), bits=st.integers(1, 255))
def test_any_changed_byte_shows(folder, name, where, bits):
    """Any change must be found, also one in the checksums: in a checksum, in a name or between them."""
    path = folder / name
    content = path.read_bytes()
    changed = bytearray(content)
    changed[where % len(content)] ^= bits
    path.write_bytes(changed)
    assert atomic_files.verify(folder).endswith(" is missing or was changed")
    path.write_bytes(content)
    assert atomic_files.verify(folder) == ""


def test_checksums_that_were_cut_off_are_none(tmp_path):
    """A crash may keep their first lines, and lose the others with the files that these name."""
    folder = make_folder(tmp_path)
    lines = (folder / CHECKSUMS).read_text().splitlines(keepends=True)
    while lines:
        (folder / lines.pop().split()[1]).unlink()
        (folder / CHECKSUMS).write_text("".join(lines))
        assert atomic_files.verify(folder) == f"{CHECKSUMS} is missing or was changed"


def test_what_cannot_be_read_is_damaged(folder, monkeypatch):
    """Any read error must count as damage, because the checkpoint before may be whole."""

    def sha256(path):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(atomic_files, "sha256", sha256)
    assert atomic_files.verify(folder) == "it can't be read: [Errno 5] Input/output error"


@pytest.mark.parametrize("ranks", [1, 2, 3, 9])
def test_ranks_share_the_reading(folder, monkeypatch, ranks):
    """Each file must be read by one rank, and large files by different ranks."""
    read, real = [], atomic_files.sha256
    monkeypatch.setattr(atomic_files, "sha256", lambda path: read[-1].append(path) or real(path))
    for rank in range(ranks):
        read.append([])
        assert atomic_files.verify(folder, rank, ranks) == ""
    everything = [str(path.relative_to(folder)) for share in read for path in share]
    assert sorted(everything) == sorted(SIZES)
    sizes = [sum(path.stat().st_size for path in share) for share in read]
    largest = max((folder / name).stat().st_size for name in SIZES)
    assert max(sizes) - min(sizes) <= largest


def test_the_name_of_a_checkpoint(tmp_path):
    """A checkpoint must have another name while it is being written."""
    for name in ("step_3", "step_12", "step_12.partial-77", "step_x", "steps", "7"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_99").write_text("no folder")
    assert atomic_files.steps_in(tmp_path) == [12, 3]
    assert atomic_files.step_of(tmp_path / "7") is None


def test_a_removed_checkpoint_has_no_name_before_its_first_file_goes(tmp_path, monkeypatch):
    folder, seen = tmp_path / "step_3", []
    folder.mkdir()
    look = lambda *_, **__: seen.append(atomic_files.steps_in(tmp_path))  # noqa: E731
    monkeypatch.setattr(atomic_files.shutil, "rmtree", look)
    atomic_files.remove_atomically(folder)
    atomic_files.remove_atomically(folder)  # already removed
    assert seen == [[]]


@contextmanager
def full_disk(size=0):
    """Limit files to `size` bytes: a write stores what fits, and the next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Stingy(io.FileIO):
    """A file that takes seven bytes at a time, like an almost full disk."""

    def write(self, data):
        time.sleep(0)  # lets others run in between
        return super().write(data[:7])


def test_a_row_has_null_for_what_json_lacks(tmp_path):
    row = {"loss": math.nan, "worst": [-math.inf, (1.5, math.inf)], "step": 3, "text": "nan"}
    atomic_files.append(tmp_path / "rows.jsonl", [row])
    refuse = {"parse_constant": lambda name: pytest.fail(f"{name} is no JSON")}
    found = json.loads((tmp_path / "rows.jsonl").read_text(), **refuse)
    assert found == {"loss": None, "worst": [None, [1.5, None]], "step": 3, "text": "nan"}


def test_rows_are_added_whole(tmp_path, monkeypatch):
    """Several ranks must be able to add rows to one file; a row that doesn't fit leaves no partial line."""
    path, rows = tmp_path / "rows.jsonl", [{"step": step, "x": "x" * step} for step in range(40)]
    monkeypatch.setattr(Path, "open", lambda self, *_, **__: Stingy(self, "ab"))
    with ThreadPoolExecutor(4) as ranks:
        list(ranks.map(lambda row: atomic_files.append(path, [row, row]), rows))
    monkeypatch.undo()
    problem = r"rows\.jsonl can't be written: File too large$"
    with full_disk(path.stat().st_size + 5), pytest.raises(RunLost, match=problem):
        atomic_files.append(path, rows)
    atomic_files.append(path, [rows[0], rows[0]])
    found = list(atomic_files.whole_rows(path))
    assert found[::2] == found[1::2] and found[-1] == rows[0]
    assert sorted(found[:-2:2], key=lambda row: row["step"]) == rows
