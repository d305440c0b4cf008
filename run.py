"""nanoYATT: RLHF with parallel controllers, Megatron-Core and SGLang, on one machine or many, with or without GPUs.

    torchrun --nproc-per-node 2 run.py --mode partial                    the demo: addition, judged by a generative reward model
    torchrun --nproc-per-node 2 run.py --mode full --seed 1 --steps 60   every setting is --name value
    torchrun --nproc-per-node 8 run.py --model DIR --judge DIR --data prompts.jsonl    your own models and prompts
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import json
import math
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import algorithms
import controller
import data
import exits
import genrm
import placement

AT_LEAST_1 = ("steps", "prompts_per_step", "max_new_tokens", "judge_max_new_tokens", "max_judge_failures", "eval_every")
AT_LEAST_1 += ("tp", "pp", "cp", "max_tokens_per_micro_batch", "updates_per_step", "max_running_requests", "max_total_tokens")
AT_LEAST_0 = ("max_refill_waves", "eval_prompts", "rollout_ranks", "judge_temperature", "lr_warmup_steps", "weight_decay", "clip_low")
ABOVE_0 = ("temperature", "lr", "clip_grad", "clip_high", "max_logprob_diff", "engine_timeout_s", "collective_timeout_s")
LIMITS = {name: (1, math.inf) for name in AT_LEAST_1} | {name: (0, math.inf) for name in AT_LEAST_0}
LIMITS |= {name: (1e-12, math.inf) for name in ABOVE_0} | {name: (0, 1) for name in ("lr_decay_to", "adam_beta1", "adam_beta2")}
LIMITS |= {"answers_per_prompt": (2, math.inf), "mem_fraction": (0.05, 0.95), "port": (1024, 65000)}


@dataclass(frozen=True)
class Config:
    """Every setting. Sizes in tokens, times in seconds; the values below suit the demo."""

    # ---- what to run
    preset: str = ""  # a row of PRESETS; default: tiny
    mode: str = "partial"  # who holds the devices when: full | partial (colocation)
    algorithm: str = "grpo"  # a row of algorithms.ALGORITHMS
    out: str = ""  # what the run leaves behind goes here; default: runs/<preset>-<mode>
    steps: int = 40  # batches to train on, each for updates_per_step optimizer updates
    seed: int = 0  # of the demo's models, the order of prompts and the samplers
    # ---- models and prompts
    model: str = ""  # Hugging Face directory of the actor; default: the demo's, made on first use
    judge: str = ""  # Hugging Face directory of the generative reward model
    data: str = ""  # prompts, JSONL or Parquet; default: the built-in addition task
    judge_format: str = ""  # a row of genrm.FORMATS; default: chat with --data, addition without
    # ---- the batch
    prompts_per_step: int = 16  # groups trained on in a step
    answers_per_prompt: int = 8  # samples in a group
    max_refill_waves: int = 3  # more waves of prompts to replace groups whose rewards are all equal
    rollout_ranks: int = 0  # partial mode: ranks that serve rollout, the rest serve genrm; 0: half
    # ---- sampling
    temperature: float = 1.0  # of the answers
    max_new_tokens: int = 72  # of an answer
    judge_max_new_tokens: int = 100  # of a critique and its verdict
    judge_temperature: float = 0.0  # of the judge; 0: greedy
    max_judge_failures: int = 64  # stop when so many verdicts were unreadable and none was read
    # ---- evaluation and texts
    eval_every: int = 10  # steps between greedy evaluations on held-out prompts
    eval_prompts: int = 200  # rows of --data that are held out, at most a tenth
    # ---- the actor
    tp: int = 1  # tensor-parallel ranks
    pp: int = 1  # pipeline-parallel ranks
    cp: int = 1  # context-parallel ranks
    sp: bool = False  # sequence parallelism beside tp
    dtype: str = "float32"  # float32 | bfloat16
    max_tokens_per_micro_batch: int = 8192  # prompts and responses packed into one forward pass
    updates_per_step: int = 1  # optimizer updates on one batch of samples
    lr: float = 5e-4  # AdamW
    lr_warmup_steps: int = 5  # linear, from 0
    lr_decay_to: float = 0.1  # linear, to this part of lr at the last step
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    clip_grad: float = 1.0  # largest gradient norm
    clip_low: float = 0.2  # the ratio is clipped at 1 - clip_low ...
    clip_high: float = 0.28  # ... and 1 + clip_high (clip-higher)
    max_logprob_diff: float = 1e-3  # stop when trainer and engine disagree by more on one token; bfloat16 needs about 1
    # ---- the engines
    max_model_len: int = 256  # context of an engine, prompt and answer
    max_running_requests: int = 128  # answers that one engine decodes at once
    max_total_tokens: int = 32768  # tokens in an engine's KV cache
    mem_fraction: float = 0.7  # CUDA: part of the device that an awake engine may hold
    port: int = 30000  # rank r's rollout engine listens on port + 2 r, its genrm engine on the next
    engine_timeout_s: float = 300.0  # for an engine to come up
    collective_timeout_s: float = 600.0  # for the slowest controller to arrive

    def __post_init__(self):
        """Raises ValueError with one sentence for a value that can't work whatever the number of ranks."""
        for name, (low, high) in LIMITS.items():
            value = dataclasses.asdict(self)[name]
            if not low <= value <= high:  # NaN is refused, too
                needed = f"at least {low:g}" if high == math.inf else f"{low:g} to {high:g}"
                raise ValueError(f"--{dashed(name)} {value}: {needed} is needed")
        algorithms.get_algorithm(self.algorithm)
        for name in ("max_new_tokens", "judge_max_new_tokens"):
            if (value := dataclasses.asdict(self)[name]) >= self.max_model_len:
                raise ValueError(f"--{dashed(name)} {value} leaves prompts no room in --max-model-len {self.max_model_len}")
        if self.max_tokens_per_micro_batch < self.max_model_len:
            raise ValueError(
                f"--max-tokens-per-micro-batch {self.max_tokens_per_micro_batch} is less than one sample may have: "
                f"--max-model-len {self.max_model_len}"
            )
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"--dtype {self.dtype} is unknown; choose float32 or bfloat16")
        if self.judge_format not in ("", *genrm.FORMATS):
            raise ValueError(f"--judge-format {self.judge_format} is unknown; choose one of {', '.join(genrm.FORMATS)}")
        if bool(self.model) != bool(self.judge) or (self.data and not self.model):
            raise ValueError("--data needs --model and --judge, and those two need each other: the demo's models only know addition")
        if self.sp and self.tp == 1:
            raise ValueError("--sp needs --tp 2 or more")


# A preset is what differs from Config's defaults. `tiny` is the demo, whose values those are.
PRESETS = {
    "tiny": {},
    "cuda": dict(dtype="bfloat16", max_logprob_diff=1.0, lr=1e-6, max_model_len=4096, max_new_tokens=2048, judge_max_new_tokens=1024)
    | dict(max_running_requests=256, max_total_tokens=1 << 20, max_tokens_per_micro_batch=16384, prompts_per_step=64),
}


def dashed(name: str) -> str:
    """A setting's name on the command line."""
    return name.replace("_", "-")


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line, like all of ours."""

    def error(self, message: str):
        raise ValueError(f"{message}; see run.py --help")


def parse_config(arguments: list[str]) -> Config:
    """The resolved settings: Config's defaults, then the preset, then the command line. Raises ValueError naming the setting."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    comments = field_comments()
    for field in dataclasses.fields(Config):
        kind = {"bool": None, "int": int, "float": float, "str": str}[field.type]
        action = {"action": argparse.BooleanOptionalAction} if kind is None else {"type": kind, "metavar": field.type.upper()}
        help_text = f"{comments.get(field.name, '')} [{field.default}]".replace("%", "%%")
        parser.add_argument(f"--{dashed(field.name)}", default=argparse.SUPPRESS, help=help_text, **action)
    given = vars(parser.parse_args(arguments))
    preset = given.get("preset") or "tiny"
    if preset not in PRESETS:
        raise ValueError(f"--preset {preset} is unknown; choose one of {', '.join(PRESETS)}")
    config = Config(**PRESETS[preset] | given | {"preset": preset})
    return dataclasses.replace(
        config,
        out=config.out or f"runs/{preset}-{config.mode}",
        judge_format=config.judge_format or ("chat" if config.data else "addition"),
    )


def field_comments() -> dict[str, str]:
    """The comment behind each field of Config, which is also its --help text."""
    import inspect

    lines = [line for line in inspect.getsource(Config).splitlines() if ":" in line and " = " in line and "#" in line]
    return {line.split(":")[0].strip(): line.split("#", 1)[1].strip() for line in lines}


def check_batch(config: Config, world_size: int) -> placement.Plan:
    """What only the number of ranks can tell (pure). Raises ValueError with the numbers; returns the plan."""
    model_parallel = config.tp * config.pp * config.cp
    if world_size % model_parallel:
        raise ValueError(f"--tp {config.tp} x --pp {config.pp} x --cp {config.cp} = {model_parallel} doesn't divide {world_size} ranks")
    dp = world_size // model_parallel
    if config.prompts_per_step % dp:
        raise ValueError(f"--prompts-per-step {config.prompts_per_step} can't be shared evenly by {dp} data-parallel ranks")
    return placement.make_plan(config.mode, world_size, config.rollout_ranks)


def describe(config: Config, plan: placement.Plan, world_size: int) -> str:
    """The resolved truth, printed once."""
    dp = world_size // (config.tp * config.pp * config.cp)
    samples = config.prompts_per_step * config.answers_per_prompt
    fields = dataclasses.fields(Config)
    resolved_settings = {f.name: value for f in fields if (value := dataclasses.asdict(config)[f.name]) != f.default}
    return (
        f"nanoYATT: {config.mode} colocation on {world_size} ranks: {plan}\n"
        f"  model {config.model}\n  judge {config.judge}\n  data  {config.data or 'built-in addition task'}\n"
        f"  {config.steps} steps of {samples} samples ({config.prompts_per_step} prompts x {config.answers_per_prompt} answers), "
        f"{samples // dp} for each of {dp} data-parallel ranks (tp {config.tp}, pp {config.pp}, cp {config.cp}), "
        f"packed into micro-batches of up to {config.max_tokens_per_micro_batch} tokens\n"
        f"  settings other than the defaults: {' '.join(f'--{dashed(name)} {value}' for name, value in resolved_settings.items())}"
    )


# ---------------------------------------------------------------- one rank's program


async def run(config: Config, plan: placement.Plan) -> None:
    """Bring the parts up, train, and end every process that was started (collective: every rank)."""
    from report import Progress

    # off the event loop, which must hear signals while ranks wait; not asyncio.to_thread, whose threads are waited for at the end
    world = await asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1), join_ranks, config)
    world.enter_device()
    progress = Progress(config.steps, world.rank == 0)
    engines: list = []
    ticking = asyncio.create_task(progress.tick())
    try:
        if not config.model:
            import warmstart

            model, judge = await warmstart.prepare(config, world, progress)
            config = dataclasses.replace(config, model=str(model), judge=str(judge))
        inputs = await world.run(load_prompts, config)  # checked before anything is moved or started
        out = await world.run(prepare_out, config, world)
        job = await build(config, plan, world, out, inputs, progress, engines)
        await controller.train(job)
        await world.barrier()
        job.report.close(config.max_running_requests, f"{config.mode} colocation, {world.size} ranks, the last steps")
        progress.close()
        if world.rank == 0:
            print(f"wrote {out}/: metrics.jsonl, samples.jsonl, trace.json, timeline.png, tensorboard/, config.json, logs/", flush=True)
    finally:
        ticking.cancel()
        progress.close()
        await asyncio.gather(*(engine.close() for engine in engines))
        world.close()


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


async def build(config: Config, plan: placement.Plan, world, out: Path, inputs, progress, engines: list) -> controller.Job:
    """The parts of one controller around its `inputs` (collective). Engines that start are appended to `engines`."""
    from report import Report
    from rollout import Sampling
    from timeline import Timeline

    actor_tokenizer, judge_tokenizer, prompts = inputs
    progress.doing("starting engines")
    await together(world, launch_engines, config, plan, world.rank, out, engines)
    if world.rank == 0:
        (out / "config.json").write_text(json.dumps(resolved(config), indent=1) + "\n")
    progress.line(describe(config, plan, world.size))
    actor = await world.run(build_actor, config)
    await together(world, ready, engines, config.engine_timeout_s)
    timeline = Timeline(world.rank, asyncio.get_running_loop().time, out / "spans", progress.phase)
    pools = await connect(engines, world, timeline)
    sampling = Sampling(config.temperature, config.max_new_tokens, data.stop_tokens(config.model, actor_tokenizer))
    judge_sampling = Sampling(config.judge_temperature, config.judge_max_new_tokens, data.stop_tokens(config.judge, judge_tokenizer))
    decode = functools.partial(data.decode, actor_tokenizer)
    judge = genrm.Judge(
        genrm.FORMATS[config.judge_format],
        functools.partial(data.encode, judge_tokenizer),
        functools.partial(data.decode, judge_tokenizer),
        decode,
        judge_sampling,
        config.max_model_len - config.judge_max_new_tokens,
    )
    report = Report(config, world, out, progress, decode)
    greedy = dataclasses.replace(sampling, temperature=0.0)
    await world.barrier()
    timeline.start()
    return controller.Job(config, world, actor, pools["rollout"], pools["genrm"], judge, prompts, sampling, greedy, timeline, report)


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


async def launch_engines(config: Config, plan: placement.Plan, rank: int, out: Path, engines: list) -> None:
    """Start the servers of this rank, all at once, without waiting."""
    from rollout import Engine

    models = {"rollout": config.model, "genrm": config.judge}
    for offset, role in enumerate(("rollout", "genrm")):
        if role in plan.roles_of(rank):
            log = out / "logs" / f"{role}-{rank}.log"
            engines.append(Engine.launch(role, rank, config.port + 2 * rank + offset, models[role], config, str(log)))


async def ready(engines: list, deadline_s: float) -> None:
    """Wait until this rank's servers answer."""
    await asyncio.gather(*(engine.ready(deadline_s) for engine in engines))


async def connect(engines: list, world, timeline) -> dict[str, placement.Pool]:
    """A handle on every engine of the run, by role (collective). Handles on other ranks' engines are appended to `engines`."""
    from rollout import Engine

    own = {(engine.role, engine.rank): engine for engine in engines}
    addresses = await world.gather([(engine.role, engine.rank, engine.url, engine.capacity) for engine in engines])
    remote = [Engine(*address) for here in addresses for address in here if address[:2] not in own]
    engines += remote
    fleet = sorted((*own.values(), *remote), key=lambda engine: engine.rank)
    for engine in fleet:
        engine.on_request = timeline.request
    return {role: placement.Pool([e for e in fleet if e.role == role], world, timeline) for role in ("rollout", "genrm")}


def load_prompts(config: Config):
    """Both tokenizers and the prompts."""
    actor_tokenizer, judge_tokenizer = data.load_tokenizer(config.model), data.load_tokenizer(config.judge)
    encode = functools.partial(data.encode, actor_tokenizer)
    if config.data:
        room = config.max_model_len - config.max_new_tokens
        source = data.PromptFile(Path(config.data), encode, config.seed, config.eval_prompts, room)
    else:
        source = data.Addition(config.seed, encode)
    return actor_tokenizer, judge_tokenizer, data.Prompts(source)


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


def main() -> None:
    """One rank: exit status 0 when the asked steps are done, else 1 after one line on stderr (130 after Ctrl-C)."""
    exits.prepare()
    try:
        config = parse_config(sys.argv[1:])
        if "RANK" not in os.environ:
            raise ValueError("start with: torchrun --nproc-per-node 2 run.py [--name value ...]")
        plan = check_batch(config, int(os.environ["WORLD_SIZE"]))
        asyncio.run(exits.until_told(run(config, plan)))
    except ValueError as error:
        exits.give_up(f"error: {error}", 1)
    except (KeyboardInterrupt, asyncio.CancelledError):
        exits.give_up("interrupted", 130)


if __name__ == "__main__":
    main()
