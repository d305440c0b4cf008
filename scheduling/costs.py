"""What things take on a cluster: closed forms of devices, models and layouts. Pure.

In seconds, bytes, tokens and floating-point operations (FLOPs). The constants are the caller's, with the
points that they were fitted on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from config import UserError

BF16_BYTES = 2  # of a parameter, and of a number in the KV cache


class Device(NamedTuple):
    """One accelerator, as its data sheet says. Bandwidths in bytes/s."""

    flops: float  # a second, bfloat16, dense
    memory: float  # bytes
    hbm: float
    network: float  # to other machines, its part
    host: float  # to its machine's memory
    link: float = math.inf  # to the others in its machine


class Model(NamedTuple):
    params: float
    layers: int
    hidden: int
    kv_width: int  # key heads * size of a head
    active: float = 0.0  # parameters that a token meets; 0: all
    cuts: int = 0  # what tensor parallelism has to divide; 0: it may cut as it likes

    @property
    def bytes(self) -> float:
        return BF16_BYTES * self.params

    @property
    def flops(self) -> float:
        """Of one token forward, without attention."""
        return 2 * (self.active or self.params)

    @property
    def kv_bytes(self) -> float:
        """Of one token: keys and values of all layers."""
        return BF16_BYTES * 2 * self.layers * self.kv_width

    def reduced_bytes(self, tp: int) -> float:
        """Through a rank's link, of one token forward: two all-reduces a layer, in rings of tp ranks."""
        return 2 * self.layers * 2 * (tp - 1) / tp * BF16_BYTES * self.hidden


FULL = 16  # sequences from which an engine doesn't read prompts between any two decode steps


@dataclass(frozen=True)
class Decode:
    """A decode step of b sequences with c tokens in all takes `fixed + each * b + context * c` seconds.

    prefill: seconds a prompt token, after `read` for all that are read at once. apart: decode steps between
    two such passes, from FULL sequences on. most: sequences at once. kv_tokens: room for contexts. steps:
    decode steps that one token of the simulation stands for.
    """

    fixed: float
    each: float = 0.0
    context: float = 0.0
    prefill: float = 0.0
    read: float = 0.0
    apart: int = 0
    most: int = 256
    kv_tokens: float = math.inf
    steps: int = 1

    def _pace(self, batch: int, context: float) -> tuple[float, float]:
        """(p, q): p * v + q * v**2 seconds until each has v tokens more.

        The k-th of n steps reads (k - 1) * b tokens more than the first, all of them n * (n - 1) / 2 * b.
        """
        slope = self.context * batch
        first = self.fixed + self.each * batch + self.context * context
        return first - slope / (2 * self.steps), slope / 2

    def seconds(self, tokens: float, batch: int, context: float) -> float:
        """Until each sequence of a batch with that many tokens in all has so many more."""
        p, q = self._pace(batch, context)
        return (p + q * tokens) * tokens

    def tokens(self, seconds: float, batch: int, context: float) -> float:
        """The inverse of `seconds`."""
        p, q = self._pace(batch, context)
        return 2 * seconds / (p + math.sqrt(p * p + 4 * q * seconds)) if p and seconds else 0.0


def decode_of(
    model: Model,
    device: Device,
    tp: int,
    most: int = 256,
    *,
    memory: float = 0.75,
    weights: float = 1.0,
    kv: float = 1.0,
    flops: float = 1.0,
    prefill: float = 1.0,
    layer_s: float = 0.0,
    reduce_s: float = 0.0,
    sequence_s: float = 0.0,
) -> Decode:
    """An engine of tp devices. UserError if the model doesn't fit into `memory`, a part of theirs.

    weights, kv: parts of the bandwidth at which they are read; flops, prefill: of the FLOPs, decoding and
    reading prompts. On top for each in a step: layer_s of a layer, sequence_s of a sequence, reduce_s of an
    all-reduce for each doubling of its ranks.
    """
    room = memory * device.memory * tp - model.bytes
    if room <= 0:
        weights_gb = f"{model.bytes / 1e9:.0f} GB of weights"
        raise UserError(f"{weights_gb} leave {tp} devices no room for a KV cache")
    reducing = model.reduced_bytes(tp) / device.link
    layer_s += 2 * reduce_s * math.log2(tp)
    return Decode(
        fixed=model.layers * layer_s + model.bytes / tp / (weights * device.hbm),
        each=sequence_s + model.flops / tp / (flops * device.flops) + reducing,
        context=model.kv_bytes / tp / (kv * device.hbm),
        prefill=model.flops / tp / (prefill * device.flops) + reducing,
        most=most,
        kv_tokens=room / model.kv_bytes,
    )


@dataclass(frozen=True)
class Passes:
    """A trainer's seconds for the micro-batches of its own model-parallel group.

    token, square: of a sequence forward, by its tokens and their square. micro_batch, update: more for each.
    stages: of its pipeline. backward: over forward.
    """

    token: float
    square: float = 0.0
    micro_batch: float = 0.0
    update: float = 0.0
    stages: float = 1
    backward: float = 2.0

    def cost(self, tokens: int) -> float:
        return self.token * tokens + self.square * tokens**2

    def forward_s(self, micro_batches: Iterable[list[int]]) -> float:
        """Of lengths [micro-batch][sequence]. Filling and draining the pipeline takes as one each."""
        each = [
            self.micro_batch + sum(map(self.cost, lengths)) for lengths in micro_batches if lengths
        ]
        return sum(each) * (1 + (self.stages - 1) / max(1, len(each)))

    def update_s(self, micro_batches: Iterable[list[int]]) -> float:
        """Forward and backward over a mini-batch, then the optimizer's step."""
        return self.update + (1 + self.backward) * self.forward_s(micro_batches)


def passes_of(
    model: Model, device: Device, ranks: int, mfu: float, tp: int = 1, **more: float
) -> Passes:
    """Over the ranks of a model-parallel group, at `mfu` of their FLOPs; more: of Passes.

    Causal attention over s tokens forward: 2 * layers * hidden * s**2 FLOPs. The stages' all-reduces, each of
    tp ranks, run beside each other; backward has as many of them as forward.
    """
    speed = ranks * mfu * device.flops
    reducing = model.reduced_bytes(tp) / device.link / (ranks // tp)
    token = model.flops / speed + reducing
    more = {"backward": 2 - reducing / token} | more
    return Passes(token, 2 * model.layers * model.hidden / speed, **more)
