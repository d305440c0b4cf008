"""Pushes to engines on ranks without the actor: one rank of each of the actor's copies sends all tensors.

The tensors go over the process group of a sender and its receivers, gloo or NCCL. Each receiver then loads
its own engine, as a rank with the actor does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from engines.wire import buckets
from training.groups import own_device

Named = Iterator[tuple[str, Tensor]]  # tensors by their Hugging Face names


@dataclass
class Route:
    """A sender and its receivers; this rank is one of them."""

    sender: int
    group: ProcessGroup
    received: int = 0  # bytes that this rank received in the last push

    def carry(self, named: Named) -> Named:
        """Yield the sender's tensors on all ranks of the route (collective: the route's ranks)."""
        return self._sent(named) if dist.get_rank() == self.sender else self._received()

    @torch.no_grad()
    def _sent(self, named: Named) -> Named:
        for bucket in buckets(named):
            self._broadcast_object([(name, t.shape, t.dtype) for name, t in bucket])
            flat = torch.cat([tensor.reshape(-1) for _, tensor in bucket])
            dist.broadcast(flat, self.sender, self.group)
            del flat  # free it before an engine loads the bucket
            yield from bucket
        self._broadcast_object([])

    def _received(self) -> Named:
        self.received = 0
        while facts := self._broadcast_object(None):
            sizes = [shape.numel() for _, shape, _ in facts]
            _, _, dtype = facts[0]
            flat = torch.empty(sum(sizes), dtype=dtype, device=own_device())
            dist.broadcast(flat, self.sender, self.group)
            self.received += flat.nbytes
            for (name, shape, _), part in zip(facts, flat.split(sizes), strict=True):
                yield name, part.view(shape)

    def _broadcast_object(self, value: list | None) -> list:
        box = [value]
        dist.broadcast_object_list(box, self.sender, self.group)
        return box[0]


def connect(senders: Sequence[int], receivers: Sequence[int], timeout_s: float) -> Route | None:
    """Assign the receivers to the senders in turn; return this rank's route (collective: all ranks)."""
    own = None
    for number, sender in enumerate(senders):
        ranks = [sender, *receivers[number :: len(senders)]]
        if len(ranks) > 1:
            group = dist.new_group(ranks, timedelta(seconds=timeout_s), sort_ranks=False)
            if dist.get_rank() in ranks:
                own = Route(sender, group)
    return own
