"""Reads a Hugging Face model directory: JSON and the headers of tensor files. Never runs its code."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from runtime.errors import UserError


class Family(NamedTuple):
    """The facts that distinguish an architecture."""

    architecture: str  # transformers' class for generation
    layers: dict[str, bool]  # Megatron settings
    text: str = "model."  # prefix of the text model's tensor names
    tower: str = ""  # prefix of the image tower's, if it has one


BIAS = {"add_qkv_bias": True}
NORM = {"qk_layernorm": True}
FAMILIES = {  # model_type in config.json -> its family
    "qwen2": Family("Qwen2ForCausalLM", BIAS),
    "qwen3": Family("Qwen3ForCausalLM", NORM),
    "llama": Family("LlamaForCausalLM", {}),
    "qwen2_5_vl": Family("Qwen2_5_VLForConditionalGeneration", BIAS, tower="visual."),
    "qwen3_vl": Family(
        "Qwen3VLForConditionalGeneration", NORM, "model.language_model.", "model.visual."
    ),
}
VISION_FAMILIES = [name for name, family in FAMILIES.items() if family.tower]
# keys that name files with classes, or a file that transformers reads instead of config.json
CODE = re.compile(r'"(auto_map|configuration_files)": (?!null)')
FLOATS = ("F64", "F32", "F16", "BF16")  # tensor types; all others need a scale
INDEX = "model.safetensors.index.json"
HEAD = "score.weight"  # a scalar model's last tensor: it gives a value or a reward


@contextmanager
def readable(where: str) -> Iterator[None]:
    """Turn a library's error about a file into a one-line UserError that begins with `where`."""
    from huggingface_hub.errors import StrictDataclassError

    known = (
        StrictDataclassError,
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        ArithmeticError,
        RecursionError,
    )
    try:
        yield
    except UserError:
        raise
    except (*known, OSError) as error:
        raise UserError(f"{where}: {' '.join(str(error).split())[:200]}") from None


def read_object(path: Path, where: str) -> dict:
    """Return the object in a JSON file. Raises UserError, beginning with `where`, if there is none."""
    with readable(f"{where}: {path.name} is not valid JSON"):
        found = json.loads(path.read_text())
    if not isinstance(found, dict):
        raise UserError(f"{where}: {path.name} holds no JSON object")
    return found


def named_ends(model_dir: str) -> set[int]:
    """Return the end-of-sequence tokens in a directory's generation_config.json, if it has one."""
    path = Path(model_dir, "generation_config.json")
    named = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    ends = named if isinstance(named, list) else [named]
    if not all(end is None or (type(end) is int and end >= 0) for end in ends):
        raise UserError(f"{path}: eos_token_id is a token's number, or several, not {named!r:.60}")
    return {*ends} - {None}


def read_model_config(model_dir: str | Path, setting: str = "") -> dict:
    """Return config.json. Raises UserError if it can't be read, or if any *config.json names code."""
    where = f"{setting} {model_dir}".strip()
    found = {}
    for path in sorted(Path(model_dir).glob("*config.json")):  # also tokenizer's, processors'
        found[path.name] = read_object(path, where)
        text = json.dumps(found[path.name])  # quotes inside strings are escaped and can't match
        if named := CODE.search(text):
            raise UserError(f"{where}: {path.name} has {named[1]}: a model's own code never runs")
    if "adapter_config.json" in found:
        raise UserError(
            f"{where}: adapter_config.json makes it an adapter: "
            "merge it into its model, and take that directory"
        )
    if "config.json" not in found:
        raise UserError(f"{where}: not a Hugging Face model directory, it has no config.json")
    return found["config.json"]


def sees(model_dir: str | Path) -> bool:
    """Return whether the model reads images; False if the directory has no model."""
    is_here = Path(model_dir, "config.json").is_file()
    return is_here and read_model_config(model_dir).get("model_type") in VISION_FAMILIES


def has_weights(model_dir: str | Path) -> bool:
    """Return whether the directory has a file of tensors. Before a download it may have none."""
    return any(Path(model_dir).glob("*.safetensors"))


def tensor_files(model_dir: str | Path, setting="", framework="numpy") -> dict[str, Any]:
    """Map each tensor's name to its open file, among the files that SGLang would load.

    Reads only headers. framework: "pt" to load tensors; torch maps whole files, so needs more host memory.
    Raises UserError if files are missing, damaged, or not in the index.
    """
    from safetensors import SafetensorError, safe_open

    where = f"{setting} {model_dir}".strip()
    found = {path.name for path in Path(model_dir).glob("*.safetensors")}
    named = {"model.safetensors"}
    if (index := Path(model_dir, INDEX)).exists():
        weight_map = read_object(index, where).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UserError(f"{where}: {INDEX} has no weight_map")
        named = {*map(str, weight_map.values())}
    elif strays := found - named:
        raise UserError(f"{where}: without {INDEX} it's unclear if {min(strays)} belongs to it")
    if missing := named - found:
        raise UserError(f"{where}: no {min(missing)} in it")
    files = {}
    for name in sorted(named):
        try:
            file = safe_open(Path(model_dir, name), framework=framework)
        except (SafetensorError, OSError) as error:  # such as an interrupted download
            raise UserError(f"{where}: {name} is damaged or incomplete: {error}") from None
        if twice := files.keys() & file.keys():
            raise UserError(f"{where}: {min(twice)} is in {name} and in another file")
        files |= dict.fromkeys(file.keys(), file)
    return files


def check_tensors(files: dict, where: str, shapes: dict[str, list[int]], optional: set) -> None:
    """Raise UserError if a tensor is quantized, unknown, of the wrong shape or, unless optional, missing."""
    for name, file in sorted(files.items()):
        tensor = file.get_slice(name)
        if (kind := tensor.get_dtype()) not in FLOATS:
            raise UserError(f"{where}: {name} is {kind}: quantized weights can't be taken")
        if name.endswith("inv_freq"):  # it is recomputed
            continue
        if name not in shapes:
            raise UserError(f"{where}: nothing here reads {name}, one of its tensors")
        if (shape := tensor.get_shape()) != shapes[name]:
            raise UserError(f"{where}: {name} has the shape {shape}, and needs {shapes[name]}")
    if missing := shapes.keys() - optional - files.keys():
        raise UserError(f"{where}: its safetensors files lack {min(missing)}")


@cache  # --recompute -1 calls it repeatedly, and large models have many files
def checkpoint_shapes(model_dir: str | Path) -> dict[str, list[int]]:
    """Map every tensor's name to its shape."""
    files = tensor_files(model_dir).items()
    return {name: file.get_slice(name).get_shape() for name, file in files}
