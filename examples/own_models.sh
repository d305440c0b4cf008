#!/usr/bin/env bash
# Your own models and prompts on GPUs: MODEL, JUDGE and DATA in the environment
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PATH="$PWD/.venv/bin:$PATH"
exec torchrun --nproc-per-node 8 run.py --preset cuda --model "$MODEL" --judge "$JUDGE" --data "$DATA" "$@"
