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

from config import Config
from engines.pool import EngineStatus, Pool
from engines.routing import Silence
from runtime.errors import UserError
from runtime.world import World
from scheduling.layout import Placement, Shape
from scheduling.measured import Split

if TYPE_CHECKING:
    from apart.push import Route
    from controller import Controller
    from reporting.timeline import Timeline
    from rollout import RolloutBatch
    from scheduling.dealing import Shares
    from training.trainer import Trainer  # which imports Megatron: placements are made without


# ---------------------------------------------------------------- which ranks hold which model


def colocate(everyone: tuple[int, ...], config: Config) -> Placement:
    """Let all models and engines take turns on all ranks. Source: WeChat-YATT; HybridFlow's "colocate"."""
    shape = Shape.of(config, everyone)
    return Placement(everyone, shape, shape, shape)


class Shared:
    """Engines and trainers have the same ranks, and take turns on their devices.

    What another placement does in another way is a method here: the loop asks for no placement.
    """

    stops_serving = True  # a stop gives up the step that is served
    serves_ahead = False

    def problems(self, placement: Placement, config: Config) -> Iterator[str]:
        """Yield what the other settings don't go with, a sentence each."""
        if config.ahead and not self.serves_ahead:
            yield "--ahead 1 needs engines on ranks that train nothing, as --placement standalone"

    async def to_training(self, devices: Devices) -> None:
        """Put engines to sleep (collective)."""
        await devices.rest_engines()

    async def to_serving(self, devices: Devices) -> None:
        """Move critics out, weights back, push, actor out, KV cache back (collective)."""
        devices.take_next_split()
        await devices.give_device_to(devices.actor)
        await devices.push(stays=False)
        await devices.rest_trainers()
        await devices.meet_for_wide_engines()
        await devices.rollout.wake_kv_cache()

    async def serve_ahead(self, c: Controller) -> RolloutBatch | None:
        """Return the batch of the next step, if it is served while this one is trained on."""
        return None

    async def share_columns(self, c: Controller, shares: Shares) -> None:
        """Give each model what another computed of its samples: here every rank has it."""

    async def gather_metrics(self, c: Controller, stats: dict[str, float]) -> dict[str, float]:
        """Return the metrics of all models: here every rank has them, and they needn't meet."""
        return stats


class PlacementRow(NamedTuple):
    """A placement: which ranks hold what, and how they share their devices."""

    place: Callable[[tuple[int, ...], Config], Placement]  # of all ranks
    sharing: Callable[[Placement], Shared]


# apart/placements.py adds others
PLACEMENTS = {"colocate": PlacementRow(colocate, lambda placement: Shared())}
# of a run that can't be: (config, placement, splits), each may raise a UserError before anything starts
CHECKS: list[Callable[[Config, Placement, list[Split]], None]] = []


def row_of(config: Config) -> PlacementRow:
    """The row of --placement. UserError."""
    name = "ranks" if "=" in config.placement else config.placement
    if name not in PLACEMENTS:
        raise UserError(f"choose one of {', '.join(PLACEMENTS)}")
    return PLACEMENTS[name]


def make_placement(config: Config, world_size: int, on_machine: int = 0) -> Placement:
    """The ranks of engines and models by --placement (pure). UserError. on_machine: ranks of each."""
    sizes = {"rollout": config.rollout_tp, "genrm": config.genrm_tp}
    for role, tp in sizes.items():
        if (on_machine or world_size) % tp:
            where = "ranks of a machine, which no engine leaves" if on_machine else "ranks"
            raise UserError(f"--{role}-tp {tp} doesn't divide {on_machine or world_size} {where}")
    everyone = tuple(range(world_size))
    try:
        row = row_of(config)
        placement = row.place(everyone, config)
        unmet = row.sharing(placement).problems(placement, config)
        for problem in (*placement.problems(world_size), *unmet):
            raise UserError(problem)
    except UserError as error:
        raise UserError(f"--placement {config.placement}: {error}") from None
    return placement._replace(rollout_tp=config.rollout_tp, genrm_tp=config.genrm_tp)


# ---------------------------------------------------------------- what has a rank's device


class Models(NamedTuple):
    """The models that are trained, or read for training, and the way of the weights to the engines."""

    trainers: list[Trainer]  # the actor, then the critics
    # what a KL is to, if there is one: a frozen model, or the actor, which has adapters to switch off
    references: list[Trainer]
    route: Route | None = None  # of a push between ranks


class Devices:
    """This rank's trainers and the engines of both roles, which take turns on its device."""

    def __init__(
        self,
        config: Config,
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
        self.split = splits[0]  # by which engines serve now
        self.next = splits[0]  # that of the next step
        self.sharing = row_of(config).sharing(placement)
        self.serves = world.rank in placement.servers  # else it only trains
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

    async def set_awake(self, rollout: tuple[int, ...] = (), genrm: tuple[int, ...] = ()) -> None:
        """Have the engines of these ranks awake, and no others (collective).

        Judges that aren't wanted finish, and sleep. Then answers move to the rollout engines that stay, and
        critiques that wait at busy judges move to the judges that come.
        """
        if not self.split.genrm:
            return  # of a run without a judge
        start = self._timeline.now()
        await self.genrm.set_awake(tuple(lead for lead in self.genrm.awake if lead in genrm))
        await self.rollout.set_awake(rollout, move=True)
        await self.genrm.set_awake(genrm, move=True)
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
        """Have the trainers take over the ranks that they share with engines (collective)."""
        await self.sharing.to_training(self)

    async def to_serving(self) -> None:
        """Push the weights, and have the engines take over (collective). A mode wakes genrm."""
        await self.sharing.to_serving(self)

    async def rest_engines(self) -> None:
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

    def take_next_split(self) -> None:
        """Deal the engines by the split of the next step. Not collective."""
        self.split = self.next
        self.rollout.assign(self.leads("rollout"))
        self.genrm.assign(self.leads("genrm"))
        self.swap_s = 0.0

    async def push(self, stays: bool) -> None:
        """Wake the rollout engines' weights, and load the actor's (collective). stays: it stays awake."""
        await self._world.run(self.actor.trim, stays)
        await self.meet_for_wide_engines()
        await self.rollout.wake_weights()
        named_weights = self.actor.named_weights()
        if self._route:
            named_weights = self._route.carry(named_weights)
        await self.rollout.load_weights(named_weights, self.actor.version)

    async def meet_for_wide_engines(self) -> None:
        """Meet if an engine holds the devices of other ranks, too, which must have room (collective)."""
        if self.placement.rollout_tp > 1:
            await self._world.barrier()
