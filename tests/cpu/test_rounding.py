"""No result depends on the order in which one machine's vectors add."""

import os
import sys

import pytest

from tests.runs.planted_bugs import DEFAULT_TIER
from tests.support.patience import run_process

# no vectors in torch, and no AVX-512 in its multiplication libraries
NARROW = {"ATEN_CPU_CAPABILITY": "default"}
NARROW |= {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
FILES = (
    "root/test_actor.py root/test_algorithms.py training/test_attention.py training/test_executor.py "
    "training/test_layouts.py extras/test_apart.py extras/test_critic.py extras/test_memory.py "
    "extras/test_ptx.py examples/test_sft.py"
)


@pytest.mark.slow
def test_narrower_vectors_pass_the_same_tests():
    """These are the default tier's tests of numbers from float32 sums."""
    files = [f"tests/{name}" for name in FILES.split()]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", DEFAULT_TIER, *files]
    ran = run_process(*command, env=os.environ | NARROW)
    assert ran.returncode == 0, ran.stdout[-4000:]
