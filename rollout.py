"""Rollout: the `Sample` record and the SGLang engine that fills it.

An `Engine` is a handle on one real SGLang server. The rank that launches it owns the server's process; any controller may
use a handle over HTTP. Tokens in, tokens out: the server never sees text.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace

BUCKET_BYTES = 512 << 20  # weights travel in flat buckets of about this size


@dataclass
class Sample:
    """One answer to one prompt; the only record that flows between the roles.

    Every field names who fills it. Token ids are exactly those that the engine sampled: text is for people and
    for the judge, because decoding and re-encoding does not give the same tokens back.
    """

    # data.py
    prompt_id: int
    index: int  # answer number within its group (the answers to one prompt)
    prompt: list[int]
    question: str = ""  # what the judge is shown
    answer_key: str | None = None
    media: list = field(default_factory=list)  # images; never leave the controller that loaded them
    # rollout.py
    response: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # one per response token, under the weights that wrote it
    finish: str = ""  # stop | length | abort
    versions: list[int] = field(default_factory=list)  # weight version that wrote each response token
    # genrm.py
    critique: str = ""
    verdict: bool | None = None
    reward: float | None = None
    # algorithms.py
    advantages: list[float] | None = None  # one per response token; None is padding, masked out of the loss


@dataclass(frozen=True)
class Sampling:
    """How to sample an answer. Logprobs always come back: under the temperature, before top_p; unscaled when greedy."""

    temperature: float  # 0 is greedy
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own EOS; the stop token is part of the answer
    top_p: float = 1.0


@dataclass(frozen=True)
class Answer:
    """One finished answer of `Engine.generate`; the fields are those of `Sample`."""

    index: int  # which of the n answers
    tokens: list[int]
    logprobs: list[float]
    finish: str
    versions: list[int]


class Engine:
    """A handle on one SGLang server.

    role, rank: whose engine it is and where it runs, for spans and messages ("rollout", 3).
    capacity: the most answers that the server decodes at once; more of them queue inside it.
    in_flight: answers asked for through this handle that have not come back yet.
    awake: whether the server may be asked; `sleep` and `wake` set it here, and whoever holds another handle sets it there.
    on_request: called with (role, rank, start, end), in the event loop's seconds, for every answer that finishes.
    """

    def __init__(self, role: str, rank: int, url: str, capacity: int):
        self.role, self.rank, self.url, self.capacity = role, rank, url, capacity
        self.name = f"{role} engine of rank {rank}"
        self.in_flight = 0
        self.awake = True
        self.on_request: Callable[[str, int, float, float], None] | None = None
        self._process: subprocess.Popen | None = None
        self._log_path = Path(os.devnull)
        self._shapes: dict[str, list[int]] = {}
        self._session = None

    # ---- the server's life -------------------------------------------------------------------------------------------

    @classmethod
    def launch(cls, role: str, rank: int, port: int, model_dir: str, config, log_path: str) -> Engine:
        """Starts a server on this machine and returns at once; `await ready()` before use.

        The server dies with the thread that calls this, even if it is killed hard. Raises ValueError if the port is taken.
        """
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                raise ValueError(f"port {port}, wanted by the {role} engine of rank {rank}, is in use: choose another --port")
        engine = cls(role, rank, f"http://127.0.0.1:{port}", config.max_running_requests)
        engine._log_path = Path(log_path)
        engine._shapes = checkpoint_shapes(model_dir)
        engine._log_path.parent.mkdir(parents=True, exist_ok=True)
        with engine._log_path.open("wb") as log:
            # Its own process group, so that `close` reaches the scheduler and the detokenizer too.
            engine._process = subprocess.Popen(
                [sys.executable, "-m", "cpu.sglang", *server_flags(role, rank, port, model_dir, config)],
                cwd=Path(__file__).parent, env=server_environment(), stdout=log, stderr=log, start_new_session=True,
            )
        return engine

    async def ready(self, deadline_s: float = 300.0):
        """Waits until the server generates. Raises ValueError with the end of its log if it died or was too slow."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + deadline_s
        while not await self._is_healthy():
            if self._process is not None and self._process.poll() is not None:
                raise ValueError(f"the {self.name} stopped while starting{self._log_tail()}")
            if clock() > deadline:
                raise ValueError(f"the {self.name} was not ready within {deadline_s:.0f} s{self._log_tail()}")
            await asyncio.sleep(0.2)
        if self._process is not None and (await self._model_info())["served_model_name"] != str(os.getpid()):
            raise ValueError(f"the {self.name} found another server at {self.url}: choose another --port")
        await self._post("/freeze_gc")  # every sleep collects garbage: else 0.7 s each time, over all that SGLang has imported

    async def close(self):
        """Ends the server and all of its processes, and waits until the port is free."""
        if self._session is not None:
            await self._session.close()
        if self._process is None:
            return
        self._process.kill()  # it holds nothing worth saving, and its children die with it; SIGTERM would take 5 s
        self._process.wait()
        await asyncio.sleep(0.5)  # multiprocessing's tracker, the last of the group, removes the semaphores and ends too
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process = None

    def _log_tail(self) -> str:
        lines = self._log_path.read_text(errors="replace").splitlines()[-15:]
        return "\n".join((f"; the end of {self._log_path}:", *lines))

    # ---- memory ------------------------------------------------------------------------------------------------------

    async def sleep(self):
        """Hands the memory back. Answers still running are aborted; they come back with finish "abort"."""
        assert self.awake, f"the {self.name} sleeps already"
        self.awake = False
        await self._post("/pause_generation", mode="abort")  # other modes leave the idle scheduler spinning
        await self._post("/flush_cache?timeout=30")
        await self._post("/release_memory_occupation", tags=["kv_cache", "weights"])

    async def wake(self):
        """Takes the memory back, all of it. The weights of a genrm engine are as they were; those of a rollout engine are not."""
        await self.wake_weights()
        await self.wake_kv_cache()

    async def wake_weights(self):
        """First half of waking: room for the weights, ready for `load_weights` while the actor still holds its memory."""
        assert not self.awake, f"the {self.name} is awake already"
        await self._post("/resume_memory_occupation", tags=["weights"])

    async def wake_kv_cache(self):
        """Second half of waking, once the actor is out: room for the KV cache; requests are welcome again."""
        await self._post("/resume_memory_occupation", tags=["kv_cache"])
        await self._post("/continue_generation")
        self.awake = True

    # ---- weights -----------------------------------------------------------------------------------------------------

    async def load_weights(self, named_tensors: Iterable[tuple[str, object]], version: int):
        """Replaces the server's weights by full tensors under Hugging Face names; `version` marks what is written from now on.

        Only handles travel: the server, on the same machine, reads the tensors from shared memory or over CUDA IPC.
        Raises ValueError for a tensor that the model does not have, or lacks, or when the server refuses.
        """
        names: set[str] = set()
        await self._post("/begin_weight_update")
        try:
            for bucket in buckets(self._checked(named_tensors, names)):
                await self._post(
                    "/update_weights_from_tensor", serialized_named_tensors=[serialize_bucket(bucket)],
                    load_format="flattened_bucket", flush_cache=True, weight_version=str(version),
                )
        finally:
            await self._post("/end_weight_update")
        missing = self._shapes.keys() - names - {"lm_head.weight"}  # tied to the embedding
        if missing:
            raise ValueError(f"the {self.name} was pushed no {sorted(missing)}")
        served = (await self._model_info())["weight_version"]
        assert served == str(version), f"the {self.name} serves weights {served} after a push of {version}"

    def _checked(self, named_tensors, names: set[str]):
        """Passes the tensors on, noting their names: SGLang silently skips an unknown name and dies of a wrong shape."""
        for name, tensor in named_tensors:
            expected = self._shapes.get(name)
            if expected != list(tensor.shape):
                raise ValueError(f"the {self.name} cannot load {name} of shape {list(tensor.shape)}: its model has {expected}")
            names.add(name)
            yield name, tensor

    # ---- generation --------------------------------------------------------------------------------------------------

    async def generate(self, prompt: list[int], n: int, sampling: Sampling) -> AsyncIterator[Answer]:
        """n answers to one prompt, in one request, each yielded the moment it is finished.

        Survives two broken connections: what has been yielded is not asked again. Raises ValueError when the server refuses.
        """
        assert self.awake, f"a request reached the {self.name} while it sleeps"
        clock = asyncio.get_running_loop().time
        start = clock()
        missing = list(range(n))
        self.in_flight += n
        try:
            async for answer in retry_broken(lambda: self._stream(prompt, tuple(missing), sampling)):
                missing.remove(answer.index)
                self.in_flight -= 1
                if self.on_request is not None:
                    self.on_request(self.role, self.rank, start, clock())
                yield answer
        finally:
            self.in_flight -= len(missing)
        assert not missing, f"the {self.name} ended its reply without answers {missing}"

    async def abort(self):
        """Aborts every answer that the server is writing, whoever asked; they come back with finish "abort"."""
        await self._post("/abort_request", abort_all=True)

    async def _stream(self, prompt, indices: tuple[int, ...], sampling: Sampling) -> AsyncIterator[Answer]:
        """One streamed request. By the server's stream interval, an answer sends two events: its first token, and its end."""
        body = dict(input_ids=[prompt] * len(indices), sampling_params=asdict(sampling), return_logprob=True, stream=True)
        async with self._http().post(self.url + "/generate", json=body) as response:
            await self._check(response, "/generate")
            async for event in server_sent_events(response):
                if "error" in event:
                    raise ValueError(f"the {self.name} refused: {event['error']['message']}")
                if event["meta_info"]["finish_reason"] is not None:
                    yield read_answer(event, indices[event["index"]])

    # ---- HTTP --------------------------------------------------------------------------------------------------------

    def _http(self):
        import aiohttp

        if self._session is None:
            # SGLang drops idle connections after 5 s: ours must go first, or a request meets a closing one.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self._session

    async def _is_healthy(self) -> bool:
        import aiohttp

        try:
            async with self._http().get(self.url + "/health") as response:  # generates one token
                return response.status == 200
        except aiohttp.ClientConnectionError:
            return False

    async def _model_info(self) -> dict:
        async with self._http().get(self.url + "/model_info") as response:
            return await response.json()

    async def _post(self, path: str, **body):
        async with self._http().post(self.url + path, json=body) as response:
            await self._check(response, path)

    async def _check(self, response, path: str):
        """SGLang says with the status whether a call succeeded, and why not in the text."""
        if response.status != 200:
            raise ValueError(f"the {self.name} refused {path}: {(await response.text())[:500]}")


# ---- what goes over the wire -----------------------------------------------------------------------------------------


async def server_sent_events(response) -> AsyncIterator[dict]:
    """The JSON objects of a stream of `data: ...` events."""
    unread = b""
    async for chunk in response.content.iter_any():  # not by line: aiohttp refuses lines over 128 KB
        *events, unread = (unread + chunk).split(b"\n\n")
        for event in events:
            if event != b"data: [DONE]":
                yield json.loads(event.removeprefix(b"data: "))


def read_answer(event: dict, index: int) -> Answer:
    info = event["meta_info"]
    versions = [int(span["version"]) for span in info["weight_versions"] for _ in range(span["start"], span["end"])]
    logprobs = [logprob for logprob, _, _ in info["output_token_logprobs"]]
    return Answer(index, event["output_ids"], logprobs, info["finish_reason"]["type"], versions)


async def retry_broken(stream: Callable[[], AsyncIterator]) -> AsyncIterator:
    """Passes on what `stream()` yields; opens it again when the connection breaks, twice at most."""
    import aiohttp

    for delay_s in (1.0, 5.0, None):
        try:
            async for item in stream():
                yield item
            return
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
            if delay_s is None:
                raise
        await asyncio.sleep(delay_s)


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


def server_environment() -> dict[str, str]:
    """Ours without torchrun's variables, from which SGLang would join our process group."""
    import torch

    torchrun = ("MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(torchrun)}
    environment |= {"NANOYATT_PARENT": str(os.getpid()), "PYTHONWARNINGS": "ignore"}
    if not torch.cuda.is_available():
        # MALLOC: glibc would hand every large buffer back to the kernel, and fault its pages in again at the next step.
        environment |= {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": f"{1 << 30}", "MALLOC_TRIM_THRESHOLD_": f"{1 << 30}"}
    return environment


def server_flags(role: str, rank: int, port: int, model_dir: str, config) -> list[str]:
    import torch

    flags = {
        "model-path": Path(model_dir).resolve(), "weight-version": 0, "port": port,
        "served-model-name": os.getpid(),  # by which `ready` knows that the server is ours
        "dtype": config.dtype, "random-seed": config.seed + rank,
        "context-length": config.max_model_len, "max-running-requests": config.max_running_requests,
        "skip-tokenizer-init": None,  # tokens in, tokens out
        "stream-interval": 1_000_000,  # an answer's first token and its end: nothing in between
        "skip-server-warmup": None, "sleep-on-idle": None, "log-level": "error",
    }
    if torch.cuda.is_available():
        flags |= {"base-gpu-id": torch.cuda.current_device(), "mem-fraction-static": config.mem_fraction, "enable-memory-saver": None}
        if role == "genrm":
            flags["enable-weights-cpu-backup"] = None  # nobody pushes a judge its weights after it slept
    else:
        flags |= {"device": "cpu", "max-total-tokens": config.max_total_tokens, "disable-overlap-schedule": None}
    return [text for flag, value in flags.items() for text in (f"--{flag}", *([] if value is None else [str(value)]))]


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
