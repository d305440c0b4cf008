"""What the first rank of a machine makes once, and the others read."""

import errno
import math
import os
from decimal import Decimal
from pathlib import Path

import pyarrow
import pytest

from runtime import shared
from runtime.errors import RunLost, UserError
from tests.support.rows import become_rank

ITEMS = [(1, Decimal("0.10")), {"a": [None, 1e300]}, "é", Path("a"), -math.inf, b"", ["a", ("b",)]]


def never():
    raise AssertionError("only the first rank makes the items")
    yield


def test_items_are_made_once_and_keep_their_types(tmp_path, monkeypatch):
    """They are in several chunks."""
    monkeypatch.setattr(shared, "CHUNK", 3)
    for rank, items in enumerate((iter(ITEMS), never(), never())):
        become_rank(monkeypatch, tmp_path, rank)
        found = shared.once_a_machine("items", items)
        assert repr([*found]) == repr(ITEMS) and len(found) == len(ITEMS) and found[-1] == ITEMS[-1]
        assert [*shared.once_a_machine("none", iter(()) if rank == 0 else never())] == []
        assert found.pickles.type == pyarrow.large_binary()  # others end at 2 GB
    assert {path.name for path in tmp_path.iterdir()} == {"items", "none"}


def test_an_error_leaves_nothing_to_read(tmp_path, monkeypatch):
    def failing():
        yield 1
        raise UserError("rows.jsonl:2: no")

    become_rank(monkeypatch, tmp_path, 0)
    with pytest.raises(UserError, match=r"^rows\.jsonl:2: no$"):
        shared.once_a_machine("items", failing())
    assert not (tmp_path / "items").exists()


def test_ranks_wait_for_the_first(tmp_path, monkeypatch):
    become_rank(monkeypatch, tmp_path, 1)

    def look_later(seconds):
        become_rank(monkeypatch, tmp_path, 0)
        shared.once_a_machine("items", iter(ITEMS))

    monkeypatch.setattr(shared.time, "sleep", look_later)
    assert len(shared.once_a_machine("items", never())) == len(ITEMS)


def test_a_rank_whose_folder_is_its_own_waits_for_nobody(tmp_path, monkeypatch):
    become_rank(monkeypatch, tmp_path, 1)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert [*shared.once_a_machine("items", iter([7]))] == [7]


def test_a_full_disk_ends_the_run_in_one_line(tmp_path, monkeypatch):
    def full():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield

    become_rank(monkeypatch, tmp_path, 0)
    with pytest.raises(RunLost, match=r"items\.part can't be written: No space left on device"):
        shared.once_a_machine("items", full())
