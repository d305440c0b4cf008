<<<<<<<< HEAD:tests/test_rollout.py
"""Rollout on fakes and a virtual clock: what is cut off and comes again, where every token goes, the meeting.

And engines and judges that are slow, silent or wrong.
========
"""Engine: the real SGLang server, one for the whole file, on a random model of the demo's shape."""

import asyncio
import dataclasses
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from config import Config
from engines import server
from engines.engine import Engine, EngineLost, Request, Sampling, read_part
from engines.pool import Pool
from engines.reward_model import ScoringEngine
from engines.server import STREAM_INTERVAL, buckets, checkpoint_shapes, server_flags
from reporting.timeline import Timeline
from tests.tiny_models import EOS, make_tiny_qwen3

REPOSITORY = Path(__file__).parents[1]
CONFIG = Config(max_running_requests=64, max_model_len=1024, max_new_tokens=64, judge_max_new_tokens=64, seed=1)
START_S = 300.0  # for a server to come up
PROMPT = [5, 6, 7, 8, 9, 10, 11]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def group_members(pgid):
    """Living processes of a process group (a zombie is dead, though not yet reaped)."""
    table = subprocess.run(["ps", "-eo", "pid,pgid,stat"], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in table.splitlines()[1:]]
    return [int(pid) for pid, group, state in rows if int(group) == pgid and not state.startswith("Z")]


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
    return lambda coroutine, timeout_s=400: asyncio.run_coroutine_threadsafe(coroutine, loop).result(timeout_s)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return [make_tiny_qwen3(directory / str(seed), seed, kv_heads=2) for seed in (0, 1)]


@pytest.fixture(scope="session")
def shared_engine(run, models, tmp_path_factory):
    engine = Engine.launch("rollout", 0, free_port(), models[0], CONFIG, tmp_path_factory.mktemp("log") / "engine.log")
    pid = engine._process._process.pid
    try:
        run(engine.ready(START_S))
        yield engine
    finally:
        run(engine.close())
    assert group_members(pid) == []


@pytest.fixture
def engine(shared_engine, run, models):
    """The shared engine, idle and with the weights of models[0] as version 0."""
    if getattr(shared_engine, "dirty", False):
        run(shared_engine.load_weights(hf_model(models[0]).named_parameters(), 0))
        shared_engine.dirty = False
    assert shared_engine.awake
    return shared_engine


class OneRank:
    """The world of a run of one rank."""

    rank, size = 0, 1


def pool_of(*engines, config=CONFIG):
    return Pool(list(engines), OneRank(), Timeline(0, time.monotonic), config)


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
    """The finished answers, in the order of the prompts; nothing is awaited any more."""
    pool = pool_of(engine)
    answers = [answer async for answer in pool.generate(prompts, sampling, **how)]
    assert not pool.status().outstanding
    return sorted(answers, key=lambda answer: answer.index)


async def collect(engine, prompt, n, sampling):
    return await ask(engine, [prompt] * n, sampling, seeds=list(range(n)))


# ---- what comes back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_transformers(engine, run, models, temperature):
    answers = run(collect(engine, PROMPT, 4, Sampling(temperature, 40)))
    model = hf_model(models[0])
    assert sorted(answer.index for answer in answers) == [0, 1, 2, 3]
    assert len({tuple(answer.tokens) for answer in answers}) == 4
    for answer in answers:
        assert largest_difference(answer.logprobs, hf_logprobs(model, PROMPT, answer.tokens, temperature)) < 1e-4
        assert answer.versions == [0] * len(answer.tokens)
        assert answer.finish == ("stop" if answer.tokens[-1] == EOS else "length")


def test_a_greedy_answer_among_sampled_ones(engine, run, models):
    """In one request: it is greedy, and the others are what they are without it."""
    import torch

    def tokens(greedy):
        answers = run(ask(engine, [PROMPT] * 4, Sampling(1.0, 30), seeds=[5, 6, 7, 8], greedy=greedy))
        return [answer.tokens for answer in answers]

    mixed, sampled = tokens([False, True, False, False]), tokens([])
    expected = hf_model(models[0]).generate(torch.tensor([PROMPT]), max_new_tokens=30, do_sample=False)[0, len(PROMPT) :]
    assert mixed[1] == expected.tolist() != sampled[1]
    assert [mixed[i] for i in (0, 2, 3)] == [sampled[i] for i in (0, 2, 3)]


def test_ragged_batch_equals_transformers(engine, run, models):
    """40 requests at once, of 1 to 118 prompt tokens: the batched attention against one sequence at a time."""
    prompts = [[2 + (7 * i + j) % 60 for j in range(1 + 3 * i)] for i in range(40)]
    sampling = [Sampling(1.0, 1 + 13 * i % 60) for i in range(40)]

    async def ask_all():
        return await asyncio.gather(*(collect(engine, *ask) for ask in zip(prompts, [1] * 40, sampling, strict=True)))

    model = hf_model(models[0])
    for prompt, [answer] in zip(prompts, run(ask_all()), strict=True):
        assert largest_difference(answer.logprobs, hf_logprobs(model, prompt, answer.tokens)) < 1e-4


def test_greedy_equals_transformers(engine, run, models):
    import torch

    [answer] = run(collect(engine, PROMPT, 1, Sampling(0.0, 30)))
    expected = hf_model(models[0]).generate(torch.tensor([PROMPT]), max_new_tokens=30, do_sample=False)[0, len(PROMPT) :]
    assert answer.tokens == expected.tolist()


def test_stop_token_ends_an_answer_and_belongs_to_it(engine, run):
    [full] = run(collect(engine, PROMPT, 1, Sampling(0.0, 30)))
    stop = full.tokens[len(full.tokens) // 2]
    [answer] = run(collect(engine, PROMPT, 1, Sampling(0.0, 30, stop_token_ids=(stop,))))
    assert answer.finish == "stop"
    assert answer.tokens == full.tokens[: full.tokens.index(stop) + 1]


def test_an_early_answer_arrives_early(engine, run):
    """Answers of one request stop at different lengths; each must come when it is done, not with the last."""
    pool, seen = pool_of(engine), []

    async def ask_all():
        async for answer in pool.generate([PROMPT] * 16, Sampling(1.0, 200), seeds=list(range(16))):
            seen.append((len(answer.tokens), answer.end, pool.status().outstanding.get(0, 0)))
            assert answer.sent < answer.first_token <= answer.end

    run(ask_all())
    lengths, times, outstanding = zip(*seen, strict=True)
    assert lengths[0] < lengths[-1] / 2 and times[0] < times[-1] - 0.05
    assert list(lengths) == sorted(lengths)
    assert list(outstanding) == [left * (len(PROMPT) + 200 - 1) for left in range(15, -1, -1)]  # each has begun
    stats = pool.pop_stats()
    assert (stats.tokens, stats.longest, stats.prompt_tokens) == (sum(lengths), lengths[-1], 16 * len(PROMPT))
    assert len(pool.timeline.spans) == 16


def test_a_long_answer_comes_in_parts(engine, run, models):
    """Its first token at once, then STREAM_INTERVAL at a time, each with its facts; together they are the answer."""

    async def stream():
        request = Request(PROMPT, Sampling(1.0, 1, ignore_eos=True), 2 * STREAM_INTERVAL + 40, 7)
        return [part async for part in engine.generate([request])]

    engine.dirty = True
    run(engine.load_weights(hf_model(models[0]).named_parameters(), 3))
    parts = run(stream())
    assert [len(part.tokens) for part in parts] == [1, STREAM_INTERVAL, STREAM_INTERVAL, 39]
    assert [part.finish for part in parts] == ["", "", "", "length"]
    for part in parts:
        assert part.versions == [3] * len(part.tokens) and len(part.logprobs) == len(part.tokens)
    run(flush(engine))
    [answer] = run(ask(engine, [PROMPT], Sampling(1.0, 2 * STREAM_INTERVAL + 40, ignore_eos=True), seeds=[7]))
    assert answer.tokens == [token for part in parts for token in part.tokens]
    assert answer.logprobs == [logprob for part in parts for logprob in part.logprobs]


def test_a_short_answer_brings_its_first_token_and_its_end(engine, run):
    """As long as the demo's: nothing comes between."""

    async def stream():
        return [part async for part in engine.generate([Request(PROMPT, Sampling(1.0, 1, ignore_eos=True), 100, 7)])]

    assert [len(part.tokens) for part in run(stream())] == [1, 99]


def test_abort_returns_what_was_written(engine, run):
    async def ask_and_abort():
        asked = asyncio.create_task(collect(engine, PROMPT, 8, Sampling(1.0, 900, ignore_eos=True)))
        await asyncio.sleep(0.5)
        await engine.abort()
        return await asked

    answers = run(ask_and_abort())
    assert [answer.finish for answer in answers] == ["abort"] * 8
    assert all(len(answer.tokens) == len(answer.logprobs) == len(answer.versions) for answer in answers)


def test_an_answer_that_is_aborted_in_the_queue_has_no_tokens(engine, run):
    """One engine decodes 64 at once; the others wait."""

    async def ask_and_abort():
        asked = asyncio.create_task(collect(engine, PROMPT, 80, Sampling(1.0, 900, ignore_eos=True)))
        await asyncio.sleep(0.5)
        await engine.abort()
        return await asked

    lengths = [len(answer.tokens) for answer in run(ask_and_abort())]
    assert sorted(lengths)[:16] == [0] * 16 and max(lengths) > 0


def test_a_consumer_that_leaves_frees_its_answers(engine, run):
    pool = pool_of(engine)

    async def leave():
        stream = pool.generate([PROMPT] * 4, Sampling(1.0, 300))
        await anext(stream)
        await stream.aclose()

    run(leave())
    assert not pool.status().outstanding


def test_an_answer_is_continued_within_its_limit(engine, run, models):
    """One greedy answer in two requests, beside another prompt in the same request: the tokens of one."""
    sampling = Sampling(0.0, 20, ignore_eos=True)
    [whole] = run(collect(engine, PROMPT, 1, sampling))
    begun, other = run(ask(engine, [PROMPT, PROMPT[:3]], sampling, limits=[8, 5]))
    prompts = [PROMPT + begun.tokens, PROMPT[:3] + other.tokens]
    [rest, _] = run(ask(engine, prompts, sampling, limits=[12, 1]))
    assert (len(begun.tokens), len(other.tokens), rest.finish) == (8, 5, "length")
    assert begun.tokens + rest.tokens == whole.tokens
    assert largest_difference(begun.logprobs + rest.logprobs, whole.logprobs) < 1e-4


def test_a_refused_request_says_why(engine, run):
    with pytest.raises(ValueError, match="rollout engine of rank 0 refused"):
        run(collect(engine, [5] * 2000, 1, Sampling(1.0, 10)))


# ---- one prompt and one seed, one answer, to the last bit --------------------------------------------------------------

# tokens of the prompt, tokens to write, temperature: within MKL's unsplit sums, beyond them, and across their end
TARGETS = [(7, 60, 1.0), (30, 130, 0.7), (150, 120, 1.0), (400, 40, 1.0), (1, 20, 0.0)]


def tokens_of(seed, length):
    rng = random.Random(seed)
    return [rng.randrange(2, 64) for _ in range(length)]


async def flush(engine):
    await engine._post("/flush_cache?timeout=30")


async def ask_target(engine, target, prompt=None, limit=None):
    """The answer to a target's prompt, or to another that begins so, under its own seed; it never ends early."""
    length, tokens, temperature = target
    prompts, sampling = [prompt or tokens_of(length, length)], Sampling(temperature, tokens, ignore_eos=True)
    [answer] = await ask(engine, prompts, sampling, limits=[limit or tokens], seeds=[1000 + length])
    return answer


async def ask_others(engine, count, seed):
    """Random requests of every kind, a quarter of which begin as a target's prompt does."""
    rng = random.Random(seed)

    async def one():
        begin = tokens_of(*[rng.choice(TARGETS)[0]] * 2) if rng.random() < 0.25 else []
        prompt = begin[: rng.randint(0, len(begin))] + tokens_of(rng.random(), rng.randint(1, 200))
        sampling = Sampling(rng.choice([0.0, 0.7, 1.0, 1.3]), rng.randint(1, 150), top_p=rng.choice([1.0, 1.0, 0.9]))
        await asyncio.sleep(0.3 * rng.random())
        return await ask(engine, [prompt], sampling, seeds=[rng.randrange(2**63)])

    await asyncio.gather(*(one() for _ in range(count)))


@pytest.fixture(scope="module")
def alone(run, shared_engine):
    """What each target is answered by an engine that has nothing else to do and nothing in its cache: (tokens, logprobs)."""

    async def ask_each():
        answers = []
        for target in TARGETS:
            await flush(shared_engine)
            answers.append(await ask_target(shared_engine, target))
        return [(answer.tokens, answer.logprobs) for answer in answers]

    answers = run(ask_each())
    assert [len(tokens) for tokens, _ in answers] == [tokens for _, tokens, _ in TARGETS]
    return answers


@pytest.mark.parametrize("others", [0, 1, 2, 7, 40])
@pytest.mark.parametrize("cache", ["kept", "flushed"])
def test_an_answer_does_not_depend_on_its_neighbours(engine, run, alone, others, cache):
    """Alone, beside 1, 2, 7 and 40 others, greedy ones among them, and beside the other targets; after a flush, and with hits."""

    async def ask_all():
        await flush(engine)
        if cache == "kept":
            await ask_others(engine, 10, "before")
        answers = await asyncio.gather(*(ask_target(engine, target) for target in TARGETS), ask_others(engine, others, others))
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
            assert (again.tokens, again.logprobs) == (anew.tokens, anew.logprobs) == alone[number], target

    run(ask_each())


@pytest.mark.parametrize("cut", [1, 3, 15, 38])
@pytest.mark.parametrize("cache", ["kept", "flushed"])
def test_a_continued_answer_is_as_if_it_was_never_cut(engine, run, alone, cut, cache):
    """Its first tokens came by decode steps; they are found in the cache, or computed again in one prefill. The rest is the same."""

    async def ask_each():
        for number, target in enumerate(TARGETS[:4]):
            begun = await ask_target(engine, target, limit=cut)
            if cache == "flushed":
                await flush(engine)
            rest = await ask_target(engine, target, tokens_of(target[0], target[0]) + begun.tokens, target[1] - cut)
            assert (begun.tokens + rest.tokens, begun.logprobs + rest.logprobs) == alone[number], target
            assert (rest.cached_tokens > 0) == (cache == "kept")

    run(ask_each())


def test_another_seed_writes_another_answer(engine, run):
    """To the same prompt in the same request; seeds that differ in their upper half alone are others, too."""

    def tokens(seeds):
        answers = run(ask(engine, [PROMPT] * len(seeds), Sampling(1.0, 30, ignore_eos=True), seeds=seeds))
        return [answer.tokens for answer in answers]

    one, other, same, upper = tokens([1, 2, 1, 1 + 2**62])
    assert one == same and len({*map(tuple, (one, other, upper))}) == 3
    assert tokens([1 + 2**62, 2]) == [upper, other]


# ---- weights and memory ----------------------------------------------------------------------------------------------


def test_pushed_weights_are_served_under_their_version(engine, run, models):
    engine.dirty = True
    model = hf_model(models[1])
    run(engine.load_weights(model.named_parameters(), 7))
    [answer] = run(collect(engine, PROMPT, 1, Sampling(1.0, 30)))
    assert largest_difference(answer.logprobs, hf_logprobs(model, PROMPT, answer.tokens)) < 1e-4
    assert answer.versions == [7] * len(answer.tokens)


def test_a_push_in_many_buckets(engine, run, models, monkeypatch):
    engine.dirty = True
    monkeypatch.setattr(server, "BUCKET_BYTES", 100_000)
    model = hf_model(models[1])
    assert len(list(buckets(model.named_parameters()))) > 5
    run(engine.load_weights(model.named_parameters(), 8))
    [answer] = run(collect(engine, PROMPT, 1, Sampling(1.0, 30)))
    assert largest_difference(answer.logprobs, hf_logprobs(model, PROMPT, answer.tokens)) < 1e-4


@pytest.mark.parametrize("broken, message", [
    (lambda name, tensor: ("model.nothing.weight", tensor), "model.nothing.weight .* its model has None"),
    (lambda name, tensor: (name, tensor[:1]), "its model has"),
    (None, "was pushed no"),
])  # fmt: skip
def test_a_wrong_push_is_refused(engine, run, models, broken, message):
    engine.dirty = True
    first, *others = hf_model(models[1]).named_parameters()
    pushed = others if broken is None else [broken(*first), *others]
    with pytest.raises(ValueError, match=message):
        run(engine.load_weights(pushed, 9))


def test_a_refusal_of_the_server_is_raised(engine, run):
    with pytest.raises(ValueError, match="no weight-update session is open"):
        run(engine._post("/end_weight_update"))


def test_sleep_and_wake(engine, run, models):
    calls, post = [], engine._post
    engine._post = lambda path, **body: calls.append((path, body.get("tags"))) or post(path, **body)
    try:
        run(engine.sleep())
        with pytest.raises(AssertionError, match="while it sleeps"):
            run(collect(engine, PROMPT, 1, Sampling(1.0, 3)))
        with pytest.raises(AssertionError, match="sleeps already"):
            run(engine.sleep())
        run(engine.wake_weights())
        run(engine.load_weights(hf_model(models[0]).named_parameters(), 0))
        assert not engine.awake
        run(engine.wake_kv_cache())
    finally:
        del engine._post
    [answer] = run(collect(engine, PROMPT, 1, Sampling(1.0, 3)))
    assert len(answer.tokens) == 3
    assert calls == [
        ("/pause_generation", None), ("/flush_cache?timeout=30", None), ("/release_memory_occupation", ["kv_cache", "weights"]),
        ("/resume_memory_occupation", ["weights"]),
        ("/begin_weight_update", None), ("/update_weights_from_tensor", None), ("/end_weight_update", None),
        ("/resume_memory_occupation", ["kv_cache"]), ("/continue_generation", None),
    ]  # fmt: skip


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


# ---- a scalar reward model -------------------------------------------------------------------------------------------


def test_a_scalar_reward_models_scores_are_transformers(run, models, tmp_path):
    """Within 1e-4; to the last bit the same whatever is scored beside it, and after sleep; and the head has no bias."""
    import torch
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    oracle = AutoModelForSequenceClassification.from_pretrained(models[0], num_labels=1, dtype=torch.float32, pad_token_id=0)
    oracle.save_pretrained(tmp_path / "model")
    prompts = [PROMPT, [*PROMPT, 12], PROMPT[:1], list(range(5, 40)) * 8, PROMPT]
    with torch.no_grad():
        expected = [oracle(torch.tensor([prompt])).logits.item() for prompt in prompts]
    engine = ScoringEngine.launch("genrm", 0, free_port(), str(tmp_path / "model"), CONFIG, tmp_path / "engine.log")

    async def scores(prompts):
        return [answer.score for answer in await ask(engine, prompts, Sampling(0.0, 1))]

    async def all_scores():
        await engine.ready(START_S)
        together = await scores(prompts)
        await engine.sleep()
        await wake(engine)
        return together, [(await scores([prompt]))[0] for prompt in prompts], await scores(prompts * 5)

    private = Path(engine._process._folder)
    try:
        together, alone, crowded = run(all_scores())
        assert any(path.is_socket() for path in private.iterdir()), "the server keeps its sockets elsewhere"
    finally:
        run(engine.close())
    assert not private.exists()
    assert together == pytest.approx(expected, abs=1e-4) and together == alone and crowded == together * 5
    assert max(expected) - min(expected) > 1e-2


def test_a_model_without_a_scalar_head_is_refused(run, models, tmp_path):
    engine = ScoringEngine.launch("genrm", 1, free_port(), models[0], CONFIG, tmp_path / "engine.log")
    try:
        with pytest.raises(ValueError, match="rank 1 serves no scalar reward model: its directory has no score"):
            run(engine.ready(START_S))
    finally:
        run(engine.close())


# ---- start and end ---------------------------------------------------------------------------------------------------


def test_a_taken_port_is_named(tmp_path, models):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port}.*is in use: choose another --port"):
            Engine.launch("genrm", 0, port, models[0], CONFIG, tmp_path / "log")


def test_a_port_that_is_taken_while_the_server_starts_ends_it(run, models, tmp_path):
    """The system may give it to any connection, if it is in the range that it takes them from."""
    port = free_port()
    engine = Engine.launch("rollout", 0, port, models[0], CONFIG, tmp_path / "engine.log")
    try:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", port))
            taken.listen()
            with pytest.raises(ValueError, match=r"(?s)stopped while starting; the end of .*engine.log:.*address already in use"):
                run(engine.ready(120))
    finally:
        run(engine.close())


def test_a_directory_without_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no"):
        checkpoint_shapes(tmp_path)


def test_a_failing_start_shows_the_log(run, models, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.safetensors").write_bytes(Path(models[0], "model.safetensors").read_bytes())
    engine = Engine.launch("rollout", 3, free_port(), tmp_path / "model", CONFIG, tmp_path / "engine.log")
    try:
        with pytest.raises(ValueError, match=r"(?s)engine of rank 3 stopped while starting; the end of .*engine.log:.*config"):
            run(engine.ready(START_S))
    finally:
        run(engine.close())


OWNER = """
import asyncio, sys, time
from tests.test_engine import CONFIG, START_S, Engine
engine = Engine.launch("rollout", 0, int(sys.argv[1]), sys.argv[2], CONFIG, sys.argv[3])
print(engine._process._process.pid, flush=True)
if sys.argv[4] == "ready":
    asyncio.run(engine.ready(START_S))
print("up", flush=True)
time.sleep(600)
>>>>>>>> 28bd869 (Tests of the engine ask through a pool):tests/test_engine.py
"""

import asyncio
import copy
import random
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
from fakes import simulate, to_text, write_answer, write_verdict
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import controller
import genrm
import rollout
from engines.engine import Answer
from sample import Sample


def batches_of(controllers, step):
    """What a step came to on every rank."""
    return [c.report.steps[step][1] for c in controllers]


<<<<<<<< HEAD:tests/test_rollout.py
def groups_of(batch):
    """The groups of one rank's step by how they ended: {fate: {prompt_id: samples}}."""
    kept = {}
    for sample in batch.kept + batch.dropped:
        kept.setdefault(sample.prompt_id, []).append(sample)
    others = {"filtered": batch.filtered, "carried": batch.carried}
    others = {fate: {group[0].prompt_id: group for group in groups} for fate, groups in others.items()}
    return {"kept": kept} | others


def tokens_of(groups):
    return sum(len(sample.response) for group in groups for sample in group)


def at_random_paces(seed):
    """Engines that differ up to tenfold in speed."""
    rng = random.Random(seed)

    def prepare(engines):
        for engine in engines:
            engine.server.pace = 0.005 * 10 ** rng.random()

    return prepare


def meeting_every(seconds):
    """Controllers that serve meet so often."""
    return mock.patch.object(rollout, "MEETING_INTERVAL_S", seconds)


# ---------------------------------------------------------------- nothing is lost


def check_prompts(controllers):
    """Every prompt was trained on, filtered, or waits: exactly one of them, and no controller disagrees."""
    done = Counter()
    for step in range(controllers[0].config.steps):
        fates = Counter()
        for batch in batches_of(controllers, step):
            ended = groups_of(batch)
            fates += Counter([prompt_id for groups in ended.values() for prompt_id in groups])
            done += Counter([*ended["kept"], *ended["filtered"]])
        assert set(fates.values()) <= {1}, "a prompt was served twice in one step"
        assert len({tuple(c.report.requeued[step]) for c in controllers}) == 1
    prompts = controllers[0].prompts
    assert done + Counter(prompts.requeued) == Counter(range(prompts.cursor))


def check_tokens(controllers):
    """Tokens generated are trained on, filtered or held, or else thrown away with what comes again."""
    generated = trained = filtered = thrown = 0
    for step in range(controllers[0].config.steps):
        for batch in batches_of(controllers, step):
            generated += batch.tokens
            trained += tokens_of([batch.kept])
            filtered += tokens_of([batch.dropped, *batch.filtered])
            thrown += tokens_of(batch.carried)
    held = sum(tokens_of(c.prompts.groups.values()) for c in controllers)
    if controllers[0].config.continues_answers:
        assert generated == trained + filtered + held
    else:
        assert held == 0 and generated == trained + filtered + thrown


def check_continued(controllers):
    """What a prompt's answers had when it was cut off is how they begin when it is served again.

    By the controller that holds it.
    """
    begun = {}
    for step in range(controllers[0].config.steps):
        for rank, batch in enumerate(batches_of(controllers, step)):
            for sample in (
                s for groups in groups_of(batch).values() for group in groups.values() for s in group
            ):
                owner, *before = begun.pop((sample.prompt_id, sample.index), (rank, [], [], []))
                now = (sample.response, sample.logprobs, sample.versions)
                assert owner == rank
                assert all(new[: len(old)] == old for old, new in zip(before, now, strict=True))
                assert before[0] or set(sample.versions) <= {*range(step, controllers[0].config.steps)}
        for rank, c in enumerate(controllers):
            begun |= {key: (rank, *facts) for key, facts in c.report.carried[step].items()}


def check_come_first(controllers):
    """What waited is dealt first in the next step."""
    for step in range(controllers[0].config.steps - 1):
        batches = batches_of(controllers, step + 1)
        served = [p for batch in batches for groups in groups_of(batch).values() for p in groups]
        first = controllers[0].report.requeued[step][: controllers[0].config.prompts_per_step]
        assert set(first) <= set(served)


@settings(max_examples=80, deadline=None)
@given(
    mode=st.sampled_from(["full", "partial", "auto"]),
    size=st.sampled_from([1, 2, 3, 4]),
    tp=st.sampled_from([1, 2]),
    over_dispatch=st.sampled_from([1.0, 1.25, 2.0, 4.0]),
    refills=st.integers(0, 3),
    interval_s=st.sampled_from([0.01, 0.05, 0.5]),
    seed=st.integers(0, 10**6),
)
def test_nothing_is_lost(mode, size, tp, over_dispatch, refills, interval_s, seed):
    """No prompt, no token, whatever is cut off. A sleeping engine is never asked (the fakes assert it)."""
    assume(size % tp == 0 and (size > 1 or mode != "partial"))
    options = dict(over_dispatch=over_dispatch, max_refill_waves=refills, rebalance=mode == "partial")
    with meeting_every(interval_s):
        controllers, _ = simulate(mode, size, tp=tp, steps=5, prepare=at_random_paces(seed), **options)
    check_prompts(controllers)
    check_tokens(controllers)
    check_come_first(controllers)
    if over_dispatch > 1:
        check_continued(controllers)


def test_a_judgement_is_not_begun_once_all_is_cut_off():
    """An answer that finished in the moment in which its group is cut off: a call would outlive the step."""
    asked = []

    class Rewards:
        async def score(self, sample, pool):
            asked.append(sample)

    async def close_before_it_begins():
        c = SimpleNamespace(rewards=Rewards())
        step = rollout.RolloutStep(c, rollout.DynamicSampler(1), rollout.is_informative)
        judging = asyncio.create_task(rollout.judge_one(step, Sample(0, 0, [1])))
        step.tasks.closed = True
        await judging

    asyncio.run(close_before_it_begins())
    assert not asked


def test_a_cut_off_prompt_comes_first_and_is_continued():
    """With what was generated of it; which weights wrote each token is known."""
    controllers, _ = simulate("partial", 4, over_dispatch=4.0, steps=6, eval_every=100)
    check_come_first(controllers)
    kept = [(step, s) for step in range(6) for batch in batches_of(controllers, step) for s in batch.kept]
    assert any(len(set(s.versions)) > 1 for _, s in kept) and any(s.versions[0] < step for step, s in kept)
    assert any(c.report.carried[step] for c in controllers for step in range(6))
========
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("prefix", [[0, 5, 31, 32, 70, 12], [33, 40, 46, 41, 36, 34]], ids=["many groups", "one group"])
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
        expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
        torch.testing.assert_close(output[first : first + n], expected)
        first += n
>>>>>>>> 28bd869 (Tests of the engine ask through a pool):tests/test_engine.py


def test_what_is_not_needed_begins_anew_by_default():
    """In the order of drawing, what comes again is empty, and every answer is of the step's weights."""
    controllers, _ = simulate("partial", 4, steps=6, eval_every=100)
    check_come_first(controllers)
    kept = [(step, s) for step in range(6) for batch in batches_of(controllers, step) for s in batch.kept]
    assert kept and all(set(s.versions) == {step} for step, s in kept)
    assert any(c.report.carried[step] for c in controllers for step in range(6))
    assert not any(c.prompts.groups for c in controllers)


<<<<<<<< HEAD:tests/test_rollout.py
# ---------------------------------------------------------------- the tail


def one_in_ten(prompt, index, sampling, long=7):
    """Answers of 10 tokens, of prompt 7 (or `long`) of 100; every group has both rewards."""
    question, begun = "".join(map(chr, prompt)).split("=")
    length = 98 if int(question.split("+")[0]) == long else 8
    text = ("#" * length + ">" + str(index % 2))[len(begun) :]
    return Answer(index, [ord(c) for c in text], [-0.5] * len(text), "stop", [])


def parity(prompt, index, sampling):
    """A judge that accepts `1`."""
    text = "Y" if to_text(prompt).rstrip("?")[-1] == "1" else "N"
    return Answer(0, [ord(text)], [-0.1], "stop", [])


def serving_seconds(controllers, step):
    """Of each rank."""
    return [s.end - s.start for c in controllers for s in c.report.steps[step][3] if s.name == "serve"]


========
>>>>>>>> 28bd869 (Tests of the engine ask through a pool):tests/test_engine.py
@pytest.mark.parametrize(
    "mode,size,over_dispatch,seconds",
    [
        # 0.1 s for genrm to wake, 100 tokens of 0.01 s, a verdict of one token
        ("partial", 2, 1.0, 0.1 + 1.0 + 0.01),
        # 10 tokens and a verdict; controllers meet 0.05 s after the first of theirs ended, at the latest
        ("partial", 2, 1.25, 0.1 + 0.1 + 0.01),
        ("partial", 4, 1.25, 0.1 + 0.1 + 0.01),
        # 100 tokens, rollout sleeps (0.1 s) and genrm wakes (0.1 s), a verdict
        ("full", 2, 1.0, 1.0 + 0.1 + 0.1 + 0.01),
        ("full", 2, 1.25, 0.1 + 0.1 + 0.1 + 0.01),
    ],
)
def test_over_dispatch_cuts_the_tail(mode, size, over_dispatch, seconds):
    """One of eight prompts has answers ten times as long: the default waits for it, 10 prompts for 8 do not.

<<<<<<<< HEAD:tests/test_rollout.py
    Worked out by hand. What the split's statistics say is the same.
    """
    options = dict(write=one_in_ten, verdict=parity, over_dispatch=over_dispatch, steps=1, eval_every=100)
    controllers, _ = simulate(mode, size, **options)
    for taken in (*serving_seconds(controllers, 0), controllers[0].state.history[0].serve_s):
        assert seconds - 1e-9 <= taken <= seconds + 2 * rollout.MEETING_INTERVAL_S
    swap_s = 0.2 if mode == "full" else 0.1
    assert controllers[0].state.history[0].swap_s == pytest.approx(swap_s)
    kept = {s.prompt_id for batch in batches_of(controllers, 0) for s in batch.kept}
    assert len(kept) == 8 and (7 in kept) == (over_dispatch == 1)
    assert (7 in controllers[0].prompts.requeued) == (over_dispatch > 1)


@pytest.mark.parametrize("mode,size", [("partial", 2), ("full", 2), ("partial", 4)])
def test_the_longest_prompt_is_trained_on_in_the_end(mode, size):
    """Cut off in every step, it goes on where it was: no prompt starves."""
    options = dict(over_dispatch=1.25, steps=10, eval_every=100)
    controllers, _ = simulate(mode, size, write=one_in_ten, verdict=parity, **options)
    kept = [(step, s) for step in range(10) for batch in batches_of(controllers, step) for s in batch.kept]
    long = [(step, s) for step, s in kept if s.prompt_id == 7]
    assert len(long) == 4 and len({step for step, _ in long}) == 1 and long[0][0] > 1
    assert all(len(s.response) == 100 and len(set(s.versions)) > 1 for _, s in long)
    check_tokens(controllers)


LAYOUTS = [("full", 1), ("full", 4), ("partial", 2), ("partial", 3), ("partial", 4), ("auto", 4)]
========
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    flags = server_flags(role, 0, 30000, models[0], dataclasses.replace(CONFIG, mode=mode))
    assert ("--enable-weights-cpu-backup" in flags) == keeps


def test_murmur_hash_equals_the_reference():
    import torch
>>>>>>>> 28bd869 (Tests of the engine ask through a pool):tests/test_engine.py


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(LAYOUTS), st.booleans())
def test_the_default_batch_does_not_depend_on_timing(seed, layout, rebalance):
    """Which prompts a step trains on, and their answers, whatever the engines' speed, mode and ranks."""
    mode, size = layout
    options = dict(steps=4, max_refill_waves=30)
    moves = dict(rebalance=rebalance and mode != "full", prepare=at_random_paces(seed))
    runs = [simulate("full", 1, **options)[0], simulate(mode, size, **options, **moves)[0]]
    for step in range(4):
        first, second = (
            sorted(
                (s.prompt_id, s.index, to_text(s.response), s.reward)
                for batch in batches_of(controllers, step)
                for s in batch.kept
            )
            for controllers in runs
        )
        assert first == second and len({prompt_id for prompt_id, *_ in first}) == 8


# ---------------------------------------------------------------- where controllers meet


def in_a_meeting(size, act, strike=lambda c: None):
    """`act(c)` of every controller between two meetings of a partial run, after `strike(c)`."""

    async def loop(c):
        await c.placement.begin()
        await c.placement.genrm.wake()
        strike(c)
        await asyncio.sleep(1.0)
        await act(c)

    return simulate("partial", size, rollout_ranks=2, loop=loop)[0]


def visible_state(c):
    """What a controller's callers can see of it."""
    pools = [c.placement.rollout, c.placement.genrm]
    outstanding = [[pool.route().rank for pool in pools], [pool.awake for pool in pools]]
    plan, engines = c.placement.plan, [[engine.rank for engine in pool.engines] for pool in pools]
    state, prompts = copy.deepcopy(c.state), copy.deepcopy(c.prompts.state())
    return c.stopping, c.stop.asked, plan, engines, outstanding, state, prompts, list(c.report.notes)


def hit(c):
    """The rollout engine of rank 0 dies, and rank 1 is asked to stop."""
    if c.world.rank == 0:
        c.placement.rollout.own.server.die()
    if c.world.rank == 1:
        c.stop.asked = 15


def test_a_meeting_by_itself_changes_nothing():
    """It says which engine was lost and that a stop was asked for; whoever doesn't follow it hasn't heard."""
    seen = []

    async def act(c):
        before = visible_state(c)
        meeting = await rollout.sync_controllers(c, f"fact {c.world.rank}")
        assert visible_state(c) == before and before[0] == 0
        seen.append(meeting)

    in_a_meeting(4, act, hit)
    assert len(seen) == 4 and all(meeting == seen[0] for meeting in seen)
    assert seen[0].facts == ["fact 0", "fact 1", "fact 2", "fact 3"] and seen[0].stop == 15
    assert [status.up for status in seen[0].rollout] == [False, True, True, True]
    assert all(status.up for status in seen[0].genrm)


def test_whoever_follows_a_meeting_routes_around_lost_engines_and_stops():
    """On every controller alike, with a line for people that names the engine."""
    asked = []

    async def act(c):
        rollout.follow(c, await rollout.sync_controllers(c, None))
        asked.append(c.placement.rollout.route().rank)

    controllers = in_a_meeting(4, act, hit)
    assert asked == [1] * 4 and [c.stopping for c in controllers] == [15] * 4
    for c in controllers:
        (note,) = c.report.notes
        assert note.startswith("the rollout engine of rank 0 died")


def test_a_role_without_engines_ends_the_run():
    """In one line, said by the first meeting that is followed."""

    async def act(c):
        meeting = await rollout.sync_controllers(c, None)
        with pytest.raises(ValueError, match=r"no rollout engine .*: the rollout engine of rank 0 died"):
            rollout.follow(c, meeting)

    def strike(c):
        if c.placement.rollout.own:
            c.placement.rollout.own.server.die()

    in_a_meeting(4, act, strike)


# ---------------------------------------------------------------- bad engines


def only(role, rank, **changes):
    """Change one engine, or with rank None all of a role."""

    def prepare(engines):
        for engine in engines:
            if engine.role == role and rank in (None, engine.rank):
                vars(engine.server).update(changes)

    return prepare


def requests(controllers, role):
    """Requests that each engine got, by rank."""
    placement = controllers[0].placement
    pool = {"rollout": placement.rollout, "genrm": placement.genrm}[role]
    return {engine.rank: engine.server.requests for engine in pool.all_engines}


def test_a_slow_engine_gets_fewer_requests():
    """Ten times slower: what it was asked at first bounds the step.

    The prompts that are drawn later go to the others.
    """
    options = dict(rollout_ranks=3, steps=3, eval_every=100, max_refill_waves=30)
    slow, _ = simulate("partial", 4, **options, prepare=only("rollout", 2, pace=0.1))
    check_prompts(slow)
    asked = requests(slow, "rollout")
    assert asked[2] < 0.8 * min(asked[0], asked[1])
    for step in range(3):
        # an answer has up to 65 tokens; a refill may still go there
        assert max(serving_seconds(slow, step)) < 2 * 10 * 0.7


SILENT = dict(pace=1e9, is_deaf=True)  # nothing comes of it, and it doesn't know that it is late


@pytest.mark.parametrize("mode,size,rank", [("full", 2, 1), ("partial", 4, 0), ("auto", 4, 1)])
def test_an_engine_that_stalls_is_passed_over(mode, size, rank):
    """Its groups are generated elsewhere after stalled_s; nobody asks it again until it wakes again."""
    options = dict(steps=3, eval_every=100, prepare=only("rollout", rank, **SILENT))
    controllers, _ = simulate(mode, size, **options)
    check_prompts(controllers)
    stalled_s = controllers[0].config.stalled_s
    assert max(serving_seconds(controllers, 0)) < stalled_s + 5
    pool = controllers[0].placement.rollout
    (engine,) = [engine for engine in pool.all_engines if engine.rank == rank]
    first_step = [sent for sent, version in engine.server.asked if version == 0]
    assert first_step and max(first_step) < stalled_s


@pytest.mark.parametrize("mode,size", [("full", 2), ("partial", 2), ("full", 4)])
def test_engines_that_all_stall_stop_the_run(mode, size):
    """With one sentence that names the setting; three engines, or three times the same one, stalled."""
    with pytest.raises(ValueError, match=r"rollout engine of rank \d.*--timeout-s 100"):
        simulate(mode, size, eval_every=100, prepare=only("rollout", None, **SILENT))


@pytest.mark.parametrize("mode,size", [("full", 2), ("partial", 4)])
@pytest.mark.parametrize("part", [0, 0.5])
def test_answers_that_an_engine_aborts_are_continued(mode, size, part):
    """All answers are aborted once, in the queue or half generated, by nobody's wish.

    They go on where they were, in the same step.
    """
    aborted = set()

    def abort_once(prompt, index, sampling):
        answer, question = write_answer(prompt, index, sampling), to_text(prompt).split("=")[0]
        if (question, index) in aborted or to_text(prompt)[-1] != "=":
            return answer
        aborted.add((question, index))
        tokens = answer.tokens[: int(part * len(answer.tokens))]
        return Answer(index, tokens, answer.logprobs[: len(tokens)], "abort", [])

    controllers, _ = simulate(mode, size, steps=2, eval_every=100, write=abort_once)
    check_prompts(controllers)
    check_tokens(controllers)
    for step in range(2):
        batches = batches_of(controllers, step)
        assert sum(len(batch.kept) for batch in batches) == 8 * 4 and sum(batch.aborted for batch in batches)
        assert all(s.finish == "stop" for batch in batches for s in batch.kept)


# ---------------------------------------------------------------- bad judges


@pytest.mark.parametrize("mode,size", [("full", 2), ("partial", 2), ("partial", 4)])
def test_garbage_of_a_judge_is_dropped(mode, size, monkeypatch):
    """For about one pair in twenty: those samples are neither scored nor trained on, the rest is."""
    monkeypatch.setattr(genrm, "MAX_JUDGE_FAILURES", 1000)

    def varied(prompt, index, sampling):
        wrong_by = random.Random(f"{to_text(prompt)} {index}").choice([0, 0, 1, 2, 3])
        text = f">{int(to_text(prompt).split('+')[0]) + wrong_by}"
        return Answer(index, [ord(c) for c in text], [-0.5] * len(text), "stop", [])

    def garbage(prompt, index, sampling):
        unreadable = random.Random(to_text(prompt)).random() < 0.05
        garbled = Answer(0, [ord("?")], [-0.1], "stop", [])
        return garbled if unreadable else write_verdict(prompt, index, sampling)

    controllers, _ = simulate(mode, size, write=varied, verdict=garbage, steps=6)
    check_prompts(controllers)
    check_tokens(controllers)
    batches = [batch for step in range(6) for batch in batches_of(controllers, step)]
    dropped = [s for batch in batches for s in batch.dropped]
    assert dropped and all(s.reward is None for s in dropped)
    assert not any(s.reward is None for batch in batches for s in batch.kept)
    assert sum(failed for c in controllers for failed in c.rewards.counts()[0]) > 0


@pytest.mark.parametrize("mode,size", [("full", 2), ("partial", 4)])
def test_a_judge_that_stalls_costs_time_and_no_sample(mode, size):
    """One of two judges' engines is silent: its calls go to the other, and every answer has its reward."""
    options = dict(steps=2, eval_every=100, rollout_ranks=0 if mode == "full" else 2)
    controllers, _ = simulate(mode, size, **options, prepare=only("genrm", size - 1, **SILENT))
    check_prompts(controllers)
    batches = [batch for step in range(2) for batch in batches_of(controllers, step)]
    samples = [s for batch in batches for s in batch.kept + batch.dropped]
    assert samples and all(s.reward is not None for s in samples)
    assert max(serving_seconds(controllers, 0)) < controllers[0].config.stalled_s + 10


def test_judges_that_all_stall_stop_the_run():
    """With one sentence that names the engine and the setting."""
    with pytest.raises(ValueError, match=r"genrm engine of rank 1.*--timeout-s 100"):
        simulate("partial", 2, prepare=only("genrm", None, **SILENT))


# ---------------------------------------------------------------- prompts that teach nothing


def always_right(prompt, index, sampling):
    question, begun = to_text(prompt).split("=")
    length = random.Random(question).randint(0, 60)
    text = (" " * length + ">" + question.split("+")[0])[len(begun) :]
    return Answer(index, [ord(c) for c in text], [-0.5] * len(text), "stop", [])


@pytest.mark.parametrize("mode,size", [("full", 2), ("partial", 2), ("partial", 4), ("auto", 4)])
@pytest.mark.parametrize("over_dispatch", [1.0, 2.0])
def test_prompts_that_teach_nothing_do_not_hang_the_run(mode, size, over_dispatch):
    """No group ever has two rewards: waves end, the batch is empty, and the run goes on.

    groups_per_kept stays at most 10.
    """
    controllers, _ = simulate(mode, size, write=always_right, over_dispatch=over_dispatch, steps=12)
    check_prompts(controllers)
    for c in controllers:
        assert c.placement.actor.version == 12 and c.state.empty_steps == 12
        assert 5 < c.state.groups_per_kept <= 10
    for step in range(12):
        batches = batches_of(controllers, step)
        assert not any(batch.kept for batch in batches)
        assert all(batch.missing_groups == 8 and batch.waves == 4 for batch in batches)


@pytest.mark.parametrize("mode,size", [("full", 2), ("partial", 4)])
def test_enough_empty_steps_stop_every_rank(mode, size, monkeypatch):
    """After MAX_EMPTY_STEPS in a row; every rank has done as many steps, and the last has its row."""
    monkeypatch.setattr(controller, "MAX_EMPTY_STEPS", 3)
    controllers = []
    with pytest.raises(ValueError, match="no prompt of 3 steps in a row"):
        simulate(mode, size, write=always_right, steps=12, controllers=controllers)
    assert [len(c.report.steps) for c in controllers] == [3] * size
