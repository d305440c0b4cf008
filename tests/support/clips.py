"""Clips written by PyAV: encoders differ between builds, so tests compare pixels."""

import hashlib
import io
from fractions import Fraction
from functools import partial

import av
import numpy as np

from extras.images.clips import Clips

KINDS = {  # container, encoder and its options
    "h264": ("mp4", "libx264", {"bf": "2"}),
    "vp9": ("webm", "libvpx-vp9", {}),
    "av1": ("matroska", "libaom-av1", {"cpu-used": "8"}),
    "raw": ("matroska", "rawvideo", {}),
    "mpeg4": ("mov", "mpeg4", {"q:v": "2"}),
}


def frames_of(count: int, height: int = 64, width: int = 96) -> list[np.ndarray]:
    """Return pictures of four quarters, [height, width, 3]: the first grows brighter, the others don't."""
    pictures = []
    for number in range(count):
        picture = np.full((height, width, 3), (200, 40, 40), np.uint8)
        picture[: height // 2, : width // 2] = 255 * (number + 1) // count
        picture[: height // 2, width // 2 :] = (40, 200, 40)
        picture[height // 2 :, : width // 2] = (40, 40, 200)
        pictures.append(picture)
    return pictures


def as_frame(picture) -> av.VideoFrame:
    if isinstance(picture, av.VideoFrame):
        return picture
    return av.VideoFrame.from_ndarray(picture, format="rgb24")


def encoded_clip(
    pictures, kind="h264", rate=10, times=None, pixels="yuv420p", flags="", **settings
) -> bytes:
    """Encode a file with one frame per picture. times: in ms; flags: an MP4's; settings: the codec's."""
    container, encoder, options = KINDS[kind]
    file = io.BytesIO()
    muxing = {"movflags": flags} if flags else {}
    with av.open(file, "w", format=container, options=muxing) as output:
        stream = output.add_stream(encoder, rate=rate, options=options)
        first, *_ = frames = list(map(as_frame, pictures))
        stream.height, stream.width = first.height, first.width
        stream.pix_fmt = pixels
        stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for name, value in settings.items():
            setattr(stream.codec_context, name, value)
        for number, frame in enumerate(frames):
            frame.pts = times[number] if times else number * 1000 // rate
            frame.time_base = Fraction(1, 1000)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()


def turned_clip(clip: bytes, matrix: tuple[int, int, int, int]) -> bytes:
    """Return an MP4 whose track header has another display matrix: its first two rows and columns."""
    start = clip.index(b"tkhd") + 4
    place = start + 40 if clip[start] == 0 else start + 52
    a, b, c, d = ((65536 * number).to_bytes(4, "big", signed=True) for number in matrix)
    none = bytes(4)
    numbers = a + b + none + c + d + none
    return clip[:place] + numbers + clip[place + len(numbers) :]


def digest_of_pairs(file: bytes) -> str:
    """Return a digest of the pairs of frames that the project shows of a file."""
    shown = Clips(2.0, 16, lambda height, width, pairs, where: (96, 160))
    pairs = shown.pairs(b"", partial(bytes, file), "a clip")
    return hashlib.sha256(b"".join(pair.file for pair in pairs)).hexdigest()
