"""decoder.cpp compiled for this machine's processor, once. Where that can't be, plain torch serves."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from runtime.hf_directory import read_model_config

SOURCE = Path(__file__).with_name("decoder.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=fast", "-shared", "-fPIC", "-w")
COMPILERS = ("g++", "clang++")
CPU_INFO = Path("/proc/cpuinfo")
FAMILIES = ("qwen2", "qwen3", "llama")  # by config.json's model_type


class Choice(NamedTuple):
    """Who runs a model on a machine without CUDA."""

    library: Path | None  # None: plain torch
    text: str  # for people


def compiled() -> Choice:
    """Return the library; compile it if no process has yet, in about a second."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return plain_torch(f"there is no {' or '.join(COMPILERS)}")
    if platform.machine() != "x86_64":
        return plain_torch(f"decoder.cpp is not for {platform.machine()}")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    library = caches / "nanoyatt" / f"decoder-{key(compiler, version)}.so"
    text = f"cpu/decoder.cpp, compiled by {version.partition(chr(10))[0]}"
    if library.exists():
        return Choice(library, text)
    above = next(folder for folder in library.parents if folder.exists())
    if not os.access(above, os.W_OK):
        return plain_torch(f"{above} can't be written")
    library.parent.mkdir(parents=True, exist_ok=True)
    # several processes may compile at once, and find the library whole or not at all
    with tempfile.TemporaryDirectory(dir=library.parent) as private:
        built = Path(private, library.name)
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            problem = next(iter(done.stderr.splitlines()), f"status {done.returncode}")
            return plain_torch(f"{compiler} fails on decoder.cpp: {problem}")
        built.rename(library)
    return Choice(library, text)


def key(compiler: str, version: str) -> str:
    """Name what the code depends on: also the processor, as machines may share a home."""
    lines = CPU_INFO.read_text().splitlines()
    processor = next((line for line in lines if line.startswith("flags")), "")
    parts = (SOURCE.read_text(), compiler, version, *FLAGS, processor)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def plain_torch(why: str) -> Choice:
    return Choice(None, f"plain torch, 3 to 5 times slower: {why}")


def choose(model_dir: str | Path, dtype: str) -> Choice:
    """Return what serves a model without CUDA. UserError if it has no config.json."""
    hf = read_model_config(model_dir)
    kind = hf.get("model_type")
    if kind not in FAMILIES:
        return plain_torch(f"decoder.cpp knows no {kind}")
    if dtype != "float32":
        return plain_torch(f"decoder.cpp knows no {dtype}")
    dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    if hf["hidden_size"] % 8 or dim % 8 or hf["intermediate_size"] < 16:
        return plain_torch("hidden size or head size is no multiple of 8")
    if hf.get("attention_bias") or hf.get("mlp_bias") or hf.get("use_sliding_window"):
        return plain_torch("the model has biases or a sliding window")
    return compiled()
