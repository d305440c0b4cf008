#!/usr/bin/env bash
# Megatron's tensor, sequence and pipeline parallelism
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PATH="$PWD/.venv/bin:$PATH"
exec torchrun --nproc-per-node 6 run.py --mode full --tp 2 --sp --pp 3 "$@"
