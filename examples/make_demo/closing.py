"""Closes a trainer in a process that then builds others. A run doesn't need it: its process ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from training.trainer import Trainer


def close(trainer: Trainer) -> None:
    """Destroy the model and its process groups, so that others can be built (collective: all ranks).

    DDP's hooks hold the model and C++ holds the hooks, a cycle that the garbage collector doesn't see.
    """
    dist.barrier()  # no rank may still use a group that another has destroyed
    for node in trainer.ddp.grad_accs:
        # a new hook's handle leads to all hooks; `print` is never called
        node.register_hook(print).hooks_dict_ref().clear()
    groups = trainer.own_groups.made
    while groups:
        dist.destroy_process_group(groups.pop())
