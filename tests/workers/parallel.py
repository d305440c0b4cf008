"""Ranks that train in their own processes, for tests of one parallel layout after another.

As a program it reads lines, MODULE FOLDER, forks a process for each and prints its exit status. The module is
a test file; for each layout in the folder's case.pt the results hold what its `train` returned for a
reference, sizes and a path. Ranks are forked after the imports, which take longer than training, once for all
cases; they meet through a file, so that no port is needed.
"""

import datetime
import gc
import importlib
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import extras
from algorithms import Settings
from config import Config
from scheduling.balance import Measure, plan_batch
from tests.support.patience import LIMIT_S

extras.load()


def actor_config(row: str = "grpo", **changes) -> Config:
    """Make a small run's settings; a change that isn't a run's setting changes the algorithm."""
    names = [field.name for field in fields(Settings)]
    own = {name: changes.pop(name) for name in names if name in changes}
    small = dict(temperature=0.8, max_tokens_per_micro_batch=48, max_new_tokens=20, steps=4)
    rates = dict(lr=1e-3, lr_warmup_steps=2, lr_decay_to=0.5, weight_decay=0.1)
    algorithm = (row, *(f"{name}={value}" for name, value in own.items()))
    return Config(**small | rates | changes, algorithm=algorithm)


def critic_config(**changes) -> Config:
    return actor_config(**{"critic_lr": 2e-3} | changes)


def set_constants(patch: Callable = setattr) -> None:
    """Set a clip that cuts, and let engines be far off."""
    from transformers import AutoConfig  # noqa: F401  each rank would take seconds to import it

    import actor
    from training import trainer

    patch(trainer, "CLIP_GRAD", 0.5)
    patch(actor, "MAX_LOGPROB_DIFF", {"float32": 1e3, "bfloat16": 1e3})


def set_overlap(bucket: int | None, patch: Callable = setattr) -> None:
    """Sum gradients in the backward pass in buckets of this many parameters, and fuse AdamW, as on CUDA."""
    from megatron.core.distributed import DistributedDataParallelConfig

    from training import trainer

    patch(trainer, "OVERLAPS", bucket is not None)
    buckets = partial(DistributedDataParallelConfig, bucket_size=bucket)
    patch(trainer, "DistributedDataParallelConfig", buckets)


def supervised(trainer, sequences: list, lr: float) -> float:
    """Make an optimizer step of cross-entropy on (prompt, response) pairs; return the mean loss before it."""
    packed = [[sequences[index] for index in chosen] for chosen in trainer.pack(sequences)]
    stats = trainer.run_step(packed, trainer.cross_entropy_loss, (), lr)
    return stats["loss"] / stats["divisor"]


def balanced(batch: list, actor) -> list:
    """Return `actor`'s part of all ranks' samples, dealt and packed by the project's own plan."""
    kept = [sample for sample in batch if sample.advantages is not None]
    samples = {(sample.prompt_id, sample.index): sample for sample in kept}
    tokens = {key: len(sample.tokens) for key, sample in samples.items()}
    prefixes = {sample.prompt_id: actor.prefix_of(sample.prompt) for sample in kept}
    measure = Measure(tokens, actor.macs, prefixes)
    plan = plan_batch(measure, actor.config, actor.dp_size)[actor.dp_rank]
    return [[[samples[key] for key in micro] for micro in mini_batch] for mini_batch in plan]


def train_on(actor, batches: list) -> tuple[list[dict], float]:
    """Update on each batch; return metrics and the actor's distance from the true log-probabilities."""
    metrics, distance = [], 0.0
    for batch in batches:
        mine = batch[actor.dp_rank :: actor.dp_size]
        for sample, row in zip(mine, actor.read_tokens([mine]), strict=True):
            pairs = zip(sample.true_logprobs, row, strict=True)
            distance = max([distance, *(abs(true - logprob) for true, logprob in pairs)])
        metrics.append(actor.update(balanced(batch, actor)))
    return metrics, distance


def weights_of(trainer) -> dict[str, torch.Tensor]:
    """Return a copy of what a trainer would push (collective)."""
    return {name: tensor.clone() for name, tensor in trainer.named_weights()}


def far(one: dict, other: dict) -> float:
    """Return the largest distance of any weight."""
    assert one.keys() == other.keys()
    return max((one[name].float() - other[name]).abs().max().item() for name in one)


def gathered(value) -> list:
    """Return every rank's value (collective)."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def save(trainer, folder: Path) -> None:
    """Save a trainer's part of a checkpoint (collective)."""
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    write, complete = trainer.snapshot(folder)
    written = gathered(write())
    if dist.get_rank() == 0:
        complete(written)
    dist.barrier()


def rank_main(rank: int, size: int, train: Callable[..., dict], case: dict, path: str) -> None:
    store, timeout = f"file://{path}.store{size}", datetime.timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", store, timeout=timeout, rank=rank, world_size=size)
    results = {
        name: train(case["references"][family], layout, f"{path}.{name}")
        for name, (family, ranks, layout) in case["layouts"].items()
        if ranks == size
    }
    if rank == 0:
        torch.save(results, f"{path}.{size}")
    dist.destroy_process_group()


def run_case(module: str, folder: str) -> None:
    """Fork the case's ranks, one case after another. All their output is in the folder's log."""
    log = os.open(f"{folder}/log", os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(log, stream)
    train = importlib.import_module(module).train
    case = torch.load(f"{folder}/case.pt", weights_only=False)
    for size in case["sizes"]:
        how = dict(nprocs=size, start_method="fork")
        mp.start_processes(rank_main, (size, train, case, f"{folder}/result"), **how)


def main() -> None:
    with suppress(ModuleNotFoundError):  # without that extra a case that needs it fails
        importlib.import_module("extras.critic")
    set_constants()
    torch.set_num_threads(1)
    for line in sys.stdin:
        module, folder = line.removesuffix("\n").split(" ", 1)
        gc.freeze()  # a rank collects only its own
        assert len(os.listdir("/proc/self/task")) == 1  # other threads' locks would stay locked
        process = mp.get_context("fork").Process(target=run_case, args=(module, folder))
        process.start()
        process.join()
        print(process.exitcode, flush=True)


if __name__ == "__main__":
    main()
