"""Convert a GGUF file into a Hugging Face directory in float32, if transformers can read its architecture.

pip install accelerate gguf
python examples/from_gguf.py FILE.gguf DIR
"""

import sys
from importlib.util import find_spec
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    if missing := [name for name in ("accelerate", "gguf") if not find_spec(name)]:
        sys.exit(f"error: to read GGUF files, pip install {' '.join(missing)}")
    file, folder = map(Path, sys.argv[1:])
    from_file = dict(gguf_file=file.name)
    AutoTokenizer.from_pretrained(file.parent, **from_file).save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, **from_file, dtype="float32")
    # copy the weights into a new, plain model: the loaded one would be saved as quantized
    del loaded.config.quantization_config
    model = AutoModelForCausalLM.from_config(loaded.config, dtype="float32")
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):  # safetensors makes them 0600, whatever the umask
        weights.chmod((folder / "config.json").stat().st_mode)


if __name__ == "__main__":
    main()
