"""The critic of one rank, the value loss, and the reference model."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.make_demo.closing import close
from sample import Sample
from tests.support.plain import make_model, make_samples
from tests.workers.parallel import critic_config, supervised, weights_of

pytestmark = pytest.mark.usefixtures("constants")


def with_returns(samples: list[Sample], values: list[list[float]], seed: int) -> list[Sample]:
    """Set random returns around the values; `old_values` are up to 0.5 away, as if the critic had moved."""
    noise = random.Random(seed)
    for sample, row in zip(samples, values, strict=True):
        sample.true_values = row
        sample.old_values = [value + noise.uniform(-0.5, 0.5) for value in row]
        sample.returns = {"reward": [value + noise.gauss(0, 0.5) for value in row]}
        sample.values = {"reward": sample.old_values}
    return samples


def trained_on(step: int) -> list[Sample]:
    return [sample for sample in make_samples(step) if sample.advantages is not None]


@pytest.fixture
def start(build):
    from actor import Actor
    from extras.critic import Critic

    def make(model_dir: str, critic_dir: str = "", **changes) -> list:
        config = critic_config(**changes)
        return build((Actor, config, model_dir), (Critic, config, critic_dir or model_dir))

    return make


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True)


def same_weights(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def ready(critic, step: int) -> list[Sample]:
    samples = trained_on(step)
    critic.compute_values([[samples]])
    return with_returns(samples, [sample.values["reward"] for sample in samples], step)


def test_a_critic_begins_at_zero_learns_and_goes_out_and_in(start, model_dir, tmp_path):
    """From a policy with tied embeddings, it must take all but the output layer."""
    actor, critic = start(model_dir, critic_lr=3e-3)
    samples = trained_on(0)
    critic.compute_values([[samples]])
    assert all(set(sample.values["reward"]) == {0.0} for sample in samples)
    for sample in samples:
        sample.returns = {"reward": [sum(sample.response) / 500] * len(sample.response)}
    losses = []
    for _ in range(30):
        critic.compute_values([[samples]])
        losses.append(critic.update([[samples]])["critic/value_loss"])
    assert losses[-1] < losses[0] / 4
    assert same_weights(weights_of(actor), weights_of(start(model_dir)[0]))  # the actor's


def test_mini_batches_are_updates_one_after_the_other(start, model_dir):
    """So must passes be. Any split into micro-batches, even with empty ones, must be the same step."""
    first, second = slice(None, 5), slice(5, None)

    def weights_after(*updates: list[list[slice]]) -> dict:
        """Return the weights after updates, each a list of mini-batches of micro-batches."""
        critic = start(model_dir, lr_warmup_steps=0, row="ppo")[1]
        samples = ready(critic, 1)
        for mini_batches in updates:
            critic.update([[samples[part] for part in parts] for parts in mini_batches])
        return weights_of(critic)

    whole, micro = weights_after([[slice(None)]]), weights_after([[first, slice(0), second]])
    assert all(torch.allclose(whole[name], micro[name], rtol=0, atol=5e-5) for name in whole)
    mini = weights_after([[first], [second]])
    assert same_weights(mini, weights_after([[first]], [[second]]))
    assert not same_weights(whole, mini)


def test_metrics_of_a_cost_critic_have_their_own_names(start, model_dir):
    from extras.critic import Critic

    start(model_dir)
    cost = Critic(critic_config(), model_dir, "cost")
    samples = trained_on(0)
    cost.compute_values([[samples]])
    for sample in samples:
        sample.returns = {"cost": [1.0] * len(sample.response)}
    metrics = cost.update([[samples]])
    assert metrics["cost_critic/value_loss"] == 0.5
    assert metrics["cost_critic/explained_variance"] == 0
    assert all(name.startswith("cost_critic/") for name in metrics)
    close(cost)


NUMBERS = st.floats(-3, 3, width=32)


@settings(deadline=None)  # the first import of megatron
@given(
    tokens=st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=8),
    clip=st.sampled_from([0.1, 0.5, math.inf]),
)
def test_the_value_loss_is_its_formula_and_its_gradient_ends_at_the_clip(tokens, clip):
    """A token must be pulled on unless it has moved beyond the clip towards its return."""
    from extras.critic import value_loss

    values, old, returns = torch.tensor(tokens, dtype=torch.float64).T
    values.requires_grad_()
    loss, clipped = value_loss(values, old, returns, clip)
    loss.sum().backward()
    for row, (value, before, target) in enumerate(tokens):
        near = min(max(value, before - clip), before + clip)
        larger = max((value - target) ** 2, (near - target) ** 2)
        assert loss[row].item() == pytest.approx(larger / 2, abs=1e-12)
        further = (near - target) ** 2 - (value - target) ** 2
        assert clipped[row].item() == (further > 0)
        if clipped[row]:
            assert values.grad[row] == 0 and abs(value - before) > clip
        elif further < -1e-9 or value == near:  # beyond the clip, away from the return; or inside
            assert values.grad[row].item() == pytest.approx(value - target)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_the_reference_keeps_the_start_weights_and_leaves_no_trace(start, model_dir, dtype):
    """Its log-probabilities must stay the first weights'; training is the same without it, bit for bit."""
    from actor import Actor

    runs = []
    for asked in (False, True):
        actor = start(model_dir, dtype=dtype)[0]
        samples = trained_on(0)
        reference = Actor(actor.config, model_dir, actor.own_groups, learns=False)
        at_start = actor.read_tokens([samples[:5], samples[5:]])
        weights, losses = weights_of(actor), []
        for step in range(3):
            if asked:
                before = weights_of(actor)
                reference.compute_ref_logprobs([[samples[:5], samples[5:]]])
                assert [sample.reference_logprobs for sample in samples] == at_start
                assert same_weights(weights_of(actor), before)
            sequences = [(sample.prompt, sample.response) for sample in make_samples(step)]
            losses.append(supervised(actor, sequences, lr=1e-2))
        assert not same_weights(weights_of(actor), weights)
        assert actor.read_tokens([samples[:5], samples[5:]]) != at_start
        runs.append((losses, weights_of(actor)))
    assert runs[0][0] == runs[1][0] and same_weights(runs[0][1], runs[1][1])
