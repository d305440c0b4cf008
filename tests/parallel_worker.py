"""What test_actor.py starts as a process of its own: trains the same batches under one parallel layout after another.

Usage: parallel_worker.py case.pt result.pt. The case holds batches and what a plain reference made of them; the result holds, for
each layout, the metrics of every update and the largest distance of any rank's weights from the reference. Ranks are forked after
the imports, which take longer than the training, and meet through a file, so that no port is needed.
"""

import datetime
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def actor_config(**overrides) -> SimpleNamespace:
    config = dict(
        seed=0, algorithm="grpo", tp=1, pp=1, cp=1, sp=False, dtype="float32", temperature=0.8, clip_low=0.2, clip_high=0.28,
        lr=1e-3, lr_warmup_steps=2, lr_decay_to=0.5, steps=4, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, clip_grad=0.5,
        max_tokens_per_micro_batch=48, updates_per_step=1, max_logprob_diff=1e3,
    )  # fmt: skip
    assert overrides.keys() <= config.keys()
    return SimpleNamespace(**{**config, **overrides})


def train(model_dir: str, layout: dict, reference: dict, export_to: str) -> dict:
    from actor import Actor

    actor = Actor(actor_config(**layout), model_dir)
    metrics = []
    for batch in reference["batches"]:
        mine = batch[actor.dp_rank :: actor.dp_size]
        logprobs = actor.logprobs(mine)
        metrics.append(actor.update(mine))
    weights = dict(actor.named_weights())
    assert weights.keys() == reference["weights"].keys()
    distance = max((weights[name].float() - reference["weights"][name]).abs().max().item() for name in weights)
    logprob_distance = max(
        abs(a - b) for sample, row in zip(mine, logprobs, strict=True) for a, b in zip(sample.true_logprobs, row, strict=True)
    )
    actor.export(export_to)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (metrics, distance, logprob_distance, actor.dp_rank, actor.is_head))
    actor.close()
    assert all(other[0] == metrics for other in everyone), "metrics differ between ranks"
    return {
        "metrics": metrics,
        "weight_distance": max(distance for _, distance, *_ in everyone),
        "logprob_distance": max(distance for _, _, distance, *_ in everyone),
        "heads": sorted(dp_rank for *_, dp_rank, is_head in everyone if is_head),
    }


def rank_main(rank: int, size: int, case: dict, result_path: str) -> None:
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{result_path}.store{size}", timeout=timeout, rank=rank, world_size=size)
    results = {
        name: train(case["model_dirs"][family], layout, case["references"][family], f"{result_path}.{name}")
        for name, (family, ranks, layout) in case["layouts"].items()
        if ranks == size
    }
    if rank == 0:
        torch.save(results, f"{result_path}.{size}")
    dist.destroy_process_group()


if __name__ == "__main__":
    import actor  # noqa: F401  before the fork

    torch.set_num_threads(1)
    case = torch.load(sys.argv[1], weights_only=False)
    for size in (2, 4):
        mp.start_processes(rank_main, (size, case, sys.argv[2]), nprocs=size, start_method="fork")
