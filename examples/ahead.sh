#!/usr/bin/env bash
# Engines on ranks of their own serve the next step while this one is trained on
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PATH="$PWD/.venv/bin:$PATH"
exec torchrun --nproc-per-node 4 run.py --placement standalone --ahead 1 "$@"
