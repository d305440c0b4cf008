"""Make a Hugging Face directory, in float32, of a GGUF file whose architecture transformers can read.

pip install accelerate gguf
python examples/from_gguf.py FILE.gguf DIR
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    if missing := [name for name in ("accelerate", "gguf") if not find_spec(name)]:
        sys.exit(
            f"error: transformers reads GGUF files with more packages: pip install {' '.join(missing)}"
        )
    file = Path(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    loaded = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    del loaded.config.quantization_config  # its weights are plain numbers now
    # in a model of its own: the one that was loaded would be saved as a quantized one
    model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(sys.argv[2])
    tokenizer.save_pretrained(sys.argv[2])
    print(f"wrote {sys.argv[2]}/: {model.num_parameters() / 1e6:.0f} million parameters")


if __name__ == "__main__":
    main()
