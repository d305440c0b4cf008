"""A package, so that every import names its module from the project's root."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
