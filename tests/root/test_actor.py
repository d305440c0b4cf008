"""The actor of one rank against plain transformers + torch AdamW: losses, packing, masking, conversion."""

import copy
import json
import math
import os
import random
from dataclasses import fields
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import SavePlan
from transformers import AutoImageProcessor, AutoModelForCausalLM, AutoTokenizer

from algorithms import ALGORITHMS, Algorithm, clipped_loss, group_norm
from config import Config
from extras.ptx import Texts
from runtime.errors import UserError
from sample import Image, Sample
from scheduling.balance import pack_evenly, packed_length
from tests.support.models import save_model
from tests.support.packed import sights_of
from tests.support.plain import (
    CONFIGS,
    LEARNING_RATES,
    check_export,
    make_model,
    make_samples,
    plain_logprobs,
)
from tests.support.vision import CLASSES, make_vision_model
from tests.workers.parallel import (
    actor_config,
    balanced,
    far,
    save,
    supervised,
    weights_of,
)
from training.packing import Sequence, make_micro_batches, pieces_of
from training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("constants")
NEAR = {"float32": 1e-4}  # how far trainer and engine may be apart where a test is about it


@pytest.fixture
def make_actor(build):
    """Build an actor of a single rank, after closing the one before it."""
    from actor import Actor

    return lambda model_dir, **changes: build((Actor, actor_config(**changes), model_dir))[0]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True)


def on_policy_samples(actor) -> list[Sample]:
    samples = [sample for sample in make_samples(0) if sample.advantages is not None]
    for sample, logprobs in zip(samples, actor.read_tokens([samples]), strict=True):
        sample.logprobs, sample.versions = logprobs, [actor.version] * len(logprobs)
    return samples


def update(actor, samples: list[Sample]) -> dict[str, float]:
    return actor.update(balanced(samples, actor))


def is_as(actor, weights: dict) -> bool:
    """Return True if the actor has these weights, bit for bit."""
    return all(torch.equal(weights[name], tensor) for name, tensor in actor.named_weights())


def test_texts_are_read_at_temperature_1_beside_answers_at_another(make_actor, model_dir):
    """The pretraining term must equal the model's float64 -log p(token); the engine's check is at 0.5."""
    actor = make_actor(model_dir, temperature=0.5, ptx_coef=0.7, ptx_data="texts", ptx_batch=3)
    own = [([number], [number + 1, 7, 40 - number]) for number in range(3)]
    actor.terms = [Texts(own)]
    metrics = update(actor, on_policy_samples(actor))
    model = AutoModelForCausalLM.from_pretrained(model_dir).double()
    texts = [Sample(0, 0, prompt, response=response) for prompt, response in own]
    logprobs = torch.cat([plain_logprobs(model, text, 1.0)[0] for text in texts])
    assert metrics["train/ptx_loss"] == pytest.approx(-logprobs.mean().item(), abs=1e-5)
    assert metrics["train/engine_logprob_diff_max"] < 1e-5


def test_steps_without_a_target_are_skipped(make_actor, model_dir):
    """With few samples a mini-batch may be empty on all ranks; the norm must be the mean of the others."""
    norms = []
    for empty in (0, 3):
        actor = make_actor(model_dir)
        mini_batches = balanced(on_policy_samples(actor), actor)
        norms.append(actor.update(mini_batches + [[[]]] * empty)["train/grad_norm"])
    assert norms[0] == norms[1] > 0
    before, samples = weights_of(actor), on_policy_samples(actor)  # Adam has momentum by now
    for sample in samples:
        sample.advantages = None
    metrics = update(actor, samples)
    names = ("skipped", "tokens", "grad_norm", "loss")
    assert [metrics[f"train/{name}"] for name in names] == [1, 0, 0, 0]
    assert is_as(actor, before) and actor.version == 2


def test_a_disagreement_with_the_engine_moves_no_weights(make_actor, model_dir, monkeypatch):
    monkeypatch.setattr("actor.MAX_LOGPROB_DIFF", NEAR)
    actor = make_actor(model_dir)
    samples, before = on_policy_samples(actor), weights_of(actor)
    samples[3].logprobs[0] += 1e-3  # one token may be far off
    update(make_actor(model_dir), samples)
    actor = make_actor(model_dir)
    for sample in samples:
        sample.logprobs = [logprob + 0.01 for logprob in sample.logprobs]
    with pytest.raises(ValueError, match=r"by 1.00e-02 on average, more than .* \(1.00e-04\)"):
        update(actor, samples)
    assert is_as(actor, before)
    update(make_actor(model_dir, samples="RUN"), samples)  # another run's weights wrote these


def optimizer_state(actor) -> list[torch.Tensor]:
    (only,) = actor.optimizer.chained_optimizers
    return [value.clone() for state in only.optimizer.state.values() for value in state.values()]


@pytest.mark.parametrize("where, value", [("loss", "nan"), ("gradient", "inf")])
def test_an_update_that_is_not_finite_is_skipped(make_actor, model_dir, monkeypatch, where, value):
    """Weights and AdamW's state must stay bit-equal; the update is counted; the next one isn't skipped."""
    actor = make_actor(model_dir)
    update(actor, on_policy_samples(actor))
    samples, weights, adam = on_policy_samples(actor), weights_of(actor), optimizer_state(actor)
    if where == "loss":
        samples[3].advantages = [float(value)] * len(samples[3].advantages)
    else:
        weight = next(iter(actor.gpt.parameters()))
        hook = weight.register_hook(lambda gradient: gradient + float(value))
    metrics = update(actor, samples)
    assert (metrics["train/not_finite"], metrics["train/skipped"], actor.version) == (1, 1, 2)
    unknown = {name for name, number in metrics.items() if not math.isfinite(number)}
    assert unknown == {"train/grad_norm", *["train/loss"] * (where == "loss")}
    assert is_as(actor, weights)
    pairs = list(zip(adam, optimizer_state(actor), strict=True))
    assert len(pairs) > 10 and all(torch.equal(*pair) for pair in pairs)
    if where == "gradient":
        hook.remove()
    assert update(actor, on_policy_samples(actor))["train/not_finite"] == 0
    assert not is_as(actor, weights)


UNFIT_LOSSES = {"mean": (torch.Tensor.mean, r"\[\] and requires_grad=True")}
UNFIT_LOSSES |= {"detached": (torch.Tensor.detach, r"\[\d+\] and requires_grad=False")}
UNFIT_LOSSES |= {"column": (lambda loss: loss[:, None], r"\[\d+, 1\] and requires_grad=True")}


@pytest.mark.parametrize("name", UNFIT_LOSSES)
def test_a_loss_without_a_gradient_a_token_is_refused(make_actor, model_dir, monkeypatch, name):
    change, has = UNFIT_LOSSES[name]

    def loss(inputs, algorithm):
        losses, clipped = clipped_loss(inputs, algorithm)
        return change(losses), clipped

    monkeypatch.setitem(ALGORITHMS, name, Algorithm(group_norm, loss))
    actor = make_actor(model_dir, row=name)
    samples, before = on_policy_samples(actor), weights_of(actor)
    where = rf"{__file__}:{loss.__code__.co_firstlineno}"
    expected = (
        rf"^--algorithm {name}: its loss \({where}\) has the shape {has}; a number for each of \d+"
    )
    with pytest.raises(UserError, match=expected):
        update(actor, samples)
    assert is_as(actor, before)


def test_what_cannot_be_trained_on_is_refused(make_actor, model_dir):
    """Samples of older weights and unplanned padding must be refused, also while the actor sleeps."""
    actor = make_actor(model_dir)
    samples = on_policy_samples(actor)
    update(actor, samples)
    with pytest.raises(AssertionError, match="meets weights 1"):
        update(actor, samples)
    samples = on_policy_samples(actor)
    samples[1].advantages = None
    with pytest.raises(AssertionError, match="without advantages"):
        actor.update([[samples]])
    actor.sleep()
    for call in (actor.sleep, lambda: actor.read_tokens([samples]), actor.named_weights):
        with pytest.raises(AssertionError):
            call()
    actor.wake()
    assert actor.read_tokens([samples])


STALE = {"over_dispatch": 1.5, "behavior_weight_cap": 1.5, "lr_warmup_steps": 0}


def with_stale_tokens(actor, samples: list[Sample]) -> tuple[list[Sample], list[float]]:
    """Return samples at version 1, a third begun by weights 0; the same, all fresh; the weights, up to e."""
    actor.version, rng, weights = 1, random.Random(0), []
    for sample, logprobs in zip(samples, actor.read_tokens([samples]), strict=True):
        sample.logprobs, sample.versions = logprobs, [1] * len(logprobs)
    stale, fresh = copy.deepcopy(samples), copy.deepcopy(samples)
    for sample, plain in list(zip(stale, fresh, strict=True))[::3]:
        for token in range(-(-len(sample.response) // 2)):
            distance = rng.uniform(-1, 1)
            sample.versions[token] = 0
            sample.logprobs[token] -= distance
            weights.append(min(torch.tensor(distance).exp().item(), STALE["behavior_weight_cap"]))
            plain.advantages[token] *= weights[-1]
    assert min(weights) < 0.5 and weights.count(1.5) > 2
    return stale, fresh, weights


def test_stale_tokens_are_held_to_the_start_of_the_step(make_actor, model_dir, monkeypatch):
    """With two updates, the second's ratio must be to the weights before the first, and the clip cuts it."""
    monkeypatch.setattr("actor.MAX_LOGPROB_DIFF", NEAR)
    weights, metrics = [], []
    for which in range(2):
        actor = make_actor(model_dir, updates_per_step=2, lr=3e-2, **STALE)
        samples = with_stale_tokens(actor, on_policy_samples(actor))[which]
        metrics.append(update(actor, samples))
        weights.append(weights_of(actor))
    assert metrics[0]["train/clip_frac"] > 0.05
    assert metrics[0]["train/clip_frac"] == pytest.approx(metrics[1]["train/clip_frac"])
    assert metrics[0]["train/loss"] == pytest.approx(metrics[1]["train/loss"], abs=1e-5)
    assert far(*weights) < 5e-5


def test_learning_rate_of_every_update():
    from actor import learning_rate

    late = actor_config(steps=7)  # first only the critic learns; the rest is as without
    for config, first in ((actor_config(), 0), (late, 3)):
        rates = [learning_rate(version, config, first) for version in (0, 1, 2, 3, 9)]
        assert rates == pytest.approx([*LEARNING_RATES, 5e-4])


@pytest.mark.parametrize("updates", [1, 2, 4])
def test_warm_up_counts_steps_as_its_help_says(make_actor, model_dir, updates):
    """However many updates a step has, all must have one learning rate, the actor's and the critic's."""
    from actor import learning_rate
    from extras.critic import Critic

    sizes = dict(steps=9, lr_warmup_steps=3, lr_decay_to=1.0, updates_per_step=updates)
    config = actor_config(**sizes)
    rates = [learning_rate(version, config) / config.lr for version in range(4)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 1])
    critic = SimpleNamespace(config=config, algorithm=Algorithm(group_norm, clipped_loss))
    for critic.version, rate in enumerate(rates):
        assert Critic._learning_rate(critic) == pytest.approx(rate * critic.algorithm.critic_lr)
    actor = make_actor(model_dir, **sizes)
    for rate in rates[:2]:
        metrics = update(actor, on_policy_samples(actor))
        assert metrics["train/lr"] == pytest.approx(rate * config.lr)
    (text,) = [f.metadata["help"] for f in fields(Config) if f.name == "lr_warmup_steps"]
    assert text.startswith("steps in which")


LLAMA3_ROPE = dict(rope_type="llama3", rope_theta=500000.0, original_max_position_embeddings=8192)
LLAMA3_ROPE |= dict(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0)
LONG_LLAMA = ("llama", {"rope_parameters": LLAMA3_ROPE})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family, changes", [*((name, {}) for name in CONFIGS), LONG_LLAMA])
def test_a_model_goes_in_and_out_and_computes_the_same(make_actor, tmp_path, family, changes, tied):
    path = make_model(tmp_path / "in", family, tied, **changes)
    actor = make_actor(path)
    plain = AutoModelForCausalLM.from_pretrained(path)
    expected = dict(plain.named_parameters())
    assert dict(actor.named_weights()).keys() == expected.keys() and is_as(actor, expected)
    Path(path, "config.json").chmod(0o444)  # a read-only directory that many use
    before = os.umask(0o027)
    actor.export(str(tmp_path / "out"))
    os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes == {0o640}  # the umask's, for another user's server
    check_export(tmp_path / "out", expected, tolerance=0.0)
    samples = make_samples(0)
    for sample, logprobs in zip(samples, actor.read_tokens([samples]), strict=True):
        with torch.no_grad():
            expected = plain_logprobs(plain, sample, temperature=0.8)[0].tolist()
        assert logprobs == pytest.approx(expected, abs=1e-5)


def bpe_files(path):
    tokenizer = AutoTokenizer.from_pretrained(save_model(path))
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": "T"}
    tokenizer.save_pretrained(path)
    for name in ("vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json"):
        (path / name).write_text("{}" if "json" in name else "#version: 0.2")


def image_files(path):
    make_vision_model(path, "qwen3_vl", layers=1)


def read_tokenizer(path):
    tokenizer = AutoTokenizer.from_pretrained(path)
    return tokenizer("What is 7?")["input_ids"], tokenizer.chat_template


def read_processor(path):
    return AutoImageProcessor.from_pretrained(path).to_dict()


OTHERS = """q8_0.gguf tf_model.h5 flax_model.msgpack model.onnx pytorch_model.bin rust_model.ot
consolidated.00.pth model-00001-of-00002.safetensors model.safetensors.index.json README.md
trainer_state.json"""
TEMPLATES = "chat_template.jinja additional_chat_templates tokenizer.json merges.txt"
DIRECTORIES = [  # who makes and reads the directory; names in its export
    (bpe_files, read_tokenizer, TEMPLATES),
    (image_files, read_processor, "preprocessor_config.json video_preprocessor_config.json"),
]


@pytest.mark.parametrize("make, read, names", DIRECTORIES)
def test_an_export_has_what_its_tokenizer_needs_and_no_other_weights(tmp_path, make, read, names):
    """transformers must read the export like the directory that it came from, license included."""
    path, out = tmp_path / "in", tmp_path / "out"
    (path / "onnx").mkdir(parents=True)
    make(path)
    for other in (*OTHERS.split(), "LICENSE.txt", "NOTICE", "onnx/tokenizer.model"):
        (path / other).write_bytes(b"old")
    trainer = SimpleNamespace(model_dir=str(path), stop_tokens=(), _hf_config=dict)
    trainer.gpt = SimpleNamespace(adapters={})
    Trainer.write_hf(trainer, {"model.safetensors": {"weight": torch.zeros(1)}}, out)
    left = {file.name for file in out.iterdir()}
    assert {*names.split(), "config.json", "LICENSE.txt", "NOTICE"} < left
    assert not left & {*OTHERS.split(), "onnx"}
    assert read(path) == read(out)


@pytest.mark.parametrize("family", [*CONFIGS, *CLASSES])
def test_a_directorys_tensors_are_known(tmp_path, family):
    """They must be those that transformers writes, an output layer if not tied, even with hub kernels."""
    from inputs.hf_directory import checkpoint_shapes
    from training.model import read_hf_config, tensor_shapes

    make = make_model if family in CONFIGS else make_vision_model
    for tied in (False, True):
        path = make(tmp_path / str(tied), family, tied=tied)
        config = json.loads(Path(path, "config.json").read_text())
        kernels = {"_attn_implementation": "of-a-hub/attention"}
        Path(path, "config.json").write_text(json.dumps(config | kernels))
        shapes = tensor_shapes(read_hf_config(path))
        if tied:
            del shapes["lm_head.weight"]
        assert shapes == checkpoint_shapes(path)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_cost_of_a_sequence_is_its_matrix_products(tmp_path, family):
    """It must match torch's flop counter, 2 per multiply-add; `forward_macs` takes half of attention."""
    from torch.utils.flop_counter import FlopCounterMode

    from training.model import forward_macs, read_hf_config

    path = make_model(tmp_path / "model", family, tied=True)
    hf = read_hf_config(path)
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    quadratic = (forward_macs(hf, 200) - 2 * forward_macs(hf, 100)) / 20_000
    for tokens in (1, 10, 100):
        with FlopCounterMode(display=False) as counter:
            plain(torch.zeros(1, tokens, dtype=torch.int64))
        assert counter.get_total_flops() == 2 * (forward_macs(hf, tokens) + quadratic * tokens**2)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_checkpoint_goes_on_as_if_nothing_had_happened(make_actor, model_dir, tmp_path, dtype):
    sequences = [(sample.prompt, sample.response) for sample in make_samples(0)]
    actor, losses = make_actor(model_dir, dtype=dtype), []
    for version in (0, 2):
        actor.version = version
        save(actor, tmp_path / str(version))
        losses += [supervised(actor, sequences, 1e-2) for _ in range(2)]
    weights = weights_of(actor)
    for version in (0, 2):
        actor = make_actor(model_dir, dtype=dtype)
        actor.restore(tmp_path / str(version))
        assert actor.version == version
        assert [supervised(actor, sequences, 1e-2) for _ in losses[version:]] == losses[version:]
        assert is_as(actor, weights)


def test_numbers_that_no_rank_saved_are_missed(make_actor, model_dir, tmp_path):
    """A missing part of a tensor must fail in torch when several ranks save, and as a UserError on load."""
    actor = make_actor(model_dir)
    write, complete = actor.snapshot(tmp_path)
    plan, written = write()
    of_another_rank = [SavePlan([], planner_data={}), []]
    complete([[plan, written], of_another_rank])
    lost = next(item for item in plan.items if ".layers." in item.index.fqn)  # an item of one layer
    plan.items.remove(lost)
    with pytest.raises(ValueError, match=f"{lost.index.fqn} invalid fill tensor-volume"):
        complete([[plan, written], of_another_rank])
    complete([[plan, written]])  # torch doesn't check a single rank's plan
    with pytest.raises(UserError, match=f"^the checkpoint lacks numbers of {lost.index.fqn} "):
        actor.restore(tmp_path)


def test_prompts_of_other_images_are_others():
    """Prompts with equal tokens but different images must differ. Images are equal if their bytes are."""
    images = [Image(digest, (1, 2, 2), 7, read=Mock()) for digest in (b"one", b"other", b"one")]
    sequences = [Sequence([1, 7, 7, 7, 7, 2], [3, 4], (image,)) for image in images]
    assert sorted(piece.prefix for piece in pieces_of(sequences)) == [0, 0, 5]


PROMPTS = st.lists(st.integers(1, 9), min_size=1, max_size=4)  # prompt lengths
SEQUENCES = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20)), max_size=12)


@given(prompts=PROMPTS, sequences=SEQUENCES, tp_with_sp=st.sampled_from([1, 2]))
def test_every_response_token_is_a_target_once(prompts, sequences, tp_with_sp):
    """Each must see its prompt, which is there once per micro-batch, and all of its response before it.

    Some micro-batches are empty; few tokens are added for sp.
    """
    counter = iter(range(1, 10_000))  # every token is different, so that a wrong shift cannot hide
    prompts = [[next(counter) for _ in range(length)] for length in prompts]
    pairs = []
    for number, length in sequences:
        pairs.append((prompts[number % len(prompts)], [next(counter) for _ in range(length)]))
    lengths = [packed_length(len(prompt) + len(response)) for prompt, response in pairs]
    chosen = [[], *pack_evenly(lengths, lengths, 64, multiple=1), []]
    packed = [[pairs[index] for index in numbers] for numbers in chosen]
    expected = []
    for prompt, response in chain(*packed):
        expected += [(prompt + response[:place], token) for place, token in enumerate(response)]
    found = {}
    for batch, own in zip(make_micro_batches(packed, tp_with_sp), packed, strict=True):
        shown = {prompt[0]: len(prompt) - 1 for prompt, _ in own}
        counted = sum(shown.values()) + sum(len(response) for _, response in own)
        assert counted <= batch.tokens.shape[1] <= max(counted, 1) + tp_with_sp - 1
        assert (
            batch.tokens.shape[1] % tp_with_sp == 0 and batch.lengths == sorted(batch.lengths)[::-1]
        )
        found |= sights_of(batch)
    assert found == dict(enumerate(expected))
