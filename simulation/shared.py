"""Decisions that every controller works out alike, worked out once where all controllers are in one process.

A decision is a pure function, and its result is taken again where its arguments are the same. Facts of one
meeting are the same objects on every rank, and a comparison asks for that first. Without `sharing` every
controller works out everything, as in a real run; what it comes to is the same.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import controller
import placement
import rollout
from scheduling.dynamic_sampling import DynamicSampler, OrderedSampler, Wave

FUNCTIONS = ((controller, "choose_split"), (placement, "ranks_of_tail"), (rollout, "token_latency"))


class Once:
    """A pure function that remembers its newest result; it depends on its first `count` arguments alone.

    spent: gets the seconds of working it out, which are one controller's own thinking.
    """

    def __init__(self, function: Callable, spent: Counter[str], count: int | None = None):
        self._function, self._spent, self._count = function, spent, count
        self._known: tuple[tuple, Any] = (), None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        given = (*arguments, *named.values())[: self._count]
        if self._known[0] != given:
            start = time.process_time()
            self._known = given, self._function(*arguments, **named)
            self._spent[self._function.__name__] += time.process_time() - start
        return self._known[1]


class SharedSampler(DynamicSampler):
    """One whose questions, each a pass over all prompts of the step, are answered once, on a page for all.

    The same events come on every rank, and each turns the page.
    """

    def __init__(self, *arguments: float, page: dict, spent: Counter[str], **more: float):
        super().__init__(*arguments, **more)
        self._page, self._spent = page, spent
        self._turn(arguments, more)

    def _turn(self, *event: Any) -> None:
        if self._page.get("event") != event:
            self._page |= {"event": event, "next": {}}
        self._page = self._page["next"]

    def _once(self, ask: Callable) -> Any:
        question = ask.__name__, self.num_generated
        if question not in self._page:
            start, before = time.process_time(), self._spent["sampling"]
            self._page[question] = ask()  # which may ask others
            self._spent["sampling"] = before + time.process_time() - start
        return self._page[question]

    def add(self, prompt_ids: list[int], wave: int) -> None:
        super().add(prompt_ids, wave)
        self._turn(prompt_ids, wave)

    def record(self, finished: dict[int, bool]) -> None:
        super().record(finished)
        self._turn(finished)

    def candidates(self) -> list[int]:
        return self._once(super().candidates)

    def chosen(self) -> list[int]:
        return self._once(super().chosen)

    def used(self) -> list[int]:
        return self._once(super().used)

    def next_wave(self) -> Wave | None:
        return self._once(super().next_wave)


class SharedOrderedSampler(SharedSampler, OrderedSampler):
    def wave_ends(self) -> list[int]:
        return self._once(super().wave_ends)


@contextmanager
def sharing() -> Iterator[Counter[str]]:
    """Yields the seconds that one controller spends on each kind of decision."""
    spent, page = Counter(), {}
    shared = [(module, name, Once(vars(module)[name], spent)) for module, name in FUNCTIONS]
    shared += [(controller, "deal", Once(controller.deal, spent, 1))]  # the rest is alike
    shared += [(rollout, "DynamicSampler", partial(SharedSampler, page=page, spent=spent))]
    shared += [(rollout, "OrderedSampler", partial(SharedOrderedSampler, page=page, spent=spent))]
    with ExitStack() as stack:
        for module, name, function in shared:
            stack.enter_context(mock.patch.object(module, name, function))
        yield spent
