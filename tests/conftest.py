"""`pytest -n 2` runs the tests in two streams; --no-loadscope-reorder starts with the long ones.

Hypothesis draws the same examples every time, with HYPOTHESIS_PROFILE=fresh others.
"""

import os
import sys
from pathlib import Path

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

sys.path.insert(0, str(Path(__file__).parent.parent))

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
hypothesis.settings.register_profile("fresh", print_blob=True, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

WHOLE_RUNS = {"test_command", "test_demo", "test_determinism", "test_faults", "test_machines"}
AT_THE_END = {"test_security", "test_resume", "test_rollout"}  # with engines, too


class TwoStreams(LoadScopeScheduling):
    """Runs one by one, beside tests of pure functions, which use their waits; two would wait for each other.

    The last scope goes to the process that is first done.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = Path(nodeid.split("::")[0]).stem
        return "whole runs" if file in WHOLE_RUNS else "at the end" if file in AT_THE_END else "others"


@pytest.fixture(autouse=True)
def any_load():
    """sharded_checkpoint lets torch.load read nothing but tensors from then on, in children too."""
    yield
    os.environ.pop("TORCH_FORCE_WEIGHTS_ONLY_LOAD", None)


def pytest_xdist_make_scheduler(config, log) -> TwoStreams:
    return TwoStreams(config, log)
