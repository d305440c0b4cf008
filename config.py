"""The settings of a run: defaults, limits, help, and what each needs from the others."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from extras import EXTRAS
from runtime.devices import default_device
from runtime.errors import UserError

HELD_OUT = 200  # rows of --data that measure the accuracy instead of training, at most a tenth
TINY = 1e-12  # the low end of what must be above 0
DTYPES = ("float32", "bfloat16")
Texts = tuple[str, ...]
Numbers = tuple[float, ...]


def setting(
    default: Any,
    help: str = "",
    group: str = "",
    low: float = 0,
    high: float = math.inf,
    choices: Sequence[str] = (),
) -> Any:
    """A field with limits. low, high: of a number, 0 or more by default; choices: a text's only values.

    help, group: of a flag; group is its heading in --help: a part of the core, or a row of extras.py.
    """
    metadata = dict(help=help, group=group, low=low, high=high, choices=choices)
    return dataclasses.field(default=default, metadata=metadata)


def check_limits(field: dataclasses.Field, value: object, shown: str) -> None:
    """Raise UserError for a value that its field doesn't allow. shown: as the command line has it."""
    choices = field.metadata["choices"]
    if choices and value not in choices:
        raise UserError(f"{shown} is unknown; choose {' or '.join(choices)}")
    low = field.metadata["low"]
    high = field.metadata["high"]
    if isinstance(value, int | float) and not low <= value <= high:  # NaN is refused, too
        needed = f"at least {low:g}" if high == math.inf else f"{low:g} to {high:g}"
        raise UserError(f"{shown}: {needed} is needed")


# what differs with --device cuda from Config's defaults; below, what else suits a GPU
WITH_CUDA = dict(dtype="bfloat16", deterministic=False, max_running_requests=512)
AS_FITS = -1  # of --recompute


@dataclass(frozen=True)
class Config:
    """The settings. Sizes in tokens, times in seconds."""

    command: str = "rl"  # or what examples/finetune.py does; no flag
    max_running_requests: int = 128  # answers that one engine decodes at once; no flag
    algorithm_defaults: Texts = ()  # for any row, unlike its own: critic_lr=1e-3; no flag
    kept_chunks: int = 0  # of logits, beside the last, that aren't made again (lm_head.py); no flag
    preset: str = setting("", "of PRESETS; default: tiny, the demo, or base with --model", "run")
    out: str = setting("", "folder of the run's files; default: runs/<preset>-<mode>", "run")
    seed: int = setting(0, "of the order of prompts, and of sampling", "run", low=-math.inf)
    device: str = setting("cpu", "default: cuda if there is a GPU", "run", choices=("cpu", "cuda"))
    host: str = setting("127.0.0.1", "address here that ranks and servers listen on", "run")
    port: int = setting(30000, "rank r's engines: port + 2 r and the next", "run", 1024, 65000)
    timeout_s: float = setting(600.0, "longest wait for a rank; engines get half", "run", low=TINY)
    memory_check: bool = setting(True, "end before a start without enough memory", "memory")
    model: str = setting("", "Hugging Face directory of the policy; default: the demo's", "data")
    data: str = setting("", "prompts or examples, JSONL or Parquet; default: the demo's", "data")
    template: Texts = setting((), "settings of chat templates: enable_thinking=false", "data")
    dtype: str = setting("float32", "bfloat16 by default with CUDA", "data", choices=DTYPES)
    mode: str = setting("partial", "engines share ranks: full | partial | fused", "loop")
    placement: str = setting("colocate", "split | standalone | engines=0-1 actor=2:tp1", "loop")
    ahead: int = setting(0, "1: serve a batch while another trains, on own ranks", "apart", 0, 1)
    algorithm: Texts = setting(("grpo",), "of ALGORITHMS, then its settings: kl_coef=0.01", "loop")
    prompts_per_step: int = setting(16, "groups trained on in a step", "loop", low=1)
    answers_per_prompt: int = setting(8, "samples in a group", "loop", low=1)
    updates_per_step: int = setting(1, "optimizer updates on a batch", "loop", low=1)
    critic: str = setting("", "the value model; default: the policy with a new head", "critics")
    over_dispatch: float = setting(1.0, "times the prompts; the unfinished go on", "loop", 1, 4)
    rollout_ranks: int = setting(0, "partial mode: ranks that write, not judge; 0: half", "loop")
    tail: float = setting(0.2, "fused mode: part of answers left as judging begins", "fused", 0, 1)
    rebalance: bool = setting(False, "move ranks by load; in fused mode the tail", "rebalance")
    log_samples: int = setting(2, "answers a step for samples.jsonl and TensorBoard", "loop")
    dry_run: bool = setting(False, "print who would run where, in how much memory", "dry run")
    judge: Texts = setting((), "directories of reward models, generative or scalar", "rewards")
    rule: Texts = setting((), "reward functions: FILE.py[:name], or a row of RULES", "rewards")
    environment: str = setting("", "FILE.py[:Class] that answers turns", "environment")
    teacher: str = setting("", "directory of a model to learn from, by a KL", "teacher")
    reward_weights: Numbers = setting((), "of judges, rules, environment; or equal", "rewards")
    cost_judge: Texts = setting((), "like --judge, for the cost (a constraint)", "rewards")
    cost_rule: Texts = setting((), "like --rule, for the cost (`cost` of FILE.py)", "rewards")
    judge_max_new_tokens: int = setting(1024, "of a critique and its verdict", "rewards", low=1)
    judge_format: Texts = setting((), "rows of FORMATS, for all judges or each", "evaluation")
    eval_data: str = setting("", "prompts with an `answer`; default: rows of --data", "evaluation")
    eval_samples: int = setting(0, "answers to a held-out prompt, for pass@k", "evaluation")
    steps: int = setting(40, "batches to train on; 0: evaluate, and end", "training")
    eval_every: int = setting(10, "steps between evaluations on held-out rows", "training", low=1)
    lr: float = setting(1e-6, "AdamW", "training", low=TINY)
    lr_warmup_steps: int = setting(5, "steps in which --lr grows from a part to all", "training")
    lr_decay_to: float = setting(1.0, "part of --lr at the end; demo: 0.1", "training", 0, 1)
    max_tokens_per_micro_batch: int = setting(8192, "of a pass; on a CPU fewer", "training", 1)
    tp: int = setting(1, "tensor-parallel ranks", "training", low=1)
    pp: int = setting(1, "pipeline-parallel ranks", "training", low=1)
    sp: bool = setting(False, "sequence parallelism beside tp", "training")
    schedule: str = setting("1f1b", "of pipelines: 1f1b | fused, with critics", "training")
    lora: int = setting(0, "rank of the adapters that are learned; 0: all weights", "lora", low=0)
    recompute: int = setting(0, "layers computed again; -1: as few as fit", "training", AS_FITS)
    temperature: float = setting(1.0, "of the answers", "engines", low=TINY)
    max_new_tokens: int = setting(1024, "of an answer", "engines", low=1)
    answer_tokens: int = setting(0, "of an answer exactly, as in papers; 0: to its end", "engines")
    max_model_len: int = setting(0, "of prompt and answer; 0: the model's own", "engines")
    video_fps: float = setting(2.0, "frames shown of a second of a clip", "images", TINY, 1000)
    video_frames: int = setting(16, "frames shown of a clip, at most", "images", low=2)
    rollout_tp: int = setting(1, "ranks that one rollout engine spans", "engines", low=1)
    genrm_tp: int = setting(1, "ranks that one genrm engine spans", "engines", low=1)
    mem_fraction: float = setting(0.7, "of a GPU, for awake engines", "engines", 0.05, 0.95)
    deterministic: bool = setting(True, "same seed, same tokens; with CUDA off", "engines")
    resume: str = setting("auto", "auto: the newest in OUT; never; or a folder", "checkpoints")
    save_every: int = setting(10, "steps between saves; one at the end; 0: none", "checkpoints")
    keep: int = setting(2, "newest checkpoints that are kept", "checkpoints", low=1)
    save_hf_every: int = setting(0, "steps between Hugging Face models; 0: none", "checkpoints")
    weight_decay: float = 0.0  # AdamW; examples/finetune.py makes a flag of it

    @property
    def judge_models(self) -> tuple[str, ...]:
        """Directories of all judges, those of the reward first."""
        return self.judge + self.cost_judge

    @property
    def evaluates(self) -> bool:
        """True if held-out prompts are answered, and nothing is trained."""
        return self.steps == 0

    def recomputed(self, layers: int) -> int:
        """Return how many of a stage's layers keep their input alone, and are computed again."""
        return layers if self.recompute == AS_FITS else min(self.recompute, layers)

    @property
    def engine_start_s(self) -> float:
        """The longest start of an engine, while the other ranks wait."""
        return 0.9 * self.timeout_s

    @property
    def engine_lost_s(self) -> float:
        """The deadline of every call to an engine: more than a prefill takes, less than a rank waits."""
        return self.timeout_s / 2

    def __post_init__(self):
        """Raise UserError with one sentence for a value that can't work whatever the number of ranks."""
        for field in settings_of(type(self)):
            value = vars(self)[field.name]
            check_limits(field, value, f"--{dashed(field.name)} {value}")
        self._check_together()
        longest = max(self.max_model_len, self.max_new_tokens + 1)
        budget = self.max_tokens_per_micro_batch
        if self.command == "rl" and not self.evaluates and longest > budget:
            flag = f"--max-tokens-per-micro-batch {budget}"
            raise UserError(f"{flag}: one sample may have {longest} tokens")

    def _check_together(self) -> None:
        """Refuse settings that don't go together, a run without a reward, weights that can't be added."""
        if self.command == "rl" and self.device == "cuda" and self.dtype != "bfloat16":
            raise UserError(f"--dtype {self.dtype}: with --device cuda engines take bfloat16 alone")
        exactly = self.answer_tokens
        if exactly and exactly != self.max_new_tokens:
            most = f"--max-new-tokens {self.max_new_tokens}"
            raise UserError(f"--answer-tokens {exactly}: {most} says otherwise, so leave it out")
        if self.sp and self.tp == 1 and ":tp" not in self.placement:
            raise UserError("--sp needs --tp 2 or more")
        if self.environment and exactly:
            turns = "with --environment turns end by themselves"
            raise UserError(f"--answer-tokens {exactly}: {turns}")
        sources = len(self.judge) + len(self.rule) + bool(self.environment)
        weights = self.reward_weights
        shown = f"--reward-weights {as_text(weights)}"
        if len(weights) not in (0, sources):
            each = "one for each --judge, then each --rule, then --environment"
            raise UserError(f"{shown}: {each}, so {sources}")
        # NaN is refused, too
        if weights and not (min(weights) >= 0 and 0 < sum(weights) < math.inf):
            raise UserError(f"{shown}: finite numbers are needed, none below 0 and one above")


# the demos: sums of numbers that are written, drawn or filmed, an actor and a judge for each
DEMO_MODELS = Path(__file__).parent / "demo" / "models"
DEMOS = {"tiny": "written", "images": "drawn", "video": "filmed"}  # preset -> folder of its models
DEMO = dict(lr=5e-4, lr_decay_to=0.1, algorithm_defaults=("critic_lr=1e-3",))
DEMO |= dict(max_model_len=256, max_new_tokens=72, judge_max_new_tokens=100)
ON_CUDA = dict(dtype="bfloat16", max_model_len=4096, max_new_tokens=2048, recompute=AS_FITS)
ON_CUDA |= dict(prompts_per_step=64)
# a preset is what differs from Config's defaults
PRESETS = {"base": {}, "tiny": DEMO, "images": DEMO, "video": DEMO | {"steps": 20}, "cuda": ON_CUDA}


# groups of settings that are flags of run.py: of the core, and of each extra that is there
GROUPS = ("run", "data", "evaluation", "engines", "training", "loop", "rewards", *EXTRAS)
EVALUATION = ("run", "data", "evaluation", "engines")  # those of --steps 0
EVALUATION += ("images", "memory", "dry run", "environment")


def dashed(name: str) -> str:
    return name.replace("_", "-")


def as_text(value: object) -> str:
    """A setting's value as the command line takes it."""
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def parse_config(arguments: list[str], usage: str = "") -> Config:
    """Read the command line of run.py. UserError names the setting."""
    config = parse_settings(Config, arguments, usage, GROUPS, {"command": "rl"})
    return evaluation_of(config) if config.evaluates else config


def evaluation_of(config: Config) -> Config:
    """Return the settings of an evaluation: those that are for training have their defaults. UserError."""
    if not config.eval_data and config.preset not in DEMOS:
        demos = "--preset tiny, images or video has the demo's"
        raise UserError(f"--steps 0 needs prompts to answer: --eval-data FILE; {demos}")
    if config.resume not in ("auto", "never"):
        weights = "evaluate the Hugging Face directory of --save-hf-every as --model"
        raise UserError(f"--resume {config.resume}: --steps 0 reads no checkpoint: {weights}")
    settings = settings_of(Config)
    used = {field.name for field in settings if field.metadata["group"] in EVALUATION}
    used = used - {"data", "genrm_tp"} | {"steps"}
    unused = {field.name: field.default for field in settings if field.name not in used}
    # without judges one format: the first judge's, by which training finds final answers
    return dataclasses.replace(config, **unused, judge_format=config.judge_format[:1])


S = TypeVar("S", bound=Config)


def parse_settings(
    kind: type[S], arguments: list[str], usage: str, groups: Sequence[str], defaults: dict[str, Any]
) -> S:
    """Read a command line as a Config of the kind. UserError names the setting.

    usage: what --help says first. groups: of settings that are flags. defaults: what differs from the kind's,
    `command` among them. The device's come before them, the preset's behind; what is given comes last.
    """
    given = vars(parser_of(kind, usage, groups).parse_args(arguments))
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    preset = given.get("preset") or ("base" if given.get("model") else "tiny")
    if preset not in PRESETS:
        raise UserError(f"--preset {preset} is unknown; choose one of {', '.join(PRESETS)}")
    device = given.get("device") or default_device()
    if not given.get("model"):
        given |= demo_models(given, preset, defaults["command"])
    of_device = WITH_CUDA if device == "cuda" else {}
    given |= {"preset": preset, "device": device}
    if given.get("answer_tokens"):
        given.setdefault("max_new_tokens", given["answer_tokens"])
    config = kind(**of_device | defaults | PRESETS[preset] | given)
    prompts = config.eval_data if config.evaluates else config.data
    formats = config.judge_format or ("chat" if prompts else "addition",)
    name = f"{preset}-{config.mode}" if config.command == "rl" else config.command
    name = "eval" if config.evaluates else name
    return dataclasses.replace(config, out=config.out or f"runs/{name}", judge_format=formats)


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message}; see --help")


def parser_of(kind: type[Config], usage: str, groups: Sequence[str]) -> Parser:
    """The parser of these groups of settings; it returns those that are given."""
    parser = Parser(
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [--name value ...]",
        description=usage,
    )
    types = get_type_hints(kind)
    headings = {group: parser.add_argument_group(group) for group in groups}
    for field in settings_of(kind):
        heading = headings.get(field.metadata["group"])
        if heading is None:
            continue
        default = "" if field.default is False else as_text(field.default)
        how = {"help": field.metadata["help"] + (f" [{default}]" if default else "")}
        several = get_args(types[field.name])  # of a tuple: the type of its values, and ...
        value = several[0] if several else types[field.name]
        if value is bool:
            how["action"] = argparse.BooleanOptionalAction if field.default else "store_true"
        else:
            # a shell leaves the ~ of --out=~/runs to the program
            how["type"] = os.path.expanduser if value is str else value
            how["metavar"] = value.__name__.upper()
        if several:
            how |= {"nargs": "+", "action": "extend"}
        heading.add_argument(f"--{dashed(field.name)}", **how)
    return parser


def settings_of(kind: type[Config]) -> list[dataclasses.Field]:
    """The fields that are flags."""
    return [field for field in dataclasses.fields(kind) if field.metadata]


def demo_models(given: dict, preset: str, command: str) -> dict:
    """The models of a command line that names none. UserError for what asks for a model of one's own."""
    for name in ("data", "eval_data", "judge", "cost_judge", "critic"):
        if given.get(name):
            raise UserError(f"--{dashed(name)} needs --model: the demo's models only know addition")
    folder = DEMO_MODELS / DEMOS.get(preset, "written")
    # from the working directory: a run may be resumed where the project lies in another place
    models = {"model": os.path.relpath(folder / "actor")}
    if command == "rl":
        models["judge"] = (os.path.relpath(folder / "judge"),)
    return models
