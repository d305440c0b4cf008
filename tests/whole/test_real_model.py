"""A real language model, SmolLM2-135M-Instruct, through every command, as in docs/real_model.md.

It takes about an hour on 2 cores and 16 GB, and is skipped if the package with the model can't be had.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests import ROOT
from tests.support.launched import Run, free_ports, saved
from tests.support.patience import run_process
from tests.support.rows import jsonl
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
def full(tmp_path_factory):
    """Run three steps in full mode; the checkpoint holds a Hugging Face directory."""
    folder = tmp_path_factory.mktemp("full")
    return Run(folder, *RL, *NUMBER, "--mode", "full", "--save-hf-every", "3").ended()


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


def test_learning_from_examples(tmp_path):
    """The held-out loss must fall, and SGLang must serve the result."""
    rows = []
    for line in SUMS.read_text().splitlines()[:200]:
        row = json.loads(line)
        answer = {"role": "assistant", "content": f"It is {row['answer']}."}
        rows.append({"messages": [*row["messages"], answer]})
    out = tmp_path / "out"
    command = [Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node", 2]
    command += ["examples/sft.py", "--model", MODEL, "--data", jsonl(tmp_path / "rows.jsonl", rows)]
    command += ["--steps", 4, "--eval-every", 4, "--lr", "1e-5", "--out", out]
    run_command(command)
    losses = column(out, "sft/held_out_loss")
    assert losses[-1] < losses[0]
    assert evaluate(out / "hf", tmp_path / "eval")["eval/truncated_frac"] < 1
    assert len((tmp_path / "eval" / "answers.jsonl").read_text().splitlines()) == 32


def test_a_scalar_judge(tmp_path):
    """Rewards must be transformers' scores of the conversation. The judge: the model with a new head."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    how = dict(num_labels=1, dtype=torch.float32, pad_token_id=tokenizer.pad_token_id)
    judge = AutoModelForSequenceClassification.from_pretrained(MODEL, **how)
    judge.save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    scored = ("--judge", tmp_path / "judge", "--judge-format", "score", "--steps", "1")
    run = Run(tmp_path, *RL, *scored, "--log-samples", "16").ended()
    rows = run.rows("samples.jsonl")
    assert len(rows) == 16
    for row in rows:
        turns = [{"role": "user", "content": row["question"]}]
        turns.append({"role": "assistant", "content": row["response"]})
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        if row["finish"] == "length":
            text = text[: text.rindex("<|im_end|>")]
        with torch.no_grad():
            tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False)
            score = judge(**tokens).logits[0, 0].item()
        assert row["reward"] == pytest.approx(score, abs=LOGPROB_DIFF)


def test_an_exported_directory_is_read_by_transformers_and_served(full, tmp_path):
    """Greedy answers by both must be the same."""
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
