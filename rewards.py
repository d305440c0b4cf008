"""Rewards and costs of answers, from judges, rules (functions of an answer) and an environment."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from statistics import fmean
from typing import NamedTuple, Protocol

from config import Config
from engines.pool import Pool
from genrm import FORMATS, Judge, Judgement, formats_of
from inputs.rows import as_turns
from runtime.errors import UserError
from runtime.hooks import needed
from sample import Sample, TextSample

MAX_FAILURES = 64  # they end the run if a judge or an environment hasn't succeeded yet
Decode = Callable[..., str]  # the policy's tokens -> text, as tokenization.decode


def exact_match(sample: TextSample, how: str) -> float:
    """Return 1 if the final answer (`right`) or last number (`number`) equals the answer key's, else 0."""
    answer = sample.answer
    key = sample.answer_key
    if how == "number":
        answer = FORMATS[how].answer_of(sample.plain_text, sample.finish)
        key = FORMATS[how].read_key(key or "")
    if key is None:
        raise UserError(
            f"the rule {how}: the prompt {sample.question[:60]!r} has no `answer` to compare with"
        )
    return float(answer == key)


# pattern of --rule -> its function, which also takes the pattern's groups; read before engines start
RULES = {
    r"(?P<how>right|number)": exact_match,
    # `length:40`: the number of tokens, divided by 40; `forbidden:7`: 1 if the text contains a 7, else 0
    r"length:(?P<tokens>[1-9]\d{,17})": lambda sample, tokens: len(sample.response) / int(tokens),
    r"forbidden:(?P<text>.+)": lambda sample, text: float(text in sample.plain_text),
}


class Rule(NamedTuple):
    """A function that scores answers: a row of RULES, or one from a user's file.

    A rule that returns None doesn't apply to the answer, which the others score; if none applies, the answer
    is dropped. It is also dropped if a Judgement has the value None: then a verdict couldn't be read.
    """

    signal: str  # what its number is a part of: "reward" or "cost"
    judge: Callable[[TextSample], Awaitable[Judgement | None]]


async def judge_by_row(
    title: str, function: Callable[[TextSample], float], sample: TextSample
) -> Judgement:
    """Apply a row of RULES."""
    value = function(sample)
    return Judgement(f"{title}: {value}", value)


def load(signal: str, spec: str, timeout_s: float) -> Rule:
    """Return a rule from RULES or a user's file, which is executed. Raises UserError if it can't be used."""
    title = f"{'--rule' if signal == 'reward' else '--cost-rule'} {spec}"
    for pattern, function in RULES.items():
        if match := re.fullmatch(pattern, spec, re.DOTALL):
            return Rule(
                signal, partial(judge_by_row, title, partial(function, **match.groupdict()))
            )
    load_file = needed("rule_file", title)
    return Rule(signal, load_file(title, spec, signal, timeout_s).judge)


async def judge_episode(sample: TextSample) -> Judgement:
    """Return the sum of the rewards that an episode's turns earned."""
    earned = round(math.fsum(sample.earned), 9)
    return Judgement(f"--environment: {earned}", earned)


ENVIRONMENT = Rule("reward", judge_episode)


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the mean, rounded: 0.1 + 0.2 isn't 0.3 in floats, but equal rewards must have no variance."""
    return round(sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights), 9)


class Counted(Protocol):
    """Whatever scores answers and may fail: a judge, an environment."""

    failed: int  # since the run's start
    succeeded: int

    def never_succeeded(self, failures: int) -> UserError: ...


class Rewards:
    """Judges, rules and their judgements. In a step, a judge is asked only once about identical pairs."""

    def __init__(self, config: Config, judges: list[Judge], rules: list[Rule], decode: Decode):
        self.judges = judges
        self.counted: list[Counted] = [*judges]  # MAX_FAILURES of one end the run
        self.rules = rules
        self._sources: list[Judge | Rule] = [*judges, *rules]
        of_reward = [source for source in self._sources if source.signal == "reward"]
        given = zip(of_reward, config.reward_weights, strict=False)
        self._weights = dict.fromkeys(self._sources, 1.0) | dict(given)
        self._decode = decode
        self._format = formats_of(config)[0]
        self._tasks: dict[tuple, asyncio.Task[Judgement]] = {}  # this step's, by question

    def reset(self) -> None:
        """Start a step: forget earlier judgements, because the engines may have changed."""
        assert all(task.done() for task in self._tasks.values()), "a judgement outlived its step"
        self._tasks.clear()
        for judge in self.judges:
            judge.latencies.clear()

    async def score(self, sample: Sample, pool: Pool) -> None:
        """Fill a finished sample's critique, verdict, reward and cost. All judges are asked at once.

        The reward stays None, which drops the sample, in three cases: its episode is lost; a value can't be
        read; or nothing with a weight applies to it.
        """
        if sample.finish == "lost":
            return
        # shielded from this task's end, because another sample may wait for the same judgement
        found = await asyncio.gather(*map(asyncio.shield, self._judgements(sample, pool)))
        judgements = dict(zip(self._sources, found, strict=True))
        # a rule that doesn't apply returns None
        judgements = {source: one for source, one in judgements.items() if one is not None}
        sample.critique = self._joined_critiques([one.critique for one in judgements.values()])
        values = {source: one.value for source, one in judgements.items()}
        if None in values.values():
            return  # the mean of the other values would have a different scale
        # each signal needs a judgement that counts
        weighted_signals = {source.signal for source in values if self._weights[source]}
        if weighted_signals != {source.signal for source in self._sources}:
            return
        of_reward = [source for source in values if source.signal == "reward"]
        weights = [self._weights[source] for source in of_reward]
        sample.reward = 0.0  # if the run only has a teacher
        if of_reward:
            sample.reward = weighted_mean([values[source] for source in of_reward], weights)
            part = self._weights.get(ENVIRONMENT, 0.0) / sum(weights)
            sample.turn_rewards = [part * earned for earned in sample.earned]
        costs = [value for source, value in values.items() if source.signal == "cost"]
        sample.cost = math.fsum(costs) if costs else None
        verdicts = [values[judge] for judge in self.judges if judge.gives_verdict]
        sample.verdict = fmean(verdicts) > 0.5 if verdicts else None

    def _joined_critiques(self, critiques: list[str]) -> str:
        """Join a sample's critiques, the judges' first; with several judges each is named by its number."""
        if len(self.judges) > 1:
            for number in range(len(self.judges)):
                critiques[number] = f"judge {number}:\n{critiques[number]}"
        return "\n".join(filter(None, critiques))

    async def cancel(self) -> None:
        """Cancel unfinished judgements, and wait until they end. A later request asks again."""
        running = {key: task for key, task in self._tasks.items() if not task.done()}
        for key, task in running.items():
            del self._tasks[key]
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)

    def final_answer(self, sample: Sample) -> str | None:
        """Return the final answer as the first judge reads it; None if it is missing or cut off."""
        return self._format.answer_of(self._decode(sample.last_turn), sample.finish)

    def _judgements(self, sample: Sample, pool: Pool) -> list[asyncio.Task[Judgement]]:
        """Return each judge's and rule's task, either an existing one or a new one."""
        text = self._decode(sample.last_turn)
        prompt = turns_before(sample, self._decode) or sample.question
        asks = {}
        for judge in self.judges:
            kind = judge.format
            shown = text if kind.full_response else kind.answer_of(text, sample.finish)
            is_cut = kind.is_scalar and sample.finish != "stop"  # only these judges use it
            ask = partial(judge.judge, prompt, shown, pool, sample.media, is_cut)
            asks[judge, str(prompt), shown, sample.media, is_cut] = ask
        for number, rule in enumerate(self.rules):
            seen = seen_by_rules(sample, self._decode)
            seen.answer = self._format.answer_of(text, sample.finish)
            asks[number, *sample.key] = partial(rule.judge, seen)
        for key, ask in asks.items():
            if key not in self._tasks:
                self._tasks[key] = asyncio.create_task(ask())
        return [self._tasks[key] for key in asks]

    @property
    def latencies(self) -> list[float]:
        return [seconds for judge in self.judges for seconds in judge.latencies]

    def counts(self) -> tuple[list[int], list[int]]:
        """Return the failures and successes of each judge (and environment) since the run's start."""
        return [each.failed for each in self.counted], [each.succeeded for each in self.counted]

    def load_counts(self, counts: list[tuple[list[int], list[int]]]) -> None:
        """Load the `counts` of several controllers, which are added up."""
        for number, each in enumerate(self.counted):
            each.failed = sum(failed[number] for failed, _ in counts)
            each.succeeded = sum(succeeded[number] for _, succeeded in counts)

    def check(self, failed: list[int], succeeded: list[int]) -> None:
        """Raise UserError if one has MAX_FAILURES and no success, given the sums over all controllers."""
        for each, failures, successes in zip(self.counted, failed, succeeded, strict=True):
            if successes == 0 and failures >= MAX_FAILURES:
                raise each.never_succeeded(failures)


def seen_by_rules(sample: Sample, decode: Decode) -> TextSample:
    """Return the sample with its texts, but without a final answer."""
    last = sample.last_turn
    earlier = sample.tokens[: len(sample.prompt) + sample.begun - len(last)]
    texts = {"text": decode(last, special=True), "plain_text": decode(last)}
    texts["prompt_text"] = decode(earlier, special=True)
    fields = vars(sample) | {"turns": turns_before(sample, decode)}
    return TextSample(**fields, **texts)


def turns_before(sample: Sample, decode: Decode) -> list[dict]:
    """Return the chat turns before the last one of an episode, or Sample.turns if it isn't an episode."""
    if not sample.replies:
        return sample.turns
    turns = [*(sample.turns or as_turns(sample.question, "user"))]
    start = 0
    for place, _, reply in sample.replies:
        turns += [*as_turns(decode(sample.response[start:place]), "assistant"), *reply]
        start = place
    return turns


def load_rules(config: Config) -> list[Rule]:
    """Return all rules. Raises UserError if one can't be used."""
    rules = [load("reward", spec, config.timeout_s) for spec in config.rule]
    rules += [ENVIRONMENT] if config.environment else []
    return rules + [load("cost", spec, config.timeout_s) for spec in config.cost_rule]


def build(
    config: Config, rules: list[Rule], tokenizers: list, decode: Decode, readers: Sequence = ()
) -> Rewards:
    """Make the judges and Rewards. tokenizers, readers (ImageReader or None): one per judge."""
    models = zip(tokenizers, readers or [None] * len(tokenizers), strict=True)
    judges = [Judge(config, number, *model) for number, model in enumerate(models)]
    return Rewards(config, judges, rules, decode)
