"""The demo's problems as pictures: two numbers, one above the other, a cell of 32 x 32 pixels for a digit.

A cell is one feature of the demo's tower. Digits are moved a little in it, brighter or darker, under noise.
"""

import io

import numpy as np
from PIL import Image

CELL = 32  # pixels of a digit's cell
DOT = 4  # pixels of a dot of its glyph
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


def picture(a: int, b: int, key: str) -> bytes:
    """Draw a PNG of `a` above `b`; places, brightness and noise follow from these and `key`."""
    rng = np.random.default_rng(list(f"{a} {b} {key}".encode()))
    width = max(len(str(a)), len(str(b)))
    light = rng.normal(0.1, 0.1, (2 * CELL, width * CELL))
    for row, number in enumerate((a, b)):
        for place, digit in enumerate(reversed(str(number)), 1):
            top = row * CELL + rng.integers(5)
            left = (width - place) * CELL + rng.integers(4, 9)
            glyph = rng.uniform(0.6, 1.0) * GLYPHS[int(digit)]
            light[top : top + 7 * DOT, left : left + 5 * DOT] += glyph
    file = io.BytesIO()
    Image.fromarray((light.clip(0, 1) * 255).astype(np.uint8)).save(file, "PNG")
    return file.getvalue()
