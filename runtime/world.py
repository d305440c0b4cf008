"""The outside of a controller: the other controllers, met in small collectives, and a thread for work that blocks.

controller.py knows only the methods of `World`; here they are gloo collectives under torchrun. The tests hold another World with the
same methods, in which many ranks live in one process on a virtual clock.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

LAST_WORD_S = 2.0  # between the first rank that gives up and the last


class World:
    """Rank, size and the collectives of the parallel controllers, over a gloo group of their own.

    Every method but `run` is collective: all ranks call it, in the same order. They are coroutines, so that a controller that waits
    for the others still serves its event loop. Everything blocking runs on ONE thread: collectives keep their order that way.

    Each rank notes how many collectives it has come to and what it is doing; when one fails, the error names the ranks that didn't
    come. notes: a folder that all ranks share, for these notes; default: the store of the process group, where only that is shared.
    """

    def __init__(self, device: str, timeout_s: float, notes: Path | None = None):
        import torch
        import torch.distributed as dist

        self._dist, self._torch = dist, torch
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._store, self._timeout_s = dist.PrefixStore("arrivals", dist.distributed_c10d._get_default_store()), timeout_s
        self._notes = notes  # a store in a file would grow with every note
        self._arrivals, self._phase = 0, "starting"
        self.device = device
        # the current CUDA device is a property of the thread: `enter_device` sets it for the one that asks
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="collective", initializer=self.enter_device)

    def enter_device(self) -> None:
        """Make this rank's GPU the calling thread's current one; nothing on CPU. Not collective."""
        if self.device.startswith("cuda"):
            self._torch.cuda.set_device(self.device)

    async def run(self, function, *args) -> Any:
        """Run a blocking function (a training call, a file) off the event loop, after what was asked before it. Not collective."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._explained, function, args)

    async def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank (collective). For counts, lengths, flags: never for payloads."""
        values = [None] * self.size
        await self.run(self._meet, lambda: self._dist.all_gather_object(values, value, group=self._group))
        return values

    async def broadcast(self, value: Any, source: int = 0) -> Any:
        """The value of rank `source`, on every rank (collective)."""
        box = [value]
        await self.run(self._meet, lambda: self._dist.broadcast_object_list(box, src=source, group=self._group))
        return box[0]

    async def barrier(self) -> None:
        """Returns once every rank has called it (collective)."""
        await self.run(self._meet, lambda: self._dist.barrier(group=self._group))

    def _meet(self, collective) -> None:
        self._note()
        collective()

    def doing(self, phase: str) -> None:
        """Say what this rank is doing now, for the others, if it should hang. Not collective."""
        self._phase = phase
        self._thread.submit(self._tell)

    def _note(self) -> None:
        self._arrivals += 1
        self._tell()

    def _tell(self) -> None:
        note = f"{self._arrivals} {self._phase}"
        if self._notes:
            (self._notes / f"rank{self.rank}").write_text(note)
        else:
            self._store.set(str(self.rank), note)

    def _told_by(self, rank: int) -> str:
        if self._notes:
            path = self._notes / f"rank{rank}"
            return path.read_text() if path.exists() else ""
        return self._store.get(str(rank)).decode() if self._store.check([str(rank)]) else ""

    def _explained(self, function, args) -> Any:
        """Call; if a collective in it fails because of another rank, the error says which, where that can be told."""
        try:
            return function(*args)
        except RuntimeError as error:
            if "imed out" in str(error):  # gloo's word; also of Megatron's collectives, in training
                self._note()  # all who wait give up at about the same time: who doesn't is the one that they waited for
                time.sleep(LAST_WORD_S)
            late = self._late()
            if not late:
                raise
            raise RuntimeError(f"rank {self.rank} waited in vain, for {self._timeout_s:g} s at most: {late}") from error

    def _late(self) -> str:
        """The ranks that have come to fewer collectives than this one, and what each was doing last."""
        seen = {rank: (self._told_by(rank) or "0 starting").split(" ", 1) for rank in range(self.size)}
        late = {rank: phase for rank, (count, phase) in seen.items() if int(count) < self._arrivals}
        return ", ".join(f"rank {rank} didn't come, last seen in phase: {phase}" for rank, phase in late.items())

    async def exchange(self, outgoing: dict[int, Any]) -> dict[int, Any]:
        """Point to point: `outgoing[r]` goes to rank r, and what ranks sent here comes back by sender (collective).

        Payloads travel directly between the two ranks. Nobody but the ranks of this run can connect to the group, so unpickling
        what arrives opens no door.
        """
        payloads = {rank: pickle.dumps(value) for rank, value in outgoing.items() if rank != self.rank}
        sizes = await self.gather({rank: len(payload) for rank, payload in payloads.items()})
        incoming = {sender: sent[self.rank] for sender, sent in enumerate(sizes) if self.rank in sent}
        received = await self.run(self._send_and_receive, payloads, incoming)  # right after all have met
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
