"""What test_critic.py starts as a process: a critic learns the same batches under one layout after another.

Usage: critic_worker.py case.pt result.pt, as parallel_worker.py. The result holds for each layout the metrics
of every update, and how far values and weights of any rank were from those of the plain reference.
"""

from functools import partial

import torch.distributed as dist

from config import Config
from parallel_worker import actor_config, balanced, each_layout, main
from scheduling.balance import flat


def critic_config(**changes) -> Config:
    return actor_config(**{"critic_lr": 2e-3} | changes)


def train(model_dir: str, layout: dict, reference: dict, export_to: str) -> dict:
    """Under one layout of Megatron's sizes."""
    from critic import Critic

    critic = Critic(critic_config(**layout), model_dir)
    metrics, value_distance = [], 0.0
    for batch in reference["batches"]:
        mine = balanced(batch, critic)
        critic.compute_values(mine)
        for sample in flat(mine):
            pairs = zip(sample.values["reward"], sample.true_values, strict=True)
            value_distance = max([value_distance, *(abs(value - true) for value, true in pairs)])
            sample.values["reward"] = sample.old_values
        metrics.append(critic.update(mine))
    weights = {name: tensor.clone() for name, tensor in critic.named_weights()}
    assert weights.keys() == reference["weights"].keys()
    distance = max(
        (weights[name].float() - reference["weights"][name]).abs().max().item() for name in weights
    )
    critic.export(export_to)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (metrics, distance, value_distance))
    critic.close()
    assert all(other[0] == metrics for other in everyone), "metrics differ between ranks"
    return {
        "metrics": metrics,
        "weight_distance": max(distance for _, distance, _ in everyone),
        "value_distance": max(distance for _, _, distance in everyone),
    }


if __name__ == "__main__":
    import critic  # noqa: F401  before the fork

    main(partial(each_layout, train), sizes=(2, 4))
