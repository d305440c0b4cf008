"""The demo's pictures and clips: they can be read, and are the written problems; a cell is a feature."""

import io

import numpy as np
from PIL import Image

from config import DEMO_MODELS
from demo import task
from demo.drawing import CELL
from images.reader import ImageReader
from inputs.templates import IMAGE

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
