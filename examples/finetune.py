"""Learning from examples instead of a model's own answers: SFT, reward models, DPO.

    torchrun --nproc-per-node 2 examples/finetune.py sft --model DIR --data FILE      or rm, or dpo

No engine, no controller. Every rank reads the file and makes the same plan. An example is one Sample, or for
a pair of answers two, the chosen one first, which stay in one micro-batch: the loss of a pair needs both.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

import data
import run
from actor import Actor, learning_rate
from commands import memory
from config import HELD_OUT, TINY, Config, parse_settings, setting
from controller import MAX_SKIPS
from critic import Critic
from demo.task import shown_work, training_problem
from inputs.hf_directory import sees
from inputs.rows import PLACES, TURNS, as_turns, is_chat, read_rows, read_turns, with_tools
from inputs.shuffled import identities
from placement import make_placement
from reporting.describe import run_metadata
from reporting.metrics import MetricsWriter
from reporting.progress import Progress
from runtime import shutdown
from runtime.devices import choose_device
from runtime.errors import UserError
from runtime.out_folder import archive
from runtime.shutdown import Stop
from runtime.world import raise_on_all
from sample import Sample, flat
from scheduling.balance import packed_length, plan_batch
from scheduling.layout import Placement
from scheduling.pipeline import schedule_of
from training.lm_head import over_context_parallel
from training.memory import with_micro_batch
from training.model import check_models
from training.packing import NO_TARGET, MicroBatch
from training.trainer import Loss, LossSums, Trainer, as_sequences, loss_sums, means

Example = list[Sample]  # one, or the chosen and the rejected answer
GROUPS = ("run", "data", "training", "examples")  # of settings that are flags


@dataclass(frozen=True)
class FinetuneConfig(Config):
    """The settings of a run of run.py that these commands have, and their own."""

    steps: int = setting(40, "batches to train on", "training", low=1)
    batch_size: int = setting(32, "examples of a step: conversations, or pairs", "examples", low=1)
    weight_decay: float = setting(0.0, "AdamW", "examples", low=0)
    dpo_beta: float = setting(0.1, "dpo: strength of the KL to the start", "examples", low=TINY)


def read_answer(row: dict, answer: Any, tokenizer: data.Tokenizer, where: str) -> tuple:
    """Return a row's prompt and an answer, both text or both chat turns. UserError says what is wrong."""
    prompt = row.get("prompt")
    if isinstance(prompt, str) and isinstance(answer, str) and prompt and answer:
        with_tools(prompt, row, where)
        if tokenizer.eos_token_id is None:
            name = tokenizer.name_or_path
            raise UserError(f"{where}: the tokenizer in {name} has no end-of-sequence token")
        data.check_prompt(tokenizer, prompt, where)
        data.check_end(tokenizer, answer.rstrip(), where, "answer")
        return prompt, answer
    before = read_turns(as_turns([] if prompt in (None, "") else prompt, "user"), where)
    turns = read_turns(as_turns(answer, "assistant"), where)
    if not (is_chat(before) and is_chat(turns) and turns):
        raise UserError(f"{where}: a prompt and an answer are needed, each text or {TURNS}")
    turns = conversation_of(before, turns, where)
    last = turns[-1]
    is_empty = not (last["content"].strip() or "tool_calls" in last)
    if len(turns) < 2 or last["role"] != "assistant" or is_empty:
        needed = "a turn of the assistant, which is not empty, after at least one other"
        raise UserError(f"{where}: a conversation ends with {needed}")
    if turns[-2]["role"] == "assistant":
        raise UserError(f"{where}: the answer follows a turn of the assistant; make them one")
    data.check_prompt(tokenizer, turns[:-1], where)
    data.check_end(tokenizer, last["content"].rstrip(), where, "answer")
    return with_tools(turns[:-1], row, where), [last]


def conversation_of(before: list[dict], turns: list[dict], where: str) -> list[dict]:
    """Return a prompt's turns, then an answer's, which may begin with all of them, or the last. UserError."""
    first = turns[0]
    is_headed = first["role"] in ("system", "developer")
    if is_headed and turns[1 : 1 + len(before)] == before:
        return turns  # a prompt without the instructions
    new = next(n for n in range(len(before) + 1) if before[n:] == turns[: len(before) - n])
    is_whole = 0 < new == len(before) and first["role"] != "assistant"
    if is_whole and (is_headed or first in before or before[-1]["role"] == "user"):
        raise UserError(f"{where}: `prompt` contradicts how the conversation beside it begins")
    return before[:new] + turns


def parse_sft(row: dict, tokenizer: data.Tokenizer, where: str) -> Example:
    """Read {"messages"}, {"prompt", "response"} or {"prompt", "completion"}: the answer is learned."""
    answers = [row[n] for n in ("messages", "response", "completion") if row.get(n) is not None]
    if len(answers) != 1:
        raise UserError(f"{where}: needs `messages`, or `prompt` and `response` or `completion`")
    pair = read_answer(row, answers[0], tokenizer, where)
    prompt, response = data.encode_pair(tokenizer, *pair, where)
    return [Sample(0, 0, prompt, response=response, turns=as_turns(pair[0], "user"))]


def encode_both(row: dict, tokenizer: data.Tokenizer, where: str, encode: Callable) -> tuple:
    """Read {"prompt", "chosen", "rejected"}, the first answer is liked better: turns, both encoded."""
    if not {"chosen", "rejected"} <= row.keys():
        raise UserError(f"{where}: needs `prompt`, `chosen` and `rejected`")
    pairs = [read_answer(row, row[name], tokenizer, where) for name in ("chosen", "rejected")]
    if pairs[0][0] != pairs[1][0]:
        raise UserError(f"{where}: `chosen` and `rejected` differ before their last turns")
    encoded = [encode(tokenizer, *pair) for pair in pairs]
    if encoded[0] == encoded[1]:
        raise UserError(f"{where}: `chosen` and `rejected` are the same")
    return as_turns(pairs[0][0], "user"), encoded


def parse_pair(row: dict, tokenizer: data.Tokenizer, where: str) -> Example:
    """Read a row as `encode_both` does, as two samples."""
    turns, pairs = encode_both(row, tokenizer, where, partial(data.encode_pair, where=where))
    return [Sample(0, n, pair[0], response=pair[1], turns=turns) for n, pair in enumerate(pairs)]


def parse_rm(row: dict, tokenizer: data.Tokenizer, where: str) -> Example:
    """Read a pair for a scalar head, which is read at the last token: one target behind it, any one."""
    turns, pairs = encode_both(row, tokenizer, where, partial(data.encode_exchange, where=where))
    return [Sample(0, n, both, response=both[-1:], turns=turns) for n, both in enumerate(pairs)]


def read_examples(
    path: Path, parse: Callable, tokenizer: data.Tokenizer, config: FinetuneConfig
) -> list[Example]:
    """Read all rows. UserError with file and line for one that can't be used, or is too long."""
    rows = []
    budget = config.max_tokens_per_micro_batch
    for line, row in read_rows(path):
        where = f"{path}:{line}"
        for name in filter(row.get, PLACES):
            raise UserError(f"{where}: it has {name}, and {config.command} learns from texts")
        rows.append(parse(row, tokenizer, where))
        if (tokens := room(rows[-1], config.cp)) > budget:
            flag = f"--max-tokens-per-micro-batch {budget}"
            raise UserError(f"{where}: {tokens} tokens don't fit into {flag}")
    return rows


def room(example: Example, cp: int) -> int:  # in a micro-batch, in tokens
    return sum(packed_length(len(sample.prompt) + len(sample.response), cp) for sample in example)


class PairLoss:
    """The mean of -log sigmoid(r(chosen) - r(rejected)) over pairs, by the conventions of TRL.

    r = scale * the sum over an answer's targets of what `read` gives, less the reference's. Every
    context-parallel rank counts every pair.
    """

    def __init__(self, trainer: Trainer, scale: float, samples: list[Sample]):
        """samples: of all micro-batches, chosen and rejected in turns."""
        self.read = trainer.read_targets
        self.cp = trainer.groups.cp
        self.scale = scale
        self.answers = len(samples)
        answer_of = []  # [slots]
        reference = []  # [slots]
        for number, sample in enumerate(samples):
            answer_of += [number] * len(sample.response)
            reference += sample.reference_logprobs or [0.0] * len(sample.response)
        self.answer_of = torch.tensor(answer_of, dtype=torch.int64, device=trainer.device)
        self.reference = torch.tensor(reference, dtype=torch.float32, device=trainer.device)

    def __call__(self, batch: MicroBatch, output: Tensor) -> LossSums:
        """The loss of a micro-batch, from the model's output (collective: the context-parallel group)."""
        slots = batch.slots[batch.slots != NO_TARGET]
        # less the reference before they are summed: equal weights give exactly 0
        values = self.read(batch, output) - self.reference[slots]
        both = torch.stack([values, torch.ones_like(values)], -1)
        sums = values.new_zeros(self.answers, 2).index_add(0, self.answer_of[slots], both)
        sums, targets = over_context_parallel(self.cp, sums).unbind(-1)  # [answers]
        here = targets[::2] > 0  # pairs of this micro-batch
        chosen, rejected = (self.scale * sums).view(-1, 2)[here].unbind(-1)
        margin = chosen - rejected
        losses = -F.logsigmoid(margin)
        columns = zip(PAIR_STATS, (margin > 0, margin, chosen, rejected), strict=True)
        stats = {name: column.detach().sum() for name, column in columns}
        return loss_sums(losses.sum(), here.sum(), stats)


class Task(NamedTuple):
    """A command: how a row is parsed, which model learns, and how fast by default."""

    parse: Callable[[dict, data.Tokenizer, str], Example]
    model: type[Trainer]
    lr: float
    stats: tuple[str, ...] = ()  # of PairLoss; a task without any has the cross-entropy
    has_reference: bool = False


PAIR_STATS = ("accuracy", "margin", "chosen", "rejected")
TASKS = {
    "sft": Task(parse_sft, Actor, 1e-5),
    # InstructGPT (arXiv 2203.02155), section 3.5, equation 1; r: the scalar head at the last token
    "rm": Task(parse_rm, Critic, 1e-5, PAIR_STATS),
    # DPO (arXiv 2305.18290), section 4, equation 7; r: the log-probability of the answer, scale: beta
    "dpo": Task(parse_pair, Actor, 1e-6, PAIR_STATS, has_reference=True),
}


class Learner:
    """A task, the model that learns it, and the start weights where the task asks for them."""

    def __init__(self, config: FinetuneConfig):
        """Load --model, at temperature 1: log-probabilities are the model's own (collective)."""
        self.config = replace(config, temperature=1.0)
        self.task = TASKS[config.command]
        self.trainer = self.task.model(self.config, config.model)
        self.reference = None
        if self.task.has_reference:
            groups = self.trainer.own_groups
            self.reference = Actor(self.config, config.model, groups, learns=False)
            self.reference.sleep()

    def step(self, examples: list[Example]) -> dict[str, float]:
        """Learn a batch; returns its metrics from before (collective)."""
        lr = learning_rate(self.trainer.version, self.config)
        packed, loss = self._prepare(examples)
        stats = self.trainer.optimizer_step(packed, loss, self.task.stats, lr)
        self.trainer.version += 1
        metrics = means(stats, ("loss", *self.task.stats), "divisor")
        return metrics | {"grad_norm": stats["grad_norm"], "skipped": stats["skipped"], "lr": lr}

    def measure(self, examples: list[Example]) -> dict[str, float]:
        """The metrics of examples, without learning (collective)."""
        packed, loss = self._prepare(examples)
        stats = self.trainer.measure(packed, loss, self.task.stats)
        return means(stats, ("loss", *self.task.stats), "divisor")

    def _prepare(self, examples: list[Example]) -> tuple[list, Loss]:
        """Make this rank's micro-batches, and the loss. Samples keep the reference's log-probabilities."""
        trainer = self.trainer
        rooms = {(n, 0): room(example, self.config.cp) + 1 for n, example in enumerate(examples)}
        plans = plan_batch(rooms, trainer.cost, self.config, trainer.dp_size)
        (plan,) = plans[trainer.dp_rank]
        micro_batches = []
        for keys in plan:
            micro_batches.append([sample for number, _ in keys for sample in examples[number]])
        samples = flat([micro_batches])
        if self.reference and any(sample.reference_logprobs is None for sample in samples):
            self.reference.wake()
            self.reference.compute_ref_logprobs([micro_batches])
            self.reference.sleep()
        if self.task.stats:
            scale = self.config.dpo_beta if self.task.has_reference else 1.0
            loss = PairLoss(trainer, scale, samples)
        else:
            loss = trainer.cross_entropy_loss
        return as_sequences(micro_batches), loss


def example_rows(command: str, seed: int, count: int = 2048) -> list[dict]:
    """Make rows of shown work; in pairs (rm, dpo) with a wrong sum, blurted out or after the same work."""
    rng = random.Random(f"{command} {seed}")
    rows = []
    for _ in range(count):
        a, b = training_problem(rng)
        work = shown_work(a, b)
        row = {"prompt": f"{a}+{b}="}
        if command == "sft":
            rows.append(row | {"response": work})
            continue
        place = rng.randrange(len(str(a + b)))
        wrong = a + b + rng.choice([-1, 1]) * 10**place
        shown = work.rsplit(">", 1)[0] if rng.random() < 0.5 else ""
        rows.append(row | {"chosen": work, "rejected": f"{shown}>{wrong}"})
    return rows


async def prepare(config: FinetuneConfig, rank: int, say: Callable[[str], None]) -> None:
    """Clear the folder that `train` writes to, on rank 0; without --data put the demo's examples in it."""
    check_models(config, becomes_scalar=config.command == "rm")
    if config.command == "rm" and sees(config.model):
        raise UserError("rm: a scalar reward model reads text alone, and --model sees images")
    if rank:
        return
    out = Path(config.out)
    archive(out, say)
    (out / "config.json").write_text(json.dumps(run_metadata(config), indent=1) + "\n")
    if not config.data:
        rows = example_rows(config.command, config.seed)
        (out / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(
    config: FinetuneConfig, placement: Placement, out: Path, progress: Progress, rank: int
) -> None:
    """Train as `config.command` says; leave metrics and a Hugging Face directory in `out` (collective)."""
    name = config.command
    path = Path(config.data or out / "data.jsonl")
    [tokenizer] = data.load_tokenizers(config, progress.line)
    examples = read_examples(path, TASKS[name].parse, tokenizer, config)
    prompts = identities(example[0].turns for example in examples)
    order = data.Shuffled(range(len(examples)), config.seed, HELD_OUT, prompts=prompts)
    held_out = [examples[number] for number in sorted(order.held_out)]
    config = with_micro_batch(config)
    memory.check_fits(config, placement, [])
    measured = f"{len(held_out)} more are held out, {order.repeats} repeat a prompt"
    source = f"{order.count} examples of {path}, {measured}"
    steps = f"{config.steps} steps of {config.batch_size}"
    progress.line(f"nanoYATT {name}: {config.model} learns from {source}; {steps}")
    learner = Learner(config)
    writer = MetricsWriter(out) if rank == 0 else None
    learner.trainer.stop_tokens = data.stop_tokens(config.model, tokenizer, say=progress.line)
    skips = 0
    for step in range(config.steps + 1):
        row = {}
        began = time.perf_counter()
        if held_out and (step % config.eval_every == 0 or step == config.steps):
            progress.doing(f"{name}: held-out examples")
            metrics = learner.measure(held_out)
            row |= {f"{name}/held_out_{metric}": value for metric, value in metrics.items()}
            shown = "  ".join(f"{metric} {value:.4f}" for metric, value in metrics.items())
            progress.line(f"after {step:3d} steps: {shown} on held-out examples")
        if step < config.steps:
            progress.doing(f"{name}: step {step + 1}")
            numbers = range(step * config.batch_size, (step + 1) * config.batch_size)
            metrics = learner.step([examples[order.training(number)] for number in numbers])
            skips = skips + 1 if metrics["skipped"] else 0
            row |= {f"{name}/{metric}": value for metric, value in metrics.items()}
            row["time/step_s"] = time.perf_counter() - began
            names = ("loss", *learner.task.stats)
            shown = "  ".join(f"{metric} {metrics[metric]:.4f}" for metric in names)
            progress.line(f"step {step + 1:3d}/{config.steps}  {shown}")
            progress.done()
        if writer:
            writer.write(step, row)
        if skips == MAX_SKIPS:
            raise UserError(f"the loss or the gradient of {skips} updates in a row was not finite")
    learner.trainer.export(str(out / "hf"))
    if writer and name == "rm":
        progress.line(set_padding(out / "hf", tokenizer, examples))
    progress.line(f"wrote {out}/: hf/ (a Hugging Face directory), metrics.jsonl, tensorboard/")


def set_padding(folder: Path, tokenizer: data.Tokenizer, examples: list[Example]) -> str:
    """Let an exported reward model pad with a special token that ends no example. Returns what to say.

    transformers scores the last token that isn't padding; without a pad token it takes single texts.
    """
    ends = {None, *(sample.prompt[-1] for sample in chain(*examples))}
    special = [token for token, added in tokenizer.added_tokens_decoder.items() if added.special]
    pads = [tokenizer.pad_token_id, *reversed(special)]
    tokenizer.pad_token_id = next((pad for pad in pads if pad not in ends), None)
    Path(folder, "special_tokens_map.json").unlink(missing_ok=True)  # it would have the last word
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    hf = json.loads(path.read_text()) | {"pad_token_id": tokenizer.pad_token_id}
    path.write_text(json.dumps(hf, indent=2))
    if tokenizer.pad_token_id is None:
        return f"{folder} has no token to pad with: transformers reads it right a text at a time"
    return f"{folder} pads with {tokenizer.pad_token}, which ends no example"


def parse_command(arguments: list[str]) -> FinetuneConfig:
    """Read the command line: a row of TASKS, then its settings. UserError names the setting."""
    name = arguments[0] if arguments else ""
    if name not in TASKS:
        raise UserError("the first word is sft, rm or dpo; finetune.py sft --help tells the rest")
    defaults = dict(command=name, lr=TASKS[name].lr, lr_decay_to=0.1)
    return parse_settings(FinetuneConfig, arguments[1:], __doc__, GROUPS, defaults)


def placement_of(config: FinetuneConfig, ranks: int) -> Placement:
    """All ranks hold the model, and none has an engine. UserError for what doesn't fit them."""
    schedule_of(config)
    return make_placement(config, ranks)


def start(arguments: list[str], stop: Stop) -> str:
    """Do what the command line asks for, as run.start."""
    config = parse_command(arguments)
    placement = placement_of(config, run.launched("WORLD_SIZE") or 2)
    run.check_launcher(f"examples/finetune.py {config.command} ...")
    choose_device(config)
    return shutdown.run(learn(config, placement), stop)


async def learn(config: FinetuneConfig, placement: Placement) -> str:
    """Join the other ranks, train, part (collective: every rank)."""
    async with run.joined(config) as (world, progress):
        await raise_on_all(world, prepare(config, world.rank, progress.line))
        await world.run(train, config, placement, Path(config.out), progress, world.rank)
        await world.barrier()
    return ""


if __name__ == "__main__":
    run.main(sys.argv[1:], start)
