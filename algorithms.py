"""Algorithms: advantages as pure functions, and a row for each algorithm; losses.py has the losses. Knows neither Megatron nor SGLang.

A new algorithm is a new row of `ALGORITHMS`. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from losses import KL, Tokens, cispo_loss, clipped_loss, gspo_loss

if TYPE_CHECKING:
    from torch import Tensor

    from sample import Sample

STD_EPSILON = 1e-4  # keeps a group of equal rewards at advantage 0 instead of 0/0
WHITEN_EPSILON = 1e-8  # the same for the tokens of a step
MULTIPLIER_MAX = 100.0  # lambda: the cost counts alone by then, and it must find back
MULTIPLIER_STEP_MAX = 1.0  # of ln(lambda): one step's slack could end a large lambda for good, for its steps are as large as itself

Rewards = dict[int, dict[int, float]]  # prompt_id -> index -> reward


# ---------------------------------------------------------------- scores: rewards of one group (all answers to one prompt) -> scores


def as_they_are(rewards: list[float]) -> list[float]:
    """s_i = r_i. PPO and REINFORCE++, and ReMax, whose baseline has been taken off."""
    return rewards


def group_standardised(rewards: list[float]) -> list[float]:
    """s_i = (r_i - mean(r)) / (std(r) + 1e-4), with the population standard deviation.

    Source: GRPO, DeepSeekMath (arXiv 2402.03300), section 4.1.2.
    """
    mean, std = fmean(rewards), pstdev(rewards)
    return [(reward - mean) / (std + STD_EPSILON) for reward in rewards]


def less_group_mean(rewards: list[float]) -> list[float]:
    """s_i = r_i - mean(r): without the division, which gives too easy and too hard prompts more weight.

    Source: Dr. GRPO (arXiv 2503.20783), section 3.2; REINFORCE++-baseline (arXiv 2501.03262, section 3) before it is whitened.
    """
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


def less_others_mean(rewards: list[float]) -> list[float]:
    """s_i = r_i - mean of the other r_j: a baseline that doesn't depend on the answer itself. 0 of an answer without others.

    Source: RLOO, Back to Basics (arXiv 2402.14740), section 2.2, after Kool et al. (2019).
    """
    total, others = math.fsum(rewards), len(rewards) - 1
    return [reward - (total - reward) / others if others else 0.0 for reward in rewards]


# ---------------------------------------------------------------- credit: rewards of one answer's tokens -> advantages and returns


def reward_to_go(rewards: list[float], values: list[float] | None, config) -> tuple[list[float], list[float]]:
    """A_t = r_t + gamma * A_(t+1), [T] each: with one reward, at the end, and gamma 1 the same for every token. Needs no values.

    Source: REINFORCE (Williams, 1992); REINFORCE++ (arXiv 2501.03262), section 3.
    """
    advantages, ahead = [], 0.0
    for reward in reversed(rewards):
        ahead = reward + config.gamma * ahead
        advantages.append(ahead)
    return advantages[::-1], advantages[::-1]


def gae(rewards: list[float], values: list[float], config) -> tuple[list[float], list[float]]:
    """A_t = delta_t + gamma * lambda * A_(t+1) with delta_t = r_t + gamma * V_(t+1) - V_t; after the last token V and A are 0.

    values: [T], V_t of what stands before token t is written. The returns, which the critic learns, are A_t + V_t.
    Source: generalised advantage estimation (arXiv 1506.02438), section 3, equation 16.
    """
    advantages, ahead, value_ahead = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        ahead = reward + config.gamma * value_ahead - value + config.gamma * config.gae_lambda * ahead
        advantages.append(ahead)
        value_ahead = value
    advantages.reverse()
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


# ---------------------------------------------------------------- signals: advantages by reward, and by cost -> those that train


def the_reward_s(advantages: dict[str, list[float]], multiplier: float) -> list[float]:
    """A = A_reward: there is no other signal."""
    return advantages["reward"]


def lagrangian(advantages: dict[str, list[float]], multiplier: float) -> list[float]:
    """A = (A_reward - lambda * A_cost) / (1 + lambda): what lowers the cost counts more, the longer the constraint is broken.

    Source: Safe RLHF (arXiv 2310.12773), section 3.3 and equation 30; the division keeps the size of a step.
    """
    pairs = zip(advantages["reward"], advantages["cost"], strict=True)
    return [(reward - multiplier * cost) / (1 + multiplier) for reward, cost in pairs]


# ---------------------------------------------------------------- the table


@dataclass(frozen=True)
class Algorithm:
    """score -> credit -> whiten makes advantages, loss and mean what is minimised; the rest says what else takes part."""

    score: Callable[[list[float]], list[float]]  # the rewards of one group -> one score an answer
    loss: Callable[[Tokens, object], tuple[Tensor, Tensor]]  # (tokens, config) -> loss of each target, whether it was clipped
    # (rewards of an answer's tokens, a critic's values of them, config) -> advantages and returns
    credit: Callable[[list[float], list[float] | None, object], tuple[list[float], list[float]]] = reward_to_go
    mean: str = "token"  # a row of losses.MEANS
    whiten: bool = False  # advantages are standardised over all tokens of the step, on all ranks
    # with --kl-in reward the KL is taken off the rewards of its tokens; else off the answer's, before the score
    kl_by_token: bool = False
    signals: tuple[str, ...] = ("reward",)  # rows of SIGNALS: each is scored and credited, then combined
    combine: Callable[[dict[str, list[float]], float], list[float]] = the_reward_s  # (advantages by signal, lambda) -> those that train
    critics: tuple[str, ...] = ()  # names of the value models that are trained, by the signal that they predict
    filters: bool = True  # groups of equal rewards are replaced (dynamic sampling); False: an answer's worth isn't up to its group
    greedy: bool = False  # one more answer a prompt, greedy: its reward is taken off the others', and it isn't trained on


ALGORITHMS = {
    "grpo": Algorithm(group_standardised, clipped_loss),
    "dr_grpo": Algorithm(less_group_mean, clipped_loss, mean="constant"),
    "rloo": Algorithm(less_others_mean, clipped_loss),
    "reinforce++": Algorithm(as_they_are, clipped_loss, whiten=True, kl_by_token=True, filters=False),
    "reinforce++_baseline": Algorithm(less_group_mean, clipped_loss, whiten=True),
    "remax": Algorithm(as_they_are, clipped_loss, greedy=True, kl_by_token=True),
    "gspo": Algorithm(group_standardised, gspo_loss, mean="sequence"),
    "cispo": Algorithm(group_standardised, cispo_loss),
    "ppo": Algorithm(as_they_are, clipped_loss, gae, whiten=True, kl_by_token=True, critics=("reward",), filters=False),
    "safe_rlhf": Algorithm(
        as_they_are, clipped_loss, gae, whiten=True, kl_by_token=True, filters=False,
        signals=("reward", "cost"), combine=lagrangian, critics=("reward", "cost"),
    ),
}


def get_algorithm(name: str) -> Algorithm:
    """The row called `name`. ValueError with the rows there are, if there is none."""
    if name not in ALGORITHMS:
        raise ValueError(f"--algorithm {name!r} is unknown; choose one of: {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]


# ---------------------------------------------------------------- from rewards to advantages


def overlong_penalty(length: int, config) -> float:
    """0 up to overlong_from tokens, from there linear to overlong_penalty at max_new_tokens. Taken off the reward.

    Source: DAPO's soft overlong punishment (arXiv 2503.14476), section 3.4, equation 13.
    """
    if not config.overlong_from:
        return 0.0
    over = (length - config.overlong_from) / (config.max_new_tokens - config.overlong_from)
    return config.overlong_penalty * min(max(over, 0.0), 1.0)


def set_baseline(group: list[Sample], config) -> None:
    """Fill `baseline` of a judged group: the reward of its greedy answer, 0 without one. ReMax (arXiv 2310.10505), section 4."""
    baseline = sum(sample.reward - overlong_penalty(len(sample.response), config) for sample in group if sample.greedy)
    for sample in group:
        sample.baseline = float(baseline)


def kl_penalties(sample: Sample, config) -> list[float]:
    """kl_coef times the KL to the reference model at each token, [T], for the reward; 0 if it isn't there.

    By the engine's log-probabilities, which are those of the weights that wrote the tokens.
    """
    if not config.kl_coef or config.kl_in != "reward":
        return [0.0] * len(sample.response)
    from torch import float64, tensor

    log_ratio = tensor(sample.logprobs, dtype=float64) - tensor(sample.reference_logprobs, dtype=float64)
    return (config.kl_coef * KL[config.kl_estimator](log_ratio)).tolist()


def rewards_of(samples: list[Sample], config) -> Rewards:
    """What the score of each sample is made of: its reward, less what the settings take off the whole answer. Not collective."""
    rewards = {}
    for sample in samples:
        assert sample.reward is not None, f"sample {sample.index} of prompt {sample.prompt_id} has no reward yet"
        off = sample.baseline + overlong_penalty(len(sample.response), config)
        if not get_algorithm(config.algorithm).kl_by_token:
            off += math.fsum(kl_penalties(sample, config))
        rewards.setdefault(sample.prompt_id, {})[sample.index] = sample.reward - off
    return rewards


def costs_of(samples: list[Sample], config) -> Rewards:
    """What the score of each sample's cost is made of. Not collective."""
    costs = {}
    for sample in samples:
        assert sample.cost is not None, f"sample {sample.index} of prompt {sample.prompt_id} has no cost yet"
        costs.setdefault(sample.prompt_id, {})[sample.index] = sample.cost
    return costs


SIGNALS = {"reward": rewards_of, "cost": costs_of}
KL_SIGN = {"reward": -1.0, "cost": 1.0}  # so that combined, too, the KL comes off once, whatever lambda is; the paper halves both


def signals_of(samples: list[Sample], config) -> dict[str, Rewards]:
    """What scores are made of, of every signal of the algorithm. Not collective."""
    return {name: SIGNALS[name](samples, config) for name in get_algorithm(config.algorithm).signals}


def scores_of(prompt_ids: set[int], parts: list[Rewards], score: Callable[[list[float]], list[float]]) -> dict[tuple[int, int], float]:
    """By prompt_id and index, the scores of whole groups, of whose values each of `parts` may hold some. Not collective."""
    groups = {prompt_id: {} for prompt_id in prompt_ids}
    for part in parts:
        for prompt_id in groups.keys() & part.keys():
            groups[prompt_id] |= part[prompt_id]
    scores = {}
    for prompt_id, group in groups.items():
        ordered = sorted(group)
        scores |= zip([(prompt_id, index) for index in ordered], score([group[index] for index in ordered]), strict=True)
    return scores


def set_advantages(samples: list[Sample], parts: list[dict[str, Rewards]], config, multiplier: float = 0.0) -> None:
    """Fill `advantages` and, of every critic, `returns` of each sample. Not collective.

    parts: what `signals_of` says on each rank: a score needs the rewards of the whole group, wherever its answers are.
    multiplier: lambda, the weight of the cost, where the algorithm has one.
    """
    algorithm, prompt_ids = get_algorithm(config.algorithm), {sample.prompt_id for sample in samples}
    scores = {name: scores_of(prompt_ids, [part[name] for part in parts], algorithm.score) for name in algorithm.signals}
    for sample in samples:
        length, advantages, returns = len(sample.response), {}, {}
        for name in algorithm.signals:
            token_rewards = [0.0] * (length - 1) + [scores[name][sample.prompt_id, sample.index]][:length]
            if algorithm.kl_by_token:
                penalties = zip(token_rewards, kl_penalties(sample, config), strict=True)
                token_rewards = [reward + KL_SIGN[name] * penalty for reward, penalty in penalties]
            advantages[name], returns[name] = algorithm.credit(token_rewards, sample.values.get(name), config)
        sample.advantages = algorithm.combine(advantages, multiplier)
        sample.returns = {name: returns[name] for name in algorithm.critics}


# ---------------------------------------------------------------- the constraint


def multiplier_of(state, config) -> float:
    """lambda, the weight of the cost: `lagrange_init` times what the steps so far have made of it. Never negative."""
    return config.lagrange_init * math.exp(state.log_multiplier)


def update_multiplier(state, parts: list[dict[str, Rewards]], config) -> dict[str, float]:
    """One step of lambda on the mean cost of the step: ln(lambda) += lagrange_lr * lambda * (mean cost - cost_limit). Not collective.

    It is gradient ascent in ln(lambda) on lambda * (mean cost - cost_limit): lambda rises while the constraint is broken and falls
    while there is slack. parts: as in `set_advantages`, the same on every rank. Returns metrics, none where there is no cost.
    Source: Safe RLHF (arXiv 2310.12773), equation 31.
    """
    costs = [cost for part in parts for group in part.get("cost", {}).values() for cost in group.values()]
    if not costs:
        return {}
    mean, before = math.fsum(costs) / len(costs), multiplier_of(state, config)  # fsum: the same on any number of ranks
    step = config.lagrange_lr * before * (mean - config.cost_limit)
    step = min(max(step, -MULTIPLIER_STEP_MAX), MULTIPLIER_STEP_MAX)
    most = math.log(MULTIPLIER_MAX / max(config.lagrange_init, 1e-12))
    state.log_multiplier = min(state.log_multiplier + step, most)
    after = multiplier_of(state, config)
    return {"cost/mean": mean, "cost/multiplier": after, "cost/violation": mean - config.cost_limit}


Moments = tuple[int, float, float]  # count, mean, and sum of squared distances from it


def moments(values: list[float]) -> Moments:
    """Of some values."""
    mean = fmean(values) if values else 0.0
    return len(values), mean, math.fsum((value - mean) ** 2 for value in values)


def whiten(samples: list[Sample], parts: list[Moments]) -> None:
    """A = (A - mean) / (std + 1e-8), over all tokens of the step. Not collective. parts: `moments` of each rank's advantages.

    Source: REINFORCE++ (arXiv 2501.03262), section 3; the parts are pooled after Chan et al. (1979).
    """
    count = max(1, sum(n for n, _, _ in parts))
    mean = math.fsum(n * m for n, m, _ in parts) / count
    std = math.sqrt(math.fsum(squares + n * (m - mean) ** 2 for n, m, squares in parts) / count)
    for sample in samples:
        sample.advantages = [(advantage - mean) / (std + WHITEN_EPSILON) for advantage in sample.advantages]
