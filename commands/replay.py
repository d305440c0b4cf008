"""Debug seams: one half of the loop on its own, for whoever looks for a fault in the other half.

    torchrun --nproc-per-node 2 run.py --rollout-only --steps 3                   serves and judges; the samples go to OUT/replay.jsonl
    torchrun --nproc-per-node 2 run.py --train-only --replay OUT/replay.jsonl     trains on them; no engine is started

A row of the replay is one whole Sample and its `step`, in the order of drawing. A step that kept nothing has no row.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import controller
import placement
from controller import Job
from engines.pool import RoleLoad
from rollout import SERVE, Served, serve
from sample import Sample
from scheduling.balance import flat
from scheduling.rebalance import Load

FIELDS = {field.name for field in dataclasses.fields(Sample)}


def choose(config) -> Callable[[Job], Awaitable[int]]:
    """The loop that the settings ask for. A replay is read here, before anything is moved or started: ValueError if it can't be."""
    if config.train_only:
        return functools.partial(train_only, steps=read_replay(Path(config.replay)))
    return rollout_only if config.rollout_only else controller.train


# ---------------------------------------------------------------- serve and judge


async def rollout_only(job: Job) -> int:
    """The loop without the update: engines and hand-overs as ever, but the weights stay (collective: every rank calls).

    Returns the signal that ended it early, else 0.
    """
    config, world, actor, rollout, genrm = job.config, job.world, job.actor, job.rollout, job.genrm
    await controller.begin(job)
    for step in range(job.state.step, config.steps):
        job.timeline.step = step
        await controller.evaluate(job, step)
        with job.timeline.span("serve"):
            served = await serve(job, SERVE[job.plan.mode])
        if job.stopping:
            break
        await keep(job, step, served.kept)
        await placement.to_training(actor, job.critics, rollout, genrm, world, job.timeline)
        decision = await controller.replan(job, served)
        job.state.hand_over_s = await placement.to_serving(actor, job.critics, rollout, world, job.timeline)
        controller.note_step(job, served)
        await job.report.step(step, served, served.kept, decision, job)
        controller.check_progress(job)
    job.report.note(f"to train on what was served: --train-only --replay {job.report.out}/replay.jsonl")
    return job.stopping


async def keep(job: Job, step: int, samples: list[Sample]) -> None:
    """Append all controllers' samples of a step to the replay. They go to rank 0, which nothing else in a run does (collective)."""
    parcels = await job.world.exchange({0: samples})
    rows = sorted((sample for parcel in parcels.values() for sample in parcel), key=lambda s: (s.prompt_id, s.index))
    if rows:
        with (job.report.out / "replay.jsonl").open("a") as file:
            file.writelines(json.dumps({"step": step} | dataclasses.asdict(sample)) + "\n" for sample in rows)


# ---------------------------------------------------------------- train


async def train_only(job: Job, steps: list[list[Sample]]) -> int:
    """The loop without serving: one update on each step of a replay (collective: every rank calls, with all samples).

    Returns the signal that ended it early, else 0; nothing is saved.
    From the second step on the weights are newer than those that wrote the samples, whose tokens are then trained on as stale ones.
    Raises ValueError when they are older: the replay needs those that wrote it.
    """
    config, world, actor = job.config, job.world, job.actor
    for step, samples in enumerate(steps[: config.steps]):
        job.stopping = max(await world.gather(job.stop.asked))
        if job.stopping:
            return job.stopping
        job.timeline.step = step
        newest = max((version for sample in samples for version in sample.versions), default=0)
        if newest > actor.version:
            raise ValueError(f"--replay {config.replay}: step {step} is of weights v{newest}, newer than the actor's v{actor.version}")
        served = Served(kept=share(samples, actor))
        mini_batches = await controller.balance(served.kept, config, actor, world)
        with job.timeline.span("train"):
            stats = await controller.appraise(job, mini_batches) | await controller.update(job, mini_batches)
        controller.check_skips(job, stats, mini_batches)
        job.state.history = [Load(job.plan, RoleLoad(), RoleLoad(), 0, 0.0, 0.0, 0.0)]  # nothing was served
        job.state.step = step + 1
        await job.report.step(step, served, flat(mini_batches), stats, job)
    if len(steps) < config.steps:
        job.report.note(f"{config.replay} holds {len(steps)} steps, fewer than --steps {config.steps}: all are trained on")
    return 0


def share(samples: list[Sample], actor) -> list[Sample]:
    """Whole groups for this data-parallel rank's controller, as if it had served them; nothing for ranks that serve none."""
    groups = [list(group) for _, group in itertools.groupby(samples, key=lambda sample: sample.prompt_id)]
    return [sample for group in groups[actor.dp_rank :: actor.dp_size] for sample in group] if actor.is_head else []


def read_replay(path: Path) -> list[list[Sample]]:
    """The samples of each step from the first in the file to the last, as `keep` wrote them; none for a step that kept nothing.

    Raises ValueError that names the file, and the line that isn't a sample's.
    """
    if not path.is_file():
        raise ValueError(f"--replay {path}: no such file")
    rows = [sample_row(line, f"--replay {path}:{number}") for number, line in enumerate(path.read_bytes().splitlines(), 1)]
    if not rows:
        raise ValueError(f"--replay {path}: the file holds no sample")
    steps = [step for step, _ in rows]
    by_step = {step: [] for step in range(min(steps), max(steps) + 1)}
    for step, sample in rows:
        by_step[step].append(sample)
    return list(by_step.values())


def sample_row(line: bytes, where: str) -> tuple[int, Sample]:
    """A line of the replay: step and sample."""
    try:
        row = json.loads(line)
    except ValueError:
        raise ValueError(f"{where}: not valid JSON") from None
    if not isinstance(row, dict) or row.keys() != FIELDS | {"step"} or not isinstance(row["step"], int):
        raise ValueError(f"{where}: expected the fields of a Sample and its step, as --rollout-only writes them")
    return row.pop("step"), Sample(**row)
