"""Algorithms: rows of `ALGORITHMS`, made of scores, estimators, losses and means, which are pure functions.

Rewards become advantages in `set_advantages`. Losses only call methods of tensors, so this module doesn't
import torch. A target is a response token that is trained on; tensors are [targets] unless noted otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from config import MOST, TINY, Config, as_text, check_limits, setting, text
from runtime.errors import UserError, place_of
from sample import Outcome, Sample

if TYPE_CHECKING:
    from torch import Tensor


MULTIPLIER_MAX = 100.0  # largest lambda: the cost dominates, and lambda can still come back down
MULTIPLIER_CHANGE_MAX = 1.0  # largest change of ln(lambda) per step: slack can't undo it at once

Estimate = tuple[list[float], list[float]]  # advantages and returns of an answer's tokens


def raw(rewards: list[float], *_: object) -> list[float]:
    """s_i = r_i. For PPO, REINFORCE++ and ReMax (its baseline is already subtracted)."""
    return rewards


def group_norm(rewards: list[float], *_: object) -> list[float]:
    """s_i = (r_i - mean(r)) / (std(r) + 1e-4), population std. GRPO (arXiv 2402.03300), section 4.1.2."""
    std = pstdev(rewards) + 1e-4  # equal rewards: 0 instead of 0/0
    return [distance / std for distance in mean_baseline(rewards)]


def mean_baseline(rewards: list[float], *_: object) -> list[float]:
    """s_i = r_i - mean(r). Dr. GRPO (arXiv 2503.20783), section 3.2."""
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def leave_one_out(rewards: list[float], *_: object) -> list[float]:
    """s_i = r_i - mean of the others; 0 for a single answer. RLOO (arXiv 2402.14740), section 2.2."""
    total = math.fsum(rewards)
    others = len(rewards) - 1
    return [reward - (total - reward) / others if others else 0.0 for reward in rewards]


def gae(rewards: list[float], values: list[float], algorithm: Algorithm) -> Estimate:
    """A_t = delta_t + gamma * lambda * A_(t+1) with delta_t = r_t + gamma * V_(t+1) - V_t.

    values: [T], V_t for the state before token t. The returns, which the critic learns, are A_t + V_t.
    Generalized advantage estimation (arXiv 1506.02438), section 3, equation 16.
    """
    gamma = algorithm.gamma
    advantages = []
    advantage = 0.0  # the following token's, then this token's
    next_value = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        delta = reward + gamma * next_value - value
        advantage = delta + gamma * algorithm.gae_lambda * advantage
        advantages.append(advantage)
        next_value = value
    advantages.reverse()
    returns = [advantage + value for advantage, value in zip(advantages, values, strict=True)]
    return advantages, returns


def reward_to_go(rewards: list[float], _: list[float] | None, algorithm: Algorithm) -> Estimate:
    """A_t = r_t + gamma * A_(t+1): GAE without a critic. REINFORCE++ (arXiv 2501.03262), section 3."""
    return gae(rewards, [0.0] * len(rewards), replace(algorithm, gae_lambda=1.0))


def lagrangian(advantages: dict[str, list[float]], multiplier: float) -> list[float]:
    """A = (A_reward - lambda * A_cost) / (1 + lambda). Safe RLHF (arXiv 2310.12773), equation 30."""
    pairs = zip(advantages["reward"], advantages["cost"], strict=True)
    return [(reward - multiplier * cost) / (1 + multiplier) for reward, cost in pairs]


@dataclass
class LossInputs:
    """The targets of one micro-batch."""

    logprobs: Tensor  # under the weights in training; the only field with a gradient
    old_logprobs: Tensor  # the ratio is exp(logprobs - old_logprobs)
    advantages: Tensor
    sequence: Tensor  # index into `lengths` of each target's answer
    lengths: Tensor  # [answers], the number of targets of each answer

    def mean_of_sequence(self, x: Tensor) -> Tensor:
        """Return, for each target, the mean of x over its answer."""
        sums = x.new_zeros(len(self.lengths)).index_add(0, self.sequence, x)
        return (sums / self.lengths.clamp(min=1))[self.sequence]


def clipped_loss(inputs: LossInputs, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) with ratio = exp(logprob - old_logprob).

    PPO (arXiv 1707.06347), equation 7; clip-higher: DAPO (arXiv 2503.14476), section 3.1.
    """
    return clip(ratio_of(inputs.logprobs - inputs.old_logprobs), inputs.advantages, algorithm)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio), from e^-20 to e^20: float32's infinity times a gradient of 0 would be NaN."""
    return log_ratio.clamp(-20, 20).exp()


def clip(ratio: Tensor, advantages: Tensor, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """Return each target's larger loss, unclipped or clipped, and whether it is the clipped one."""
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high) * advantages
    return unclipped.maximum(clipped), clipped > unclipped


def gspo_loss(inputs: LossInputs, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """Clip s = exp(mean of the answer's logprob - old_logprob). GSPO (arXiv 2507.18071), section 4.3.

    Each token uses sg[s] * p / sg[p] (sg stops gradients), so that its importance weight applies to it only.
    """
    logprobs = inputs.logprobs.detach()
    log_ratio = inputs.mean_of_sequence(logprobs - inputs.old_logprobs)
    return clip(ratio_of(log_ratio + (inputs.logprobs - logprobs)), inputs.advantages, algorithm)


def cispo_loss(inputs: LossInputs, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """-stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * logprob: no token loses its gradient.

    CISPO, MiniMax-M1 (arXiv 2506.13585), equations 4 and 5; its clip_low is 1, so there is no lower bound.
    """
    ratio = ratio_of(inputs.logprobs - inputs.old_logprobs).detach()
    weight = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    return -weight * inputs.advantages * inputs.logprobs, weight != ratio


def one_of(length: int) -> list[int]:
    """Return 1 for an answer's first token and 0 for the others, so that the answer counts once."""
    return [int(token == 0) for token in range(length)]


# (length of an answer, longest allowed) -> each token's weight in the sum of the loss, and its part in the
# optimizer step's divisor: no mean depends on how a step is divided into micro-batches or among ranks
MEANS: dict[str, Callable[[int, int], tuple[list[float], list[int]]]] = {
    # all tokens have equal weight: DAPO (arXiv 2503.14476), section 3.3
    "token": lambda length, longest: ([1.0] * length, [1] * length),
    # all answers have equal weight: GRPO (arXiv 2402.03300), equation 3
    "sequence": lambda length, longest: ([1 / max(1, length)] * length, one_of(length)),
    # weights don't depend on any length: Dr. GRPO (arXiv 2503.20783), section 3.2
    "constant": lambda length, longest: ([1 / longest] * length, one_of(length)),
}
# estimators of KL(policy || reference) on the policy's tokens: Schulman, Approximating KL Divergence (2020)
KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    # unbiased; useless as a loss, because its gradient is 0 on average
    "k1": lambda log_ratio: log_ratio,
    # biased; on fresh tokens its gradient is the gradient of the KL
    "k2": lambda log_ratio: log_ratio.square() / 2,
    # unbiased and never negative; GRPO's
    "k3": lambda log_ratio: ratio_of(-log_ratio) - 1 + log_ratio,
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Defaults. A row may override them, and so may the command line: `--algorithm ppo gae_lambda=0.95`."""

    clip_low: float = setting(0.2, high=1)  # the ratio is clipped at 1 - clip_low ...
    clip_high: float = setting(0.28, low=TINY)  # ... and 1 + clip_high (clip-higher)
    behavior_weight_cap: float = setting(2.0, low=TINY)  # largest weight of a stale token
    tis_cap: float = setting(2.0)  # largest weight of a fresh token, in bfloat16; 0: always 1
    gamma: float = setting(1.0, high=1)  # discount per token
    gae_lambda: float = setting(1.0, high=1)  # 0: trust the critic; 1: trust the rewards
    kl_coef: float = setting(0.0)  # weight of the KL to the start weights, or --teacher; 0: none
    kl_in: str = setting("loss", choices=("loss", "reward"))  # where the KL goes
    kl_estimator: str = setting("auto", choices=("auto", *KL_ESTIMATORS))  # see Algorithm.kl
    entropy_coef: float = setting(0.0)  # weight of the entropy, which is subtracted from the loss
    overlong_from: int = setting(0)  # number of tokens at which the reward starts to fall; 0: never
    overlong_penalty: float = setting(1.0)  # how far it has fallen at --max-new-tokens
    ptx_coef: float = setting(0.0)  # weight of the cross-entropy on ptx_data; 0: none
    ptx_data: str = setting("")  # JSONL or Parquet, rows with `text`, or `prompt` and `response`
    ptx_batch: int = setting(16, low=1)  # texts per optimizer step
    cost_limit: float = setting(0.0, low=-MOST)  # highest mean cost of an answer
    # lambda, the cost's weight, before the first step; 0: it stays 0
    lagrange_init: float = setting(1.0, high=MULTIPLIER_MAX)
    lagrange_lr: float = setting(0.1)  # learning rate of lambda: see updated_multiplier
    max_refill_waves: int = setting(3)  # waves per step that replace groups that teach nothing
    critic_lr: float = setting(1e-5, low=TINY)  # AdamW
    critic_warmup: int = setting(0)  # number of first steps in which only the critic learns
    value_clip: float = setting(0.2, low=TINY)  # see value_loss in extras/critic.py


@dataclass(frozen=True)
class Algorithm(Settings):
    """A row: score, estimator, combine and whiten make advantages; loss and mean define the objective."""

    # (rewards of one group, tokens of its answers, the algorithm) -> a score for each answer
    score: Callable[[list[float], list[int], Algorithm], list[float]]
    # (targets, the algorithm) -> the loss of each target, and whether it is clipped
    loss: Callable[[LossInputs, Algorithm], tuple[Tensor, Tensor]]
    # (rewards of an answer's tokens, a critic's values of them, the algorithm) -> advantages and returns
    estimator: Callable[[list[float], list[float] | None, Algorithm], Estimate] = reward_to_go
    mean: str = "token"  # a row of MEANS
    whiten: bool = False  # standardize advantages over all tokens of the step, on all ranks
    signals: tuple[str, ...] = ("reward",)  # reward, cost: each is scored and estimated
    # (advantages by signal, lambda) -> the advantages to train on
    combine: Callable[[dict[str, list[float]], float], list[float]] = lambda by, _: by["reward"]
    critics: tuple[str, ...] = ()  # value models, named after the signal that they predict
    needs_reward: bool = True  # if False, it needs a teacher, and judges and rules are optional
    filters: bool = True  # replace groups of equal rewards (dynamic sampling)
    greedy: bool = False  # one more answer per prompt, greedy: its reward is the others' baseline
    # settings that only this row has, with their defaults: its functions read `algorithm.own["tau"]`
    own: dict[str, float | int | str] = field(default_factory=dict)
    # filled in by `algorithm_of`
    name: str = ""  # the row's key
    max_new_tokens: int = 0
    dtype: str = "float32"

    @property
    def corrects_mismatch(self) -> bool:
        """True if fresh tokens are also corrected: in bfloat16 engine and trainer differ numerically."""
        return self.tis_cap > 0 and self.dtype == "bfloat16"

    def kl(self, log_ratio: Tensor) -> Tensor:
        """Estimate each token's KL(policy || reference). auto: k3 in the loss, k1 in the reward."""
        auto = "k1" if self.kl_in == "reward" else "k3"
        return KL_ESTIMATORS[auto if self.kl_estimator == "auto" else self.kl_estimator](log_ratio)


# arXiv 2402.03300, equation 3 and section 4.2; it doesn't give the clip
AS_PUBLISHED = dict(mean="sequence", clip_high=0.2, kl_coef=0.04, filters=False)
WITH_GAE = dict(estimator=gae, whiten=True, filters=False)
# on-policy distillation: A_t = log p_teacher - log p_student (Thinking Machines, 2025)
DISTILLED = dict(needs_reward=False, filters=False, kl_in="reward", kl_coef=1.0, gamma=0.0)
CONSTRAINED = dict(signals=("reward", "cost"), combine=lagrangian, critics=("reward", "cost"))
# name in --algorithm -> its row, which algorithm_of reads with the settings
ALGORITHMS = {
    "grpo": Algorithm(group_norm, clipped_loss),
    "grpo_2024": Algorithm(group_norm, clipped_loss, **AS_PUBLISHED),
    "dr_grpo": Algorithm(mean_baseline, clipped_loss, mean="constant"),
    "rloo": Algorithm(leave_one_out, clipped_loss),
    "reinforce++": Algorithm(raw, clipped_loss, whiten=True, filters=False),
    "reinforce++_baseline": Algorithm(mean_baseline, clipped_loss, whiten=True),
    "remax": Algorithm(raw, clipped_loss, greedy=True),
    "gspo": Algorithm(group_norm, gspo_loss, mean="sequence", clip_low=3e-4, clip_high=4e-4),
    "cispo": Algorithm(group_norm, cispo_loss, clip_low=1.0),
    "ppo": Algorithm(raw, clipped_loss, critics=("reward",), **WITH_GAE),
    "safe_rlhf": Algorithm(raw, clipped_loss, **CONSTRAINED, **WITH_GAE),
    "distill": Algorithm(raw, clipped_loss, **DISTILLED),
}


def algorithm_of(config: Config) -> Algorithm:
    """Return the row that --algorithm names, with its settings. Raises UserError if it can't be used."""
    name, *given = config.algorithm
    if name not in ALGORITHMS:
        raise UserError(f"--algorithm {name} is unknown; choose one of: {', '.join(ALGORITHMS)}")
    of_run = dict(name=name, max_new_tokens=config.max_new_tokens, dtype=config.dtype)
    algorithm = replace(ALGORITHMS[name], **of_run)
    for word in (*config.algorithm_defaults, *given):
        algorithm = with_setting(algorithm, word)
    check_needs(algorithm, config)
    return algorithm


def with_setting(algorithm: Algorithm, word: str) -> Algorithm:
    """Return the algorithm with a setting changed: gamma=0.9. Raises UserError if it isn't valid."""
    name, _, value = word.partition("=")
    shown = f"--algorithm {algorithm.name} {word}"
    known = {each.name: each for each in fields(Settings)}
    for own, default in algorithm.own.items():
        known[own] = setting(default, low=-MOST)
    if name not in known:
        raise UserError(f"{shown}: its settings are {', '.join(known)}")
    kind = type(known[name].default)
    try:
        changed = {name: text(value) if kind is str else kind(value)}
    except ValueError:
        raise UserError(f"{shown} is not a valid {kind.__name__}") from None
    check_limits(known[name], changed[name], shown)
    if name in algorithm.own:
        changed = {"own": algorithm.own | changed}
    return replace(algorithm, **changed)


def check_needs(a: Algorithm, config: Config) -> None:
    """Raise UserError if the settings don't meet a requirement of the algorithm."""
    shown = f"--algorithm {as_text(config.algorithm)}"
    alone = a.score is raw and (a.greedy or not a.filters)  # otherwise answers are compared
    if config.answers_per_prompt < 2 and not alone:
        raise UserError(f"{shown} needs --answers-per-prompt 2 or more")
    is_rewarded = config.judge or config.rule or config.environment
    learns_from_answers = config.command == "rl" and config.model and not config.evaluates
    if a.needs_reward and learns_from_answers and not is_rewarded:
        raise UserError(f"{shown} needs a --judge, a --rule or an --environment to score answers")
    if config.teacher and not a.kl_coef:
        raise UserError(f"{shown} needs kl_coef above 0 with --teacher")
    if not a.needs_reward and not config.teacher:
        raise UserError(f"{shown} needs a --teacher")
    if (config.critic or a.critic_warmup) and not a.critics:
        raise UserError(f"{shown} needs a critic for --critic and critic_warmup")
    if a.critic_warmup and a.critic_warmup >= config.steps:
        raise UserError(f"{shown} needs critic_warmup below --steps {config.steps}")
    if "cost" in a.signals and not (config.cost_rule or config.cost_judge):
        raise UserError(f"{shown} needs a --cost-rule or a --cost-judge to score the cost")
    if bool(a.ptx_coef) != bool(a.ptx_data):
        raise UserError(f"{shown} needs both ptx_coef and ptx_data, or neither")
    if a.loss is gspo_loss and a.dtype == "bfloat16" and not a.tis_cap:
        raise UserError(
            f"{shown} needs tis_cap with --dtype bfloat16: the engine's numerical error exceeds its clip"
        )
    if a.overlong_from >= a.max_new_tokens:
        raise UserError(f"{shown} needs overlong_from below --max-new-tokens {a.max_new_tokens}")
    if a.overlong_from and config.answer_tokens:
        raise UserError(
            f"{shown} needs overlong_from=0 with --answer-tokens: no answer is longer than another"
        )


def set_advantages(samples: list[Sample], algorithm: Algorithm, multiplier: float = 0.0) -> None:
    """Fill `advantages` and, for critics, `returns`. multiplier: the weight of the cost."""
    scores: dict[tuple[int, str], dict[int, float]] = {}  # once per group, not per answer
    for sample in samples:
        advantages = {}
        returns = {}
        for signal in algorithm.signals:
            group = (sample.prompt_id, signal)
            if group not in scores:
                scores[group] = group_scores(sample.outcomes, signal, algorithm)
            rewards = token_rewards(sample, signal, scores[group][sample.index], algorithm)
            values = sample.values.get(signal)
            advantages[signal], returns[signal] = algorithm.estimator(rewards, values, algorithm)
        sample.advantages = algorithm.combine(advantages, multiplier)
        sample.returns = {name: returns[name] for name in algorithm.critics}


def group_scores(outcomes: list[Outcome], signal: str, algorithm: Algorithm) -> dict[int, float]:
    """Return the scores of a group's answers, by index, without the greedy one. signal: reward or cost."""
    trained = [answer for answer in outcomes if not answer.greedy]
    if signal == "cost":
        numbers = [answer.cost for answer in trained]
    else:
        # the greedy answer's reward is the baseline: ReMax (arXiv 2310.10505), section 4
        greedy = [answer for answer in outcomes if answer.greedy]
        baseline = sum(a.reward - overlong_penalty(a.length, algorithm) for a in greedy)
        numbers = [a.reward - (baseline + overlong_penalty(a.length, algorithm)) for a in trained]
    assert None not in numbers, f"an answer that is trained on has no {signal}"
    scores = algorithm.score(numbers, [answer.length for answer in trained], algorithm)
    if len(scores) != len(trained):
        raise UserError(
            f"--algorithm {algorithm.name}: score ({place_of(algorithm.score)}) returned "
            f"{len(scores)} numbers for {len(trained)} answers"
        )
    return {answer.index: score for answer, score in zip(trained, scores, strict=True)}


def teaches(outcomes: list[Outcome], algorithm: Algorithm) -> bool:
    """Return whether to train on a group; if not, it is replaced. outcomes: those of its judged answers.

    With filters the scores must differ or, if a greedy answer is the baseline, one must differ from 0.
    A group that lacks its baseline teaches nothing.
    """
    greedy = sum(answer.greedy for answer in outcomes)
    if len(outcomes) == greedy or greedy < algorithm.greedy:
        return False
    scores = group_scores(outcomes, "reward", algorithm).values()
    return not algorithm.filters or len({*scores, *[0.0] * greedy}) > 1


def overlong_penalty(length: int, algorithm: Algorithm) -> float:
    """Return a penalty that grows linearly from overlong_from on. DAPO (arXiv 2503.14476), equation 13."""
    if not algorithm.overlong_from:
        return 0.0
    over = (length - algorithm.overlong_from) / (algorithm.max_new_tokens - algorithm.overlong_from)
    return algorithm.overlong_penalty * min(max(over, 0.0), 1.0)


def token_rewards(sample: Sample, signal: str, score: float, algorithm: Algorithm) -> list[float]:
    """Return each token's reward: the score at the last token, minus each token's KL with kl_in=reward.

    If the score is the raw reward, each turn of an episode has its own reward at its last token.
    """
    rewards = [0.0] * len(sample.response)
    if rewards:
        rewards[-1] = score
    if algorithm.score is raw and signal == "reward":
        for reply, reward in zip(
            sample.replies, sample.turn_rewards, strict=False
        ):  # the last turn has no reply
            # the score is the sum over turns: move this turn's part from the last token to the turn's last
            rewards[reply.start - 1] += reward
            rewards[-1] -= reward
    if not algorithm.kl_coef or algorithm.kl_in != "reward":
        return rewards
    from torch import float64, tensor

    # both computed by the trainer: the engine's numerical error would add to the KL
    policy = tensor(sample.policy_logprobs, dtype=float64)
    reference = tensor(sample.reference_logprobs, dtype=float64)
    kl = algorithm.kl_coef * algorithm.kl(policy - reference)
    # minus for the reward, plus for the cost: combined, the KL counts once, whatever the multiplier
    sign = 1.0 if signal == "cost" else -1.0
    return [reward + sign * penalty for reward, penalty in zip(rewards, kl.tolist(), strict=True)]


def moments(values: list[float]) -> tuple[int, float, float]:
    """Return the count, the mean, and the sum of squared distances from it."""
    mean = fmean(values) if values else 0.0
    return len(values), mean, math.fsum((value - mean) ** 2 for value in values)


def whiten(samples: list[Sample], parts: list[tuple[int, float, float]]) -> None:
    """A = (A - mean) / (std + 1e-8). parts: each rank's `moments`, pooled as in Chan et al. (1979)."""
    count = max(1, sum(n for n, _, _ in parts))
    mean = math.fsum(n * m for n, m, _ in parts) / count
    std = math.sqrt(math.fsum(squares + n * (m - mean) ** 2 for n, m, squares in parts) / count)
    for sample in samples:
        sample.advantages = [(advantage - mean) / (std + 1e-8) for advantage in sample.advantages]


def lagrange_multiplier(log_multiplier: float, algorithm: Algorithm) -> float:
    """Return lambda, the weight of the cost: `lagrange_init` times the changes so far."""
    return algorithm.lagrange_init * math.exp(log_multiplier)


def updated_multiplier(
    log_multiplier: float, costs: list[float], algorithm: Algorithm, reacts: bool = True
) -> tuple[float, dict[str, float]]:
    """ln(lambda) += lagrange_lr * lambda * (mean cost - cost_limit). Safe RLHF (arXiv 2310.12773), eq. 31.

    costs: those of all answers of the step, on all ranks. reacts: the policy learns in this step. Returns the
    new ln(lambda / lagrange_init), and the constraint's metrics.
    """
    if not costs:
        return log_multiplier, {}
    mean = math.fsum(costs) / len(costs)  # fsum: the same on any number of ranks
    violation = mean - algorithm.cost_limit
    most = math.log(MULTIPLIER_MAX / max(algorithm.lagrange_init, TINY))
    change = algorithm.lagrange_lr * lagrange_multiplier(log_multiplier, algorithm) * violation
    change = min(max(change, -MULTIPLIER_CHANGE_MAX), MULTIPLIER_CHANGE_MAX)
    if reacts:
        log_multiplier = min(log_multiplier + change, most)
    now = lagrange_multiplier(log_multiplier, algorithm)
    return log_multiplier, {"cost/mean": mean, "cost/multiplier": now, "cost/violation": violation}
