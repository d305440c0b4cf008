"""The record that flows between the roles: one answer to one prompt."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Sample:
    """One answer to one prompt; the only record that flows between the roles. Every field names who fills it.

    Token ids are exactly those that were sampled: text is for people and judges; decoded and encoded again, it gives others.
    """

    # data.py
    prompt_id: int
    index: int  # answer number within its group (the answers to one prompt)
    prompt: list[int]
    question: str = ""  # what the judge is shown
    answer_key: str | None = None
    media: list = field(default_factory=list)  # images; travel with the sample, point to point
    greedy: bool = False  # written greedily, as a baseline for the others of its group, and not trained on
    # rollout.py
    response: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # one per response token, under the weights that wrote it
    finish: str = ""  # stop | length | abort
    versions: list[int] = field(default_factory=list)  # weight version that wrote each response token
    # genrm.py
    critique: str = ""
    verdict: bool | None = None
    reward: float | None = None
    cost: float | None = None  # by a judge of costs; rewards.py adds the rules' parts to both
    baseline: float = 0.0  # taken off the reward; by algorithms.py
    # reference.py, critic.py (by name) and algorithms.py, on the ranks that train; one per response token
    reference_logprobs: list[float] | None = None
    values: dict[str, list[float]] = field(default_factory=dict)
    returns: dict[str, list[float]] = field(default_factory=dict)
    advantages: list[float] | None = None
