"""The pretraining term of an update: texts that the policy shall not unlearn, by cross-entropy beside the policy's loss.

    loss = mean policy loss + ptx_coef * mean over the texts' tokens of -log p(token)

in one optimizer step: two steps of their own would each be scaled to the same size by AdamW, whatever ptx_coef. Source: PPO-ptx of
InstructGPT (arXiv 2203.02155), section 3.5; Safe RLHF (arXiv 2310.12773), appendix B. Imports no torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import data

if TYPE_CHECKING:
    from torch import Tensor

    from training.packing import Sequence

    TokenLoss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]  # as in actor.py

SUMS = ("ptx", "ptx_tokens")  # statistics of the texts, beside objective.SUMS


def read_texts(path: Path, tokenizer, longest: int) -> list[Sequence]:
    """(prompt, response) tokens of each row of a JSONL or Parquet file: `text`, or `prompt` and `response`, whose end is learned, too.

    A text is learned from its second token on; what is longer than `longest` tokens is cut off. ValueError with file and line for a
    row that can't be used.
    """
    sequences = []
    for line, row in data.read_rows(path):
        texts = [row.get(name) for name in (("prompt", "response") if "response" in row else ("text",))]
        if not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"{path}:{line}: needs `text`, or `prompt` and `response`, which are texts")
        tokens = data.encode(tokenizer, texts[0])
        prompt, response = tokens[:1], tokens[1:]
        if len(texts) == 2:  # encoded apart: a token across the border would be none of a prompt's
            prompt, response = tokens, [*tokenizer(texts[1], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        response = response[: max(0, longest - len(prompt))]
        if not prompt or not response:
            raise ValueError(f"{path}:{line}: nothing to learn in {longest} tokens (--max-model-len)")
        sequences.append((prompt, response))
    return sequences


def choose(texts: list[Sequence], number: int, size: int, seed: int, dp_rank: int, dp_size: int) -> list[Sequence]:
    """A data-parallel rank's texts of the run's optimizer step `number`, which has `size` in all; reordered every epoch (pure)."""
    chosen, orders = [], {}
    for draw in range(number * size + dp_rank, (number + 1) * size, dp_size):
        epoch, position = divmod(draw, len(texts))
        if epoch not in orders:
            orders[epoch] = random.Random(f"texts {seed} {epoch}").sample(range(len(texts)), len(texts))
        chosen.append(texts[orders[epoch][position]])
    return chosen


def with_texts(policy: TokenLoss, first: int, weight: float, slots: Tensor, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, dict]:
    """The loss of the targets of a micro-batch, of samples or of texts, whose slots begin at `first`. All tensors: [targets].

    weight: of a text's token in the sum, ptx_coef * (what the whole sum is divided by) / (the texts' tokens), over all ranks.
    """
    ours = slots < first
    loss, stats = policy(slots[ours], logprobs[ours], entropy[ours])  # also of none: it may meet other ranks
    text = -logprobs[~ours]
    stats = {"tokens": ours.sum()} | stats | {"ptx": text.detach().sum(), "ptx_tokens": (~ours).sum()}
    return (-weight * logprobs).masked_scatter(ours, loss), stats


def metrics(steps: list[dict[str, float]]) -> dict[str, float]:
    """Of one update's optimizer steps: the mean loss of the texts' tokens. Empty without texts."""
    tokens = sum(step["ptx_tokens"] for step in steps)
    return {"train/ptx_loss": sum(step["ptx"] for step in steps) / tokens} if tokens else {}


def add_texts(policy: TokenLoss, first: int, divisor: float, tokens: float, coefficient: float) -> TokenLoss:
    """`with_texts`, or the policy's loss as it is if there are none."""
    return partial(with_texts, policy, first, coefficient * divisor / tokens) if tokens else policy
