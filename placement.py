"""Placement: which ranks each role holds, and the hand-over of the devices between serving and training.

Who holds what is data, a `Plan`. --placement says which ranks engines and models hold (`Holders`), --mode how
rollout and genrm share those of the engines. What holds the same ranks takes turns; the order decides the
memory peak:

    to training   every engine sleeps (weights and KV cache go); then trainers wake: one at a time, or all
                  where the schedule runs them in one pipeline
    to serving    critics sleep, the actor's gradients and what its passes left go, rollout weights come back,
                  push, the actor sleeps, the KV cache comes back

Engines on ranks that train nothing sleep for the push alone. While all sleep, a run may switch to another
plan.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from algorithms import algorithm_of
from config import Config, UserError
from engines.pool import EngineStatus, Pool
from engines.routing import Silence
from runtime.world import World
from scheduling.fusion import TAILS, Left, ranks_of_tail
from scheduling.layout import Holders, Shape, holders_from, ranks_in_words
from scheduling.measured import Split
from scheduling.pipeline import schedule_of

if TYPE_CHECKING:
    from reporting.timeline import Timeline
    from training.push import Route
    from training.trainer import Trainer  # which imports Megatron: plans are made without


@dataclass(frozen=True)
class Plan:
    """The ranks of each role; on shared ones they take turns. The first rank of an engine owns its server."""

    mode: str  # a row of rollout.MODES
    rollout: tuple[int, ...]
    genrm: tuple[int, ...]
    holders: Holders
    rollout_tp: int = 1  # ranks of one rollout engine
    genrm_tp: int = 1
    tail: float = 0.0  # fused: the part of answers that is unwritten when genrm gets ranks

    def leads(self, role: str) -> tuple[int, ...]:
        """The ranks that own a server of `role`."""
        return vars(self)[role][:: vars(self)[f"{role}_tp"]]

    def judge_of(self, lead: int, judges: int) -> int:
        """The number of the judge model of the genrm engine that `lead` owns: judges are dealt in turn."""
        return self.holders.engines.index(lead) // self.genrm_tp % judges

    @property
    def is_whole(self) -> bool:
        """True if the ranks of each engine are neighbours, from a multiple of their number on."""
        for ranks, tp in ((self.rollout, self.rollout_tp), (self.genrm, self.genrm_tp)):
            if len({rank // tp for rank in ranks}) * tp != len(ranks):
                return False
        return True

    @property
    def units(self) -> list[tuple[int, ...]]:
        """The ranks, in the smallest parts of them that cut no engine."""
        size = math.lcm(self.rollout_tp, self.genrm_tp)
        ranks = self.holders.engines
        return [ranks[first : first + size] for first in range(0, len(ranks), size)]

    @property
    def split(self) -> Split:
        return Split(self.mode, len(self.rollout), len(self.genrm), self.tail)

    def __str__(self) -> str:
        parts = []
        ranks_of = {"rollout": self.rollout, "genrm": self.genrm}
        ranks_of |= {name: shape.ranks for name, shape in self.holders.shapes.items()}
        for role, ranks in ranks_of.items():
            if ranks:
                parts.append(f"{role} on ranks {ranks_in_words(ranks)}")
        return ", ".join(parts)


# ---------------------------------------------------------------- which ranks hold which model


def colocate(everyone: tuple[int, ...], config: Config) -> Holders:
    """Let all models and engines take turns on all ranks. Source: WeChat-YATT; HybridFlow's "colocate"."""
    shape = Shape.of(config, everyone)
    return Holders(everyone, shape, shape, shape)


def split(everyone: tuple[int, ...], config: Config) -> Holders:
    """Let actor and reference hold one half, critics the other, engines all. HybridFlow, section 8.3."""
    shape = Shape.of(config, everyone)
    cut = len(everyone) // 2 // shape.unit * shape.unit
    actor = shape._replace(ranks=everyone[: len(everyone) - cut])
    critic = shape._replace(ranks=everyone[len(everyone) - cut :])
    return Holders(everyone, actor, critic, actor)


def standalone(everyone: tuple[int, ...], config: Config) -> Holders:
    """Let engines hold one half, and actor and critics each a part of the other. HybridFlow, section 8.3."""
    shape = Shape.of(config, everyone)
    models = 2 if algorithm_of(config).critics else 1
    each = max(1, len(everyone) // 2 // models // shape.unit) * shape.unit
    first = len(everyone) - models * each
    actor = shape._replace(ranks=everyone[first : first + each])
    critic = shape._replace(ranks=everyone[-each:])
    return Holders(everyone[:first], actor, critic, actor)


PLACEMENTS = {"colocate": colocate, "split": split, "standalone": standalone}


def make_holders(config: Config, world_size: int) -> Holders:
    """The ranks of engines and models by --placement (pure). UserError."""
    everyone = tuple(range(world_size))
    text = config.placement
    try:
        if "=" in text:
            holders = holders_from(text, Shape.of(config, everyone))
        elif text in PLACEMENTS:
            holders = PLACEMENTS[text](everyone, config)
        else:
            raise UserError(f"choose {', '.join(PLACEMENTS)}, or ranks: engines=0-1 actor=2-3")
        if config.train_only:
            holders = holders._replace(engines=())
        for problem in (*holders.problems(world_size), *problems_of(holders, config)):
            raise UserError(problem)
    except UserError as error:
        raise UserError(f"--placement {text}: {error}") from None
    return holders


def problems_of(holders: Holders, config: Config) -> Iterator[str]:
    """Yield what the other settings don't go with, a sentence each."""
    algorithm = algorithm_of(config)
    row = f"--algorithm {config.algorithm[0]}"
    if 0 not in holders.engines and not config.train_only:
        yield "rank 0, which keeps the prompts, needs an engine"
    if "critic" in holders.shapes and not algorithm.critics:
        yield f"{row} has no critic"
    if "critic" in holders.shapes and schedule_of(config).fuses:
        yield f"--schedule {config.schedule} needs actor and critic on the same ranks"
    if "reference" in holders.shapes and not algorithm.kl_coef:
        yield f"{row} without kl_coef has no reference"
    if config.ahead and not holders.is_apart:
        yield "--ahead 1 needs engines on ranks that train nothing, as --placement standalone"


# ---------------------------------------------------------------- how engines share their ranks


def plan_of(
    mode: str, config: Config, holders: Holders, rollout: tuple[int, ...], genrm: tuple[int, ...]
) -> Plan:
    """A plan with the run's sizes of engines."""
    return Plan(mode, rollout, genrm, holders, config.rollout_tp, config.genrm_tp)


def full_colocation(holders: Holders, config: Config) -> list[Plan]:
    """Let rollout and genrm take turns, each on all ranks of engines. WeChat-YATT, full colocation."""
    return [plan_of("full", config, holders, holders.engines, holders.engines)]


def partial_colocation(holders: Holders, config: Config) -> list[Plan]:
    """Let the first S ranks serve rollout, the others genrm, for each S that cuts no engine. WeChat-YATT."""
    ranks = holders.engines
    unit = math.lcm(config.rollout_tp, config.genrm_tp)
    cuts = range(unit, len(ranks), unit)
    return [plan_of("partial", config, holders, ranks[:s], ranks[s:]) for s in cuts]


def inter_stage_fusion(holders: Holders, config: Config) -> list[Plan]:
    """A plan for each tail of the answers: 0 is full, 1 partial. RLHFuse (arXiv 2409.13221), section 4."""
    (plan,) = full_colocation(holders, config)
    if len(plan.units) == 1:
        return []
    return [replace(plan, mode="fused", tail=tail) for tail in dict.fromkeys((config.tail, *TAILS))]


def auto(holders: Holders, config: Config) -> list[Plan]:
    modes = (partial_colocation, full_colocation, inter_stage_fusion)
    return [plan for mode in modes for plan in mode(holders, config)]


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
    holders = make_holders(config, world_size)
    if config.train_only:
        return [Plan("partial", rollout=(), genrm=(), holders=holders)]
    if not (plans := plans_of_mode(config, holders)):
        judges = len(config.judge_models)
        unit = math.lcm(config.rollout_tp, config.genrm_tp)
        counts = itertools.count(unit, unit)
        least = next(n for n in counts if plans_of_mode(config, colocate(range(n), config)))
        engines = f"a rollout engine of {config.rollout_tp} and a genrm engine of {config.genrm_tp}"
        engines += f" for each of {judges} judges" if judges > 1 else ""
        engines += f", on neighbours from a multiple of {unit} on" if unit > 1 else ""
        has = f"this run has {len(holders.engines)} of {world_size} for engines"
        raise UserError(f"--mode {config.mode} needs at least {least} ranks, for {engines}; {has}")
    first = first_plan(plans, config, len(holders.engines))
    if not config.rebalance and config.mode != "auto":
        return [first]
    return [first] + [plan for plan in plans if plan != first]


def plans_of_mode(config: Config, holders: Holders) -> list[Plan]:
    """The plans in which every judge has an engine. Without a judge, rollout shares ranks with nobody."""
    judges = len(config.judge_models)
    found = PLANS[config.mode](holders, config)
    if not judges:
        mode = "partial" if config.mode in ("fused", "auto") else config.mode
        found = [plan_of(mode, config, holders, holders.engines, ())]
    plans = []
    for plan in found:
        served = {plan.judge_of(lead, judges) for lead in plan.leads("genrm")}
        if plan.is_whole and len(served) == judges:
            plans.append(plan)
    return plans


def first_plan(plans: list[Plan], config: Config, ranks: int) -> Plan:
    """Choose the plan of --rollout-ranks, by default half, rounded up; on shared ranks, that of --tail."""
    splits = [len(plan.rollout) for plan in plans if plan.rollout != plan.genrm]
    if not splits:
        return plans[0]  # full, or fused: of --tail
    half = min(splits, key=lambda s: (abs(2 * s - ranks), -s))
    wanted = config.rollout_ranks or half
    for plan in plans:
        if len(plan.rollout) == wanted:
            return plan
    left = f"{ranks - wanted} of {ranks} ranks for genrm"
    known = ", ".join(map(str, splits))
    raise UserError(f"--rollout-ranks {wanted} leaves {left}; this run takes {known}")


class Models(NamedTuple):
    """The models that are trained, or read for training, and the way of the weights to the engines."""

    trainers: list[Trainer]  # the actor, then the critics
    references: list[Trainer]  # one that never learns, if the KL to the start weights is asked for
    route: Route | None = None  # of a push between ranks


class Placement:
    """The holder of this rank's device now: the plan, the trainers and the engines of both roles."""

    def __init__(
        self,
        plans: list[Plan],
        models: Models,
        pools: dict[str, Pool],
        world: World,
        timeline: Timeline,
    ):
        """pools: by role."""
        self.plans = plans
        self.plan = plans[0]
        self.next = plans[0]  # from the next hand-over to serving on
        holders = plans[0].holders
        self.is_apart = holders.is_apart  # engines and trainers share no rank
        self.is_shared = all(len(s.ranks) == world.size for s in holders.shapes.values())  # by all
        self.serves = world.rank in holders.servers
        self.actor, *self.critics = models.trainers
        self.references = models.references
        self.rollout = pools["rollout"]
        self.genrm = pools["genrm"]
        self._world = world
        self._timeline = timeline
        self._route = models.route
        self.swap_s = 0.0  # moves between the roles in this step, on this rank
        self._idle = Silence()  # of all engines

    @property
    def received_bytes(self) -> int:
        """The bytes of weights that collectives brought to this rank for the last push."""
        return self.actor.received_bytes + (self._route.received if self._route else 0)

    def switch(self, plan: Plan) -> None:
        """Serve with the engines of `plan` from the next hand-over on. The same plan on every controller."""
        self.next = plan

    async def share(self, rollout: tuple[int, ...] = (), genrm: tuple[int, ...] = ()) -> None:
        """Wake engines led by these ranks alone (collective): judges leave, answers move, judges come."""
        if not self.plan.genrm:
            return  # of a run without a judge
        start = self._timeline.now()
        await self.genrm.use(tuple(lead for lead in self.genrm.awake if lead in genrm))
        await self.rollout.use(rollout, move=True)
        await self.genrm.use(genrm)
        self.swap_s += self._timeline.now() - start

    def apply(self, rollout: EngineStatus, genrm: EngineStatus) -> None:
        """Act on what all controllers told of the engines. Not collective.

        EngineLost: this rank's engine owes tokens and writes none. UserError: requests wait for an engine
        that the mode doesn't wake.
        """
        self.rollout.apply_status(rollout)
        self.genrm.apply_status(genrm)
        waiting = rollout.waiting + genrm.waiting
        # an engine that has to write is watched by its owner
        are_idle = rollout.outstanding.total() + genrm.outstanding.total() == 0
        most_s = self.rollout.config.engine_lost_s
        if self._idle.is_too_long(most_s, awaited=waiting > 0 and are_idle, came=False):
            asked = f"{rollout.waiting} answers and {genrm.waiting} critiques wait for an engine"
            idle = f"no engine has had anything to write for {most_s:g} s"
            raise UserError(f"{asked} that --mode {self.plan.mode} doesn't wake, and {idle}")

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
            writers={engine.rank: engine.model for engine in self.rollout.engines},
            judges={engine.rank: engine.model for engine in self.genrm.engines},
        )
        if ranks != held:
            self._timeline.mark("tail", f"{len(ranks)}|{len(plan.rollout) - len(ranks)}")
            rollout = tuple(sorted({*plan.leads("rollout")} & {*ranks}))
            genrm = tuple(sorted({*plan.leads("genrm")} - {*ranks}))
            await self.share(rollout, genrm)

    async def to_training(self) -> None:
        """Put engines to sleep that share ranks with trainers (collective)."""
        if not self.is_apart:
            await self._rest()

    async def _rest(self) -> None:
        """Put all engines to sleep (collective)."""
        await self.rollout.sleep()
        await self.genrm.sleep()
        await self._world.barrier()

    async def give_device_to(self, *trainers: Trainer) -> None:
        """Wake those of this rank, once others that have its device sleep. Not collective."""
        models = (self.actor, *self.critics, *self.references)
        held = [model for model in models if model.holds]
        wanted = [model for model in held if model in trainers]
        if trainers and not wanted:
            return  # they are on other ranks: who has this device keeps it
        for other in held:
            if other.awake and other not in wanted:
                with self._timeline.span("switch"):
                    await self._world.run(other.sleep)
        for model in wanted:
            if not model.awake:
                with self._timeline.span("switch"):
                    await self._world.run(model.wake)

    async def to_serving(self) -> None:
        """Move critics out, weights back, push, actor out, KV cache back (collective). A mode wakes genrm."""
        if self.is_apart:
            await self._rest()
        self.plan = self.next
        self.rollout.assign(self.plan.leads("rollout"))
        self.genrm.assign(self.plan.leads("genrm"))
        if not (self.is_apart or self.actor.holds):
            await self.give_device_to()  # of ranks that another model trained on
        await self.give_device_to(self.actor)
        await self._world.run(self.actor.trim, self.is_apart)
        await self._meet_for_wide_engines()
        await self.rollout.wake_weights()
        named_weights = self.actor.named_weights()
        if self._route:
            named_weights = self._route.carry(named_weights)
        await self.rollout.load_weights(named_weights, self.actor.version)
        if not self.is_apart:
            await self.give_device_to()
            await self._meet_for_wide_engines()
        await self.rollout.wake_kv_cache()
        self.swap_s = 0.0

    async def _meet_for_wide_engines(self) -> None:
        """Meet if an engine holds the devices of other ranks, too, which must have room (collective)."""
        if self.plan.rollout_tp > 1:
            await self._world.barrier()
