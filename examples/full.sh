#!/usr/bin/env bash
# Rollout, genrm and training take turns
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PATH="$PWD/.venv/bin:$PATH"
exec torchrun --nproc-per-node 2 run.py --mode full "$@"
