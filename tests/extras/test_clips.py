"""Clips: which frames are shown, equal bytes everywhere, files and rows with clips, and what is refused."""

import asyncio
import hashlib
import io
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image as pillow

import data
from extras.images import clips, reader
from inputs.templates import VIDEO
from runtime.errors import UserError
from sample import Prompt
from tests.extras.test_images import prompts_of
from tests.support.clips import KINDS, digest_of_pairs, encoded_clip, frames_of, turned_clip
from tests.support.patience import run_process
from tests.support.rows import jsonl
from tests.support.vision import IMAGE, encoded_picture, make_vision_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """Make a model that takes images of up to 16 features, of 32 x 32 pixels each."""
    return make_vision_model(tmp_path_factory.mktemp("vision"), "qwen3_vl", layers=1)


def as_it_is(height, width, pairs, where):
    return height, width


def new_clips(fps=2.0, most=16, fit=as_it_is):
    return clips.Clips(fps, most, fit)


def pairs_of(file: bytes, **settings):
    return new_clips(**settings).pairs(b"", partial(bytes, file), "a clip")


def frames_in(pairs):
    """Return all frames of the pairs, [height, width, 3], in order."""
    frames = []
    for pair in pairs:
        image = pillow.open(io.BytesIO(pair.file))
        for number in (0, 1):
            image.seek(number)
            frames.append(np.asarray(image.convert("RGB")).astype(int))
    return frames


def corners(frame):
    """Return colors near the four corners: upper left and right, lower left and right."""
    return [tuple(frame[y, x]) for y in (8, -8) for x in (8, -8)]


RED, GREEN, BLUE = (200, 40, 40), (40, 200, 40), (40, 40, 200)  # colors in `frames_of`


def is_near(color, other, most=10):
    return max(abs(a - b) for a, b in zip(color, other, strict=True)) <= most


@pytest.mark.parametrize("kind", KINDS)
def test_even_times_from_the_first_frame_to_the_last(kind):
    """Three seconds must give two frames each; a clip of one or three frames shows its last one again."""
    pairs = pairs_of(encoded_clip(frames_of(30), kind))
    assert [pair.seconds for pair in pairs] == pytest.approx([0.3, 1.45, 2.6])
    assert [pair.sides for pair in pairs] == [(64, 96)] * 3
    shown = [corners(frame) for frame in frames_in(pairs)]
    for (grey, *others), number in zip(shown, (0, 6, 12, 17, 23, 29), strict=True):
        assert is_near(grey, [255 * (number + 1) // 30] * 3)
        assert all(map(is_near, others, (GREEN, BLUE, RED)))
    for count, numbers in ((1, (0, 0)), (3, (0, 1, 2, 2))):
        shown = frames_in(pairs_of(encoded_clip(frames_of(count), kind)))
        for frame, number in zip(shown, numbers, strict=True):
            assert is_near(corners(frame)[0], [255 * (number + 1) // count] * 3)


def test_a_variable_rate_shows_what_is_seen_at_a_time():
    """Frames are at 0, 0.1, 0.2, 3, 3.1 and 5 s, and the third one lasts longest."""
    file = encoded_clip(frames_of(6), times=[0, 100, 200, 3000, 3100, 5000])
    pairs = pairs_of(file, most=6)
    greys = [round(corners(frame)[0][0] / 42) for frame in frames_in(pairs)]
    assert greys == [1, 3, 3, 4, 5, 6]
    assert [round(pair.seconds, 1) for pair in pairs] == [0.5, 2.5, 4.5]


TURNS = [(1, 0, 0, 1), (-1, 0, 0, -1), (0, 1, -1, 0), (0, -1, 1, 0)]
MIRRORED = [(-1, 0, 0, 1), (1, 0, 0, -1), (0, 1, 1, 0), (0, -1, -1, 0)]


@pytest.mark.parametrize("matrix", TURNS)
def test_a_display_matrix_is_obeyed(matrix):
    """A quarter at (x, y) from the middle must go to (a x + c y, b x + d y)."""
    a, b, c, d = matrix
    (pair,) = pairs_of(turned_clip(encoded_clip(frames_of(1)), matrix))
    assert pair.sides == ((96, 64) if b else (64, 96))
    shown = corners(frames_in([pair])[0])
    quarters = {(-1, -1): (255, 255, 255), (1, -1): GREEN, (-1, 1): BLUE, (1, 1): RED}
    for (x, y), color in quarters.items():
        place = (a * x + c * y, b * x + d * y)
        assert is_near(shown[list(quarters).index(place)], color)


@pytest.mark.parametrize("matrix", [*MIRRORED, (1, 1, -1, 1)])
def test_a_clip_that_is_not_only_turned_is_refused(matrix):
    refused = "^a clip: it is mirrored, skewed or tilted; convert it$"
    with pytest.raises(UserError, match=refused):
        pairs_of(turned_clip(encoded_clip(frames_of(1)), matrix))


def test_ten_bits_are_right_and_hdr_is_refused():
    (pair,) = pairs_of(encoded_clip(frames_of(1), pixels="yuv420p10le"))
    assert all(map(is_near, corners(frames_in([pair])[0])[1:], (GREEN, BLUE, RED)))
    for transfer in (16, 18):
        file = encoded_clip(frames_of(1), pixels="yuv420p10le", color_trc=transfer)
        with pytest.raises(UserError, match=r"^a clip: HDR"):
            new_clips().bound(file, "a clip")


def several():
    files = [encoded_clip(frames_of(24), kind) for kind in KINDS]
    files.append(encoded_clip(frames_of(6), times=[0, 100, 200, 3000, 3100, 5000]))
    files += [turned_clip(files[0], matrix) for matrix in TURNS[1:]]
    return [*files, encoded_clip(frames_of(5, 66, 98))]


def test_two_processes_and_four_threads_read_the_same_bytes(tmp_path):
    files = several()
    expected = list(map(digest_of_pairs, files))
    assert len({*expected}) == len(files)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(digest_of_pairs, 3 * files)) == 3 * expected
    for number, file in enumerate(files):
        Path(tmp_path, f"{number}").write_bytes(file)
    other = (
        "import sys; from pathlib import Path; from tests.support.clips import digest_of_pairs\n"
    )
    other += "for path in sys.argv[1:]: print(digest_of_pairs(Path(path).read_bytes()))"
    paths = [str(tmp_path / str(number)) for number in range(len(files))]
    found = run_process(sys.executable, "-c", other, *paths, env={})
    assert found.stdout.split() == expected, found.stderr


def test_a_pair_fills_the_patches_where_an_image_stands_twice(model_dir):
    """Pairs must be as transformers makes them from two frames; a still among them stays as it is."""
    eyes = reader.ImageReader(model_dir)
    read = partial(eyes.read_item, "here", True)
    ((_, still),) = read(reader.IMAGE, lambda: encoded_picture(64, 64))
    pairs = [image for _, image in read(VIDEO, lambda: encoded_clip(frames_of(4)))]
    pixels, grids = eyes.pixels([pairs[0], still, pairs[1]])
    sides = [each.shape[1:] for each in (pairs[0], still, pairs[1])]
    assert grids.tolist() == [[1, 2 * rows, 2 * columns] for rows, columns in sides]
    parts = pixels.unflatten(1, (3, 2, -1)).split(grids.prod(-1).tolist())
    for part, pair in zip((parts[0], parts[2]), pairs, strict=True):
        for number, frame in enumerate(frames_in_image(pair)):
            alone = eyes._processor([frame], return_tensors="pt")["pixel_values"]
            assert alone.unflatten(1, (3, 2, -1))[:, :, 0].equal(part[:, :, number])
        assert not part[:, :, 0].equal(part[:, :, 1])
    assert parts[1][:, :, 0].equal(parts[1][:, :, 1])


def frames_in_image(image):
    file = pillow.open(io.BytesIO(image.read()))
    frames = []
    for number in (0, 1):
        file.seek(number)
        frames.append(file.convert("RGB"))
    return frames


@pytest.fixture(scope="module")
def files():
    return {"a.mp4": encoded_clip(frames_of(30)), "b.webm": encoded_clip(frames_of(4), "vp9")}


@pytest.fixture
def folder(tmp_path, files):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "c.png").write_bytes(encoded_picture(64, 32))
    return tmp_path


ROWS = [
    dict(prompt="<video>=", videos=["a.mp4"], answer="1"),
    dict(prompt="0<video>+<image>+<video>=", videos=["b.webm", "a.mp4"], answer="2"),
    dict(prompt="7+5=", answer="12"),
]
ROWS[1]["images"] = ["c.png"]
A = "<0.3 seconds><image><1.4 seconds><image><2.6 seconds><image>"  # frames of a.mp4
B = "<0.1 seconds><image><0.2 seconds><image>"  # frames of b.webm


@pytest.mark.parametrize("kind", ["paths in JSONL", "bytes in Parquet"])
def test_rows_with_videos(model_dir, folder, kind):
    """They must keep their order, with images among them; JSONL and Parquet give the same prompts."""
    path = jsonl(folder / "rows.jsonl", ROWS)
    if kind == "bytes in Parquet":
        path = folder / "rows.parquet"
        columns = {name: [row[name] for row in ROWS] for name in ("prompt", "answer")}
        for name in ("images", "videos"):
            files = [[folder / each for each in row.get(name, [])] for row in ROWS]
            columns[name] = [[file.read_bytes() for file in row] for row in files]
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    prompts = list(prompts_of(model_dir, path))
    assert [prompt.question for prompt in prompts] == [f"{A}=", f"0{B}+<image>+{A}=", "7+5="]
    sides = [[image.shape[1:] for image in prompt.images] for prompt in prompts]
    assert sides == [[(1, 2)] * 3, [(2, 3)] * 2 + [(1, 2)] + [(1, 2)] * 3, []]
    for prompt in prompts:
        assert prompt.tokens.count(IMAGE) == sum(image.features for image in prompt.images)
        digests = [hashlib.sha256(image.read()).digest() for image in prompt.images]
        assert digests == [image.digest for image in prompt.images]
    assert prompts[1].images[3:] == prompts[0].images
    assert prompts[1].images[2].read()[:4] == b"\x89PNG"


PLAYLIST = "#EXTM3U\n#EXTINF:1,\n{}\n#EXT-X-ENDLIST\n"
CONCAT = "ffconcat version 1.0\nfile '{}'\n"
NO_CLIP = "no MP4, MOV, WebM or MKV that can be read"
NO_CLIPS = ("empty", "a text", "a moving picture", "a playlist", "a list of files")
# the file's fault -> the rest of its line
BAD = dict.fromkeys((*NO_CLIPS, "cut before moov"), NO_CLIP)
BAD |= {
    "10^8 pixels": "frames of 12000 x 12000 pixels, of at most 89478485",
    "an hour": "3600 seconds, of at most 1800; cut it",
    "HDR": "HDR",
}
BAD_WHEN_DRAWN = {
    "cut behind moov": "cut off at .* of 6.0 seconds",
    "cut": "cut off at .* of 3.0 seconds",
    "a hole": f"damaged: .* frames can't be read|{NO_CLIP}",
}


def moving_picture() -> bytes:
    two = dict(save_all=True, append_images=[pillow.new("RGB", (64, 64))])
    return encoded_picture(64, 64, kind="GIF", **two)


def bad_file(name: str, whole: bytes) -> bytes:
    """Make a clip with one of these faults. whole: an MP4 with its moov after the frames."""
    webm = encoded_clip(frames_of(30, 128, 128), "vp9")
    fragments = encoded_clip(frames_of(60), flags="frag_keyframe+empty_moov")
    large = encoded_clip(frames_of(1, 300, 300), "raw")
    side = bytes([300 // 256, 300 % 256])
    for element in (b"\xb0\x82", b"\xba\x82"):  # width and height, two bytes each
        large = large.replace(element + side, element + (12000).to_bytes(2, "big"))
    middle = whole.index(b"mdat") + 900
    return {
        "empty": b"",
        "a text": b"a film",
        "a moving picture": moving_picture(),
        "a playlist": PLAYLIST.format("a.mp4").encode(),
        "a list of files": CONCAT.format("a.mp4").encode(),
        "cut before moov": whole[: whole.index(b"moov")],
        "10^8 pixels": large,
        "an hour": encoded_clip(frames_of(2), times=[0, 3_600_000]),
        "HDR": encoded_clip(frames_of(1), pixels="yuv420p10le", color_trc=16),
        "cut behind moov": fragments[: len(fragments) * 3 // 4],
        "cut": webm[: len(webm) // 2],
        "a hole": whole[:middle] + bytes(300) + whole[middle + 300 :],
    }[name]


@pytest.mark.parametrize("name", [*BAD, *BAD_WHEN_DRAWN])
def test_a_bad_clip_is_one_line(model_dir, folder, files, name):
    """The error must come before anything starts if the header shows it, otherwise when the row is drawn."""
    (folder / "bad.mp4").write_bytes(bad_file(name, files["a.mp4"]))
    path = jsonl(folder / "rows.jsonl", [ROWS[0], ROWS[0] | dict(videos=["bad.mp4"])])
    line = r"rows.jsonl:2: \S*bad.mp4: "
    if name in BAD_WHEN_DRAWN:
        prompts = prompts_of(model_dir, path)
        with pytest.raises(UserError, match=line + f"({BAD_WHEN_DRAWN[name]})"):
            prompts[1]
        return
    with pytest.raises(UserError, match=line + BAD[name]) as error:
        prompts_of(model_dir, path)
    assert "\n" not in str(error.value)


def test_too_many_frames_are_refused_by_the_header_or_as_they_are_counted(monkeypatch):
    monkeypatch.setattr(clips, "MOST_PIXELS", 29 * 64 * 96)
    line = r"^a clip: 30 frames of 96 x 64 pixels, of at most 2e\+05 pixels"
    for kind in ("h264", "vp9"):
        with pytest.raises(UserError, match=line):
            new_clips().bound(encoded_clip(frames_of(30), kind), "a clip")
    monkeypatch.setattr(clips, "frames_in", lambda *header: 0)
    with pytest.raises(UserError, match=line):
        pairs_of(encoded_clip(frames_of(40)))


class Slow:
    """A source that reads slowly and records which prompts it reads."""

    def __init__(self):
        self.read = []

    def training(self, prompt_id):
        self.read.append(prompt_id)
        time.sleep(0.05)
        return Prompt([1], str(prompt_id), None)


def test_prompts_are_read_in_threads_and_ahead(run):
    """The event loop must go on; prompts are read before they are drawn, and only once."""
    source = Slow()

    def own_of(prompts, count):
        drawn = prompts.draw(count)
        owners = prompts.assign_owners(drawn, 2)
        return [prompt_id for prompt_id in drawn if owners[prompt_id] == 1]

    async def serve():
        prompts = data.Prompts(source, 2, threads=ThreadPoolExecutor(4))
        reading = asyncio.ensure_future(prompts.read(own_of(prompts, 8)))
        turns = 0
        while not reading.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert turns > 10 and list(reading.result()) == [1, 3, 5, 7]
        prompts.read_ahead(8, 2, 1)
        await asyncio.sleep(0.3)
        assert sorted(source.read) == list(range(1, 16, 2))
        prompts.carry_over([3, 4], [])
        prompts.read_ahead(8, 2, 1)  # 3 comes first, 4 second
        found = await prompts.read(own_of(prompts, 8))
        questions = {number: prompt.question for number, prompt in found.items()}
        assert questions == {number: str(number) for number in (4, 9, 11, 13)}
        assert source.read.count(4) == source.read.count(9) == source.read.count(13) == 1

    run(serve())
