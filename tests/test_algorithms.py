"""Advantages and losses: values worked by hand, and plain float64 loops over random ragged batches.

The loops are written from the papers' formulas, one token at a time, with nothing of the project's in them.
"""

import math
import random
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actor import (
    DIFF_BINS,
    Actor,
    PackedTargets,
    difference_stats,
    pack_targets,
    policy_loss,
    update_metrics,
)
from algorithms import (
    ALGORITHMS,
    KL_ESTIMATORS,
    MEANS,
    Algorithm,
    LossInputs,
    algorithm_of,
    clipped_loss,
    gae,
    gspo_loss,
    moments,
    reward_to_go,
    set_advantages,
    set_baseline,
    set_scores,
    signals_of,
    whiten,
)
from config import Config
from sample import Sample

ROWS = list(ALGORITHMS)
CPU = torch.device("cpu")
LAMBDA = 0.7  # weight of the cost, of rows that have one


def settings_of(row: str = "grpo", **changes) -> Algorithm:
    """A row but for the settings that are named."""
    return replace(ALGORITHMS[row], **{"max_new_tokens": 1024} | changes)


def answer(prompt_id: int, index: int, reward: float | None, tokens: int, **fields) -> Sample:
    """One answer of so many tokens."""
    return Sample(
        prompt_id,
        index,
        prompt=[1],
        response=[2] * tokens,
        logprobs=[-0.5] * tokens,
        reward=reward,
        **fields,
    )


def with_advantages(samples: list[Sample], algorithm: Algorithm) -> list[Sample]:
    """What the controllers do, on one rank."""
    set_scores(samples, [signals_of(samples, algorithm)], algorithm)
    set_advantages(samples, algorithm)
    if algorithm.whiten:
        whiten(samples, [moments([a for sample in samples for a in sample.advantages])])
    return samples


# ----------------------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize(
    "row, rewards, scores",
    [
        (
            "grpo",
            [1.0, 0.0, 0.0, 0.0],
            [0.75 / 0.4331127] + [-0.25 / 0.4331127] * 3,
        ),  # mean 0.25, population std sqrt(3)/4 = 0.4330127
        ("grpo", [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]),  # nothing to tell the answers apart
        ("grpo", [0.7], [0.0]),
        ("gspo", [1.0, 0.0], [0.5 / 0.5001, -0.5 / 0.5001]),
        ("cispo", [1.0, 0.0], [0.5 / 0.5001, -0.5 / 0.5001]),
        ("dr_grpo", [1.0, 0.0, 0.0, 0.0], [0.75, -0.25, -0.25, -0.25]),
        ("reinforce++_baseline", [3.0, 1.0], [1.0, -1.0]),
        ("rloo", [1.0, 0.0, 0.5], [0.75, -0.75, 0.0]),
        ("rloo", [0.4], [0.0]),
        ("reinforce++", [1.0, 0.0, 0.5], [1.0, 0.0, 0.5]),
        ("remax", [1.0, -1.0], [1.0, -1.0]),
        ("ppo", [1.0, 0.5], [1.0, 0.5]),
    ],
)
def test_scores_by_hand(row, rewards, scores):
    assert ALGORITHMS[row].score(rewards) == pytest.approx(scores, abs=1e-6)


def plain_scores(row: str, rewards: list[float]) -> list[float]:
    """The scores of a group, from the papers."""
    scores = []
    for i, reward in enumerate(rewards):
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
        others = [r for j, r in enumerate(rewards) if j != i]
        standardised = (reward - mean) / (std + 1e-4)
        scores.append(
            {
                "grpo": standardised,
                "gspo": standardised,
                "cispo": standardised,
                "dr_grpo": reward - mean,
                "reinforce++_baseline": reward - mean,
                "rloo": reward - sum(others) / len(others) if others else 0.0,
                "reinforce++": reward,
                "remax": reward,
                "ppo": reward,
                "safe_rlhf": reward,
            }[row]
        )
    return scores


# --------------------------------------------------------------------------------------- advantage estimators


def test_gae_by_hand():
    """gamma 0.5, lambda 0.5; deltas from the last: 1 - 0.6 = 0.4; 0 + 0.5 * 0.6 - 0.2 = 0.1.

    0 + 0.5 * 0.2 - 0.4 = -0.3.
    """
    advantages, returns = gae(
        [0.0, 0.0, 1.0], [0.4, 0.2, 0.6], settings_of(gamma=0.5, gae_lambda=0.5)
    )
    assert advantages == pytest.approx([-0.3 + 0.25 * 0.2, 0.1 + 0.25 * 0.4, 0.4])
    assert returns == pytest.approx([0.15, 0.4, 1.0])


FLOATS = st.floats(-3, 3, width=32)


@given(st.lists(st.tuples(FLOATS, FLOATS), max_size=12), st.floats(0, 1), st.floats(0, 1))
def test_the_estimators_are_the_plain_double_loop(tokens, gamma, lam):
    """A_t as the sum over all later tokens, not by recursion."""
    rewards, values = [r for r, _ in tokens], [v for _, v in tokens]
    config = settings_of(gamma=gamma, gae_lambda=lam)
    ahead = [*values[1:], 0.0]
    deltas = [
        r + gamma * after - v
        for r, v, after in zip(rewards, values, ahead[: len(values)], strict=True)
    ]
    steps = range(len(tokens))
    expected = [sum((gamma * lam) ** (k - t) * deltas[k] for k in steps if k >= t) for t in steps]
    advantages, returns = gae(rewards, values, config)
    assert advantages == pytest.approx(expected, abs=1e-6)
    assert returns == pytest.approx(
        [a + v for a, v in zip(expected, values, strict=True)], abs=1e-6
    )
    plain = [sum(gamma ** (k - t) * rewards[k] for k in steps if k >= t) for t in steps]
    assert reward_to_go(rewards, None, config)[0] == pytest.approx(plain, abs=1e-6)


# --------------------------------------------------------------------------------- from rewards to advantages


def test_a_sample_without_a_reward_is_refused():
    with pytest.raises(AssertionError, match="answer 3\\.1 has no reward"):
        signals_of([answer(3, 1, None, 2)], settings_of())


TOKEN = st.tuples(
    *[st.floats(-4, 0, width=32)] * 3, FLOATS
)  # logprobs: engine's, reference's, now; value
ANSWER = st.tuples(
    st.integers(0, 4).map(lambda reward: reward / 4), st.lists(TOKEN, min_size=1, max_size=6)
)
GROUPS = st.lists(st.lists(ANSWER, min_size=2, max_size=4), min_size=1, max_size=4)


def cost_of(reward: float, tokens: list) -> float:
    """Any number that isn't the reward."""
    return 0.5 * len(tokens) - reward**2


def samples_of(groups) -> list[Sample]:
    """A ragged batch."""
    samples = []
    for draw, group in enumerate(groups):
        for index, (reward, tokens) in enumerate(group):
            engine, reference, _, values = (list(column) for column in zip(*tokens, strict=True))
            sample = Sample(
                draw,
                index,
                [1],
                response=[2] * len(tokens),
                logprobs=engine,
                versions=[0] * len(tokens),
                reward=reward,
            )
            sample.reference_logprobs, sample.values = (
                reference,
                {"reward": values, "cost": [0.3 - value / 2 for value in values]},
            )
            sample.cost, sample.policy_logprobs = cost_of(reward, tokens), engine
            samples.append(sample)
    return samples


def plain_kl(name: str, log_ratio: float) -> tuple[float, float]:
    """An estimator and its slope."""
    return {
        "k1": (log_ratio, 1.0),
        "k2": (log_ratio**2 / 2, log_ratio),
        "k3": (math.exp(-log_ratio) - 1 + log_ratio, 1 - math.exp(-log_ratio)),
    }[name]


def plain_advantages(groups, row: str, config) -> dict[tuple[int, int], list[float]]:
    """By sample, one token at a time."""
    by_token, has_critic = (
        row in ("reinforce++", "remax", "ppo", "safe_rlhf"),
        row in ("ppo", "safe_rlhf"),
    )
    result = {}
    for draw, group in enumerate(groups):
        rewards, kls = [], []
        for reward, tokens in group:
            kls.append(
                [
                    config.kl_coef
                    * plain_kl(config.kl_estimator, e - r)[0]
                    * (config.kl_in == "reward")
                    for e, r, *_ in tokens
                ]
            )
            over = 0.0
            if config.overlong_from and len(tokens) > config.overlong_from:
                over = (
                    config.overlong_penalty
                    * (len(tokens) - config.overlong_from)
                    / (config.max_new_tokens - config.overlong_from)
                )
            rewards.append(
                reward - min(over, config.overlong_penalty) - (0.0 if by_token else sum(kls[-1]))
            )
        for index, (score, (reward, tokens)) in enumerate(
            zip(plain_scores(row, rewards), group, strict=True)
        ):

            def credit(score, sign, values, kl=kls[index]):
                given = [
                    sign * kl[t] * by_token + score * (t == len(kl) - 1) for t in range(len(kl))
                ]
                weight = config.gamma * (config.gae_lambda if has_critic else 1.0)
                deltas = [
                    r + config.gamma * after - v
                    for r, v, after in zip(given, values, [*values[1:], 0.0], strict=True)
                ]
                steps = range(len(kl))
                return [sum(weight ** (k - t) * deltas[k] for k in steps if k >= t) for t in steps]

            values = [value * has_critic for *_, value in tokens]
            result[draw, index] = credit(score, -1, values)
            if row == "safe_rlhf":
                costs = credit(cost_of(reward, tokens), 1, [0.3 - value / 2 for value in values])
                result[draw, index] = [
                    (a - LAMBDA * c) / (1 + LAMBDA)
                    for a, c in zip(result[draw, index], costs, strict=True)
                ]
    if row in ("reinforce++", "reinforce++_baseline", "ppo", "safe_rlhf"):
        every = [a for row_of in result.values() for a in row_of]
        mean = sum(every) / len(every)
        std = math.sqrt(sum((a - mean) ** 2 for a in every) / len(every))
        result = {
            key: [(a - mean) / (std + 1e-8) for a in row_of] for key, row_of in result.items()
        }
    return result


CHANGES = st.fixed_dictionaries(
    {
        "gamma": st.sampled_from([1.0, 0.9]),
        "gae_lambda": st.sampled_from([1.0, 0.8]),
        "kl_coef": st.sampled_from([0.0, 0.3]),
        "kl_in": st.sampled_from(["reward", "loss"]),
        "kl_estimator": st.sampled_from(list(KL_ESTIMATORS)),
        "entropy_coef": st.sampled_from([0.0, 0.1]),
        "overlong_from": st.sampled_from([0, 3]),
        "overlong_penalty": st.just(0.5),
        "max_new_tokens": st.just(6),
        "clip_low": st.just(0.2),
        "clip_high": st.just(0.28),
        "tis_cap": st.sampled_from([0.0, 2.0]),
        "icepop_bound": st.sampled_from([0.0, 3.0]),
    }
)


@pytest.mark.parametrize("row", ROWS)
@settings(max_examples=25, deadline=None)
@given(groups=GROUPS, changes=CHANGES, ranks=st.integers(1, 3), seed=st.integers(0, 99))
def test_advantages_are_the_plain_loop_wherever_the_samples_are(row, groups, changes, ranks, seed):
    """Groups are torn apart: every rank works out its own samples from what was gathered."""
    config, rng = settings_of(row, **changes), random.Random(seed)
    shares = [[] for _ in range(ranks)]
    for sample in samples_of(groups):
        rng.choice(shares).append(sample)
    gathered = [signals_of(share, config) for share in shares]
    for share in shares:
        set_scores(share, gathered, config)
        set_advantages(share, config, LAMBDA)
    if ALGORITHMS[row].whiten:
        parts = [moments([a for sample in share for a in sample.advantages]) for share in shares]
        for share in shares:
            whiten(share, parts)
    expected = plain_advantages(groups, row, config)
    every = [a for row_of in expected.values() for a in row_of]
    for share in shares:
        for sample in share:
            got, wanted = sample.advantages, expected[sample.prompt_id, sample.index]
            if (
                not ALGORITHMS[row].whiten or max(every) - min(every) > 1e-3
            ):  # else it is rounding errors that are whitened
                assert got == pytest.approx(wanted, abs=1e-6)


def test_the_returns_that_ppo_s_critic_learns_are_not_whitened():
    sample = answer(0, 0, 1.0, 2, values={"reward": [0.25, 0.5]})
    with_advantages([sample, answer(0, 1, 0.0, 1, values={"reward": [0.5]})], settings_of("ppo"))
    assert sample.returns == {"reward": [1.0, 1.0]}
    assert sample.advantages == pytest.approx(
        [(0.75 - 0.25) / math.sqrt(0.875 / 3), (0.5 - 0.25) / math.sqrt(0.875 / 3)]
    )


def test_the_overlong_penalty_by_hand():
    """0 up to 4 tokens, then linear to 0.5 at 8."""
    config = settings_of(overlong_from=4, overlong_penalty=0.5, max_new_tokens=8)
    samples = [answer(0, index, 1.0, tokens) for index, tokens in enumerate((1, 4, 6, 8))]
    assert signals_of(samples, config)["reward"] == {0: {0: 1.0, 1: 1.0, 2: 0.75, 3: 0.5}}


def test_remax_takes_the_greedy_answer_s_reward_off():
    """Also what is taken off it for its length; the greedy one itself is not trained on."""
    config = settings_of("remax", overlong_from=4, overlong_penalty=0.5, max_new_tokens=8)
    group = [answer(0, 0, 1.0, 2), answer(0, 1, 0.25, 3), answer(0, 2, 0.5, 6, greedy=True)]
    set_baseline(group, config)
    assert [sample.baseline for sample in group] == [0.25] * 3
    assert [sample.advantages for sample in with_advantages(group[:2], config)] == [
        [0.75] * 2,
        [0.0] * 3,
    ]
    set_baseline(group[:2], config)
    assert group[0].baseline == 0.0


# ----------------------------------------------------------------------------------------------------- losses


def inputs_of(logprobs, old, advantages, lengths=None) -> LossInputs:
    lengths = lengths or [len(advantages)]
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return LossInputs(
        logprobs,
        torch.tensor(old),
        torch.tensor(advantages),
        sequence,
        torch.tensor(lengths, dtype=torch.float64),
    )


@pytest.mark.parametrize(
    "ratio, advantage, loss, clipped",
    [
        (1.00, 2.0, -2.00, False),  # on-policy
        (1.25, 2.0, -2.50, False),  # above 1 + 0.2, but clip-higher leaves room up to 1.28
        (
            1.50,
            2.0,
            -2.56,
            True,
        ),  # a good token is already likelier by more than 1.28: no more push
        (0.50, 2.0, -1.00, False),  # a good token became less likely: full push back
        (0.50, -2.0, 1.60, True),  # a bad token is already less likely than 1 - 0.2
        (1.50, -2.0, 3.00, False),  # a bad token became likelier: full push back
    ],
)
def test_clipped_loss_by_hand(ratio, advantage, loss, clipped):
    logprobs = torch.tensor([-1.0 + math.log(ratio)], requires_grad=True)
    value, flag = clipped_loss(inputs_of(logprobs, [-1.0], [advantage]), settings_of())
    assert value.item() == pytest.approx(loss) and flag.item() is clipped
    value.sum().backward()
    assert logprobs.grad.item() == pytest.approx(0.0 if clipped else -ratio * advantage)


# ------------------------------------------------------------------------------ the whole objective of a step


def plain_objective(groups, row: str, advantages, config, stale) -> tuple[float, dict]:
    """The loss of a step and its slope at every token's log-probability, one token at a time.

    stale: which tokens older weights wrote. The entropy of a token stands for itself: 0.7 of its logprob.
    """
    answers = {
        (d, i): tokens for d, group in enumerate(groups) for i, (_, tokens) in enumerate(group)
    }
    corrects = config.tis_cap or config.icepop_bound
    total, slopes, divisor = 0.0, {}, 0.0
    for key, tokens in answers.items():
        n = len(tokens)
        per_token = {"dr_grpo": 1 / config.max_new_tokens, "gspo": 1 / n}.get(row, 1.0)
        divisor += 1 if row in ("dr_grpo", "gspo") else n
        now, engine = [token[2] for token in tokens], [token[0] for token in tokens]
        # the weights at the start of the step are those that train
        old = [now[t] if corrects or stale[key, t] else engine[t] for t in range(n)]
        s = math.exp(sum(now[t] - old[t] for t in range(n)) / n)
        kept = [True] * n
        for t in range(n):
            weight, off = 1.0, math.exp(now[t] - engine[t])
            if stale[key, t]:
                weight = min(off, config.behavior_weight_cap)
            elif corrects:
                weight = min(off, config.tis_cap) if config.tis_cap else off
                kept[t] = (
                    not config.icepop_bound or 1 / config.icepop_bound <= off <= config.icepop_bound
                )
            a, r = advantages[key][t], s if row == "gspo" else math.exp(now[t] - old[t])
            cut = min(max(r, 1 - config.clip_low), 1 + config.clip_high)
            loss, slope = -r * a, -r * a
            if row == "cispo":
                loss, slope = -cut * a * now[t], -cut * a
            elif -cut * a > -r * a:
                loss, slope = -cut * a, 0.0
            loss, slope = weight * loss, weight * slope
            own, shared = (0.0, slope / n) if row == "gspo" else (slope, 0.0)
            if config.kl_coef and config.kl_in == "loss":
                kl, kl_slope = plain_kl(config.kl_estimator, now[t] - tokens[t][1])
                loss, own = loss + config.kl_coef * kl, own + config.kl_coef * kl_slope
            loss, own = loss - config.entropy_coef * 0.7 * now[t], own - config.entropy_coef * 0.7
            if kept[t]:
                total += per_token * loss
                slopes[key, t] = slopes.get((key, t), 0.0) + per_token * own
                for other in range(n):
                    slopes[key, other] = slopes.get((key, other), 0.0) + per_token * shared
        for t in range(n):
            if not kept[t]:
                slopes[key, t] = 0.0
    return total / divisor, {where: slope / divisor for where, slope in slopes.items()}


def near_a_kink(groups, row, config) -> bool:
    """Whether some ratio is so near a bound that rounding decides on which side it is."""
    bounds = [1 - config.clip_low, 1 + config.clip_high, config.behavior_weight_cap]
    bounds += [config.tis_cap or 9e9, config.icepop_bound or 9e9, 1 / (config.icepop_bound or 9e9)]
    offs = [now - engine for group in groups for _, tokens in group for engine, _, now, _ in tokens]
    offs += [
        sum(t[2] - t[0] for t in tokens) / len(tokens) for group in groups for _, tokens in group
    ]
    return any(abs(off - math.log(bound)) < 1e-4 for off in offs for bound in bounds)


@pytest.mark.parametrize("row", ROWS)
@settings(max_examples=25, deadline=None)
@given(
    groups=GROUPS,
    changes=CHANGES,
    parts=st.integers(1, 4),
    seed=st.integers(0, 99),
    stale_part=st.sampled_from([0.0, 0.3]),
)
def test_the_objective_of_a_step_is_the_plain_loop_however_it_is_split(
    row, groups, changes, parts, seed, stale_part
):
    """Loss, slopes and what is summed.

    Over micro-batches in any order, each with its targets in any order.
    """
    config, rng = settings_of(row, **changes), random.Random(seed)
    if near_a_kink(groups, row, config):
        return
    samples = with_advantages(samples_of(groups), config)
    for sample in samples:
        sample.reference_logprobs = sample.reference_logprobs if config.kl_coef else None
    stale = {
        ((s.prompt_id, s.index), t): rng.random() < stale_part
        for s in samples
        for t in range(len(s.response))
    }
    for sample in samples:
        sample.versions = [
            int(not stale[(sample.prompt_id, sample.index), t]) for t in range(len(sample.response))
        ]
    now = {
        ((d, i), t): token[2]
        for d, g in enumerate(groups)
        for i, (_, tokens) in enumerate(g)
        for t, token in enumerate(tokens)
    }
    micro_batches = [[] for _ in range(parts)]
    for sample in samples:
        rng.choice(micro_batches).append(sample)
    total, divisor, slopes, masked = 0.0, 0, {}, 0
    for micro_batch in micro_batches:
        targets = exact(pack_targets(micro_batch, 1, {}, config, CPU), micro_batch, config)
        where = [((s.prompt_id, s.index), t) for s in micro_batch for t in range(len(s.response))]
        logprobs = torch.tensor(
            [now[place] for place in where], dtype=torch.float64, requires_grad=True
        )
        order = torch.tensor(rng.sample(range(len(where)), len(where)), dtype=torch.int64)
        loss, stats = policy_loss(
            targets, config, same, order, logprobs[order], 0.7 * logprobs[order]
        )
        loss.sum().backward()
        slopes |= dict(zip(where, logprobs.grad.tolist(), strict=True))
        total, divisor = total + loss.sum().item(), divisor + stats["divisor"].item()
        masked += stats["masked_frac"].item()
        assert stats["policy_loss"].item() == pytest.approx(loss.sum().item(), abs=1e-9)
    advantages = {(s.prompt_id, s.index): s.advantages for s in samples}
    expected, plain_slopes = plain_objective(groups, row, advantages, config, stale)
    assert total / divisor == pytest.approx(expected, abs=1e-6)
    assert slopes.keys() == plain_slopes.keys()
    for place, slope in slopes.items():
        assert slope / divisor == pytest.approx(plain_slopes[place], abs=1e-6), place
        assert (slope == 0.0) or (plain_slopes[place] != 0.0), (
            "a masked or clipped token has a gradient of exactly 0"
        )


def exact(targets: PackedTargets, samples: list[Sample], config: Algorithm) -> PackedTargets:
    """The columns with all the bits that float32 took from them."""
    mean = MEANS[config.mean]
    names = ("logprobs", "advantages", "reference_logprobs")
    rows = {name: [x for sample in samples for x in vars(sample)[name] or ()] for name in names}
    rows["weights"] = [
        weight
        for sample in samples
        for weight in mean(len(sample.response), config.max_new_tokens)[0]
    ]
    rows = {name: torch.tensor(row, dtype=torch.float64) for name, row in rows.items()}
    columns = {
        "engine_logprobs": rows["logprobs"],
        "advantages": rows["advantages"],
        "weights": rows["weights"],
    }
    if targets.reference_logprobs is not None:
        columns["reference_logprobs"] = rows["reference_logprobs"]
    return replace(targets, **columns)


@pytest.mark.parametrize("row", ROWS)
@settings(max_examples=25, deadline=None)
@given(groups=GROUPS, kl=st.sampled_from([0.0, 0.5]))
def test_a_masked_token_gives_a_gradient_of_exactly_zero(row, groups, kl):
    """Whatever else is in the loss, and though a ratio be infinite; what isn't masked has one."""
    config = settings_of(row, icepop_bound=1.5, max_new_tokens=6, kl_coef=kl, entropy_coef=0.1)
    samples = with_advantages(samples_of(groups), config)
    for sample in samples:
        sample.reference_logprobs = sample.reference_logprobs if kl else None
    targets = pack_targets(samples, 0, {}, config, CPU)
    now = torch.tensor([token[2] for group in groups for _, tokens in group for token in tokens])
    now[0] = 200.0
    now.requires_grad_()
    slots = torch.arange(len(now))
    loss, stats = policy_loss(targets, config, same, slots, now, -now)
    loss.sum().backward()
    ratio = (now.detach() - targets.engine_logprobs).exp()
    kept = (ratio >= 1 / 1.5) & (ratio <= 1.5)
    assert (
        torch.equal(now.grad[~kept], torch.zeros_like(now.grad[~kept]))
        and stats["masked_frac"] == (~kept).sum()
    )
    assert not kept[0] and now.grad.isfinite().all() and (loss[~kept] == 0).all()
    if kept.any():
        assert (now.grad[kept] != 0).any()


@pytest.mark.parametrize("pieces", [2, 3])
@settings(max_examples=25, deadline=None)
@given(groups=GROUPS, seed=st.integers(0, 99))
def test_a_sequence_s_mean_over_context_parallel_ranks(pieces, groups, seed):
    """Each holds some targets of every answer; `total` adds up what all have."""
    rng, lengths = random.Random(seed), [len(tokens) for group in groups for _, tokens in group]
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    x = torch.tensor([rng.gauss(0, 1) for _ in sequence], dtype=torch.float64)
    holder = torch.tensor([rng.randrange(pieces) for _ in sequence])
    divisor = torch.tensor(lengths, dtype=torch.float64)
    sums = sum(
        divisor.new_zeros(len(lengths)).index_add(0, sequence[holder == p], x[holder == p])
        for p in range(pieces)
    )
    for piece in range(pieces):
        mine = sequence[holder == piece]
        tokens = LossInputs(
            x[holder == piece],
            x[holder == piece],
            x[holder == piece],
            mine,
            divisor,
            lambda part: sums,
        )
        plain = [
            sum(v.item() for v, s in zip(x, sequence, strict=True) if s == one) / lengths[one]
            for one in mine.tolist()
        ]
        assert tokens.mean_of_sequence(x[holder == piece]).tolist() == pytest.approx(
            plain, abs=1e-9
        )


# ---------------------------------------------------------------------------- tokens that older weights wrote

SETTINGS = settings_of()
logprob = st.floats(-6, 0, width=32)


def same(sums: torch.Tensor) -> torch.Tensor:
    """One context-parallel rank."""
    return sums


def targets_from(engine, advantages, stale, proximal) -> PackedTargets:
    """Tokens of one answer each, every one of the same weight."""
    ones = torch.ones(len(engine), dtype=engine.dtype)
    sequence = torch.arange(len(engine))
    return PackedTargets(
        engine, advantages, stale, proximal, ones, ones.long(), sequence, ones, None
    )


def columns_of(tokens) -> tuple[torch.Tensor, PackedTargets]:
    """float64 tensors of (now, engine, proximal, advantage, stale) rows: what trains now, with a gradient,
    and what is known."""
    now, engine, proximal, advantages, stale = (
        torch.tensor(column) for column in zip(*tokens, strict=True)
    )
    return now.double().requires_grad_(), targets_from(
        engine.double(), advantages.double(), stale, proximal.double()
    )


def test_in_bfloat16_engines_are_corrected_for():
    """By default; gspo insists, and takes either way."""
    assert (
        algorithm_of(Config(dtype="bfloat16")).tis_cap == 2.0
        and algorithm_of(Config()).tis_cap == 0.0
    )
    assert algorithm_of(Config(algorithm=("grpo", "tis_cap=0"), dtype="bfloat16")).tis_cap == 0.0
    masked = ("gspo", "tis_cap=0", "icepop_bound=3")
    assert algorithm_of(Config(algorithm=masked, dtype="bfloat16")).icepop_bound == 3.0
    assert algorithm_of(Config(algorithm=("gspo", "tis_cap=0"))).tis_cap == 0.0
    with pytest.raises(
        ValueError, match="gspo tis_cap=0 needs tis_cap or icepop_bound with --dtype"
    ):
        algorithm_of(Config(algorithm=("gspo", "tis_cap=0"), dtype="bfloat16"))


def test_what_is_no_number_is_no_agreement_with_the_engine():
    """A masked token has no gradient, whatever it is: the loss alone wouldn't tell."""
    for differences, agrees in (([0.0, 1e-5], True), ([0.0, 1.0], False), ([0.0, math.nan], False)):
        found = difference_stats(torch.tensor(differences))
        stats = {name: value.item() for name, value in found.items()}
        with (
            nullcontext()
            if agrees
            else pytest.raises(ValueError, match="differ from the engine's by")
        ):
            Actor._check_engine(SimpleNamespace(config=Config()), stats)


@given(
    st.lists(
        st.tuples(logprob, logprob, logprob, st.floats(-3, 3, width=32), st.booleans()),
        min_size=1,
        max_size=20,
    )
)
def test_the_loss_of_stale_tokens_is_the_plain_loop(tokens):
    """Loss, gradient and sums; targets come in another order than slots."""
    now, targets = columns_of(tokens)
    slots = torch.tensor(range(len(tokens))).flip(0)
    losses, stats = policy_loss(
        targets, SETTINGS, same, slots, now[slots], torch.zeros(len(tokens))
    )
    losses.sum().backward()
    total_weight, clips, fresh_difference = 0.0, 0, 0.0
    for (new, engine, proximal, advantage, stale), loss, slope in zip(
        tokens, losses.flip(0).tolist(), now.grad.tolist(), strict=True
    ):
        weight, old = (min(math.exp(proximal - engine), 2.0), proximal) if stale else (1.0, engine)
        ratio = math.exp(new - old)
        cut = min(max(ratio, 0.8), 1.28)
        is_cut = cut * advantage < ratio * advantage
        assert loss == pytest.approx(-weight * min(ratio * advantage, cut * advantage))
        if ratio not in (0.8, 1.28):
            assert slope == pytest.approx(0.0 if is_cut else -weight * ratio * advantage)
        total_weight, clips = total_weight + stale * weight, clips + is_cut
        fresh_difference = max(fresh_difference, 0.0 if stale else abs(new - engine))
    assert stats["policy_loss"].item() == pytest.approx(losses.sum().item())
    assert stats["stale_token_frac"].item() == sum(stale for *_, stale in tokens)
    assert stats["clip_frac"].item() == clips
    assert stats["stale_weight"].item() == pytest.approx(total_weight)
    assert stats["kl"].item() == pytest.approx(
        sum(engine - new for new, engine, *_ in tokens), abs=1e-9
    )
    assert stats["engine_logprob_diff_max"].item() == pytest.approx(fresh_difference)


def test_packed_targets_by_slot():
    """One column entry a response token, in the order of the samples."""
    one = Sample(
        0, 0, [1], response=[5, 6], logprobs=[-1.0, -2.0], versions=[2, 3], advantages=[0.5, 0.5]
    )
    two = Sample(0, 1, [1], response=[7], logprobs=[-3.0], versions=[3], advantages=[-0.5])
    by_sequence = settings_of(mean="sequence")
    known = pack_targets([two, one], 3, {(0, 0): [-1.5, -2.5]}, by_sequence, CPU)
    assert known.stale.tolist() == [False, True, False] and known.advantages.tolist() == [
        -0.5,
        0.5,
        0.5,
    ]
    assert known.engine_logprobs.tolist() == [
        -3.0,
        -1.0,
        -2.0,
    ] and known.proximal_logprobs.tolist()[1:] == [
        -1.5,
        -2.5,
    ]
    assert known.weights.tolist() == [1.0, 0.5, 0.5] and known.divisors.tolist() == [1, 1, 0]
    assert (
        known.sequence.tolist() == [0, 1, 1]
        and known.lengths.tolist() == [1.0, 2.0]
        and known.reference_logprobs is None
    )
    one.reference_logprobs, two.reference_logprobs = [-1.0, -1.0], [-7.0]
    assert pack_targets([two, one], 3, {}, SETTINGS, CPU).reference_logprobs.tolist() == [
        -7.0,
        -1.0,
        -1.0,
    ]
    assert pack_targets([], 3, {}, SETTINGS, CPU).proximal_logprobs is None


def test_metrics_of_two_optimizer_steps_by_hand():
    """Sums over both by the tokens of both; seconds lost in both by those of the slowest rank."""
    first = {
        "policy_loss": 2.0,
        "entropy": 4.0,
        "kl": 1.0,
        "clip_frac": 3.0,
        "tokens": 10.0,
        "reference_kl": 5.0,
    }
    first |= {
        "stale_token_frac": 4.0,
        "stale_weight": 6.0,
        "masked_frac": 2.0,
        "divisor": 4.0,
        "ptx_tokens": 0.0,
    }
    first |= {"not_finite": 0.0, "skipped": 0.0, "grad_norm": 1.0, "engine_logprob_diff_max": 0.1}
    first |= dict.fromkeys(DIFF_BINS, 0.0) | {"diff_bin_64": 3.0, "diff_bin_90": 1.0}
    first["engine_logprob_diff_sum"] = 0.2
    first |= {"slowest_s": 3.0, "fastest_s": 2.0}
    second = dict.fromkeys(first, 0.0) | {
        "engine_logprob_diff_max": 0.7,
        "slowest_s": 1.0,
        "fastest_s": 1.0,
        "skipped": 1.0,
    }
    assert update_metrics([first, second], 0.01) == {
        "train/loss": 0.5,
        "train/reference_kl": 0.5,
        "train/masked_frac": 0.2,
        "train/entropy": 0.4,
        "train/kl": 0.1,
        "train/clip_frac": 0.3,
        "train/grad_norm": 0.5,
        "train/lr": 0.01,
        "train/tokens": 10.0,
        "train/skipped": 1.0,
        "train/not_finite": 0.0,
        "train/engine_logprob_diff_mean": 0.05,
        "train/engine_logprob_diff_p999": 10 ** (90 / 16 - 7),
        "train/engine_logprob_diff_max": 0.1,
        "train/seconds_spread": 0.25,
        "train/stale_token_frac": 0.4,
        "train/stale_weight_mean": 1.5,
    }
    assert update_metrics([second], 0.01)["train/stale_weight_mean"] == 1.0
    third = first | {"not_finite": 1.0, "skipped": 1.0}
    skips = update_metrics([first, second, third], 0.01)
    assert (skips["train/skipped"], skips["train/not_finite"]) == (2.0, 1.0)


# ------------------------------------------------------------------------------- settings on the command line


def test_a_row_brings_its_own_settings_and_the_command_line_overrides_them():
    assert algorithm_of(Config(algorithm=("gspo",))).clip_high == 4e-4
    got = algorithm_of(
        Config(
            algorithm=("gspo", "clip_high=1e-3", "ptx_batch=3", "kl_in=reward"), max_new_tokens=50
        )
    )
    assert (got.clip_low, got.clip_high, got.ptx_batch, got.kl_in, got.max_new_tokens) == (
        3e-4,
        1e-3,
        3,
        "reward",
        50,
    )
    assert got.loss is gspo_loss and ALGORITHMS["gspo"].clip_high == 4e-4


@pytest.mark.parametrize(
    "given, message",
    [
        (
            ("a2c",),
            r"--algorithm a2c is unknown; choose one of: grpo, dr_grpo, rloo, reinforce\+\+, ",
        ),
        (("ppo", "lambda=1"), r"lambda=1 is none of the settings clip_low=0.2, clip_high=0.28, "),
        (("ppo", "gamma=half"), "gamma=half is none of the settings"),
        (("ppo", "gamma=1.1"), "ppo gamma=1.1 needs gamma from 0 to 1"),
        (("ppo", "gae_lambda=nan"), "needs gae_lambda from 0 to 1"),
        (("ppo", "critic_warmup=7"), "needs critic_warmup below --steps 7"),
        (("grpo", "critic_warmup=1"), "needs a critic for --critic and critic_warmup"),
        (("grpo", "kl_in=both"), "needs kl_in=loss or kl_in=reward"),
        (("grpo", "kl_estimator=k4"), "needs kl_estimator one of k1, k2, k3"),
        (("grpo", "icepop_bound=0.5"), "needs icepop_bound=0 or more than 1"),
        (("grpo", "overlong_from=9"), "needs overlong_from below --max-new-tokens 9"),
        (("grpo", "ptx_coef=0.1"), "needs both of ptx_coef and ptx_data"),
        (("safe_rlhf",), "safe_rlhf needs a --cost-rule or a --cost-judge"),
    ],
)
def test_a_setting_that_cannot_be_is_named_in_one_line(given, message):
    with pytest.raises(ValueError, match=message) as error:
        algorithm_of(Config(algorithm=given, steps=7, max_new_tokens=9))
    assert "\n" not in str(error.value)


def test_what_a_run_gives_that_an_algorithm_cannot_use():
    with pytest.raises(ValueError, match="needs --answers-per-prompt 2 or more"):
        algorithm_of(Config(answers_per_prompt=1))
    assert algorithm_of(Config(algorithm=("remax",), answers_per_prompt=1)).greedy
    assert algorithm_of(
        Config(algorithm=("ppo",), answers_per_prompt=1)
    ).critics  # which are its baseline
    with pytest.raises(ValueError, match="needs a critic for --critic"):
        algorithm_of(Config(model="m", rule=("right",), critic="c"))
    assert algorithm_of(Config(algorithm=("safe_rlhf",), cost_rule=("length:9",))).critics == (
        "reward",
        "cost",
    )


def test_algorithms_import_without_torch():
    code = "import algorithms, sys; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent).returncode
        == 0
    )
