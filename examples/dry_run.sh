#!/usr/bin/env bash
# Who would run where, and the memory it takes
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PATH="$PWD/.venv/bin:$PATH"
exec torchrun --nproc-per-node 4 run.py --dry-run "$@"
