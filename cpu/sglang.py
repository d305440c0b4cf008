"""Run the real SGLang 0.5.23 without CUDA: fill in what its wheel lacks before it is imported."""

import importlib.machinery
import importlib.util
import os
import runpy
import shutil
import sys
import types
from pathlib import Path

import numpy
import torch


class StandInFinder:
    """An import hook: `name` and `name.x` are SGLang's stubs for Macs: any call in them is a decorator."""

    def __init__(self, name):
        self.name = name
        # `import sglang` would already need them
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
    """Stand in for triton, a 700 MB GPU compiler: its decorators declare kernels at import."""
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
    """Stand in for torchvision, which links to CUDA and breaks transformers. Only videos need it."""
    if importlib.util.find_spec("torchvision") is not None:
        return
    from transformers.processing_utils import ProcessorMixin
    from transformers.utils import import_utils

    # caches the result: transformers must not see the stand-in
    assert not import_utils.is_torchvision_available()
    # `from ... import` would return transformers' dummy of it
    videos = importlib.import_module("transformers.models.auto.video_processing_auto")
    videos.AutoVideoProcessor.from_pretrained = lambda *args, **kwargs: None
    # a processor may lack one for videos
    check = ProcessorMixin.check_argument_for_proper_class
    ProcessorMixin.check_argument_for_proper_class = lambda self, name, part: (
        part and check(self, name, part)
    )
    sys.meta_path.append(StandInFinder("torchvision"))


# models name these at import, and vision models depend on such models
NAMED_KERNELS = ("fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu")
NAMED_KERNELS += ("fused_sigmoid_mul_cpu", "fused_sigmoid_gating_delta_rule_update_cpu")
NAMED_KERNELS += ("fused_gdn_gating_cpu", "fused_qkvzba_split_reshape_cat_contiguous_cpu")
# an engine on arm64 calls these at its start, to pin threads and share memory between ranks
IDLE_KERNELS = ("init_cpu_threads_env", "initialize")


def replace_sgl_kernel():
    """Stand in for SGLang's compiled kernels. Only the one that fills the table of KV slots is needed."""

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


def replace_lscpu():
    """Stand in for the topology that SGLang reads from lscpu, if that isn't installed: one node."""
    if shutil.which("lscpu") is None:
        from sglang.srt.utils import common

        common.parse_lscpu_topology = lambda: [(cpu, cpu, 0, 0) for cpu in os.sched_getaffinity(0)]


def unavailable_kernel(name):
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def refuse(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name}: this model or feature needs a GPU")

    return refuse


def murmur_hash32(seed, positions, columns):
    """Hash seeds with MurmurHash3, as on a GPU: int64 seed, positions [n], columns [m] -> uint32 [n, m]."""

    def rotate(x, bits):
        return (x << bits) | (x >> (32 - bits))

    seed = seed.view(torch.int64).numpy()[:, None]
    blocks = (seed, seed >> 32, positions.numpy()[:, None], columns.numpy()[None, :])
    state = numpy.zeros_like(seed, dtype=numpy.uint32)
    for block in blocks:  # 32 bits each; products wrap around
        block = rotate(block.astype(numpy.uint32) * 0xCC9E2D51, 15) * 0x1B873593
        state = rotate(state ^ block, 13) * 5 + 0xE6546B64
    state = state ^ 16  # 16 bytes were hashed
    state = (state ^ (state >> 16)) * 0x85EBCA6B
    state = (state ^ (state >> 13)) * 0xC2B2AE35
    return torch.from_numpy(state ^ (state >> 16))


def install():
    """Make `import sglang` work without CUDA. Call once per process, before importing any of sglang."""
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    # the cores of each of 64 ranks: any; with "all", SGLang asks for a NUMA node for each rank
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|" * 63
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    os.environ["SGLANG_ENABLE_TORCH_INFERENCE_MODE"] = "1"  # 0.9 x the CPU time of no_grad
    replace_triton()
    replace_torchvision()
    replace_sgl_kernel()
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
    return library  # the operator lives as long as this object
