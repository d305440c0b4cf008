"""Reads a model's Hugging Face directory: config.json, and the heads of tensor files. No code of it runs."""

import json
import re
from pathlib import Path
from typing import Any

from config import UserError

# names files with classes, or one that transformers reads in config.json's place
CODE = re.compile(r'"(auto_map|configuration_files)": (?!null)')
FLOATS = ("F64", "F32", "F16", "BF16")  # types of tensors; all others need a scale


def read_model_config(model_dir: str | Path, setting: str = "") -> dict:
    """Return config.json. UserErrors, also if any *config.json names code, name setting and directory."""
    where = f"{setting} {model_dir}".strip()
    found = {}
    for path in sorted(Path(model_dir).glob("*config.json")):  # also a tokenizer's, processors'
        try:
            found[path.name] = json.loads(path.read_text())
        except ValueError as error:
            raise UserError(f"{where}: {path.name} is not valid JSON ({error})") from None
        text = json.dumps(found[path.name])  # escapes quotes within a text, which so can't match
        if named := CODE.search(text):
            raise UserError(f"{where}: {path.name} has {named[1]}: a model's own code never runs")
    if "config.json" not in found:
        raise UserError(f"{where}: not a Hugging Face model directory, it has no config.json")
    return found["config.json"]


def tensor_files(model_dir: str | Path, setting="", framework="numpy") -> dict[str, Any]:
    """Return the open file of each tensor by its name; only heads are read. UserErrors name the directory.

    framework: "pt" to load tensors; torch maps whole files, which a host may have no memory for.
    """
    from safetensors import SafetensorError, safe_open

    where = f"{setting} {model_dir}".strip()
    files = {}
    for path in sorted(Path(model_dir).glob("*.safetensors")):
        try:
            file = safe_open(path, framework=framework)
        except SafetensorError as error:  # as of a download that broke off
            raise UserError(f"{where}: {path.name} is damaged or incomplete: {error}") from None
        files |= dict.fromkeys(file.keys(), file)
    if not files:
        raise UserError(f"{where}: no *.safetensors file in it")
    return files


def check_tensors(model_dir: str, setting: str, known: set[str] | None = None) -> set[str]:
    """Return the tensors' names. UserError if one is quantized or, where `known` is given, not known."""
    where = f"{setting} {model_dir}"
    files = tensor_files(model_dir, setting)
    for name, file in sorted(files.items()):
        kind = file.get_slice(name).get_dtype()
        if kind not in FLOATS:
            raise UserError(f"{where}: {name} is {kind}: quantized weights can't be taken")
        if known and name not in known and not name.endswith("inv_freq"):  # which is made anew
            raise UserError(f"{where}: nothing here reads {name}, one of its tensors")
    return {*files}


def checkpoint_shapes(model_dir: str | Path) -> dict[str, list[int]]:
    """Return the shape of every tensor by its name."""
    files = tensor_files(model_dir).items()
    return {name: file.get_slice(name).get_shape() for name, file in files}
