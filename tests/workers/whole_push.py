"""run.py with pushes of whole tensors, also where shards fit."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import run
from runtime.hooks import HOOKS

if __name__ == "__main__":
    HOOKS["push_kind"].clear()
    run.main(sys.argv[1:])
