"""Clips: the frames of a video that a model is shown, two and two; each pair is a small file of its own.

A pair goes the way of an image. Its two frames fill one patch of time, as those of the models' own videos do.
The same file gives the same bytes in every process and thread.
"""

from __future__ import annotations

import io
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from hashlib import file_digest
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from runtime.errors import UserError

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer
    from av.video.stream import VideoStream
    from PIL.Image import Image as Picture

# ffmpeg's readers of MP4, MOV, WebM and MKV; that of a playlist would open other files, and addresses
FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm"
LEAST_FRAMES = 4  # shown, if there are so many; as in the models' own processors
MOST_SECONDS = 1800
MOST_PIXELS = 30_000_000_000  # of all frames: eight minutes of 1080p, which take two to decode
MOST_OF_A_FRAME = 89_478_485  # pixels, as Pillow thinks safe
CUT_SECONDS = 0.5  # that may be missing of what the header says
HDR = (16, 18)  # transfer functions PQ and HLG, for screens that are brighter than white
KEPT_BYTES = 512 << 20  # of pairs: engines and trainer ask for those of a step several times
# of swscale: bicubic, ACCURATE_RND, BITEXACT. Else each kind of processor rounds in its own way
EXACT = 0x4 | 0x40000 | 0x80000
TURNS = {  # a display matrix's first two rows and columns -> what Pillow does
    (1, 0, 0, 1): "",
    (0, 1, -1, 0): "ROTATE_270",
    (-1, 0, 0, -1): "ROTATE_180",
    (0, -1, 1, 0): "ROTATE_90",
    (-1, 0, 0, 1): "FLIP_LEFT_RIGHT",
    (1, 0, 0, -1): "FLIP_TOP_BOTTOM",
    (0, 1, 1, 0): "TRANSPOSE",
    (0, -1, -1, 0): "TRANSVERSE",
}


File = bytes | Path


class Pair(NamedTuple):
    seconds: float  # between its frames, from the clip's start
    sides: tuple[int, int]  # pixels of its frames, as they lie in the file: height, width
    file: bytes  # a TIFF of two


@dataclass
class Kept:
    """The pairs of a clip, once they are decoded. lock: of the thread that decodes them."""

    lock: Lock = field(default_factory=Lock)
    pairs: tuple[Pair, ...] = ()


@dataclass
class Clips:
    """The clips that a process reads: each is decoded once while its pairs are kept. For threads."""

    fps: float  # frames shown of a second
    most: int  # frames shown of a clip
    # of height, width, number of pairs, `where`: sides that fit. UserError
    fit: Callable[[int, int, int, str], tuple[int, int]]
    _kept: dict[bytes, Kept] = field(default_factory=dict)  # by SHA-256, the latest last
    _lock: Lock = field(default_factory=Lock)

    def pairs(self, digest: bytes, file: Callable[[], File], where: str) -> tuple[Pair, ...]:
        """Return a clip's pairs. UserError, which says `where`, for what isn't whole or allowed."""
        with self._lock:
            kept = self._kept.pop(digest, None) or Kept()
            size = sum(len(pair.file) for each in self._kept.values() for pair in each.pairs)
            while size > KEPT_BYTES:
                oldest = self._kept.pop(next(iter(self._kept)))
                size -= sum(len(pair.file) for pair in oldest.pairs)
            self._kept[digest] = kept
        with kept.lock:
            if not kept.pairs:
                kept.pairs = self._decoded(file(), where)
        return kept.pairs

    def bound(self, file: File, where: str) -> tuple[Pair, ...]:
        """Return as many pairs as may be shown, of the right sides, by the header. UserError as above."""
        with opened(file, where) as (container, stream):
            seconds = container.duration / 1e6 if container.duration else MOST_SECONDS
            frames = min(max(int(seconds * self.fps) + 1, LEAST_FRAMES), self.most)
            count = (min(frames, frames_of(container, stream) or frames) + 1) // 2
            sides = self.fit(*sides_of(stream), count, where)
        return (Pair(float(MOST_SECONDS), sides, b""),) * count

    def _decoded(self, file: File, where: str) -> tuple[Pair, ...]:
        with opened(file, where) as (container, stream):
            unit = stream.time_base
            times = frame_times(container, stream, where)
            shown = chosen(times, unit, self.fps, self.most)
            shown += shown[-1:] * (len(shown) % 2)  # as in the models' own processors
            sides = self.fit(*sides_of(stream), len(shown) // 2, where)
        wanted = {frame for frame, _ in shown}
        found = {}
        with opened(file, where) as (container, stream):
            for frame in container.decode(stream):
                if frame.pts in wanted:
                    found[frame.pts] = picture(frame, sides, where)
                if len(found) == len(wanted):
                    break
            check(container, stream, where)  # what no header says, the first frame does
        if missing := len(wanted) - len(found):
            raise UserError(f"{where}: damaged: {missing} of {len(wanted)} frames can't be read")
        pairs = []
        for (first, start), (second, end) in zip(shown[::2], shown[1::2], strict=True):
            seconds = ((start + end) / 2 - times[0]) * unit
            pair = io.BytesIO()
            found[first].save(pair, "TIFF", save_all=True, append_images=[found[second]])
            width, height = found[first].size
            pairs.append(Pair(float(seconds), (height, width), pair.getvalue()))
        return tuple(pairs)


def digest_of(file: File) -> bytes:
    with file.open("rb") if isinstance(file, Path) else io.BytesIO(file) as source:
        return file_digest(source, "sha256").digest()


@contextmanager
def opened(file: File, where: str) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a clip: its container and video stream. UserError for what `check` or ffmpeg refuses."""
    import av

    source = file.open("rb") if isinstance(file, Path) else io.BytesIO(file)
    only = {"format_whitelist": FORMATS, "protocol_whitelist": "none"}
    try:
        with source, av.open(source, options=only, metadata_errors="replace") as container:
            moving = [s for s in container.streams.video if s.codec_context and not is_cover(s)]
            if not moving:
                raise UserError(f"{where}: it has no video stream that can be decoded")
            check(container, moving[0], where)
            context = moving[0].codec_context
            context.thread_count = 1  # damaged ones, too, give the same bytes everywhere
            context.options = {"err_detect": "explode", "max_pixels": str(MOST_OF_A_FRAME)}
            yield container, moving[0]
    except (av.FFmpegError, OSError) as error:
        raise UserError(f"{where}: not a video that can be read: {error.strerror}") from None


def is_cover(stream: VideoStream) -> bool:
    """True for a picture of a film's box."""
    return bool(stream.disposition & stream.disposition.attached_pic)


def sides_of(stream: VideoStream) -> tuple[int, int]:
    """Height and width before any turn, of square pixels."""
    return stream.height, round(stream.width * (stream.sample_aspect_ratio or 1))


def frames_of(container: InputContainer, stream: VideoStream) -> int:
    """How many the header says; 0 if it doesn't."""
    seconds = (container.duration or 0) / 1e6
    return stream.frames or round(seconds * (stream.average_rate or 0))


def check(container: InputContainer, stream: VideoStream, where: str, frames: int = 0) -> None:
    """Raise UserError for a clip that would take too long or too much memory, or is HDR.

    frames: as far as they were counted; else as the header says.
    """
    pixels = stream.width * stream.height
    seconds = (container.duration or 0) / 1e6
    frames = frames or frames_of(container, stream)
    size = f"{stream.width} x {stream.height} pixels"
    problem = ""
    if not 0 < pixels <= MOST_OF_A_FRAME:
        problem = f"frames of {size}, of at most {MOST_OF_A_FRAME}"
    elif seconds > MOST_SECONDS:
        problem = f"{seconds:.0f} seconds, of at most {MOST_SECONDS}; cut it"
    elif frames * pixels > MOST_PIXELS:
        problem = (
            f"{frames} frames of {size}, of at most {MOST_PIXELS:.0e}; cut it or scale it down"
        )
    elif stream.codec_context.color_trc in HDR:
        problem = "HDR (PQ or HLG), which has no colors for a model; convert it"
    if problem:
        raise UserError(f"{where}: {problem}")


def frame_times(container: InputContainer, stream: VideoStream, where: str) -> list[int]:
    """The times of all frames, in the stream's time base, without decoding. UserError if some lack."""
    times = set()
    end = 0
    for packet in container.demux():
        if not packet.size or packet.pts is None:
            continue
        end = max(end, (packet.pts + (packet.duration or 0)) * packet.time_base)
        if packet.stream_index == stream.index and not packet.is_discard:
            times.add(packet.pts)
            check(container, stream, where, len(times))
    if not times:
        raise UserError(f"{where}: it has no frame")
    seconds = (container.duration or 0) / 1e6
    if end + CUT_SECONDS < seconds:
        raise UserError(f"{where}: cut off at {float(end):.1f} of {seconds:.1f} seconds")
    return sorted(times)


def chosen(times: list[int], unit: Fraction, fps: float, most: int) -> list[tuple[int, Fraction]]:
    """Choose what is seen at times that are even, from the first frame to the last: (frame, its time).

    unit: seconds of one of the times. At a constant rate these are the frames, and their times, of the
    models' own processors. A frame that lasts longer than others is shown again, at a later time.
    """
    span = times[-1] - times[0]
    each = Fraction(span, max(1, len(times) - 1))  # on average; the last one lasts as long
    count = min(max(int(len(times) * each * unit * Fraction(fps)), LEAST_FRAMES), most, len(times))
    found = []
    for number in range(count):
        time = times[0] + Fraction(span * number, max(1, count - 1))
        place = bisect_right(times, time) - 1
        coming = times[min(place + 1, len(times) - 1)]
        is_nearer = abs(coming - time) <= min(time - times[place], each / 2)
        frame = coming if is_nearer else times[place]
        found.append((frame, frame if abs(frame - time) <= each / 2 else time))
    return found


def picture(frame: VideoFrame, sides: tuple[int, int], where: str) -> Picture:
    """A frame in RGB, of this height and width, then turned as it is to be shown. UserError."""
    from PIL.Image import Resampling, Transpose

    turn = ""
    if matrix := frame.side_data.get("DISPLAYMATRIX"):
        a, b, _, c, d, *_ = (number / 65536 for number in struct.unpack("=9i", bytes(matrix)))
        if (a, b, c, d) not in TURNS:
            raise UserError(f"{where}: it is to be turned by no quarter, or bent")
        turn = TURNS[a, b, c, d]
    colors = {"src_colorspace": frame.colorspace, "src_color_range": frame.color_range}
    # another space than its own: PyAV would take all for BT.601
    image = frame.to_image(interpolation=EXACT, dst_colorspace=0, **colors)
    image = image.resize(sides[::-1], Resampling.BICUBIC)  # as the models' own processors
    return image.transpose(Transpose[turn]) if turn else image
