"""A real language model, SmolLM2-135M-Instruct, through every command, as in docs/real_model.md.

It takes about an hour on 2 cores and 16 GB, and is skipped if the package with the model can't be had.
"""

import json
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.launched import Run, free_ports, saved
from tests.support.patience import run_process
from tests.workers.start import run_command

pytestmark = pytest.mark.long
FOLDER = ROOT / "runs" / "smollm2"
MODEL = FOLDER / "model"
SUMS = FOLDER / "sums.jsonl"
SIZES = ("--model", MODEL, "--max-model-len", "128", "--max-new-tokens", "24")
RL = (*SIZES, "--data", SUMS, "--lr", "1e-5", "--steps", "3", "--prompts-per-step", "8")
RL += ("--eval-every", "100", "--judge-format", "number", "--max-tokens-per-micro-batch", "512")
NUMBER = ("--rule", "number")
LOGPROB_DIFF = 1e-4  # most between engine and trainer


@pytest.fixture(scope="session", autouse=True)
def made():
    """Make the model and the rows in runs/, as the example does."""
    done = run_process("bash", "examples/smollm2.sh", "--dry-run")
    if done.returncode:
        pytest.skip(f"the model can't be had: {done.stderr.strip().splitlines()[-1]}")


@pytest.fixture(scope="session")
def rows(tmp_path_factory):
    """Make a folder with 200 examples for sft, and 200 pairs for rm with the right one chosen."""
    folder = tmp_path_factory.mktemp("rows")
    examples, pairs = [], []
    for line in (SUMS.read_text().splitlines() * 2)[:200]:
        row = json.loads(line)
        right, wrong = (f"It is {row['answer'] + more}." for more in (0, 1))
        turn = {"role": "assistant", "content": right}
        examples.append({"messages": [*row["messages"], turn]})
        pairs.append({"prompt": row["messages"], "chosen": right, "rejected": wrong})
    for name, written in (("examples", examples), ("pairs", pairs)):
        text = "".join(json.dumps(row) + "\n" for row in written)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


@pytest.fixture(scope="session")
def full(tmp_path_factory):
    """Run three steps in full mode; the checkpoint holds a Hugging Face directory."""
    folder = tmp_path_factory.mktemp("full")
    return Run(folder, *RL, *NUMBER, "--mode", "full", "--save-hf-every", "3").ended()


@pytest.fixture(scope="session")
def reward_model(tmp_path_factory, rows):
    return learn("rm", rows / "pairs.jsonl", tmp_path_factory.mktemp("rm"), steps=6) / "hf"


def learn(command: str, data, folder, steps: int):
    """Run sft or rm on 2 ranks; return its folder."""
    launch = [Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node", 2]
    how = ["--model", MODEL, "--data", data, "--steps", steps, "--eval-every", steps]
    command = [
        *launch,
        "examples/finetune.py",
        command,
        *how,
        "--lr",
        "1e-5",
        "--out",
        folder / "out",
    ]
    run_command(command)
    return folder / "out"


def column(out, name: str) -> list[float]:
    """Return a metric of a run, from the rows that have it."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


def evaluate(model, out, *more) -> dict:
    """Return the metrics of an evaluation on the first 32 sums."""
    data = out.parent / "few.jsonl"
    data.write_text("".join(SUMS.read_text().splitlines(keepends=True)[:32]))
    command = [sys.executable, "run.py", "--steps", "0", "--model", model, "--eval-data", data]
    command += [
        "--out",
        out,
        "--judge-format",
        "number",
        "--max-new-tokens",
        "32",
        "--max-model-len",
        "128",
    ]
    command += ["--eval-samples", "2", "--port", free_ports(), *more]
    run_command(command)
    return json.loads((out / "metrics.jsonl").read_text())


def test_engine_and_trainer_agree(full):
    apart = column(full.out, "train/engine_logprob_diff_max")
    assert len(apart) == 3 and max(apart) < LOGPROB_DIFF


def test_killed_and_resumed(full, tmp_path):
    """kill -9 of everything in the third step, then the same command again, must give the same run."""
    run = Run(tmp_path, *RL, *NUMBER, "--mode", "full", "--save-every", "1")
    run.struck((saved(1), Run.kill_all))
    run.again().check_as(full)


def test_learning_from_examples(tmp_path, rows):
    """The held-out loss must fall, and SGLang must serve the result."""
    out = learn("sft", rows / "examples.jsonl", tmp_path, steps=4)
    losses = column(out, "sft/held_out_loss")
    assert losses[-1] < losses[0]
    assert evaluate(out / "hf", tmp_path / "eval")["eval/truncated_frac"] < 1
    assert len((tmp_path / "eval" / "answers.jsonl").read_text().splitlines()) == 32


def test_a_reward_model_prefers_right_answers(reward_model):
    assert column(reward_model.parent, "rm/held_out_accuracy")[-1] > 0.5


def test_an_exported_directory_is_read_by_transformers_and_served(full, tmp_path):
    """Greedy answers by both must be the same."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported = full.out / "hf" / "step_3"
    evaluate(exported, tmp_path / "eval")
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported)
    lines = (tmp_path / "eval" / "answers.jsonl").read_text().splitlines()
    for row in map(json.loads, lines[:4]):
        turns = [{"role": "user", "content": row["question"]}]
        how = dict(add_generation_prompt=True, return_tensors="pt", return_dict=True)
        asked = tokenizer.apply_chat_template(turns, **how)
        written = model.generate(**asked, max_new_tokens=32, do_sample=False)
        text = tokenizer.decode(written[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
        assert text == row["greedy"]
