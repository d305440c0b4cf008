"""Algorithms as pure functions: scores, advantage estimators, losses, means, KL estimators; a row for each algorithm.

A new algorithm is a new row of `ALGORITHMS`. The losses use tensors by their methods alone, so that importing this
file doesn't import torch. A target is a response token that is trained on; tensors are [targets] unless it says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from config import Config, as_text
from sample import Sample

if TYPE_CHECKING:
    from torch import Tensor

    from controller import State

STD_EPSILON = 1e-4  # keeps a group of equal rewards at advantage 0 instead of 0/0
WHITEN_EPSILON = 1e-8  # the same for the tokens of a step
MULTIPLIER_MAX = 100.0  # lambda: the cost counts alone by then, and it must find back
MULTIPLIER_STEP_MAX = 1.0  # of ln(lambda) in one step, which grows with lambda: one large slack could end it for good

GroupRewards = dict[int, dict[int, float]]  # prompt_id -> index -> reward
Estimate = tuple[list[float], list[float]]  # advantages and returns of an answer's tokens


# ---------------------------------------------------------------- scores: the rewards of one group -> its scores


def raw(rewards: list[float]) -> list[float]:
    """s_i = r_i. PPO and REINFORCE++, and ReMax, whose baseline has been taken off."""
    return rewards


def group_norm(rewards: list[float]) -> list[float]:
    """s_i = (r_i - mean(r)) / (std(r) + 1e-4), with the population standard deviation.

    Source: GRPO, DeepSeekMath (arXiv 2402.03300), section 4.1.2.
    """
    mean, std = fmean(rewards), pstdev(rewards)
    return [(reward - mean) / (std + STD_EPSILON) for reward in rewards]


def mean_baseline(rewards: list[float]) -> list[float]:
    """s_i = r_i - mean(r): no division, which gives too easy and too hard prompts more weight.

    Source: Dr. GRPO (arXiv 2503.20783), section 3.2; REINFORCE++-baseline (arXiv 2501.03262, section 3) whitens it then.
    """
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def leave_one_out(rewards: list[float]) -> list[float]:
    """s_i = r_i - mean of the other r_j: the baseline doesn't depend on the answer itself. 0 of a lone answer.

    Source: RLOO, Back to Basics (arXiv 2402.14740), section 2.2, after Kool et al. (2019).
    """
    total, others = math.fsum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others if others else 0.0 for reward in rewards]


# ---------------------------------------------------------------- advantage estimators: rewards of one answer's tokens -> Estimate


def reward_to_go(rewards: list[float], values: list[float] | None, algorithm: Algorithm) -> Estimate:
    """A_t = r_t + gamma * A_(t+1); the returns are the same. Needs no values.

    Source: REINFORCE (Williams, 1992); REINFORCE++ (arXiv 2501.03262), section 3.
    """
    advantages, ahead = [], 0.0
    for reward in reversed(rewards):
        ahead = reward + algorithm.gamma * ahead
        advantages.append(ahead)
    return advantages[::-1], advantages[::-1]


def gae(rewards: list[float], values: list[float], algorithm: Algorithm) -> Estimate:
    """A_t = delta_t + gamma * lambda * A_(t+1) with delta_t = r_t + gamma * V_(t+1) - V_t; 0 behind the last token.

    values: [T], V_t of what stands before token t is written. The returns, which the critic learns, are A_t + V_t.
    Source: generalised advantage estimation (arXiv 1506.02438), section 3, equation 16.
    """
    gamma, advantages, ahead, value_ahead = algorithm.gamma, [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        ahead = reward + gamma * value_ahead - value + gamma * algorithm.gae_lambda * ahead
        advantages.append(ahead)
        value_ahead = value
    advantages.reverse()
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


# ---------------------------------------------------------------- signals: advantages by reward, and by cost -> those that train


def reward_only(advantages: dict[str, list[float]], multiplier: float) -> list[float]:
    """A = A_reward."""
    return advantages["reward"]


def lagrangian(advantages: dict[str, list[float]], multiplier: float) -> list[float]:
    """A = (A_reward - lambda * A_cost) / (1 + lambda): the longer the constraint is broken, the more the cost counts.

    Source: Safe RLHF (arXiv 2310.12773), section 3.3 and equation 30; the division keeps the size of a step.
    """
    pairs = zip(advantages["reward"], advantages["cost"], strict=True)
    return [(reward - multiplier * cost) / (1 + multiplier) for reward, cost in pairs]


# ---------------------------------------------------------------- losses -> the loss of each target, whether the clip cut its gradient


@dataclass
class LossInputs:
    """The targets of one micro-batch, as one context-parallel rank sees them."""

    logprobs: Tensor  # under the weights that train; the only one with a gradient
    old_logprobs: Tensor  # under the weights that the ratio is to
    advantages: Tensor
    sequence: Tensor  # the answer that each target belongs to, a row of `lengths`
    lengths: Tensor  # [answers], the targets of each answer, over all context-parallel ranks
    total: Callable[[Tensor], Tensor] = lambda sums: sums  # sums over the context-parallel ranks; has a gradient

    def mean_of_sequence(self, x: Tensor) -> Tensor:
        """For each target the mean of x over its answer (collective over the context-parallel group)."""
        sums = x.new_zeros(len(self.lengths)).index_add(0, self.sequence, x)
        return (self.total(sums) / self.lengths.clamp(min=1))[self.sequence]


def clipped_loss(inputs: LossInputs, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) with ratio = exp(logprob - old_logprob).

    With clip_dual c > 1 the loss of a token of negative advantage is at most -c * A, however likely the token became.
    Source: PPO (arXiv 1707.06347), equation 7; the two separate bounds are DAPO's clip-higher (arXiv 2503.14476,
    section 3.1), the third is dual-clip PPO (arXiv 1912.09729, equation 5).
    """
    return clip((inputs.logprobs - inputs.old_logprobs).exp(), inputs.advantages, algorithm)


def clip(ratio: Tensor, advantages: Tensor, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """The clipped loss of any ratio, for `clipped_loss` and `gspo_loss`."""
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high) * advantages
    loss, is_clipped = unclipped.maximum(clipped), clipped > unclipped
    if algorithm.clip_dual:
        most = (-algorithm.clip_dual * advantages).where(advantages < 0, loss.detach())
        # not `minimum`, which halves the gradients of equals
        loss, is_clipped = most.where(loss > most, loss), is_clipped | (loss > most)
    return loss, is_clipped


def gspo_loss(inputs: LossInputs, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """The clipped loss of the sequence ratio exp(mean over the answer of (logprob - old_logprob)), one for all its tokens.

    Collective over the context-parallel group. Source: GSPO (arXiv 2507.18071), section 4.1, equations 5 to 7.
    """
    log_ratio = inputs.mean_of_sequence(inputs.logprobs - inputs.old_logprobs)
    return clip(log_ratio.exp(), inputs.advantages, algorithm)


def cispo_loss(inputs: LossInputs, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """-stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * logprob: no token loses its gradient.

    The flag says where the weight was cut. clip_low 1 leaves it unbounded below, as in the paper.
    Source: CISPO, MiniMax-M1 (arXiv 2506.13585), section 3.1, equations 4 and 5.
    """
    ratio = (inputs.logprobs - inputs.old_logprobs).exp().detach()
    weight = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    return -weight * inputs.advantages * inputs.logprobs, weight != ratio


# ---------------------------------------------------------------- means: weights of an answer's tokens, and what they add to the divisor


def token_mean(length: int, longest: int) -> tuple[list[float], list[int]]:
    """Every token of the step weighs the same. DAPO (arXiv 2503.14476), section 3.3.

    Returns for an answer of `length` tokens the weight of each token's loss, and what it adds to the divisor of the sum.
    The divisor is that of the whole step: no mean depends on the split into micro-batches or ranks.
    longest: the most tokens that an answer may have.
    """
    return [1.0] * length, [1] * length


def sequence_mean(length: int, longest: int) -> tuple[list[float], list[int]]:
    """The mean over answers of the mean over their tokens. GRPO (arXiv 2402.03300), equation 3."""
    return [1 / max(1, length)] * length, ([1] + [0] * length)[:length]


def constant_mean(length: int, longest: int) -> tuple[list[float], list[int]]:
    """Answers' sums over tokens, divided by the number of answers and `longest`: lengths change no token's weight.

    Source: Dr. GRPO (arXiv 2503.20783), section 3.2.
    """
    return [1 / longest] * length, ([1] + [0] * length)[:length]


MEANS = {"token": token_mean, "sequence": sequence_mean, "constant": constant_mean}


# ---------------------------------------------------------------- KL to a reference model, and importance weights


def k1(log_ratio: Tensor) -> Tensor:
    """log_ratio = logprob - reference's. Unbiased, of either sign. As a loss it pulls nowhere: its gradient's mean is 0.

    Source of k1, k2, k3, estimators of KL(policy || reference) on the policy's own tokens: Schulman, Approximating KL
    Divergence (2020).
    """
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """log_ratio^2 / 2. Biased; on fresh tokens its gradient is that of the KL without bias."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """exp(-log_ratio) - 1 + log_ratio. Unbiased and never negative; GRPO's (arXiv 2402.03300, equation 4)."""
    return (-log_ratio).exp() - 1 + log_ratio


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def truncated_weights(proximal_logprobs: Tensor, engine_logprobs: Tensor, largest: float) -> Tensor:
    """min(exp(proximal - engine), largest), a factor of a token's loss; no gradient flows through it.

    `engine_logprobs` are under the weights that wrote a token, as the engine computed them; `proximal_logprobs` under
    those at the start of the step, which are also the old ones in the ratio that is clipped: the clip keeps the weights
    near where the step began, and this corrects for who wrote the token. Sources: the decoupled objective of AReaL (arXiv
    2505.24298, section 5.2), after Hilton et al. (arXiv 2110.00641); truncated importance sampling (Ionides, 2008), for an
    engine whose numbers aren't the trainer's by Yao et al. (Your Efficient RL Framework Secretly Brings You Off-Policy RL, 2025).
    """
    return (proximal_logprobs - engine_logprobs).exp().clamp(max=largest).detach()


def is_within(proximal_logprobs: Tensor, engine_logprobs: Tensor, bound: float) -> Tensor:
    """Whether trainer and engine agree on a token: 1 / bound <= exp(proximal - engine) <= bound.

    Source: IcePop, in Every Step Evolves (arXiv 2510.18855).
    """
    ratio = (proximal_logprobs - engine_logprobs).exp().detach()
    return (ratio >= 1 / bound) & (ratio <= bound)


# ---------------------------------------------------------------- the table


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a row may set otherwise, and the command line after it: `--algorithm ppo gae_lambda=0.95 critic_warmup=2`."""

    clip_low: float = 0.2  # the ratio is clipped at 1 - clip_low ...
    clip_high: float = 0.28  # ... and 1 + clip_high (clip-higher)
    clip_dual: float = 0.0  # a token of negative advantage A loses at most clip_dual * -A, above 1; 0: unbounded
    behavior_weight_cap: float = 2.0  # largest importance weight of a token that older weights wrote
    tis_cap: float = 0.0  # correct for the engine's numbers by importance weights, at most this large; 0: don't
    icepop_bound: float = 0.0  # tokens whose importance weight isn't in [1/this, this] give no gradient; 0: all do
    gamma: float = 1.0  # discount of a token's reward for each token before it
    gae_lambda: float = 1.0  # from the critic's word (0) to what was rewarded (1)
    kl_coef: float = 0.0  # weight of the KL to the start weights, a reference model; 0: none is made
    kl_in: str = "loss"  # where the KL goes: loss | reward
    kl_estimator: str = "k3"  # k1 | k2 | k3; in the loss take k2 or k3, in the reward k1
    entropy_coef: float = 0.0  # weight of the entropy, which lowers the loss
    overlong_from: int = 0  # tokens of an answer from where the reward falls, up to max_new_tokens; 0: it doesn't
    overlong_penalty: float = 1.0  # by so much at max_new_tokens
    ptx_coef: float = 0.0  # weight of the pretraining term, cross-entropy on ptx_data; 0: there is none
    ptx_data: str = ""  # JSONL or Parquet, rows with `text`, or `prompt` and `response`
    ptx_batch: int = 16  # texts of an optimizer step
    cost_limit: float = 0.0  # the mean cost of an answer shall be at most this
    lagrange_init: float = 1.0  # lambda, the cost's weight, before the first step; 0: it stays 0
    lagrange_lr: float = 0.1  # a step adds this times lambda times (mean cost - cost_limit) to ln(lambda)
    critic_epochs: int = 1  # passes of a critic over a step's answers; the actor makes one
    critic_warmup: int = 0  # first steps in which the critic learns alone; the actor's learning rate begins then
    value_clip: float = 0.2  # a value that moved by more towards its return isn't pulled on; inf: no limit


LIMITS = dict.fromkeys(("clip_low", "clip_dual", "tis_cap", "icepop_bound", "kl_coef", "entropy_coef"), (0, math.inf))
LIMITS |= dict.fromkeys(("overlong_from", "overlong_penalty", "ptx_coef", "lagrange_lr", "critic_warmup"), (0, math.inf))
LIMITS |= dict.fromkeys(("clip_high", "behavior_weight_cap", "value_clip"), (1e-12, math.inf))
LIMITS |= dict.fromkeys(("ptx_batch", "critic_epochs"), (1, math.inf)) | dict.fromkeys(("gamma", "gae_lambda"), (0, 1))
LIMITS |= {"lagrange_init": (0, MULTIPLIER_MAX)}


@dataclass(frozen=True)
class Algorithm(Settings):
    """score, estimator, combine and whiten make advantages; loss and mean say what is minimised."""

    score: Callable[[list[float]], list[float]]  # the rewards of one group -> one score an answer
    loss: Callable[[LossInputs, Algorithm], tuple[Tensor, Tensor]]  # -> loss of each target, whether it was clipped
    # (rewards of an answer's tokens, a critic's values of them, the algorithm) -> advantages and returns
    estimator: Callable[[list[float], list[float] | None, Algorithm], Estimate] = reward_to_go
    mean: str = "token"  # a row of MEANS
    whiten: bool = False  # advantages are standardised over all tokens of the step, on all ranks
    # with kl_in=reward the KL is taken off the rewards of its tokens; else off the answer's, before the score
    kl_by_token: bool = False
    signals: tuple[str, ...] = ("reward",)  # rows of SIGNALS: each is scored and estimated, then combined
    combine: Callable[[dict[str, list[float]], float], list[float]] = reward_only  # (by signal, lambda) -> those that train
    critics: tuple[str, ...] = ()  # names of the value models that are trained, by the signal that they predict
    filters: bool = True  # groups of equal rewards are replaced (dynamic sampling): their answers teach nothing
    greedy: bool = False  # one more answer a prompt, greedy: its reward is taken off the others', and it isn't trained on
    max_new_tokens: int = 0  # of an answer in this run; `algorithm_of` fills it in

    @property
    def corrects_mismatch(self) -> bool:
        """Whether fresh tokens, too, are corrected for what wrote them: the engine's numbers, which aren't the trainer's."""
        return self.tis_cap > 0 or self.icepop_bound > 0


ALGORITHMS = {
    "grpo": Algorithm(group_norm, clipped_loss),
    "dr_grpo": Algorithm(mean_baseline, clipped_loss, mean="constant"),
    "rloo": Algorithm(leave_one_out, clipped_loss),
    "reinforce++": Algorithm(raw, clipped_loss, whiten=True, kl_by_token=True, filters=False),
    "reinforce++_baseline": Algorithm(mean_baseline, clipped_loss, whiten=True),
    "remax": Algorithm(raw, clipped_loss, greedy=True, kl_by_token=True),
    "gspo": Algorithm(group_norm, gspo_loss, mean="sequence", clip_low=3e-4, clip_high=4e-4),
    "cispo": Algorithm(group_norm, cispo_loss),
    "ppo": Algorithm(
        raw, clipped_loss, gae, whiten=True, kl_by_token=True, filters=False, critics=("reward",)
    ),
    "safe_rlhf": Algorithm(
        raw, clipped_loss, gae, whiten=True, kl_by_token=True, filters=False,
        signals=("reward", "cost"), combine=lagrangian, critics=("reward", "cost"),
    ),
}  # fmt: skip


def algorithm_of(config: Config) -> Algorithm:
    """The row of --algorithm with the settings given behind it. ValueError in one sentence for what can't be used."""
    name, *given = config.algorithm
    if name not in ALGORITHMS:
        raise ValueError(f"--algorithm {name} is unknown; choose one of: {', '.join(ALGORITHMS)}")
    overrides = dict(parse_setting(text) for text in given)
    algorithm = replace(ALGORITHMS[name], **overrides, max_new_tokens=config.max_new_tokens)
    for problem in problems(algorithm, config):
        raise ValueError(f"--algorithm {as_text(config.algorithm)}: {problem}")
    return algorithm


def parse_setting(text: str) -> tuple[str, int | float | str]:
    """`name=value` as the name and a value of the setting's type. ValueError for what isn't one."""
    name, _, value = text.partition("=")
    types = {field.name: field.type for field in fields(Settings)}
    if name not in types:
        raise ValueError(f"--algorithm ... {text}: {name} is unknown; choose one of: {', '.join(types)}")
    try:
        return name, {"int": int, "float": float, "str": str}[types[name]](value)
    except ValueError:
        kind = {"int": "a whole number", "float": "a number"}[types[name]]
        raise ValueError(f"--algorithm ... {text}: {name}={kind} is needed") from None


def problems(algorithm: Algorithm, config: Config) -> Iterator[str]:
    """What of an algorithm's settings can't be, or doesn't fit to each other or to the run."""
    for name, (low, high) in LIMITS.items():
        if not low <= (value := vars(algorithm)[name]) <= high:  # NaN is refused, too
            yield f"{name}={value} must be {f'at least {low:g}' if high == math.inf else f'{low:g} to {high:g}'}"
    for name, rows in (("kl_in", ("loss", "reward")), ("kl_estimator", KL_ESTIMATORS)):
        if (value := vars(algorithm)[name]) not in rows:
            yield f"{name}={value} is unknown; choose one of {', '.join(rows)}"
    for name in ("clip_dual", "icepop_bound"):
        if 0 < (value := vars(algorithm)[name]) <= 1:
            yield f"{name}={value:g} must be 0 or more than 1"
    least = 1 if algorithm.greedy else 2
    if config.answers_per_prompt < least:
        yield f"at least {least} is needed for --answers-per-prompt {config.answers_per_prompt}"
    if (config.critic or algorithm.critic_warmup) and not algorithm.critics:
        yield "--critic and critic_warmup are for algorithms with a critic"
    if algorithm.critic_warmup >= config.steps:
        yield f"critic_warmup={algorithm.critic_warmup} leaves the actor none of --steps {config.steps}"
    if "cost" in algorithm.signals and not (config.cost_rule or config.cost_judge):
        yield "a --cost-rule or a --cost-judge is needed, which says what an answer costs"
    if bool(algorithm.ptx_coef) != bool(algorithm.ptx_data):
        yield "ptx_coef and ptx_data need each other"
    if not math.isfinite(algorithm.cost_limit):
        yield f"cost_limit={algorithm.cost_limit} must be finite"
    if algorithm.overlong_from >= config.max_new_tokens:
        yield f"overlong_from={algorithm.overlong_from} must be below --max-new-tokens {config.max_new_tokens}"


# ---------------------------------------------------------------- from rewards to advantages


def overlong_penalty(length: int, algorithm: Algorithm) -> float:
    """0 up to overlong_from tokens, from there linear to overlong_penalty at max_new_tokens. Taken off the reward.

    Source: DAPO's soft overlong punishment (arXiv 2503.14476), section 3.4, equation 13.
    """
    if not algorithm.overlong_from:
        return 0.0
    over = (length - algorithm.overlong_from) / (algorithm.max_new_tokens - algorithm.overlong_from)
    return algorithm.overlong_penalty * min(max(over, 0.0), 1.0)


def set_baseline(group: list[Sample], algorithm: Algorithm) -> None:
    """Fill `baseline` of a judged group: the reward of its greedy answer, 0 without one.

    Source: ReMax (arXiv 2310.10505), section 4.
    """
    greedy = [sample for sample in group if sample.greedy]
    baseline = sum(sample.reward - overlong_penalty(len(sample.response), algorithm) for sample in greedy)
    for sample in group:
        sample.baseline = float(baseline)


def kl_penalties(sample: Sample, algorithm: Algorithm) -> list[float]:
    """kl_coef times the KL to the reference model at each token, [T], for the reward; 0 if it isn't there.

    By the engine's log-probabilities, which are those of the weights that wrote the tokens.
    """
    if not algorithm.kl_coef or algorithm.kl_in != "reward":
        return [0.0] * len(sample.response)
    from torch import float64, tensor

    log_ratio = tensor(sample.logprobs, dtype=float64) - tensor(sample.reference_logprobs, dtype=float64)
    return (algorithm.kl_coef * KL_ESTIMATORS[algorithm.kl_estimator](log_ratio)).tolist()


def rewards_of(samples: list[Sample], algorithm: Algorithm) -> GroupRewards:
    """What the score of each sample is made of: its reward, less what the settings take off the whole answer."""
    rewards = {}
    for sample in samples:
        assert sample.reward is not None, f"sample {sample.index} of prompt {sample.prompt_id} has no reward yet"
        off = sample.baseline + overlong_penalty(len(sample.response), algorithm)
        if not algorithm.kl_by_token:
            off += math.fsum(kl_penalties(sample, algorithm))
        rewards.setdefault(sample.prompt_id, {})[sample.index] = sample.reward - off
    return rewards


def costs_of(samples: list[Sample], algorithm: Algorithm) -> GroupRewards:
    """What the score of each sample's cost is made of."""
    costs = {}
    for sample in samples:
        assert sample.cost is not None, f"sample {sample.index} of prompt {sample.prompt_id} has no cost yet"
        costs.setdefault(sample.prompt_id, {})[sample.index] = sample.cost
    return costs


SIGNALS = {"reward": rewards_of, "cost": costs_of}
KL_SIGN = {"reward": -1.0, "cost": 1.0}  # so that combined, too, the KL comes off once, whatever lambda; the paper halves both


def signals_of(samples: list[Sample], algorithm: Algorithm) -> dict[str, GroupRewards]:
    """What scores are made of, of every signal of the algorithm."""
    return {name: SIGNALS[name](samples, algorithm) for name in algorithm.signals}


def scores_of(prompt_ids: set[int], parts: list[GroupRewards], algorithm: Algorithm) -> dict[tuple[int, int], float]:
    """By prompt_id and index, the scores of whole groups, of whose rewards each of `parts` may hold some."""
    groups = {prompt_id: {} for prompt_id in prompt_ids}
    for part in parts:
        for prompt_id in groups.keys() & part.keys():
            groups[prompt_id] |= part[prompt_id]
    scores = {}
    for prompt_id, group in groups.items():
        indices = sorted(group)
        values = algorithm.score([group[index] for index in indices])
        scores |= {(prompt_id, index): value for index, value in zip(indices, values, strict=True)}
    return scores


def set_advantages(
    samples: list[Sample], parts: list[dict[str, GroupRewards]], algorithm: Algorithm, multiplier: float = 0.0
) -> None:
    """Fill `advantages` and, of every critic, `returns` of each sample.

    parts: `signals_of` on each rank: a score needs the rewards of the whole group, wherever its answers are.
    multiplier: lambda, the weight of the cost, where the algorithm has one.
    """
    prompt_ids = {sample.prompt_id for sample in samples}
    scores = {name: scores_of(prompt_ids, [part[name] for part in parts], algorithm) for name in algorithm.signals}
    for sample in samples:
        length, advantages, returns = len(sample.response), {}, {}
        for name in algorithm.signals:
            token_rewards = [0.0] * (length - 1) + [scores[name][sample.prompt_id, sample.index]][:length]
            if algorithm.kl_by_token:
                penalties = zip(token_rewards, kl_penalties(sample, algorithm), strict=True)
                token_rewards = [reward + KL_SIGN[name] * penalty for reward, penalty in penalties]
            estimate = algorithm.estimator(token_rewards, sample.values.get(name), algorithm)
            advantages[name], returns[name] = estimate
        sample.advantages = algorithm.combine(advantages, multiplier)
        sample.returns = {name: returns[name] for name in algorithm.critics}


Moments = tuple[int, float, float]  # count, mean, and sum of squared distances from it


def moments(values: list[float]) -> Moments:
    """Of some values."""
    mean = fmean(values) if values else 0.0
    return len(values), mean, math.fsum((value - mean) ** 2 for value in values)


def whiten(samples: list[Sample], parts: list[Moments]) -> None:
    """A = (A - mean) / (std + 1e-8), over all tokens of the step. parts: `moments` of each rank's advantages.

    Source: REINFORCE++ (arXiv 2501.03262), section 3; the parts are pooled after Chan et al. (1979).
    """
    count = max(1, sum(n for n, _, _ in parts))
    mean = math.fsum(n * m for n, m, _ in parts) / count
    std = math.sqrt(math.fsum(squares + n * (m - mean) ** 2 for n, m, squares in parts) / count)
    for sample in samples:
        sample.advantages = [(advantage - mean) / (std + WHITEN_EPSILON) for advantage in sample.advantages]


# ---------------------------------------------------------------- the constraint


def lagrange_multiplier(state: State, algorithm: Algorithm) -> float:
    """lambda, the weight of the cost: `lagrange_init` times what the steps so far have made of it."""
    return algorithm.lagrange_init * math.exp(state.log_multiplier)


def update_multiplier(
    state: State, parts: list[dict[str, GroupRewards]], algorithm: Algorithm
) -> dict[str, float]:
    """One step of lambda on the step's mean cost: ln(lambda) += lagrange_lr * lambda * (mean cost - cost_limit).

    That is gradient ascent in ln(lambda): it rises while the constraint is broken and falls while there is slack.
    parts: as in `set_advantages`, the same on every rank. Returns metrics, none where there is no cost.
    Source: Safe RLHF (arXiv 2310.12773), equation 31.
    """
    costs = [cost for part in parts for group in part.get("cost", {}).values() for cost in group.values()]
    if not costs:
        return {}
    violation = math.fsum(costs) / len(costs) - algorithm.cost_limit  # fsum: the same on any number of ranks
    step = algorithm.lagrange_lr * lagrange_multiplier(state, algorithm) * violation
    step = min(max(step, -MULTIPLIER_STEP_MAX), MULTIPLIER_STEP_MAX)
    most = math.log(MULTIPLIER_MAX / max(algorithm.lagrange_init, 1e-12))
    state.log_multiplier = min(state.log_multiplier + step, most)
    return {
        "cost/mean": math.fsum(costs) / len(costs),
        "cost/multiplier": lagrange_multiplier(state, algorithm),
        "cost/violation": violation,
    }
