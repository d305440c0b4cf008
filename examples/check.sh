#!/usr/bin/env bash
# What is installed and free
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PATH="$PWD/.venv/bin:$PATH"
exec python run.py check "$@"
