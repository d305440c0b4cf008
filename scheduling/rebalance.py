"""Rebalance: which split serves the next step, from what the last steps measured (WeChat-YATT's placement).

Without --rebalance or --mode auto there is one plan, and nothing to choose. In fused mode ranks change hands
within a step, too: fusion.ranks_of_tail.

A request of a role gains a token in `fixed + per_request * k` seconds while its engine holds k of them; both
numbers are fitted to what requests took. With W tokens on n engines, the longest answer of L, a role needs

    seconds(n) = fixed * max(waves * L, W / (n * capacity)) + per_request * W / n

Side by side (partial) serving takes max(rollout(S) + a last critique, genrm(N - S)); in turns (full) it takes
rollout(N) + genrm(N) + a swap for each wave. What a split really took, over what the model says of it,
corrects the model: a tried split is judged by its own measurements, any other by its nearest neighbour's.

That devices move one by one is the paper's. Its signal is utilisation; here these seconds are. All is pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile, zip_longest
from math import hypot
from statistics import fmean, median, stdev
from typing import NamedTuple

from scheduling.fusion import FluidModel, TokenLatency
from scheduling.measured import RequestStats, Split, StepStats

HISTORY = 200  # steps that are remembered
FITTED = 40  # steps that token latencies are fitted to
RECENT = 6  # steps of a split that correct the model, and of any that say what the work is now
COOL_DOWN = 3  # steps to measure a split before the next move
LEAST_GAIN = 0.05  # of the serving time: less is noise, and so is less than the standard error
OPTIMISM = 0.10  # part of its predicted time by which an untried split is hoped to be faster
SIMILAR_LOAD = 0.1  # a trial with a judges' share of the tokens further off says nothing of now
TRY_AGAIN = 100  # steps after which auto measures the other mode again


class Decision(NamedTuple):
    split: Split  # of the next step
    reason: str  # for people
    predicted_s: float  # serving seconds


class Prediction(NamedTuple):
    seconds: float  # of serving the work that lies ahead with a split
    error: float  # the standard error of these
    hoped: float  # fewer seconds, if `was_tried` says no


def choose_split(
    history: list[StepStats],
    splits: list[Split],
    capacity: int,
    tp: dict[str, int],
    steps_left: int,
) -> Decision:
    """The next step's split (pure). history: newest last; capacity, tp: requests and ranks of an engine.

    A split stays for COOL_DOWN steps, each mode has its turn, then the run moves to where it hopes to be
    fastest, if `is_worth_it`. Ranks move one engine at a time.
    """
    now = history[-1].split
    predicted = predictions(history, splits, capacity, tp)
    seconds = predicted[now].seconds
    if len(splits) == 1:
        return Decision(now, f"{now}: the only plan", seconds)
    measured = len([*takewhile(lambda step: step.split == now, reversed(history))])
    if measured < COOL_DOWN:
        reason = f"{now} stays: measured for {measured} of {COOL_DOWN} steps"
        return Decision(now, reason, seconds)
    mode = mode_to_measure(history, splits)
    if mode and steps_left > COOL_DOWN:
        of_mode = [split for split in splits if split.mode == mode]
        is_new = not any(step.split.mode == mode for step in history)
        split = of_mode[0] if is_new else min(of_mode, key=lambda s: predicted[s].seconds)
        reason = f"{now} -> {split}: to measure {mode} colocation for {COOL_DOWN} steps"
        return Decision(split, reason, predicted[split].seconds)
    best = min(splits, key=lambda split: predicted[split].hoped)
    if is_worth_it(predicted[now], predicted[best], steps_left, history[-1].hand_over_s):
        split = one_engine_towards(now, best, splits)
        hoped = f"serving may take {predicted[best].hoped:.2f} s instead of {seconds:.2f} s"
        reason = f"{now} -> {split}: {hoped} with {best}"
        return Decision(split, reason, predicted[split].seconds)
    return Decision(now, f"{now} stays: there is too little to gain", seconds)


def is_worth_it(now: Prediction, best: Prediction, steps_left: int, hand_over_s: float) -> bool:
    """A move has to gain more than noise in a step, and in those left more than a hand-over costs."""
    gain = now.seconds - best.hoped
    noise = max(LEAST_GAIN * now.seconds, hypot(now.error, best.error))
    return gain >= noise and gain * steps_left >= hand_over_s


def was_tried(split: Split, history: list[StepStats]) -> bool:
    """Tell whether `split` serves now, or served work with about the same judges' share.

    Tails count as one: the model predicts how they differ. A split that wasn't tried is predicted faster, or
    errors of the model would keep a run in the first good place.
    """
    share = judges_share(mean_work(history))
    alike = [step for step in history if abs(judges_share(step) - share) < SIMILAR_LOAD]
    known = [history[-1].split, *(step.split for step in alike)]
    return any(split._replace(tail=other.tail) == other for other in known)


def mode_to_measure(history: list[StepStats], splits: list[Split]) -> str | None:
    """A mode measured for less than COOL_DOWN steps, or not in the last TRY_AGAIN; None: there is none."""
    for mode in {split.mode: None for split in splits}:
        ages = [age for age, step in enumerate(reversed(history)) if step.split.mode == mode]
        if len(ages) < COOL_DOWN or ages[0] >= TRY_AGAIN:
            return mode
    return None


def judges_share(work: StepStats) -> float:
    return work.genrm.tokens / max(1, work.rollout.tokens + work.genrm.tokens)


def one_engine_towards(now: Split, best: Split, splits: list[Split]) -> Split:
    """The next split on the way to `best`; itself if it has another mode, or another tail."""
    if now.mode != best.mode or now.tail != best.tail:
        return best
    low, high = sorted((now.rollout, best.rollout))
    between = [s for s in splits if s.mode == now.mode and s != now and low <= s.rollout <= high]
    return min(between, key=lambda split: abs(split.rollout - now.rollout))


@dataclass(frozen=True)
class ServingModel:
    """The formula at the head of this file."""

    latency: dict[str, TokenLatency]
    capacity: int
    tp: dict[str, int]
    swap_s: float  # of one wave where the roles take turns

    def seconds(self, split: Split, work: StepStats) -> float:
        """Seconds of serving with `split` for the work of `work`, which another split may have done."""
        if split.mode == "fused":
            engines = (split.rollout // self.tp["rollout"], split.genrm // self.tp["genrm"])
            model = FluidModel(engines, **self.latency, capacity=self.capacity, swap_s=self.swap_s)
            critique = work.genrm.tokens / max(1, work.genrm.requests)
            return model.seconds(split.tail, work.lengths, work.genrm.requests, critique)
        rollout = self._role_seconds("rollout", split.rollout, work.rollout, work.waves)
        genrm = self._role_seconds("genrm", split.genrm, work.genrm, work.waves)
        if split.mode == "full":
            return rollout + genrm + work.waves * self.swap_s
        return max(rollout + self.latency["genrm"].fixed * work.genrm.longest, genrm)

    def _role_seconds(self, role: str, ranks: int, stats: RequestStats, waves: int) -> float:
        if not stats.tokens:
            return 0.0  # nobody was asked, and there may be no engine
        engines = ranks // self.tp[role]
        fixed, per_request = self.latency[role]
        decode_steps = max(waves * stats.longest, stats.tokens / (engines * self.capacity))
        return fixed * decode_steps + per_request * stats.tokens / engines


def predictions(
    history: list[StepStats], splits: list[Split], capacity: int, tp: dict[str, int]
) -> dict[Split, Prediction]:
    """Predict each split's seconds for the newest steps' work, corrected by what splits took."""
    swaps = [step.swap_s / max(1, step.waves) for step in history if step.split.mode != "partial"]
    swap_s = median(swaps[-RECENT:]) if swaps else 0.0
    models = {}
    for mode in {split.mode for split in splits} | {step.split.mode for step in history}:
        latency = {role: token_latency(history, role, ranks, mode) for role, ranks in tp.items()}
        models[mode] = ServingModel(latency, capacity, tp, swap_s)
    ratios = {}  # what a split's newest steps took, over what the model says of them
    for step in history:
        ratio = step.serve_s / max(1e-9, models[step.split.mode].seconds(step.split, step))
        ratios[step.split] = [*ratios.get(step.split, []), ratio][-RECENT:]
    work = mean_work(history)
    predicted = {}
    for split in splits:
        nearest = ratios[nearest_to(split, list(ratios))]
        scatter = stdev(nearest) if len(nearest) > 1 else 0.0
        modelled = models[split.mode].seconds(split, work)
        seconds = modelled * median(nearest)
        error = modelled * scatter / len(nearest) ** 0.5
        hoped = seconds if was_tried(split, history) else (1 - OPTIMISM) * seconds
        predicted[split] = Prediction(seconds, error, hoped)
    return predicted


def nearest_to(split: Split, tried: list[Split]) -> Split:
    """The tried split of the same mode, else of any, with the most similar ranks, then tail."""
    of_mode = [other for other in tried if other.mode == split.mode] or tried
    return min(of_mode, key=lambda o: (abs(o.rollout - split.rollout), abs(o.tail - split.tail)))


def mean_work(history: list[StepStats]) -> StepStats:
    """The work that lies ahead: the mean of the newest steps."""
    recent = history[-RECENT:]
    roles = {}
    for role in ("rollout", "genrm"):
        parts = [step.ranks_and_stats(role)[1] for step in recent]
        tokens = round(fmean(part.tokens for part in parts))
        longest = round(fmean(part.longest for part in parts))
        requests = round(fmean(part.requests for part in parts))
        roles[role] = RequestStats(tokens, longest, requests=requests)
    waves = max(1, round(fmean(step.waves for step in recent)))
    counts = [*map(fmean, zip_longest(*(step.lengths for step in recent), fillvalue=0))]
    # fewer than the longest of all steps has
    bins = round(fmean(len(step.lengths) for step in recent))
    lengths = (*counts[: bins - 1], sum(counts[bins - 1 :])) if bins else ()
    return replace(recent[-1], **roles, waves=waves, lengths=lengths)


def token_latency(history: list[StepStats], role: str, tp: int, mode: str) -> TokenLatency:
    """Fit the newest FITTED steps of a mode, else of all; no time if the role was never asked.

    Where requests come one by one, each prompt holds up those that are written: so modes aren't mixed.
    """
    of_mode = [step for step in history if step.split.mode == mode] or history
    points = []
    for step in of_mode[-FITTED:]:
        ranks, stats = step.ranks_and_stats(role)
        if stats.tokens:
            points.append((stats.in_flight / (ranks // tp), stats.request_s / stats.tokens))
    return fit(points) if points else TokenLatency(0.0, 0.0)


def fit(points: list[tuple[float, float]]) -> TokenLatency:
    """Least squares through (requests in an engine, seconds a token); each older point weighs a tenth less.

    Where all points have nearly the same k, a prior tells the two numbers apart: half of the time is fixed.
    """
    weights = [0.9**age for age in reversed(range(len(points)))]
    weighed = [(weight, k, t) for weight, (k, t) in zip(weights, points, strict=True)]
    total = sum(weights)
    k_mean = sum(w * k for w, k, _ in weighed) / total
    t_mean = sum(w * t for w, _, t in weighed) / total
    covariance = sum(w * (k - k_mean) * (t - t_mean) for w, k, t in weighed)
    variance = sum(w * (k - k_mean) ** 2 for w, k, _ in weighed)
    # ridge: as if the points also spread by 0.2 k around the prior's slope
    prior = 0.5 * t_mean / max(k_mean, 1e-9)
    trust = total * (0.2 * k_mean) ** 2
    per_request = (covariance + trust * prior) / max(variance + trust, 1e-12)
    per_request = min(max(per_request, 0.0), t_mean / max(k_mean, 1e-9))
    return TokenLatency(t_mean - per_request * k_mean, per_request)
