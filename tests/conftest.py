"""Tests import the project's flat files."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
