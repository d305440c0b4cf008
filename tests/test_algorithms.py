"""Advantages and losses: values worked by hand, and a plain float64 loop over random ones."""

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms import ALGORITHMS, clipped_loss, grpo_advantages, set_advantages, stale_weights
from objective import Known, known_of, policy_loss, update_metrics
from rollout import Sample


def answer(prompt_id: int, index: int, reward: float | None, tokens: int) -> Sample:
    return Sample(prompt_id, index, prompt=[1], response=[2] * tokens, reward=reward)


def test_grpo_advantages_by_hand():
    # mean 0.25, population std sqrt(3)/4 = 0.4330127
    assert grpo_advantages([1.0, 0.0, 0.0, 0.0]) == pytest.approx([0.75 / 0.4331127] + [-0.25 / 0.4331127] * 3)
    assert grpo_advantages([1.0, 1.0, 1.0]) == [0.0, 0.0, 0.0]  # nothing to tell the answers apart
    assert grpo_advantages([0.7]) == [0.0]


def test_set_advantages_groups_by_prompt_whatever_the_order():
    samples = [answer(7, 0, 1.0, 2), answer(8, 0, 0.5, 1), answer(7, 1, 0.0, 3), answer(8, 1, 0.5, 0)]
    set_advantages(samples, "grpo")
    one = 0.5 / 0.5001
    assert samples[0].advantages == pytest.approx([one, one])
    assert samples[2].advantages == pytest.approx([-one] * 3)
    assert samples[1].advantages == [0.0] and samples[3].advantages == []


def test_a_sample_without_a_reward_is_refused():
    with pytest.raises(AssertionError, match="sample 1 of prompt 3 has no reward"):
        set_advantages([answer(3, 1, None, 2)], "grpo")


def test_an_unknown_algorithm_is_answered_with_the_rows_there_are():
    with pytest.raises(ValueError, match="'ppo' is unknown; choose one of: grpo"):
        set_advantages([answer(0, 0, 1.0, 1)], "ppo")
    assert list(ALGORITHMS) == ["grpo"]


@pytest.mark.parametrize(
    "ratio, advantage, loss, clipped",
    [
        (1.00, 2.0, -2.00, False),  # on-policy
        (1.25, 2.0, -2.50, False),  # above 1 + 0.2, but clip-higher leaves room up to 1.28
        (1.50, 2.0, -2.56, True),  # a good token is already likelier by more than 1.28: no more push
        (0.50, 2.0, -1.00, False),  # a good token became less likely: full push back
        (0.50, -2.0, 1.60, True),  # a bad token is already less likely than 1 - 0.2
        (1.50, -2.0, 3.00, False),  # a bad token became likelier: full push back
    ],
)
def test_clipped_loss_by_hand(ratio, advantage, loss, clipped):
    logprobs = torch.tensor([-1.0 + math.log(ratio)], requires_grad=True)
    value, flag = clipped_loss(logprobs, torch.tensor([-1.0]), torch.tensor([advantage]), 0.2, 0.28)
    assert value.item() == pytest.approx(loss) and flag.item() is clipped
    value.sum().backward()
    assert logprobs.grad.item() == pytest.approx(0.0 if clipped else -ratio * advantage)


logprob = st.floats(-6, 0, width=32)


@given(st.lists(st.tuples(logprob, logprob, st.floats(-3, 3, width=32)), min_size=1, max_size=20))
def test_clipped_loss_is_the_plain_loop(tokens):
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True)]
    losses, flags = clipped_loss(*columns, 0.2, 0.28)
    for (new, old, advantage), loss, flag in zip(tokens, losses.tolist(), flags.tolist(), strict=True):
        ratio = math.exp(new - old)
        cut = min(max(ratio, 0.8), 1.28)
        assert loss == pytest.approx(-min(ratio * advantage, cut * advantage))
        assert flag == (cut * advantage < ratio * advantage)


@given(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=16))
def test_grpo_advantages_are_the_plain_loop(rewards):
    mean = math.fsum(rewards) / len(rewards)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
    expected = [(reward - mean) / (std + 1e-4) for reward in rewards]
    assert grpo_advantages(rewards) == pytest.approx(expected, abs=1e-6)


# ------------------------------------------------------------------------------------------- tokens that older weights wrote

SETTINGS = SimpleNamespace(clip_low=0.2, clip_high=0.28, stale_weight_max=2.0)


def columns_of(tokens) -> tuple[torch.Tensor, Known]:
    """float64 tensors of (now, engine, proximal, advantage, stale) rows: what trains now, with a gradient, and what is known."""
    now, engine, proximal, advantages, stale = (torch.tensor(column) for column in zip(*tokens, strict=True))
    return now.double().requires_grad_(), Known(engine.double(), advantages.double(), stale, proximal.double())


def test_stale_weights_by_hand():
    """Likelier, less likely, cut off at 2; a constant for the gradient."""
    proximal = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    weights = stale_weights(proximal, torch.tensor([-1.0 - math.log(1.5), -1.0 + math.log(4), -9.0]), 2.0)
    assert weights.tolist() == pytest.approx([1.5, 0.25, 2.0]) and not weights.requires_grad


@given(st.lists(st.tuples(logprob, logprob, logprob, st.floats(-3, 3, width=32), st.booleans()), min_size=1, max_size=20))
def test_the_loss_of_stale_tokens_is_the_plain_loop(tokens):
    """Loss, gradient and sums; targets come in another order than slots."""
    now, known = columns_of(tokens)
    slots = torch.tensor(range(len(tokens))).flip(0)
    losses, stats = policy_loss(known, ALGORITHMS["grpo"], SETTINGS, slots, now[slots], torch.zeros(len(tokens)))
    losses.sum().backward()
    total_weight, clips, fresh_difference = 0.0, 0, 0.0
    for (new, engine, proximal, advantage, stale), loss, slope in zip(tokens, losses.flip(0).tolist(), now.grad.tolist(), strict=True):
        weight, old = (min(math.exp(proximal - engine), 2.0), proximal) if stale else (1.0, engine)
        ratio = math.exp(new - old)
        cut = min(max(ratio, 0.8), 1.28)
        is_cut = cut * advantage < ratio * advantage
        assert loss == pytest.approx(-weight * min(ratio * advantage, cut * advantage))
        if ratio not in (0.8, 1.28):
            assert slope == pytest.approx(0.0 if is_cut else -weight * ratio * advantage)
        total_weight, clips = total_weight + stale * weight, clips + is_cut
        fresh_difference = max(fresh_difference, 0.0 if stale else abs(new - engine))
    assert stats["loss"].item() == pytest.approx(losses.sum().item())
    assert stats["stale"].item() == sum(stale for *_, stale in tokens) and stats["clipped"].item() == clips
    assert stats["stale_weight"].item() == pytest.approx(total_weight)
    assert stats["kl"].item() == pytest.approx(sum(engine - new for new, engine, *_ in tokens), abs=1e-9)
    assert stats["engine_logprob_diff_max"].item() == pytest.approx(fresh_difference)


@given(st.lists(st.tuples(logprob, logprob, logprob, st.floats(-3, 3, width=32), st.just(False)), min_size=1, max_size=20))
def test_fresh_tokens_have_the_algorithm_s_loss_bit_for_bit(tokens):
    """And its gradient."""
    slots = torch.tensor(range(len(tokens)))
    (now, known), (plain, _) = columns_of(tokens), columns_of(tokens)
    losses, _ = policy_loss(known, ALGORITHMS["grpo"], SETTINGS, slots, now, torch.zeros(len(tokens)))
    expected, _ = clipped_loss(plain, known.engine_logprobs, known.advantages, 0.2, 0.28)
    losses.sum().backward()
    expected.sum().backward()
    assert torch.equal(losses, expected) and torch.equal(now.grad, plain.grad)


def test_without_a_pass_before_the_weights_that_train_are_the_proximal_ones():
    """Then a stale token's ratio is 1 and its gradient the weight times the advantage."""
    now = torch.tensor([-1.0, -1.0], requires_grad=True)
    known = Known(torch.tensor([-1.0 - math.log(1.5), -9.0]), torch.tensor([2.0, 2.0]), torch.tensor([True, True]), None)
    losses, stats = policy_loss(known, ALGORITHMS["grpo"], SETTINGS, torch.tensor([0, 1]), now, torch.zeros(2))
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([-3.0, -4.0]) and now.grad.tolist() == pytest.approx([-3.0, -4.0])
    assert stats["clipped"].item() == 0


def test_what_is_known_by_slot():
    """One column entry a response token, in the order of the samples."""
    one = Sample(0, 0, [1], response=[5, 6], logprobs=[-1.0, -2.0], versions=[2, 3], advantages=[0.5, 0.5])
    two = Sample(0, 1, [1], response=[7], logprobs=[-3.0], versions=[3], advantages=[-0.5])
    known = known_of([two, one], 3, {(0, 0): [-1.5, -2.5]}, torch.device("cpu"))
    assert known.stale.tolist() == [False, True, False] and known.advantages.tolist() == [-0.5, 0.5, 0.5]
    assert known.engine_logprobs.tolist() == [-3.0, -1.0, -2.0] and known.proximal_logprobs.tolist()[1:] == [-1.5, -2.5]
    assert known_of([], 3, {}, torch.device("cpu")).proximal_logprobs is None


def test_metrics_of_two_optimizer_steps_by_hand():
    """Sums over both by the tokens of both; seconds lost in both by those of the slowest rank."""
    first = {"loss": 2.0, "entropy": 4.0, "kl": 1.0, "clipped": 3.0, "tokens": 10.0, "stale": 4.0, "stale_weight": 6.0}
    first |= {"not_finite": 0.0, "micro_batches": 2.0, "grad_norm": 1.0, "engine_logprob_diff_max": 0.1, "slowest": 3.0, "fastest": 2.0}
    second = dict.fromkeys(first, 0.0) | {"micro_batches": 2.0, "engine_logprob_diff_max": 0.7, "slowest": 1.0, "fastest": 1.0}
    assert update_metrics([first, second], 0.01) == {
        "train/loss": 0.2, "train/entropy": 0.4, "train/kl": 0.1, "train/clip_frac": 0.3, "train/grad_norm": 0.5, "train/lr": 0.01,
        "train/tokens": 10.0, "train/micro_batches": 4.0, "train/skipped": 1.0, "train/not_finite": 0.0,
        "train/engine_logprob_diff_max": 0.1,
        "train/seconds_spread": 0.25, "train/stale_token_frac": 0.4, "train/stale_weight_mean": 1.5,
    }  # fmt: skip
    assert update_metrics([second], 0.01)["train/stale_weight_mean"] == 1.0
    third = first | {"not_finite": 1.0}
    skips = update_metrics([first, second, third], 0.01)
    assert (skips["train/skipped"], skips["train/not_finite"]) == (2.0, 1.0)


def test_algorithms_import_without_torch():
    code = "import algorithms, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent).returncode == 0
