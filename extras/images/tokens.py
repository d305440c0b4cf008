"""Image tokens as Qwen-VL writes them: a prompt has one token per feature of an image.

Engines receive one token per image and expand it themselves; everything else works on all of them.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

from sample import Image


def expand(tokens: list[int], images: Sequence[Image]) -> list[int]:
    """Replace each image's single token with one per feature."""
    expanded = list(tokens)
    at = -1  # the last token processed
    for image in images:
        at = expanded.index(image.token, at + 1)
        expanded[at : at + 1] = [image.token] * image.features
        at += image.features - 1
    return expanded


def collapse(tokens: list[int], images: Sequence[Image]) -> list[int]:
    """Undo `expand`."""
    collapsed = list(tokens)
    at = -1
    for image in images:
        at = collapsed.index(image.token, at + 1)
        del collapsed[at + 1 : at + image.features]
    return collapsed


def positions(tokens: Sequence[int], images: Sequence[Image]) -> Iterator[tuple[int, int, int]]:
    """Yield frame, row and column of each token of an expanded sequence (Qwen2-VL, 2409.12191, section 2.1).

    Text advances all three; an image spans its shape, and the next token comes after its longest side.
    """
    start = 0  # the position of the next token of text
    at = 0  # the index of the next token
    left = iter(images)
    while at < len(tokens):
        is_image = images and tokens[at] == images[0].token
        shape = next(left).shape if is_image else (1, 1, 1)
        for frame, row, column in product(*map(range, shape)):
            yield start + frame, start + row, start + column
        start += max(shape)
        at += prod(shape)
