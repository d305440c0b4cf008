"""Placement: which ranks each role holds, and the hand-over of the devices between serving and training.

A mode is data, a `Plan`: the ranks of each role. While serving, rollout and genrm engines hold ranks; while training, the actor
holds all of them. The hand-overs are the vertical rules of the paper's figure, and their order decides the memory peak:

    to training    every engine sleeps (weights and KV cache go)   then the actor wakes, and the critics
    to serving     critics sleep, rollout weights come back, push, the actor sleeps, and only then does the KV cache come back

Between the two everything sleeps: there a run may take another plan (see rebalance.py). When no rollout engine is left, both happen
in the middle of serving, so that new ones get the weights.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from dataclasses import dataclass

from engines.pool import Pool

PATIENCE_S = 0.05  # controllers that wait for the last judgements look so often


@dataclass(frozen=True)
class Plan:
    """The ranks of each role. Roles that share a rank take turns on it; roles on disjoint ranks run side by side.

    An engine may span several ranks that follow each other (tensor parallelism): the first of them, its lead, owns the server.
    """

    mode: str  # the row of serving.SERVE that serves it
    rollout: tuple[int, ...]
    genrm: tuple[int, ...]
    actor: tuple[int, ...]
    rollout_tp: int = 1  # ranks of one rollout engine
    genrm_tp: int = 1

    def leads(self, role: str) -> tuple[int, ...]:
        """The ranks that own a server of `role`, one an engine."""
        return {"rollout": self.rollout[:: self.rollout_tp], "genrm": self.genrm[:: self.genrm_tp]}[role]

    @property
    def split(self) -> str:
        """The plan in a word, for logs and figures: `full`, or the ranks of rollout and genrm, `3|1`."""
        return f"{len(self.rollout)}|{len(self.genrm)}" if self.mode == "partial" else self.mode

    def __str__(self) -> str:
        roles = {"rollout": self.rollout, "genrm": self.genrm, "actor": self.actor}
        return ", ".join(f"{role} on ranks {_ranges(ranks)}" for role, ranks in roles.items() if ranks)


def full_colocation(world_size: int, rollout_tp: int, genrm_tp: int) -> list[Plan]:
    """Rollout, genrm and actor take turns, each on all ranks (WeChat-YATT, full colocation)."""
    everyone = tuple(range(world_size))
    return [Plan("full", everyone, everyone, everyone, rollout_tp, genrm_tp)]


def partial_colocation(world_size: int, rollout_tp: int, genrm_tp: int) -> list[Plan]:
    """Ranks [0, S) serve rollout and [S, N) serve genrm at the same time; then all N train (WeChat-YATT, partial colocation).

    One plan for every valid S: a multiple of both engines' sizes, so that no engine is cut when the split moves.
    """
    everyone, unit = tuple(range(world_size)), math.lcm(rollout_tp, genrm_tp)
    return [Plan("partial", everyone[:s], everyone[s:], everyone, rollout_tp, genrm_tp) for s in range(unit, world_size, unit)]


def auto(world_size: int, rollout_tp: int, genrm_tp: int) -> list[Plan]:
    """Every plan of both."""
    return [plan for colocation in (partial_colocation, full_colocation) for plan in colocation(world_size, rollout_tp, genrm_tp)]


def rollout_alone(world_size: int, rollout_tp: int, genrm_tp: int) -> list[Plan]:
    """Rollout on all ranks: where rules alone reward, it has nobody to share them with, whatever the mode."""
    everyone = tuple(range(world_size))
    return [Plan("partial", everyone, (), everyone, rollout_tp, genrm_tp)]


PLANS = {"full": full_colocation, "partial": partial_colocation, "auto": auto}


def make_plans(config, world_size: int) -> list[Plan]:
    """The plans that a run may take, the first of which it starts with (pure).

    One, unless `rebalance` lets the split move or the mode is auto. Raises ValueError with the numbers when none is valid.
    """
    mode, split = config.mode, config.rollout_ranks
    if mode not in PLANS:
        raise ValueError(f"--mode {mode} is unknown; choose one of {', '.join(PLANS)}")
    for name, tp in (("rollout", config.rollout_tp), ("genrm", config.genrm_tp)):
        if world_size % tp:
            raise ValueError(f"--{name}-tp {tp} doesn't divide {world_size} ranks")
    plans = plans_with_every_judge(config, world_size)
    if not plans:
        unit, judges = math.lcm(config.rollout_tp, config.genrm_tp), len(config.judge)
        least = next(ranks for ranks in itertools.count(unit, unit) if plans_with_every_judge(config, ranks))
        raise ValueError(
            f"--mode {mode} needs at least {least} ranks, for a rollout engine of {config.rollout_tp} and a genrm engine of "
            f"{config.genrm_tp}{f' for each of {judges} judges' if judges > 1 else ''}; this run has {world_size}"
        )
    splits = [len(plan.rollout) for plan in plans if plan.mode == "partial"]
    start = split or min(splits, key=lambda s: (abs(2 * s - world_size), -s), default=world_size)  # 0: the half, rounded up
    first = [plan for plan in plans if mode == "full" or len(plan.rollout) == start]
    if not first:
        raise ValueError(
            f"--rollout-ranks {split} leaves {world_size - split} of {world_size} ranks for genrm; "
            f"this run takes {', '.join(map(str, splits))}"
        )
    may_move = config.rebalance or mode == "auto"
    return first[:1] + [plan for plan in plans if may_move and plan != first[0]]


def plans_with_every_judge(config, world_size: int) -> list[Plan]:
    """The plans of the mode in which every judge has an engine. Without a judge there is one, in all modes."""
    judges, tp = config.judges, config.genrm_tp
    plans = (PLANS[config.mode] if judges else rollout_alone)(world_size, config.rollout_tp, tp)
    return [plan for plan in plans if len({judge_of(rank, tp, judges) for rank in plan.leads("genrm")}) == judges]


def judge_of(rank: int, genrm_tp: int, judges: int) -> int:
    """Which of several judge models the genrm engine that `rank` leads serves: they take turns."""
    return rank // genrm_tp % judges


def _ranges(ranks: tuple[int, ...]) -> str:
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"{ranks[0]}"


def take_plan(plan: Plan, rollout: Pool, genrm: Pool) -> None:
    """The engines of `plan` serve from now on; all engines sleep. Every controller calls it, with the same plan."""
    rollout.assign(plan.leads("rollout"))
    genrm.assign(plan.leads("genrm"))


async def to_training(actor, critics: list, rollout: Pool, genrm: Pool, world, timeline) -> None:
    """Engines sleep, then the actor and the critics wake (collective)."""
    await rollout.sleep()
    await genrm.sleep()
    for trainer in (actor, *critics):
        with timeline.span("switch"):
            await world.run(trainer.wake)


async def to_serving(actor, critics: list, rollout: Pool, world, timeline) -> float:
    """Critics out, weights back, push, actor out, KV cache back (collective). Whether genrm wakes is up to the mode's serve function.

    Returns the seconds that it took: what a move of the split may cost.
    """
    start = timeline.now()
    for critic in critics:
        with timeline.span("switch"):
            await world.run(critic.sleep)
            await world.barrier()
    await rollout.wake_weights()
    await rollout.load_weights(actor.named_weights(), actor.version)
    with timeline.span("switch"):
        await world.run(actor.sleep)
        await world.barrier()
    await rollout.wake_kv_cache()
    return timeline.now() - start


async def revive(actor, rollout: Pool, genrm: Pool, world, timeline) -> None:
    """Every rollout engine was lost: those that were started again get the actor's weights (collective). Critics sleep on.

    Answers that wait for an engine go on waiting. What is being judged is judged to its end; genrm sleeps afterwards.
    """
    genrm.hold()
    while any(await world.gather(genrm.outstanding())):
        await asyncio.sleep(PATIENCE_S)
    await to_training(actor, [], rollout, genrm, world, timeline)
    await to_serving(actor, [], rollout, world, timeline)
