"""The demo's problems as images: two numbers in a picture, one above the other, or in a clip, in turn.

A digit's cell of 32 x 32 pixels is one feature of the demo's tower. Its place, brightness and noise vary.
"""

import io

import numpy as np
from PIL import Image

from demo.task import Shown
from inputs.templates import IMAGE, VIDEO

CELL = 32  # width and height of a digit's cell, in pixels
DOT = 4  # pixels per dot of its glyph
FRAMES = 4  # frames per number in a clip: a second
DOTS = """
    .###. ..#.. .###. ##### ...#. ##### ..##. ##### .###. .###.
    #...# .##.. #...# ...#. ..##. #.... .#... ....# #...# #...#
    #..## ..#.. ....# ..#.. .#.#. ####. #.... ...#. #...# #...#
    #.#.# ..#.. ...#. ...#. #..#. ....# ####. ..#.. .###. .####
    ##..# ..#.. ..#.. ....# ##### ....# #...# .#... #...# ....#
    #...# ..#.. .#... #...# ...#. #...# #...# .#... #...# ...#.
    .###. .###. ##### .###. ...#. .###. .###. .#... .###. .##..
"""
INK = np.array([list(part) for part in DOTS.split()]) == "#"  # [7 rows x 10 digits, 5 dots]
# [10 digits, 28 rows, 20 columns]: 1 where there is ink
GLYPHS = np.kron(INK.reshape(7, 10, 5).swapaxes(0, 1), np.ones((1, DOT, DOT)))


def shown(preset: str, a: int, b: int, key: str) -> Shown:
    """Return a problem as a clip with --preset video, or else as a picture."""
    if preset == "video":
        return Shown(f"{VIDEO}=", {VIDEO: lambda: [clip(a, b, key)]})
    return Shown(f"{IMAGE}=", {IMAGE: lambda: [picture(a, b, key)]})


def picture(a: int, b: int, key: str) -> bytes:
    """Draw a PNG of `a` above `b`; places, brightness and noise depend only on these and `key`."""
    rng = np.random.default_rng(list(f"{a} {b} {key}".encode()))
    width = max(len(str(a)), len(str(b)))
    light = rng.normal(0.1, 0.1, (2 * CELL, width * CELL))
    for row, number in enumerate((a, b)):
        write(number, light[row * CELL : (row + 1) * CELL], rng)
    file = io.BytesIO()
    Image.fromarray(as_pixels(light)).save(file, "PNG")
    return file.getvalue()


def clip(a: int, b: int, key: str) -> bytes:
    """Draw an MP4 that shows `a` for a second, then `b`; otherwise like `picture`, with noise per frame."""
    import av

    rng = np.random.default_rng(list(f"{a} {b} {key}".encode()))
    shape = (CELL, max(len(str(a)), len(str(b))) * CELL)
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        options = {"crf": "18", "preset": "ultrafast"}
        stream = output.add_stream("libx264", rate=FRAMES, options=options)
        stream.height, stream.width = shape
        stream.pix_fmt = "yuv420p"
        stream.thread_count = 1
        for number in (a, b):
            digits = np.zeros(shape)
            write(number, digits, rng)
            for _ in range(FRAMES):
                pixels = as_pixels(digits + rng.normal(0.1, 0.1, shape))
                output.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="gray")))
        output.mux(stream.encode())
    return file.getvalue()


def write(number: int, light: np.ndarray, rng: np.random.Generator) -> None:
    """Add a number's digits, right-aligned, to its row of cells: light [CELL, columns]."""
    for place, digit in enumerate(reversed(str(number)), 1):
        top = rng.integers(5)
        left = light.shape[1] - place * CELL + rng.integers(4, 9)
        glyph = rng.uniform(0.6, 1.0) * GLYPHS[int(digit)]
        light[top : top + 7 * DOT, left : left + 5 * DOT] += glyph


def as_pixels(light: np.ndarray) -> np.ndarray:
    return (light.clip(0, 1) * 255).astype(np.uint8)
