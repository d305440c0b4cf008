#!/usr/bin/env bash
# Greedy accuracy and pass@k: MODEL and DATA in the environment
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PATH="$PWD/.venv/bin:$PATH"
exec python run.py eval --model "$MODEL" --data "$DATA" "$@"
