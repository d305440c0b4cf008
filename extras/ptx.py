"""The pretraining term of an update, which keeps the policy from forgetting texts.

    loss = mean policy loss + ptx_coef * mean over the texts' tokens of -log p(token)

Both terms share an optimizer step: AdamW would scale separate steps to the same size, whatever ptx_coef is.
p is at temperature 1; at the answers' temperature the optimum would be a different distribution. Sources:
PPO-ptx of InstructGPT (arXiv 2203.02155), equation 2; Safe RLHF (arXiv 2310.12773), appendix B.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from algorithms import Algorithm
from inputs import tokenization
from inputs.rows import read_rows
from inputs.shuffled import Shuffled
from runtime.errors import UserError
from training.packing import MicroBatch, Sequence
from training.passes import Work
from training.trainer import LossSums, Read, loss_sums

if TYPE_CHECKING:
    from actor import Actor

STATS = ("ptx", "ptx_tokens")  # statistics of micro-batches with texts


def read_texts(path: Path, tokenizer: tokenization.Tokenizer, longest: int) -> list[Sequence]:
    """Read rows with `text`, or `prompt` and `response`, truncated to `longest` tokens.

    Raises UserError if a row has neither, or leaves nothing to learn.
    """
    sequences = []
    for line, row in read_rows(path, "ptx_data"):
        where = f"{path}:{line}"
        names = ("prompt", "response") if "response" in row else ("text",)
        texts = [row.get(name) for name in names]
        if not all(isinstance(text, str) and text for text in texts):
            raise UserError(f"{where}: needs `text`, or `prompt` and `response`")
        if len(texts) == 2:
            prompt, response = tokenization.encode_pair(tokenizer, *texts, where)
        else:
            tokens = tokenization.encode(tokenizer, *texts, where)
            prompt = tokens[:1]
            response = tokens[1:]
        response = response[: max(0, longest - len(prompt))]
        if not prompt or not response:
            raise UserError(
                f"{where}: nothing to learn in {longest} tokens "
                "(--max-model-len, --max-tokens-per-micro-batch)"
            )
        sequences.append((prompt, response))
    return sequences


def choose(
    texts: list[Sequence], number: int, size: int, seed: int, dp_rank: int, dp_size: int
) -> list[Sequence]:
    """Choose a rank's texts for the run's optimizer step `number`, `size` over all ranks (pure)."""
    order = Shuffled(texts, seed, name="texts")
    draws = range(number * size + dp_rank, (number + 1) * size, dp_size)
    return [order.training(draw) for draw in draws]


def term_of(algorithm: Algorithm, tokenizer: tokenization.Tokenizer, longest: int) -> Texts | None:
    if not algorithm.ptx_data:
        return None
    return Texts(read_texts(Path(algorithm.ptx_data), tokenizer, longest))


@dataclass
class Texts:
    """The texts of a run: see Actor.terms."""

    texts: list[Sequence]
    names: tuple[str, ...] = STATS

    def add(self, actor: Actor, work: Work, number: int, divisors: Tensor) -> None:
        """Add texts for optimizer step `number`, in own micro-batches (collective: the model's ranks)."""
        config = actor.config
        step = actor.version * config.updates_per_step + number
        place = (actor.dp_rank, actor.dp_size)
        mine = choose(self.texts, step, actor.algorithm.ptx_batch, config.seed, *place)
        # each rank of a model-parallel group counts the same tokens, which doesn't change the ratio
        tokens = float(sum(len(response) for _, response in mine))
        counts = {"divisor": divisors.sum().item(), "tokens": tokens}
        total = actor.all_reduce(counts, dist.ReduceOp.SUM)
        packed = [[mine[index] for index in chosen] for chosen in actor.pack(mine)]
        # an equal number on every rank: otherwise replicas would sum gradients in a different order
        most = actor.all_reduce({"count": float(len(packed))}, dist.ReduceOp.MAX)
        packed += [[]] * (int(most["count"]) - len(packed))
        weight = actor.algorithm.ptx_coef * total["divisor"] / total["tokens"]
        texts = actor.work(packed, partial(text_loss, actor.own_logprobs, weight))
        work.micro_batches += texts.micro_batches
        work.losses += texts.losses


def text_loss(read: Read, weight: float, batch: MicroBatch, hidden: Tensor) -> LossSums:
    """Return a micro-batch's loss, the sum of -weight * log p(token), with a divisor of 0.

    weight: ptx_coef * the policy's divisor / the texts' tokens, both over all ranks.
    """
    logprobs = read(batch, hidden)
    stats = {"ptx": -logprobs.detach().sum(), "ptx_tokens": torch.tensor(len(logprobs))}
    return loss_sums((-weight * logprobs).sum(), 0, stats)
