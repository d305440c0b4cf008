"""Trivial predictors with the same fitted points as the simulation, and whether the simulation beats them.

A prediction has skill only if it is nearer than what anybody would guess from the same points.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from reproduce.papers.tables import Row, percent


def power_law(known: list[tuple[float, ...]]) -> Callable[..., float | None]:
    """Fit y = k * a**p * b**q ... to rows of (a, b, ..., y), by least squares of logarithms.

    Returns a function of (a, b, ...), which returns None if there are fewer rows than constants.
    """
    logs = np.log(np.array(known or [(1.0, 1.0)]))
    inputs = np.column_stack([np.ones(len(logs)), logs[:, :-1]])
    powers, *_ = np.linalg.lstsq(inputs, logs[:, -1])

    def law(*at: float) -> float | None:
        if len(known) <= len(at):
            return None
        return float(np.exp(powers @ [1.0, *map(math.log, at)]))

    return law


class Spread(NamedTuple):
    """Errors of rows: median and 90th percentile without sign, and the largest with its sign."""

    median: float
    ninth: float
    largest: float

    def __str__(self) -> str:
        return f"{percent(self.median, '.1f')} ({percent(self.largest, '+.1f')})"


def spread(errors: tuple[float, ...]) -> Spread:
    median, ninth = np.percentile(np.abs(errors), [50, 90])
    return Spread(float(median), float(ninth), max(errors, key=abs))


class Skill(NamedTuple):
    """How near predicted rows are, beside a trivial predictor."""

    count: int
    simulated: Spread
    trivial: Spread
    closer: int  # rows in which the simulation is nearer

    def __str__(self) -> str:
        both = f"median error {self.simulated}, the trivial predictor's {self.trivial}"
        return f"{both}; closer in {self.closer} of {self.count}"


def skill(rows: Iterable[Row]) -> Skill | None:
    """Compare the predicted rows that have both errors; None without any."""
    own = [row for row in rows if row.kind == "predicted"]
    both = [(row.error, row.error_of("trivial")) for row in own if row.error is not None]
    both = [errors for errors in both if errors[1] is not None]
    if not both:
        return None
    closer = sum(abs(ours) < abs(trivial) for ours, trivial in both)
    return Skill(len(both), *map(spread, zip(*both, strict=True)), closer)
