"""Placement: which ranks hold engines and models, and which of these currently uses a rank's device.

--placement decides which ranks hold which model (`Placement` in scheduling/layout.py), --mode how rollout and
genrm share the engines' ranks (modes.py). Whatever shares ranks takes turns. The order limits peak memory:

    to training   every engine sleeps (frees weights and KV cache); then trainers wake: one at a time, or all
                  if the schedule runs them in one pipeline
    to serving    critics sleep, the actor frees its gradients and buffers, the rollout weights wake, push,
                  the actor sleeps, the KV cache wakes

Engines on ranks that don't train sleep only during a push. While all sleep, the split may change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from config import Config
from engines.pool import EngineStatus, Pool
from engines.routing import Silence
from runtime.errors import UserError
from runtime.world import World
from scheduling.layout import Placement, Shape
from scheduling.measured import Split

if TYPE_CHECKING:
    from runtime.timeline import Timeline
    from scheduling.dealing import Shares
    from training.trainer import Trainer  # imports Megatron, which placements don't need


# ---------------------------------------------------------------- which ranks hold which model


def colocate(everyone: tuple[int, ...], config: Config) -> Placement:
    """Let all models and engines take turns on all ranks, as in WeChat-YATT and HybridFlow's "colocate"."""
    shape = Shape.of(config, everyone)
    return Placement(everyone, shape, shape, shape)


class Shared:
    """Engines and trainers share all ranks, and take turns on devices. Other placements are subclasses."""

    stops_serving = True  # a stop abandons the step that is being served
    serves_ahead = False

    def problems(self, placement: Placement, config: Config) -> Iterator[str]:
        """Yield each conflict with other settings, as a sentence."""
        if config.ahead and not self.serves_ahead:
            yield "--ahead 1 needs engines on ranks that train nothing: --placement standalone"

    async def to_training(self, devices: Devices) -> None:
        """Put engines to sleep (collective)."""
        await devices.rest_engines()

    async def to_serving(self, devices: Devices) -> None:
        """Hand the devices from trainers to engines, in the order described above (collective)."""
        devices.take_next_split()
        await devices.give_device_to(devices.actor)
        await devices.push(stays=False)
        await devices.rest_trainers()
        await devices.meet_for_wide_engines()
        await devices.rollout.wake_kv_cache()

    def stand_in(self, config: Config, model: str, shape: Shape, **how: Any) -> Trainer:
        """Return the stand-in for a model on a rank that doesn't hold it; here every rank does."""
        raise NotImplementedError

    def connect(self, senders: list[int], receivers: list[int], timeout_s: float) -> Any:
        """Return a route for pushes to engines on ranks without the actor; here there is none."""
        return None

    async def share_columns(self, world: World, shares: Shares) -> None:
        """Send what models computed to the ranks that need it; with shared ranks, all have it already."""

    async def gather_metrics(
        self, world: World, stats: dict[str, float], is_asked: bool
    ) -> tuple[dict[str, float], bool]:
        """Return the metrics of all models, and whether a rank notes a stop that it was asked for.

        With shared ranks, every rank has the metrics already, and a stop is noted before the training.
        """
        return stats, False


class PlacementRow(NamedTuple):
    """A placement: which ranks hold what, and how they share their devices."""

    place: Callable[[tuple[int, ...], Config], Placement]  # (all ranks, config)
    sharing: Callable[[Placement], Shared]


# --placement -> its row, which row_of returns with the settings, and when models are built
PLACEMENTS = {"colocate": PlacementRow(colocate, lambda placement: Shared())}


def row_of(config: Config) -> PlacementRow:
    """Return the row of --placement. Raises UserError if there is none."""
    name = "ranks" if "=" in config.placement else config.placement
    if name not in PLACEMENTS:
        raise UserError(f"choose one of {', '.join(PLACEMENTS)}")
    return PLACEMENTS[name]


def make_placement(config: Config, world_size: int, on_machine: int = 0) -> Placement:
    """Place engines and models (pure). on_machine: ranks per machine. Raises UserError if it can't."""
    sizes = {"rollout": config.rollout_tp, "genrm": config.genrm_tp}
    for role, tp in sizes.items():
        if (on_machine or world_size) % tp:
            where = "ranks of a machine" if on_machine else "ranks"
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


# ---------------------------------------------------------------- which model uses a rank's device


class Models(NamedTuple):
    """The models to train, their references, and the route of the weights to the engines."""

    trainers: list[Trainer]  # the actor, then the critics
    # the KL's reference, if there is one: a frozen model, or the actor with its adapters switched off
    references: list[Trainer]
    route: Any = None  # for pushes to other ranks: see Shared.connect


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
        """splits: those that the run may use, the initial one first. pools: role -> engines."""
        self.placement = placement
        self.splits = splits
        self.split = splits[0]  # the current one
        self.next = splits[0]  # the next step's
        self.sharing = row_of(config).sharing(placement)
        self.serves = world.rank in placement.servers  # if not, it only trains
        self.actor, *self.critics = models.trainers or [None]  # None in an evaluation
        self.references = models.references
        self.rollout = pools["rollout"]
        self.genrm = pools["genrm"]
        self._world = world
        self._timeline = timeline
        self._route = models.route
        self.swap_s = 0.0  # time spent on swaps in this step, on this rank
        self._idle = Silence()  # how long no engine has had anything to write

    @property
    def received_bytes(self) -> int:
        """The bytes of weights that this rank received in collectives for the last push."""
        return self.actor.received_bytes + (self._route.received if self._route else 0)

    def leads(self, role: str) -> tuple[int, ...]:
        """The ranks that own a server of `role` in this split."""
        return self.placement.leads(role, self.split)

    async def set_awake(self, rollout: tuple[int, ...] = (), genrm: tuple[int, ...] = ()) -> None:
        """Wake the engines of these ranks, and put all others to sleep (collective).

        Judges that must sleep finish first. Then answers move to the remaining rollout engines, and critiques
        that wait for busy judges move to the judges that wake.
        """
        if not self.split.genrm:
            return  # a run without a judge
        start = self._timeline.now()
        await self.genrm.set_awake(tuple(lead for lead in self.genrm.awake if lead in genrm))
        await self.rollout.set_awake(rollout, move=True)
        await self.genrm.set_awake(genrm, move=True)
        self.swap_s += self._timeline.now() - start

    def apply(self, rollout: EngineStatus, genrm: EngineStatus) -> None:
        """Act on the engines' status, which all controllers gathered. Not collective.

        Raises EngineLost if this rank's engine has tokens to write but writes none, or UserError if requests
        wait for an engine that the mode doesn't wake.
        """
        self.rollout.apply_status(rollout)
        self.genrm.apply_status(genrm)
        waiting = rollout.waiting + genrm.waiting
        # an engine with tokens to write is watched by its owner
        are_idle = rollout.outstanding.total() + genrm.outstanding.total() == 0
        most_s = self.rollout.config.engine_lost_s
        if self._idle.is_too_long(most_s, awaited=waiting > 0 and are_idle, came=False):
            asked = f"{rollout.waiting} answers and {genrm.waiting} critiques wait for an engine"
            idle = f"no engine has had anything to write for {most_s:g} s"
            raise UserError(f"{asked} that --mode {self.split.mode} doesn't wake, and {idle}")

    async def to_training(self) -> None:
        """Hand the devices that engines share with trainers to the trainers (collective)."""
        await self.sharing.to_training(self)

    async def to_serving(self) -> None:
        """Push the weights, and wake the rollout engines (collective). The mode wakes genrm."""
        await self.sharing.to_serving(self)

    async def rest_engines(self) -> None:
        """Put all engines to sleep (collective)."""
        await self.rollout.sleep()
        await self.genrm.sleep()
        await self._world.barrier()

    async def give_device_to(self, *trainers: Trainer) -> None:
        """Put this rank's other trainers to sleep, then wake these. Not collective."""
        wanted = [trainer for trainer in trainers if trainer.holds]
        if not wanted:
            return  # these models are on other ranks: leave this device as it is
        await self.rest_trainers(but=wanted)
        for trainer in wanted:
            if not trainer.awake:
                with self._timeline.span("switch"):
                    await self._world.run(trainer.wake)

    async def rest_trainers(self, but: Collection[Trainer] = ()) -> None:
        """Put this rank's trainers to sleep, except some. Not collective."""
        for trainer in (self.actor, *self.critics, *self.references):
            if trainer.awake and trainer not in but:
                with self._timeline.span("switch"):
                    await self._world.run(trainer.sleep)

    def take_next_split(self) -> None:
        """Assign the engines by the next step's split. Not collective."""
        self.split = self.next
        self.rollout.assign(self.leads("rollout"))
        self.genrm.assign(self.leads("genrm"))
        self.swap_s = 0.0

    async def push(self, stays: bool) -> None:
        """Wake the rollout weights and load the actor's (collective). stays: the actor stays awake."""
        await self._world.run(self.actor.trim, stays)
        await self.meet_for_wide_engines()
        await self.rollout.wake_weights()
        named_weights = self.actor.named_weights()
        if self._route:
            named_weights = self._route.carry(named_weights)
        await self.rollout.load_weights(named_weights, self.actor.version)

    async def meet_for_wide_engines(self) -> None:
        """Wait for all ranks if an engine spans several, which must have room (collective)."""
        if self.placement.rollout_tp > 1:
            await self._world.barrier()
