"""The settings of a run: defaults, limits, help texts, and how they depend on each other."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from runtime.devices import default_device
from runtime.errors import UserError

HELD_OUT = 200  # rows of --data to evaluate on instead of training, at most a tenth
TINY = 1e-12  # lower limit of numbers that must be above 0
MOST = 2**63 - 1  # default upper limit of numbers, which must fit into 64 bits
DTYPES = ("float32", "bfloat16")
Texts = tuple[str, ...]
Numbers = tuple[float, ...]


def setting(
    default: Any,
    help: str = "",
    group: str = "",
    low: float = 0,
    high: float = MOST,
    choices: Sequence[str] = (),
) -> Any:
    """Return a field. group: heading in --help; low, high: a number's limits; choices: a text's values."""
    metadata = dict(help=help, group=group, low=low, high=high, choices=choices)
    return dataclasses.field(default=default, metadata=metadata)


def check_limits(field: dataclasses.Field, value: object, shown: str) -> None:
    """Raise UserError if the field doesn't allow the value. shown: the setting as the user typed it."""
    choices = field.metadata["choices"]
    if choices and value not in choices:
        raise UserError(f"{shown} is unknown; choose {' or '.join(choices)}")
    low = field.metadata["low"]
    high = field.metadata["high"]
    if isinstance(value, int | float) and not low <= value <= high:  # also rejects NaN
        if value < low:
            raise UserError(f"{shown}: at least {low:g} is needed")
        raise UserError(f"{shown}: {low:g} to {high:g} is needed")


WITH_CUDA = dict(dtype="bfloat16", deterministic=False, max_running_requests=512)  # new defaults
AS_FITS = -1  # the value of --recompute that picks the fewest layers that fit


@dataclass(frozen=True)
class Config:
    """The settings. Sizes are in tokens, times in seconds."""

    command: str = "rl"  # or sft, of examples/sft.py; no flag
    max_running_requests: int = 128  # answers that one engine decodes at once; no flag
    algorithm_defaults: Texts = ()  # they override those of any row: critic_lr=1e-3; no flag
    kept_chunks: int = 0  # chunks of logits to keep besides the last (lm_head.py); no flag
    preset: str = setting("", "row of PRESETS; default: tiny (the demo), base with --model", "run")
    out: str = setting("", "folder for the run's files; default: runs/<preset>-<mode>", "run")
    seed: int = setting(0, "seed of prompt order and sampling", "run", low=-MOST)
    device: str = setting("cpu", "default: cuda if there is a GPU", "run", choices=("cpu", "cuda"))
    host: str = setting("127.0.0.1", "address that ranks and servers here listen on", "run")
    port: int = setting(30000, "rank r's engines: port + 2 r and the next", "run", 1024, 65000)
    timeout_s: float = setting(600.0, "longest wait for a rank; engines get half", "run", TINY, 1e6)
    memory_check: bool = setting(True, "refuse to start without enough of a GPU", "memory")
    model: str = setting("", "Hugging Face directory of the policy; default: the demo's", "data")
    data: str = setting("", "prompts or examples, JSONL or Parquet; default: the demo's", "data")
    template: Texts = setting((), "chat template settings: enable_thinking=false", "data")
    dtype: str = setting("float32", "bfloat16 by default with CUDA", "data", choices=DTYPES)
    mode: str = setting("partial", "how engines share ranks: full | partial | fused", "loop")
    placement: str = setting("colocate", "split | standalone | engines=0-1 actor=2:tp1", "loop")
    ahead: int = setting(0, "1: serve a batch while the last one trains", "apart", 0, 1)
    algorithm: Texts = setting(("grpo",), "row of ALGORITHMS [settings: kl_coef=0.01]", "loop")
    prompts_per_step: int = setting(16, "groups to train on in a step", "loop", low=1)
    answers_per_prompt: int = setting(8, "samples in a group", "loop", low=1)
    updates_per_step: int = setting(1, "optimizer updates per batch", "loop", low=1)
    critic: str = setting("", "value model; default: the policy with a new head", "critics")
    over_dispatch: float = setting(1.0, "start this many times the prompts", "loop", 1, 4)
    rollout_ranks: int = setting(0, "partial mode: ranks of rollout; 0: half", "loop")
    tail: float = setting(0.2, "fused mode: fraction left when judging starts", "fused", 0, 1)
    rebalance: bool = setting(False, "adapt split (partial) or tail (fused)", "rebalance")
    log_samples: int = setting(2, "answers per step in samples.jsonl and TensorBoard", "loop")
    record: bool = setting(False, "keep what each step served, for --samples", "replay")
    samples: str = setting("", "folder of a run --record: train on it, no engines", "replay")
    dry_run: bool = setting(False, "print what would run where, and its memory", "dry run")
    judge: Texts = setting((), "directories of reward models, generative or scalar", "rewards")
    rule: Texts = setting((), "reward functions: FILE.py[:name], or a row of RULES", "rewards")
    environment: str = setting("", "FILE.py[:Class] that replies to turns", "environment")
    teacher: str = setting("", "directory of a model to learn from, by a KL", "teacher")
    reward_weights: Numbers = setting((), "weights of judges, rules, environment", "rewards")
    cost_judge: Texts = setting((), "like --judge, for the cost (a constraint)", "rewards")
    cost_rule: Texts = setting((), "like --rule, for the cost (`cost` of FILE.py)", "rewards")
    judge_max_new_tokens: int = setting(1024, "longest critique with verdict", "rewards", low=1)
    judge_format: Texts = setting((), "rows of FORMATS: one, or one per judge", "evaluation")
    eval_data: str = setting("", "prompts with an `answer`; default: rows of --data", "evaluation")
    eval_samples: int = setting(0, "samples per held-out prompt, for pass@k", "evaluation")
    steps: int = setting(40, "batches to train on; 0: only evaluate", "training")
    eval_every: int = setting(10, "steps between evaluations on held-out rows", "training", low=1)
    lr: float = setting(1e-6, "learning rate of AdamW", "training", low=TINY)
    lr_warmup_steps: int = setting(5, "steps in which the learning rate grows to --lr", "training")
    lr_decay_to: float = setting(1.0, "final fraction of --lr; demo: 0.1", "training", 0, 1)
    max_tokens_per_micro_batch: int = setting(8192, "tokens per pass; CPU: fewer", "training", 1)
    tp: int = setting(1, "tensor-parallel ranks", "training", low=1)
    pp: int = setting(1, "pipeline-parallel ranks", "pipelines", low=1)
    sp: bool = setting(False, "sequence parallelism, with --tp", "training")
    schedule: str = setting("1f1b", "1f1b | fused (with critics)", "pipelines")
    lora: int = setting(0, "rank of adapters to train; 0: train all weights", "lora", low=0)
    recompute: int = setting(0, "layers to recompute; -1: as few as fit", "training", AS_FITS)
    temperature: float = setting(1.0, "sampling temperature of answers", "engines", low=TINY)
    max_new_tokens: int = setting(1024, "longest answer", "engines", low=1)
    answer_tokens: int = setting(0, "fixed length of answers, as in papers; 0: off", "engines")
    max_model_len: int = setting(0, "prompt + answer + 6 for SGLang; 0: model's limit", "engines")
    video_fps: float = setting(2.0, "frames shown per second of video", "images", TINY, 1000)
    video_frames: int = setting(16, "most frames shown of a video", "images", low=2)
    rollout_tp: int = setting(1, "ranks per rollout engine", "engines", low=1)
    genrm_tp: int = setting(1, "ranks per genrm engine", "engines", low=1)
    mem_fraction: float = setting(0.7, "fraction of a GPU for engines", "engines", 0.05, 0.95)
    deterministic: bool = setting(True, "same seed, same tokens; off with CUDA", "engines")
    resume: str = setting("auto", "auto: newest in OUT; never; or a folder", "checkpoints")
    save_every: int = setting(10, "steps between saves; also at the end; 0: none", "checkpoints")
    keep: int = setting(2, "how many newest checkpoints to keep", "checkpoints", low=1)
    save_hf_every: int = setting(0, "steps between Hugging Face models; 0: none", "checkpoints")
    weight_decay: float = 0.0  # AdamW's; no flag

    @property
    def judge_models(self) -> tuple[str, ...]:
        """The directories of all judges: those of the reward, then those of the cost."""
        return self.judge + self.cost_judge

    @property
    def reference(self) -> str:
        """The directory of the reference of the policy's KL."""
        return self.teacher or self.model

    @property
    def evaluates(self) -> bool:
        """True if the run only answers held-out prompts, and trains nothing."""
        return self.steps == 0

    def recomputed(self, layers: int) -> int:
        """Return how many of a stage's layers keep only their input, and are recomputed."""
        return layers if self.recompute == AS_FITS else min(self.recompute, layers)

    @property
    def engine_start_s(self) -> float:
        """The deadline for the start of an engine, while the other ranks wait."""
        return 0.9 * self.timeout_s

    @property
    def engine_lost_s(self) -> float:
        """The deadline for every call to an engine: above a prefill's time, below a rank's longest wait."""
        return self.timeout_s / 2

    def __post_init__(self):
        """Raise UserError if a value can't work with any number of ranks."""
        for field in settings_of(type(self)):
            value = vars(self)[field.name]
            check_limits(field, value, f"--{dashed(field.name)} {value}")
        self._check_together()
        longest = max(self.max_model_len, self.max_new_tokens + 1)
        budget = self.max_tokens_per_micro_batch
        if self.command == "rl" and not self.evaluates and longest > budget:
            raise UserError(
                f"--max-tokens-per-micro-batch {budget}: one sample may have {longest} tokens"
            )

    def _check_together(self) -> None:
        """Raise UserError if settings contradict each other."""
        if self.command == "rl" and self.device == "cuda" and self.dtype != "bfloat16":
            raise UserError(f"--dtype {self.dtype}: with --device cuda engines only take bfloat16")
        exactly = self.answer_tokens
        if exactly and exactly != self.max_new_tokens:
            raise UserError(
                f"--answer-tokens {exactly}: --max-new-tokens {self.max_new_tokens} contradicts it, "
                "so leave that out"
            )
        if self.sp and self.tp == 1 and ":tp" not in self.placement:
            raise UserError("--sp needs --tp 2 or more")
        if self.environment and exactly:
            raise UserError(
                f"--answer-tokens {exactly}: with --environment turns end by themselves"
            )
        sources = len(self.judge) + len(self.rule) + bool(self.environment)
        weights = self.reward_weights
        shown = f"--reward-weights {as_text(weights)}"
        if len(weights) not in (0, sources):
            raise UserError(
                f"{shown}: one for each --judge, then each --rule, then --environment, so {sources}"
            )
        # also rejects NaN
        if weights and not (min(weights) >= 0 and 0 < sum(weights) < math.inf):
            raise UserError(f"{shown}: finite numbers are needed, none below 0 and one above")


# the demos: addition of numbers that are written, drawn or filmed; each has an actor and a judge
DEMO_MODELS = Path(__file__).parent / "demo" / "models"
DEMOS = {"tiny": "written", "images": "drawn", "video": "filmed"}  # preset -> folder of its models
DEMO = dict(lr=5e-4, lr_decay_to=0.1, algorithm_defaults=("critic_lr=1e-3",))
DEMO |= dict(max_model_len=256, max_new_tokens=72, judge_max_new_tokens=100)
ON_CUDA = dict(dtype="bfloat16", max_model_len=4096, max_new_tokens=2048, recompute=AS_FITS)
ON_CUDA |= dict(prompts_per_step=64)
# presets override Config's defaults
PRESETS = {"base": {}, "tiny": DEMO, "images": DEMO, "video": DEMO | {"steps": 20}, "cuda": ON_CUDA}


# group of settings -> whether --steps 0 uses it; parse_config makes flags of them. Each extra adds its own
GROUPS = dict.fromkeys(("run", "data", "evaluation", "engines"), True)
GROUPS |= dict.fromkeys(("training", "loop", "rewards", "checkpoints"), False)


def dashed(name: str) -> str:
    return name.replace("_", "-")


def as_text(value: object) -> str:
    """Return a setting's value as one types it on the command line."""
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def parse_config(arguments: list[str], usage: str = "") -> Config:
    """Read the command line of run.py. Raises UserError if a setting is wrong."""
    config = parse_settings(Config, arguments, usage, [*GROUPS], {"command": "rl"})
    return evaluation_of(config) if config.evaluates else config


def evaluation_of(config: Config) -> Config:
    """Return the settings of an evaluation, with training's defaults.

    Raises UserError if there are no prompts to answer, or if a checkpoint is named.
    """
    if not config.eval_data and config.preset not in DEMOS:
        raise UserError(
            "--steps 0 needs prompts to answer: --eval-data FILE; "
            "--preset tiny, images or video has the demo's"
        )
    if config.resume not in ("auto", "never"):
        raise UserError(
            f"--resume {config.resume}: --steps 0 reads no checkpoint: "
            "evaluate the Hugging Face directory of --save-hf-every as --model"
        )
    settings = settings_of(Config)
    used = {field.name for field in settings if GROUPS.get(field.metadata["group"])}
    used = used - {"data", "genrm_tp"} | {"steps"}
    unused = {field.name: field.default for field in settings if field.name not in used}
    # keep the first judge's format: it also finds final answers during training
    return dataclasses.replace(config, **unused, judge_format=config.judge_format[:1])


S = TypeVar("S", bound=Config)


def parse_settings(
    kind: type[S], arguments: list[str], usage: str, groups: Sequence[str], defaults: dict[str, Any]
) -> S:
    """Read a command line as a Config of some kind. Raises UserError if a setting is wrong.

    usage: the first text of --help. groups: the groups of settings that are flags. defaults: overrides of the
    kind's defaults. Later ones win: the device's, `defaults`, the preset's, --config's, the command line.
    """
    parser = parser_of(kind, usage, groups)
    given = vars(parser.parse_args(arguments))
    if path := given.pop("config", None):
        fields = {f.name: f for f in settings_of(kind) if f.metadata["group"] in groups}
        try:
            given = vars(parser.parse_args(words_in(path, fields))) | given
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"--config {path}: {error}") from None
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


def words_in(path: str, fields: dict[str, dataclasses.Field]) -> list[str]:
    """Return the settings in a JSON file as one types them. Raises ValueError or OSError if it can't.

    A run's config.json also has what follows from its settings: that is worked out again. In a run's folder,
    which may have moved, it names that folder.
    """
    found = json.loads(Path(path).read_text())
    if not isinstance(found, dict):
        raise ValueError('an object of settings is needed, such as {"lr": 1e-6}')
    if "versions" not in found and (unknown := found.keys() - fields.keys()):
        raise ValueError(f"{min(unknown)} is not a setting")
    if "versions" in found and Path(path).with_name("lock").exists():
        found["out"] = str(Path(path).parent)
    words = []
    for name in (name for name in fields if found.get(name) not in (None, "", [])):
        flag = f"--{dashed(name)}"
        match found[name]:
            case list(several):
                words += [flag, *map(str, several)]
            case True:
                words.append(flag)
            case False if not isinstance(fields[name].default, bool):
                raise ValueError(f"{name} needs a value, not false")
            case False:
                words += [f"--no-{dashed(name)}"] if fields[name].default else []
            case value:
                words.append(f"{flag}={value}")
    return words


def text(word: str) -> str:
    """Return a word of the command line. Raises ValueError if it is empty, as "$UNSET", or has a \\r."""
    if not word.strip() or any(unicodedata.category(c) == "Cc" for c in word):
        raise ValueError
    return os.path.expanduser(word)  # shells don't expand the ~ of --out=~/runs


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(f"{message}; see --help")


def parser_of(kind: type[Config], usage: str, groups: Sequence[str]) -> Parser:
    """Build a parser for these groups of settings, which returns only settings that are given."""
    parser = Parser(
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [--name value ...]",
        description=usage,
    )
    types = get_type_hints(kind)
    words = "JSON of settings, such as a run's config.json; the command line wins"
    parser.add_argument("--config", type=text, metavar="FILE", help=words)
    headings = {group: parser.add_argument_group(group) for group in groups}
    for field in settings_of(kind):
        heading = headings.get(field.metadata["group"])
        if heading is None:
            continue
        default = "" if field.default is False else as_text(field.default)
        how = {"help": field.metadata["help"] + (f" [{default}]" if default else "")}
        several = get_args(types[field.name])  # for a tuple: the type of its values, and ...
        value = several[0] if several else types[field.name]
        if value is bool:
            how["action"] = argparse.BooleanOptionalAction if field.default else "store_true"
        else:
            how["type"] = text if value is str else value
            how["metavar"] = value.__name__.upper()
        if several:
            how |= {"nargs": "+", "action": "extend"}
        heading.add_argument(f"--{dashed(field.name)}", **how)
    return parser


def settings_of(kind: type[Config]) -> list[dataclasses.Field]:
    """Return the fields that are flags."""
    return [field for field in dataclasses.fields(kind) if field.metadata]


def demo_models(given: dict, preset: str, command: str) -> dict:
    """Return the demo's models. Raises UserError if a setting needs another model."""
    for name in ("data", "eval_data", "judge", "cost_judge", "critic"):
        if given.get(name):
            raise UserError(f"--{dashed(name)} needs --model: the demo's models only know addition")
    folder = DEMO_MODELS / DEMOS.get(preset, "written")
    # relative paths, so that a run can resume when the project has moved
    models = {"model": os.path.relpath(folder / "actor")}
    if command == "rl":
        models["judge"] = (os.path.relpath(folder / "judge"),)
    return models
