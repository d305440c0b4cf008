#!/usr/bin/env bash
# The split follows the load
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PATH="$PWD/.venv/bin:$PATH"
exec torchrun --nproc-per-node 4 run.py --rebalance "$@"
