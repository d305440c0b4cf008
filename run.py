"""nanoYATT: RLHF with parallel controllers, Megatron-Core and SGLang, on a laptop's CPU or on GPUs.

A rank is a process, with a GPU or a part of the CPU:

    torchrun --nproc-per-node 2 run.py --mode partial                 the demo: addition, judged by a model
    torchrun --nproc-per-node 8 run.py --model DIR --judge DIR --data prompts.jsonl     your own models
    torchrun --nproc-per-node 2 run.py --dry-run                      print what would run where
    WORLD_SIZE=8 python run.py --dry-run --simulate --like RUN        estimate the time of a step
    python run.py --steps 0 --model DIR --eval-data FILE              greedy accuracy and pass@k
    python run.py check                                               show what is installed
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

sys.path.insert(0, str(Path(__file__).parent))  # as PYTHONSAFEPATH leaves it out

import build
import extras
import rewards
from build import ALONE, work_of
from config import Config, parse_config
from engines import server
from engines.fleet import Fleet
from placement import Devices
from reporting.describe import describe, run_metadata
from reporting.progress import Progress
from runtime import rendezvous, shutdown
from runtime.atomic_files import writing
from runtime.devices import choose_device
from runtime.errors import RunLost, UserError, printable
from runtime.hooks import added
from runtime.out_folder import held
from runtime.shutdown import Stop
from runtime.timeline import Timeline
from runtime.world import World, raise_on_all
from scheduling.layout import Placement
from scheduling.measured import Split
from state import Controller

extras.load()


def start(arguments: list[str], stop: Stop) -> str:
    """Do what the command line asks for. Returns the last line to print if the run was stopped."""
    for command in added("command"):  # check, --dry-run
        last_line = command(arguments, __doc__)
        if last_line is not None:
            return last_line
    config = parse_config(arguments, __doc__)
    placement, splits = build.placed(config)
    choose_device(config)
    check_launcher("run.py [--name value ...]")
    return shutdown.run(run(config, placement, splits, stop), stop)


def check_launcher(command: str) -> None:
    """Raise UserError if torchrun's variables are missing. A cluster may have set some of them."""
    missing = [name for name in ALONE if name not in os.environ]
    if missing:
        raise UserError(
            f"start with: torchrun --nproc-per-node 2 {command}, which sets {', '.join(missing)}"
        )


def main(arguments: list[str], command: Callable[[list[str], Stop], str] = start) -> None:
    """Run a rank, and end this process. command: does what the command line asks for.

    Status 0: done or stopped; 1: an engine or the disk failed; 2: user error; 128 or more: by a signal.
    """
    shutdown.prepare()
    if command is start and __name__ != "__main__":  # a file with a user's rows starts the program
        sys.excepthook = partial(shutdown.leave_with_line, main.__code__)
    stop = Stop()
    try:
        last_line = command(arguments, stop)
    except UserError as error:
        shutdown.exit_on_error(2, f"error: {printable(str(error))}")
    except RunLost as error:
        shutdown.exit_on_error(1, f"error: {printable(str(error))}")
    except (KeyboardInterrupt, asyncio.CancelledError):
        shutdown.exit_now(128 + (stop.asked or signal.SIGTERM), stop.reason)
    if last_line:
        shutdown.exit_now(0, last_line)
    shutdown.leave(0)


async def run(config: Config, placement: Placement, splits: list[Split], stop: Stop) -> str:
    """Build the parts, train or evaluate, and tear down (collective: all ranks)."""
    work = work_of(config)
    async with contextlib.AsyncExitStack() as opened:
        world, progress = await opened.enter_async_context(joined(config))
        # once on each machine: it takes almost a second
        checks_here = os.environ["LOCAL_RANK"] == "0"
        check_all = partial(world.run, build.check_directories, config, placement)
        await raise_on_all(world, check_all() if checks_here else asyncio.sleep(0))
        for check in added("run_check"):
            config = await check(config, placement, splits, world)
        fleet = await opened.enter_async_context(Fleet(config, world))
        c = await controller_of(config, placement, splits, world, progress, fleet, stop)
        opened.push_async_callback(c.environment.close)
        stopped = await fleet.while_up(work.run(c))
        await world.barrier()
        stop.neighbours = {}  # from here on other ranks may exit
        if stopped:
            return work.last_line(c)
        c.report.close()
        progress.line(f"wrote {config.out}/: {', '.join(sorted(os.listdir(config.out)))}")
        return ""


@contextlib.asynccontextmanager
async def joined(config: Config) -> AsyncIterator[tuple[World, Progress]]:
    """Yield the World of all ranks and the progress bar, with --out locked (collective: all ranks)."""
    async with contextlib.AsyncExitStack() as opened:
        opened.callback(rendezvous.close)
        if config.command == "rl" and not config.samples and os.environ["LOCAL_RANK"] == "0":
            server.kind_of(config.device).prepare()
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


async def controller_of(
    config: Config,
    placement: Placement,
    splits: list[Split],
    world: World,
    progress: Progress,
    fleet: Fleet,
    stop: Stop,
) -> Controller:
    """Start this rank's servers, and build its controller or restore it (collective: all ranks)."""
    out = Path(config.out)
    # first read and check everything that doesn't need engines
    rules = await world.run(rewards.load_rules, config)
    inputs = await world.run(build.load_inputs, config, rules, progress.line)
    work = work_of(config)
    saves = await work.open_saves(config, world, progress.line)
    point = saves.point
    held_out = len(inputs.prompts.source.held_out)
    progress.line(describe(config, placement, splits[0]))
    progress.doing("starting engines")
    clock = asyncio.get_running_loop().time
    timeline = Timeline(world.rank, clock, out / "spans", progress.phase)
    await fleet.launch(build.servers_of(world.rank, config, placement, splits))
    if world.rank == 0:
        with writing(out / "config.json") as path:
            path.write_text(json.dumps(run_metadata(config), indent=1) + "\n")
    # on a CPU while servers load; with CUDA they have loaded, and sleep
    models = await world.run(build.build_models, config, inputs, placement, splits)
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
        report=work.report(config, world, out, progress, inputs.decode, point, held_out),
        checkpoints=saves,
        same_duty=same_duty,
        environment=inputs.environment,
        stop=stop,
    )
    await saves.restore(c)
    await stop.until_all_are_ready(world)  # from here on every rank handles a stop by itself
    timeline.start(point.ended_s if point else 0.0)
    return c


if __name__ == "__main__":
    main(sys.argv[1:])
