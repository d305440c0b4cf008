"""Tests import the project's flat files."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))


def pytest_collection_modifyitems(items):
    """test_actor.py last: every actor of this process leaves the threads of its process groups behind, which wake up all the time."""
    items.sort(key=lambda item: item.path.name == "test_actor.py")
