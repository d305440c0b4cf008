"""Episodes are trained on as plain transformers in float64 trains on their tokens. Only the policy's own are
targets: prompt, turns and replies in order. Packed, and under tensor, pipeline and sequence parallelism."""

import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from sample import Reply, Sample
from tests.support.packed import sights_of
from tests.support.plain import LEARNING_RATES, VOCAB, copies, make_model, plain_steps
from tests.training.test_layouts import plain_loss
from tests.workers.parallel import actor_config, far, gathered, train_on, weights_of
from tests.workers.start import train_layouts
from training.packing import Sequence, make_micro_batches

LAYOUTS = {  # name -> family, ranks, sizes
    "one": ("qwen3", 1, {}),
    "tp2": ("qwen3", 2, {"tp": 2}),
    "tp2_sp": ("qwen3", 2, {"tp": 2, "sp": True}),
    "pp2": ("qwen3", 2, {"pp": 2}),
    "dp2": ("qwen3", 2, {}),
}
STEPS = 2
REPLIES = (0, 1, 3, 2)  # in the episodes of a group


def draw(rng: random.Random, low: int, high: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(rng.randint(low, high))]


def make_episode(rng: random.Random, prompt_id: int, index: int, prompt: list[int]) -> Sample:
    """Make turns and replies of a few tokens, some of one; each turn has an advantage of its own."""
    sample = Sample(prompt_id, index, prompt)
    sample.advantages = []
    for turn in range(REPLIES[index] + 1):
        if turn:
            place = len(sample.response)
            reply = Reply(place, draw(rng, 1, 6), [{"role": "user", "content": "?"}])
            sample.replies = [*sample.replies, reply]
        tokens = draw(rng, 1, 6)
        sample.response = sample.response + tokens
        sample.advantages += [rng.gauss(0, 1)] * len(tokens)
    return sample


def make_episodes(step: int) -> list[Sample]:
    """Make twelve: a group has episodes without a reply, and with several."""
    rng = random.Random(step)
    prompts = [draw(rng, 1, 8) for _ in range(3)]
    keys = [(prompt_id, index) for prompt_id in range(3) for index in range(4)]
    episodes = [make_episode(rng, *key, prompts[key[0]]) for key in keys]
    for sample in episodes:
        sample.versions = [step] * len(sample.response)
    return episodes


def woven(sample: Sample) -> tuple[list[int], list[bool]]:
    """Return all tokens of an episode, and which are the policy's, using only its fields."""
    replies = {reply.start: reply.tokens for reply in sample.replies}
    tokens, own = [*sample.prompt], [False] * len(sample.prompt)
    for place, token in enumerate(sample.response):
        for other in replies.get(place, []):
            tokens.append(other)
            own.append(False)
        tokens.append(token)
        own.append(True)
    return tokens, own


def plain_logprobs(model, sample: Sample, temperature: float) -> tuple:
    """Return log-probability and entropy of the policy's tokens."""
    tokens, own = woven(sample)
    targets = torch.tensor(own[1:])
    logits = model(torch.tensor([tokens])).logits[0, :-1][targets]
    log_softmax = F.log_softmax(logits / temperature, -1)
    ids = torch.tensor(tokens[1:])[targets]
    logprobs = log_softmax[range(len(ids)), ids]
    return logprobs, -(log_softmax.exp() * log_softmax).sum(-1)


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> dict:
    """Make updates of plain transformers and AdamW in float64. The second batch is off-policy."""
    model_dir = make_model(tmp_path_factory.mktemp("model"), "qwen3", tied=False)
    config = actor_config()
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    batches, metrics = [], []

    def loss_of(step: int) -> torch.Tensor:
        samples, noise = make_episodes(step), random.Random(step)
        for sample in samples:
            with torch.no_grad():
                logprobs, _ = plain_logprobs(model, sample, config.temperature)
            sample.true_logprobs = logprobs.tolist()
            sample.logprobs = [x + step * noise.gauss(0, 0.3) for x in sample.true_logprobs]
        batches.append(samples)
        return plain_loss(model, config, metrics, samples, plain_logprobs)

    steps = plain_steps(model, range(STEPS), loss_of)
    for row, (loss, norm) in zip(metrics, steps, strict=True):
        row |= {"train/loss": loss, "train/grad_norm": norm}
    known = {"model_dir": model_dir, "batches": batches, "metrics": metrics}
    return known | {"weights": copies(model)}


def train(reference: dict, sizes: dict, path: str) -> dict:
    """Make the same updates by an actor under a layout."""
    from actor import Actor
    from examples.make_demo.closing import close

    actor = Actor(actor_config(**sizes), reference["model_dir"])
    metrics, distance = train_on(actor, reference["batches"])
    apart = far(weights_of(actor), reference["weights"])
    everyone = gathered((distance, apart))
    close(actor)
    distance, apart = map(max, zip(*everyone, strict=True))
    return {"metrics": metrics, "distance": distance, "apart": apart}


@pytest.fixture(scope="module")
def results(reference, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("layouts")
    return train_layouts(
        "tests.extras.test_episode_training", Path(folder), LAYOUTS, {"qwen3": reference}
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_update_of_episodes_is_that_of_plain_transformers(name, reference, results):
    """Log-probabilities of the policy's tokens, loss, gradient and weights must agree after two updates."""
    result = results[name]
    assert len(LEARNING_RATES) >= STEPS == len(result["metrics"])
    for step, expected in enumerate(reference["metrics"]):
        got = {metric: result["metrics"][step][metric] for metric in expected}
        assert got == pytest.approx(expected, abs=1e-5), f"update {step}"
    assert result["metrics"][0]["train/micro_batches"] >= 2
    assert result["distance"] < 2e-5
    assert result["apart"] < 5e-5


@given(st.randoms(use_true_random=False), st.integers(1, 4), st.sampled_from([1, 2, 4]))
def test_packed_targets_are_the_policys_tokens(rng, count, tp_with_sp):
    """In any episode the token before predicts each of them, and no token predicts a reply's."""
    episodes = [make_episode(rng, 0, rng.randrange(4), draw(rng, 1, 5)) for _ in range(count)]
    sequences = [Sequence(s.prompt, s.response, (), s.replies) for s in episodes]
    [batch] = make_micro_batches([sequences], tp_with_sp)
    assert batch.tokens.shape[1] % tp_with_sp == 0
    expected = []
    for sample in episodes:
        tokens, own = woven(sample)
        assert tokens == sample.tokens
        places = [place for place in range(len(sample.prompt), len(tokens)) if own[place]]
        expected += [(tokens[:place], tokens[place]) for place in places]
    assert sights_of(batch) == dict(enumerate(expected))
