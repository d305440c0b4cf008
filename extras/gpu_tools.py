"""The tools besides Python that a run on GPUs needs; they are checked before anything starts."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from runtime.devices import LIBCUDART, cuda_home, cuda_libraries, toolkits
from runtime.errors import UserError

if TYPE_CHECKING:
    from config import Config

PACKAGES = ("sgl_kernel", "flashinfer", "torch_memory_saver")  # only installed for GPUs


def check(config: Config) -> None:
    """Raise UserError if a tool is missing, or if trainer and engines can't share a GPU."""
    missing = [f"{tool.name} ({tool.install})" for tool in tools(config) if not tool.is_there]
    if missing:
        raise UserError(
            f"--device cuda: kernels are compiled in a run, which needs {', '.join(missing)}"
        )
    if config.command == "rl" and "Exclusive_Process" in compute_modes():
        raise UserError(
            "--device cuda: trainer and engines share a GPU, which is exclusive now; "
            "as root: nvidia-smi --compute-mode DEFAULT"
        )


class Tool(NamedTuple):
    """A tool that a run needs besides Python, and how to get it."""

    name: str
    install: str
    is_there: bool
    found: str = "there"


def tools(config: Config) -> list[Tool]:
    """Return the tools with which torch compiles kernels, and engines do if the run starts any."""
    headers = Path(sysconfig.get_paths()["include"])
    package = f"python{sys.version_info[0]}.{sys.version_info[1]}-dev, for {headers}"
    has_headers = Path(headers, "Python.h").is_file()
    rows = [
        Tool("C++20", "apt install g++", has_cpp20()),
        Tool("Python.h", f"apt install {package}", has_headers),
    ]
    if config.command == "rl":
        has_runtime = cuda_libraries() or ctypes.util.find_library("cudart") == LIBCUDART
        missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
        packages = " ".join(missing or PACKAGES)
        found = [f"{version[0]}.{version[1]} in {home}" for home, version in toolkits().items()]
        nvccs = ", ".join(found) or "none"
        wanted = "12.8 or newer, by pip install -r requirements.txt or in CUDA_HOME"
        rows += [
            Tool("nvcc", f"{wanted}; found: {nvccs}", bool(cuda_home()), nvccs),
            Tool(LIBCUDART, "pip install -r requirements.txt", bool(has_runtime)),
            Tool(packages, "pip install -r requirements.txt", not missing),
        ]
    return rows


def has_cpp20() -> bool:
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(compiler[0]) is None:
        return False
    empty_file = ["-std=c++20", "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run([*compiler, *empty_file], capture_output=True).returncode == 0


def compute_modes() -> list[str]:
    """Return each GPU's mode: Default, Exclusive_Process, Prohibited; empty without the driver's tool."""
    if not (tool := shutil.which("nvidia-smi")):
        return []
    query = [tool, "--query-gpu=compute_mode", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
