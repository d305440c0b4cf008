"""A sheet of held-out pictures of the demo whose numbers are drawn, each above its answer.

python bench/drawings.py              -> docs/images.png
"""

from __future__ import annotations

import io
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).parent.parent))

from recipes.addition import task
from recipes.addition.drawing import CELL

SHEET = Path(__file__).parent.parent / "docs" / "images.png"
COLUMNS, ROWS = 4, 2
WIDTH, HEIGHT, MARGIN = 6 * CELL, 2 * CELL, 20  # of the longest picture, and around it


def main() -> None:
    sheet = Image.new("L", (COLUMNS * (WIDTH + MARGIN), ROWS * (HEIGHT + 2 * MARGIN)), "white")
    pen = ImageDraw.Draw(sheet)
    for number, (a, b) in enumerate(task.HELD_OUT_PROBLEMS[: COLUMNS * ROWS]):
        _, png = task.drawn(a, b, task.HELD_OUT_KEY)
        row, column = divmod(number, COLUMNS)
        place = column * (WIDTH + MARGIN) + MARGIN // 2, row * (HEIGHT + 2 * MARGIN) + MARGIN // 2
        sheet.paste(Image.open(io.BytesIO(png)), place)
        pen.text((place[0], place[1] + HEIGHT + 2), str(a + b), "black", font_size=16)
    sheet.quantize(16).save(SHEET, optimize=True)


if __name__ == "__main__":
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    main()
