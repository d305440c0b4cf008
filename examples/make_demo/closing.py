"""The end of a trainer whose process goes on and builds others. A run never does: its process ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from training.trainer import Trainer


def close(trainer: Trainer) -> None:
    """Destroy the model and all trainers' process groups: others can be built (collective).

    DDP's hooks hold the model and C++ holds the hooks, a cycle that the collector doesn't see. Megatron
    only forgets its groups; each is a pair of threads that wake up all the time.
    """
    from training.trainer import mpu  # Megatron's, once it can be imported without CUDA

    dist.barrier()  # nobody may still talk in a group that another has destroyed
    for node in trainer.ddp.grad_accs:
        # a new hook's handle leads to all hooks; `print` is never called
        node.register_hook(print).hooks_dict_ref().clear()
    if trainer.pipeline.down is not trainer.pipeline.up:
        dist.destroy_process_group(trainer.pipeline.down)
    if mpu.model_parallel_is_initialized():  # not closed with another trainer
        for group in mpu._global_process_group_list[1:]:  # the first is None, the world's
            dist.destroy_process_group(group)
        mpu.destroy_model_parallel()
