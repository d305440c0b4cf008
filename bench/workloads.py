"""The loads of bench/modes.py: named workloads, and the sides that take turns on them."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

PROMPTS = 16  # of a step
ANSWERS = 8  # of a prompt


class Side(NamedTuple):
    """Some steps of a workload under one split, or under those to which it may move."""

    workload: str
    name: str
    repeat: int
    plans: list[str]  # as `Split` writes them; the first one begins
    steps: int


@dataclass(frozen=True)
class Workload:
    """Lengths in tokens."""

    # of one answer; the first generator is its group's
    length: Callable[[random.Random, random.Random], int]
    critique: int = 32
    keep: float = 1.0  # part of the groups whose rewards differ


def uniform(group: random.Random, answer: random.Random) -> int:
    """22 to 26."""
    return answer.randint(22, 26)


def long_tail(group: random.Random, answer: random.Random) -> int:
    """Most between 10 and 20; one in forty from 80 to 100: ten times the shortest."""
    return answer.randint(80, 100) if answer.random() < 0.025 else answer.randint(10, 20)


def longer_tail(group: random.Random, answer: random.Random) -> int:
    """Twice as long: most between 20 and 40, one in forty from 160 to 200."""
    return 2 * long_tail(group, answer)


def by_prompt(group: random.Random, answer: random.Random) -> int:
    """8 to 60: some prompts have long answers, and those of one prompt differ by a quarter."""
    return round(group.uniform(10, 48) * answer.uniform(0.8, 1.25))


WORKLOADS = {
    "short": Workload(uniform),
    "tail": Workload(long_tail),
    "tail-judged": Workload(longer_tail, critique=52),
    "resample": Workload(by_prompt, keep=0.5),
    "judge-heavy": Workload(by_prompt, critique=96),
}


def length_of(name: str, prompt_id: int, index: int) -> int:
    """Tokens of an answer, the same in every run."""
    group = random.Random(f"{name} {prompt_id}")
    answer = random.Random(f"{name} {(prompt_id, index)}")
    return WORKLOADS[name].length(group, answer)


def is_kept(name: str, prompt_id: int) -> bool:
    """True if the rewards of a group differ: half of its answers are right then, else all."""
    return random.Random(f"{name} keep {prompt_id}").random() < WORKLOADS[name].keep
