"""World: small gloo collectives with the other controllers, and a thread for blocking work."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import pickle
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import psutil

from runtime.errors import UserError

WAIT_S = 0.02  # interval between checks that all ranks are there
# gloo's errors contain these if a rank hangs or is gone
BROKEN = ("imed out", "closed by peer", "reset by peer")


class World:
    """The controllers' collectives, over a gloo group of their own; ONE thread keeps them in order."""

    def __init__(self, device: str, timeout_s: float):
        import torch
        import torch.distributed as dist

        self._dist = dist
        self._torch = torch
        self.rank = dist.get_rank()
        self.device = device
        self._timeout_s = timeout_s
        self._store = dist.distributed_c10d._get_default_store()
        self._waits = 0  # calls of `wait_for_all`
        self.is_parted = False
        self._join(range(dist.get_world_size()))
        # every thread has its own current CUDA device: this one calls `enter_device` first
        self._thread = ThreadPoolExecutor(1, "collective", initializer=self.enter_device)

    def _join(self, *parts: Sequence[int]) -> None:
        """Make a group for each set of ranks, and join this rank's (collective: all ranks)."""
        timeout = timedelta(seconds=self._timeout_s)
        for ranks in parts:
            group = self._dist.new_group(ranks, backend="gloo", timeout=timeout)
            if self.rank in ranks:
                self._group = group
                self.ranks = ranks  # the run's, or a `part`'s
                self.size = len(ranks)
                self.index = ranks.index(self.rank)  # position among them

    def part(self, ranks: Sequence[int]) -> World:
        """Return the World of these ranks; all others form a second one (collective: its ranks)."""
        others = [rank for rank in self.ranks if rank not in ranks]
        if not others:
            return self
        self.is_parted = True
        part = copy.copy(self)
        part._join(ranks, others)
        return part

    async def wait_for_all(self) -> None:
        """Return once all ranks call it, however late (collective: all ranks); at once without parts."""
        if not self.is_parted:
            return
        self._waits += 1
        name = f"wait {self._waits}"
        if self._store.add(name, 1) == self.size:
            self._store.set(f"{name} is over", "")
        while not self._store.check([f"{name} is over"]):  # unlike `add`, `check` writes nothing
            await asyncio.sleep(WAIT_S)

    def enter_device(self) -> None:
        """Make this rank's GPU the calling thread's current one; no-op on CPU. Not collective."""
        if self.device.startswith("cuda"):
            self._torch.cuda.set_device(self.device)

    async def run(self, function: Callable, *args: Any) -> Any:
        """Run a blocking function off the event loop, after all earlier calls. Not collective."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, function, *args)

    async def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, by rank (collective: its ranks). For counts and flags only."""
        values = [None] * self.size
        await self.run(self._dist.all_gather_object, values, value, self._group)
        return values

    async def gather_on_0(self, value: Any) -> list[Any]:
        """Return every rank's `value`, by rank, on the first rank; [] on others (collective: its ranks)."""
        values = None if self.index else [None] * self.size
        await self.run(self._dist.gather_object, value, values, self.ranks[0], self._group)
        return values or []

    async def reduce(self, value: Any, total: Callable[[list], Any]) -> Any:
        """Combine every rank's `value` pairwise with `total`, in a binary tree (collective: its ranks)."""
        return await self.run(self._reduce, value, total)

    def _reduce(self, value: Any, total: Callable[[list], Any]) -> Any:
        dist = self._dist
        box = [None]
        distance = 1
        while distance < self.size and self.index % (2 * distance) == 0:
            if self.index + distance < self.size:
                dist.recv_object_list(box, self.ranks[self.index + distance], self._group)
                value = total([value, box[0]])
            distance *= 2
        box = [value]
        if self.index:
            dist.send_object_list(box, self.ranks[self.index - distance], self._group)
        dist.broadcast_object_list(box, self.ranks[0], self._group)
        return box[0]

    async def broadcast(self, value: Any) -> Any:
        """Return the first rank's value (collective: its ranks)."""
        box = [value]
        await self.run(self._dist.broadcast_object_list, box, self.ranks[0], self._group)
        return box[0]

    async def barrier(self) -> None:
        """Return once every rank has called it (collective: its ranks)."""
        await self.run(self._dist.barrier, self._group)

    async def exchange(self, outgoing: dict[int, Any]) -> dict[int, Any]:
        """Send `outgoing[r]` to rank r, but no None; return values by sender (collective: its ranks)."""
        received = await self.run(self._exchange, outgoing | {self.rank: None})
        received[self.rank] = outgoing.get(self.rank)
        return {rank: value for rank, value in received.items() if value is not None}

    def _exchange(self, outgoing: dict[int, Any]) -> dict[int, Any]:
        torch = self._torch
        exchange = partial(self._dist.all_to_all_single, group=self._group)
        parcels = [pickle.dumps(outgoing.get(rank)) for rank in self.ranks]
        sizes = torch.tensor(list(map(len, parcels)))
        coming = torch.empty_like(sizes)
        exchange(coming, sizes)
        buffer = torch.empty(int(coming.sum()), dtype=torch.uint8)
        sent = torch.frombuffer(bytearray().join(parcels), dtype=torch.uint8)
        exchange(buffer, sent, coming.tolist(), sizes.tolist())
        parts = buffer.split(coming.tolist())
        values = [pickle.loads(part.numpy().tobytes()) for part in parts]
        return dict(zip(self.ranks, values, strict=True))

    @contextlib.contextmanager
    def explaining(self, phase: Callable[[], str]) -> Iterator[None]:
        """Add this rank's phase to the error of a collective that another rank broke. Not collective."""
        try:
            yield
        except RuntimeError as error:
            if any(words in str(error) for words in BROKEN):  # or from Megatron's collectives
                waited = f"rank {self.rank} waited in vain for the others"
                error.add_note(f"{waited}, for {self._timeout_s:g} s at most ({phase()})")
            raise

    def close(self) -> None:
        """End the thread. Not collective."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def is_alive(pid: int) -> bool:
    """True if a process of this machine runs; a zombie, which only waits for its parent, doesn't."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def raise_on_all(world: World, work: Awaitable[Any]) -> None:
    """Await `work`. If it raises UserError on some ranks, all raise it (collective: the world's ranks)."""
    error = ""
    try:
        await work
    except UserError as caught:
        error = str(caught)
    error = await world.reduce(error, lambda errors: next(filter(None, errors), ""))
    if error:
        raise UserError(error)


async def on_rank_0(world: World, function: Callable, *args: Any) -> Any:
    """Return a function's result on rank 0, or raise its OSError or UserError (collective: its ranks)."""
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
