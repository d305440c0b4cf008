"""What test_image_training.py starts as a process: trains on images under one layout after another.

Usage: image_worker.py case.pt result.pt, as parallel_worker.py.
"""

from pathlib import Path

import torch.distributed as dist
from parallel_worker import actor_config, main

from sample import Sample

LR = 1e-3
SIZES = dict(temperature=1.0, max_tokens_per_micro_batch=64, weight_decay=0.0)


def make_actor(model_dir: str, **sizes):
    from actor import Actor

    return Actor(actor_config(**SIZES | sizes), model_dir)


def step(actor, samples: list[Sample]) -> tuple[float, float]:
    """One optimizer step of cross-entropy on this rank's share of samples; the mean loss, the norm."""
    from actor import cross_entropy_loss
    from training.trainer import as_sequences

    mine = as_sequences([samples[actor.dp_rank :: actor.dp_size]])[0]
    packed = [[mine[index] for index in chosen] for chosen in actor.pack(mine)]
    stats = actor.optimizer_step(packed, cross_entropy_loss, (), LR)
    return stats["loss"] / stats["divisor"], stats["grad_norm"]


def train(model_dir: str, layout: dict, reference: dict, path: str) -> dict:
    """Three steps of a layout; `saves`: a checkpoint behind them, and the losses that follow it."""
    saves = layout.get("saves", False)
    actor = make_actor(model_dir, **{name: size for name, size in layout.items() if name != "saves"})
    samples = reference["samples"]
    mine = list(range(len(samples)))[actor.dp_rank :: actor.dp_size]
    rows = dict(zip(mine, actor.logprobs([samples[number] for number in mine]), strict=True))
    steps = [step(actor, samples) for _ in range(3)]
    weights = {name: tensor.clone() for name, tensor in actor.named_weights()}
    result = {"steps": steps, "weights": weights}
    if saves:
        Path(path).mkdir(exist_ok=True)
        write, complete = actor.snapshot(Path(path))
        written = [None] * dist.get_world_size()
        dist.all_gather_object(written, write())
        if dist.get_rank() == 0:
            complete(written)
        dist.barrier()
        result |= {"saved": path, "next": [step(actor, samples) for _ in range(2)]}
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, rows)
    actor.close()
    return result | {"logprobs": {number: row for rows in everyone for number, row in rows.items()}}


def work(case: dict, size: int, path: str) -> dict:
    """Results by name, of the layouts of `size` ranks; those that go on from a checkpoint come last."""
    results = {}
    for name, (family, ranks, layout) in case["layouts"].items():
        if ranks == size:
            reference = case["references"][family]
            results[name] = train(case["model_dirs"][family], layout, reference, f"{path}.{name}")
    return results


if __name__ == "__main__":
    main(work, sizes=(2, 4))
