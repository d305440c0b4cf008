"""The sample: the record that all parts read and fill."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Any, NamedTuple

Key = tuple[int, int]  # prompt_id and index of a sample
REWARD_LIMIT = 1e30  # largest reward or cost: its square, and sums of squares, are finite


class Outcome(NamedTuple):
    """The result of an answer, for comparison within its group."""

    index: int
    length: int  # tokens of the response
    reward: float
    cost: float | None
    greedy: bool


class Reply(NamedTuple):
    """An environment's reply. It is kept apart from the response, so that its tokens aren't trained on."""

    start: int  # how many tokens of the response come before it
    tokens: list[int]  # all tokens between two turns of the policy
    turns: list[dict]  # the same as chat turns


@dataclass(frozen=True)
class Image:
    """An image or clip file. Whoever needs its bytes reads the file again, so that no memory holds them."""

    digest: bytes  # SHA-256 of its bytes
    shape: tuple[int, int, int]  # frames, rows, columns of its features
    token: int  # the placeholder token for each feature
    read: Callable[[], bytes] = field(compare=False, repr=False)

    @property
    def features(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    question: str  # the user's last turn
    answer_key: str | None  # for the accuracy and for rules; judges don't see it
    images: tuple[Image, ...] = field(default=(), compare=False)
    turns: list[dict] = field(default_factory=list)  # as Sample.turns
    row: dict[str, Any] = field(default_factory=dict, compare=False)


@dataclass
class Sample:
    """One answer to one prompt. Comments name the file that fills a field."""

    # data.py
    prompt_id: int
    index: int  # answer number within its group (the answers to one prompt)
    prompt: list[int]
    question: str = ""  # the user's last turn
    answer_key: str | None = None
    media: tuple[Image, ...] = ()  # images of the prompt, in the order of their tokens
    turns: list[dict] = field(default_factory=list)  # in a chat: all turns before the answer
    greedy: bool = False  # a baseline for the rest of its group, not trained on
    row: dict[str, Any] = field(default_factory=dict)  # all columns; never sent or saved
    # rollout.py; the tokens as sampled, because encoding their text may give other tokens
    response: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # under the weights that wrote the token
    # stop | length | lost: finished; abort: it may be continued; turn: the environment is next; empty: the
    # policy is next, at the start and after a reply
    finish: str = ""
    versions: list[int] = field(default_factory=list)  # the weights' version, one per token
    # extras/environment/; `response` has only the policy's own tokens, from all turns
    replies: list[Reply] = field(default_factory=list)
    earned: list[float] = field(default_factory=list)  # the reward of each turn
    noted: list[dict[str, float]] = field(default_factory=list)  # the metrics of each turn
    # rewards.py, which asks the judges of genrm.py
    critique: str = ""
    verdict: bool | None = None  # for reports; `reward` may include more
    reward: float | None = None
    cost: float | None = None
    # the part of each of `earned` in `reward`
    turn_rewards: list[float] = field(default_factory=list)
    # rollout.py; the outcomes of its whole group
    outcomes: list[Outcome] = field(default_factory=list)
    # actor.py, extras/critic.py (by name) and algorithms.py, on the ranks that train; one per
    # response token
    reference_logprobs: list[float] | None = None
    policy_logprobs: list[float] | None = None  # under the weights at the start of the step
    values: dict[str, list[float]] = field(default_factory=dict)
    returns: dict[str, list[float]] = field(default_factory=dict)
    advantages: list[float] | None = None

    @property
    def key(self) -> Key:
        return self.prompt_id, self.index

    def columns(self) -> dict[str, Any]:
        """Return the models' outputs for its tokens, for the ranks that train another model on it."""
        said = {name: vars(self)[name] for name in ("reference_logprobs", "policy_logprobs")}
        return said | {"values": self.values}

    def fill(self, columns: dict[str, Any]) -> None:
        """Add another rank's `columns` that this one lacks."""
        self.values |= columns["values"]
        self.reference_logprobs = self.reference_logprobs or columns["reference_logprobs"]
        self.policy_logprobs = self.policy_logprobs or columns["policy_logprobs"]

    @property
    def is_finished(self) -> bool:
        return self.finish in ("stop", "length", "lost")

    @property
    def is_written(self) -> bool:
        """True if it needs no more tokens from an engine now."""
        return self.is_finished or self.finish == "turn"

    @property
    def tokens(self) -> list[int]:
        """All tokens in the order that models read them: prompt, turns, replies."""
        parts = [part for part, _ in parts_of(self.response, self.replies)]
        return list(chain(self.prompt, *parts))

    @property
    def begun(self) -> int:
        """The number of tokens after the prompt, including replies."""
        return len(self.response) + sum(len(reply.tokens) for reply in self.replies)

    @property
    def last_turn(self) -> list[int]:
        """The response after the last reply."""
        return self.response[self.replies[-1].start :] if self.replies else self.response


@dataclass
class TextSample(Sample):
    """A Sample as rules see it. In an episode `text` is the last turn, and `turns` has all earlier ones."""

    text: str = ""  # the response with its special tokens
    plain_text: str = ""  # the response without them, as judges see it
    prompt_text: str = ""  # everything before `text`, as rendered, with special tokens
    answer: str | None = None  # the final answer in plain_text: see Rewards.final_answer


def parts_of(response: list[int], replies: Iterable[Reply]) -> list[tuple[list[int], bool]]:
    """Divide what follows a prompt into parts, in order: (tokens, whether the policy wrote them)."""
    parts = []
    start = 0
    for place, tokens, _ in replies:
        parts += [(response[start:place], True), (tokens, False)]
        start = place
    return [*parts, (response[start:], True)]


def sample_from_json(row: dict) -> Sample:
    """Read a sample, without images."""
    outcomes = [Outcome(*outcome) for outcome in row["outcomes"]]
    replies = [Reply(*reply) for reply in row["replies"]]
    return Sample(**row | {"outcomes": outcomes, "replies": replies, "media": ()})


def flat(mini_batches: list[list[list]]) -> list:
    """Return all samples (or keys) in mini-batches, which are lists of micro-batches."""
    return [sample for mini_batch in mini_batches for samples in mini_batch for sample in samples]
