"""Micro-batches: sequences packed end to end, with next-token targets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple, Self

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from runtime.hooks import needed
from sample import Image, Reply, parts_of
from scheduling.balance import packed_length

NO_TARGET = NO_FEATURE = -1


class Sequence(NamedTuple):
    """A prompt's tokens, the response's tokens, the prompt's images, and replies inside the response."""

    prompt: list[int]
    response: list[int]
    images: tuple[Image, ...] = ()
    replies: Iterable[Reply] = ()

    def parts(self) -> list[tuple[list[int], bool]]:
        """Return the tokens in order, in parts, each with whether it consists of targets."""
        return [(self.prompt, False), *parts_of(self.response, self.replies)]

    @property
    def tokens(self) -> list[int]:
        return list(chain(*(part for part, _ in self.parts())))


Packed = list[list[Sequence]]  # a pass's micro-batches


@dataclass
class MicroBatch:
    """Sequences end to end, T tokens in all; a shared prompt occurs only once, except for its last token.

    `slots` maps the targets to data about response tokens (old log-probabilities, advantages): slot i is
    response token i, counted over all micro-batches.
    """

    tokens: Tensor  # [1, T]
    positions: Tensor  # [T], within the sequence; with images [3, T], see extras/images/tokens.py
    reads: Tensor  # [targets], positions of the tokens that precede a response token
    targets: Tensor  # [targets], the response tokens
    slots: Tensor  # [targets], ascending
    # per piece, its queries and the keys up to its last query; on the host, so that no layer waits
    lengths: list[tuple[int, int]]
    starts: Tensor  # [2, pieces + 1], int32: see `starts_of`
    # [sum of pieces' keys], their positions among the tokens; None if every piece has its own keys
    keys: Tensor | None = None
    images: tuple[Image, ...] = ()  # without repeats
    places: Tensor | None = None  # [T], index of the token's image feature, or NO_FEATURE

    def to(self, device: torch.device) -> Self:
        tensors = {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}
        moved = {name: x.to(device, non_blocking=True) for name, x in tensors.items()}
        return replace(self, **moved)


class Piece(NamedTuple):
    """A sequence's tokens after its shared prefix, as positions among all sequences' tokens."""

    start: int
    end: int
    source: int = 0  # where the prefix begins, in the prompt's first sequence
    prefix: int = 0  # its length

    @property
    def lengths(self) -> tuple[int, int]:
        """The numbers of queries and keys."""
        own = self.end - self.start
        return own, self.prefix + own


def make_micro_batches(packed: Packed, tp_with_sp: int) -> list[MicroBatch]:
    """Make micro-batches from sequences; response tokens are the targets.

    A sequence without targets pads each to a multiple of `tp_with_sp` (the tensor-parallel size with sequence
    parallelism, else 1), even over the budget. It also fills empty ones, for ranks with nothing to train on.
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
        columns = []  # for each token but a sequence's last: token, next token, its slot, position
        for sequence in sequences:
            assert sequence.prompt, "a response's first token is predicted from a prompt token"
            tokens = np.array(sequence.tokens)
            slots = np.full(len(tokens), NO_TARGET)  # the slot of each token that is a target
            start = 0
            for part, is_target in sequence.parts():
                end = start + len(part)
                if is_target:
                    slots[start:end] = np.arange(slot, slot + len(part))
                    slot += len(part)
                start = end
            columns.append((tokens[:-1], tokens[1:], slots[1:], np.arange(len(tokens) - 1)))
        # drop repeated prompts, and put the rest in the order of the pieces
        taken = torch.cat([torch.arange(piece.start, piece.end) for piece in pieces])
        columns = torch.from_numpy(np.concatenate(columns, axis=1))
        tokens, targets, slots, positions = columns[:, taken]
        # the pieces' order isn't the slots': sort by slot, and leave out tokens without a target, the first
        without_target = (slots == NO_TARGET).sum()
        reads = slots.argsort()[without_target:]
        lengths = [piece.lengths for piece in pieces]
        known = (lengths, starts_of(lengths), keys_of(pieces, taken))
        batch = MicroBatch(tokens[None], positions, reads, targets[reads], slots[reads], *known)
        if any(sequence.images for sequence in sequences):
            batch = needed("image_packing", "a prompt with images")(batch, sequences, taken)
        micro_batches.append(batch)
    return micro_batches


def pieces_of(sequences: list[Sequence]) -> list[Piece]:
    """Cut sequences into pieces, sorted by length for attention.

    A prompt's first sequence stays whole. The others attend to its prompt, and begin with the prompt's last
    token, because that predicts their own first response token.
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
    """Return MicroBatch.keys. taken: [T], the pieces' positions among all sequences' tokens."""
    if not any(piece.prefix for piece in pieces):
        return None
    place = torch.zeros(max(piece.end for piece in pieces), dtype=torch.int64)
    place[taken] = torch.arange(len(taken))
    keys = []
    for start, end, source, prefix in pieces:
        keys += [place[source : source + prefix], place[start:end]]
    return torch.cat(keys)


def starts_of(lengths: list[tuple[int, int]]) -> Tensor:
    """Return where each piece's queries and keys start: [2, pieces + 1], int32."""
    return torch.tensor([(0, 0), *lengths]).T.cumsum(1).to(torch.int32)


@dataclass
class Packing(PackedSeqParams):
    """The data of a micro-batch that all layers share. Megatron's own layers only read `qkv_format`."""

    batch: MicroBatch | None = None
    rope: tuple[Tensor, Tensor] | None = None  # cosines and sines, [tokens, 1, dim]


def packing_of(batch: MicroBatch, frequencies: Tensor) -> Packing:
    """Compute the rotary table once for all layers. See `rotary_frequencies` in model.py."""
    angles = (batch.positions[..., None].float() * frequencies[:, None]).sum(0)
    table = torch.cat((angles, angles), -1)[:, None]
    return Packing("thd", batch=batch, rope=(table.cos(), table.sin()))
