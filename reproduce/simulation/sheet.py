"""Costs from a devices file such as examples/h20.toml: a data sheet, and the fractions of it reached."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path

from algorithms import algorithm_of
from config import Config
from inputs.hf_directory import read_model_config, readable
from reproduce.simulation.cluster import Cluster, Costs, Lengths, Workload
from reproduce.simulation.costs import Decode, Device, Model, Passes, decode_of, passes_of
from reproduce.simulation.engine import Moves
from runtime.errors import UserError
from scheduling.layout import Placement, Shape

MACHINE = 8  # devices connected by `link`
SHEET = {  # table -> keys
    "device": Device._fields,
    "engine": ("weights", "kv", "prefill", "layer_s", "sequence_s"),
    "trainer": ("mfu", "update_s"),
}


def costs_of_sheet(path: Path, config: Config) -> Costs:
    """Return costs from a devices file, with guessed lengths. Raises UserError naming the file and key."""
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
    for directory in (config.model, *config.judge_models, config.critic or config.model):
        model_of(directory)
    most = config.max_new_tokens
    answer = Lengths(most / 6, 0.8, most)
    critique = Lengths(config.judge_max_new_tokens / 4, 0.5, config.judge_max_new_tokens)
    keep = 0.7 if algorithm_of(config).filters else 1.0
    assumptions = [
        f"GUESSED: a median of {answer.median:.0f} tokens per answer, log-normal with sigma 0.8",
        f"GUESSED: critiques of {critique.median:.0f} tokens, prompts of 512",
        f"GUESSED: {keep:.0%} of the groups are trained on; use --like RUN once you have a run",
        f"devices: {sheet.get('source', 'no source is named')}",
    ]
    cluster_of = partial(cluster_of_sheet, sheet)
    work = Workload(512, answer, critique, keep)
    return Costs(work, cluster_of, assumptions, sheet["device"]["memory"])


def model_of(directory: str) -> Model:
    """Return a model's sizes, computed from its config.json. Raises UserError if that can't be read."""
    found = read_model_config(directory)
    with readable(f"{directory}/config.json"):
        hf = found.get("text_config", found)  # present in vision models
        heads = hf["num_attention_heads"]
        head = hf.get("head_dim") or hf["hidden_size"] // heads
        keys = head * hf["num_key_value_heads"]
        table = hf["vocab_size"] * (1 if hf.get("tie_word_embeddings") else 2)
        layer = 2 * head * heads + 2 * keys + 3 * hf["intermediate_size"]
        params = hf["hidden_size"] * (table + hf["num_hidden_layers"] * layer)
        return Model(params, hf["num_hidden_layers"], hf["hidden_size"], keys)


def cluster_of_sheet(sheet: dict, config: Config, placement: Placement) -> Cluster:
    """Return a run's engines and trainers on these devices. Raises UserError if weights don't fit."""
    device = Device(**sheet["device"])
    policy = model_of(config.model)
    judges = [model_of(directory) for directory in config.judge_models]

    def engine(model: Model, tp: int) -> Decode:
        decode = decode_of(model, device, tp, memory=config.mem_fraction, **sheet["engine"])
        return replace(decode, most=config.max_running_requests)

    def trainer(model: Model, shape: Shape) -> Passes:
        ranks = shape.tp * shape.pp
        band = device.link if len(shape.ranks) <= MACHINE else device.network
        update = sheet["trainer"]["update_s"] + model.updated_bytes(ranks, shape.dp) / band
        how = dict(stages=shape.pp, update=update)
        return passes_of(model, device, ranks, sheet["trainer"]["mfu"], shape.tp, **how)

    actor = placement.actor
    of_rollout = policy.bytes / config.rollout_tp  # bytes per device, like the next two
    of_judge = max((judge.bytes / config.genrm_tp for judge in judges), default=0.0)
    of_actor = policy.params / (actor.tp * actor.pp) * (2 + 4 + 12 / actor.dp)
    push_s = of_rollout / (device.network if placement.is_apart else device.host)
    moves = {
        "rollout": Moves(of_rollout / device.host, of_rollout / device.host, push_s),
        "genrm": Moves(of_judge / device.host, of_judge / device.host),
        "train": Moves(of_actor / device.host, of_actor / device.host),
    }
    rollout = engine(policy, config.rollout_tp)
    return Cluster(
        {"rollout": rollout, "genrm": rollout},
        trainer(policy, actor),
        trainer(model_of(config.critic or config.model), placement.critic),
        trainer(policy, placement.reference),
        moves=moves,
        judges=tuple(engine(judge, config.genrm_tp) for judge in judges),
    )
