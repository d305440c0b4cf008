"""Trainers whose passes take what a cost model says of this rank's own micro-batches."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from sample import Sample
from scheduling.balance import flat
from scheduling.costs import Passes
from simulation.engine import LOGPROB, Moves
from simulation.meetings import SimulatedWorld

MiniBatches = list[list[list[Sample]]]


class SimulatedTrainer:
    """A model that is trained: the actor, or a critic by its name.

    world: of the trainers alone. group: ranks of a model-parallel group. speed_up: of several trainers in one
    pipeline, over one after the other.
    """

    def __init__(
        self,
        name: str,
        world: SimulatedWorld,
        passes: Passes,
        moves: Moves,
        group: int = 1,
        speed_up=1.0,
    ):
        self.name, self.passes, self.version, self.awake, self.phases = name, passes, 0, False, []
        self._world, self._moves, self._speed_up = world, moves, speed_up
        self.dp_rank, self.dp_size = world.rank // group, world.size // group
        self.is_head, self.image_cost = world.rank % group == 0, lambda prompt: 0

    async def wake(self) -> None:
        await asyncio.sleep(self._moves.wake_s)
        self.awake = True

    async def sleep(self) -> None:
        await asyncio.sleep(self._moves.sleep_s)
        self.awake = False

    async def trim(self) -> None: ...

    def named_weights(self) -> Iterator:
        return iter(())

    def cost(self, tokens: int) -> int:
        """Work of a sample, in nanoseconds."""
        return round(1e9 * self.passes.cost(tokens))

    async def forward(self, mini_batches: MiniBatches) -> None:
        assert self.awake, "asked while asleep"
        await asyncio.sleep(sum(self.passes.forward_s(lengths_of(batch)) for batch in mini_batches))

    async def compute_values(self, mini_batches: MiniBatches) -> None:
        await self.forward(mini_batches)
        for sample in flat(mini_batches):
            sample.values = sample.values | {self.name: [0.0] * len(sample.response)}

    async def compute_ref_logprobs(self, mini_batches: MiniBatches) -> None:
        await self.forward(mini_batches)
        for sample in flat(mini_batches):
            sample.reference_logprobs = [LOGPROB] * len(sample.response)
            sample.policy_logprobs = sample.logprobs

    async def update(
        self, mini_batches: MiniBatches, beside: Iterable[SimulatedTrainer] = ()
    ) -> dict:
        """An optimizer step for each mini-batch, for which all ranks wait: it takes the gradients of all."""
        trainers = (self, *beside)
        assert all(trainer.awake for trainer in trainers), "trained while asleep"
        for mini_batch in mini_batches:
            seconds = sum(trainer.passes.update_s(lengths_of(mini_batch)) for trainer in trainers)
            await asyncio.sleep(seconds / (self._speed_up if beside else 1.0))
            await self._world.barrier()
        for trainer in trainers:
            trainer.version += 1
        return {f"{trainer.name}/not_finite": 0.0 for trainer in trainers}


def lengths_of(micro_batches: list[list[Sample]]) -> list[list[int]]:
    """Tokens of each sequence of each micro-batch."""
    return [
        [len(sample.prompt) + len(sample.response) for sample in batch] for batch in micro_batches
    ]
