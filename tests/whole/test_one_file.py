"""examples/one_file.py, a second implementation of the algorithm, against whole runs of the command.

It shares no code with the product: sampler, judge's rule, filter, loss and AdamW are its own.
"""

import json
import math
import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from config import DEMO_MODELS
from cpu.sglang import murmur_hash32
from engines.engine import seed_of
from tests import ROOT
from tests.support.launched import Run
from tests.support.rounding import apart
from tests.workers.one_file import FILE
from tests.workers.start import run_worker

DIGITS = 5e-7  # metrics.jsonl has six digits; what is compared here is below 1
LARGEST_ADVANTAGE = math.sqrt(7)  # that of one right answer among eight


class RecordedRun(Run):
    program = "tests/workers/recorded_run.py"


def terms_of_a_logit() -> int:
    """Return how many products float32 adds one after another from a token's embedding to a logit."""
    config = json.loads((DEMO_MODELS / "written" / "actor" / "config.json").read_text())
    hidden, columns = config["hidden_size"], 129
    layer = hidden + columns + hidden + hidden + config["intermediate_size"]
    return config["num_hidden_layers"] * layer + hidden


def recorded(path: Path, *settings: int) -> list[dict]:
    """Run the file with (seed, steps, prompts). Returns a row for each step, then one with the accuracy."""
    run_worker("tests.workers.one_file", path, *map(str, settings))
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_numbers(row: dict, step: dict) -> None:
    """Rewards must be equal, and losses but for the order in which float32 adds their terms."""
    rewards = [answer["reward"] for answer in step["answers"]]
    mean = sum(rewards) / len(rewards)
    assert float(f"{mean:.6g}") == row["reward/unfiltered_mean"], row["step"]
    allowed = DIGITS + apart(int(row["train/tokens"])) * LARGEST_ADVANTAGE
    assert step["loss"] == pytest.approx(row["train/loss"], abs=allowed), row["step"]


def test_it_gives_the_numbers_of_a_run(tmp_path):
    """Rewards, losses, accuracy and all of rank 0's answers must be those of three steps of the command."""
    settings = ("--steps", "3", "--prompts-per-step", "4", "--eval-every", "3")
    run = Run(tmp_path / "run", *settings, "--log-samples", "32").ended()
    *steps, last = recorded(tmp_path / "one_file.jsonl", 0, 3, 4)
    *rows, end = run.rows()
    for row, step in zip(rows, steps, strict=True):
        check_numbers(row, step)
        texts = {(answer["prompt_id"], answer["text"]) for answer in step["answers"]}
        logged = [each for each in run.rows("samples.jsonl") if each["step"] == row["step"]]
        assert logged
        assert {(each["prompt_id"], each["response"]) for each in logged} <= texts
    assert last["accuracy"] == pytest.approx(end["eval/accuracy"], abs=DIGITS)


def noise(answer: dict, seed: int, position: int, token: int) -> float:
    """Return the Gumbel noise of a token that follows `position`: -log(-log(u))."""
    seeds = torch.tensor([seed_of(seed, answer["prompt_id"], answer["index"])])
    u = murmur_hash32(seeds, torch.tensor([position]), torch.tensor([token])).item() / 0xFFFFFFFF
    return -math.log(max(-math.log(u), 2.0**-32))


def distance(sample: dict, answer: dict, seed: int) -> float:
    """Return by how much the choices of two tokens differed, where the answers differ first.

    Each side chose the token with the largest sum of log-probability and noise. So the two sums differ by at
    most the difference of both sides' log-probabilities of a token.
    """
    both = zip(sample["response"], answer["response"], strict=False)
    place = next(place for place, (one, other) in enumerate(both) if one != other)
    position = len(sample["prompt"]) + place - 1
    sums = []
    for side in (sample, answer):
        token = side["response"][place]
        sums.append(side["logprobs"][place] + noise(answer, seed, position, token))
    return abs(sums[0] - sums[1])


@pytest.mark.parametrize(
    "seed", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.long)]
)
def test_it_gives_the_tokens_of_a_run(tmp_path, seed):
    """All answers of all ranks must be equal until two tokens are almost equally likely.

    A logit depends on a forward pass, and on a forward and a backward pass of each earlier step; a backward
    pass adds twice as many terms.
    """
    run = RecordedRun(tmp_path / "run", "--steps", "40", "--seed", str(seed)).ended()
    *steps, last = recorded(tmp_path / "one_file.jsonl", seed, 40, 16)
    *rows, end = run.rows()
    trained = defaultdict(list)
    for rank in range(2):
        for sample in run.rows(f"trained.{rank}.jsonl"):
            trained[sample["step"]].append(sample)
    for number, (row, step) in enumerate(zip(rows, steps, strict=True)):
        answers = {(answer["prompt_id"], answer["index"]): answer for answer in step["answers"]}
        pairs = [
            (sample, answers[sample["prompt_id"], sample["index"]]) for sample in trained[number]
        ]
        different = [pair for pair in pairs if pair[0]["response"] != pair[1]["response"]]
        terms = terms_of_a_logit() * (1 + 3 * number)
        assert all(distance(*pair, seed) <= apart(terms) for pair in different), number
        if different:
            break  # from here on the weights differ
        check_numbers(row, step)
    assert len(pairs) == 128
    assert last["accuracy"] == pytest.approx(end["eval/accuracy"], abs=0.02)


def test_the_file_is_short_and_imports_nothing_of_the_project():
    text = FILE.read_text()
    assert len(text.splitlines()) <= 150
    imported = set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE))
    assert imported and not imported & {path.stem for path in ROOT.iterdir()}
