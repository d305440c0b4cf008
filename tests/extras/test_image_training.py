"""Training on images against plain transformers + torch AdamW, under every kind of parallelism."""

import random
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from actor import Actor
from examples.make_demo.closing import close
from extras.critic import Critic
from extras.images.reader import ImageReader
from sample import Sample
from tests.support.plain import plain_steps
from tests.support.rounding import apart
from tests.support.vision import BOS, END, IMAGE, START, encoded_picture, make_vision_model
from tests.workers.parallel import actor_config, gathered, set_constants, weights_of
from tests.workers.start import trained_by_tier
from training.trainer import as_sequences

LR = 1e-3
SIZES = dict(temperature=1.0, max_tokens_per_micro_batch=64)
FAMILIES = ("qwen3_vl", "qwen2_5_vl")
FIRST = {"tp2_sp": ("qwen3_vl", 2, {"tp": 2, "sp": True, "recompute": -1})}
# name -> ranks, sizes
EVERY = {"dp2": (2, {}), "tp2": (2, {"tp": 2}), "pp2": (2, {"pp": 2})}
EVERY |= {"tp2_pp2": (4, {"tp": 2, "pp": 2, "sp": True})}
OTHERS = {f"{f}_{name}": (f, *row) for f in FAMILIES for name, row in EVERY.items()}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in OTHERS]


def make_samples(reader: ImageReader) -> list[Sample]:
    """Make 8 ragged samples with 0, 1 or 2 images of three sizes; some images are repeated."""
    rng, text = random.Random(4), range(7, 60)
    sizes = [(64, 64), (96, 64), (128, 96)]
    pictures = [partial(encoded_picture, *size, seed=seed) for seed, size in enumerate(sizes)]
    small, wide, large = (reader.read(picture, "here") for picture in pictures)
    rows = [((small,), 2, 9), ((small,), 2, 5), ((), 6, 7), ((wide,), 1, 12)]
    rows += [((small, large), 3, 6), ((large,), 2, 8), ((wide, wide), 0, 5), ((), 3, 15)]
    samples = []
    for number, (images, before, length) in enumerate(rows):
        prompt = [BOS, *rng.choices(text, k=before)]
        for image in images:
            prompt += [START, *[IMAGE] * image.features, END, *rng.choices(text, k=2)]
        response = rng.choices(text, k=length)
        samples.append(Sample(number, 0, prompt, media=images, response=response))
    return samples


def inputs_of(reader: ImageReader, sample: Sample) -> dict:
    ids, seen = torch.tensor([sample.prompt + sample.response]), {}
    if sample.media:
        pixels, grids = reader.pixels(list(sample.media))
        seen = dict(pixel_values=pixels, image_grid_thw=grids)
        seen["mm_token_type_ids"] = (ids == IMAGE).int()
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids)) | seen


def plain_logprobs(model, reader: ImageReader, sample: Sample) -> torch.Tensor:
    rows = model(**inputs_of(reader, sample)).logits[0, len(sample.prompt) - 1 : -1].log_softmax(-1)
    return rows[range(len(sample.response)), sample.response]


def plain_reference(model_dir: str) -> dict:
    reader = ImageReader(model_dir)
    samples = make_samples(reader)
    model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        logprobs = [plain_logprobs(model, reader, sample).tolist() for sample in samples]

    def loss_of(step: int) -> torch.Tensor:
        return -torch.cat([plain_logprobs(model, reader, sample) for sample in samples]).mean()

    steps = plain_steps(model, range(3), loss_of, [LR] * 3)
    model.save_pretrained(f"{model_dir}/trained")  # saving gives tensors their names in a directory
    known = {"model_dir": model_dir, "samples": samples, "logprobs": logprobs, "steps": steps}
    return known | {"weights": tensors_of(f"{model_dir}/trained"), "before": tensors_of(model_dir)}


def tensors_of(path: str) -> dict[str, torch.Tensor]:
    return load_file(f"{path}/model.safetensors")


@pytest.fixture(scope="session")
def references(tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("models")
    more = {name: {} for name in FAMILIES} | {"qwen3_vl": dict(deepstack_visual_indexes=[0, 1])}
    model_dirs = {name: make_vision_model(path / name, name, **more[name]) for name in more}
    return {family: plain_reference(directory) for family, directory in model_dirs.items()}


@pytest.fixture(scope="session")
def result_of(references, tmp_path_factory):
    return trained_by_tier(
        "tests.extras.test_image_training", tmp_path_factory, FIRST, OTHERS, references
    )


def image_config(**changes):
    return actor_config(**SIZES | changes)


def step(actor, samples: list[Sample]) -> tuple[float, float]:
    mine = as_sequences([samples[actor.dp_rank :: actor.dp_size]])[0]
    packed = [[mine[index] for index in chosen] for chosen in actor.pack(mine)]
    stats = actor.run_step(packed, actor.cross_entropy_loss, (), LR)
    return stats["loss"] / stats["divisor"], stats["grad_norm"]


def train(reference: dict, sizes: dict, path: str) -> dict:
    actor, samples = Actor(image_config(**sizes), reference["model_dir"]), reference["samples"]
    mine = list(range(len(samples)))[actor.dp_rank :: actor.dp_size]
    rows = dict(zip(mine, actor.read_tokens([[samples[number] for number in mine]]), strict=True))
    steps = [step(actor, samples) for _ in range(3)]
    weights = weights_of(actor)
    logprobs = {number: row for rows in gathered(rows) for number, row in rows.items()}
    close(actor)
    return {"logprobs": logprobs, "steps": steps, "weights": weights}


@pytest.mark.parametrize("name", [*FIRST, *SLOW])
def test_a_layout_trains_as_transformers(name, references, result_of):
    reference = references[(FIRST | OTHERS)[name][0]]
    result = result_of(name)
    for number, row in enumerate(reference["logprobs"]):
        assert result["logprobs"][number] == pytest.approx(row, rel=0, abs=1e-5)
    losses, norms = zip(*result["steps"], strict=True)
    true_losses, true_norms = zip(*reference["steps"], strict=True)
    assert losses == pytest.approx(true_losses, rel=0, abs=1e-5)
    assert norms == pytest.approx(true_norms, rel=0, abs=1e-4)
    assert result["weights"].keys() == reference["weights"].keys()
    moved = dict.fromkeys((True, False), 0.0)  # is it the tower's? -> the largest move
    # AdamW divides a gradient by its size: one that is only rounding moves a weight by LR in either direction
    most = 2 * LR * len(losses)
    # a gradient has a term for each token, and each comes through up to four layers
    terms = 4 * sum(len(sample.tokens) for sample in reference["samples"])
    for name, weight in reference["weights"].items():
        apart_by = (result["weights"][name] - weight).abs()
        assert apart_by.max() <= most and apart_by.mean() <= most * apart(terms), name
        far = (weight - reference["before"][name]).abs().max().item()
        moved["visual." in name] = max(moved["visual." in name], far)
    assert min(moved.values()) > 1e-3


@pytest.fixture
def make_trainer(build, monkeypatch):
    set_constants(monkeypatch.setattr)
    return lambda kind, model_dir, **changes: build((kind, image_config(**changes), model_dir))[0]


def test_a_critic_sees(references, make_trainer):
    model_dir, samples = references["qwen3_vl"]["model_dir"], references["qwen3_vl"]["samples"]
    critic = make_trainer(Critic, model_dir)
    head = torch.randn(96)
    with torch.no_grad():
        critic.gpt.output_layer.weight.copy_(head)
    critic.compute_values([[samples]])
    model = AutoModelForImageTextToText.from_pretrained(model_dir).model
    reader = ImageReader(model_dir)
    for sample in samples:
        with torch.no_grad():
            states = model(**inputs_of(reader, sample)).last_hidden_state[0]
        hidden = states[len(sample.prompt) - 1 : -1]
        assert sample.values["reward"] == pytest.approx((hidden @ head).tolist(), rel=0, abs=1e-4)
