"""What passes between a trainer and its SGLang servers: flags and environment at the start, weights, and the events of a stream.

No server is started here: rollout.py does that.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

BUCKET_BYTES = 512 << 20  # weights travel in flat buckets of about this size


class EngineLost(ConnectionError):
    """A server doesn't answer: it died, it hangs, or it can't be reached. What it owed is asked of another."""


# ---- what goes over the wire -----------------------------------------------------------------------------------------


async def server_sent_events(response) -> AsyncIterator[dict]:
    """The JSON objects of a stream of `data: ...` events."""
    unread = b""
    async for chunk in response.content.iter_any():  # not by line: aiohttp refuses lines over 128 KB
        *events, unread = (unread + chunk).split(b"\n\n")
        for event in events:
            if event != b"data: [DONE]":
                yield json.loads(event.removeprefix(b"data: "))


async def retry_broken(stream: Callable[[], AsyncIterator], is_up: Callable[[], bool] = lambda: True) -> AsyncIterator:
    """Passes on what `stream()` yields; opens it again when the connection breaks, twice at most, while the server `is_up`.

    Raises EngineLost after that.
    """
    import aiohttp

    for delay_s in (1.0, 5.0, None):
        try:
            async for item in stream():
                yield item
            return
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            broken = error
        if delay_s is not None and is_up():
            await asyncio.sleep(delay_s)
        if delay_s is None or not is_up():  # a new server in its place may have other weights
            raise EngineLost(f"the connection broke: {broken!r}") from broken


def buckets(named_tensors: Iterable) -> Iterable[list]:
    """Cuts a stream of (name, tensor) into lists of one dtype and of about BUCKET_BYTES."""
    bucket, size = [], 0
    for name, tensor in named_tensors:
        if bucket and (tensor.dtype != bucket[0][1].dtype or size >= BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def serialize_bucket(bucket: list) -> str:
    """A bucket in SGLang's format "flattened_bucket": one flat tensor, as a handle, and where each tensor lies in it.

    Written by hand, because the trainer would spend 10 s on importing SGLang's own FlattenedTensorBucket.
    """
    from multiprocessing.reduction import ForkingPickler

    import torch
    import torch.multiprocessing  # teaches ForkingPickler to send tensors as handles

    # With the default, file descriptors, the receiver fails multiprocessing's handshake and the scheduler kills itself.
    torch.multiprocessing.set_sharing_strategy("file_system")
    metadata, offset = [], 0
    for name, tensor in bucket:
        span = dict(start_idx=offset, end_idx=offset + tensor.nbytes, numel=tensor.nbytes)
        metadata.append(SimpleNamespace(name=name, shape=tensor.shape, dtype=tensor.dtype, **span))
        offset += tensor.nbytes
    flat = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for _, tensor in bucket])
    payload = io.BytesIO()
    ForkingPickler(payload).dump(dict(flattened_tensor=flat, metadata=metadata))
    return base64.b64encode(payload.getvalue()).decode()


# ---- launching -------------------------------------------------------------------------------------------------------


def server_environment(key: str, private: str) -> dict[str, str]:
    """Ours without torchrun's variables, from which SGLang would join our process group.

    key: what requests must show; in the environment, because anybody may read a command line. private: a folder of the server's own.
    There its processes find each other in a file (SGLang's default is a port, which torch opens on every interface), and there are
    its sockets, which a killed server doesn't remove.
    """
    import torch

    torchrun = ("MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(torchrun)}
    environment |= {"NANOYATT_PARENT": str(os.getpid()), "PYTHONWARNINGS": "ignore"}
    environment |= {"NANOYATT_API_KEY": key, "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{private}/store", "TMPDIR": private}
    if not torch.cuda.is_available():
        # MALLOC: glibc would hand every large buffer back to the kernel, and fault its pages in again at the next step.
        environment |= {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": f"{1 << 30}", "MALLOC_TRIM_THRESHOLD_": f"{1 << 30}"}
    return environment


def server_flags(role: str, rank: int, port: int, model_dir: str, config) -> list[str]:
    """The server's command line. An engine of several ranks takes the devices from this rank's on: they are on one machine."""
    import torch

    flags = {
        "model-path": Path(model_dir).resolve(), "weight-version": 0, "host": config.host, "port": port,
        "load-format": "safetensors",  # by default it would take a .bin, too, which is a pickle
        "served-model-name": os.getpid(),  # by which `ready` knows that the server is ours
        "dtype": config.dtype, "random-seed": config.seed + rank,
        "context-length": config.max_model_len, "max-running-requests": config.max_running_requests,
        "skip-tokenizer-init": None,  # tokens in, tokens out
        "stream-interval": 1_000_000,  # an answer's first token and its end: nothing in between
        # answers come to the judge one by one, and each prefill holds up all that is being decoded: take them in together
        "prefill-decode-interval": 8, "prefill-decode-interval-min-bs": 16,
        "skip-server-warmup": None, "sleep-on-idle": None, "log-level": "error",
    }
    if config.trust_remote_code:
        flags["trust-remote-code"] = None
    if ranks_of_an_engine(role, config) > 1:  # written for CUDA, not yet run
        if not torch.cuda.is_available():
            raise ValueError(f"--{role}-tp {ranks_of_an_engine(role, config)} needs CUDA: without it an engine spans one rank")
        flags["tp-size"] = ranks_of_an_engine(role, config)
    if torch.cuda.is_available():
        flags |= {"base-gpu-id": torch.cuda.current_device(), "mem-fraction-static": config.mem_fraction, "enable-memory-saver": None}
        if role == "genrm" or config.mode != "partial":
            # nobody pushes a judge its weights after it slept, nor a rollout engine between the waves of full colocation
            flags["enable-weights-cpu-backup"] = None
    else:
        flags |= {"device": "cpu", "max-total-tokens": config.max_total_tokens, "disable-overlap-schedule": None}
        flags["attention-backend"] = "torch_native"  # cpu/invariance.py's; deterministic mode would look for a GPU's
    if config.deterministic:
        flags["enable-deterministic-inference"] = None
    return [text for flag, value in flags.items() for text in (f"--{flag}", *([] if value is None else [str(value)]))]


def ranks_of_an_engine(role: str, config) -> int:
    """Tensor-parallel ranks that one engine spans."""
    return {"rollout": config.rollout_tp, "genrm": config.genrm_tp}[role]


def checkpoint_shapes(model_dir: str) -> dict[str, list[int]]:
    """Name and shape of every tensor in a Hugging Face directory, from the headers of its safetensors files."""
    shapes = {}
    for path in Path(model_dir).glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        shapes |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    if not shapes:
        raise ValueError(f"{model_dir} holds no *.safetensors file: a model is a Hugging Face directory")
    return shapes
