"""Placement: which ranks each role holds, and the hand-over of the devices between serving and training.

Who holds what is data, a `Plan`. While serving, rollout and genrm engines hold ranks; while training, the
actor holds all. Where both may hold all, the mode says who has them now. The order decides the memory peak:

    to training   every engine sleeps (weights and KV cache go); then trainers wake: one at a time, or all
                  where the schedule runs them in one pipeline
    to serving    critics sleep, the actor's gradients and what its passes left go, rollout weights come back,
                  push, the actor sleeps, the KV cache comes back

Between the two all engines sleep: lost ones are started again before training, and after it a run may switch
to another plan.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from config import Config, UserError
from engines.pool import Pool
from runtime.world import World
from scheduling.fusion import TAILS, Left, ranks_of_tail
from scheduling.rebalance import Split

if TYPE_CHECKING:
    from reporting.timeline import Timeline
    from training.trainer import Trainer  # which imports Megatron: plans are made without


@dataclass(frozen=True)
class Plan:
    """The ranks of each role; on shared ones they take turns. The first rank of an engine owns its server."""

    mode: str  # a row of rollout.MODES
    rollout: tuple[int, ...]
    genrm: tuple[int, ...]
    actor: tuple[int, ...]
    rollout_tp: int = 1  # ranks of one rollout engine
    genrm_tp: int = 1
    tail: float = 0.0  # fused: the part of answers that is unwritten when genrm gets ranks

    def leads(self, role: str) -> tuple[int, ...]:
        """The ranks that own a server of `role`."""
        return vars(self)[role][:: vars(self)[f"{role}_tp"]]

    @property
    def units(self) -> list[tuple[int, ...]]:
        """The ranks, in the smallest parts of them that cut no engine."""
        size = math.lcm(self.rollout_tp, self.genrm_tp)
        return [self.actor[first : first + size] for first in range(0, len(self.actor), size)]

    @property
    def split(self) -> Split:
        return Split(self.mode, len(self.rollout), len(self.genrm), self.tail)

    def __str__(self) -> str:
        parts = []
        for role in ("rollout", "genrm", "actor"):
            if ranks := vars(self)[role]:
                ends = dict.fromkeys([ranks[0], ranks[-1]])
                parts.append(f"{role} on ranks {'-'.join(map(str, ends))}")
        return ", ".join(parts)


def plan_of(mode: str, config: Config, rollout: tuple[int, ...], genrm: tuple[int, ...]) -> Plan:
    """A plan with the run's sizes of engines, whose actor holds the ranks of both roles."""
    actor = tuple(sorted({*rollout, *genrm}))
    return Plan(mode, rollout, genrm, actor, config.rollout_tp, config.genrm_tp)


def full_colocation(everyone: tuple[int, ...], config: Config) -> list[Plan]:
    """Let rollout, genrm and actor take turns, each on all ranks. Source: WeChat-YATT, full colocation."""
    return [plan_of("full", config, everyone, everyone)]


def partial_colocation(everyone: tuple[int, ...], config: Config) -> list[Plan]:
    """Let ranks [0, S) serve rollout, [S, N) genrm, for each S that cuts no engine. Source: WeChat-YATT."""
    unit = math.lcm(config.rollout_tp, config.genrm_tp)
    cuts = range(unit, len(everyone), unit)
    return [plan_of("partial", config, everyone[:s], everyone[s:]) for s in cuts]


def inter_stage_fusion(everyone: tuple[int, ...], config: Config) -> list[Plan]:
    """A plan for each tail of the answers: 0 is full, 1 partial. RLHFuse (arXiv 2409.13221), section 4."""
    (plan,) = full_colocation(everyone, config)
    if len(plan.units) == 1:
        return []
    return [replace(plan, mode="fused", tail=tail) for tail in dict.fromkeys((config.tail, *TAILS))]


def auto(everyone: tuple[int, ...], config: Config) -> list[Plan]:
    modes = (partial_colocation, full_colocation, inter_stage_fusion)
    return [plan for mode in modes for plan in mode(everyone, config)]


PLANS = {"full": full_colocation, "partial": partial_colocation, "fused": inter_stage_fusion}
PLANS["auto"] = auto


def make_plans(config: Config, world_size: int, on_machine: int = 0) -> list[Plan]:
    """The plans a run may take, that of its start first (pure), or UserError. on_machine: ranks of each."""
    if config.mode not in PLANS:
        raise UserError(f"--mode {config.mode} is unknown; choose one of {', '.join(PLANS)}")
    ranks = on_machine or world_size
    for name, tp in (("rollout", config.rollout_tp), ("genrm", config.genrm_tp)):
        if ranks % tp:
            where = " of a machine, which no engine leaves" if ranks != world_size else ""
            raise UserError(f"--{name}-tp {tp} doesn't divide {ranks} ranks{where}")
    if config.train_only:
        return [Plan("partial", rollout=(), genrm=(), actor=tuple(range(world_size)))]
    if not (plans := plans_of_mode(config, world_size)):
        judges = len(config.judge_models)
        unit = math.lcm(config.rollout_tp, config.genrm_tp)
        least = next(ranks for ranks in itertools.count(unit, unit) if plans_of_mode(config, ranks))
        engines = f"a rollout engine of {config.rollout_tp} and a genrm engine of {config.genrm_tp}"
        engines += f" for each of {judges} judges" if judges > 1 else ""
        needed = f"at least {least} ranks, for {engines}"
        raise UserError(f"--mode {config.mode} needs {needed}; this run has {world_size}")
    first = first_plan(plans, config, world_size)
    if not config.rebalance and config.mode != "auto":
        return [first]
    return [first] + [plan for plan in plans if plan != first]


def plans_of_mode(config: Config, world_size: int) -> list[Plan]:
    """The plans in which every judge has an engine. Without a judge, rollout shares ranks with nobody."""
    everyone = tuple(range(world_size))
    judges = len(config.judge_models)
    if not judges:
        mode = "partial" if config.mode in ("fused", "auto") else config.mode
        return [plan_of(mode, config, everyone, ())]
    plans = []
    for plan in PLANS[config.mode](everyone, config):
        served = {judge_of(rank, config.genrm_tp, judges) for rank in plan.leads("genrm")}
        if len(served) == judges:
            plans.append(plan)
    return plans


def first_plan(plans: list[Plan], config: Config, world_size: int) -> Plan:
    """Choose the plan of --rollout-ranks, by default half, rounded up; on shared ranks, that of --tail."""
    splits = [len(plan.rollout) for plan in plans if plan.rollout != plan.genrm]
    if not splits:
        return plans[0]  # full, or fused: of --tail
    half = min(splits, key=lambda s: (abs(2 * s - world_size), -s))
    wanted = config.rollout_ranks or half
    for plan in plans:
        if len(plan.rollout) == wanted:
            return plan
    left = f"{world_size - wanted} of {world_size} ranks for genrm"
    known = ", ".join(map(str, splits))
    raise UserError(f"--rollout-ranks {wanted} leaves {left}; this run takes {known}")


def judge_of(rank: int, genrm_tp: int, judges: int) -> int:
    """The number of the judge model of the genrm engine that `rank` leads: judges are dealt in turn."""
    return rank // genrm_tp % judges


class Placement:
    """The holder of this rank's device now: the plan, the trainers and the engines of both roles."""

    def __init__(
        self,
        plans: list[Plan],
        trainers: list[Trainer],
        pools: dict[str, Pool],
        world: World,
        timeline: Timeline,
    ):
        """trainers: the actor, then the critics. pools: by role."""
        self.plans = plans
        self.plan = plans[0]
        self.actor, *self.critics = trainers
        self.rollout = pools["rollout"]
        self.genrm = pools["genrm"]
        self._world = world
        self._timeline = timeline
        self.hand_over_s = 0.0  # of the last hand-over to serving, on this rank
        self.swap_s = 0.0  # moves between the roles since
        self.restarts = 0  # engines of this rank that the last hand-over to training started again

    async def begin(self) -> None:
        """Hand the devices to serving: engines come up asleep, as trainers do (collective)."""
        self.switch(self.plan)
        await self.to_serving()

    def switch(self, plan: Plan) -> None:
        """Serve with the engines of `plan` from now on; all sleep. The same plan on every controller."""
        self.plan = plan
        self.rollout.assign(plan.leads("rollout"))
        self.genrm.assign(plan.leads("genrm"))

    async def share(self, rollout: tuple[int, ...] = (), genrm: tuple[int, ...] = ()) -> None:
        """Wake engines led by these ranks alone (collective): judges leave, answers move, judges come."""
        if not self.plan.genrm:
            return  # of a run without a judge
        start = self._timeline.now()
        await self.genrm.use(tuple(lead for lead in self.genrm.awake if lead in genrm))
        await self.rollout.use(rollout, move=True)
        await self.genrm.use(genrm)
        self.swap_s += self._timeline.now() - start

    async def follow_the_tail(self, left: Left, keep: int, owed: Counter[int]) -> None:
        """Share the ranks by the answers that are left: fused mode (collective). See ranks_of_tail."""
        plan = self.plan
        tp = plan.rollout_tp
        held = tuple(rank for lead in self.rollout.awake for rank in range(lead, lead + tp))
        ranks = ranks_of_tail(
            plan.tail,
            units=plan.units,
            held=held,
            left=left,
            most_ranks=keep * tp,
            owed=owed,
            writers={engine.rank: engine.model for engine in self.rollout.up},
            judges={engine.rank: engine.model for engine in self.genrm.up},
        )
        if ranks != held:
            self._timeline.mark("tail", f"{len(ranks)}|{len(plan.rollout) - len(ranks)}")
            rollout = tuple(sorted({*plan.leads("rollout")} & {*ranks}))
            genrm = tuple(sorted({*plan.leads("genrm")} - {*ranks}))
            await self.share(rollout, genrm)

    async def to_training(self, go_on: bool = True) -> None:
        """Put all engines to sleep (collective). If the run goes on, start lost ones again."""
        await self.rollout.sleep()
        await self.genrm.sleep()
        if go_on:
            self.restarts = await self.rollout.restart_lost() + await self.genrm.restart_lost()

    async def give_device_to(self, *trainers: Trainer) -> None:
        """Wake trainers, once those that have the device sleep (collective)."""
        for other in (self.actor, *self.critics):
            if other.awake and other not in trainers:
                with self._timeline.span("switch"):
                    await self._world.run(other.sleep)
                    await self._world.barrier()
        for trainer in trainers:
            if not trainer.awake:
                with self._timeline.span("switch"):
                    await self._world.run(trainer.wake)

    async def to_serving(self) -> None:
        """Move critics out, weights back, push, actor out, KV cache back (collective). A mode wakes genrm."""
        start = self._timeline.now()
        await self.give_device_to(self.actor)
        await self._world.run(self.actor.trim)
        await self.rollout.wake_weights()
        await self.rollout.load_weights(self.actor.named_weights(), self.actor.version)
        await self.give_device_to()
        await self.rollout.wake_kv_cache()
        self.hand_over_s = self._timeline.now() - start
        self.swap_s = 0.0
