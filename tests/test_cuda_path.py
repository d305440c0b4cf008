"""What can be shown of the CUDA path without a device: flags, the order at the start, who holds how much."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

import run
from commands.memory import ASLEEP, engines_of, memory, peaks_of, trainers_of
from config import PRESETS, UserError, parse_config
from engines import server
from engines.server import server_environment, server_flags
from fakes import simulate

ROOT = Path(__file__).parent.parent
H200 = 141e9  # bytes
QWEN_7B = dict(hidden=3584, layers=28, heads=28, kv_heads=4, ffn=18944, vocab=152064)
QWEN_32B = dict(hidden=5120, layers=64, heads=40, kv_heads=8, ffn=27648, vocab=152064)
CUDA = ["--preset", "cuda", "--device", "cuda", "--data", "prompts.jsonl"]
LARGE = ["--tp", "4", "--sp", "--rollout-tp", "2", "--genrm-tp", "2"]


def sparse_model(path: Path, hidden, layers, heads, kv_heads, ffn, vocab) -> str:
    """A Hugging Face directory of published sizes in bfloat16; its tensors take no room on the disk."""
    kv, layer = kv_heads * 128, {}
    for name, rows in (("q_proj", hidden), ("k_proj", kv), ("v_proj", kv)):
        layer |= {f"self_attn.{name}.weight": (rows, hidden), f"self_attn.{name}.bias": (rows,)}
    layer |= {"self_attn.o_proj.weight": (hidden, hidden), "mlp.down_proj.weight": (hidden, ffn)}
    layer |= {f"mlp.{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")}
    layer |= {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    shapes = {f"model.layers.{i}.{name}": layer[name] for i in range(layers) for name in layer}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (vocab, hidden))
    shapes |= {"model.norm.weight": (hidden,)}
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.mkdir()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    config = dict(model_type="qwen2", hidden_size=hidden, intermediate_size=ffn, vocab_size=vocab)
    config |= dict(num_hidden_layers=layers, num_attention_heads=heads)
    config |= dict(num_key_value_heads=kv_heads)
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32768}))
    return str(path)


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("models")
    sizes = {"7B": QWEN_7B, "32B": QWEN_32B}
    return {name: sparse_model(home / name, **size) for name, size in sizes.items()}


def settings(models, name, *more):
    return parse_config([*CUDA, "--model", models[name], "--judge", models[name], *more])


# ---------------------------------------------------------------- flags

PARSE = """
import json, sys
from cpu import sglang
library = sglang.install()
from argparse import ArgumentParser
from sglang.srt.server_args import ServerArgs
parser = ArgumentParser(allow_abbrev=False)
ServerArgs.add_cli_args(parser)
parser.error = lambda message: print(message)
for flags in json.load(sys.stdin):
    parser.parse_args(flags)
print("parsed")
"""


def test_sglang_takes_every_flag(models, monkeypatch):
    """Of each preset, device, role and mode, by its own parser."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    asked = []
    devices = (("cpu", "float32"), ("cpu", "bfloat16"), ("cuda", "bfloat16"))
    roles, repeated = ("rollout", "genrm"), ("--deterministic", "--no-deterministic")
    options = product(PRESETS, devices, ("partial", "full"), repeated, roles)
    for preset, (device, dtype), mode, deterministic, role in options:
        where = ["--preset", preset, "--device", device, "--dtype", dtype, "--mode", mode]
        where += ["--rollout-tp", "2"] if device == "cuda" else []
        config = parse_config([*where, deterministic])
        asked.append(server_flags(role, 1, 30002, models["7B"], config))
    how = dict(text=True, capture_output=True, cwd=ROOT, timeout=300)
    how["env"] = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    given = json.dumps(asked, default=str)
    found = subprocess.run([sys.executable, "-c", PARSE], input=given, **how)
    assert found.stdout.splitlines()[-1:] == ["parsed"], found.stderr[-2000:]
    assert len(found.stdout.splitlines()) == 1, found.stdout
    texts = [" ".join(map(str, flags)) for flags in asked]
    assert sum("--base-gpu-id 1" in text for text in texts) == len(texts) / 3


# ---------------------------------------------------------------- who holds how much when


@pytest.mark.parametrize("mode", ["partial", "full"])
@pytest.mark.parametrize("algorithm", [("grpo",), ("ppo", "kl_coef=0.1", "kl_in=reward")])
@pytest.mark.parametrize("name,ranks,more", [("7B", 8, []), ("32B", 64, LARGE)])
def test_what_a_device_holds_at_every_moment_of_a_step(models, name, ranks, more, algorithm, mode):
    """The loop's own takes and gives, with the sizes of each part: all fits a device of 141 GB, with room."""
    config = settings(models, name, *more, "--mode", mode, "--algorithm", *algorithm)
    trainers, engines = trainers_of(config, ranks), engines_of(config)
    _, log = simulate(mode, 4, algorithm=algorithm)
    learners = {who: parts for who, parts in trainers.items() if "loss" in parts}
    states = {who: sum(p.values()) - p["activations"] - p["loss"] for who, p in learners.items()}
    weights = {who.split()[0]: parts["weights"] for who, parts in engines.items()}
    held, peak = {}, 0.0
    for rank, verb, who in log:
        mine = held.setdefault(rank, {})
        if verb == "give":
            mine.pop(who, None)
            continue
        role = who.split()[0]
        cache = config.mem_fraction * H200 - weights.get(role, 0)
        mine[who] = weights[role] if who.endswith("weights") else states.get(who, cache)
        learning = sum(trainers[who].values()) if set(mine) == {who} and who in states else 0.0
        peak = max(peak, sum(mine.values()), learning)
    predicted = peaks_of(config, trainers, engines, H200)
    most = max(size for who, size in predicted.items() if "reference" not in who)
    assert peak + ASLEEP == pytest.approx(most)
    assert max(predicted.values()) <= 0.9 * H200, predicted
    assert "a device of 141 GB takes it" in " ".join(memory(config, [], ranks))


def test_an_engine_with_cuda_finds_what_pip_put_beside_python(monkeypatch, tmp_path):
    """`ninja` of a virtual environment that isn't activated, whose Python is a link."""
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "python").symlink_to(sys.executable)
    (tmp_path / "venv" / "ninja").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    path = server_environment("key", "/tmp/x", "cuda")["PATH"]
    assert shutil.which("ninja", path=path) == str(tmp_path / "venv" / "ninja")


@pytest.mark.parametrize("where", ["CUDA_HOME", "PATH", ""])
def test_engines_need_a_compiler(models, monkeypatch, tmp_path, where):
    """nvcc is looked for where SGLang does; without it one line comes before anything starts."""
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(server, "NVCC", tmp_path / "bin" / "nvcc")
    for name in ("CUDA_HOME", "CUDA_PATH", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if where == "PATH":
        (tmp_path / "nvcc").touch(mode=0o755)
    elif where:
        monkeypatch.setenv(where, "/opt/cuda")
    config = settings(models, "7B")
    if where:
        run.choose_device(config)
        return
    with pytest.raises(UserError, match=r"^--device cuda: engines compile kernels, .* no nvcc"):
        run.choose_device(config)
    run.choose_device(replace(config, command="sft"))  # starts no engine
