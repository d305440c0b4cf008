"""Started by test_image_training.py, as parallel_worker.py: trains on images, layout by layout."""

from functools import partial

from parallel_worker import actor_config, each_layout, gathered, main, weights_of
from sample import Sample

LR = 1e-3
SIZES = dict(temperature=1.0, max_tokens_per_micro_batch=64, weight_decay=0.0)


def image_config(**changes):
    return actor_config(**SIZES | changes)


def step(actor, samples: list[Sample]) -> tuple[float, float]:
    """One optimizer step of cross-entropy on this rank's share of samples; the mean loss, the norm."""
    from training.trainer import as_sequences

    mine = as_sequences([samples[actor.dp_rank :: actor.dp_size]])[0]
    packed = [[mine[index] for index in chosen] for chosen in actor.pack(mine)]
    stats = actor.optimizer_step(packed, actor.cross_entropy_loss, (), LR)
    return stats["loss"] / stats["divisor"], stats["grad_norm"]


def train(reference: dict, sizes: dict, path: str) -> dict:
    """Three steps under one layout."""
    from actor import Actor
    from examples.make_demo.closing import close

    actor, samples = Actor(image_config(**sizes), reference["model_dir"]), reference["samples"]
    mine = list(range(len(samples)))[actor.dp_rank :: actor.dp_size]
    rows = dict(zip(mine, actor.read_tokens([[samples[number] for number in mine]]), strict=True))
    steps = [step(actor, samples) for _ in range(3)]
    weights = weights_of(actor)
    logprobs = {number: row for rows in gathered(rows) for number, row in rows.items()}
    close(actor)
    return {"logprobs": logprobs, "steps": steps, "weights": weights}


if __name__ == "__main__":
    # each rank would take seconds to import them
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl  # noqa: F401
    from transformers.models.qwen3_vl import modeling_qwen3_vl  # noqa: F401

    import actor  # noqa: F401
    import critic  # noqa: F401

    main(partial(each_layout, train))
