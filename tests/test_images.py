"""Images: tokens one way and the other, positions against transformers', and what is refused."""

import io
import random
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import EpsImagePlugin
from PIL import Image as pillow
from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from config import UserError
from images import reader, tokens
from images.tokens import Image
from vision_models import encoded_picture, make_vision_model

IMAGE = 5
SIDES = st.integers(1, 4)
IMAGES = st.tuples(st.just(1), SIDES, SIDES).map(lambda shape: image_of(*shape))
TEXT = st.lists(st.integers(6, 20), max_size=4)


@st.composite
def prompts(draw):
    """Text and images in turns: collapsed tokens, and the images."""
    images = draw(st.lists(IMAGES, max_size=4))
    parts = [*([*draw(TEXT), IMAGE] for _ in images), draw(TEXT)]
    return [token for part in parts for token in part], images


def image_of(*shape):
    return Image(b"", shape, IMAGE, bytes)


@given(prompts())
def test_collapse_is_the_inverse_of_expand(prompt):
    collapsed, images = prompt
    expanded = tokens.expand(collapsed, images)
    assert expanded.count(IMAGE) == sum(image.features for image in images)
    assert tokens.collapse(expanded, images) == collapsed


@given(prompts())
def test_positions_are_transformers(prompt):
    collapsed, images = prompt
    apart = []
    for token in collapsed:
        apart += [3, token, 4] if token == IMAGE else [token]
    expanded = tokens.expand(apart or [1], images)  # theirs takes neighbours for one image
    model = Qwen3VLModel.__new__(Qwen3VLModel)
    torch.nn.Module.__init__(model)
    model.config = Qwen3VLConfig(vision_config={"spatial_merge_size": 2}, image_token_id=IMAGE)
    grids = torch.tensor([(f, 2 * r, 2 * c) for f, r, c in (image.shape for image in images)])
    ids = torch.tensor([expanded])
    theirs, _ = model.get_rope_index(ids, (ids == IMAGE).int(), grids if images else None)
    assert list(tokens.positions(expanded, images)) == [tuple(x) for x in theirs[:, 0].T.tolist()]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_vision_model(tmp_path_factory.mktemp("vision"), "qwen3_vl", layers=1)


@pytest.mark.parametrize("width, height", [(64, 32), (40, 100), (5, 5), (700, 300), (33, 900)])
def test_an_images_shape_is_its_pixels(directory, width, height):
    read = reader.reader_of(directory)
    image = read.read(partial(encoded_picture, width, height), "here")
    other = read.read(partial(encoded_picture, 64, 64, kind="JPEG"), "there")
    pixels, grids = read.pixels([image, other])
    assert [(f, r // 2, c // 2) for f, r, c in grids.tolist()] == [image.shape, other.shape]
    assert len(pixels) == grids.prod(-1).sum() == 4 * (image.features + other.features)


def test_what_is_no_still_image_is_refused(directory, monkeypatch):
    def read(data: bytes, where: str):
        return reader.reader_of(directory).read(partial(bytes, data), where)

    whole = encoded_picture(64, 64)
    two = dict(save_all=True, append_images=[pillow.new("RGB", (64, 64))])
    moving = encoded_picture(64, 64, kind="GIF", **two)
    for data in (b"", b"no image", whole[: len(whole) // 2]):
        with pytest.raises(ValueError, match=r"^a\.png: not an image that can be read"):
            read(data, "a.png")
    with pytest.raises(ValueError, match=r"^a\.gif: it moves, and videos are not supported"):
        read(moving, "a.gif")
    with pytest.raises(ValueError, match=r"^a\.png: absolute aspect ratio"):
        read(encoded_picture(1, 300), "a.png")
    monkeypatch.setattr(pillow, "MAX_IMAGE_PIXELS", 64 * 64 - 1)
    with pytest.raises(ValueError, match=r"^a\.png: not an image that can be read: Image size"):
        read(whole, "a.png")


def test_postscript_starts_no_interpreter(tmp_path, monkeypatch):
    """Pillow hands an EPS to Ghostscript, whatever its file is called."""
    interpreter, started, file = tmp_path / "gs", tmp_path / "started", io.BytesIO()
    interpreter.write_text(f"#!/bin/sh\ntouch {started}\n")
    interpreter.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # it looks once
    pillow.new("RGB", (8, 8)).save(file, "EPS")
    with pytest.raises(UserError, match="not an image that can be read"):
        reader.decoded(file.getvalue(), "a.png")
    assert not started.exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", reader.FORMATS)
def test_whatever_a_damaged_image_makes_pillow_raise_is_one_line(kind):
    """200 times with some bytes changed, lost or added, near the beginning, where the headers are."""
    rng, refused = random.Random(kind), 0
    file = io.BytesIO()
    pillow.frombytes("RGB", (24, 17), rng.randbytes(24 * 17 * 3)).save(file, kind)
    for _ in range(200):
        data = bytearray(file.getvalue())
        for _ in range(rng.randint(1, 8)):
            place = rng.randrange(min(len(data), 200))
            lost, added = rng.choice(((1, 1), (rng.randint(1, 20), 0), (0, 10)))
            data[place : place + lost] = rng.randbytes(added)
        try:
            reader.decoded(bytes(data), "a file")
        except UserError as error:
            assert str(error).startswith("a file: ")
            refused += 1
    assert refused > 20  # else nothing was damaged
