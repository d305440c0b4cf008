"""decoder.cpp compiled for this machine's processor, once. Where that can't be, plain torch serves."""

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from runtime.hf_directory import read_model_config

SOURCE = Path(__file__).with_name("decoder.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=fast", "-shared", "-fPIC", "-w")
CPU_INFO = Path("/proc/cpuinfo")


def program_for(model_dir: str | Path, dtype: str) -> str:
    """Name what serves a model, for people."""
    if library_for(model_dir, dtype):
        return "cpu/decoder.cpp"
    takes = "cpu/decoder.cpp takes g++ or clang++, a ~/.cache, and Qwen2, Qwen3 or Llama in float32"
    return f"plain torch, 3 to 5 times slower: {takes}"


def library_for(model_dir: str | Path, dtype: str) -> Path | None:
    """Return the library that serves a model. None: plain torch does. UserError: it has no config.json."""
    hf = read_model_config(model_dir)
    if hf.get("model_type") not in ("qwen2", "qwen3", "llama") or dtype != "float32":
        return None
    dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    is_odd = hf["hidden_size"] % 8 or dim % 8 or hf["intermediate_size"] < 16
    if is_odd or hf.get("attention_bias") or hf.get("mlp_bias") or hf.get("use_sliding_window"):
        return None
    return compiled()


def compiled() -> Path | None:
    """Return the library; compile it if no process has yet, in a second or two. None: that can't be."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if not compiler or platform.machine() != "x86_64":
        return None
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    # machines of several kinds may share a home
    processor = [line for line in CPU_INFO.read_text().splitlines() if line.startswith("flags")]
    made_of = "\0".join((SOURCE.read_text(), version, *FLAGS, *processor[:1]))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "nanoyatt")
    library = folder / f"decoder-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        parent = next(each for each in (folder, *folder.parents) if each.exists())
        if not os.access(parent, os.W_OK):
            return None
        folder.mkdir(parents=True, exist_ok=True)
        # several processes may compile at once: the library is there whole or not at all
        with tempfile.TemporaryDirectory(dir=folder) as private:
            built = Path(private, library.name)
            if subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(built)]).returncode != 0:
                return None
            built.rename(library)
    return library
