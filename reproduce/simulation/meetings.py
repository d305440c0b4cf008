"""A `World` for controllers that are all tasks in one event loop."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any


@dataclass
class Network:
    """The network of all ranks. It takes no time. Each meeting passes it the values of all ranks."""

    meetings: int = 0  # so far

    def gathered(self, values: list) -> list:
        self.meetings += 1
        return values

    def reduced(self, total: Callable[[list], Any], values: list) -> Any:
        """Return the total in World.reduce's order: pairs of neighbors, then pairs of pairs."""
        self.meetings += 1
        while len(values) > 1:
            pairs = [values[first : first + 2] for first in range(0, len(values), 2)]
            values = [total(pair) if len(pair) == 2 else pair[0] for pair in pairs]
        return values[0]

    def exchanged(self, parcels: list[dict[int, Any]]) -> list[dict[int, Any]]:
        """Return parcels[sender][receiver]."""
        self.meetings += 1
        return parcels


@dataclass
class Meeting:
    """One collective."""

    done: asyncio.Future  # holds the result
    values: dict[int, Any] = field(
        default_factory=dict
    )  # rank -> value, for ranks that have arrived


@dataclass(eq=False)
class SimulatedWorld:
    """The runtime.world.World of one rank.

    meetings: by number, in one dict that all ranks share; it also holds the meetings of parts. Ranks gather
    the same objects, not copies. A meeting is dropped once all ranks have arrived, to bound a long run's
    memory.
    """

    rank: int
    size: int
    meetings: dict
    network: Network = field(default_factory=Network)
    calls: int = 0  # meetings that this rank has joined

    def __post_init__(self) -> None:
        self.ranks = range(self.size)
        self.index = self.rank

    def part(self, ranks: Sequence[int]) -> SimulatedWorld:
        others = [rank for rank in self.ranks if rank not in ranks]
        if not others:
            return self
        part = copy.copy(self)
        part.ranks = ranks if self.rank in ranks else others
        part.size = len(part.ranks)
        part.index = part.ranks.index(self.rank)
        part.meetings = self.meetings.setdefault(f"of {[*part.ranks]}", {})
        part.calls = 0
        return part

    async def wait_for_all(self) -> None: ...

    async def run(self, function: Callable, *args: Any) -> Any:
        result = function(*args)
        return await result if inspect.isawaitable(result) else result

    async def _meet(self, value: Any, result_of: Callable[[list], Any]) -> Any:
        """Return `result_of` all ranks' values, in rank order. The last rank to arrive computes it."""
        call = self.calls
        self.calls += 1
        if call not in self.meetings:
            self.meetings[call] = Meeting(asyncio.get_running_loop().create_future())
        meeting = self.meetings[call]
        assert self.rank not in meeting.values, "a rank joined the same meeting twice"
        meeting.values[self.rank] = value
        if len(meeting.values) == self.size:
            del self.meetings[call]
            meeting.done.set_result(result_of([meeting.values[rank] for rank in self.ranks]))
        return await asyncio.shield(meeting.done)  # a cancelled rank must not cancel the others

    async def gather(self, value: Any) -> list[Any]:
        return await self._meet(value, self.network.gathered)

    async def reduce(self, value: Any, total: Callable[[list], Any]) -> Any:
        return await self._meet(value, partial(self.network.reduced, total))

    async def barrier(self) -> None:
        await self.gather(None)

    async def exchange(self, outgoing: dict[int, Any]) -> dict[int, Any]:
        sent = await self._meet(outgoing, self.network.exchanged)
        incoming = {}
        for sender, parcels in zip(self.ranks, sent, strict=True):
            if self.rank in parcels:
                parcel = parcels[self.rank]
                incoming[sender] = parcel if sender == self.rank else self._received(parcel)
        return incoming

    def _received(self, parcel: list | dict) -> list | dict:
        """Return shallow copies of samples from another rank, or its columns as they are."""
        return list(map(copy.copy, parcel)) if isinstance(parcel, list) else parcel
