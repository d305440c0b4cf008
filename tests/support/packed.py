"""A micro-batch as attention sees it."""

import torch
from torch import Tensor

from training.packing import MicroBatch


def sights_of(batch: MicroBatch) -> dict[int, tuple[list[int], int]]:
    """Return for each slot the tokens that its query sees, in order of their positions, and the target."""
    keys = torch.arange(batch.tokens.numel()) if batch.keys is None else batch.keys
    sights: list[Tensor] = []  # for each token, the tokens that it sees
    for queries, seen in batch.lengths:
        own, keys = keys[:seen], keys[seen:]
        assert batch.positions[own].tolist() == list(range(seen))
        sights += [own[: seen - queries + number + 1] for number in range(queries)]
    assert not len(keys) and len(sights) == batch.tokens.numel()
    found = {}
    columns = (batch.reads.tolist(), batch.targets.tolist(), batch.slots.tolist())
    assert columns[2] == sorted({*columns[2]})
    for place, target, slot in zip(*columns, strict=True):
        found[slot] = (batch.tokens[0, sights[place]].tolist(), target)
    return found
