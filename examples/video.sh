#!/usr/bin/env bash
# The demo filmed: its models see clips
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PATH="$PWD/.venv/bin:$PATH"
exec torchrun --nproc-per-node 2 run.py --preset video "$@"
