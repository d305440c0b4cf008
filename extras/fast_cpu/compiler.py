"""Compile decoder.cpp once for this machine's processor. If that fails, plain torch serves."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from inputs.hf_directory import read_model_config

SOURCE = Path(__file__).with_name("decoder.cpp")
FLAGS = ("-O3", "-std=c++17", "-ffp-contract=fast", "-shared", "-fPIC", "-w")
TARGETS = {"x86_64": "-march=native", "aarch64": "-mcpu=native"}
CPU_INFO = Path("/proc/cpuinfo")
FAMILIES = ("qwen2", "qwen3", "llama")  # model_type in config.json
ROPES = (None, "default", "linear", "dynamic", "llama3", "yarn")  # these have one table of angles


def program_for(model_dir: str | Path, dtype: str, tp: int = 1) -> str:
    """Return a text that names what serves a model on `tp` ranks."""
    if library_for(model_dir, dtype, tp):
        return "extras/fast_cpu/decoder.cpp"
    takes = "g++ or clang++, and a private ~/.cache without noexec"
    if not fits(model_dir, dtype, tp):
        takes = "one rank, and Qwen2, Qwen3 or Llama in float32"
    return f"plain torch, several times slower: extras/fast_cpu/decoder.cpp needs {takes}"


def library_for(model_dir: str | Path, dtype: str, tp: int = 1) -> Path | None:
    """Return the library that serves a model, or None for torch. Raises UserError without a config.json."""
    return compiled() if fits(model_dir, dtype, tp) else None


def fits(model_dir: str | Path, dtype: str, tp: int) -> bool:
    hf = read_model_config(model_dir)
    if tp > 1 or dtype != "float32" or hf.get("model_type") not in FAMILIES:
        return False
    heads = hf["num_attention_heads"]
    dim = hf.get("head_dim") or hf["hidden_size"] // heads
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    is_odd = hf["hidden_size"] % 8 or dim % 8 or heads % (hf.get("num_key_value_heads") or heads)
    is_small = hf["intermediate_size"] < 16
    turns_a_part = (hf | rope).get("partial_rotary_factor", 1) != 1
    has_other_rope = rope.get("rope_type", rope.get("type")) not in ROPES
    others = ("attention_bias", "mlp_bias", "use_sliding_window", "dual_chunk_attention_config")
    return not (is_odd or is_small or turns_a_part or has_other_rope or any(map(hf.get, others)))


def compiled() -> Path | None:
    """Return the library; compile it, in a second or two, if no process has yet. None if that fails."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "nanoyatt")
    if platform.machine() not in TARGETS or not folder.is_absolute():
        return None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.lstat()
        # code that others write there would run as us
        if facts.st_uid != os.getuid() or facts.st_mode & 0o022:
            return None
        compilers = filter(shutil.which, ("g++", "clang++"))
        return next(filter(None, (compiled_by(name, folder) for name in compilers)), None)
    except OSError:  # the folder can't be made, or its disk is full or noexec
        return None


def compiled_by(compiler: str, folder: Path) -> Path | None:
    """Return the library that a compiler builds; if it fails, print why and return None.

    Raises OSError if the compiler or the folder can't be used.
    """
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    # different machines may share a home
    lines = CPU_INFO.read_text().splitlines()
    processor = [line for line in lines if line.startswith(("flags", "Features"))]
    flags = [*FLAGS, TARGETS[platform.machine()]]
    made_of = "\0".join((SOURCE.read_text(), version, *flags, *processor[:1]))
    library = folder / f"decoder-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    content = library.read_bytes() if library.exists() else b""
    # a whole file ends with a digest of the rest; loading a part could crash
    if content[-32:] != hashlib.sha256(content[:-32]).digest():
        # several processes may compile at once: each replaces the file
        with tempfile.TemporaryDirectory(dir=folder) as private:
            built = Path(private, library.name)
            command = [compiler, *flags, str(SOURCE), "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                errors = (line for line in done.stderr.splitlines() if "error" in line)
                print(f"{compiler}: {next(errors, 'it failed')}", file=sys.stderr)
                return None
            content = built.read_bytes()
            built.write_bytes(content + hashlib.sha256(content).digest())
            built.chmod(0o700)  # whatever the umask
            built.rename(library)
    ctypes.CDLL(str(library))  # raises OSError on a noexec disk
    return library
