"""Placements: which ranks hold which model, how they shard it, and the text that describes it. Pure."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from config import Config
from runtime.errors import UserError
from scheduling.measured import ROLES, Split

SIZES = ("tp", "pp")


class Shape(NamedTuple):
    """The ranks that hold a model, in Megatron's order: shards are adjacent, stages farthest apart."""

    ranks: tuple[int, ...]  # any of the run's
    tp: int = 1
    pp: int = 1

    @staticmethod
    def of(config: Config, ranks: tuple[int, ...]) -> Shape:
        """Return the shape of a model on `ranks` with a config's sizes."""
        return Shape(ranks, config.tp, config.pp)

    @property
    def copy_size(self) -> int:
        """The number of ranks of one copy of the model."""
        return self.tp * self.pp

    @property
    def dp(self) -> int:
        return len(self.ranks) // self.copy_size

    @property
    def copies(self) -> list[list[int]]:
        """The ranks of each copy, its lead first, in Megatron's order tp-dp-pp: [dp][copy_size]."""
        copies = [[] for _ in range(self.dp)]
        for place, rank in enumerate(self.ranks):
            copies[place // self.tp % self.dp].append(rank)
        return copies

    def sized(self, config: Config) -> Config:
        """Return the settings of a model with this shape."""
        return replace(config, tp=self.tp, pp=self.pp, sp=config.sp and self.tp > 1)

    def position_of(self, rank: int) -> tuple[int, bool] | None:
        """Return a rank's dp_rank, and whether it leads its copy; None if it doesn't hold the model."""
        for dp_rank, copy in enumerate(self.copies):
            if rank in copy:
                return dp_rank, rank == copy[0]
        return None

    def __str__(self) -> str:
        """Return the text that --placement reads, independent of defaults: 0-3:tp2, or 0-3:tp1."""
        sizes = [f":{name}{size}" for name, size in zip(SIZES, self[1:], strict=True) if size > 1]
        return ranks_in_words(self.ranks) + ("".join(sizes) or ":tp1")


def ranks_in_words(ranks: tuple[int, ...]) -> str:
    """Write ascending ranks as in 0-3,6."""
    words = []
    for _, run in groupby(enumerate(ranks), lambda item: item[1] - item[0]):
        first, *_, last = [rank for _, rank in run] * 2
        words.append(f"{first}-{last}" if last > first else str(first))
    return ",".join(words)


class Placement(NamedTuple):
    """The ranks of the engines and of each model that is trained, or read for training.

    A split gives the first of the engines' ranks to rollout, and the last ones to genrm. The first rank of an
    engine is its lead, which owns its server; see `stride` for the others.
    """

    engines: tuple[int, ...]
    actor: Shape
    critic: Shape  # the same for every critic
    reference: Shape
    rollout_tp: int = 1  # ranks per rollout engine
    genrm_tp: int = 1
    pushes_shards: bool = False  # a push gives each rank of a rollout engine only its shard
    push: str = ""  # if rollout engines span ranks: which push runs, and why

    @property
    def everyone(self) -> tuple[int, ...]:
        """All ranks of the run. Each holds a model or an engine."""
        return tuple(sorted({*self.engines} | self.learners))

    @property
    def models(self) -> tuple[Shape, Shape, Shape]:
        return self.actor, self.critic, self.reference

    def tp(self, role: str) -> int:
        """Return the number of ranks of one engine of `role`."""
        return {"rollout": self.rollout_tp, "genrm": self.genrm_tp}[role]

    def ranks(self, role: str, split: Split) -> tuple[int, ...]:
        if role == "rollout":
            return self.engines[: split.rollout]
        return self.engines[len(self.engines) - split.genrm :]

    def leads(self, role: str, split: Split) -> tuple[int, ...]:
        """Return the ranks that own a server of `role`."""
        stride = self.stride(role)
        places = enumerate(self.ranks(role, split))
        return tuple(rank for place, rank in places if place % (self.tp(role) * stride) < stride)

    def stride(self, role: str) -> int:
        """Return the distance between an engine's ranks: how many of the actor's shards it joins to one."""
        return self.actor.tp // self.rollout_tp if role == "rollout" and self.pushes_shards else 1

    def ranks_of(self, role: str, lead: int) -> range:
        """Return the ranks of `lead`'s engine."""
        stride = self.stride(role)
        return range(lead, lead + self.tp(role) * stride, stride)

    def judge_of(self, lead: int, judges: int) -> int:
        """Return the number of the judge that `lead`'s genrm engine serves: judges take turns."""
        return self.engines.index(lead) // self.genrm_tp % judges

    @property
    def least_ranks(self) -> int:
        """The fewest ranks that hold whole engines, of either role."""
        return math.lcm(self.rollout_tp * self.stride("rollout"), self.genrm_tp)

    @property
    def rank_groups(self) -> list[tuple[int, ...]]:
        """The engines' ranks, `least_ranks` at a time."""
        starts = range(0, len(self.engines), self.least_ranks)
        return [self.engines[start : start + self.least_ranks] for start in starts]

    def serves_all(self, split: Split, judges: int) -> bool:
        """Return whether each judge has an engine, and each engine has aligned ranks on one machine."""
        for role in ROLES:
            ranks = self.ranks(role, split)
            span = self.tp(role) * self.stride(role)
            if len({rank // span for rank in ranks}) * span != len(ranks):
                return False
        return len({self.judge_of(lead, judges) for lead in self.leads("genrm", split)}) == judges

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of the actor, and of models that aren't on the actor's ranks, by name."""
        shapes = {"actor": self.actor}
        others = {"critic": self.critic, "reference": self.reference}
        return shapes | {name: shape for name, shape in others.items() if shape != self.actor}

    @property
    def learners(self) -> set[int]:
        """The ranks that hold a model."""
        return {rank for shape in self.models for rank in shape.ranks}

    @property
    def is_apart(self) -> bool:
        """True if no rank both serves and trains."""
        return bool(self.engines) and not self.learners & {*self.engines}

    def actor_is_reference(self, config: Config) -> bool:
        """Return whether the actor without its adapters is the reference, so no second model is needed."""
        return config.lora > 0 and not config.teacher and self.reference == self.actor

    @property
    def servers(self) -> tuple[int, ...]:
        """The ranks whose controllers serve: those of the engines if they are apart, otherwise all."""
        return self.engines if self.is_apart else self.everyone

    def in_words(self, split: Split) -> str:
        """Describe the ranks: rollout on ranks 0-1, genrm on ranks 2, actor on ranks 0-2."""
        ranks_of = {role: self.ranks(role, split) for role in ROLES}
        ranks_of |= {name: shape.ranks for name, shape in self.shapes.items()}
        return ", ".join(f"{who} on ranks {ranks_in_words(r)}" for who, r in ranks_of.items() if r)

    def check(self, world_size: int) -> None:
        """Raise UserError if this placement doesn't fit `world_size` ranks."""
        names = ("engines", "actor", "critic", "reference")
        for name, shape in zip(names, (Shape(self.engines), *self.models), strict=True):
            ranks = shape.ranks
            if [*ranks] != sorted({*ranks}):
                raise UserError(f"the ranks of {name} aren't in ascending order, each named once")
            if ranks and max(ranks) >= world_size:
                raise UserError(
                    f"{name} on rank {max(ranks)}: there are {world_size} ranks, from 0"
                )
            if not ranks and name != "engines":
                raise UserError(f"{name} has no rank")
            if len(ranks) % shape.copy_size:
                raise UserError(
                    f"tp {shape.tp} x pp {shape.pp} = {shape.copy_size} doesn't divide the {len(ranks)} "
                    f"ranks of {name}"
                )
        if idle := {*range(world_size)} - {*self.engines} - self.learners:
            raise UserError(f"rank {min(idle)} holds nothing")

    def __str__(self) -> str:
        """Return the text that --placement reads."""
        models = f"actor={self.actor} critic={self.critic} reference={self.reference}"
        return f"engines={ranks_in_words(self.engines)} {models}"
