"""Images and clips as they were read, and what a model makes of them; engines see no bad one."""

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

from images.clips import MOST_OF_A_FRAME, Clips, File, open_file
from images.tokens import expand
from inputs.hf_directory import read_model_config, readable
from inputs.rows import PLACES, Text
from inputs.templates import IMAGE, map_texts
from runtime.errors import UserError
from sample import Image

if TYPE_CHECKING:
    from torch import Tensor

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # for EPS Pillow would run Ghostscript
MOST_BYTES = 8 * MOST_OF_A_FRAME  # of a file: as many pixels, not compressed, of four times 16 bits
# by EXIF's orientation, Pillow's name for the turn that undoes it
TURNS = {2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE"}
TURNS |= {6: "ROTATE_270", 7: "TRANSVERSE", 8: "ROTATE_90"}
# what Pillow raises on damaged ones
DAMAGED = (OSError, SyntaxError, ValueError, EOFError, TypeError, LookupError, ArithmeticError)
DAMAGED += (struct.error,)
Media = dict[str, Callable[[], list[File]]]  # by place, what gives a row's files there


class ImageReader:
    """A model's reader of images, and of clips, which become images of two frames. UserError: it has none."""

    def __init__(self, model_dir: str, fps: float = 2.0, frames: int = 16):
        from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as qwen2_vl

        config = read_model_config(model_dir)
        start = config["vision_start_token_id"]
        end = config["vision_end_token_id"]
        self.image_token: int = config["image_token_id"]
        self.placeholder = [start, self.image_token, end]  # of an image in a text
        # an answer ends at one of these: behind it, engine and trainer would look for an image
        self.stop_tokens = (self.image_token, config["video_token_id"], start, end)
        show_pairs()
        # Pillow's, which engines take, too: torchvision's makes other pixels
        processor = qwen2_vl.Qwen2VLImageProcessorPil
        how = {"local_files_only": True, "do_convert_rgb": True}
        with readable(f"{model_dir}: no image processor"):
            self._processor = processor.from_pretrained(model_dir, **how)
        self._side = self._processor.patch_size * self._processor.merge_size  # pixels; of a feature
        # of an image: larger ones are scaled down
        self.most_features = self._processor.size["longest_edge"] // self._side**2
        self._clips = Clips(fps, frames, self._fit)

    def reads_as(self, other: ImageReader) -> bool:
        """True if both make the same tokens and pixels of an image."""
        mine, others = (reader._processor.to_dict() for reader in (self, other))
        return self.placeholder == other.placeholder and mine == others

    def media_of(self, row: dict, prompt: Text, folder: Path, where: str) -> Media:
        """Return what gives a row's images and videos, checked unless bytes. UserError."""
        file_of = partial(media_file, folder=folder, where=where)
        media = {}
        for name, place in PLACES.items():
            items = row.get(name) or []
            if callable(items):  # bytes, which aren't held: they are asked for again
                media[place] = lambda read=items: list(map(file_of, read()))
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
        """Write IMAGE for each image and pair of a clip, which its header bounds unless it `decodes`."""
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
        """Read an image, or a clip's pairs, each behind its time as the models' own processors write it."""
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
        """Check an image. UserError says `where` unless it is still, whole, and of a size that fits."""
        data = content()
        picture = decoded(data, where)
        if not picture.format:  # it isn't what every reader sees in the file
            content = partial(shown, content, where)
            data = content()
        width, height = picture.size
        return self._image(data, (height, width), content, where)

    def _image(
        self, data: bytes, sides: tuple[int, int], content: Callable[[], bytes], where: str
    ) -> Image:
        """The image in a file, of this height and width. UserError, see `_fit`."""
        height, width = self._fit(*sides, 1, where)
        shape = (1, height // self._side, width // self._side)
        return Image(sha256(data).digest(), shape, self.image_token, content)

    def _fit(self, height: int, width: int, pairs: int, where: str) -> tuple[int, int]:
        """Return sides of `pairs` that have the room of one image together. UserError: too narrow."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        size = self._processor.size
        least = size["shortest_edge"]
        most = max(size["longest_edge"] // pairs, least)
        try:
            return smart_resize(height, width, self._side, least, most)
        except ValueError as error:  # one side is 200 times the other
            raise UserError(f"{where}: {error}") from None

    def expanded(self, tokens: list[int], images: Sequence[Image], where: str) -> list[int]:
        """Write a token for each feature. UserError, which says `where`, for too few or many images."""
        check_places(tokens.count(self.image_token), images, IMAGE, where)
        return expand(tokens, images)

    def pixels(self, images: list[Image]) -> tuple[Tensor, Tensor]:
        """Return patches [patches, numbers of a patch] and grids [images, 3]: frames, rows, columns."""
        import torch

        # one by one: decoded, and as floats, an image is many times its file
        pictures = (decoded(image.read(), "an image", 2) for image in images)
        found = [self._processor([each], return_tensors="pt") for each in pictures]
        names = ("pixel_values", "image_grid_thw")
        return tuple(torch.cat([each[name] for each in found]) for name in names)


@cache  # once in a process
def show_pairs() -> None:
    """Have Pillow's processor fill patches with both frames of a pair, where one image stands twice."""
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
            shape = (3, self.temporal_patch_size, -1)  # of a patch: colors, frames, pixels
            second = last["pixel_values"].unflatten(1, shape)[:, :, 1]
            found["pixel_values"].unflatten(1, shape)[:, :, 1] = second
        return found

    processor.preprocess = preprocess


def decoded(data: bytes, where: str, frames: int = 1) -> Any:
    """Decode the whole image, of at most so many frames; one as `seen`. UserError: as ImageReader.read."""
    from PIL import Image as pillow
    from PIL import ImageSequence

    with warnings.catch_warnings():
        warnings.simplefilter("error", pillow.DecompressionBombWarning)
        try:
            image = pillow.open(io.BytesIO(data), formats=FORMATS)
            # a camera's photo has previews behind it
            most = 1 if image.format == "MPO" else frames + 1
            found = len(list(islice(ImageSequence.Iterator(image), most)))
            image.seek(0)
            image.load()
            image = seen(image) if found == 1 else image
        except (*DAMAGED, pillow.DecompressionBombWarning, pillow.DecompressionBombError) as error:
            reason = re.sub(r" <.*?>", "", str(error))  # the file, as Python names it
            raise UserError(f"{where}: not an image that can be read: {reason}") from None
    if found > frames:
        raise UserError(f"{where}: it moves; a clip is MP4, WebM, MOV or MKV, in `videos`")
    return image


def seen(image: Any) -> Any:
    """Return a still as people see it: upright, on white, in RGB; itself if each reader sees it so."""
    from PIL import Image as pillow
    from PIL.ExifTags import Base

    try:
        tags = image.getexif()
    except DAMAGED:  # the picture is whole
        tags = {}
    # by hand: exif_transpose fails where other tags are damaged
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
    """Return a picture of 16 bits in 256 shades. ValueError for others. tags: of a TIFF."""
    import numpy as np
    from PIL import Image as pillow
    from PIL.ExifTags import Base

    if not image.mode.startswith("I;16"):
        raise ValueError("nobody knows which of its numbers is white; save it with 8 or 16 bits")
    numbers = np.asarray(image)
    span = (0, 2 ** tags.get(Base.BitsPerSample, 16) - 1)
    shades = (255, 0) if tags.get(Base.PhotometricInterpretation) == 0 else (0, 255)
    light = np.interp(numbers, span, shades).round()
    light[numbers == image.info.get("transparency")] = 255
    return pillow.fromarray(light.astype(np.uint8))


def shown(content: Callable[[], bytes], where: str) -> bytes:
    """Return a file in which every reader sees what people see: a TIFF, written in 1/20 of a PNG's time."""
    file = io.BytesIO()
    decoded(content(), where).save(file, "TIFF", compression="raw")
    return file.getvalue()


def whole(file: File, where: str) -> bytes:
    """Read an image's file. UserError if it is too large, or can't be read."""
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


def media_file(item: Any, folder: Path, where: str) -> File:
    """Read an item of a column of media: bytes, path, or dict with either. UserError: nothing is fetched."""
    item = (item.get("bytes") or item.get("path")) if isinstance(item, dict) else item
    if isinstance(item, bytes | Path):
        return item
    if not isinstance(item, str) or re.match(r"\w+:", item):
        raise UserError(f"{where}: a file's path or its bytes is needed, not {str(item)[:60]!r}")
    if not os.path.isfile(folder / item):  # False also for what no path could be
        raise UserError(f"{where}: {str(folder / item)[:200]}: no such file")
    return folder / item


def check_places(places: int, items: Sequence, place: str, where: str) -> None:
    """Raise UserError unless the texts have as many places as there are items."""
    if places != len(items):
        found = f"{len(items)} {place[1:-1]}s for {places} places"
        raise UserError(f"{where}: {found}, {place} or a part of the type {place[1:-1]}")
