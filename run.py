"""nanoYATT: RLHF with parallel controllers, Megatron-Core and SGLang, on one machine or many, with or without GPUs.

    torchrun --nproc-per-node 2 run.py --mode partial                    the demo: addition, judged by a generative reward model
    torchrun --nproc-per-node 2 run.py --mode full --seed 1 --steps 60   every setting is --name value
    torchrun --nproc-per-node 8 run.py --model DIR --judge DIR --data prompts.jsonl    your own models and prompts
    torchrun --nproc-per-node 2 run.py --dry-run [--name value ...]      says what would run where, and starts nothing
    torchrun --nproc-per-node 2 run.py sft|rm|dpo --model DIR --data FILE   learns from examples instead: see preference.py
    python run.py eval --model DIR --data FILE                           greedy accuracy and pass@k: see evaluation.py
    python run.py check [--name value ...]                               says what is installed and whether ports, disk and memory do
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import secrets
import shlex
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import algorithms
import controller
import data
import genrm
import placement
import resume
import rewards
from checkpoint import Checkpoints, restore
from commands import replay
from config import Config, as_text, check_batch, dashed, parse_config, printable
from engines import orphans
from engines.pool import Pool
from runtime import rendezvous, shutdown
from scheduling.dynamic_sampling import Groups
from training import ptx


def describe(config: Config, plans: list[placement.Plan], world_size: int) -> str:
    """The resolved truth, printed once."""
    dp = world_size // (config.tp * config.pp * config.cp)
    samples = config.prompts_per_step * config.answers_per_prompt
    fields = dataclasses.fields(Config)
    model, judge = config.model or "the demo's", as_text(config.judge) or ("the demo's" if config.judges else "none")
    resolved_settings = {f.name: as_text(value) for f in fields if (value := dataclasses.asdict(config)[f.name]) != f.default}
    return (
        f"nanoYATT: {config.mode} colocation on {world_size} ranks: {plans[0]}\n"
        f"  model {model}\n  judge {judge}\n  data  {config.data or 'built-in addition task'}\n"
        f"  {config.steps} steps of {samples} samples ({config.prompts_per_step} prompts x {config.answers_per_prompt} answers), "
        f"{samples // dp} for each of {dp} data-parallel ranks (tp {config.tp}, pp {config.pp}, cp {config.cp}), "
        f"packed into micro-batches of up to {config.max_tokens_per_micro_batch} tokens\n"
        f"  settings other than the defaults: {' '.join(f'--{dashed(name)} {value}' for name, value in resolved_settings.items())}"
    )


# ---------------------------------------------------------------- one rank's program


async def run(config: Config, plans: list[placement.Plan], stop: shutdown.Stop) -> tuple[int, str]:
    """Bring the parts up, train, and end every process that was started (collective: every rank).

    Returns the signal that stopped it before the asked steps were done, 0 if none did, and what to say then.
    """
    engines, pools = [], []
    async with joined(config) as (world, progress):
        try:
            loop, job = await prepare_job(config, plans, world, progress, engines)
            pools += (job.rollout, job.genrm)
            job.stop, stop.gently = stop, True
            stopped = await loop(job)
            stop.gently = False
            await world.barrier()
            return stopped, how_to_go_on(job) if stopped else conclude(job, progress)
        finally:
            progress.close()
            for pool in pools:
                pool.close()
            await asyncio.gather(*(engine.close() for engine in engines))


@contextlib.asynccontextmanager
async def joined(config: Config):
    """The World of all ranks and the progress bar, while they are together (collective)."""
    from reporting.metrics import Progress

    # off the event loop, which must hear signals while ranks wait; not asyncio.to_thread, whose threads are waited for at the end
    world = await asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1), join_ranks, config)
    world.enter_device()
    progress = Progress(config.steps, world.rank == 0)
    ticking = asyncio.create_task(progress.tick())
    try:
        yield world, progress
    finally:
        ticking.cancel()
        progress.close()
        world.close()
        rendezvous.close()


async def prepare_job(config: Config, plans: list[placement.Plan], world, progress, engines: list):
    """The loop that is asked for, and the job that it runs on (collective). What can be wrong is found before anything is started."""
    if not config.model:
        from recipes.addition import warmstart

        model, judge = await warmstart.prepare(config, world, progress)
        config = dataclasses.replace(config, model=str(model), judge=(str(judge),))
    inputs = await world.run(load_prompts, config)
    loop = await world.run(replay.choose, config)
    await together(world, end_orphans, config, world.rank, progress)
    out, found = await prepare_out(config, world, progress.line)
    return loop, await build(config, plans, world, out, found, inputs, progress, engines)


async def learn(config: Config, stop: shutdown.Stop) -> tuple[int, str]:
    """sft, rm, dpo: the same from examples, without engines (collective: every rank). It isn't gone on with: it starts anew."""
    from commands import finetune
    from recipes.addition import warmstart

    async with joined(config) as (world, progress):
        if not config.model:
            model, _ = await warmstart.prepare(config, world, progress)
            config = dataclasses.replace(config, model=str(model))
        await together(world, finetune.prepare, config, world.rank, progress.line, resolved)
        await world.run(finetune.train, config, Path(config.out), progress, world.rank)
        await world.barrier()
    return 0, ""


def conclude(job: controller.Job, progress) -> str:
    """The asked steps are done: the pictures. What is to be said has been said."""
    config, world = job.config, job.world
    job.report.close(config.max_running_requests, f"{config.mode} colocation, {world.size} ranks, the last steps")
    progress.close()
    if world.rank == 0:
        files = ("metrics.jsonl", "samples.jsonl", "trace.json", "timeline.png", "tensorboard", "config.json", "logs", "checkpoints")
        there = [path.name + "/" * path.is_dir() for name in files if (path := Path(config.out) / name).exists()]
        print(f"wrote {config.out}/: {', '.join(there)}", flush=True)
    return ""


def how_to_go_on(job: controller.Job) -> str:
    """What a run that was stopped says at its end."""
    job.report.flush()
    launch = f"torchrun --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}"
    saved = f"go on with: {launch} {shlex.join(sys.argv)}" if job.checkpoints.newest == job.state.step else "nothing was saved"
    return f"stopped after {job.state.step} of {job.config.steps} steps; {saved}"


def join_ranks(config: Config):
    """Join the process group (collective); returns the World. gloo for controllers and CPU, nccl between GPUs."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from runtime.world import World

    torch.manual_seed(config.seed)
    cuda = torch.cuda.is_available()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu"
    if not cuda:
        torch.set_num_threads(1)  # ranks and engines share the cores: more threads a process spin on each other's
    timeout = timedelta(seconds=config.collective_timeout_s)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout, **rendezvous.meeting_point(config.host))
    return World(device, config.collective_timeout_s, rendezvous.private_folder() if rendezvous.is_local() else None)


async def end_orphans(config: Config, rank: int, progress) -> None:
    """Servers that an earlier run in the same place left behind hold ports and devices."""
    for line in orphans.end_orphans(Path(config.out)) if rank == 0 else ():
        progress.line(line)


async def prepare_out(config: Config, world, say) -> tuple[Path, resume.Found | None]:
    """The run's folder, and the checkpoint that it goes on from, as rank 0 decides (collective)."""
    out, box = Path(config.out), []

    async def decide() -> None:
        box.append(await world.run(resume.prepare, config, out, say) if world.rank == 0 else None)

    await together(world, decide)
    return out, await world.broadcast(box[0])


async def build(config: Config, plans: list[placement.Plan], world, out: Path, found, inputs, progress, engines) -> controller.Job:
    """The parts of one controller around its `inputs`, as the checkpoint `found` has them or new (collective).

    Engines that start are appended to the list `engines`.
    """
    from engines.engine import Sampling
    from reporting.metrics import Report
    from reporting.timeline import Timeline

    actor_tokenizer, judge_tokenizers, prompts, texts = inputs
    progress.doing("starting engines")
    key = await world.broadcast(secrets.token_hex(32))  # rank 0's: what the servers of this run want to see
    await together(world, launch_engines, config, [] if config.train_only else plans, world.rank, out, engines, key)
    if world.rank == 0:
        (out / "config.json").write_text(json.dumps(resolved(config), indent=1) + "\n")
    progress.line(describe(config, plans, world.size))
    actor, models = await world.run(build_trainers, config, texts)
    await together(world, ready, engines, config.engine_timeout_s)

    def on_open(name: str, step: int) -> None:
        world.doing(f"{name} of step {step + 1}")
        progress.phase(name, step)

    timeline = Timeline(world.rank, asyncio.get_running_loop().time, out / "spans", on_open)
    pools = await connect(engines, config, world, timeline)
    sampling = Sampling(config.temperature, config.max_new_tokens, data.stop_tokens(config.model, actor_tokenizer))
    decode = functools.partial(data.decode, actor_tokenizer)
    judge = build_judge(config, judge_tokenizers, decode)
    models["rules"] = rewards.build(config, judge, decode)
    greedy = dataclasses.replace(sampling, temperature=0.0)
    groups = Groups(prompts, config.answers_per_prompt, config.partial_rollout, algorithms.get_algorithm(config.algorithm).greedy)
    report = Report(config, world, out, progress, decode, found)
    checkpoints = Checkpoints(config, world, out, found and found.step)
    outside = (prompts, groups, sampling, greedy, timeline, report, checkpoints)
    job = controller.Job(config, world, plans, plans[0], actor, pools["rollout"], pools["genrm"], judge, *outside, **models)
    if found:
        await restore(job, found.folder)
    await world.barrier()
    timeline.start(found.ended_s if found else 0.0)
    return job


def build_judge(config: Config, tokenizers: list, decode_response) -> genrm.Judge:
    """The judges, each with its own tokenizer, stop tokens and format."""
    from engines.engine import Sampling

    models, formats = [], [genrm.FORMATS[name] for name in config.judge_format]
    each = zip(config.judge, tokenizers, formats[: config.judges], config.judge_weights, config.judge_signal, strict=True)
    for model_dir, tokenizer, judge_format, weight, of in each:
        most = config.judge_max_new_tokens
        encode, most = (data.encode_exchange, 1) if judge_format.scores else (data.encode, most)
        sampling = Sampling(config.judge_temperature, most, data.stop_tokens(model_dir, tokenizer))
        into, back = functools.partial(encode, tokenizer), functools.partial(data.decode, tokenizer)
        models.append(genrm.JudgeModel(judge_format, into, back, sampling, config.max_model_len - most, weight, of))
    how = (config.judgements, config.judge_vote, config.judge_timeout_s, config.judge_retries, config.judge_calls_at_once)
    calls = genrm.Calls(*how, config.seed)
    return genrm.Judge(models, decode_response, calls, formats[0])


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


async def launch_engines(config: Config, plans: list[placement.Plan], rank: int, out: Path, engines: list, key: str) -> None:
    """Start the servers that any of the plans has on this rank, all at once, without waiting."""
    for port, role, models in ((0, "rollout", (config.model,)), (1, "genrm", config.judge)):
        if any(rank in plan.leads(role) for plan in plans):
            log, model = out / "logs" / f"{role}-{rank}.log", placement.judge_of(rank, config.genrm_tp, len(models))
            kind = engine_class(config, role, model)
            engines.append(kind.launch(role, rank, config.port + 2 * rank + port, models[model], config, str(log), model, key))


def engine_class(config: Config, role: str, model: int) -> type:
    """Which kind of server model number `model` of a role has."""
    from engines.engine import Engine
    from engines.reward_model import ScoringEngine

    return ScoringEngine if role == "genrm" and genrm.FORMATS[config.judge_format[model]].scores else Engine


async def ready(engines: list, deadline_s: float) -> None:
    """Wait until this rank's servers answer."""
    await asyncio.gather(*(engine.ready(deadline_s) for engine in engines))


async def connect(engines: list, config: Config, world, timeline) -> dict[str, Pool]:
    """A handle on every engine of the run, by role (collective). Handles on other ranks' engines are appended to `engines`."""
    own = {(engine.role, engine.rank): engine for engine in engines}
    addresses = await world.gather([(e.role, e.rank, e.url, e.capacity, e.model, e.key) for e in engines])
    addresses = [address for here in addresses for address in here if address[:2] not in own]
    remote = [engine_class(config, address[0], address[4])(*address) for address in addresses]
    engines += remote
    fleet = sorted((*own.values(), *remote), key=lambda engine: engine.rank)
    return {role: Pool([e for e in fleet if e.role == role], world, timeline, config.engine_timeout_s) for role in ("rollout", "genrm")}


def load_prompts(config: Config):
    """The actor's tokenizer, the judges', the prompts, and the texts of the pretraining term."""
    load = functools.partial(data.load_tokenizer, trust_remote_code=config.trust_remote_code)
    actor_tokenizer, judge_tokenizers = load(config.model), [load(judge) for judge in config.judge]
    encode = functools.partial(data.encode, actor_tokenizer)
    if config.data:
        room = config.max_model_len - config.max_new_tokens
        source = data.PromptFile(Path(config.data), encode, config.seed, config.eval_prompts, room)
    else:
        source = data.Addition(config.seed, encode)
    texts = ptx.read_texts(Path(config.ptx_data), actor_tokenizer, config.max_model_len) if config.ptx_data else []
    return actor_tokenizer, judge_tokenizers, data.Prompts(source), texts


def build_trainers(config: Config, texts: list) -> tuple:
    """The policy, and what learns or looks on beside it: {"reference": [...], "critics": [...]}, which may be empty (collective).

    To be called before a checkpoint is restored: the reference has the start weights. Imported late: megatron takes seconds, which
    the engines use to start.
    """
    from actor import Actor
    from critic import Critic
    from reference import Reference
    from training import model as models

    actor, names = Actor(config, config.model), algorithms.get_algorithm(config.algorithm).critics
    actor.texts = texts
    if config.rollout_only:
        return actor, {}
    if config.critic:
        models.check_critic(config)
    critics = [Critic(config, config.critic or config.model, name) for name in names]
    return actor, {"reference": [Reference(actor)] if config.kl_coef else [], "critics": critics}


def resolved(config: Config) -> dict:
    """Settings, versions and commit: what it takes to make the run's numbers again."""
    import subprocess
    from importlib.metadata import version

    here = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True).stdout.strip()
    packages = {name: version(name) for name in ("torch", "megatron-core", "sglang", "transformers", "numpy")}
    return dataclasses.asdict(config) | {"ranks": int(os.environ["WORLD_SIZE"]), "versions": packages, "commit": commit}


def choose(config: Config, stop: shutdown.Stop):
    """The command's program, a coroutine that returns as `run`. ValueError if it can't be on these ranks."""
    ranks = int(os.environ.get("WORLD_SIZE", "0"))
    if config.command == "eval":
        from commands import evaluate

        if ranks > 1:
            raise ValueError(f"run.py eval needs one engine, and {ranks} ranks would start one each: python run.py eval ...")
        return evaluate.run(config, stop)
    if not ranks:
        raise ValueError("start with: torchrun --nproc-per-node 2 run.py [--name value ...]")
    return run(config, check_batch(config, ranks), stop) if config.command == "rl" else learn(config, stop)


def main(arguments: list[str]) -> None:
    """One rank: exit status 0 when the asked steps are done or a stop was asked for, else 1 after one line on stderr.

    A stop that came before training or was asked for twice: 130 after Ctrl-C, 143 after SIGTERM.
    """
    shutdown.prepare()
    stop = shutdown.Stop()
    try:
        if arguments[:1] == ["check"]:
            from commands import dry_run

            sys.exit(dry_run.check(parse_config(arguments[1:], __doc__)))
        config = parse_config(arguments, __doc__)
        if config.dry_run:
            from commands import dry_run

            return dry_run.dry_run(config)
        stopped_by, line = asyncio.run(shutdown.until_told(choose(config, stop), stop))
    except ValueError as error:
        shutdown.give_up(f"error: {printable(str(error))}", 1)
    except (KeyboardInterrupt, asyncio.CancelledError):
        shutdown.leave("interrupted", 143 if stop.asked == signal.SIGTERM else 130, stop.asked)
    if stopped_by:
        shutdown.leave(line, 0, stopped_by)


if __name__ == "__main__":
    main(sys.argv[1:])
