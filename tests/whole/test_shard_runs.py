"""Whole runs with pushes of shards train on the samples of runs with pushes of whole tensors."""

import pytest

from config import DEMO_MODELS
from tests.support.launched import Run
from tests.support.models import save_tokenizer
from tests.support.plain import make_model

pytestmark = pytest.mark.slow
STEPS = ("--steps", 2, "--prompts-per-step", 4, "--save-every", 0, "--rollout-tp", 2)
FULL = ("--mode", "full", "--preset", "tiny")
DEMO = (*FULL, "--model", DEMO_MODELS / "written" / "actor", "--rule", "right")
RUNS = {  # name -> ranks, settings, bytes received as a part of whole tensors' (table 2 of HybridFlow)
    "1 2 2": (4, (*DEMO, "--tp", 2), 0),
    "1 4 2": (4, (*DEMO, "--tp", 4), 1 / 3),
    "partial": (4, ("--mode", "partial", "--tp", 2), 0),
    "lora": (4, (*DEMO, "--tp", 4, "--lora", 4, "--lr", 5e-3), 1 / 3),
}
SIZES = dict(hidden_size=64, intermediate_size=144, vocab_size=384, max_position_embeddings=512)
SIZES |= dict(num_attention_heads=8, num_key_value_heads=4)
MODELS = {  # name -> family, whether the head is tied, ranks, p, t; as above
    "llama": ("llama", False, 2, 1, 2, 0),
    "qwen2": ("qwen2", True, 2, 1, 2, 0),
    "qwen3": ("qwen3", False, 4, 2, 2, 1 / 3),
}


class WholePush(Run):
    program = "tests/workers/whole_push.py"


def check_same(folder, ranks: int, how: tuple, part: float) -> None:
    shards = Run(folder / "shards", *STEPS, *how, ranks=ranks).ended()
    whole = WholePush(folder / "whole", *STEPS, *how, ranks=ranks).ended()
    assert "pushes send shards" in shards.stdout and "pushes send" not in whole.stdout
    one, other = (run.out / "samples.jsonl" for run in (shards, whole))
    assert one.read_bytes() == other.read_bytes()
    for row, as_whole in zip(shards.rows()[:2], whole.rows()[:2], strict=True):
        assert row["train/grad_norm"] > 0
        expected = pytest.approx(part * as_whole["sync/received_mb"], rel=0.02)
        assert row["sync/received_mb"] == expected
    shards.check_nothing_is_left()


@pytest.mark.parametrize("name", RUNS)
def test_the_demo_makes_the_same_samples(tmp_path, name):
    check_same(tmp_path, *RUNS[name])


@pytest.mark.parametrize("name", MODELS)
def test_each_family_makes_the_same_samples(tmp_path, name):
    """With 4 key heads for 8 query heads, biases (Qwen2), a head of its own (the others)."""
    family, tied, ranks, pp, tp, part = MODELS[name]
    model = make_model(tmp_path / "model", family, tied, **SIZES)
    save_tokenizer(model)
    how = (*FULL, "--model", model, "--rule", "length:30", "--pp", pp, "--tp", tp)
    check_same(tmp_path, ranks, how, part)
