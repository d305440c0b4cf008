"""Engine: the real SGLang server, one for the whole file, on a random model of the demo's shape."""

import asyncio
import contextlib
import dataclasses
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from base64 import b64decode
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from aiohttp import web

from config import Config
from engines import server
from engines.engine import Engine, EngineLost, Request, Sampling, read_part
from engines.pool import Pool
from engines.reward_model import ScoringEngine
from engines.server import STREAM_INTERVAL, buckets, checkpoint_shapes, server_flags
from reporting.timeline import Timeline
from tests.fakes import requests_of
from tests.launched import ROOT, free_port
from tests.tiny_models import EOS, make_tiny_qwen3

CONFIG = Config(
    max_running_requests=64, max_model_len=1024, max_new_tokens=64, judge_max_new_tokens=64, seed=1
)
START_S = 300.0  # for a server to come up
PROMPT = [5, 6, 7, 8, 9, 10, 11]


def group_members(pgid):
    """Living processes of a process group (a zombie is dead, though not yet reaped)."""
    table = subprocess.run(
        ["ps", "-eo", "pid,pgid,stat"], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split() for line in table.splitlines()[1:]]
    return [
        int(pid) for pid, group, state in rows if int(group) == pgid and not state.startswith("Z")
    ]


@pytest.fixture(scope="session")
def loop():
    """One event loop in a thread of its own: an engine's HTTP session belongs to the loop that made it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="session")
def run(loop):
    return lambda coroutine, timeout_s=400: asyncio.run_coroutine_threadsafe(
        coroutine, loop
    ).result(timeout_s)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return [make_tiny_qwen3(directory / str(seed), seed, kv_heads=2) for seed in (0, 1)]


def launch(model_dir, log, role="rollout", rank=0, port=0, kind=Engine):
    return kind.launch(role, rank, port or free_port(), str(model_dir), CONFIG, Path(log), "a key")


@pytest.fixture(scope="session")
def shared_engine(run, models, tmp_path_factory):
    engine = launch(models[0], tmp_path_factory.mktemp("log") / "engine.log")
    pid = engine._process._process.pid
    try:
        run(engine.ready(START_S))
        engine.dirty = False  # whether a test has pushed other weights
        yield engine
    finally:
        run(engine.close())
    assert group_members(pid) == []


@pytest.fixture
def engine(shared_engine, run, models):
    """The shared engine, idle and with the weights of models[0] as version 0."""
    if shared_engine.exit_status():
        run(shared_engine.restart(START_S))
    if shared_engine.dirty:
        run(shared_engine.load_weights(hf_model(models[0]).named_parameters(), 0))
        shared_engine.dirty = False
    return shared_engine


class OneRank:
    """The world of a run of one rank."""

    rank, size = 0, 1


def pool_of(*engines, config=CONFIG):
    pool = Pool(list(engines), OneRank(), Timeline(0, time.monotonic), config)
    pool.awake = tuple(engine.rank for engine in pool.engines)
    return pool


def hf_model(directory):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory).eval()


def hf_logprobs(model, prompt, response, temperature=1.0):
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)[range(len(response)), response].tolist()


def largest_difference(a, b):
    assert len(a) == len(b)
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


async def ask(engine, prompts, sampling, **how):
    return await ask_for(engine, requests_of(prompts, sampling, **how))


async def ask_for(engine, requests):
    """The finished answers, in the order of the requests; nothing is awaited any more."""
    pool = pool_of(engine)
    answers = [answer async for answer in pool.generate(requests)]
    assert not pool.status().outstanding
    return sorted(answers, key=lambda answer: answer.index)


async def collect(engine, prompt, n, sampling):
    return await ask(engine, [prompt] * n, sampling, seeds=list(range(n)))


# ---- a server that plays a script: SGLang's part of the talk, without SGLang


@contextlib.asynccontextmanager
async def scripted(generate, health=None):
    """A handle on a server that answers POST /generate by `await generate(response, body)`."""

    async def answer(request):
        response = web.StreamResponse()
        await response.prepare(request)
        await generate(response, await request.json())
        return response

    async def is_healthy(request):
        await (health or asyncio.sleep)(0)
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/generate", answer), web.get("/health", is_healthy)])
    runner, port = web.AppRunner(app, shutdown_timeout=0.1), free_port()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    engine = Engine("rollout", 0, f"http://127.0.0.1:{port}", "a key")
    folder = SimpleNamespace(cleanup=lambda: None)
    engine._process = SimpleNamespace(exit_status=lambda: "", folder=folder, kill=runner.cleanup)
    try:
        yield engine
    finally:
        await engine.close()


def event_of(index, tokens, total, finish=None, **info):
    """An event of SGLang's incremental stream: the new tokens; of how many that makes."""
    rows = [[-token / 100, token, None] for token in tokens]
    info = {"completion_tokens": total, "output_token_logprobs": rows, "weight_version": "4"} | info
    return {
        "index": index,
        "output_ids": tokens,
        "meta_info": info | {"finish_reason": finish and {"type": finish}},
    }


async def send(response, *events):
    for event in events:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


REQUESTS = [Request([5, 6], Sampling(1.0, 9), 9, seed) for seed in (1, 2)]


async def stream(engine, requests=REQUESTS):
    return [part async for part in engine.generate(requests)]


def test_what_is_asked_and_what_comes():
    """One request with each prompt's own limit and seed; parts have the new tokens and their facts alone."""
    asked = []

    async def script(response, body):
        asked.append(body)
        spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 4}]
        await send(
            response, event_of(0, [11], 1, cached_tokens=1), event_of(1, [21, 22], 2, "length")
        )
        await send(
            response, event_of(0, [12, 13], 3), event_of(0, [14], 4, "stop", weight_versions=spans)
        )

    async def talk():
        async with scripted(script) as engine:
            return await stream(engine)

    parts = asyncio.run(talk())
    assert [(part.index, part.tokens, part.finish) for part in parts] == [
        (0, [11], ""),
        (1, [21, 22], "length"),
        (0, [12, 13], ""),
        (0, [14], "stop"),
    ]
    assert [part.versions for part in parts] == [[4], [4, 4], [4, 4], [4]]
    assert parts[2].logprobs == [-0.12, -0.13] and parts[0].cached_tokens == 1
    assert (
        parts[0].sent
        == parts[3].sent
        <= parts[0].first_token
        == parts[3].first_token
        <= parts[3].end
    )
    [body] = asked
    assert body["input_ids"] == [[5, 6]] * 2 and body["stream"] and body["return_logprob"]
    rules = [(rule["max_new_tokens"], rule["sampling_seed"]) for rule in body["sampling_params"]]
    assert rules == [(9, 1), (9, 2)]


def test_an_answer_that_was_aborted_in_the_queue():
    """With nothing written; or put back into it after three tokens: SGLang then repeats what it has sent."""
    nothing = event_of(0, [], 0, "abort")
    assert read_part(nothing, 0).tokens == [] and read_part(nothing, 0).finish == "abort"
    again = event_of(0, [11, 12, 13], 3, "abort", output_ids=[13])
    part = read_part(again, 3)
    assert (part.tokens, part.logprobs, part.versions, part.finish) == ([], [], [], "abort")


def test_the_last_token_of_an_aborted_answer_is_written_again():
    """SGLang ends it without a look at whether that token, drawn meanwhile, was the end."""
    part = read_part(event_of(0, [13, 14], 4, "abort"), 2)
    assert (part.tokens, part.logprobs, part.versions, part.finish) == ([13], [-0.13], [4], "abort")


def test_a_reply_that_breaks_off_is_a_lost_engine():
    """After a part; and nobody listens any more."""
    parts = []

    async def script(response, body):
        await send(response, event_of(0, [11], 1))
        response.force_close()
        response._req.transport.abort()

    async def talk():
        async with scripted(script) as engine:
            with pytest.raises(EngineLost, match="didn't answer /generate"):
                async for part in engine.generate(REQUESTS):
                    parts.append(part)
            await engine.kill()
            with pytest.raises(EngineLost, match="didn't answer /generate"):
                await stream(engine)

    asyncio.run(talk())
    assert [part.tokens for part in parts] == [[11]]


def test_an_event_may_come_in_pieces():
    """And two in one."""
    event = json.dumps(event_of(0, [11, 12], 2, "stop")).encode()
    other = json.dumps(event_of(1, [21], 1, "length")).encode()

    async def script(response, body):
        text = b"data: " + event + b"\n\ndata: " + other + b"\n\ndata: [DONE]\n\n"
        for start in range(0, len(text), 50):
            await response.write(text[start : start + 50])
            await asyncio.sleep(0.01)

    async def talk():
        async with scripted(script) as engine:
            return await stream(engine)

    parts = asyncio.run(talk())
    assert [(part.tokens, part.finish) for part in parts] == [([11, 12], "stop"), ([21], "length")]


def test_an_error_in_the_stream_is_a_refusal():
    async def script(response, body):
        await send(response, {"error": {"message": "too long"}})

    async def talk():
        async with scripted(script) as engine:
            await stream(engine)

    with pytest.raises(ValueError, match=r"^the rollout engine of rank 0 refused: too long$"):
        asyncio.run(talk())


@pytest.mark.parametrize("busy", [False, True])
def test_a_server_hangs_if_neither_a_stream_nor_its_health_says_otherwise(monkeypatch, busy):
    """It answers nothing for silence_s; while it writes, it isn't asked: pausing would wait for that."""
    monkeypatch.setattr("engines.engine.LOOK_S", 0.05)
    asked = []  # when

    async def script(response, body):
        for number in range(20):
            await asyncio.sleep(0.1)
            await send(response, event_of(0, [11], number + 1, "stop" if number == 19 else None))

    async def silent(_):
        asked.append(time.monotonic())
        await asyncio.sleep(3600)

    async def talk():
        async with scripted(script, silent) as engine:
            engine._silence_s, start = 3.0, time.monotonic()
            writing = asyncio.create_task(stream(engine, REQUESTS[:1])) if busy else None
            trouble = await engine.until_down()
            assert not busy or writing.done()
            return trouble, time.monotonic() - start, asked[0] - start

    trouble, seconds, first_s = asyncio.run(talk())
    written_s = 2.0 if busy else 0.0
    assert (
        trouble == "gave no sign of life for 3 s"
        and first_s > written_s
        and seconds > written_s + 2.5
    )


@pytest.mark.parametrize("status", ["signal 9", "exit status 1"])
def test_a_server_that_died_says_how(status):
    async def talk():
        async with scripted(asyncio.sleep) as engine:
            engine._process.exit_status = lambda: status
            return await engine.until_down()

    assert asyncio.run(talk()) == f"died ({status})"


# ---- without a server


def test_what_lies_where_in_a_bucket():
    """Every tensor is found again in the bytes, by the name, place and shape that go with them."""
    import torch

    given = [("a", torch.randn(3, 5)), ("b", torch.randn(7)), ("c", torch.randn(2, 2))]
    [payload] = server.serialize_bucket(given, 1)
    found = pickle.loads(b64decode(payload))
    for (name, tensor), facts in zip(given, found["metadata"], strict=True):
        part = found["flattened_tensor"][facts.start_idx : facts.end_idx].view(facts.dtype)
        assert facts.name == name and torch.equal(part.view(facts.shape), tensor)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    "prefix", [[0, 5, 31, 32, 70, 12], [33, 40, 46, 41, 36, 34]], ids=["many groups", "one group"]
)
@pytest.mark.parametrize("decode", [True, False])
def test_batched_attention_equals_one_request_at_a_time(kv_heads, prefix, decode):
    import torch

    from cpu.invariance import attend, group_by_length

    torch.manual_seed(0)
    prefix = torch.tensor(prefix)
    new = torch.ones_like(prefix) if decode else torch.tensor([3, 1, 40, 32, 7, 33])
    lengths, slots = prefix + new, torch.randperm(500)
    table = torch.zeros(8, 120, dtype=torch.int32)
    rows = torch.tensor([7, 1, 2, 0, 5, 4])
    for row, start, length in zip(rows, lengths.cumsum(0) - lengths, lengths, strict=True):
        table[row, :length] = slots[start : start + length]
    k, v = torch.randn(500, kv_heads, 24), torch.randn(500, kv_heads, 24)
    query = torch.randn(int(new.sum()), 4, 24)
    output = attend(query, k, v, group_by_length(table, rows, lengths, new), 0.2, kv_heads != 4)

    first = 0
    for row, length, n in zip(rows, lengths, new, strict=True):
        own = table[row, :length].long()
        repeat = 4 // kv_heads
        keys, values = k[own].repeat_interleave(repeat, 1), v[own].repeat_interleave(repeat, 1)
        scores = torch.einsum("qhd,khd->hqk", query[first : first + n], keys) * 0.2
        hidden = torch.arange(length)[None, :] > torch.arange(length - n, length)[:, None]
        expected = torch.einsum(
            "hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values
        )
        torch.testing.assert_close(output[first : first + n], expected)
        first += n


def test_batched_attention_does_not_depend_on_the_neighbours(request):
    import torch

    from cpu.invariance import attend, group_by_length

    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(
        1
    )  # as in the server: threads cut the sums of a lone request in other places
    torch.manual_seed(0)
    lengths = torch.tensor([3, 40, 17, 64, 90, 31])
    table = torch.randperm(6 * 96).view(6, 96).int()
    k, v, query = torch.randn(576, 4, 24), torch.randn(576, 4, 24), torch.randn(6, 4, 24)

    def run(requests):
        plan = group_by_length(table, requests, lengths[requests], torch.ones_like(requests))
        return attend(query[requests], k, v, plan, 0.2, False)

    plan = group_by_length(table, torch.arange(6), lengths, torch.ones_like(lengths))
    assert {mask.shape[-1] for _, mask in plan[1]} == {16, 32, 48, 64, 96}  # of its own length
    together = run(torch.arange(6))
    for i in range(6):
        assert torch.equal(run(torch.tensor([i]))[0], together[i])


@pytest.mark.parametrize(
    "mode,role,keeps",
    [
        ("partial", "rollout", False),
        ("full", "rollout", True),
        ("auto", "rollout", True),
        ("partial", "genrm", True),
    ],
)
def test_who_keeps_its_weights_while_it_sleeps(monkeypatch, models, mode, role, keeps):
    """On CUDA: a judge, and rollout that wakes between waves: nobody pushes weights then."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    config = dataclasses.replace(CONFIG, mode=mode, device="cuda", dtype="bfloat16")
    flags = server_flags(role, 0, 30000, models[0], config)
    assert ("--enable-weights-cpu-backup" in flags) == keeps


def test_a_pace_makes_a_step_last(monkeypatch):
    """200 ms, and 50 for each of two sequences; the host's work between two steps hides behind that."""
    from bench import paced_server

    now = [100.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0], sleep=lambda s: now.append(now.pop() + s))
    monkeypatch.setattr(paced_server, "time", clock)
    paced = paced_server.at_pace(lambda self, tokens, places, batch: tokens + places, "200,50")
    assert paced(None, 3, 4, SimpleNamespace(batch_size=2)) == 7
    assert now[0] == pytest.approx(100.3)
    clock.sleep(0.2)
    paced(None, 3, 4, SimpleNamespace(batch_size=2))
    assert now[0] == pytest.approx(100.6)


def test_murmur_hash_equals_the_reference():
    import torch

    from cpu.sglang import murmur_hash32

    def reference(data, mask=0xFFFFFFFF):  # MurmurHash3_x86_32 of whole 4-byte blocks, seed 0
        state = 0
        for i in range(0, len(data), 4):
            block = int.from_bytes(data[i : i + 4], "little") * 0xCC9E2D51 & mask
            block = ((block << 15 | block >> 17) & mask) * 0x1B873593 & mask
            state ^= block
            state = ((state << 13 | state >> 19) & mask) * 5 + 0xE6546B64 & mask
        state ^= len(data)
        state = (state ^ state >> 16) * 0x85EBCA6B & mask
        state = (state ^ state >> 13) * 0xC2B2AE35 & mask
        return state ^ state >> 16

    seeds, positions = [1, 2**40 + 12345], [0, 977]
    table = murmur_hash32(torch.tensor(seeds), torch.tensor(positions), torch.arange(5))
    for i, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for column in range(5):
            data = (
                seed.to_bytes(8, "little")
                + position.to_bytes(4, "little")
                + column.to_bytes(4, "little")
            )
            assert table[i, column].item() == reference(data)


# ---- what comes back


def test_ragged_batch_equals_transformers(engine, run, models):
    """40 requests at once, of 1 to 118 prompt tokens: batched attention against one sequence at a time."""
    prompts = [[2 + (7 * i + j) % 60 for j in range(1 + 3 * i)] for i in range(40)]
    sampling = [Sampling((1.0, 0.7)[i % 2], 1 + 13 * i % 60) for i in range(40)]

    async def ask_all():
        each = zip(prompts, [2] * 40, sampling, strict=True)
        return await asyncio.gather(*(collect(engine, *asked) for asked in each))

    model = hf_model(models[0])
    for prompt, rule, answers in zip(prompts, sampling, run(ask_all()), strict=True):
        for answer in answers:
            expected = hf_logprobs(model, prompt, answer.tokens, rule.temperature)
            assert largest_difference(answer.logprobs, expected) < 1e-4
            assert answer.versions == [0] * len(answer.tokens)
            assert answer.finish == ("stop" if answer.tokens[-1] == EOS else "length")


def test_a_greedy_answer_among_sampled_ones(engine, run, models):
    """In one request: it is greedy, and the others are what they are without it."""
    import torch

    def tokens(*greedy):
        requests = requests_of([PROMPT] * 4, Sampling(1.0, 30), seeds=[5, 6, 7, 8])
        for index in greedy:
            requests[index] = requests[index]._replace(sampling=Sampling(0.0, 30))
        return [answer.tokens for answer in run(ask_for(engine, requests))]

    mixed, sampled = tokens(1), tokens()
    how = dict(max_new_tokens=30, do_sample=False)
    expected = hf_model(models[0]).generate(torch.tensor([PROMPT]), **how)[0, len(PROMPT) :]
    assert mixed[1] == expected.tolist() != sampled[1]
    assert [mixed[i] for i in (0, 2, 3)] == [sampled[i] for i in (0, 2, 3)]


def test_stop_token_ends_an_answer_and_belongs_to_it(engine, run):
    [full] = run(collect(engine, PROMPT, 1, Sampling(0.0, 30)))
    stop = full.tokens[len(full.tokens) // 2]
    [answer] = run(collect(engine, PROMPT, 1, Sampling(0.0, 30, stop_token_ids=(stop,))))
    assert answer.finish == "stop"
    assert answer.tokens == full.tokens[: full.tokens.index(stop) + 1]


def test_an_early_answer_arrives_early(engine, run):
    """Answers of one request stop at different lengths; each comes when it is done, not with the last."""
    pool, seen = pool_of(engine), []

    async def ask_all():
        requests = requests_of([PROMPT] * 16, Sampling(1.0, 200), seeds=range(16))
        async for answer in pool.generate(requests):
            assert answer.sent < answer.first_token <= answer.end
            seen.append((len(answer.tokens), answer.end, pool.status().outstanding.get(0, 0)))

    run(ask_all())
    lengths, ended, outstanding = zip(*seen, strict=True)
    assert lengths[0] < max(lengths) / 2 and ended[0] < ended[-1]
    assert list(outstanding) == sorted(set(outstanding), reverse=True) and outstanding[-1] == 0
    stats = pool.pop_stats()
    totals = sum(lengths), max(lengths), 16 * len(PROMPT)
    assert (stats.tokens, stats.longest, stats.prompt_tokens) == totals
    assert len(pool.timeline.spans) == 16


def test_a_long_answer_comes_in_parts(engine, run, models):
    """Its first token first, then some at a time, with their facts; together they are it."""
    limit = 2 * STREAM_INTERVAL + 40

    async def stream():
        request = Request(PROMPT, Sampling(1.0, 1, ignore_eos=True), limit, 7)
        return [part async for part in engine.generate([request])]

    engine.dirty = True
    run(engine.load_weights(hf_model(models[0]).named_parameters(), 3))
    parts = run(stream())
    assert len(parts) > 1 and [part.finish for part in parts] == [""] * (len(parts) - 1) + [
        "length"
    ]
    for part in parts:
        assert part.versions == [3] * len(part.tokens) and len(part.logprobs) == len(part.tokens)
    run(flush(engine))
    [answer] = run(ask(engine, [PROMPT], Sampling(1.0, limit, ignore_eos=True), seeds=[7]))
    assert answer.tokens == [token for part in parts for token in part.tokens]
    assert answer.logprobs == [logprob for part in parts for logprob in part.logprobs]


def test_abort_returns_what_was_written(engine, run):
    """One engine decodes 64 at once; the others wait, and have no tokens."""
    requests = requests_of([PROMPT] * 80, Sampling(1.0, 900, ignore_eos=True), seeds=range(80))
    written, ends = Counter(), {}

    async def ask_and_abort():
        async for part in engine.generate(requests):
            if not written:
                await engine.abort()
            written[part.index] += len(part.tokens)
            ends[part.index] = part.finish
            assert len(part.tokens) == len(part.logprobs) == len(part.versions)

    run(ask_and_abort())
    assert ends == dict.fromkeys(range(80), "abort")
    assert 0 < sum(count > 0 for count in written.values()) <= 64


def test_a_refused_request_says_why(engine, run):
    with pytest.raises(ValueError, match="rollout engine of rank 0 refused"):
        run(collect(engine, [5] * 2000, 1, Sampling(1.0, 10)))
    with pytest.raises(ValueError, match=r"no weight-update session is open"):
        run(engine._call("POST", "/end_weight_update"))


# ---- one prompt and one seed, one answer, to the last bit

# tokens of the prompt, tokens to write, temperature: within MKL's unsplit sums, beyond, across their end
TARGETS = [(7, 60, 1.0), (30, 130, 0.7), (150, 120, 1.0), (400, 40, 1.0), (1, 20, 0.0)]


def tokens_of(seed, length):
    rng = random.Random(seed)
    return [rng.randrange(2, 64) for _ in range(length)]


async def flush(engine):
    await engine._call("POST", "/flush_cache?timeout=30")


async def ask_target(engine, target, prompt=None, limit=None):
    """The answer to a target's prompt, or to another that begins so, under its own seed; in full length."""
    length, tokens, temperature = target
    prompts, sampling = (
        [prompt or tokens_of(length, length)],
        Sampling(temperature, tokens, ignore_eos=True),
    )
    [answer] = await ask(engine, prompts, sampling, limits=[limit or tokens], seeds=[1000 + length])
    return answer


async def ask_others(engine, count, seed):
    """Random requests of every kind, a quarter of which begin as a target's prompt does."""
    rng = random.Random(seed)

    async def one():
        begin = tokens_of(*[rng.choice(TARGETS)[0]] * 2) if rng.random() < 0.25 else []
        prompt = begin[: rng.randint(0, len(begin))] + tokens_of(rng.random(), rng.randint(1, 200))
        sampling = Sampling(
            rng.choice([0.0, 0.7, 1.0, 1.3]), rng.randint(1, 150), top_p=rng.choice([1.0, 1.0, 0.9])
        )
        await asyncio.sleep(0.3 * rng.random())
        return await ask(engine, [prompt], sampling, seeds=[rng.randrange(2**63)])

    await asyncio.gather(*(one() for _ in range(count)))


@pytest.fixture(scope="module")
def alone(run, shared_engine):
    """(tokens, logprobs) of each target by an engine with nothing else to do and nothing in its cache."""

    async def ask_each():
        answers = []
        for target in TARGETS:
            await flush(shared_engine)
            answers.append(await ask_target(shared_engine, target))
        return [(answer.tokens, answer.logprobs) for answer in answers]

    answers = run(ask_each())
    assert [len(tokens) for tokens, _ in answers] == [tokens for _, tokens, _ in TARGETS]
    return answers


@pytest.mark.parametrize("others,cache", [(1, "flushed"), (40, "kept")])
def test_an_answer_does_not_depend_on_its_neighbours(engine, run, alone, others, cache):
    """Alone or beside others, greedy ones among them, and beside the targets; after a flush, or with hits."""

    async def ask_all():
        await flush(engine)
        if cache == "kept":
            await ask_others(engine, 10, "before")
        answers = await asyncio.gather(
            *(ask_target(engine, target) for target in TARGETS), ask_others(engine, others, others)
        )
        return [(answer.tokens, answer.logprobs) for answer in answers[:-1]]

    assert run(ask_all()) == alone


def test_an_answer_does_not_depend_on_what_was_cached(engine, run, alone):
    """After a flush nothing of the prompt is found; asked again, all but its last token is."""

    async def ask_each():
        for number, target in enumerate(TARGETS):
            await flush(engine)
            anew = await ask_target(engine, target)
            again = await ask_target(engine, target)
            assert (anew.cached_tokens, again.cached_tokens) == (0, target[0] - 1)
            assert (
                (again.tokens, again.logprobs) == (anew.tokens, anew.logprobs) == alone[number]
            ), target

    run(ask_each())


@pytest.mark.parametrize("cut,cache", [(3, "flushed"), (15, "kept")])
def test_a_continued_answer_is_as_if_it_was_never_cut(engine, run, alone, cut, cache):
    """Its first tokens came by decode steps; they are in the cache, or are computed again in one prefill."""

    async def ask_each():
        for number, target in enumerate(TARGETS[:4]):
            begun = await ask_target(engine, target, limit=cut)
            if cache == "flushed":
                await flush(engine)
            rest = await ask_target(
                engine, target, tokens_of(target[0], target[0]) + begun.tokens, target[1] - cut
            )
            assert (begun.tokens + rest.tokens, begun.logprobs + rest.logprobs) == alone[number], (
                target
            )
            assert (rest.cached_tokens > 0) == (cache == "kept")

    run(ask_each())


def test_another_seed_writes_another_answer(engine, run):
    """To the same prompt in the same request; seeds that differ in their upper half alone are others, too."""

    def tokens(seeds):
        answers = run(
            ask(engine, [PROMPT] * len(seeds), Sampling(1.0, 30, ignore_eos=True), seeds=seeds)
        )
        return [answer.tokens for answer in answers]

    one, other, same, upper = tokens([1, 2, 1, 1 + 2**62])
    assert one == same and len({*map(tuple, (one, other, upper))}) == 3
    assert tokens([1 + 2**62, 2]) == [upper, other]


# ---- weights and memory


def test_pushed_weights_are_served_under_their_version(engine, run, models, monkeypatch):
    """Though they come in many buckets."""
    engine.dirty = True
    monkeypatch.setattr(server, "BUCKET_BYTES", 100_000)
    model = hf_model(models[1])
    assert len(list(buckets(model.named_parameters()))) > 5
    run(engine.load_weights(model.named_parameters(), 8))
    [answer] = run(collect(engine, PROMPT, 1, Sampling(1.0, 30)))
    assert largest_difference(answer.logprobs, hf_logprobs(model, PROMPT, answer.tokens)) < 1e-4
    assert answer.versions == [8] * len(answer.tokens)


@pytest.mark.parametrize(
    "broken, message",
    [
        (
            lambda name, tensor: ("model.nothing.weight", tensor),
            "model.nothing.weight .* its model has None",
        ),
        (lambda name, tensor: (name, tensor[:1]), "its model has"),
        (None, "was pushed no"),
    ],
)
def test_a_wrong_push_is_refused(engine, run, models, broken, message):
    engine.dirty = True
    first, *others = hf_model(models[1]).named_parameters()
    pushed = others if broken is None else [broken(*first), *others]
    with pytest.raises(ValueError, match=message):
        run(engine.load_weights(pushed, 9))


def test_sleep_and_wake(engine, run, models):
    calls, call = [], engine._open

    def noted(method, path, body, deadline_s=None):
        if method == "POST":
            calls.append((path, body.get("tags")))
        return call(method, path, body, deadline_s)

    engine._open = noted
    try:
        run(engine.sleep())
        run(engine.wake_weights())
        run(engine.load_weights(hf_model(models[0]).named_parameters(), 0))
        run(engine.wake_kv_cache())
    finally:
        del engine._open
    [answer] = run(collect(engine, PROMPT, 1, Sampling(1.0, 3)))
    assert len(answer.tokens) == 3
    assert calls == [
        ("/pause_generation", None),
        ("/flush_cache?timeout=30", None),
        ("/release_memory_occupation", ["kv_cache", "weights"]),
        ("/resume_memory_occupation", ["weights"]),
        ("/begin_weight_update", None),
        ("/update_weights_from_tensor", None),
        ("/end_weight_update", None),
        ("/flush_cache?timeout=30", None),
        ("/resume_memory_occupation", ["kv_cache"]),
        ("/continue_generation", None),
    ]


def test_sleep_aborts_what_still_runs(engine, run):
    async def ask_and_sleep():
        asked = asyncio.create_task(collect(engine, PROMPT, 8, Sampling(1.0, 900)))
        await asyncio.sleep(0.2)
        await engine.sleep()
        answers = await asked
        await wake(engine)
        return answers

    assert len(run(ask_and_sleep())) == 8


async def wake(engine):
    await engine.wake_weights()
    await engine.wake_kv_cache()


# ---- a scalar reward model


@pytest.mark.slow
def test_a_scalar_reward_models_scores_are_transformers(run, models, tmp_path):
    """Within 1e-4; to the last bit the same whatever is scored beside it, and after sleep; without a bias."""
    import torch
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    oracle = AutoModelForSequenceClassification.from_pretrained(
        models[0], num_labels=1, dtype=torch.float32, pad_token_id=0
    )
    oracle.save_pretrained(tmp_path / "model")
    prompts = [PROMPT, [*PROMPT, 12], PROMPT[:1], list(range(5, 40)) * 8, PROMPT]
    with torch.no_grad():
        expected = [oracle(torch.tensor([prompt])).logits.item() for prompt in prompts]
    engine = launch(tmp_path / "model", tmp_path / "engine.log", "genrm", kind=ScoringEngine)

    async def scores(prompts):
        return [answer.score for answer in await ask(engine, prompts, Sampling(0.0, 1))]

    async def all_scores():
        await engine.ready(START_S)
        together = await scores(prompts)
        await engine.sleep()
        await wake(engine)
        return (
            together,
            [(await scores([prompt]))[0] for prompt in prompts],
            await scores(prompts * 5),
        )

    private = Path(engine._process.folder.name)
    try:
        together, alone, crowded = run(all_scores())
        assert any(path.is_socket() for path in private.iterdir()), (
            "the server keeps its sockets elsewhere"
        )
    finally:
        run(engine.close())
    assert not private.exists()
    assert (
        together == pytest.approx(expected, abs=1e-4)
        and together == alone
        and crowded == together * 5
    )
    assert max(expected) - min(expected) > 1e-2


def test_a_model_without_a_scalar_head_is_refused(models):
    """From its directory alone."""
    engine = ScoringEngine("genrm", 1, "http://127.0.0.1:1", "a key")
    engine._shapes = checkpoint_shapes(models[0])
    with pytest.raises(ValueError, match="rank 1 serves no scalar reward model: its directory has"):
        asyncio.run(engine.ready(START_S))


# ---- start and end


def test_a_taken_port_is_named(tmp_path, models):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port}.*is in use: choose another --port"):
            launch(models[0], tmp_path / "log", "genrm", port=port)


def test_a_directory_without_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no"):
        checkpoint_shapes(tmp_path)


OWNER = """
import asyncio, sys, time
from tests.test_engine import START_S, launch
engine = launch(sys.argv[2], sys.argv[3], port=int(sys.argv[1]))
print(engine._process._process.pid, flush=True)
if sys.argv[4] == "ready":
    asyncio.run(engine.ready(START_S))
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["ready", "starting"])
def test_nothing_is_left_when_the_owner_is_killed(models, tmp_path, moment):
    command = [
        sys.executable,
        "-c",
        OWNER,
        str(free_port()),
        models[0],
        str(tmp_path / "log"),
        moment,
    ]
    owner = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    group = int(owner.stdout.readline())
    assert owner.stdout.readline() == "up\n"
    if moment == "starting":  # the children are being spawned, and still importing
        deadline = time.monotonic() + 120
        while len(group_members(group)) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
    assert len(group_members(group)) >= 3
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 60  # a child that still imports notices at its end
    while group_members(group) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert group_members(group) == []


def test_a_killed_server_is_found_out(engine, run):
    """Its scheduler dies by kill -9: the stream breaks off, and the owner hears. Nothing is left of it.

    The fixture starts it again for a test that comes later.
    """
    request = Request(PROMPT, Sampling(1.0, 1, ignore_eos=True), 900, 7)
    server_process = psutil.Process(engine._process._process.pid)
    note = json.loads(engine._process._pid_file.read_text())
    assert (note["pid"], note["born"]) == (server_process.pid, server_process.create_time())
    assert note["owner"] == os.getpid()

    async def strike():
        down, parts = asyncio.create_task(engine.until_down()), []
        with pytest.raises(EngineLost, match="didn't answer /generate"):
            async for part in engine.generate([request]):
                for process in server_process.children(recursive=True) * (not parts):
                    if "scheduler" in " ".join(process.cmdline()):
                        process.kill()
                parts.append(part)
        return await down

    assert run(strike()).startswith("died (")
    run(engine.kill())
    assert group_members(server_process.pid) == []
    assert not engine._process._pid_file.exists() and engine.exit_status() == "killed"


@pytest.mark.slow
def test_a_server_that_is_started_again_answers_alike(engine, run):
    [before] = run(collect(engine, PROMPT, 1, Sampling(1.0, 30)))
    run(engine.kill())
    run(engine.restart(START_S))
    [after] = run(collect(engine, PROMPT, 1, Sampling(1.0, 30)))
    assert (after.tokens, after.logprobs) == (before.tokens, before.logprobs)
    assert after.versions == before.versions and engine._process._pid_file.exists()


@pytest.mark.slow
def test_answers_that_move_are_as_if_they_had_stayed(engine, run, models, tmp_path):
    """256 answers to 16 prompts, cut off again and again and continued on the other of two servers.

    Some at the very token that ends them: one in about sixty does.
    """
    other = launch(models[0], tmp_path / "engine.log", rank=1)
    pool, rng, sampling = pool_of(engine, other), random.Random(0), Sampling(1.0, 120)
    prompts = [[2 + (5 * i + j) % 60 for j in range(4 + 5 * i)] for i in range(16)]
    seeds = [[1000 * i + k for k in range(16)] for i in range(16)]
    written = {
        seed: ([], [], []) for row in seeds for seed in row
    }  # tokens, log-probabilities, ranks
    finish = {}

    async def write(prompt, row):
        """As rollout.ask does it."""
        while unfinished := [seed for seed in row if finish.get(seed) not in ("stop", "length")]:
            begun = [prompt + written[seed][0] for seed in unfinished]
            limits = [120 - len(written[seed][0]) for seed in unfinished]
            async for answer in pool.generate(requests_of(begun, sampling, limits, unfinished)):
                parts = (answer.tokens, answer.logprobs, [answer.rank] * bool(answer.tokens))
                finish[unfinished[answer.index]] = answer.finish
                for column, part in zip(written[unfinished[answer.index]], parts, strict=True):
                    column += part

    async def move(tasks):
        """In turns, everything to one of the servers, each time after some answers have begun there."""
        while not all(task.done() for task in tasks):
            leaving, other_rank = (engine, 1) if 0 in pool.awake else (other, 0)
            events = leaving._events
            while leaving._events < events + 16 and not all(task.done() for task in tasks):
                await asyncio.sleep(0.05)
            await asyncio.sleep(rng.uniform(0.1, 0.5))
            pool.awake = (other_rank,)
            await leaving.abort()

    async def write_all():
        tasks = [asyncio.create_task(write(*each)) for each in zip(prompts, seeds, strict=True)]
        await asyncio.gather(move(tasks), *tasks)

    try:
        run(other.ready(START_S))
        run(other.load_weights(hf_model(models[0]).named_parameters(), 0))
        groups = zip(prompts, seeds, strict=True)
        stayed = [run(ask(engine, [prompt] * 16, sampling, seeds=row)) for prompt, row in groups]
        run(write_all())
        assert any(len(set(ranks)) > 1 for _, _, ranks in written.values())
        for row, answers in zip(seeds, stayed, strict=True):
            for answer in answers:
                tokens, logprobs, _ = written[row[answer.index]]
                assert answer.tokens == tokens and answer.logprobs == logprobs
                assert answer.finish == finish[row[answer.index]]
    finally:
        run(other.close())
