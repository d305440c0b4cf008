"""Inter-stage fusion (RLHFuse, arXiv 2409.13221, section 4): the ranks in the tail, and its length. Pure."""

import math
from collections import Counter, deque
from statistics import fmean
from typing import NamedTuple

from scheduling.measured import (
    LEAST_GAIN,
    MOVES,
    Decision,
    Remaining,
    Split,
    StepStats,
    newest_of_split,
)

Ranks = tuple[int, ...]
TAILS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)  # --rebalance chooses from these
RECENT = 3  # steps from which to estimate speed: a slow start is soon forgotten


class TokenLatency(NamedTuple):
    """Seconds for one more token of a request: fixed + per_request * (requests in its engine)."""

    fixed: float
    per_request: float

    def seconds(self, in_flight: float, capacity: int) -> float:
        """Return seconds per token while an engine has `in_flight` requests, `capacity` at once."""
        return self.fixed * max(1.0, in_flight / capacity) + self.per_request * in_flight


def token_latency(history: list[StepStats], role: str, tp: int) -> TokenLatency:
    """Estimate the latency from the newest steps, of fused mode if any; half of it is assumed to be fixed.

    Modes aren't mixed, because a trickle of prompts interrupts decoding. Zeros if there were no requests.
    """
    fused = [step for step in history if step.split.mode == "fused"] or history
    seconds = []
    in_flight = []
    for step in fused[-RECENT:]:
        ranks, stats = step.ranks_and_stats(role)
        if stats.tokens:
            seconds.append(stats.request_s / stats.tokens)
            in_flight.append(stats.in_flight / (ranks // tp))
    if not seconds:
        return TokenLatency(0.0, 0.0)
    half = fmean(seconds) / 2
    return TokenLatency(half, half / max(1e-9, fmean(in_flight)))


def kept_engines(unwritten: float, latency: TokenLatency, capacity: int) -> int:
    """Return how many engines the tail needs for its KV caches and its speed."""
    # an engine's step takes twice as long with this many answers as with none
    at_once = latency.fixed / latency.per_request if latency.per_request else math.inf
    return max(1, math.ceil(unwritten / max(1.0, min(capacity, at_once))))


def ranks_of_tail(
    tail: float,
    rank_groups: list[Ranks],
    held: Ranks,
    remaining: Remaining,
    most_ranks: int,
    outstanding: Counter[int],
    writers: dict[int, int],
    judges: dict[int, int],
) -> Ranks:
    """Return the ranks that rollout has from now on; genrm has the rest. The first rule that applies decides:

    1. Every answer is written: rollout gets none.
    2. Rollout has none, and answers are being judged: still none, so the next wave waits.
    3. More than `tail` of the answers are unwritten, and rollout has all ranks or none is being judged: all.
    4. Both roles have ranks: no change.
    5. The tail begins: rollout keeps the ranks with the most tokens outstanding, at most `most_ranks`.

    rank_groups: ranks that move together. held: rollout's ranks now. outstanding: tokens that each rank's
    engine has yet to write. writers, judges: lead rank -> model of each engine.
    """
    everyone = tuple(rank for group in rank_groups for rank in group)
    is_tail = remaining.unwritten <= tail * remaining.begun
    if not remaining.unwritten or (not held and remaining.judging):
        return ()
    if not is_tail and (held == everyone or not remaining.judging):
        return everyone
    if held != everyone and can_share({*held}, writers, judges):
        return held
    kept: set[int] = set()
    for group in sorted(rank_groups, key=lambda group: -sum(outstanding[rank] for rank in group)):
        more = kept | {*group}
        writes = writers.keys() & {*group}
        if writes and len(kept) < most_ranks and can_share(more, writers, judges):
            kept = more
    return tuple(sorted(kept)) or everyone  # all, if the roles can't be separated


def can_share(ranks: set[int], writers: dict[int, int], judges: dict[int, int]) -> bool:
    """Return whether these ranks have a rollout engine, and the others an engine for every judge."""
    models = {model for lead, model in judges.items() if lead not in ranks}
    return bool(ranks & writers.keys()) and models == {*judges.values()}


Cohorts = list[tuple[float, float]]  # seconds, answers


class FluidModel(NamedTuple):
    """Predicts the serving time with a tail. All requests of an engine progress at the same speed."""

    engines: tuple[int, int]  # number of engines of each role if it has all ranks
    rollout: TokenLatency
    genrm: TokenLatency
    capacity: int
    swap_s: float  # the time of a swap

    def seconds(self, tail: float, lengths: tuple[int, ...], judged: float, tokens: float) -> float:
        """Return the time for answers with this `histogram`, and `judged` critiques of `tokens` tokens."""
        written, cut, kept = self._written(lengths, tail * sum(lengths))
        each = judged / sum(lengths)
        arrivals = [(max(cut, time), answers * each) for time, answers in written]
        return self._judged(arrivals, tokens, self.engines[1] * (1 - kept / self.engines[0]))

    def _written(self, lengths: tuple[float, ...], of_tail: float) -> tuple[Cohorts, float, int]:
        """Return when answers are written, when genrm gets ranks, and how many engines rollout keeps."""
        now = tokens = 0.0
        left = sum(lengths)
        engines = self.engines[0]
        kept = 0
        cut = math.inf
        written = []
        for length, answers in ((2 ** (number / 4), n) for number, n in enumerate(lengths) if n):
            if left <= of_tail and not kept:
                now = cut = now + self.swap_s
                engines = kept = min(kept_engines(left, self.rollout, self.capacity), engines - 1)
            now += (length - tokens) * self.rollout.seconds(left / engines, self.capacity)
            tokens = length
            left -= answers
            written.append((now, answers))
        return written, min(cut, now + self.swap_s), kept

    def _judged(self, arrivals: Cohorts, tokens: float, engines: float) -> float:
        """Return the time of the last critique. `engines` judge; after the last answers, all engines do."""
        now = in_flight = depth = 0.0  # depth: tokens that each critique has gained so far
        queue = deque()
        for time, critiques in [*arrivals, (math.inf, 0.0)]:
            while queue:
                pace = self.genrm.seconds(in_flight / engines, self.capacity)
                end, ended = queue[0]
                ends_at = now + (end - depth) * pace
                if ends_at > time:
                    depth += (time - now) / pace
                    break
                now = ends_at
                depth = end
                in_flight -= ended
                queue.popleft()
            if time == arrivals[-1][0]:
                engines = self.engines[1]
            if critiques:
                now = time
                in_flight += critiques
                queue.append((depth + tokens, critiques))
        return now


def best_tail(
    history: list[StepStats], splits: list[Split], capacity: int, tp: dict[str, int]
) -> Decision:
    """Return the split whose tail would serve the newest steps fastest, or theirs if the gain is small."""
    now = history[-1].split
    newest = newest_of_split(history)[:RECENT]
    if len(newest) < RECENT:
        return Decision(now, f"{now} stays: measured for {len(newest)} of {RECENT} steps")
    swap_s = fmean(step.swap_s / max(1, step.waves) for step in newest)
    latency = {role: token_latency(history, role, tp[role]) for role in tp}
    engines = (now.rollout // tp["rollout"], now.genrm // tp["genrm"])
    model = FluidModel(engines, **latency, capacity=capacity, swap_s=swap_s)
    seconds = dict.fromkeys(splits, 0.0)
    for step in newest:
        critique = step.genrm.tokens / max(1, step.genrm.requests)
        for split in splits:
            seconds[split] += model.seconds(split.tail, step.lengths, step.genrm.requests, critique)
    best = min(splits, key=seconds.__getitem__)
    if seconds[best] < (1 - LEAST_GAIN) * seconds[now]:
        ratio = seconds[now] / seconds[best]
        return Decision(best, f"{now} -> {best}: it should be {ratio:.2f} times as fast")
    return Decision(now, f"{now} stays: no tail should be faster")


MOVES["fused"] = best_tail
