"""What can be shown of the CUDA path without a device: flags, the order at the start, who holds how much."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

import run
from commands import memory
from commands.dry_run import graphics
from commands.memory import RESIDENT, engines_of, peaks_of, trainers_of
from config import PRESETS, Config, UserError, parse_config
from cpu.sglang import CHATTY
from engines.server import server_environment, server_flags
from fakes import LEFTOVERS, simulate
from placement import colocate, make_plans
from reporting.describe import describe
from runtime import devices, supported
from runtime.hf_directory import checkpoint_shapes
from scheduling.layout import Shape

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
    # which return wrong values, and want more running requests than were asked for
    assert sum("--disable-prefill-cuda-graph" in text for text in texts) == len(texts) / 3


def test_loggers_that_are_kept_quiet_are_sglangs():
    folder = Path(importlib.util.find_spec("sglang").origin).parents[1]
    for name in ("managers.scheduler", "managers.tokenizer_manager", "entrypoints.engine"):
        source = folder.joinpath("sglang/srt", *name.split(".")).with_suffix(".py").read_text()
        assert "\nlogger = logging.getLogger(__name__)\n" in source
        assert f"sglang.srt.{name}".startswith(CHATTY)
    says_all = re.compile(r'logger\.info\(\s*f?"server_args=')  # with the key of the run
    sources = {path: path.read_text() for path in folder.glob("sglang/srt/entrypoints/*.py")}
    assert [path.stem for path, text in sources.items() if says_all.search(text)] == ["engine"]


@pytest.mark.parametrize("given,is_so", [([], False), (["--deterministic"], True)])
def test_what_cuda_leaves_out_by_default_is_said(models, given, is_so):
    config = parse_config(["--device", "cuda", "--model", models["7B"], "--rule", "exact", *given])
    assert config.deterministic == is_so
    lines = describe(config, make_plans(config, 2), 2)
    assert ("tokens differ from run to run" in lines) == (not is_so)


# ---------------------------------------------------------------- who holds how much when


@pytest.mark.parametrize("mode", ["partial", "full"])
@pytest.mark.parametrize("algorithm", [("grpo",), ("ppo", "kl_coef=0.1", "kl_in=reward")])
@pytest.mark.parametrize("name,ranks,more", [("7B", 8, []), ("32B", 64, LARGE)])
def test_what_a_device_holds_at_every_moment_of_a_step(models, name, ranks, more, algorithm, mode):
    """The loop's own takes and gives, with the sizes of each part: all fits a device of 141 GB, with room."""
    config = settings(models, name, *more, "--mode", mode, "--algorithm", *algorithm)
    holders = colocate(tuple(range(ranks)), config)
    trainers, engines = trainers_of(config, holders), engines_of(config)
    _, log = simulate(mode, 4, algorithm=algorithm)
    learners = {who: parts for who, parts in trainers.items() if "loss" in parts}
    states = {who: p["weights"] + p["optimizer"] for who, p in learners.items()}
    states |= {LEFTOVERS[who]: p["gradients"] for who, p in learners.items()}
    states |= {who: p["weights"] for who, p in trainers.items() if who not in learners}
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
    plans = make_plans(config, ranks)
    predicted = peaks_of(config, plans, ranks, H200)
    most = max(size for who, size in predicted.items() if "reference" not in who)
    processes = 2 if mode == "partial" else 3
    more = memory.CONTEXT * (config.rollout_tp - 1)
    assert peak + processes * RESIDENT + more == pytest.approx(most)
    assert max(predicted.values()) <= 0.9 * H200, predicted
    assert "a device of 141 GB takes it" in " ".join(memory.memory(config, plans, ranks))


def test_an_engine_with_cuda_finds_what_pip_put_beside_python(monkeypatch, tmp_path):
    """`ninja` of a virtual environment that isn't activated, whose Python is a link."""
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "python").symlink_to(sys.executable)
    (tmp_path / "venv" / "ninja").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    path = server_environment("key", "/tmp/x", "cuda")["PATH"]
    assert shutil.which("ninja", path=path) == str(tmp_path / "venv" / "ninja")


def pip_libraries(home: Path) -> Path:
    """What `pip install` of the CUDA runtime leaves in a folder of packages."""
    folder = home / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    (home / "nvidia" / "__init__.py").touch()  # else a real one elsewhere would be a part of it
    (folder / devices.LIBCUDART).touch()
    return folder


@pytest.mark.parametrize("before", ["", "/opt/lib"])
def test_an_engine_with_cuda_finds_the_cuda_runtime(monkeypatch, tmp_path, before):
    """Its first process preloads a library that needs it, and the loader looks into no package of Python."""
    folder = pip_libraries(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", before)
    path = server_environment("key", "/tmp/x", "cuda")["LD_LIBRARY_PATH"]
    assert path.split(":") == [str(folder), *filter(None, [before])]
    assert server_environment("key", "/tmp/x", "cpu")["LD_LIBRARY_PATH"] == before


# ---------------------------------------------------------------- what a machine lacks


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """One with a GPU and all that a run needs, to take something away from."""
    for name in ("CUDA_HOME", "CUDA_PATH", "LOCAL_WORLD_SIZE", "CXX", *devices.ALLOCATOR):
        monkeypatch.delenv(name, raising=False)
    for name in ("CUDA_VISIBLE_DEVICES", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.setenv(name, "0")
    for name in ("bin", "include", "dev"):
        (tmp_path / name).mkdir()
    for name in ("include/Python.h", "dev/nvidia0", *(f"{each}.py" for each in devices.PACKAGES)):
        (tmp_path / name).touch()
    (tmp_path / "driver").write_text("570.86.10\n")
    for name, script in (("nvcc", ""), ("c++", ""), ("nvidia-smi", "echo Default")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    pip_libraries(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(devices, "CUDA_FOLDER", tmp_path / "nothing")
    monkeypatch.setattr("config.DEVICE_FILES", tmp_path / "dev")
    monkeypatch.setattr("config.DRIVER", tmp_path / "driver")
    monkeypatch.setattr(devices.sysconfig, "get_paths", lambda: {"include": tmp_path / "include"})
    monkeypatch.setattr(devices.ctypes.util, "find_library", lambda name: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    return tmp_path


@pytest.mark.parametrize("where", ["CUDA_HOME", "PATH", "CUDA_FOLDER"])
def test_a_compiler_is_looked_for_where_sglang_does(models, machine, monkeypatch, where):
    if where == "CUDA_HOME":
        monkeypatch.setenv(where, str(machine / "cuda"))
    if where == "CUDA_FOLDER":
        monkeypatch.setattr(devices, "CUDA_FOLDER", machine / "cuda")
    if where != "PATH":
        (machine / "bin" / "nvcc").unlink()
        with pytest.raises(UserError, match="nvcc"):
            devices.choose_device(settings(models, "7B"))
        (machine / "cuda" / "bin").mkdir(parents=True)
        (machine / "cuda" / "bin" / "nvcc").touch()
    devices.choose_device(settings(models, "7B"))


@pytest.mark.parametrize(
    "missing,words",
    [
        ("bin/nvcc", "nvcc (apt install cuda-toolkit-13-0"),
        ("bin/c++", "C++20 (apt install g++)"),
        ("include/Python.h", "Python.h (apt install python3."),
        ("nvidia/cu13/lib/libcudart.so.13", "libcudart.so.13 (pip install"),
        ("torch_memory_saver.py", "torch_memory_saver (pip install"),
    ],
)
def test_what_kernels_are_compiled_with_is_named(models, machine, missing, words):
    """In one line before anything starts."""
    (machine / missing).unlink()
    config = settings(models, "7B")
    needed = "^--device cuda: kernels are compiled in a run, which needs "
    with pytest.raises(UserError, match=f"{needed}{re.escape(words)}((?!install).)*$"):
        devices.choose_device(config)
    torch_needs_it = missing in ("bin/c++", "include/Python.h")
    with pytest.raises(UserError) if torch_needs_it else nullcontext():
        devices.choose_device(replace(config, command="sft"))


def test_an_old_compiler_is_none(models, machine):
    """GCC 9 has no C++20."""
    (machine / "bin" / "c++").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(UserError, match=r"needs C\+\+20 \("):
        devices.choose_device(settings(models, "7B"))


def test_check_says_what_a_gpu_is_missing(models, machine, monkeypatch):
    """Each with ! where a run would end. Of one process: a trainer and engines share it."""
    config = settings(models, "7B")
    rows = {name: (text, is_good) for name, text, is_good in graphics(config)}
    assert rows["compute mode"] == ("Default", True) and rows["nvcc"] == ("there", True)
    assert all(is_good for _, is_good in rows.values())
    (machine / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho Exclusive_Process\n")
    with pytest.raises(UserError, match="which is exclusive now; as root: nvidia-smi"):
        devices.choose_device(config)
    devices.choose_device(replace(config, command="sft"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert graphics(config)[0][1].startswith("torch can't use ")
    (machine / "dev" / "nvidia0").unlink()
    assert graphics(config)[0] == ("GPU", "there is none", False)
    (machine / "bin" / "nvcc").unlink()
    rows = {name: is_good for name, _, is_good in graphics(config)}
    assert not rows["compute mode"] and not rows["nvcc"] and rows["Python.h"]


@pytest.mark.parametrize("name", devices.ALLOCATOR)
def test_settings_of_the_allocator_are_kept(models, machine, monkeypatch, name):
    """But those with which memory can't be handed over."""
    monkeypatch.setenv(name, "max_split_size_mb:512")
    devices.choose_device(settings(models, "7B"))
    assert os.environ["PYTORCH_ALLOC_CONF"] == f"{devices.PIN_EXACTLY},max_split_size_mb:512"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv(name, "expandable_segments:True")
    with pytest.raises(UserError, match="with expandable_segments engines can't sleep"):
        devices.choose_device(settings(models, "7B"))
    devices.choose_device(replace(settings(models, "7B"), command="sft"))


@pytest.mark.parametrize(
    "built_for,driver,words",
    [
        (None, "580.95", "it is built for CPUs; install requirements.txt"),
        ("13.0", "570.86", "CUDA 13 needs driver 580 or newer, and this is 570.86"),
        ("13.0", "580.95", "its driver is 580.95, and nvidia-smi may say more"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_an_error(machine, monkeypatch, built_for, driver, words):
    """Unless that is said, or the GPU is hidden."""
    monkeypatch.setattr("torch.version.cuda", built_for)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (machine / "driver").write_text(driver + "\n")
    with pytest.raises(UserError) as raised:
        parse_config([])
    line = f"torch can't use {machine}/dev/nvidia0: {words}"
    assert str(raised.value) == f"{line}; --device cpu trains without it"
    assert parse_config(["--device", "cpu"]).device == "cpu"
    with pytest.raises(UserError, match=f"^{line}$"):  # though the driver counts it
        devices.choose_device(parse_config(["--device", "cuda", "--preset", "cuda"]))
    for hidden in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert parse_config([]).device == "cpu"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (machine / "dev" / "nvidia0").unlink()
    assert parse_config([]).device == "cpu"


@pytest.mark.parametrize(
    "python,libc,words",
    [
        ((3, 14), ("glibc", "2.39"), "(make install PYTHON=python3.11), and this is 3.14"),
        ((3, 12), ("glibc", "2.31"), "this is glibc 2.31"),
        ((3, 12), ("", ""), "this is another libc"),
        ((3, 11), ("glibc", "2.34"), ""),
        ((3, 13), ("glibc", "2.41"), ""),
    ],
)
def test_what_the_wheels_need(python, libc, words):
    found = supported.lacks(python, libc)
    assert words in found and bool(words) == bool(found)


def test_make_says_so_before_it_installs(tmp_path):
    """A Python that says it is 3.14, and has nothing installed."""
    python = tmp_path / "python3"
    patched = "import platform, runpy, sys; sys.version_info = (3, 14); sys.argv = sys.argv[1:]; "
    patched += "runpy.run_path(sys.argv[0], run_name='__main__')"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{patched}" "$@"\n')
    python.chmod(0o755)
    for name in ("Makefile", "requirements.txt", "cpu", "runtime"):
        (tmp_path / name).symlink_to(ROOT / name)
    command = ["make", "install", f"PYTHON={python}"]
    made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert made.returncode == 2
    assert "(make install PYTHON=python3.11), and this is 3.14" in made.stderr
    assert not (tmp_path / ".venv").exists()


# ---------------------------------------------------------------- a run that doesn't fit


@pytest.fixture
def device_of(machine, monkeypatch):
    """Makes torch say that a device has so many bytes."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    facts = SimpleNamespace()
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda number: facts)
    return partial(setattr, facts, "total_memory")


def test_a_run_that_does_not_fit_ends_before_it_starts(models, device_of):
    """One line names the peak and what may help; --no-memory-check overrules it."""
    config = settings(models, "7B", "--mode", "full")
    plans = make_plans(config, 1)
    device_of(85e9)
    with pytest.raises(UserError) as raised:
        memory.check_fits(config, plans, 1)
    needed = peaks_of(config, plans, 1, 85e9)["training the actor"]
    assert needed > 7_615_616_512 * 18 + 3 * RESIDENT  # weights, gradients, optimizer; then a pass
    assert str(raised.value) == (
        f"training the actor takes about {needed / 1e9:.1f} GB of a device, which has 85.0: try "
        "--recompute, a smaller --max-tokens-per-micro-batch, --tp with --sp or more ranks; "
        "--no-memory-check starts anyway"
    )
    memory.check_fits(replace(config, memory_check=False), plans, 1)
    device_of(170e9)
    memory.check_fits(config, plans, 1)
    device_of(70e9)
    trains_nothing = replace(config, rollout_only=True, mem_fraction=0.5)
    memory.check_fits(trains_nothing, make_plans(config, 8), 8)


@pytest.mark.parametrize("recompute,measured", [(False, 25.78e9), (True, 12.07e9)])
def test_a_step_takes_what_was_measured_on_a_gpu(tmp_path, recompute, measured):
    """By gpu_worker.py's `pass`, of gpu_model.py's widths, on an H100 (docs/gpu.md): within 6 %."""
    widths = dict(hidden=1536, ffn=4608, layers=16, heads=12, kv_heads=4, vocab=32768)
    shapes = checkpoint_shapes(sparse_model(tmp_path / "model", **widths))
    how = dict(device="cuda", dtype="bfloat16", max_tokens_per_micro_batch=16384)
    config = Config(**how, recompute=recompute)
    parts = memory.trainer_parts(shapes, config, Shape.of(config, (0,)))
    assert sum(parts.values()) == pytest.approx(measured, rel=0.06)


def test_a_model_is_looked_at_before_it_is_measured(device_of):
    device_of(1e9)
    arguments = ["--device", "cuda", "--preset", "cuda", "--model", "/nowhere", "--rule", "right"]
    config = parse_config(arguments)
    with pytest.raises(UserError, match=r"^--model /nowhere"):
        run.load_inputs(config, make_plans(config, 1), print)


def test_the_push_needs_no_gradients_but_a_bucket(models):
    """Of a 7B on 8, by hand: 2 bytes a parameter, 12 / 8 of the optimizer, the engine's 2, a bucket."""
    config = settings(models, "7B", "--mode", "full")
    plans, parameters, largest = make_plans(config, 8), 7_615_616_512, 2 * 152064 * 3584
    expected = parameters * (2 + 12 / 8 + 2) + (512 << 20) + largest + 3 * RESIDENT
    assert peaks_of(config, plans, 8, H200)["the push"] == pytest.approx(expected, rel=1e-6)
    with_tp = settings(models, "7B", "--mode", "full", "--tp", "2")
    sharded = peaks_of(with_tp, make_plans(with_tp, 8), 8, H200)["the push"]
    copies = sharded - peaks_of(config, plans, 8, H200)["the push"]
    # half of the weights, the optimizer's over half as many ranks, and whole tensors beside the flat ones
    assert copies == pytest.approx(-parameters + (512 << 20) + largest, rel=1e-6)
