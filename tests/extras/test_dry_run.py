"""The estimates printed before a run: sizes by hand and by the real libraries, both commands as typed."""

import dataclasses
import io
import os
import re
import sys
from math import prod

import pytest
from transformers import AutoModelForSequenceClassification

import build
import run
from config import DEMO_MODELS, Config, parse_config
from engines import server
from examples.make_demo import models
from extras import dry_run
from extras.dry_run import device_map
from extras.memory import check as memory
from extras.memory import estimate
from extras.memory.estimate import embedding, engine_parts, trainer_parts
from inputs.hf_directory import checkpoint_shapes
from runtime.shutdown import Stop
from scheduling.layout import Shape
from tests.support.models import save_model
from tests.support.patience import run_process
from tests.support.rows import jsonl
from tests.support.vision import make_vision_model

LAYER = {
    **{f"self_attn.{name}.weight": [8, 8] for name in ("q_proj", "o_proj")},
    **{f"self_attn.{name}.weight": [4, 8] for name in ("k_proj", "v_proj")},
    **{f"self_attn.{name}.weight": [4] for name in ("q_norm", "k_norm")},
    **{f"mlp.{name}.weight": [16, 8] for name in ("gate_proj", "up_proj")},
    "mlp.down_proj.weight": [8, 16],
    **{f"{name}.weight": [8] for name in ("input_layernorm", "post_attention_layernorm")},
}
TWO_LAYERS = {f"model.layers.{n}.{name}": LAYER[name] for n in (0, 1) for name in LAYER}
# and a tied output layer
TWO_LAYERS |= {"model.embed_tokens.weight": [10, 8], "model.norm.weight": [8]}


def settings(**more):
    return dataclasses.replace(parse_config([]), **more)


def test_bytes_of_a_trainer_by_hand():
    """Two layers (attention 192, MLP 384, norms 24), embedding 80 and norm 8 have 1288 numbers.

    float32 has 4 bytes of weight, 4 of gradient, 8 of AdamW over 2 ranks; bfloat16 has 2 and 4 of weight."""

    def parts(config, dp):
        ranks = tuple(range(dp * config.tp * config.pp))
        found = trainer_parts(TWO_LAYERS, config, Shape.of(config, ranks))
        return [found[name] for name in ("weights", "gradients", "optimizer")]

    assert parts(settings(), 2) == [5152, 5152, 5152]
    assert parts(settings(tp=2, pp=2), 1) == [4 * 322, 4 * 322, 8 * 322]
    assert parts(settings(dtype="bfloat16"), 1) == [2576, 5152, 15456]


@pytest.mark.parametrize("dtype,size", [("float32", 4), ("bfloat16", 2)])
def test_bytes_of_a_trainer_with_adapters_by_hand(dtype, size):
    """A layer has qkv [16, 8], output [8, 8], gate and up [32, 8], down [8, 16]: 24 + 16 + 40 + 24 sides.

    The sum of gate and up is made in float32, then rounded; the head has no gradient.
    """
    ranks = tuple(range(4))
    config = settings(lora=3, tp=2, dtype=dtype)
    found = trainer_parts(TWO_LAYERS, config, Shape.of(config, ranks), lora=3)
    numbers = 3 * 2 * (24 + 16 + 40 + 24) // 2
    assert (found["adapters"], found["gradients"]) == (4 * numbers, 4 * numbers)
    assert found["optimizer"] == 8 * numbers // 2
    assert found["weights"] == 1288 // 2 * size
    assert found["sum"] == 32 * 8 // 2 * {4: 4, 2: 6}[size]
    without = trainer_parts(TWO_LAYERS, config, Shape.of(config, ranks))
    assert without["loss"] - found["loss"] == 2 * 10 * 8 * size // 2


def test_the_actor_without_adapters_is_the_reference():
    """It must need no second model where both have the same ranks and sizes."""
    kl = dict(algorithm=("grpo", "kl_coef=0.1"), lora=4)

    def models(**more):
        config = settings(**kl | more)
        placement, _ = build.check_settings(config, 2)
        return [*estimate.trainers_of(config, placement)]

    assert models() == ["actor"]
    assert models(lora=0) == ["actor", "reference"]
    elsewhere = "engines=0-1 actor=0-1 reference=0:tp1"
    assert models(placement=elsewhere) == ["actor", "reference"]


def test_memory_counts_critics_and_the_reference():
    def names(**more):
        config = settings(**more)
        lines = memory.table(config, *build.check_settings(config, 2))
        # twice 8192 tokens of 64 in float32, and twice 64 x 96 of the head
        assert "loss 4.2" in lines[1]
        listed = [line.split(":")[0].strip() for line in lines[1:]]
        return [name.split(" demo/")[0] for name in listed]  # without the model's directory

    ppo = ("ppo", "kl_coef=0.1")
    assert names() == ["actor", "rollout", "genrm"]
    learners = ["actor", "reward critic", "reference"]
    assert names(algorithm=ppo) == [*learners, "rollout", "genrm"]


def test_bytes_of_an_engine_by_hand(monkeypatch):
    """A token has 2 layers x (4 keys + 4 values) = 16 numbers of 4 bytes; over two ranks half each."""
    tokens = server.KV_TOKENS
    monkeypatch.setattr(estimate, "shapes_of", lambda path: TWO_LAYERS)
    for tp in (1, 2):
        expected = {"weights": 5152 // tp, "KV cache": tokens * 64 // tp}
        assert engine_parts("m", settings(), tp) == expected


def test_an_evaluation_has_engines_only():
    config = parse_config(["--steps", "0", "--port", "23010", "--tp", "2"])
    placed = build.check_settings(config, 1)
    assert device_map(config, *placed)[1:] == ["  rank 0: rollout on port 23010"]
    lines = memory.table(config, *placed)
    assert [line.split()[0] for line in lines[1:]] == ["rollout"]


@pytest.fixture
def said(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)

    def said(*arguments, ranks=2):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        assert run.start(["--dry-run", *map(str, arguments)], Stop()) == ""
        return capsys.readouterr().out

    return said


def test_it_prints_names_that_the_terminal_lacks(tmp_path, said, monkeypatch):
    rows = [{"prompt": f"{n % 30}+4=", "answer": n % 30 + 4} for n in range(40)]
    data = jsonl(tmp_path / "donn\u00e9es.jsonl", rows)
    given = ["--model", DEMO_MODELS / "written" / "actor", "--data", data, "--rule", "right"]
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    said(*given, "--max-model-len", 99, "--max-new-tokens", 9)
    sys.stdout.flush()
    assert rb"/donn\xe9es.jsonl: 36 rows train" in sys.stdout.buffer.getvalue()


def test_a_dry_run_starts_nothing(tmp_path):
    command = [sys.executable, "run.py", "--dry-run", "--out", tmp_path / "out", "--lr", "0.25"]
    ran = run_process(*command, env=os.environ | {"WORLD_SIZE": "4"}, check=True)
    said = ran.stdout
    assert not ran.stderr
    assert said.startswith("nanoYATT: partial colocation on 4 ranks")
    assert said.endswith("\nnothing was started\n")
    assert len(re.findall(r"^  rank \d+: ", said, re.MULTILINE)) == 4
    assert "--lr 0.25" in said and "actor: weights 1.5, gradients 1.5" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_a_model_that_sees_is_counted(tmp_path, family):
    """Its tower's tensors are named like the layers', but have other widths."""
    config = Config(model="m", rule=("right",), max_tokens_per_micro_batch=2000)
    path = make_vision_model(tmp_path, family, layers=2)
    shapes = checkpoint_shapes(path)
    assert server.engine_context(path, config) == 1024 and embedding(shapes) == [64, 96]
    parts = trainer_parts(shapes, config, Shape((0,)))
    assert parts["weights"] == 4 * sum(map(prod, shapes.values()))
    keys, width = 2 * 24, 288  # two key-value heads
    assert parts["activations"] == 2 * (32 * 96 + 12 * keys + 20 * width) * 2000


@pytest.mark.parametrize("context, tokens", [(0, 256), (8000, 8000), (100, 100)])
def test_a_micro_batch_has_room_for_one_sample_in_whatever_memory(monkeypatch, context, tokens):
    """The settings must be those of a run: 6 tokens of a context stay free, but they count."""
    monkeypatch.setattr(estimate, "ACTIVATIONS", 1)
    monkeypatch.setattr(estimate, "activations", lambda *_, tokens: tokens)
    model = str(DEMO_MODELS / "written" / "actor")
    config = Config(
        model=model, rule=("right",), max_model_len=context, max_new_tokens=9, device="cpu"
    )
    assert estimate.with_micro_batch(config).max_tokens_per_micro_batch == tokens


@pytest.mark.parametrize("judge", ["written", "scalar"])
def test_a_dry_run_comes_before_the_download_of_the_weights(tmp_path, said, judge):
    """By config.json it counts as many bytes as by the tensors: tied, untied, or with a scalar head."""
    paths = [save_model(tmp_path / "policy"), tmp_path / "judge"]
    models.new_model(paths[1], 0)
    if judge == "scalar":
        scalar = AutoModelForSequenceClassification.from_pretrained(paths[1], num_labels=1)
        scalar.save_pretrained(paths[1])
    given = [
        "--model",
        paths[0],
        "--judge",
        paths[1],
        "--max-new-tokens",
        "9",
        "--max-model-len",
        "200",
    ]
    given += [
        "--judge-max-new-tokens",
        "9",
        "--data",
        jsonl(tmp_path / "r.jsonl", [{"prompt": "3+4="}]),
    ]
    given += ["--judge-format", "score" if judge == "scalar" else "addition"]
    estimate.shapes_of.cache_clear()
    expected = said(*given)
    for path in paths:
        (path / "model.safetensors").unlink()
    estimate.shapes_of.cache_clear()
    assert said(*given) == expected
    with pytest.raises(ValueError, match=r"no model\.safetensors in it"):
        run.start(["check", *map(str, given)], Stop())


def test_a_dry_run_refuses_what_the_run_would(tmp_path, said):
    here = save_model(tmp_path / "model")
    for arguments, named in (
        ("--rollout-ranks 8", "--rollout-ranks 8"),
        (f"--model /nowhere --judge {here}", "nowhere"),
        (f"--model {here} --judge /nowhere", "nowhere"),
        (f"--model {here} --judge {here} --pp 2 --tp 4 --mode full", "--tp 4 does not divide"),
        ("--host 203.0.113.7", "--host 203.0.113.7 is not an IPv4 address of this machine"),
    ):
        with pytest.raises(ValueError, match=named):
            said(*arguments.split(), ranks=8)
    with pytest.raises(ValueError, match=r"^--host ::1 is not an IPv4 address of this machine"):
        dry_run.check(settings(host="::1"))


def test_a_dry_run_reads_the_rows(tmp_path):
    models.new_model(tmp_path / "model", 0)
    good = dict(prompt="3+4=", answer=7)
    path = jsonl(tmp_path / "rows.jsonl", [good, {"prompt": "3+4=", "answer": "a"}])
    given = f"--dry-run --max-new-tokens 9 --rule number --model {tmp_path}/model --data {path}"
    no_key = "the rule number finds no key in 'a'; .* one plain number"
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: .*{no_key}"):
        run.start(given.split(), Stop())
    jsonl(path, [good])
    assert run.start(given.split(), Stop()) == ""
    assert not dry_run.rendezvous.launcher_folder().exists()
