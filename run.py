"""nanoYATT: RLHF with parallel controllers, Megatron-Core and SGLang, on one machine or many, with or without GPUs.

    torchrun --nproc-per-node 2 run.py --mode partial                    the demo: addition, judged by a generative reward model
    torchrun --nproc-per-node 2 run.py --mode full --seed 1 --steps 60   every setting is --name value
    torchrun --nproc-per-node 8 run.py --model DIR --judge DIR --data prompts.jsonl    your own models and prompts
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import os
import shlex
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import controller
import data
import exits
import genrm
import placement
from config import Config, as_text, check_batch, dashed, parse_config
from draws import Groups
from pool import Pool


def describe(config: Config, plans: list[placement.Plan], world_size: int) -> str:
    """The resolved truth, printed once."""
    dp = world_size // (config.tp * config.pp * config.cp)
    samples = config.prompts_per_step * config.answers_per_prompt
    fields = dataclasses.fields(Config)
    resolved_settings = {f.name: as_text(value) for f in fields if (value := dataclasses.asdict(config)[f.name]) != f.default}
    return (
        f"nanoYATT: {config.mode} colocation on {world_size} ranks: {plans[0]}\n"
        f"  model {config.model}\n  judge {as_text(config.judge)}\n  data  {config.data or 'built-in addition task'}\n"
        f"  {config.steps} steps of {samples} samples ({config.prompts_per_step} prompts x {config.answers_per_prompt} answers), "
        f"{samples // dp} for each of {dp} data-parallel ranks (tp {config.tp}, pp {config.pp}, cp {config.cp}), "
        f"packed into micro-batches of up to {config.max_tokens_per_micro_batch} tokens\n"
        f"  settings other than the defaults: {' '.join(f'--{dashed(name)} {value}' for name, value in resolved_settings.items())}"
    )


# ---------------------------------------------------------------- one rank's program


async def run(config: Config, plans: list[placement.Plan], stop: exits.Stop) -> tuple[int, str]:
    """Bring the parts up, train, and end every process that was started (collective: every rank).

    Returns the signal that stopped it before the asked steps were done, 0 if none did, and what to say then.
    """
    from report import Progress

    # off the event loop, which must hear signals while ranks wait; not asyncio.to_thread, whose threads are waited for at the end
    world = await asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1), join_ranks, config)
    world.enter_device()
    progress = Progress(config.steps, world.rank == 0)
    engines, pools = [], []
    ticking = asyncio.create_task(progress.tick())
    try:
        if not config.model:
            import warmstart

            model, judge = await warmstart.prepare(config, world, progress)
            config = dataclasses.replace(config, model=str(model), judge=(str(judge),))
        inputs = await world.run(load_prompts, config)  # checked before anything is moved or started
        out = await world.run(prepare_out, config, world)
        job = await build(config, plans, world, out, inputs, progress, engines)
        pools += (job.rollout, job.genrm)
        job.stop, stop.gently = stop, True
        stopped = await controller.train(job)
        stop.gently = False
        await world.barrier()
        return stopped, how_to_go_on(job) if stopped else conclude(job, progress)
    finally:
        ticking.cancel()
        progress.close()
        for pool in pools:
            pool.close()
        await asyncio.gather(*(engine.close() for engine in engines))
        world.close()


def conclude(job: controller.Job, progress) -> str:
    """The asked steps are done: the pictures. What is to be said has been said."""
    config, world = job.config, job.world
    job.report.close(config.max_running_requests, f"{config.mode} colocation, {world.size} ranks, the last steps")
    progress.close()
    if world.rank == 0:
        files = "metrics.jsonl, samples.jsonl, trace.json, timeline.png, tensorboard/, config.json, logs/"
        print(f"wrote {config.out}/: {files}", flush=True)
    return ""


def how_to_go_on(job: controller.Job) -> str:
    """What a run that was stopped says at its end."""
    job.report.flush()
    launch = f"torchrun --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}"
    saved = f"go on with: {launch} {shlex.join(sys.argv)}" if job.checkpoints is not None else "nothing was saved"
    return f"stopped after {job.state.step} of {job.config.steps} steps; {saved}"


def join_ranks(config: Config):
    """Join the process group (collective); returns the World. gloo for controllers and CPU, nccl between GPUs."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from world import World

    torch.manual_seed(config.seed)
    cuda = torch.cuda.is_available()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu"
    if not cuda:
        torch.set_num_threads(1)  # ranks and engines share the cores: more threads a process spin on each other's
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=config.collective_timeout_s))
    return World(device, config.collective_timeout_s)


def prepare_out(config: Config, world) -> Path:
    """The run's folder, empty; what an earlier run left there is moved aside, not overwritten (collective)."""
    import torch.distributed as dist

    out = Path(config.out)
    if world.rank == 0:
        if (out / "metrics.jsonl").exists():
            aside = next(path for i in range(1, 10**6) if not (path := out.with_name(f"{out.name}-{i}")).exists())
            out.rename(aside)
            print(f"moved the earlier run in {out} to {aside}", flush=True)
        (out / "spans").mkdir(parents=True, exist_ok=True)
        (out / "logs").mkdir(exist_ok=True)
    dist.barrier()
    return out


async def build(config: Config, plans: list[placement.Plan], world, out: Path, inputs, progress, engines: list) -> controller.Job:
    """The parts of one controller around its `inputs` (collective). Engines that start are appended to `engines`."""
    from report import Report
    from rollout import Sampling
    from timeline import Timeline

    actor_tokenizer, judge_tokenizers, prompts = inputs
    progress.doing("starting engines")
    await together(world, launch_engines, config, plans, world.rank, out, engines)
    if world.rank == 0:
        (out / "config.json").write_text(json.dumps(resolved(config), indent=1) + "\n")
    progress.line(describe(config, plans, world.size))
    actor = await world.run(build_actor, config)
    await together(world, ready, engines, config.engine_timeout_s)

    def on_open(name: str, step: int) -> None:
        world.phase = f"{name} of step {step + 1}"
        progress.phase(name, step)

    timeline = Timeline(world.rank, asyncio.get_running_loop().time, out / "spans", on_open)
    pools = await connect(engines, world, timeline, config.engine_timeout_s)
    sampling = Sampling(config.temperature, config.max_new_tokens, data.stop_tokens(config.model, actor_tokenizer))
    decode = functools.partial(data.decode, actor_tokenizer)
    judge = build_judge(config, judge_tokenizers, decode)
    report = Report(config, world, out, progress, decode)
    greedy = dataclasses.replace(sampling, temperature=0.0)
    await world.barrier()
    timeline.start()
    groups = Groups(prompts, config.answers_per_prompt, config.partial_rollout)
    roles = (actor, pools["rollout"], pools["genrm"], judge)
    return controller.Job(config, world, plans, plans[0], *roles, prompts, groups, sampling, greedy, timeline, report)


def build_judge(config: Config, tokenizers: list, decode_response) -> genrm.Judge:
    """The judges, each with its own tokenizer, stop tokens and format."""
    from rollout import Sampling

    models = [
        genrm.JudgeModel(
            genrm.FORMATS[judge_format],
            functools.partial(data.encode, tokenizer),
            functools.partial(data.decode, tokenizer),
            Sampling(config.judge_temperature, config.judge_max_new_tokens, data.stop_tokens(model_dir, tokenizer)),
            config.max_model_len - config.judge_max_new_tokens,
            weight,
        )
        for model_dir, tokenizer, judge_format, weight in zip(
            config.judge, tokenizers, config.judge_format, config.judge_weights, strict=True
        )
    ]
    how = (config.judgements, config.judge_vote, config.judge_timeout_s, config.judge_retries, config.judge_calls_at_once)
    calls = genrm.Calls(*how, config.seed)
    return genrm.Judge(models, decode_response, calls)


async def together(world, function, *args) -> None:
    """Await a step in which one rank alone may meet a user's error; then every rank raises it (collective), and none waits in vain."""
    error = None
    try:
        await function(*args)
    except ValueError as caught:
        error = str(caught)
    errors = [e for e in await world.gather(error) if e]
    if errors:
        raise ValueError(errors[0])


async def launch_engines(config: Config, plans: list[placement.Plan], rank: int, out: Path, engines: list) -> None:
    """Start the servers that any of the plans has on this rank, all at once, without waiting."""
    from rollout import Engine

    judge = placement.judge_of(rank, config.genrm_tp, len(config.judge))
    for port, role, model, model_dir in ((0, "rollout", 0, config.model), (1, "genrm", judge, config.judge[judge])):
        if any(rank in plan.leads(role) for plan in plans):
            log = out / "logs" / f"{role}-{rank}.log"
            engines.append(Engine.launch(role, rank, config.port + 2 * rank + port, model_dir, config, str(log), model))


async def ready(engines: list, deadline_s: float) -> None:
    """Wait until this rank's servers answer."""
    await asyncio.gather(*(engine.ready(deadline_s) for engine in engines))


async def connect(engines: list, world, timeline, deadline_s: float) -> dict[str, Pool]:
    """A handle on every engine of the run, by role (collective). Handles on other ranks' engines are appended to `engines`."""
    from rollout import Engine

    own = {(engine.role, engine.rank): engine for engine in engines}
    addresses = await world.gather([(e.role, e.rank, e.url, e.capacity, e.model) for e in engines])
    remote = [Engine(*address) for here in addresses for address in here if address[:2] not in own]
    engines += remote
    fleet = sorted((*own.values(), *remote), key=lambda engine: engine.rank)
    return {role: Pool([e for e in fleet if e.role == role], world, timeline, deadline_s) for role in ("rollout", "genrm")}


def load_prompts(config: Config):
    """The actor's tokenizer, the judges', and the prompts."""
    actor_tokenizer, judge_tokenizers = data.load_tokenizer(config.model), [data.load_tokenizer(judge) for judge in config.judge]
    encode = functools.partial(data.encode, actor_tokenizer)
    if config.data:
        room = config.max_model_len - config.max_new_tokens
        source = data.PromptFile(Path(config.data), encode, config.seed, config.eval_prompts, room)
    else:
        source = data.Addition(config.seed, encode)
    return actor_tokenizer, judge_tokenizers, data.Prompts(source)


def build_actor(config: Config):
    """The policy (collective). Imported late: megatron takes seconds, which the engines use to start."""
    from actor import Actor

    return Actor(config, config.model)


def resolved(config: Config) -> dict:
    """Settings, versions and commit: what it takes to make the run's numbers again."""
    import subprocess
    from importlib.metadata import version

    here = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True).stdout.strip()
    packages = {name: version(name) for name in ("torch", "megatron-core", "sglang", "transformers", "numpy")}
    return dataclasses.asdict(config) | {"ranks": int(os.environ["WORLD_SIZE"]), "versions": packages, "commit": commit}


def main(arguments: list[str]) -> None:
    """One rank: exit status 0 when the asked steps are done or a stop was asked for, else 1 after one line on stderr.

    A stop that came before training or was asked for twice: 130 after Ctrl-C, 143 after SIGTERM.
    """
    exits.prepare()
    stop = exits.Stop()
    try:
        config = parse_config(arguments, __doc__)
        if "RANK" not in os.environ:
            raise ValueError("start with: torchrun --nproc-per-node 2 run.py [--name value ...]")
        plans = check_batch(config, int(os.environ["WORLD_SIZE"]))
        stopped_by, line = asyncio.run(exits.until_told(run(config, plans, stop), stop))
    except ValueError as error:
        exits.give_up(f"error: {error}", 1)
    except (KeyboardInterrupt, asyncio.CancelledError):
        exits.leave("interrupted", 143 if stop.asked == signal.SIGTERM else 130, stop.asked)
    if stopped_by:
        exits.leave(line, 0, stopped_by)


if __name__ == "__main__":
    main(sys.argv[1:])
