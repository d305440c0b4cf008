"""What test_resharding.py starts as a process: real shards are put together, one layout after another.

Usage: resharding_worker.py case.pt result.pt, as parallel_worker.py. The result holds for each layout and
each size of an engine what every rank found, see `gather`.
"""

from functools import partial

import torch
import torch.distributed as dist

from parallel_worker import actor_config, main
from training.hf_weights import HFWeights, global_parameters, is_tied_copy
from training.resharding import Gathering, Layout

ROW_PARALLEL = ("o_proj.weight", "down_proj.weight")  # cut by columns


class Carried:
    """Bytes of tensors that collectives bring to this rank, counted where torch is called."""

    def __init__(self):
        self.bytes, self.all_gather, self.broadcast = 0, dist.all_gather, dist.broadcast
        dist.all_gather, dist.broadcast = self.count_all_gather, self.count_broadcast

    def count_all_gather(self, outputs, tensor, group):
        self.bytes += sum(output.nbytes for output in outputs) - tensor.nbytes
        self.all_gather(outputs, tensor, group=group)

    def count_broadcast(self, tensor, group, group_src):
        self.bytes += tensor.nbytes * (group.rank() != group_src)
        self.broadcast(tensor, group=group, group_src=group_src)


def slice_of(name: str, whole: torch.Tensor, part: int, parts: int) -> torch.Tensor:
    """Of a Hugging Face tensor, what an engine's rank `part` has; norms are whole everywhere."""
    return whole if "norm" in name else whole.chunk(parts, int(name.endswith(ROW_PARALLEL)))[part]


def sums(named) -> tuple[int, int]:
    """Bytes of the tensors that tensor parallelism cuts, and of norms."""
    sizes = {name: tensor.nbytes for name, tensor in named}
    norms = sum(size for name, size in sizes.items() if "norm" in name)
    return sum(sizes.values()) - norms, norms


def gathering_of(actor, layout: Layout) -> Gathering:
    """As a push's for engines of one rank; else those of a micro-data-parallel group in a stage are near."""
    if layout.parts == 1:
        return actor.gathering
    of_a_stage = layout.tp * layout.copies
    _, groups = layout.groups()
    near = [
        [rank for rank in ranks if rank // of_a_stage == stage]
        for ranks in groups
        for stage in range(layout.pp)
    ]
    return Gathering(actor.chunks, dist.new_subgroups_by_enumeration(near)[0])


def gather(actor, parts: int, carried: Carried) -> list[dict]:
    """Every rank's: bytes received, those of its shards and of its part, and which tensors came out wrong."""
    config, ranks, rank = actor.config, dist.get_world_size(), dist.get_rank()
    layout = Layout(config.pp, config.tp, ranks // (config.pp * config.tp), parts)
    gathering, whole = gathering_of(actor, layout), HFWeights(actor.model_dir)
    carried.bytes = 0
    found = {
        name: tensor.clone()
        for name, tensor in (actor.named_weights() if parts == 1 else gathering)
    }
    part = rank % config.tp * parts // config.tp
    wanted = {name: slice_of(name, whole[name], part, parts) for name in found}
    shards = [
        item for c in actor.chunks for item in global_parameters(c) if not is_tied_copy(c, item[0])
    ]
    facts = {
        "received": gathering.received,
        "carried": carried.bytes,
        "own": sums(shards),
        "part": sums(found.items()),
        "model": sums((name, whole[name]) for name in whole.file_of),
        "names": list(found),
        "missing": whole.file_of.keys() - found.keys(),
        "wrong": [name for name in found if not torch.equal(found[name], wanted[name])],
    }
    if parts > 1:
        dist.destroy_process_group(gathering.near)
    everyone = [None] * ranks
    dist.all_gather_object(everyone, facts)
    return everyone


def work(case: dict, size: int, path: str, carried: Carried) -> dict:
    """By name of the layout and ranks of an engine, of the layouts of `size` ranks."""
    from actor import Actor

    results = {}
    for name, (model, ranks, sizes, engines) in case["layouts"].items():
        if ranks == size:
            actor = Actor(actor_config(**sizes), case["models"][model])
            results |= {(name, parts): gather(actor, parts, carried) for parts in engines}
            actor.close()
    return results


if __name__ == "__main__":
    main(partial(work, carried=Carried()))
