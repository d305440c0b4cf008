"""Costs by a devices file, as examples/h20.toml: an accelerator's data sheet, and what is reached of it."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path

from algorithms import algorithm_of
from config import Config
from inputs.hf_directory import read_model_config, readable
from runtime.errors import UserError
from scheduling.layout import Placement, Shape
from simulation.cluster import Cluster, Costs, Lengths, Workload
from simulation.costs import BF16_BYTES, Decode, Device, Model, Passes, decode_of, passes_of
from simulation.engine import Moves

SHEET = {  # its tables, and their keys
    "device": Device._fields,
    "engine": ("weights", "kv", "prefill", "layer_s", "sequence_s"),
    "trainer": ("mfu", "update_s"),
}


def costs_of_sheet(path: Path, config: Config) -> Costs:
    """The costs of a devices file, and lengths that are a guess. UserError names the file and the key."""
    where = f"--devices {path}"
    try:
        sheet = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: {error}") from None
    if unknown := sheet.keys() - SHEET.keys() - {"source"}:
        raise UserError(f"{where}: {min(unknown)} is none of source, {', '.join(SHEET)}")
    for name, keys in SHEET.items():
        table = sheet.get(name, {})
        if not isinstance(table, dict) or (unknown := table.keys() - {*keys}):
            raise UserError(f"{where}: {min(unknown)} in [{name}] is none of {', '.join(keys)}")
        for key in keys:
            if not (isinstance(table.get(key), int | float) and 0 <= table[key] < float("inf")):
                raise UserError(f"{where}: [{name}] needs {key}, a number")
    models = (config.model, *config.judge_models, *([config.critic] if config.critic else []))
    for each in models:
        model_of(each)
    most = config.max_new_tokens
    answer = Lengths(most / 6, 0.8, most)
    critique = Lengths(config.judge_max_new_tokens / 4, 0.5, config.judge_max_new_tokens)
    keep = 0.7 if algorithm_of(config).filters else 1.0
    work = Workload(512, answer, critique, keep)
    said = [f"GUESSED: answers of {most / 6:.0f} tokens in the median, log-normal with sigma 0.8"]
    said += [f"GUESSED: critiques of {critique.median:.0f}, prompts of 512 tokens"]
    said += [f"GUESSED: {keep:.0%} of the groups are trained on; give --like RUN once you have one"]
    said += [f"devices: {sheet.get('source', 'no source is named')}"]
    device = sheet["device"]["memory"]
    return Costs(work, partial(cluster_of_sheet, sheet), said, device)


def model_of(path: str) -> Model:
    """The sizes of a model by its config.json alone. UserError."""
    found = read_model_config(path)
    with readable(f"{path}/config.json"):
        hf = found.get("text_config", found)  # of a model that sees
        heads = hf["num_attention_heads"]
        head = hf.get("head_dim") or hf["hidden_size"] // heads
        keys = head * hf["num_key_value_heads"]
        table = hf["vocab_size"] * (1 if hf.get("tie_word_embeddings") else 2)
        layer = 2 * head * heads + 2 * keys + 3 * hf["intermediate_size"]
        params = hf["hidden_size"] * (table + hf["num_hidden_layers"] * layer)
        return Model(params, hf["num_hidden_layers"], hf["hidden_size"], keys)


def cluster_of_sheet(sheet: dict, config: Config, placement: Placement) -> Cluster:
    """UserError if an engine's weights don't fit."""
    device = Device(**sheet["device"])
    policy = model_of(config.model)
    rates = {name: sheet["engine"][name] for name in ("weights", "kv", "prefill", "layer_s")}

    def engine(model: Model, tp: int) -> Decode:
        found = decode_of(model, device, tp, memory=config.mem_fraction, **rates)
        own = dict(each=found.each + sheet["engine"]["sequence_s"])
        return replace(found, most=config.max_running_requests, **own)

    def learned(model: Model, shape: Shape) -> Passes:
        sent = (4 + BF16_BYTES) * model.params / (shape.tp * shape.pp) * (shape.dp - 1) / shape.dp
        band = device.link if len(shape.ranks) <= 8 else device.network
        update = sheet["trainer"]["update_s"] + sent / band
        how = (device, shape.tp * shape.pp, sheet["trainer"]["mfu"], shape.tp)
        return passes_of(model, *how, stages=shape.pp, update=update)

    actor = placement.actor
    critic = model_of(config.critic or config.model)
    states = policy.params / (actor.tp * actor.pp) * (2 + 4 + 12 / actor.dp) / device.host
    serve = policy.bytes / config.rollout_tp
    push = serve / (device.network if placement.is_apart else device.host)
    judges = [model_of(path) for path in config.judge_models]
    judge = max((each.bytes / config.genrm_tp for each in judges), default=0.0) / device.host
    moves = {"rollout": Moves(serve / device.host, serve / device.host, push)}
    moves |= {"genrm": Moves(judge, judge), "train": Moves(states, states)}
    rollouts = engine(policy, config.rollout_tp)
    return Cluster(
        {"rollout": rollouts, "genrm": rollouts},
        learned(policy, actor),
        learned(critic, placement.critic),
        learned(policy, placement.reference),
        moves=moves,
        judges=tuple(engine(each, config.genrm_tp) for each in judges),
    )
