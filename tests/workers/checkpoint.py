"""test_checkpoint.py's work in its own process: ranks save, then other layouts resume from that.

parallel.py imports it. The reference is a model directory and three batches. A layout's result has, by rank,
what was saved or restored, the metrics of the next update, and the weights after it.
"""

import asyncio
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import torch

import modes
import placement
from checkpoint import Checkpoints, restore
from data import Prompts
from runtime.timeline import Timeline
from runtime.world import World
from sample import flat
from state import State
from tests.support.fakes import FakeSource
from tests.workers.parallel import balanced, critic_config, gathered, weights_of


def controller_of(world: World, actor, critic) -> SimpleNamespace:
    """Make a stand-in with the parts of a Controller that a checkpoint reads."""
    holders = placement.colocate(tuple(range(world.size)), actor.config)
    splits = modes.full_colocation(holders, actor.config)
    held = dict(actor=actor, critics=[critic], splits=splits, next=splits[0], serves=True)
    held["give_device_to"] = AsyncMock()  # there is only a CPU
    return SimpleNamespace(
        config=replace(actor.config, save_every=2, save_hf_every=2, keep=2),
        world=world,
        same_duty=world,
        ahead=None,
        devices=SimpleNamespace(**held),
        rewards=Mock(counts=Mock(return_value=5 + world.rank)),
        prompts=Prompts(FakeSource(), 4, keeps_groups=True),
        timeline=Timeline(world.rank, asyncio.get_running_loop().time),
        state=State(),
        report=SimpleNamespace(note=None),  # called after a failed save
    )


def update(c: SimpleNamespace, batch: list) -> dict[str, float]:
    """Update both models, the critic on returns derived from the tokens. Return the metrics."""
    actor, (critic,) = c.devices.actor, c.devices.critics
    metrics = actor.update(balanced(batch, actor))
    mini_batches = balanced(batch, critic)
    critic.compute_values(mini_batches)
    for sample in flat(mini_batches):
        sample.returns = {critic.name: [token / 64 for token in sample.response]}
    return metrics | critic.update(mini_batches)


def carry_answers(prompts: Prompts, actor) -> None:
    """Draw prompts that come again, with their answers so far."""
    drawn = prompts.draw(9)
    owners = prompts.assign_owners(drawn, actor.dp_size)
    mine = [each for each in drawn if owners[each] == actor.dp_rank and actor.is_lead]
    groups = [prompts.group(number, prompts.source.training(number)) for number in mine]
    for sample in chain(*groups):
        sample.response, sample.logprobs = [sample.prompt_id], [-sample.prompt_id / 3]
        sample.versions = [1]
        sample.media = ()  # as modes.collect leaves it
    prompts.carry_over(drawn, groups)


async def live(reference: dict, sizes: dict, path: str, saves: bool) -> list[dict]:
    """If `saves`: make two updates, a save, and the next update meanwhile. Otherwise only that update."""
    from actor import Actor
    from examples.make_demo.closing import close
    from extras.critic import Critic

    config, world = critic_config(**sizes), World("cpu", 60.0)
    models = [kind(config, reference["model_dir"]) for kind in (Actor, Critic)]
    c = controller_of(world, *models)
    *before, last = reference["batches"]
    out = Path(path).parent
    c.checkpoints = Checkpoints(c.config, world, out, contents={})
    if saves:
        for batch in before:
            update(c, batch)
        c.state.step = 2
        torch.manual_seed(world.rank + 100)
        carry_answers(c.prompts, models[0])
        await c.checkpoints.save(c)
    else:
        await restore(c, out / "checkpoints" / "step_2")
        assert [model.version for model in models] == [2, 2]
        if world.rank == 0:  # only there: neither a load nor a save waits for another rank
            models[0].restore(out / "checkpoints" / "step_2" / "megatron")
            models[0].snapshot(Path(f"{path}.alone"))
    random = torch.rand(3)
    groups = c.prompts.groups.values()
    answers = [sample for group in groups for sample in group]
    held = {s.prompt_id: (s.response, s.logprobs, s.versions, world.rank) for s in answers}
    counts = [call.args[0] for call in c.rewards.load_counts.mock_calls]
    facts = dict(step=c.state.step, prompts=c.prompts.state(), held=held, counts=counts)
    facts |= dict(metrics=update(c, last), random=random, weights=[*map(weights_of, models)])
    if saves:
        await c.checkpoints.finish(c, wait=True)
        await c.checkpoints.save_now(c)  # this has nothing to do
        assert c.checkpoints.newest == 2
    world.close()
    for model in models:
        close(model)
    return gathered(facts)


def train(reference: dict, layout: dict, path: str) -> list[dict]:
    sizes = dict(layout)
    return asyncio.run(live(reference, sizes, path, saves=sizes.pop("saves", False)))
