"""Images: tokens one way and the other, positions against transformers', and what is refused."""

import io
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as pillow

from images import reader, tokens

IMAGE = 5
SHAPES = st.tuples(st.just(1), st.integers(1, 4), st.integers(1, 4))
TEXT = st.lists(st.integers(6, 20), max_size=4)


@st.composite
def prompts(draw):
    """Text and images in turns: collapsed tokens, and the images' shapes."""
    shapes = draw(st.lists(SHAPES, max_size=4))
    parts = [*([*draw(TEXT), IMAGE] for _ in shapes), draw(TEXT)]
    return [token for part in parts for token in part], shapes


def counts_of(shapes):
    return [frames * rows * columns for frames, rows, columns in shapes]


@given(prompts())
def test_collapse_is_the_inverse_of_expand(prompt):
    collapsed, shapes = prompt
    counts = counts_of(shapes)
    expanded = tokens.expand(collapsed, IMAGE, counts)
    assert expanded.count(IMAGE) == sum(counts)
    assert tokens.collapse(expanded, IMAGE, counts) == collapsed


def test_adjacent_images_stay_apart():
    assert tokens.collapse([IMAGE] * 5, IMAGE, [2, 3]) == [IMAGE] * 2


@pytest.mark.parametrize("counts", [[], [1], [1, 1, 1]])
def test_a_placeholder_for_each_image(counts):
    with pytest.raises(ValueError, match=f"2 placeholders for {len(counts)} images"):
        tokens.expand([IMAGE, 7, IMAGE], IMAGE, counts)


@given(prompts())
def test_positions_are_transformers(prompt):
    from transformers import Qwen3VLConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    collapsed, shapes = prompt
    apart = [each for token in collapsed for each in ((3, token, 4) if token == IMAGE else (token,))]
    expanded = tokens.expand(apart or [1], IMAGE, counts_of(shapes))  # theirs takes neighbours for one image
    model = Qwen3VLModel.__new__(Qwen3VLModel)
    torch.nn.Module.__init__(model)
    model.config = Qwen3VLConfig(vision_config={"spatial_merge_size": 2}, image_token_id=IMAGE)
    grids = torch.tensor([(f, 2 * r, 2 * c) for f, r, c in shapes]) if shapes else None
    ids = torch.tensor([expanded])
    theirs, _ = model.get_rope_index(ids, (ids == IMAGE).int(), grids)
    assert list(tokens.positions(expanded, IMAGE, shapes)) == [tuple(x) for x in theirs[:, 0].T.tolist()]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("vision")
    named = dict(image_token_id=5, video_token_id=6, vision_start_token_id=3, vision_end_token_id=4)
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"} | named))
    size = dict(shortest_edge=32 * 32, longest_edge=32 * 32 * 16)
    processor = dict(patch_size=16, temporal_patch_size=2, merge_size=2, size=size)
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return str(path)


def encoded(width, height, kind="PNG", **options):
    pixels = np.random.default_rng(width * height).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    pillow.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("width, height", [(64, 32), (40, 100), (5, 5), (700, 300), (33, 900)])
def test_an_images_shape_is_its_pixels(directory, width, height):
    read = reader.reader_of(directory)
    image, other = read.read(encoded(width, height), "here"), read.read(encoded(64, 64, "JPEG"), "there")
    pixels, grids = read.pixels([image, other])
    assert [(f, r // 2, c // 2) for f, r, c in grids.tolist()] == [image.shape, other.shape]
    assert len(pixels) == grids.prod(-1).sum() == 4 * (image.features + other.features)


def test_what_is_no_still_image_is_refused(directory, monkeypatch):
    read = reader.reader_of(directory).read
    whole = encoded(64, 64)
    moving = encoded(64, 64, "GIF", save_all=True, append_images=[pillow.new("RGB", (64, 64))])
    for data in (b"", b"no image", whole[: len(whole) // 2], encoded(64, 64, "JPEG")[:400]):
        with pytest.raises(ValueError, match=r"^a\.png: not an image that can be read"):
            read(data, "a.png")
    with pytest.raises(ValueError, match=r"^a\.gif: it moves, and videos are not supported"):
        read(moving, "a.gif")
    with pytest.raises(ValueError, match=r"^a\.png: absolute aspect ratio"):
        read(encoded(1, 300), "a.png")
    monkeypatch.setattr(pillow, "MAX_IMAGE_PIXELS", 64 * 64 - 1)
    with pytest.raises(ValueError, match=r"^a\.png: not an image that can be read: Image size"):
        read(whole, "a.png")


def test_a_model_of_text_reads_no_images(tmp_path, directory):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert reader.reader_of(str(tmp_path)) is None
    assert reader.reader_of(directory).stop_tokens == (5, 6, 3, 4)
    (tmp_path / "config.json").write_text((reader.Path(directory) / "config.json").read_text())
    with pytest.raises(ValueError, match="no image processor"):
        reader.reader_of(str(tmp_path))
