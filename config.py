"""Every setting of a run: its default, its limits, and what it needs from the others. Read from the command line, nowhere else."""

from __future__ import annotations

import argparse
import dataclasses
import math
from dataclasses import dataclass

import algorithms
import genrm
import losses
import placement
from serving import MOST_LATE

AT_LEAST_1 = ("steps", "prompts_per_step", "max_new_tokens", "judge_max_new_tokens", "max_judge_failures", "eval_every")
AT_LEAST_1 += ("tp", "pp", "cp", "max_tokens_per_micro_batch", "updates_per_step", "max_running_requests", "max_total_tokens")
AT_LEAST_1 += ("judgements", "judge_calls_at_once", "rollout_tp", "genrm_tp", "keep", "max_skips", "ptx_batch", "batch_size")
AT_LEAST_1 += ("critic_epochs", "samples")
AT_LEAST_0 = ("max_refill_waves", "eval_prompts", "rollout_ranks", "judge_temperature", "lr_warmup_steps", "weight_decay", "clip_low")
AT_LEAST_0 += ("critic_lr_warmup_steps", "critic_warmup", "judge_retries", "max_empty_steps", "save_every")
AT_LEAST_0 += ("save_hf_every", "lagrange_lr", "ptx_coef")
AT_LEAST_0 += ("clip_dual", "kl_coef", "entropy_coef", "overlong_from", "overlong_penalty", "mismatch_max", "mismatch_mask")
ABOVE_0 = ("temperature", "lr", "clip_grad", "clip_high", "max_logprob_diff", "engine_timeout_s", "collective_timeout_s")
ABOVE_0 += ("critic_lr", "value_clip", "dpo_beta")
ABOVE_0 += ("judge_timeout_s", "request_timeout_s", "meet_every_s", "stale_weight_max", "engine_probe_s")
LIMITS = {name: (1, math.inf) for name in AT_LEAST_1} | {name: (0, math.inf) for name in AT_LEAST_0}
LIMITS |= {name: (1e-12, math.inf) for name in ABOVE_0} | {name: (0, 1) for name in ("lr_decay_to", "adam_beta1", "adam_beta2")}
LIMITS |= {name: (0, 1) for name in ("gamma", "gae_lambda")} | {"lagrange_init": (0, algorithms.MULTIPLIER_MAX)}
LIMITS |= {"answers_per_prompt": (1, math.inf), "over_dispatch": (1, 4), "mem_fraction": (0.05, 0.95), "port": (1024, 65000)}


# the first word of the command line
COMMANDS = {
    "rl": "reinforcement learning: the loop of controller.py",
    "sft": "supervised fine-tuning",
    "rm": "a reward model from pairs of answers",
    "dpo": "direct preference optimisation, from such pairs",
    "eval": "accuracy and pass@k of a model",
}


@dataclass(frozen=True)
class Config:
    """Every setting. Sizes in tokens, times in seconds; the values below suit the demo."""

    # ---- what to run
    command: str = "rl"  # a row of COMMANDS
    preset: str = ""  # a row of PRESETS; default: tiny
    mode: str = "partial"  # who holds the devices when: full | partial (colocation) | auto: the faster of both
    algorithm: str = "grpo"  # a row of algorithms.ALGORITHMS
    out: str = ""  # what the run leaves behind goes here; default: runs/<preset>-<mode>
    steps: int = 40  # batches to train on, each for updates_per_step optimizer updates
    seed: int = 0  # of the demo's models, the order of prompts and the engines' random state
    dry_run: bool = False  # print the resolved settings, who runs where and how much memory that takes, and end
    rollout_only: bool = False  # serve and judge, but never train; the samples go to OUT/replay.jsonl
    train_only: bool = False  # train on the samples of --replay; no engine is started
    replay: str = ""  # what a --rollout-only run wrote
    # ---- models and prompts
    model: str = ""  # Hugging Face directory of the actor; default: the demo's, made on first use
    judge: tuple[str, ...] = ()  # Hugging Face directory of the reward model, or of several; with --model and --rule none is needed
    judge_weights: tuple[float, ...] = ()  # of each judge's verdict among those of its signal, in proportion; default: equal
    judge_signal: tuple[str, ...] = ()  # what each judge's verdict is part of, reward or cost; default: reward
    data: str = ""  # prompts, JSONL or Parquet; default: the built-in addition task
    rule: tuple[str, ...] = ()  # rules beside the judges: FILE.py (its function reward), FILE.py:name or a row of rewards.RULES
    reward_weights: tuple[float, ...] = ()  # in the reward, in proportion: of the judges together, then of each --rule; default: equal
    cost_rule: tuple[str, ...] = ()  # likewise (in FILE.py: cost), for the cost, which is the judges' and their sum
    judge_format: tuple[str, ...] = ()  # a row of genrm.FORMATS, for all or for each; default: chat with --data, addition without
    trust_remote_code: bool = False  # run Python code that a model's directory brings along, for its tokenizer or in its server
    # ---- the batch
    prompts_per_step: int = 16  # groups trained on in a step
    answers_per_prompt: int = 8  # samples in a group
    max_refill_waves: int = 3  # more waves of prompts to replace groups whose rewards are all equal
    max_empty_steps: int = 0  # stop after so many steps in a row in which all groups had equal rewards; 0: go on
    over_dispatch: float = 1.0  # start so many times the prompts needed; the first to end make the batch, the rest are cut off
    partial_rollout: bool = False  # answers that were cut off are continued in the next step, else their prompts come again
    # ---- who serves where
    rollout_ranks: int = 0  # partial mode: ranks that serve rollout, the rest serve genrm; 0: half
    rebalance: bool = False  # partial mode: move ranks between the roles from measured load
    rollout_tp: int = 1  # ranks that one rollout engine spans
    genrm_tp: int = 1  # ranks that one genrm engine spans
    meet_every_s: float = 0.05  # controllers that serve side by side meet at least this often
    request_timeout_s: float = 180.0  # for a group to be written; then another engine is asked
    # ---- sampling
    temperature: float = 1.0  # of the answers
    max_new_tokens: int = 72  # of an answer
    judge_max_new_tokens: int = 100  # of a critique and its verdict
    judge_temperature: float = 0.0  # of the judge; 0: greedy
    judgements: int = 1  # critiques of a sample; the reward is the mean of their verdicts
    judge_vote: bool = False  # the reward is the majority's verdict instead, a tie rejects
    judge_timeout_s: float = 120.0  # for one call of the judge
    judge_retries: int = 2  # more calls while a verdict is missing: late or, of a judge that samples, unreadable
    judge_calls_at_once: int = 1024  # by one controller; others wait
    max_judge_failures: int = 64  # stop when so many answers got no verdict and none got one
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
    stale_weight_max: float = 2.0  # largest importance weight of a token that older weights wrote
    max_logprob_diff: float = 1e-3  # stop when trainer and engine disagree by more on one token; bfloat16 needs about 1
    max_skips: int = 3  # stop when the loss or gradient of so many updates in a row isn't finite; such an update is skipped
    # ---- the algorithm
    gamma: float = 1.0  # discount of a token's reward for each token before it
    gae_lambda: float = 1.0  # generalised advantage estimation: from the critic's word (0) to what was rewarded (1)
    clip_dual: float = 0.0  # a token of negative advantage A loses at most clip_dual * -A, above 1 (dual clip); 0: unbounded
    kl_coef: float = 0.0  # weight of the KL to the start weights, a reference model; 0: none is made
    kl_in: str = "loss"  # where the KL goes: loss | reward
    kl_estimator: str = "k3"  # k1 | k2 | k3; in the loss take k2 or k3, in the reward k1
    entropy_coef: float = 0.0  # weight of the entropy, which lowers the loss
    overlong_from: int = 0  # tokens of an answer from where the reward falls, up to max_new_tokens; 0: it doesn't
    overlong_penalty: float = 1.0  # by so much at max_new_tokens
    mismatch_max: float = 0.0  # correct for the engine's numbers by importance weights, at most this large (truncated); 0: don't
    ptx_coef: float = 0.0  # weight of the pretraining term, cross-entropy on --ptx-data; 0: there is none
    ptx_data: str = ""  # JSONL or Parquet, rows with `text`, or `prompt` and `response`
    ptx_batch: int = 16  # texts of an optimizer step
    mismatch_mask: float = 0.0  # tokens whose importance weight isn't in [1/this, this] give no gradient; 0: all do
    # ---- the constraint, of algorithms with a cost: the mean cost of an answer shall be at most cost_limit
    cost_limit: float = 0.0  # of any sign
    lagrange_init: float = 1.0  # lambda, the weight of the cost against the reward, before the first step; 0: it stays 0
    lagrange_lr: float = 0.1  # a step adds this times lambda times (mean cost - cost_limit) to ln(lambda)
    # ---- the critic, of algorithms that have one
    critic: str = ""  # Hugging Face directory of the value model it starts from; default: the actor's, with a head of zeros
    critic_lr: float = 1e-3  # AdamW; the other settings of its optimizer are the actor's
    critic_lr_warmup_steps: int = 5  # linear, from 0; then constant
    critic_epochs: int = 1  # passes of a critic over a step's answers, each with its optimizer steps; the actor makes one
    critic_warmup: int = 0  # first steps in which the critic learns alone; the actor's learning rate begins after them
    value_clip: float = 0.2  # a value that moved by more towards its return since the step began isn't pulled on; inf: no limit
    # ---- sft, rm, dpo and eval
    batch_size: int = 32  # examples of a step: conversations, or pairs of answers
    dpo_beta: float = 0.1  # dpo: how dear it is to leave the start weights
    samples: int = 8  # eval: answers to each prompt, beside a greedy one
    pass_at: tuple[int, ...] = (1, 4, 8)  # eval: the k of pass@k, at most `samples`
    # ---- the engines
    max_model_len: int = 256  # context of an engine, prompt and answer
    max_running_requests: int = 128  # answers that one engine decodes at once
    max_total_tokens: int = 32768  # tokens in an engine's KV cache
    mem_fraction: float = 0.7  # CUDA: part of the device that an awake engine may hold
    port: int = 30000  # rank r's rollout engine listens on port + 2 r, its genrm engine on the next
    engine_timeout_s: float = 300.0  # for an engine to come up
    collective_timeout_s: float = 600.0  # for the slowest controller to arrive
    engine_probe_s: float = 30.0  # an awake engine without a sign of life for so long hangs: it is started again
    deterministic: bool = True  # same seed, same tokens, whatever shares a batch; off in the cuda preset, where it costs speed
    host: str = "127.0.0.1"  # this machine's address that ranks and servers listen on; any but loopback opens them to a network
    # ---- checkpoints
    resume: str = "auto"  # continue the newest checkpoint under --out (auto), none (never), or the checkpoint in this folder
    save_every: int = 10  # steps between checkpoints, and one at the end; 0: none
    keep: int = 2  # newest checkpoints that are kept
    save_hf_every: int = 0  # steps between checkpoints with a Hugging Face directory in them, and at the end; 0: none

    @property
    def judges(self) -> int:
        """Judge models of a reinforcement learning run: the demo's one isn't named. 0: rules alone say what an answer is worth."""
        return 1 if self.command == "rl" and not self.model else len(self.judge)

    def __post_init__(self):
        """Raises ValueError with one sentence for a value that can't work whatever the number of ranks."""
        values = vars(self)
        for name, (low, high) in LIMITS.items():
            value = values[name]
            if not low <= value <= high:  # NaN is refused, too
                needed = f"at least {low:g}" if high == math.inf else f"{low:g} to {high:g}"
                raise ValueError(f"--{dashed(name)} {value}: {needed} is needed")
        self._check_algorithm()
        for name in ("max_new_tokens", "judge_max_new_tokens"):
            if (value := values[name]) >= self.max_model_len:
                raise ValueError(f"--{dashed(name)} {value} leaves prompts no room in --max-model-len {self.max_model_len}")
        if self.max_tokens_per_micro_batch < self.max_model_len:
            raise ValueError(
                f"--max-tokens-per-micro-batch {self.max_tokens_per_micro_batch} is less than one sample may have: "
                f"--max-model-len {self.max_model_len}"
            )
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"--dtype {self.dtype} is unknown; choose float32 or bfloat16")
        self._check_command()
        self._check_judges()
        self._check_patience()
        if self.rebalance and self.mode == "full":
            raise ValueError("--rebalance moves ranks between rollout and genrm: in --mode full both hold all ranks")
        if self.sp and self.tp == 1:
            raise ValueError("--sp needs --tp 2 or more")
        if self.rollout_only and self.train_only:
            raise ValueError("--rollout-only never trains and --train-only starts no engine: choose one")
        if self.train_only != bool(self.replay):
            raise ValueError("--train-only needs --replay FILE, what a --rollout-only run wrote, and nothing else reads that")

    def _check_command(self):
        """What the command asks of models, data and switches. Raises ValueError like the rest."""
        if self.command == "rl":
            if (self.data or self.judge) and not self.model:
                raise ValueError("--data and --judge need --model: the demo's models only know addition")
            if self.model and not (self.judge or self.rule or self.train_only):
                raise ValueError("--model needs a --judge or a --rule, which say what an answer is worth")
            return
        if self.judge or self.dry_run or self.rollout_only or self.train_only:
            raise ValueError(f"run.py {self.command} has no --judge, --dry-run, --rollout-only or --train-only")
        if not self.model and (self.data or self.command == "eval"):
            raise ValueError(f"run.py {self.command} needs --model DIR{' with --data' if self.command != 'eval' else ''}")
        if self.updates_per_step > 1:
            raise ValueError(f"run.py {self.command} makes one update a step: --updates-per-step is for run.py rl")
        if not all(1 <= k <= self.samples for k in self.pass_at):
            raise ValueError(f"--pass-at {as_text(self.pass_at)}: each k from 1 to --samples {self.samples} is needed")

    def _check_algorithm(self):
        """What the settings of the algorithm ask of each other. Raises ValueError like the rest."""
        least = 1 if algorithms.get_algorithm(self.algorithm).greedy else 2
        if self.answers_per_prompt < least:
            needed = f"at least {least} is needed by --algorithm {self.algorithm}"
            raise ValueError(f"--answers-per-prompt {self.answers_per_prompt}: {needed}")
        for name, rows in (("kl_in", ("loss", "reward")), ("kl_estimator", losses.KL)):
            if (value := vars(self)[name]) not in rows:
                raise ValueError(f"--{dashed(name)} {value} is unknown; choose one of {', '.join(rows)}")
        if (self.critic or self.critic_warmup) and not algorithms.get_algorithm(self.algorithm).critics:
            raise ValueError(f"--critic and --critic-warmup are for algorithms with a critic: --algorithm {self.algorithm} has none")
        if self.critic and not self.model:
            raise ValueError("--critic needs --model: the demo's critic starts from its actor")
        if self.critic_warmup >= self.steps:
            raise ValueError(f"--critic-warmup {self.critic_warmup} leaves the actor none of --steps {self.steps}")
        for name in ("clip_dual", "mismatch_mask"):
            if 0 < (value := vars(self)[name]) <= 1:
                raise ValueError(f"--{dashed(name)} {value:g}: 0 or more than 1 is needed")
        if "cost" in algorithms.get_algorithm(self.algorithm).signals and not self.cost_rule and "cost" not in self.judge_signal:
            raise ValueError(f"--algorithm {self.algorithm} needs a --cost-rule or a --judge-signal cost: what an answer costs")
        if bool(self.ptx_coef) != bool(self.ptx_data):
            raise ValueError("--ptx-coef and --ptx-data need each other")
        if not math.isfinite(self.cost_limit):
            raise ValueError(f"--cost-limit {self.cost_limit}: a finite number is needed")
        if self.overlong_from >= self.max_new_tokens:
            raise ValueError(f"--overlong-from {self.overlong_from} must be below --max-new-tokens {self.max_new_tokens}")

    def _check_judges(self):
        """What the settings of the judges ask of each other. Raises ValueError like the rest."""
        judges, weights, rewards = self.judges, self.judge_weights, min(1, self.judges) + len(self.rule)
        for judge_format in self.judge_format:
            if judge_format not in genrm.FORMATS:
                raise ValueError(f"--judge-format {judge_format} is unknown; choose one of {', '.join(genrm.FORMATS)}")
        if not judges and (weights or self.judge_signal):
            raise ValueError("--judge-weights and --judge-signal need a --judge")
        if len(self.judge_format) not in (0, 1, judges):
            raise ValueError(f"--judge-format {as_text(self.judge_format)}: one for all judges is needed, or one for each, so {judges}")
        if len(weights) not in (0, judges):
            raise ValueError(f"--judge-weights {as_text(weights)}: one for each judge is needed, so {judges}")
        signals = self.judge_signal or ("reward",) * judges
        if len(signals) != judges or not set(signals) <= set(genrm.SIGNALS) or (judges and "reward" not in signals):
            needed = f"{' or '.join(genrm.SIGNALS)} is needed for each judge, so {judges}, and reward at least once"
            raise ValueError(f"--judge-signal {as_text(self.judge_signal)}: {needed}")
        if len(self.reward_weights) not in (0, rewards):
            needed = f"{'one for the judges and ' * min(1, judges)}one for each --rule is needed, so {rewards}"
            raise ValueError(f"--reward-weights {as_text(self.reward_weights)}: {needed}")
        for name in ("judge_weights", "reward_weights"):
            weights = vars(self)[name]
            if weights and not (all(weight >= 0 for weight in weights) and 0 < sum(weights) < math.inf):  # NaN is refused, too
                raise ValueError(f"--{dashed(name)} {as_text(weights)}: finite numbers are needed, none below 0 and one above")
        for signal in set(signals):
            if self.judge_weights and not sum(weight for weight, of in zip(self.judge_weights, signals, strict=True) if of == signal):
                raise ValueError(f"--judge-weights {as_text(self.judge_weights)}: one above 0 is needed for each --judge-signal")
        if self.judgements > 1 and self.judge_temperature == 0:
            raise ValueError(f"--judgements {self.judgements} needs --judge-temperature above 0: a greedy judge repeats itself")

    def _check_patience(self):
        """What waits for what. Raises ValueError like the rest."""
        if (1 + self.judge_retries) * self.judge_timeout_s >= self.collective_timeout_s:
            raise ValueError(
                f"--judge-retries {self.judge_retries} with --judge-timeout-s {self.judge_timeout_s:g} may take longer than the other "
                f"controllers wait, --collective-timeout-s {self.collective_timeout_s:g}"
            )
        if MOST_LATE * self.request_timeout_s >= self.collective_timeout_s:
            raise ValueError(
                f"{MOST_LATE} late engines, --request-timeout-s {self.request_timeout_s:g} each, may take longer than the other "
                f"controllers wait, --collective-timeout-s {self.collective_timeout_s:g}"
            )
        if self.engine_timeout_s >= self.collective_timeout_s:
            raise ValueError(
                f"--engine-timeout-s {self.engine_timeout_s:g}, also for one that is started again, is longer than the other "
                f"controllers wait, --collective-timeout-s {self.collective_timeout_s:g}"
            )


# A preset is what differs from Config's defaults. `tiny` is the demo, whose values those are.
PRESETS = {
    "tiny": {},
    "cuda": dict(dtype="bfloat16", max_logprob_diff=1.0, lr=1e-6, max_model_len=4096, max_new_tokens=2048, judge_max_new_tokens=1024)
    | dict(max_running_requests=256, max_total_tokens=1 << 20, max_tokens_per_micro_batch=16384, prompts_per_step=64)
    | dict(deterministic=False, critic_lr=1e-5),
}


def dashed(name: str) -> str:
    """A setting's name on the command line."""
    return name.replace("_", "-")


def as_text(value) -> str:
    """A setting's value as the command line takes it."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def printable(text: str) -> str:
    """Text from a model, a file or a server as a terminal may see it: what isn't printable is spelled out, but for line ends and tabs.

    An escape sequence could otherwise hide or rewrite what stands on the screen.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def option(kind: str) -> dict:
    """What argparse has to know of a setting whose field is annotated `kind`; a tuple takes one value or more."""
    if kind == "bool":
        return {"action": argparse.BooleanOptionalAction}
    one = kind.removeprefix("tuple[").removesuffix(", ...]")
    known = {"type": {"int": int, "float": float, "str": str}[one], "metavar": one.upper()}
    return known if one == kind else known | {"nargs": "+"}


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line, like all of ours."""

    def error(self, message: str):
        raise ValueError(f"{message}; see run.py --help")


def parse_config(arguments: list[str], usage: str = "") -> Config:
    """The resolved settings: Config's defaults, then the preset, then the command line. Raises ValueError naming the setting.

    usage: how the program is started, for --help.
    """
    command, *rest = arguments if arguments[:1] and arguments[0] in COMMANDS else ("rl", *arguments)
    commands = "commands:\n" + "\n".join(f"  {name:5} {what}" for name, what in COMMANDS.items())
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=usage, epilog=commands, formatter_class=form, allow_abbrev=False)
    comments = field_comments()
    for field in dataclasses.fields(Config)[1:]:  # the command has been read
        help_text = f"{comments.get(field.name, '')} [{as_text(field.default)}]".replace("%", "%%")
        parser.add_argument(f"--{dashed(field.name)}", default=argparse.SUPPRESS, help=help_text, **option(field.type))
    parsed = vars(parser.parse_args(rest))
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in parsed.items()}
    preset = given.get("preset") or "tiny"
    if preset not in PRESETS:
        raise ValueError(f"--preset {preset} is unknown; choose one of {', '.join(PRESETS)}")
    config = Config(**PRESETS[preset] | given | {"preset": preset, "command": command})
    formats = config.judge_format or (("chat" if config.data else "addition"),)
    seam = "-rollout-only" * config.rollout_only + "-train-only" * config.train_only  # or a run would move its own replay aside
    return dataclasses.replace(
        config,
        out=config.out or (f"runs/{preset}-{config.mode}{seam}" if command == "rl" else f"runs/{command}"),
        partial_rollout=config.partial_rollout or config.train_only,  # from the second step on, older weights wrote the samples
        judge_format=formats if len(formats) > 1 else formats * max(1, config.judges),  # without a judge: what a final answer is
        judge_weights=config.judge_weights or (1.0,) * config.judges,
        judge_signal=config.judge_signal or ("reward",) * config.judges,
    )


def field_comments() -> dict[str, str]:
    """The comment behind each field of Config, which is also its --help text."""
    import inspect

    lines = [line for line in inspect.getsource(Config).splitlines() if ":" in line and " = " in line and "#" in line]
    return {line.split(":")[0].strip(): line.split("#", 1)[1].strip() for line in lines}


def check_batch(config: Config, world_size: int) -> list[placement.Plan]:
    """What only the number of ranks can tell (pure). Raises ValueError with the numbers; returns the plans, as `make_plans`."""
    model_parallel = config.tp * config.pp * config.cp
    if world_size % model_parallel:
        raise ValueError(f"--tp {config.tp} x --pp {config.pp} x --cp {config.cp} = {model_parallel} doesn't divide {world_size} ranks")
    dp = world_size // model_parallel
    if config.prompts_per_step % dp:
        raise ValueError(f"--prompts-per-step {config.prompts_per_step} can't be shared evenly by {dp} data-parallel ranks")
    return placement.make_plans(config, world_size)
