"""Which push serves engines of several ranks: of shards, if they fit, or of whole tensors."""

from __future__ import annotations

from pathlib import Path

from config import Config
from inputs.hf_directory import read_model_config, sees
from modes import splits_of
from runtime.errors import UserError
from scheduling.layout import Placement

PADDED = 64  # SGLang pads a vocabulary to a multiple, and divides the padded one


def choose(placement: Placement, config: Config, on_machine: int) -> Placement:
    """Return the placement with the push that runs, and why. on_machine: ranks per machine."""
    if placement.rollout_tp == 1 or config.evaluates:
        return placement
    shards = placement._replace(pushes_shards=True)
    if why := why_whole(shards, config, on_machine):
        return placement._replace(push=f"pushes send whole tensors: {why}")
    stride = placement.actor.tp // placement.rollout_tp
    words = f"pushes send shards: a rank of an engine needs {stride} of the actor's {placement.actor.tp}"
    return shards._replace(push=words)


def why_whole(placement: Placement, config: Config, on_machine: int) -> str:
    """Return why a push can't send shards in a placement with `pushes_shards`; an empty text if it can.

    Key and value heads are never fewer than an engine's ranks: --tp divides them.
    """
    tp = placement.actor.tp
    if placement.actor.ranks != placement.engines:
        return "engines are on other ranks than the actor"
    if tp % placement.rollout_tp:
        return f"--rollout-tp {placement.rollout_tp} doesn't divide the actor's tp {tp}"
    if on_machine % tp:
        return f"the actor's tp {tp} doesn't divide {on_machine} ranks of a machine"
    if not Path(config.model, "config.json").is_file():
        return f"{config.model} has no config.json"
    if sees(config.model):
        return "an engine divides an image tower in its own way"
    vocabulary = read_model_config(config.model).get("vocab_size", 1)
    if vocabulary % PADDED:
        return f"an engine pads the vocabulary of {vocabulary} to a multiple of {PADDED}"
    try:
        splits_of(placement, config)
    except UserError as error:
        return f"with shards {error}"
    return ""
