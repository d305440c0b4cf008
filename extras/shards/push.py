"""The push of shards: joins each engine rank's shard from the actor's, and hands it over without a copy.

Each rank of an engine reads its shard from its own rank's memory. Only handles go to the engine's lead, which
posts them. SGLang copies the tensors into its parameters as they are (load_format "direct"), so they have its
names and its order: q, k and v in one, gate and up in one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from engines import wire
from engines.pool import Pool, exhaust
from inputs.hf_directory import checkpoint_shapes
from scheduling.layout import Placement
from training.resharding import Gathering
from training.trainer import Trainer

# what SGLang fuses: Hugging Face's part -> SGLang's
FUSED = {r"\b[qkv]_proj\b": "qkv_proj", r"\b(gate|up)_proj\b": "gate_up_proj"}
BY_COLUMN = ("o_proj.weight", "down_proj.weight")
BY_ROW = ("embed_tokens.weight", "lm_head.weight")  # besides what is fused


def sglang_name(name: str) -> str:
    """Return SGLang's name of the parameter that holds a Hugging Face tensor."""
    for part, whole in FUSED.items():
        name = re.sub(part, whole, name)
    return name


def shard_shapes(shapes: dict[str, list[int]], tp: int) -> dict[str, list[int]]:
    """Return the shapes of an engine rank's parameters, by SGLang's names. shapes: a directory's."""
    found: dict[str, list[int]] = {}
    for name, shape in shapes.items():
        own = sglang_name(name)
        shard = list(shape)
        if name.endswith(BY_COLUMN):
            shard[1] //= tp
        elif name.endswith(BY_ROW) or own != name:
            shard[0] //= tp
        if own in found:
            shard[0] += found[own][0]
        found[own] = shard
    return found


class Sharding(Gathering):
    """Joins one shard of every tensor, in SGLang's layout, instead of whole tensors."""

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's shards with SGLang's names (collective: a copy's ranks)."""
        for names, tensors in self.parts():
            shard = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
            yield sglang_name(names[0]), shard


class ShardPush:
    """This rank's part in pushes of shards. group: the ranks of an engine, which a split may not have."""

    def __init__(self, actor: Trainer, joined: ProcessGroup, group: ProcessGroup):
        self.actor = actor
        self.sharding = Sharding(actor.gpt, joined)
        self.group = group
        self.lead = dist.get_global_rank(group, 0)
        self.shapes = shard_shapes(checkpoint_shapes(actor.model_dir), group.size())

    @property
    def received(self) -> int:
        """The bytes of weights that this rank received in the last push."""
        return self.sharding.received

    async def load(self, pool: Pool, leads: tuple[int, ...]) -> None:
        """Push into the engines of these leads (collective: the actor's ranks).

        Each bucket is freed once the engine has read it. A rank whose engine isn't among them only helps
        to join.
        """
        assert self.actor.awake, "the actor sleeps: its weights are not there"
        run = pool.world.run
        with pool.timeline.span("sync"):
            if self.lead not in leads:
                await run(exhaust, iter(self.sharding))
                return
            update = nullcontext()
            if pool.own:
                update = pool.own.updating(self.shapes, "direct", self.actor.version)
            async with update as load:
                shards = wire.buckets(self.sharding)
                while bucket := await run(next, shards, None):
                    flat, handle = shared(bucket)
                    offers = await run(self._gather, (wire.facts_of(bucket), handle))
                    if load:
                        facts = [fact for of_rank, _ in offers for fact in of_rank]
                        await load(facts, [handle for _, handle in offers])
                    await run(dist.barrier, self.group)  # the engine has read `flat`
                    del flat

    def _gather(self, value: Any) -> list[Any]:
        values = [None] * self.group.size()
        dist.all_gather_object(values, value, self.group)
        return values


def shared(bucket: list[tuple[str, Tensor]]) -> tuple[Tensor, str]:
    """Copy a bucket to flat memory; return that, and SGLang's "direct" payload, a handle on it."""
    flat = wire.flat_copy(bucket)
    parts = flat.split([tensor.nbytes for _, tensor in bucket])
    named = []
    for (name, tensor), part in zip(bucket, parts, strict=True):
        named.append((name, part.view(tensor.dtype).view(tensor.shape)))
    return flat, wire.handle_of(named)


def connect(placement: Placement, actor: Trainer, timeout_s: float) -> ShardPush | None:
    """Return this rank's part in the pushes; None if it doesn't hold the actor (collective: all ranks)."""
    timeout = timedelta(seconds=timeout_s)
    shape = placement.actor
    stride = placement.stride("rollout")
    own = None
    for first in range(0, len(shape.ranks), shape.tp):
        ranks = shape.ranks[first : first + shape.tp]
        joined = []
        for start in range(0, shape.tp, stride):
            joined.append(dist.new_group(ranks[start : start + stride], timeout))
        engines = []
        for start in range(stride):
            engines.append(dist.new_group(ranks[start::stride], timeout, backend="gloo"))
        if dist.get_rank() in ranks:
            place = ranks.index(dist.get_rank())
            own = ShardPush(actor, joined[place // stride], engines[place % stride])
    return own
