"""Layouts: which ranks hold a model, and how they cut it. Pure."""

from __future__ import annotations

from typing import NamedTuple

from config import Config


class Place(NamedTuple):
    """The place of a rank in a model's layout."""

    dp_rank: int  # its share of the samples
    is_head: bool  # the first of its copy of the model, which speaks for it


class Shape(NamedTuple):
    """The ranks that hold a model, in Megatron's order: shards are neighbours, stages farthest apart."""

    ranks: tuple[int, ...]  # any of the run's
    tp: int = 1
    pp: int = 1
    cp: int = 1

    @staticmethod
    def of(config: Config, ranks: tuple[int, ...]) -> Shape:
        """The layout of a model on `ranks` with the sizes of a config."""
        return Shape(ranks, config.tp, config.pp, config.cp)

    @property
    def dp(self) -> int:
        return len(self.ranks) // (self.tp * self.pp * self.cp)

    @property
    def copies(self) -> list[list[int]]:
        """The model-parallel group of each data-parallel rank, its head first."""
        copies = [[] for _ in range(self.dp)]
        for place, rank in enumerate(self.ranks):
            copies[place // (self.tp * self.cp) % self.dp].append(rank)
        return copies

    def place(self, rank: int) -> Place | None:
        """The place of a rank; None of one that doesn't hold the model."""
        for dp_rank, copy in enumerate(self.copies):
            if rank in copy:
                return Place(dp_rank, rank == copy[0])
        return None
