"""The engine: the real SGLang server, one for the whole file, on a random model of the demo's shape."""

import asyncio
import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import extras
from config import Config
from cpu.invariance import attend, group_by_length
from cpu.sglang import murmur_hash32
from engines import server, wire
from engines.engine import Engine, EngineLost, Request, Sampling, read_part
from engines.pool import Pool
from engines.server import STREAM_INTERVAL
from extras import scalar
from runtime import shutdown
from runtime.errors import UserError
from runtime.timeline import Timeline
from tests import ROOT
from tests.support.fakes import VirtualClock, requests_of
from tests.support.launched import free_port
from tests.support.models import EOS, make_tiny_qwen3
from tests.support.patience import LIMIT_S
from tests.support.rounding import apart

ROOM = dict(max_model_len=1024, max_new_tokens=64, judge_max_new_tokens=64)
CONFIG = Config(max_running_requests=64, seed=1, **ROOM)
PROMPT = [5, 6, 7, 8, 9, 10, 11]
NEAR = apart(3 * 288)  # the longest sum in each of three layers


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return [make_tiny_qwen3(directory / str(seed), seed, kv_heads=2) for seed in (0, 1)]


def launch(model_dir, log, role="rollout", port=0, kind=Engine):
    return kind.launch(role, 0, port or free_port(), str(model_dir), CONFIG, Path(log), "a key")


@pytest.fixture(scope="module")
def shared_engine(run, models, tmp_path_factory):
    engine = launch(models[0], tmp_path_factory.mktemp("log") / "engine.log")
    try:
        run(engine.ready(LIMIT_S))
        engine.dirty = False  # True if a test has pushed other weights
        yield engine
    finally:
        run(engine.close())


@pytest.fixture
def engine(shared_engine, run, models):
    """Return the shared engine, idle, with the weights of models[0] as version 0."""
    if shared_engine.dirty:
        with contextlib.suppress(UserError):  # ignore a refused push, which ends a run
            run(shared_engine._call("POST", "/end_weight_update"))
        run(shared_engine.load_weights(hf_model(models[0]).named_parameters(), 0))
        shared_engine.dirty = False
    return shared_engine


def pool_of(*engines):
    world = SimpleNamespace(rank=0, size=1, index=0)
    pool = Pool(list(engines), world, Timeline(0, time.monotonic), CONFIG)
    pool._mark_awake(tuple(engine.rank for engine in pool.engines))
    return pool


def hf_model(directory):
    return AutoModelForCausalLM.from_pretrained(directory).eval()


def hf_logprobs(model, prompt, response, temperature=1.0):
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)[range(len(response)), response].tolist()


async def ask_for(engine, requests):
    """Return the finished answers in the order of the requests; check that nothing is outstanding."""
    pool = pool_of(engine)
    answers = [answer async for answer in pool.generate(requests)]
    assert not pool.status().outstanding
    return sorted(answers, key=lambda answer: answer.index)


async def ask(engine, prompts, sampling, **how):
    return await ask_for(engine, requests_of(prompts, sampling, **how))


async def collect(engine, prompt, n, sampling):
    return await ask(engine, [prompt] * n, sampling, seeds=list(range(n)))


async def flush(engine):
    await engine._call("POST", f"/flush_cache?timeout={LIMIT_S}")


def event_of(index, tokens, total, finish=None, **info):
    """Return an event of SGLang's incremental stream: the new tokens, and their total so far."""
    rows = [[-token / 100, token, None] for token in tokens]
    info = {"completion_tokens": total, "output_token_logprobs": rows, "weight_version": "4"} | info
    info["finish_reason"] = finish and {"type": finish}
    return {"index": index, "output_ids": tokens, "meta_info": info}


async def stream(engine, requests):
    return [part async for part in engine.generate(requests)]


def test_what_is_asked_and_what_comes(monkeypatch):
    """A request must have each prompt's limit and seed; parts hold only the new tokens and their facts.

    Events may arrive in pieces or two at once. An answer of a given length is complete at that length."""
    asked = []
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 4}]
    events = [event_of(0, [11], 1, cached_tokens=1), event_of(1, [21, 22], 2, "length")]
    events += [event_of(0, [12, 13], 3), event_of(0, [14], 4, "stop", weight_versions=spans)]
    events += [event_of(2, [31], 1, "length")]
    sent = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)

    async def pieces():
        for start in range(0, len(sent), 250):
            yield sent[start : start + 250]
        yield b"data: [DONE]\n\n"

    @contextlib.asynccontextmanager
    async def opened(method, path, body):
        asked.append(body)
        yield SimpleNamespace(content=SimpleNamespace(iter_any=pieces))

    engine = Engine("rollout", 0, "http://127.0.0.1:1", "a key")
    monkeypatch.setattr(engine, "_open", opened)
    exactly = Sampling(1.0, 1, ignore_eos=True)
    requests = [Request([5, 6], Sampling(1.0, 9), limit, limit) for limit in (9, 2)]
    requests.append(Request([5, 6], exactly, 1, 3))
    parts = asyncio.run(stream(engine, requests))
    tokens = [(0, [11]), (1, [21, 22]), (0, [12, 13]), (0, [14]), (2, [31])]
    assert [(part.index, part.tokens) for part in parts] == tokens
    assert [part.finish for part in parts] == ["", "length", "", "stop", "stop"]
    assert [part.versions for part in parts] == [[4], [4, 4], [4, 4], [4], [4]]
    assert parts[2].logprobs == [-0.12, -0.13] and parts[0].cached_tokens == 1
    first, last = parts[0], parts[3]
    assert first.sent == last.sent <= first.first_token == last.first_token <= last.end
    [body] = asked
    assert body["input_ids"] == [[5, 6]] * 3 and body["stream"] and body["return_logprob"]
    rules = [(rule["max_new_tokens"], rule["sampling_seed"]) for rule in body["sampling_params"]]
    assert rules == [(9, 9), (2, 2), (1, 3)]
    assert [rule["ignore_eos"] for rule in body["sampling_params"]] == [False, False, True]


ABORTED = {  # when -> the event, tokens that came before, new tokens
    "in the queue": (event_of(0, [], 0, "abort"), 0, []),
    "in it again: SGLang repeats": (event_of(0, [1, 2, 3], 3, "abort", output_ids=[3]), 3, []),
    "while it was written": (event_of(0, [13, 14], 4, "abort"), 2, [13]),
}


@pytest.mark.parametrize("event, written, tokens", ABORTED.values(), ids=ABORTED)
def test_an_aborted_answer(event, written, tokens):
    """Its last token must be generated again, because SGLang didn't check whether that was the end."""
    part = read_part(event, written)
    assert (part.tokens, part.finish) == (tokens, "abort")
    assert part.logprobs == [-token / 100 for token in tokens]
    assert part.versions == [4] * len(tokens)


def test_what_sglang_says_of_any_end_is_not_quoted(tmp_path):
    """Only the scheduler's own error, or the signal that ended one, may be quoted."""
    log = tmp_path / "rollout-0.log"
    process = server.ServerProcess([], "a key", log, "cpu", {})
    error = "[20:30:45] Scheduler hit an exception: Traceback (most recent call last):\n"
    error += "  File ...\nRuntimeError: out of memory\n\n"
    crash = "[20:30:46] Subprocess scheduler_0 (pid=3683) crashed with exit code {}. ...\n"
    farewell = "[20:30:46] SIGQUIT received. signum=None. It usually means one child failed.\n"
    farewell += "[20:30:51] No live scheduler processes found; skipping ...\n"
    ends = {error + crash.format(1): "RuntimeError: out of memory"}
    ends |= {crash.format(-9): crash.format(-9).strip(), "": "nothing"}
    for said, quoted in ends.items():
        log.write_text(f"{server.LOG_START}, 2026-11-26 20:30:23\n{said}{farewell}")
        assert process.log_end() == f"the end of {log}: {quoted}"


def test_a_port_that_was_taken_after_the_look_is_named(monkeypatch):
    """Two runs that start at once both find it free; the second server then ends."""
    engine = Engine("rollout", 0, "http://127.0.0.1:1", "a key")
    log = "error while attempting to bind on address ('127.0.0.1', 1): address already in use"
    engine._process = SimpleNamespace(exit_status=lambda: "exit status 1", log_tail=lambda: log)
    monkeypatch.setattr(Engine, "_is_ready", AsyncMock(return_value=False))
    with pytest.raises(ValueError, match=r"^port 1 is in use: choose another --port$"):
        asyncio.run(engine.ready(LIMIT_S))


class Compiling(Engine):
    """A server that is up, but whose first answers come late because kernels are compiled."""

    def __init__(self, after_s, error=None):
        super().__init__("rollout", 0, "http://127.0.0.1:1", "a key")
        self.after_s, self.error, self.requests, self.calls = after_s, error, [], []
        says = dict(exit_status=lambda: "", log_tail=lambda: "the end of its log", device="cuda")
        self._process = SimpleNamespace(start=lambda: None, **says)

    async def _is_ready(self):
        return True

    async def _call(self, method, path, deadline_s=None, **body):
        self.calls.append((path, deadline_s))
        facts = dict(max_total_num_tokens=1000, context_length=100, max_running_requests=8)
        return facts | {"served_model_name": str(os.getpid())}

    async def generate(self, requests):
        self.requests += requests
        await asyncio.sleep(self.after_s)
        if self.error:
            raise self.error
        yield None


def test_a_first_answer_has_the_time_of_a_start():
    """This holds for answers of both kinds. The first sleep has what is left of that time."""
    engine, clock = Compiling(after_s=60), VirtualClock()
    clock.run_until_complete(engine.ready_asleep(300.0))
    assert engine.capacity == 8 and ("/freeze_gc", None) in engine.calls
    assert engine.calls[-1] == ("/release_memory_occupation", pytest.approx(240))
    assert sorted(request.sampling.temperature for request in engine.requests) == [0.0, 1.0]
    assert all(request.seed is not None for request in engine.requests)


BROKEN = EngineLost("the engine broke off")
LATE = [(400, None, "the rollout .* a first request within 300 s; the end of its log")]
LATE += [(7, BROKEN, "while it started, the engine broke off")]


@pytest.mark.parametrize("after_s,error,line", LATE)
def test_a_first_answer_that_does_not_come_ends_the_run(after_s, error, line):
    engine, clock = Compiling(after_s, error), VirtualClock()
    with pytest.raises(UserError, match=f"^{line}$"):
        clock.run_until_complete(engine.ready(300.0))
    assert clock.time() == pytest.approx(min(after_s, 300))


def test_a_log_keeps_what_earlier_servers_said(tmp_path):
    """It must also keep an earlier run's lines; a message quotes only the newest server's."""
    log = tmp_path / "logs" / "rollout-0.log"

    for word in ("first", "second"):
        process = server.ServerProcess(["py_compile", word], "a key", log, "cuda", {})
        process.start()
        process._process.wait()
    [line] = process.log_tail().splitlines()[1:]
    assert "'second'" in line and "'first'" in log.read_text()
    assert log.read_text().count("---- a server starts, 20") == 2


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("decode", [True, False])
def test_batched_attention_equals_one_request_at_a_time(request, kv_heads, decode):
    """It must match the formula, and to the last bit a batch of one, whatever its neighbors."""
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(1)  # as in the server: threads split a sum elsewhere
    torch.manual_seed(0)
    prefix = torch.tensor([0, 5, 31, 32, 70, 12, 33, 40, 46, 41, 36, 34])
    new = torch.ones_like(prefix) if decode else torch.tensor([3, 1, 40, 32, 7, 33] * 2)
    lengths, slots = prefix + new, torch.randperm(700)
    table = torch.zeros(14, 120, dtype=torch.int32)
    rows = torch.randperm(14)[:12]
    for row, start, length in zip(rows, lengths.cumsum(0) - lengths, lengths, strict=True):
        table[row, :length] = slots[start : start + length]
    k, v = torch.randn(700, kv_heads, 24), torch.randn(700, kv_heads, 24)
    queries = torch.randn(int(new.sum()), 4, 24).split(new.tolist())

    def attention(some):
        groups = group_by_length(table, rows[some], lengths[some], new[some])
        output = attend(torch.cat(queries[some]), k, v, groups, 0.2, kv_heads != 4)
        return output.split(new[some].tolist()), groups

    outputs, groups = attention(slice(None))
    if decode:  # each is padded to its own length, not to the longest
        assert {mask.shape[-1] for _, _, mask in groups} == {16, 32, 48, 80}
    for i, (row, length, query) in enumerate(zip(rows, lengths, queries, strict=True)):
        own = table[row, :length].long()
        keys, values = (each[own].repeat_interleave(4 // kv_heads, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", query, keys) * 0.2
        hidden = torch.arange(length)[None, :] > torch.arange(length - len(query), length)[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        torch.testing.assert_close(outputs[i], torch.einsum("hqk,khd->qhd", weights, values))
        assert torch.equal(outputs[i], attention(slice(i, i + 1))[0][0])


def test_murmur_hash_equals_the_reference():
    """MurmurHash3_x86_32 hashes the 16 bytes of seed, place and column."""
    seeds, places = torch.tensor([1, 2**40 + 12345]), torch.tensor([0, 977])
    expected = [[2451737883, 3080619736, 1663027248], [4085201047, 2615633886, 1752657305]]
    assert murmur_hash32(seeds, places, torch.arange(3)).tolist() == expected


def test_ragged_batch_equals_transformers(engine, run, models):
    """40 concurrent requests of 1 to 118 prompt tokens must match: batched attention against one by one."""
    prompts = [[2 + (7 * i + j) % 60 for j in range(1 + 3 * i)] for i in range(40)]
    sampling = [Sampling((1.0, 0.7)[i % 2], 1 + 13 * i % 60) for i in range(40)]

    async def ask_all():
        each = zip(prompts, [2] * 40, sampling, strict=True)
        return await asyncio.gather(*(collect(engine, *asked) for asked in each))

    model = hf_model(models[0])
    for prompt, rule, answers in zip(prompts, sampling, run(ask_all()), strict=True):
        for answer in answers:
            expected = hf_logprobs(model, prompt, answer.tokens, rule.temperature)
            assert answer.logprobs == pytest.approx(expected, rel=0, abs=1e-4)
            assert answer.versions == [0] * len(answer.tokens)
            assert answer.finish == ("stop" if answer.tokens[-1] == EOS else "length")


def test_a_greedy_answer_ends_with_its_stop_token(engine, run, models):
    [full] = run(collect(engine, PROMPT, 1, Sampling(0.0, 30)))
    how = dict(max_new_tokens=30, do_sample=False)
    [expected] = hf_model(models[0]).generate(torch.tensor([PROMPT]), **how).tolist()
    assert full.tokens == expected[len(PROMPT) :]
    stop = full.tokens[len(full.tokens) // 2]
    [answer] = run(collect(engine, PROMPT, 1, Sampling(0.0, 30, stop_token_ids=(stop,))))
    assert answer.finish == "stop"
    assert answer.tokens == full.tokens[: full.tokens.index(stop) + 1]


def test_what_is_aborted_goes_on_as_if_it_had_stayed(engine, run):
    """80 requests (64 decode at once) are cut off repeatedly, with or without the cache, some at the end."""
    prompts = [tokens_of(i // 16, 4 + 2 * i) for i in range(80)]
    requests, turns = requests_of(prompts, Sampling(1.0, 200), seeds=range(80)), []

    async def write_in_turns():
        answers, left = {}, dict(enumerate(requests))
        while left:
            indices, ends = list(left), []
            turns.append(ends)
            async for part in engine.generate(list(left.values())):
                if not ends:
                    await asyncio.sleep(0.05 * (len(turns) - 1))
                    await engine.abort()
                index = indices[part.index]
                answers[index] = answers[index].extended(part) if index in answers else part
                rest = dict(prompt=left[index].prompt + part.tokens)
                rest |= dict(limit=left[index].limit - len(part.tokens))
                left[index] = left[index]._replace(**rest)
                ends.append(part.finish)
                if part.finish in ("stop", "length"):
                    del left[index]
            if len(turns) % 2:
                await flush(engine)
        return [answers[index] for index in range(80)]

    stayed, written = run(ask_for(engine, requests)), run(write_in_turns())
    assert len(turns) > 1 and "abort" in turns[0]
    for one, other in zip(stayed, written, strict=True):
        assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
        assert one.finish == other.finish and one.versions == other.versions


def test_one_answer_is_aborted_by_its_name(engine, run):
    prompts = [tokens_of(i, 5) for i in range(80)]
    sampling = Sampling(1.0, 100, ignore_eos=True)
    requests = requests_of(prompts, sampling, seeds=range(80))
    requests = [each._replace(name=f"request {k:02}") for k, each in enumerate(requests)]

    async def work():
        finishes = {}
        async for part in engine.generate(requests):
            if not finishes:
                await asyncio.gather(*(engine.abort_request(f"request {k:02}") for k in (3, 79)))
            finishes[part.index] = part.finish
        return finishes

    finishes = run(work())
    assert [k for k in sorted(finishes) if finishes[k] == "abort"] == [3, 79]
    assert set(finishes.values()) == {"abort", "stop"}


def test_answers_of_one_request_come_when_they_are_done(engine, run):
    short, long = requests_of([PROMPT] * 2, Sampling(1.0, 30, ignore_eos=True), seeds=[1, 2])
    parts = run(stream(engine, [long._replace(limit=2 * STREAM_INTERVAL + 40), short]))
    ends = [(part.index, part.finish) for part in parts if part.finish]
    assert ends == [(1, "stop"), (0, "stop")] and sum(part.index == 0 for part in parts) > 2
    for index, limit in enumerate((2 * STREAM_INTERVAL + 40, 30)):
        assert sum(len(part.tokens) for part in parts if part.index == index) == limit


def test_a_refused_request_says_why(engine, run):
    with pytest.raises(ValueError, match="rollout engine of rank 0 refused"):
        run(collect(engine, [5] * 2000, 1, Sampling(1.0, 10)))
    with pytest.raises(ValueError, match=r"no weight-update session is open"):
        run(engine._call("POST", "/end_weight_update"))


def test_a_context_is_used_to_its_end(engine, run, models):
    """What SGLang has no room for, it ends as if it had been aborted, or cuts off: both must be errors."""
    most = server.context_length(models[0], CONFIG)
    one, many = (Sampling(1.0, limit, ignore_eos=True) for limit in (1, 64))
    for whole in (one, many):
        longest = [5] * (most - whole.max_new_tokens)
        [answer] = run(collect(engine, longest, 1, whole))
        assert len(answer.tokens) == whole.max_new_tokens and answer.finish == "stop"
    with pytest.raises(UserError, match=r"rank 0 refused: .* tokens\) exceeds the maximum"):
        run(collect(engine, [5] * most, 1, one))
    with pytest.raises(UserError, match="rank 0 cut an answer off after 62 tokens, not 64"):
        run(collect(engine, [5] * (CONFIG.max_model_len - 64), 1, many))


# prompt tokens, tokens to generate, temperature: within MKL's unsplit sums, beyond, across their end
TARGETS = [(7, 60, 1.0), (30, 130, 0.7), (150, 120, 1.0), (400, 40, 1.0), (1, 20, 0.0)]


def tokens_of(seed, length):
    rng = random.Random(seed)
    return [rng.randrange(2, 64) for _ in range(length)]


async def ask_others(engine, count, seed):
    """Send random requests of every kind; a quarter of them begin like a target's prompt."""
    rng = random.Random(seed)

    async def one():
        begin = tokens_of(*[rng.choice(TARGETS)[0]] * 2) if rng.random() < 0.25 else []
        prompt = begin[: rng.randint(0, len(begin))] + tokens_of(rng.random(), rng.randint(1, 200))
        temperature, limit = rng.choice([0.0, 0.7, 1.0, 1.3]), rng.randint(1, 150)
        sampling = Sampling(temperature, limit, top_p=rng.choice([1.0, 1.0, 0.9]))
        await asyncio.sleep(0.3 * rng.random())
        return await ask(engine, [prompt], sampling, seeds=[rng.randrange(2**63)])

    await asyncio.gather(*(one() for _ in range(count)))


def test_an_answer_does_not_depend_on_its_neighbours(engine, run):
    """Each by itself without the cache must match all of them among others, greedy ones too, with hits."""

    async def ask_target(length, tokens, temperature):
        sampling = Sampling(temperature, tokens, ignore_eos=True)
        [answer] = await ask(engine, [tokens_of(length, length)], sampling, seeds=[1000 + length])
        return answer.tokens, answer.logprobs

    async def ask_all(others):
        asked = [ask_target(*target) for target in TARGETS]
        return (await asyncio.gather(*asked, ask_others(engine, others, others)))[:-1]

    alone = []
    for target in TARGETS:
        run(flush(engine))
        alone.append(run(ask_target(*target)))
        assert len(alone[-1][0]) == target[1]
    run(flush(engine))
    for others in (1, 40):
        assert run(ask_all(others)) == alone


def test_what_a_window_lacks_is_written_step_by_step(engine, run):
    """Such requests have biased logits or lists of log-probabilities; all others must stay the same."""

    async def ask_raw(**asked):
        params = dict(temperature=1.0, max_new_tokens=40, sampling_seed=5, ignore_eos=True)
        params |= asked.pop("sampling_params", {})
        body = dict(input_ids=PROMPT, sampling_params=params, return_logprob=True) | asked
        reply = await engine._call("POST", "/generate", **body)
        return reply["output_ids"], reply["meta_info"]

    async def ask_all():
        biased = ask_raw(sampling_params={"logit_bias": {"9": 1000.0}})
        penalized = ask_raw(sampling_params={"frequency_penalty": 2.0})
        ruled = await asyncio.gather(biased, penalized, ask_raw())
        return ruled + await asyncio.gather(ask_raw(top_logprobs_num=2), ask_raw())

    plain, info = run(ask_raw())
    (biased, _), (penalized, _), (beside, _), (listed, lists), (beside_lists, _) = run(ask_all())
    assert biased == [9] * 40 and penalized != plain
    assert listed == beside == beside_lists == plain
    assert lists["output_token_logprobs"] == info["output_token_logprobs"]
    pairs = zip(info["output_token_logprobs"], lists["output_top_logprobs"], strict=True)
    assert all(len(top) == 2 and top[0][0] > logprob - 1e-5 for (logprob, *_), top in pairs)


def test_without_a_compiler_the_tokens_are_the_same(engine, run, models, tmp_path, monkeypatch):
    """Torch's log-probabilities differ in their last bits, but must be the same with any neighbors."""
    asked = [tokens_of(i, 5 + i) for i in range(16)]
    answers = run(ask(engine, asked, Sampling(1.0, 60), seeds=range(16)))
    monkeypatch.setenv("PATH", str(tmp_path))  # no lscpu either, which SGLang looks for
    other = launch(models[0], tmp_path / "engine.log")
    try:
        run(other.ready(LIMIT_S))
        plain_answers = run(ask(other, asked, Sampling(1.0, 60), seeds=range(16)))
        for one, plain in zip(answers, plain_answers, strict=True):
            assert one.tokens == plain.tokens
            assert one.logprobs == pytest.approx(plain.logprobs, rel=0, abs=NEAR)
            assert (one.logprobs != plain.logprobs) == ("fast CPU" in extras.EXTRAS)
        for some in (slice(3, 4), slice(0, 16, 3)):  # one request, and several
            again = run(ask(other, asked[some], Sampling(1.0, 60), seeds=range(16)[some]))
            expected = [(each.tokens, each.logprobs) for each in plain_answers[some]]
            assert [(each.tokens, each.logprobs) for each in again] == expected
    finally:
        run(other.close())


def test_another_seed_writes_another_answer(engine, run):
    """The prompt and the request are the same; seeds that differ only in their upper half must count too."""
    sampling, seeds = Sampling(1.0, 30, ignore_eos=True), [1, 2, 1, 1 + 2**62]
    answers = run(ask(engine, [PROMPT] * 4, sampling, seeds=seeds))
    one, other, same, upper = (answer.tokens for answer in answers)
    assert one == same and len({*map(tuple, (one, other, upper))}) == 3


def test_pushed_weights_are_served_under_their_version(engine, run, models, monkeypatch):
    engine.dirty = True
    monkeypatch.setattr(wire, "BUCKET_BYTES", 100_000)
    model = hf_model(models[1])
    assert len(list(wire.buckets(model.named_parameters()))) > 5
    run(engine.load_weights(model.named_parameters(), 8))
    [answer] = run(collect(engine, PROMPT, 1, Sampling(1.0, 30)))
    expected = hf_logprobs(model, PROMPT, answer.tokens)
    assert answer.logprobs == pytest.approx(expected, rel=0, abs=1e-4)
    assert answer.versions == [8] * len(answer.tokens)


@pytest.mark.parametrize("message", ["has None for", r"has \[.*\] for", "lacked"])
def test_a_wrong_push_is_refused(engine, run, models, message):
    engine.dirty = True
    (name, tensor), *others = hf_model(models[1]).named_parameters()
    pushed = {"has None for": [("nothing.weight", tensor)], "lacked": []}
    first = pushed.get(message, [(name, tensor[:1])])
    with pytest.raises(ValueError, match=message):
        run(engine.load_weights([*first, *others], 9))


def test_sleep_and_wake(engine, run, models, monkeypatch):
    """Running requests must be aborted; once the engine has its weights again, it answers."""
    calls, call = [], engine._call

    def noted(method, path, *deadline_s, **body):
        calls.append(" ".join([path, *body.get("tags", ())]))
        return call(method, path, *deadline_s, **body)

    async def ask_and_sleep():
        asked = asyncio.create_task(collect(engine, PROMPT, 8, Sampling(1.0, 900)))
        await asyncio.sleep(0.2)
        monkeypatch.setattr(engine, "_call", noted)
        monkeypatch.setattr(engine._process, "device", "cuda")
        await engine.sleep()
        assert len(await asked) == 8
        await engine.wake_weights()
        await engine.load_weights(hf_model(models[0]).named_parameters(), 0)
        await engine.wake_kv_cache()

    run(ask_and_sleep())
    [answer] = run(collect(engine, PROMPT, 1, Sampling(1.0, 3)))
    assert len(answer.tokens) == 3
    assert calls[2] == "/release_memory_occupation kv_cache weights"
    assert calls[3] == "/resume_memory_occupation weights"
    assert calls[5] == "/update_weights_from_tensor"
    assert calls[-2:] == ["/resume_memory_occupation kv_cache", "/continue_generation"]
    [again] = run(collect(engine, PROMPT, 1, Sampling(1.0, 30)))
    expected = hf_logprobs(hf_model(models[0]), PROMPT, again.tokens)
    assert again.logprobs == pytest.approx(expected, rel=0, abs=NEAR)


@pytest.mark.slow
def test_a_scalar_reward_models_scores_are_transformers(run, models, tmp_path):
    """They must be within 1e-4 of a padded batch, and the same to the last bit in any batch and after sleep.

    The head has no bias, and another save's shards next to its own aren't read."""
    torch.manual_seed(0)
    how = dict(num_labels=1, dtype=torch.float32, pad_token_id=0)
    oracle = AutoModelForSequenceClassification.from_pretrained(models[0], **how)
    oracle.save_pretrained(tmp_path / "model", max_shard_size="500KB")
    for shard in [*(tmp_path / "model").glob("*.safetensors")]:
        zeros = {name: torch.zeros_like(tensor) for name, tensor in load_file(shard).items()}
        save_file(zeros, shard.with_name(f"other-{shard.name}"))
    prompts = [PROMPT, [*PROMPT, EOS], PROMPT[:1], list(range(5, 40)) * 8, PROMPT]
    longest = max(map(len, prompts))
    padded = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts])
    with torch.no_grad():
        expected = oracle(padded, attention_mask=padded != 0).logits[:, 0].tolist()
    kind = scalar.ScoringEngine
    engine = launch(tmp_path / "model", tmp_path / "engine.log", "genrm", kind=kind)

    def scores(prompts):
        return [answer.score for answer in run(ask(engine, prompts, Sampling(0.0, 1)))]

    try:
        run(engine.ready(LIMIT_S))
        together = scores(prompts)
        for verb in (engine.sleep, engine.wake_weights, engine.wake_kv_cache):
            run(verb())
        assert [scores([prompt])[0] for prompt in prompts] == together
        assert scores(prompts * 5) == together * 5
    finally:
        run(engine.close())
    assert together == pytest.approx(expected, rel=0, abs=1e-4)
    assert max(expected) - min(expected) > 1e-2


def test_what_cannot_be_served_is_refused(tmp_path, models):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port}.*is in use: choose another --port"):
            launch(models[0], tmp_path / "log", "genrm", port=port)


def living_children():
    """Return the processes of servers and the fork server, but not those that torch starts for a push."""
    children = psutil.Process().children(recursive=True)
    ours = [each for each in children if not each.name().startswith("torch_shm")]
    return [each for each in ours if each.status() != psutil.STATUS_ZOMBIE]


def check_ignored(processes):
    """Check that every thread ignores a signal that ends a rank, or keeps it blocked."""
    for process in processes:
        for number in shutdown.SIGNALS:
            process.send_signal(number)
        status = Path(f"/proc/{process.pid}/status").read_text()
        pending, ignored = (
            int(mask, 16) for mask in re.findall(r"(?:ShdPnd|SigIgn):\s*(\w+)", status)
        )
        taken = [number for number in shutdown.SIGNALS if not (pending | ignored) >> number - 1 & 1]
        assert not taken, f"{process} {process.cmdline()}: {taken}"


# as with CUDA; the process that multiprocessing starts with its first child unblocks signals
SPAWNER = """
import multiprocessing, runpy, time
runpy.run_module("engines.server_main", run_name="__mp_main__")
work = "import time; print('up', flush=True); time.sleep(9999)"
multiprocessing.get_context("spawn").Process(target=exec, args=(work,)).start()
time.sleep(9999)
"""


def test_a_signal_to_all_processes_reaches_no_spawned_engine():
    """Nor may it reach the process that spawns the engine."""
    command = [sys.executable, "-c", SPAWNER]
    how = dict(cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with shutdown.starting_deaf():
        spawning = subprocess.Popen(command, **how)
    with spawning as process:
        assert process.stdout.readline() == "up\n"
        spawner = psutil.Process(process.pid)
        [spawned] = [c for c in spawner.children() if "spawn_main" in " ".join(c.cmdline())]
        try:
            check_ignored([spawner, spawned])
        finally:
            spawned.kill()
            process.kill()


def test_a_signal_to_all_processes_reaches_none_of_a_server(engine, run):
    run(collect(engine, PROMPT, 1, Sampling(1.0, 3)))
    family = living_children()
    # three are SGLang's, two the fork server's
    assert len(family) >= (5 if "fast CPU" in extras.EXTRAS else 3)
    check_ignored(family)


def test_a_server_that_is_stopped_or_killed_is_found_out(engine, run, monkeypatch):
    """After its scheduler's SIGSTOP, then kill -9, the owner reports how its log ends and leaves nothing."""
    request = Request(PROMPT, Sampling(1.0, 1, ignore_eos=True), 900, 7)
    family = living_children()
    [scheduler] = [each for each in family if "scheduler" in " ".join(each.cmdline())]
    first = scheduler.parent()
    children = [first, *first.children(recursive=True)]

    async def line_after(strike, work):
        strike()
        with pytest.raises(EngineLost) as error:
            await work
        return str(error.value)

    async def strike_twice():
        # a single one might be done by then
        asked = asyncio.create_task(stream(engine, [request] * 64))
        await asyncio.sleep(0.5)
        monkeypatch.setattr(engine, "_lost_s", 2.0)
        lines = [await line_after(scheduler.suspend, engine.load_weights([], 1))]
        lines += [await line_after(scheduler.kill, engine.watch())]
        with pytest.raises(EngineLost, match="didn't answer /generate"):
            await asked
        return lines

    stopped, killed = run(strike_twice())
    who = "the rollout engine of rank 0"
    assert stopped.startswith(f"{who} didn't answer /begin_weight_update: TimeoutError()")
    assert killed.startswith(f"{who} died (signal 9: memory may have run out); the end of ")
    assert " crashed with exit code -9." in killed
    run(engine.close())
    psutil.wait_procs(children, LIMIT_S)
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in children)
