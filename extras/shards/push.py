"""The push of shards: HybridFlow (arXiv 2409.19256), section 5.3. docs/push.md has a picture.

An engine's ranks lie among those that hold the parts of their shards, so only these are joined. Handles go to
the engine's lead, which posts them. SGLang copies the tensors into its parameters as they are (load_format
"direct"), so they have its names and its order: q, k and v in one, gate and up in one.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from engines import wire
from engines.engine import Offer
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
        """Push into the engines of these leads; other ranks only help to join (collective: the actor's)."""
        with pool.timeline.span("sync"):
            if self.lead not in leads:
                await pool.world.run(exhaust, iter(self.sharding))
            elif pool.own:
                offers = self._offers(pool.world.run)
                await pool.own.load(offers, self.shapes, "direct", self.actor.version)
            else:
                async for _ in self._offers(pool.world.run):
                    pass

    async def _offers(self, run: Callable) -> AsyncIterator[Offer]:
        """Yield each bucket's names, shapes and handles on all of the engine's ranks (collective: these)."""
        shards = wire.buckets(self.sharding)
        while bucket := await run(next, shards, None):
            flat, handle = shared(bucket)
            found = [None] * self.group.size()
            own = (wire.facts_of(bucket), handle)
            await run(dist.all_gather_object, found, own, self.group)
            yield [fact for facts, _ in found for fact in facts], [handle for _, handle in found]
            await run(dist.barrier, self.group)  # the engine has read `flat`
            del flat


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
        starts = range(0, shape.tp, stride)
        joined = [dist.new_group(ranks[i : i + stride], timeout) for i in starts]
        engines = [dist.new_group(ranks[i::stride], timeout, "gloo") for i in range(stride)]
        if dist.get_rank() in ranks:
            place = ranks.index(dist.get_rank())
            own = ShardPush(actor, joined[place // stride], engines[place % stride])
    return own
