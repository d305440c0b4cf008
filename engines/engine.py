"""Engine: a handle on one SGLang server, which never sees text. Whoever launches it owns its process."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import aiohttp

from config import Config, UserError
from engines import server
from images.tokens import Image, collapse
from runtime import hf_directory

if TYPE_CHECKING:
    from torch import Tensor

LOOK_S = 0.5  # between two looks at whether a server is ready, or down
HEALTH_S = 3.0  # at least, for /health: SGLang looks at itself once a second
WARM_UP_TOKENS = 2  # one that a prompt's pass gives, and one of a decoding step


class EngineLost(ConnectionError):
    """A server doesn't answer: it died, it hangs, or it can't be reached."""


@dataclass(frozen=True)
class Sampling:
    """How to sample an answer. Its logprobs are under the temperature, before top_p; unscaled when greedy."""

    temperature: float  # 0 is greedy
    max_new_tokens: int
    # besides the model's own EOS; the stop token is part of the answer
    stop_token_ids: tuple[int, ...] = ()
    top_p: float = 1.0
    ignore_eos: bool = False  # write max_new_tokens whatever comes: for measurements


class Request(NamedTuple):
    """One answer that is asked for. With --deterministic, prompt and seed alone say what is written."""

    prompt: list[int]  # with a token for each feature of its images
    sampling: Sampling
    limit: int  # the most new tokens
    seed: int | None = None  # 63 bits
    images: tuple[Image, ...] = ()

    def after(self, tokens: list[int]) -> Request:
        """What is left to ask for once these came; as a token's noise is by its place, the same will come."""
        return self._replace(prompt=self.prompt + tokens, limit=self.limit - len(tokens))


def seed_of(*what: int | str) -> int:
    """The seed of an answer: 63 bits that follow from `what` names it, and from nothing else (pure)."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8]) >> 1


@dataclass(frozen=True)
class Answer:
    """What an engine wrote, or a part of it. Times are the event loop's, in seconds."""

    index: int  # which of the prompts
    tokens: list[int]
    logprobs: list[float]
    finish: str  # stop | length | abort; empty while more is to come
    versions: list[int]  # weight version that wrote each token
    cached_tokens: int = 0  # of the prompt, found in the engine's KV cache
    sent: float = 0.0
    first_token: float = 0.0  # when it left the queue and its first token was there
    end: float = 0.0
    score: float | None = None  # instead of tokens, from a scalar reward model
    rank: int = 0  # of the engine that wrote its end

    def extended(self, part: Answer) -> Answer:
        lists = {
            name: vars(self)[name] + vars(part)[name] for name in ("tokens", "logprobs", "versions")
        }
        return replace(self, **lists, finish=part.finish, end=part.end, rank=part.rank)


class Engine:
    """A handle on one SGLang server. Its owner, who launched it, may call all methods; others `generate`.

    role, rank: whose it is and its (lead) rank. model: which of its role's models it serves. key: what every
    request must show. capacity: requests of full length that it holds at once, known when it is ready.
    """

    module = "cpu.sglang"  # that a server runs
    flags: tuple[str, ...] = ()  # of the server, besides those of every role

    def __init__(self, role: str, rank: int, url: str, key: str, model: int = 0, capacity: int = 0):
        self.role, self.rank, self.url, self.key, self.model = role, rank, url, key, model
        self.capacity, self.name = capacity, f"{role} engine of rank {rank}"
        self._process: server.ServerProcess | None = None
        self._shapes: dict[str, list[int]] = {}
        self._tp, self._session = 1, None
        # a hang, and the deadlines of short and of long calls
        self._silence_s, self._move_s = 40.0, 120.0
        self._events = 0  # of all streams: signs of life
        self._has_aborted = False  # since it woke up

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
        model=0,
    ) -> Self:
        """Starts a server, which dies with this thread. Then `await ready()`. UserError: port taken."""
        engine = cls(role, rank, f"http://{config.host}:{port}", key, model)
        server.check_port(config.host, port, engine.name)
        engine._silence_s, engine._move_s = config.engine_silence_s, config.stalled_s
        engine._tp, engine._shapes = (
            vars(config)[f"{role}_tp"],
            hf_directory.checkpoint_shapes(model_dir),
        )
        flags = [*server.server_flags(role, rank, port, model_dir, config), *cls.flags]
        command = [sys.executable, "-m", cls.module, *flags]
        environment = server.image_environment(role, model_dir)
        engine._process = server.ServerProcess(command, key, log, config.device, environment)
        engine._process.start()
        return engine

    async def ready(self, deadline_s: float) -> None:
        """Waits until the server generates. UserError with the end of its log if it died or was too slow."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + deadline_s
        while not await self.is_healthy(self._silence_s):
            if self.exit_status():
                raise UserError(f"the {self.name} stopped while starting; {self.log_tail()}")
            if clock() > deadline:
                raise UserError(
                    f"the {self.name} wasn't ready within {deadline_s:g} s; {self.log_tail()}"
                )
            await asyncio.sleep(LOOK_S)
        if (await self._call("GET", "/model_info"))["served_model_name"] != str(os.getpid()):
            raise UserError(
                f"the {self.name} found another server at {self.url}: choose another --port"
            )
        info = await self._call("GET", "/server_info")
        full_length = max(1, info["max_total_num_tokens"] // info["context_length"])
        self.capacity = min(info["max_running_requests"], full_length)
        try:
            await asyncio.wait_for(self._warm_up(), deadline - clock())
        except (TimeoutError, EngineLost) as error:
            failed = f"didn't answer a first request within {deadline_s:g} s"
            if isinstance(error, EngineLost):
                failed = f"{error} while starting"
            raise UserError(f"the {self.name} {failed}; {self.log_tail()}") from None
        # else each sleep collects over all of SGLang's imports: 0.7 s
        await self._call("POST", "/freeze_gc")

    async def _warm_up(self) -> None:
        """A greedy answer beside a sampled one: with CUDA kernels for both are compiled now, for minutes.

        Later such a silence would count as a hang.
        """
        kinds = [
            Sampling(temperature, WARM_UP_TOKENS, ignore_eos=True) for temperature in (0.0, 1.0)
        ]
        requests = [Request([0] * 4, sampling, WARM_UP_TOKENS, seed=0) for sampling in kinds]
        async for _ in self.generate(requests):
            pass

    def exit_status(self) -> str:
        """How its process ended; empty while it runs."""
        return self._process.exit_status()

    async def until_down(self) -> str:
        """Waits until the server, which is awake, is dead or hangs; says which.

        It hangs if no stream brings anything and /health, asked after silence alone, doesn't say yes: SGLang
        holds such a request for a second beside others, and pausing would wait as long.
        """
        clock, silent_s, patience_s = asyncio.get_running_loop().time, 0.0, self._silence_s / 4
        while silent_s < self._silence_s:
            if status := self.exit_status():
                return f"died ({status})"
            events, start = self._events, clock()
            await asyncio.sleep(LOOK_S)
            is_alive = silent_s >= patience_s and await self.is_healthy(patience_s)
            # at most: this process may have been stopped, and couldn't listen
            waited_s = min(clock() - start, LOOK_S + patience_s)
            silent_s = 0.0 if is_alive or self._events != events else silent_s + waited_s
        return f"gave no sign of life for {self._silence_s:g} s"

    async def ready_asleep(self, deadline_s: float) -> None:
        """`ready`, then its first sleep, which pins the memory of all weights: both within the deadline."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + deadline_s
        await self.ready(deadline_s)
        await self.sleep(deadline - clock())

    async def restart(self, deadline_s: float) -> None:
        """A new server for a killed one: asleep, with the directory's weights. Raises like `ready_asleep`."""
        self._process.start()
        await self.ready_asleep(deadline_s)

    async def kill(self) -> None:
        """Ends the server and all of its processes; its port is free then. Requests that it owed break."""
        await self._process.kill()

    async def close(self) -> None:
        """Uses the handle no more; ends the server if it is ours."""
        if self._session:
            await self._session.close()
        if self._process:
            await self.kill()
            self._process.folder.cleanup()

    def log_tail(self) -> str:
        """Where its log is, and its last lines."""
        return self._process.log_tail()

    def log_end(self) -> str:
        """Where its log is, and its last line, in one."""
        where, *lines = self.log_tail().splitlines()
        return f"{where} {lines[-1]}" if lines else where

    async def sleep(self, deadline_s: float | None = None) -> None:
        """Hands the memory back. Answers still running are aborted; they come back with finish "abort"."""
        if self._has_aborted:
            # until an aborted request is out, or pausing would take a second
            await asyncio.sleep(0.1)
        self._has_aborted = False
        # in other modes the idle scheduler spins
        await self._call("POST", "/pause_generation", mode="abort")
        await self._call("POST", "/flush_cache?timeout=30")
        await self._move("/release_memory_occupation", deadline_s, tags=["kv_cache", "weights"])

    async def wake_weights(self) -> None:
        """Room for the weights. A judge's are as they were, a rollout engine's are to be loaded."""
        await self._move("/resume_memory_occupation", tags=["weights"])

    async def wake_kv_cache(self) -> None:
        """Room for the KV cache, once the actor is out; requests are welcome again."""
        await self._move("/resume_memory_occupation", tags=["kv_cache"])
        await self._call("POST", "/continue_generation")

    async def load_weights(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replaces all weights, under Hugging Face names. UserError: one is unknown or missing."""
        missing = set(self._shapes)
        await self._push(self._checked(named_weights, missing), weight_version=str(version))
        if missing := missing - {"lm_head.weight"}:  # tied to the embedding
            raise UserError(f"the {self.name} was pushed no {sorted(missing)}")
        served = (await self._call("GET", "/model_info"))["weight_version"]
        assert served == str(version), (
            f"the {self.name} serves weights {served} after a push of {version}"
        )

    def _checked(self, named_weights: Iterable, missing: set[str]) -> Iterator[tuple[str, Tensor]]:
        """Passes tensors on, crossing them off: SGLang skips an unknown name and dies of a wrong shape."""
        for name, tensor in named_weights:
            shape, own = list(tensor.shape), self._shapes.get(name)
            if shape != own:
                raise UserError(
                    f"the {self.name} cannot load {name} of shape {shape}: its model has {own}"
                )
            missing.discard(name)
            yield name, tensor

    async def _push(self, named_weights: Iterable[tuple[str, Tensor]], **body: Any) -> None:
        body |= {"load_format": "flattened_bucket", "flush_cache": False}
        await self._move("/begin_weight_update")
        try:
            for bucket in server.buckets(named_weights):
                body["serialized_named_tensors"] = server.serialize_bucket(bucket, self._tp)
                await self._move("/update_weights_from_tensor", **body)
        finally:
            await self._move("/end_weight_update")
        await self._call("POST", "/flush_cache?timeout=30")  # once, not in each bucket

    async def generate(self, requests: list[Request]) -> AsyncIterator[Answer]:
        """Asks for answers in one go, so that they share the KV cache of what their prompts have in common.

        Yields an Answer of new tokens alone as they come, STREAM_INTERVAL at a time: `index` is its request,
        `finish` empty but at the end. EngineLost if the connection breaks, UserError if the server refuses.
        """
        clock = asyncio.get_running_loop().time
        sent, written, first_tokens, finished = clock(), Counter(), {}, 0
        params = [
            asdict(r.sampling) | {"max_new_tokens": r.limit, "sampling_seed": r.seed}
            for r in requests
        ]
        how = {"sampling_params": params, "return_logprob": True, "stream": True}
        async with self._open("POST", "/generate", prompts_of(requests) | how) as response:
            async for event in server.server_sent_events(response):
                self._events += 1
                if "error" in event:
                    raise UserError(f"the {self.name} refused: {event['error']['message']}")
                part = read_part(event, written[event["index"]])
                written[part.index] += len(part.tokens)
                finished += bool(part.finish)
                first_token = first_tokens.setdefault(part.index, clock())
                yield replace(part, sent=sent, first_token=first_token, end=clock(), rank=self.rank)
        assert finished == len(requests), f"the {self.name} ended its reply before its answers"

    async def abort(self) -> None:
        """Aborts every answer that the server writes, whoever asked; they come back with finish "abort"."""
        self._has_aborted = True
        await self._call("POST", "/abort_request", abort_all=True)

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, body: dict, deadline_s: float | None = None, also: int = 200
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A reply. EngineLost if none comes or it breaks off, UserError: neither 200 nor `also`."""
        if self._session is None:
            # SGLang drops idle connections after 5 s: ours must go first, or a request meets a closing one
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
            headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
            self._session = aiohttp.ClientSession(self.url, connector=connector, headers=headers)
        sent = server.in_pieces(body) if method == "POST" else None
        how = {"timeout": aiohttp.ClientTimeout(total=deadline_s), "data": sent}
        try:
            async with self._session.request(method, path, **how) as response:
                if response.status not in (200, also):  # why not is in the text
                    raise UserError(
                        f"the {self.name} refused {path}: {(await response.text())[:500]}"
                    )
                yield response
        except (TimeoutError, aiohttp.ClientError) as error:
            raise EngineLost(f"didn't answer {path}: {error!r}") from error

    async def is_healthy(self, deadline_s: float) -> bool:
        """Whether it takes another step, or if it has nothing to do generates one token."""
        try:
            async with self._open("GET", "/health", {}, max(HEALTH_S, deadline_s)):
                return True
        except (EngineLost, UserError):
            return False

    async def _call(self, method: str, path: str, **body: Any) -> Any:
        async with self._open(method, path, body, self._silence_s) as response:
            return await response.json() if response.content_type == "application/json" else None

    async def _move(self, path: str, deadline_s: float | None = None, **body: Any) -> None:
        async with self._open("POST", path, body, deadline_s or self._move_s):
            pass


def prompts_of(requests: list[Request]) -> dict[str, Any]:
    """What a server reads: one token for each image, and the images. One that all share is sent once."""
    body: dict[str, Any] = {
        "input_ids": [collapse(request.prompt, request.images) for request in requests]
    }
    if any(request.images for request in requests):
        each = [list(request.images) or [None] for request in requests]
        one = len(each[0]) == 1 and all(found == each[0] for found in each)
        body["image_data"] = each[0][0] if one else each
    return body


def read_part(event: dict, written: int) -> Answer:
    """The new tokens in an event of the stream of an answer of which `written` tokens have come."""
    info, total = event["meta_info"], event["meta_info"]["completion_tokens"]
    # (logprob, token, None); if it was aborted in the queue, all so far
    rows = info["output_token_logprobs"]
    rows = rows[len(rows) - (total - written) :]
    # which weights wrote what is said at the end; until then it was the present ones, for they change asleep
    spans = info.get("weight_versions") or [
        {"version": info["weight_version"], "start": 0, "end": total}
    ]
    versions = [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])][
        written:
    ]
    finish = info["finish_reason"]["type"] if info["finish_reason"] else ""
    # SGLang didn't look at the last token: it may be the answer's end, and comes again
    if finish == "abort":
        rows, versions = rows[:-1], versions[:-1]
    tokens, logprobs = [token for _, token, _ in rows], [logprob for logprob, _, _ in rows]
    return Answer(event["index"], tokens, logprobs, finish, versions, info.get("cached_tokens", 0))
