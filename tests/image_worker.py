"""What test_image_training.py starts as a process: trains on images under one layout after another.

Usage: image_worker.py case.pt result.pt, as parallel_worker.py.
"""

from dataclasses import replace
from pathlib import Path

from parallel_worker import actor_config, balanced, gathered, main, save
from sample import Sample

LR = 1e-3
SIZES = dict(temperature=1.0, max_tokens_per_micro_batch=64, weight_decay=0.0)


def image_config(**changes):
    return actor_config(**SIZES | changes)


def make_actor(model_dir: str, **sizes):
    from actor import Actor

    return Actor(image_config(**sizes), model_dir)


def step(actor, samples: list[Sample]) -> tuple[float, float]:
    """One optimizer step of cross-entropy on this rank's share of samples; the mean loss, the norm."""
    from actor import cross_entropy_loss
    from training.trainer import as_sequences

    mine = as_sequences([samples[actor.dp_rank :: actor.dp_size]])[0]
    packed = [[mine[index] for index in chosen] for chosen in actor.pack(mine)]
    stats = actor.optimizer_step(packed, cross_entropy_loss, (), LR)
    return stats["loss"] / stats["divisor"], stats["grad_norm"]


def train(model_dir: str, sizes: dict, samples: list[Sample], path: str) -> dict:
    """Three steps under one layout, a checkpoint in `path`, and two more steps."""
    actor = make_actor(model_dir, **sizes)
    mine = list(range(len(samples)))[actor.dp_rank :: actor.dp_size]
    rows = dict(zip(mine, actor.logprobs([samples[number] for number in mine]), strict=True))
    steps = [step(actor, samples) for _ in range(3)]
    weights = {name: tensor.clone() for name, tensor in actor.named_weights()}
    save(actor, Path(path))
    after = [step(actor, samples) for _ in range(2)]
    logprobs = {number: row for rows in gathered(rows) for number, row in rows.items()}
    actor.close()
    return {"logprobs": logprobs, "steps": steps, "weights": weights, "after": after}


def resume(model_dir: str, sizes: dict, samples: list[Sample], path: str) -> dict:
    """Two steps from a checkpoint on."""
    actor = make_actor(model_dir, **sizes)
    actor.restore(Path(path))
    after = [step(actor, samples) for _ in range(2)]
    actor.close()
    return {"after": after}


def train_beside(model_dir: str, sizes: dict, samples: list[Sample]) -> list[dict[str, float]]:
    """Metrics of two updates of an actor and a critic, whose passes are one table."""
    from critic import Critic

    actor = make_actor(model_dir, **sizes)
    critic, metrics = Critic(actor.config, model_dir), []
    for _ in range(2):
        fresh = [replace(sample, advantages=[1.0] * len(sample.response)) for sample in samples]
        mini_batches = balanced(fresh, actor)
        critic.compute_values(mini_batches)
        for sample, row in zip(fresh, actor.logprobs(fresh), strict=True):
            sample.logprobs, sample.versions = row, [actor.version] * len(row)
            sample.returns = {critic.name: [token / 64 for token in sample.response]}
        metrics.append(actor.update(mini_batches, [critic]))
    critic.close()
    actor.close()
    return metrics


def work(case: dict, size: int, path: str) -> dict:
    """Results by name, of the layouts of `size` ranks; of some from the checkpoint of another."""
    results = {}
    for name, sizes in case["beside"].items() if size == 2 else ():
        results[name] = train_beside(
            case["model_dirs"]["qwen3_vl"], sizes, case["samples"]["qwen3_vl"]
        )
    for name, (family, ranks, sizes, source) in case["layouts"].items():
        if ranks == size:
            model_dir, samples = case["model_dirs"][family], case["samples"][family]
            how = resume if source else train
            results[name] = how(model_dir, sizes, samples, f"{path}.{source or name}")
    return results


if __name__ == "__main__":
    # each rank would take seconds to import them
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl  # noqa: F401
    from transformers.models.qwen3_vl import modeling_qwen3_vl  # noqa: F401

    import actor  # noqa: F401
    import critic  # noqa: F401

    main(work)
