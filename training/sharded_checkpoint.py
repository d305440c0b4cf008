"""A trainer's part of a checkpoint, in Megatron-Core's format, for any number of ranks, --tp, --pp to load.

Training waits for `plan_save` (all ranks) alone, which plans who writes what. Of what it returns, `write`
is called in a process forked from each rank, whose memory stays as it was, and `complete` on rank 0 at last.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
from collections.abc import Callable, Iterator
from math import prod
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import base, common
from megatron.core.dist_checkpointing.strategies import torch as mcore
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.state_dict_saver import save_state_dict_async_plan
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from config import UserError

if TYPE_CHECKING:
    from training.trainer import Trainer

Chunk = dcp.ChunkStorageMetadata  # the place of a box in a full tensor: offsets and sizes
Sizes = tuple[int, ...]
Shard = ShardedTensor | ShardedTensorFactory
# Megatron-Core 0.16.1's default is broken
SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}
BACKEND = ("torch_dist", 1)  # name and version of the format
# what the pickle `.metadata` may name: descriptions of tensors, and nothing that does anything
ALLOWED = {
    "torch.distributed.checkpoint.metadata": "Metadata MetadataIndex StorageMeta TensorProperties "
    "_MEM_FORMAT_ENCODING TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch": "Size float32 bfloat16 float16 float64 int64 int32 uint8 bool",
    "torch.serialization": "_get_layout",
    "pathlib": "PosixPath",
}


class Box(NamedTuple):
    """A box of a tensor, to be written."""

    facts: TensorWriteData  # its place in the full tensor, the full tensor's shape, its type
    numbers: Tensor


Boxes = dict[dcp.MetadataIndex, Box]  # by the full tensor's name and the place in it


def metadata(trainer: Trainer) -> dict:
    group = trainer.groups.dp_cp  # who has the same weights
    return SHARDING | {"chained_optim_avoid_prefix": True, "dp_cp_group": group}


def model_state(trainer: Trainer) -> dict:
    """Describe the model's tensors. Each says where it belongs: this name isn't in a checkpoint."""
    mpu.set_data_parallel_rank(trainer.groups.dp_cp.rank())  # a tied copy asks nobody else
    for module in trainer.gpt.modules():
        vars(module).setdefault("tp_group", trainer.groups.tp)  # nor does one without a group
    return {"gpt": trainer.gpt.sharded_state_dict(metadata=metadata(trainer))}


class CommonLater(common.TorchCommonSaveStrategy):
    """Keeps what isn't sharded. Megatron writes it between collectives: with a full disk others wait."""

    def save_common(self, common_state_dict, checkpoint_dir) -> None:
        self.kept = common_state_dict


class Writer(FileSystemWriter):
    """A writer of torch's that keeps what there is to write for later."""

    def prepare_write_data(self, plan, planner) -> None:
        self.planned = (plan, planner)


class Planner(mcore.MCoreSavePlanner):
    """Megatron's planner, which also plans the boxes of other tensors."""

    def __init__(self, boxes: Boxes):
        super().__init__(flatten_state_dict=False, dedup_replicated_tensors=False)
        self.boxes = boxes

    def create_local_plan(self) -> SavePlan:
        kind = WriteItemType.SHARD
        items = [WriteItem(index, kind, tensor_data=box.facts) for index, box in self.boxes.items()]
        plan = super().create_local_plan()
        self.plan = dataclasses.replace(plan, items=[*plan.items, *items])
        return self.plan

    def lookup_object(self, index: dcp.MetadataIndex):
        return self.boxes[index].numbers if index in self.boxes else super().lookup_object(index)


class PlanOnly(mcore.TorchDistSaveShardedStrategy):
    """Megatron's planning of a save, and none of its writing.

    Its writer clones what it writes before it forks, starts a manager process that outlives a killed rank,
    takes exit code 1 for success, and writes on rank 0 between collectives.
    """

    def __init__(self, boxes: Boxes):
        super().__init__(*BACKEND)
        self.planner = Planner(boxes)

    def async_save(self, sharded_state_dict, checkpoint_dir) -> AsyncRequest:
        main = self.keep_only_main_replica
        sharded, _, _ = mcore._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, main)
        for part in itertools.chain(*sharded.values()):
            if isinstance(part, ShardedTensor):
                part.data = part.data.to("cpu")  # a fork can't read a GPU; on a CPU no copy
        # 0: no CUDA streams in the fork
        self.writer = Writer(checkpoint_dir, per_thread_copy_ahead=0)
        state = mcore.mcore_to_pyt_state_dict(sharded, False)
        plan, *_ = save_state_dict_async_plan(state, self.writer, planner=self.planner)
        _, self.metadata, _ = plan
        return AsyncRequest(None, (), [])


def plan_save(trainer: Trainer, folder: Path) -> tuple[Callable, Callable]:
    """Plan a save into `folder`, which exists and is empty (collective over all ranks); nothing is written.

    Returns `write`, which describes what it wrote, and `complete`, for rank 0 with every rank's descriptions.
    Megatron plans over all ranks of the run: those that don't hold the model have nothing to save.
    """
    model = {}
    boxes = {}
    state = {"version": trainer.version, "model": model, "optimizer": {}}
    if trainer.holds:
        model |= model_state(trainer)
        boxes = optimizer_boxes(trainer, model)
        state["optimizer"] = trainer.optimizer.state_dict()
    state["optimizer"]["param_state_sharding_type"] = SHARDING["distrib_optim_sharding_type"]
    later = CommonLater("torch", 1)
    strategy = PlanOnly(boxes)
    which = (base.StrategyAction.SAVE_COMMON, "torch", 1)
    default = base.get_default_strategy(*which)
    base.register_default_strategy(*which, later)  # `save` takes it from there alone
    options = dict(async_sharded_save=True, content_metadata=dict(SHARDING))
    dist_checkpointing.save(state, str(folder), strategy, **options)
    base.register_default_strategy(*which, default)
    writer = strategy.writer
    planned = writer.planned
    writer.planned = None  # `complete` keeps the writer, and need not keep the tensors

    def write() -> list:
        if dist.get_rank() == trainer.shape.ranks[0]:
            torch.save(later.kept, folder / common.COMMON_STATE_FNAME)
        return writer.write_data(*planned).wait()

    def complete(written: list[list]) -> None:
        writer.finish(strategy.metadata, written)
        save_config(CheckpointingConfig(*BACKEND), str(folder))

    return write, complete


def optimizer_boxes(trainer: Trainer, model_state: dict) -> Boxes:
    """Find this rank's part of the optimizer's state, under Megatron's names of `fully_reshardable`.

    Megatron's own would gather all of it on every data-parallel rank first, which is most of a save's stall.
    A rank holds a stretch of a flattened tensor, which is some boxes of it. Readers take any boxes.
    """
    described, _ = extract_sharded_tensors_and_factories(model_state)
    # of copies on other tp and pp ranks the first alone; dp ranks, the last of replica_id, all hold a part
    mine = [shard for shard in nested_values(described) if not any(shard.replica_id[:-1])]
    found = {}
    for optimizer in trainer.optimizer.chained_optimizers:
        optimizer.state_dict()  # makes the state of an optimizer that hasn't made a step
        stretches = {}  # of each flattened parameter, that of which this rank holds the state
        by_dtype = itertools.chain(*(buffer.values() for buffer in optimizer.gbuf_ranges))
        for bucket in itertools.chain(*by_dtype):
            for parameter, ranges in bucket["param_map"].items():
                stretches[parameter] = range(ranges["param"].start, ranges["param"].end)
        for shard in mine:
            if shard.data in stretches:
                held = optimizer._get_main_param_and_optimizer_states(shard.data)
                found |= boxes_of(shard, held, stretches[shard.data])
    return found


def boxes_of(shard: Shard, held: dict[str, Tensor], stretch: range) -> Boxes:
    """Cut what is held of a parameter's state, that of a stretch of the flattened parameter, into boxes."""
    found = {}
    for part in shard.build() if isinstance(shard, ShardedTensorFactory) else [shard]:
        first = part.data.storage_offset() - shard.data.storage_offset()
        for chunk, where in cut(part, first, stretch):
            for name in ("param", "exp_avg", "exp_avg_sq"):
                index = dcp.MetadataIndex(f"optimizer.state.{name}.{part.key}", chunk.offsets)
                numbers = held[name].detach()[where].view(chunk.sizes).to("cpu")  # no copy on a CPU
                properties = dcp.TensorProperties.create_from_tensor(numbers)
                facts = TensorWriteData(chunk, properties, torch.Size(part.global_shape))
                found[index] = Box(facts, numbers)
    return found


def cut(part: ShardedTensor, first: int, stretch: range) -> Iterator[tuple[Chunk, slice]]:
    """Yield the boxes of `part` in a stretch of its flattened parameter, in which it begins at `first`.

    A box is (where it is in the full tensor, where it is in the stretch).
    """
    ahead = part.prepend_axis_num
    start = max(stretch.start - first, 0)
    stop = min(stretch.stop - first, part.data.numel())
    at = first + start - stretch.start
    for inner, sizes in boxes(start, stop, part.local_shape):
        moved = map(add, part.global_offset[ahead:], inner)
        offsets = torch.Size([*part.global_offset[:ahead], *moved])
        place = Chunk(offsets, torch.Size((1,) * ahead + sizes))
        end = at + prod(sizes)
        yield place, slice(at, end)
        at = end


def boxes(start: int, end: int, shape: Sizes) -> Iterator[tuple[Sizes, Sizes]]:
    """Yield the stretch [start, end) of a flattened tensor as (where, sizes), in order: up to 3 a matrix."""
    # [3, 10) of a 4 x 4 matrix: (0, 3) of 1 x 1, (1, 0) of 1 x 4, (2, 0) of 1 x 2
    below = prod(shape[1:])
    while start < end:
        row, column = divmod(start, below)
        whole = 0 if column else (end - start) // below  # rows
        if whole:
            stop = start + whole * below
            yield (row, *[0] * (len(shape) - 1)), (whole, *shape[1:])
        else:
            stop = min(end, (row + 1) * below)
            inner = boxes(column, column + stop - start, shape[1:])
            yield from (((row, *where), (1, *sizes)) for where, sizes in inner)
        start = stop


class OnlyDescriptions(pickle.Unpickler):
    """An unpickler that refuses whatever isn't in ALLOWED."""

    def find_class(self, module: str, name: str):
        if name not in ALLOWED.get(module, "").split():
            what = f"{module}.{name}, which has no place there"
            raise UserError(f"a checkpoint's .metadata names {what}: it was tampered with")
        return super().find_class(module, name)


def load(trainer: Trainer, folder: Path) -> None:
    """Load what `plan_save` saved on any number of ranks (collective). Refuses code with a UserError."""
    with (folder / ".metadata").open("rb") as file:  # Megatron unpickles it without asking
        OnlyDescriptions(file).load()
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # so does torch with what isn't a tensor
    template = {"version": trainer.version, "model": {}}
    if trainer.holds:
        model = model_state(trainer)
        how = {"is_loading": True, "metadata": metadata(trainer)}
        template["model"] = model
        template["optimizer"] = trainer.optimizer.sharded_state_dict(model, **how)
    loaded = dist_checkpointing.load(template, str(folder))
    trainer.version = loaded["version"]
    if trainer.holds:
        trainer.gpt.load_state_dict(loaded["model"]["gpt"])
        trainer.optimizer.load_state_dict(loaded["optimizer"])
