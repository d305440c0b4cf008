"""Images: their tokens and positions, files and rows with images, judges that see, what is refused."""

import hashlib
import io
import pickle
import random
from functools import partial

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import EpsImagePlugin
from PIL import Image as pillow
from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

import demo.task  # noqa: F401 (it adds a judge format)
import rewards
from config import Config
from engines.engine import Answer
from extras.images import reader, tokens
from inputs import prompt_file, tokenization
from runtime.errors import UserError
from sample import Image, Sample
from tests.root.test_genrm import score_all
from tests.support.models import save_tokenizer
from tests.support.rows import jsonl
from tests.support.vision import IMAGE, START, encoded_picture, make_vision_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_vision_model(tmp_path_factory.mktemp("vision"), "qwen3_vl", layers=1)


SIDE = st.integers(1, 4)
IMAGES = st.tuples(st.just(1), SIDE, SIDE).map(lambda shape: image_of(*shape))
TEXT = st.lists(st.integers(6, 20), max_size=4)


@st.composite
def prompts(draw):
    images = draw(st.lists(IMAGES, max_size=4))
    parts = [*([*draw(TEXT), IMAGE] for _ in images), draw(TEXT)]
    return [token for part in parts for token in part], images


def image_of(*shape):
    return Image(b"", shape, IMAGE, bytes)


@given(prompts())
def test_collapse_is_the_inverse_of_expand_and_positions_are_transformers(prompt):
    collapsed, images = prompt
    expanded = tokens.expand(collapsed, images)
    assert expanded.count(IMAGE) == sum(image.features for image in images)
    assert tokens.collapse(expanded, images) == collapsed
    apart = []
    for token in collapsed:
        apart += [3, token, 4] if token == IMAGE else [token]
    expanded = tokens.expand(apart or [1], images)  # theirs takes neighbors for one image
    model = Qwen3VLModel.__new__(Qwen3VLModel)
    torch.nn.Module.__init__(model)
    model.config = Qwen3VLConfig(vision_config={"spatial_merge_size": 2}, image_token_id=IMAGE)
    grids = torch.tensor([(f, 2 * r, 2 * c) for f, r, c in (image.shape for image in images)])
    ids = torch.tensor([expanded])
    theirs, _ = model.get_rope_index(ids, (ids == IMAGE).int(), grids if images else None)
    assert list(tokens.positions(expanded, images)) == [tuple(x) for x in theirs[:, 0].T.tolist()]


@pytest.mark.parametrize("width, height", [(64, 32), (40, 100), (5, 5), (700, 300), (33, 900)])
def test_an_images_shape_is_its_pixels(model_dir, width, height):
    read = tokenization.reader_of(model_dir)
    image = read.read(partial(encoded_picture, width, height), "here")
    other = read.read(partial(encoded_picture, 64, 64, kind="JPEG"), "there")
    pixels, grids = read.pixels([image, other])
    assert [(f, r // 2, c // 2) for f, r, c in grids.tolist()] == [image.shape, other.shape]
    assert len(pixels) == grids.prod(-1).sum() == 4 * (image.features + other.features)


def test_what_is_no_still_image_is_refused(model_dir, monkeypatch):
    def check(content: bytes, problem: str) -> None:
        with pytest.raises(UserError, match=rf"^a\.gif: {problem}"):
            tokenization.reader_of(model_dir).read(partial(bytes, content), "a.gif")

    whole = encoded_picture(64, 64)
    two = dict(save_all=True, append_images=[pillow.new("RGB", (64, 64))])
    for content in (b"", b"no image", whole[: len(whole) // 2]):
        check(content, "not an image that can be read")
    check(encoded_picture(64, 64, kind="GIF", **two), "it is animated; a clip is MP4")
    check(encoded_picture(1, 300), "absolute aspect ratio")
    monkeypatch.setattr(pillow, "MAX_IMAGE_PIXELS", 64 * 64 - 1)
    check(whole, "not an image that can be read: Image size")


def test_postscript_starts_no_interpreter(tmp_path, monkeypatch):
    """Pillow gives an EPS to Ghostscript, whatever its file is called; this must never happen."""
    interpreter, started, file = tmp_path / "gs", tmp_path / "started", io.BytesIO()
    interpreter.write_text(f"#!/bin/sh\ntouch {started}\n")
    interpreter.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # Pillow checks only once
    pillow.new("RGB", (8, 8)).save(file, "EPS")
    with pytest.raises(UserError, match="not an image that can be read"):
        reader.decoded(file.getvalue(), "a.png")
    assert not started.exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", reader.FORMATS)
def test_whatever_a_damaged_image_makes_pillow_raise_is_one_line(kind):
    """200 files with bytes changed, lost or added near the beginning, where headers are, must give one."""
    rng, refused = random.Random(kind), 0
    file = io.BytesIO()
    pillow.frombytes("RGB", (24, 17), rng.randbytes(24 * 17 * 3)).save(file, kind)
    for _ in range(200):
        content = bytearray(file.getvalue())
        for _ in range(rng.randint(1, 8)):
            place = rng.randrange(min(len(content), 200))
            lost, added = rng.choice(((1, 1), (rng.randint(1, 20), 0), (0, 10)))
            content[place : place + lost] = rng.randbytes(added)
        try:
            reader.decoded(bytes(content), "a file")
        except UserError as error:
            assert str(error).startswith("a file: ")
            refused += 1
    assert refused > 20  # otherwise nothing was damaged


BLACK, RED, WHITE = (0, 0, 0), (255, 0, 0), (255, 255, 255)


def picture(mode="RGB", colors=(BLACK, RED, WHITE), size=(32, 64)):
    image = pillow.new(mode, (size[0] * len(colors), size[1]))
    for number, color in enumerate(colors):
        image.paste(color, (number * size[0], 0, (number + 1) * size[0], size[1]))
    return image


def saved(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def of_numbers(dtype, *numbers, **options):
    pixels = np.repeat(np.array([numbers], dtype), 64, 0).repeat(32, 1)
    return saved(pillow.fromarray(pixels), "TIFF", **options)


def photo(**options):
    noise = pillow.open(io.BytesIO(encoded_picture(96, 64)))
    options |= dict(save_all=True, append_images=[pillow.new("RGB", (24, 16))])
    return saved(noise, "MPO", **options)


def transparent(mode, **options):
    """Make a picture with black, red and transparent pixels, which are also black."""
    image = picture("RGBA", [(*BLACK, 255), (*RED, 255), (*BLACK, 0)])
    if mode == "P":
        image = picture("P", [0, 1, 2])
        image.putpalette([*BLACK, *RED, *BLACK])
    return saved(image.convert(mode), **options)


SHADES = [(n, n, n) for n in (0, 64, 128, 255)]
PAPER = [BLACK, RED, WHITE]
GREY = [BLACK, (76, 76, 76), WHITE]
PAPER_IN_LAB = [(0, 128, 128), (138, 209, 198), (255, 128, 128)]
SIXTEEN_BITS = of_numbers(np.uint16, 0, 64 * 257, 128 * 257, 65535)
# name of a file -> the file, the colors of its columns, and how far they may differ
SEEN = {
    "RGBA": (transparent("RGBA"), PAPER, 0),
    "RGBA in WebP": (transparent("RGBA", kind="WEBP", lossless=True), PAPER, 0),
    "RGBA, half": (saved(picture("RGBA", [(0, 0, 0, 128)])), [(127, 127, 127)], 0),
    "LA": (transparent("LA"), GREY, 0),
    "PA": (transparent("PA", kind="TIFF"), PAPER, 0),
    "P and a transparent color": (transparent("P", transparency=2), PAPER, 0),
    "P and alpha": (transparent("P", transparency=b"\xff\xff\0"), PAPER, 0),
    "GIF": (transparent("P", kind="GIF", transparency=2), PAPER, 0),
    "P": (saved(picture().quantize(4)), PAPER, 0),
    "L and a transparent color": (saved(picture("L", [0, 76, 9]), transparency=9), GREY, 0),
    "1": (saved(picture("1", [0, 255])), [BLACK, WHITE], 0),
    "CMYK": (saved(picture("CMYK", [(*BLACK, 255), (0, 255, 255, 0), (0,) * 4]), "TIFF"), PAPER, 0),
    "CMYK in JPEG": (saved(picture().convert("CMYK"), "JPEG", quality=100), PAPER, 3),
    "YCbCr": (saved(picture().convert("YCbCr"), "TIFF"), PAPER, 2),
    "LAB": (saved(picture("LAB", PAPER_IN_LAB), "TIFF"), PAPER, 6),
    "16 bits": (SIXTEEN_BITS, SHADES, 0),
    "16 bits in PNG": (saved(pillow.open(io.BytesIO(SIXTEEN_BITS))), SHADES, 0),
    "dark 16 bits": (of_numbers(np.uint16, 0, 257, 514), [(n, n, n) for n in range(3)], 0),
}


@pytest.mark.parametrize("name", SEEN)
def test_engine_and_trainer_get_what_people_see(model_dir, name):
    """An engine opens the file and converts it with Pillow; a rule must also get that file."""
    file, colors, error = SEEN[name]
    image = reader.decoded(file, "here").convert("RGB")
    width = image.width // len(colors)
    expected = np.array(picture(colors=colors, size=(width, image.height)), int)
    assert abs(np.array(image, int) - expected).max() <= error
    if min(image.size) < 32:
        return
    eyes = tokenization.reader_of(model_dir)
    found = eyes.read(partial(bytes, file), "here")
    sent = pillow.open(io.BytesIO(found.read())).convert("RGB")
    assert sent.tobytes() == image.tobytes() and pickle.loads(pickle.dumps(found)) == found
    pixels, _ = eyes.pixels([found])
    assert pixels.equal(eyes._processor([image], return_tensors="pt")["pixel_values"])


def turned_back(pixels, orientation):
    """Return how pixels are stored that this orientation sets upright, as TIFF 6.0 defines it."""
    stored = {2: pixels[:, ::-1], 3: pixels[::-1, ::-1], 4: pixels[::-1], 5: pixels.swapaxes(0, 1)}
    stored |= {6: np.rot90(pixels), 7: pixels[::-1, ::-1].swapaxes(0, 1), 8: np.rot90(pixels, -1)}
    return np.ascontiguousarray(stored.get(orientation, pixels))


STORED = {  # kind -> format, mode, options
    "PNG": ("PNG", "RGB", {}),
    "PNG with alpha": ("PNG", "RGBA", {}),
    "JPEG": ("JPEG", "RGB", dict(quality=100, subsampling=0)),
    "WebP": ("WEBP", "RGB", dict(lossless=True)),
    "TIFF": ("TIFF", "RGB", {}),
    "compressed TIFF": ("TIFF", "RGB", dict(compression="tiff_lzw")),
}


@pytest.mark.parametrize("kind", STORED)
def test_a_picture_stands_upright(model_dir, kind):
    """All eight orientations must be applied, and 0 means none."""
    form, mode, options = STORED[kind]
    pixels = np.zeros((64, 96, 3), np.uint8)
    pixels[:32, :32] = 255
    pixels[:32, 32:, 1] = 200
    for orientation in range(9):
        tags = pillow.Exif()
        if orientation or form != "TIFF":
            tags[0x0112] = orientation
        stored = pillow.fromarray(turned_back(pixels, orientation)).convert(mode)
        file = saved(stored, form, exif=tags, **options)
        found = tokenization.reader_of(model_dir).read(partial(bytes, file), "here")
        assert found.shape == (1, 2, 3)
        sent = pillow.open(io.BytesIO(found.read())).convert("RGB")
        assert abs(np.array(sent, int) - pixels).max() <= (3 if kind == "JPEG" else 0)


def test_a_file_in_which_all_see_the_same_is_used_as_it_is(model_dir):
    """Other tags of a photo may be damaged, even all of them."""
    kinds = [encoded_picture(64, 64, kind=kind) for kind in reader.FORMATS if kind != "GIF"]
    kinds += [saved(picture("L", [0, 90])), photo(), photo(exif=pillow.Exif())]
    kinds.append(encoded_picture(64, 64, kind="WEBP", exif=b"damaged"))
    for file in kinds:
        found = tokenization.reader_of(model_dir).read(partial(bytes, file), "here")
        assert found.read() == file and found.digest == hashlib.sha256(file).digest()


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_numbers_of_which_nobody_knows_the_white_are_refused(kind):
    with pytest.raises(UserError, match=r"^a\.tiff: not an image that can be read: it's unclear"):
        reader.decoded(of_numbers(kind, 0, 1), "a.tiff")


def test_a_file_that_is_too_large_is_not_read(model_dir, folder, monkeypatch):
    path = folder / "pictures/0.png"
    with path.open("ab") as file:
        file.truncate(reader.MOST_BYTES + 1)
    read = partial(tokenization.reader_of(model_dir).read_item, "rows.jsonl:1", True)
    with pytest.raises(UserError, match=r"^rows.jsonl:1: .*0.png: 715,827,881 bytes, of at most"):
        read(reader.IMAGE, lambda: path)
    monkeypatch.setattr(reader, "MOST_BYTES", (folder / "pictures/1.png").stat().st_size)
    [(_, image)] = read(reader.IMAGE, lambda: folder / "pictures/1.png")
    assert image.read() == (folder / "pictures/1.png").read_bytes()
    with pytest.raises(UserError, match=r"^here: Is a directory$"):
        reader.whole(folder, "here")


SIDES = ((64, 32), (32, 96), (32, 32))  # sizes of the pictures: 2, 3 and 1 features


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "pictures").mkdir()
    for number, sides in enumerate(SIDES):
        (tmp_path / f"pictures/{number}.png").write_bytes(encoded_picture(*sides, seed=number))
    return tmp_path


def prompts_of(model_dir, path, room=200, **options):
    eyes, tokenizer = tokenization.reader_of(model_dir), tokenization.load_tokenizer(model_dir)
    if options.pop("template", False):
        turn = "{{ turn.content }}{{ eos_token }}"
        tokenizer.chat_template = f"{{% for turn in messages %}}{turn}{{% endfor %}}"
    return prompt_file.PromptFile(path, tokenizer, room, reader=eyes, **options)


def write(folder, *rows):
    return jsonl(folder / "rows.jsonl", rows)


ROWS = [
    dict(prompt="<image>=", images=["pictures/0.png"], answer=1),
    dict(prompt="0<image>+<image>=", images=["pictures/1.png", "pictures/2.png"], answer=2),
    dict(prompt="7+5=", answer=12),
]


@pytest.mark.parametrize("kind", ["paths in JSONL", "paths", "image features"])
def test_rows_with_images(model_dir, folder, kind):
    """Paths must be relative to the file; Parquet may hold the bytes."""
    path = folder / "rows.parquet"
    columns = {name: [str(row[name]) for row in ROWS] for name in ("prompt", "answer")}
    columns["images"] = [row.get("images", []) for row in ROWS]
    if kind == "paths in JSONL":
        path = write(folder, *ROWS)
    elif kind == "paths":
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    else:
        content = lambda name: {"bytes": (folder / name).read_bytes(), "path": None}  # noqa: E731
        columns["images"] = [[content(name) for name in names] for names in columns["images"]]
        text = {name: datasets.Value("string") for name in ("prompt", "answer")}
        features = datasets.Features(text | {"images": datasets.List(datasets.Image(decode=False))})
        datasets.Dataset.from_dict(columns, features=features).to_parquet(path)
    prompts = prompts_of(model_dir, path)
    assert [prompt.answer_key for prompt in prompts] == ["1", "2", "12"]
    assert [prompt.question for prompt in prompts] == [row["prompt"] for row in ROWS]
    bytes_of = [(folder / f"pictures/{number}.png").read_bytes() for number in range(3)]
    found = [prompt.images for prompt in prompts]
    read = [[image.read() for image in images] for images in found]
    assert read == [bytes_of[:1], bytes_of[1:], []]
    assert [image.features for images in found for image in images] == [2, 3, 1]
    assert [prompt.tokens.count(IMAGE) for prompt in prompts] == [2, 3 + 1, 0]
    assert [prompt.tokens.count(START) for prompt in prompts] == [1, 2, 0]


def test_chat_parts_are_what_a_text_with_places_is(model_dir, folder):
    text, last = {"type": "text", "text": "add "}, {"type": "text", "text": "and 5", "image": None}
    parts = [text, {"type": "image"}, last]
    contents = (parts, "add <image>and 5")
    rows = [dict(messages=[{"role": "user", "content": content}]) for content in contents]
    path = write(folder, *(row | dict(images=["pictures/0.png"]) for row in rows))
    first, second = prompts_of(model_dir, path, template=True)
    assert first == second and first.question == "add <image>and 5"
    assert first.tokens.count(IMAGE) == 2


def test_a_text_cannot_spell_an_image_in_a_chat(model_dir, folder):
    turn = {"role": "user", "content": "<|vision_start|><|image_pad|><|vision_end|>"}
    (prompt,) = prompts_of(model_dir, write(folder, dict(messages=[turn])), template=True)
    assert not {IMAGE, START} & {*prompt.tokens}


def test_the_room_is_counted_after_expansion(model_dir, folder):
    """At most 16 features: a prompt must be read if that doesn't show that it fits."""
    rows = [row | dict(prompt="a" * 20 + row["prompt"]) for row in ROWS]
    longest = max(len(prompt.tokens) for prompt in prompts_of(model_dir, write(folder, *rows)))
    assert len(prompts_of(model_dir, write(folder, *rows), room=longest)) == 3
    assert len(prompts_of(model_dir, write(folder, *rows), room=longest - 1)) == 2


ONE = dict(prompt="<image>=", images=["pictures/0.png"])
CHAT, OWN, VIDEO = {"role": "user"}, {"type": "image", "image": "a.png"}, {"type": "video"}
PATH = "a file's path or its bytes is needed"
REFUSED = {  # the row's fault -> the rest of its line
    "no place": (ONE | dict(prompt="="), "1 images for 0 places, <image> or a part of the type"),
    "no image": (dict(prompt="<image>="), "0 images for 1 places"),
    "an address": (ONE | dict(images=["https://a.b/c.png"]), f"{PATH}, not 'https"),
    "a file's address": (ONE | dict(images=["file:///etc/passwd"]), PATH),
    "no such file": (ONE | dict(images=["pictures/9.png"]), r".*pictures/9.png: no such file"),
    "no path": (ONE | dict(images=["A" * 5000]), r".*A: no such file"),
    "a clip without a place": (dict(prompt="=", videos=["a.mp4"]), r".*a.mp4: no such file"),
    "a video part": (dict(messages=[CHAT | dict(content=[VIDEO])]), "0 videos for 1 places"),
    "a part's own image": (dict(messages=[CHAT | dict(content=[OWN])]), "a part {'type': 'image',"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_row_that_cannot_be_used_is_refused_at_once(model_dir, folder, kind):
    row, problem = REFUSED[kind]
    with pytest.raises(ValueError, match=rf"rows.jsonl:2: {problem}") as error:
        prompts_of(model_dir, write(folder, ROWS[0], row), template=True)
    assert "\n" not in str(error.value)


def test_a_model_of_texts_refuses_images(folder, tmp_path):
    tokenizer = tokenization.load_tokenizer(str(save_tokenizer(tmp_path)))
    texts = prompt_file.PromptFile(write(folder, dict(prompt="<image>")), tokenizer, 100)
    assert tokenizer.decode(texts[0].tokens) == "<image>"  # a text like any other
    refused = r"rows.jsonl:1: it has images, and --model only reads text"
    with pytest.raises(ValueError, match=refused):
        prompt_file.PromptFile(write(folder, *ROWS), tokenizer, 100)


class Pool:
    """Accept all; record all requests."""

    def __init__(self, text):
        self.asked, self._text = [], text

    async def generate(self, requests, model):
        first = requests[0]
        self.asked.append((first.prompt, first.images, first.sampling.stop_token_ids))
        yield Answer(0, self._text, [-0.01] * len(self._text), "stop", [])


def score(listed, text, *samples):
    pool = Pool(text)
    score_all(listed, pool, samples)
    assert all(sample.reward == 1.0 for sample in samples)
    return pool.asked


def listed_for(model_dir):
    config = Config(model="m", judge=(model_dir,), judge_format=("addition",), max_model_len=2000)
    eyes = [tokenization.reader_of(model_dir)]
    return rewards.build(config, [], [tokenization.load_tokenizer(model_dir)], "".join, eyes)


def read_picture(model_dir, seed):
    picture = partial(encoded_picture, 64, 32, seed=seed)
    return (tokenization.reader_of(model_dir).read(picture, "here"),)


def sample_of(media, prompt_id=0, answer=">5"):
    return Sample(prompt_id, 0, [], "<image>=", media=media, response=list(answer), finish="stop")


@pytest.mark.parametrize("answer", [">5", "><image>"])
def test_a_judge_that_sees_is_shown_the_images(model_dir, answer):
    """They must be in their places, expanded; a critique ends at an image token. Answers can't add one."""
    tokenizer, media = tokenization.load_tokenizer(model_dir), read_picture(model_dir, 0)
    sample = sample_of(media, answer=answer)
    [(prompt, images, stop)] = score(listed_for(model_dir), tokenizer("Y")["input_ids"], sample)
    assert prompt.count(IMAGE) == 2 and images is media
    assert {*tokenization.reader_of(model_dir).stop_tokens} < {*stop}
    if answer == ">5":
        shown = tokenizer("<|vision_start|><|image_pad|><|vision_end|>=>5?")["input_ids"]
        assert prompt == tokens.expand(shown, media)


def test_a_judgement_is_shared_only_if_the_images_are_the_same(model_dir):
    first, second, same = (read_picture(model_dir, seed) for seed in (0, 1, 0))
    samples = [sample_of(media, number) for number, media in enumerate((first, second, same))]
    yes = tokenization.load_tokenizer(model_dir)("Y")["input_ids"]
    asked = score(listed_for(model_dir), yes, *samples)
    assert [images for _, images, _ in asked] == [first, second]
