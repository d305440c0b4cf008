#!/usr/bin/env bash
# Resumes from the last checkpoint when a rank dies
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PATH="$PWD/.venv/bin:$PATH"
exec torchrun --nproc-per-node 2 --max-restarts 3 run.py "$@"
