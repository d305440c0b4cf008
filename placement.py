"""Placement: which ranks each role holds, and the hand-over of the devices between serving and training.

Who holds what is data, a `Plan`: the ranks of each role. While serving, rollout and genrm engines hold ranks;
while training, the actor holds all of them. The order of the hand-overs decides the memory peak:

    to training   every engine sleeps (weights and KV cache go); then actor and critics wake, one at a time
    to serving    critics sleep, rollout weights come back, push, the actor sleeps, the KV cache comes back

Between the two everything sleeps: there a run may switch to another plan, and lost engines are started again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from config import Config
from engines.pool import Pool
from runtime.world import World
from scheduling.rebalance import Split

if TYPE_CHECKING:
    from reporting.timeline import Timeline
    from training.trainer import Trainer  # which imports Megatron: plans are made without


@dataclass(frozen=True)
class Plan:
    """The ranks of each role. Roles that share a rank take turns; on disjoint ranks they run side by side.

    An engine may span several consecutive ranks (tensor parallelism): the first, its lead, owns the server.
    """

    mode: str  # a row of rollout.MODES
    rollout: tuple[int, ...]
    genrm: tuple[int, ...]
    actor: tuple[int, ...]
    rollout_tp: int = 1  # ranks of one rollout engine
    genrm_tp: int = 1

    def leads(self, role: str) -> tuple[int, ...]:
        """The ranks that own a server of `role`."""
        return {"rollout": self.rollout[:: self.rollout_tp], "genrm": self.genrm[:: self.genrm_tp]}[role]

    @property
    def split(self) -> Split:
        return Split(self.mode, len(self.rollout), len(self.genrm))

    def __str__(self) -> str:
        roles = {"rollout": self.rollout, "genrm": self.genrm, "actor": self.actor}
        return ", ".join(f"{role} on ranks {as_range(ranks)}" for role, ranks in roles.items() if ranks)


def as_range(ranks: tuple[int, ...]) -> str:
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"{ranks[0]}"


# ---------------------------------------------------------------- the plans of a mode, as pure functions


def full_colocation(everyone: tuple[int, ...], rollout_tp: int, genrm_tp: int) -> list[Plan]:
    """Rollout, genrm and actor take turns, each on all ranks. Source: WeChat-YATT, full colocation."""
    return [Plan("full", everyone, everyone, everyone, rollout_tp, genrm_tp)]


def partial_colocation(everyone: tuple[int, ...], rollout_tp: int, genrm_tp: int) -> list[Plan]:
    """Ranks [0, S) serve rollout and [S, N) serve genrm side by side; then all N train.

    One plan for every S that is a multiple of both engines' sizes, so that no engine is cut when the split
    moves. Source: WeChat-YATT, partial colocation.
    """
    splits = range(unit := math.lcm(rollout_tp, genrm_tp), len(everyone), unit)
    return [Plan("partial", everyone[:s], everyone[s:], everyone, rollout_tp, genrm_tp) for s in splits]


def auto(everyone: tuple[int, ...], rollout_tp: int, genrm_tp: int) -> list[Plan]:
    """Every plan of both."""
    modes = (partial_colocation, full_colocation)
    return [plan for mode in modes for plan in mode(everyone, rollout_tp, genrm_tp)]


PLANS: dict[str, Callable[..., list[Plan]]] = {
    "full": full_colocation,
    "partial": partial_colocation,
    "auto": auto,
}


def make_plans(config: Config, world_size: int, on_machine: int = 0) -> list[Plan]:
    """The plans that a run may take, the first of which it starts with (pure).

    One, unless `rebalance` lets the split move or the mode is auto. on_machine: ranks of each machine, 0: all
    are on one. ValueError with the numbers if none fits.
    """
    if config.mode not in PLANS:
        raise ValueError(f"--mode {config.mode} is unknown; choose one of {', '.join(PLANS)}")
    for name, tp in (("rollout", config.rollout_tp), ("genrm", config.genrm_tp)):
        if (ranks := on_machine or world_size) % tp:
            where = " of a machine, which no engine leaves" if ranks != world_size else ""
            raise ValueError(f"--{name}-tp {tp} doesn't divide {ranks} ranks{where}")
    if config.train_only:
        return [Plan("partial", (), (), tuple(range(world_size)))]
    plans = plans_of_mode(config, world_size)
    if not plans:
        least = least_ranks(config)
        raise ValueError(f"--mode {config.mode} needs at least {least}; this run has {world_size}")
    first = first_plan(plans, config, world_size)
    may_move = config.rebalance or config.mode == "auto"
    return [first] + [plan for plan in plans if may_move and plan != first]


def plans_of_mode(config: Config, world_size: int) -> list[Plan]:
    """Those in which every judge has an engine. Without a judge, rollout shares the ranks with nobody."""
    everyone, judges, tp = tuple(range(world_size)), len(config.judge_models), config.genrm_tp
    if not judges:
        mode = "partial" if config.mode == "auto" else config.mode
        return [Plan(mode, everyone, (), everyone, config.rollout_tp, tp)]
    plans = PLANS[config.mode](everyone, config.rollout_tp, tp)
    return [p for p in plans if len({judge_of(rank, tp, judges) for rank in p.leads("genrm")}) == judges]


def first_plan(plans: list[Plan], config: Config, world_size: int) -> Plan:
    """The split that --rollout-ranks asks for, by default half the ranks, rounded up; else the only plan."""
    splits = [len(plan.rollout) for plan in plans if plan.rollout != plan.genrm]
    half = min(splits, key=lambda s: (abs(2 * s - world_size), -s), default=world_size)
    wanted = config.rollout_ranks or half
    for plan in plans:
        if not splits or len(plan.rollout) == wanted:
            return plan
    raise ValueError(
        f"--rollout-ranks {wanted} leaves {world_size - wanted} of {world_size} ranks for genrm; "
        f"this run takes {', '.join(map(str, splits))}"
    )


def least_ranks(config: Config) -> str:
    """What a mode asks for, in words."""
    unit, judges = math.lcm(config.rollout_tp, config.genrm_tp), len(config.judge_models)
    least = next(ranks for ranks in itertools.count(unit, unit) if plans_of_mode(config, ranks))
    engines = f"a rollout engine of {config.rollout_tp} and a genrm engine of {config.genrm_tp}"
    return f"{least} ranks, for {engines}{f' for each of {judges} judges' if judges > 1 else ''}"


def judge_of(rank: int, genrm_tp: int, judges: int) -> int:
    """Which of several judge models the genrm engine that `rank` leads serves: they are dealt in turn."""
    return rank // genrm_tp % judges


# ---------------------------------------------------------------- the hand-over


class Placement:
    """Who holds this rank's device now: the plan, the trainers and the engines of both roles.

    hand_over_s: seconds that the last hand-over to serving took here. restarts: engines of this rank that the
    last hand-over to training started again.
    """

    def __init__(
        self,
        plans: list[Plan],
        trainers: list[Trainer],
        pools: dict[str, Pool],
        world: World,
        timeline: Timeline,
    ):
        """trainers: the actor, then the critics. pools: by role."""
        self.plans, self.plan = plans, plans[0]
        self.actor, *self.critics = trainers
        self.rollout, self.genrm = pools["rollout"], pools["genrm"]
        self._world, self._timeline = world, timeline
        self.hand_over_s, self.restarts = 0.0, 0

    async def begin(self) -> None:
        """Engines come up asleep, as trainers do: hand the devices to serving (collective)."""
        self.switch(self.plan)
        await self.to_serving()

    def switch(self, plan: Plan) -> None:
        """The engines of `plan` serve from now on; all engines sleep. The same plan on every controller."""
        self.plan = plan
        self.rollout.assign(plan.leads("rollout"))
        self.genrm.assign(plan.leads("genrm"))

    async def to_training(self, go_on: bool = True) -> None:
        """Engines sleep (collective). If the run goes on, lost ones are started again."""
        await self.rollout.sleep()
        await self.genrm.sleep()
        if go_on:
            self.restarts = await self.rollout.restart_lost() + await self.genrm.restart_lost()

    async def give_device_to(self, trainer: Trainer | None) -> None:
        """Wake a trainer, once the one that has the device sleeps: none needs another (collective)."""
        for other in (self.actor, *self.critics):
            if other.awake and other is not trainer:
                with self._timeline.span("switch"):
                    await self._world.run(other.sleep)
                    await self._world.barrier()
        if trainer and not trainer.awake:
            with self._timeline.span("switch"):
                await self._world.run(trainer.wake)

    async def to_serving(self) -> None:
        """Critics out, weights back, push, actor out, KV cache back (collective). The mode wakes genrm."""
        start = self._timeline.now()
        await self.give_device_to(self.actor)
        await self.rollout.wake_weights()
        await self.rollout.load_weights(self.actor.named_weights(), self.actor.version)
        await self.give_device_to(None)
        await self.rollout.wake_kv_cache()
        self.hand_over_s = self._timeline.now() - start
