"""What test_checkpoint.py starts as a process of its own: ranks save, then other layouts go on from that.

Usage: checkpoint_worker.py case.pt OUT NAME ..., of LAYOUTS, in this order. The case holds
a model directory and three batches; OUT gets the checkpoints, and a file for each layout and rank with the
metrics of the update that follows and the weights after it. Ranks are forked after the imports.
"""

import asyncio
import datetime
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import placement
from checkpoint import Checkpoints, restore
from controller import State
from data import Prompts
from fakes import FakeSource
from parallel_worker import balanced, critic_config, set_constants, weights_of
from reporting.timeline import Timeline
from runtime.world import World
from sample import Sample
from scheduling.balance import flat

LAYOUTS = {"save": (2, {}), "dp2": (2, {}), "tp2": (2, {"tp": 2})}  # name -> ranks, sizes


class Rewards:
    """As much of the real ones as a checkpoint looks at: what one judge was read from."""

    parsed = 0

    def counts(self):
        return self.parsed

    def load_counts(self, counts):
        self.parsed = sum(counts)


def controller_of(world: World, actor, critic, notes: list) -> SimpleNamespace:
    """As much of a Controller as a checkpoint looks at."""
    holders = placement.colocate(tuple(range(world.size)), actor.config)
    plans = placement.full_colocation(holders, actor.config)
    held = dict(actor=actor, critics=[critic], plans=plans, next=plans[0], serves=True)
    held["switch"] = lambda plan: None
    held["give_device_to"] = AsyncMock()  # there is only a CPU
    return SimpleNamespace(
        config=replace(actor.config, save_every=2, save_hf_every=2, keep=2),
        world=world,
        team=world,
        ahead=None,
        placement=SimpleNamespace(**held),
        rewards=Rewards(),
        prompts=Prompts(FakeSource(), 4, keeps_groups=True),
        timeline=Timeline(world.rank, asyncio.get_running_loop().time),
        state=State(),
        report=SimpleNamespace(note=notes.append),
    )


def learn(critic, batch: list) -> dict[str, float]:
    """An update of the critic on returns that follow from the tokens. Returns its metrics."""
    mini_batches = balanced(batch, critic)
    critic.compute_values(mini_batches)
    for sample in flat(mini_batches):
        sample.returns = {critic.name: [token / 64 for token in sample.response]}
    return critic.update(mini_batches)


async def save(world: World, actor, critic, batches: list, out: Path) -> dict:
    """Two updates, a save, and another update while it is being written: nothing of that may get into it."""
    notes = []
    c = controller_of(world, actor, critic, notes)
    checkpoints = c.checkpoints = Checkpoints(c.config, world, out)
    for batch in batches[:2]:
        actor.update(balanced(batch, actor))
        learn(critic, batch)
    c.state.step = 2
    c.rewards.parsed = 5 + world.rank
    torch.manual_seed(world.rank + 100)
    carry_answers(c.prompts, actor)
    await checkpoints.save(c)
    random = torch.rand(3)
    metrics = actor.update(balanced(batches[2], actor)) | learn(critic, batches[2])
    await checkpoints.finish(c, wait=True)
    assert not notes, notes
    await checkpoints.save_now(c)  # which has nothing to do
    assert checkpoints.newest == 2
    weights = {"weights": weights_of(actor), "critic": weights_of(critic)}
    return weights | {"metrics": metrics, "random": random}


def carry_answers(prompts: Prompts, actor) -> None:
    """Draw prompts that come again, as far as they were answered."""
    drawn = prompts.draw(9)
    owners = prompts.assign_owners(drawn, actor.dp_size)
    mine = [each for each in drawn if owners[each] == actor.dp_rank and actor.is_head]
    groups = [prompts.group(prompt_id) for prompt_id in mine]
    for sample in flat([groups]):
        sample.response, sample.logprobs = [sample.prompt_id], [-sample.prompt_id / 3]
        sample.versions = [1]
        sample.media = ()  # as rollout.collect leaves it
    prompts.requeue(drawn, groups)


async def go_on(world: World, actor, critic, batches: list, out: Path) -> dict:
    """The update that follows the checkpoint."""
    c = controller_of(world, actor, critic, [])
    await restore(c, out / "checkpoints" / "step_2")
    random = torch.rand(3)
    metrics = actor.update(balanced(batches[2], actor)) | learn(critic, batches[2])
    groups = c.prompts.groups.values()
    answers = [sample for group in groups for sample in group]
    held = {s.prompt_id: (s.response, s.logprobs, s.versions, world.rank) for s in answers}
    assert critic.version == actor.version
    facts = {"version": actor.version, "step": c.state.step, "prompts": c.prompts.state()}
    facts |= {"parsed": c.rewards.parsed, "critic": weights_of(critic), "random": random}
    everyone = await world.gather(held)
    return facts | {"metrics": metrics, "weights": weights_of(actor), "held": everyone}


def rank_main(rank: int, size: int, case: dict, out: str, name: str) -> None:
    from actor import Actor
    from critic import Critic

    store, timeout = f"file://{out}/{name}.store", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store, timeout=timeout, rank=rank, world_size=size)
    _, layout = LAYOUTS[name]
    config, world = critic_config(**layout), World("cpu", 60.0)
    actor, critic = Actor(config, case["model_dir"]), Critic(config, case["model_dir"])
    work = save if name == "save" else go_on
    batches = [[Sample(**sample) for sample in batch] for batch in case["batches"]]
    result = asyncio.run(work(world, actor, critic, batches, Path(out)))
    torch.save(result, f"{out}/{name}.{rank}")
    world.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    import actor  # noqa: F401  before the fork
    import critic  # noqa: F401

    set_constants()
    torch.set_num_threads(1)
    case = torch.load(sys.argv[1])
    for name in sys.argv[3:]:
        size, _ = LAYOUTS[name]
        how = dict(nprocs=size, start_method="fork")
        mp.start_processes(rank_main, (size, case, sys.argv[2], name), **how)
