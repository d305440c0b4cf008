"""--steps 0: the loop's evaluation without a step, and its files; pass@k by counting."""

import itertools
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import evaluation
from extras.answers import AnswersReport, start_evaluation
from reporting.metrics import pass_at_k
from runtime.errors import UserError
from tests.support.fakes import FakeSource, number_in, simulate, text_answer, to_text


def rows_in(out):
    rows = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    return sorted(rows, key=lambda row: row["prompt"])


def figures_in(out):
    [row] = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return row


def by_hand(prompt, index, sampling):
    """Make prompt 0's greedy answer and samples 1, 3 right, none of 1's; cut off the last of prompt 5."""
    is_right = number_in(prompt) == 0 and index in (0, 1, 3, 5)
    text = f">{number_in(prompt) + (not is_right)}"
    return text_answer(" " * 200 + text if index == 5 else text, index)


def evaluate(out, size=1, write=by_hand, prompts=2, events=(), **settings):
    """Evaluate on fakes; return the controllers and rank 0's messages."""
    said = []
    given = dict(steps=0, model="m", eval_samples=5, out=str(out), **settings)
    out.mkdir(exist_ok=True)
    start_evaluation(out, said.append, given)

    def awaken(engines):
        for engine in engines:
            engine.version = 0  # the weights of its own directory

    def report(c):
        c.prompts.source.held_out = FakeSource().held_out[:prompts]
        progress = SimpleNamespace(line=said.append, resume_at=lambda *at: None, done=list)
        c.report = AnswersReport(c.config, c.world, out, progress, to_text, prompts=prompts)

    how = dict(write=write, prepare=awaken, prepare_controller=report, events=events)
    found, _ = simulate(size=size, loop=evaluation.evaluate_once, **given | how, mode="partial")
    if not any(c.was_stopped for c in found):
        for c in found:
            c.report.close()
    return found, said


@pytest.mark.parametrize("size", [1, 3])
def test_an_evaluation_compares_answers_with_their_keys(tmp_path, size):
    """On any number of ranks, samples 1 and 3 of the first prompt are right, and none of the second."""
    controllers, said = evaluate(tmp_path / "out", size)
    assert not any(c.was_stopped for c in controllers)
    found = figures_in(tmp_path / "out")
    # for the first, 3 of 10 ways to draw 2 have no right one, and none of those to draw 4
    figures = {"accuracy": 1, "pass@1": 2 / 5, "pass@2": 1 - 3 / 10, "pass@4": 1, "pass@5": 1}
    for name, of_first in figures.items():
        assert found[f"eval/{name}"] == pytest.approx(of_first / 2)
    assert found["eval/truncated_frac"] == pytest.approx(2 / 12, abs=1e-6)
    assert found["eval/tokens_per_s"] > 0 and found["step"] == 0
    first, second = rows_in(tmp_path / "out")
    assert (first["prompt"], first["question"], first["answer"]) == (0, "0+0=", "0")
    assert (first["greedy"], first["sampled"][:2]) == (">0", [">0", ">1"])
    assert first["right"] == [True, True, False, True, False, False] and not any(second["right"])
    assert first["finish"] == ["stop"] * 5 + ["length"] and first["tokens"] == 5 * 2 + 100
    assert "eval/accuracy 0.500" in said[0] and "none of" not in said[-1]


@pytest.mark.parametrize("size", [1, 2])
def test_an_evaluation_that_is_stopped_begins_anew(tmp_path, size):
    """Finished answers must be moved aside. The next one generates all again, and gets all figures."""
    slow = dict(write=lambda prompt, *_: text_answer(" " * 90 * number_in(prompt)), prompts=5)
    slow |= dict(max_new_tokens=400, max_running_requests=1)
    out = tmp_path / "out"

    def stop(engines, controllers):
        controllers[-1].stop.asked = 15

    controllers, _ = evaluate(out, size, events=[(2.0, stop)], **slow)
    assert all(c.was_stopped for c in controllers) and not (out / "metrics.jsonl").exists()
    assert 0 < len(rows_in(out)) < 5
    _, said = evaluate(out, size, **slow)
    assert said[0] == f"moved the earlier run in {out} to {out}-1"
    assert [row["prompt"] for row in rows_in(out)] == [*range(5)] and figures_in(out)


@pytest.mark.parametrize("name", ["checkpoints/step_3", "hf/step_3", "hf/config.json"])
def test_a_folder_with_weights_is_refused(tmp_path, name):
    """Its run may resume, or it may hold --model."""
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(
        UserError, match=rf"^--out {tmp_path}: {name[:2]}\S* belongs to a run, and --st"
    ):
        start_evaluation(tmp_path, print, {})
    assert (tmp_path / "metrics.jsonl").exists() and not tmp_path.with_name("out-1").exists()


@given(st.integers(1, 9), st.data())
def test_pass_at_k_counts_the_draws_that_hold_a_right_answer(samples, drawn):
    """It must match all ways to draw k of them, averaged over prompts; k: powers of two, and all."""
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
