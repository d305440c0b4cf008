"""Advantages and losses: values worked out by hand, and plain float64 loops over random ragged batches,
written from the papers' formulas, one token at a time, without any of the project's code."""

import math
import random
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import permutations
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import actor
import algorithms
from actor import STATS, PackedTargets, pack_targets, policy_loss, update_metrics
from algorithms import ALGORITHMS, Algorithm, LossInputs, algorithm_of, moments, set_advantages
from config import Config
from rollout import outcomes_of
from runtime.errors import UserError
from sample import Outcome, Sample
from tests.support.columns import numbers

# rows whose plain loop is written below: a new row starts without one
ROWS = ["grpo", "grpo_2024", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline", "remax"]
ROWS += ["gspo", "cispo", "ppo", "safe_rlhf"]
CPU = torch.device("cpu")
LAMBDA = 0.7  # weight of the cost, in rows that have one


def settings_of(row: str = "grpo", **changes) -> Algorithm:
    return replace(ALGORITHMS[row], **{"max_new_tokens": 1024} | changes)


def answer(prompt_id: int, index: int, reward: float | None, tokens: int, **fields) -> Sample:
    fields |= dict(response=[2] * tokens, logprobs=[-0.5] * tokens, reward=reward)
    return Sample(prompt_id, index, prompt=[1], **fields)


def with_outcomes(samples: list[Sample]) -> list[Sample]:
    """Set what rollout sets while groups are whole."""
    for sample in samples:
        sample.outcomes = outcomes_of([s for s in samples if s.prompt_id == sample.prompt_id])
    return samples


def with_advantages(samples: list[Sample], algorithm: Algorithm) -> list[Sample]:
    """Compute what the controllers compute, on one rank."""
    set_advantages(samples, algorithm)
    if algorithm.whiten:
        algorithms.whiten(samples, [moments([a for sample in samples for a in sample.advantages])])
    return samples


def test_an_answer_alone_in_its_group_has_nothing_to_be_compared_with():
    assert algorithms.group_norm([0.7]) == algorithms.leave_one_out([0.4]) == [0.0]


def plain_scores(row: str, rewards: list[float]) -> list[float]:
    if row in ("reinforce++", "remax", "ppo", "safe_rlhf"):
        return rewards
    if row == "rloo":
        return [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    mean = sum(rewards) / len(rewards)
    if row in ("dr_grpo", "reinforce++_baseline"):
        return [r - mean for r in rewards]
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    return [(r - mean) / (std + 1e-4) for r in rewards]


FLOATS = st.floats(-3, 3, width=32)


def plain_sums(rewards: list[float], values: list[float], gamma: float, weight: float):
    """Return at each token the sum of later r + gamma V' - V, each step weighted `weight` less."""
    ahead = [*values[1:], 0.0]
    steps = range(len(rewards))
    deltas = [rewards[t] + gamma * ahead[t] - values[t] for t in steps]
    return [sum(weight ** (k - t) * deltas[k] for k in steps if k >= t) for t in steps]


@given(st.lists(st.tuples(FLOATS, FLOATS), max_size=12), st.floats(0, 1), st.floats(0, 1))
def test_the_estimators_are_the_plain_double_loop(tokens, gamma, lam):
    rewards, values = [r for r, _ in tokens], [v for _, v in tokens]
    config = settings_of(gamma=gamma, gae_lambda=lam)
    expected = plain_sums(rewards, values, gamma, gamma * lam)
    advantages, returns = algorithms.gae(rewards, values, config)
    assert advantages == pytest.approx(expected, abs=1e-6)
    with_values = [a + v for a, v in zip(expected, values, strict=True)]
    assert returns == pytest.approx(with_values, abs=1e-6)
    plain = plain_sums(rewards, [0.0] * len(rewards), gamma, gamma)
    assert algorithms.reward_to_go(rewards, None, config)[0] == pytest.approx(plain, abs=1e-6)


def test_a_sample_without_a_cost_is_refused():
    with pytest.raises(AssertionError, match="an answer that is trained on has no cost"):
        set_advantages(with_outcomes([answer(3, 1, 0.0, 2)]), settings_of(signals=("cost",)))


LOGPROB = st.floats(-4, 0, width=32)
TOKEN = st.tuples(LOGPROB, LOGPROB, LOGPROB, FLOATS)  # engine, reference, current; value
ANSWER = st.tuples(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.lists(TOKEN, min_size=1, max_size=6))
GROUPS = st.lists(st.lists(ANSWER, min_size=2, max_size=4), min_size=1, max_size=4)


def cost_of(reward: float, tokens: list) -> float:
    return 0.5 * len(tokens) - reward**2


def samples_of(groups) -> list[Sample]:
    samples = []
    for draw, group in enumerate(groups):
        for index, (reward, tokens) in enumerate(group):
            engine, reference, _, values = (list(column) for column in zip(*tokens, strict=True))
            sample = Sample(draw, index, [1], response=[2] * len(tokens), reward=reward)
            sample.logprobs, sample.policy_logprobs = engine, engine
            sample.reference_logprobs, sample.versions = reference, [0] * len(tokens)
            sample.values = {"reward": values, "cost": [0.3 - value / 2 for value in values]}
            sample.cost = cost_of(reward, tokens)
            samples.append(sample)
    return with_outcomes(samples)


def plain_kl(name: str, log_ratio: float) -> tuple[float, float]:
    return {
        "k1": (log_ratio, 1.0),
        "k2": (log_ratio**2 / 2, log_ratio),
        "k3": (math.exp(-log_ratio) - 1 + log_ratio, 1 - math.exp(-log_ratio)),
    }[name]


def plain_advantages(groups, row: str, config) -> dict[tuple[int, int], list[float]]:
    has_critic = row in ("ppo", "safe_rlhf")
    weight = config.gamma * (config.gae_lambda if has_critic else 1.0)
    kl_coef = config.kl_coef if config.kl_in == "reward" else 0.0

    def credit(score, kl, values):
        given = [*kl]
        given[-1] += score
        return plain_sums(given, values, config.gamma, weight)

    result = {}
    for draw, group in enumerate(groups):
        rewards, kls = [], []
        for reward, tokens in group:
            kl = [kl_coef * plain_kl(config.kl_estimator, e - r)[0] for e, r, *_ in tokens]
            over = 0.0
            if config.overlong_from and len(tokens) > config.overlong_from:
                room = config.max_new_tokens - config.overlong_from
                over = config.overlong_penalty * (len(tokens) - config.overlong_from) / room
            kls.append(kl)
            rewards.append(reward - min(over, config.overlong_penalty))
        scores = plain_scores(row, rewards)
        for index, (reward, tokens) in enumerate(group):
            values = [value * has_critic for *_, value in tokens]
            found = credit(scores[index], [-kl for kl in kls[index]], values)
            if row == "safe_rlhf":
                values = [0.3 - value / 2 for *_, value in tokens]
                costs = credit(cost_of(reward, tokens), kls[index], values)
                both = zip(found, costs, strict=True)
                found = [(a - LAMBDA * c) / (1 + LAMBDA) for a, c in both]
            result[draw, index] = found
    if row in ("reinforce++", "reinforce++_baseline", "ppo", "safe_rlhf"):
        every = [a for answer in result.values() for a in answer]
        mean = sum(every) / len(every)
        std = math.sqrt(sum((a - mean) ** 2 for a in every) / len(every)) + 1e-8
        result = {key: [(a - mean) / std for a in answer] for key, answer in result.items()}
    return result


CHOICES = dict(gamma=[1.0, 0.9], gae_lambda=[1.0, 0.8], kl_coef=[0.0, 0.3])
CHOICES |= dict(kl_in=["reward", "loss"], kl_estimator=list(algorithms.KL_ESTIMATORS))
CHOICES |= dict(entropy_coef=[0.0, 0.1], tis_cap=[0.0, 2.0], dtype=["float32", "bfloat16"])
CHOICES |= dict(overlong_from=[0, 3], overlong_penalty=[0.5], max_new_tokens=[6])
CHOICES |= dict(clip_low=[0.2], clip_high=[0.28])
CHANGES = st.fixed_dictionaries({name: st.sampled_from(CHOICES[name]) for name in CHOICES})
STEP = dict(groups=GROUPS, changes=CHANGES, parts=st.integers(1, 4), seed=st.integers(0, 99))
# 2: the weights at the start of the step are those that train
STEP |= dict(start_column=st.sampled_from([1, 2]), stale_part=st.sampled_from([0.0, 0.3]))


@pytest.mark.parametrize("row", ROWS)
@settings(max_examples=25, deadline=None)
@given(groups=GROUPS, changes=CHANGES, ranks=st.integers(1, 3), seed=st.integers(0, 99))
def test_advantages_are_the_plain_loop_wherever_the_samples_are(row, groups, changes, ranks, seed):
    config, rng = settings_of(row, **changes), random.Random(seed)
    shares = [[] for _ in range(ranks)]
    for sample in samples_of(groups):
        rng.choice(shares).append(sample)
    for share in shares:
        set_advantages(share, config, LAMBDA)
    if ALGORITHMS[row].whiten:
        parts = [moments([a for sample in share for a in sample.advantages]) for share in shares]
        for share in shares:
            algorithms.whiten(share, parts)
    expected = plain_advantages(groups, row, config)
    every = [a for answer in expected.values() for a in answer]
    if ALGORITHMS[row].whiten and max(every) - min(every) < 1e-3:
        return  # only rounding errors would be whitened
    for sample in (sample for share in shares for sample in share):
        assert sample.advantages == pytest.approx(expected[sample.key], abs=1e-6)


def test_remax_takes_the_greedy_answer_s_reward_off():
    """The length penalty must be subtracted from it as well; the greedy answer isn't trained on."""
    config = settings_of("remax", overlong_from=4, overlong_penalty=0.5, max_new_tokens=8)
    group = [answer(0, 0, 1.0, 2), answer(0, 1, 0.25, 3), answer(0, 2, 0.5, 6, greedy=True)]
    trained = with_outcomes(group)[:2]
    found = [sample.advantages for sample in with_advantages(trained, config)]
    assert found == [[0.75] * 2, [0.0] * 3]
    found = [sample.advantages for sample in with_advantages(with_outcomes(trained), config)]
    assert found == [[1.0] * 2, [0.25] * 3]


def test_the_clip_by_hand():
    """Ratios too far in the right direction are clipped; those in the wrong one are pulled back in full."""
    ratio = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    loss, clipped = algorithms.clip(ratio, advantages, settings_of(clip_low=0.2, clip_high=0.28))
    assert loss.tolist() == pytest.approx([-1.28, 1.5, -0.5, 0.8, -2.2])
    assert clipped.tolist() == [True, False, False, True, False]


@pytest.mark.parametrize("row", ["grpo", "gspo", "cispo"])
def test_a_ratio_that_no_float_holds_is_no_nan(row):
    """e^100 times a gradient of 0, or an advantage of 0, must be 0."""
    now = torch.zeros(2, requires_grad=True)
    columns = (torch.full((2,), -100.0), torch.tensor([1.0, 0.0]))
    tokens = LossInputs(now, *columns, torch.arange(2), torch.ones(2))
    loss, _ = ALGORITHMS[row].loss(tokens, settings_of(row))
    loss.sum().backward()
    assert loss.isfinite().all() and now.grad.isfinite().all() and now.grad[1] == 0
    assert algorithms.KL_ESTIMATORS["k3"](torch.tensor(-100.0)).isfinite()


def test_cispo_clips_the_weight_of_a_token_but_not_its_gradient():
    """With the row's own settings, tokens that the policy has left must not be pulled back to a bound."""
    now = torch.tensor([-1 + math.log(1.5), -1 + math.log(0.135)], requires_grad=True)
    columns = (torch.tensor([-1.0, -1.0]), torch.tensor([2.0, -1.0]))
    tokens = LossInputs(now, *columns, torch.zeros(2, dtype=torch.int64), torch.tensor([2.0]))
    loss, clipped = algorithms.cispo_loss(tokens, settings_of("cispo"))
    loss.sum().backward()
    assert now.grad.tolist() == pytest.approx([-1.28 * 2, 0.135])
    assert clipped.tolist() == [True, False]


def loss_of(targets: PackedTargets, config: Algorithm, slots, logprobs, entropy) -> tuple:
    """Return the sum and statistics of a policy's loss if its model gives these log-probabilities."""
    loss = partial(policy_loss, lambda batch, output: output, targets, config)
    total, divisor, stats = loss(SimpleNamespace(slots=slots), (logprobs, entropy))
    assert stats["loss"] == total and stats["divisor"] == divisor
    return total, stats


def plain_objective(groups, row: str, advantages, config, stale, start_column):
    """Return a step's loss, slopes and sums, with `stale` tokens and `start_column` per token."""
    total, divisor, slopes, sums = 0.0, 0.0, {}, Counter()
    corrects = config.tis_cap and config.dtype == "bfloat16"
    for key, tokens in answers_of(groups):
        n = len(tokens)
        by_answer = {"dr_grpo": config.max_new_tokens, "gspo": n, "grpo_2024": n}
        per_token = 1 / by_answer.get(row, 1)
        divisor += 1 if row in by_answer else n
        engine, now = [token[0] for token in tokens], [token[2] for token in tokens]
        start = [token[start_column] for token in tokens]
        old = [start[t] if corrects or stale[key, t] else engine[t] for t in range(n)]
        s = math.exp(sum(now[t] - old[t] for t in range(n)) / n)
        for t in range(n):
            weight, off = 1.0, math.exp(start[t] - engine[t])
            if stale[key, t]:
                weight = min(off, config.behavior_weight_cap)
                sums["stale_weight"] += weight
            elif corrects:
                weight = min(off, config.tis_cap)
            a, r = advantages[key][t], s if row == "gspo" else math.exp(now[t] - old[t])
            cut = min(max(r, 1 - config.clip_low), 1 + config.clip_high)
            loss, slope, clipped = -r * a, -r * a, -cut * a > -r * a
            if row == "cispo":
                loss, slope, clipped = -cut * a * now[t], -cut * a, cut != r
            elif clipped:
                loss, slope = -cut * a, 0.0
            loss, slope = weight * loss, weight * slope
            if config.kl_coef and config.kl_in == "loss":
                kl, kl_slope = plain_kl(config.kl_estimator, now[t] - tokens[t][1])
                loss, slope = loss + config.kl_coef * kl, slope + config.kl_coef * kl_slope
            loss -= config.entropy_coef * 0.7 * now[t]
            slope -= config.entropy_coef * 0.7
            sums.update(clip_frac=clipped, stale_token_frac=stale[key, t], kl=engine[t] - now[t])
            total += per_token * loss
            slopes[key, t] = per_token * slope
    slopes = {where: slope / divisor for where, slope in slopes.items()}
    return total / divisor, slopes, sums


def answers_of(groups) -> list[tuple[tuple[int, int], list]]:
    return [((d, i), row[1]) for d, group in enumerate(groups) for i, row in enumerate(group)]


def near_a_kink(groups, config) -> bool:
    """Return True if a ratio is so near a bound that rounding decides on which side it is."""
    bounds = [1 - config.clip_low, 1 + config.clip_high, config.behavior_weight_cap]
    bounds.append(config.tis_cap or 9e9)
    offs = []
    for _, tokens in answers_of(groups):
        rows = [[a - b for a, b in permutations(token[:3], 2)] for token in tokens]
        offs += [off for row in rows for off in row]
        offs += [sum(column) / len(tokens) for column in zip(*rows, strict=True)]
    return any(abs(off - math.log(bound)) < 1e-4 for off in offs for bound in bounds)


@pytest.mark.parametrize("row", ROWS)
@settings(max_examples=20, deadline=None)
@given(**STEP)
def test_the_objective_of_a_step_is_the_plain_loop_however_it_is_split(row, **drawn):
    """Loss, slopes and sums must agree for micro-batches in any order and targets in any order."""
    groups, parts, start_column = drawn["groups"], drawn["parts"], drawn["start_column"]
    config, rng = settings_of(row, **drawn["changes"]), random.Random(drawn["seed"])
    if near_a_kink(groups, config):
        return
    samples, answers = with_advantages(samples_of(groups), config), answers_of(groups)
    now = {(key, t): token[2] for key, tokens in answers for t, token in enumerate(tokens)}
    stale = {place: rng.random() < drawn["stale_part"] for place in now}
    start = {key: [token[1] for token in tokens] for key, tokens in answers}
    micro_batches = [[] for _ in range(parts)]
    for sample in samples:
        sample.reference_logprobs = sample.reference_logprobs if config.kl_coef else None
        sample.versions = [int(not stale[sample.key, t]) for t in range(len(sample.response))]
        rng.choice(micro_batches).append(sample)
    slopes, sums = {}, Counter()
    for micro_batch in micro_batches:
        targets = pack_targets(micro_batch, 1, start if start_column == 1 else {}, config, CPU)
        where = [(s.key, t) for s in micro_batch for t in range(len(s.response))]
        logprobs = torch.tensor([now[place] for place in where], dtype=torch.float64)
        logprobs.requires_grad_()
        order = torch.tensor(rng.sample(range(len(where)), len(where)), dtype=torch.int64)
        columns = (order, logprobs[order], 0.7 * logprobs[order])
        loss, stats = loss_of(exact(targets, micro_batch, config), config, *columns)
        loss.backward()
        slopes |= dict(zip(where, logprobs.grad.tolist(), strict=True))
        assert stats["policy_loss"].item() == pytest.approx(loss.item(), abs=1e-9)
        sums.update({name: value.item() for name, value in stats.items()})
    advantages = {sample.key: sample.advantages for sample in samples}
    expected = plain_objective(groups, row, advantages, config, stale, start_column)
    assert sums["policy_loss"] / sums["divisor"] == pytest.approx(expected[0], abs=1e-6)
    assert slopes.keys() == expected[1].keys()
    for place, slope in slopes.items():
        wanted = expected[1][place]
        assert slope / sums["divisor"] == pytest.approx(wanted, abs=1e-6), place
        assert slope == 0.0 or wanted != 0.0, "a clipped token's gradient is exactly 0"
    assert {name: sums[name] for name in expected[2]} == pytest.approx(expected[2], abs=1e-6)


def exact(targets: PackedTargets, samples: list[Sample], config: Algorithm) -> PackedTargets:
    """Return the columns in float64, rounded to float32 first."""
    mean = algorithms.MEANS[config.mean]
    weights = [w for s in samples for w in mean(len(s.response), config.max_new_tokens)[0]]
    advantages = [advantage for sample in samples for advantage in sample.advantages]
    rows = {"mean_weights": weights, "advantages": advantages}
    columns = {name: torch.tensor(row, dtype=torch.float64) for name, row in rows.items()}
    for name in ("engine_logprobs", "proximal_logprobs", "reference_logprobs"):
        columns[name] = vars(targets)[name]
    known = {name: column for name, column in columns.items() if column is not None}
    return replace(targets, **{name: column.double() for name, column in known.items()})


def test_in_bfloat16_engines_are_corrected_for():
    """Engines must be corrected for by default in bfloat16 and in no other dtype; gspo requires it."""

    def found(*given, dtype="bfloat16"):
        return algorithm_of(Config(algorithm=given, dtype=dtype))

    assert found("grpo").corrects_mismatch and found("grpo").tis_cap == 2.0
    assert not found("grpo", dtype="float32").corrects_mismatch
    assert not found("grpo", "tis_cap=0").corrects_mismatch
    assert not found("gspo", "tis_cap=0", dtype="float32").corrects_mismatch
    with pytest.raises(ValueError, match="tis_cap=0 needs tis_cap with --dtype"):
        found("gspo", "tis_cap=0")


@pytest.mark.parametrize("difference, agrees", [(1e-5, True), (1.0, False), (math.nan, False)])
def test_what_is_no_number_is_no_agreement_with_the_engine(difference, agrees):
    """A mean difference of NaN must also end the run."""
    found = actor.engine_stats(torch.tensor([0.0, difference]))
    stats = {name: value.item() for name, value in found.items()}
    refused = pytest.raises(ValueError, match="differ from the engine's by")
    with nullcontext() if agrees else refused:
        actor.Actor._check_engine(SimpleNamespace(config=Config()), stats)


def test_metrics_of_two_optimizer_steps_by_hand():
    """Metrics must be sums over both divided by the tokens of both; seconds are those of the slowest rank."""
    first = dict.fromkeys(STATS, 0.0) | numbers("""
        policy_loss=2 entropy=4 kl=1 clip_frac=3 tokens=10 reference_kl=5 stale_token_frac=4
        stale_weight=6 divisor=4 ptx=0 ptx_tokens=0 not_finite=0 skipped=0 grad_norm=1
        fresh_tokens=4 engine_logprob_diff_max=0.1 engine_logprob_diff_sum=0.2
        slowest_s=3 fastest_s=2 micro_batches=3""")
    second = dict.fromkeys(first, 0.0) | dict(slowest_s=1.0, fastest_s=1.0, skipped=1.0)
    second["engine_logprob_diff_max"] = 0.7
    expected = numbers("""
        loss=0.5 reference_kl=0.5 entropy=0.4 kl=0.1 clip_frac=0.3 grad_norm=1.0
        lr=0.01 tokens=10 skipped=1 not_finite=0 engine_logprob_diff_mean=0.05
        engine_logprob_diff_max=0.1 seconds_spread=0.25 stale_token_frac=0.4
        stale_weight_mean=1.5 micro_batches=3""")
    found = update_metrics([first, second], 0.01)
    assert found | {f"train/{name}": value for name, value in expected.items()} == found
    assert update_metrics([second], 0.01)["train/stale_weight_mean"] == 1.0
    third = first | {"not_finite": 1.0, "skipped": 1.0}
    skips = update_metrics([first, second, third], 0.01)
    assert (skips["train/skipped"], skips["train/not_finite"]) == (2.0, 1.0)
    texts = [first | {"ptx": 8.0, "ptx_tokens": 2.0}, second | {"ptx": 2.0, "ptx_tokens": 2.0}]
    assert update_metrics(texts, 0.01)["train/ptx_loss"] == 2.5


def test_a_row_brings_its_own_settings_and_the_command_line_overrides_them():
    given = ("gspo", "clip_high=1e-3", "ptx_batch=3", "kl_in=reward")
    got = algorithm_of(Config(algorithm=given, max_new_tokens=50))
    assert (got.clip_low, got.clip_high, got.ptx_batch) == (3e-4, 1e-3, 3)
    assert (got.kl_in, got.max_new_tokens, got.loss) == ("reward", 50, algorithms.gspo_loss)
    assert algorithm_of(Config(algorithm=("gspo",))).clip_high == 4e-4
    assert not ALGORITHMS["grpo_2024"].filters


@pytest.mark.parametrize("given, log_ratios", [("", "k3 k1"), ("kl_estimator=k2", "k2 k2")])
def test_the_kl_is_estimated_as_suits_its_place(given, log_ratios):
    for place, name in zip(("loss", "reward"), log_ratios.split(), strict=True):
        words = ("grpo", f"kl_in={place}", *given.split())
        found = algorithm_of(Config(algorithm=words)).kl(torch.tensor(0.5))
        assert found.item() == pytest.approx(plain_kl(name, 0.5)[0])


def test_defaults_of_the_run_stand_before_what_is_given():
    """Defaults must come before the settings that are given, and after the row's."""
    run = dict(algorithm_defaults=("critic_lr=1e-3", "clip_low=0.3"))
    found = algorithm_of(Config(algorithm=("cispo", "clip_low=0.4"), **run))
    assert (found.critic_lr, found.clip_low) == (1e-3, 0.4)
    assert algorithm_of(Config(algorithm=("cispo",), **run)).clip_low == 0.3


def shorter(rewards, lengths, algorithm):
    """Return the length reward of Kimi k1.5 (arXiv 2501.12599), section 2.3.3: short right answers gain."""
    spread = max(max(lengths) - min(lengths), 1)
    gains = [algorithm.own["weight"] * (0.5 - (n - min(lengths)) / spread) for n in lengths]
    pairs = zip(rewards, gains, strict=True)
    return algorithms.mean_baseline([r + (gain if r else min(gain, 0)) for r, gain in pairs])


def test_a_row_of_ones_own_has_settings_of_its_own_and_sees_lengths(monkeypatch):
    """Where all answers are right grpo replaces the group; this row must learn to be short."""
    row = Algorithm(shorter, algorithms.clipped_loss, own={"tau": 0.2, "weight": 1.0})
    monkeypatch.setitem(ALGORITHMS, "kimi", row)
    kimi = algorithm_of(Config(algorithm=("kimi", "tau=1", "clip_low=0.1")))
    assert (kimi.own, kimi.clip_low) == ({"tau": 1.0, "weight": 1.0}, 0.1) and row.own["tau"] == 0.2
    refused = {
        "grpo tau=1": "grpo tau=1: its settings are clip_low, clip_h",
        "kimi tau=x": "tau=x is not a valid float",
        "kimi x=1": "value_clip, tau, weight$",
        "kimi tau=nan": "kimi tau=nan: -9.2.*e.18 to 9.2.*e.18 is needed",
        "kimi tau=inf": "kimi tau=inf: -9",
    }
    for words, message in refused.items():
        with pytest.raises(ValueError, match=message):
            algorithm_of(Config(algorithm=tuple(words.split())))
    group = [Sample(0, n, [], response=[7] * (2 * n + 2), reward=1.0) for n in range(3)]
    set_advantages(with_outcomes(group), kimi)
    assert [sample.advantages[0] for sample in group] == [0.5, 0.0, -0.5]
    outcomes = group[0].outcomes
    assert algorithms.teaches(outcomes, kimi) and not algorithms.teaches(
        outcomes, ALGORITHMS["grpo"]
    )


JUDGED = [  # rewards; whether grpo, reinforce++ and remax (with a greedy last answer) learn
    ([0.0, 1.0, None], True, True, False),
    ([1.0, None], False, True, False),
    ([None, None], False, False, False),
    ([1.0, 1.0, 0.0], True, True, True),  # they differ from their baseline
    ([0.1, 0.1, 0.1], False, True, False),
]


@pytest.mark.parametrize("rewards,grpo,alone,remax", JUDGED)
def test_a_group_teaches_if_its_judged_answers_differ(rewards, grpo, alone, remax):
    """A failed judgement (None) must not make a group informative; without a baseline one is enough."""
    found = []
    for name in ("grpo", "reinforce++", "remax"):
        group = [Sample(0, i, [], reward=reward) for i, reward in enumerate(rewards)]
        group[-1].greedy = name == "remax"
        found.append(algorithms.teaches(outcomes_of(group), ALGORITHMS[name]))
    assert found == [grpo, alone, remax]


@pytest.mark.parametrize(
    "given, message",
    [
        ("a2c", "a2c is unknown; choose one of: .*grpo"),
        ("ppo lambda=1", "ppo lambda=1: its settings are clip_low, .* gae_lambda, "),
        ("ppo gamma=half", "gamma=half is not a valid float"),
        ("ppo gamma=1.1", "^--algorithm ppo gamma=1.1: 0 to 1 is needed$"),
        ("ppo gae_lambda=nan", "ppo gae_lambda=nan: 0 to 1 is needed"),
        ("grpo kl_coef=1 clip_low=2", "grpo clip_low=2: 0 to 1 is needed"),
        ("grpo critic_lr=0", "critic_lr=0: at least 1e-12 is needed"),
        ("grpo kl_in=both", "kl_in=both is unknown; choose loss or reward"),
        ("ppo critic_warmup=7", "needs critic_warmup below --steps 7"),
        ("grpo critic_warmup=1", "needs a critic for --critic and critic_warmup"),
        ("grpo kl_estimator=k4", "k4 is unknown; choose auto or k1 or k2 or k3"),
        ("grpo overlong_from=9", "needs overlong_from below --max-new-tokens 9"),
        ("grpo ptx_coef=0.1", "needs both ptx_coef and ptx_data"),
        ("safe_rlhf", "safe_rlhf needs a --cost-rule or a --cost-judge"),
    ],
)
def test_a_setting_that_cannot_be_is_named_in_one_line(given, message):
    with pytest.raises(ValueError, match=message) as error:
        algorithm_of(Config(algorithm=tuple(given.split()), steps=7, max_new_tokens=9))
    assert "\n" not in str(error.value)


def test_answers_of_a_prompt_are_compared_if_there_is_no_other_baseline():
    for row in ("grpo", "grpo_2024"):
        with pytest.raises(ValueError, match="needs --answers-per-prompt 2 or more"):
            algorithm_of(Config(algorithm=(row,), answers_per_prompt=1))
    for row in ("remax", "ppo"):
        algorithm_of(Config(algorithm=(row,), answers_per_prompt=1))


def test_a_row_scores_each_answer():
    """A user's score of another length must be one line with its place."""

    def score(rewards, lengths, algorithm):
        return rewards[1:]

    row = algorithms.Algorithm(score, algorithms.clipped_loss, name="mine")
    line = rf"^--algorithm mine: score \({__file__}:{score.__code__.co_firstlineno}\) returned 1 numbers"
    with pytest.raises(UserError, match=f"{line} for 2 answers$"):
        algorithms.teaches([Outcome(n, 3, 1.0, None, False) for n in range(2)], row)
