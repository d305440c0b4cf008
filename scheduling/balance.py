"""Who trains on what: samples to micro-batches of equal work, micro-batches to data-parallel ranks. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from config import Config, UserError
from sample import Key


def plan_batch(
    tokens: dict[Key, int],
    cost: Callable[[int], int],
    config: Config,
    dp_size: int,
    image_costs: dict[int, int] | None = None,
) -> list[list[list[list[Key]]]]:
    """What every data-parallel rank trains on: [rank][mini-batch][micro-batch][sample], the samples' keys.

    tokens: of each sample, prompt and response together; cost(tokens): its work. image_costs, by prompt_id:
    the work on a prompt's images, which every answer counts in full, though those in one micro-batch share
    it. The mini-batches are dealt one by one in the order of the keys, so that the answers of a group spread
    over all of them. Of each every rank gets the same number of micro-batches, as pipelines need it, which
    come close in work; some are empty if there are fewer samples. UserError if a sample alone is over the
    token budget.
    """
    keys, plan, seeing = sorted(tokens), [[] for _ in range(dp_size)], image_costs or {}
    updates = config.updates_per_step
    for mini_batch in (keys[first::updates] for first in range(updates)):
        lengths = [packed_length(tokens[key], config.cp) for key in mini_batch]
        costs = [cost(tokens[key]) + seeing.get(key[0], 0) for key in mini_batch]
        micro_batches = pack_evenly(lengths, costs, config.max_tokens_per_micro_batch, dp_size)
        work = [sum(costs[sample] for sample in chosen) for chosen in micro_batches]
        for rank, numbers in enumerate(karmarkar_karp(work, dp_size)):
            mine = [micro_batches[number] for number in numbers]
            plan[rank].append([[mini_batch[sample] for sample in chosen] for chosen in mine])
    return plan


def pack_evenly(
    lengths: list[int], costs: list[int], budget: int, multiple: int
) -> list[list[int]]:
    """Pack sequences into micro-batches of at most `budget` tokens and of nearly equal cost.

    Their number is a multiple of `multiple`, less than twice the fewest possible plus `multiple`, and near
    the fewest where sequences are short. Each is tried by `karmarkar_karp` and by `spread`, which gets along
    with a few long sequences among many short ones; the more even that fits is taken. The longest come first:
    attention takes neighbours of equal length together. UserError if a sequence alone is over the budget.
    """
    if (longest := max(lengths, default=0)) > budget:
        flag = f"--max-tokens-per-micro-batch {budget}"
        raise UserError(f"a sequence of {longest} tokens does not fit into {flag}; raise it")

    def largest(values: list[int], micro_batches: list[list[int]]) -> int:
        return max(sum(values[sample] for sample in chosen) for chosen in micro_batches)

    def fitting(count: int) -> list[list[list[int]]]:
        tried = (karmarkar_karp(costs, count), spread(lengths, costs, budget, count))
        return [packed for packed in tried if packed and largest(lengths, packed) <= budget]

    fewest = max(-(-sum(lengths) // budget), 1)
    for most in range(1, 5):  # sequences over budget / (most + 1) that one micro-batch can take
        fewest = max(fewest, -(-sum((most + 1) * length > budget for length in lengths) // most))
    first = count = round_up(fewest, multiple)
    too_few = first - multiple
    while not (found := fitting(count)):  # it ends: in twice the fewest `spread` finds room for all
        too_few, count = count, first + max(multiple, 2 * (count - first))
    while count - too_few > multiple:
        middle = too_few + round_up((count - too_few) // 2, multiple)
        if fits := fitting(middle):
            found, count = fits, middle
        else:
            too_few = middle
    best = min(found, key=lambda packed: largest(costs, packed))
    return [sorted(chosen, key=lambda sample: -lengths[sample]) for chosen in best]


def karmarkar_karp(costs: list[int], shares: int) -> list[list[int]]:
    """Deal samples into shares, equal in number to within one and nearly equal in cost. Ascending in a share.

    Largest differencing (Karmarkar and Karp, 1982) with a fixed number in each share: partial deals of one
    sample a share are merged, the two most uneven first, one's dearest share with the other's cheapest.
    """
    by_cost = sorted(range(len(costs)), key=lambda sample: -costs[sample])
    # heap of (cheapest less dearest share, against ties, [(cost, samples)], dearest first)
    deals = []
    for start in range(0, max(len(costs), 1), shares):
        each = [(costs[sample], [sample]) for sample in by_cost[start : start + shares]]
        each += [(0, [])] * (shares - len(each))
        heapq.heappush(deals, (each[-1][0] - each[0][0], start, each))
    while len(deals) > 1:
        (_, number, a), (_, _, b) = heapq.heappop(deals), heapq.heappop(deals)
        pairs = zip(a, reversed(b), strict=True)
        merged = [(dear + cheap, s + t) for (dear, s), (cheap, t) in pairs]
        merged.sort(key=lambda share: -share[0])
        heapq.heappush(deals, (merged[-1][0] - merged[0][0], number, merged))
    return [sorted(samples) for _, samples in deals[0][2]]


def spread(lengths: list[int], costs: list[int], budget: int, count: int) -> list[list[int]]:
    """Longest first, each where there is room and least work (Graham, 1969); empty if one finds no room."""
    micro_batches, room, work = [[] for _ in range(count)], [budget] * count, [0] * count
    by_work = [(0, number) for number in range(count)]  # a heap
    full = []  # another, of those that have no room for this length
    for sample in sorted(range(len(lengths)), key=lambda sample: -lengths[sample]):
        while full and -full[0][0] >= lengths[sample]:
            _, number = heapq.heappop(full)
            heapq.heappush(by_work, (work[number], number))
        while by_work and room[by_work[0][1]] < lengths[sample]:
            _, number = heapq.heappop(by_work)
            heapq.heappush(full, (-room[number], number))
        if not by_work:
            return []
        best = by_work[0][1]
        micro_batches[best].append(sample)
        room[best] -= lengths[sample]
        work[best] += costs[sample]
        heapq.heapreplace(by_work, (work[best], best))
    return micro_batches


def flat(mini_batches: list[list[list]]) -> list:
    """All samples (or keys) of mini-batches of micro-batches."""
    return [sample for micro_batches in mini_batches for each in micro_batches for sample in each]


def packed_length(tokens: int, cp: int) -> int:
    """Room in a micro-batch: the last token is only a target, and context parallelism cuts 2 * cp pieces."""
    return round_up(tokens - 1, 2 * cp if cp > 1 else 1)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
