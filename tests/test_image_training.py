"""Training on images against plain transformers + torch AdamW, under every kind of parallelism."""

import random

import pytest
import torch
from image_worker import LR
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText
from vision_models import BOS, END, IMAGE, START, encoded_picture, make_vision_model
from workers import run_worker

from images.reader import ImageReader
from sample import Sample

CLIP_GRAD = 0.5  # as in parallel_worker.set_constants
FAMILIES = ("qwen3_vl", "qwen2_5_vl")
EVERY = {  # name -> ranks, sizes, the layout from whose checkpoint it goes on
    "dp2": (2, {}, None),
    "tp2": (2, {"tp": 2}, None),
    "tp2_sp": (2, {"tp": 2, "sp": True, "recompute": True}, None),
    "pp2": (2, {"pp": 2}, None),
    "cp2": (2, {"cp": 2}, None),
    "tp2_pp2": (4, {"tp": 2, "pp": 2, "sp": True}, None),
}
RESUMED = {"dp2_of_tp2": (2, {}), "pp2_of_tp2": (2, {"pp": 2}), "dp1_of_tp2": (1, {})}
LAYOUTS = {f"{family}_{name}": (family, *layout) for family in FAMILIES for name, layout in EVERY.items()}
LAYOUTS |= {"interleaved": ("qwen2_5_vl", 2, {"pp": 2, "schedule": "interleaved"}, None)}
LAYOUTS |= {f"{f}_{name}": (f, *row, f"{f}_tp2") for f in FAMILIES for name, row in RESUMED.items()}
TRAINED = [name for name, layout in LAYOUTS.items() if layout[-1] is None]


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
    model.save_pretrained(f"{model_dir}/trained")  # which gives tensors their names in a directory
    known = {"model_dirs": model_dir, "samples": samples, "logprobs": logprobs, "steps": steps}
    return known | {"weights": tensors_of(f"{model_dir}/trained"), "before": tensors_of(model_dir)}


def tensors_of(path: str) -> dict[str, torch.Tensor]:
    return load_file(f"{path}/model.safetensors")


@pytest.fixture(scope="session")
def references(tmp_path_factory) -> dict:
    """By family: the model directory, and what plain training makes of it."""
    path = tmp_path_factory.mktemp("models")
    deep = {"qwen3_vl": dict(deepstack_visual_indexes=[0, 1])}
    model_dirs = {
        family: make_vision_model(path / family, family, **deep.get(family, {})) for family in FAMILIES
    }
    return {family: plain_reference(directory) for family, directory in model_dirs.items()}


@pytest.fixture(scope="session")
def results(references, tmp_path_factory) -> dict:
    """Of every layout, in processes that are gone afterwards."""
    path = tmp_path_factory.mktemp("layouts")
    case = {name: {f: r[name] for f, r in references.items()} for name in ("model_dirs", "samples")}
    torch.save(case | {"layouts": LAYOUTS}, path / "case.pt")
    run_worker("image_worker.py", path / "case.pt", path / "result")
    found = (torch.load(f"{path / 'result'}.{size}", weights_only=False) for size in (4, 2, 1))
    return {name: result for each in found for name, result in each.items()}


@pytest.mark.parametrize("name", TRAINED)
def test_a_layout_trains_as_transformers(name, references, results):
    reference, result = references[LAYOUTS[name][0]], results[name]
    for number, row in enumerate(reference["logprobs"]):
        assert result["logprobs"][number] == pytest.approx(row, rel=0, abs=1e-5)
    losses, norms = zip(*result["steps"], strict=True)
    true_losses, true_norms = zip(*reference["steps"], strict=True)
    assert losses == pytest.approx(true_losses, rel=0, abs=1e-5)
    assert norms == pytest.approx(true_norms, rel=0, abs=1e-4)
    assert result["weights"].keys() == reference["weights"].keys()
    moved = dict.fromkeys((True, False), 0.0)  # by part: whether it is the tower's
    for name, weight in reference["weights"].items():
        assert torch.allclose(result["weights"][name], weight, rtol=0, atol=1e-4), name
        far = (weight - reference["before"][name]).abs().max().item()
        moved["visual." in name] = max(moved["visual." in name], far)
    assert min(moved.values()) > 1e-3


@pytest.mark.parametrize("name", sorted(LAYOUTS.keys() - set(TRAINED)))
def test_a_checkpoint_goes_on_under_another_layout(name, results):
    losses, norms = zip(*results[name]["after"], strict=True)
    true_losses, true_norms = zip(*results[LAYOUTS[name][-1]]["after"], strict=True)
    assert losses == pytest.approx(true_losses, rel=0, abs=1e-6)
    assert norms == pytest.approx(true_norms, rel=0, abs=1e-5)
