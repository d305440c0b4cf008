"""World: the collectives of real ranks over gloo, and what they say of a rank that doesn't come."""

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


def in_ranks(folder, program, timeout_s, size=2, notes=None):
    """Run `program(world)` in forked ranks; returns what each printed, an exception's text at the
    end. notes: the folder where they note, as ranks of one machine do; else in the store."""
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            sys.stdout = sys.stderr = (folder / str(rank)).open("w")
            world.OTHERS_GIVE_UP_S = 0.5
            try:
                where = dict(rank=rank, world_size=size, timeout=timedelta(seconds=30))
                dist.init_process_group("gloo", f"file://{folder}/store", **where)
                asyncio.run(program(World("cpu", timeout_s, notes)))
            except RuntimeError as error:
                print(error)
            except BaseException:  # a forked rank must not go on as pytest
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    return [(folder / str(rank)).read_text() for rank in range(size)]


async def meet(world):
    print(await world.gather(world.rank * 10), await world.broadcast(f"from {world.rank}"))
    print(await world.gather_on_0(world.rank))
    print(await world.exchange({1 - world.rank: b"to the other", world.rank: b"to myself"}, (0, 1)))
    print(await world.exchange({1: b"passed on"} if world.rank == 0 else {}, (0,) * world.rank))
    await world.barrier()


def test_collectives(tmp_path):
    """Every rank hears everyone, in rank order, or rank 0 alone does; parcels go point to point."""
    assert in_ranks(tmp_path, meet, 30.0) == [
        "[0, 10] from 0\n[0, 1]\n{1: b'to the other', 0: b'to myself'}\n{}\n",
        "[0, 10] from 0\n[]\n{0: b'to the other', 1: b'to myself'}\n{0: b'passed on'}\n",
    ]


@pytest.mark.parametrize("size", [1, 5, 8])
def test_reduce_is_the_total_in_the_order_of_the_ranks(tmp_path, size):
    """On every rank, whatever their number."""

    async def total(world):
        print(await world.reduce(f"{world.rank}", "".join))

    assert in_ranks(tmp_path, total, 30.0, size) == ["01234567"[:size] + "\n"] * size


@pytest.mark.parametrize("in_folder", [False, True], ids=["store", "folder"])
@pytest.mark.parametrize("how", ["hangs", "hangs in training", "dies"])
def test_who_did_not_come(tmp_path, how, in_folder):
    """The error names the rank, and the phase in which it was last seen. The collectives inside of
    an update are none of World's."""
    phase = "train of step 4" if how == "dies" else "serve of step 5"

    def update():
        raise RuntimeError("Timed out waiting 1000ms for recv operation to complete")

    async def one_is_late(world):
        world.doing("train of step 4")
        await world.barrier()
        if how != "dies":
            world.doing(phase)
        if world.rank == 0:
            await (world.run(update) if how == "hangs in training" else world.gather(None))
        elif how == "dies":
            os._exit(1)
        else:
            time.sleep(6.0)  # its event loop, too: as if it were stopped

    printed, _ = in_ranks(tmp_path, one_is_late, 2.0, notes=tmp_path if in_folder else None)
    waited = "rank 0 waited in vain, for 2 s at most"
    assert printed == f"{waited}: rank 1 didn't come, last seen in phase: {phase}\n"


def test_the_notes_are_gone(tmp_path):
    async def one_takes_them_along(world):
        await world.barrier()
        if world.rank == 1:
            # at once: rank 0 may be writing its note there
            (tmp_path / "notes").rename(tmp_path / "gone")
            os._exit(1)
        await world.barrier()

    (tmp_path / "notes").mkdir()
    printed, _ = in_ranks(tmp_path, one_takes_them_along, 30.0, notes=tmp_path / "notes")
    assert printed.endswith(": the ranks' notes are gone, so who didn't come is unknown\n")


def test_an_error_of_its_own_is_nobody_elses(tmp_path):
    """It is raised as it is."""

    def update():
        raise RuntimeError("shapes don't fit")

    async def both_fail(world):
        await world.barrier()
        await world.run(update)

    assert in_ranks(tmp_path, both_fail, 2.0) == ["shapes don't fit\n"] * 2
