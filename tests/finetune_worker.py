"""What test_finetune.py starts as a process of its own: each command learns under each layout.

Usage: finetune_worker.py case.pt result.pt, as parallel_worker.py. The result holds for each case the metrics
of every step, and how far the weights of any rank are from those of the plain reference at the end.
"""

from config import Config
from parallel_worker import far, gathered, main


def config_of(command: str, model_dir: str, **layout) -> Config:
    """A small run's."""
    small = dict(
        max_model_len=48, max_tokens_per_micro_batch=48, max_new_tokens=8, judge_max_new_tokens=8
    )
    rates = dict(steps=4, lr=1e-3, lr_warmup_steps=2, weight_decay=0.1, temperature=0.7)
    return Config(command=command, model=model_dir, **small | rates | layout)


def learn(command: str, model_dir: str, layout: dict, reference: dict, export_to: str) -> dict:
    """Under one layout of Megatron's sizes."""
    from commands.finetune import Learner

    learner = Learner(config_of(command, model_dir, **layout))
    held_out = [learner.measure(reference["held_out"])]
    metrics = [learner.step(batch) for batch in reference["batches"]]
    held_out.append(learner.measure(reference["held_out"]))
    weights = {name: tensor.clone() for name, tensor in learner.trainer.named_weights()}
    distance = far(weights, reference["weights"])
    learner.trainer.export(export_to)
    everyone = gathered((metrics, held_out, distance))
    learner.trainer.close()
    assert all(other[:2] == (metrics, held_out) for other in everyone), (
        "metrics differ between ranks"
    )
    return {
        "metrics": metrics,
        "held_out": held_out,
        "weight_distance": max(other[2] for other in everyone),
    }


def every_command(case: dict, size: int, path: str) -> dict:
    """Results by command and layout, of the layouts of `size` ranks."""
    return {
        (command, name): learn(
            command, reference["model_dir"], layout, reference, f"{path}.{command}.{name}"
        )
        for command, reference in case["references"].items()
        for name, (ranks, layout) in case["layouts"].items()
        if ranks == size
    }


if __name__ == "__main__":
    from commands import finetune  # noqa: F401  before the fork

    main(every_command)
