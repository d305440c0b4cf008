"""Micro-batches: sequences packed end to end, with next-token targets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import NamedTuple, Self

import torch
from torch import Tensor

from sample import Image, Reply, parts_of
from scheduling.balance import packed_length

NO_TARGET = NO_FEATURE = -1


class Sequence(NamedTuple):
    """A prompt's tokens, those of the response to it, the prompt's images, and replies in the response."""

    prompt: list[int]
    response: list[int]
    images: tuple[Image, ...] = ()
    replies: Iterable[Reply] = ()

    def parts(self) -> list[tuple[list[int], bool]]:
        """The tokens in their order, in parts, and whether these are targets."""
        return [(self.prompt, False), *parts_of(self.response, self.replies)]

    @property
    def tokens(self) -> list[int]:
        return list(chain(*(part for part, _ in self.parts())))


Packed = list[list[Sequence]]  # micro-batches of a pass


@dataclass
class MicroBatch:
    """Sequences end to end: T = the sum of padded lengths.

    `slots` ties the packed tokens to what is known about each response token (old log-probabilities,
    advantages): slot i is the i-th of all the response tokens of all micro-batches.
    """

    tokens: Tensor  # [1, T]
    targets: Tensor  # [T], the token that follows
    slots: Tensor  # [T], the target's slot; NO_TARGET for a prompt, a reply, padding
    positions: Tensor  # [T], in its sequence; with images [3, T], see images.tokens.positions
    # of each piece, its queries and the keys up to its last query; on the host: no layer waits for them
    lengths: list[tuple[int, int]]
    starts: Tensor  # [2, pieces + 1], int32: see `starts_of`
    # [sum of pieces' keys], their places among the tokens; None: a piece's keys are its own tokens'
    keys: Tensor | None = None
    images: tuple[Image, ...] = ()  # each once, however many sequences show it
    places: Tensor | None = None  # [T], the image feature that a token stands for, or NO_FEATURE

    def to(self, device: torch.device) -> Self:
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        moved = {name: x.to(device, non_blocking=True) for name, x in tensors.items()}
        return replace(self, **moved)


def make_micro_batches(packed: Packed, tp_with_sp: int) -> list[MicroBatch]:
    """Make micro-batches of sequences, whose response tokens are the targets.

    A sequence is a piece. `tp_with_sp`, the tensor-parallel size under sequence parallelism, else 1, must
    divide the tokens of a micro-batch: its last sequence is padded for that, over the budget if need be. An
    empty micro-batch is a token without a target: a rank that has nothing to train on takes part in the
    passes, too.
    """
    micro_batches = []
    slot = 0
    for chosen in packed:
        sequences = [Sequence(*each) for each in chosen]
        lengths = [packed_length(len(s.tokens)) for s in sequences] or [1]
        lengths[-1] += -sum(lengths) % tp_with_sp
        tokens = []
        targets = []
        slots = []
        places = []
        pairs = zip(sequences or [Sequence([0], [])], lengths, strict=True)
        for sequence, length in pairs:
            assert sequence.prompt, "a response's first token is predicted from a prompt token"
            own = sequence.tokens
            padding = length - len(own) + 1
            tokens += own[:-1] + [0] * padding
            targets += own[1:] + [0] * padding
            own_slots = []
            for part, is_target in sequence.parts():
                own_slots += range(slot, slot + len(part)) if is_target else [NO_TARGET] * len(part)
                slot += len(part) * is_target
            slots += own_slots[1:] + [NO_TARGET] * padding
            places += range(length)
        pieces = [(length, length) for length in lengths]
        columns = torch.tensor([tokens, targets, slots, places])
        batch = MicroBatch(columns[:1], *columns[1:], pieces, starts_of(pieces))
        micro_batches.append(_with_images(batch, sequences, lengths))
    return micro_batches


def starts_of(lengths: list[tuple[int, int]]) -> Tensor:
    """Where each piece's queries start, and its keys: [2, pieces + 1], int32."""
    return torch.tensor([(0, 0), *lengths]).T.cumsum(1).to(torch.int32)


def _with_images(batch: MicroBatch, sequences: list[Sequence], lengths: list[int]) -> MicroBatch:
    """Add what a pass has to know of images."""
    images = dict.fromkeys(chain(*(sequence.images for sequence in sequences)))
    if not images:
        return batch
    from images.tokens import positions

    ends = accumulate(image.features for image in images)
    ranges = (range(end - image.features, end) for image, end in zip(images, ends, strict=True))
    features = dict(zip(images, ranges, strict=True))
    axes = []
    places = []
    for (prompt, _, shown, _), length in zip(sequences, lengths, strict=True):
        tokens = (prompt + [NO_TARGET] * length)[:length]  # whatever a response has in it is text
        axes += positions(tokens, shown)
        left = chain(*(features[image] for image in shown))
        markers = {image.token for image in shown}
        places += [next(left) if token in markers else NO_FEATURE for token in tokens]
    columns = torch.tensor([*zip(*axes, strict=True), places])
    return replace(batch, positions=columns[:3], places=columns[3], images=tuple(images))
