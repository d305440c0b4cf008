"""Episodes of several turns: an environment, the user's, answers the policy until it ends the episode.

    class Environment:                              # FILE.py, or FILE.py:Name; one object is one episode
        def __init__(self, sample, *, seed): ...    # sample: a copy, as a rule sees it
        def step(self, text): ...                   # a turn of the policy has ended
        def score(self): ...                        # optional: a reward at the end, even after a limit
        def close(self): ...                        # optional; always called once

`step` returns a Step, or in short:

    a text, or chat turns    a reply (a text is the user's turn): the policy goes on
    a number                 the last reward: the episode is over
    None                     it is over

An episode follows from its seed, which all answers to a prompt share, and from the policy's turns. After a
restart one that was cut off is played again up to where it was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from numbers import Real
from typing import Any, NamedTuple

from inputs.rows import as_turns, is_chat

OWN_METRICS = ("turns_mean", "tokens", "step_s", "reward_mean", "lost_frac")


class Step(NamedTuple):
    """What a turn of the policy leads to: a reply, or the end. metrics: numbers for environment/NAME."""

    reply: str | dict | list[dict] | None = None
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = {}


def is_number(value: Any) -> bool:
    """True for a finite number. A bool is none: people mean `done`."""
    with suppress(OverflowError):  # no float holds every int
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    return False


def read_step(value: Any) -> Step:
    """Read what `step` returned; a reply as chat turns. ValueError, which says what is wrong."""
    if isinstance(value, bool):
        raise ValueError("a bool is no reward; Step(done=True) ends an episode")
    if value is None or isinstance(value, Real):
        value = Step(reward=0.0 if value is None else value, done=True)
    step = value if isinstance(value, Step) else Step(value)
    if not is_number(step.reward):
        raise ValueError("a reward is a finite number")
    if not isinstance(step.done, bool):
        raise ValueError("done is True or False")
    metrics = step.metrics if isinstance(step.metrics, Mapping) else {0: 0}
    for name, number in metrics.items():
        if not (isinstance(name, str) and name not in OWN_METRICS and is_number(number)):
            raise ValueError(f"metrics map names to numbers, none of {', '.join(OWN_METRICS)}")
    return step._replace(reply=None if step.done else read_reply(step.reply))


def read_reply(reply: Any) -> list[dict]:
    """Return a copy of a reply's turns. ValueError for what no chat template can write."""
    turns = [reply] if isinstance(reply, dict) else as_turns(reply, "user")
    if not (is_chat(turns) and turns and turns[-1]["role"] in ("user", "tool")):
        raise ValueError("a Step, a text, chat turns, a finite number or None is needed")
    if any(turn["role"] == "assistant" for turn in turns):
        raise ValueError("the assistant's turns are the policy's")
    try:
        return json.loads(json.dumps(turns, ensure_ascii=False).encode())
    except TypeError:
        raise ValueError("turns hold what JSON has words for") from None
