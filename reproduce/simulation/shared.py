"""Computes once the decisions that all controllers of this process would compute alike.

A decision is a pure function. Its result is reused while the arguments stay the same. That comparison is
cheap: the facts of a meeting are the same objects on every rank. Without `deciding_once` every controller
computes everything, as in a real run, with the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import controller
import extras
import modes
from scheduling.dynamic_sampling import Draw, FirstFinishedSampler, OrderedSampler
from scheduling.measured import MOVES


@dataclass
class Once:
    """A pure function that remembers its newest result."""

    function: Callable
    count: int | None = None  # how many leading arguments to compare; None: all
    known: tuple = ()
    result: Any = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        given = (*arguments, *named.values())[: self.count]
        if self.known != given:
            self.result = self.function(*arguments, **named)
            self.known = given
        return self.result


class SharedSampler(FirstFinishedSampler):
    """A sampler that shares its results with all ranks, as each result takes a pass over a step's prompts.

    Results are stored under the events that precede them. Those are the same on every rank.
    """

    def __init__(self, *arguments: float, page: dict, **more: float):
        super().__init__(*arguments, **more)
        self._page = page
        self._turn(arguments, more)

    def _turn(self, *event: Any) -> None:
        if self._page.get("event") != event:
            self._page |= {"event": event, "next": {}}
        self._page = self._page["next"]

    def _once(self, ask: Callable) -> Any:
        question = (ask.__name__, self.num_generated)
        if question not in self._page:
            self._page[question] = ask()  # may call other shared methods
        return self._page[question]

    def add(self, prompt_ids: list[int], wave: int) -> None:
        super().add(prompt_ids, wave)
        self._turn(prompt_ids, wave)

    def record(self, finished: dict[int, bool], num_generated: int) -> None:
        super().record(finished, num_generated)
        self._turn(finished)

    def candidates(self) -> list[int]:
        return self._once(super().candidates)

    def chosen(self) -> list[int]:
        return self._once(super().chosen)

    def used(self) -> list[int]:
        return self._once(super().used)

    def next_draw(self) -> Draw | None:
        return self._once(super().next_draw)


class SharedOrderedSampler(SharedSampler, OrderedSampler):
    def wave_ends(self) -> list[int]:
        return self._once(super().wave_ends)


@contextmanager
def deciding_once() -> Iterator[None]:
    """While this is open, compute each decision once for all controllers of the process."""
    page: dict = {}
    shared = {
        (controller, "deal"): Once(controller.deal, 1),
        (modes, "FirstFinishedSampler"): partial(SharedSampler, page=page),
        (modes, "OrderedSampler"): partial(SharedOrderedSampler, page=page),
    }
    if "fused" in extras.EXTRAS:
        from extras.fused import mode as fused

        shared[fused, "ranks_of_tail"] = Once(fused.ranks_of_tail)
        shared[fused, "token_latency"] = Once(fused.token_latency)
    moves = {mode: Once(move) for mode, move in MOVES.items()}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(MOVES, moves))
        for (module, name), function in shared.items():
            stack.enter_context(mock.patch.object(module, name, function))
        yield
