"""What test_executor.py starts as a process: PPO's updates under every schedule, in one layout after another.

Usage: executor_worker.py case.pt result.pt, as parallel_worker.py. The result holds for each layout and
schedule what the updates made, and "megatron" is Megatron-Core's own schedule in the executor's place.
"""

import asyncio
import os
import random
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from parallel_worker import (
    actor_config,
    balanced,
    critic_config,
    each_layout,
    gathered,
    main,
    save,
    set_overlap,
)
from scheduling.balance import flat

SETTINGS = dict(row="ppo", critic_epochs=2, updates_per_step=2, max_tokens_per_micro_batch=32)


def megatron_run(works: list, schedule: str):
    """Megatron-Core's own schedule in the place of executor.run."""
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from scheduling.pipeline import Task
    from training.executor import Pass, Phase

    for work in works:
        (module,) = work.trainer.ddps
        config = module.config
        config.no_sync_func, config.finalize_model_grads_func = module.no_sync, finalize_model_grads
        module.zero_grad_buffer()
        with torch.set_grad_enabled(not work.forward_only):
            work.stats = get_forward_backward_func()(
                forward_step_func=lambda rest, module: work.forward(next(rest), module),  # noqa: B023
                data_iterator=iter(work.micro_batches),
                model=module,
                seq_length=0,
                micro_batch_size=1,
                num_microbatches=len(work.micro_batches),
                forward_only=work.forward_only,
            )
        config.no_sync_func = config.finalize_model_grads_func = None
        work.passes = [Pass("", Task(0, 0, backward, 0), 0.0, 1.0) for backward in (False, True)]
    return Phase(0.0, 1.0, [])


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


def close(trainers: tuple) -> None:
    for trainer in trainers:
        trainer.close()


def batch_of(step: int, samples: list) -> list:
    """Samples of weights `step`, with what PPO knows of them but the values."""
    samples = [
        replace(s, versions=[step] * len(s.response)) for s in samples if s.advantages is not None
    ]
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
    return {
        (n, name): tensor.clone()
        for n, trainer in named
        for name, tensor in trainer.named_weights()
    }


def gradients(trainers: tuple, samples: list) -> dict:
    """After one pass, by model, tensor-parallel rank and name (data parallelism cuts them elsewhere)."""
    from training.hf_weights import global_parameters
    from training.trainer import as_sequences

    found = {}
    for number, trainer in enumerate(trainers):
        packed = as_sequences(
            [[sample] for sample in samples[:3]] + [samples[3:6], samples[6:7], []]
        )

        def loss(batch, output):
            values = output if isinstance(output, torch.Tensor) else output.hidden
            chosen = (batch.slots >= 0).float()[None, :, None]
            return (
                (chosen * values.float() ** 2).sum(),
                int(chosen.sum()),
                {"all": values.detach().sum()},
            )

        stats = trainer._passes(packed, loss)
        mine = {
            (number, trainer.groups.tp.rank(), name): parameter.main_grad.clone()
            for chunk in trainer.chunks
            for name, parameter in global_parameters(chunk)
        }
        for other in gathered((mine, stats)):
            found |= other[0] | ({(number, "stats"): other[1]} if other[1] else {})
    return found


def resumed(model_dir: str, layout: dict, schedules: list[str], batches: list, path: str) -> tuple:
    """A step under each schedule, each from the checkpoint of the one before."""
    history, trainers, durations = [], None, []
    for step, schedule in enumerate(schedules):
        trainers = build(model_dir, schedule, layout)
        for number, trainer in enumerate(trainers) if step else ():
            trainer.restore(Path(f"{path}.{step - 1}.{number}"))
            assert trainer.durations == durations[number]
        history.append(ppo_step(trainers, step, batches[step]))
        durations = [trainer.durations for trainer in trainers]
        assert durations == gathered(durations)[0], "ranks would make different tables"
        for number, trainer in enumerate(trainers):
            save(trainer, Path(f"{path}.{step}.{number}"))
        weights = weights_of(trainers)
        close(trainers)
    return history, weights


def train(reference: dict, layout: dict, path: str) -> dict:
    """Three PPO steps under every schedule that the layout names, and the gradients of a pass."""
    from training import trainer

    trainer.CLIP_GRAD = (
        100.0  # the norm's last bit depends on where its parts lie, and would show in weights
    )
    layout, batches, results = dict(layout), reference["batches"], {}
    model_dir = reference["model_dir"]
    set_overlap(layout.pop("bucket", None))
    names, resumes = layout.pop("schedules"), layout.pop("resumes", False)
    for name in names:
        with schedule_of(name) as schedule:
            trainers = build(model_dir, schedule, layout)
            found = gradients(trainers, batches[0]) if trainers[0].dp_size == 1 else {}
            history = [ppo_step(trainers, step, batch) for step, batch in enumerate(batches)]
            results[name] = {
                "gradients": found,
                "history": history,
                "weights": weights_of(trainers),
            }
            close(trainers)
    if resumes:
        order = ["fused", "1f1b", "interleaved"]
        history, weights = resumed(model_dir, layout, order, batches, f"{path}.resumed")
        results["resumed"] = {"history": history, "weights": weights}
    return results


def one_has_another_table(actor) -> str:
    """What a rank says where the others' table differs from its own."""
    from scheduling.pipeline import SCHEDULES, Schedule, one_after_another

    def table(pipes):
        whole = one_after_another(pipes)
        if dist.get_rank() == 1:
            whole[0][:2] = whole[0][1::-1]
        return whole

    config, actor.config = actor.config, replace(actor.config, schedule="broken")
    SCHEDULES["broken"] = Schedule(table)
    try:
        actor.packed_logprobs([[sample] for sample in make_samples(0)[:3]])
    except AssertionError as error:
        return str(error)
    finally:
        del SCHEDULES["broken"]
        actor.config = config
    return "nothing"


def one_dies(trainers: tuple, path: str) -> None:
    """The third of four ranks ends in the middle of a table; the others leave what they say of it."""
    from runtime.world import World
    from training import executor

    notes, rank, own, passes = Path(f"{path}.notes"), dist.get_rank(), executor.backward_step, []
    notes.mkdir(exist_ok=True)
    world = World("cpu", 120.0, notes)

    def dying(*arguments):
        passes.append(arguments)
        if rank == 2 and len(passes) == 5:
            os._exit(0)
        return own(*arguments)

    async def step() -> None:
        world.doing("train of step 4")
        await world.barrier()
        executor.backward_step = dying
        await world.run(ppo_step, trainers, 0, make_samples(0))

    try:
        asyncio.run(step())
    except RuntimeError as error:
        Path(f"{path}.died.{rank}").write_text(str(error))
    os._exit(0)


def each_then_fail(case: dict, size: int, path: str) -> dict:
    """The layouts; then what happens when ranks have different tables, and when one dies."""
    results = each_layout(train, case, size, path)
    if size == 4:
        trainers = build(case["references"]["qwen3"]["model_dir"], "fused", {"pp": 4})
        results["another table"] = gathered(one_has_another_table(trainers[0]))
        if dist.get_rank() == 0:
            torch.save(results, f"{path}.{size}")
        one_dies(trainers, path)
    return results


if __name__ == "__main__":
    import actor  # noqa: F401  before the fork
    import critic  # noqa: F401
    from test_actor import make_samples

    main(each_then_fail)
