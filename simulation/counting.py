"""What every unit of a simulation sends and hears, where units have work alike."""

from __future__ import annotations

import pickle
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from controller import Controller
from rollout import RolloutBatch
from sample import Sample
from simulation.cluster import Lengths, Simulation, Workload
from simulation.meetings import Network

TOKEN_BYTES = 5 + 9 + 2  # pickled: a token id, its logprob, the version that wrote it


@dataclass(frozen=True)
class Alike(Lengths):
    """The k-th prompts of all units have texts alike: figures are a unit's own, not the luck of the draw.

    To a tenth: of equal ones the deal would leave every unit its own.
    """

    units: int = 1

    def of(self, *text: Any) -> int:
        *_, prompt_id, index = text
        part = random.Random(repr(text)).uniform(0.9, 1.0)
        return max(1, round(part * super().of(prompt_id // self.units, index)))


@dataclass(frozen=True)
class Even(Workload):
    """And of every unit as many groups are kept."""

    units: int = 1

    def is_right(self, prompt_id: int, index: int) -> bool:
        return super().is_right(prompt_id // self.units, index)


class Counting(Network):
    """By unit. sent: its own facts and samples; relayed: others' facts, in totals that it passes on.

    dealt: bytes of all samples, of those that stay, too. grain: tokens that one of theirs stands for. spent:
    CPU seconds of `counting`, and of merging at the `first` unit, which merges the most, and at `others`.
    """

    def __init__(self, grain: int):
        super().__init__()
        self.grain, self.dealt, self.spent = grain, 0, Counter()
        self.sent, self.relayed, self.heard = Counter(), Counter(), Counter()

    def _bytes(self, value: Any) -> int:
        start = time.process_time()
        if isinstance(value, list) and value and isinstance(value[0], Sample):
            tokens = (5 * len(sample.prompt) + TOKEN_BYTES * len(sample.response) for sample in value)
            size = 200 * len(value) + self.grain * sum(tokens)  # 200: its names and numbers
        else:
            size = 0 if value is None else len(pickle.dumps(value))
        self.spent["counting"] += time.process_time() - start
        return size

    def gather_s(self, values: list) -> float:
        sizes = dict(enumerate(map(self._bytes, values)))
        self.meetings += 1
        self.sent.update(sizes)
        self.heard.update({unit: sum(sizes.values()) - size for unit, size in sizes.items()})
        return 0.0

    def reduce_s(self, values: list) -> float:
        self.meetings += 1
        return 0.0

    def reduced(self, total: Callable[[list], Any], values: list) -> Any:
        """Unit 0 has its total merged with a neighbour's at each distance, and tells all the result."""
        own, values, distance = list(map(self._bytes, values)), list(values), 1
        self.sent.update(dict(enumerate(own)))
        while distance < len(values):
            for unit in range(0, len(values) - distance, 2 * distance):
                sender = unit + distance
                size = self._bytes(values[sender]) if distance > 1 else own[sender]
                self.heard[unit] += size
                self.relayed[sender] += max(0, size - own[sender])
                start = time.process_time()
                values[unit] = total([values[unit], values[sender]])
                self.spent["others" if unit else "first"] += time.process_time() - start
            distance *= 2
        size = self._bytes(values[0])
        self.relayed[0] += max(0, size - own[0])
        self.heard.update(dict.fromkeys(range(1, len(values)), size))
        return values[0]

    def exchange_s(self, parcels: list[dict[int, Any]]) -> float:
        for sender, receiver in [(s, r) for s, to in enumerate(parcels) for r in to]:
            size = self._bytes(parcels[sender][receiver])
            self.dealt += size
            self.sent[sender] += size * (sender != receiver)
            self.heard[receiver] += size * (sender != receiver)
        return 0.0


class Counted(Simulation):
    """By unit: samples drawn, and held at once; requests to and from it."""

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        self.drawn, self.held, self.requests = Counter(), Counter(), Counter()

    async def step(
        self, c: Controller, step: int, batch: RolloutBatch, samples: list[Sample], stats: dict
    ) -> None:
        unit, mine = c.world.rank, {sample.key for sample in batch.kept}
        self.drawn[unit] = len(batch.kept + batch.dropped) + sum(map(len, batch.filtered + batch.carried))
        self.held[unit] = self.drawn[unit] + sum(sample.key not in mine for sample in samples)
        self.requests[unit] += batch.stats.rollout.requests + batch.stats.genrm.requests
        served = (span.rank for span in c.timeline.spans if span.name in self.engines)
        self.requests.update(served)
        await super().step(c, step, batch, samples, stats)
