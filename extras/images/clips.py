"""Clips: the frames of a video that a model sees, stored as pairs in small files.

A pair is handled like an image. Its two frames fill one temporal patch, as in the models' own processors.
Decoding is deterministic: a file gives the same bytes in every process and thread.
"""

import io
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, NamedTuple

from runtime.errors import UserError

# ffmpeg's demuxers for MP4, MOV, WebM and MKV; one for playlists would open other files, and URLs
FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm"
LEAST_FRAMES = 4  # shown if the clip has that many; as in the models' own processors
MOST_SECONDS = 1800
MOST_PIXELS = 30_000_000_000  # in a clip: 8 minutes of 1080p, which take 2 minutes to decode
MOST_OF_A_FRAME = 89_478_485  # pixels, as Pillow thinks safe
CUT_SECONDS = 0.5  # how much shorter than its header a clip may be
HDR = (16, 18)  # transfer functions PQ and HLG
KEPT_BYTES = 512 << 20  # cached pairs: engines and trainer request a step's several times
# display matrix -> degrees counterclockwise
TURNS = {(1, 0, 0, 1): 0, (0, -1, 1, 0): 90, (-1, 0, 0, -1): 180, (0, 1, -1, 0): 270}
# swscale's bicubic, ACCURATE_RND and BITEXACT; without them rounding depends on the CPU
EXACT = 0x4 | 0x40000 | 0x80000
File = bytes | Path


class Pair(NamedTuple):
    seconds: float  # midway between its frames, from the clip's start
    sides: tuple[int, int]  # height and width of its frames
    file: bytes  # a TIFF with two frames


@dataclass
class Clips:
    """A process's clips, each decoded only once while its pairs are cached. Thread-safe."""

    fps: float  # frames shown per second
    most: int  # frames shown per clip
    # (height, width, number of pairs, `where`) -> sides that fit; raises UserError
    fit: Callable[[int, int, int, str], tuple[int, int]]
    # SHA-256 -> (the lock of the thread that decodes, the pairs); least recently used first
    _kept: dict[bytes, tuple[Lock, list[Pair]]] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def pairs(self, digest: bytes, file: Callable[[], File], where: str) -> list[Pair]:
        """Return a clip's pairs. Raises UserError, naming `where`, if it is damaged or not allowed."""
        with self._lock:
            lock, pairs = self._kept[digest] = self._kept.pop(digest, (Lock(), []))
            size = sum(len(pair.file) for _, kept in self._kept.values() for pair in kept)
            while size > KEPT_BYTES and len(self._kept) > 1:
                _, oldest = self._kept.pop(next(iter(self._kept)))
                size -= sum(len(pair.file) for pair in oldest)
        with lock:
            if not pairs:
                pairs += self._decoded(file(), where)
        return pairs

    def bound(self, file: File, where: str) -> list[Pair]:
        """Return the most pairs that the header allows, of the right sides but empty.

        Raises UserError if the header can't be read, or allows too long or too large a clip.
        """
        with opened(file, where) as (container, stream):
            seconds = container.duration / 1e6 if container.duration else MOST_SECONDS
            frames = min(max(int(seconds * self.fps) + 1, LEAST_FRAMES), self.most)
            pairs = (min(frames, frames_in(container, stream) or frames) + 1) // 2
            sides = self.fit(*sides_of(stream), pairs, where)
        return [Pair(float(MOST_SECONDS), sides, b"")] * pairs

    def _decoded(self, file: File, where: str) -> list[Pair]:
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
            check(container, stream, where)  # some facts are known only after the first frame
        if missing := len(wanted) - len(found):
            raise UserError(f"{where}: damaged: {missing} of {len(wanted)} frames can't be read")
        pairs = []
        for (first, start), (second, end) in zip(shown[::2], shown[1::2], strict=True):
            seconds = float(((start + end) / 2 - times[0]) * unit)
            pair = io.BytesIO()
            found[first].save(pair, "TIFF", save_all=True, append_images=[found[second]])
            pairs.append(Pair(seconds, found[first].size[::-1], pair.getvalue()))
        return pairs


def open_file(file: File) -> BinaryIO:
    return file.open("rb") if isinstance(file, Path) else io.BytesIO(file)


@contextmanager
def opened(file: File, where: str) -> Iterator[tuple[Any, Any]]:
    """Open a clip: PyAV's container and video stream. Raises UserError if `check` or ffmpeg refuses it."""
    import av

    only = {"format_whitelist": FORMATS, "protocol_whitelist": "none"}
    how = {"options": only, "metadata_errors": "replace"}
    try:
        with open_file(file) as source, av.open(source, **how) as container:
            decodable = [stream for stream in container.streams.video if stream.codec_context]
            moving = [s for s in decodable if not s.disposition & s.disposition.attached_pic]
            if not moving:
                raise UserError(f"{where}: it has no video stream that can be decoded")
            check(container, moving[0], where)
            context = moving[0].codec_context
            context.thread_count = 1  # so that even damaged clips give the same bytes everywhere
            context.options = {"err_detect": "explode", "max_pixels": str(MOST_OF_A_FRAME)}
            yield container, moving[0]
    except (av.FFmpegError, OSError) as error:
        raise UserError(
            f"{where}: no MP4, MOV, WebM or MKV that can be read: {error.strerror}"
        ) from None


def sides_of(stream: Any) -> tuple[int, int]:
    """Return height and width in square pixels, before rotation."""
    return stream.height, round(stream.width * (stream.sample_aspect_ratio or 1))


def frames_in(container: Any, stream: Any) -> int:
    """Return the number of frames according to the header, 0 if unknown."""
    seconds = (container.duration or 0) / 1e6
    return stream.frames or round(seconds * (stream.average_rate or 0))


def check(container: Any, stream: Any, where: str, counted: int = 0) -> None:
    """Raise UserError if a clip would take too long or too much memory, or is HDR."""
    pixels = stream.width * stream.height
    seconds = (container.duration or 0) / 1e6
    frames = counted or frames_in(container, stream)
    size = f"{stream.width} x {stream.height}"
    if not 0 < pixels <= MOST_OF_A_FRAME:
        raise UserError(f"{where}: frames of {size} pixels, of at most {MOST_OF_A_FRAME}")
    if seconds > MOST_SECONDS:
        raise UserError(f"{where}: {seconds:.0f} seconds, of at most {MOST_SECONDS}; cut it")
    if frames * pixels > MOST_PIXELS:
        raise UserError(
            f"{where}: {frames} frames of {size} pixels, of at most {MOST_PIXELS:.0e} pixels"
        )
    if not sides_of(stream)[1]:
        raise UserError(f"{where}: pixels of {stream.sample_aspect_ratio} leave it no width")
    if stream.codec_context.color_trc in HDR:
        raise UserError(f"{where}: HDR (PQ or HLG), which can't be shown; convert it")


def frame_times(container: Any, stream: Any, where: str) -> list[int]:
    """Return all frames' times in the stream's time base. Raises UserError if the clip is cut off."""
    times = set()
    end = 0
    for packet in container.demux():
        if packet.size and packet.pts is not None:
            end = max(end, (packet.pts + (packet.duration or 0)) * packet.time_base)
            if packet.stream_index == stream.index and not packet.is_discard:
                times.add(packet.pts)
                check(container, stream, where, len(times))
    seconds = (container.duration or 0) / 1e6
    if not times or end + CUT_SECONDS < seconds:
        raise UserError(f"{where}: cut off at {float(end):.1f} of {seconds:.1f} seconds")
    return sorted(times)


def chosen(times: list[int], unit: Fraction, fps: float, most: int) -> list[tuple[int, Fraction]]:
    """Sample frames evenly, long ones repeatedly: (frame, its time). unit: seconds per unit of `times`."""
    span = times[-1] - times[0]
    each = Fraction(span, max(1, len(times) - 1))  # average duration, assumed for the last one
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


def picture(frame: Any, sides: tuple[int, int], where: str) -> Any:
    """Convert a frame to RGB, resize it, then rotate it for display. Raises UserError if it can't."""
    from PIL.Image import Resampling

    colors = {"src_colorspace": frame.colorspace, "src_color_range": frame.color_range}
    # without an explicit space PyAV would treat all as BT.601
    image = frame.to_image(interpolation=EXACT, dst_colorspace=0, **colors)
    image = image.resize(sides[::-1], Resampling.BICUBIC)  # as in the models' own processors
    if matrix := frame.side_data.get("DISPLAYMATRIX"):
        # x and y go to (a x + c y, b x + d y)
        a, b, _, c, d, *_ = (number / 65536 for number in struct.unpack("=9i", bytes(matrix)))
        if (a, b, c, d) not in TURNS:
            raise UserError(f"{where}: it is mirrored, skewed or tilted; convert it")
        image = image.rotate(TURNS[a, b, c, d], expand=True)
    return image
