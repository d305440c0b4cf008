"""Learning from examples instead of a model's own answers: SFT and reward models.

    torchrun --nproc-per-node 2 examples/finetune.py sft --model DIR --data FILE      or rm

There is no engine and no controller: every rank reads the file and makes the same plan. An example is one
Sample, or two for a pair of answers: the chosen one first, both in one micro-batch, as their loss needs both.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

import build
import run
from actor import Actor, learning_rate
from config import HELD_OUT, Config, parse_settings, setting
from controller import MAX_SKIPS
from demo.task import example_rows
from extras import lora
from extras.critic import Critic
from extras.memory import check as memory
from extras.memory.estimate import with_micro_batch
from inputs import tokenization
from inputs.hf_directory import sees
from inputs.rows import PLACES, as_turns, read_conversation, read_rows, with_tools
from inputs.shuffled import Shuffled, identities
from placement import make_placement
from reporting.describe import run_metadata
from reporting.metrics import MetricsWriter
from reporting.progress import Progress
from runtime import shutdown
from runtime.devices import choose_device
from runtime.errors import UserError
from runtime.out_folder import archive
from runtime.world import raise_on_all
from sample import Sample
from scheduling.balance import Measure, packed_length, plan_batch
from scheduling.layout import Placement
from scheduling.pipeline import schedule_of
from training.model import check_models
from training.packing import MicroBatch, Packed
from training.trainer import LossSums, Trainer, as_sequences, loss_sums, means

if TYPE_CHECKING:
    from inputs.tokenization import Tokenizer

Example = list[Sample]  # one, or the chosen and the rejected answer
PAIR_STATS = ("accuracy", "margin", "chosen", "rejected")
# groups of settings with flags
GROUPS = ("run", "data", "training", "pipelines", "memory", "lora", "examples")


@dataclass(frozen=True)
class FinetuneConfig(Config):
    """The settings of `sft` and `rm`: some of run.py's, and three of their own."""

    steps: int = setting(40, "batches to train on", "training", low=1)
    batch_size: int = setting(32, "examples per step: conversations, or pairs", "examples", low=1)
    weight_decay: float = setting(0.0, "AdamW", "examples")


def read_answer(row: dict, answer: Any, tokenizer: Tokenizer, where: str) -> tuple:
    """Return a row's prompt and answer, both text or both chat turns. Raises UserError if one is wrong."""
    prompt = row.get("prompt")
    if isinstance(prompt, str) and isinstance(answer, str) and prompt and answer:
        last = answer
        if tokenizer.eos_token_id is None:
            raise UserError(f"{where}: {tokenizer.name_or_path} has no end-of-sequence token")
    else:
        *prompt, turn = read_conversation(prompt, answer, where)
        answer = [turn]
        last = turn["content"]
    tokenization.check_prompt(tokenizer, prompt, where)
    tokenization.check_end(tokenizer, last.rstrip(), where, "answer")
    return with_tools(prompt, row, where), answer


def parse_sft(row: dict, tokenizer: Tokenizer, where: str) -> Example:
    """Read {"messages"}, {"prompt", "response"} or {"prompt", "completion"}; the model learns the answer."""
    answers = [row[n] for n in ("messages", "response", "completion") if row.get(n) is not None]
    if len(answers) != 1:
        raise UserError(f"{where}: needs `messages`, or `prompt` and `response` or `completion`")
    pair = read_answer(row, answers[0], tokenizer, where)
    prompt, response = tokenization.encode_pair(tokenizer, *pair, where)
    return [Sample(0, 0, prompt, response=response, turns=as_turns(pair[0], "user"))]


def parse_rm(row: dict, tokenizer: Tokenizer, where: str) -> Example:
    """Read {"prompt", "chosen", "rejected"}. A text ends in a dummy target: the head reads the last token."""
    if not {"chosen", "rejected"} <= row.keys():
        raise UserError(f"{where}: needs `prompt`, `chosen` and `rejected`")
    pairs = [read_answer(row, row[name], tokenizer, where) for name in ("chosen", "rejected")]
    if pairs[0][0] != pairs[1][0]:
        raise UserError(f"{where}: `chosen` and `rejected` differ before their last turns")
    from extras.scalar import encode_exchange

    texts = [encode_exchange(tokenizer, *pair, where=where) for pair in pairs]
    if texts[0] == texts[1]:
        raise UserError(f"{where}: `chosen` and `rejected` are the same")
    turns = as_turns(pairs[0][0], "user")
    return [Sample(0, n, text, response=text[-1:], turns=turns) for n, text in enumerate(texts)]


def read_examples(path: Path, tokenizer: Tokenizer, config: FinetuneConfig) -> list[Example]:
    """Read all rows. Raises UserError with file and line if one can't be used or is too long."""
    examples = []
    for line, row in read_rows(path):
        where = f"{path}:{line}"
        for name in filter(row.get, PLACES):
            raise UserError(f"{where}: it has {name}, but {config.command} learns only from texts")
        example = TASKS[config.command].parse(row, tokenizer, where)
        if (tokens := room(example)) > config.max_tokens_per_micro_batch:
            raise UserError(f"{where}: {tokens} tokens don't fit into --max-tokens-per-micro-batch")
        examples.append(example)
    return examples


def room(example: Example) -> int:  # tokens in a micro-batch
    return sum(packed_length(len(sample.prompt) + len(sample.response)) for sample in example)


def pair_loss(critic: Critic, batch: MicroBatch, output: Tensor) -> LossSums:
    """Return the mean over pairs of -log sigmoid(r(chosen) - r(rejected)), by the conventions of TRL.

    r: the scalar head at the last token. InstructGPT (arXiv 2203.02155), section 3.5, equation 1.
    """
    rewards = critic.read_targets(batch, output)  # chosen, rejected, chosen, ...
    chosen = rewards[::2]
    rejected = rewards[1::2]
    margin = chosen - rejected
    columns = zip(PAIR_STATS, (margin > 0, margin, chosen, rejected), strict=True)
    stats = {name: column.detach().sum() for name, column in columns}
    return loss_sums(-F.logsigmoid(margin).sum(), len(margin), stats)


class Task(NamedTuple):
    """A command: how a row is parsed, which model learns, and from which loss."""

    parse: Callable[[dict, Tokenizer, str], Example]
    model: type[Trainer]
    loss: Callable[[Trainer, MicroBatch, Tensor], LossSums]
    stats: tuple[str, ...] = ()  # what the loss adds up


TASKS = {
    "sft": Task(parse_sft, Actor, Actor.cross_entropy_loss),
    "rm": Task(parse_rm, Critic, pair_loss, PAIR_STATS),
}


class Learner:
    """A task, and the model that learns it."""

    def __init__(self, config: FinetuneConfig):
        """Load --model (collective: all ranks)."""
        self.task = TASKS[config.command]
        self.trainer = self.task.model(config, config.model)
        self.loss = partial(self.task.loss, self.trainer)

    def learn(self, examples: list[Example]) -> dict[str, float]:
        """Learn from a batch; return its metrics from before the update (collective: all ranks)."""
        lr = learning_rate(self.trainer.version, self.trainer.config)
        stats = self.trainer.run_step(self._packed(examples), self.loss, self.task.stats, lr)
        self.trainer.version += 1
        metrics = means(stats, ("loss", *self.task.stats), "divisor")
        return metrics | {"grad_norm": stats["grad_norm"], "skipped": stats["skipped"], "lr": lr}

    def measure(self, examples: list[Example]) -> dict[str, float]:
        """Return the metrics of examples without learning from them (collective: all ranks)."""
        stats = self.trainer.measure(self._packed(examples), self.loss, self.task.stats)
        return means(stats, ("loss", *self.task.stats), "divisor")

    def _packed(self, examples: list[Example]) -> Packed:
        """Return this rank's micro-batches."""
        trainer = self.trainer
        rooms = {(n, 0): room(each) + 1 for n, each in enumerate(examples)}
        measure = Measure(rooms, trainer.macs)
        [plan] = plan_batch(measure, trainer.config, trainer.dp_size)[trainer.dp_rank]
        micro_batches = []
        for keys in plan:
            micro_batches.append([sample for n, _ in keys for sample in examples[n]])
        return as_sequences(micro_batches)


async def prepare(config: FinetuneConfig, rank: int, say: Callable[[str], None]) -> None:
    """Check the model; on rank 0, archive --out and, without --data, write the demo's examples to it."""
    is_scalar = config.command == "rm"
    check_models(config, becomes_scalar=is_scalar)
    lora.check(config)
    if is_scalar and sees(config.model):
        raise UserError("rm: a scalar reward model reads text only, and --model sees images")
    if rank:
        return
    out = Path(config.out)
    archive(out, say)
    (out / "config.json").write_text(json.dumps(run_metadata(config), indent=1) + "\n")
    if not config.data:
        rows = example_rows(config.command, config.seed)
        (out / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(config: FinetuneConfig, placement: Placement, progress: Progress, rank: int) -> None:
    """Run `config.command`; leave metrics and a Hugging Face directory in --out (collective: all ranks)."""
    say = progress.line
    name = config.command
    out = Path(config.out)
    path = Path(config.data or out / "data.jsonl")
    [tokenizer] = tokenization.load_tokenizers(config, say)
    examples = read_examples(path, tokenizer, config)
    prompts = identities(example[0].turns for example in examples)
    order = Shuffled(examples, config.seed, HELD_OUT, prompts=prompts)
    held_out = [examples[number] for number in sorted(order.held_out)]
    config = with_micro_batch(config)
    memory.check_fits(config, placement, [])
    counts = f"{len(held_out)} more are held out, {order.repeats} repeat a prompt"
    say(f"{name}: {config.model} learns from {order.count} examples of {path}, {counts}")
    learner = Learner(config)
    learner.trainer.stop_tokens = tokenization.stop_tokens(config.model, tokenizer, say=say)
    writer = MetricsWriter(out) if rank == 0 else None
    skips = 0
    for step in range(config.steps + 1):
        row = {}
        began = time.perf_counter()
        if held_out and (step % config.eval_every == 0 or step == config.steps):
            progress.doing(f"{name}: held-out examples")
            metrics = learner.measure(held_out)
            row |= {f"{name}/held_out_{metric}": value for metric, value in metrics.items()}
            say(f"after {step:3d} steps: {shown(metrics)} on held-out examples")
        if step < config.steps:
            progress.doing(f"{name}: step {step + 1}")
            numbers = range(step * config.batch_size, (step + 1) * config.batch_size)
            metrics = learner.learn(list(map(order.training, numbers)))
            row |= {f"{name}/{metric}": value for metric, value in metrics.items()}
            row["time/step_s"] = time.perf_counter() - began
            say(f"step {step + 1:3d}/{config.steps}  {shown(metrics)}")
            progress.done()
            skips = skips + 1 if metrics["skipped"] else 0
        if writer:
            writer.write(step, row)
        if skips == MAX_SKIPS:
            raise UserError(f"the loss or the gradient of {skips} updates in a row was not finite")
    learner.trainer.export(str(out / "hf"))
    if writer and name == "rm":
        say(set_padding(out / "hf", tokenizer, examples))
    say(f"wrote {out}/: hf/ (a Hugging Face directory), metrics.jsonl, tensorboard/")


def shown(metrics: dict[str, float]) -> str:
    names = [name for name in ("loss", *PAIR_STATS) if name in metrics]
    return "  ".join(f"{name} {metrics[name]:.4f}" for name in names)


def set_padding(folder: Path, tokenizer: Tokenizer, examples: list[Example]) -> str:
    """Set a padding token that ends no example: transformers scores the last token that isn't padding."""
    ends = {None, *(sample.prompt[-1] for samples in examples for sample in samples)}
    special = [token for token, added in tokenizer.added_tokens_decoder.items() if added.special]
    pads = [tokenizer.pad_token_id, *reversed(special)]
    tokenizer.pad_token_id = next((pad for pad in pads if pad not in ends), None)
    Path(folder, "special_tokens_map.json").unlink(missing_ok=True)  # it would take precedence
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    hf = json.loads(path.read_text()) | {"pad_token_id": tokenizer.pad_token_id}
    path.write_text(json.dumps(hf, indent=2))
    if tokenizer.pad_token_id is None:
        return f"{folder} has no token to pad with: let transformers read one text at a time"
    return f"{folder} pads with {tokenizer.pad_token}, which ends no example"


def parse_command(arguments: list[str]) -> FinetuneConfig:
    """Read the command line: a row of TASKS, then its settings. Raises UserError that names the setting."""
    name = arguments[0] if arguments else ""
    if name not in TASKS:
        raise UserError("the first word is sft or rm; finetune.py sft --help lists the settings")
    defaults = dict(command=name, lr=1e-5, lr_decay_to=0.1)
    config = parse_settings(FinetuneConfig, arguments[1:], __doc__, GROUPS, defaults)
    if name == "rm" and config.lora:
        raise UserError(f"--lora {config.lora}: a reward model learns all weights")
    return config


def start(arguments: list[str], stop: shutdown.Stop) -> str:
    """Run the command line, as run.start does."""
    config = parse_command(arguments)
    schedule_of(config)  # raises UserError for a bad one
    placement = make_placement(config, build.launched("WORLD_SIZE") or 2)
    run.check_launcher(f"examples/finetune.py {config.command} ...")
    choose_device(config)
    return shutdown.run(learn(config, placement), stop)


async def learn(config: FinetuneConfig, placement: Placement) -> str:
    """Join the other ranks, train, and leave (collective: all ranks)."""
    async with run.joined(config) as (world, progress):
        await raise_on_all(world, prepare(config, world.rank, progress.line))
        await world.run(train, config, placement, progress, world.rank)
        await world.barrier()
    return ""


if __name__ == "__main__":
    run.main(sys.argv[1:], start)
