"""run.py on engines whose decode steps take at least 20 ms: a test that waits until an answer is half done
finds it so, however fast the machine and however busy its cores are."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import run
from engines.engine import Engine

if __name__ == "__main__":
    os.environ["BENCH_PACE_MS"] = "20,0"
    Engine.module = "reproduce.bench.paced_server"
    run.main(sys.argv[1:])
