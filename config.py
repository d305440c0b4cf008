"""The settings of a run: defaults, limits, and what each needs from the others. Imports nothing of ours."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

AT_LEAST_1 = ("steps", "prompts_per_step", "answers_per_prompt", "updates_per_step", "batch_size")
AT_LEAST_1 += ("max_new_tokens", "judge_max_new_tokens", "judgements", "eval_every")
AT_LEAST_1 += ("max_tokens_per_micro_batch", "max_running_requests", "keep")
AT_LEAST_1 += ("tp", "pp", "cp", "rollout_tp", "genrm_tp")
AT_LEAST_0 = ("max_refill_waves", "rollout_ranks", "lr_warmup_steps", "weight_decay")
AT_LEAST_0 += ("max_model_len", "save_every", "save_hf_every", "eval_samples")
HELD_OUT = 200  # rows of --data that measure the accuracy instead of training, at most a tenth
ABOVE_0 = ("temperature", "lr", "critic_lr", "timeout_s", "dpo_beta")
LIMITS = dict.fromkeys(AT_LEAST_1, (1, math.inf)) | dict.fromkeys(AT_LEAST_0, (0, math.inf))
LIMITS |= dict.fromkeys(ABOVE_0, (1e-12, math.inf))
LIMITS |= {"over_dispatch": (1, 4), "tail": (0, 1), "lr_decay_to": (0, 1), "ahead": (0, 1)}
LIMITS |= {"mem_fraction": (0.05, 0.95), "port": (1024, 65000)}


class UserError(ValueError):
    """A mistake that the user can mend, told in one line; any other ValueError shows its place."""


class RunLost(Exception):
    """The run lost what it needs, an engine or room on a disk. It ends in one line, and goes on later."""


@dataclass(frozen=True)
class Config:
    """The settings. Sizes in tokens, times in seconds. The comment behind a field is its --help."""

    command: str = "rl"  # a row of COMMANDS; the first word of the command line
    # ---- the run
    preset: str = ""  # a row of PRESETS; default: tiny, which is the demo, or base with --model
    out: str = ""  # where the run leaves its files; default: runs/<preset>-<mode>
    seed: int = 0  # of the order of prompts, and of sampling
    device: str = "cpu"  # cpu | cuda, one for each rank; default: cuda where there is one
    host: str = "127.0.0.1"  # this machine's address that ranks and servers listen on
    timeout_s: float = 600.0  # the longest wait for another rank; other timeouts are parts of it
    memory_check: bool = True  # end before a start if --dry-run says: too little memory
    # ---- model and data
    model: str = ""  # Hugging Face directory of the policy; default: the demo's
    data: str = ""  # prompts or examples, JSONL or Parquet; default: the demo's
    template: tuple[str, ...] = ()  # settings of the chat templates: enable_thinking=false
    dtype: str = "float32"  # float32 | bfloat16, which is the default with CUDA
    # ---- the loop
    mode: str = "partial"  # how engines share their ranks: full | partial | fused | auto
    placement: str = "colocate"  # colocate | split | standalone, or ranks: engines=0-1 actor=2:tp1
    ahead: int = 0  # 1: serve the next batch while one is trained on; needs ranks of its own
    algorithm: tuple[str, ...] = ("grpo",)  # a row of ALGORITHMS, then its settings: kl_coef=0.01
    prompts_per_step: int = 16  # groups trained on in a step
    answers_per_prompt: int = 8  # samples in a group
    max_refill_waves: int = 3  # more waves of prompts to replace groups whose rewards are all equal
    over_dispatch: float = 1.0  # above 1: so many times the prompts; the rest is continued later
    rollout_ranks: int = 0  # partial mode: ranks that serve rollout, the rest serve genrm; 0: half
    tail: float = 0.2  # fused mode: the last part of the answers, beside which others are judged
    rebalance: bool = False  # move ranks between the roles (fused: the tail) by load
    eval_data: str = ""  # held-out prompts, each with an `answer`; default: some rows of --data
    # ---- debugging
    dry_run: bool = False  # print who would run where, and the memory that takes, and end
    rollout_only: bool = False  # generate and judge alone; samples go to OUT/replay.jsonl
    train_only: bool = False  # train on the samples of --replay; no engine is started
    replay: str = ""  # what a --rollout-only run wrote
    # ---- rewards
    judge: tuple[str, ...] = ()  # Hugging Face directories of reward models, generative or scalar
    rule: tuple[str, ...] = ()  # reward functions: FILE.py[:name], or a row of RULES
    reward_weights: tuple[float, ...] = ()  # of each judge, then each rule; default: equal
    cost_judge: tuple[str, ...] = ()  # like judge, for the cost (algorithms with a constraint)
    cost_rule: tuple[str, ...] = ()  # like rule, for the cost (`cost` of FILE.py)
    judge_max_new_tokens: int = 1024  # of a critique and its verdict
    judgements: int = 1  # of a sample; the reward is their mean; a single one is greedy
    # ---- evaluation
    judge_format: tuple[str, ...] = ()  # rows of genrm.FORMATS, for all judges or each
    eval_samples: int = 0  # answers to a held-out prompt beside a greedy one, for pass@k; eval: 8
    # ---- training
    steps: int = 40  # batches to train on
    eval_every: int = 10  # steps between greedy evaluations on held-out prompts
    lr: float = 1e-6  # AdamW
    lr_warmup_steps: int = 5  # linear; the first update has a fifth
    lr_decay_to: float = 1.0  # part of --lr at the end, linear; sft, rm, dpo, demo: 0.1
    max_tokens_per_micro_batch: int = 8192  # most in a forward pass; on CPUs fewer of a large model
    tp: int = 1  # tensor-parallel ranks
    pp: int = 1  # pipeline-parallel ranks
    cp: int = 1  # context-parallel ranks
    sp: bool = False  # sequence parallelism beside tp
    schedule: str = "1f1b"  # of pipeline passes: 1f1b | fused, with critics
    recompute: bool = False  # keep each layer's input alone, compute the rest again
    freeze_vision: bool = False  # of a model that sees, train the language model alone
    # ---- reinforcement learning
    updates_per_step: int = 1  # optimizer updates on one batch of samples
    critic: str = ""  # directory of the value model; default: the policy's, with a new head
    critic_lr: float = 1e-5  # AdamW
    # ---- engines
    temperature: float = 1.0  # of the answers
    max_new_tokens: int = 1024  # of an answer
    max_model_len: int = 0  # of prompt and answer; 0: what the model's config names
    skip_long: bool = False  # leave out prompts that are too long, instead of an error
    max_running_requests: int = 128  # answers that one engine decodes at once
    rollout_tp: int = 1  # ranks that one rollout engine spans
    genrm_tp: int = 1  # ranks that one genrm engine spans
    mem_fraction: float = 0.7  # CUDA: of a device, for an awake engine's weights and cache
    deterministic: bool = True  # same seed, same tokens; costs speed, with CUDA off by default
    port: int = 30000  # rank r's rollout engine listens on port + 2 r, its genrm engine on the next
    # ---- checkpoints
    resume: str = "auto"  # the newest checkpoint under --out (auto), none (never), or this folder
    save_every: int = 10  # steps between checkpoints, and one at the end; 0: none
    keep: int = 2  # newest checkpoints that are kept
    save_hf_every: int = 0  # steps between Hugging Face directories, and at the end; 0: none
    # ---- examples
    batch_size: int = 32  # examples of a step: conversations, or pairs of answers
    weight_decay: float = 0.0  # AdamW
    dpo_beta: float = 0.1  # dpo: strength of the KL to the start weights

    @property
    def judge_models(self) -> tuple[str, ...]:
        """Directories of all judges, those of the reward first."""
        return self.judge + self.cost_judge

    @property
    def continues_answers(self) -> bool:
        """True if answers may be cut off and continued under newer weights."""
        return self.over_dispatch > 1 or self.train_only

    @property
    def asks_engines(self) -> bool:
        return self.command in ("rl", "eval") and not self.train_only

    @property
    def token_budget(self) -> int:
        """The longest sequence that a micro-batch takes: context parallelism cuts it into 2 * cp."""
        pieces = 2 * self.cp if self.cp > 1 else 1
        return self.max_tokens_per_micro_batch // pieces * pieces

    @property
    def engine_start_s(self) -> float:
        """The longest start of an engine, while the other ranks wait."""
        return 0.9 * self.timeout_s

    @property
    def engine_lost_s(self) -> float:
        """The time after which an engine that says nothing is lost: the deadline of every call to it.

        It is longer than a long prompt's prefill on a CPU, and shorter than the wait for another rank.
        """
        return self.timeout_s / 2

    def __post_init__(self):
        """Raise UserError with one sentence for a value that can't work whatever the number of ranks."""
        self._check_choices()
        self._check_rewards()
        for name, (low, high) in LIMITS.items():
            value = vars(self)[name]
            if not low <= value <= high:  # NaN is refused, too
                needed = f"at least {low:g}" if high == math.inf else f"{low:g} to {high:g}"
                raise UserError(f"--{dashed(name)} {value}: {needed} is needed")
        context = self.max_model_len
        no_room = f"leaves prompts no room in --max-model-len {context}"
        if 0 < context <= self.max_new_tokens:
            raise UserError(f"--max-new-tokens {self.max_new_tokens} {no_room}")
        writes = self.judge_models and self.judge_format != ("score",)
        if writes and 0 < context <= self.judge_max_new_tokens:
            raise UserError(f"--judge-max-new-tokens {self.judge_max_new_tokens} {no_room}")
        longest = max(context, self.max_new_tokens + 1)
        if self.command == "rl" and longest > self.token_budget:
            setting = f"--max-tokens-per-micro-batch {self.token_budget}"
            raise UserError(f"{setting}: one sample may have {longest} tokens")

    def _check_choices(self) -> None:
        """Refuse unknown words, and settings that don't go together."""
        if self.dtype not in ("float32", "bfloat16"):
            raise UserError(f"--dtype {self.dtype} is unknown; choose float32 or bfloat16")
        if self.device not in DEVICES:
            raise UserError(f"--device {self.device} is unknown; choose {' or '.join(DEVICES)}")
        if self.asks_engines and self.device == "cuda" and self.dtype != "bfloat16":
            raise UserError(f"--dtype {self.dtype}: with --device cuda engines take bfloat16 alone")
        if self.sp and self.tp == 1 and ":tp" not in self.placement:
            raise UserError("--sp needs --tp 2 or more")
        if self.rebalance and self.mode == "full":
            raise UserError("--rebalance moves ranks between roles: in --mode full both hold all")
        if self.rollout_only and self.train_only:
            halves = "--rollout-only never trains, --train-only starts no engine"
            raise UserError(f"{halves}: choose one")
        if self.train_only != bool(self.replay):
            raise UserError("--train-only and --replay FILE, of a --rollout-only run, go together")

    def _check_rewards(self) -> None:
        """Refuse a run without a reward, and weights that can't be added."""
        sources = len(self.judge) + len(self.rule)
        needs_reward = self.command == "rl" and self.model and not self.train_only
        if needs_reward and not sources:
            needed = "--model needs a --judge or a --rule"
            raise UserError(f"{needed}, which say what an answer is worth")
        weights = self.reward_weights
        shown = f"--reward-weights {as_text(weights)}"
        if len(weights) not in (0, sources):
            raise UserError(f"{shown}: one for each --judge, then each --rule, so {sources}")
        # NaN is refused, too
        if weights and not (min(weights) >= 0 and 0 < sum(weights) < math.inf):
            raise UserError(f"{shown}: finite numbers are needed, none below 0 and one above")


# by device, what differs there from Config's defaults
DEVICES = {"cpu": {}, "cuda": dict(dtype="bfloat16", deterministic=False)}
DEVICE_FILES = Path("/dev")  # nvidia0, nvidia1 ... where there is a driver for them
DRIVER = Path("/sys/module/nvidia/version")
OLDEST_DRIVER = 580
VISIBLE = re.compile(r"\d|GPU-|MIG-")  # how CUDA_VISIBLE_DEVICES begins if it shows a device
# the demos: sums of numbers that are written or drawn, an actor and a judge for each
DEMO_MODELS = Path(__file__).parent / "demo" / "models"
DEMO = dict(lr=5e-4, lr_decay_to=0.1, critic_lr=1e-3, max_model_len=256)
DEMO |= dict(max_new_tokens=72, judge_max_new_tokens=100)
ON_CUDA = dict(dtype="bfloat16", max_model_len=4096, max_new_tokens=2048, recompute=True)
ON_CUDA |= dict(max_tokens_per_micro_batch=16384, prompts_per_step=64, max_running_requests=256)
# a preset is what differs from Config's defaults
PRESETS = {"base": {}, "tiny": DEMO, "images": DEMO, "cuda": ON_CUDA}


class Command(NamedTuple):
    """A first word of the command line: what it does, its groups of settings, its own defaults."""

    help: str
    groups: tuple[str, ...]
    defaults: dict[str, float]


ALWAYS = ("the run", "model and data", "evaluation")
LOOP = ("the loop", "debugging", "rewards", "reinforcement learning", "engines", "checkpoints")
EXAMPLES = (*ALWAYS, "training", "examples")
DECAYS = {"lr_decay_to": 0.1}
COMMANDS = {
    "rl": Command("the loop of controller.py (default)", (*ALWAYS, "training", *LOOP), {}),
    "sft": Command("supervised fine-tuning", EXAMPLES, DECAYS | {"lr": 1e-5}),
    "rm": Command("a scalar reward model from pairs of answers", EXAMPLES, DECAYS | {"lr": 1e-5}),
    "dpo": Command("direct preference optimisation, from such pairs", EXAMPLES, DECAYS),
    "eval": Command(
        "greedy accuracy and pass@k of a model", (*ALWAYS, "engines"), {"eval_samples": 8}
    ),
}


def dashed(name: str) -> str:
    return name.replace("_", "-")


def as_text(value: object) -> str:
    """A setting's value as the command line takes it."""
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def printable(text: str) -> str:
    """Make text from elsewhere safe for a terminal: an escape sequence could rewrite the screen."""
    unsafe = {c for c in text if not c.isprintable() and c not in "\n\t"}
    return text.translate({ord(c): c.encode("unicode_escape").decode() for c in unsafe})


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message}; see run.py --help")


def parse_config(arguments: list[str], usage: str = "") -> Config:
    """Merge the defaults of Config, command and preset with the command line. UserError names the setting."""
    name = "rl"
    if arguments and arguments[0] in COMMANDS:
        name, *arguments = arguments
    given = vars(parser_of(name, usage).parse_args(arguments))
    given = {key: tuple(v) if isinstance(v, list) else v for key, v in given.items()}
    preset = given.get("preset") or ("base" if given.get("model") else "tiny")
    if preset not in PRESETS:
        raise UserError(f"--preset {preset} is unknown; choose one of {', '.join(PRESETS)}")
    device = given.get("device") or default_device()
    given |= {"preset": preset, "command": name, "device": device}
    if not given.get("model"):
        given |= demo_models(given)
    defaults = COMMANDS[name].defaults | DEVICES.get(device, {})
    config = Config(**defaults | PRESETS[preset] | given)
    formats = config.judge_format or ("chat" if config.data else "addition",)
    half = "-rollout-only" * config.rollout_only + "-train-only" * config.train_only
    out = f"runs/{preset}-{config.mode}{half}" if name == "rl" else f"runs/{name}"
    return dataclasses.replace(config, out=config.out or out, judge_format=formats)


def parser_of(name: str, usage: str) -> Parser:
    """The parser of a command: its groups of settings, none of which has a default of the parser's."""
    commands = [f"  {each:5} {row.help}" for each, row in COMMANDS.items()]
    parser = Parser(
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=f"run.py {name} [--name value ...]",
        description=usage,
        epilog="\n".join(["commands:", *commands]),
    )
    for group, settings in documented_settings().items():
        if group not in COMMANDS[name].groups:
            continue
        heading = parser.add_argument_group(group)
        for field, comment in settings:
            default = "" if field.default is False else as_text(field.default)
            shown = f"{comment} [{default}]" if default else comment
            heading.add_argument(f"--{dashed(field.name)}", help=shown, **option(field))
    return parser


def default_device() -> str:
    """Return cuda where torch finds a device, cpu where there is none. UserError: torch can't use it."""
    # told at once: importing torch takes a second, in which the fork server imports, too
    devices = [*DEVICE_FILES.glob("nvidia[0-9]*"), *DEVICE_FILES.glob("dxg")]  # of Linux; of WSL
    if not devices or not shows_devices():
        return "cpu"
    from torch import cuda

    if reason := why_unusable():
        raise UserError(f"{reason}; --device cpu trains without it")
    return "cuda" if cuda.is_available() else "cpu"


def shows_devices() -> bool:
    """Tell whether CUDA_VISIBLE_DEVICES leaves a device: one that it hides isn't there."""
    return VISIBLE.match(os.environ.get("CUDA_VISIBLE_DEVICES", "0")) is not None


def why_unusable() -> str:
    """Say why torch finds no device although the machine has one; empty if it has none, or hides it."""
    import torch

    devices = sorted(DEVICE_FILES.glob("nvidia[0-9]*"))
    if torch.cuda.is_available() or not devices or not shows_devices():
        return ""
    driver = DRIVER.read_text().strip() if DRIVER.exists() else "unknown"
    reason = f"its driver is {driver}, and nvidia-smi may say more"
    if driver[:1].isdigit() and int(driver.partition(".")[0]) < OLDEST_DRIVER:
        reason = f"CUDA 13 needs driver {OLDEST_DRIVER} or newer, and this is {driver}"
    if not torch.version.cuda:
        reason = "it is built for CPUs; install requirements.txt"
    return f"torch can't use {devices[0]}: {reason}"


def demo_models(given: dict) -> dict:
    """The models of a command line that names none. UserError for what asks for a model of one's own."""
    for name in ("data", "eval_data", "judge", "cost_judge", "critic"):
        if given.get(name):
            raise UserError(f"--{dashed(name)} needs --model: the demo's models only know addition")
    folder = DEMO_MODELS / ("drawn" if given["preset"] == "images" else "written")
    # from the working directory: a run may be resumed where the project lies in another place
    models = {"model": os.path.relpath(folder / "actor")}
    if given["command"] == "rl":
        models["judge"] = (os.path.relpath(folder / "judge"),)
    return models


def option(field: dataclasses.Field) -> dict:
    """The keywords of argparse for a setting; a tuple takes one value or more."""
    if field.type == "bool":
        is_on = field.default or any(field.name in preset for preset in PRESETS.values())
        return {"action": argparse.BooleanOptionalAction if is_on else "store_true"}
    kind = field.type.removeprefix("tuple[").removesuffix(", ...]")
    known = {"type": {"int": int, "float": float, "str": str}[kind], "metavar": kind.upper()}
    if field.name == "template":  # each time that it is given adds names
        known["action"] = "extend"
    return known if kind == field.type else known | {"nargs": "+"}


def documented_settings() -> dict[str, list[tuple[dataclasses.Field, str]]]:
    """The settings by the name of their group, each with the comment behind it in the source of Config."""
    fields = {field.name: field for field in dataclasses.fields(Config)}
    groups = {}
    for line in inspect.getsource(Config).splitlines():
        code, _, comment = line.strip().partition("#")
        name = code.split(":")[0]
        if comment.startswith(" ---- "):
            group = groups.setdefault(comment.removeprefix(" ---- "), [])
        elif name in fields and name != "command" and " = " in code:
            group.append((fields[name], comment.strip()))
    return groups
