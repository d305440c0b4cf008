"""No result depends on the order in which one machine's vectors add."""

import os
import sys

import pytest

from tests.runs.planted_bugs import DEFAULT_TIER
from tests.support.patience import run_process

# no vectors in torch, and no AVX-512 in its multiplication libraries
NARROW = {"ATEN_CPU_CAPABILITY": "default"}
NARROW |= {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
FILES = ["actor", "algorithms", "apart", "attention", "critic", "executor", "finetune"]
FILES += ["layouts", "memory", "ptx"]


@pytest.mark.slow
def test_narrower_vectors_pass_the_same_tests():
    """These are the default tier's tests of numbers from float32 sums."""
    files = [f"tests/test_{name}.py" for name in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", DEFAULT_TIER, *files]
    ran = run_process(*command, env=os.environ | NARROW)
    assert ran.returncode == 0, ran.stdout[-4000:]
