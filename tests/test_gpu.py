"""Checks that need a CUDA device: `make test-gpu`, which ends in a table.

There are four parts: `trainer`, `engine`, `demo`, and with two cards `ranks` (`make test-gpu PART=trainer`).
A part that lacks a device, or a tool that compiles its kernels, is skipped with that reason. `--dry` runs all
of it on a CPU, small, without checking the device's memory. Each check is part of what gpu_worker.py does in
its own process; a process that several tests use is started once.
"""

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from actor import MAX_LOGPROB_DIFF
from config import parse_config
from extras.memory.estimate import RESIDENT
from runtime import devices
from runtime.errors import UserError
from tests import ROOT
from tests.gpu_model import SIZES, make_model
from tests.workers.start import run_command, run_worker

# a part needs what a run of its command needs: a trainer needs no engine packages and no nvcc
COMMAND = {"trainer": "sft", "engine": "rl", "demo": "rl", "ranks": "rl"}
of_trainer = pytest.mark.gpu(part="trainer")
of_engine = pytest.mark.gpu(part="engine")
of_demo = pytest.mark.gpu(part="demo")
of_ranks = pytest.mark.gpu(part="ranks")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
GB = 1e9


@pytest.fixture
def device(request) -> str:
    if request.config.getoption("dry"):
        return "cpu"
    part = request.node.get_closest_marker("gpu").kwargs["part"]
    config = replace(parse_config(["--device", "cuda"]), command=COMMAND[part])
    try:
        devices.check_usable()
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        devices.choose_device(config)
    except UserError as error:
        pytest.skip(str(error))
    return "cuda"


@pytest.fixture(scope="session")
def work(tmp_path_factory):
    """(device, row of WORKS, its argument) -> check(name): return the figures of one of its checks."""

    @cache
    def model_of(device: str) -> Path:
        make_model(path := tmp_path_factory.mktemp("model"), SIZES[device].widths)
        return path

    @cache
    def run(device: str, *what: str):
        result, problem = tmp_path_factory.mktemp("work") / "result.json", ""
        try:
            of_work = (what[0], device, model_of(device), result, *what[1:])
            if what[0] == "ranks":
                run_command([*TORCHRUN, "2", "-m", "tests.gpu_worker", *of_work])
            else:
                run_worker("tests.gpu_worker", *of_work)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            problem = str(error)
        figures = json.loads(result.read_text()) if result.exists() else {}

        def check(name: str, *needed: str) -> dict[str, float]:
            found = figures.get(name, {})
            assert found and set(needed) <= found.keys(), f"the process ended before: {problem}"
            return found

        return check

    return run


@pytest.fixture
def record(record_property):
    """Record figures for the table by name, also those of a failed test."""

    def record(**texts: str) -> None:
        for name, text in texts.items():
            record_property(name.replace("_", " "), text)

    return record


def gb(size: float) -> str:
    return f"{size / GB:.2f} GB"


def record_difference(record, found: dict[str, float]) -> None:
    record(**{f"{name}_difference": f"{found[name]:.4f}" for name in ("mean", "p999", "max")})


def test_the_script_of_a_trainer_runs_dry(work):
    """It must run on any machine. Nothing moves, so an update after a nap must have the same bits."""
    nap = work("cpu", "nap")("nap", "napped")
    assert nap["lost"] == nap["repeated"] == nap["napped"] == 0 < nap["moved"]


@of_trainer
def test_a_trainer_that_sleeps_gives_its_memory_back(device, work, record):
    """Weights, gradients and optimizer must be freed, as many bytes as --dry-run counts."""
    found = work(device, "nap")("release")
    record(given_back=gb(found["given_back"]), counted=gb(found["states"]))
    assert device == "cpu" or found["given_back"] > 0.95 * found["states"]


@of_trainer
def test_a_trainer_that_slept_lost_nothing(device, work, record):
    """Weights and optimizer must be equal bit for bit; the next update as near as a repeated one."""
    found = work(device, "nap")("nap", "napped")
    names = ("lost", "moved", "repeated", "napped")
    record(**{name: f"{found[name]:.1e}" for name in names})
    assert found["lost"] == 0 < found["moved"]
    assert found["napped"] <= 2 * found["repeated"]


@of_trainer
@pytest.mark.parametrize("how", ["", "recompute", "fits"])
def test_a_training_pass(device, work, record, how):
    """It runs full micro-batches forward and backward; a step's memory must be at most --dry-run's."""
    check = work(device, "pass", *[how] * bool(how))
    found, memory = check("pass"), check("memory")
    record(tokens_per_s=f"{found['tokens_per_s']:.0f}")
    record(peak_memory=gb(memory["peak"]), predicted=gb(memory["predicted"]))
    assert memory["peak"] < 1.1 * memory["predicted"]


def needs_two_cards(device: str, dry: bool = True) -> None:
    """Skip what one card can't show. dry: True if a CPU can."""
    if (device == "cpu" and not dry) or (device == "cuda" and torch.cuda.device_count() < 2):
        pytest.skip("needs 2 CUDA devices")


@of_ranks
@pytest.mark.parametrize("how, near", [("during", 1e-5), ("stages", 1e-2)])
def test_two_ranks_learn_the_same(device, work, record, how, near):
    """Ranks must agree if gradients are summed during or after the backward pass, and with a stage each."""
    needs_two_cards(device)
    check = work(device, "ranks")
    found, after = check(how, "grad_norm"), check("after", "grad_norm")
    record(grad_norm=f"{found['grad_norm']:.6f}", after=f"{after['grad_norm']:.6f}")
    assert found["grad_norm"] == pytest.approx(after["grad_norm"], rel=near)


@of_ranks
def test_the_demo_on_two_devices(device, tmp_path, record):
    """In partial colocation one rank must generate and the other judge, and both train."""
    needs_two_cards(device)
    run_demo(device, tmp_path, record, ranks=2, mode="partial")


@of_engine
def test_an_engine_that_sleeps_gives_its_memory_back(device, work, record):
    """It must free weights and KV cache; what stays is within what --dry-run allows for."""
    found = work(device, "serve")("release")
    given_back, left = found["awake"] - found["asleep"], found["asleep"] - found["before"]
    record(given_back=gb(given_back), left=gb(left), mem_fraction=gb(found["share"]))
    assert device == "cpu" or given_back > 0.8 * found["share"]
    assert left < RESIDENT


@of_engine
def test_engine_and_trainer_agree(device, work, record):
    """They must agree on answers that the engine sampled, both with the directory's weights."""
    found = work(device, "serve")("agreement")
    record_difference(record, found)
    assert found["mean"] < MAX_LOGPROB_DIFF["bfloat16"]


@pytest.mark.parametrize("tp", [pytest.param(1, marks=of_engine), pytest.param(2, marks=of_ranks)])
def test_a_push_arrives(device, work, record, tp):
    """With updated weights, sent over CUDA IPC, the engine must agree with the trainer, and not before."""
    if tp > 1:
        needs_two_cards(device, dry=False)
    found = work(device, "serve", *[str(tp)] * (tp > 1))("push", "stale", "mean")
    record(before_the_push=f"{found['stale']:.4f}")
    record_difference(record, found)
    assert found["mean"] < MAX_LOGPROB_DIFF["bfloat16"]
    assert found["stale"] > 2 * found["mean"]
    assert device == "cpu" or found["room"] > 0.9 * found["weights"]


@of_engine
def test_both_engines_and_a_trainer_share_a_device(device, work, record):
    """In full mode the memory that sleeping processes keep, and a push's peak, must be within limits."""
    found = work(device, "full")("asleep", "rollout", "genrm", "actor")
    record(**{f"{who}_asleep": gb(size) for who, size in found.items()})
    push = work(device, "full")("push", "peak", "predicted")
    record(peak_of_the_push=gb(push["peak"]), predicted=gb(push["predicted"]))
    assert max(found.values()) < RESIDENT
    assert push["peak"] < 1.1 * push["predicted"]


@of_engine
def test_a_deterministic_engine_gives_the_same_tokens(device, work, record):
    """One seed must give the same tokens, by itself and among other requests, some of them greedy."""
    found = work(device, "same")("deterministic")
    names = ("same_tokens", "same_logprobs")
    record(**{name: f"{found[name]} of {found['answers']}" for name in names})
    assert found["same_tokens"] == found["answers"]


@of_engine
def test_a_judge_that_slept_lost_nothing(device, work, record):
    """Nobody pushes its weights, so they must come back from pinned host memory."""
    found = work(device, "same")("judge", "given_back")
    same = f"{found['same_tokens']} of {found['answers']}"
    record(same_tokens=same, given_back=gb(found["given_back"]))
    assert found["same_tokens"] == found["answers"]
    assert device == "cpu" or found["given_back"] > found["weights"]


@of_demo
def test_the_demo_on_one_device(device, tmp_path, record):
    """In full colocation rollout, judge and training must alternate."""
    run_demo(device, tmp_path, record, ranks=1, mode="full")


def run_demo(device: str, tmp_path: Path, record, ranks: int, mode: str) -> None:
    launch = [*TORCHRUN, str(ranks), str(ROOT / "run.py"), "--mode", mode]
    launch += ["--steps", "3", "--device", device]
    run_command([*launch, "--out", str(tmp_path / "out"), "--port", "32100"])
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").open()]
    steps = [row for row in rows if "train/loss" in row]
    worst = max(row["train/engine_logprob_diff_mean"] for row in steps)
    record(engine_logprob_diff_mean=f"{worst:.4f}", last_step=f"{steps[-1]['time/step_s']:.1f} s")
    assert len(steps) == 3
    assert worst < MAX_LOGPROB_DIFF["float32" if device == "cpu" else "bfloat16"]
