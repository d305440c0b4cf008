"""What test_executor.py starts as a process: PPO's updates under every schedule, in one layout after another.

Usage: executor_worker.py case.pt result.pt, as parallel_worker.py. The result holds for each layout and
schedule what the updates made, and "megatron" is Megatron-Core's own schedule in the executor's place.
"""

import random
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from parallel_worker import actor_config, balanced, critic_config, each_layout, main, set_overlap
from scheduling.balance import flat

SETTINGS = dict(row="ppo", critic_epochs=2, updates_per_step=2, max_tokens_per_micro_batch=32)


def megatron_run(works: list, schedule: str):
    """Megatron-Core's own schedule in the place of executor.run."""
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from scheduling.pipeline import Task
    from training.executor import Pass

    for work in works:
        module, config = work.trainer.ddp, work.trainer.ddp.config
        config.no_sync_func, config.finalize_model_grads_func = module.no_sync, finalize_model_grads
        module.zero_grad_buffer()
        with torch.set_grad_enabled(not work.forward_only):
            numbers = iter(range(len(work.micro_batches)))
            step = lambda rest, module: work.forward(next(rest), module)  # noqa: B023, E731
            how = dict(data_iterator=numbers, forward_only=work.forward_only)
            how |= dict(seq_length=0, micro_batch_size=1, num_microbatches=len(work.micro_batches))
            groups = work.trainer.groups
            how["pg_collection"] = groups
            if groups.pp.size() > 1:
                how["p2p_communicator"] = P2PCommunicator(groups.pp, config)
            run = get_forward_backward_func(groups.pp.size(), None)
            work.stats = run(forward_step_func=step, model=module, **how)
        config.no_sync_func = config.finalize_model_grads_func = None
        work.passes = [Pass("", Task(0, 0, backward, 0), 0.0, 1.0) for backward in (False, True)]


@contextmanager
def schedule_of(name: str):
    """The setting's value, while Megatron's own runs in the executor's place if that is its name."""
    from training import executor, trainer

    own = executor.run
    executor.run = trainer.run = megatron_run if name == "megatron" else own
    try:
        yield "1f1b" if name == "megatron" else name
    finally:
        executor.run = trainer.run = own


def build(model_dir: str, schedule: str, layout: dict) -> tuple:
    from actor import Actor
    from critic import Critic

    settings = SETTINGS | layout | {"schedule": schedule}
    return Actor(actor_config(**settings), model_dir), Critic(critic_config(**settings), model_dir)


def batch_of(step: int, samples: list) -> list:
    """Samples of weights `step`, with what PPO knows of them but the values."""
    kept = [sample for sample in samples if sample.advantages is not None]
    samples = [replace(sample, versions=[step] * len(sample.response)) for sample in kept]
    rng = random.Random(step)
    for sample in samples:
        sample.logprobs = [-3.0] * len(sample.response)
        sample.returns = {"reward": [rng.gauss(0, 1) for _ in sample.response]}
    return samples


def ppo_step(trainers: tuple, step: int, samples: list) -> tuple[dict, list]:
    """As controller.learn. Returns metrics but for seconds, and the values that the critic gave."""
    from scheduling.pipeline import SCHEDULES

    actor, critic = trainers
    mini_batches = balanced(batch_of(step, samples), actor)
    critic.compute_values(mini_batches)
    fuses = SCHEDULES[actor.config.schedule].fuses
    metrics = {}
    for first, *others in [(critic, actor)] if fuses else [(critic,), (actor,)]:
        metrics |= first.update(mini_batches, others)
    metrics = {name: value for name, value in metrics.items() if "seconds" not in name}
    return metrics, [sample.values["reward"] for sample in flat(mini_batches)]


def weights_of(trainers: tuple) -> dict:
    named = ((str(number), trainer) for number, trainer in enumerate(trainers))
    return {(n, name): each.clone() for n, of in named for name, each in of.named_weights()}


def train(reference: dict, layout: dict, path: str) -> dict:
    """Three PPO steps under every schedule that the layout names."""
    from examples.make_demo.closing import close
    from training import trainer

    # the norm's last bit depends on where its parts lie, and would show in weights
    trainer.CLIP_GRAD = 100.0
    layout, batches, results = dict(layout), reference["batches"], {}
    model_dir = reference["model_dir"]
    set_overlap(layout.pop("bucket", None))
    for name in layout.pop("schedules"):
        with schedule_of(name) as schedule:
            trainers = build(model_dir, schedule, layout)
            history = [ppo_step(trainers, step, batch) for step, batch in enumerate(batches)]
            results[name] = {"history": history, "weights": weights_of(trainers)}
            for trainer in trainers:
                close(trainer)
    return results


if __name__ == "__main__":
    import actor  # noqa: F401  before the fork
    import critic  # noqa: F401

    main(partial(each_layout, train))
