"""What test_actor.py launches under torchrun: trains the same batches under one parallel layout after another.

Usage: torchrun ... parallel_worker.py case.pt result.pt. The case holds the batches and what a plain reference made of them;
the result holds, for each layout, the metrics of every update and the largest distance of any rank's weights from the reference.
"""

import datetime
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist


def actor_config(**overrides) -> SimpleNamespace:
    config = dict(
        seed=0, algorithm="grpo", tp=1, pp=1, cp=1, sp=False, dtype="float32", temperature=0.8, clip_low=0.2, clip_high=0.28,
        lr=1e-3, lr_warmup_steps=2, lr_decay_to=0.5, steps=4, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, clip_grad=0.5,
        max_tokens_per_micro_batch=48, updates_per_step=1, max_logprob_diff=1e3,
    )  # fmt: skip
    assert overrides.keys() <= config.keys()
    return SimpleNamespace(**{**config, **overrides})


def run(model_dir: str, layout: dict, reference: dict, export_to: str) -> dict:
    from actor import Actor, mpu

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
    worst = torch.tensor([distance, logprob_distance])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    actor.export(export_to)
    heads = [None] * dist.get_world_size()
    dist.all_gather_object(heads, (actor.dp_rank, actor.is_head))
    result = {"metrics": metrics, "weight_distance": worst[0].item(), "logprob_distance": worst[1].item(), "heads": heads}
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, metrics)
    assert all(other == metrics for other in everyone), "metrics differ between ranks"
    mpu.destroy_model_parallel()
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    case = torch.load(sys.argv[1], weights_only=False)
    results = {
        name: run(case["model_dirs"][family], layout, case["references"][family], f"{sys.argv[2]}.{name}")
        for name, (family, layout) in case["layouts"].items()
    }
    if dist.get_rank() == 0:
        torch.save(results, sys.argv[2])
    dist.destroy_process_group()
