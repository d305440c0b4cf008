#!/usr/bin/env bash
# Actor and critic learn side by side, on ranks of their own
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PATH="$PWD/.venv/bin:$PATH"
exec torchrun --nproc-per-node 4 run.py --algorithm ppo --placement split "$@"
