"""World: the other controllers, met in small gloo collectives, and a thread for work that blocks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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


@dataclass
class Notes:
    """The notes of one machine's ranks on what they do: an error names the rank that didn't come.

    torch's monitored_barrier names it to rank 0 alone, and to nobody where a rank has died.
    """

    rank: int
    size: int
    folder: Path | None  # that all ranks share; None: they are on several machines, without notes
    arrivals: int = 0  # the collectives that this rank has come to
    phase: str = "starting"

    def arrive(self) -> None:
        """Note that this rank has come to one more collective."""
        self.arrivals += 1
        self.write()

    def write(self) -> None:
        if self.folder:
            with contextlib.suppress(OSError):  # a full disk
                note = f"{self.arrivals} {os.getpid()} {self.phase}"
                (self.folder / f"note of rank {self.rank}").write_text(note)

    def _read(self, rank: int) -> str:
        """Return a rank's note; OSError if the folder is gone."""
        name = f"note of rank {rank}"
        note = (self.folder / name).read_text() if name in os.listdir(self.folder) else ""
        return note or "0 0 starting"

    def late(self) -> list[str]:
        """Name those who have come to fewer collectives: the dead alone, if any are."""
        late = []
        dead = []
        for rank in range(self.size) if self.folder else ():
            try:
                arrivals, pid, phase = self._read(rank).split(" ", 2)
            except OSError:
                return ["the ranks' notes are gone, so who didn't come is unknown"]
            if rank != self.rank and int(arrivals) < self.arrivals:
                late.append(f"rank {rank} didn't come, last seen in phase: {phase}")
                if not is_alive(int(pid)):
                    dead.append(late[-1])
        return dead or late


class World:
    """The parallel controllers' collectives, over a gloo group of their own; ONE thread keeps their order."""

    def __init__(self, device: str, timeout_s: float, notes: Path | None = None):
        import torch
        import torch.distributed as dist

        self._dist = dist
        self._torch = torch
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.device = device
        self._timeout_s = timeout_s
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._notes = Notes(self.rank, self.size, notes)
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
        """Return every rank's `value`, by rank (collective). For counts and flags, not payloads."""
        values = [None] * self.size
        await self.run(self._meet, self._dist.all_gather_object, values, value, self._group)
        return values

    async def gather_on_0(self, value: Any) -> list[Any]:
        """Return every rank's `value`, by rank, on rank 0; nothing on the others (collective)."""
        values = [None] * self.size if self.rank == 0 else None
        await self.run(self._meet, self._dist.gather_object, value, values, 0, self._group)
        return values or []

    async def reduce(self, value: Any, total: Callable[[list], Any]) -> Any:
        """Return `total` of every rank's `value`, pair by pair, then of such totals (collective)."""
        return await self.run(self._meet, self._reduce, value, total)

    def _reduce(self, value: Any, total: Callable[[list], Any]) -> Any:
        dist = self._dist
        box = [None]
        distance = 1
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
        """Return the value of rank 0 (collective)."""
        box = [value]
        await self.run(self._meet, self._dist.broadcast_object_list, box, 0, self._group)
        return box[0]

    async def barrier(self) -> None:
        """Return once every rank has called it (collective)."""
        await self.run(self._meet, self._dist.barrier, self._group)

    async def exchange(self, outgoing: dict[int, Any], senders: Iterable[int]) -> dict[int, Any]:
        """Send `outgoing[r]` to rank r; return what came of `senders`, exactly those (collective)."""
        outgoing = dict(outgoing)
        own = {self.rank: outgoing.pop(self.rank)} if self.rank in outgoing else {}
        parcels = {rank: bytearray(pickle.dumps(value)) for rank, value in outgoing.items()}
        others = set(senders) - {self.rank}
        received = await self.run(self._meet, self._send_and_receive, parcels, others)
        return received | own

    def _send_and_receive(self, parcels: dict[int, bytearray], senders: set[int]) -> dict[int, Any]:
        """Exchange the sizes, then the bytes."""
        torch = self._torch
        sizes = {sender: torch.empty(1, dtype=torch.int64) for sender in senders}
        self._transfer({rank: torch.tensor([len(data)]) for rank, data in parcels.items()}, sizes)
        byte = torch.uint8
        buffers = {sender: torch.empty(int(size), dtype=byte) for sender, size in sizes.items()}
        outgoing = {rank: torch.frombuffer(data, dtype=byte) for rank, data in parcels.items()}
        self._transfer(outgoing, buffers)
        return {rank: pickle.loads(buffer.numpy().tobytes()) for rank, buffer in buffers.items()}

    def _transfer(self, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> None:
        dist = self._dist
        group = self._group
        requests = [dist.irecv(tensor, rank, group) for rank, tensor in incoming.items()]
        requests += [dist.isend(tensor, rank, group) for rank, tensor in outgoing.items()]
        for request in requests:
            request.wait()

    def _meet(self, collective: Callable, *args: Any) -> Any:
        self._notes.arrive()
        return collective(*args)

    def doing(self, phase: str) -> None:
        """Note what this rank is doing now, for the others, if it should hang. Not collective."""
        self._notes.phase = phase
        self._thread.submit(self._notes.write)

    def _explained(self, function: Callable, args: tuple) -> Any:
        """Call; if a collective fails because of another rank, the error names it, where that can be told."""
        try:
            return function(*args)
        except RuntimeError as error:
            if any(words in str(error) for words in BROKEN):  # also of Megatron's collectives
                # all who wait give up at about the same time, and say so: who doesn't is late
                self._notes.arrive()
                time.sleep(OTHERS_GIVE_UP_S)
            late = self._notes.late()
            if not late:
                raise
            waited = f"rank {self.rank} waited in vain, for {self._timeout_s:g} s at most"
            raise RuntimeError(f"{waited}: {', '.join(late)}") from error

    def close(self) -> None:
        """End the thread. Not collective."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def is_alive(pid: int) -> bool:
    """Tell whether a process of this machine runs: a zombie only waits for its parent."""
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
    error = await world.reduce(error, lambda errors: next(filter(None, errors), ""))
    if error:
        raise UserError(error)


async def on_rank_0(world: World, function: Callable, *args: Any) -> Any:
    """Return a function's result on rank 0, or raise its OSError or UserError (collective)."""
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
