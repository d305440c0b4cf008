# ruff: noqa: E402
"""The policy's part of a checkpoint, in Megatron-Core's own format: any other number of ranks, --tp or --pp can load it.

A save comes in three parts, so that training waits for the first alone. `take` (all ranks) plans who writes what. What it returns to
write is called in a process forked from each rank, whose memory stays as it was; what it returns to complete, on rank 0 in the end.
"""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from cpu.megatron import install

install()

from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import StrategyAction, get_default_strategy, register_default_strategy
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME, TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import FileSystemWriter

SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}  # the default type is broken in Megatron-Core 0.16.1
BACKEND = ("torch_dist", 1)  # name and version of the format
KNOWN = {  # what the pickle `.metadata` may name: descriptions of tensors, and nothing that does anything
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size", "float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8", "bool"),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath",),
}


def state(actor, loading: bool = False) -> dict:
    """What a checkpoint holds of an actor, as sharded tensors. Collective over all ranks.

    `loading`: the state is the template for a load instead of what to save.
    """
    data_parallel = mpu.get_data_parallel_group(with_context_parallel=True)
    metadata = SHARDING | {"chained_optim_avoid_prefix": True, "dp_cp_group": data_parallel}
    model = actor.gpt.sharded_state_dict(metadata=metadata)
    optimizer = actor.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    return {"version": actor.version, "model": model, "optimizer": optimizer}


# ---------------------------------------------------------------------------------------------------------------- saving


class CommonLater(TorchCommonSaveStrategy):
    """Keeps the part that isn't sharded for the process that writes.

    Megatron's own writes it on rank 0 at once, between two collectives: with a full disk the other ranks would wait for it in vain.
    """

    def save_common(self, common_state_dict, checkpoint_dir) -> None:
        self.kept = common_state_dict


class Writer(FileSystemWriter):
    """torch's own, told to write only later."""

    def prepare_write_data(self, plan, planner) -> None:
        self.planned = (plan, planner)


class PlanOnly(TorchDistSaveShardedStrategy):
    """Megatron's planning of a save, and none of its writing.

    Its asynchronous writer clones what it writes before it forks, starts a manager process that outlives a killed rank, and takes
    exit code 1 for success; its last steps write on rank 0 between collectives.
    """

    def async_save(self, sharded_state_dict, checkpoint_dir) -> AsyncRequest:
        sharded, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        for part in itertools.chain(*sharded.values()):
            if isinstance(part, ShardedTensor):
                part.data = part.data.to("cpu")  # itself on CPU; a forked process can't read a GPU
        self.writer = Writer(checkpoint_dir, per_thread_copy_ahead=0)  # 0: no CUDA streams in the forked process
        planner = MCoreSavePlanner(flatten_state_dict=False, dedup_replicated_tensors=False)
        (_, self.metadata, _), *_ = save_state_dict_async_plan(mcore_to_pyt_state_dict(sharded, False), self.writer, planner=planner)
        return AsyncRequest(None, (), [])


def take(actor, folder: Path) -> tuple[Callable[[], list], Callable[[list[list]], None]]:
    """Plan a save of the actor into `folder`, which exists and is empty. Collective over all ranks; nothing is written yet.

    Returns `write`, which writes this rank's part and returns descriptions of what it wrote, and `complete`, which rank 0 calls with
    every rank's. `write` holds copies of the optimizer's state: let go of it once the process is forked.
    """
    common, strategy = CommonLater("torch", 1), PlanOnly(*BACKEND)
    default = get_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1)
    register_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1, common)  # `save` takes no other by argument
    dist_checkpointing.save(state(actor), str(folder), strategy, async_sharded_save=True, content_metadata=dict(SHARDING))
    register_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1, default)
    writer, metadata = strategy.writer, strategy.metadata
    planned, writer.planned = writer.planned, None

    def write() -> list:
        if dist.get_rank() == 0:
            torch.save(common.kept, folder / COMMON_STATE_FNAME)
        return writer.write_data(*planned).wait()

    def complete(written: list[list]) -> None:
        writer.finish(metadata, written)
        save_config(CheckpointingConfig(*BACKEND), str(folder))

    return write, complete


# ---------------------------------------------------------------------------------------------------------------- loading


class OnlyDescriptions(pickle.Unpickler):
    """Refuses whatever isn't in KNOWN."""

    def find_class(self, module: str, name: str):
        if name not in KNOWN.get(module, ()):
            raise ValueError(f"a checkpoint's .metadata names {module}.{name}, which has no place there: it was tampered with")
        return super().find_class(module, name)


def load(actor, folder: Path) -> None:
    """Take over what `take` saved on any number of ranks. Collective over all ranks. Nothing in `folder` is ever executed.

    ValueError if the folder holds code.
    """
    with (folder / ".metadata").open("rb") as file:  # Megatron unpickles it without asking
        OnlyDescriptions(file).load()
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # so does torch with what isn't a tensor
    loaded = dist_checkpointing.load(state(actor, loading=True), str(folder))
    actor.gpt.load_state_dict(loaded["model"])
    actor.optimizer.load_state_dict(loaded["optimizer"])
    actor.version = loaded["version"]
