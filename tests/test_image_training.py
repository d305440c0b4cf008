"""Training on images against plain transformers + torch AdamW, under every kind of parallelism."""

import random

import pytest
import torch
from image_worker import LR
from transformers import AutoModelForImageTextToText
from vision_models import BOS, END, IMAGE, START, encoded_picture, make_vision_model

from images.reader import ImageReader
from sample import Sample

CLIP_GRAD = 0.5  # as in parallel_worker.set_constants
FAMILIES = ("qwen3_vl", "qwen2_5_vl")
EVERY = {
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2, "saves": True}),
    "tp2_sp": (2, {"tp": 2, "sp": True}),
    "pp2": (2, {"pp": 2}),
    "cp2": (2, {"cp": 2}),
    "tp2_pp2": (4, {"tp": 2, "pp": 2, "sp": True}),
}
LAYOUTS = {f"{family}_{name}": (family, *layout) for family in FAMILIES for name, layout in EVERY.items()}


def make_samples(reader: ImageReader) -> list[Sample]:
    """8 ragged ones with 0, 1 or 2 images of three sizes, of which some come again."""
    rng, text = random.Random(4), range(7, 60)
    small, wide, large = (
        reader.read(encoded_picture(*size, seed=seed), "here")
        for seed, size in enumerate([(64, 64), (96, 64), (128, 96)])
    )
    rows = [
        ((small,), 2, 9), ((small,), 2, 5), ((), 6, 7), ((wide,), 1, 12),
        ((small, large), 3, 6), ((large,), 2, 8), ((wide, wide), 0, 5), ((), 3, 15),
    ]  # fmt: skip
    samples = []
    for number, (images, before, length) in enumerate(rows):
        prompt = [BOS, *rng.choices(text, k=before)]
        for image in images:
            prompt += [START, *[IMAGE] * image.features, END, *rng.choices(text, k=2)]
        samples.append(Sample(number, 0, prompt, media=images, response=rng.choices(text, k=length)))
    return samples


def plain_logprobs(model, reader: ImageReader, sample: Sample) -> torch.Tensor:
    ids, seen = torch.tensor([sample.prompt + sample.response]), {}
    if sample.media:
        pixels, grids = reader.pixels(list(sample.media))
        seen = dict(pixel_values=pixels, image_grid_thw=grids, mm_token_type_ids=(ids == IMAGE).int())
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **seen).logits[0]
    rows = logits[len(sample.prompt) - 1 : -1].log_softmax(-1)
    return rows[range(len(sample.response)), sample.response]


def plain_reference(model_dir: str) -> dict:
    """Three steps of plain transformers and AdamW."""
    reader = ImageReader(model_dir)
    samples = make_samples(reader)
    model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    with torch.no_grad():
        logprobs = [plain_logprobs(model, reader, sample).tolist() for sample in samples]
    steps = []
    for _ in range(3):
        optimizer.zero_grad()
        tokens = sum(len(sample.response) for sample in samples)
        loss = -sum(plain_logprobs(model, reader, sample).sum() for sample in samples) / tokens
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
        optimizer.step()
        steps.append((loss.item(), norm.item()))
    model.save_pretrained(f"{model_dir}/trained")
    return {"samples": samples, "logprobs": logprobs, "steps": steps}


@pytest.fixture(scope="session")
def references(tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("models")
    deep = {"qwen3_vl": dict(deepstack_visual_indexes=[0, 1])}
    model_dirs = {
        family: make_vision_model(path / family, family, **deep.get(family, {})) for family in FAMILIES
    }
    return {
        "model_dirs": model_dirs,
        "references": {family: plain_reference(path) for family, path in model_dirs.items()},
    }
