#!/usr/bin/env bash
# Another algorithm, and a setting of its own
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PATH="$PWD/.venv/bin:$PATH"
exec torchrun --nproc-per-node 2 run.py --algorithm ppo gae_lambda=0.95 "$@"
