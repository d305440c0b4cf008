"""Placement: which ranks each role holds, and the hand-over of the devices between serving and training.

A mode is data, a `Plan`: the ranks of each role. While serving, rollout and genrm engines hold ranks; while training, the actor
holds all of them. The hand-overs are the vertical rules of the paper's figure, and their order decides the memory peak:

    to training    every engine sleeps (weights and KV cache go)   then the actor wakes
    to serving     rollout weights come back, push, the actor sleeps, and only then does the KV cache come back
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """The ranks of each role. Roles that share a rank take turns on it; roles on disjoint ranks run side by side."""

    rollout: tuple[int, ...]
    genrm: tuple[int, ...]
    actor: tuple[int, ...]

    def roles_of(self, rank: int) -> tuple[str, ...]:
        """The serving roles that `rank` hosts an engine for."""
        return tuple(role for role, ranks in (("rollout", self.rollout), ("genrm", self.genrm)) if rank in ranks)

    def __str__(self) -> str:
        return f"rollout on ranks {_ranges(self.rollout)}, genrm on ranks {_ranges(self.genrm)}, actor on ranks {_ranges(self.actor)}"


def full_colocation(world_size: int, rollout_ranks: int) -> Plan:
    """Rollout, genrm and actor take turns, each on all ranks (WeChat-YATT, full colocation). `rollout_ranks` plays no part."""
    everyone = tuple(range(world_size))
    return Plan(rollout=everyone, genrm=everyone, actor=everyone)


def partial_colocation(world_size: int, rollout_ranks: int) -> Plan:
    """Ranks [0, S) serve rollout and [S, N) serve genrm at the same time; then all N train (WeChat-YATT, partial colocation).

    S is `rollout_ranks`; 0 asks for the half, rounded up. Raises ValueError when a role would be left without a rank.
    """
    if world_size < 2:
        raise ValueError(f"--mode partial needs at least 2 ranks, one for rollout and one for genrm; this run has {world_size}")
    split = rollout_ranks or (world_size + 1) // 2
    if not 1 <= split <= world_size - 1:
        raise ValueError(
            f"--rollout-ranks {split} leaves {world_size - split} of {world_size} ranks for genrm; "
            f"partial mode takes 1 to {world_size - 1}"
        )
    everyone = tuple(range(world_size))
    return Plan(rollout=everyone[:split], genrm=everyone[split:], actor=everyone)


PLANS = {"full": full_colocation, "partial": partial_colocation}


def make_plan(mode: str, world_size: int, rollout_ranks: int = 0) -> Plan:
    """The plan of `mode` on `world_size` ranks. Raises ValueError with the numbers when the split isn't valid."""
    if mode not in PLANS:
        raise ValueError(f"--mode {mode} is unknown; choose one of {', '.join(PLANS)}")
    return PLANS[mode](world_size, rollout_ranks)


def _ranges(ranks: tuple[int, ...]) -> str:
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"{ranks[0]}"


class Pool:
    """The engines of one role, as one controller sees them: a handle on each, of which at most one is its own to wake and put to sleep.

    `wake`, `wake_weights`, `wake_kv_cache` and `sleep` are collective: every controller calls them, each acts on the engine of its
    own rank, and all leave together, so that nobody sends a request to an engine that sleeps. Each is a no-op when already there.
    """

    def __init__(self, engines: list, world, timeline):
        self.engines = engines
        self.own = [engine for engine in engines if engine.rank == world.rank]  # none or one
        self.others = [engine for engine in engines if engine.rank != world.rank]
        self.world, self.timeline = world, timeline
        self.awake = True  # an engine comes up awake

    @property
    def capacity(self) -> int:
        """Answers that the pool decodes at once."""
        return sum(engine.capacity for engine in self.engines)

    def least_loaded(self):
        """The engine with the fewest answers of this controller in flight; ties go round by rank so that controllers differ."""
        start = self.world.rank
        count = len(self.engines)
        return min((self.engines[(start + i) % count] for i in range(count)), key=lambda engine: engine.in_flight)

    async def wake(self) -> None:
        """Weights and KV cache back on the device (collective)."""
        if self.awake:
            return
        await self.wake_weights()
        await self.wake_kv_cache()

    async def wake_weights(self) -> None:
        """Room for the weights alone (collective): what a weight push needs while the actor still holds its own memory."""
        await self._each([engine.wake_weights() for engine in self.own])

    async def wake_kv_cache(self) -> None:
        """The KV cache back, requests may come (collective)."""
        await self._each([engine.wake_kv_cache() for engine in self.own])
        self._mark(awake=True)

    async def sleep(self) -> None:
        """All requests have ended on every controller, then weights and KV cache leave the device (collective)."""
        if not self.awake:
            return
        await self.world.barrier()
        self._mark(awake=False)
        await self._each([engine.sleep() for engine in self.own])

    async def load_weights(self, named_weights, version: int) -> None:
        """Push the actor's weights into this rank's engine (collective: the iterator gathers over the model-parallel group)."""
        with self.timeline.span("sync"):
            for engine in self.own:
                await engine.load_weights(named_weights, version)
            if not self.own:
                await self.world.run(_drain, named_weights)  # other ranks of the group still need this rank's shards
            await self.world.barrier()

    def _mark(self, awake: bool) -> None:
        self.awake = awake
        for engine in self.others:  # its own engine keeps the flag itself
            engine.awake = awake

    async def _each(self, calls: list) -> None:
        with self.timeline.span("switch"):
            await asyncio.gather(*calls)
            await self.world.barrier()


def _drain(iterator) -> None:
    for _ in iterator:
        pass


async def to_training(actor, rollout: Pool, genrm: Pool, world, timeline) -> None:
    """Engines sleep, then the actor wakes (collective)."""
    await rollout.sleep()
    await genrm.sleep()
    with timeline.span("switch"):
        await world.run(actor.wake)


async def to_serving(actor, rollout: Pool, world, timeline) -> None:
    """Weights back, push, actor out, KV cache back (collective). Whether genrm wakes beside it is up to the mode's serve function."""
    await rollout.wake_weights()
    await rollout.load_weights(actor.named_weights(), actor.version)
    with timeline.span("switch"):
        await world.run(actor.sleep)
        await world.barrier()
    await rollout.wake_kv_cache()
