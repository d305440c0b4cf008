"""Placement: which ranks hold engines and models, and which of these currently uses a rank's device.

--placement decides which ranks hold which model (`Placement` in scheduling/layout.py), --mode how rollout and
genrm share the engines' ranks (modes.py). Whatever shares ranks takes turns. The order limits peak memory:

    to training   every engine sleeps (frees weights and KV cache); then `learn` wakes trainers: one at a
                  time, but a reference beside the actor, and all that one pipeline schedule runs
    to serving    see Devices.push; the mode wakes the judges

With --placement standalone engines are on ranks that don't train, and sleep only during a push. While all
sleep, the split may change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from config import Config
from engines.pool import Choose, EngineStatus, Pool
from engines.routing import Silence
from runtime.errors import UserError
from runtime.hooks import needed
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


class Colocated:
    """Engines and trainers share all ranks, and take turns on devices. Other placements are subclasses."""

    stops_serving = True  # a stop abandons the step that is being served
    serves_ahead = False

    def check(self, placement: Placement, config: Config) -> None:
        """Raise UserError if the placement conflicts with other settings."""
        if config.ahead and not self.serves_ahead:
            raise UserError(
                "--ahead 1 needs engines on ranks that train nothing: --placement standalone"
            )

    async def to_training(self, devices: Devices) -> None:
        """Put engines to sleep (collective: all ranks)."""
        await devices.put_engines_to_sleep()

    async def to_serving(self, devices: Devices) -> None:
        """Hand the devices from trainers to engines (collective: all ranks)."""
        await devices.push()

    def stand_in(self, config: Config, model: str, shape: Shape, **how: Any) -> Trainer:
        """Return the stand-in for a model on a rank that doesn't hold it; here every rank does."""
        raise NotImplementedError

    def connect(self, senders: list[int], receivers: list[int], timeout_s: float) -> Any:
        """Return a route for pushes to engines on ranks without the actor; here there is none."""
        return None

    async def send_columns(self, world: World, shares: Shares) -> None:
        """Send what models computed to the ranks that need it; with shared ranks, all have it already."""

    async def gather_metrics(
        self, world: World, stats: dict[str, float], is_asked: bool
    ) -> tuple[dict[str, float], bool]:
        """Return the metrics of all models, and whether a rank notes a stop that it was asked for.

        With shared ranks, every rank has the metrics already, and a stop is noted before the training.
        """
        return stats, False


def colocation_of(placement: Placement) -> Colocated:
    """Return how engines and trainers share the devices of a placement."""
    if placement.engines == placement.actor.ranks and len(placement.shapes) == 1:
        return Colocated()
    return needed("colocation", "models on separate ranks")(placement)


# --placement -> its function, from (all ranks, config)
PLACEMENTS: dict[str, Callable[[tuple[int, ...], Config], Placement]] = {"colocate": colocate}


def make_placement(config: Config, world_size: int, on_machine: int = 0) -> Placement:
    """Place engines and models (pure). on_machine: ranks per machine. Raises UserError if it can't."""
    sizes = {"rollout": config.rollout_tp, "genrm": config.genrm_tp}
    for role, tp in sizes.items():
        if on_machine % tp:
            raise UserError(f"--{role}-tp {tp} doesn't divide {on_machine} ranks of a machine")
        if world_size % tp:
            raise UserError(f"--{role}-tp {tp} doesn't divide {world_size} ranks")
    everyone = tuple(range(world_size))
    name = "ranks" if "=" in config.placement else config.placement
    try:
        if name not in PLACEMENTS:
            raise UserError(f"choose one of {', '.join(PLACEMENTS)}")
        placement = PLACEMENTS[name](everyone, config)
        placement.check(world_size)
        colocation_of(placement).check(placement, config)
    except UserError as error:
        raise UserError(f"--placement {config.placement}: {error}") from None
    return placement._replace(rollout_tp=config.rollout_tp, genrm_tp=config.genrm_tp)


# ---------------------------------------------------------------- which model uses a rank's device


class Models(NamedTuple):
    """The models to train, their references, and the route of the weights to the engines."""

    trainers: list[Trainer]  # the actor, then the critics
    # the KL's reference, if there is one: a frozen model, or the actor with its adapters switched off
    references: list[Trainer]
    route: Any = None  # for pushes to other ranks: see Colocated.connect
    shard_push: Any = None  # sends shards instead of whole tensors: see the hook `shard_push`


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
        self.colocation = colocation_of(placement)
        self.serves = world.rank in placement.servers  # if not, it only trains
        self.actor, *self.critics = models.trainers or [None]  # None in an evaluation
        self.references = models.references
        self.rollout = pools["rollout"]
        self.genrm = pools["genrm"]
        self._world = world
        self._timeline = timeline
        self._route = models.route
        self._shard_push = models.shard_push
        self.swap_s = 0.0  # time spent on swaps in this step, on this rank
        self._idle = Silence()  # how long no engine has had anything to write

    @property
    def received_bytes(self) -> int:
        """The bytes of weights that this rank received in collectives for the last push."""
        if self._shard_push:
            return self._shard_push.received
        return self.actor.received_bytes + (self._route.received if self._route else 0)

    def leads(self, role: str) -> tuple[int, ...]:
        """The ranks that own a server of `role` in this split."""
        return self.placement.leads(role, self.split)

    async def set_awake(
        self,
        rollout: tuple[int, ...] = (),
        genrm: tuple[int, ...] = (),
        choose: Choose | None = None,
    ) -> None:
        """Wake the engines of these ranks, and put all others to sleep (collective: ranks that serve).

        Judges that must sleep finish first. With `choose`, answers then move to the remaining rollout
        engines, and the critiques that it returns move to the judges that wake.
        """
        if not self.split.genrm:
            return  # a run without a judge
        start = self._timeline.now()
        await self.genrm.set_awake(tuple(lead for lead in self.genrm.awake if lead in genrm))
        await self.rollout.set_awake(rollout, choose)
        await self.genrm.set_awake(genrm, choose)
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
            raise UserError(
                f"{rollout.waiting} answers and {genrm.waiting} critiques wait for an engine that "
                f"--mode {self.split.mode} doesn't wake, and no engine has had anything to write for "
                f"{most_s:g} s"
            )

    async def to_training(self) -> None:
        """Hand the devices that engines share with trainers to the trainers (collective: all ranks)."""
        await self.colocation.to_training(self)

    async def to_serving(self) -> None:
        """Push the weights, and wake the rollout engines (collective: all ranks). The mode wakes genrm."""
        await self.colocation.to_serving(self)

    async def put_engines_to_sleep(self) -> None:
        """Put all engines to sleep (collective: all ranks)."""
        await self.rollout.sleep()
        await self.genrm.sleep()
        await self._world.barrier()

    async def give_device_to(self, *trainers: Trainer) -> None:
        """Put this rank's other trainers to sleep, then wake these. Not collective."""
        wanted = [trainer for trainer in trainers if trainer.holds]
        if not wanted:
            return  # these models are on other ranks: leave this device as it is
        await self.put_trainers_to_sleep(but=wanted)
        for trainer in wanted:
            if not trainer.awake:
                with self._timeline.span("switch"):
                    await self._world.run(trainer.wake)

    async def put_trainers_to_sleep(self, but: Collection[Trainer] = ()) -> None:
        """Put this rank's trainers to sleep, except some. Not collective."""
        for trainer in (self.actor, *self.critics, *self.references):
            if trainer.awake and trainer not in but:
                with self._timeline.span("switch"):
                    await self._world.run(trainer.sleep)

    async def push(self, actor_stays: bool = False) -> None:
        """Load the actor's weights into the rollout engines, and wake these (collective: all ranks).

        actor_stays: the actor stays awake, because its ranks have no engines. Example with --tp 2: ranks 0
        and 1 hold half of the actor each; the engine of rank 0 writes, that of rank 1 judges.

            rank   does                        waits for    until
            0, 1   gather a tensor             each other   both have asked for it
            0      sends a bucket's handle     its engine   it has copied the bucket, and responds
            1      drops the tensors           rank 0       rank 0 asks for the next bucket's first tensor
            0, 1   put their actors to sleep   -
            0      wakes the KV cache          its engine   it has the memory, and responds
            0, 1   meet at a barrier           each other   both are there; then requests may come

        Beside each line of code: what it takes (+) or frees (-) on a GPU. A bucket has about 512 MiB; its
        gathered tensors, with tp or adapters, take as much again.
        """
        self._take_next_split()
        if not actor_stays:
            await self.put_trainers_to_sleep(but=[self.actor])  # - other models
        await self.give_device_to(self.actor)  # + its weights, optimizer, gradients, if it slept
        trim = partial(self.actor.trim, keeps_gradients=actor_stays)
        await self._world.run(trim)  # - gradients, memory cached by passes
        await self._meet_for_wide_engines()
        await self.rollout.wake_weights()  # + the engine's weights, of an older version
        if self._shard_push:
            await self._shard_push.load(self.rollout, self.leads("rollout"))  # + a bucket
        else:
            weights = self.actor.named_weights()
            if self._route:  # engines on ranks without the actor
                weights = self._route.carry(weights)
            await self.rollout.load_weights(weights, self.actor.version)  # + a bucket
        if not actor_stays:
            await self.put_trainers_to_sleep()  # - the actor, the last bucket
            await self._meet_for_wide_engines()
        await self.rollout.wake_kv_cache()  # + the KV cache

    def _take_next_split(self) -> None:
        """Use the engines of the next step's split, which may differ from this one's. Not collective."""
        self.split = self.next
        self.rollout.use_only(self.leads("rollout"))
        self.genrm.use_only(self.leads("genrm"))
        self.swap_s = 0.0

    async def _meet_for_wide_engines(self) -> None:
        """If an engine spans ranks, wait until all have room for its parts (collective: all ranks)."""
        if self.placement.rollout_tp > 1:
            await self._world.barrier()
