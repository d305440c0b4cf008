"""World: the other controllers, met in small gloo collectives, and a thread for work that blocks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from config import UserError

if TYPE_CHECKING:
    from torch import Tensor

OTHERS_GIVE_UP_S = 2.0  # between the first rank whose collective times out and the last
# gloo's words where a rank hangs or is gone
BROKEN = ("imed out", "closed by peer", "reset by peer")


class World:
    """Rank, size and the collectives of the parallel controllers, over a gloo group of their own.

    ONE thread for all that blocks keeps their order. Each rank notes its phase and how many it has come to:
    an error names who didn't come. notes: a folder that all ranks share; None: the process group's store.
    """

    def __init__(self, device: str, timeout_s: float, notes: Path | None = None):
        import torch
        import torch.distributed as dist

        self._dist, self._torch = dist, torch
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._store, self._notes = dist.distributed_c10d._get_default_store(), notes
        self._timeout_s, self._arrivals, self._phase = timeout_s, 0, "starting"
        self.device = device
        # the current CUDA device is a property of the thread: `enter_device` sets it for the one that asks
        self._thread = ThreadPoolExecutor(1, "collective", initializer=self.enter_device)

    def enter_device(self) -> None:
        """Make this rank's GPU the calling thread's current one; nothing on CPU. Not collective."""
        if self.device.startswith("cuda"):
            self._torch.cuda.set_device(self.device)

    async def run(self, function: Callable, *args: Any) -> Any:
        """Run a blocking function off the event loop, after what was asked before it. Not collective."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._explained, function, args)

    async def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, by rank, on every rank (collective). For counts and flags, not payloads."""
        values, group = [None] * self.size, self._group
        await self.run(self._meet, lambda: self._dist.all_gather_object(values, value, group))
        return values

    async def gather_on_0(self, value: Any) -> list[Any]:
        """Every rank's `value`, by rank, on rank 0; nothing on the others (collective)."""
        values, group = [None] * self.size if self.rank == 0 else None, self._group
        await self.run(self._meet, lambda: self._dist.gather_object(value, values, 0, group))
        return values or []

    async def reduce(self, value: Any, total: Callable[[list], Any]) -> Any:
        """`total` of every rank's `value`, pair by pair, then of such totals, on every rank (collective)."""
        return await self.run(self._meet, self._reduce, value, total)

    def _reduce(self, value: Any, total: Callable[[list], Any]) -> Any:
        dist, box, distance = self._dist, [None], 1
        while distance < self.size and self.rank % (2 * distance) == 0:
            if self.rank + distance < self.size:
                dist.recv_object_list(box, src=self.rank + distance, group=self._group)
                value = total([value, box[0]])
            distance *= 2
        box = [value]
        if self.rank:
            dist.send_object_list(box, dst=self.rank - distance, group=self._group)
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    async def broadcast(self, value: Any) -> Any:
        """The value of rank 0, on every rank (collective)."""
        box, group = [value], self._group
        await self.run(self._meet, lambda: self._dist.broadcast_object_list(box, 0, group))
        return box[0]

    async def barrier(self) -> None:
        """Returns once every rank has called it (collective)."""
        await self.run(self._meet, lambda: self._dist.barrier(group=self._group))

    async def exchange(self, outgoing: dict[int, Any], senders: Iterable[int]) -> dict[int, Any]:
        """`outgoing[r]` goes to rank r; returns what came of `senders`, exactly those (collective)."""
        leaving = {rank: value for rank, value in outgoing.items() if rank != self.rank}
        pickled = {id(value): bytearray(pickle.dumps(value)) for value in leaving.values()}
        payloads = {rank: pickled[id(value)] for rank, value in leaving.items()}
        others = set(senders) - {self.rank}
        received = await self.run(self._meet, self._send_and_receive, payloads, others)
        return received | {rank: value for rank, value in outgoing.items() if rank == self.rank}

    def _send_and_receive(
        self, payloads: dict[int, bytearray], senders: set[int]
    ) -> dict[int, Any]:
        torch = self._torch
        sizes = {sender: torch.empty(1, dtype=torch.int64) for sender in senders}
        own_sizes = {rank: torch.tensor([len(payload)]) for rank, payload in payloads.items()}
        self._transfer(own_sizes, sizes)
        byte = torch.uint8
        buffers = {sender: torch.empty(int(size), dtype=byte) for sender, size in sizes.items()}
        outgoing = {rank: torch.frombuffer(data, dtype=byte) for rank, data in payloads.items()}
        self._transfer(outgoing, buffers)
        return {
            sender: pickle.loads(buffer.numpy().tobytes()) for sender, buffer in buffers.items()
        }

    def _transfer(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
        dist, group = self._dist, self._group
        requests = [
            dist.irecv(tensor, src=sender, group=group) for sender, tensor in incoming.items()
        ]
        requests += [dist.isend(tensor, dst=rank, group=group) for rank, tensor in outgoing.items()]
        for request in requests:
            request.wait()

    def _meet(self, collective: Callable, *args: Any) -> Any:
        self._arrivals += 1
        self._write_note()
        return collective(*args)

    def doing(self, phase: str) -> None:
        """Note what this rank is doing now, for the others, if it should hang. Not collective."""
        self._phase = phase
        self._thread.submit(self._write_note)

    def _write_note(self) -> None:
        note = f"{self._arrivals} {os.getpid()} {self._phase}"
        with contextlib.suppress(OSError, RuntimeError):  # a full disk, or rank 0 is gone
            if self._notes:
                (self._notes / f"rank{self.rank}").write_text(note)
            else:
                self._store.set(f"note of rank {self.rank}", note)

    def _read_note(self, rank: int) -> tuple[int, int, str]:
        """How many collectives a rank has come to, its process, its phase."""
        name, key = f"rank{rank}", f"note of rank {rank}"
        if self._notes:
            note = (self._notes / name).read_text() if name in os.listdir(self._notes) else ""
        else:
            note = self._store.get(key).decode() if self._store.check([key]) else ""
        arrivals, pid, phase = (note or "0 0 starting").split(" ", 2)
        return int(arrivals), int(pid), phase

    def _late(self) -> list[str]:
        """Who has come to fewer collectives, in words: those of this machine who are gone, if any are."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        try:
            notes = [(rank, *self._read_note(rank)) for rank in others]
        except (OSError, RuntimeError):
            return ["the ranks' notes are gone, so who didn't come is unknown"]
        late = [
            (rank, pid, phase) for rank, arrivals, pid, phase in notes if arrivals < self._arrivals
        ]
        gone = [each for each in late if self._notes and not is_alive(each[1])]
        sentence = "rank {} didn't come, last seen in phase: {}"
        return [sentence.format(rank, phase) for rank, _, phase in gone or late]

    def _explained(self, function: Callable, args: tuple) -> Any:
        """Call; if a collective fails because of another rank, the error names it, where that can be told."""
        try:
            return function(*args)
        except RuntimeError as error:
            if any(words in str(error) for words in BROKEN):  # also of Megatron's collectives
                # all who wait give up at about the same time: who doesn't is late
                self._arrivals += 1
                self._write_note()
                time.sleep(OTHERS_GIVE_UP_S)
            if not (late := self._late()):
                raise
            waited = f"rank {self.rank} waited in vain, for {self._timeout_s:g} s at most"
            raise RuntimeError(f"{waited}: {', '.join(late)}") from error

    def close(self) -> None:
        """End the thread. Not collective."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs: a zombie only waits for its parent."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def raise_on_all(world: World, work: Awaitable[Any]) -> None:
    """Await what may meet a user's error on one rank alone; then all raise the UserError (collective)."""
    error = ""
    try:
        await work
    except UserError as caught:
        error = str(caught)
    if error := await world.reduce(error, lambda errors: next(filter(None, errors), "")):
        raise UserError(error)


async def on_rank_0(world: World, function: Callable, *args: Any) -> Any:
    """A function's result on rank 0, or its OSError or UserError, on every rank (collective)."""
    value = error = None
    if world.rank == 0:
        try:
            value = await world.run(function, *args)
        except (OSError, UserError) as caught:
            error = caught
    value, error = await world.broadcast((value, error))
    if error:
        raise error
    return value
