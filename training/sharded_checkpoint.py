"""A trainer's part of a torch.distributed.checkpoint that loads with any number of ranks, --tp and --pp.

A rank saves boxes of full tensors, and loads its own boxes from any saved ones that overlap. Ranks don't
communicate; training waits only for this rank's `take_snapshot`. A forked process, whose memory doesn't
change, calls the returned `write`; finally rank 0 calls `write_index`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from math import prod
from operator import add, getitem
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata as Chunk
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from runtime.errors import UserError
from training.passes import Stage

MOMENTS = ("exp_avg", "exp_avg_sq")
Shard = ShardedTensor | ShardedTensorFactory
# names allowed in the pickle `.metadata`: only descriptions of tensors, nothing that has an effect
ALLOWED = {
    "torch.distributed.checkpoint.metadata": "Metadata MetadataIndex StorageMeta TensorProperties "
    "_MEM_FORMAT_ENCODING TensorStorageMetadata ChunkStorageMetadata",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch": "Size float32 bfloat16 float16 float64 int64 int32 uint8 bool",
    "torch.serialization": "_get_layout",
    "pathlib": "PosixPath",
}

# (full tensor's name, box's place in it) -> (place, the tensor's shape and type; the box's data)
Boxes = dict[MetadataIndex, tuple[TensorWriteData, Tensor]]


class Adam(NamedTuple):
    """A rank's part of a parameter's optimizer state."""

    stretch: range  # in the flattened parameter
    step: Tensor
    held: dict[str, Tensor]  # prefix of its name in a checkpoint -> values in the stretch


NO_ADAM = Adam(range(0), torch.zeros(()), {})  # for parameters that this rank doesn't update


class SavePlanner(dcp.DefaultSavePlanner):
    """Plans to write boxes to files, and scalars to the metadata."""

    def __init__(self, boxes: Boxes, scalars: dict[str, float]):
        super().__init__()
        # a fork can't access the GPU; no copy on a CPU
        self.numbers = {index: numbers.to("cpu") for index, (_, numbers) in boxes.items()}
        shard = WriteItemType.SHARD
        items = [WriteItem(index, shard, tensor_data=facts) for index, (facts, _) in boxes.items()]
        self.plan = dcp.SavePlan(items, planner_data=scalars)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.numbers[index]


class LoadPlanner(dcp.DefaultLoadPlanner):
    """Plans to fill boxes from the saved ones. Raises UserError if they don't cover a box."""

    def __init__(self, boxes: Boxes, saved: Metadata):
        super().__init__()
        self.boxes = boxes
        self.plan = dcp.LoadPlan([])
        for index, (facts, numbers) in boxes.items():
            tensor = saved.state_dict_metadata.get(index.fqn)
            found = []
            if tensor and tensor.size == facts.size:
                found = create_read_items_for_chunk_list(index.fqn, tensor, [facts.chunk])
            if sum(prod(item.lengths) for item in found) != numbers.numel():  # torch doesn't check
                raise UserError(f"the checkpoint lacks numbers of {index.fqn} {[*facts.size]}")
            self.plan.items += found

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.boxes[index][1]


class OnlyDescriptions(pickle.Unpickler):
    """An unpickler that refuses whatever isn't in ALLOWED."""

    def find_class(self, module: str, name: str):
        if (module, name) == ("builtins", "getattr"):
            return getitem  # Python 3.11.2 pickles Enum members as getattr(class, name)
        module = module.removesuffix("._local")  # Python 3.13's location of PosixPath
        if name not in ALLOWED.get(module, "").split():
            raise UserError(f"a checkpoint's .metadata names {module}.{name}: was it changed?")
        return super().find_class(module, name)


def take_snapshot(trainer: Stage, folder: Path) -> tuple[Callable, Callable]:
    """Plan a save into `folder`, an empty directory, and copy data off a GPU. Not collective.

    Returns `write`, which returns a description of what it wrote, and `write_index`, which rank 0 calls with
    all descriptions. `write_index` raises ValueError if the boxes don't cover each tensor.
    """
    adam = adam_of(trainer)
    scalars = {"version": trainer.version}
    for each in adam.values():
        scalars["step"] = each.step.item()  # all are equal
    planner = SavePlanner(boxes_of_rank(trainer, adam, saves=True), scalars)
    writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)  # no CUDA streams in the fork
    # without collectives, each rank names its own file
    writer.set_up_storage_writer(False, rank=dist.get_rank(), use_collectives=False)
    plan = writer.prepare_local_plan(planner.plan)

    def write() -> list:
        return [plan, writer.write_data(plan, planner).wait()]

    def write_index(written: list[list]) -> None:
        plans, results = zip(*written, strict=True)
        _, metadata = dcp.DefaultSavePlanner().create_global_plan(plans)
        dcp.FileSystemWriter(folder).finish(metadata, results)

    return write, write_index


def load(trainer: Stage, folder: Path) -> None:
    """Load a save by any number of ranks. Raises UserError if it has code or gaps. Not collective."""
    with (folder / ".metadata").open("rb") as file:
        saved = OnlyDescriptions(file).load()
    adam = adam_of(trainer)
    planner = LoadPlanner(boxes_of_rank(trainer, adam), saved)
    reader = dcp.FileSystemReader(folder)
    reader.set_up_storage_reader(saved, is_coordinator=False)
    reader.read_data(planner.plan, planner)  # only tensors, no pickles
    trainer.version = saved.planner_data["version"]
    for each in adam.values():
        each.step.fill_(saved.planner_data["step"])


def adam_of(trainer: Stage) -> dict[Tensor, Adam]:
    """Map parameters to AdamW's state on this rank, which is created if there hasn't been a step."""
    found = {}
    for optimizer in trainer.optimizer.chained_optimizers if trainer.holds else ():
        for parameter, (group, place) in optimizer.model_param_group_index_map.items():
            param = optimizer.optimizer.param_groups[group]["params"][place]  # in float32
            state = optimizer.optimizer.state[param]
            if not state:
                state["step"] = torch.zeros((), device=param.device)
                state |= {name: torch.zeros_like(param) for name in MOMENTS}
            held = {"optimizer.state.param.": param}
            held |= {f"optimizer.state.{name}.": state[name] for name in MOMENTS}
            own = optimizer._get_model_param_range_map(parameter)["param"]
            found[parameter] = Adam(range(own.start, own.end), state["step"], held)
    return found


def boxes_of_rank(trainer: Stage, adam: dict[Tensor, Adam], saves: bool = False) -> Boxes:
    """Cut this rank's part of the model into boxes. If it `saves`, leave out what other ranks save."""
    found = {}
    if not trainer.holds:
        return found
    assert trainer.awake, f"the {trainer.title} sleeps: wake it before a save or a load"
    group = trainer.groups.dp  # ranks with the same weights
    mpu.set_data_parallel_rank(group.rank())  # Megatron reads this for tied copies
    for module in trainer.gpt.modules():
        vars(module).setdefault("tp_group", trainer.groups.tp)  # some modules have none
    if trainer.gpt.adapters:
        shards = trainer.gpt.adapters.shards(group)  # the rest comes from --model
    else:
        shards = trainer.gpt.sharded_state_dict(metadata={"dp_cp_group": group}).values()
    for shard in shards:
        if not isinstance(shard, Shard):
            continue
        # which of several equal shards this is: (among tp and pp ranks, in the group)
        *among_tp_and_pp, in_group = shard.replica_id
        if saves and any(among_tp_and_pp):
            continue
        stretch, _, held = adam.get(shard.data, NO_ADAM)
        weights = shard.data.view(-1)
        # everything when loading; when saving, all of a frozen parameter, on one rank
        is_whole = not saves or (in_group == 0 and not shard.data.requires_grad)
        own = range(weights.numel()) if is_whole else stretch
        found |= boxes_of(shard, {"": weights[own.start : own.stop]}, own)
        found |= boxes_of(shard, held, stretch)
    return found


def boxes_of(shard: Shard, held: dict[str, Tensor], stretch: range) -> Boxes:
    """Cut a stretch of the flattened shard into boxes. held: prefix of the name -> values in the stretch."""
    found = {}
    for part in shard.build() if isinstance(shard, ShardedTensorFactory) else [shard]:
        first = part.data.storage_offset() - shard.data.storage_offset()
        for chunk, where in cut(part, first, stretch):
            for prefix, tensor in held.items():
                numbers = tensor.detach()[where].view(chunk.sizes)
                properties = TensorProperties.create_from_tensor(numbers)
                facts = TensorWriteData(chunk, properties, torch.Size(part.global_shape))
                found[MetadataIndex(prefix + part.key, chunk.offsets)] = (facts, numbers)
    return found


def cut(part: ShardedTensor, first: int, stretch: range) -> Iterator[tuple[Chunk, slice]]:
    """Yield boxes, (chunk of the full tensor, slice of the stretch), that cover `part` in a stretch.

    first: where `part` begins in its flattened parameter. A matrix gives up to 3 boxes: [3, 10) of a 4 x 4
    matrix gives 1 x 1 at (0, 3), 1 x 4 at (1, 0) and 1 x 2 at (2, 0): the end of a row, whole rows, the start
    of a row.
    """
    shape = part.local_shape
    # how many numbers one index of an axis holds
    row_sizes = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    above = part.global_offset[: part.prepend_axis_num]  # on axes that only the full tensor has
    corner = part.global_offset[part.prepend_axis_num :]
    start = max(stretch.start - first, 0)  # in the flattened part, as is `stop`
    stop = min(stretch.stop - first, prod(shape))
    while start < stop:
        # the largest box that begins here: whole rows of the first axis where one begins here and fits
        fits = [start % size == 0 and start + size <= stop for size in row_sizes]
        axis = fits.index(True)
        place = [start // size % length for size, length in zip(row_sizes, shape, strict=True)]
        rows = min((stop - start) // row_sizes[axis], shape[axis] - place[axis])
        offsets = torch.Size([*above, *map(add, corner, place)])
        sizes = torch.Size([1] * (len(above) + axis) + [rows, *shape[axis + 1 :]])
        numbers = rows * row_sizes[axis]
        begin = first + start - stretch.start  # in the stretch
        yield Chunk(offsets, sizes), slice(begin, begin + numbers)
        start += numbers
