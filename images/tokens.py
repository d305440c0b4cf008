"""Image tokens, as Qwen-VL writes them: a prompt has one for each feature of its images.

An engine is sent one token for each image and expands it by itself; trainers, lengths and balance see all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

Shape = tuple[int, int, int]  # of a image's features: frames, rows, columns


def expand(tokens: list[int], image_token: int, counts: Sequence[int]) -> list[int]:
    """One image token a image -> as many as it has features. ValueError unless each image has its one."""
    if (found := tokens.count(image_token)) != len(counts):
        raise ValueError(f"{found} placeholders for {len(counts)} images")
    left = iter(counts)
    return [token for each in tokens for token in ([each] * next(left) if each == image_token else [each])]


def collapse(tokens: list[int], image_token: int, counts: Sequence[int]) -> list[int]:
    """The inverse of `expand`."""
    collapsed, at, left = [], 0, iter(counts)
    while at < len(tokens):
        collapsed.append(tokens[at])
        at += next(left) if tokens[at] == image_token else 1
    return collapsed


def positions(
    tokens: Sequence[int], image_token: int, shapes: Sequence[Shape]
) -> Iterator[tuple[int, int, int]]:
    """Frame, row and column of each token of an expanded sequence, as Qwen-VL's rotary embedding counts.

    Text counts on in all three; an image spans its shape from where it starts, and what follows starts behind
    its longest side (Qwen2-VL, 2409.12191, section 2.1).
    """
    start, at, left = 0, 0, iter(shapes)
    while at < len(tokens):
        shape = next(left) if tokens[at] == image_token else (1, 1, 1)
        yield from ((start + f, start + r, start + c) for f, r, c in product(*map(range, shape)))
        start, at = start + max(shape), at + shape[0] * shape[1] * shape[2]
