"""Whole runs with pushes of shards train on the samples of runs with pushes of whole tensors."""

import pytest

from tests.support.launched import Run

pytestmark = pytest.mark.slow
STEPS = ("--steps", 2, "--prompts-per-step", 4, "--save-every", 0)
RUNS = {  # name -> settings, MB that a rank receives as a fraction of whole tensors' (HybridFlow's table 2)
    "1 2 2": (("--mode", "full", "--tp", 2), 0),
    "1 4 2": (("--mode", "full", "--tp", 4), 1 / 3),
    "partial": (("--mode", "partial", "--tp", 2), 0),
    "lora": (("--mode", "full", "--tp", 4, "--lora", 4, "--lr", 5e-3), 1 / 3),
}


class WholePush(Run):
    program = "tests/workers/whole_push.py"


@pytest.mark.parametrize("name", RUNS)
def test_shards_and_whole_tensors_make_the_same_samples(tmp_path, name):
    how, fraction = RUNS[name]
    command = (*STEPS, *how, "--rollout-tp", 2)
    shards = Run(tmp_path / "shards", *command, ranks=4).ended()
    whole = WholePush(tmp_path / "whole", *command, ranks=4).ended()
    assert "pushes send shards" in shards.stdout and "pushes send" not in whole.stdout
    one, other = (run.out / "samples.jsonl" for run in (shards, whole))
    assert one.read_bytes() == other.read_bytes()
    for row, as_whole in zip(shards.rows(), whole.rows(), strict=True):
        received = row.get("sync/received_mb", 0), as_whole.get("sync/received_mb", 0)
        assert received[0] == pytest.approx(fraction * received[1], rel=1e-3)
    shards.check_nothing_is_left()
