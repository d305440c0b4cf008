"""What images add to the core: a reader, the demo's pictures, a patch of every server."""

from __future__ import annotations

from demo.task import SHOWS, Shown
from engines.server import PATCHES
from inputs.media import READERS, Reader
from inputs.templates import IMAGE, VIDEO


def read(model_dir: str, *sampling: float) -> Reader:
    from extras.images.reader import ImageReader

    return ImageReader(model_dir, *sampling)


def drawn(a: int, b: int, key: str) -> Shown:
    from extras.images.drawing import picture

    return Shown(f"{IMAGE}=", {IMAGE: lambda: [picture(a, b, key)]})


def filmed(a: int, b: int, key: str) -> Shown:
    from extras.images.drawing import clip

    return Shown(f"{VIDEO}=", {VIDEO: lambda: [clip(a, b, key)]})


READERS.append(read)
PATCHES.append("extras.images.server")
SHOWS |= {"images": drawn, "video": filmed}
