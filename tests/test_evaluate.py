"""Evaluation: answers against their keys, pass@k against counting."""

import asyncio
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import data
from commands import evaluate
from commands.evaluate import pass_at_k
from config import UserError, parse_config
from demo import task  # noqa: F401  task adds the format
from engines.engine import Answer, Sampling, seed_of
from engines.pool import Pool
from examples.make_demo import models
from models import end_turns_with
from reporting.timeline import Timeline
from tests.fakes import Device, FakeEngine, FakeWorld, VirtualClock, run_on, text_answer


def answers_of(tokenizer, count):
    """To one prompt: >7, but of the sampled ones >8 with an odd index, and the last of them is cut off."""
    for index in range(count):
        text = ">8" if index % 2 and index < count - 1 else ">7"
        tokens = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        yield Answer(index, tokens, [], "length" if index == count - 2 else "stop", [])


def test_an_evaluation_compares_answers_with_their_keys(tmp_path, monkeypatch, capsys):
    """By hand: of samples 0 to 4, 0 and 2 are right, and 4 was cut off; 7 answers one of two problems."""
    models.new_model(tmp_path / "model", 0)
    end = end_turns_with(tmp_path / "model", "<unused59>")
    tokenizer = data.load_tokenizer(str(tmp_path / "model"))
    rows = [{"prompt": "3+4=", "answer": 7}, {"prompt": "3+5=", "answer": "9"}, {"prompt": "3+6="}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked, out = [], tmp_path / "out"
    out.mkdir()

    async def generate(config, fleet, prompts, sampling):
        asked.extend(prompts)
        assert sampling.stop_token_ids == (tokenizer.eos_token_id, end)
        return [[*answers_of(tokenizer, config.samples + 1)] for _ in prompts]

    monkeypatch.setattr(evaluate, "generate", generate)
    given = f"--data {tmp_path}/rows.jsonl --out {out} --model {tmp_path}/model"
    given += " --judge-format addition --samples 5 --max-new-tokens 72"
    asyncio.run(evaluate.evaluate(parse_config(["eval", *given.split()]), None, print))
    encoded = [data.encode(tokenizer, row["prompt"]) for row in rows[:2]]
    assert [prompt.tokens for prompt in asked] == encoded
    found = json.loads((out / "eval.json").read_text())
    # of the first, 3 of the 10 ways to draw 2 have no right one, and none of those to draw 4
    by_hand = {"accuracy": 1, "pass@1": 2 / 5, "pass@2": 1 - 3 / 10, "pass@4": 1}
    for name, of_first in by_hand.items():
        assert found[f"eval/{name}"] == pytest.approx(of_first / 2)
    assert found["prompts"] == 2 and "pass@2 0.350" in capsys.readouterr().out
    first, second = (json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines())
    assert (first["question"], first["greedy"], first["sampled"][1]) == ("3+4=", ">7", ">8")
    assert first["right"] == [True, False, True, False, False, True] and not any(second["right"])
    assert first["finish"] == ["stop"] * 4 + ["length", "stop"]


@pytest.mark.parametrize("name, accuracy", [("chat", 0), ("number", 0.5)])
def test_an_evaluation_without_a_right_answer_says_what_one_looks_like(
    tmp_path, monkeypatch, capsys, name, accuracy
):
    """`>7` is no 7 to `chat`. A whole solution as the key is read, too; a word isn't by `number`."""
    models.new_model(tmp_path / "model", 0)
    (tmp_path / "out").mkdir()
    rows = [{"prompt": "3+4=", "answer": "3+4=7\n#### 7.0"}, {"prompt": "3+5=", "answer": 9}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = data.load_tokenizer(str(tmp_path / "model"))

    async def generate(config, fleet, prompts, sampling):
        return [[*answers_of(tokenizer, config.samples + 1)] for _ in prompts]

    monkeypatch.setattr(evaluate, "generate", generate)
    given = f"--data {tmp_path}/rows.jsonl --out {tmp_path}/out --model {tmp_path}/model"
    given += f" --judge-format {name} --samples 5 --max-new-tokens 72"
    asyncio.run(evaluate.evaluate(parse_config(["eval", *given.split()]), None, print))
    said = capsys.readouterr().out
    assert f"accuracy {accuracy:.3f}" in said
    line = (
        "none of 12 answers is right by --judge-format chat; one ends in '>7', and its key is '7.0'"
    )
    assert (line in said) == (name == "chat") == ("none of" in said)


class FakePool:
    """Writes what it was asked for, the latest first."""

    async def generate(self, requests):
        for index, request in reversed([*enumerate(requests)]):
            is_greedy = request.sampling.temperature == 0
            yield Answer(index, [*request.prompt, request.seed, is_greedy], [], "stop", [])


def test_a_prompt_is_asked_once_with_a_seed_for_each_answer():
    """In one request, the greedy one last; seeds follow from the run's and from both numbers."""
    config = parse_config(["eval", "--model", "m", "--samples", "3"])
    what = (data.Prompt([5], "", None), FakePool(), Sampling(1.0, 9), config)
    for number in (4, 5):
        answers = asyncio.run(evaluate.ask(number, *what))
        seeds = [seed_of(0, "eval", number, index) for index in range(4)]
        assert [answer.tokens for answer in answers] == [[5, s, s == seeds[3]] for s in seeds]


@pytest.mark.parametrize("verb", ["die", "hang"])
def test_an_engine_that_is_gone_ends_an_evaluation(verb):
    """In one line, while answers are awaited."""
    engine = FakeEngine("genrm", 0, Device(0, []), lambda *_: text_answer("7" * 4000))
    clock, config = VirtualClock(), parse_config(["eval", "--model", "m", "--samples", "1"])

    async def evaluation():
        pool = Pool([engine], FakeWorld(0, 1, {}), Timeline(0, clock.time), config)
        await pool.wake()
        clock.call_later(5, engine.die if verb == "die" else engine.hang)
        prompts = [data.Prompt([ord("7"), ord("+")], "", None)] * 3
        await asyncio.wait_for(evaluate.ask_all(prompts, pool, Sampling(1.0, 5000), config), 30)

    line = "no genrm engine is left to ask: the genrm engine of rank 0 (died|gave no sign of life)"
    with pytest.raises(UserError, match=line):
        run_on(clock, evaluation())


@given(st.integers(1, 9), st.data())
def test_pass_at_k_counts_the_draws_that_hold_a_right_answer(samples, drawn):
    """Over all ways to draw k of them, one by one."""
    right, k = drawn.draw(st.integers(0, samples)), drawn.draw(st.integers(1, samples))
    answers = [True] * right + [False] * (samples - right)
    draws = list(itertools.combinations(answers, k))
    expected = sum(map(any, draws)) / len(draws)
    assert pass_at_k(samples, right, k) == pytest.approx(expected, abs=1e-12)
