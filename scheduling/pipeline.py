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


WHOLE = Schedule(in_turn)  # with --pp 1: a stage is the whole model

# --schedule -> its row, for stages on several ranks. Trainers look it up to run passes, the controller to
# know which models learn together
SCHEDULES: dict[str, Schedule] = {}


def schedule_of(config: Config) -> Schedule:
    """Return the schedule of an optimizer step's passes. Raises UserError if there is none."""
    if config.pp == 1 and config.schedule == "1f1b":
        return WHOLE
    if config.schedule not in SCHEDULES:
        raise UserError(
            f"--schedule {config.schedule} with --pp {config.pp}: no extra has the row "
            f"{config.schedule!r}"
        )
    return SCHEDULES[config.schedule]
