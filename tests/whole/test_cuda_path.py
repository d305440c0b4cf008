"""The CUDA path, as far as it can be checked without a device: flags, start order, memory of each part."""

import asyncio
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from config import AS_FITS, PRESETS, Config, parse_config
from demo import task  # noqa: F401  task adds the format
from engines import wire
from engines.server import server_environment, server_flags
from engines.server_main import CHATTY
from extras.apart.elsewhere import Elsewhere
from extras.memory import check as memory
from extras.memory.estimate import (
    CONTEXT,
    RESIDENT,
    engines_of,
    peaks_of,
    trainer_parts,
    trainers_of,
    with_recompute,
)
from inputs.hf_directory import checkpoint_shapes
from modes import lay_out
from placement import colocate
from runtime import devices, rendezvous, supported
from runtime.errors import UserError
from scheduling.layout import Shape
from tests.support.fakes import LEFTOVERS, simulate
from tests.support.patience import run_process
from training.lm_head import CHUNK_BYTES
from training.trainer import Trainer

H200 = 141e9  # bytes
QWEN_7B = dict(hidden_size=3584, num_hidden_layers=28, num_attention_heads=28)
QWEN_7B |= dict(num_key_value_heads=4, intermediate_size=18944, vocab_size=152064)
QWEN_32B = dict(hidden_size=5120, num_hidden_layers=64, num_attention_heads=40)
QWEN_32B |= dict(num_key_value_heads=8, intermediate_size=27648, vocab_size=152064)
CUDA = ["--preset", "cuda", "--device", "cuda", "--data", "prompts.jsonl"]
LARGE = ["--tp", "4", "--sp", "--rollout-tp", "2", "--genrm-tp", "2"]


def sparse_model(path: Path, **sizes) -> str:
    """Make a Hugging Face directory of published sizes in bfloat16; its tensors take no disk space."""
    config = Qwen2Config(**sizes, max_position_embeddings=32768)
    config.save_pretrained(path)
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    header, end = {}, 0
    for name, tensor in model.named_parameters():
        begin, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return str(path)


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, str]:
    home = tmp_path_factory.mktemp("models")
    sizes = {"7B": QWEN_7B, "32B": QWEN_32B}
    return {name: sparse_model(home / name, **size) for name, size in sizes.items()}


def settings(model, *more):
    return parse_config([*CUDA, "--model", model, "--judge", model, *more])


# first for its parser; then for arm64, where SGLang's kernels, which bind threads to cores, aren't installed
SGLANG = """
import json, sys
from types import SimpleNamespace
from cpu import sglang
library = sglang.install()
from argparse import ArgumentParser
from sglang.srt.server_args import ServerArgs
parser = ArgumentParser(allow_abbrev=False)
ServerArgs.add_cli_args(parser)
parser.error = lambda message: print(message)
for flags in json.load(sys.stdin):
    parser.parse_args(flags)
print("parsed", flush=True)
from sglang.srt.distributed import bootstrap
bootstrap._is_cpu_arm64 = True
bootstrap.get_parallel = lambda: SimpleNamespace(tp_size=1, tp_rank=0)
bootstrap._init_cpu_threads_env(local_omp_cpuid="0")
"""
DEVICES = (("cpu", "float32"), ("cpu", "bfloat16"), ("cuda", "bfloat16"))
REPEATED = ("--deterministic", "--no-deterministic")
OPTIONS = [*product(PRESETS, DEVICES, ("partial", "full"), REPEATED, ("rollout", "genrm"))]


@pytest.fixture(scope="module")
def asked(models) -> list[list]:
    """Return the flags of an engine of rank 1 for each of OPTIONS."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "1")
        for preset, (device, dtype), mode, repeated, role in OPTIONS:
            where = f"--preset {preset} --device {device} --dtype {dtype} --mode {mode} {repeated}"
            config = parse_config([*where.split(), *["--rollout-tp", "2"] * (device == "cuda")])
            found.append(server_flags(role, 1, 30002, models["7B"], config))
    return found


@pytest.fixture(scope="module")
def sglang_alone(asked) -> subprocess.CompletedProcess[str]:
    how = dict(input=json.dumps(asked, default=str), env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    return run_process(sys.executable, "-c", SGLANG, **how)


def test_sglang_takes_every_flag(asked, sglang_alone):
    assert sglang_alone.stdout == "parsed\n", sglang_alone.stderr
    for (_, (device, _), mode, _, role), flags in zip(OPTIONS, asked, strict=True):
        # for a judge, and rollout that wakes between waves: nobody pushes weights then
        keeps_weights = device == "cuda" and (role, mode) != ("rollout", "partial")
        assert ("--enable-weights-cpu-backup" in flags) == keeps_weights
    texts = [" ".join(map(str, flags)) for flags in asked]
    assert sum("--base-gpu-id 1" in text for text in texts) == len(texts) / 3
    # these return wrong values, and exceed the requested running requests
    assert sum("--disable-prefill-cuda-graph" in text for text in texts) == len(texts) / 3


def test_an_engine_starts_on_arm64(sglang_alone):
    assert sglang_alone.returncode == 0, sglang_alone.stderr


def test_the_one_logger_that_says_the_key_of_the_run_is_kept_quiet():
    folder = Path(importlib.util.find_spec("sglang").origin).parent / "srt" / "entrypoints"
    says_all = re.compile(r'logger\.info\(\s*f?"server_args=')
    found = [path.stem for path in folder.glob("*.py") if says_all.search(path.read_text())]
    assert found == ["engine"] and "sglang.srt.entrypoints.engine".startswith(CHATTY)


@pytest.mark.parametrize("mode", ["partial", "full"])
@pytest.mark.parametrize("algorithm", [("grpo",), ("ppo", "kl_coef=0.1", "kl_in=reward")])
@pytest.mark.parametrize("name,ranks,more", [("7B", 8, []), ("32B", 64, LARGE)])
def test_what_a_device_holds_at_every_moment_of_a_step(models, name, ranks, more, algorithm, mode):
    """Run through the loop's own hand-overs with the parts' sizes: all must fit a 141 GB device with room."""
    config = settings(models[name], *more, "--mode", mode, "--algorithm", *algorithm)
    holders = colocate(tuple(range(ranks)), config)
    trainers = {who: model.parts for who, model in trainers_of(config, holders).items()}
    engines = engines_of(config, *lay_out(config, ranks))
    _, log = simulate(mode, 4, algorithm=algorithm)
    learners = {who: parts for who, parts in trainers.items() if "loss" in parts}
    states = {who: p["weights"] + p["optimizer"] for who, p in learners.items()}
    states |= {LEFTOVERS[who]: p["gradients"] for who, p in learners.items()}
    states |= {who: p["weights"] for who, p in trainers.items() if who not in learners}
    weights = {who.split()[0]: model.parts["weights"] for who, model in engines.items()}
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
    placed = lay_out(config, ranks)
    predicted = peaks_of(config, *placed, H200)
    most = max(size for who, size in predicted.items() if "reference" not in who)
    processes = 2 if mode == "partial" else 3
    more = CONTEXT * (config.rollout_tp - 1)
    assert peak + processes * RESIDENT + more == pytest.approx(most)
    assert max(predicted.values()) <= 0.9 * H200, predicted
    table = "\n".join(memory.table(config, *placed))
    assert re.search(r"0\.9 of its (85|141)\.0 GB are used: enough", table)


PACKAGES = ("sgl_kernel", "flashinfer", "torch_memory_saver")
NVCC = "echo 'Cuda compilation tools, release {0}, V{0}.88'"


def pip_libraries(home: Path) -> Path:
    """Make the folders that `pip install` of the CUDA runtime leaves among packages."""
    folder = home / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    (home / "nvidia" / "__init__.py").touch()  # otherwise a real one elsewhere would be part of it
    (folder / devices.LIBCUDART).touch()
    return folder


@pytest.mark.parametrize("before", ["", "/opt/lib"])
def test_an_engine_with_cuda_finds_what_pip_installed(monkeypatch, tmp_path, before):
    """Its first process must preload a library that needs the CUDA runtime, which the loader wouldn't find.

    `ninja` may be in a virtual environment that isn't activated."""
    folder = pip_libraries(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", before)
    (tmp_path / "python").symlink_to(sys.executable)
    (tmp_path / "ninja").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    found = server_environment("key", "/tmp/x", "cuda")
    assert "PYTHONSAFEPATH" not in found  # it would find none of our modules
    assert found["LD_LIBRARY_PATH"].split(":") == [str(folder), *filter(None, [before])]
    assert shutil.which("ninja", path=found["PATH"]) == str(tmp_path / "ninja")
    assert server_environment("key", "/tmp/x", "cpu")["LD_LIBRARY_PATH"] == before


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a machine with a GPU and all that a run needs; tests remove one thing."""
    for name in ("CUDA_HOME", "CUDA_PATH", "LOCAL_WORLD_SIZE", "CXX", *devices.ALLOCATOR):
        monkeypatch.delenv(name, raising=False)
    for name in ("CUDA_VISIBLE_DEVICES", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.setenv(name, "0")
    for name in ("bin", "include", "dev"):
        (tmp_path / name).mkdir()
    for name in ("include/Python.h", "dev/nvidia0", *(f"{each}.py" for each in PACKAGES)):
        (tmp_path / name).touch()
    (tmp_path / "driver").write_text("570.86.10\n")
    tools = {"nvcc": NVCC.format("13.0"), "c++": "", "nvidia-smi": "echo Default"}
    for name, script in tools.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    pip_libraries(tmp_path)
    listed = "\tlibcuda.so.1 (libc6) => /usr/lib/libcuda.so.1\n"
    listed += "\tlibcuda.so.1 (libc6,x86-64) => /usr/lib64/libcuda.so.1"
    (tmp_path / "ldconfig").write_text(f"#!/bin/sh\necho '{listed}'\n")
    (tmp_path / "ldconfig").chmod(0o755)
    monkeypatch.setattr(devices, "LDCONFIG", str(tmp_path / "ldconfig"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(devices, "CUDA_FOLDER", tmp_path / "nothing")
    monkeypatch.setattr(devices, "DEVICE_FILES", tmp_path / "dev")
    monkeypatch.setattr(devices, "DRIVER", tmp_path / "driver")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": tmp_path / "include"})
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    return tmp_path


@pytest.mark.parametrize(
    "on_path,named", [("", ""), ("12.0", ""), ("12.9", ""), ("13.1", ""), ("", "12.8")]
)
def test_engines_get_a_toolkit_that_is_new_enough(machine, monkeypatch, on_path, named):
    """They get pip's, as links with linkable names, unless CUDA_HOME is set or PATH has CUDA 13."""
    pip, other = machine / "nvidia" / "cu13", machine / "other"
    for home, version in ((pip, "13.0"), (machine, on_path), (other, named)):
        (home / "bin").mkdir(parents=True, exist_ok=True)
        (home / "bin" / "nvcc").write_text(f"#!/bin/sh\n{NVCC.format(version or '11.5')}\n")
        (home / "bin" / "nvcc").chmod(0o755)
    if named:
        monkeypatch.setenv("CUDA_HOME", str(other))
    for _ in range(2):  # the second run finds the links
        found = Path(server_environment("key", "/tmp/x", "cuda")["CUDA_HOME"])
    links = machine / "nvidia" / "cu13-links"
    assert found == (other if named else machine if on_path == "13.1" else links)
    if found == links:
        assert (links / "bin" / "nvcc").samefile(pip / "bin" / "nvcc")
        assert (links / "lib64" / "libcudart.so").samefile(pip / "lib" / devices.LIBCUDART)
        assert (links / "nvvm").readlink() == pip / "nvvm"
        assert str((links / "lib64/stubs/libcuda.so").readlink()) == "/usr/lib64/libcuda.so.1"
        shutil.rmtree(links)
        links.touch()
        with pytest.raises(UserError, match="cu13-links: Not a directory: set CUDA_HOME to a"):
            devices.cuda_home()


@pytest.mark.parametrize("name", devices.ALLOCATOR)
def test_settings_of_the_allocator_are_kept(machine, monkeypatch, name):
    """Only settings that prevent handing memory over are removed."""
    monkeypatch.setenv(name, "max_split_size_mb:512")
    devices.choose_device(settings("m"))
    assert os.environ["PYTORCH_ALLOC_CONF"] == f"{devices.PIN_EXACTLY},max_split_size_mb:512"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv(name, "expandable_segments:True")
    with pytest.raises(UserError, match="with expandable_segments engines can't sleep"):
        devices.choose_device(settings("m"))
    devices.choose_device(replace(settings("m"), command="sft"))


def test_what_is_pushed_lies_in_no_segment_that_grows(machine, monkeypatch):
    """CUDA IPC can't send such memory: a bucket must be made while segments have a fixed size."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", devices.PIN_EXACTLY)
    told = []
    monkeypatch.setattr("torch._C._accelerator_setAllocatorSettings", told.append)
    monkeypatch.setattr("torch.cat", lambda tensors: told.append("the bucket"))
    monkeypatch.setattr("torch.Tensor.is_cuda", True)
    wire.serialize_bucket([("weight", torch.zeros(3))], 1)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    devices.grow_segments(True)  # an explicit setting wins
    fixed, bucket, grows = told
    assert bucket == "the bucket"
    assert fixed == f"{devices.PIN_EXACTLY},expandable_segments:False"
    assert grows == f"{devices.PIN_EXACTLY},expandable_segments:True"


def test_a_deterministic_run_on_a_gpu_asks_all_of_torch(machine, monkeypatch):
    """With only a warning, FlashAttention's backward pass would add in any order."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "0")
    devices.choose_device(settings("m"))
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    devices.choose_device(settings("m", "--deterministic"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setattr("torch._C._accelerator_setAllocatorSettings", lambda text: None)
    monkeypatch.setattr("torch.distributed.init_process_group", Mock())
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr(rendezvous, "init_method", lambda config: {})
    monkeypatch.setattr(rendezvous, "World", Mock())
    for flag in ("--deterministic", "--no-deterministic"):
        rendezvous.join(settings("m", flag))
        asked = flag == "--deterministic"
        assert torch.are_deterministic_algorithms_enabled() == asked
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


@pytest.mark.parametrize(
    "built_for,driver,words",
    [
        (None, "580.95", "it is built for CPUs; install requirements.txt"),
        ("13.0", "570.86", "CUDA 13 needs driver 580 or newer, and this is 570.86"),
        ("13.0", "580.95", "its driver is 580.95; nvidia-smi may show more"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_an_error(machine, monkeypatch, built_for, driver, words):
    """It must be one unless the user chooses cpu or hides the GPU."""
    monkeypatch.setattr("torch.version.cuda", built_for)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (machine / "driver").write_text(driver + "\n")
    with pytest.raises(UserError) as raised:
        parse_config([])
    line = f"torch can't use {machine}/dev/nvidia0: {words}; --device cpu trains without it"
    assert str(raised.value) == line
    assert parse_config(["--device", "cpu"]).device == "cpu"
    with pytest.raises(UserError, match=f"^{line}$"):  # though the driver counts it
        devices.choose_device(parse_config(["--device", "cuda", "--preset", "cuda"]))
    for hidden in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert parse_config([]).device == "cpu"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (machine / "dev" / "nvidia0").unlink()
    assert parse_config([]).device == "cpu"


def test_what_a_gpu_needs_is_told_before_the_installation(machine):
    assert not supported.lacks_for_gpus()
    (machine / "include" / "Python.h").unlink()
    assert "apt install g++ python3" in supported.lacks_for_gpus()


def test_what_the_wheels_need():
    assert not supported.lacks((3, 11), ("glibc", "2.34"))
    assert not supported.lacks((3, 13), ("glibc", "2.41"))
    assert "this is glibc 2.31" in supported.lacks((3, 12), ("glibc", "2.31"))
    assert "this is another libc" in supported.lacks((3, 12), ("", ""))


@pytest.fixture
def device_of(machine, monkeypatch):
    """Set the free memory of the GPU."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    facts = SimpleNamespace()
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda number: (facts.free, 170e9))
    return partial(setattr, facts, "free")


def test_a_run_that_does_not_fit_ends_before_it_starts(models, device_of):
    config = settings(models["7B"], "--mode", "full")
    placed = lay_out(config, 1)
    device_of(85e9)
    with pytest.raises(UserError) as raised:
        memory.check_fits(config, *placed)
    needed = peaks_of(config, *placed, 85e9)["training the actor"]
    assert needed > 7_615_616_512 * 18 + 3 * RESIDENT  # weights, gradients, optimizer; then a pass
    most = f"{needed / 1e9:.1f} GB for training the actor"
    line = f"0.9 of a device: the run needs about {most}, and 76.5 are free"
    assert str(raised.value).startswith(line)
    memory.check_fits(replace(config, memory_check=False), *placed)
    device_of(needed / 0.9 + 1)
    memory.check_fits(config, *placed)


def test_a_teacher_that_does_not_fit_is_named(models, device_of):
    config = settings(models["7B"], "--teacher", models["32B"], "--algorithm", "distill")
    device_of(85e9)
    with pytest.raises(UserError, match=r"GB for the teacher's pass, and 76\.5 are free"):
        memory.check_fits(config, *lay_out(config, 8))


@pytest.mark.parametrize("recompute,measured", [(0, 25.78e9), (AS_FITS, 12.07e9)])
def test_a_step_takes_what_was_measured_on_a_gpu(tmp_path, recompute, measured):
    """It must be within 6% of gpu_worker.py's `pass` with gpu_model.py's widths on an H100 (docs/gpu.md)."""
    widths = dict(hidden_size=1536, intermediate_size=4608, num_hidden_layers=16)
    widths |= dict(num_attention_heads=12, num_key_value_heads=4, vocab_size=32768)
    shapes = checkpoint_shapes(sparse_model(tmp_path / "model", **widths))
    how = dict(device="cuda", dtype="bfloat16", max_tokens_per_micro_batch=16384)
    config = Config(**how, recompute=recompute)
    parts = trainer_parts(shapes, config, Shape.of(config, (0,)))
    assert sum(parts.values()) == pytest.approx(measured, rel=0.06)


def test_as_few_layers_are_computed_again_as_fit(models, monkeypatch):
    """The count is for a 7B's 28 layers in 0.9 of a device; with memory left, logits must be kept."""
    how = ("--max-tokens-per-micro-batch", "8192", "--tp", "2", "--sp")
    config = settings(models["7B"], *how)
    placed = lay_out(config, 8)

    def training(layers: int, size: float) -> float:
        return peaks_of(replace(config, recompute=layers), *placed, size)["training the actor"]

    hidden, kv, ffn = 3584, 512, 18944
    whole = 8192 * (16 * hidden + 6 * kv + 6 * ffn) // 2
    again = 8192 * 2 * hidden // 2
    assert training(6, 85e9) - training(5, 85e9) == pytest.approx(again - whole, rel=1e-6)
    for size in (85e9, 65e9, 62e9):
        there = with_recompute(config, *placed, size)
        assert training(there.recompute, size) + there.kept_chunks * CHUNK_BYTES <= 0.9 * size
        if there.recompute:
            assert training(there.recompute - 1, size) > 0.9 * size
    assert with_recompute(config, *placed, 85e9).kept_chunks > 0 == there.kept_chunks
    least = with_recompute(config, *placed, 40e9)
    assert (least.recompute, least.kept_chunks) == (28, 0)
    assert training(28, 40e9) == training(AS_FITS, 40e9)
    by_hand = replace(config, recompute=3)
    assert with_recompute(by_hand, *placed, 85e9) == by_hand
    # whatever a directory's name; where a tower takes uncounted memory, nothing is kept
    training_dir = Path(models["7B"]).parent / "training"
    training_dir.symlink_to(models["7B"])
    serving = settings(str(training_dir), *how, "--mem-fraction", "0.9")
    assert with_recompute(serving, *placed, 85e9).recompute == 0
    monkeypatch.setattr("extras.memory.estimate.sees", lambda path: True)
    seeing = with_recompute(config, *placed, 85e9)
    assert (seeing.recompute, seeing.kept_chunks) == (28, 0)


def test_ranks_settle_on_the_smallest_gpu(models, monkeypatch):
    """Otherwise a model-parallel group would wait for layers that only one of its ranks recomputes."""
    config = settings(models["7B"], "--tp", "2", "--sp")
    monkeypatch.setattr(memory, "free_bytes", lambda: 85e9)

    monkeypatch.setattr(memory, "check_fits", lambda *_: None)

    async def gather(own):
        return [own, 60e9]

    async def call(function, *args):
        return function(*args)

    placed = lay_out(config, 8)
    world = SimpleNamespace(gather=gather, run=call)
    found = asyncio.run(memory.settled(config, *placed, world))
    assert found == with_recompute(config, *placed, 60e9) != with_recompute(config, *placed, 85e9)


def test_narrow_heads_get_an_attention_that_can(models, tmp_path, monkeypatch):
    """The demo's heads have 24; flashinfer, SGLang's choice except on Hopper, needs at least 64."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    demo = parse_config(["--device", "cuda"])
    for path, config, is_narrow in ((demo.model, demo, True), (models["7B"], settings("m"), False)):
        flags = server_flags("rollout", 0, 30000, path, config)
        assert ("--attention-backend" in flags) == is_narrow


def test_sequence_parallel_trainers_order_their_launches(machine, monkeypatch):
    """They must use one queue to the device, but engines don't inherit the setting."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    devices.choose_device(settings("m"))
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ
    devices.choose_device(settings("m", "--tp", "2", "--sp"))
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    environment = server_environment("", "", "cuda")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in environment and "PATH" in environment
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")


def test_a_trim_takes_back_the_last_pushs_bucket(monkeypatch):
    """It must do so before memory is freed, on a rank with the actor and on one with only its engine."""
    done = []
    for name in ("ipc_collect", "empty_cache"):
        monkeypatch.setattr(f"torch.cuda.{name}", partial(done.append, name))
    actor = SimpleNamespace(device=torch.device("cuda"), learns=True)
    Trainer.trim(actor, keeps_gradients=True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    Elsewhere.trim(SimpleNamespace(), keeps_gradients=True)
    assert done == ["ipc_collect", "empty_cache"] * 2


def test_the_push_needs_no_gradients_but_a_bucket(models):
    """By hand for a 7B on 8: 2 bytes per parameter, 12 / 8 of the optimizer, the engine's 2, a bucket."""
    config = settings(models["7B"], "--mode", "full")
    placed, parameters, largest = lay_out(config, 8), 7_615_616_512, 2 * 152064 * 3584
    expected = parameters * (2 + 12 / 8 + 2) + (512 << 20) + largest + 3 * RESIDENT
    assert peaks_of(config, *placed, H200)["the push"] == pytest.approx(expected, rel=1e-6)
    with_tp = settings(models["7B"], "--mode", "full", "--tp", "2")
    sharded = peaks_of(with_tp, *lay_out(with_tp, 8), H200)["the push"]
    copies = sharded - peaks_of(config, *placed, H200)["the push"]
    # half the weights, the optimizer over half as many ranks, and whole tensors in addition to flat ones
    assert copies == pytest.approx(-parameters + (512 << 20) + largest, rel=1e-6)
