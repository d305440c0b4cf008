"""What a fused table of actor and critic saves, run on real stages, beside what its schedule says.

    python -m bench.schedules [--ranks 4] [--micro-batches 8 4] [--repeats 5] [--pace 40 80]
    python -m bench.schedules --instances papers/published/rlhfuse_table3.json    worked out, nothing is run
    python -m bench.schedules --passes RUN STEP      passes.png: what a run's pipelines did in a step

Both schedules are run as tables of the same two models, of the demo's width, in turns. A pace makes a forward
and a backward pass last at least so many milliseconds, asleep: then ranks that share this machine's cores
don't slow each other down, as devices of their own wouldn't. Without it (--pace 0 0) seconds are the CPU's.
"""

from __future__ import annotations

import datetime
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from actor import Actor
from bench.tables import picture, print_table, spread
from config import Config, UserError
from critic import Critic, ValueLoss
from examples.make_demo import models
from reporting import timeline
from scheduling.pipeline import SCHEDULES, base_memory, bound, evaluate, fused, read_instances
from training import executor

SERIAL, FUSED = "1f1b", "fused"
LENGTH = 32  # tokens of a micro-batch's only sequence
PASSES = {"actor": timeline.COLORS["train"], "reward critic": timeline.COLORS["genrm"]}
PASSES |= {"cost critic": timeline.COLORS["rollout"]}


def at_pace(run_pass: Callable, milliseconds: float) -> Callable:
    """A pass of one stage that lasts at least so long."""

    def paced(*arguments, **options):
        due = time.monotonic() + milliseconds / 1000
        result = run_pass(*arguments, **options)
        time.sleep(max(0.0, due - time.monotonic()))
        return result

    return paced


def works_of(trainers: list, count: int) -> list[executor.Work]:
    """The passes of critic and actor over `count` micro-batches, not yet run."""
    critic, actor = trainers
    packed = [[([1] * 8, [2] * (LENGTH - 8))] for _ in range(count)]
    values = torch.zeros(count * LENGTH)
    value_loss = ValueLoss(critic.read_targets, values, values, 0.2)
    return [critic.work(packed, value_loss), actor.work(packed, actor.cross_entropy_loss)]


def run_once(trainers: list, count: int, schedule: str) -> tuple[float, float]:
    """Seconds of a table on the slowest rank, and the part of it that ranks waited in the mean."""
    works = works_of(trainers, count)
    dist.barrier()
    phase = executor.run(works, schedule)
    elapsed = phase.end - phase.start
    waited = 1 - sum(done.end - done.start for done in phase.passes) / elapsed
    facts = [None] * dist.get_world_size()
    dist.all_gather_object(facts, (elapsed, waited))
    return max(seconds for seconds, _ in facts), sum(part for _, part in facts) / len(facts)


def rank_main(rank: int, given: Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", f"file://{folder}/store", timeout, given.ranks, rank)
    config = Config(pp=given.ranks, schedule=FUSED, algorithm=("ppo",))
    trainers = [Critic(config, f"{folder}/model"), Actor(config, f"{folder}/model")]
    executor.forward_step, executor.backward_step = (
        at_pace(run_pass, pace)
        for run_pass, pace in zip(
            (executor.forward_step, executor.backward_step), given.pace, strict=True
        )
    )
    for count in given.micro_batches:
        pipes = [work.pipe() for work in works_of(trainers, count)]
        planned = {
            name: evaluate(pipes, SCHEDULES[name].table(pipes)).latency for name in (SERIAL, FUSED)
        }
        runs = {name: [] for name in planned}
        for _ in range(given.repeats + 1):
            for name, rows in runs.items():
                rows.append(run_once(trainers, count, name))
        if rank == 0:
            report(count, planned, {name: rows[1:] for name, rows in runs.items()}, pipes)
    dist.barrier()
    dist.destroy_process_group()


def report(count: int, planned: dict[str, float], runs: dict[str, list], pipes: list) -> None:
    """The first of each is a warm-up and left out."""
    busy = sum(pipe.micro_batches * (pipe.forward + pipe.backward) for pipe in pipes)
    rows = []
    for name, measured in runs.items():
        seconds, waited = zip(*measured, strict=True)
        by_table = f"{1 - busy / planned[name]:.3f}"
        units = f"{planned[name] / pipes[0].forward:g}"
        rows.append([name, spread(seconds, 3), units, spread(waited, 3), by_table])
    print_table([f"{count} micro-batches", "seconds", "the table's", "bubble", "the table's"], rows)
    measured = median(s for s, _ in runs[FUSED]) / median(s for s, _ in runs[SERIAL])
    expected = planned[FUSED] / planned[SERIAL]
    print(
        f"fused / serial: {measured:.3f}, by the tables {expected:.3f}: {measured / expected - 1:+.1%}"
    )


def print_instances(path: str) -> None:
    """What fusing gains by the tables alone."""
    rows = []
    for name, pipes in read_instances(path).items():
        start = time.perf_counter()
        latency, memory, _ = evaluate(pipes, fused(pipes))
        seconds = time.perf_counter() - start
        serial, least = evaluate(pipes, SCHEDULES[SERIAL].table(pipes)).latency, bound(pipes)
        numbers = [f"{number:g}" for number in (least, serial, latency)]
        rows.append([name, *numbers, f"{memory / base_memory(pipes):.2f}", f"{seconds:.1f}"])
    print_table(
        ["instance", "bound", "1F1B in turn", "fused", "memory over 1F1B's", "seconds"], rows
    )


def draw_passes(records: timeline.Records, step: int, path: Path) -> None:
    """A step's passes by rank: forward pale, backward full, the micro-batch's number. UserError if none."""
    passes = [done for done in records.passes if done.step == step]
    if not passes:
        raise UserError(f"no pass of a pipeline was recorded in step {step}")
    ranks, begin = sorted({done.rank for done in passes}), min(done.start for done in passes)
    with picture(path, 1, 13) as (axes,):
        for done in passes:
            row, left, width = ranks.index(done.rank), done.start - begin, done.end - done.start
            style = dict(
                color=PASSES[done.model], edgecolor="white", alpha=1.0 if done.backward else 0.5
            )
            axes.barh(row, width, left=left, height=0.8, **style)
            axes.text(
                left + width / 2, row, f"{done.micro_batch}", fontsize=7, ha="center", va="center"
            )
        axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
        axes.invert_yaxis()
        axes.set_xlabel(f"seconds since the first pass of step {step}; forward pale, backward full")
        for model in sorted({done.model for done in passes}):
            axes.barh(0, 0, color=PASSES[model], label=model)
        axes.legend(loc="lower right", fontsize=8)


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--pace", type=float, nargs=2, default=[40, 80], help="ms: forward, backward"
    )
    parser.add_argument("--instances", metavar="FILE")
    parser.add_argument("--passes", nargs=2, metavar=("RUN", "STEP"))
    given = parser.parse_args()
    if given.instances:
        return print_instances(given.instances)
    if given.passes:
        run, step = given.passes
        return draw_passes(timeline.read(Path(run, "spans")), int(step), Path("passes.png"))
    with tempfile.TemporaryDirectory() as folder:
        models.SHAPE["num_hidden_layers"] = 2 * given.ranks
        models.new_model(Path(folder, "model"), seed=0)
        mp.start_processes(rank_main, (given, folder), nprocs=given.ranks, start_method="fork")


if __name__ == "__main__":
    main()
