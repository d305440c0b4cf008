"""A teacher: --teacher DIR is the reference of the policy's KL, with --algorithm distill all that it
learns from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from build import DIRECTORIES
from config import Config
from reporting.metrics import DETAILS
from sample import Sample
from scheduling.layout import Placement


def check(config: Config, placement: Placement) -> None:
    if config.teacher:
        from extras.teacher.check import check_teacher  # imports Megatron, which takes seconds

        check_teacher(placement.reference.sized(config))


def differences(
    config: Config, sample: Sample, decode: Callable[[list[int]], str]
) -> dict[str, Any]:
    """Return the tokens on which student and teacher differ most, for samples.jsonl."""
    if not config.teacher:
        return {}
    from extras.teacher.check import largest_differences

    found = largest_differences(sample)
    return (
        {"differences": [x._asdict() | {"token": decode([x.token])} for x in found]}
        if found
        else {}
    )


DIRECTORIES.append(check)
DETAILS.append(differences)
