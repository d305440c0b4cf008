"""Balance."""

from __future__ import annotations

import heapq


def deal(costs: list[int], shares: int) -> list[int]:
    """Which of `shares` data-parallel ranks gets each sample: equal in number to within one, and nearly equal in cost (pure).

    costs: of the samples, in the order of controllers; returned: one share per sample. Karmarkar and Karp's largest differencing
    method (1982) with a fixed number in each share: partial deals of one sample a share are merged, the two most uneven first, each
    one's dearest share with the other's cheapest.
    """
    by_cost = sorted(range(len(costs)), key=lambda sample: -costs[sample])
    deals = []  # a heap of (cheapest less dearest share, a number against ties, [(cost, samples) of each share, dearest first])
    for start in range(0, len(costs), shares):
        each = [(costs[sample], [sample]) for sample in by_cost[start : start + shares]]
        each += [(0, [])] * (shares - len(each))
        heapq.heappush(deals, (each[-1][0] - each[0][0], start, each))
    while len(deals) > 1:
        (_, number, a), (_, _, b) = heapq.heappop(deals), heapq.heappop(deals)
        merged = [(dear + cheap, s + t) for (dear, s), (cheap, t) in zip(a, reversed(b), strict=True)]
        merged.sort(key=lambda share: -share[0])
        heapq.heappush(deals, (merged[-1][0] - merged[0][0], number, merged))
    share_of = {sample: share for share, (_, samples) in enumerate(deals[0][2] if deals else []) for sample in samples}
    return [share_of[sample] for sample in range(len(costs))]
