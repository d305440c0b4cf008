"""Tools that a run on a GPU needs besides Python: a missing one is named at the start, and by `check`."""

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest

from extras import dry_run, gpu_tools
from runtime import devices
from runtime.errors import UserError
from tests.whole.test_cuda_path import NVCC, machine, settings  # noqa: F401

pytestmark = pytest.mark.usefixtures("machine")
OLD = "#!/bin/sh\nexit 1\n"  # a compiler without C++20
NO_NVCC = "nvcc (12.8 or newer, by pip install -r requirements.txt or in CUDA_HOME; found:"


@pytest.mark.parametrize(
    "missing,instead,words",
    [
        ("bin/nvcc", "", f"{NO_NVCC} none"),
        ("bin/nvcc", f"#!/bin/sh\n{NVCC.format('12.0')}\n", f"{NO_NVCC} 12.0 in /"),
        ("bin/c++", "", "C++20 (apt install g++)"),
        ("bin/c++", OLD, "C++20 (apt install g++)"),
        ("include/Python.h", "", "Python.h (apt install python3."),
        ("nvidia/cu13/lib/libcudart.so.13", "", "libcudart.so.13 (pip install"),
        ("torch_memory_saver.py", "", "torch_memory_saver (pip install"),
    ],
)
def test_what_kernels_are_compiled_with_is_named(tmp_path, missing, instead, words):
    """One line must name it before anything starts; learning from examples needs only torch's tools."""
    (tmp_path / missing).write_text(instead) if instead else (tmp_path / missing).unlink()
    needed = "^--device cuda: kernels are compiled in a run, which needs "
    with pytest.raises(UserError, match=f"{needed}{re.escape(words)}((?!install).)*$"):
        devices.choose_device(settings("m"))
    torch_needs_it = missing in ("bin/c++", "include/Python.h")
    with pytest.raises(UserError) if torch_needs_it else nullcontext():
        devices.choose_device(replace(settings("m"), command="sft"))


def test_check_says_what_a_gpu_is_missing(tmp_path, monkeypatch):
    """Each line must have ! where a run would end. One process checks for both, trainer and engines."""
    config = settings("m")
    rows = {name: (text, is_good) for name, text, is_good in dry_run.graphics(config)}
    assert rows["compute mode"] == ("Default", True) and rows["nvcc"][0].startswith("13.0 in /")
    assert all(is_good for _, is_good in rows.values())
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho Exclusive_Process\n")
    with pytest.raises(UserError, match="which is exclusive now; as root: nvidia-smi"):
        gpu_tools.check(config)
    gpu_tools.check(replace(config, command="sft"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert dry_run.graphics(config)[0][1].startswith("torch can't use ")
    (tmp_path / "dev" / "nvidia0").unlink()
    (tmp_path / "bin" / "nvcc").unlink()
    first, *others = dry_run.graphics(config)
    rows = {name: is_good for name, _, is_good in others}
    assert first == ("GPU", "there is none", False)
    assert not rows["compute mode"] and not rows["nvcc"] and rows["Python.h"]
