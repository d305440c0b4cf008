"""What test_resharding.py starts as a process: real shards are put together, one layout after another.

Usage: resharding_worker.py case.pt result.pt, as parallel_worker.py. The result holds for each layout what
every rank found, see `gather`.
"""

from functools import partial

import torch
import torch.distributed as dist

from parallel_worker import actor_config, gathered, main
from training.hf_weights import HFWeights


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


def gather(actor, carried: Carried) -> dict:
    """By a push: bytes received, those of what tensor parallelism cuts, and what came out wrong."""
    whole, carried.bytes = HFWeights(actor.model_dir), 0
    found = {name: tensor.clone() for name, tensor in actor.named_weights()}
    norms = {name for name in found if "norm" in name}
    return {
        "received": actor.gathering.received,
        "carried": carried.bytes,
        "cut": sum(found[name].nbytes for name in found.keys() - norms),
        "norms": sum(found[name].nbytes for name in norms),
        "missing": whole.file_of.keys() - found.keys(),
        "wrong": [name for name in found if not torch.equal(found[name], whole[name])],
    }


def work(case: dict, size: int, path: str, carried: Carried) -> dict:
    """By name of the layout, of the layouts of `size` ranks: what every rank found."""
    from actor import Actor
    from examples.make_demo.closing import close

    results = {}
    for name, (model, ranks, sizes) in case["layouts"].items():
        if ranks == size:
            actor = Actor(actor_config(**sizes), case["models"][model])
            results[name] = gathered(gather(actor, carried))
            close(actor)
    return results


if __name__ == "__main__":
    main(partial(work, carried=Carried()))
