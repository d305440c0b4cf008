"""The outside of a controller: the other controllers, met in small collectives, and a thread for work that blocks.

controller.py knows only the methods of `World`; here they are gloo collectives under torchrun. The tests hold another World with the
same methods, in which many ranks live in one process on a virtual clock.
"""

from __future__ import annotations

import asyncio
import pickle
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any


class World:
    """Rank, size and the collectives of the parallel controllers, over a gloo group of their own.

    Every method but `run` is collective: all ranks call it, in the same order. They are coroutines, so that a controller that waits
    for the others still serves its event loop. Everything blocking runs on ONE thread: collectives keep their order that way.
    """

    def __init__(self, device: str, timeout_s: float):
        import torch
        import torch.distributed as dist

        self._dist, self._torch = dist, torch
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.device = device
        # the current CUDA device is a property of the thread: `enter_device` sets it for the one that asks
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="collective", initializer=self.enter_device)

    def enter_device(self) -> None:
        """Make this rank's GPU the calling thread's current one; nothing on CPU. Not collective."""
        if self.device.startswith("cuda"):
            self._torch.cuda.set_device(self.device)

    async def run(self, function, *args) -> Any:
        """Run a blocking function (a training call, a file) off the event loop, after what was asked before it. Not collective."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    async def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank (collective). For counts, lengths, flags: never for payloads."""
        values = [None] * self.size
        await self.run(lambda: self._dist.all_gather_object(values, value, group=self._group))
        return values

    async def broadcast(self, value: Any, source: int = 0) -> Any:
        """The value of rank `source`, on every rank (collective)."""
        box = [value]
        await self.run(lambda: self._dist.broadcast_object_list(box, src=source, group=self._group))
        return box[0]

    async def barrier(self) -> None:
        """Returns once every rank has called it (collective)."""
        await self.run(lambda: self._dist.barrier(group=self._group))

    async def exchange(self, outgoing: dict[int, Any]) -> dict[int, Any]:
        """Point to point: `outgoing[r]` goes to rank r, and what ranks sent here comes back by sender (collective).

        Payloads travel directly between the two ranks. Nobody but the ranks of this run can connect to the group, so unpickling
        what arrives opens no door.
        """
        payloads = {rank: pickle.dumps(value) for rank, value in outgoing.items() if rank != self.rank}
        sizes = await self.gather({rank: len(payload) for rank, payload in payloads.items()})
        incoming = {sender: sent[self.rank] for sender, sent in enumerate(sizes) if self.rank in sent}
        received = await self.run(self._send_and_receive, payloads, incoming)
        if self.rank in outgoing:
            received[self.rank] = outgoing[self.rank]
        return received

    def _send_and_receive(self, payloads: dict[int, bytes], incoming: dict[int, int]) -> dict[int, Any]:
        torch, dist = self._torch, self._dist
        buffers = {sender: torch.empty(size, dtype=torch.uint8) for sender, size in incoming.items()}
        requests = [dist.irecv(buffer, src=sender, group=self._group) for sender, buffer in buffers.items()]
        for rank, payload in payloads.items():
            requests.append(dist.isend(torch.frombuffer(bytearray(payload), dtype=torch.uint8), dst=rank, group=self._group))
        for request in requests:
            request.wait()
        return {sender: pickle.loads(buffer.numpy().tobytes()) for sender, buffer in buffers.items()}

    def close(self) -> None:
        """End the thread. Not collective."""
        self._thread.shutdown(wait=False, cancel_futures=True)
