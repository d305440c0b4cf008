"""Closed-form costs of a cluster, in seconds, bytes, tokens and floating-point operations. Pure.

Callers supply the constants, and name the points that each was fitted on.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from runtime.errors import UserError

BF16_BYTES = 2  # per parameter, and per number in the KV cache


class Device(NamedTuple):
    """An accelerator's data sheet. Bandwidths are in bytes/s."""

    flops: float  # per second, bfloat16, dense
    memory: float  # bytes
    hbm: float
    network: float  # its share of the machine's link to other machines
    host: float  # to host memory
    link: float = math.inf  # to other devices in its machine


class Model(NamedTuple):
    params: float
    layers: int
    hidden: int
    kv_width: int  # key heads * head size
    active: float = 0.0  # parameters used for a token; 0: all
    cuts: int = 0  # number that the tensor-parallel size must divide; 0: any size works

    @property
    def bytes(self) -> float:
        return BF16_BYTES * self.params

    @property
    def flops(self) -> float:
        """FLOPs of a forward pass per token, without attention."""
        return 2 * (self.active or self.params)

    @property
    def kv_bytes(self) -> float:
        """Bytes of keys and values per token, over all layers."""
        return BF16_BYTES * 2 * self.layers * self.kv_width

    def reduced_bytes(self, tp: int) -> float:
        """Return the bytes per token over a rank's link: forward, two ring all-reduces per layer."""
        return 2 * self.layers * 2 * (tp - 1) / tp * BF16_BYTES * self.hidden

    def updated_bytes(self, ranks: int, copies: int) -> float:
        """Return the bytes that a rank sends in an update of a model split over `ranks`.

        Copies reduce float32 gradients and gather weights.
        """
        return (4 + BF16_BYTES) * self.params / ranks * (copies - 1) / copies


@dataclass(frozen=True)
class Decode:
    """An engine. A decode step of b sequences with c tokens takes `fixed + each * b + context * c` seconds.

    Prompts are read in one pass between two steps, while all sequences wait.
    """

    fixed: float
    each: float = 0.0
    context: float = 0.0
    prefill: float = 0.0  # seconds to read a prompt token
    most: int = 256  # sequences at once
    kv_tokens: float = math.inf  # room for contexts
    read: float = 0.0  # fixed seconds for a pass that reads prompts; `prefill` is extra
    apart: int = 0  # decode steps between two such passes, with engine.FULL or more sequences
    steps: int = 1  # decode steps per simulated token
    kept: int = 0  # answers of full length for each engine of a tail; 0: as many as have room

    def _pace(self, batch: int, context: float) -> tuple[float, float]:
        """Return (p, q): each sequence gains v tokens in p * v + q * v**2 seconds.

        Step k of n reads (k - 1) * batch tokens more than the first; all n read n * (n - 1) / 2 * batch more.
        """
        slope = self.context * batch
        first = self.fixed + self.each * batch + self.context * context
        return first - slope / (2 * self.steps), slope / 2

    def seconds(self, tokens: float, batch: int, context: float) -> float:
        """Return the seconds for each sequence to gain `tokens`. context: total tokens in the batch."""
        p, q = self._pace(batch, context)
        return (p + q * tokens) * tokens

    def tokens(self, seconds: float, batch: int, context: float) -> float:
        """Return the tokens that each sequence gains in `seconds`: the inverse of `seconds`."""
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
    """Return an engine of tp devices. Raises UserError if the weights fill `memory`, a fraction of theirs.

    weights, kv: fractions of the bandwidth reached when reading them; prefill: fraction of the FLOPs reached
    when reading prompts. layer_s, sequence_s: extra seconds per layer and per sequence in a step;
    reduce_s: extra seconds per all-reduce for each doubling of its ranks.
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
    """A trainer's costs: the seconds that a model-parallel group takes for its own micro-batches."""

    token: float  # forward seconds per token
    square: float = 0.0  # forward seconds per squared sequence length
    update: float = 0.0  # seconds of the optimizer step
    stages: float = 1  # pipeline stages
    backward: float = 2.0  # backward seconds / forward seconds

    def cost(self, tokens: int) -> float:
        return self.token * tokens + self.square * tokens**2


def passes_of(
    model: Model, device: Device, ranks: int, mfu: float, tp: int = 1, **more: float
) -> Passes:
    """Return the costs of a model-parallel group at `mfu` of its FLOPs. more: other fields of Passes.

    A forward pass of causal attention over s tokens takes 2 * layers * hidden * s**2 FLOPs. Stages run their
    all-reduces, each over tp ranks, in parallel. Backward has as many all-reduces as forward.
    """
    speed = ranks * mfu * device.flops
    reducing = model.reduced_bytes(tp) / device.link / (ranks // tp)
    token = model.flops / speed + reducing
    square = 2 * model.layers * model.hidden / speed
    return Passes(token, square, **{"backward": 2 - reducing / token} | more)
