"""What every unit of a simulation sends and hears, in bytes, and how long the reductions take one of them."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from sample import Sample
from simulation.meetings import Network

TOKEN_BYTES = 5 + 9 + 2  # pickled: a token id, its logprob, the version that wrote it


class Counting(Network):
    """By unit. sent: its own facts and samples; relayed: others' facts, in totals that it passes on.

    grain: tokens that one of a sample stands for. spent: CPU seconds of `counting`, of the `first` unit, which
    merges the most, and of the `others`.
    """

    def __init__(self, grain: int):
        super().__init__()
        self.grain, self.spent = grain, Counter()
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
        for sender, receiver in [(s, r) for s, to in enumerate(parcels) for r in to if r != s]:
            size = self._bytes(parcels[sender][receiver])
            self.sent[sender] += size
            self.heard[receiver] += size
        return 0.0
