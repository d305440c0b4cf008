"""nanoYATT: RLHF with parallel controllers, Megatron-Core and SGLang, on a laptop's CPU or on GPUs.

A rank is a process, with a GPU or a part of the CPU:

    torchrun --nproc-per-node 2 run.py --mode partial                 the demo: addition, judged by a model
    torchrun --nproc-per-node 8 run.py --model DIR --judge DIR --data prompts.jsonl     your own models
    torchrun --nproc-per-node 2 run.py --dry-run                      print what would run where
    WORLD_SIZE=8 python run.py --dry-run --simulate --like RUN        estimate the time of a step
    python run.py --steps 0 --model DIR --eval-data FILE              greedy accuracy and pass@k
    python run.py check                                               print what is installed and free
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import controller
import data
import evaluation
import extras
import modes
import rewards
from algorithms import Algorithm, algorithm_of
from config import HELD_OUT, Config, parse_config
from controller import Controller
from demo import task
from engines import server
from engines.engine import Sampling
from engines.fleet import Fleet, ServerSpec
from genrm import formats_of
from inputs import tokenization
from inputs.numbers import number_key
from inputs.prompt_file import PromptFile
from inputs.shuffled import Shuffled
from placement import CHECKS, Devices, Models
from reporting.describe import describe, run_metadata
from reporting.metrics import Report
from reporting.progress import Progress
from reporting.timeline import Timeline
from runtime import out_folder, rendezvous, shutdown
from runtime.atomic_files import writing
from runtime.devices import choose_device
from runtime.errors import RunLost, UserError, printable
from runtime.out_folder import NoSaves, held
from runtime.shutdown import Stop
from runtime.world import World, on_rank_0, raise_on_all
from scheduling.layout import Placement, Shape
from scheduling.measured import Split
from scheduling.pipeline import schedule_of

if TYPE_CHECKING:
    from checkpoint import Checkpoints
    from extras.environment.episodes import Episodes
    from training.trainer import Trainer  # imports Megatron, which takes seconds

extras.load()
REMOVED = {  # former commands of run.py, and what replaces them
    "eval": "python run.py --steps 0 --model DIR --eval-data FILE --eval-samples 8",
    "rm": "torchrun --nproc-per-node 2 examples/finetune.py rm ...",
    "sft": "torchrun --nproc-per-node 2 examples/finetune.py sft ...",
}
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}  # one process


def start(arguments: list[str], stop: Stop) -> str:
    """Do what the command line asks for. Returns the last line to print if the run was stopped."""
    for word in REMOVED.keys() & {*arguments[:1]}:
        raise UserError(f"{word} is now: {REMOVED[word]}")
    is_first = os.environ.get("RANK", "0") == "0"
    if arguments[:1] == ["check"]:
        extras.need("dry run", "check")
        from extras.dry_run import check

        sys.exit(check(parse_config(arguments[1:], __doc__)))
    if "--simulate" in arguments:
        extras.need("dry run", "--simulate")
        if is_first:
            from extras.dry_run import simulate

            simulate(arguments)
        return ""
    config = parse_config(arguments, __doc__)
    if config.evaluates and not {*ALONE} & os.environ.keys():
        os.environ |= ALONE
    ranks = launched("WORLD_SIZE")
    on_machine = launched("LOCAL_WORLD_SIZE")
    placement, splits = check_settings(config, ranks or 2, on_machine)
    if config.dry_run:
        if is_first:
            from extras.dry_run import dry_run

            check_directories(config, placement)
            config = resolved(config)
            load_inputs(config, rewards.load_rules(config), print)
            dry_run(config, placement, splits)
        return ""
    choose_device(config)
    check_launcher("run.py [--name value ...]")
    return shutdown.run(run(config, placement, splits, stop), stop)


def launched(variable: str) -> int:
    """Return a count that torchrun sets, or 0 without it. Raises UserError if it isn't a number."""
    text = os.environ.get(variable, "0")
    if not text.isdigit():
        raise UserError(f"{variable}={text} in the environment is not a number: unset it")
    return int(text)


def check_launcher(command: str) -> None:
    """Raise UserError if torchrun's variables are missing. A cluster may have set some of them."""
    given = [name for name in ALONE if name in os.environ]
    if len(given) < len(ALONE):
        others = f", which sets more than {' and '.join(given)}" if given else ""
        raise UserError(f"start with: torchrun --nproc-per-node 2 {command}{others}")


def main(arguments: list[str], start: Callable[[list[str], Stop], str] = start) -> None:
    """Run a rank, and end this process. start: does what the command line asks for.

    Status 0: done or stopped; 1: an engine or the disk failed; 2: user error; 128 or more: by a signal.
    """
    shutdown.prepare()
    stop = Stop()
    try:
        last_line = start(arguments, stop)
    except UserError as error:
        shutdown.exit_on_error(2, f"error: {printable(str(error))}")
    except RunLost as error:
        shutdown.exit_on_error(1, f"error: {printable(str(error))}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        shutdown.exit_now(128 + (stop.asked or signal.SIGTERM), stop.reason)
    if last_line:
        shutdown.exit_now(0, last_line)
    shutdown.leave(0)


def check_settings(
    config: Config, ranks: int, on_machine: int = 0
) -> tuple[Placement, list[Split]]:
    """Check the settings against the tables and the number of ranks. Returns modes.lay_out's result."""
    algorithm = algorithm_of(config)
    formats_of(config)
    schedule_of(config)
    if algorithm.critics:
        extras.need("critics", f"--algorithm {algorithm.name}")
    if algorithm.ptx_data:
        extras.need("pretraining texts", f"--algorithm {algorithm.name} ptx_data=...")
    if config.evaluates:
        extras.need("answers", "--steps 0")
    return modes.lay_out(config, ranks, on_machine)


async def run(config: Config, placement: Placement, splits: list[Split], stop: Stop) -> str:
    """Build the parts, train or evaluate, and tear down (collective: every rank)."""
    work = evaluation.evaluate_once if config.evaluates else controller.train
    async with contextlib.AsyncExitStack() as opened:
        world, progress = await opened.enter_async_context(joined(config))
        # once on each machine: it takes almost a second
        checks_here = os.environ["LOCAL_RANK"] == "0"
        checked = (
            world.run(check_directories, config, placement) if checks_here else asyncio.sleep(0)
        )
        await raise_on_all(world, checked)
        config = await world.run(resolved, config)
        for check in CHECKS:
            check(config, placement, splits)
        if config.device == "cuda" and extras.has("memory"):
            from extras.memory import check as memory

            config = await memory.settled(config, placement, splits, world)
        fleet = await opened.enter_async_context(Fleet(config, world))
        c = await build(config, placement, splits, world, progress, fleet, stop)
        if c.environment:
            opened.push_async_callback(c.environment.close)
        stopped = await fleet.while_up(work(c))
        await world.barrier()
        stop.neighbours = {}  # from here on other ranks may exit
        if stopped and config.evaluates:
            return "stopped; the same command starts over"
        if stopped:
            saved = "nothing was saved"
            if c.checkpoints.newest == c.state.step:
                saved = "the same command, without --resume, continues"
            return f"stopped after {c.state.step} of {config.steps} steps; {saved}"
        c.report.close()
        progress.line(f"wrote {config.out}/: {', '.join(sorted(os.listdir(config.out)))}")
        return ""


@contextlib.asynccontextmanager
async def joined(config: Config) -> AsyncIterator[tuple[World, Progress]]:
    """Yield the World of all ranks and the progress bar, with --out locked (collective)."""
    async with contextlib.AsyncExitStack() as opened:
        opened.callback(rendezvous.close)
        is_fast = config.device == "cpu" and extras.has("fast CPU")
        if config.command == "rl" and is_fast and os.environ["LOCAL_RANK"] == "0":
            from extras.fast_cpu import forked

            forked.start_forks()  # it imports in parallel
        # a thread lets the event loop handle signals; not to_thread, because asyncio waits for its threads
        thread = ThreadPoolExecutor(1)
        loop = asyncio.get_running_loop()
        gc.disable()  # it would take a fifth of the time, and imported modules are never freed
        await loop.run_in_executor(thread, import_module, "training.trainer")
        gc.freeze()
        gc.enable()
        world = await loop.run_in_executor(thread, rendezvous.join, config)
        opened.callback(world.close)
        world.enter_device()
        progress = Progress(config.steps, world.rank == 0)
        opened.callback(progress.close)
        opened.enter_context(world.explaining(lambda: progress.what))
        out_is_ours = held(Path(config.out), progress.line)
        lock = out_is_ours if world.rank == 0 else contextlib.nullcontext()
        await raise_on_all(world, opened.enter_async_context(lock))
        yield world, progress


async def build(
    config: Config,
    placement: Placement,
    splits: list[Split],
    world: World,
    progress: Progress,
    fleet: Fleet,
    stop: Stop,
) -> Controller:
    """Start this rank's servers, and build its controller, new or from a checkpoint (collective)."""
    out = Path(config.out)
    # first read and check everything that doesn't need engines
    inputs = await world.run(load_inputs, config, rewards.load_rules(config), progress.line)
    saves = await saves_of(config, world, progress.line)
    point = saves.point
    progress.line(describe(config, placement, splits[0]))
    progress.doing("starting engines")
    clock = asyncio.get_running_loop().time
    timeline = Timeline(world.rank, clock, out / "spans", progress.phase)
    await fleet.launch(servers_of(world.rank, config, placement, splits))
    if world.rank == 0:
        with writing(out / "config.json") as path:
            path.write_text(json.dumps(run_metadata(config), indent=1) + "\n")
    models = await world.run(build_models, config, inputs, placement, splits)  # while servers load
    await fleet.ready()
    same_duty = world.part(placement.servers)
    pools = await fleet.connect(timeline, same_duty)
    c = Controller(
        config=config,
        algorithm=inputs.algorithm,
        world=world,
        devices=Devices(config, placement, splits, models, pools, world, timeline),
        rewards=inputs.rewards,
        prompts=inputs.prompts,
        sampling=inputs.sampling,
        timeline=timeline,
        report=report_of(config, inputs)(config, world, out, progress, inputs.decode, point),
        checkpoints=saves,
        same_duty=same_duty,
        environment=inputs.environment,
        stop=stop,
    )
    await saves.restore(c)
    await stop.until_all_are_ready(world)  # from here on every rank handles a stop by itself
    timeline.start(point.ended_s if point else 0.0)
    return c


def report_of(config: Config, inputs: Inputs) -> Callable[..., Report]:
    """Return the constructor of the report: a run's or an evaluation's."""
    if not config.evaluates:
        return Report
    from extras.answers import AnswersReport

    return partial(AnswersReport, prompts=len(inputs.prompts.source.held_out))


async def saves_of(
    config: Config, world: World, say: Callable[[str], None]
) -> Checkpoints | NoSaves:
    """Prepare --out, and return the run's checkpoints (collective). Raises UserError if it can't."""
    if config.evaluates:
        from extras.answers import make_ready

        return await on_rank_0(world, make_ready, Path(config.out), say)
    if extras.has("checkpoints"):
        from checkpoint import open_checkpoints

        return await open_checkpoints(config, world, say)
    return await on_rank_0(world, out_folder.make_ready, Path(config.out), say)


def check_directories(config: Config, placement: Placement) -> None:
    """Raise UserError if a model's directory can't be used."""
    from training import model

    model.check_models(config, placement, formats_of(config))
    if config.teacher:
        from extras.teacher import check_teacher

        check_teacher(placement.reference.sized(config))


def resolved(config: Config) -> Config:
    """Return the config with settings that follow from the models' directories."""
    if not extras.has("memory"):
        return config
    from extras.memory.estimate import with_micro_batch

    return with_micro_batch(config)


class Inputs(NamedTuple):
    """The parts that are read before anything starts."""

    algorithm: Algorithm
    decode: Callable[[list[int]], str]  # the policy's tokens -> text
    prompts: data.Prompts
    rewards: rewards.Rewards
    sampling: Sampling  # how answers are sampled
    texts: list[list[int]]  # for the pretraining term
    environment: Episodes | None


def load_inputs(config: Config, rules: list[rewards.Rule], say: Callable[[str], None]) -> Inputs:
    """Read tokenizers and data. rules: from `rewards.load_rules`. Raises UserError if any can't be used."""
    algorithm = algorithm_of(config)
    longest = server.context_length(config.model, config)
    if not config.evaluates:
        longest = min(longest, config.max_tokens_per_micro_batch)
    tokenizer, *judges = tokenization.load_tokenizers(config, say)
    clips = (config.video_fps, config.video_frames)
    reader, *readers = (
        tokenization.reader_of(model, *clips) for model in (config.model, *config.judge_models)
    )
    decode = partial(tokenization.decode, tokenizer)
    room = longest - config.max_new_tokens
    if room < 1:
        of = f"leaves prompts no room in the {longest} tokens of {config.model}"
        raise UserError(f"--max-new-tokens {config.max_new_tokens} {of}")
    how = dict(tokenizer=tokenizer, max_tokens=room, say=say, reader=reader)
    stop = tokenization.stop_tokens(config.model, tokenizer, reader, say)
    environment = None
    checks = []
    if config.environment:
        from extras.environment import episodes

        environment = episodes.build(config, tokenizer, stop)
        checks.append(episodes.chat_check(environment.code.title, tokenizer, say))
        how["keeps_turns"] = True
    read = partial(PromptFile, **how, read_key=formats_of(config)[0].read_key)
    if config.data:
        source = training_rows(config, read, judges, checks)
    else:
        show = task.filmed if config.preset == "video" else task.drawn
        encode = partial(tokenization.encode_prompt, tokenizer, reader)
        source = task.Addition(config.seed, encode, reader, show)
    if config.eval_data:
        path = Path(config.eval_data)
        needs = {} if environment else {"--eval-data": str}
        source.held_out = read(path, needs=needs, setting="--eval-data", checks=checks)
    if config.eval_samples and not source.held_out:
        raise UserError("--eval-samples: no held-out prompt has an `answer`; see --eval-data")
    keeps = {"keeps_groups": config.over_dispatch > 1, "has_greedy": algorithm.greedy}
    if reader:
        keeps |= {"has_images": True, "threads": ThreadPoolExecutor(data.READERS)}
    prompts = data.Prompts(source, config.answers_per_prompt, **keeps)
    is_exact = config.answer_tokens > 0
    sampling = Sampling(config.temperature, config.max_new_tokens, stop, ignore_eos=is_exact)
    scores = rewards.build(config, rules, judges, decode, readers)
    if environment:
        scores.counted.append(environment)
    texts = []
    if algorithm.ptx_data:
        from extras import ptx

        texts = ptx.read_texts(Path(algorithm.ptx_data), tokenizer, longest)
    return Inputs(algorithm, decode, prompts, scores, sampling, texts, environment)


def training_rows(
    config: Config,
    read: Callable[..., PromptFile],
    judges: list[tokenization.Tokenizer],
    checks: list[Callable],
) -> Shuffled:
    """Read --data, and hold out some rows. Raises UserError if a row can't be used."""
    read_key = {"right": str, "number": number_key}  # for rules that compare with a row's key
    rules = read_key.keys() & {*config.rule, *config.cost_rule}
    needs = {f"the rule {rule}": read_key[rule] for rule in sorted(rules)}
    formats = zip(judges, formats_of(config), strict=False)
    checks = [*checks, *(partial(row.check, tokenizer) for tokenizer, row in formats)]
    rows = read(Path(config.data), needs=needs, checks=checks)
    return rows.shuffled(config.seed, 0 if config.eval_data else HELD_OUT)


def servers_of(
    rank: int, config: Config, placement: Placement, splits: list[Split]
) -> list[ServerSpec]:
    """Return the servers that a rank owns in any of the splits."""
    specs = []
    if any(rank in placement.leads("rollout", split) for split in splits):
        specs.append(ServerSpec("rollout", server.port_of(config, rank, "rollout"), config.model))
    if any(rank in placement.leads("genrm", split) for split in splits):
        model = placement.judge_of(rank, len(config.judge_models))
        engine = formats_of(config)[model].engine
        port = server.port_of(config, rank, "genrm")
        specs.append(ServerSpec("genrm", port, config.judge_models[model], model, engine))
    return specs


def build_models(
    config: Config, inputs: Inputs, placement: Placement, splits: list[Split]
) -> Models:
    """Build this rank's models, which are asleep; none for an evaluation (collective)."""
    if config.evaluates:
        return Models([], [])
    from actor import Actor
    from training.groups import make_groups

    groups = {}
    for shape in dict.fromkeys(placement.models):
        groups[shape] = make_groups(shape, config.timeout_s)

    def made(kind: type, shape: Shape, model: str, **how: Any) -> Trainer:
        own = shape.sized(config)
        if groups[shape] is None:
            from extras.apart.elsewhere import Elsewhere

            return Elsewhere(own, model, shape, **how)
        return kind(own, model, groups=groups[shape], **how)

    actor = made(Actor, placement.actor, config.model)
    actor.texts = inputs.texts
    actor.stop_tokens = inputs.sampling.stop_token_ids
    actor.sleep()
    references = []
    if inputs.algorithm.kl_coef and placement.actor_is_reference(config):
        references.append(actor)
    elif inputs.algorithm.kl_coef:
        model = config.teacher or config.model
        references.append(made(Actor, placement.reference, model, learns=False))
        references[0].sleep()
    critics = []
    for name in inputs.algorithm.critics:
        from extras.critic import Critic

        model = config.critic or config.model
        critics.append(made(Critic, placement.critic, model, name=name))
        critics[-1].sleep()
    engines = {rank for split in splits for rank in placement.leads("rollout", split)}
    senders = [copy[0] for copy in placement.actor.copies]
    receivers = sorted(engines - {*placement.actor.ranks})
    route = None
    if receivers:
        from extras.apart import push

        route = push.connect(senders, receivers, config.timeout_s)
    return Models([actor, *critics], references, route)


if __name__ == "__main__":
    main(sys.argv[1:])
