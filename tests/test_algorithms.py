"""Advantages and losses: values worked by hand, and a plain float64 loop over random ones."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms import ALGORITHMS, clipped_loss, grpo_advantages, set_advantages
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


def test_algorithms_import_without_torch():
    code = "import algorithms, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent).returncode == 0
