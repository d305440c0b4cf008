"""Rewards and costs from rules: Python functions of one answer, mixed with the judges of genrm.py by weights.

A rule is `reward(sample) -> float`, a row of `RULES` or a function in the user's own file, which runs because the user named it. It
sees a `TextSample`. It may be `async`, to ask a server of its own: other answers are written and judged meanwhile.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
import sys
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from numbers import Real
from pathlib import Path

from genrm import BACKOFF_S, LONGEST_BACKOFF_S, weigh
from sample import Sample


@dataclass
class TextSample(Sample):
    """A Sample as a rule sees it. To be read only: its lists are the run's own. It has no reward yet."""

    text: str = ""  # of the response
    answer: str | None = None  # the final answer in it, as the first judge's format reads it; None: it has none or was cut off


Function = Callable[[TextSample], float | Awaitable[float]]


# ---------------------------------------------------------------- rules that are there: (what stands behind the colon) -> function


def right(argument: str) -> Function:
    """`right`: 1 if the final answer is the answer key, else 0. ValueError for a prompt without one."""
    if argument:
        raise ValueError("it takes nothing behind a colon")

    def equals_key(sample: TextSample) -> float:
        if sample.answer_key is None:
            raise ValueError(f"no `answer` beside the prompt {sample.question[:60]!r}: there is nothing to compare with")
        return float(sample.answer == sample.answer_key)

    return equals_key


def length(argument: str) -> Function:
    """`length:40`: tokens of the answer over 40."""
    tokens = int(argument)
    if tokens < 1:
        raise ValueError("a number above 0 is needed")
    return lambda sample: len(sample.response) / tokens


def forbidden(argument: str) -> Function:
    """`forbidden:7`: 1 if the answer's text has a 7 (any text will do), else 0."""
    if not argument:
        raise ValueError("the text that is forbidden is needed")
    return lambda sample: float(argument in sample.text)


RULES = {"right": right, "length": length, "forbidden": forbidden}
DEFAULTS = {"--rule": "reward", "--cost-rule": "cost"}  # the function that is meant if the user names only the file


# ---------------------------------------------------------------- how a rule is named, and called


@dataclass(frozen=True)
class Rule:
    """One rule: where it was named, as messages have it (`--rule my.py:score`), and its function."""

    title: str
    function: Function
    file: str = ""  # the user's, to say which line of it is at fault

    def read(self, value) -> float:
        """A result as a number. Raises ValueError if it is none, or not finite."""
        if not isinstance(value, Real) or not math.isfinite(value):
            raise ValueError(f"{self.title} returned {value!r}: a finite number is needed")
        return float(value)

    def at_fault(self, error: BaseException) -> ValueError:
        """One line for an exception of the user's code: file, line, what."""
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if self.file and frame.filename == self.file]
        where = f" ({self.file}:{lines[-1]})" if lines else ""
        return ValueError(f"{self.title}{where}: {type(error).__name__}: {' '.join(str(error).split())}")


def load(option: str, spec: str) -> Rule:
    """The rule `right`, `length:40`, `my.py` (its function `reward`, or `cost` for --cost-rule) or `my.py:name`.

    Runs the file. Raises ValueError in one line for what can't be used.
    """
    title = f"{option} {spec}"
    name, _, argument = spec.partition(":")
    if name in RULES:
        try:
            return Rule(title, RULES[name](argument))
        except ValueError as error:
            raise ValueError(f"{title}: {error}") from None
    path, _, name = (spec, "", DEFAULTS[option]) if spec.endswith(".py") else spec.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise ValueError(f"{title}: no such file, nor one of the rules {', '.join(RULES)}; expected FILE.py or FILE.py:name")
    rule = Rule(title, lambda sample: 0.0, str(Path(path).resolve()))
    found = importlib.util.spec_from_file_location(f"rule_{Path(path).stem}", rule.file)
    module = sys.modules[found.name] = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except SyntaxError as error:
        raise ValueError(f"{title} ({path}:{error.lineno}): SyntaxError: {error.msg}") from None
    except Exception as error:  # whatever the user's code may raise: it is his, and this is where it is told
        raise rule.at_fault(error) from None
    function = vars(module).get(name)
    if not callable(function):
        raise ValueError(f"{title}: {path} has no function {name}(sample)")
    return Rule(title, function, rule.file)


class Rules:
    """All rules of a run, none by default, and their part in a sample's reward. The cost rules' numbers are added to its cost."""

    def __init__(
        self, rewards: tuple[Rule, ...] = (), costs: tuple[Rule, ...] = (), weights: tuple[float, ...] = (), judges: bool = True,
        read: Callable[[Sample], tuple[str, str | None]] = lambda sample: ("", None), retries: int = 2, timeout_s: float = math.inf,
        most_failures: int = 64,
    ):  # fmt: skip
        """weights: of the judges together, if there are any, then of each of `rewards`. read: a sample's text and final answer.

        most_failures: stop when a rule couldn't be asked so many times and never could.
        """
        self.rewards, self.costs, self.judges, self.weights = rewards, costs, judges, weights
        self._read, self._retries, self._timeout_s, self._most_failures = read, retries, timeout_s, most_failures
        self._answered, self._given_up = Counter(), Counter()  # by rule, since the run's start
        self._calls: set[asyncio.Task] = set()

    async def ask(self, sample: Sample) -> list[float | None]:
        """What each rule says of a finished answer, then each cost rule; None of one that couldn't be asked."""
        if not self.rewards + self.costs:
            return []
        text, answer = self._read(sample)
        seen = TextSample(**vars(sample) | {"text": text, "answer": answer})
        calls = [asyncio.create_task(self._ask(rule, seen)) for rule in self.rewards + self.costs]
        self._calls.update(calls)
        for call in calls:
            call.add_done_callback(self._calls.discard)
        return await asyncio.gather(*calls)

    def mix(self, sample: Sample, said: list[float | None]) -> None:
        """Fill `reward` and `cost` of a judged sample from what `ask` returned, at once with the judges' reward.

        The reward is the weighted mean. A sample that one of them has nothing to say of has none: it is dropped, not scored 0.
        """
        count = len(self.rewards)
        if self.rewards:
            rewards = [sample.reward] * self.judges + said[:count]
            sample.reward = weigh(rewards, self.weights or (1.0,) * len(rewards))
        if self.costs and None not in said[count:]:
            sample.cost = math.fsum([sample.cost or 0.0, *said[count:]])  # the judges' is there already
        lines = [f"{rule.title}: {value}" for rule, value in zip(self.rewards + self.costs, said, strict=True)]
        sample.critique = "\n".join(filter(None, (sample.critique, *lines)))
        if None in said or sample.reward is None:
            sample.reward = sample.cost = sample.verdict = None

    async def cancel(self) -> None:
        """Cancel every call that isn't finished, and return when none runs. Samples that wait for one get CancelledError."""
        for task in (calls := list(self._calls)):
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    async def _ask(self, rule: Rule, sample: TextSample) -> float | None:
        """One rule's word, asked 1 + retries times while it can't be reached: it raises ConnectionError or TimeoutError, or is late.

        Raises ValueError for any other exception, which is an error of the rule's.
        """
        for attempt in range(1 + self._retries):
            try:
                value = rule.function(sample)
                if inspect.isawaitable(value):
                    value = await asyncio.wait_for(value, None if math.isinf(self._timeout_s) else self._timeout_s)
            except (ConnectionError, TimeoutError):
                if attempt < self._retries:
                    await asyncio.sleep(min(BACKOFF_S * 2**attempt, LONGEST_BACKOFF_S))
                continue
            except Exception as error:  # whatever the user's code may raise: it is his, and this is where it is told
                raise rule.at_fault(error) from None
            self._answered[rule] += 1
            return rule.read(value)
        self._given_up[rule] += 1
        if not self._answered[rule] and self._given_up[rule] >= self._most_failures:
            count = self._given_up[rule]
            raise ValueError(f"{rule.title} couldn't be asked about any of the first {count} answers (--max-judge-failures)")
        return None


def build(config, judge, decode: Callable[[list[int]], str]) -> Rules:
    """The rules that the settings name. Runs their files. ValueError as from `load`."""
    rewards, costs = (
        tuple(map(partial(load, option), specs)) for option, specs in (("--rule", config.rule), ("--cost-rule", config.cost_rule))
    )

    def read(sample: Sample) -> tuple[str, str | None]:
        return decode(sample.response), judge.final_answer(sample)

    how = (config.judge_retries, config.judge_timeout_s, config.max_judge_failures)
    return Rules(rewards, costs, config.reward_weights, config.judges > 0, read, *how)
