"""Images through the engine's handle: the real SGLang server of each family against transformers."""

import asyncio
import io
import json
import random
from base64 import b64encode
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image as pillow
from safetensors.torch import load_file

from config import Config
from engines import server, wire
from engines.engine import Engine, Request, Sampling, body_of
from examples.make_demo.models import ALPHABET
from extras.images.reader import ImageReader
from extras.images.tokens import expand
from inputs.tokenization import encode_prompt, load_tokenizer
from sample import Image
from tests.support.clips import encoded_clip, frames_of
from tests.support.launched import free_port
from tests.support.patience import LIMIT_S
from tests.support.vision import (
    CLASSES,
    END,
    IMAGE,
    START,
    VIDEO,
    encoded_picture,
    make_vision_model,
)

CONFIG = Config(max_running_requests=64, max_new_tokens=64, seed=1)
TEXT = [10, 11, 63, 7 + ALPHABET.index("|"), 7 + ALPHABET.index(">"), 18]  # spells the image token
FAMILIES = ("qwen3_vl", "qwen2_5_vl")


@pytest.fixture(scope="module", params=FAMILIES)
def seeing(run, request, tmp_path_factory):
    """Start an engine, and make two directories of weights for it. It takes images of up to 64 features,
    256 patches; one of its tokens can make texts look alike."""
    home, family = tmp_path_factory.mktemp(request.param), request.param
    directories = [make_vision_model(home / str(i), family, layers=2, seed=i) for i in (0, 1)]
    for directory in map(Path, directories):
        path = directory / "preprocessor_config.json"
        processor = json.loads(path.read_text())
        processor["size"]["longest_edge"] *= 4
        path.write_text(json.dumps(processor))
        path = directory / "tokenizer.json"
        path.write_text(path.read_text().replace("<unused63>", "<|image_pad"))
    models = [CLASSES[family][1].from_pretrained(directory).eval() for directory in directories]
    facts = dict(reader=ImageReader(directories[0]), models=models, directories=directories)
    facts |= dict(tokenizer=load_tokenizer(directories[0]), family=request.param)
    log = home / "engine.log"
    engine = Engine.launch("rollout", 0, free_port(), directories[0], CONFIG, log, "a key")
    try:
        run(engine.ready(LIMIT_S))
        yield SimpleNamespace(engine=engine, **facts)
    finally:
        run(engine.close())


def request_of(seeing, data, seed=0, limit=24):
    """Return a prompt of these files, each followed by text."""
    images = tuple(seeing.reader.read(partial(bytes, file), "here") for file in data)
    prompt = [1] + [START, IMAGE, END, *TEXT[:2]] * len(images) + TEXT
    sampling = Sampling(1.0, limit, seeing.reader.stop_tokens)
    return Request(expand(prompt, images), sampling, limit, seed, images)


async def ask(engine, *requests):
    answers = {}
    async for part in engine.generate(list(requests)):
        before = answers.get(part.index)
        answers[part.index] = before.extended(part) if before else part
    return [answers[index] for index in range(len(requests))]


def clips_of(seeing, *files, seed=0, limit=24):
    """Return a prompt of these clips, each followed by text: the images are pairs of frames."""
    media = {"<video>": lambda: list(files)}
    shown, images = seeing.reader.fill("1+<video>=" * len(files) + "?", media, "here")
    prompt = encode_prompt(seeing.tokenizer, seeing.reader, shown, images)
    sampling = Sampling(1.0, limit, seeing.reader.stop_tokens)
    return Request(prompt, sampling, limit, seed, images)


def error_of(seeing, request, answer, model=0, clips=()):
    """Return the largest difference to transformers' log-probabilities of an answer's tokens.

    clips: the pairs in each, if its path for videos is to be used.
    """
    whole, media = torch.tensor([request.prompt + answer.tokens[:-1]]), {}
    if clips:
        pixels, grids = seeing.reader.pixels(list(request.images))
        each_clip = grids.split(clips)
        grids = torch.stack([each[0] * torch.tensor([len(each), 1, 1]) for each in each_clip])
        media = {"pixel_values_videos": pixels, "video_grid_thw": grids}
        media["mm_token_type_ids"] = 2 * (whole == IMAGE).int()
        whole[whole == IMAGE] = VIDEO
    elif request.images:
        pixels, grids = seeing.reader.pixels(list(request.images))
        media = {"pixel_values": pixels, "image_grid_thw": grids}
        media["mm_token_type_ids"] = (whole == IMAGE).int()
    with torch.no_grad():
        logits = seeing.models[model](input_ids=whole, **media).logits[0, len(request.prompt) - 1 :]
    expected = logits.log_softmax(-1)[range(len(answer.tokens)), answer.tokens]
    return (torch.tensor(answer.logprobs) - expected).abs().max().item()


def picture(mode, kind="PNG", **options):
    """Return a file with this mode and kind, of noise, also in its alpha channel."""
    noise = pillow.open(io.BytesIO(encoded_picture(96, 64, seed=9)))
    image = noise.quantize(16) if mode == "P" else noise.convert(mode)
    if mode == "RGBA":
        image.putalpha(noise.getchannel(0))
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


TURNED = pillow.Exif()
TURNED[0x0112] = 6  # turned by 90 degrees
ONE, OTHER = encoded_picture(64, 64, seed=1), encoded_picture(96, 64, seed=2)
FILES = {"none": [], "one": [ONE], "three": [OTHER, ONE, OTHER], "grey": [picture("L")]}
FILES |= {"exif": [picture("RGB", "JPEG", exif=TURNED)], "alpha": [picture("RGBA")]}
FILES |= {"palette": [picture("P", transparency=3)]}
KINDS = (("1", "PNG"), ("LA", "PNG"), ("I;16", "PNG"), ("CMYK", "JPEG"))
KINDS += (("LAB", "TIFF"), ("PA", "TIFF"), ("RGBA", "WEBP"))
FILES |= {f"{mode} in {kind}": [picture(mode, kind)] for mode, kind in KINDS}
PREVIEW = dict(save_all=True, append_images=[pillow.new("RGB", (64, 64))])
FILES |= {"previews": [picture("RGB", "MPO", **PREVIEW)]}
FILES |= {"previews, exif": [picture("RGB", "MPO", exif=TURNED, **PREVIEW)]}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_logprobs_are_transformers(run, seeing, name):
    """They must agree even for files with ambiguous pixels: engine and trainer read them the same way."""
    requests = [request_of(seeing, FILES[name], seed) for seed in range(8)]
    pairs = list(zip(requests, run(ask(seeing.engine, *requests)), strict=True))
    assert len({tuple(answer.tokens) for _, answer in pairs}) > 4
    for request, answer in pairs:
        assert error_of(seeing, request, answer) < 1e-5
        ended = answer.tokens[-1] in (*request.sampling.stop_token_ids, 2)
        assert answer.finish == ("stop" if ended else "length")
    if name == "one":  # the picture must decide, or agreement would be vacuous
        swapped = request_of(seeing, [encoded_picture(64, 64, seed=3)]).images
        assert max(error_of(seeing, r._replace(images=swapped), a) for r, a in pairs) > 1e-3


@pytest.mark.slow
def test_an_answer_does_not_depend_on_its_neighbours(run, seeing):
    """It must be the same by itself, in a group, and among eight large images that share a prefill."""
    side = 2 * seeing.reader._processor.patch_size
    files = [encoded_picture((8 - i % 2) * side, 8 * side, seed=100 + i) for i in range(8)]
    requests = [request_of(seeing, [file], seed) for seed, file in enumerate(files)]
    assert all(4 * image.features > 192 for request in requests for image in request.images)

    def ask_anew(*those):
        run(seeing.engine._call("POST", f"/flush_cache?timeout={LIMIT_S}"))
        return [(answer.tokens, answer.logprobs) for answer in run(ask(seeing.engine, *those))]

    alone = [ask_anew(request)[0] for request in requests]
    assert ask_anew(*(requests[0]._replace(seed=seed) for seed in range(8)))[0] == alone[0]
    assert ask_anew(*requests) == alone


CLIP = encoded_clip(frames_of(30))
OTHER_CLIP = encoded_clip([255 - frame for frame in frames_of(25, 96, 64)], "vp9", rate=5)
# it has CLIP's first frames, and different second ones
CHANGED = encoded_clip(
    [frame if n in (0, 12, 23) else 255 - frame for n, frame in enumerate(frames_of(30))]
)


@pytest.mark.slow
def test_logprobs_of_answers_to_clips_are_transformers(run, seeing):
    """The engine's path for images must agree, and with Qwen3-VL also its path for videos.

    This also holds once the engine has seen a pair with the same first frame, and after other pushes.
    """
    engine = seeing.engine
    for version, model in enumerate((0, 1, 0), 11):
        weights = load_file(Path(seeing.directories[model], "model.safetensors"))
        run(engine.sleep())
        run(engine.wake_weights())
        run(engine.load_weights(weights.items(), version))
        run(engine.wake_kv_cache())
        requests = [clips_of(seeing, CLIP, seed=seed) for seed in range(4)]
        requests += [clips_of(seeing, file) for file in (CHANGED, OTHER_CLIP)]
        requests += [clips_of(seeing, OTHER_CLIP, CLIP)]
        answers = run(ask(engine, *requests))
        pairs_of = [[3]] * 5 + [[5], [5, 3]]
        for request, answer, pairs in zip(requests, answers, pairs_of, strict=True):
            assert len(request.images) == sum(pairs)
            assert error_of(seeing, request, answer, model) < 1e-5
            if seeing.family == "qwen3_vl":
                assert error_of(seeing, request, answer, model, pairs) < 1e-5
        # the second frames must also decide, or agreement would be vacuous
        swapped = requests[0]._replace(images=requests[4].images)
        assert max(error_of(seeing, swapped, answer, model) for answer in answers[:4]) > 1e-4


def test_a_groups_image_is_sent_once():
    image, other = (Image(digest, (1, 2, 2), IMAGE, bytes) for digest in (b"one", b"other"))
    prompt = [1, *[IMAGE] * 4, 9]
    group = [Request(prompt, Sampling(1.0, 9), 9, seed, (image,)) for seed in range(8)]
    body = body_of(group)
    assert body["input_ids"] == [[1, IMAGE, 9]] * 8
    assert body["image_data"] == image
    text = group[0]._replace(prompt=[7], images=())
    both = group[0]._replace(prompt=prompt * 2, images=(other, image))
    mixed = body_of([group[0], text, both])
    assert mixed["image_data"] == [[image], [None], [other, image]]
    assert mixed["input_ids"] == [[1, IMAGE, 9], [7], [1, IMAGE, 9] * 2]
    assert body_of([both, both])["image_data"] == [[other, image]] * 2
    assert "image_data" not in body_of([text])


@pytest.mark.parametrize("size", [0, 10, 1 << 20])
def test_an_image_travels_in_a_piece(size):
    files = {b"one": random.Random(0).randbytes(size), b"other": b"2"}
    each = files.items()
    first, second = (Image(name, (1, 2, 2), IMAGE, partial(bytes, file)) for name, file in each)
    body = {"input_ids": [[1]], "image_data": [[first], [None], [second, first]], "stream": True}

    async def collect():
        return [piece async for piece in wire.in_pieces(body)]

    pieces = asyncio.run(collect())
    seen, other = (f"data:;base64,{b64encode(file).decode()}" for file in files.values())
    assert json.loads(b"".join(pieces)) == body | {"image_data": [[seen], [None], [other, seen]]}
    assert seen.removeprefix("data:;base64,").encode() in pieces


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3"])
def test_only_an_engine_that_sees_is_told_of_images(tmp_path, family):
    model = {"model_type": family, "text_config": {"max_position_embeddings": 64}}
    (tmp_path / "config.json").write_text(json.dumps(model))
    sees = family in FAMILIES
    flags = server.server_flags("rollout", 0, 30000, str(tmp_path), CONFIG)
    for flag in ("--image-processor-backend", "--mm-preprocess-cache-size-mb"):
        assert (flag in flags) == sees
