"""Micro-batches: ragged sequences packed end to end under a token budget, with next-token targets. Pure torch, no Megatron."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

NO_TARGET = -1


@dataclass
class MicroBatch:
    """Some sequences end to end, as one context-parallel rank sees them: T = their padded lengths summed, over cp.

    `slots` ties the packed tokens to what is known about each response token (old log-probabilities, advantages): slot i is
    the i-th of all the response tokens of all sequences, in the order they were given. Nothing else needs to be packed.
    """

    tokens: Tensor  # [1, T]
    targets: Tensor  # [T], the token that follows
    slots: Tensor  # [T], the target's slot; NO_TARGET where the target is a prompt token, masked out or padding
    starts: Tensor  # [sequences + 1], int32, where each sequence starts (before the context-parallel split)
    longest: int  # the longest padded sequence
    attention_mask: Tensor | None  # [T, cp * T], True where a query sees a key; None without context parallelism

    def to(self, device: torch.device) -> MicroBatch:
        moved = {name: x.to(device, non_blocking=True) if isinstance(x, Tensor) else x for name, x in vars(self).items()}
        return MicroBatch(**moved)


def pack(lengths: list[int], budget: int) -> list[list[int]]:
    """Deal sequences to micro-batches of at most `budget` tokens: indices into `lengths`, longest first, filled one by one.

    Sorting puts sequences of equal length side by side, which model.py's attention takes together; a tighter bin packing would
    save few micro-batches and lose that. ValueError if a sequence alone is over the budget.
    """
    micro_batches: list[list[int]] = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if lengths[index] > budget:
            raise ValueError(
                f"a sequence of {lengths[index]} tokens does not fit into --max-tokens-per-micro-batch {budget}; raise it"
            )
        if lengths[index] > room or not micro_batches:
            micro_batches.append([])
            room = budget
        micro_batches[-1].append(index)
        room -= lengths[index]
    return micro_batches


def make_micro_batches(
    sequences: list[tuple[list[int], list[int]]], masked: list[bool], budget: int, cp: int, cp_rank: int, tp_with_sp: int
) -> list[MicroBatch]:
    """Pack (prompt, response) pairs; the response tokens of those that are not `masked` are the targets.

    A sequence is padded to a multiple of 2 * cp, so that each context-parallel rank gets two equal pieces of it (see `zigzag`).
    `tp_with_sp` is the tensor-parallel size under sequence parallelism, else 1: it must divide the tokens of a micro-batch, whose
    last sequence is padded for that, over the budget if need be. ValueError as from `pack`.
    """
    lengths = [round_up(len(prompt) + len(response) - 1, 2 * cp if cp > 1 else 1) for prompt, response in sequences]
    first_slots = [0]
    for _, response in sequences:
        first_slots.append(first_slots[-1] + len(response))
    micro_batches = []
    for chosen in pack(lengths, budget):
        padded = [lengths[index] for index in chosen]
        padded[-1] += round_up(sum(padded), tp_with_sp * (2 * cp if cp > 1 else 1)) - sum(padded)
        tokens, targets, slots = [], [], []
        for index, length in zip(chosen, padded, strict=True):
            prompt, response = sequences[index]
            assert prompt, "a sequence needs a prompt token to predict the first response token from"
            whole, padding = prompt + response, length - len(prompt) - len(response) + 1
            first = first_slots[index]
            slots_here = [NO_TARGET] * len(response) if masked[index] else list(range(first, first + len(response)))
            tokens += whole[:-1] + [0] * padding
            targets += whole[1:] + [0] * padding
            slots += [NO_TARGET] * (len(prompt) - 1) + slots_here + [NO_TARGET] * padding
        micro_batches.append(_split(tokens, targets, slots, padded, cp, cp_rank))
    return micro_batches


def _split(tokens: list[int], targets: list[int], slots: list[int], lengths: list[int], cp: int, cp_rank: int) -> MicroBatch:
    """The context-parallel rank's part. The targets were shifted before this, so that a piece's last token has the right one."""
    columns = torch.tensor([tokens, targets, slots])
    mask = None
    if cp > 1:
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        mine = zigzag(lengths, cp, cp_rank)
        keys = torch.cat([zigzag(lengths, cp, rank) for rank in range(cp)])  # the order in which an all-gather returns them
        mask = (sequence[mine][:, None] == sequence[keys]) & (mine[:, None] >= keys)
        columns = columns[:, mine]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return MicroBatch(columns[:1], columns[1], columns[2], starts, max(lengths), mask)


def zigzag(lengths: list[int], cp: int, rank: int) -> Tensor:
    """Which packed tokens a context-parallel rank holds: of each sequence's 2 * cp pieces, number `rank` and its mirror image.

    An early piece has few keys to see and a late one many, so that every rank gets the same work (Megatron's convention).
    """
    pieces, start = [], 0
    for length in lengths:
        size = length // (2 * cp)
        for piece in (rank, 2 * cp - 1 - rank):
            pieces.append(torch.arange(start + piece * size, start + (piece + 1) * size))
        start += length
    return torch.cat(pieces)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def deal(items: list, hands: int) -> Iterator[list]:
    """Deal one by one into `hands` lists, so that the answers of a group, which are neighbours, spread over all of them."""
    assert len(items) >= hands, f"{len(items)} samples cannot be dealt to --updates-per-step {hands}"
    return (items[hand::hands] for hand in range(hands))
