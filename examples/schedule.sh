#!/usr/bin/env bash
# Actor and critic in one table of pipeline passes
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PATH="$PWD/.venv/bin:$PATH"
exec torchrun --nproc-per-node 3 run.py --pp 3 --schedule fused --algorithm ppo "$@"
