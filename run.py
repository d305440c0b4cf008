"""nanoYATT: RLHF with parallel controllers, Megatron-Core and SGLang, on a laptop's CPU or on GPUs.

A rank is a process, with a GPU or a part of the CPU:

    torchrun --nproc-per-node 2 run.py --mode partial                 the demo: addition, judged by a model
    torchrun --nproc-per-node 8 run.py --model DIR --judge DIR --data prompts.jsonl     your own
    torchrun --nproc-per-node 2 run.py --dry-run                      what would run where; starts nothing
    torchrun --nproc-per-node 2 run.py --dry-run --map                and which placement might be fastest
    torchrun --nproc-per-node 2 run.py sft|rm|dpo --model DIR --data FILE     learns from examples instead
    python run.py eval --model DIR --data FILE                        greedy accuracy and pass@k
    python run.py check                                               what is installed, what is free
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import controller
import data
import rewards
from algorithms import algorithm_of
from checkpoint import Checkpoints, prepare_out, restore
from commands import dry_run, evaluate, memory, replay
from config import HELD_OUT, Config, UserError, parse_config, printable
from controller import Controller
from engines import server
from engines.engine import Sampling
from engines.fleet import Fleet, ServerSpec
from genrm import formats_of
from images.reader import reader_of
from placement import Placement, Plan, judge_of, make_plans
from recipes.addition.task import Addition
from reporting.describe import describe, run_metadata
from reporting.metrics import Report
from reporting.progress import Progress
from reporting.timeline import Timeline
from runtime import rendezvous, shutdown
from runtime.devices import choose_device
from runtime.out_folder import held
from runtime.world import World, raise_on_all
from scheduling.pipeline import schedule_of

if TYPE_CHECKING:  # Megatron takes seconds to import, which the engines use to start
    from actor import Reference
    from training.trainer import Trainer


def main(arguments: list[str]) -> None:
    """One rank. Status 0: done or stopped; 2: a user's error; 130, 143: a signal too early, or a second."""
    shutdown.prepare()
    stop = shutdown.Stop()
    try:
        last_line = start(arguments, stop)
    except UserError as error:
        shutdown.exit_on_error(f"error: {printable(str(error))}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        shutdown.exit_on_signal(stop.asked or signal.SIGTERM, stop.reason)
    if last_line:
        shutdown.exit_now(0, last_line)


def start(arguments: list[str], stop: shutdown.Stop) -> str:
    """Do what the command line asks for. Returns what a run that was stopped says at its end."""
    if arguments[:1] == ["check"]:
        sys.exit(dry_run.check(parse_config(arguments[1:], __doc__)))
    # no setting
    maps, arguments = "--map" in arguments, [each for each in arguments if each != "--map"]
    config, ranks = parse_config(arguments, __doc__), int(os.environ.get("WORLD_SIZE", "0"))
    plans = check_settings(config, ranks or 2, int(os.environ.get("LOCAL_WORLD_SIZE", "0")))
    if config.dry_run:
        dry_run.dry_run(config, plans, ranks or 2, maps)
        return ""
    if maps:
        raise UserError(
            "--map belongs to --dry-run: it prints what a search finds, and starts nothing"
        )
    choose_device(config)
    if config.command == "eval":
        if ranks > 1:
            raise UserError(
                f"run.py eval needs one engine, not {ranks} ranks: python run.py eval ..."
            )
        work = evaluate.run(config)
    elif not ranks:
        raise UserError("start with: torchrun --nproc-per-node 2 run.py [--name value ...]")
    else:
        work = run(config, plans, stop) if config.command == "rl" else learn_from_examples(config)
    return asyncio.run(shutdown.run_until_signal(work, stop))


def check_settings(config: Config, ranks: int, on_machine: int = 0) -> list[Plan]:
    """What only tables and the number of ranks tell: UserError, or the plans of the loop (make_plans)."""
    if ranks % (model_parallel := config.tp * config.pp * config.cp):
        sizes = f"--tp {config.tp} x --pp {config.pp} x --cp {config.cp} = {model_parallel}"
        raise UserError(f"{sizes} doesn't divide {ranks} ranks")
    algorithm_of(config)
    formats_of(config)
    schedule_of(config)
    return make_plans(config, ranks, on_machine) if config.command == "rl" else []


async def run(config: Config, plans: list[Plan], stop: shutdown.Stop) -> str:
    """Reinforcement learning: build the parts, train, tear down (collective: every rank)."""
    if config.rollout_only or config.train_only:  # a half of the loop begins anew each time
        config = dataclasses.replace(config, save_every=0, save_hf_every=0)
    async with joined(config) as (world, progress), Fleet(config, world) as fleet:
        c = await build(config, plans, world, progress, fleet, stop)
        stopped_by = await controller.train(c)
        await world.barrier()
        stop.neighbours = {}  # who is through may leave
        if stopped_by:
            obeyed = re.escape(shlex.quote(config.resume))
            words = re.sub(f" --resume[ =]{obeyed}", "", shlex.join(sys.argv))
            launch = f"torchrun --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']} {words}"
            launch = launch if rendezvous.is_local() else "the same command on each machine"
            saved = (
                f"go on with: {launch}"
                if c.checkpoints.newest == c.state.step
                else "nothing was saved"
            )
            return f"stopped after {c.state.step} of {config.steps} steps; {saved}"
        c.report.close()
        progress.line(f"wrote {config.out}/: {', '.join(sorted(os.listdir(config.out)))}")
        if config.rollout_only:
            progress.line(
                f"to train on what was served: --train-only --replay {config.out}/replay.jsonl"
            )
        return ""


async def learn_from_examples(config: Config) -> str:
    """sft, rm, dpo: train without engines (collective: every rank)."""
    from commands import finetune

    async with joined(config) as (world, progress):
        await raise_on_all(world, finetune.prepare(config, world.rank, progress.line))
        await world.run(finetune.train, config, Path(config.out), progress, world.rank)
        await world.barrier()
    return ""


@contextlib.asynccontextmanager
async def joined(config: Config) -> AsyncIterator[tuple[World, Progress]]:
    """The World of all ranks and the progress bar, while they are together and hold --out (collective)."""
    async with contextlib.AsyncExitStack() as opened:
        opened.callback(rendezvous.close)
        # off the event loop, which hears signals meanwhile; not to_thread, whose threads are waited for
        joining = asyncio.get_running_loop().run_in_executor(
            ThreadPoolExecutor(1), rendezvous.join, config
        )
        world = await joining
        opened.callback(world.close)
        world.enter_device()
        progress = Progress(config.steps, world.rank == 0)
        opened.callback(progress.close)
        opened.callback(asyncio.create_task(progress.tick()).cancel)
        lock = (
            held(Path(config.out), progress.line) if world.rank == 0 else contextlib.nullcontext()
        )
        await raise_on_all(world, opened.enter_async_context(lock))
        yield world, progress


async def build(
    config: Config,
    plans: list[Plan],
    world: World,
    progress: Progress,
    fleet: Fleet,
    stop: shutdown.Stop,
) -> Controller:
    """This rank's controller, new or as a checkpoint has it (collective). What may be wrong comes first."""
    decode, texts, inputs = await world.run(load_inputs, config, progress.line)
    memory.check_fits(config, plans, world.size)
    point = await prepare_out(config, world, progress.line)
    progress.line(describe(config, plans, world.size))
    progress.doing("starting engines")
    await fleet.launch(servers_of(world.rank, config, plans))
    out = Path(config.out)
    if world.rank == 0:
        (out / "config.json").write_text(json.dumps(run_metadata(config), indent=1) + "\n")
    trainers, references = await world.run(build_trainers, config, texts)
    trainers[0].stop_tokens = inputs["sampling"].stop_token_ids
    await fleet.ready()

    def on_open(name: str, step: int) -> None:
        world.doing(f"{name} of step {step + 1}")
        progress.phase(name, step)

    timeline = Timeline(world.rank, asyncio.get_running_loop().time, out / "spans", on_open)
    parts = dict(config=config, algorithm=algorithm_of(config), world=world, timeline=timeline)
    c = Controller(
        placement=Placement(plans, trainers, await fleet.connect(timeline), world, timeline),
        report=Report(config, world, out, progress, decode, point),
        checkpoints=Checkpoints(config, world, out, point and point.step),
        references=references,
        stop=stop,
        **parts | inputs,
    )
    if point:
        await restore(c, point.folder)
    await stop.until_all_are_ready(world)
    timeline.start(point.ended_s if point else 0.0)
    return c


def load_inputs(config: Config, say: Callable[[str], None]) -> tuple:
    """(decode, texts of the pretraining term, fields of Controller by name): what is read before a start."""
    from training import model, ptx

    model.check_models(config)
    algorithm = algorithm_of(config)
    longest = min(server.context_length(config.model, config), config.token_budget)
    tokenizer, *judges = map(data.load_tokenizer, (config.model, *config.judge_models))
    reader, *readers = map(reader_of, (config.model, *config.judge_models))
    encode, decode = partial(data.encode_prompt, tokenizer, reader), partial(data.decode, tokenizer)
    source = Addition(config.seed, encode, reader)
    if config.data:
        room = longest - config.max_new_tokens
        rows = data.PromptFile(Path(config.data), tokenizer, room, config.skip_long, say, reader)
        source = data.Shuffled(rows, config.seed, HELD_OUT)
    stop = data.stop_tokens(config.model, tokenizer, reader, say)
    sampling = Sampling(config.temperature, config.max_new_tokens, stop)
    kept = (config.continues_answers, algorithm.greedy, reader is not None)
    prompts = data.Prompts(source, config.answers_per_prompt, *kept)
    inputs = {"prompts": prompts, "rewards": rewards.build(config, judges, decode, readers)}
    inputs |= {"sampling": sampling, "greedy": dataclasses.replace(sampling, temperature=0.0)}
    if config.rollout_only:
        inputs["learn"] = replay.record
    if config.train_only:
        inputs["collect"] = replay.Replay(Path(config.replay), config.algorithm[0]).collect
    texts = []
    if algorithm.ptx_data:
        texts = ptx.read_texts(Path(algorithm.ptx_data), tokenizer, longest)
    return decode, texts, inputs


def servers_of(rank: int, config: Config, plans: list[Plan]) -> list[ServerSpec]:
    """The servers that any of the plans has on a rank."""
    port, specs = config.port + 2 * rank, []
    if any(rank in plan.leads("rollout") for plan in plans):
        specs.append(ServerSpec("rollout", port, config.model))
    if any(rank in plan.leads("genrm") for plan in plans):
        model = judge_of(rank, config.genrm_tp, len(config.judge_models))
        scores = formats_of(config)[model].scores
        specs.append(ServerSpec("genrm", port + 1, config.judge_models[model], model, scores))
    return specs


def build_trainers(config: Config, texts: list) -> tuple[list[Trainer], list[Reference]]:
    """Actor and critics, asleep; the reference, with the weights from before a restore (collective)."""
    from actor import Actor, Reference
    from critic import Critic

    algorithm, actor = algorithm_of(config), Actor(config, config.model)
    actor.texts, trainers = texts, [actor]
    references = [Reference(actor)] if algorithm.kl_coef and not config.rollout_only else []
    actor.sleep()
    for name in () if config.rollout_only else algorithm.critics:
        trainers.append(Critic(config, config.critic or config.model, name))
        trainers[-1].sleep()
    return trainers, references


if __name__ == "__main__":
    main(sys.argv[1:])
