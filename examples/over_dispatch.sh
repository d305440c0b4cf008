#!/usr/bin/env bash
# The tail isn't waited for: it is continued in the next step
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PATH="$PWD/.venv/bin:$PATH"
exec torchrun --nproc-per-node 4 run.py --over-dispatch 1.25 "$@"
