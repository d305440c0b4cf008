"""Whole runs with a teacher: the same numbers in every mode and after kill -9; with other extras."""

import pytest

from config import DEMO_MODELS
from extras.teacher import SHOWN
from tests.support.launched import Run, saved

pytestmark = pytest.mark.slow
STUDENT = ("--preset", "tiny", "--model", DEMO_MODELS / "written" / "actor")
SMALL = ("--steps", 4, "--prompts-per-step", 4, "--save-every", 2)
DISTILL = ("--algorithm", "distill", "--teacher")
MIXED = ("--algorithm", "grpo", "kl_in=reward", "kl_coef=0.1", "--rule", "right", "--teacher")
ELSEWHERE = "engines=0-1 actor=0-1:tp2 reference=1:tp1"
BESIDE = {  # name -> ranks, how it learns, the run's other settings
    "a reward": (2, MIXED, ()),
    "ahead": (4, DISTILL, ("--placement", "standalone", "--ahead", 1)),
    "elsewhere": (2, DISTILL, ("--placement", ELSEWHERE)),
    "lora": (2, DISTILL, ("--lora", 4, "--lr", 5e-3)),
    "tp": (2, DISTILL, ("--tp", 2, "--sp")),
    "episodes": (2, DISTILL, ("--environment", "examples/my_environment.py")),
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> str:
    run = Run(tmp_path_factory.mktemp("teacher"), "--steps", 6, "--save-hf-every", 6).ended()
    return str(run.out / "hf/step_6")


@pytest.fixture(scope="module")
def partial(tmp_path_factory, teacher) -> Run:
    run = Run(tmp_path_factory.mktemp("partial"), *STUDENT, *SMALL, *DISTILL, teacher).ended()
    first, *_, last = [row["train/reference_kl"] for row in run.rows()[:4]]
    assert 0 < last < first
    assert all(row["time/reference_s"] > 0 for row in run.rows()[:4])
    for row in run.rows("samples.jsonl"):
        assert len(row["differences"]) == min(SHOWN, len(row["response"]) + 1)
    return run


@pytest.mark.parametrize("mode", ["full", "fused"])
def test_modes_learn_the_same(tmp_path, partial, teacher, mode):
    Run(tmp_path, *STUDENT, *SMALL, *DISTILL, teacher, "--mode", mode).ended().check_as(partial)


def test_a_killed_run_goes_on_with_the_same_numbers(tmp_path, partial, teacher):
    killed = Run(tmp_path, *STUDENT, *SMALL, *DISTILL, teacher)
    killed.struck((saved(2), Run.kill_all)).again().check_as(partial)


def test_another_teacher_is_another_run(partial):
    given = (*STUDENT, *SMALL, "--steps", 6, *DISTILL, DEMO_MODELS / "written" / "actor")
    run = Run(partial.folder / "refused", *given, out=partial.out).start().finish()
    run.check_one_line("--teacher ", ": the checkpoint ", "; --resume never starts over")


@pytest.mark.parametrize("name", BESIDE)
def test_other_extras_go_with_it(tmp_path, teacher, name):
    ranks, how, changes = BESIDE[name]
    run = Run(tmp_path, *STUDENT, *SMALL, *how, teacher, *changes, ranks=ranks).ended()
    assert len(run.rows()) == 5 and run.rows()[0]["train/reference_kl"] > 0


@pytest.mark.parametrize("learned", [0, 4])
def test_a_teacher_of_images(tmp_path, learned):
    """The student itself must teach nothing, but what it became in a few steps must."""
    model = DEMO_MODELS / "drawn" / "actor"
    images = ("--preset", "images", *SMALL)
    teacher = model
    if learned:
        run = Run(tmp_path / "teacher", *images, "--save-hf-every", learned).ended()
        teacher = run.out / f"hf/step_{learned}"
    run = Run(tmp_path / "student", *images, "--model", model, *DISTILL, teacher).ended()
    rows = run.rows()[:4]
    if learned:
        assert rows[0]["train/reference_kl"] > rows[3]["train/reference_kl"] > 0
    else:
        assert all(row["train/reference_kl"] == row["train/grad_norm"] == 0 for row in rows)
