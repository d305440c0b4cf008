"""Pipelines, with stages of a model on several ranks: --pp above 1, and --schedule."""

from collections.abc import Callable
from functools import partial
from typing import Any

from extras.pipelines.fused import fused
from extras.pipelines.tables import Pipe, Table, one_after_another
from scheduling.pipeline import SCHEDULES, Schedule


def run(table: Callable[[list[Pipe]], Table], works: list[Any]) -> None:
    """Run all works as one table: see executor.run."""
    from extras.pipelines import executor  # imports Megatron, which takes seconds

    executor.run(works, table)


SCHEDULES["1f1b"] = Schedule(partial(run, one_after_another))
SCHEDULES["fused"] = Schedule(partial(run, fused), fuses=True)
