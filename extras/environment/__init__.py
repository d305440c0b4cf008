"""Multi-turn episodes: the user's environment replies to the policy until it ends the episode.

    class Environment:                              # FILE.py, or FILE.py:Name; one object per episode
        def __init__(self, sample, *, seed): ...    # sample: a copy, as rules get it
        def step(self, text): ...                   # called after each turn of the policy
        def score(self): ...                        # optional: a final reward, even if a limit ended it
        def close(self): ...                        # optional; always called once

`step` returns a Step, or a shorthand:

    a text, or chat turns    a reply (a text is a user turn); the policy continues
    a number                 the final reward; the episode is over
    None                     the episode is over

An episode must depend only on its seed, which all answers to a prompt share, and on the policy's turns:
after a restart, an interrupted episode is replayed up to where it stopped.
"""

from __future__ import annotations

import json
import sys
from asyncio import CancelledError
from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple

from inputs.rows import as_turns, is_chat
from sample import REWARD_LIMIT

OWN_METRICS = ("turns_mean", "tokens", "step_s", "reward_mean", "lost_frac")


class Step(NamedTuple):
    """The environment's response to one turn of the policy. metrics: numbers for environment/NAME."""

    reply: str | dict | list[dict] | None = None
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = {}


def is_number(value: Any) -> bool:
    """Return whether a value is a number within REWARD_LIMIT. A bool isn't: users mean `done` by one."""
    return isinstance(value, Real) and not isinstance(value, bool) and abs(value) <= REWARD_LIMIT


def read_step(value: Any) -> Step:
    """Convert what `step` returned to a Step, replies as chat turns. Raises ValueError if it is invalid."""
    if isinstance(value, bool):
        raise ValueError("a bool isn't a reward; Step(done=True) ends an episode")
    if value is None or isinstance(value, Real):
        value = Step(reward=0.0 if value is None else value, done=True)
    step = value if isinstance(value, Step) else Step(value)
    if not is_number(step.reward):
        raise ValueError(f"a reward is a number, at most {REWARD_LIMIT:g}")
    if not isinstance(step.done, bool):
        raise ValueError("done is True or False")
    metrics = step.metrics if isinstance(step.metrics, Mapping) else {0: 0}
    for name, number in metrics.items():
        is_name = isinstance(name, str) and name.isprintable() and name not in OWN_METRICS
        if not (is_name and is_number(number)):
            raise ValueError(f"metrics map names to numbers, none of {', '.join(OWN_METRICS)}")
    return step._replace(reply=None if step.done else read_reply(step.reply))


def read_reply(reply: Any) -> list[dict]:
    """Return a copy of a reply's turns. Raises ValueError if no chat template can render them."""
    turns = [reply] if isinstance(reply, dict) else as_turns(reply, "user")
    if not (is_chat(turns) and turns and turns[-1]["role"] in ("user", "tool")):
        raise ValueError("a Step, a text, chat turns, a number or None is needed")
    if any(turn["role"] == "assistant" or "tool_calls" in turn for turn in turns):
        raise ValueError("the assistant's turns and tool calls are the policy's")
    try:
        return json.loads(json.dumps(turns, ensure_ascii=False).encode())
    except (TypeError, RecursionError):
        raise ValueError("turns may hold only JSON values, not nested too deeply") from None


# `is_mistake` in a line
RULE = " (Python's own errors end the run; a library's, ConnectionError and TimeoutError lose an episode)"


def is_mistake(error: BaseException) -> bool:
    """Return whether an error in a user's class ends the run; any other one only loses its episode.

    A wrong line of code raises one of Python's own classes, and would never be found if that lost episodes;
    so does text that json and other parsers of Python's can't read, which is often the policy's. What fails
    around the code (servers, processes) raises a library's, or Python's two for connections.
    """
    if isinstance(error, ConnectionError | TimeoutError):
        return False
    module = type(error).__module__
    # ssl's errors are both
    if isinstance(error, ValueError | ArithmeticError | LookupError) and not isinstance(
        error, OSError
    ):
        return module.partition(".")[0] in sys.stdlib_module_names
    return module == "builtins" or isinstance(error, CancelledError)
