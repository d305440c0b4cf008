"""Placement: which ranks engines and models hold, and which of them has a rank's device now.

--placement says which ranks hold which model (`Placement` in scheduling/layout.py), --mode how rollout and
genrm share those of the engines (modes.py). What holds the same ranks takes turns; the order decides the
memory peak:

    to training   every engine sleeps (weights and KV cache go); then trainers wake: one at a time, or all
                  where the schedule runs them in one pipeline
    to serving    critics sleep, the actor's gradients and what its passes left go, rollout weights come back,
                  push, the actor sleeps, the KV cache comes back

Engines on ranks that train nothing sleep only while weights are pushed. While all sleep, a run may switch to
another split.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, NamedTuple

from algorithms import algorithm_of
from config import Config
from engines.pool import EngineStatus, Pool
from engines.routing import Silence
from runtime.errors import UserError
from runtime.world import World
from scheduling.layout import Placement, Shape, placement_from
from scheduling.measured import Split
from scheduling.pipeline import schedule_of

if TYPE_CHECKING:
    from reporting.timeline import Timeline
    from training.push import Route
    from training.trainer import Trainer  # which imports Megatron: placements are made without


# ---------------------------------------------------------------- which ranks hold which model


def colocate(everyone: tuple[int, ...], config: Config) -> Placement:
    """Let all models and engines take turns on all ranks. Source: WeChat-YATT; HybridFlow's "colocate"."""
    shape = Shape.of(config, everyone)
    return Placement(everyone, shape, shape, shape)


def split(everyone: tuple[int, ...], config: Config) -> Placement:
    """Let actor and reference hold one half, critics the other, engines all. HybridFlow, section 8.3."""
    shape = Shape.of(config, everyone)
    cut = len(everyone) // 2 // shape.unit * shape.unit
    actor = shape._replace(ranks=everyone[: len(everyone) - cut])
    critic = shape._replace(ranks=everyone[len(everyone) - cut :])
    return Placement(everyone, actor, critic, actor)


def standalone(everyone: tuple[int, ...], config: Config) -> Placement:
    """Let engines hold one half, and actor and critics each a part of the other. HybridFlow, section 8.3."""
    shape = Shape.of(config, everyone)
    models = 2 if algorithm_of(config).critics else 1
    each = max(1, len(everyone) // 2 // models // shape.unit) * shape.unit
    first = len(everyone) - models * each
    actor = shape._replace(ranks=everyone[first : first + each])
    critic = shape._replace(ranks=everyone[-each:])
    return Placement(everyone[:first], actor, critic, actor)


PLACEMENTS = {"colocate": colocate, "split": split, "standalone": standalone}


# of a run that can't be: (config, placement, splits), each may raise a UserError before anything starts
CHECKS: list[Callable[[Config, Placement, list[Split]], None]] = []


def make_placement(config: Config, world_size: int, on_machine: int = 0) -> Placement:
    """The ranks of engines and models by --placement (pure). UserError. on_machine: ranks of each."""
    sizes = {"rollout": config.rollout_tp, "genrm": config.genrm_tp}
    for role, tp in sizes.items():
        if (on_machine or world_size) % tp:
            where = "ranks of a machine, which no engine leaves" if on_machine else "ranks"
            raise UserError(f"--{role}-tp {tp} doesn't divide {on_machine or world_size} {where}")
    everyone = tuple(range(world_size))
    text = config.placement
    try:
        if "=" in text:
            placement = placement_from(text, Shape.of(config, everyone))
        elif text in PLACEMENTS:
            placement = PLACEMENTS[text](everyone, config)
        else:
            raise UserError(f"choose {', '.join(PLACEMENTS)}, or ranks: engines=0-1 actor=2-3")
        for problem in (*placement.problems(world_size), *problems_of(placement, config)):
            raise UserError(problem)
    except UserError as error:
        raise UserError(f"--placement {text}: {error}") from None
    return placement._replace(rollout_tp=config.rollout_tp, genrm_tp=config.genrm_tp)


def problems_of(placement: Placement, config: Config) -> Iterator[str]:
    """Yield what the other settings don't go with, a sentence each."""
    algorithm = algorithm_of(config)
    row = f"--algorithm {config.algorithm[0]}"
    if 0 not in placement.engines:
        yield "rank 0, which saves where the prompts stand, needs an engine"
    if "critic" in placement.shapes and not algorithm.critics:
        yield f"{row} has no critic"
    if "critic" in placement.shapes and schedule_of(config).fuses:
        yield f"--schedule {config.schedule} needs actor and critic on the same ranks"
    if "reference" in placement.shapes and not algorithm.kl_coef:
        yield f"{row} without kl_coef has no reference"
    if config.ahead and not placement.is_apart:
        yield "--ahead 1 needs engines on ranks that train nothing, as --placement standalone"


# ---------------------------------------------------------------- what has a rank's device


class Models(NamedTuple):
    """The models that are trained, or read for training, and the way of the weights to the engines."""

    trainers: list[Trainer]  # the actor, then the critics
    references: list[Trainer]  # one that never learns, if the KL to the start weights is asked for
    route: Route | None = None  # of a push between ranks


class Devices:
    """This rank's trainers and the engines of both roles, which take turns on its device.

    `split` is the one by which engines serve now, `next` that of the next step.
    """

    def __init__(
        self,
        placement: Placement,
        splits: list[Split],
        models: Models,
        pools: dict[str, Pool],
        world: World,
        timeline: Timeline,
    ):
        """splits: which the run may take, that of its start first. pools: by role."""
        self.placement = placement
        self.splits = splits
        self.split = splits[0]
        self.next = splits[0]
        self.is_apart = placement.is_apart  # engines and trainers share no rank
        # every rank holds every model
        self.is_colocated = all(len(s.ranks) == world.size for s in placement.shapes.values())
        self.serves = world.rank in placement.servers
        self.actor, *self.critics = models.trainers or [None]  # of an evaluation
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

    def leads(self, role: str) -> tuple[int, ...]:
        """The ranks that own a server of `role` in this split."""
        return self.placement.leads(role, self.split)

    async def share(self, rollout: tuple[int, ...] = (), genrm: tuple[int, ...] = ()) -> None:
        """Have the engines of these ranks awake, and no others (collective).

        Judges that aren't wanted finish, and sleep. Then answers move to the rollout engines that stay, and
        critiques that wait at busy judges move to the judges that come.
        """
        if not self.split.genrm:
            return  # of a run without a judge
        start = self._timeline.now()
        await self.genrm.use(tuple(lead for lead in self.genrm.awake if lead in genrm))
        await self.rollout.use(rollout, move=True)
        await self.genrm.use(genrm, move=True)
        self.swap_s += self._timeline.now() - start

    def apply(self, rollout: EngineStatus, genrm: EngineStatus) -> None:
        """Act on the facts that the controllers gathered about the engines. Not collective.

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
            raise UserError(f"{asked} that --mode {self.split.mode} doesn't wake, and {idle}")

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
        """Wake those that this rank holds, once its other trainers sleep. Not collective."""
        wanted = [trainer for trainer in trainers if trainer.holds]
        if not wanted:
            return  # these models are on other ranks: this device stays as it is
        await self.rest_trainers(but=wanted)
        for trainer in wanted:
            if not trainer.awake:
                with self._timeline.span("switch"):
                    await self._world.run(trainer.wake)

    async def rest_trainers(self, but: Collection[Trainer] = ()) -> None:
        """Put this rank's trainers to sleep, all but some. Not collective."""
        for trainer in (self.actor, *self.critics, *self.references):
            if trainer.awake and trainer not in but:
                with self._timeline.span("switch"):
                    await self._world.run(trainer.sleep)

    async def to_serving(self) -> None:
        """Move critics out, weights back, push, actor out, KV cache back (collective). A mode wakes genrm."""
        if self.is_apart:
            await self._rest()
        self.split = self.next
        self.rollout.assign(self.leads("rollout"))
        self.genrm.assign(self.leads("genrm"))
        if not (self.is_apart or self.actor.holds):
            await self.rest_trainers()  # of ranks that another model trained on
        await self.give_device_to(self.actor)
        await self._world.run(self.actor.trim, self.is_apart)
        await self._meet_for_wide_engines()
        await self.rollout.wake_weights()
        named_weights = self.actor.named_weights()
        if self._route:
            named_weights = self._route.carry(named_weights)
        await self.rollout.load_weights(named_weights, self.actor.version)
        if not self.is_apart:
            await self.rest_trainers()
            await self._meet_for_wide_engines()
        await self.rollout.wake_kv_cache()
        self.swap_s = 0.0

    async def _meet_for_wide_engines(self) -> None:
        """Meet if an engine holds the devices of other ranks, too, which must have room (collective)."""
        if self.placement.rollout_tp > 1:
            await self._world.barrier()
