"""The process of an SGLang server: command line, life, end, wire. sglang isn't imported: that takes 10 s."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from config import Config, UserError
from images.reader import sees
from images.tokens import Image
from runtime.devices import cuda_libraries
from runtime.hf_directory import read_model_config

if TYPE_CHECKING:
    import aiohttp
    from torch import Tensor

STREAM_INTERVAL = 32  # tokens between two events of an answer, which are all that its engine tells
KV_TOKENS = 32768  # in an engine's KV cache without CUDA, if its context isn't longer
BUCKET_BYTES = 512 << 20  # weights travel in flat buckets of about this size
PIECE_BYTES = 3 << 16  # of a body on its way; base64 of multiples of three can be joined
MOST_COLUMNS = 300  # of a line of its log that is quoted
LOG_START = "---- a server starts"  # a line of its log begins so


def server_flags(role: str, rank: int, port: int, model_dir: str, config: Config) -> list[str]:
    """The server's command line. An engine of several ranks takes the devices from this rank's on."""
    context = context_length(model_dir, config)
    flags = {
        "model-path": Path(model_dir).resolve(),
        "weight-version": 0,
        "host": config.host,
        "port": port,
        "load-format": "safetensors",  # by default it would take a .bin, too, which is a pickle
        "served-model-name": os.getpid(),  # by which `ready` knows that the server is ours
        "dtype": config.dtype,
        "random-seed": config.seed + rank,
        "context-length": context,
        "max-running-requests": config.max_running_requests,
        "skip-tokenizer-init": None,  # tokens in, tokens out
        "stream-interval": STREAM_INTERVAL,
        "incremental-streaming-output": None,
        # answers come to the judge one by one, and each prefill holds up all decoding: take them in together
        "prefill-decode-interval": 8,
        "prefill-decode-interval-min-bs": 16,
        "skip-server-warmup": None,
        "sleep-on-idle": None,
        "log-level": "error",
    }
    if config.deterministic:
        flags["enable-deterministic-inference"] = None
    flags |= (
        cuda_flags(role, config) if config.device == "cuda" else cpu_flags(role, context, config)
    )
    if sees(model_dir):
        # pixels by Pillow, as the trainer's. Without that cache SGLang makes a text of Qwen2.5-VL's tokens
        # and tokens of that, and fails where a text spells out the image token; with it, it takes them as is
        flags |= {"image-processor-backend": "pil", "mm-preprocess-cache-size-mb": 64}
    texts = [text for flag, value in flags.items() for text in (f"--{flag}", str(value))]
    return [text for text in texts if text != "None"]


def cuda_flags(role: str, config: Config) -> dict[str, Any]:
    """Those of an engine on GPUs, from this rank's on."""
    flags = {
        "base-gpu-id": os.environ["LOCAL_RANK"],
        "mem-fraction-static": config.mem_fraction,
        "enable-memory-saver": None,
        # prefill graphs give wrong values (sgl-project/sglang#37606)
        "disable-prefill-cuda-graph": None,
        "watchdog-timeout": config.timeout_s,  # of a pass, which may compile kernels
        # which attention, how large a KV cache, how long CUDA graphs took; cpu/sglang.py drops the rest
        "log-level": "info",
        "log-level-http": "error",
    }
    if (tp := vars(config)[f"{role}_tp"]) > 1:
        flags["tp-size"] = tp
    if role == "genrm" or config.mode != "partial" or config.command == "eval":
        # nobody pushes these their weights after they slept, nor a rollout engine between waves in turns
        flags["enable-weights-cpu-backup"] = None
    return flags


def cpu_flags(role: str, context: int, config: Config) -> dict[str, Any]:
    """Those of an engine without CUDA. UserError if it is to span several ranks."""
    if (tp := vars(config)[f"{role}_tp"]) > 1:
        raise UserError(f"--{role}-tp {tp} needs CUDA: without it an engine spans one rank")
    return {
        "device": "cpu",
        # cpu/invariance.py's attention; deterministic mode would look for a GPU's
        "attention-backend": "torch_native",
        "disable-overlap-schedule": None,
        "max-total-tokens": max(KV_TOKENS, context),
    }


def image_environment(role: str, model_dir: str | Path) -> dict[str, str]:
    """SGLang's cache of image features outlives a push, which may bring another tower. A judge's is right."""
    return {"SGLANG_VLM_CACHE_SIZE_MB": "0"} if role == "rollout" and sees(model_dir) else {}


def server_environment(key: str, private: str, device: str) -> dict[str, str]:
    """Ours without torchrun's variables, from which SGLang would join our process group.

    key: what requests must show; anybody may read a command line. private: a folder of the server's own, for
    its sockets and the file by which its processes meet (by default, on a port open on every interface).
    """
    torchrun = ("MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(torchrun)
    }
    environment |= {"NANOYATT_PARENT": str(os.getpid()), "NANOYATT_API_KEY": key}
    environment |= {"PYTHONWARNINGS": "ignore", "TMPDIR": private}
    environment["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{private}/store"
    if device == "cuda":
        # a sleeping engine's weights keep their pinned memory: to pin it anew takes a second for 1 or 2 GB
        environment["TMS_RETAIN_CPU_BACKUP"] = "1"
        # actors and other engines share the devices: that these have unequal memory free is no fault
        environment["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"
        # it compiles kernels with `ninja`, which pip puts beside a Python whose folder need not be in PATH
        environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        # the memory saver is loaded before Python, and needs libcudart, which may lie in pip's folders alone
        folders = [*cuda_libraries(), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        environment["LD_LIBRARY_PATH"] = ":".join(folders)
    else:
        # glibc would hand every large buffer back to the kernel, and fault its pages in at the next step
        environment |= dict.fromkeys(
            ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(1 << 30)
        )
        # MKL's products have other last bits for few rows on some processors, if not told to be strict
        environment |= {"OMP_NUM_THREADS": "1", "MKL_CBWR": "AUTO,STRICT"}
    return environment


def context_length(model_dir: str | Path, config: Config) -> int:
    """Tokens of prompt and answer together: --max-model-len, or what the model's directory says."""
    if config.max_model_len:
        return config.max_model_len
    found = read_model_config(model_dir)
    found = found.get("text_config", found)  # of a model that sees
    if "max_position_embeddings" not in found:
        raise UserError(
            f"{model_dir}/config.json names no max_position_embeddings: say --max-model-len"
        )
    return found["max_position_embeddings"]


def check_port(host: str, port: int, name: str) -> None:
    """UserError if somebody listens on the port that the engine `name` is to have."""
    with socket.socket() as probe:
        if probe.connect_ex((host, port)) == 0:
            raise UserError(f"port {port}, wanted by the {name}, is in use: choose another --port")


class ServerProcess:
    """A server on this machine: a group of processes, a log, a private folder."""

    def __init__(
        self, command: list[str], key: str, log: Path, device: str, environment: dict[str, str]
    ):
        self._command, self._key, self._log = command, key, log
        self._device, self._environment = device, environment
        self.folder = tempfile.TemporaryDirectory(prefix="nanoyatt-", ignore_cleanup_errors=True)
        self._process: subprocess.Popen | None = None
        log.parent.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        """What earlier servers said stays in the log, also over a resume: it may say why they ended."""
        assert self._process is None, f"{self._log.stem} still runs"
        Path(self.folder.name, "store").unlink(missing_ok=True)  # with what a killed server wrote
        environment = (
            server_environment(self._key, self.folder.name, self._device) | self._environment
        )
        how = {"cwd": Path(__file__).parents[1], "env": environment, "start_new_session": True}
        with open(self._log, "ab", buffering=0, opener=for_us_alone) as log:
            log.write(f"{LOG_START}, {time.strftime('%F %T')}\n".encode())
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, **how)

    def exit_status(self) -> str:
        """How it ended; empty while it runs."""
        if self._process is None:
            return "killed"
        status = self._process.poll()
        return (
            "" if status is None else f"signal {-status}" if status < 0 else f"exit status {status}"
        )

    async def kill(self) -> None:
        """End the group, and return when it is gone."""
        if self._process is None:
            return
        process, self._process = self._process, None
        # it holds nothing worth saving, and its children die with it; SIGTERM would take 5 s
        process.kill()
        process.wait()
        try:
            # multiprocessing's tracker, the last of them, removes the semaphores
            await asyncio.sleep(0.5)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def log_tail(self) -> str:
        newest = self._log.read_text(errors="replace").rpartition(LOG_START)[2]
        lines = [line[:MOST_COLUMNS] for line in newest.splitlines()[1:][-15:]]
        return "\n".join((f"the end of {self._log}:", *lines))


def for_us_alone(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


async def in_pieces(body: dict) -> AsyncIterator[bytes]:
    """A request's body in JSON, an Image in it as base64; whole, it would be copied into the connection."""
    images = {}

    def name(image: Image) -> str:
        images[image.digest.hex()] = image
        return image.digest.hex()

    text = json.dumps(body, default=name)
    for part in re.split(f"({'|'.join(images)})", text) if images else [text]:
        data, encode = part, str.encode
        if part in images:
            # without it, SGLang takes a JPEG's for a path: it begins with a slash
            yield b"data:;base64,"
            data, encode = images[part].read(), base64.b64encode
        for start in range(0, len(data), PIECE_BYTES):
            yield encode(data[start : start + PIECE_BYTES])


async def server_sent_events(response: aiohttp.ClientResponse) -> AsyncIterator[dict]:
    """The JSON objects of a stream of `data: ...` events."""
    unread = b""
    # not by line: aiohttp refuses lines over 128 KB
    async for chunk in response.content.iter_any():
        *events, unread = (unread + chunk).split(b"\n\n")
        for event in events:
            if event != b"data: [DONE]":
                yield json.loads(event.removeprefix(b"data: "))


def buckets(named_weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Cuts a stream of (name, tensor) into lists of one dtype and of about BUCKET_BYTES."""
    bucket, size = [], 0
    for name, tensor in named_weights:
        if bucket and (tensor.dtype != bucket[0][1].dtype or size >= BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def serialize_bucket(bucket: list[tuple[str, Tensor]], readers: int) -> list[str]:
    """As SGLang's "flattened_bucket": a flat tensor's handle, one a reader, and what lies where in it."""
    from multiprocessing.reduction import ForkingPickler

    import torch
    import torch.multiprocessing  # teaches ForkingPickler to send tensors as handles

    # with the default, file descriptors, the receiver fails multiprocessing's handshake, and dies
    torch.multiprocessing.set_sharing_strategy("file_system")
    metadata, offset = [], 0
    for name, tensor in bucket:
        span = dict(start_idx=offset, end_idx=offset + tensor.nbytes, numel=tensor.nbytes)
        metadata.append(SimpleNamespace(name=name, shape=tensor.shape, dtype=tensor.dtype, **span))
        offset += tensor.nbytes
    flat = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for _, tensor in bucket])
    # CUDA takes the memory back once all were read
    payloads = [io.BytesIO() for _ in range(readers)]
    for payload in payloads:
        ForkingPickler(payload).dump(dict(flattened_tensor=flat, metadata=metadata))
    return [base64.b64encode(payload.getvalue()).decode() for payload in payloads]
