"""Run the real megatron.core on a machine without CUDA.

Megatron-Core 0.16.1 without its optional kernels (Transformer Engine, Apex) is plain PyTorch with hard-coded
"cuda" names. `install()` adds an import hook that rewrites them only in megatron.core: if torch itself were
patched, every other library would see a CUDA that isn't there.
"""

import contextlib
import importlib.abc
import importlib.machinery
import re
import sys
import warnings
from typing import ClassVar

import torch

REWRITES = {  # pattern -> replacement in a module's source, in this order
    r"torch\.cuda\.(\w+Tensor)": r"torch.\1",
    r"from torch\.cuda import": "from _CpuDevice import",
    r"(?<!from )(?<!import )\btorch\.cuda(\.random)?\b": "_CpuDevice",
    r"\.cuda\(([^()]|\(\))*\)": ".cpu()",  # the tensor itself
    r"\.pin_memory\(\)": ".clone()",  # a copy: callers free the source's storage on the next line
    r"pin_memory=True": "pin_memory=False",
    r"(['\"])cuda(:0)?\1": r"\1cpu\1",
}


class CpuDevice:
    """The names of `torch.cuda` that training touches, as megatron.core sees them."""

    # annotations and default arguments name these; none is ever created
    Stream = torch.Stream
    Event = torch.Event
    is_available = staticmethod(lambda: False)
    current_device = staticmethod(lambda: torch.device("cpu"))
    synchronize = empty_cache = _lazy_init = staticmethod(lambda *args: None)
    stream = device = staticmethod(lambda *args: contextlib.nullcontext())
    default_generators: ClassVar = {torch.device("cpu"): torch.default_generator}
    manual_seed = staticmethod(torch.manual_seed)
    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=None: torch.set_rng_state(state))
    _lazy_call = staticmethod(lambda function, **kwargs: function())


class _Loader(importlib.machinery.SourceFileLoader):
    # never writes rewritten code to a .pyc
    def get_code(self, fullname):
        path = self.get_filename(fullname)
        source = self.get_data(path).decode()
        if "cuda" not in source and "pin_memory" not in source:
            return super().get_code(fullname)
        for pattern, new in REWRITES.items():
            source = re.sub(pattern, new, source)
        return compile(source, path, "exec", dont_inherit=True)

    def exec_module(self, module):
        module.__dict__["_CpuDevice"] = CpuDevice
        super().exec_module(module)
        if module.__name__ == "megatron.core.jit":
            module.disable_jit_fuser()  # it uses torch.compile, which needs a C++ compiler on CPU


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname != "megatron.core" and not fullname.startswith("megatron.core."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Make megatron.core importable here, once, before its first import."""
    # Megatron warns about packages that are missing on purpose
    warnings.filterwarnings("ignore", module=r"megatron\.")
    if not torch.cuda.is_available():
        assert "megatron.core" not in sys.modules, "install() must come before megatron.core"
        sys.modules["_CpuDevice"] = CpuDevice
        sys.meta_path.insert(0, _Finder())
