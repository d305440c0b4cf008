"""Whole runs of the command, with real engines and trainers: all must have the numbers of an unbroken one.
Most are of the demo. test_command.py has the errors for bad input."""

import json
import re
import signal
import sys
import time

import pytest

from config import DEMO_MODELS
from runtime import timeline
from runtime.shutdown import ECHO_S
from tests import ROOT
from tests.support.launched import Run, free_ports, rows_done, saved
from tests.support.models import save_model
from tests.support.patience import PATIENCE
from tests.support.vision import encoded_picture, make_vision_model
from tests.workers.start import run_command

SHORT = ("--log-samples", "20", "--prompts-per-step", "4", "--eval-every", "3", "--save-every", "1")
THREE = (*SHORT, "--steps", "3")
FIVE = (*SHORT, "--steps", "5")
DEMO = DEMO_MODELS / "written"
SIXTEEN = ("--prompts-per-step", "4", "--answers-per-prompt", "4")
GROUPS = "reward rollout genrm train balance time occupancy perf split"  # groups of metrics


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Run three steps in full mode: every other run of three steps must have its numbers."""
    return Run(tmp_path_factory.mktemp("unbroken"), *THREE, "--mode", "full").ended()


@pytest.fixture(scope="module")
def longer(tmp_path_factory):
    """Run five steps in partial mode, for runs with more faults."""
    return Run(tmp_path_factory.mktemp("longer"), *FIVE).ended()


def test_a_run_leaves_what_it_promises(unbroken):
    """It must have a row per step, the files, and nothing else; engine and trainer agree."""
    unbroken.check_nothing_is_left()
    said = unbroken.stderr + unbroken.stdout
    assert "Traceback" not in said and "warning" not in said.lower() and len(said.splitlines()) < 30
    *rows, last = unbroken.rows()
    assert [row["step"] for row in (*rows, last)] == [0, 1, 2, 3]
    for row in rows:
        assert {name.partition("/")[0] for name in row} >= set(GROUPS.split())
        assert row["train/engine_logprob_diff_max"] <= 1e-4 and row["train/grad_norm"] > 0
        assert row["reward/unfiltered_mean"] == row["genrm/accept_frac"]
        assert row["genrm/failed"] == 0 and 0 < row["time/save_s"] < row["time/step_s"]
    assert ["eval/accuracy" in row for row in (*rows, last)] == [True, False, False, True]
    out = unbroken.out
    for name in ("config.json", "samples.jsonl", "timeline.png"):
        assert (out / name).stat().st_size > 0 and name in said
    assert len(list((out / "tensorboard").iterdir())) == 1
    logs = {f"{role}-{rank}.log" for role in ("rollout", "genrm") for rank in (0, 1)}
    assert {path.name for path in (out / "logs").iterdir()} == logs
    assert {path.name for path in (out / "checkpoints").iterdir()} == {"step_2", "step_3"}
    spans = timeline.read(out / "spans")
    for rank in (0, 1):
        names = {span.name for span in spans if span.rank == rank}
        assert names >= {"rollout", "genrm", "train", "sync", "switch"}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["partial", "fused"])
def test_all_modes_train_on_the_same_samples(tmp_path, unbroken, mode):
    """Runs must agree in every number except times, and in every text."""
    Run(tmp_path, *THREE, "--mode", mode).ended().check_as(unbroken)


@pytest.mark.parametrize("mode", ["partial", pytest.param("full", marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_by_itself(tmp_path, unbroken, mode):
    """After kill -9 of everything after a save, the same command must give the unbroken run's numbers, also
    in another mode."""
    run = Run(tmp_path, *THREE, "--mode", mode).struck((saved(1), Run.kill_all))
    assert len(run.rows()) < 4
    again = run.again()
    assert f"resuming from {run.out}/checkpoints/step_" in again.stdout
    again.check_as(unbroken)


def fill_the_disk(run: Run) -> None:
    (run.out / "samples.jsonl").rename(run.out / "before.jsonl")
    (run.out / "samples.jsonl").symlink_to("/dev/full")


@pytest.mark.slow
def test_a_full_disk_ends_the_run_in_one_line_and_it_goes_on(tmp_path, longer):
    """It happens at a row after a save. Once there is room, the same command must go on."""
    run = Run(tmp_path, *FIVE).struck((saved(1), fill_the_disk))
    line = f"{run.out}/samples.jsonl can't be written: No space left on device"
    run.check_one_line(line, status=1)
    run.check_nothing_is_left()
    (run.out / "before.jsonl").replace(run.out / "samples.jsonl")
    run.again().check_as(longer)


APART = ("--placement", "engines=0-1 actor=2")
AHEAD = (*APART, "--ahead", "1")


@pytest.mark.slow
def test_engines_and_actor_on_ranks_of_their_own(tmp_path, longer):
    """Samples must be those of a run on shared ranks; what is learned may differ by the order of sums."""
    run = Run(tmp_path, *FIVE, *APART, ranks=3).ended()
    run.check_nothing_is_left()
    assert run.rows("samples.jsonl") == longer.rows("samples.jsonl")
    others = {"balance/max_over_mean", "train/micro_batches", "sync/received_mb"}
    assert {row["sync/received_mb"] for row in run.rows()[:-1]} == {1.46554}  # all of the actor
    for row, expected in zip(run.numbers(), longer.numbers(), strict=True):
        for name in expected.keys() - others:
            assert row[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name


@pytest.mark.slow
def test_served_ahead_the_demo_learns_and_twice_the_same(tmp_path):
    """In ten steps accuracy must rise from at most 0.45 to at least 0.8, by weights one update older."""
    steps = ("--steps", "10", "--eval-every", "10", *AHEAD)
    run, other = (Run(tmp_path / name, *steps, ranks=3).ended() for name in ("one", "other"))
    other.check_as(run)
    first, *middle, last = run.rows()
    assert first["eval/accuracy"] <= 0.45 and last["eval/accuracy"] >= 0.8
    assert first["train/stale_token_frac"] == 0
    assert [row["train/stale_token_frac"] for row in middle] == [1.0] * 9


@pytest.mark.slow
def test_a_rank_that_trains_is_killed_while_others_serve_ahead(tmp_path):
    """After kill -9 after a save, the same command must go on with the served batch, to the same rows."""
    unbroken = Run(tmp_path / "unbroken", *FIVE, *AHEAD, ranks=3).ended()
    kill = (saved(2), lambda run: run.rank_processes()[2].kill())
    run = Run(tmp_path / "run", *FIVE, *AHEAD, ranks=3).struck(kill)
    assert run.status != 0 and len(run.rows()) < 6
    again = run.again()
    assert f"resuming from {run.out}/checkpoints/step_" in again.stdout
    again.check_as(unbroken)


def terminate_all(run: Run) -> None:
    for process in (run.launcher(), *run.launcher().children(recursive=True)):
        process.terminate()


STOPS = {
    "SIGTERM to torchrun": lambda run: run.launcher().terminate(),
    "SIGTERM to every process": terminate_all,
    "SIGUSR1 to torchrun": lambda run: run.launcher().send_signal(signal.SIGUSR1),
    "SIGHUP under nohup": lambda run: time.sleep(1) or run.launcher().send_signal(signal.SIGHUP),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STOPS)
def test_a_run_is_stopped_and_goes_on(tmp_path, longer, name):
    """It is stopped while it serves, or a second later trains: finished steps must be saved, due or not."""
    under = ("nohup",) if "nohup" in name else ()
    launch = ("--signals-to-handle", "SIGTERM,SIGUSR1") if "USR1" in name else ()
    run = Run(tmp_path, *FIVE, "--save-every", "4", under=under, launch=launch)
    run.struck((rows_done(1), STOPS[name]))
    run.check_no_traceback_of_ours()
    run.check_nothing_is_left()
    done = len(run.rows())
    goes_on = "the same command continues"
    assert run.status == 1 and run.ours == [f"stopped after {done} of 5 steps; {goes_on}"]
    again = run.again()
    assert f"step_{done}, after {done} steps" in again.stdout
    again.check_as(longer)


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_stop_that_waits(tmp_path, longer):
    """It waits for a hanging engine: nothing more is saved, and the same command must go on."""

    def hang(run: Run) -> None:
        run.engine("rollout", 0, "sglang::scheduler").suspend()
        time.sleep(5 * PATIENCE)  # step 3 begins: between two steps the stop wouldn't wait

    def press_again(run: Run) -> None:
        time.sleep(ECHO_S + 5 * PATIENCE)
        run.press_ctrl_c()

    strikes = [(saved(2), hang), (saved(2), Run.press_ctrl_c), (saved(2), press_again)]
    for attempt in "abc":  # if no request reached the engine while it hung, the stop didn't wait
        run = Run(tmp_path / attempt, *FIVE).struck(*strikes)
        if run.ours == ["interrupted"]:
            break
    assert run.status == 1 and run.ours == ["interrupted"]
    run.check_no_traceback_of_ours()
    run.check_nothing_is_left()
    run.again().check_as(longer)


def starting_engines(run: Run) -> bool:
    return sum("-m engines.server_main" in command for _, command in run.processes()) >= 2


@pytest.mark.slow
def test_ctrl_c_before_it_trains(tmp_path):
    run = Run(tmp_path).struck((starting_engines, Run.press_ctrl_c))
    assert run.status == 1 and run.ours == ["interrupted"]
    run.check_no_traceback_of_ours()
    run.check_nothing_is_left()


@pytest.mark.slow
def test_when_the_launcher_is_killed_the_ranks_and_their_engines_go(tmp_path):
    run = Run(tmp_path).struck((starting_engines, lambda run: run.launcher().kill()))
    run.check_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Ctrl-C", "kill -9 of the launcher"])
def test_a_run_whose_rule_never_finishes_loading_can_be_ended(tmp_path, name):
    strike = Run.press_ctrl_c if name == "Ctrl-C" else lambda run: run.launcher().kill()
    (rule := tmp_path / "rule.py").write_text("print('read', flush=True)\nwhile True: pass")
    run = Run(tmp_path / "run", "--rule", rule)
    run.struck((lambda run: run.stdout.count("read") == run.ranks, strike))
    run.check_nothing_is_left()


LOSSES = {  # name -> the strike, the message
    "a rank": (
        lambda run: run.rank_processes()[1].kill(),
        "interrupted: rank 1 of this machine is gone",
    ),
    "an engine": (
        lambda run: run.engine("genrm", 1, "-m engines.server_main").kill(),
        "error: the genrm engine of rank 1 died (signal 9: memory may have run out); the end of ",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_what_dies_is_started_again_by_torchrun(tmp_path, longer, name):
    """After a save and kill -9 torchrun restarts all ranks, with one line, and the run goes on by itself."""
    strike, line = LOSSES[name]
    run = Run(tmp_path, *FIVE, launch=("--max-restarts", "1")).struck((saved(2), strike))
    run.check_as(longer)
    [said] = run.ours
    assert said.startswith(line), said
    assert re.search(r"step_(\d), after \1 steps", run.stdout)


@pytest.mark.slow
def test_a_users_error_is_not_tried_again(tmp_path):
    """Its line must appear once; the ranks that torchrun restarts read nothing."""
    (rule := tmp_path / "rule.py").write_text("print('read', flush=True)")
    run = Run(tmp_path / "run", "--rule", f"{rule}:lacking", launch=("--max-restarts", "3"))
    run.start().finish().check_one_line("rule.py has no function lacking(sample)")
    run.check_nothing_is_left()
    assert 1 <= run.stdout.count("read") <= run.ranks and "/attempt_3/" in run.stderr


WATCHED = """
import os, sys

def note(event, arguments):
    if event == "open" and str(arguments[0]).endswith("rows.jsonl"):
        os.write(1, f"rank {os.environ['RANK']} reads\\n".encode())

sys.addaudithook(note)
"""


@pytest.mark.slow
def test_the_first_rank_reads_the_rows_and_a_bad_one_ends_all(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(WATCHED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "3+4=", "answer": "7"}\n{"prompt": "no')
    given = ["--model", DEMO / "actor", "--rule", "right", "--data", rows]
    given += ["--max-new-tokens", "72", "--judge-format", "addition"]
    run = Run(tmp_path / "run", *given).start().finish()
    run.check_one_line(f"{rows}:2: not valid JSON in UTF-8")
    run.check_nothing_is_left()
    assert {*re.findall(r"rank \d reads", run.stdout)} == {"rank 0 reads"}


def test_an_evaluation_on_an_engine(tmp_path):
    """The demo's actor shows no work yet, so it must be right only about small sums."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "3+4=", "answer": "7"}')
    given = ["--steps", "0", "--eval-data", tmp_path / "rows.jsonl", "--model", DEMO / "actor"]
    given += ["--eval-samples", "8", "--max-new-tokens", "72", "--judge-format", "addition"]
    given += ["--out", tmp_path / "out", "--port", free_ports()]
    run_command([sys.executable, ROOT / "run.py", *given])
    found = json.loads((tmp_path / "out" / "metrics.jsonl").read_text())
    assert (found["eval/accuracy"], found["eval/pass@8"]) == (1.0, 1.0)


@pytest.mark.slow
def test_the_demo_learns_in_a_few_steps(tmp_path):
    """In ten steps accuracy must rise from at most 0.45 to at least 0.85."""
    first, *_, last = Run(tmp_path, "--steps", "10", "--eval-every", "10").ended().rows()
    assert first["eval/accuracy"] <= 0.45 and last["eval/accuracy"] >= 0.85


@pytest.mark.slow
def test_a_users_models_and_prompts(tmp_path):
    """Questions come from a file, and the judge's own words are kept with the parsed verdict."""
    given = ["--model", DEMO / "actor", "--judge", DEMO / "judge", "--judge-format", "addition"]
    given += ["--judge-max-new-tokens", "96"]
    given += ["--data", tmp_path / "rows.jsonl", "--max-new-tokens", "96", "--steps", "2", *SIXTEEN]
    sums = {f"{number}+57=": str(number + 57) for number in range(24)}
    rows = [json.dumps({"prompt": each, "answer": sums[each]}) for each in sums]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    run = Run(tmp_path / "run", *given).ended()
    config = json.loads((run.out / "config.json").read_text())
    assert (config["judge"], config["judge_format"]) == ([str(DEMO / "judge")], ["addition"])
    assert config["commit"] and {"torch", "sglang"} <= config["versions"].keys()
    for sample in run.rows("samples.jsonl"):
        assert sample["answer_key"] == sums[sample["question"]]
        assert sample["reward"] == float(sample["verdict"])
        if sample["critique"] != "no final answer":
            assert sample["verdict"] <= sample["critique"].endswith("Y")


@pytest.mark.slow
def test_a_rule_rewards_without_a_judge_in_bfloat16(tmp_path):
    """It runs on one rank with fixed length. Trainer and engine differ in 16 bits: no gradient, no KL."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What is 3+4?"}\n' * 8)
    given = ["--model", save_model(tmp_path / "model"), "--data", tmp_path / "rows.jsonl", *SIXTEEN]
    given += ["--rule", "forbidden:7", "--steps", "1", "--dtype", "bfloat16"]
    given += ["--answer-tokens", "12", "--algorithm", "gspo", "kl_coef=0.01", "kl_in=reward"]
    run = Run(tmp_path / "run", *given, ranks=1).ended()
    run.check_nothing_is_left()
    assert [path.name for path in (run.out / "logs").iterdir()] == ["rollout-0.log"]
    row = run.rows()[0]
    assert 1e-5 < row["train/engine_logprob_diff_mean"] < 0.05
    assert (row["rollout/response_len_mean"], row["rollout/truncated_frac"]) == (12, 0)
    assert row["train/clip_frac"] == 0 and row["train/grad_norm"] > 0
    # weights of the start, in bfloat16
    assert row["train/reference_kl"] == pytest.approx(0, abs=2.0**-8)
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
    """Trainer and engine must agree, also after kill -9 and a restart. No file may hold the pictures."""
    make_vision_model(tmp_path / "model", "qwen3_vl", layers=2)
    (tmp_path / "rule.py").write_text(RULE)
    with (tmp_path / "rows.jsonl").open("w") as file:
        for number in range(200):
            picture = encoded_picture(32 * (1 + number % 3), 32 * (1 + number % 2), seed=number)
            (tmp_path / f"{number}.png").write_bytes(picture)
            row = {"prompt": "<image>7+5=", "images": [f"{number}.png"], "answer": 12}
            file.write(json.dumps(row) + "\n")
    given = ["--model", tmp_path / "model", "--rule", tmp_path / "rule.py", *SIXTEEN]
    given += ["--data", tmp_path / "rows.jsonl", "--max-new-tokens", "8", "--save-every", "1"]
    given += ["--steps", "3", "--max-model-len", "128"]
    whole = Run(tmp_path / "whole", *given).ended()
    run = Run(tmp_path / "run", *given).struck((saved(1), Run.kill_all))
    run.again().check_as(whole)
    for row in run.rows()[:-1]:
        assert row["train/engine_logprob_diff_max"] < 1e-5 and row["train/grad_norm"] > 0
    kept = [path for path in whole.out.rglob("*") if path.is_file()]
    with_pictures = [path.parent.name for path in kept for _ in range(path.read_bytes().count(PNG))]
    assert sorted(with_pictures) == ["out", "tensorboard"]  # each the run's timeline


@pytest.mark.long
def test_chaos():
    run_command([sys.executable, "tests/runs/chaos.py", "--trials", 14])
