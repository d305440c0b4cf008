"""Value models, for --algorithm ppo and safe_rlhf."""

from build import DIRECTORIES, KINDS
from config import Config
from scheduling.layout import Placement


def kind_of(config: Config) -> type:
    from extras.critic.model import Critic  # imports Megatron, which takes seconds

    return Critic


def check(config: Config, placement: Placement) -> None:
    """Raise UserError unless --critic is a value model for the actor's tokens, and the sizes fit."""
    if config.critic:
        from training import model

        actor = model.read_hf_config(config.model)
        hf = model.read_hf_config(config.critic, "--critic")
        model.check_directory(config.critic, "--critic", hf, scores=True)
        sized = placement.critic.sized(config)
        model.check_reads_policy(sized, config.critic, "--critic", hf, actor)


KINDS["critic"] = kind_of
DIRECTORIES.append(check)
