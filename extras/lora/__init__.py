"""LoRA: --lora RANK trains adapters instead of all weights."""

from build import DIRECTORIES, KINDS
from config import Config
from scheduling.layout import Placement

whole = KINDS["actor"]


def kind_of(config: Config) -> type:
    """Return the policy's class: with --lora the one whose optimizer has only the adapters' parameters."""
    if not config.lora:
        return whole(config)
    from extras.lora.adapters import AdaptedActor  # imports Megatron, which takes seconds

    return AdaptedActor


def check(config: Config, placement: Placement | None = None) -> None:
    """Raise UserError if a matrix of --model is too small for --lora."""
    if config.lora:
        from extras.lora.adapters import check_rank
        from training import model

        check_rank(config, model.read_hf_config(config.model))


KINDS["actor"] = kind_of
DIRECTORIES.append(check)
