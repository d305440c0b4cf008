#!/usr/bin/env bash
# The tail goes on beside the judging
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PATH="$PWD/.venv/bin:$PATH"
exec torchrun --nproc-per-node 4 run.py --mode fused "$@"
