"""Engine: a handle on one SGLang server, which sees only tokens. The rank that launches it owns it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self

import aiohttp

from config import Config
from engines import server, wire
from inputs import hf_directory
from runtime.errors import RunLost, UserError
from runtime.hooks import needed
from sample import Image

if TYPE_CHECKING:
    from torch import Tensor


LOOK_S = 0.1  # interval between checks that a server is ready, or still up
WARM_UP_TOKENS = 2  # one from the prefill, one from a decode step
# a bucket's names and shapes, and a handle for each of the engine's ranks
Offer = tuple[list[tuple[str, list[int]]], list[str]]


class EngineLost(RunLost):
    """An engine died, hangs, or can't be reached."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Logprobs are at the temperature, before top_p; unscaled when greedy."""

    temperature: float  # 0 is greedy
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()  # besides the model's EOS; they stay in the answer
    top_p: float = 1.0
    ignore_eos: bool = False  # always generate max_new_tokens, and finish with "stop"


class Request(NamedTuple):
    """A request for one answer. With --deterministic, its tokens depend only on prompt and seed."""

    prompt: list[int]  # includes a token for each feature of its images
    sampling: Sampling
    limit: int  # maximum number of new tokens
    seed: int | None = None  # 63 bits
    images: tuple[Image, ...] = ()
    name: str = ""  # `abort_request` takes it; no name is a prefix of another


def seed_of(*what: int | str) -> int:
    """Return a 63-bit seed that depends only on `what`, the name of an answer (pure)."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8]) >> 1


@dataclass(frozen=True)
class Answer:
    """An engine's answer, or a part of one. Times are the event loop's, in seconds."""

    index: int  # position of its prompt in the call
    tokens: list[int]
    logprobs: list[float]
    finish: str  # stop | length | abort; empty until the last part
    versions: list[int]  # weight version that generated each token
    cached_tokens: int = 0  # prompt tokens found in the engine's KV cache
    sent: float = 0.0
    first_token: float = 0.0  # arrival of the first token
    end: float = 0.0
    score: float | None = None  # a scalar reward model's output, instead of tokens
    rank: int = 0  # rank of the engine that finished it

    def extended(self, *parts: Answer) -> Answer:
        """Return this answer with the next `parts` appended."""
        whole = (self, *parts)
        changed = {}
        for name in ("tokens", "logprobs", "versions"):
            changed[name] = list(chain.from_iterable(vars(part)[name] for part in whole))
        for name in ("finish", "end", "rank", "score"):
            changed[name] = vars(whole[-1])[name]
        return replace(self, **changed)


class Engine:
    """A handle on one SGLang server. The owner may call all methods, others `generate` and `abort_request`.

    rank: its (lead) rank. model: index among its role's models. key: requests must carry it.
    capacity: how many full-length requests fit at once, known when it is ready.
    """

    module = "engines.server_main"  # the server runs it
    flags: tuple[str, ...] = ()  # extra flags of the server

    def __init__(self, role: str, rank: int, url: str, key: str, model: int = 0, capacity: int = 0):
        self.role = role
        self.rank = rank
        self.url = url
        self.key = key
        self.model = model
        self.capacity = capacity
        self.name = f"{role} engine of rank {rank}"
        self._process: server.ServerProcess | None = None
        self._session: aiohttp.ClientSession | None = None
        self._tp = 1
        self._shapes: dict[str, list[int]] = {}  # shapes of the weights by Hugging Face name
        self._lost_s = 300.0  # every call's timeout
        self._has_aborted = False  # since it last woke up

    @classmethod
    def launch(
        cls,
        role: str,
        rank: int,
        port: int,
        model_dir: str,
        config: Config,
        log: Path,
        key: str,
        stride: int = 1,
    ) -> Self:
        """Start a server that dies with this thread (see `ready`). Raises UserError if the port is taken."""
        engine = cls(role, rank, f"http://{config.host}:{port}", key)
        with socket.socket() as probe:
            if probe.connect_ex((config.host, port)) == 0:
                raise UserError(f"port {port} is in use: choose another --port")
        engine._tp = vars(config)[f"{role}_tp"]
        engine._shapes = hf_directory.checkpoint_shapes(model_dir)
        engine._lost_s = config.engine_lost_s
        flags = server.server_flags(role, rank, port, model_dir, config, stride)
        command = [cls.module, *flags, *cls.flags]
        # don't cache image features: a push may change the vision tower
        environment = {"SGLANG_VLM_CACHE_SIZE_MB": "0"} if role == "rollout" else {}
        kind = server.kind_of(config.device)
        engine._process = kind(command, key, log, config.device, environment)
        engine._process.start()
        return engine

    async def ready(self, deadline_s: float) -> None:
        """Wait until the server generates. Raises UserError with its log's end if it dies or is too slow."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + deadline_s
        while not await self._is_ready():
            if self._process.exit_status():
                if "address already in use" in self._process.log_tail():
                    port = self.url.rpartition(":")[2]
                    raise UserError(f"port {port} is in use: choose another --port")
                raise self._start_error("stopped while starting")
            if clock() > deadline:
                raise self._start_error(f"wasn't ready within {deadline_s:g} s")
            await asyncio.sleep(LOOK_S)
        if (await self._call("GET", "/model_info"))["served_model_name"] != str(os.getpid()):
            raise UserError(f"another server is at {self.url}: choose another --port")
        info = await self._call("GET", "/server_info")
        full_length = max(1, info["max_total_num_tokens"] // info["context_length"])
        self.capacity = min(info["max_running_requests"], full_length)
        try:
            await asyncio.wait_for(self._warm_up(), deadline - clock())
        except TimeoutError:
            raise self._start_error(
                f"didn't answer a first request within {deadline_s:g} s"
            ) from None
        except EngineLost as error:
            raise UserError(f"while it started, {error}") from None
        # otherwise the garbage collection in each sleep scans all that SGLang imported: 0.7 s
        await self._call("POST", "/freeze_gc")

    def _start_error(self, why: str) -> UserError:
        return UserError(f"the {self.name} {why}; {self._process.log_tail()}")

    async def _warm_up(self) -> None:
        """Generate a greedy and a sampled answer: compiling CUDA kernels later would look like a hang."""
        kinds = [Sampling(heat, WARM_UP_TOKENS, ignore_eos=True) for heat in (0.0, 1.0)]
        requests = [Request([0] * 4, kind, WARM_UP_TOKENS, seed=0) for kind in kinds]
        async for _ in self.generate(requests):
            pass

    async def watch(self) -> NoReturn:
        """Raise EngineLost once the process ends.

        `Pool.apply_status` finds one that hangs while it has tokens to write, a call's timeout any other.
        """
        while not (status := self._process.exit_status()):
            await asyncio.sleep(LOOK_S)
        raise self.lost(f"died ({status})")

    def lost(self, how: str) -> EngineLost:
        """Return the error to raise. On the engine's owner it includes the end of the log."""
        log = f"; {self._process.log_end()}" if self._process else ""
        return EngineLost(f"the {self.name} {how}{log}")

    async def ready_asleep(self, deadline_s: float) -> None:
        """Await `ready`, then sleep, which pins memory for all weights. The deadline covers both."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + deadline_s
        await self.ready(deadline_s)
        await self.sleep(deadline - clock())

    async def close(self) -> None:
        """Close the connections. If the server is ours, end all of its processes."""
        if self._session:
            await self._session.close()
        if self._process:
            await self._process.kill()
            self._process.folder.cleanup()

    async def sleep(self, deadline_s: float = 0.0) -> None:
        """Release the device's memory. Answers in progress finish with "abort"."""
        if self._process.device == "cpu":
            return
        if self._has_aborted:  # pausing before an aborted request has left would take a second
            await asyncio.sleep(0.1)
        self._has_aborted = False
        # other modes leave the idle scheduler spinning
        await self._call("POST", "/pause_generation", mode="abort")
        await self._call("POST", "/flush_cache?timeout=30")
        tags = ["kv_cache", "weights"]
        await self._call("POST", "/release_memory_occupation", deadline_s, tags=tags)

    async def wake_weights(self) -> None:
        """Allocate the weights. A backup (see cuda_flags) restores them; without one, load them next."""
        if self._process.device != "cpu":
            await self._call("POST", "/resume_memory_occupation", tags=["weights"])

    async def wake_kv_cache(self) -> None:
        """Allocate the KV cache, once the actor has released its memory. Requests may come again."""
        if self._process.device != "cpu":
            await self._call("POST", "/resume_memory_occupation", tags=["kv_cache"])
            await self._call("POST", "/continue_generation")

    async def load_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights, under Hugging Face names. Raises UserError like `load`."""

        async def offers() -> AsyncIterator[Offer]:
            for bucket in wire.buckets(named_weights):
                yield wire.facts_of(bucket), wire.serialize_bucket(bucket, self._tp)

        await self.load(offers(), self._shapes, "flattened_bucket", version)

    async def load(
        self, offers: AsyncIterator[Offer], shapes: dict, load_format: str, version: int
    ) -> None:
        """Load buckets. Raises UserError if a name is unknown or missing, or not of its shape."""
        missing = set(shapes)
        body = {"load_format": load_format, "flush_cache": False, "weight_version": str(version)}
        await self._call("POST", "/begin_weight_update")
        async for facts, handles in offers:
            for name, shape in facts:  # SGLang skips an unknown name and crashes on a wrong shape
                expected = shapes.get(name)
                if shape != expected:
                    raise UserError(f"the {self.name} has {expected} for {name}, not {shape}")
                missing.discard(name)
            body["serialized_named_tensors"] = handles
            await self._call("POST", "/update_weights_from_tensor", **body)
        if missing := missing - {"lm_head.weight"}:  # tied to the embedding
            raise UserError(f"the push to the {self.name} lacked {sorted(missing)}")
        await self._call("POST", "/end_weight_update")
        await self._call("POST", "/flush_cache?timeout=30")  # once, not per bucket

    async def generate(self, requests: list[Request]) -> AsyncIterator[Answer]:
        """Request answers in one call: they share the KV cache of their prompts' common prefix.

        Yields each answer in parts of up to STREAM_INTERVAL new tokens; only the last part has a `finish`.
        Raises EngineLost if the connection breaks, UserError if the server refuses.
        """
        clock = asyncio.get_running_loop().time
        sent = clock()
        written = Counter()  # index -> tokens so far
        first_tokens = {}  # index -> when the first one came
        finished = 0
        params = []
        for request in requests:
            own = {"max_new_tokens": request.limit, "sampling_seed": request.seed}
            params.append(asdict(request.sampling) | own)
        body = body_of(requests) | {"sampling_params": params}
        body |= {"return_logprob": True, "stream": True}
        async with self._open("POST", "/generate", body) as response:
            async for event in wire.server_sent_events(response):
                if refusal := refusal_in(event):
                    raise UserError(f"the {self.name} refused: {refusal}")
                part = read_part(event, written[event["index"]])
                written[part.index] += len(part.tokens)
                request = requests[part.index]
                if part.finish == "length" and written[part.index] < request.limit:
                    raise UserError(
                        f"the {self.name} cut an answer off after {written[part.index]} tokens, not "
                        f"{request.limit}: its KV cache has no room for more"
                    )
                if part.finish == "length" and request.sampling.ignore_eos:
                    part = replace(part, finish="stop")  # nothing follows
                finished += bool(part.finish)
                first_token = first_tokens.setdefault(part.index, clock())
                yield replace(part, sent=sent, first_token=first_token, end=clock(), rank=self.rank)
        assert finished == len(requests), f"the {self.name} closed its stream too early"

    async def abort(self) -> None:
        """Abort every answer in progress, whichever rank requested it: its finish is "abort"."""
        self._has_aborted = True
        await self._call("POST", "/abort_request", abort_all=True)

    async def abort_request(self, name: str) -> None:
        """Abort one answer if it hasn't finished: its finish is "abort"."""
        await self._call("POST", "/abort_request", rid=name)

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, body: dict, deadline_s: float | None = None, also: int = 200
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the response. Raises EngineLost if it fails or breaks off, UserError unless 200 or `also`."""
        if self._session is None:
            # SGLang drops idle connections after 5 s; drop ours first, so no request meets a closing one
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
            headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
            self._session = aiohttp.ClientSession(self.url, connector=connector, headers=headers)
        sent = wire.in_pieces(body) if method == "POST" else None
        how = {"timeout": aiohttp.ClientTimeout(total=deadline_s), "data": sent}
        try:
            async with self._session.request(method, path, **how) as response:
                if response.status not in (200, also):
                    reason = (await response.text())[:500]
                    raise UserError(f"the {self.name} refused {path}: {reason}")
                yield response
        except (TimeoutError, aiohttp.ClientError) as error:
            raise self.lost(f"didn't answer {path}: {error!r}") from error

    async def _is_ready(self) -> bool:
        with suppress(EngineLost, UserError):
            async with self._open("GET", "/ready", {}, self._lost_s):
                return True
        return False

    async def _call(self, method: str, path: str, deadline_s: float = 0.0, **body: Any) -> Any:
        async with self._open(method, path, body, deadline_s or self._lost_s) as response:
            return await response.json() if response.content_type == "application/json" else None


def body_of(requests: list[Request]) -> dict[str, Any]:
    """Return names, prompts with one token per image, and images; an image that all share only once."""
    body: dict[str, Any] = {"input_ids": [request.prompt for request in requests]}
    if all(request.name for request in requests):
        body["rid"] = [request.name for request in requests]
    if any(request.images for request in requests):
        collapse = needed("image_collapse", "a prompt with images")
        body["input_ids"] = [collapse(request.prompt, request.images) for request in requests]
        each = [list(request.images) or [None] for request in requests]
        is_shared = len(each[0]) == 1 and all(found == each[0] for found in each)
        body["image_data"] = each[0][0] if is_shared else each
    return body


def refusal_in(event: dict) -> str:
    """Return why the server won't answer, or "". Unlike an abort that we request, its own has a status."""
    if "error" in event:
        return event["error"]["message"]
    reason = event["meta_info"]["finish_reason"] or {}
    return reason["message"] if reason.get("status_code") else ""


def read_part(event: dict, written: int) -> Answer:
    """Return the new tokens in an event of an answer's stream: those after the first `written`."""
    info = event["meta_info"]
    total = info["completion_tokens"]
    # (logprob, token, None) per new token, or per token so far if it was aborted in the queue
    rows = info["output_token_logprobs"]
    rows = rows[len(rows) - (total - written) :]
    # only the last event has spans; until then all is one version, as weights only change during sleep
    present = {"version": info["weight_version"], "start": 0, "end": total}
    versions = []
    for span in info.get("weight_versions") or [present]:
        versions += [int(span["version"])] * (span["end"] - max(span["start"], written))
    finish = info["finish_reason"]["type"] if info["finish_reason"] else ""
    # SGLang hasn't checked if the last token ends the answer: drop it, and have it generated again
    if finish == "abort":
        rows = rows[:-1]
        versions = versions[:-1]
    tokens = [token for _, token, _ in rows]
    logprobs = [logprob for logprob, _, _ in rows]
    return Answer(event["index"], tokens, logprobs, finish, versions, info.get("cached_tokens", 0))
