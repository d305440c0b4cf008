"""What a trainer does about the process of an SGLang server: command line, environment, life and end; weights for it.

Nothing of sglang is imported: that takes 10 s.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import psutil

from config import Config

if TYPE_CHECKING:
    import aiohttp
    from torch import Tensor

STREAM_INTERVAL = 256  # tokens between two events of an answer
KV_TOKENS = 32768  # least size of an engine's KV cache without CUDA
BUCKET_BYTES = 512 << 20  # weights travel in flat buckets of about this size
END_S = 10.0  # for a killed server to be gone
SAME_S = 1.0  # two readings of when a process began may differ: the clock may have been set between them

# ---- command line and environment


def server_flags(role: str, rank: int, port: int, model_dir: str, config: Config) -> list[str]:
    """The server's command line. An engine of several ranks takes the devices from this rank's on."""
    import torch

    context, tp = context_length(model_dir, config), ranks_of_an_engine(role, config)
    flags = {
        "model-path": Path(model_dir).resolve(), "weight-version": 0, "host": config.host, "port": port,
        "load-format": "safetensors",  # by default it would take a .bin, too, which is a pickle
        "served-model-name": os.getpid(),  # by which `ready` knows that the server is ours
        "dtype": config.dtype, "random-seed": config.seed + rank,
        "context-length": context, "max-running-requests": config.max_running_requests,
        "skip-tokenizer-init": None,  # tokens in, tokens out
        "stream-interval": STREAM_INTERVAL, "incremental-streaming-output": None,
        # answers come to the judge one by one, and each prefill holds up all decoding: take them in together
        "prefill-decode-interval": 8, "prefill-decode-interval-min-bs": 16,
        "skip-server-warmup": None, "sleep-on-idle": None, "log-level": "error",
    }  # fmt: skip
    if config.trust_remote_code:
        flags["trust-remote-code"] = None
    if tp > 1:  # written for CUDA, not yet run
        if not torch.cuda.is_available():
            raise ValueError(f"--{role}-tp {tp} needs CUDA: without it an engine spans one rank")
        flags["tp-size"] = tp
    if torch.cuda.is_available():
        flags |= {"base-gpu-id": torch.cuda.current_device(), "mem-fraction-static": config.mem_fraction}
        flags["enable-memory-saver"] = None
        if role == "genrm" or config.mode != "partial":
            # nobody pushes a judge its weights after it slept, nor a rollout engine between waves in turns
            flags["enable-weights-cpu-backup"] = None
    else:
        flags |= {"device": "cpu", "max-total-tokens": kv_tokens(context), "disable-overlap-schedule": None}
        flags["attention-backend"] = "torch_native"  # cpu/invariance.py's; deterministic mode would look for a GPU's
    if config.deterministic:
        flags["enable-deterministic-inference"] = None
    return [text for flag, value in flags.items() for text in (f"--{flag}", str(value))[: 1 + (value is not None)]]


def server_environment(key: str, private: str) -> dict[str, str]:
    """Ours without torchrun's variables, from which SGLang would join our process group.

    key: what requests must show; in the environment, because anybody may read a command line. private: a folder of
    the server's own. There its processes find each other in a file (SGLang's default is a port, which torch opens
    on every interface), and there are its sockets, which a killed server doesn't remove.
    """
    import torch

    torchrun = ("MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(torchrun)}
    environment |= {"NANOYATT_PARENT": str(os.getpid()), "PYTHONWARNINGS": "ignore", "NANOYATT_API_KEY": key}
    environment |= {"SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{private}/store", "TMPDIR": private}
    if not torch.cuda.is_available():
        # MALLOC: glibc would hand every large buffer back to the kernel, and fault its pages in at the next step
        large = str(1 << 30)
        environment |= {"MALLOC_MMAP_THRESHOLD_": large, "MALLOC_TRIM_THRESHOLD_": large, "OMP_NUM_THREADS": "1"}
    return environment


def ranks_of_an_engine(role: str, config: Config) -> int:
    """Tensor-parallel ranks that one engine spans."""
    return {"rollout": config.rollout_tp, "genrm": config.genrm_tp}[role]


def context_length(model_dir: str | Path, config: Config) -> int:
    """Tokens of prompt and answer that an engine of this model takes together: --max-model-len, or the model's."""
    if config.max_model_len:
        return config.max_model_len
    path = Path(model_dir, "config.json")
    length = json.loads(path.read_text()).get("max_position_embeddings") if path.is_file() else None
    if not length:
        raise ValueError(f"{path} names no max_position_embeddings: say --max-model-len")
    return length


def kv_tokens(context: int) -> int:
    """Tokens in the KV cache of an engine without CUDA: those of one request at least."""
    return max(KV_TOKENS, context)


def checkpoint_shapes(model_dir: str | Path) -> dict[str, list[int]]:
    """Name and shape of every tensor in a Hugging Face directory, from the headers of its safetensors files."""
    from safetensors import SafetensorError, safe_open

    shapes = {}
    for path in sorted(Path(model_dir).glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as file:
                shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}
        except SafetensorError as error:
            raise ValueError(f"{path} can't be read: {error}") from None
    if not shapes:
        raise ValueError(f"{model_dir} holds no *.safetensors file: a model is a Hugging Face directory")
    return shapes


def check_port(host: str, port: int, name: str) -> None:
    """ValueError if somebody listens on the port that the engine `name` is to have."""
    with socket.socket() as probe:
        if probe.connect_ex((host, port)) == 0:
            raise ValueError(f"port {port}, wanted by the {name}, is in use: choose another --port")


# ---- the process


class ServerProcess:
    """A server on this machine: a process group of its own, a log, a file with its process id beside that, and a
    folder that nobody else may read."""

    def __init__(self, command: list[str], key: str, log: Path):
        self._command, self._key, self._log = command, key, log
        self._folder = tempfile.mkdtemp(prefix="nanoyatt-")
        self._process: subprocess.Popen | None = None
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")

    def start(self) -> None:
        """What an earlier server said stays in the log."""
        assert self._process is None, f"{self._log.stem} still runs"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=Path(__file__).parents[1], env=server_environment(self._key, self._folder),
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        write_pid_file(self._log.with_suffix(".pid"), self._process.pid)

    def exit_status(self) -> str:
        """How it ended; empty while it runs."""
        status = self._process and self._process.poll()
        if self._process and status is None:
            return ""
        return "ended" if status is None else f"signal {-status}" if status < 0 else f"exit status {status}"

    async def kill(self) -> None:
        """Ends the group, and waits until it is gone."""
        if self._process is None:
            return
        process, self._process = self._process, None
        self._log.with_suffix(".pid").unlink(missing_ok=True)
        process.kill()  # it holds nothing worth saving, and its children die with it; SIGTERM would take 5 s
        process.wait()
        try:
            await asyncio.sleep(0.5)  # multiprocessing's tracker, the last of the group, removes the semaphores
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def remove_folder(self) -> None:
        """It will not be started again."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def log_tail(self) -> str:
        """The end of the log, to be added to a message."""
        lines = self._log.read_text(errors="replace").splitlines()[-15:]
        return "\n".join((f"; the end of {self._log}:", *lines))


# ---- servers that an earlier run left: a kernel that didn't pass the signal on, a rank that was frozen


def write_pid_file(path: Path, pid: int) -> None:
    """Which process serves, which owns it (this one), and since when: an id alone may be another's by tomorrow."""
    server, owner = psutil.Process(pid), psutil.Process()
    facts = {"pid": pid, "born": server.create_time(), "owner": owner.pid, "owner_born": owner.create_time()}
    written = path.with_suffix(".part")
    written.write_text(json.dumps(facts))
    written.rename(path)  # whole or not at all


def end_stale_servers(out: Path) -> list[str]:
    """End the servers of an earlier run in `out`, which hold ports and devices; returns a line for each.

    ValueError if the process that owns one is alive: that run isn't over, and nothing of it may be touched.
    """
    noted = {path: json.loads(path.read_text()) for path in sorted((out / "logs").glob("*.pid"))}
    for facts in noted.values():
        if same_process(facts["owner"], facts["owner_born"]):
            raise ValueError(
                f"--out {out}: a run is at work there (process {facts['owner']}): stop it, or choose another --out"
            )
    lines = []
    for path, facts in noted.items():
        server = same_process(facts["pid"], facts["born"])
        if server and os.getpgid(server.pid) == server.pid:  # launched as the leader of a group of its own
            os.killpg(server.pid, signal.SIGKILL)
            gone_by = time.monotonic() + END_S
            while same_process(facts["pid"], facts["born"]):  # Process.wait waits for a zombie's parent, too
                if time.monotonic() > gone_by:
                    raise ValueError(f"process {server.pid}, a server that an earlier run left, doesn't end: {path}")
                time.sleep(0.02)
            lines.append(f"ended process {server.pid}, a server that an earlier run left: {path.stem}")
        path.unlink()
    return lines


def same_process(pid: int, born: float) -> psutil.Process | None:
    """The process of this id that began then, if it runs."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - born) < SAME_S and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if same else None


# ---- what goes over the wire


async def server_sent_events(response: aiohttp.ClientResponse) -> AsyncIterator[dict]:
    """The JSON objects of a stream of `data: ...` events."""
    unread = b""
    async for chunk in response.content.iter_any():  # not by line: aiohttp refuses lines over 128 KB
        *events, unread = (unread + chunk).split(b"\n\n")
        for event in events:
            if event != b"data: [DONE]":
                yield json.loads(event.removeprefix(b"data: "))


def buckets(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
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


def serialize_bucket(bucket: list[tuple[str, Tensor]]) -> str:
    """A bucket in SGLang's format "flattened_bucket": one flat tensor, as a handle, and where each tensor lies.

    Written by hand: SGLang's own FlattenedTensorBucket would have to be imported.
    """
    from multiprocessing.reduction import ForkingPickler

    import torch
    import torch.multiprocessing  # teaches ForkingPickler to send tensors as handles

    # With the default, file descriptors, the receiver fails multiprocessing's handshake and the scheduler dies.
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
