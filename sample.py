"""The record that flows between the roles."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Any, NamedTuple

Key = tuple[int, int]  # prompt_id and index of a sample


class Outcome(NamedTuple):
    """The worth of an answer, with which the rest of its group is compared."""

    index: int
    length: int  # tokens of the response
    reward: float
    cost: float | None
    greedy: bool


class Reply(NamedTuple):
    """A reply of an environment. It stands beside the response, so nothing learns its tokens."""

    start: int  # tokens of the response before it
    tokens: list[int]  # all between the end of the policy's turn and the start of its next
    turns: list[dict]  # what they say, as chat turns


@dataclass(frozen=True)
class Image:
    """A file. Engines are sent its bytes and trainers decode them: it is read anew, and nobody holds them."""

    digest: bytes  # SHA-256 of its bytes
    shape: tuple[int, int, int]  # of its features: frames, rows, columns
    token: int  # that stands for one of them
    read: Callable[[], bytes] = field(compare=False, repr=False)

    @property
    def features(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    question: str  # the last turn of the user
    answer_key: str | None  # for the accuracy and for rules; no judge sees it
    images: tuple[Image, ...] = field(default=(), compare=False)
    turns: list[dict] = field(default_factory=list)  # as Sample.turns
    row: dict[str, Any] = field(default_factory=dict, compare=False)


@dataclass
class Sample:
    """One answer to one prompt. Every field names the file that fills it."""

    # data.py
    prompt_id: int
    index: int  # answer number within its group (the answers to one prompt)
    prompt: list[int]
    question: str = ""  # the last turn of the user
    answer_key: str | None = None
    media: tuple[Image, ...] = ()  # images of the prompt, in the order of their tokens
    turns: list[dict] = field(default_factory=list)  # of a chat of several: all before the answer
    greedy: bool = False  # a baseline for the rest of its group, not trained on
    row: dict[str, Any] = field(default_factory=dict)  # all columns; never sent, nor in a file
    # rollout.py; the tokens as they were sampled: their text, encoded again, may give others
    response: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # by the weights that wrote the token
    # stop | length | lost: finished; abort: it may be continued; turn: the environment is next
    finish: str = ""
    versions: list[int] = field(default_factory=list)  # of those weights; one per token, too
    # environment/; `response` has the policy's own tokens only, of all turns
    replies: list[Reply] = field(default_factory=list)
    earned: list[float] = field(default_factory=list)  # the reward of each turn
    noted: dict[str, list[float]] = field(default_factory=dict)  # its metrics, in their order
    # rewards.py, which asks the judges of genrm.py
    critique: str = ""
    verdict: bool | None = None  # for reports; `reward` has more than that in it
    reward: float | None = None
    cost: float | None = None
    turn_rewards: list[float] = field(default_factory=list)  # what `earned` is of `reward`
    # of its group, itself among them; by rollout.py, before the answers go to different ranks
    outcomes: list[Outcome] = field(default_factory=list)
    # actor.py, critic.py (by name) and algorithms.py, on the ranks that train; one per response token
    reference_logprobs: list[float] | None = None
    policy_logprobs: list[float] | None = None  # by the weights at the start of the step
    values: dict[str, list[float]] = field(default_factory=dict)
    returns: dict[str, list[float]] = field(default_factory=dict)
    advantages: list[float] | None = None

    @property
    def key(self) -> Key:
        return self.prompt_id, self.index

    def columns(self) -> dict[str, Any]:
        """Return what models said of its tokens, for the ranks that train another model on it."""
        said = {name: vars(self)[name] for name in ("reference_logprobs", "policy_logprobs")}
        return said | {"values": self.values}

    def fill(self, columns: dict[str, Any]) -> None:
        """Take another rank's `columns`, those that this one lacks."""
        self.values |= columns["values"]
        self.reference_logprobs = self.reference_logprobs or columns["reference_logprobs"]
        self.policy_logprobs = self.policy_logprobs or columns["policy_logprobs"]

    @property
    def is_finished(self) -> bool:
        return self.finish in ("stop", "length", "lost")

    @property
    def is_written(self) -> bool:
        """True if no engine is to be asked for more of it now."""
        return self.is_finished or self.finish == "turn"

    @property
    def tokens(self) -> list[int]:
        """All tokens in the order in which models read them: prompt, turns, replies."""
        parts = [part for part, _ in parts_of(self.response, self.replies)]
        return list(chain(self.prompt, *parts))

    @property
    def begun(self) -> int:
        """How many tokens follow the prompt, including replies."""
        return len(self.response) + sum(len(reply.tokens) for reply in self.replies)

    @property
    def last_turn(self) -> list[int]:
        """The response from the last reply on."""
        return self.response[self.replies[-1].start :] if self.replies else self.response


def parts_of(response: list[int], replies: Iterable[Reply]) -> list[tuple[list[int], bool]]:
    """Cut what follows a prompt into its parts, in their order: tokens, and whether the policy wrote them."""
    parts = []
    start = 0
    for place, tokens, _ in replies:
        parts += [(response[start:place], True), (tokens, False)]
        start = place
    return [*parts, (response[start:], True)]


def sample_from_json(row: dict) -> Sample:
    """Read a sample, but no images."""
    outcomes = [Outcome(*outcome) for outcome in row["outcomes"]]
    replies = [Reply(*reply) for reply in row["replies"]]
    return Sample(**row | {"outcomes": outcomes, "replies": replies, "media": ()})


def flat(mini_batches: list[list[list]]) -> list:
    """Return all samples (or keys) of mini-batches, which are lists of micro-batches."""
    return [sample for mini_batch in mini_batches for samples in mini_batch for sample in samples]
