"""The end of a trainer whose process goes on and builds others. A run never does: its process ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from training.trainer import Trainer


def close(trainer: Trainer) -> None:
    """Destroy the model and its process groups: others can be built (collective).

    DDP's hooks hold the model and C++ holds the hooks, a cycle that the collector doesn't see.
    """
    dist.barrier()  # nobody may still talk in a group that another has destroyed
    for node in trainer.ddp.grad_accs:
        # a new hook's handle leads to all hooks; `print` is never called
        node.register_hook(print).hooks_dict_ref().clear()
    groups = trainer.own_groups.made
    while groups:
        dist.destroy_process_group(groups.pop())
