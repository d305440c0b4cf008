"""Training on examples instead of on a model's own answers: supervised fine-tuning, reward models, direct preference optimisation.

    torchrun --nproc-per-node 2 run.py sft --model DIR --data conversations.jsonl
    torchrun --nproc-per-node 2 run.py rm  --model DIR --data pairs.jsonl
    torchrun --nproc-per-node 2 run.py dpo --model DIR --data pairs.jsonl

No engine, no controller. Every rank reads the file and makes the same plan; each trains on its share, under any layout of trainer.py.
An example is one Sample, or for a pair of answers two, the chosen one first, which stay in one micro-batch: the loss of a pair needs
both.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import data
import resume
from actor import Actor, Reference, cross_entropy_loss, learning_rate, over_context_parallel, target_logprobs
from critic import Critic, target_values
from sample import Sample
from scheduling.balance import flat, packed_length, plan_batch
from training.packing import NO_TARGET, MicroBatch
from training.trainer import OutputLoss, Trainer, as_sequences

Example = list[Sample]  # one, or the chosen and the rejected answer
SUMS = ("accuracy", "margin", "chosen", "rejected")  # divided by the number of pairs in the end


# ---------------------------------------------------------------- rows of a file


def conversation(prompt, answer, tokenizer, where: str) -> tuple[list[int], list[int]]:
    """Tokens of what comes before an answer, and of the answer with what ends it. ValueError that says `where` what is wrong.

    Text is encoded as it is, and the answer ends with the end-of-sequence token. Chat turns go through the tokenizer's chat template;
    the last one is the answer, all others are its prompt. Turns that don't begin with the assistant's are a whole conversation:
    `prompt` is then left out or said once more.
    """
    if isinstance(prompt, str) and isinstance(answer, str) and prompt and answer:
        if tokenizer.eos_token_id is None:
            raise ValueError(f"{where}: the tokenizer in {tokenizer.name_or_path} has no end-of-sequence token to end the answer with")
        return data.encode(tokenizer, prompt), [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    turns = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    if not (data.is_chat(before) and data.is_chat(turns) and turns):
        raise ValueError(f"{where}: a prompt and an answer are needed, each text or a list of {{role, content}}, both text")
    turns = turns if turns[0]["role"] != "assistant" else before + turns
    if len(turns) < 2 or turns[-1]["role"] != "assistant" or not turns[-1]["content"]:
        raise ValueError(f"{where}: a conversation ends with a turn of the assistant, which is not empty, after at least one other")
    if tokenizer.chat_template is None:
        raise ValueError(f"{where}: chat turns need a chat template, and the tokenizer in {tokenizer.name_or_path} has none")
    start, whole = data.encode(tokenizer, turns[:-1]), tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]
    if whole[: len(start)] != start or len(whole) == len(start):
        raise ValueError(f"{where}: the chat template doesn't render the conversation as its prompt and an answer behind it")
    return start, whole[len(start) :]


def spoken(row: dict, tokenizer, where: str) -> Example:
    """{"messages": [...]}, or {"prompt", "response"} or {"prompt", "completion"}: the answer is trained on."""
    if "messages" in row:
        answers = [([], row["messages"])]
    else:
        answers = [(row.get("prompt"), row[name]) for name in ("response", "completion") if name in row]
    if len(answers) != 1:
        raise ValueError(f"{where}: needs `messages`, or `prompt` and one of `response` and `completion`")
    return [Sample(0, 0, prompt, response=answer) for prompt, answer in [conversation(*answers[0], tokenizer, where)]]


def compared(row: dict, tokenizer, where: str) -> Example:
    """{"prompt", "chosen", "rejected"}: two answers, of which people like the first better."""
    if not {"chosen", "rejected"} <= row.keys():
        raise ValueError(f"{where}: needs `prompt`, `chosen` and `rejected`")
    answers = [conversation(row.get("prompt"), row[name], tokenizer, where) for name in ("chosen", "rejected")]
    return [Sample(0, index, prompt, response=answer) for index, (prompt, answer) in enumerate(answers)]


def scored(row: dict, tokenizer, where: str) -> Example:
    """The same for a scalar head, which is read at the last token: one target behind it, whatever it is.

    transformers reads it at the last token that isn't padding: the same one, unless the tokenizer pads with what ends an answer.
    """
    return [replace(s, prompt=s.prompt + s.response, response=s.response[-1:]) for s in compared(row, tokenizer, where)]


class Examples:
    """The rows of a file, in a new seeded order every epoch; a seeded choice of `held_out`, at most a tenth, is never trained on."""

    def __init__(self, rows: list[Example], seed: int, held_out: int):
        order = list(range(len(rows)))
        random.Random(f"held out {seed}").shuffle(order)
        aside = min(held_out, len(rows) // 10)
        self.held_out, self._training = ([rows[i] for i in sorted(part)] for part in (order[:aside], order[aside:]))
        self.count, self._seed, self._epoch, self._order = len(self._training), seed, -1, []

    def batch(self, step: int, size: int) -> list[Example]:
        """The examples of a step: the same on every rank, whatever their number."""
        return [self._draw(number) for number in range(step * size, (step + 1) * size)]

    def _draw(self, number: int) -> Example:
        epoch, position = divmod(number, len(self._training))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._training)))
            random.Random(f"epoch {self._seed} {epoch}").shuffle(self._order)
        return self._training[self._order[position]]


def read_examples(path: Path, read: Callable, tokenizer, config) -> Examples:
    """ValueError with file and line for a row that can't be used, or is longer than a micro-batch."""
    rows, budget = [], config.max_tokens_per_micro_batch
    for line, row in data.read_rows(path):
        rows.append(read(row, tokenizer, f"{path}:{line}"))
        if (tokens := room(rows[-1], config.cp)) > budget:
            raise ValueError(f"{path}:{line}: {tokens} tokens don't fit into --max-tokens-per-micro-batch {budget}")
    return Examples(rows, config.seed, config.eval_prompts)


def room(example: Example, cp: int) -> int:
    """Tokens that an example takes in a micro-batch."""
    return sum(packed_length(len(sample.prompt) + len(sample.response), cp) for sample in example)


# ---------------------------------------------------------------- losses


def token_loss(samples: list[Sample], trainer: Trainer) -> OutputLoss:
    """The mean over the answers' tokens of the whole batch."""
    return cross_entropy_loss


def ranking_loss(samples: list[Sample], trainer: Trainer) -> OutputLoss:
    """-log sigmoid(r(chosen) - r(rejected)), the mean over pairs; r is the scalar head at an answer's last token.

    Bradley and Terry's model (1952). The convention of TRL's RewardTrainer. Source: InstructGPT (arXiv 2203.02155), section 3.5,
    equation 1.
    """
    return pair_loss(samples, target_values, 1.0, trainer)


def preference_loss(samples: list[Sample], trainer: Trainer) -> OutputLoss:
    """The same of r = beta * (log p(answer) - log p_reference(answer)), sums over its tokens; the mean over pairs.

    The convention of TRL's DPOTrainer with the sigmoid loss. Source: DPO (arXiv 2305.18290), section 4, equation 7.
    """
    return pair_loss(samples, target_logprobs, trainer.config.dpo_beta, trainer)


def pair_loss(samples: list[Sample], read: Callable[[MicroBatch, Tensor], Tensor], scale: float, trainer: Trainer) -> OutputLoss:
    """For both: r = scale * (the sum over an answer's targets of what `read` gives, less the reference's log-probability, if any).

    `samples`: those of all micro-batches, chosen and rejected in turns. Every context-parallel rank holds a part of each answer, gets
    all sums, and counts every pair: once too often in the sum for each further rank, and in what it is divided by.
    """
    owners = [number for number, sample in enumerate(samples) for _ in sample.response]
    answer_of = torch.tensor(owners, dtype=torch.int64, device=trainer.device)  # [slots]
    known = [x for sample in samples for x in sample.reference_logprobs or [0.0] * len(sample.response)]
    reference = torch.tensor(known, dtype=torch.float32, device=trainer.device)  # [slots]

    def loss(batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        slots = batch.slots[batch.slots != NO_TARGET]
        values = read(batch, output) - reference[slots]  # [targets]; before they are summed: equal weights give 0, not nearly 0
        both = torch.stack([values, torch.ones_like(values)], -1)
        sums, targets = over_context_parallel(values.new_zeros(len(samples), 2).index_add(0, answer_of[slots], both)).unbind(-1)  # [answers]
        here = targets[::2] > 0  # pairs of this micro-batch
        chosen, rejected = (scale * sums).view(-1, 2)[here].unbind(-1)
        margin = chosen - rejected
        losses, count = -F.logsigmoid(margin), here.sum()
        facts = {"accuracy": margin > 0, "margin": margin, "chosen": chosen, "rejected": rejected}
        return losses.sum(), count.int(), {name: fact.detach().sum() for name, fact in facts.items()}

    return loss


# ---------------------------------------------------------------- the commands


@dataclass(frozen=True)
class Task:
    """What a command learns from: how a row is read, which model is trained, by which loss, and what is reported of it."""

    read: Callable[[dict, object, str], Example]
    model: type[Trainer]
    loss: Callable[[list[Sample], Trainer], OutputLoss]
    metrics: tuple[str, ...]
    has_reference: bool = False


OF_PAIRS = ("loss", "accuracy", "margin", "chosen", "rejected")
TASKS = {
    "sft": Task(spoken, Actor, token_loss, ("loss",)),
    "rm": Task(scored, Critic, ranking_loss, OF_PAIRS),
    "dpo": Task(compared, Actor, preference_loss, OF_PAIRS, has_reference=True),
}


class Learner:
    """A task, the model that learns it, and the start weights where the task asks for them."""

    def __init__(self, config):
        """Load --model (collective over all ranks). ValueError if it can't be used."""
        self.config, self.task = replace(config, temperature=1.0), TASKS[config.command]  # log-probabilities of the model itself
        self.trainer = self.task.model(self.config, config.model)
        self.references = [Reference(self.trainer)] if self.task.has_reference else []

    def step(self, examples: list[Example]) -> dict[str, float]:
        """Learn a batch, the same on every rank; returns its metrics from before (collective)."""
        lr, trainer = learning_rate(self.trainer.version, self.config), self.trainer
        (micro_batches,) = self.appraised(examples)
        facts = trainer.learn(as_sequences(micro_batches), self.task.loss(flat([micro_batches]), trainer), SUMS, lr)
        trainer.version += 1
        return self.means(facts) | {name: facts[name] for name in ("grad_norm", "skipped")} | {"lr": lr}

    def measure(self, examples: list[Example]) -> dict[str, float]:
        """The metrics of examples under the weights as they are (collective)."""
        (micro_batches,) = self.appraised(examples)
        return self.means(self.trainer.measure(as_sequences(micro_batches), self.task.loss(flat([micro_batches]), self.trainer), SUMS))

    def appraised(self, examples: list[Example]) -> list[list[list[Sample]]]:
        """This rank's share in micro-batches, as the only mini-batch; with the reference's log-probabilities, which a sample keeps."""
        mini_batches = share(examples, self.trainer)
        if any(sample.reference_logprobs is None for sample in flat(mini_batches)):  # the model-parallel group has the same samples
            for reference in self.references:
                reference.compute_ref_logprobs(mini_batches)
        return mini_batches

    def means(self, sums: dict[str, float]) -> dict[str, float]:
        return {name: sums[name] / max(sums["divisor"], 1.0) for name in self.task.metrics}


def share(examples: list[Example], trainer: Trainer) -> list[list[list[Sample]]]:
    """What this data-parallel rank trains on, by the plan that every rank makes (balance.py). The answers of a pair stay together."""
    rooms = {(number, 0): room(example, trainer.config.cp) + 1 for number, example in enumerate(examples)}  # as of one sequence
    plan = plan_batch(rooms, trainer.cost, trainer.config, trainer.dp_size)[trainer.dp_rank]
    return [[[sample for number, _ in micro_batch for sample in examples[number]] for micro_batch in part] for part in plan]


async def prepare(config, rank: int, say: Callable[[str], None], resolved: Callable) -> None:
    """An empty folder for what `train` leaves behind, made by rank 0; without --data with the demo's examples in it."""
    if rank == 0:
        out = Path(config.out)
        resume.move_aside(out, say)
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.json").write_text(json.dumps(resolved(config), indent=1) + "\n")
        if not config.data:
            (out / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in demo_rows(config.command, config.seed)))


def train(config, out: Path, progress, rank: int) -> None:
    """Train as `config.command` says, and leave metrics and a Hugging Face directory in `out` (collective over all ranks)."""
    name, path = config.command, Path(config.data or out / "data.jsonl")
    tokenizer = data.load_tokenizer(config.model, config.trust_remote_code)
    examples = read_examples(path, TASKS[name].read, tokenizer, config)
    progress.line(
        f"nanoYATT {name}: {config.model} learns from {examples.count} examples of {path}, {len(examples.held_out)} more are held out; "
        f"{config.steps} steps of {config.batch_size}"
    )
    learner, writer, skips = Learner(config), Writer(out) if rank == 0 else None, 0
    for step in range(config.steps + 1):
        row, began = {}, time.perf_counter()
        if examples.held_out and (step % config.eval_every == 0 or step == config.steps):
            progress.doing(f"{name}: held-out examples")
            measured = learner.measure(examples.held_out)
            row |= {f"{name}/held_out_{metric}": value for metric, value in measured.items()}
            progress.line(f"after {step:3d} steps: {spelled(measured)} on {len(examples.held_out)} held-out examples")
        if step < config.steps:
            progress.doing(f"{name}: step {step + 1}")
            learnt = learner.step(examples.batch(step, config.batch_size))
            skips = skips + 1 if learnt["skipped"] else 0
            row |= {f"{name}/{metric}": value for metric, value in learnt.items()} | {"time/step_s": time.perf_counter() - began}
            progress.line(f"step {step + 1:3d}/{config.steps}  {spelled({m: learnt[m] for m in learner.task.metrics})}")
            progress.done()
        if writer:
            writer.row(step, row)
        if skips == config.max_skips:
            raise ValueError(f"--max-skips {skips}: the loss or the gradient of so many updates in a row was not finite")
    learner.trainer.export(str(out / "hf"))
    progress.line(f"wrote {out}/: hf/ (a Hugging Face directory), metrics.jsonl, tensorboard/")


def spelled(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())


class Writer:
    """metrics.jsonl and TensorBoard. Row k: what was measured with k updates done, and the update that followed."""

    def __init__(self, out: Path):
        from torch.utils.tensorboard import SummaryWriter

        self._path, self._board = out / "metrics.jsonl", SummaryWriter(str(out / "tensorboard"))

    def row(self, step: int, metrics: dict[str, float]) -> None:
        with self._path.open("a") as file:
            numbers = {name: round(value, 6) for name, value in sorted(metrics.items())}
            file.write(json.dumps({"step": step} | numbers) + "\n")
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()


# ---------------------------------------------------------------- the demo's examples


def demo_rows(command: str, seed: int, count: int = 2048) -> list[dict]:
    """Rows of the addition task in the usual format: work shown; for pairs beside an answer that is wrong.

    Half of the wrong ones are blurted out, half come after the same work, so that to look at the form alone isn't enough.
    """
    from recipes.addition import warmstart

    rng, rows = random.Random(f"{command} {seed}"), []
    while len(rows) < count:
        a, b = data.training_problem(rng)
        work, wrong = warmstart.shown_work(a, b), warmstart.corrupted(rng, a, b)
        if command == "sft":
            rows.append({"prompt": f"{a}+{b}=", "response": work})
        elif wrong != str(a + b):
            shown = work.rsplit(">", 1)[0] if rng.random() < 0.5 else ""
            rows.append({"prompt": f"{a}+{b}=", "chosen": work, "rejected": f"{shown}>{wrong}"})
    return rows
