"""Images as they were read, and what a model makes of them; a bad one is refused before an engine sees it."""

from __future__ import annotations

import io
import os
import re
import struct
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from images.tokens import Image
from inputs.hf_directory import VISION_FAMILIES, read_model_config
from runtime.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

IMAGE = "<image>"  # an image's place in the texts of rows, whatever a model's own tokens are called
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # for EPS Pillow would run Ghostscript
# what Pillow raises on damaged ones
DAMAGED = (OSError, SyntaxError, ValueError, EOFError, TypeError, LookupError, ArithmeticError)
DAMAGED += (struct.error,)


class ImageReader:
    """A model's reader of images: their tokens, sizes and pixels. UserError if the directory has none."""

    def __init__(self, model_dir: str):
        from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as qwen2_vl

        config = read_model_config(model_dir)
        start = config["vision_start_token_id"]
        end = config["vision_end_token_id"]
        self.image_token: int = config["image_token_id"]
        self.placeholder = [start, self.image_token, end]  # of an image in a text
        # an answer ends at one of these: behind it, engine and trainer would look for an image
        self.stop_tokens = (self.image_token, config["video_token_id"], start, end)
        # Pillow's, which engines take, too: torchvision's makes other pixels
        processor = qwen2_vl.Qwen2VLImageProcessorPil
        try:
            self._processor = processor.from_pretrained(model_dir, local_files_only=True)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"{model_dir}: no image processor: {reason}") from None
        self._side = self._processor.patch_size * self._processor.merge_size  # pixels; of a feature
        # of an image: larger ones are scaled down
        self.most_features = self._processor.size["longest_edge"] // self._side**2

    def read_row(self, items: Callable[[], list], folder: Path, where: str) -> tuple[Image, ...]:
        """Read the images of a row of a file in `folder`; items: gives its list. UserError as in `read`."""

        def content(number: int) -> bytes:
            file = image_file(items()[number], folder, where)
            return file.read_bytes() if isinstance(file, Path) else file

        images = []
        for number, item in enumerate(items()):
            file = image_file(item, folder, where)
            name = f"{where}: {file}" if isinstance(file, Path) else where
            images.append(self.read(partial(content, number), name))
        return tuple(images)

    def read(self, content: Callable[[], bytes], where: str) -> Image:
        """Check an image. UserError says `where` unless it is still, whole, and of a size that fits."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        data = content()
        width, height = decoded(data, where).size
        size = self._processor.size
        limits = (size["shortest_edge"], size["longest_edge"])
        try:
            height, width = smart_resize(height, width, self._side, *limits)
        except ValueError as error:  # one side is 200 times the other
            raise UserError(f"{where}: {error}") from None
        shape = (1, height // self._side, width // self._side)
        return Image(sha256(data).digest(), shape, self.image_token, content)

    def pixels(self, images: list[Image]) -> tuple[Tensor, Tensor]:
        """Return patches [patches, numbers of a patch] and grids [images, 3]: frames, rows, columns."""
        import torch

        pixels = []
        grids = []
        for image in images:  # one by one: decoded, and as floats, an image is many times its file
            found = self._processor([decoded(image.read(), "an image")], return_tensors="pt")
            pixels.append(found["pixel_values"])
            grids.append(found["image_grid_thw"])
        return torch.cat(pixels), torch.cat(grids)


def sees(model_dir: str | Path) -> bool:
    """Tell if the model reads images; no, if there is none in the directory."""
    is_here = Path(model_dir, "config.json").is_file()
    return is_here and read_model_config(model_dir).get("model_type") in VISION_FAMILIES


def reader_of(model_dir: str) -> ImageReader | None:
    """The reader of a model; None if it reads text alone."""
    return ImageReader(model_dir) if sees(model_dir) else None


def decoded(data: bytes, where: str) -> Any:
    """Decode the whole image, in RGB. UserError as in `ImageReader.read`."""
    from PIL import Image as pillow
    from PIL import ImageSequence

    with warnings.catch_warnings():
        warnings.simplefilter("error", pillow.DecompressionBombWarning)
        try:
            image = pillow.open(io.BytesIO(data), formats=FORMATS)
            frames = len(list(islice(ImageSequence.Iterator(image), 2)))
            image.seek(0)
            image = image.convert("RGB")
        except (*DAMAGED, pillow.DecompressionBombWarning, pillow.DecompressionBombError) as error:
            raise UserError(f"{where}: not an image that can be read: {error}") from None
    if frames > 1:
        raise UserError(f"{where}: it moves, and videos are not supported")
    return image


def image_file(item: Any, folder: Path, where: str) -> bytes | Path:
    """Read an item of a row's `images`: bytes, path, or dict with either. UserError: nothing is fetched."""
    item = (item.get("bytes") or item.get("path")) if isinstance(item, dict) else item
    if isinstance(item, bytes | Path):
        return item
    if not isinstance(item, str) or re.match(r"\w+:", item):
        raise UserError(f"{where}: an image is a file's path or its bytes, not {str(item)[:60]!r}")
    if not os.path.isfile(folder / item):  # False also for what no path could be
        raise UserError(f"{where}: {str(folder / item)[:200]}: no such file")
    return folder / item


def check_places(places: int, images: Sequence, where: str) -> None:
    """Raise UserError unless the texts have as many places as there are images."""
    if places != len(images):
        found = f"{len(images)} images for {places} places"
        raise UserError(f"{where}: {found}, {IMAGE} or an image part")
