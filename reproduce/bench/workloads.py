"""The loads of reproduce/bench/modes.py: named workloads, and the sides that alternate on them."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

PROMPTS = 16  # per step
ANSWERS = 8  # per prompt


class Side(NamedTuple):
    """Some steps of a workload under one split, or under several between which it may move."""

    workload: str
    name: str
    repeat: int
    plans: list[str]  # splits, formatted as by `Split`; the first one begins
    steps: int


@dataclass(frozen=True)
class Workload:
    """The lengths of a workload, in tokens."""

    # one answer's length; the first generator is its group's
    length: Callable[[random.Random, random.Random], int]
    critique: int = 32
    keep: float = 1.0  # fraction of groups with differing rewards


def uniform(group: random.Random, answer: random.Random) -> int:
    """Return 22 to 26."""
    return answer.randint(22, 26)


def long_tail(group: random.Random, answer: random.Random) -> int:
    """Return 10 to 20, or 80 to 100 for one answer in forty."""
    return answer.randint(80, 100) if answer.random() < 0.025 else answer.randint(10, 20)


def longer_tail(group: random.Random, answer: random.Random) -> int:
    """Return 20 to 40, or 160 to 200 for one answer in forty."""
    return 2 * long_tail(group, answer)


def by_prompt(group: random.Random, answer: random.Random) -> int:
    """Return 8 to 60: prompts differ, and the answers of one prompt are within about a quarter."""
    return round(group.uniform(10, 48) * answer.uniform(0.8, 1.25))


WORKLOADS = {
    "short": Workload(uniform),
    "tail": Workload(long_tail),
    "tail-judged": Workload(longer_tail, critique=52),
    "resample": Workload(by_prompt, keep=0.5),
    "judge-heavy": Workload(by_prompt, critique=96),
}


def length_of(name: str, prompt_id: int, index: int) -> int:
    """Return the tokens of an answer, the same in every run."""
    group = random.Random(f"{name} {prompt_id}")
    answer = random.Random(f"{name} {(prompt_id, index)}")
    return WORKLOADS[name].length(group, answer)


def is_kept(name: str, prompt_id: int) -> bool:
    """Return True if the rewards of a group differ. Then half of its answers are right, otherwise all."""
    return random.Random(f"{name} keep {prompt_id}").random() < WORKLOADS[name].keep
