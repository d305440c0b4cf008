"""Micro-batches: sequences packed end to end, with next-token targets. balance.py says what goes in."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scheduling.balance import packed_length, round_up

NO_TARGET = -1

Sequence = tuple[list[int], list[int]]  # the tokens of a prompt and of the response to it


@dataclass
class MicroBatch:
    """Sequences end to end, as one context-parallel rank sees them: T = the sum of padded lengths / cp.

    `slots` ties the packed tokens to what is known about each response token (old log-probabilities,
    advantages): slot i is the i-th of all the response tokens of all micro-batches.
    """

    tokens: Tensor  # [1, T]
    targets: Tensor  # [T], the token that follows
    slots: Tensor  # [T], the target's slot; NO_TARGET where the target is a prompt token or padding
    starts: Tensor  # [sequences + 1], int32, where each sequence starts (before the context-parallel split)
    longest: int  # the longest padded sequence
    attention_mask: Tensor | None  # [T, cp * T], True where a query sees a key; None if cp is 1

    def to(self, device: torch.device) -> MicroBatch:
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **{name: x.to(device, non_blocking=True) for name, x in tensors.items()})


def make_micro_batches(
    packed: list[list[Sequence]], cp: int, cp_rank: int, tp_with_sp: int
) -> list[MicroBatch]:
    """Micro-batches of (prompt, response) pairs, whose response tokens are the targets.

    A sequence is padded to a multiple of 2 * cp (see `zigzag`). `tp_with_sp`, the tensor-parallel size under
    sequence parallelism, else 1, must divide the tokens of a micro-batch: its last sequence is padded for
    that, over the budget if need be. An empty micro-batch is a token without a target: a rank that has
    nothing to train on takes part in the passes, too.
    """
    micro_batches, slot = [], 0
    for sequences in packed:
        padded = [packed_length(len(prompt) + len(response), cp) for prompt, response in sequences] or [1]
        padded[-1] += round_up(sum(padded), tp_with_sp * (2 * cp if cp > 1 else 1)) - sum(padded)
        tokens, targets, slots = [], [], []
        for (prompt, response), length in zip(sequences or [([0], [])], padded, strict=True):
            assert prompt, "a sequence needs a prompt token to predict the first response token from"
            sequence = prompt + response
            padding = length - len(sequence) + 1
            tokens += sequence[:-1] + [0] * padding
            targets += sequence[1:] + [0] * padding
            slots += [NO_TARGET] * (len(prompt) - 1) + list(range(slot, slot + len(response)))
            slots += [NO_TARGET] * padding
            slot += len(response)
        micro_batches.append(_split(torch.tensor([tokens, targets, slots]), padded, cp, cp_rank))
    return micro_batches


def _split(columns: Tensor, lengths: list[int], cp: int, cp_rank: int) -> MicroBatch:
    """The context-parallel rank's part of tokens, targets and slots: [3, T].

    The targets were shifted before this, so that a piece's last token has the right one.
    """
    mask = None
    if cp > 1:
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        mine = zigzag(lengths, cp, cp_rank)
        keys = torch.cat([zigzag(lengths, cp, rank) for rank in range(cp)])  # as an all-gather returns them
        mask = (sequence[mine][:, None] == sequence[keys]) & (mine[:, None] >= keys)
        columns = columns[:, mine]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return MicroBatch(columns[:1], columns[1], columns[2], starts, max(lengths), mask)


def zigzag(lengths: list[int], cp: int, rank: int) -> Tensor:
    """A context-parallel rank's packed tokens: of each sequence's 2 * cp pieces, `rank` and its mirror image.

    An early piece has few keys to see and a late one many: so every rank gets the same work, as in Megatron.
    """
    pieces, start = [], 0
    for length in lengths:
        size = length // (2 * cp)
        for piece in (rank, 2 * cp - 1 - rank):
            pieces.append(torch.arange(start + piece * size, start + (piece + 1) * size))
        start += length
    return torch.cat(pieces)
