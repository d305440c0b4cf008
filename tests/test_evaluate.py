"""Evaluation: answers against their keys, pass@k against counting."""

import asyncio
import itertools
import json
from collections import Counter
from unittest.mock import create_autospec

import pytest
from hypothesis import given
from hypothesis import strategies as st

import data
from commands import evaluate
from config import parse_config
from demo import task  # noqa: F401  task adds the format
from engines.engine import Answer, EngineLost, Sampling, seed_of
from engines.fleet import Fleet
from engines.pool import EngineStatus, Pool
from examples.make_demo import models
from models import end_turns_with
from reporting.metrics import pass_at_k
from reporting.timeline import Timeline
from rollout import Tasks
from runtime.shutdown import Stop
from scheduling.measured import RequestStats
from support.rows import jsonl
from tests.fakes import Device, FakeEngine, FakeWorld, VirtualClock, run_on, text_answer


class FakePool:
    """Writes what `write` says to a prompt's requests, the latest first; after `most` prompts it breaks."""

    def __init__(self, write, most=10**6, broken=None):
        self.write, self.left, self.broken, self.asked, self.tokens = write, most, broken, [], 0

    async def wake(self):
        self.woke_at = asyncio.get_running_loop().time()

    async def generate(self, requests):
        if not self.left:
            await asyncio.sleep(5)
            raise AssertionError("nobody saw that it is broken")
        self.left -= 1
        self.asked.append(requests)
        for answer in reversed([*self.write(requests)]):
            self.tokens += len(answer.tokens)
            yield answer

    def status(self):
        return EngineStatus(Counter(), Counter(), 0)

    def apply_status(self, status):
        if not self.left:
            self.broken()

    def pop_stats(self):
        came, self.tokens = self.tokens, 0
        return RequestStats(came)


class FakeProgress:
    """Keeps what is said."""

    def __init__(self):
        self.lines, self.bar, self.at = [], [], None
        self.line, self.doing = self.lines.append, self.bar.append

    def resume_at(self, done, total):
        self.at = (done, total)

    def done(self):
        self.at = (self.at[0] + 1, self.at[1])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory, its tokenizer, and what else ends an answer."""
    folder = tmp_path_factory.mktemp("model")
    models.new_model(folder, 0)
    end = end_turns_with(folder, "<unused59>")
    return folder, data.load_tokenizer(str(folder)), end


@pytest.fixture
def writing(model):
    """A function of what to write to (index, request): answers that end; the one `cut` is cut off."""
    tokenizer = model[1]

    def writing(text_of, cut=None):
        def write(requests):
            for index, request in enumerate(requests):
                tokens = tokenizer(text_of(index, request), add_special_tokens=False)["input_ids"]
                finish = "length" if index == cut else "stop"
                yield Answer(index, [*tokens, tokenizer.eos_token_id], [], finish, [])

        return write

    return writing


@pytest.fixture
def evaluate_in(model, tmp_path):
    """A function that evaluates on a pool, in OUT, and returns its last word and what it has said."""
    (tmp_path / "out").mkdir()

    def evaluated(pool, *more, stop=None):
        given = f"--data {tmp_path}/rows.jsonl --out {tmp_path}/out --model {model[0]}".split()
        given += ["--judge-format", "addition", "--max-new-tokens", "72", *more]
        fleet = create_autospec(Fleet, instance=True)
        fleet.connect.return_value = {"rollout": pool}
        fleet.while_up = lambda work: work
        progress = FakeProgress()
        config = parse_config(["eval", *given])
        return asyncio.run(evaluate.evaluate(config, fleet, progress, stop or Stop())), progress

    return evaluated


def read(out):
    rows = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    return sorted(rows, key=lambda row: row["prompt"])


def test_an_evaluation_compares_answers_with_their_keys(tmp_path, model, evaluate_in, writing):
    """By hand: of samples 0 to 4, 0 and 2 are right, and 4 was cut off; 7 answers one of two problems."""
    _, tokenizer, end = model
    rows = [{"prompt": "3+4=", "answer": 7}, {"prompt": "3+5=", "answer": "9"}]
    jsonl(tmp_path / "rows.jsonl", rows)
    pool = FakePool(writing(lambda index, _: ">8" if index in (1, 3) else ">7", cut=4))
    last, progress = evaluate_in(pool, "--samples", "5")
    encoded = [data.encode(tokenizer, row["prompt"]) for row in rows[:2]]
    assert [requests[0].prompt for requests in pool.asked] == encoded
    assert pool.asked[0][0].sampling.stop_token_ids == (tokenizer.eos_token_id, end)
    found = json.loads((tmp_path / "out" / "eval.json").read_text())
    # of the first, 3 of the 10 ways to draw 2 have no right one, and none of those to draw 4
    by_hand = {"accuracy": 1, "pass@1": 2 / 5, "pass@2": 1 - 3 / 10, "pass@4": 1, "pass@5": 1}
    for name, of_first in by_hand.items():
        assert found[f"eval/{name}"] == pytest.approx(of_first / 2)
    assert found["prompts"] == 2 and found["eval/truncated_frac"] == pytest.approx(2 / 12)
    first, second = read(tmp_path / "out")
    assert (first["prompt"], second["prompt"]) == (0, 1)
    assert (first["question"], first["greedy"], first["sampled"][1]) == ("3+4=", ">7", ">8")
    assert first["right"] == [True, False, True, False, False, True] and not any(second["right"])
    assert first["finish"] == ["stop"] * 4 + ["length", "stop"]
    rate = f"{found['eval/tokens_per_s']:.0f} tokens/s"
    said = progress.lines[-2]
    assert found["eval/tokens_per_s"] > 0 and progress.at == (2, 2) and last == ""
    assert "pass@2 0.350  pass@4" in said and said.endswith(f"each, {rate})")


def test_a_row_without_a_key_is_refused(tmp_path, evaluate_in):
    jsonl(tmp_path / "rows.jsonl", [{"prompt": "3+4=", "answr": 7}])
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: `answer` is missing, for run.py eval"):
        evaluate_in(FakePool(lambda requests: []))


@pytest.mark.parametrize("name, accuracy", [("chat", 0), ("number", 0.5)])
def test_without_a_right_answer_one_is_shown(tmp_path, evaluate_in, writing, name, accuracy):
    """`>7` is no 7 to `chat`. A whole solution as the key is read, too; a word isn't by `number`."""
    rows = [{"prompt": "3+4=", "answer": "3+4=7\n#### 7.0"}, {"prompt": "3+5=", "answer": 9}]
    jsonl(tmp_path / "rows.jsonl", rows)
    pool = FakePool(writing(lambda *_: ">7"))
    _, progress = evaluate_in(pool, "--samples", "5", "--judge-format", name)
    said = "\n".join(progress.lines)
    assert f"accuracy {accuracy:.3f}" in said
    by = "none of 12 answers is right by --judge-format chat"
    line = f"{by}; one ends in '>7', and its key is"
    assert (line in said) == (name == "chat") == ("none of" in said)


@pytest.fixture
def five(writing, tmp_path):
    """Five problems, and what writes answers that follow from the seeds alone."""
    rows = [{"prompt": f"{n}+4=", "answer": n + 4} for n in range(5)]
    jsonl(tmp_path / "rows.jsonl", rows)
    return writing(lambda _, request: f">{request.seed % 10}")


def lose_the_engine():
    raise EngineLost("the rollout engine of rank 0 died")


def stopped_evaluation(evaluate_in, five):
    with pytest.raises(EngineLost):
        evaluate_in(FakePool(five, 2, lose_the_engine), "--samples", "3")


def test_an_evaluation_goes_on_where_it_was_stopped(tmp_path, evaluate_in, five):
    """It asks what wasn't answered alone, and comes to an unbroken one's rows and figures."""
    out = tmp_path / "out"
    evaluate_in(FakePool(five), "--samples", "3")
    unbroken = [json.loads((out / "eval.json").read_text()), read(out)]
    out.rename(tmp_path / "unbroken")
    out.mkdir()
    stopped_evaluation(evaluate_in, five)
    with (out / "answers.jsonl").open("a") as file:
        file.write('{"prompt": 2, "qu')  # kill -9 while it is written
    assert not (out / "eval.json").exists()
    stop = Stop()
    pool = FakePool(five, 1, lambda: vars(stop).update(asked=15))
    last, progress = evaluate_in(pool, "--samples", "3", stop=stop)
    assert stop.graceful and last == "stopped after 3 of 5 prompts" and progress.at == (3, 5)
    assert progress.lines[-1] == "goes on after 2 of 5 prompts"
    pool = FakePool(five)
    last, progress = evaluate_in(pool, "--samples", "3", "--port", "7000")
    assert last == "" and len(pool.asked) == 2 and "goes on after 3 of 5 prompts" in progress.lines
    found = [json.loads((out / "eval.json").read_text()), read(out)]
    for figures, _ in (found, unbroken):
        del figures["eval/tokens_per_s"], figures["config"]
    assert found == unbroken
    assert not (tmp_path / "out-1").exists()


@pytest.mark.parametrize("change", ["setting", "data", "model", "finished"])
def test_another_evaluation_begins_anew(tmp_path, model, evaluate_in, five, change):
    """The one before is moved aside, whole."""
    stopped_evaluation(evaluate_in, five)
    more = ["--samples", "2" if change == "setting" else "3"]
    if change == "data":
        with (tmp_path / "rows.jsonl").open("a") as file:
            file.write('{"prompt": "5+5=", "answer": 10}\n')
    if change == "model":
        with (model[0] / "generation_config.json").open("a") as file:
            file.write(" ")
    if change == "finished":
        evaluate_in(FakePool(five), *more)
    before = read(tmp_path / "out")
    pool = FakePool(five)
    _, progress = evaluate_in(pool, *more)
    assert len(pool.asked) == (6 if change == "data" else 5) == len(read(tmp_path / "out"))
    assert read(tmp_path / "out-1") == before
    assert progress.lines[1].startswith("moved the earlier run in ")


def test_a_prompt_is_asked_once_with_a_seed_for_each_answer():
    """In one request, the greedy one last; seeds follow from the run's and from both numbers."""

    def write(requests):
        for index, request in enumerate(requests):
            is_greedy = request.sampling.temperature == 0
            yield Answer(index, [*request.prompt, request.seed, is_greedy], [], "stop", [])

    config = parse_config(["eval", "--model", "m", "--samples", "3"])
    what = (data.Prompt([5], "", None), FakePool(write), Sampling(1.0, 9), config)
    for number in (4, 5):
        answers = asyncio.run(evaluate.ask(number, *what))
        seeds = [seed_of(0, "eval", number, index) for index in range(4)]
        assert [answer.tokens for answer in answers] == [[5, s, s == seeds[3]] for s in seeds]


@pytest.mark.parametrize("verb", ["die", "hang"])
def test_an_engine_that_is_gone_ends_an_evaluation(verb):
    engine = FakeEngine("genrm", 0, Device(0, []), lambda *_: text_answer("7" * 4000))
    clock, config = VirtualClock(), parse_config(["eval", "--model", "m", "--samples", "1"])
    prompt, tasks = data.Prompt([ord("7"), ord("+")], "", None), Tasks()

    async def evaluation():
        pool = Pool([engine], FakeWorld(0, 1, {}), Timeline(0, clock.time), config)
        await pool.wake()
        clock.call_later(5, engine.die if verb == "die" else engine.hang)
        fleet = Fleet(config, FakeWorld(0, 1, {}))
        fleet._engines = [engine]
        async with asyncio.timeout(30), tasks:
            for number in range(3):
                tasks.start(number, evaluate.ask(number, prompt, pool, Sampling(1.0, 5000), config))
            await fleet.while_up(evaluate.wait_for_answers(tasks, pool, Stop(), FakeProgress()))

    line = (
        r"the genrm engine of rank 0 (died \(signal 9\)|gave no sign of life); the end of its log: "
    )
    with pytest.raises(EngineLost, match=line):
        run_on(clock, evaluation())


@given(st.integers(1, 9), st.data())
def test_pass_at_k_counts_the_draws_that_hold_a_right_answer(samples, drawn):
    """Over all ways to draw k of them, one by one, in the mean over prompts. k: powers of two, and all."""
    counts = drawn.draw(st.lists(st.integers(0, samples), min_size=1, max_size=3))
    found = pass_at_k(samples, counts)
    sizes = [k for k in range(1, samples + 1) if k in (1, 2, 4, 8, samples)]
    assert [*found] == [f"eval/pass@{k}" for k in sizes]
    for name, value in found.items():
        shares = []
        for right in counts:
            answers = [True] * right + [False] * (samples - right)
            draws = list(itertools.combinations(answers, int(name.partition("@")[2])))
            shares.append(sum(map(any, draws)) / len(draws))
        assert value == pytest.approx(sum(shares) / len(shares), abs=1e-12)
    assert pass_at_k(0, counts) == {}
