"""Whole runs with adapters: the same numbers in every mode and after kill -9; with other extras."""

import json

import pytest

from extras.lora import ALPHA
from tests.support.launched import Run, saved

pytestmark = pytest.mark.slow
LORA = ("--lora", 4, "--lr", 5e-3, "--steps", 4, "--prompts-per-step", 4)
KL = ("--algorithm", "grpo", "kl_coef=0.01")  # the reference is the actor without adapters
SAVED = (*LORA, *KL, "--save-every", 2, "--save-hf-every", 4)
BESIDE = {  # name -> ranks, the run's other settings
    "images": (2, ("--preset", "images")),
    "critic": (2, ("--algorithm", "ppo", "kl_coef=0.01")),
    "ahead": (4, ("--placement", "standalone", "--ahead", 1)),
    "tp": (4, ("--tp", 2, "--sp", "--mode", "full")),
}


def adapter_of(run: Run) -> bytes:
    return (run.out / "hf/step_4/adapter/adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def partial(tmp_path_factory) -> Run:
    run = Run(tmp_path_factory.mktemp("partial"), *SAVED).ended()
    config = json.loads((run.out / "hf/step_4/adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, ALPHA)
    assert run.rows()[0]["train/reference_kl"] == 0 < run.rows()[3]["train/reference_kl"]
    return run


@pytest.mark.parametrize("mode", ["full", "fused"])
def test_modes_learn_the_same(tmp_path, partial, mode):
    run = Run(tmp_path, *SAVED, "--mode", mode).ended()
    run.check_as(partial)
    assert adapter_of(run) == adapter_of(partial)


def test_a_killed_run_goes_on_with_the_same_adapters(tmp_path, partial):
    killed = Run(tmp_path, *SAVED).struck((saved(2), Run.kill_all))
    killed.again().check_as(partial)
    assert adapter_of(killed) == adapter_of(partial)


def test_another_rank_is_another_run(partial):
    run = Run(partial.folder / "refused", *SAVED, "--lora", 8, "--steps", 6, out=partial.out)
    run.start().finish()
    run.check_one_line("--lora 8: the checkpoint ", " was made with 4; --resume never starts over")


@pytest.mark.parametrize("name", BESIDE)
def test_other_extras_go_with_it(tmp_path, name):
    """The engine must have the trainer's numbers on every step, or the run would end."""
    ranks, changes = BESIDE[name]
    run = Run(tmp_path, *LORA, *changes, ranks=ranks).ended()
    assert len(run.rows()) == 5 and all(row["train/skipped"] == 0 for row in run.rows()[:4])
