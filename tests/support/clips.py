"""Clips that PyAV writes: encoders differ between builds, so tests hold them by their pixels."""

import io
from fractions import Fraction

import av
import numpy as np

KINDS = {  # container, encoder and its options
    "h264": ("mp4", "libx264", {"bf": "2"}),
    "vp9": ("webm", "libvpx-vp9", {}),
    "av1": ("matroska", "libaom-av1", {"cpu-used": "8"}),
    "mpeg4": ("mov", "mpeg4", {"q:v": "2"}),
}


def frames_of(count: int, height: int = 64, width: int = 96) -> list[np.ndarray]:
    """Pictures of four quarters, [height, width, 3]: the first grows brighter, the others keep colors."""
    pictures = []
    for number in range(count):
        picture = np.full((height, width, 3), (200, 40, 40), np.uint8)
        picture[: height // 2, : width // 2] = 255 * (number + 1) // count
        picture[: height // 2, width // 2 :] = (40, 200, 40)
        picture[height // 2 :, : width // 2] = (40, 40, 200)
        pictures.append(picture)
    return pictures


def encoded_clip(pictures, kind="h264", rate=10, times=None, pixels="yuv420p", **settings) -> bytes:
    """A file with a frame for each picture. times: in 1/1000 s; settings: of the codec's context."""
    container, encoder, options = KINDS[kind]
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(encoder, rate=rate, options=options)
        stream.height, stream.width, _ = pictures[0].shape
        stream.pix_fmt = pixels
        stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for name, value in settings.items():
            setattr(stream.codec_context, name, value)
        for number, picture in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts = times[number] if times else number * 1000 // rate
            frame.time_base = Fraction(1, 1000)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()


def turned_clip(clip: bytes, matrix: tuple[int, int, int, int]) -> bytes:
    """An MP4 whose track header has another display matrix: its first two rows and columns."""
    start = clip.index(b"tkhd") + 4
    place = start + 40 if clip[start] == 0 else start + 52
    a, b, c, d = ((65536 * number).to_bytes(4, "big", signed=True) for number in matrix)
    none = bytes(4)
    numbers = a + b + none + c + d + none
    return clip[:place] + numbers + clip[place + len(numbers) :]
