"""The deal of a step's samples: which ranks train which model on which samples. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple, Protocol

from config import Config
from sample import Key, Sample, flat
from scheduling.balance import Measure, Prefix, plan_batch
from scheduling.layout import Shape

MiniBatches = list[list[list[Sample]]]  # one data-parallel rank's mini-batches of micro-batches


class Sizes(NamedTuple):
    """The sizes of a controller's samples, which it sends to the others."""

    # prompt_id -> tokens of each answer, 0 for one that isn't trained on
    lengths: dict[int, list[int]]
    prefixes: dict[int, Prefix]  # prompt_id -> prefix
    costs: list[float]  # the samples' costs, if cost is a signal

    @staticmethod
    def of(
        samples: list[Sample], prefix_of: Callable[[list[int]], Prefix], has_costs: bool
    ) -> Sizes:
        lengths: dict[int, list[int]] = {}
        for sample in sorted(samples, key=lambda sample: sample.key):
            row = lengths.setdefault(sample.prompt_id, [])
            row += [0] * (sample.index - len(row))
            row.append(len(sample.prompt) + sample.begun)
        prompts = {sample.prompt_id: sample.prompt for sample in samples}
        prefixes = {prompt_id: prefix_of(prompt) for prompt_id, prompt in prompts.items()}
        costs = [sample.cost for sample in samples] if has_costs else []
        return Sizes(lengths, prefixes, costs)

    def tokens(self) -> dict[Key, int]:
        rows = self.lengths.items()
        return {(prompt, i): n for prompt, row in rows for i, n in enumerate(row) if n}


class Deal(NamedTuple):
    """The assignment of samples to the ranks of models of one shape."""

    plan: list[list[list[list[Key]]]]  # [dp_rank][mini-batch][micro-batch][sample]
    copies: dict[Key, list[int]]  # sample -> ranks of the copy that gets it, lead first
    work: list[int]  # multiply-adds of each data-parallel rank's forward passes


def deal(
    sizes: list[Sizes], shapes: list[Shape], macs: Callable[[int], int], config: Config
) -> tuple[dict[Key, int], dict[Shape, Deal]]:
    """Deal all samples in equal work, for each shape. Returns each sample's owner, and the deals."""
    tokens = {}
    owners = {}
    prefixes = {}
    for rank, theirs in enumerate(sizes):
        prefixes |= theirs.prefixes
        for key, length in theirs.tokens().items():
            assert key not in tokens, "two controllers hold the same sample"
            tokens[key] = length
            owners[key] = rank
    measure = Measure(tokens, macs, prefixes)
    deals = {}
    for shape in dict.fromkeys(shapes):
        plan = plan_batch(measure, shape.sized(config), shape.dp)
        copies = {}
        for share, copy in zip(plan, shape.copies, strict=True):
            copies |= dict.fromkeys(flat(share), copy)
        work = [sum(map(measure.works, mini_batches)) for mini_batches in plan]
        deals[shape] = Deal(plan, copies, work)
    return owners, deals


class Held(Protocol):
    """A model as this rank sees it: a training.trainer.Trainer, or its stand-in on other ranks."""

    holds: bool  # this rank has a part of it
    shape: Shape
    dp_rank: int


@dataclass
class Shares:
    """The samples that this rank's models read or train on, with the deals of all models."""

    deals: dict[Shape, Deal]
    samples: dict[Key, Sample]  # this rank's samples, for all its models
    costs: list[float]  # the costs of all samples of the step, if cost is a signal

    def of(self, model: Held) -> MiniBatches:
        """Return this rank's mini-batches for a model; none if only other ranks hold the model."""
        if not model.holds:
            return []
        mini_batches = []
        for mini_batch in self.deals[model.shape].plan[model.dp_rank]:
            mini_batches.append([list(map(self.samples.__getitem__, keys)) for keys in mini_batch])
        return mini_batches

    def imbalance(self, model: Held) -> float:
        """Return the largest work of a model's data-parallel ranks, divided by the mean."""
        work = self.deals[model.shape].work
        return max(work) / max(1, fmean(work))
