"""Whole runs with LoRA or a teacher: the same numbers in every mode and after kill -9; with other extras.
Replays: the numbers of the run that is replayed."""

import json

import pytest

from actor import MAX_LOGPROB_DIFF
from config import DEMO_MODELS
from extras.teacher import SHOWN
from tests.support.launched import Run, rows_done, saved

pytestmark = pytest.mark.slow
WRITTEN = DEMO_MODELS / "written" / "actor"
SMALL = ("--steps", 4, "--prompts-per-step", 4, "--save-every", 2, "--save-hf-every", 4)
LORA = (*SMALL, "--lora", 4, "--lr", 5e-3)
# the reference is the actor without adapters
LORA_KL = (*LORA, "--algorithm", "grpo", "kl_coef=0.01")
STUDENT = (*SMALL, "--preset", "tiny", "--model", WRITTEN)
DISTILL = (*STUDENT, "--algorithm", "distill", "--teacher")  # the teacher's directory follows
MIXED = (*STUDENT, "--algorithm", "grpo", "kl_in=reward", "kl_coef=0.1", "--rule", "right")
AHEAD = ("--placement", "standalone", "--ahead", 1)
ELSEWHERE = "engines=0-1 actor=0-1:tp2 reference=1:tp1"
BESIDE = {  # name -> ranks, settings; a teacher's directory follows --teacher
    "lora, images": (2, (*LORA, "--preset", "images")),
    "lora, a critic": (2, (*LORA, "--algorithm", "ppo", "kl_coef=0.01")),
    "lora, ahead": (4, (*LORA, *AHEAD)),
    "lora, tp": (4, (*LORA, "--tp", 2, "--sp", "--mode", "full")),
    "a teacher, a reward": (2, (*MIXED, "--teacher")),
    "a teacher, ahead": (4, (*AHEAD, *DISTILL)),
    "a teacher elsewhere": (2, ("--placement", ELSEWHERE, *DISTILL)),
    "a teacher, lora": (2, ("--lora", 4, "--lr", 5e-3, *DISTILL)),
    "a teacher, tp": (2, ("--tp", 2, "--sp", *DISTILL)),
    "a teacher, episodes": (2, ("--environment", "examples/my_environment.py", *DISTILL)),
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> str:
    run = Run(tmp_path_factory.mktemp("teacher"), "--steps", 6, "--save-hf-every", 6).ended()
    return str(run.out / "hf/step_6")


@pytest.fixture(scope="module", params=["lora", "teacher"])
def partial(request, tmp_path_factory, teacher) -> tuple[Run, tuple]:
    """Return a run in partial mode, and its settings."""
    how = LORA_KL if request.param == "lora" else (*DISTILL, teacher)
    return Run(tmp_path_factory.mktemp("partial"), *how).ended(), how


def adapter_of(run: Run) -> bytes | None:
    path = run.out / "hf/step_4/adapter/adapter_model.safetensors"
    return path.read_bytes() if path.exists() else None


def test_what_it_learns_and_leaves(partial):
    run, how = partial
    first, *_, last = [row["train/reference_kl"] for row in run.rows()[:4]]
    assert all(row["time/reference_s"] > 0 for row in run.rows()[:4])
    if "--lora" in how:
        assert first == 0 < last and adapter_of(run)
        config = json.loads((run.out / "hf/step_4/adapter/adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"]) == (4, 32)
    else:
        assert 0 < last < first
        for row in run.rows("samples.jsonl"):
            assert len(row["differences"]) == min(SHOWN, len(row["response"]) + 1)


@pytest.mark.parametrize("how_else", ["full", "fused", "killed"])
def test_it_learns_the_same(tmp_path, partial, how_else):
    """Other modes must, and a run that goes on after kill -9."""
    expected, how = partial
    if how_else == "killed":
        run = Run(tmp_path, *how).struck((saved(2), Run.kill_all)).again()
    else:
        run = Run(tmp_path, *how, "--mode", how_else).ended()
    run.check_as(expected)
    assert adapter_of(run) == adapter_of(expected)


def test_another_rank_or_teacher_is_another_run(partial):
    expected, how = partial
    other = ("--lora", 8) if "--lora" in how else ("--teacher", WRITTEN)
    run = Run(expected.folder / "refused", *how, *other, "--steps", 6, out=expected.out)
    run.start().finish()
    run.check_one_line(other[0], ": the checkpoint ", "; --resume never starts over")


@pytest.mark.parametrize("name", BESIDE)
def test_other_extras_go_with_it(tmp_path, teacher, name):
    """The engine must have the trainer's numbers on every step, or the run would end."""
    ranks, how = BESIDE[name]
    has_teacher = how[-1] == "--teacher"
    run = Run(tmp_path, *how, *[teacher] * has_teacher, ranks=ranks).ended()
    assert len(run.rows()) == 5
    assert all(row["train/skipped"] == 0 for row in run.rows()[:4])
    assert not has_teacher or run.rows()[0]["train/reference_kl"] > 0


def test_a_teacher_of_images(tmp_path):
    """What the student became in a few steps must teach it."""
    images = ("--preset", "images", *SMALL)
    teacher = Run(tmp_path / "teacher", *images).ended().out / "hf/step_4"
    how = ("--model", DEMO_MODELS / "drawn" / "actor", "--algorithm", "distill")
    run = Run(tmp_path / "student", *images, *how, "--teacher", teacher).ended()
    assert run.rows()[0]["train/reference_kl"] > run.rows()[3]["train/reference_kl"] > 0


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Run:
    return Run(tmp_path_factory.mktemp("recorded"), *SMALL, "--record").ended()


def test_a_replay_has_the_numbers_of_the_run(tmp_path, recorded):
    """It must also end with the same weights, and no engine may start."""

    def check_processes(run: Run) -> None:
        commands = [command for _, command in run.processes()]
        assert commands and not any("engine" in c or "forks" in c for c in commands), commands

    run = Run(tmp_path, *SMALL, "--samples", recorded.out).struck((rows_done(1), check_processes))
    assert run.status == 0, run.stderr
    run.check_nothing_is_left()
    assert not [*(run.out / "logs").iterdir()]
    *expected, _ = map(without_evaluation, recorded.numbers())
    assert [without_evaluation(row) for row in run.numbers()[:4]] == expected
    assert run.rows("samples.jsonl") == recorded.rows("samples.jsonl")
    weights = [each.out / "hf/step_4/model.safetensors" for each in (run, recorded)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def without_evaluation(row: dict) -> dict:
    return {name: value for name, value in row.items() if not name.startswith("eval/")}


def test_a_replay_with_another_loss_leaves_the_recorded_weights(tmp_path, recorded):
    """It may go where the engine's log-probabilities are far from the trainer's."""
    how = ("--samples", recorded.out, "--algorithm", "dr_grpo", "--lr", 5e-3)
    first, *_, last = Run(tmp_path, *SMALL, *how).ended().rows()[:4]
    difference = "train/engine_logprob_diff_mean"
    assert first[difference] <= MAX_LOGPROB_DIFF["float32"] < last[difference]


def test_a_run_without_a_record_is_refused_in_one_line(tmp_path):
    run = Run(tmp_path, *SMALL, "--samples", tmp_path / "nothing").start().finish()
    run.check_one_line("--samples", "is missing: that run needs --record")
