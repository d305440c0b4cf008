"""What test_actor.py starts as a process: trains the same batches under one parallel layout after another.

Usage: parallel_worker.py case.pt result.pt. The case holds batches and what a plain reference made of them;
the result holds, for each layout, the metrics of every update and the largest distance of any rank's weights
from the reference. Ranks are forked after the imports, which take longer than the training, and meet through
a file, so that no port is needed.
"""

import datetime
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from algorithms import ALGORITHMS, Settings
from config import Config
from scheduling.balance import flat, pack, packed_length, plan_batch


def actor_config(row: str = "grpo", **changes) -> Config:
    """A small run's; a change that isn't a setting of the run's is one of the algorithm's."""
    own = {
        field.name: changes.pop(field.name) for field in fields(Settings) if field.name in changes
    }
    small = dict(temperature=0.8, max_tokens_per_micro_batch=48, max_new_tokens=20, steps=4)
    rates = dict(lr=1e-3, lr_warmup_steps=2, weight_decay=0.1)
    algorithm = (row, *(f"{name}={value}" for name, value in own.items()))
    return Config(**small | rates | changes, algorithm=algorithm)


def set_constants(patch: Callable = setattr) -> None:
    """A clip that cuts, a learning rate that is worked out by hand, engines that may be far off."""
    from transformers import AutoConfig  # noqa: F401  each rank would take seconds to import it

    import actor
    from training import trainer

    patch(trainer, "CLIP_GRAD", 0.5)
    patch(actor, "LR_DECAY_TO", 0.5)
    patch(actor, "MAX_LOGPROB_DIFF", {"float32": 1e3, "bfloat16": 1e3})


def set_overlap(bucket: int | None, patch: Callable = setattr) -> None:
    """Sum gradients during the backward pass in buckets of so many parameters, and fuse AdamW, as on CUDA."""
    from megatron.core.distributed import DistributedDataParallelConfig

    from training import model, trainer

    patch(model, "overlaps", lambda device: bucket is not None)
    patch(
        trainer,
        "DistributedDataParallelConfig",
        partial(DistributedDataParallelConfig, bucket_size=bucket),
    )


def supervised(trainer, sequences: list, lr: float) -> float:
    """One optimizer step of cross-entropy on (prompt, response) pairs; returns the mean loss before it."""
    from actor import cross_entropy_loss

    packed = [[sequences[index] for index in chosen] for chosen in trainer.pack(sequences)]
    stats = trainer.optimizer_step(packed, cross_entropy_loss, (), lr)
    return stats["loss"] / stats["divisor"]


def balanced(batch: list, actor) -> list:
    """What `actor` trains on of all ranks' samples, dealt and packed by the project's own plan."""
    samples = {
        (sample.prompt_id, sample.index): sample
        for sample in batch
        if sample.advantages is not None
    }
    tokens = {key: len(sample.prompt) + len(sample.response) for key, sample in samples.items()}
    plan = plan_batch(tokens, actor.cost, actor.config, actor.dp_size)[actor.dp_rank]
    return [
        [[samples[key] for key in micro_batch] for micro_batch in mini_batch] for mini_batch in plan
    ]


def contiguous(batch: list, actor) -> list:
    """The same, dealt in one piece to each rank, which packs its own.

    Ranks with fewer micro-batches add empty ones.
    """
    samples, packed = [sample for sample in batch if sample.advantages is not None], []
    for rank in range(actor.dp_size):
        share = samples[
            rank * len(samples) // actor.dp_size : (rank + 1) * len(samples) // actor.dp_size
        ]
        lengths = [
            packed_length(len(sample.prompt) + len(sample.response), actor.config.cp)
            for sample in share
        ]
        packed.append(
            [
                [share[index] for index in chosen]
                for chosen in pack(lengths, actor.config.max_tokens_per_micro_batch)
            ]
        )
    empty = max(map(len, packed)) - len(packed[actor.dp_rank])
    return [packed[actor.dp_rank] + [[]] * empty]


def whole_gradient(actor) -> torch.Tensor:
    """Of the last update, from the parts that data-parallel ranks hold of it (collective.

    Data parallelism alone).
    """
    part = torch.cat(
        [
            bucket.grad_data.chunk(actor.dp_size)[actor.dp_rank]
            for bucket in actor.ddps[0].buffers[0].buckets
        ]
    )
    parts = [torch.empty_like(part) for _ in range(actor.dp_size)]
    dist.all_gather(parts, part)
    return torch.stack(parts)


def spread_with_a_slow_rank(actor, samples: list) -> float:
    """`train/seconds_spread` of an update in which one rank sleeps for a second during its passes."""
    loss = actor.algorithm.loss

    def slow_loss(*args):
        time.sleep(actor.dp_rank == 1)
        return loss(*args)

    actor.algorithm = replace(actor.algorithm, loss=slow_loss)
    fresh = [replace(sample, versions=[actor.version] * len(sample.response)) for sample in samples]
    return actor.update([[fresh]])["train/seconds_spread"]


def stale_update(actor, batch: list) -> dict[str, float]:
    """Metrics of two optimizer steps on a batch, of which one answer's first half is from older weights."""
    actor.config = replace(actor.config, over_dispatch=2.0, updates_per_step=2)
    batch = [replace(sample, versions=[actor.version] * len(sample.response)) for sample in batch]
    half = -(-len(batch[0].response) // 2)
    batch[0].versions[:half] = [actor.version - 1] * half
    return actor.update(balanced(batch, actor))


def sequence_update(actor, batch: list) -> dict[str, float]:
    """Metrics of an off-policy update by the ratio of sequences, with a KL and an entropy that train.

    And with texts: as many as no number of ranks divides, in several micro-batches.
    """
    before = actor.algorithm
    settings = dict(
        kl_coef=0.3, entropy_coef=0.2, ptx_coef=0.7, ptx_batch=5, clip_low=0.2, clip_high=0.28
    )
    actor.algorithm = replace(ALGORITHMS["gspo"], **settings)
    actor.texts = [
        ([number], [(7 * number + place) % 60 for place in range(3 + 5 * number)])
        for number in range(1, 6)
    ]
    batch = [replace(sample, versions=[actor.version] * len(sample.response)) for sample in batch]
    for sample in batch:
        sample.reference_logprobs = [
            x - 0.2 * (token % 3) for token, x in zip(sample.response, sample.logprobs, strict=True)
        ]
    metrics = actor.update(balanced(batch, actor))
    actor.algorithm, actor.texts = before, []
    return metrics


def train(model_dir: str, layout: dict, reference: dict, export_to: str) -> dict:
    """Under one layout: Megatron's sizes; `arrange`, how samples are dealt and packed; see `set_overlap`."""
    from actor import Actor

    set_overlap(layout.get("bucket"))
    sizes = {name: value for name, value in layout.items() if name not in ("arrange", "bucket")}
    arrange = contiguous if layout.get("arrange") == "contiguous" else balanced
    actor = Actor(actor_config(**sizes), model_dir)
    metrics, gradients, shares = [], [], []
    for batch in reference["batches"]:
        mine = batch[actor.dp_rank :: actor.dp_size]
        logprobs = actor.logprobs(mine)
        mini_batches = arrange(batch, actor)
        metrics.append(actor.update(mini_batches))
        gradients.append(whole_gradient(actor) if actor.dp_size == dist.get_world_size() else None)
        shares.append(sorted((sample.prompt_id, sample.index) for sample in flat(mini_batches)))
    weights = {name: tensor.clone() for name, tensor in actor.named_weights()}
    assert weights.keys() == reference["weights"].keys()
    distance = max(
        (weights[name].float() - reference["weights"][name]).abs().max().item() for name in weights
    )
    logprob_distance = max(
        abs(a - b)
        for sample, row in zip(mine, logprobs, strict=True)
        for a, b in zip(sample.true_logprobs, row, strict=True)
    )
    actor.export(export_to)
    stale = stale_update(actor, reference["batches"][1])
    sequences = sequence_update(actor, reference["batches"][1])
    uneven = supervised(
        actor,
        [([1], [2, 3]), ([4, 5], [6] * 30), ([7], [8] * 20)][: 3 * (actor.dp_rank == 0)],
        1e-3,
    )
    spread = (
        spread_with_a_slow_rank(actor, flat(arrange(reference["batches"][0], actor)))
        if actor.dp_size > 1
        else None
    )
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(
        everyone, (metrics, distance, logprob_distance, actor.dp_rank, actor.is_head, shares)
    )
    actor.close()
    assert all(other[0] == metrics for other in everyone), "metrics differ between ranks"
    return {
        "metrics": metrics,
        "gradients": gradients,
        "weights": weights,
        "weight_distance": max(distance for _, distance, *_ in everyone),
        "logprob_distance": max(distance for _, _, distance, *_ in everyone),
        "heads": sorted(dp_rank for *_, dp_rank, is_head, _ in everyone if is_head),
        "shares": [shares for *_, shares in everyone],
        "sequences": sequences,
        "stale": stale,
        "spread_with_a_slow_rank": spread,
        "uneven": uneven,
    }


def each_layout(train: Callable[..., dict], case: dict, size: int, path: str) -> dict:
    """Results by name, of the layouts of `size` ranks."""
    return {
        name: train(
            case["model_dirs"][family], layout, case["references"][family], f"{path}.{name}"
        )
        for name, (family, ranks, layout) in case["layouts"].items()
        if ranks == size
    }


def rank_main(
    rank: int, size: int, work: Callable[[dict, int, str], dict], case: dict, path: str
) -> None:
    store, timeout = f"file://{path}.store{size}", datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", store, timeout=timeout, rank=rank, world_size=size)
    results = work(case, size, path)
    if rank == 0:
        torch.save(results, f"{path}.{size}")
    dist.destroy_process_group()


def main(work: Callable[[dict, int, str], dict], sizes: tuple[int, ...]) -> None:
    """Fork so many ranks, one time after another. What they need is imported by now, or by set_constants."""
    set_constants()
    torch.set_num_threads(1)
    case = torch.load(sys.argv[1], weights_only=False)
    for size in sizes:
        mp.start_processes(
            rank_main, (size, work, case, sys.argv[2]), nprocs=size, start_method="fork"
        )


if __name__ == "__main__":
    main(partial(each_layout, train), sizes=(2, 4))
