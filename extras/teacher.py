"""A teacher: a separate model that serves as the reference for the policy's KL.

With the algorithm `distill` a token's advantage is log p_teacher - log p_student: the student moves toward
the teacher in states that it reaches itself (On-Policy Distillation, Thinking Machines, 2025; GKD, arXiv
2306.13649).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from config import Config
from engines.server import context_length
from inputs import tokenization
from runtime.errors import UserError
from sample import Sample
from scheduling.layout import Placement

if TYPE_CHECKING:
    from inputs.tokenization import Tokenizer

SHOWN = 10  # tokens per answer in samples.jsonl


def check(config: Config, placement: Placement) -> None:
    if config.teacher:
        check_teacher(placement.reference.sized(config))


def check_teacher(config: Config) -> None:
    """Raise UserError unless --teacher can read all of --model's outputs. config: the teacher's sizes."""
    from training import model as models  # imports Megatron, which metrics don't need

    where = f"--teacher {config.teacher}"
    student = models.read_hf_config(config.model)
    hf = models.read_hf_config(config.teacher, "--teacher")
    models.check_directory(config.teacher, "--teacher", hf, scores=False, plans=config.dry_run)
    longest = context_length(config.model, config)
    if hf["max_position_embeddings"] < longest:
        raise UserError(
            f"{where}: it reads {hf['max_position_embeddings']} tokens, "
            f"and prompt and answer may have {longest}"
        )
    models.check_reads_policy(config, config.teacher, "--teacher", hf, student)
    if "vision" in student and not student["reader"].reads_as(hf["reader"]):
        raise UserError(f"{where}: it has another image processor than --model")


def ends(config: Config, tokenizer: Tokenizer) -> set[int]:
    """Return the policy's tokens that end the teacher's answers: it learns to end as the teacher does."""
    if not config.teacher:
        return set()
    own = tokenization.load_tokenizer(config.teacher)
    return tokenization.ends_of(config.teacher, own) & {*tokenizer.get_vocab().values()}


class Difference(NamedTuple):
    """A token on which student and teacher differ."""

    place: int  # index in the response
    token: int
    student: float  # log-probabilities
    teacher: float


def largest_differences(sample: Sample) -> list[Difference]:
    """Return the tokens whose log-probabilities differ most, in descending order."""
    student = sample.policy_logprobs or sample.logprobs
    rows = zip(sample.response, student, sample.reference_logprobs, strict=True)
    found = [Difference(place, *row) for place, row in enumerate(rows)]
    return sorted(found, key=lambda each: -abs(each.teacher - each.student))[:SHOWN]


def differences(
    config: Config, sample: Sample, decode: Callable[[list[int]], str]
) -> dict[str, Any]:
    """Return the tokens on which student and teacher differ most, as a column of samples.jsonl."""
    if not config.teacher:
        return {}
    found = largest_differences(sample)
    return {"differences": [each._asdict() | {"token": decode([each.token])} for each in found]}
