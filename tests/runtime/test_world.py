"""World: the collectives of real ranks over gloo, and the errors about a rank that doesn't come."""

import asyncio
import os
import sys
import traceback
from datetime import timedelta

import pytest
import torch.distributed as dist

from runtime.world import World
from tests.support.patience import LIMIT_S, PATIENCE

SHORT_S = 6.0 * PATIENCE  # timeout of a collective to which one rank comes too late


def in_ranks(folder, program, timeout_s, size=2):
    """Run `program(world)` in forked ranks; return what each printed, last an exception's text and notes."""
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            sys.stdout = sys.stderr = (folder / str(rank)).open("w")
            try:
                where = dict(rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT_S))
                dist.init_process_group("gloo", f"file://{folder}/store", **where)
                asyncio.run(program(World("cpu", timeout_s)))
            except RuntimeError as error:
                print(error, *vars(error).get("__notes__", []), sep="\n")
            except BaseException:  # a forked rank must not continue as pytest
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
    print(await world.exchange({1 - world.rank: b"to the other", world.rank: b"to myself"}))
    print(await world.exchange({1: b"passed on"} if world.rank == 0 else {}))
    await world.barrier()


def test_collectives(tmp_path):
    """All ranks, or only rank 0, must receive every rank's value in rank order; parcels go point to point."""
    assert in_ranks(tmp_path, meet, LIMIT_S) == [
        "[0, 10] from 0\n[0, 1]\n{0: b'to myself', 1: b'to the other'}\n{}\n",
        "[0, 10] from 0\n[]\n{0: b'to the other', 1: b'to myself'}\n{0: b'passed on'}\n",
    ]


PART = (0, 2, 4)


async def meet_in_parts(world):
    part, store = world.part(PART), dist.distributed_c10d._get_default_store()
    assert world.part(range(5)) is world
    print(part.rank, part.index, part.size, [*part.ranks])
    if world.rank not in PART:
        store.wait(["the first is done"], timedelta(seconds=LIMIT_S))
    print(await part.gather(world.rank), await part.broadcast(world.rank))
    print(await part.gather_on_0(world.rank), await part.reduce(f"{world.rank}", "".join))
    right = part.ranks[(part.index + 1) % part.size]
    print(await part.exchange({right: f"for {right}", part.rank: "mine"}))
    await part.barrier()
    store.set("the first is done", "")
    await world.wait_for_all()
    print(await world.reduce(f"{world.rank}", "".join))


def test_parts_meet_by_themselves(tmp_path):
    """Each part must have its first rank, places and order of totals. Parcels name ranks of the run."""
    said = in_ranks(tmp_path, meet_in_parts, LIMIT_S, size=5)
    for ranks in (PART, (1, 3)):
        first, text = ranks[0], "".join(map(str, ranks))
        for place, rank in enumerate(ranks):
            on_0 = [*ranks] if rank == first else []
            parcels = dict(sorted({ranks[place - 1]: f"for {rank}", rank: "mine"}.items()))
            lines = [f"{rank} {place} {len(ranks)} {[*ranks]}", f"{[*ranks]} {first}"]
            lines += [f"{on_0} {text}", f"{parcels}", "01234"]
            assert said[rank].splitlines() == lines


def test_who_waits_for_all_waits_longer_than_a_collective(tmp_path):
    """A part may take any time. Nobody may pass before all are there, and it can be used again."""

    async def one_is_late(world):
        world.part((0,))
        for number in range(2):
            if world.rank == number:  # the second time just enough to show
                await asyncio.sleep((1.25 * SHORT_S, 0.5)[number])
            dist.distributed_c10d._get_default_store().add(f"come {number}", 1)
            await world.wait_for_all()
            print(dist.distributed_c10d._get_default_store().add(f"come {number}", 0))
        print(await world.gather(world.rank))

    assert in_ranks(tmp_path, one_is_late, SHORT_S, size=3) == ["3\n3\n[0, 1, 2]\n"] * 3


@pytest.mark.parametrize("how", ["hangs", "hangs in training", "dies"])
def test_an_error_says_in_which_phase_this_rank_waited(tmp_path, how):
    """It must name the phase, also in a part of the ranks. Collectives inside an update aren't World's."""

    def update():
        raise RuntimeError("Timed out waiting 1000ms for recv operation to complete")

    async def one_is_late(world):
        part, store = world.part((0, 2)), dist.distributed_c10d._get_default_store()
        await part.barrier()
        if world.rank == 0:
            try:
                with world.explaining(lambda: "step 5: serving"):
                    await (world.run(update) if how == "hangs in training" else part.gather(None))
            finally:
                store.set("rank 0 has ended", "")
        elif how == "dies":
            os._exit(1)
        else:  # also its event loop, as if it were stopped
            store.wait(["rank 0 has ended"], timedelta(seconds=LIMIT_S))

    said = in_ranks(tmp_path, one_is_late, SHORT_S, size=3)
    waited = f"rank 0 waited in vain for the others, for {SHORT_S:g} s at most (step 5: serving)"
    assert said[0].splitlines()[-1] == waited


def test_an_error_of_its_own_is_nobody_elses(tmp_path):
    def update():
        raise RuntimeError("shapes don't fit")

    async def both_fail(world):
        await world.barrier()
        with world.explaining(lambda: "training"):
            await world.run(update)

    assert in_ranks(tmp_path, both_fail, LIMIT_S) == ["shapes don't fit\n"] * 2
