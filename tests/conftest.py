"""Tests import the project's flat files. `pytest -n 2` runs those that start engines in one process and all others in a second."""

import sys
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

sys.path.insert(0, str(Path(__file__).parent.parent))

WITH_ENGINES = {"test_command", "test_demo", "test_determinism", "test_doors", "test_faults", "test_resume", "test_rollout"}


class TwoStreams(LoadScopeScheduling):
    """Two runs at once would wait for each other's cores. A run beside tests of pure functions waits little, and they use its waits."""

    def _split_scope(self, nodeid: str) -> str:
        return "engines" if Path(nodeid.split("::")[0]).stem in WITH_ENGINES else "no engines"


def pytest_xdist_make_scheduler(config, log) -> TwoStreams:
    return TwoStreams(config, log)
