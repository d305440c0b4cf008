"""Rollout: the `Sample` record and the SGLang engine that fills it.

An `Engine` is a handle on one real SGLang server. The rank that launches it owns the server's process; any controller may
use a handle over HTTP. Tokens in, tokens out: the server never sees text.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from engines import orphans, server
from engines.server import EngineLost

TICK_S = 0.5  # an owner looks so often whether its server has died
WRITTEN = ("stop", "length")  # how a whole answer ends; one that ends in "abort" may be continued


@dataclass(frozen=True)
class Sampling:
    """How to sample an answer. Logprobs always come back: under the temperature, before top_p; unscaled when greedy."""

    temperature: float  # 0 is greedy
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own EOS; the stop token is part of the answer
    top_p: float = 1.0
    ignore_eos: bool = False  # write max_new_tokens whatever comes: for measurements

    def room(self, sample) -> int:
        """Tokens that may still be added to the response of `sample`."""
        return self.max_new_tokens - len(sample.response)


def seed_of(*what: int | str) -> int:
    """The seed of an answer: 63 bits that follow from `what` names it, and from nothing else (pure)."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8]) >> 1


@dataclass(frozen=True)
class Answer:
    """What came back for one prompt of `Engine.generate`: the tokens that it added. Times are the event loop's, in seconds."""

    index: int  # which of the prompts
    tokens: list[int]
    logprobs: list[float]
    finish: str
    versions: list[int]
    cached_tokens: int = 0  # of the prompt, found in the engine's KV cache
    sent: float = 0.0
    first_token: float = 0.0  # when it left the queue and its first token was there
    end: float = 0.0
    score: float | None = None  # instead of tokens, from a scalar reward model: see scoring.py


class Engine:
    """A handle on one SGLang server.

    role, rank: whose engine it is and where it runs, for spans and messages ("rollout", 3); the lead rank, if it spans several.
    capacity: the most answers that the server decodes at once; more of them queue inside it.
    model: which of its role's models it serves (several judges), 0 of one.
    key: what every request must show.
    outstanding: tokens that the answers asked for through this handle may still come to, prompts included; requests are routed by it.
    awake: whether the server may be asked; `sleep` and `wake` set it here, and whoever holds another handle sets it there.
    up: whether it answers, as far as known here: its owner tells the other controllers (see watch.py).
    on_request: called with (this engine, tokens of the prompt, answer) for every answer that finishes.
    """

    flags: tuple[str, ...] = ()  # of the server, besides those of every role

    def __init__(self, role: str, rank: int, url: str, capacity: int, model: int = 0, key: str = ""):
        self.role, self.rank, self.url, self.capacity, self.model, self.key = role, rank, url, capacity, model, key
        self.name = f"{role} engine of rank {rank}"
        self.outstanding = 0
        self.awake = self.up = True
        self.on_request: Callable[[Engine, int, Answer], None] | None = None
        self._process: subprocess.Popen | None = None
        self._command: list[str] = []
        self._probe_s = 30.0  # without a sign of life, it hangs; also the deadline of every call but `generate`
        self._events = 0  # of all streams: a busy server's signs of life
        self._log_path, self._private = Path(os.devnull), ""  # a folder of the server's that nobody else may read
        self._shapes: dict[str, list[int]] = {}
        self._tp, self._session = 1, None
        self._aborted = False  # since it woke up

    # ---- the server's life -------------------------------------------------------------------------------------------

    @classmethod
    def launch(cls, role: str, rank: int, port: int, model_dir: str, config, log_path: str, model: int = 0, key: str = "") -> Engine:
        """Starts a server on this machine and returns at once; `await ready()` before use. Notes its process beside the log.

        The server refuses requests without `key`, by default a new one. It dies with the thread that calls this, even if that is killed
        hard. Raises ValueError if the port is taken.
        """
        with socket.socket() as probe:
            if probe.connect_ex((config.host, port)) == 0:
                raise ValueError(f"port {port}, wanted by the {role} engine of rank {rank}, is in use: choose another --port")
        engine = cls(role, rank, f"http://{config.host}:{port}", config.max_running_requests, model, key or secrets.token_hex(32))
        engine._tp = server.ranks_of_an_engine(role, config)
        engine._log_path = Path(log_path)
        engine._shapes = server.checkpoint_shapes(model_dir)
        engine._log_path.parent.mkdir(parents=True, exist_ok=True)
        engine._private = tempfile.mkdtemp(prefix="nanoyatt-")
        engine._log_path.write_bytes(b"")
        engine._probe_s = config.engine_probe_s
        engine._command = [sys.executable, "-m", "cpu.sglang", *server.server_flags(role, rank, port, model_dir, config), *cls.flags]
        engine._start()
        return engine

    def _start(self):
        with self._log_path.open("ab") as log:  # what the server before this one said stays
            # Its own process group, so that `close` reaches the scheduler and the detokenizer too.
            self._process = subprocess.Popen(
                self._command, cwd=Path(__file__).parent.parent, env=server.server_environment(self.key, self._private),
                stdout=log, stderr=log, start_new_session=True,
            )
        orphans.note(self._log_path.with_suffix(".pid"), self._process.pid)

    async def ready(self, deadline_s: float = 300.0):
        """Waits until the server generates. Raises ValueError with the end of its log if it died or was too slow."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + deadline_s
        while not await self._is_healthy():
            if self._process is not None and self._process.poll() is not None:
                raise ValueError(f"the {self.name} stopped while starting{self.log_tail()}")
            if clock() > deadline:
                raise ValueError(f"the {self.name} was not ready within {deadline_s:.0f} s{self.log_tail()}")
            await asyncio.sleep(0.2)
        if self._process is not None and (await self._get("/model_info"))["served_model_name"] != str(os.getpid()):
            raise ValueError(f"the {self.name} found another server at {self.url}: choose another --port")
        await self._post("/freeze_gc")  # every sleep collects garbage: else 0.7 s each time, over all that SGLang has imported

    async def until_down(self) -> str:
        """Waits until the server is dead or hangs, and says which; for its owner, while it is awake.

        It hangs if for so long neither a stream brought an event nor /health said yes; a busy server says yes with every batch.
        """
        silent_s, events, probe = 0.0, self._events, None
        try:
            while silent_s <= self._probe_s:
                if self._process is None:
                    return "was ended"
                if (status := self._process.poll()) is not None:
                    return f"died ({f'signal {-status}' if status < 0 else f'exit status {status}'})"
                if self._events != events or (probe is not None and probe.done() and probe.result()):
                    silent_s, events = 0.0, self._events
                if probe is None or probe.done():
                    probe = asyncio.create_task(self._is_healthy(after_s=self._probe_s / 6))
                await asyncio.sleep(TICK_S)
                silent_s += TICK_S  # not by the clock: while this process was stopped or busy it couldn't listen
            return f"gave no sign of life for {self._probe_s:g} s"
        finally:
            if probe is not None:
                probe.cancel()

    async def restart(self, deadline_s: float):
        """A new server in the place of one that was killed: awake, with the weights of the model directory. Raises like `ready`."""
        assert self._process is None, f"the {self.name} still runs"
        self._start()
        await self.ready(deadline_s)
        self.awake = True

    async def close(self):
        """Ends the server and all of its processes, and waits until the port is free."""
        if self._session is not None:
            await self._session.close()
        await self.kill()
        shutil.rmtree(self._private, ignore_errors=True)

    async def kill(self):
        """Ends the server and all of its processes. Requests that it owed break."""
        if self._process is None:
            return
        process, self._process, self.awake = self._process, None, False
        process.kill()  # it holds nothing worth saving, and its children die with it; SIGTERM would take 5 s
        process.wait()
        try:
            await asyncio.sleep(0.5)  # multiprocessing's tracker, the last of the group, removes the semaphores and ends too
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        self._log_path.with_suffix(".pid").unlink(missing_ok=True)

    def log_tail(self) -> str:
        """The end of the server's log, to be added to a message."""
        lines = self._log_path.read_text(errors="replace").splitlines()[-15:]
        return "\n".join((f"; the end of {self._log_path}:", *lines))

    # ---- memory ------------------------------------------------------------------------------------------------------

    async def sleep(self):
        """Hands the memory back. Answers still running are aborted; they come back with finish "abort"."""
        assert self.awake, f"the {self.name} sleeps already"
        self.awake = False
        if self._aborted:
            await asyncio.sleep(0.1)  # while an aborted request is still on its way out, pausing would look again after a second
        self._aborted = False
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
            for bucket in server.buckets(self._checked(named_tensors, names)):
                await self._post(
                    "/update_weights_from_tensor", serialized_named_tensors=[server.serialize_bucket(bucket)] * self._tp,
                    load_format="flattened_bucket", flush_cache=True, weight_version=str(version),
                )
        finally:
            await self._post("/end_weight_update")
        missing = self._shapes.keys() - names - {"lm_head.weight"}  # tied to the embedding
        if missing:
            raise ValueError(f"the {self.name} was pushed no {sorted(missing)}")
        served = (await self._get("/model_info"))["weight_version"]
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

    async def generate(self, prompts: list[list[int]], sampling: Sampling, rooms=(), seeds=(), greedy=()) -> AsyncIterator[Answer]:
        """An answer to each prompt, in one request, so that they share the KV cache of what they have in common; yielded when finished.

        rooms: the most new tokens of each, default sampling.max_new_tokens. seeds: of each, 63 bits; with --deterministic, prompt and
        seed alone say what is written (without seeds, SGLang takes one for all). A token's noise is by its place: an answer that is
        cut off and continued comes out the same. greedy: which are, whatever `sampling` says. Survives two broken connections: what
        has been yielded is not asked again. Raises EngineLost when it breaks again, or is down; ValueError when it is refused.
        """
        assert self.awake, f"a request reached the {self.name} while it sleeps"
        rooms = rooms or [sampling.max_new_tokens] * len(prompts)
        each = zip(rooms, seeds or [None] * len(prompts), greedy or [False] * len(prompts), strict=True)
        rules = [(replace(sampling, temperature=0.0) if is_greedy else sampling, room, seed) for room, seed, is_greedy in each]
        owed = {index: len(prompt) + room for index, (prompt, room) in enumerate(zip(prompts, rooms, strict=True))}
        sent = asyncio.get_running_loop().time()
        self.outstanding += sum(owed.values())
        try:
            stream = partial(self._stream, prompts, rules)
            async for answer in server.retry_broken(lambda: stream(tuple(owed), sent), lambda: self.up):
                self.outstanding -= owed.pop(answer.index)
                if self.on_request is not None:
                    self.on_request(self, len(prompts[answer.index]), answer)
                yield answer
        finally:
            self.outstanding -= sum(owed.values())
        assert not owed, f"the {self.name} ended its reply without answers {list(owed)}"

    async def abort(self):
        """Aborts every answer that the server is writing, whoever asked; they come back with finish "abort"."""
        self._aborted = True
        await self._post("/abort_request", abort_all=True)

    async def _stream(self, prompts, rules, indices: tuple[int, ...], sent: float) -> AsyncIterator[Answer]:
        """One streamed request. By the server's stream interval, an answer sends two events: its first token, and its end."""
        if not indices:
            return  # the connection broke when all had come
        clock, first_tokens = asyncio.get_running_loop().time, {}
        params = [asdict(how) | {"max_new_tokens": room, "sampling_seed": seed} for how, room, seed in map(rules.__getitem__, indices)]
        body = dict(input_ids=[prompts[index] for index in indices], sampling_params=params, return_logprob=True, stream=True)
        async with self._http().post(self.url + "/generate", json=body) as response:
            await self._check(response, "/generate")
            async for event in server.server_sent_events(response):
                self._events += 1
                if "error" in event:
                    raise ValueError(f"the {self.name} refused: {event['error']['message']}")
                index = indices[event["index"]]
                first_tokens.setdefault(index, clock())
                if event["meta_info"]["finish_reason"] is not None:
                    yield read_answer(event, index, sent, first_tokens[index], clock())

    # ---- HTTP --------------------------------------------------------------------------------------------------------

    def _http(self):
        import aiohttp

        if self._session is None:
            # SGLang drops idle connections after 5 s: ours must go first, or a request meets a closing one.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
            headers = {"Authorization": f"Bearer {self.key}"}
            self._session = aiohttp.ClientSession(connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=None))
        return self._session

    async def _is_healthy(self, after_s: float = 0.0) -> bool:
        await asyncio.sleep(after_s)
        try:
            await self._get("/health")  # generates one token
        except (EngineLost, ValueError):
            return False
        return True

    async def _get(self, path: str):
        return await self._call(self._http().get, path)

    async def _post(self, path: str, **body):
        return await self._call(partial(self._http().post, json=body), path)

    async def _call(self, method, path: str):
        """The reply's JSON, if it has any. Raises EngineLost when none comes in time, ValueError when the server refuses."""
        import aiohttp

        try:
            async with method(self.url + path, timeout=aiohttp.ClientTimeout(total=self._probe_s)) as response:
                await self._check(response, path)
                return await response.json() if response.content_type == "application/json" else None
        except (TimeoutError, aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise EngineLost(f"didn't answer {path}: {error!r}") from error

    async def _check(self, response, path: str):
        """SGLang says with the status whether a call succeeded, and why not in the text."""
        if response.status != 200:
            raise ValueError(f"the {self.name} refused {path}: {(await response.text())[:500]}")


def read_answer(event: dict, index: int, sent: float, first_token: float, end: float) -> Answer:
    """The last event of an answer's stream; one that was aborted in the queue has no tokens."""
    info = event["meta_info"]
    finish, tokens = info["finish_reason"]["type"], event["output_ids"]
    if not tokens:
        return Answer(index, [], [], finish, [], 0, sent, first_token, end)
    versions = [int(span["version"]) for span in info["weight_versions"] for _ in range(span["start"], span["end"])]
    logprobs = [logprob for logprob, _, _ in info["output_token_logprobs"]]
    return Answer(index, tokens, logprobs, finish, versions, info["cached_tokens"], sent, first_token, end)
