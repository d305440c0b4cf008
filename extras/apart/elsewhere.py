"""A stand-in for a model on other ranks: it takes part in collectives, and does nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist

from config import Config
from scheduling.layout import Shape
from training import model as models
from training.trainer import Trainer


class Elsewhere:
    """The stand-in for a Trainer on a rank outside of its shape. `version` counts the updates there."""

    holds = False
    awake = False
    is_lead = False
    dp_rank = -1
    received_bytes = 0

    def __init__(
        self, config: Config, model_dir: str, shape: Shape, name: str = "actor", learns: bool = True
    ):
        """Read a directory while other ranks build the model (collective: all ranks)."""
        self.config = config
        self.shape = shape
        self.name = name
        self.version = 0
        self.passes = []
        hf = models.read_hf_config(model_dir)
        self.macs = partial(models.forward_macs, hf)
        self.prefix_of = partial(models.prefix_of, hf, models.image_macs(hf))
        # Megatron's optimizer gathers its parameter groups from all ranks, then those of experts
        for _ in range(2 if learns else 0):
            dist.all_gather_object([None] * dist.get_world_size(), [])

    def sleep(self) -> None: ...
    def compute_policy_logprobs(self, mini_batches: list) -> None: ...
    def compute_ref_logprobs(self, mini_batches: list) -> None: ...
    def compute_values(self, mini_batches: list) -> None: ...

    def trim(self, keeps_gradients: bool) -> None:
        """Free the last bucket of the last push, which this rank's engine has read. Not collective."""
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def update(self, mini_batches: list, *beside: Elsewhere) -> dict[str, float]:
        for trainer in (self, *beside):
            trainer.version += 1
        return {}

    def named_weights(self) -> Iterator:
        return iter(())

    def whole_weights(self) -> dict:
        return {}

    snapshot = Trainer.snapshot
    restore = Trainer.restore
