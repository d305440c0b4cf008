"""Who reads a model's images and clips: nobody, or what an extra adds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inputs.hf_directory import sees
from runtime.hooks import needed

Reader = Any  # what reads them: see extras/images/reader.py
Media = dict[str, Callable[[], list]]  # IMAGE, VIDEO -> function that returns a row's files


def reader_of(model_dir: str, *sampling: float) -> Reader | None:
    """Return a model's reader, None if it only reads text. sampling: frames per second, most frames."""
    if not sees(model_dir):
        return None
    return needed("image_reader", model_dir)(model_dir, *sampling)
