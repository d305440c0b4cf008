"""Inter-stage fusion (RLHFuse, arXiv 2409.13221, section 4): who has ranks in the tail; which tail. Pure."""

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
RECENT = 3  # steps that say how fast tokens come: what a start took is soon forgotten


class TokenLatency(NamedTuple):
    """Seconds for one more token of a request: fixed + per_request * (requests in its engine)."""

    fixed: float
    per_request: float

    def seconds(self, in_flight: float, capacity: int) -> float:
        """Seconds a token, while an engine has so many requests and decodes `capacity` of them at once."""
        return self.fixed * max(1.0, in_flight / capacity) + self.per_request * in_flight


def token_latency(history: list[StepStats], role: str, tp: int) -> TokenLatency:
    """Return what the newest steps of fused mode, else of all, say: half of a token's seconds are fixed.

    Where requests come one by one, each prompt holds up those that are written: so modes aren't mixed. No
    time, if the role was never asked.
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
    """The engines that the tail needs: for its KV caches, and for its pace."""
    # with more answers than this an engine's step takes twice as long as an empty one
    at_once = latency.fixed / latency.per_request if latency.per_request else math.inf
    return max(1, math.ceil(unwritten / max(1.0, min(capacity, at_once))))


def ranks_of_tail(
    tail: float,
    units: list[Ranks],
    held: Ranks,
    left: Remaining,
    most_ranks: int,
    outstanding: Counter[int],
    writers: dict[int, int],
    judges: dict[int, int],
) -> Ranks:
    """Return the ranks that rollout has from now on; genrm has the rest. The first rule that fits decides:

    1. Every answer is written: rollout has none.
    2. Rollout has none, and answers are being judged: still none, so the next wave waits.
    3. More than `tail` of the answers begun are unwritten, and rollout has all, or none is being judged: all.
    4. Both roles have ranks: they stay as they are.
    5. The tail begins: rollout keeps the units with most tokens outstanding, up to `most_ranks`.

    units: the ranks, in parts that change hands. held: the ranks that rollout has now. outstanding: tokens
    that each rank's engine has still to write. writers, judges: lead rank -> model of each engine.
    """
    everyone = tuple(rank for unit in units for rank in unit)
    is_tail = left.unwritten <= tail * left.begun
    if not left.unwritten or (not held and left.judging):
        return ()
    if not is_tail and (held == everyone or not left.judging):
        return everyone
    if held != everyone and can_share({*held}, writers, judges):
        return held
    kept: set[int] = set()
    for unit in sorted(units, key=lambda unit: -sum(outstanding[rank] for rank in unit)):
        more = kept | {*unit}
        writes = writers.keys() & {*unit}
        if writes and len(kept) < most_ranks and can_share(more, writers, judges):
            kept = more
    return tuple(sorted(kept)) or everyone  # all, if an engine of each role can't be apart


def can_share(ranks: set[int], writers: dict[int, int], judges: dict[int, int]) -> bool:
    """Tell whether somebody writes on these ranks, and every judge has an engine on the others."""
    models = {model for lead, model in judges.items() if lead not in ranks}
    return bool(ranks & writers.keys()) and models == {*judges.values()}


Cohorts = list[tuple[float, float]]  # seconds, answers


class FluidModel(NamedTuple):
    """Seconds that a step is served with a tail: all requests of an engine gain their tokens in step."""

    engines: tuple[int, int]  # of both roles, if each has all ranks
    rollout: TokenLatency
    genrm: TokenLatency
    capacity: int
    swap_s: float  # for ranks to change hands

    def seconds(self, tail: float, lengths: tuple[int, ...], judged: float, tokens: float) -> float:
        """lengths: `histogram` of the answers, which so many critiques of so many tokens judge."""
        written, cut, kept = self._written(lengths, tail * sum(lengths))
        each = judged / sum(lengths)
        arrivals = [(max(cut, time), answers * each) for time, answers in written]
        return self._judged(arrivals, tokens, self.engines[1] * (1 - kept / self.engines[0]))

    def _written(self, lengths: tuple[float, ...], of_tail: float) -> tuple[Cohorts, float, int]:
        """Answers when they are written; when genrm gets ranks; the engines that are kept from it."""
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
        """The time of the last critique. So many engines judge; once the last answers come, all do."""
        now = in_flight = depth = 0.0  # depth: tokens that each has gained so far
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
    """Return the split whose tail would serve the newest steps fastest: theirs, if the gain is small."""
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
