"""Schedules: the order in which models run the passes of an optimizer step. Pure.

Here every rank has whole stages to itself. extras/pipelines adds schedules of stages on several ranks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from config import Config
from runtime.errors import UserError


class Schedule(NamedTuple):
    """A value of --schedule. A work is a model's training.passes.Work."""

    run: Callable[[list[Any]], None]  # works of one optimizer step, of models that learn together
    fuses: bool = False  # actor and critics learn together, with the critics' pipelines reversed


def in_turn(works: list[Any]) -> None:
    """Run one model's passes after another's."""
    for work in works:
        work.run()


# trainers look a row up to run passes, the controller to know which models learn together
SCHEDULES = {"": Schedule(in_turn)}


def schedule_of(config: Config) -> Schedule:
    """Return the row of --schedule, by default 1f1b with --pp. Raises UserError if there is none."""
    name = config.schedule or ("1f1b" if config.pp > 1 else "")
    if name not in SCHEDULES:
        raise UserError(f"--schedule {name} (--pp {config.pp}): no extra has the row {name!r}")
    return SCHEDULES[name]
