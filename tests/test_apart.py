"""Actor, critic and reference on ranks and in sizes of their own, against one rank that holds all."""

import asyncio
import random
from datetime import timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import checkpoint
import controller
import data
import run
from algorithms import algorithm_of
from modes import lay_out
from placement import Devices
from reporting.timeline import Timeline
from rollout import RolloutBatch, outcomes_of
from runtime.shutdown import Stop
from runtime.world import World
from sample import Sample
from tests.support.patience import LIMIT_S
from tests.support.plain import make_model, make_value_model
from tests.support.rounding import apart
from tests.workers.parallel import actor_config, far, gathered, save
from tests.workers.start import train_layouts
from training.groups import mpu

NEAR = apart(20 * 12)  # sums over the tokens of make_batch
PPO = dict(row="ppo", kl_coef=0.1, kl_in="reward", updates_per_step=2)
SP = dict(tp=2, sp=True)
CROSSED = "actor=1,3:tp1:pp2 critic=0,2:pp1:tp2"
LAYOUTS = {  # name -> ranks, what is said of it
    "one": (1, dict(placement="colocate")),
    "equal": (2, dict(placement="actor=0-1:tp2 critic=0-1:tp1:pp2")),
    "reference": (3, dict(placement="actor=0 critic=1 reference=2", saves=True, meets=True)),
    "resumed together": (4, dict(placement="colocate", resumes="reference")),
    "interleaved": (4, dict(placement=CROSSED, sizes=SP, meets=True)),
    "disjoint": (5, dict(placement="engines=0-4 actor=0-1 critic=2-3", meets=True)),
    "apart": (5, dict(placement="engines=0 actor=1-2 critic=3-4:tp1:pp2", sizes=SP, meets=True)),
}
LAYOUTS["resumed apart"] = (5, LAYOUTS["apart"][1] | dict(resumes="reference"))
LAYOUTS |= {"two receivers": (6, dict(placement="engines=0,3,5 actor=1-2 critic=4", meets=True))}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("apart")
    reference = {"model": make_model(path / "actor", "qwen3", tied=False)}
    reference["critic"] = make_value_model(path / "value", "qwen3", tied=False)
    layouts = {name: ("qwen3", *layout) for name, layout in LAYOUTS.items()}
    return train_layouts("tests.test_apart", path, layouts, {"qwen3": reference})


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


def controller_of(config, placement, splits, models, world: World) -> SimpleNamespace:
    """As much of a Controller as exchange, learn and gather_metrics look at."""
    timeline = Timeline(world.rank, asyncio.get_running_loop().time)
    how = dict(pools={"rollout": None, "genrm": None}, world=world, timeline=timeline)
    held = Devices(config, placement, splits, models, **how)
    return SimpleNamespace(
        config=config,
        algorithm=algorithm_of(config),
        world=world,
        same_duty=world.part(placement.servers),
        devices=held,
        prompts=data.Prompts(None, 1),
        timeline=timeline,
        state=controller.State(),
        stop=Stop(),
        stopping=False,
        report=SimpleNamespace(note=print),
    )


def meet_in_updates(c: SimpleNamespace) -> None:
    """Neither goes on until the other is in its update, too: in turns they would wait in vain."""
    store = dist.distributed_c10d._get_default_store()
    actor, critic = c.devices.actor, c.devices.critics[0]

    def wait_for_the_other(own: str, other: str, update, *args):
        store.set(f"{own} learns in {c.state.step}", "")
        store.wait([f"{other} learns in {c.state.step}"], timedelta(seconds=LIMIT_S))
        return update(*args)

    for trainer, *names in ((actor, "actor", "critic"), (critic, "critic", "actor")):
        if trainer.holds:
            trainer.update = partial(wait_for_the_other, *names, trainer.update)


async def step_of(c: SimpleNamespace) -> dict[str, float]:
    """A step: samples are held by those who serve, and learnt by whoever holds a model."""
    kept = (
        make_batch(c.state.step)[c.same_duty.index :: c.same_duty.size] if c.devices.serves else []
    )
    batch = RolloutBatch(kept=kept)
    held, _ = await controller.gather_sizes(batch, c)
    shares = await controller.exchange(batch, held, c)
    stats = await controller.learn(c, shares)
    stats = await controller.gather_metrics(c, stats, shares)
    c.state.step += 1
    return stats


def pushed(c: SimpleNamespace, route) -> dict[str, tuple]:
    """Shape and digest of each tensor that an engine of this rank would get (collective)."""
    named = c.devices.actor.named_weights()
    named = route.carry(named) if route else named
    return {name: (*t.shape, sha256(t.float().numpy().tobytes()).hexdigest()) for name, t in named}


async def live(reference: dict, layout: dict, path: str) -> dict:
    size = dist.get_world_size()
    given = dict(placement=layout["placement"], mode="full", rule=("right",))
    given |= layout.get("sizes", {})
    config = actor_config(**PPO, **given, model=reference["model"], critic=reference["critic"])
    placement, splits = lay_out(config, size)
    inputs = dict(algorithm=algorithm_of(config), texts=[])
    inputs |= dict(sampling=SimpleNamespace(stop_token_ids=()))
    models = run.build_models(config, SimpleNamespace(**inputs), placement, splits)
    c = controller_of(config, placement, splits, models, World("cpu", LIMIT_S))
    if "resumes" in layout:
        c.state.step = 1
        for name, trainer in checkpoint.trainers_of(c).items():
            await c.devices.give_device_to(trainer)
            trainer.restore(Path(path).parent / f"result.{layout['resumes']}.{name}")
    if "meets" in layout:
        meet_in_updates(c)
    metrics = []
    while c.state.step < 2:
        metrics.append(await step_of(c))
        if "saves" in layout and c.state.step == 1:
            for name, trainer in checkpoint.trainers_of(c).items():
                await c.devices.give_device_to(trainer)
                save(trainer, Path(f"{path}.{name}"))
    weights = {}
    for name, trainer in checkpoint.trainers_of(c).items():
        await c.devices.give_device_to(trainer)
        for found in gathered(trainer.whole_weights()):
            weights |= {name: found["model.safetensors"]} if found else {}
    versions = gathered([trainer.version for trainer in models.trainers])
    state = gathered(mpu.model_parallel_is_initialized())
    await c.devices.give_device_to(c.devices.actor)
    digests = gathered(pushed(c, models.route))
    received = gathered(models.route.received if models.route else 0)
    c.world.close()
    facts = dict(metrics=metrics, weights=weights, versions=versions, global_state=state)
    facts["columns"] = gathered([sorted(each) for each in metrics])
    return facts | dict(digests=digests, received=received)


def train(reference: dict, layout: dict, path: str) -> dict:
    return asyncio.run(live(reference, layout, path))


def exact(metrics: dict) -> dict:
    """Those that don't depend on how the samples were dealt, or on the hour."""
    others = ("seconds", "micro", "balance")
    return {name: x for name, x in metrics.items() if not any(part in name for part in others)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_learn_as_on_one_rank(name, results):
    """Two updates of each model, or one after a load; where they meet, both learn at the same time.
    Megatron's global state stays empty, and every rank counts all updates and has all metrics."""
    found, one = results[name], results["one"]
    steps = range(1, 2) if "resumes" in LAYOUTS[name][1] else range(2)
    for metrics, step in zip(found["metrics"], steps, strict=True):
        expected = exact(one["metrics"][step])
        assert {"train/loss", "train/reference_kl", "critic/value_loss"} <= expected.keys()
        assert expected["train/grad_norm"] > 0.01 and expected["critic/grad_norm"] > 0.01
        assert exact(metrics) == pytest.approx(expected, rel=NEAR, abs=NEAR), f"update {step}"
    for trainer, weights in one["weights"].items():
        assert far(found["weights"][trainer], weights) < 2e-5
    assert len(found["versions"]) == LAYOUTS[name][0]
    assert found["versions"] == [[2, 2]] * LAYOUTS[name][0]
    assert not any(found["global_state"])
    assert all(columns == found["columns"][0] for columns in found["columns"])


ENGINES = {"disjoint": range(5), "apart": [0], "two receivers": [0, 3, 5], "interleaved": range(4)}
# those of them that don't hold the actor
RECEIVERS = {"disjoint": [2, 3, 4], "apart": [0], "two receivers": [0, 3, 5], "interleaved": [0, 2]}


@pytest.mark.parametrize("name,engines", ENGINES.items())
def test_every_engine_gets_the_actors_weights(name, engines, results):
    """Bit for bit, on whatever rank, from whichever copy's lead; who has neither gets nothing."""
    digests, weights = results[name]["digests"], results[name]["weights"]["megatron"]
    got = [digests[rank] for rank in engines]
    assert all(each == got[0] for each in got) and got[0].keys() == weights.keys()
    assert len({*got[0].values()}) > len(weights) / 2
    placement = LAYOUTS[name][1]["placement"]
    critics_alone = {"apart": (3, 4), "two receivers": (4,)}.get(name, ())
    assert not any(digests[rank] for rank in critics_alone), placement
    everything = sum(tensor.nbytes for tensor in weights.values())
    found = {rank: size for rank, size in enumerate(results[name]["received"]) if size}
    assert found == dict.fromkeys(RECEIVERS[name], everything)
