"""Images as they were read, and what a model makes of them; a bad one is refused before an engine sees it."""

from __future__ import annotations

import io
import re
import struct
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config import UserError
from images.tokens import Image
from runtime.hf_directory import read_model_config

if TYPE_CHECKING:
    from torch import Tensor

IMAGE = "<image>"  # an image's place in the texts of rows, whatever a model's own tokens are called
# of Pillow's; for EPS it would run Ghostscript
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# what Pillow raises on damaged ones
DAMAGED = (OSError, SyntaxError, ValueError, EOFError, TypeError, LookupError, ArithmeticError)
DAMAGED += (struct.error,)
VISION_FAMILIES = ("qwen3_vl", "qwen2_5_vl")  # model_type of what sees, in config.json


class ImageReader:
    """What a model's directory says of images: their tokens, their size, how pixels are made."""

    def __init__(self, model_dir: str):
        """UserError if the directory has no processor for images."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        config = read_model_config(model_dir)
        self.image_token: int = config["image_token_id"]
        # an answer ends at one of these: behind it, engine and trainer would look for an image
        named = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        self.stop_tokens = tuple(config[name] for name in named)
        # of an image in a text
        self.placeholder = [config[name] for name in (named[2], named[0], named[3])]
        try:  # Pillow's, which engines take, too: torchvision's makes other pixels
            self._processor = Qwen2VLImageProcessorPil.from_pretrained(
                model_dir, local_files_only=True
            )
        except (OSError, ValueError) as error:
            raise UserError(
                f"{model_dir}: no image processor: {str(error).splitlines()[0]}"
            ) from None
        self._side = self._processor.patch_size * self._processor.merge_size  # pixels; of a feature

    @property
    def most_features(self) -> int:
        """Of any image: larger ones are scaled down."""
        return self._processor.size["longest_edge"] // self._side**2

    def read_row(self, items: Callable[[], list], folder: Path, where: str) -> tuple[Image, ...]:
        """The images of a row of a file in `folder`; `items` reads its `images`. UserError as in `read`."""

        def content(number: int) -> bytes:
            file = image_file(items()[number], folder, where)
            return file.read_bytes() if isinstance(file, Path) else file

        files = [image_file(item, folder, where) for item in items()]
        names = [f"{where}: {file}" if isinstance(file, Path) else where for file in files]
        return tuple(self.read(partial(content, number), name) for number, name in enumerate(names))

    def read(self, content: Callable[[], bytes], where: str) -> Image:
        """UserError that says `where` unless it is a still image, whole, of a size that can be taken."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        data, size, side = content(), self._processor.size, self._side
        width, height = decoded(data, where).size
        try:
            sides = smart_resize(height, width, side, size["shortest_edge"], size["longest_edge"])
        except ValueError as error:  # one side is 200 times the other
            raise UserError(f"{where}: {error}") from None
        shape = (1, sides[0] // side, sides[1] // side)
        return Image(sha256(data).digest(), shape, self.image_token, content)

    def pixels(self, images: list[Image]) -> tuple[Tensor, Tensor]:
        """Of all: [patches, numbers of a patch], and [images, 3]: frames, rows and columns of patches."""
        import torch

        # one by one: decoded, and as floats, an image is many times its file
        found = [
            self._processor([decoded(x.read(), "an image")], return_tensors="pt") for x in images
        ]
        pixels = torch.cat([x["pixel_values"] for x in found])
        grids = torch.cat([x["image_grid_thw"] for x in found])
        return pixels, grids


def sees(model_dir: str | Path) -> bool:
    """Whether the model reads images; no, if there is none in the directory."""
    is_here = Path(model_dir, "config.json").is_file()
    return is_here and read_model_config(model_dir).get("model_type") in VISION_FAMILIES


def reader_of(model_dir: str) -> ImageReader | None:
    """None of a model that reads text alone."""
    return ImageReader(model_dir) if sees(model_dir) else None


def decoded(data: bytes, where: str) -> Any:
    """The whole image in RGB. UserError as in `ImageReader.read`."""
    from PIL import Image as pillow
    from PIL import ImageSequence

    too_large = (pillow.DecompressionBombWarning, pillow.DecompressionBombError)
    with warnings.catch_warnings():
        warnings.simplefilter("error", pillow.DecompressionBombWarning)
        try:
            image = pillow.open(io.BytesIO(data), formats=FORMATS)
            frames = len(list(islice(ImageSequence.Iterator(image), 2)))
            image.seek(0)
            image = image.convert("RGB")
        except (*DAMAGED, *too_large) as error:
            raise UserError(f"{where}: not an image that can be read: {error}") from None
    if frames > 1:
        raise UserError(f"{where}: it moves, and videos are not supported")
    return image


def image_file(item: Any, folder: Path, where: str) -> bytes | Path:
    """An item of a row's `images`: bytes, a path, or a dict with either, as `datasets` writes its images.

    Nothing is fetched: UserError that says `where` for an address, and if there is no such file.
    """
    item = (item.get("bytes") or item.get("path")) if isinstance(item, dict) else item
    if isinstance(item, bytes | Path):
        return item
    if not isinstance(item, str) or re.match(r"\w+:", item):
        raise UserError(f"{where}: an image is a file's path or its bytes, not {str(item)[:60]!r}")
    if not (folder / item).is_file():
        raise UserError(f"{where}: {folder / item}: no such file")
    return folder / item


def check_places(places: int, images: Sequence, where: str) -> None:
    """UserError unless the texts have as many places as there are images."""
    if places != len(images):
        raise UserError(
            f"{where}: {len(images)} images for {places} places, {IMAGE} or an image part"
        )
