"""Tests import the project's flat files. `pytest -n 2` runs those that start whole runs in one process and all others in a second."""

import sys
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

sys.path.insert(0, str(Path(__file__).parent.parent))

WHOLE_RUNS = {"test_command", "test_demo", "test_determinism", "test_doors", "test_faults", "test_resume"}


class TwoStreams(LoadScopeScheduling):
    """Two runs at once would wait for each other's cores. A run beside tests of pure functions waits little, and they use its waits."""

    def _split_scope(self, nodeid: str) -> str:
        file = Path(nodeid.split("::")[0]).stem
        return "whole runs" if file in WHOLE_RUNS else file if file == "test_rollout" else "others"  # its engines come last


def pytest_xdist_make_scheduler(config, log) -> TwoStreams:
    return TwoStreams(config, log)
