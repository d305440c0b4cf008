"""One half of the loop on its own, for whoever looks for a fault in the other half.

    torchrun --nproc-per-node 2 run.py --rollout-only --steps 3    samples go to OUT/replay.jsonl
    torchrun --nproc-per-node 2 run.py --train-only --replay OUT/replay.jsonl --steps 3    starts no engine

The loop is controller.train: `record` and `collect` here take the places of its `learn` and `collect`. A row
is a whole Sample, its `step` and the row of ALGORITHMS. Neither half saves checkpoints.
"""

import dataclasses
import itertools
from pathlib import Path

from controller import Controller, Shares
from inputs.rows import read_rows
from rollout import RolloutBatch, sync_controllers
from runtime import atomic_files
from runtime.errors import UserError
from sample import Sample, flat, sample_from_json
from scheduling.measured import RequestStats, StepStats

FIELDS = {"step", "algorithm", *(field.name for field in dataclasses.fields(Sample))}
EMPTY = {field.name: None for field in dataclasses.fields(Sample) if field.default is None}


async def record(c: Controller, shares: Shares) -> dict[str, float]:
    """Append this data-parallel rank's samples to the replay, instead of training on them. Not collective."""
    actor = c.devices.actor
    samples = flat(shares.of(actor)) if actor.is_lead else []
    place = {"step": c.state.step, "algorithm": c.config.algorithm[0]}
    rows = [place | vars(sample) | {"media": []} for sample in samples]  # images are read anew
    atomic_files.append(Path(c.config.out, "replay.jsonl"), rows)
    return {}


async def collect(steps: list[list[Sample]], c: Controller) -> RolloutBatch:
    """Take this controller's share of the first of `steps`: whole groups (collective). UserError: too few.

    They are as if just served; from the second step on stale.
    """
    await sync_controllers(c, 0)
    left = c.config.steps - c.state.step
    if len(steps) < left:
        held = f"--replay {c.config.replay} holds {len(steps)} steps"
        raise UserError(f"{held}, but {left} are left up to --steps {c.config.steps}")
    samples = steps.pop(0)
    actor = c.devices.actor
    newest = max((version for sample in samples for version in sample.versions), default=0)
    if newest > actor.version:
        weights = f"weights v{newest}, newer than the actor's v{actor.version}"
        raise UserError(f"--replay {c.config.replay}: step {c.state.step} is of {weights}")
    by_prompt = itertools.groupby(samples, key=lambda sample: sample.prompt_id)
    groups = [list(group) for _, group in by_prompt]
    mine = groups[c.peers.place :: c.peers.size]
    unserved = dict(waves=0, serve_s=0.0, swap_s=0.0)
    stats = StepStats(c.devices.split, RequestStats(), RequestStats(), **unserved)
    return RolloutBatch(kept=[sample for group in mine for sample in group], stats=stats)


def read_replay(path: Path, name: str) -> list[list[Sample]]:
    """The samples of each step in drawing order; none for a step that kept nothing. name: the algorithm's."""
    by_step = {}
    for number, row in read_rows(path, "--replay"):
        row = EMPTY | row  # `read_rows` leaves out null fields
        if row.keys() != FIELDS or not isinstance(row["step"], int):
            needed = "expected the fields of a Sample, its step and algorithm, as of --rollout-only"
            raise UserError(f"--replay {path}:{number}: {needed}")
        if (served := row.pop("algorithm")) != name:  # ReMax would miss its greedy answers
            wrong = f"served for --algorithm {served}, not {name}"
            raise UserError(f"--replay {path}:{number}: {wrong}")
        by_step.setdefault(row.pop("step"), []).append(sample_from_json(row))
    steps = range(min(by_step), max(by_step) + 1)
    return [sorted(by_step.get(step, []), key=lambda sample: sample.key) for step in steps]
