"""The record that flows between the roles."""

from dataclasses import dataclass, field

from images.tokens import Image

Key = tuple[int, int]  # prompt_id and index of a sample


@dataclass
class Sample:
    """One answer to one prompt. Every field names who fills it.

    Token ids are those that were sampled: text is for people and judges; encoded again, it gives others.
    """

    # data.py
    prompt_id: int
    index: int  # answer number within its group (the answers to one prompt)
    prompt: list[int]
    question: str = ""  # the last turn of the user
    answer_key: str | None = None
    media: tuple[Image, ...] = ()  # images of the prompt, in the order of their tokens
    turns: list[dict] = field(default_factory=list)  # of a chat of several: all before the answer
    greedy: bool = False  # a baseline for the others of its group, not trained on
    # rollout.py
    response: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # by the weights that wrote the token
    finish: str = ""  # stop | length: finished; abort: it may be continued
    versions: list[int] = field(default_factory=list)  # of those weights; one per token, too
    # rewards.py, which asks the judges of genrm.py
    critique: str = ""
    verdict: bool | None = None
    reward: float | None = None
    cost: float | None = None
    baseline: float = 0.0  # taken off the reward; by algorithms.py
    # of its signals in its group; by algorithms.py
    scores: dict[str, float] = field(default_factory=dict)
    # actor.py, critic.py (by name) and algorithms.py, on the ranks that train; one per response token
    reference_logprobs: list[float] | None = None
    policy_logprobs: list[float] | None = None  # by the weights at the start of the step
    values: dict[str, list[float]] = field(default_factory=dict)
    returns: dict[str, list[float]] = field(default_factory=dict)
    advantages: list[float] | None = None

    @property
    def key(self) -> Key:
        return self.prompt_id, self.index

    @property
    def is_finished(self) -> bool:
        return self.finish in ("stop", "length")
