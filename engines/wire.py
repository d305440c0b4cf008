"""HTTP to an SGLang server: bodies in pieces, event streams, buckets of weights."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import AsyncIterator, Iterable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import orjson

from runtime.devices import fixed_segments
from runtime.shutdown import starting_deaf
from sample import Image

if TYPE_CHECKING:
    import aiohttp
    from torch import Tensor


BUCKET_BYTES = 512 << 20  # weights travel in flat buckets of about this size


async def in_pieces(body: dict) -> AsyncIterator[bytes]:
    """Yield a body as JSON, each Image in it as base64, without holding all images at once."""
    images: dict[str, Image] = {}

    def name_of(image: Image) -> str:
        name = image.digest.hex()
        images[name] = image
        return name

    # names stand in for the images; each image is read only when its name is reached
    text = json.dumps(body, default=name_of)
    parts = re.split(f"({'|'.join(images)})", text) if images else [text]
    for part in parts:
        if part in images:
            # without this prefix SGLang takes a JPEG for a path: its base64 begins with a slash
            yield b"data:;base64,"
            yield base64.b64encode(images[part].read())
        else:
            yield part.encode()


async def server_sent_events(response: aiohttp.ClientResponse) -> AsyncIterator[dict]:
    """Yield the JSON objects of a stream of `data: ...` events."""
    unread = b""
    # not by line: aiohttp refuses lines over 128 KB
    async for chunk in response.content.iter_any():
        *events, unread = (unread + chunk).split(b"\n\n")
        for event in events:
            if event != b"data: [DONE]":
                yield orjson.loads(event.removeprefix(b"data: "))


def buckets(named_weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Cut a stream of (name, tensor) into lists of one dtype and of about BUCKET_BYTES."""
    bucket = []
    for name, tensor in named_weights:
        size = sum(each.nbytes for _, each in bucket)
        if bucket and (tensor.dtype != bucket[0][1].dtype or size >= BUCKET_BYTES):
            yield bucket
            bucket = []
        bucket.append((name, tensor))
    if bucket:
        yield bucket


def serialize_bucket(bucket: list[tuple[str, Tensor]], readers: int) -> list[str]:
    """Return SGLang's "flattened_bucket" for each reader: a handle on flat bytes, each weight's place."""
    metadata = []
    offset = 0
    for name, tensor in bucket:
        span = dict(start_idx=offset, end_idx=offset + tensor.nbytes, numel=tensor.nbytes)
        metadata.append(SimpleNamespace(name=name, shape=tensor.shape, dtype=tensor.dtype, **span))
        offset += tensor.nbytes
    flat = flat_copy(bucket)
    # one each: CUDA frees the memory once all have been read
    return [handle_of(dict(flattened_tensor=flat, metadata=metadata)) for _ in range(readers)]


def facts_of(bucket: list[tuple[str, Tensor]]) -> list[tuple[str, list[int]]]:
    """Return the names and shapes in a bucket."""
    return [(name, list(tensor.shape)) for name, tensor in bucket]


def flat_copy(bucket: list[tuple[str, Tensor]]) -> Tensor:
    """Copy a bucket's tensors, one after another, as bytes."""
    import torch

    with fixed_segments(bucket[0][1]):
        return torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for _, tensor in bucket])


def handle_of(value: Any) -> str:
    """Return what another process reads as `value`: its tensors are handles on this process's memory."""
    from multiprocessing.reduction import ForkingPickler

    import torch.multiprocessing  # teaches ForkingPickler to send tensors as handles

    # the default passes file descriptors: the receiver fails multiprocessing's handshake and dies
    torch.multiprocessing.set_sharing_strategy("file_system")
    with starting_deaf():  # the first call starts torch's process that owns the shared memory
        return base64.b64encode(ForkingPickler.dumps(value)).decode()
