"""A model's process groups on its own ranks; models of the same shape may share them.

Megatron's parallel_state has a single layout for all models of a process. It stays uninitialized here, so
that code that forgets to pass a group fails immediately.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import ProcessGroup

from scheduling.layout import Shape

ORDER = "tp-dp-pp"  # Megatron's default, which Shape describes
# Megatron's name for a group -> the axes along which its ranks differ; a cp group is one rank
KINDS = {"tp": "tp", "cp": "cp", "dp": "dp", "dp_cp": "dp", "tp_cp": "tp", "mp": "tp-pp"}


class Pipeline(NamedTuple):
    """The ranks that share the stages of models."""

    rank: int  # this rank's position in `ranks`
    ranks: list[int]  # global ranks
    up: ProcessGroup  # for messages to higher stages, in the order of `ranks`
    down: ProcessGroup  # the reverse order, also that of a reversed model's stages


@dataclass
class Groups:
    """The process groups of a shape, as one of its ranks sees them."""

    shape: Shape
    everyone: ProcessGroup  # all ranks of the shape
    by_name: dict[str, ProcessGroup | None]  # as Megatron calls them
    pipeline: Pipeline
    made: list[ProcessGroup]  # all groups of this shape, also other ranks'

    def collection(self, reverse: bool) -> ProcessGroupCollection:
        """Return Megatron's collection of groups. reverse: stage 0 is on the last rank of a pipeline."""
        stages = self.pipeline.down if reverse else self.pipeline.up
        return ProcessGroupCollection(**self.by_name, pp=stages)


def own_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def make_groups(shape: Shape, timeout_s: float) -> Groups | None:
    """Make a shape's groups (collective: all ranks). Returns None on ranks outside of it."""
    places = mpu.RankGenerator(shape.tp, 1, shape.dp, shape.pp, 1, ORDER)
    timeout = timedelta(seconds=timeout_s)
    made: dict[tuple, ProcessGroup] = {}  # each is made once, in the same order on every rank

    def rows_of(kind: str) -> list[list[int]]:
        return [[shape.ranks[place] for place in row] for row in places.get_ranks(kind)]

    def make(rows: list[list[int]], use: str = "") -> ProcessGroup | None:
        """Make a group for each row, separate from other uses. Returns this rank's group or None."""
        own = None
        for row in rows:
            key = (use, *row)
            if key not in made:
                made[key] = dist.new_group(row, timeout=timeout, sort_ranks=False)
            if dist.get_rank() in row:
                own = made[key]
        return own

    by_name = {name: make(rows_of(kind)) for name, kind in KINDS.items()}
    everyone = make(rows_of("tp-dp-pp"))
    pipelines = rows_of("pp")
    # messages between stages have their own groups, because NCCL serializes everything in a group
    use = "messages" if shape.pp > 1 else ""
    up = make(pipelines, use)
    down = make([row[::-1] for row in pipelines], use)
    by_name["embd"] = make([list(dict.fromkeys([row[0], row[-1]])) for row in pipelines])
    if up is None:
        return None
    # there are no experts, but without `expt_dp` DDP makes a group on these ranks only
    by_name |= {"expt_dp": by_name["dp"], "ep": None, "tp_ep_pp": None, "pos_embd": None}
    by_name |= {"intra_dp_cp": by_name["dp"], "intra_dist_opt": everyone}
    if mpu._GLOBAL_MEMORY_BUFFER is None:
        mpu._set_global_memory_buffer()  # for sequence parallelism's gathers
    pipeline = Pipeline(up.rank(), dist.get_process_group_ranks(up), up, down)
    connect(pipeline, own_device())
    return Groups(shape, everyone, by_name, pipeline, [*made.values()])


def connect(pipeline: Pipeline, device: torch.device) -> None:
    """Send one number between all neighbors in both groups (collective: pipeline).

    NCCL connects two ranks at their first message, and both block until then: a table could deadlock.
    """
    number = torch.zeros(1, device=device)
    for group in (pipeline.up, pipeline.down):
        for low, high in pairwise(range(len(pipeline.ranks))):
            if pipeline.rank == low:
                dist.send(number, pipeline.ranks[high], group)
            if pipeline.rank == high:
                dist.recv(number, pipeline.ranks[low], group)
