"""What bench/modes.py asks of engines: named workloads, from the numbers of prompts and answers alone."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

YATT_TOKENS = 20  # of papers/wechat_yatt.py's texts, that one of `yatt ...` stands for


@dataclass(frozen=True)
class Workload:
    """Lengths in tokens."""

    # of one answer; the first generator is its group's
    length: Callable[[random.Random, random.Random], int]
    judgements: int = 1
    keep: float = 1.0  # part of the groups whose rewards differ
    prompts: int = 16  # of a step
    critique: Callable[[random.Random], int] = lambda critique: 32


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


def log_normal(median: int, sigma: float, most: int) -> Callable[..., int]:
    """Of papers/wechat_yatt.toml's numbers, in our tokens."""

    def length(*texts: random.Random) -> int:
        drawn = round(median / YATT_TOKENS * math.exp(texts[-1].gauss(0.0, sigma)))
        return max(1, min(most // YATT_TOKENS, drawn))

    return length


WORKLOADS = {
    "short": Workload(uniform),
    "tail": Workload(long_tail),
    "tail-judged": Workload(longer_tail, judgements=2),
    "resample": Workload(by_prompt, keep=0.5),
    "judge-heavy": Workload(by_prompt, judgements=4),
}
for part in (1.0, 0.7, 0.5):
    lengths = dict(length=log_normal(600, 1.0, 4096), critique=log_normal(250, 0.5, 1000))
    WORKLOADS[f"yatt {part:g}"] = Workload(**lengths, keep=part, prompts=8)


def length_of(name: str, prompt_id: int, index: int) -> int:
    """Tokens of an answer, the same in every run."""
    group = random.Random(f"{name} {prompt_id}")
    answer = random.Random(f"{name} {(prompt_id, index)}")
    return WORKLOADS[name].length(group, answer)


def critique_of(name: str, prompt_id: int, index: int) -> int:
    """Tokens of each critique of an answer."""
    return WORKLOADS[name].critique(random.Random(f"{name} critique {(prompt_id, index)}"))


def is_kept(name: str, prompt_id: int) -> bool:
    """Whether the rewards of a group differ: half of its answers are right then, else all."""
    return random.Random(f"{name} keep {prompt_id}").random() < WORKLOADS[name].keep
