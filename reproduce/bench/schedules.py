"""Measures how much time a fused table of actor and critic saves on real stages, against its schedule.

    python -m reproduce.bench.schedules [--ranks 4] [--micro-batches 8 4] [--repeats 5] [--pace 40 80]

Runs both schedules in turns, as tables of the same two models at the demo's width. --pace makes forward and
backward passes sleep until they have taken that many milliseconds. Ranks that share this machine's cores then
don't slow each other down, as if they had their own devices. --pace 0 0 measures the CPU's time instead.
"""

import datetime
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from actor import Actor
from config import Config
from examples.make_demo import models
from extras.critic import Critic
from extras.pipelines import executor
from extras.pipelines.fused import fused
from extras.pipelines.tables import evaluate, one_after_another
from reproduce.bench.measuring import parser_of, print_table, spread
from sample import Sample
from training.passes import Work

SERIAL = one_after_another
FUSED = fused
LENGTH = 32  # tokens in a micro-batch's only sequence, including 8 of the prompt


def at_pace(run_pass: Callable, milliseconds: float) -> Callable:
    """Return a stage's pass that lasts at least `milliseconds`."""

    def paced(*arguments, **options):
        due = time.monotonic() + milliseconds / 1000
        result = run_pass(*arguments, **options)
        time.sleep(max(0.0, due - time.monotonic()))
        return result

    return paced


def works_of(trainers: list, count: int) -> list[Work]:
    """Return each model's work over `count` micro-batches, not yet run."""
    micro_batches = []
    for number in range(count):
        sample = Sample(0, number, prompt=[1] * 8, response=[2] * (LENGTH - 8))
        zeros = [0.0] * len(sample.response)
        sample.versions = [0] * len(sample.response)
        sample.logprobs = sample.advantages = zeros
        sample.values = sample.returns = {"reward": zeros}
        micro_batches.append([sample])
    return [trainer.plan_steps([micro_batches])[0].work for trainer in trainers]


def run_once(trainers: list, count: int, schedule: Callable) -> float:
    """Run a table and return the slowest rank's seconds (collective: all ranks)."""
    works = works_of(trainers, count)
    dist.barrier()
    executor.run(works, schedule)
    passes = [each for work in works for each in work.passes]
    seconds = torch.tensor(max(p.end for p in passes) - min(p.start for p in passes))
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def compare(trainers: list, count: int, repeats: int) -> list[str]:
    """Run both schedules in turns and return a row of the table (collective: all ranks)."""
    pipes = [executor.pipe_of(work) for work in works_of(trainers, count)]
    planned = {}
    measured = {SERIAL: [], FUSED: []}
    for schedule in measured:
        planned[schedule] = evaluate(pipes, schedule(pipes)).latency
    for repeat in range(repeats + 1):
        for schedule, seconds in measured.items():
            took = run_once(trainers, count, schedule)
            if repeat:  # the first one warms up
                seconds.append(took)
    ratio = median(measured[FUSED]) / median(measured[SERIAL])
    by_table = planned[FUSED] / planned[SERIAL]
    seconds_shown = [spread(seconds, 3) for seconds in measured.values()]
    return [str(count), *seconds_shown, f"{ratio:.3f}", f"{by_table:.3f}"]


def rank_main(rank: int, given: Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", f"file://{folder}/store", timeout, given.ranks, rank)
    config = Config(pp=given.ranks, schedule="fused", algorithm=("ppo",))
    trainers = [Critic(config, f"{folder}/model"), Actor(config, f"{folder}/model")]
    forward_ms, backward_ms = given.pace
    executor.forward_step = at_pace(executor.forward_step, forward_ms)
    executor.backward_step = at_pace(executor.backward_step, backward_ms)
    rows = [compare(trainers, count, given.repeats) for count in given.micro_batches]
    if rank == 0:
        columns = ["micro-batches", "serial, s", "fused, s", "fused / serial", "by the table"]
        print_table(columns, rows)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = parser_of(__doc__, ranks=4, repeats=5)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--pace", type=float, nargs=2, default=[40, 80], metavar="MS")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models.SHAPE["num_hidden_layers"] = 2 * given.ranks
        models.new_model(Path(folder, "model"), seed=0)
        mp.start_processes(rank_main, (given, folder), nprocs=given.ranks, start_method="fork")


if __name__ == "__main__":
    main()
