"""The pretraining term of an update: texts that the policy shall not unlearn, beside the policy's loss.

    loss = mean policy loss + ptx_coef * mean over the texts' tokens of -log p(token)

in one optimizer step: AdamW would scale two steps of their own to the same size, whatever ptx_coef.
p is the model's own, at temperature 1: at that of the answers the optimum would be another distribution.
Source: PPO-ptx of InstructGPT (arXiv 2203.02155), equation 2; Safe RLHF (arXiv 2310.12773), appendix B.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import data
from config import UserError
from runtime.rows import read_rows

if TYPE_CHECKING:
    from torch import Tensor

    from training.packing import Sequence
    from training.trainer import TokenLoss

SUMS = ("ptx", "ptx_tokens")  # statistics of the texts, beside the policy's


def read_texts(path: Path, tokenizer: data.Tokenizer, longest: int) -> list[Sequence]:
    """(prompt, response) tokens of each row, cut off at `longest`. UserError with file and line.

    A row has `text`, learned from its second token on, or `prompt` and `response`.
    """
    sequences = []
    for line, row in read_rows(path, "ptx_data"):
        texts = [
            row.get(name) for name in (("prompt", "response") if "response" in row else ("text",))
        ]
        if not all(isinstance(text, str) and text for text in texts):
            raise UserError(
                f"{path}:{line}: needs `text`, or `prompt` and `response`, which are texts"
            )
        if len(texts) == 2:
            prompt, response = data.encode_pair(tokenizer, *texts)
        else:
            tokens = data.encode(tokenizer, *texts)
            prompt, response = tokens[:1], tokens[1:]
        response = response[: max(0, longest - len(prompt))]
        if not prompt or not response:
            limits = "--max-model-len, --max-tokens-per-micro-batch"
            raise UserError(f"{path}:{line}: nothing to learn in {longest} tokens ({limits})")
        sequences.append((prompt, response))
    return sequences


def choose(
    texts: list[Sequence], number: int, size: int, seed: int, dp_rank: int, dp_size: int
) -> list[Sequence]:
    """A data-parallel rank's texts of the run's optimizer step `number`, which has `size` in all (pure)."""
    order = data.Shuffled(texts, seed, name="texts")
    return [
        order.training(draw)
        for draw in range(number * size + dp_rank, (number + 1) * size, dp_size)
    ]


def add_texts(
    policy: TokenLoss, first: int, divisor: float, tokens: float, coefficient: float
) -> TokenLoss:
    """The policy's loss and that of texts, whose slots begin at `first`; without any the policy's alone.

    divisor: what the whole sum is divided by; tokens: the texts', both over all ranks.
    """
    if not tokens:
        return policy
    weight = coefficient * divisor / tokens  # of a text's token in the sum

    def with_texts(
        slots: Tensor, logprobs: Tensor, entropy: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ours = slots < first  # also of none: the policy's loss may meet other ranks
        loss, stats = policy(slots[ours], logprobs[ours], entropy[ours])
        text = -logprobs[~ours]
        stats = (
            {"tokens": ours.sum()}
            | stats
            | {"ptx": text.detach().sum(), "ptx_tokens": (~ours).sum()}
        )
        return (-weight * logprobs).masked_scatter(ours, loss), stats

    return with_texts


def metrics(steps: list[dict[str, float]]) -> dict[str, float]:
    """Of one update's optimizer steps: the mean loss of the texts' tokens. Empty without texts."""
    tokens = sum(step["ptx_tokens"] for step in steps)
    return {"train/ptx_loss": sum(step["ptx"] for step in steps) / tokens} if tokens else {}
