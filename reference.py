"""The reference model of a KL penalty: the policy as it was when the run began, kept off the device.

It has no module of its own. Its weights lie on the host, this rank's shards alone, and change places with the policy's for a pass.
"""

from __future__ import annotations

import itertools

import torch

from sample import Sample
from scheduling.balance import flat


class Reference:
    """The weights that `actor` has now, for good: to be made before a checkpoint is restored."""

    def __init__(self, actor):
        self._actor = actor
        self._host = [parameter.detach().to("cpu", copy=True) for parameter in actor.gpt.parameters()]

    def appraise(self, mini_batches: list[list[list[Sample]]]) -> None:
        """Fill `reference_logprobs` of samples that come packed. Collective over the model-parallel group; the actor must be awake.

        In the micro-batches that will be trained on, so that equal weights give equal bits.
        """
        self._swap()
        try:
            rows = self._actor.packed_logprobs(list(itertools.chain(*mini_batches)))
        finally:
            self._swap()
        for sample, row in zip(flat(mini_batches), rows, strict=True):
            sample.reference_logprobs = row

    @torch.no_grad()
    def _swap(self) -> None:
        """The device's weights and the host's change places, tensor by tensor, bit for bit; its own inverse.

        The optimizer is no part of it: its own weights stay, in float32 as views of the device's, which come back before it looks.
        """
        assert self._actor.awake, "the actor sleeps: wake it before its reference is asked"
        for parameter, host in zip(self._actor.gpt.parameters(), self._host, strict=True):
            of_device = parameter.to("cpu", copy=True)
            parameter.copy_(host)
            host.copy_(of_device)
