"""The demo's pictures and clips: they can be read, and are the written problems; a cell is a feature."""

import io

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageSequence

from config import DEMO_MODELS
from demo import task
from demo.drawing import CELL, picture
from images.reader import ImageReader
from inputs.templates import IMAGE, VIDEO

SUMMAND = st.integers(1, 6).flatmap(lambda digits: st.integers(0, 10**digits - 1))
# of character displays: the columns of each digit, from the left; a bit is a dot, the lowest at the top
COLUMNS = """
    3e5149453e 00427f4000 4261514946 2141454b31 1814127f10 2745454539 3c4a494930 0171090503 3649494936
    064949291e
"""


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
    rows = [np.split(row, row.shape[1] // CELL, 1) for row in (light[:CELL], light[CELL:])]
    upper, lower = ("".join(map(read_cell, row)) for row in rows)
    return upper, lower


@settings(deadline=None, max_examples=60)
@given(a=SUMMAND, b=SUMMAND, key=st.text(max_size=20))
def test_a_picture_can_be_read(a, b, key):
    """As the two numbers that it was drawn of, whatever its places, brightness and noise; right-aligned."""
    png = picture(a, b, key)
    assert read_numbers(png) == (str(a), str(b))
    assert Image.open(io.BytesIO(png)).size == (CELL * max(len(str(a)), len(str(b))), 2 * CELL)


def read_clip(shown: task.Shown) -> list[str]:
    """The number in each pair of a clip's frames, which is the same in both."""
    reader = ImageReader(str(DEMO_MODELS / "drawn" / "actor"))
    text, pairs = shown.read(reader)
    assert text == shown.text.replace(VIDEO, "<0.2 seconds><image><1.5 seconds><image>")
    numbers = []
    for pair in pairs:
        frames = ImageSequence.Iterator(Image.open(io.BytesIO(pair.read())))
        rows = [np.asarray(frame.convert("L"), float) for frame in frames]
        seen = {"".join(map(read_cell, np.split(row, row.shape[1] // CELL, 1))) for row in rows}
        assert len(rows) == 2 and len(seen) == 1
        numbers += seen
    return numbers


@settings(deadline=None, max_examples=20)
@given(a=SUMMAND, b=SUMMAND)
def test_a_clip_can_be_read(a, b):
    assert read_clip(task.filmed(a, b, "key")) == [str(a), str(b)]


def test_a_picture_follows_from_its_numbers_and_key():
    first, *others = (picture(57, 68, key) for key in "aab")
    assert others[0] == first != others[1]


def test_the_same_problems_are_written_and_drawn():
    """By seed and number; a question whose numbers are drawn gives nothing away. A cell is a feature."""
    reader = ImageReader(str(DEMO_MODELS / "drawn" / "actor"))

    def characters(text, images):
        return [ord(c) for c in text] + [image.features for image in images]

    written, drawn = (task.Addition(3, characters, each) for each in (None, reader))
    pairs = [(written.training(i), drawn.training(i)) for i in range(20)]
    for one, other in [*pairs, *zip(list(written.held_out)[:50], drawn.held_out, strict=False)]:
        (image,) = other.images
        numbers = read_numbers(image.read())
        assert one.question == "{}+{}=".format(*numbers) and one.images == ()
        assert one.answer_key == other.answer_key and other.question == IMAGE + "="
        assert other.tokens == characters(IMAGE + "=", (image,))
        assert image.features == 2 * max(map(len, numbers))
