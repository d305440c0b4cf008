"""run.py eval: the loop's evaluation without a step, what it leaves, how it goes on; pass@k by counting."""

import itertools
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import controller
from config import Config
from reporting.answers import AnswersReport, keep_answers
from reporting.metrics import pass_at_k
from tests.support.fakes import (
    FakeSource,
    FakeWorld,
    fake_config,
    number_in,
    simulate,
    text_answer,
    to_text,
)

RATE = "eval/tokens_per_s"
WORDS = "goes on: {} prompts are answered"


def rows_in(out):
    rows = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    return sorted(rows, key=lambda row: row["prompt"])


def by_hand(prompt, index, sampling):
    """Of 0 the greedy answer and samples 1 and 3 are right, of 1 none; the last of 5 is cut off."""
    is_right = number_in(prompt) == 0 and index in (0, 1, 3, 5)
    text = f">{number_in(prompt) + (not is_right)}"
    return text_answer(" " * 200 + text if index == 5 else text, index)


def evaluate(out, size=1, write=by_hand, prompts=2, events=(), **settings):
    """Evaluate on fakes; returns the controllers, what rank 0 said, and the questions that were asked."""
    said, asked = [], []
    given = dict(command="eval", model="m", eval_samples=5, out=str(out), **settings)
    config = fake_config(**given)
    out.mkdir(exist_ok=True)
    keep_answers(config, {"model": ["a hash"]}, said.append)

    def ask(prompt, index, sampling):
        asked.append(to_text(prompt)) if sampling.temperature == 0 else None
        return write(prompt, index, sampling)

    def awaken(engines):
        for engine in engines:
            engine.version = 0  # the weights of its own directory

    def report(c):
        c.prompts.source.held_out = FakeSource().held_out[:prompts]
        progress = SimpleNamespace(line=said.append, resume_at=lambda *at: None, done=list)
        c.report = AnswersReport(c.config, c.world, out, progress, to_text)

    how = dict(write=ask, prepare=awaken, prepare_controller=report, events=events)
    found, _ = simulate(size=size, loop=controller.evaluate_once, **given | how, mode="partial")
    if not any(c.was_stopped for c in found):
        for c in found:
            c.report.close()
    return found, said, asked


@pytest.mark.parametrize("size", [1, 3])
def test_an_evaluation_compares_answers_with_their_keys(tmp_path, size):
    """On any number of ranks. Of the first prompt samples 1 and 3 are right, of the second none."""
    controllers, said, _ = evaluate(tmp_path / "out", size)
    assert not any(c.was_stopped for c in controllers)
    found = json.loads((tmp_path / "out" / "eval.json").read_text())
    # of the first, 3 of the 10 ways to draw 2 have no right one, and none of those to draw 4
    figures = {"accuracy": 1, "pass@1": 2 / 5, "pass@2": 1 - 3 / 10, "pass@4": 1, "pass@5": 1}
    for name, of_first in figures.items():
        assert found[f"eval/{name}"] == pytest.approx(of_first / 2)
    assert found["prompts"] == 2 and found["eval/truncated_frac"] == pytest.approx(2 / 12)
    assert found["eval/tokens_per_s"] > 0 and found["config"]["eval_samples"] == 5
    first, second = rows_in(tmp_path / "out")
    assert (first["prompt"], first["question"], first["answer"]) == (0, "0+0=", "0")
    assert (first["greedy"], first["sampled"][:2]) == (">0", [">0", ">1"])
    assert first["right"] == [True, True, False, True, False, False] and not any(second["right"])
    assert first["finish"] == ["stop"] * 5 + ["length"] and first["tokens"] == 5 * 2 + 100
    assert "eval/accuracy 0.500" in said[0] and "none of" not in said[-1]


@pytest.mark.parametrize("size", [1, 2])
def test_an_evaluation_goes_on_where_it_was_stopped(tmp_path, size):
    """It asks for what wasn't answered alone, and comes to an unbroken one's rows and figures."""
    slow = dict(write=lambda prompt, *_: text_answer(" " * 90 * number_in(prompt)), prompts=5)
    slow |= dict(max_new_tokens=400, max_running_requests=1)
    evaluate(tmp_path / "unbroken", size, **slow)
    out = tmp_path / "out"

    def stop(engines, controllers):
        controllers[-1].stop.asked = 15

    controllers, _, _ = evaluate(out, size, events=[(2.0, stop)], **slow)
    assert all(c.was_stopped for c in controllers) and not (out / "eval.json").exists()
    answered = len(rows_in(out))
    assert 0 < answered < 5
    with (out / "answers.jsonl").open("a") as file:
        file.write('{"prompt": 4, "qu')  # kill -9 while it is written
    _, said, asked = evaluate(out, size, **slow)
    assert said[0] == WORDS.format(answered) and len(asked) == 5 - answered
    assert rows_in(out) == rows_in(tmp_path / "unbroken")
    figures = []
    for folder in (out, tmp_path / "unbroken"):
        found = json.loads((folder / "eval.json").read_text())
        figures.append({name: found[name] for name in found if name not in ("config", RATE)})
    assert figures[0] == figures[1]


@pytest.mark.parametrize("change", ["nothing", "setting", "contents", "finished"])
def test_another_evaluation_begins_anew(tmp_path, change):
    """The one before is moved aside, whole; that of the same settings and files goes on."""
    out, said = tmp_path / "out", []
    out.mkdir()
    config, contents = Config(command="eval", model="m", out=str(out)), {"data": ["a"]}
    keep_answers(config, contents, said.append)
    (out / "answers.jsonl").write_text('{"prompt": 0}\n')
    if change == "finished":
        AnswersReport(config, FakeWorld(0, 1, {}), out, None, to_text).close()
        (out / "eval.json").touch()
    if change == "contents":
        contents = {"data": ["b"]}
    if change == "setting":
        config = Config(command="eval", model="m", out=str(out), eval_samples=2)
    keep_answers(config, contents, said.append)
    assert (out / "answers.jsonl").exists() == (change == "nothing")
    assert (tmp_path / "out-1" / "answers.jsonl").exists() == (change != "nothing") == bool(said)


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
