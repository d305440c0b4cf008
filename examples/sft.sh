#!/usr/bin/env bash
# Supervised fine-tuning (also rm, dpo): MODEL and DATA in the environment
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PATH="$PWD/.venv/bin:$PATH"
exec torchrun --nproc-per-node 2 run.py sft --model "$MODEL" --data "$DATA" "$@"
