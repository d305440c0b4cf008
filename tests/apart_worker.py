"""What test_apart.py starts as a process: models on ranks of their own learn, are pushed, saved and loaded.

Usage: as parallel_worker.py. A layout says who holds what, as --placement; `sizes` of the run; `meets`:
actor and critic wait for each other in each update; `saves`: after the first; `resumes`: another layout's
save. The real code builds the models, deals samples and shares columns; engines alone are missing.
"""

import asyncio
import random
from datetime import timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist

import checkpoint
import controller
import run
from algorithms import algorithm_of
from parallel_worker import actor_config, each_layout, gathered, main, save
from placement import Placement, make_plans
from reporting.timeline import Timeline
from rollout import RolloutBatch, outcomes_of
from runtime.shutdown import Stop
from runtime.world import World
from sample import Sample
from training.groups import mpu

PPO = dict(row="ppo", kl_coef=0.1, kl_in="reward", updates_per_step=2)


def make_batch(step: int) -> list[Sample]:
    """Five groups of four ragged answers, by the weights of the step."""
    rng = random.Random(step)
    samples = []
    for number in range(20):
        prompt = [rng.randrange(1, 60) for _ in range(rng.randint(2, 6))]
        response = [rng.randrange(1, 60) for _ in range(rng.randint(3, 12))]
        sample = Sample(number // 4, number % 4, prompt, response=response, finish="stop")
        sample.logprobs = [-rng.random() * 3 for _ in response]
        sample.versions = [step] * len(response)
        sample.reward = rng.random()
        samples.append(sample)
    for sample in samples:
        sample.outcomes = outcomes_of([s for s in samples if s.prompt_id == sample.prompt_id])
    return samples


def controller_of(config, plans, models, world: World) -> SimpleNamespace:
    """As much of a Controller as exchange, learn and agree look at."""
    timeline = Timeline(world.rank, asyncio.get_running_loop().time)
    how = dict(pools={"rollout": None, "genrm": None}, world=world, timeline=timeline)
    held = Placement(plans, models, **how)
    return SimpleNamespace(
        config=config,
        algorithm=algorithm_of(config),
        world=world,
        team=world.part(plans[0].holders.servers),
        placement=held,
        prompts=SimpleNamespace(attach_images=lambda samples: None),
        timeline=timeline,
        state=controller.State(),
        stop=Stop(),
        stopping=0,
        report=SimpleNamespace(note=print),
    )


def meet_in_updates(c: SimpleNamespace) -> None:
    """Neither goes on until the other is in its update, too: in turns they would wait in vain."""
    store = dist.distributed_c10d._get_default_store()
    actor, critic = c.placement.actor, c.placement.critics[0]

    def wait_for_the_other(own: str, other: str, update, *args):
        store.set(f"{own} learns in {c.state.step}", "")
        store.wait([f"{other} learns in {c.state.step}"], timedelta(seconds=60))
        return update(*args)

    for trainer, *names in ((actor, "actor", "critic"), (critic, "critic", "actor")):
        if trainer.holds:
            trainer.update = partial(wait_for_the_other, *names, trainer.update)


async def step_of(c: SimpleNamespace) -> dict[str, float]:
    """A step: samples are held by those who serve, and learnt by whoever holds a model."""
    kept = make_batch(c.state.step)[c.team.place :: c.team.size] if c.placement.serves else []
    shares = await controller.exchange(RolloutBatch(kept=kept), c)
    stats = await controller.learn(c, shares)
    stats = await controller.agree(c, stats, shares)
    c.state.step += 1
    return stats


def pushed(c: SimpleNamespace, route) -> dict[str, tuple]:
    """Shape and digest of each tensor that an engine of this rank would get (collective)."""
    named = c.placement.actor.named_weights()
    named = route.carry(named) if route else named
    return {name: (*t.shape, sha256(t.float().numpy().tobytes()).hexdigest()) for name, t in named}


async def live(reference: dict, layout: dict, path: str) -> dict:
    size = dist.get_world_size()
    given = dict(placement=layout["placement"], mode="full", rule=("right",))
    given |= layout.get("sizes", {})
    config = actor_config(**PPO, **given, model=reference["model"], critic=reference["critic"])
    plans = make_plans(config, size)
    inputs = dict(algorithm=algorithm_of(config), texts=[])
    inputs |= dict(sampling=SimpleNamespace(stop_token_ids=()))
    models = run.build_models(config, SimpleNamespace(**inputs), plans)
    c = controller_of(config, plans, models, World("cpu", 60.0))
    if "resumes" in layout:
        c.state.step = 1
        for name, trainer in checkpoint.trainers_of(c).items():
            await c.placement.give_device_to(trainer)
            trainer.restore(Path(path).parent / f"result.{layout['resumes']}.{name}")
    if "meets" in layout:
        meet_in_updates(c)
    metrics = []
    while c.state.step < 2:
        metrics.append(await step_of(c))
        if "saves" in layout and c.state.step == 1:
            for name, trainer in checkpoint.trainers_of(c).items():
                await c.placement.give_device_to(trainer)
                save(trainer, Path(f"{path}.{name}"))
    weights = {}
    for name, trainer in checkpoint.trainers_of(c).items():
        await c.placement.give_device_to(trainer)
        for found in gathered(trainer.whole_weights()):
            weights |= {name: found} if found else {}
    versions = gathered([trainer.version for trainer in models.trainers])
    state = gathered(mpu.model_parallel_is_initialized())
    await c.placement.give_device_to(c.placement.actor)
    digests = gathered(pushed(c, models.route))
    received = gathered(models.route.received if models.route else 0)
    c.world.close()
    facts = dict(metrics=metrics, weights=weights, versions=versions, global_state=state)
    return facts | dict(
        digests=digests, received=received, columns=gathered([sorted(each) for each in metrics])
    )


def train(reference: dict, layout: dict, path: str) -> dict:
    return asyncio.run(live(reference, layout, path))


if __name__ == "__main__":
    import actor  # noqa: F401  before the fork
    import critic  # noqa: F401

    main(partial(each_layout, train))
