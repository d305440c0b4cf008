"""World: the collectives of two real ranks over gloo, and what they say of a rank that doesn't come."""

import asyncio
import os
import sys
import time
import traceback
from datetime import timedelta

import pytest
import torch.distributed as dist

from runtime import world
from runtime.world import World


def in_two_ranks(tmp_path, program, timeout_s, notes=False):
    return in_ranks(tmp_path, program, timeout_s, notes)


def in_ranks(tmp_path, program, timeout_s, notes=False, size=2):
    """Run `program(world)` in forked ranks; returns what each printed, an exception's text at the end.

    notes: they note in a folder, as ranks of one machine do, not in the store.
    """
    pids, folder = [], tmp_path / "notes" if notes else None
    (tmp_path / "notes").mkdir()
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            sys.stdout = sys.stderr = (tmp_path / str(rank)).open("w")
            world.OTHERS_GIVE_UP_S = 0.5
            try:
                store = f"file://{tmp_path}/store"
                dist.init_process_group(
                    "gloo", store, rank=rank, world_size=size, timeout=timedelta(seconds=30)
                )
                asyncio.run(program(World("cpu", timeout_s, folder)))
            except RuntimeError as error:
                print(error)
            except BaseException:  # a forked rank must not go on as pytest
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    return [(tmp_path / str(rank)).read_text() for rank in range(size)]


async def meet(world):
    print(await world.gather(world.rank * 10), await world.broadcast(f"from {world.rank}"))
    print(await world.reduce([world.rank], lambda parts: [rank for part in parts for rank in part]))
    print(await world.gather_on_0(world.rank))
    print(await world.exchange({1 - world.rank: b"to the other", world.rank: b"to myself"}, (0, 1)))
    print(await world.exchange({1: b"passed on"} if world.rank == 0 else {}, (0,) * world.rank))
    await world.barrier()


def test_collectives(tmp_path):
    """Every rank hears everyone, in rank order, or rank 0 alone does; parcels go point to point."""
    assert in_two_ranks(tmp_path, meet, 30.0) == [
        "[0, 10] from 0\n[0, 1]\n[0, 1]\n{1: b'to the other', 0: b'to myself'}\n{}\n",
        "[0, 10] from 0\n[0, 1]\n[]\n{0: b'to the other', 1: b'to myself'}\n{0: b'passed on'}\n",
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_reduce_is_the_total_in_the_order_of_the_ranks(tmp_path, size):
    """On every rank, whatever their number."""

    async def total(world):
        print(await world.reduce(f"{world.rank}", "".join))

    assert in_ranks(tmp_path, total, 30.0, size=size) == ["01234567"[:size] + "\n"] * size


async def one_hangs(world):
    await world.barrier()
    world.doing("train of step 4")
    await world.barrier()
    world.doing("serve of step 5")
    if world.rank == 1:
        time.sleep(6.0)  # its event loop, too: as if it were stopped
        return
    await world.gather(None)


async def one_dies(world):
    world.doing("train of step 4")
    await world.barrier()
    if world.rank == 1:
        os._exit(1)
    await world.gather(None)


async def one_hangs_in_training(world):
    """The collectives inside of an update are none of World's."""
    world.doing("train of step 4")
    await world.barrier()
    if world.rank == 1:
        time.sleep(6.0)
        return

    def update():
        raise RuntimeError("Timed out waiting 1000ms for recv operation to complete")

    await world.run(update)


LAST_SEEN = [
    (one_hangs, "serve of step 5"),
    (one_dies, "train of step 4"),
    (one_hangs_in_training, "train of step 4"),
]


@pytest.mark.parametrize("notes", [False, True], ids=["store", "folder"])
@pytest.mark.parametrize("program,phase", LAST_SEEN)
def test_who_did_not_come(tmp_path, program, phase, notes):
    """The error names the rank, and the phase in which it was last seen."""
    printed, _ = in_two_ranks(tmp_path, program, 2.0, notes)
    waited = "rank 0 waited in vain, for 2 s at most"
    assert printed == f"{waited}: rank 1 didn't come, last seen in phase: {phase}\n"


async def an_error_of_its_own(world):
    def update():
        raise RuntimeError("shapes don't fit")

    await world.barrier()
    await world.run(update)


def test_an_error_of_its_own_is_nobody_elses(tmp_path):
    """It is raised as it is."""
    assert in_two_ranks(tmp_path, an_error_of_its_own, 2.0) == ["shapes don't fit\n"] * 2
