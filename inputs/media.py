"""Images in prompts: their tokens as Qwen-VL writes them, and who reads them.

A prompt has one token per feature of an image. Engines receive one token per image and expand it themselves;
everything else works on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from inputs.hf_directory import sees
from inputs.rows import Text
from runtime.errors import UserError
from sample import Image

if TYPE_CHECKING:
    from torch import Tensor

Media = dict[str, Callable[[], list]]  # IMAGE, VIDEO -> function that returns a row's files


class Reader(Protocol):
    """Reads the images and clips of a model's prompts, and knows what the model does with them."""

    image_token: int
    stop_tokens: tuple[int, ...]
    most_features: int  # per image

    def media_of(self, row: dict, prompt: Text, folder: Path, where: str) -> Media: ...
    def fill(
        self, prompt: Text, media: Media, where: str, decodes: bool = True
    ) -> tuple[Text, tuple[Image, ...]]: ...
    def pixels(self, images: list[Image]) -> tuple[Tensor, Tensor]: ...
    def reads_as(self, other: Reader) -> bool: ...
    def deep_layers(self, hf: dict) -> int: ...
    def macs_of_images(self, hf: dict) -> Callable[[list[int]], int]: ...
    def first_stage(self) -> type: ...


READERS: list[Callable[..., Reader]] = []  # (directory, fps, frames); extras add theirs


def reader_of(model_dir: str, *sampling: float) -> Reader | None:
    """Return a model's image reader, None if it only reads text. sampling: frames per second, most frames."""
    if not sees(model_dir):
        return None
    for read in READERS:
        return read(model_dir, *sampling)
    raise UserError(f"{model_dir}: no extra reads its images")


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
