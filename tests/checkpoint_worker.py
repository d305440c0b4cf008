"""What test_checkpoint.py starts as a process of its own: two ranks save, then other layouts go on from what they saved.

Usage: checkpoint_worker.py case.pt OUT. The case holds a model directory and three batches; OUT gets the checkpoint and a file for
each layout with the metrics of the update that follows and the weights after it. Ranks are forked after the imports.
"""

import asyncio
import datetime
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from critic_worker import critic_config
from fakes import FakeSource
from parallel_worker import balanced

import placement
from checkpoint import Checkpoints, restore
from controller import State
from data import Prompts
from reporting.timeline import Timeline
from runtime.world import World
from sample import Sample
from scheduling.balance import flat
from scheduling.dynamic_sampling import Groups

SAVES = {"save": (2, {}, "."), "save_tp2_pp2": (4, {"tp": 2, "pp": 2}, "tp2_pp2"), "save_tp2_dp2": (4, {"tp": 2}, "tp2_dp2")}
LAYOUTS = {  # name -> ranks, sizes, where the checkpoint is that it goes on from
    "dp2": (2, {}, "."), "tp2": (2, {"tp": 2}, "."), "pp2": (2, {"pp": 2}, "."), "dp1": (1, {}, "."), "dp4": (4, {}, "."),
    "tp2_dp2": (4, {"tp": 2}, "."), "dp1_of_tp2_pp2": (1, {}, "tp2_pp2"), "dp2_of_tp2_dp2": (2, {}, "tp2_dp2"),
}  # fmt: skip


def job_of(world: World, actor, critic, notes: list) -> SimpleNamespace:
    """As much of a Job as a checkpoint looks at."""
    config = SimpleNamespace(**vars(actor.config), save_every=2, save_hf_every=2, keep=2, collective_timeout_s=600.0)
    prompts, plans = Prompts(FakeSource()), placement.full_colocation(world.size, 1, 1)
    judge = SimpleNamespace(failed=[0], parsed=[0])
    timeline = Timeline(world.rank, asyncio.get_running_loop().time)
    parts = dict(config=config, world=world, actor=actor, critics=[critic], prompts=prompts, plans=plans, plan=plans[0], judge=judge)
    report = SimpleNamespace(note=notes.append)
    return SimpleNamespace(**parts, groups=Groups(prompts, 4, True), timeline=timeline, state=State(), report=report)


def weights_of(actor) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in actor.named_weights()}


def learn(critic, batch: list) -> dict[str, float]:
    """An update of the critic on returns that follow from the tokens. Returns its metrics."""
    mini_batches = balanced(batch, critic)
    critic.appraise(mini_batches)
    for sample in flat(mini_batches):
        sample.returns = {critic.name: [token / 64 for token in sample.response]}
    return critic.update(mini_batches)


async def save(world: World, actor, critic, batches: list, out: Path) -> dict:
    """Two updates, a save, and another update while it is being written: none of that may get into the checkpoint."""
    notes = []
    job = job_of(world, actor, critic, notes)
    checkpoints = Checkpoints(job.config, world, out)
    for batch in batches[:2]:
        actor.update(balanced(batch, actor))
        learn(critic, batch)
    saved, saved_critic, job.state.step = weights_of(actor), weights_of(critic), 2
    job.judge.parsed[0] = 5 + world.rank
    torch.manual_seed(world.rank + 100)
    draws = job.prompts.take(9)
    owners = job.groups.deal(draws, actor.dp_size)
    carried = [job.groups.take(draw) for draw in draws if owners[draw] == actor.dp_rank and actor.is_head]
    for sample in [sample for group in carried for sample in group]:
        sample.response, sample.logprobs, sample.versions = [sample.prompt_id], [-sample.prompt_id / 3], [1]
    job.groups.put_back(draws, carried)
    await checkpoints.save(job)
    random = torch.rand(3)
    metrics = actor.update(balanced(batches[2], actor)) | learn(critic, batches[2])
    await checkpoints.finish(job, wait=True)
    assert not notes, notes
    assert await checkpoints.save_now(job), "saved already"
    (span,) = job.timeline.spans
    weights = {"weights": weights_of(actor), "critic": weights_of(critic), "saved_critic": saved_critic}
    return weights | {"metrics": metrics, "saved": saved, "random": random, "save_s": span.end - span.start}


async def go_on(world: World, actor, critic, batches: list, out: Path) -> dict:
    """The update that follows the checkpoint."""
    job = job_of(world, actor, critic, [])
    await restore(job, out / "checkpoints" / "step_2")
    random = torch.rand(3)
    metrics = actor.update(balanced(batches[2], actor)) | learn(critic, batches[2])
    held = {s.prompt_id: (s.response, s.logprobs, s.versions, actor.dp_rank) for group in job.groups.carried for s in group}
    assert critic.version == actor.version
    facts = {"version": actor.version, "step": job.state.step, "prompts": job.prompts.state(), "parsed": job.judge.parsed[0]}
    facts |= {"critic": weights_of(critic)}
    everyone = await world.gather(held)
    return facts | {"metrics": metrics, "weights": weights_of(actor), "random": random, "held": everyone, "groups": job.groups.state()}


def rank_main(rank: int, size: int, case: dict, out: str, name: str) -> None:
    from actor import Actor
    from critic import Critic

    store = f"file://{out}/{name}.store"
    dist.init_process_group("gloo", store, timeout=datetime.timedelta(seconds=60), rank=rank, world_size=size)
    _, layout, place = (SAVES | LAYOUTS)[name]
    config, world = critic_config(**layout), World("cpu", 60.0)
    actor, critic = Actor(config, case["model_dir"]), Critic(config, case["model_dir"])
    work = save if name in SAVES else go_on
    batches = [[Sample(**sample) for sample in batch] for batch in case["batches"]]
    result = asyncio.run(work(world, actor, critic, batches, Path(out, place)))
    torch.save(result, f"{out}/{name}.{rank}")
    world.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    import actor  # noqa: F401  before the fork
    import critic  # noqa: F401

    torch.set_num_threads(1)
    case = torch.load(sys.argv[1])
    for name, (size, _, _) in (SAVES | LAYOUTS).items():
        mp.start_processes(rank_main, (size, case, sys.argv[2], name), nprocs=size, start_method="fork")
