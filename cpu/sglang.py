"""Have the real SGLang 0.5.23 run without CUDA: what its wheel lacks there is filled in before its import."""

import importlib.machinery
import importlib.util
import os
import runpy
import sys
import types
from pathlib import Path

import numpy
import torch


class StandInFinder:
    """An import hook: `name` and `name.x` are SGLang's idle modules for Macs, in which any call decorates."""

    def __init__(self, name):
        self.name = name
        # `import sglang` would need them already
        file = Path(importlib.util.find_spec("sglang").origin).with_name("_platform_stubs.py")
        self.stubs = runpy.run_path(str(file))

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == self.name:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return self.stubs["_MockModule"](spec.name)

    def exec_module(self, module):
        pass


def replace_triton():
    """Stand in for triton, 700 MB of GPU compiler: kernels are declared at import by its decorators."""
    if importlib.util.find_spec("triton") is not None:
        return
    sys.meta_path.append(StandInFinder("triton"))
    import triton.language

    triton.__version__ = "3.0.0"
    triton.cdiv = lambda a, b: -(-a // b)
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()
    triton.Config = lambda *args, **kwargs: None
    triton.language.constexpr = type("constexpr", (), {"__init__": lambda self, value=None: None})


def replace_torchvision():
    """Stand in for torchvision: linked to CUDA, it breaks transformers. Videos need it, images don't."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    from transformers.processing_utils import ProcessorMixin
    from transformers.utils import import_utils

    # cached: transformers must not see the stand-in
    assert not import_utils.is_torchvision_available()
    # by `from ... import` transformers would give a dummy of it
    videos = importlib.import_module("transformers.models.auto.video_processing_auto")
    videos.AutoVideoProcessor.from_pretrained = lambda *args, **kwargs: None
    # a processor may be without one for videos
    check = ProcessorMixin.check_argument_for_proper_class
    ProcessorMixin.check_argument_for_proper_class = lambda self, name, part: (
        part and check(self, name, part)
    )
    sys.meta_path.append(StandInFinder("torchvision"))


# by models at their import, on which those that see depend
NAMED_KERNELS = ("fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu")
NAMED_KERNELS += ("fused_sigmoid_mul_cpu", "fused_sigmoid_gating_delta_rule_update_cpu")
NAMED_KERNELS += ("fused_gdn_gating_cpu", "fused_qkvzba_split_reshape_cat_contiguous_cpu")
# an engine on arm64 calls them as it starts: threads on cores, memory that tensor-parallel ranks share
IDLE_KERNELS = ("init_cpu_threads_env", "initialize")


def replace_sgl_kernel():
    """Stand in for SGLang's compiled kernels. One, which fills the table of KV slots, is needed, in torch."""

    def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, starts, ends, slots, width):
        lengths = (ends - starts).tolist()
        columns = (req_pool_indices.tolist(), starts.tolist(), ends.tolist(), slots.split(lengths))
        for row, start, end, own_slots in zip(*columns, strict=True):
            req_to_token[row, start:end] = own_slots.to(req_to_token.dtype)

    module = types.ModuleType("sgl_kernel")
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec("sgl_kernel", None, is_package=True)
    module.__version__ = "0"
    module.assign_req_to_token_pool_cpu = assign_req_to_token_pool_cpu
    module.__getattr__ = unavailable_kernel
    sys.modules["sgl_kernel"] = module
    vars(torch.ops.sgl_kernel).update({name: unavailable_kernel(name) for name in NAMED_KERNELS})
    vars(torch.ops.sgl_kernel).update(dict.fromkeys(IDLE_KERNELS, lambda *_: None))


def unavailable_kernel(name):
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def refuse(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name}: this model or feature needs a GPU")

    return refuse


def murmur_hash32(seed, positions, columns):
    """Hash seeds by MurmurHash3, as a GPU does: int64 seed, positions [n], columns [m] -> uint32 [n, m]."""

    def rotate(x, bits):
        return (x << bits) | (x >> (32 - bits))

    seed = seed.view(torch.int64).numpy()[:, None]
    blocks = (seed, seed >> 32, positions.numpy()[:, None], columns.numpy()[None, :])
    state = numpy.zeros_like(seed, dtype=numpy.uint32)
    for block in blocks:  # of 32 bits; products wrap around
        block = rotate(block.astype(numpy.uint32) * 0xCC9E2D51, 15) * 0x1B873593
        state = rotate(state ^ block, 13) * 5 + 0xE6546B64
    state = state ^ 16  # 16 bytes were hashed
    state = (state ^ (state >> 16)) * 0x85EBCA6B
    state = (state ^ (state >> 13)) * 0xC2B2AE35
    return torch.from_numpy(state ^ (state >> 16))


def install():
    """Make `import sglang` work without CUDA. Once per process, before anything of sglang is imported."""
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": "all"}
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    os.environ["SGLANG_ENABLE_TORCH_INFERENCE_MODE"] = "1"  # not no_grad: 0.9 x the CPU time
    replace_triton()
    replace_torchvision()
    replace_sgl_kernel()
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
    return library  # the operator lives as long as this object
