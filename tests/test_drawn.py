"""The demo whose numbers are drawn: pictures that can be read, what is learnt from them, and that it is."""

import asyncio
import io
import json
from functools import partial
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from recipes.addition.demos import demo_of
from safetensors.torch import load_file
from transformers import Qwen3VLForConditionalGeneration

import data
from config import Config, parse_config
from genrm import Judge
from images.reader import IMAGE, ImageReader
from recipes.addition import critiques, models, task, warmstart
from recipes.addition.drawing import CELL, picture
from test_warmstart import Alone

SUMMAND = st.integers(1, 6).flatmap(lambda digits: st.integers(0, 10**digits - 1))
DEMO = demo_of(SimpleNamespace(preset="images"))
# of character displays: the columns of each digit, from the left; a bit is a dot, the lowest at the top
COLUMNS = """
    3e5149453e 00427f4000 4261514946 2141454b31 1814127f10 2745454539 3c4a494930 0171090503 3649494936
    064949291e
"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("drawn") / "new"
    models.new_model(path, 0, models.vision_model)
    return path


# ---------------------------------------------------------------- a reader of the pictures


def template(columns: str) -> np.ndarray:
    """Of a digit, 28 x 20: without its mean and of length 1."""
    dots = [[code >> row & 1 for code in bytes.fromhex(columns)] for row in range(7)]
    ink = np.kron(dots, np.ones((4, 4)))
    return (ink - ink.mean()) / np.linalg.norm(ink - ink.mean())


TEMPLATES = [template(columns) for columns in COLUMNS.split()]


def read_cell(cell: np.ndarray) -> str:
    """The digit whose template lies nearest at any place of the cell; "" if none is near."""
    windows = np.lib.stride_tricks.sliding_window_view(cell, (28, 20)).reshape(-1, 28, 20)
    windows = windows - windows.mean((1, 2), keepdims=True)
    windows /= np.linalg.norm(windows, axis=(1, 2), keepdims=True)
    nearness = [np.einsum("wij,ij->w", windows, each).max() for each in TEMPLATES]
    return str(np.argmax(nearness)) if max(nearness) > 0.5 else ""


def read_numbers(png: bytes) -> tuple[str, str]:
    light = np.asarray(Image.open(io.BytesIO(png)), float)
    rows = [light[:CELL], light[CELL:]]
    return tuple(
        "".join(read_cell(cell) for cell in np.split(row, row.shape[1] // CELL, 1)) for row in rows
    )


@settings(deadline=None, max_examples=60)
@given(a=SUMMAND, b=SUMMAND, key=st.text(max_size=20))
def test_a_picture_can_be_read(a, b, key):
    """As the two numbers that it was drawn of, whatever its places, brightness and noise; right-aligned."""
    png = picture(a, b, key)
    assert read_numbers(png) == (str(a), str(b))
    assert Image.open(io.BytesIO(png)).size == (CELL * max(len(str(a)), len(str(b))), 2 * CELL)


def test_a_picture_follows_from_its_numbers_and_key():
    first = picture(57, 68, "a")
    assert first == picture(57, 68, "a")
    assert len({first, picture(57, 68, "b"), picture(68, 57, "a"), picture(57, 60, "a")}) == 4


def test_a_cell_is_a_feature(model_dir):
    """Nothing is resized on the way to the model; the longest sums fit."""
    reader = ImageReader(str(model_dir))
    for digits in range(1, 8):
        seen = reader.read(partial(picture, 10 ** (digits - 1), 5, ""), "here")
        assert seen.shape == (1, 2, digits) and seen.features <= models.MOST_CELLS


# ---------------------------------------------------------------- the problems


def test_the_same_problems_are_written_and_drawn(model_dir):
    """By seed and number; a question whose numbers are drawn gives nothing away."""
    reader = ImageReader(str(model_dir))

    def characters(text, images):
        return [ord(c) for c in text] + [image.features for image in images]

    written, drawn = (task.Addition(3, characters, each) for each in (None, reader))
    pairs = [(written.training(i), drawn.training(i)) for i in range(20)]
    for one, other in [*pairs, *zip(written.held_out[:50], drawn.held_out, strict=False)]:
        (image,) = other.images()
        numbers = read_numbers(image.read())
        assert one.question == "{}+{}=".format(*numbers) and one.images() == ()
        assert one.answer_key == other.answer_key and other.question == IMAGE + "="
        assert other.tokens == characters(IMAGE + "=", (image,))
        assert image.features == 2 * max(map(len, numbers))


def test_a_picture_is_drawn_again_as_it_was(model_dir):
    """Whoever needs a prompt's pictures draws them by its number; held-out ones are every seed's."""
    sources = [
        task.Addition(seed, lambda *_: [], ImageReader(str(model_dir))) for seed in (3, 3, 4)
    ]
    first, again, other = ([source.training(i).images() for i in range(5)] for source in sources)
    assert first == again != other
    held_out = [[prompt.images() for prompt in source.held_out] for source in sources]
    assert held_out[0] == held_out[1] == held_out[2]


def test_the_judge_sees_the_picture_and_the_answer(model_dir):
    """What it learns from is what it is asked in the run."""
    path = str(model_dir)
    config = parse_config(["--model", path, "--judge", path, "--judge-format", "addition"])
    tokenizer, reader = data.load_tokenizer(str(model_dir)), ImageReader(str(model_dir))
    judge = Judge(config, 0, tokenizer, reader)
    text, png = warmstart.judged(DEMO, 57, 68, "125", "held out")
    assert text == IMAGE + "=>125?" and png == picture(57, 68, "held out")
    images = (reader.read(partial(bytes, png), "here"),)
    prompt = warmstart.encoder(model_dir)(text, "Y", png).prompt
    assert judge._prompt(IMAGE + "=", "125", images) == (prompt, images)


# ---------------------------------------------------------------- model and tokens


def test_the_model_that_sees_follows_from_its_seed(model_dir, tmp_path):
    for name, seed in (("again", 0), ("other", 1)):
        models.new_model(tmp_path / name, seed, models.vision_model)
    first, again, other = (
        load_file(path / "model.safetensors")
        for path in (model_dir, tmp_path / "again", tmp_path / "other")
    )
    assert sum(tensor.numel() for tensor in first.values()) == pytest.approx(717_000, rel=0.01)
    assert all((first[name] == again[name]).all() for name in first)
    assert any((first[name] != other[name]).any() for name in first)


def test_special_tokens_are_one_each(model_dir):
    """Those that config.json names; characters keep one each; an image's are as many as its features."""
    tokenizer, config = data.load_tokenizer(str(model_dir)), models.vision_model().config
    start, end, image = (
        config.vision_start_token_id,
        config.vision_end_token_id,
        config.image_token_id,
    )
    assert data.decode(tokenizer, data.encode(tokenizer, models.ALPHABET)) == models.ALPHABET
    assert ImageReader(str(model_dir)).stop_tokens == (image, config.video_token_id, start, end)
    prompt, response, (seen,) = warmstart.encoder(model_dir)(IMAGE + "=", ">9", picture(4, 15, ""))
    (equals,), answer = (data.encode(tokenizer, text)[1:] for text in ("=", ">9"))
    assert prompt == [tokenizer.bos_token_id, start, *[image] * 4, end, equals]
    assert response == [*answer, tokenizer.eos_token_id] and seen.read() == picture(4, 15, "")


# ---------------------------------------------------------------- batches


def test_demonstrations_are_of_their_pictures():
    """What is read off each picture is added up in its response; no sum is held out."""
    batch = partial(warmstart.demonstrations, 0, demo=DEMO)
    assert batch(3) == batch(3) != batch(4)
    examples, held_out = [*batch(0), *batch(1)], {tuple(sorted(p)) for p in task.HELD_OUT_PROBLEMS}
    for prompt, response, png in examples:
        a, b = map(int, read_numbers(png))
        assert prompt == IMAGE + "=" and response in (f">{a + b}", task.shown_work(a, b))
        assert tuple(sorted((a, b))) not in held_out
    blurted = sum(response.startswith(">") for _, response, _ in examples) / len(examples)
    assert (
        abs(blurted - DEMO.recipe["actor"]["blurt"]) < 0.15
    )  # 128 draws: 3 standard errors are 0.13


def test_critiques_are_of_their_pictures():
    """Verdicts on the claim are the truth about the picture, of own errors, too."""
    pool = [(1, 1, "3"), (2, 2, "5")]
    batch, own = partial(warmstart.critiques, 0, pool, demo=DEMO), 0
    assert batch(3) == batch(3) != batch(4)
    for prompt, written, png in [*batch(0), *batch(1)]:
        a, b = map(int, read_numbers(png))
        answer = prompt.removeprefix(IMAGE + "=>").removesuffix("?")
        assert written == critiques.critique(a, b, answer)
        assert written.endswith("Y") == (answer == str(a + b))
        own += (a, b, answer) in pool
    assert own > 10


def test_each_demo_has_a_cache_of_its_own(tmp_path, monkeypatch):
    """By name and recipe: what is shown differs though seeds are equal."""
    homes = []
    monkeypatch.setattr(warmstart, "CACHE", tmp_path)
    monkeypatch.setattr(warmstart, "make", lambda *given: homes.append(given[2].name))

    def prepare(preset):
        asyncio.run(warmstart.prepare(SimpleNamespace(seed=0, preset=preset), Alone(), None))

    for preset in ("tiny", "images", "images"):
        prepare(preset)
    monkeypatch.setitem(DEMO.recipe, "muon_lr", 0.03)
    prepare("images")
    assert homes[1] == homes[2] and len(set(homes)) == 3
    assert [home.split("-")[0] for home in homes] == ["addition", *["drawn_addition"] * 3]


# ---------------------------------------------------------------- learning


class Quiet:
    def doing(self, what: str) -> None:
        pass


def loss_of(path, examples) -> float:
    """The mean cross entropy of the responses' tokens, by plain transformers, an example at a time."""
    model, reader = Qwen3VLForConditionalGeneration.from_pretrained(path), ImageReader(str(path))
    encode, losses = warmstart.encoder(path), []
    for prompt, response, images in (encode(*example) for example in examples):
        ids = torch.tensor([prompt + response])
        labels = torch.tensor([[-100] * len(prompt) + response])
        pixels, grid = reader.pixels(images)
        kinds = (ids == reader.image_token).int()
        seen = dict(pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=kinds)
        losses.append(model(ids, labels=labels, **seen).loss.item())
    return fmean(losses)


def test_both_models_are_made(model_dir, tmp_path, single_rank, monkeypatch):
    """20 steps with the own optimizer take two fifths off the loss on others, and every tensor learns, the
    tower's, too; the judge starts from the actor; what is left is what the cache needs."""
    monkeypatch.setattr(task, "HELD_OUT_PROBLEMS", task.HELD_OUT_PROBLEMS[:4])
    monkeypatch.setattr(warmstart, "GATE", 1.0)
    short = dict(actor=DEMO.recipe["actor"] | dict(steps=20, batch=16))
    short["judge"] = DEMO.recipe["judge"] | dict(steps=2, batch=8, pool=4)
    demo = DEMO._replace(recipe=DEMO.recipe | short)
    warmstart.make(Config(), single_rank, tmp_path / "home", Quiet(), demo)
    examples = warmstart.demonstrations(0, 1000, demo)
    new, actor, judge = model_dir, tmp_path / "home" / "actor", tmp_path / "home" / "judge"
    assert loss_of(actor, examples) < 0.6 * loss_of(new, examples)
    assert set(json.loads((judge / "gate.json").read_text())) == {"false_accepts", "false_rejects"}
    tensors = [load_file(path / "model.safetensors") for path in (new, actor, judge)]
    assert tensors[0].keys() == tensors[1].keys() == tensors[2].keys()
    for name in tensors[0]:
        assert not tensors[0][name].equal(tensors[1][name]) and not tensors[1][name].equal(
            tensors[2][name]
        )
    assert sorted(path.name for path in (tmp_path / "home").iterdir()) == ["actor", "judge"]
