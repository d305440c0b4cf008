"""Simulated trainers: passes take the time that a cost model gives for the rank's own micro-batches."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from reproduce.simulation.costs import Passes
from reproduce.simulation.engine import LOGPROB, Moves
from reproduce.simulation.meetings import SimulatedWorld
from sample import Sample, flat
from scheduling.balance import Prefix
from scheduling.dealing import MiniBatches
from scheduling.layout import Shape


@dataclass(eq=False)
class SimulatedTrainer:
    """One of a rank's models: the actor, the reference, or a named critic."""

    name: str
    world: SimulatedWorld  # only the ranks of this model
    costs: Passes
    moves: Moves
    shape: Shape
    speed_up: float = 1.0  # gain from several trainers in one pipeline over one after the other
    version: int = 0
    awake: bool = False
    passes: list = field(default_factory=list)

    def __post_init__(self):
        position = self.shape.position_of(self.world.rank)
        self.holds = position is not None
        self.dp_rank, self.is_lead = position or (-1, False)
        self.prefix_of = lambda prompt: Prefix()  # the papers' systems don't share prompts

    async def wake(self) -> None:
        await asyncio.sleep(self.moves.wake_s)
        self.awake = True

    async def sleep(self) -> None:
        await asyncio.sleep(self.moves.sleep_s)
        self.awake = False

    async def trim(self, keeps_gradients: bool) -> None: ...

    def named_weights(self) -> Iterator:
        return iter(())

    def macs(self, tokens: int) -> int:
        """Return a sample's work, here in nanoseconds."""
        return round(1e9 * self.costs.cost(tokens))

    async def forward(self, mini_batches: MiniBatches) -> None:
        assert self.awake or not self.holds, "a trainer was called while asleep"
        await asyncio.sleep(sum(forward_s(self.costs, lengths_of(each)) for each in mini_batches))

    async def compute_values(self, mini_batches: MiniBatches) -> None:
        await self.forward(mini_batches)
        for sample in flat(mini_batches):
            sample.values = sample.values | {self.name: [0.0] * len(sample.response)}

    async def compute_policy_logprobs(self, mini_batches: MiniBatches) -> None: ...

    async def compute_ref_logprobs(self, mini_batches: MiniBatches) -> None:
        await self.forward(mini_batches)
        for sample in flat(mini_batches):
            sample.reference_logprobs = [LOGPROB] * len(sample.response)
            sample.policy_logprobs = sample.logprobs

    async def update(self, mini_batches: MiniBatches, *beside: SimulatedTrainer) -> dict:
        """Run an optimizer step for each mini-batch. All ranks wait, as each step needs all gradients."""
        trainers = (self, *beside)
        assert all(t.awake or not t.holds for t in trainers), "trained while asleep"
        for mini_batch in mini_batches:
            lengths = lengths_of(mini_batch)
            seconds = sum(update_s(trainer.costs, lengths) for trainer in trainers)
            await asyncio.sleep(seconds / (self.speed_up if beside else 1.0))
            await self.world.barrier()
        for trainer in trainers:
            trainer.version += 1
        return {f"{trainer.name}/not_finite": 0.0 for trainer in trainers}


def lengths_of(micro_batches: list[list[Sample]]) -> list[list[int]]:
    """Return the tokens of each sequence [micro-batch][sequence]."""
    lengths = []
    for samples in micro_batches:
        lengths.append([len(sample.prompt) + len(sample.response) for sample in samples])
    return lengths


def forward_s(passes: Passes, micro_batches: Iterable[list[int]]) -> float:
    """Return the seconds of a forward pass over lengths [micro-batch][sequence].

    Filling and draining the pipeline adds the time of one micro-batch for each stage but one.
    """
    each = [sum(map(passes.cost, lengths)) for lengths in micro_batches if lengths]
    return sum(each) * (1 + (passes.stages - 1) / max(1, len(each)))


def update_s(passes: Passes, micro_batches: Iterable[list[int]]) -> float:
    """Return the seconds of forward and backward over a mini-batch and of the optimizer step."""
    return passes.update + (1 + passes.backward) * forward_s(passes, micro_batches)
