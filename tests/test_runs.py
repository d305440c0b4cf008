"""Whole runs of the command, with real engines and trainers: all come to the numbers of an unbroken one.

Most are of the demo. How a run ends on bad input is test_command.py's.
"""

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import models
from launched import ROOT, Run, rows_done
from vision_models import encoded_picture, make_vision_model

SHORT = ("--prompts-per-step", "4", "--eval-every", "3", "--save-every", "1")
THREE = (*SHORT, "--steps", "3")
FIVE = (*SHORT, "--steps", "5", "--timeout-s", "180")  # an engine that hangs is ended after 12 s
METRICS = """
reward/mean reward/unfiltered_mean reward/zero_std_frac rollout/response_len_mean rollout/response_len_max
rollout/truncated_frac rollout/waves rollout/aborted genrm/accept_frac genrm/failed genrm/p50_s genrm/p99_s
genrm/false_positive_frac train/loss train/grad_norm train/entropy train/kl train/clip_frac train/lr
train/engine_logprob_diff_max balance/max_over_mean time/step_s time/serve_s time/rollout_s time/genrm_s
time/train_s time/switch_s time/sync_s occupancy/rollout occupancy/genrm perf/tokens_per_s
split/rollout_ranks"""


def ended(run: Run) -> Run:
    """A run that ended well."""
    run.start().finish()
    assert run.status == 0, run.stderr + run.stdout
    return run


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Three steps in full mode: what every other run of three steps must come to."""
    return ended(Run(tmp_path_factory.mktemp("unbroken"), *THREE, "--mode", "full"))


@pytest.fixture(scope="module")
def longer(tmp_path_factory):
    """Five steps in partial mode, for runs to which more happens."""
    return ended(Run(tmp_path_factory.mktemp("longer"), *FIVE))


def test_a_run_leaves_what_it_promises(unbroken):
    """A row a step with every promised name, files, and nothing else; engine and trainer agree."""
    unbroken.check_nothing_is_left()
    said = unbroken.stderr + unbroken.stdout
    assert "Traceback" not in said and "warning" not in said.lower() and len(said.splitlines()) < 30
    *rows, last = unbroken.rows()
    assert [row["step"] for row in (*rows, last)] == [0, 1, 2, 3]
    for row in rows:
        assert not set(METRICS.split()) - row.keys()
        assert row["train/engine_logprob_diff_max"] <= 1e-4 and row["train/grad_norm"] > 0
        assert row["reward/unfiltered_mean"] == row["genrm/accept_frac"]
        assert row["genrm/failed"] == 0 and 0 < row["time/save_s"] < row["time/step_s"]
    assert "eval/accuracy" in rows[0] and "eval/accuracy" in last
    assert "eval/accuracy" not in rows[1]
    out = unbroken.out
    for name in ("config.json", "samples.jsonl", "trace.json", "timeline.png"):
        assert (out / name).stat().st_size > 0 and name in said
    assert len(list((out / "tensorboard").iterdir())) == 1
    logs = {f"{role}-{rank}.log" for role in ("rollout", "genrm") for rank in (0, 1)}
    assert {path.name for path in (out / "logs").iterdir()} == logs
    assert [path.name for path in sorted((out / "checkpoints").iterdir())] == ["step_2", "step_3"]
    spans = json.loads((out / "trace.json").read_text())["traceEvents"]
    lanes = {(span["name"], span["pid"]) for span in spans}
    phases = ("rollout", "genrm", "train", "sync", "switch")
    assert lanes >= {(name, rank) for name in phases for rank in (0, 1)}


@pytest.mark.parametrize("mode", ["partial", "fused"])
def test_all_modes_train_on_the_same_samples(tmp_path, unbroken, mode):
    """Every number but times, and every text."""
    ended(Run(tmp_path, *THREE, "--mode", mode)).check_as(unbroken)


def test_a_killed_run_goes_on_by_itself(tmp_path, unbroken):
    """kill -9 of everything after a save, then the same command again: the unbroken run's numbers."""
    run = Run(tmp_path, *THREE, "--mode", "full").start()
    try:
        run.wait_for(lambda run: run.saved(1))
    finally:
        run.kill_all()
        run.finish()
    assert len(run.rows()) < 4
    again = run.again().finish()
    assert f"goes on from {run.out}/checkpoints/step_" in again.stdout
    again.check_as(unbroken)


# ---------------------------------------------------------------- engines are lost


@pytest.mark.slow
def test_a_run_loses_an_engine_of_each_role(tmp_path, longer):
    """kill -9 of a rollout server's scheduler in one step, SIGSTOP of a genrm server in another.

    The other ranks' engines go on with their work.
    """
    run = Run(tmp_path, *FIVE, "--mode", "full").start()
    try:
        run.wait_for(rows_done(1))
        run.engine("rollout", 0, "sglang::scheduler").kill()
        run.wait_for(rows_done(3))
        run.engine("genrm", 1, "cpu.sglang").suspend()
    finally:
        run.finish()
    run.check_as(longer)
    assert "the rollout engine of rank 0" in run.stdout
    assert "the genrm engine of rank 1" in run.stdout
    assert sum(row["faults/engine_restarts"] for row in run.rows()[:-1]) == 2


@pytest.mark.slow
def test_a_run_loses_engines_while_its_tail_moves(tmp_path, longer):
    """In fused mode, kill -9 of the engine that goes on with it: before, during and after the move."""
    moves = ("--mode", "fused", "--tail", "0.9")
    run = ended(Run(tmp_path, *FIVE, *moves, program="tests/strike_in_move.py"))
    run.check_as(longer)
    for moment in ("before", "during", "after"):
        assert f"struck {moment} the move" in run.stdout
    assert sum(row["faults/engine_restarts"] for row in run.rows()[:-1]) == 3


@pytest.mark.slow
def test_a_run_without_a_judge_ends_in_one_line_and_goes_on(tmp_path, longer):
    """kill -9 of the only genrm server after a save; the same command goes on to the same numbers."""
    run = Run(tmp_path, *FIVE).start()
    try:
        run.wait_for(lambda run: run.saved(2))
        run.engine("genrm", 1, "cpu.sglang").kill()
    finally:
        run.finish()
    run.check_one_line("no genrm engine is left to ask: the genrm engine of rank 1")
    run.check_nothing_is_left()
    run.again().finish().check_as(longer)


# ---------------------------------------------------------------- a run is stopped


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_is_stopped_and_goes_on(tmp_path, longer, number):
    """Ctrl-C, or SIGTERM to one rank: what is done is saved, and the command in the last line goes on."""
    run = Run(tmp_path, *FIVE).start()
    try:
        run.wait_for(rows_done(1))
        if number == signal.SIGINT:
            run.press_ctrl_c()
        else:
            run.rank_processes()[1].terminate()
    finally:
        run.finish()
    run.check_no_traceback_of_ours()
    run.check_nothing_is_left()
    assert run.status == (1 if number == signal.SIGINT else 0)  # torchrun's, after a signal
    [line] = [line for line in run.stderr.splitlines() if line.startswith("stopped after")]
    done = len(run.rows())
    command = "torchrun --nproc-per-node 2 run.py --out"
    assert f"stopped after {done} of 5 steps; go on with: {command}" in line
    again = run.again().finish()
    assert f"step_{done}, after {done} steps" in again.stdout
    again.check_as(longer)


def importing(run: Run) -> bool:
    """Both ranks run and have installed their handlers (bit 14 of the signals they catch), and no more."""
    ranks = [
        p for p, command in run.processes() if " run.py " in command and p.ppid() != run.guard.pid
    ]
    caught = [Path(f"/proc/{rank.pid}/status").read_text().split("SigCgt:")[1] for rank in ranks]
    bits = [int(text.split()[0], 16) >> (signal.SIGTERM - 1) & 1 for text in caught]
    return len(bits) == run.ranks and all(bits)


def starting_engines(run: Run) -> bool:
    """Both servers run, and import."""
    return sum("cpu.sglang" in command for _, command in run.processes()) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("moment", [importing, starting_engines])
def test_ctrl_c_before_it_trains(tmp_path, moment):
    """One line and nothing left, whenever it is pressed."""
    run = Run(tmp_path).start()
    try:
        run.wait_for(moment).press_ctrl_c()
    finally:
        run.finish()
    assert run.status == 1 and run.ours == ["interrupted"]
    run.check_no_traceback_of_ours()
    run.check_nothing_is_left()


@pytest.mark.slow
def test_a_rank_that_dies_is_started_again_by_torchrun(tmp_path, longer):
    """kill -9 of one rank after a save: torchrun starts all ranks again, and the run goes on by itself."""
    run = Run(tmp_path, *FIVE, launch=("--max-restarts", "1")).start()
    try:
        run.wait_for(lambda run: run.saved(2))
        run.rank_processes()[1].kill()
    finally:
        run.finish()
    run.check_as(longer)
    assert re.search(r"step_(\d), after \1 steps", run.stdout)


@pytest.mark.slow
def test_when_the_launcher_is_killed_the_ranks_go_and_nobody_else(tmp_path):
    """A rank ends with its launcher, its engines with it, and no process of others."""
    run = Run(tmp_path).start()
    try:
        run.wait_for(starting_engines)
        run.launcher().kill()
    finally:
        run.finish()
    run.check_nothing_is_left()


@pytest.mark.slow
def test_a_taken_port_is_named(tmp_path):
    """By number; the engine of the other rank, which had found its port free, is gone too."""
    run = Run(tmp_path)
    with socket.create_server(("127.0.0.1", run.port + 3)):
        run.start().finish()
    run.check_one_line(str(run.port + 3), "--port")
    run.check_nothing_is_left()


# ---------------------------------------------------------------- what it is for


@pytest.mark.slow
def test_the_demo_learns_in_a_few_steps(tmp_path):
    """Ten steps: accuracy from at most 0.45 to at least 0.85, and engine and trainer agree."""
    run = ended(Run(tmp_path, "--steps", "10", "--eval-every", "10"))
    *rows, last = run.rows()
    assert rows[0]["eval/accuracy"] <= 0.45 and last["eval/accuracy"] >= 0.85
    assert all(row["train/engine_logprob_diff_max"] <= 1e-4 for row in rows)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """actor: answers with some digit. judge: large digits are correct. prompts: 24 chat rows with answers."""
    home = tmp_path_factory.mktemp("own")
    models.save_model(home / "actor", models.any_digit, steps=40)
    models.save_model(home / "judge", models.verdict, steps=140)
    with (home / "prompts.jsonl").open("w") as file:
        for number in range(24):
            turn = {"role": "user", "content": models.question(number, 2)}
            file.write(json.dumps({"messages": [turn], "answer": str(number + 2)}) + "\n")
    return home


def of_own(own: Path, *more: str) -> list:
    """Sixteen answers a step, of a few tokens."""
    given = ["--model", own / "actor", "--data", own / "prompts.jsonl", "--max-new-tokens", "12"]
    return [*given, "--prompts-per-step", "4", "--answers-per-prompt", "4", *more]


@pytest.mark.slow
def test_a_users_own_models_and_prompts(own, tmp_path):
    """Questions from the file, answers in text, the judge's own words beside the verdict read from them."""
    judge = ("--judge", own / "judge", "--judge-max-new-tokens", "32")
    run = ended(Run(tmp_path, *of_own(own, *judge, "--steps", "2")))
    config = json.loads((run.out / "config.json").read_text())
    assert (config["model"], config["judge"]) == (str(own / "actor"), [str(own / "judge")])
    assert (config["judge_format"], config["ranks"]) == (["chat"], 2) and config["commit"]
    assert {"torch", "megatron-core", "sglang", "transformers"} <= config["versions"].keys()
    digits = []
    for sample in run.rows("samples.jsonl"):
        assert sample["question"].startswith("What is ") and sample["answer_key"].isdigit()
        if sample["finish"] != "stop" or not sample["response"].strip():
            assert (sample["verdict"], sample["critique"]) == (False, "no final answer")
            continue
        verdict = "correct" if sample["verdict"] else "incorrect"
        assert sample["critique"].splitlines()[-1] == f"Verdict: {verdict}"
        assert sample["reward"] == float(sample["verdict"])
        if len(sample["response"]) == 1:
            digits.append(verdict == models.verdict_on(sample["response"]))
    assert sum(digits) > 0.7 * len(digits)  # it was taught for seconds


@pytest.mark.slow
def test_a_judge_that_never_says_a_verdict_is_named(own, tmp_path):
    run = Run(tmp_path, *of_own(own, "--judge", own / "actor")).start().finish()
    run.check_one_line("--judge", "none of the first", "--judge-format chat")
    run.check_nothing_is_left()


@pytest.mark.slow
def test_a_rule_rewards_without_a_judge_in_bfloat16(own, tmp_path):
    """On one rank, in whose mode there would be nobody to judge: the reward is the rule's word on the text.

    Engine and trainer disagree, as they do in 16 bits; that costs no answer its gradient, and no KL.
    """
    given = of_own(own, "--rule", "forbidden:7", "--steps", "1", "--dtype", "bfloat16")
    given += ["--algorithm", "gspo", "kl_coef=0.01", "kl_in=reward"]
    run = ended(Run(tmp_path, *given, ranks=1))
    run.check_nothing_is_left()
    assert [path.name for path in (run.out / "logs").iterdir()] == ["rollout-0.log"]
    row, _ = run.rows()
    mean, most = (row[f"train/engine_logprob_diff_{name}"] for name in ("mean", "max"))
    assert 1e-5 < mean < 0.05 and mean <= row["train/engine_logprob_diff_p999"] <= most
    assert row["train/clip_frac"] == 0 and row["train/grad_norm"] > 0
    assert row["train/reference_kl"] == pytest.approx(0, abs=1e-6)  # at the start weights
    assert "genrm/accept_frac" not in row and "rollout/correct_frac" in row
    samples = run.rows("samples.jsonl")
    assert samples and all(sample["verdict"] is None for sample in samples)
    assert all(sample["reward"] == float("7" in sample["response"]) for sample in samples)


RULE = """
def reward(sample):
    (image,) = sample.media
    assert image.read().startswith(b"\\x89PNG")
    return float(sum(sample.response) % 2)
"""
PNG = b"\x89PNG\r\n"


@pytest.mark.slow
def test_a_run_on_own_pictures(tmp_path):
    """Trainer and engine agree before and after pushes, also in a run that goes on after kill -9.

    TensorBoard shows pictures, and no other file holds one.
    """
    make_vision_model(tmp_path / "model", "qwen3_vl", layers=2)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "rule.py").write_text(RULE)
    with (tmp_path / "rows.jsonl").open("w") as file:
        for number in range(200):
            picture = encoded_picture(32 * (1 + number % 3), 32 * (1 + number % 2), seed=number)
            (tmp_path / f"pictures/{number}.png").write_bytes(picture)
            row = {"prompt": "<image>7+5=", "images": [f"pictures/{number}.png"], "answer": 12}
            file.write(json.dumps(row) + "\n")
    given = ["--model", tmp_path / "model", "--rule", tmp_path / "rule.py", "--steps", "3"]
    given += ["--data", tmp_path / "rows.jsonl", "--max-new-tokens", "8", "--save-every", "1"]
    given += ["--max-model-len", "128", "--prompts-per-step", "4", "--answers-per-prompt", "4"]
    run = Run(tmp_path / "run", *given).start()
    try:
        run.wait_for(lambda run: run.saved(1))
    finally:
        run.kill_all()
        run.finish()
    run.again().finish().check_as(ended(Run(tmp_path / "whole", *given)))
    *rows, _ = run.rows()
    assert max(row["train/engine_logprob_diff_max"] for row in rows) < 1e-5
    assert all(row["train/grad_norm"] > 0 for row in rows)
    [board] = (tmp_path / "whole/out/tensorboard").iterdir()
    assert PNG in board.read_bytes() and b"sample 0" in board.read_bytes()
    kept = [path for path in (tmp_path / "whole/out").rglob("*") if path.is_file()]
    kept = [path for path in kept if path not in (board, tmp_path / "whole/out/timeline.png")]
    assert kept and not [path for path in kept if PNG in path.read_bytes()]


@pytest.mark.long
def test_chaos():
    """Faults of every kind, at random moments."""
    command = [sys.executable, str(ROOT / "tests" / "chaos.py"), "--trials", "14"]
    assert subprocess.run(command).returncode == 0
