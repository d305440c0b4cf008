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
CPU_INFO = Path("/proc/cpuinfo")


class Choice(NamedTuple):
    """Who runs a model on a machine without CUDA."""

    library: Path | None  # None: plain torch
    text: str  # for people


def plain_torch(why: str) -> Choice:
    return Choice(None, f"plain torch, 3 to 5 times slower: {why}")


def choose(model_dir: str | Path, dtype: str) -> Choice:
    """Return what serves a model here. UserError if it has no config.json."""
    hf = read_model_config(model_dir)
    if hf.get("model_type") not in ("qwen2", "qwen3", "llama") or dtype != "float32":
        return plain_torch("decoder.cpp is for Qwen2, Qwen3 and Llama in float32")
    dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    if hf["hidden_size"] % 8 or dim % 8 or hf["intermediate_size"] < 16:
        return plain_torch("hidden size or head size is no multiple of 8")
    if hf.get("attention_bias") or hf.get("mlp_bias") or hf.get("use_sliding_window"):
        return plain_torch("the model has biases or a sliding window")
    return compiled()


def compiled() -> Choice:
    """Return the library; compile it if no process has yet, in a second or two."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if not compiler or platform.machine() != "x86_64":
        return plain_torch("it takes g++ or clang++ on x86-64")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    library = caches / "nanoyatt" / f"decoder-{key(compiler, version)}.so"
    if not library.exists():
        above = next(folder for folder in library.parents if folder.exists())
        if not os.access(above, os.W_OK):
            return plain_torch(f"{above} can't be written")
        library.parent.mkdir(parents=True, exist_ok=True)
        # several processes may compile at once: the library is there whole or not at all
        with tempfile.TemporaryDirectory(dir=library.parent) as private:
            built = Path(private, library.name)
            command = [compiler, *FLAGS, str(SOURCE), "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                return plain_torch(f"{compiler} says {done.stderr[:200]!r}")
            built.rename(library)
    return Choice(library, f"cpu/decoder.cpp, compiled by {version.splitlines()[0]}")


def key(compiler: str, version: str) -> str:
    """Name what the code depends on: also the processor, as machines may share a home."""
    lines = CPU_INFO.read_text().splitlines()
    flags = next((line for line in lines if line.startswith("flags")), "")
    parts = (SOURCE.read_text(), compiler, version, *FLAGS, flags)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
