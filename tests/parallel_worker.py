"""What test_layouts.py starts as a process: actor and critic train under one parallel layout after another.

Usage: parallel_worker.py case.pt result.pt. The case holds batches and what a plain reference made of them;
the result holds, for each layout, the metrics of every update and the largest distance of any rank's weights
from the reference. Ranks are forked after the imports, which take longer than the training, and meet through
a file, so that no port is needed.
"""

import datetime
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from algorithms import ALGORITHMS, Settings
from config import Config
from scheduling.balance import flat, plan_batch


def actor_config(row: str = "grpo", **changes) -> Config:
    """A small run's; a change that isn't a setting of the run's is one of the algorithm's."""
    names = [field.name for field in fields(Settings)]
    own = {name: changes.pop(name) for name in names if name in changes}
    small = dict(temperature=0.8, max_tokens_per_micro_batch=48, max_new_tokens=20, steps=4)
    rates = dict(lr=1e-3, lr_warmup_steps=2, lr_decay_to=0.5, weight_decay=0.1)
    algorithm = (row, *(f"{name}={value}" for name, value in own.items()))
    return Config(**small | rates | changes, algorithm=algorithm)


def critic_config(**changes) -> Config:
    return actor_config(**{"critic_lr": 2e-3} | changes)


def set_constants(patch: Callable = setattr) -> None:
    """A clip that cuts, engines that may be far off."""
    from transformers import AutoConfig  # noqa: F401  each rank would take seconds to import it

    import actor
    from training import trainer

    patch(trainer, "CLIP_GRAD", 0.5)
    patch(actor, "MAX_LOGPROB_DIFF", {"float32": 1e3, "bfloat16": 1e3})


def set_overlap(bucket: int | None, patch: Callable = setattr) -> None:
    """Sum gradients during the backward pass in buckets of so many parameters, and fuse AdamW, as on CUDA."""
    from megatron.core.distributed import DistributedDataParallelConfig

    from training import model, trainer

    patch(model, "overlaps", lambda device: bucket is not None)
    buckets = partial(DistributedDataParallelConfig, bucket_size=bucket)
    patch(trainer, "DistributedDataParallelConfig", buckets)


def supervised(trainer, sequences: list, lr: float) -> float:
    """One optimizer step of cross-entropy on (prompt, response) pairs; returns the mean loss before it."""
    packed = [[sequences[index] for index in chosen] for chosen in trainer.pack(sequences)]
    stats = trainer.optimizer_step(packed, trainer.cross_entropy_loss, (), lr)
    return stats["loss"] / stats["divisor"]


def balanced(batch: list, actor) -> list:
    """What `actor` trains on of all ranks' samples, dealt and packed by the project's own plan."""
    kept = [sample for sample in batch if sample.advantages is not None]
    samples = {(sample.prompt_id, sample.index): sample for sample in kept}
    tokens = {key: len(sample.prompt) + len(sample.response) for key, sample in samples.items()}
    plan = plan_batch(tokens, actor.cost, actor.config, actor.dp_size)[actor.dp_rank]
    return [[[samples[key] for key in micro] for micro in mini_batch] for mini_batch in plan]


def mixed_update(actor, batch: list) -> dict[str, float]:
    """Metrics of two optimizer steps with all that crosses ranks. Off-policy by the ratio of
    sequences, with a KL and an entropy that train; one answer's first half is from older weights;
    and texts: as many as no number of ranks divides, in several micro-batches."""
    actor.config = replace(actor.config, over_dispatch=2.0, updates_per_step=2)
    settings = dict(kl_coef=0.3, entropy_coef=0.2, ptx_coef=0.7, ptx_batch=5)
    actor.algorithm = replace(ALGORITHMS["gspo"], **settings, clip_low=0.2, clip_high=0.28)
    actor.texts = [([n], [(7 * n + k) % 60 for k in range(3 + 5 * n)]) for n in range(1, 6)]
    batch = [replace(sample, versions=[actor.version] * len(sample.response)) for sample in batch]
    for sample in batch:
        pairs = zip(sample.response, sample.logprobs, strict=True)
        sample.reference_logprobs = [x - 0.2 * (token % 3) for token, x in pairs]
    half = -(-len(batch[0].response) // 2)
    batch[0].versions[:half] = [actor.version - 1] * half
    return actor.update(balanced(batch, actor))


def weights_of(trainer) -> dict[str, torch.Tensor]:
    """A copy of what a trainer would push (collective)."""
    return {name: tensor.clone() for name, tensor in trainer.named_weights()}


def far(one: dict, other: dict) -> float:
    """The largest distance of any weight."""
    assert one.keys() == other.keys()
    return max((one[name].float() - other[name]).abs().max().item() for name in one)


def gathered(value) -> list:
    """Every rank's (collective)."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def save(trainer, folder: Path) -> None:
    """A trainer's part of a checkpoint (collective)."""
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    write, complete = trainer.snapshot(folder)
    written = gathered(write())
    if dist.get_rank() == 0:
        complete(written)
    dist.barrier()


def train_actor(reference: dict, sizes: dict, export_to: str) -> dict:
    from actor import Actor
    from examples.make_demo.closing import close

    actor, metrics, distance = Actor(actor_config(**sizes), reference["model_dir"]), [], 0.0
    for batch in reference["batches"]:
        mine = batch[actor.dp_rank :: actor.dp_size]
        for sample, row in zip(mine, actor.read_tokens([mine]), strict=True):
            pairs = zip(sample.true_logprobs, row, strict=True)
            distance = max([distance, *(abs(true - logprob) for true, logprob in pairs)])
        metrics.append(actor.update(balanced(batch, actor)))
        metrics[-1].pop("train/seconds_spread")
    actor.export(export_to)
    everyone = gathered((metrics, distance, far(weights_of(actor), reference["weights"])))
    heads = gathered((actor.is_head, actor.dp_rank))
    mixed = mixed_update(actor, reference["batches"][1])
    close(actor)
    heads = sorted(dp_rank for is_head, dp_rank in heads if is_head)
    return summary(everyone) | {"mixed": mixed, "heads": heads}


def train_critic(reference: dict, sizes: dict, export_to: str) -> dict:
    from critic import Critic
    from examples.make_demo.closing import close

    critic, metrics, distance = Critic(critic_config(**sizes), reference["model_dir"]), [], 0.0
    for batch in reference["batches"]:
        mine = balanced(batch, critic)
        critic.compute_values(mine)
        for sample in flat(mine):
            pairs = zip(sample.values["reward"], sample.true_values, strict=True)
            distance = max([distance, *(abs(value - true) for value, true in pairs)])
            sample.values["reward"] = sample.old_values
        metrics.append(critic.update(mine))
    critic.export(export_to)
    everyone = gathered((metrics, distance, far(weights_of(critic), reference["weights"])))
    close(critic)
    return summary(everyone)


def summary(everyone: list[tuple]) -> dict:
    """Of every rank's metrics, and of its distances from the reference, before the updates and after."""
    metrics = everyone[0][0]
    assert all(other[0] == metrics for other in everyone), "metrics differ between ranks"
    distance, weight_distance = (max(rank[column] for rank in everyone) for column in (1, 2))
    return {"metrics": metrics, "distance": distance, "weight_distance": weight_distance}


def train(references: dict, layout: dict, path: str) -> dict:
    """Both models under one layout: Megatron's sizes, and `bucket`, see `set_overlap`."""
    sizes = dict(layout)
    set_overlap(sizes.pop("bucket", None))
    actor = train_actor(references["actor"], sizes, f"{path}/actor")
    return {"actor": actor, "critic": train_critic(references["critic"], sizes, f"{path}/critic")}


def each_layout(train: Callable[..., dict], case: dict, size: int, path: str) -> dict:
    """Results by name, of the layouts of `size` ranks. train: of a reference, sizes and a path."""
    return {
        name: train(case["references"][family], layout, f"{path}.{name}")
        for name, (family, ranks, layout) in case["layouts"].items()
        if ranks == size
    }


def rank_main(rank: int, size: int, work: Callable[..., dict], case: dict, path: str) -> None:
    store, timeout = f"file://{path}.store{size}", datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", store, timeout=timeout, rank=rank, world_size=size)
    results = work(case, size, path)
    if rank == 0:
        torch.save(results, f"{path}.{size}")
    dist.destroy_process_group()


def main(work: Callable[[dict, int, str], dict]) -> None:
    """Fork as many ranks as the case says, one time after another; what they need is imported by now."""
    set_constants()
    torch.set_num_threads(1)
    case = torch.load(sys.argv[1], weights_only=False)
    for size in case["sizes"]:
        how = dict(nprocs=size, start_method="fork")
        mp.start_processes(rank_main, (size, work, case, sys.argv[2]), **how)


if __name__ == "__main__":
    import critic  # noqa: F401  before the fork

    main(partial(each_layout, train))
