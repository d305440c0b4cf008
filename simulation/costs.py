"""The costs of a cluster by closed forms, in seconds, bytes, tokens and floating-point operations. Pure.

The constants are the caller's, with the points that they were fitted on.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from runtime.errors import UserError

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
        """FLOPs of one token forward, without attention."""
        return 2 * (self.active or self.params)

    @property
    def kv_bytes(self) -> float:
        """Bytes of one token's keys and values, all layers."""
        return BF16_BYTES * 2 * self.layers * self.kv_width

    def reduced_bytes(self, tp: int) -> float:
        """Bytes of one token forward through a rank's link: two all-reduces a layer, in rings of tp."""
        return 2 * self.layers * 2 * (tp - 1) / tp * BF16_BYTES * self.hidden

    def updated_bytes(self, ranks: int, copies: int) -> float:
        """Bytes that a rank sends in an update of a model on so many ranks: float32 gradients are reduced
        over its copies, weights gathered."""
        return (4 + BF16_BYTES) * self.params / ranks * (copies - 1) / copies


@dataclass(frozen=True)
class Decode:
    """An engine: a decode step of b sequences with c tokens in all takes `fixed + each * b + context * c`
    seconds. Between two steps prompts are read in one pass, for which all sequences wait."""

    fixed: float
    each: float = 0.0
    context: float = 0.0
    prefill: float = 0.0  # seconds to read a prompt token
    most: int = 256  # sequences at once
    kv_tokens: float = math.inf  # room for contexts
    read: float = 0.0  # seconds of a pass that reads prompts; `prefill` is on top
    apart: int = 0  # decode steps between two such passes, from engine.FULL sequences on
    steps: int = 1  # decode steps that one token of the simulation stands for

    def _pace(self, batch: int, context: float) -> tuple[float, float]:
        """Return (p, q): after p * v + q * v**2 seconds each sequence has v tokens more.

        The k-th of n steps reads (k - 1) * batch tokens more than the first, all n * (n - 1) / 2 * batch.
        """
        slope = self.context * batch
        first = self.fixed + self.each * batch + self.context * context
        return first - slope / (2 * self.steps), slope / 2

    def seconds(self, tokens: float, batch: int, context: float) -> float:
        """Seconds until each sequence of a batch with `context` tokens in all has so many more."""
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
    *,
    memory: float = 0.75,
    weights: float = 1.0,
    kv: float = 1.0,
    prefill: float = 1.0,
    layer_s: float = 0.0,
    sequence_s: float = 0.0,
    reduce_s: float = 0.0,
) -> Decode:
    """An engine of tp devices. UserError if the model doesn't fit into `memory`, a part of theirs.

    weights, kv: parts of the bandwidth at which they are read; prefill: part of the FLOPs reading prompts.
    layer_s, sequence_s: more seconds of a layer and of a sequence in a step; reduce_s: of an all-reduce for
    each doubling of its ranks.
    """
    room = memory * device.memory * tp - model.bytes
    if room <= 0:
        weights_gb = f"{model.bytes / 1e9:.0f} GB of weights"
        raise UserError(f"{weights_gb} leave {tp} devices no room for a KV cache")
    reducing = model.reduced_bytes(tp) / device.link
    layer_s += 2 * reduce_s * math.log2(tp)
    return Decode(
        fixed=model.layers * layer_s + model.bytes / tp / (weights * device.hbm),
        each=model.flops / tp / device.flops + reducing + sequence_s,
        context=model.kv_bytes / tp / (kv * device.hbm),
        prefill=model.flops / tp / (prefill * device.flops) + reducing,
        kv_tokens=room / model.kv_bytes,
    )


@dataclass(frozen=True)
class Passes:
    """A trainer: what a model-parallel group takes for its own micro-batches, in seconds."""

    token: float  # of a sequence forward, by its tokens
    square: float = 0.0  # and by their square
    update: float = 0.0  # of the optimizer's step
    stages: float = 1  # of the pipeline
    backward: float = 2.0  # over forward

    def cost(self, tokens: int) -> float:
        return self.token * tokens + self.square * tokens**2


def passes_of(
    model: Model, device: Device, ranks: int, mfu: float, tp: int = 1, **more: float
) -> Passes:
    """The passes on the ranks of a model-parallel group, at `mfu` of their FLOPs; more: of Passes.

    Causal attention over s tokens forward: 2 * layers * hidden * s**2 FLOPs. The stages' all-reduces, each of
    tp ranks, run beside each other; backward has as many of them as forward.
    """
    speed = ranks * mfu * device.flops
    reducing = model.reduced_bytes(tp) / device.link / (ranks // tp)
    token = model.flops / speed + reducing
    square = 2 * model.layers * model.hidden / speed
    return Passes(token, square, **{"backward": 2 - reducing / token} | more)
