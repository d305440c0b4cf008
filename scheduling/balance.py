"""Pack samples into micro-batches of equal work, and deal these to data-parallel ranks. Pure."""

import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from config import Config
from sample import Key

Packing = list[list[int]]  # micro-batches of samples, which are indices into the list of lengths


class Prefix(NamedTuple):
    """The part of a prompt that its answers share. A micro-batch computes it only once."""

    tokens: int = 0
    macs: int = 0  # multiply-adds, including its images


class Measure(NamedTuple):
    """The lengths of samples, and the work on them: multiply-adds of forward passes."""

    tokens: dict[Key, int]  # prompt and response of each sample
    macs: Callable[[int], int]  # tokens -> multiply-adds
    prefixes: dict[int, Prefix] | None = None  # prompt_id -> prefix

    def prefix(self, key: Key) -> Prefix:
        return self.prefixes[key[0]] if self.prefixes else Prefix()

    def length(self, keys: list[Key]) -> int:
        """Return the tokens of samples in one micro-batch."""
        prefixes = {key[0]: self.prefix(key).tokens for key in keys}
        own = (packed_length(self.tokens[key]) - self.prefix(key).tokens for key in keys)
        return sum(prefixes.values()) + sum(own)

    def work(self, keys: list[Key]) -> int:
        """Return the work on samples in one micro-batch."""
        prefixes = {key[0]: self.prefix(key).macs for key in keys}
        own = (self.macs(self.tokens[key]) - self.macs(self.prefix(key).tokens) for key in keys)
        return sum(prefixes.values()) + sum(own)

    def works(self, micro_batches: list[list[Key]]) -> int:
        return sum(map(self.work, micro_batches))


def plan_batch(measure: Measure, config: Config, dp_size: int) -> list[list[list[list[Key]]]]:
    """Plan what each data-parallel rank trains on: keys as [rank][mini-batch][micro-batch][sample].

    A group's answers are spread over all mini-batches. In each one, every rank gets the same number of
    micro-batches (pipelines require it) with nearly equal work; some may be empty. A mini-batch is dealt by
    answers or by whole groups, whichever gives the slowest rank less work.
    """
    keys = sorted(measure.tokens)
    updates = config.updates_per_step
    budget = config.max_tokens_per_micro_batch
    plan = [[] for _ in range(dp_size)]
    for first in range(updates):
        mini_batch = keys[first::updates]
        ways = ([[key] for key in mini_batch], whole_groups(mini_batch, measure, budget))
        deals = [deal_bundles(bundles, measure, budget, dp_size) for bundles in ways]
        best = min(deals, key=lambda shares: max(map(measure.works, shares)))
        for rank, micro_batches in enumerate(best):
            plan[rank].append(micro_batches)
    return plan


def whole_groups(keys: list[Key], measure: Measure, budget: int) -> list[list[Key]]:
    """Put answers that share a prefix into one bundle, as many as fit the budget."""
    bundles: list[list[Key]] = []
    length = 0  # the last bundle's: see Measure.length
    for key in keys:
        prefix = measure.prefix(key).tokens
        own = packed_length(measure.tokens[key]) - prefix
        is_next = bundles and bundles[-1][0][0] == key[0] and prefix
        if is_next and length + own <= budget:
            bundles[-1].append(key)
            length += own
        else:
            bundles.append([key])
            length = prefix + own
    return bundles


def deal_bundles(
    bundles: list[list[Key]], measure: Measure, budget: int, dp_size: int
) -> list[list[list[Key]]]:
    """Deal whole bundles in equal work: [rank][micro-batch][sample]."""
    lengths = list(map(measure.length, bundles))
    packing = pack_evenly(lengths, list(map(measure.work, bundles)), budget, dp_size)
    micro_batches = [[key for n in numbers for key in bundles[n]] for numbers in packing]
    by_rank = karmarkar_karp(list(map(measure.work, micro_batches)), dp_size)
    return [[micro_batches[n] for n in numbers] for numbers in by_rank]


def pack_evenly(lengths: list[int], work: list[int], budget: int, multiple: int) -> Packing:
    """Pack sequences into micro-batches of at most `budget` tokens and of nearly equal work.

    Their number is a multiple of `multiple`. It is near the minimum if sequences are short, and always below
    twice the minimum plus `multiple`. Returns the more even packing of `karmarkar_karp` and `spread`, which
    copes with a few long sequences. A sequence above the budget raises the budget to its length.
    """
    budget = max(budget, *lengths, 1)

    def fitting(count: int) -> list[Packing]:
        tried = (karmarkar_karp(work, count), spread(lengths, work, budget, count))
        return [packing for packing in tried if packing and max(sums(lengths, packing)) <= budget]

    fewest = max(-(-sum(lengths) // budget), 1)
    for most in range(1, 5):  # at most `most` sequences above budget / (most + 1) fit together
        long = sum((most + 1) * length > budget for length in lengths)
        fewest = max(fewest, -(-long // most))
    count = -(-fewest // multiple) * multiple  # rounded up
    while not (found := fitting(count)):  # ends at the latest at 2 * fewest: then `spread` fits
        count += multiple
    return min(found, key=lambda packing: max(sums(work, packing)))


def sums(values: list[int], packing: list[list[int]]) -> list[int]:
    """Return the sum of the samples' values in each micro-batch."""
    return [sum(map(values.__getitem__, samples)) for samples in packing]


def karmarkar_karp(work: list[int], shares: int) -> Packing:
    """Deal samples into shares, equal in number to within one and nearly equal in work.

    Largest differencing (Karmarkar and Karp, 1982): start with deals of one sample per share. Merge the two
    most uneven deals, the largest share of one with the smallest of the other. Each share is sorted.
    """
    by_work = sorted(range(len(work)), key=lambda sample: -work[sample])
    # heap of (smallest minus largest share, tie-breaker, [(work, samples)] with the largest first)
    deals = []
    for start in range(0, max(len(work), 1), shares):
        dealt = [(work[sample], [sample]) for sample in by_work[start : start + shares]]
        dealt += [(0, [])] * (shares - len(dealt))
        heapq.heappush(deals, (dealt[-1][0] - dealt[0][0], start, dealt))
    while len(deals) > 1:
        _, number, one = heapq.heappop(deals)
        _, _, other = heapq.heappop(deals)
        merged = []
        for (large, some), (small, more) in zip(one, reversed(other), strict=True):
            merged.append((large + small, some + more))
        merged.sort(key=lambda share: -share[0])
        heapq.heappush(deals, (merged[-1][0] - merged[0][0], number, merged))
    return [sorted(samples) for _, samples in deals[0][2]]


def spread(lengths: list[int], work: list[int], budget: int, count: int) -> Packing:
    """Pack the longest first, each where it fits and work is least (Graham, 1969). [] if one doesn't fit."""
    micro_batches = [[] for _ in range(count)]
    room = np.full(count, budget)
    load = np.zeros(count, np.array(work).dtype)  # the work in each
    for sample in sorted(range(len(lengths)), key=lambda sample: -lengths[sample]):
        able = np.flatnonzero(room >= lengths[sample])
        if not len(able):
            return []
        best = able[load[able].argmin()]  # the first, if several are equal
        micro_batches[best].append(sample)
        room[best] -= lengths[sample]
        load[best] += work[sample]
    return micro_batches


def packed_length(tokens: int) -> int:
    """Return a sample's length in a micro-batch, where its last token is only a target."""
    return tokens - 1
