"""Costs of what is simulated alone: hand-overs, coarse tokens. Devices, models: scheduling/costs.py."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from scheduling.costs import Decode, Device, Passes


class Moves(NamedTuple):
    """Seconds of the hand-overs of an engine or a trainer."""

    sleep_s: float = 0.0
    wake_s: float = 0.0
    push_s: float = 0.0  # an engine takes weights


def moves_of(device: Device, kept: float, received: float = 0.0, swap_s=0.0, push_s=0.0) -> Moves:
    """kept: bytes of a device that go to the host and back; received: of new weights, from other machines.

    swap_s, push_s: on top.
    """
    swap_s += kept / device.host
    return Moves(swap_s, swap_s, push_s + received / device.network)


def coarse(costs: Decode | Passes, grain: float) -> Decode | Passes:
    """The same, where one token of the simulation stands for `grain` real ones."""
    if isinstance(costs, Passes):
        return replace(costs, token=costs.token * grain, square=costs.square * grain**2)
    scaled = {name: vars(costs)[name] * grain for name in ("fixed", "each", "prefill", "steps")}
    return replace(costs, **scaled, context=costs.context * grain**2, kv_tokens=costs.kv_tokens / grain)
