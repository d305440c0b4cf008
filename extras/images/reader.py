"""Reads and checks images and clips, and turns them into tokens and pixels; engines never see bad ones."""

from __future__ import annotations

import io
import os
import re
import struct
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from hashlib import file_digest, sha256
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from extras.images.clips import MOST_OF_A_FRAME, Clips, File, open_file
from extras.images.tokens import expand
from inputs.hf_directory import read_model_config, readable, sees
from inputs.rows import PLACES, Text
from inputs.templates import IMAGE, map_texts
from inputs.tokenization import Media
from runtime.errors import UserError
from sample import Image

if TYPE_CHECKING:
    from torch import Tensor

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # no EPS: Pillow would run Ghostscript
MOST_BYTES = 8 * MOST_OF_A_FRAME  # file size: that many uncompressed pixels of 4 x 16 bits
# EXIF orientation -> Pillow's name for the transposition that undoes it
TURNS = {2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE"}
TURNS |= {6: "ROTATE_270", 7: "TRANSVERSE", 8: "ROTATE_90"}
# Pillow raises these on damaged images
DAMAGED = (OSError, SyntaxError, ValueError, EOFError, TypeError, LookupError, ArithmeticError)
DAMAGED += (struct.error,)


class ImageReader:
    """Reads images for a model, and clips as images of two frames. Raises UserError without a processor."""

    def __init__(self, model_dir: str, fps: float = 2.0, frames: int = 16):
        from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as qwen2_vl

        config = read_model_config(model_dir)
        start = config["vision_start_token_id"]
        end = config["vision_end_token_id"]
        self.image_token: int = config["image_token_id"]
        self.placeholder = [start, self.image_token, end]  # for an image in a text
        # an answer ends at one of these: engine and trainer would expect an image after it
        self.stop_tokens = (self.image_token, config["video_token_id"], start, end)
        show_pairs()
        # Pillow's, as in engines: torchvision's gives different pixels
        processor = qwen2_vl.Qwen2VLImageProcessorPil
        how = {"local_files_only": True, "do_convert_rgb": True}
        with readable(f"{model_dir}: no image processor"):
            self._processor = processor.from_pretrained(model_dir, **how)
        self._side = self._processor.patch_size * self._processor.merge_size  # in pixels
        # per image: larger ones are scaled down
        self.most_features = self._processor.size["longest_edge"] // self._side**2
        self._clips = Clips(fps, frames, self._fit)

    def reads_as(self, other: ImageReader) -> bool:
        """Return whether both make the same tokens and pixels from an image."""
        mine, others = (reader._processor.to_dict() for reader in (self, other))
        return self.placeholder == other.placeholder and mine == others

    def media_of(self, row: dict, prompt: Text, folder: Path, where: str) -> Media:
        """Return functions that read a row's images and videos. Raises UserError for bad paths."""
        file_of = partial(media_file, folder=folder, where=where)
        media = {}
        for name, place in PLACES.items():
            items = row.get(name) or []
            if callable(items):  # bytes aren't kept in memory but read each time
                media[place] = partial(media_files, items, file_of)
            elif isinstance(items, list):
                files = list(map(file_of, items))
                check_places(str(prompt).count(place), files, place, where)
                media[place] = partial(list, files)
            else:
                raise UserError(f"{where}: `{name}` is a list of paths, not {items!r}")
        return media

    def fill(
        self, prompt: Text, media: Media, where: str, decodes: bool = True
    ) -> tuple[Text, tuple[Image, ...]]:
        """Write IMAGE for each image or pair of a clip. Unless it `decodes`, clips' headers give a bound."""
        numbers = {place: count() for place in media}
        for place, files in media.items():
            check_places(str(prompt).count(place), files(), place, where)
        images = []

        def put(found: re.Match) -> str:
            place = found[0]
            number = next(numbers[place])
            parts = self.read_item(where, decodes, place, lambda: media[place]()[number])
            images.extend(image for _, image in parts)
            return "".join(text + IMAGE for text, _ in parts)

        return map_texts(partial(re.compile("|".join(media)).sub, put), prompt), tuple(images)

    def read_item(
        self, where: str, decodes: bool, place: str, file: Callable[[], File]
    ) -> list[tuple[str, Image]]:
        """Read an image, or a clip's pairs, each after its time as the models' own processors write it."""
        path = file()
        name = f"{where}: {path}" if isinstance(path, Path) else where
        if place == IMAGE:
            return [("", self.read(lambda: whole(file(), name), name))]
        read = partial(self._clips.bound, path, name)
        if decodes:
            with open_file(path) as source:
                digest = file_digest(source, "sha256").digest()
            read = partial(self._clips.pairs, digest, file, name)
        parts = []
        for place_in_clip, pair in enumerate(read()):
            image = self._image(pair.file, pair.sides, lambda n=place_in_clip: read()[n].file, name)
            parts.append((f"<{pair.seconds:.1f} seconds>", image))
        return parts

    def read(self, content: Callable[[], bytes], where: str) -> Image:
        """Read and check an image. Raises UserError if it is animated, damaged, or of an unsupported size."""
        data = content()
        picture = decoded(data, where)
        if not picture.format:  # it was converted: readers would see the file differently
            content = partial(shown, content, where)
            data = content()
        width, height = picture.size
        return self._image(data, (height, width), content, where)

    def _image(
        self, data: bytes, sides: tuple[int, int], content: Callable[[], bytes], where: str
    ) -> Image:
        """Describe the image in a file, of this height and width. Raises UserError as `_fit`."""
        height, width = self._fit(*sides, 1, where)
        shape = (1, height // self._side, width // self._side)
        return Image(sha256(data).digest(), shape, self.image_token, content)

    def _fit(self, height: int, width: int, pairs: int, where: str) -> tuple[int, int]:
        """Return the sides at which `pairs` share one image's room. Raises UserError if it is too narrow."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        size = self._processor.size
        least = size["shortest_edge"]
        most = max(size["longest_edge"] // pairs, least)
        try:
            return smart_resize(height, width, self._side, least, most)
        except ValueError as error:  # one side is 200 times the other
            raise UserError(f"{where}: {error}") from None

    def expanded(self, tokens: list[int], images: Sequence[Image], where: str) -> list[int]:
        """Write one token per feature. Raises UserError if there are too few or too many images."""
        check_places(tokens.count(self.image_token), images, IMAGE, where)
        return expand(tokens, images)

    def pixels(self, images: list[Image]) -> tuple[Tensor, Tensor]:
        """Return patches [patches, numbers per patch] and grids [images, 3]: frames, rows, columns."""
        import torch

        # one by one: as decoded floats, an image is many times as large as its file
        pictures = (decoded(image.read(), "an image", 2) for image in images)
        found = [self._processor([each], return_tensors="pt") for each in pictures]
        names = ("pixel_values", "image_grid_thw")
        return tuple(torch.cat([each[name] for each in found]) for name in names)


def patch_server(settings: Any) -> None:
    """Let an engine's process read clips as the trainer does, if its model sees."""
    if sees(settings.model_path):
        show_pairs()


@cache
def show_pairs() -> None:
    """Make Pillow's processor fill patches with a pair's two frames, instead of the same image twice."""
    from PIL.TiffImagePlugin import TiffImageFile
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as qwen2_vl

    processor = qwen2_vl.Qwen2VLImageProcessorPil
    preprocess_stills = processor.preprocess

    def preprocess(self, images, **options):
        found = preprocess_stills(self, images, **options)
        pairs = [each for each in images if isinstance(each, TiffImageFile) and each.n_frames > 1]
        if pairs:
            for pair in pairs:
                pair.seek(1)
            last = preprocess_stills(self, images, **options)
            for pair in pairs:
                pair.seek(0)
            shape = (3, self.temporal_patch_size, -1)  # a patch: colors, frames, pixels
            second = last["pixel_values"].unflatten(1, shape)[:, :, 1]
            found["pixel_values"].unflatten(1, shape)[:, :, 1] = second
        return found

    processor.preprocess = preprocess


def decoded(data: bytes, where: str, frames: int = 1) -> Any:
    """Decode an image of at most `frames` frames, a still as `seen`. Raises UserError as ImageReader.read."""
    from PIL import Image as pillow
    from PIL import ImageSequence

    with warnings.catch_warnings():
        warnings.simplefilter("error", pillow.DecompressionBombWarning)
        try:
            image = pillow.open(io.BytesIO(data), formats=FORMATS)
            # a camera's photo may be followed by previews
            most = 1 if image.format == "MPO" else frames + 1
            found = len(list(islice(ImageSequence.Iterator(image), most)))
            image.seek(0)
            image.load()
            image = seen(image) if found == 1 else image
        except (*DAMAGED, pillow.DecompressionBombWarning, pillow.DecompressionBombError) as error:
            reason = re.sub(r" <.*?>", "", str(error))  # the file, as Python names it
            raise UserError(f"{where}: not an image that can be read: {reason}") from None
    if found > frames:
        raise UserError(f"{where}: it is animated; a clip is MP4, WebM, MOV or MKV, in `videos`")
    return image


def seen(image: Any) -> Any:
    """Return a still as people see it: upright, on white, in RGB; itself if it already is."""
    from PIL import Image as pillow
    from PIL.ExifTags import Base

    try:
        tags = image.getexif()
    except DAMAGED:  # the picture itself is fine
        tags = {}
    # not exif_transpose, which fails if other tags are damaged
    turn = TURNS.get(tags.get(Base.Orientation))
    if image.mode in ("RGB", "L") and not turn and not image.has_transparency_data:
        return image
    if image.mode.startswith(("I", "F")):
        image = in_8_bits(image, tags if image.format == "TIFF" else {})
    if image.has_transparency_data:
        image = image.convert("RGBA")
        ground = pillow.new("RGB", image.size, "white")
        ground.paste(image, mask=image)
        image = ground
    image = image.convert("RGB")
    return image.transpose(pillow.Transpose[turn]) if turn else image


def in_8_bits(image: Any, tags: Mapping[int, Any]) -> Any:
    """Convert a 16-bit grayscale image to 8 bits. Raises ValueError for others. tags: a TIFF's."""
    import numpy as np
    from PIL import Image as pillow
    from PIL.ExifTags import Base

    if not image.mode.startswith("I;16"):
        raise ValueError("it's unclear which of its values is white; save it with 8 or 16 bits")
    numbers = np.asarray(image)
    span = (0, 2 ** tags.get(Base.BitsPerSample, 16) - 1)
    shades = (255, 0) if tags.get(Base.PhotometricInterpretation) == 0 else (0, 255)
    light = np.interp(numbers, span, shades).round()
    light[numbers == image.info.get("transparency")] = 255
    return pillow.fromarray(light.astype(np.uint8))


def shown(content: Callable[[], bytes], where: str) -> bytes:
    """Convert an image to what every reader sees alike: TIFF, which is 20 times as fast to write as PNG."""
    file = io.BytesIO()
    decoded(content(), where).save(file, "TIFF", compression="raw")
    return file.getvalue()


def whole(file: File, where: str) -> bytes:
    """Read an image's file. Raises UserError if it is too large, or can't be read."""
    if isinstance(file, bytes):
        return file
    try:
        size = file.stat().st_size
        if size > MOST_BYTES:
            raise UserError(f"{where}: {size:,} bytes, of at most {MOST_BYTES:,}")
        with file.open("rb") as source:
            return source.read(size)
    except OSError as error:
        raise UserError(f"{where}: {error.strerror}") from None


def media_files(read: Callable[[], list], file_of: Callable[[Any], File]) -> list[File]:
    return list(map(file_of, read()))


def media_file(item: Any, folder: Path, where: str) -> File:
    """Read a media column's item: bytes, path, or dict with either. Raises UserError for URLs, bad paths."""
    item = (item.get("bytes") or item.get("path")) if isinstance(item, dict) else item
    if isinstance(item, bytes | Path):
        return item
    if not isinstance(item, str) or re.match(r"\w+:", item):
        raise UserError(f"{where}: a file's path or its bytes is needed, not {str(item)[:60]!r}")
    if not os.path.isfile(folder / item):  # also False for impossible paths
        raise UserError(f"{where}: {str(folder / item)[:200]}: no such file")
    return folder / item


def check_places(places: int, items: Sequence, place: str, where: str) -> None:
    """Raise UserError unless the texts have as many places as there are items."""
    if places != len(items):
        kind = place[1:-1]
        raise UserError(
            f"{where}: {len(items)} {kind}s for {places} places, {place} or a part of the type {kind}"
        )
