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
    """Sequences end to end; a prompt of several only once, but for its last token: T tokens in all.

    `slots` ties the targets to what is known about each response token (old log-probabilities, advantages):
    slot i is the i-th of all the response tokens of all micro-batches.
    """

    tokens: Tensor  # [1, T]
    positions: Tensor  # [T], in its sequence; with images [3, T], see images.tokens.positions
    reads: Tensor  # [targets], the places of the tokens that a response token follows, in its order
    targets: Tensor  # [targets], that response token
    slots: Tensor  # [targets], its slot; they ascend
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


class Piece(NamedTuple):
    """A sequence's tokens after its shared prefix, by their places among all sequences' tokens."""

    start: int
    end: int
    source: int = 0  # the place where the prefix begins, in the first sequence of the prompt
    prefix: int = 0  # its tokens

    @property
    def lengths(self) -> tuple[int, int]:
        """Queries and keys."""
        own = self.end - self.start
        return own, self.prefix + own


def make_micro_batches(packed: Packed, tp_with_sp: int) -> list[MicroBatch]:
    """Make micro-batches of sequences, whose response tokens are the targets.

    `tp_with_sp`, the tensor-parallel size under sequence parallelism, else 1, must divide the tokens of a
    micro-batch: a sequence without a target fills it up, over the budget if need be. It is all that an empty
    micro-batch has: a rank that has nothing to train on also takes part in the passes.
    """
    micro_batches = []
    slot = 0
    for chosen in packed:
        sequences = [Sequence(*each) for each in chosen]
        pieces = pieces_of(sequences)
        count = sum(piece.end - piece.start for piece in pieces)
        if padding := -count % tp_with_sp if count else tp_with_sp:
            end = sum(packed_length(len(sequence.tokens)) for sequence in sequences)
            pieces.append(Piece(end, end + padding))
            sequences.append(Sequence([0] * (padding + 1), []))
        rows = []  # (token, target, the target's slot, position)
        for sequence in sequences:
            assert sequence.prompt, "a response's first token is predicted from a prompt token"
            slots = []
            for part, is_target in sequence.parts():
                slots += range(slot, slot + len(part)) if is_target else [NO_TARGET] * len(part)
                slot += len(part) * is_target
            tokens = sequence.tokens
            rows += zip(tokens[:-1], tokens[1:], slots[1:], range(len(tokens) - 1), strict=True)
        taken = torch.cat([torch.arange(piece.start, piece.end) for piece in pieces])
        tokens, targets, slots, positions = torch.tensor(rows)[taken].T.contiguous()
        reads = slots.argsort()[(slots == NO_TARGET).sum() :]  # which is below all slots
        lengths = [piece.lengths for piece in pieces]
        known = (lengths, starts_of(lengths), keys_of(pieces, taken))
        batch = MicroBatch(tokens[None], positions, reads, targets[reads], slots[reads], *known)
        micro_batches.append(_with_images(batch, sequences, taken))
    return micro_batches


def pieces_of(sequences: list[Sequence]) -> list[Piece]:
    """Cut sequences into pieces, equal ones side by side, as attention takes them.

    The first sequence of a prompt is whole. Others see its prompt and begin with the last token of theirs,
    which a response token of their own follows.
    """
    first: dict[tuple, int] = {}
    pieces = []
    start = 0
    for sequence in sequences:
        end = start + packed_length(len(sequence.tokens))
        source = first.setdefault((sequence.images, *sequence.prompt), start)
        prefix = 0 if source == start else len(sequence.prompt) - 1
        pieces.append(Piece(start + prefix, end, source, prefix))
        start = end
    return sorted(pieces, key=lambda piece: piece.lengths, reverse=True)


def keys_of(pieces: list[Piece], taken: Tensor) -> Tensor | None:
    """MicroBatch.keys. taken: [T], which of all sequences' tokens the pieces have."""
    if not any(piece.prefix for piece in pieces):
        return None
    place = torch.zeros(max(piece.end for piece in pieces), dtype=torch.int64)
    place[taken] = torch.arange(len(taken))
    keys = []
    for start, end, source, prefix in pieces:
        keys += [place[source : source + prefix], place[start:end]]
    return torch.cat(keys)


def starts_of(lengths: list[tuple[int, int]]) -> Tensor:
    """Where each piece's queries start, and its keys: [2, pieces + 1], int32."""
    return torch.tensor([(0, 0), *lengths]).T.cumsum(1).to(torch.int32)


def _with_images(batch: MicroBatch, sequences: list[Sequence], taken: Tensor) -> MicroBatch:
    """Add what a pass has to know of images. taken: as of `keys_of`."""
    images = dict.fromkeys(chain(*(sequence.images for sequence in sequences)))
    if not images:
        return batch
    from images.tokens import positions

    ends = accumulate(image.features for image in images)
    ranges = (range(end - image.features, end) for image, end in zip(images, ends, strict=True))
    features = dict(zip(images, ranges, strict=True))
    axes = []
    places = []
    for sequence in sequences:
        length = packed_length(len(sequence.tokens))
        # whatever a response has in it is text
        tokens = (sequence.prompt + [NO_TARGET] * length)[:length]
        axes += positions(tokens, sequence.images)
        left = chain(*(features[image] for image in sequence.images))
        markers = {image.token for image in sequence.images}
        places += [next(left) if token in markers else NO_FEATURE for token in tokens]
    columns = torch.tensor([*zip(*axes, strict=True), places])[:, taken]
    return replace(batch, positions=columns[:3], places=columns[3], images=tuple(images))
