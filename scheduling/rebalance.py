"""Rebalance: which split serves the next step, from what the last steps measured (WeChat-YATT's dynamic placement).

The signal is the load of each role. One request of a role gains a token in `fixed + per_request * k` seconds while
its engine holds k of them; both numbers are fitted to what requests took. With W tokens on n engines and a longest
answer of L tokens, a role needs

    seconds(n) = fixed * max(waves * L, W / (n * capacity)) + per_request * W / n

side by side (partial) a serving phase takes max(rollout(S) + a last critique, genrm(N - S)); in turns (full) it takes
rollout(N) + genrm(N) + a swap for each wave. What a split really took, over what the model says of it, corrects the
model: a split that has been tried is judged by its own measurements, any other by its nearest neighbour's.

The paper says that utilisation is the signal and that devices move one after another; the model, the threshold and
the pause after a move are ours. Everything here is a pure function of gathered facts, so that every controller takes
the same split.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import hypot
from statistics import fmean, median, stdev
from typing import NamedTuple

HISTORY = 200  # steps that are remembered
FITTED = 40  # steps that token latencies are fitted to
RECENT = 6  # steps of a split that its correction is taken from, and of any split that say what the work is now
COOL_DOWN = 3  # steps to measure a split before the next move
LEAST_GAIN = 0.05  # of the serving time: less is noise, and so is less than the estimates' standard error
OPTIMISM = 0.10  # part of its predicted time by which an untried split may be faster: only so is it tried
SIMILAR_LOAD = 0.1  # where the judges' share of the tokens differed by more, a split's trial says nothing of now
TRY_AGAIN = 100  # steps after which auto measures the other mode again
ROLES = ("rollout", "genrm")


class Split(NamedTuple):
    """How many ranks serve each role. In text: `full`, or the ranks of rollout and genrm, `3|1`."""

    mode: str  # full: the roles take turns; partial: they serve side by side
    rollout: int
    genrm: int

    def __str__(self) -> str:
        return f"{self.rollout}|{self.genrm}" if self.mode == "partial" else self.mode


class Request(NamedTuple):
    """One request to an engine. Times on the event loop's clock."""

    sent: float
    end: float
    tokens: int  # generated
    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the KV cache


@dataclass(frozen=True)
class RequestStats:
    """The requests of one role in a serving phase: one controller's, or all controllers' (`total`)."""

    tokens: int = 0  # generated
    longest: int = 0  # tokens of the longest answer
    request_s: float = 0.0  # seconds from sent to finished, summed over the requests
    in_flight: float = 0.0  # requests in flight, as a request sees them: the mean over request-seconds
    prompt_tokens: int = 0
    cached_tokens: int = 0
    wakes: int = 0  # times that the role's engines woke up while serving

    @staticmethod
    def of(requests: Iterable[Request], wakes: int = 0) -> RequestStats:
        """One controller's requests."""
        requests = list(requests)
        edges = sorted([(sent, 1) for sent, *_ in requests] + [(end, -1) for _, end, *_ in requests])
        in_flight, last, first_moment, second_moment = 0, 0.0, 0.0, 0.0
        for time, change in edges:
            first_moment += in_flight * (time - last)
            second_moment += in_flight**2 * (time - last)
            in_flight, last = in_flight + change, time
        tokens, prompt, cached = ([request[column] for request in requests] for column in (2, 3, 4))
        mean = second_moment / max(first_moment, 1e-9)
        longest = max(tokens, default=0)
        return RequestStats(sum(tokens), longest, first_moment, mean, sum(prompt), sum(cached), wakes)

    @staticmethod
    def total(parts: list[RequestStats]) -> RequestStats:
        """All controllers' requests together: each sees its own part of what is in flight."""
        return RequestStats(
            tokens=sum(part.tokens for part in parts),
            longest=max(part.longest for part in parts),
            request_s=sum(part.request_s for part in parts),
            in_flight=sum(part.in_flight for part in parts),
            prompt_tokens=sum(part.prompt_tokens for part in parts),
            cached_tokens=sum(part.cached_tokens for part in parts),
            wakes=parts[0].wakes,
        )


@dataclass(frozen=True)
class StepStats:
    """One serving phase under `split`."""

    split: Split
    rollout: RequestStats
    genrm: RequestStats
    waves: int
    serve_s: float  # of the slowest controller
    swap_s: float  # of it, sleeping and waking between roles
    hand_over_s: float  # waking and pushing weights: what a move may cost

    @staticmethod
    def total(parts: list[StepStats]) -> StepStats:
        """All controllers' of one phase."""
        return StepStats(
            split=parts[0].split,
            rollout=RequestStats.total([part.rollout for part in parts]),
            genrm=RequestStats.total([part.genrm for part in parts]),
            waves=parts[0].waves,
            serve_s=max(part.serve_s for part in parts),
            swap_s=max(part.swap_s for part in parts),
            hand_over_s=max(part.hand_over_s for part in parts),
        )

    def of_role(self, role: str) -> RequestStats:
        """role: of ROLES."""
        return {"rollout": self.rollout, "genrm": self.genrm}[role]


class TokenLatency(NamedTuple):
    """Seconds for one more token of a request: fixed + per_request * (requests in its engine)."""

    fixed: float
    per_request: float


class Decision(NamedTuple):
    """The split of the next step, why, in a line for people, and the serving seconds predicted for it."""

    split: Split
    reason: str
    predicted_s: float


class Estimate(NamedTuple):
    """Serving seconds of a split, and their standard error from steps that differed for no modelled reason."""

    seconds: float
    error: float


def choose_split(
    history: list[StepStats], splits: list[Split], capacity: int, tp: dict[str, int], steps_left: int
) -> Decision:
    """The split of the next step (pure).

    history: what the steps so far measured, newest last, at most HISTORY; splits: those that the run may take;
    capacity: requests that one engine decodes at once; tp: role -> ranks of one engine.

    A move must be worth it: the gain over the steps that are left exceeds what a hand-over costs, and the noise. What
    was never tried with work like this has the benefit of the doubt, or the model's errors would keep a run in the
    first good place. After a move a few steps are measured before the next. Ranks move one engine at a time. Each
    mode has its turn to be measured.
    """
    now, estimates = history[-1].split, predictions(history, splits, capacity, tp)
    seconds = {split: estimate.seconds for split, estimate in estimates.items()}
    measured = next((age for age, step in enumerate(reversed(history)) if step.split != now), len(history))
    if len(splits) == 1:
        return Decision(now, f"{now}: the only plan", seconds[now])
    if measured < COOL_DOWN:
        return Decision(now, f"{now} stays: measured for {measured} of {COOL_DOWN} steps", seconds[now])
    if steps_left > COOL_DOWN and (mode := mode_to_measure(history, splits)):
        split = min((split for split in splits if split.mode == mode), key=seconds.__getitem__)
        reason = f"{now} -> {split}: to measure {mode} colocation for {COOL_DOWN} steps"
        return Decision(split, reason, seconds[split])
    tried = splits_tried_with_such_work(history)
    hoped = {split: took if split in tried else (1 - OPTIMISM) * took for split, took in seconds.items()}
    best = min(splits, key=hoped.__getitem__)
    gain, cost = seconds[now] - hoped[best], history[-1].hand_over_s
    may = "should" if best in tried else "may"
    what = f"serving {may} take {hoped[best]:.2f} s instead of {seconds[now]:.2f} s with {best}"
    noise = max(LEAST_GAIN * seconds[now], hypot(estimates[now].error, estimates[best].error))
    if gain < noise or gain * steps_left < cost:
        why = "it is the best plan" if best == now else f"too little to gain, {what}"
        return Decision(now, f"{now} stays: {why}", seconds[now])
    split = one_engine_towards(now, best, splits)
    return Decision(split, f"{now} -> {split}: {what}", seconds[split])


def mode_to_measure(history: list[StepStats], splits: list[Split]) -> str | None:
    """A mode that was measured for less than COOL_DOWN steps or not in the last TRY_AGAIN; None: there is none."""
    for mode in {split.mode: None for split in splits}:
        ages = [age for age, step in enumerate(reversed(history)) if step.split.mode == mode]
        if len(ages) < COOL_DOWN or ages[0] >= TRY_AGAIN:
            return mode
    return None


def splits_tried_with_such_work(history: list[StepStats]) -> set[Split]:
    """The splits of now and of every step in which the judges' share of the tokens was about today's."""
    share = judges_share(mean_work(history))
    similar = {step.split for step in history if abs(judges_share(step) - share) < SIMILAR_LOAD}
    return {history[-1].split} | similar


def judges_share(work: StepStats) -> float:
    """The part of the tokens that genrm wrote."""
    return work.genrm.tokens / max(1, work.rollout.tokens + work.genrm.tokens)


def one_engine_towards(now: Split, best: Split, splits: list[Split]) -> Split:
    """`best` itself if it has another mode, else the next split on the way to it."""
    if now.mode != best.mode:
        return best
    low, high = sorted((now.rollout, best.rollout))
    between = [s for s in splits if s.mode == now.mode and s != now and low <= s.rollout <= high]
    return min(between, key=lambda split: abs(split.rollout - now.rollout))


# ---------------------------------------------------------------- the model of a serving phase


def predictions(
    history: list[StepStats], splits: list[Split], capacity: int, tp: dict[str, int]
) -> dict[Split, Estimate]:
    """What each split would take for the work of the newest steps, corrected by what splits did take."""
    latency, work = token_latencies(history, tp), mean_work(history)
    swaps = [step.swap_s / max(1, step.waves) for step in history if step.split.mode == "full"]
    swap_s = median(swaps[-RECENT:]) if swaps else 0.0

    def modelled(split: Split, work: StepStats) -> float:
        return model_seconds(split, work, latency, capacity, tp, swap_s)

    ratios = {}  # what a split's newest steps took, over what the model says of them
    for step in history:
        ratio = step.serve_s / max(1e-9, modelled(step.split, step))
        ratios[step.split] = [*ratios.get(step.split, []), ratio][-RECENT:]

    def estimate(split: Split) -> Estimate:
        tried = [other for other in ratios if other.mode == split.mode] or list(ratios)
        nearest = ratios[min(tried, key=lambda other: abs(other.rollout - split.rollout))]
        scatter = stdev(nearest) if len(nearest) > 1 else 0.0
        seconds = modelled(split, work)
        return Estimate(seconds * median(nearest), seconds * scatter / len(nearest) ** 0.5)

    return {split: estimate(split) for split in splits}


def model_seconds(
    split: Split,
    work: StepStats,
    latency: dict[str, TokenLatency],
    capacity: int,
    tp: dict[str, int],
    swap_s: float,
) -> float:
    """Serving seconds of `split` for the work of `work`. swap_s: of one wave in full mode."""
    rollout, genrm = (
        role_seconds(latency[role], work.of_role(role), engines(split, role, tp), capacity, work.waves)
        for role in ROLES
    )
    if split.mode == "full":
        return rollout + genrm + work.waves * swap_s
    return max(rollout + latency["genrm"].fixed * work.genrm.longest, genrm)


def role_seconds(
    latency: TokenLatency, stats: RequestStats, num_engines: int, capacity: int, waves: int
) -> float:
    """How long a role is at work on engines that hold `capacity` requests each."""
    if not stats.tokens:
        return 0.0  # nobody was asked, and there may be no engine
    decode_steps = max(waves * stats.longest, stats.tokens / (num_engines * capacity))
    return latency.fixed * decode_steps + latency.per_request * stats.tokens / num_engines


def engines(split: Split, role: str, tp: dict[str, int]) -> int:
    """How many engines a role has."""
    return {"rollout": split.rollout, "genrm": split.genrm}[role] // tp[role]


def mean_work(history: list[StepStats]) -> StepStats:
    """The work that lies ahead: the mean of the newest steps."""
    recent = history[-RECENT:]
    rollout, genrm = (
        RequestStats(
            tokens=round(fmean(step.of_role(role).tokens for step in recent)),
            longest=round(fmean(step.of_role(role).longest for step in recent)),
        )
        for role in ROLES
    )
    last, waves = recent[-1], max(1, round(fmean(step.waves for step in recent)))
    hand_over_s = fmean(step.hand_over_s for step in recent)
    return StepStats(last.split, rollout, genrm, waves, last.serve_s, last.swap_s, hand_over_s)


def token_latencies(history: list[StepStats], tp: dict[str, int]) -> dict[str, TokenLatency]:
    """Role -> its latency, from the newest FITTED steps; no time at all for a role that was never asked."""
    latencies = {}
    for role in ROLES:
        steps = [(step.split, step.of_role(role)) for step in history[-FITTED:]]
        points = [
            (stats.in_flight / engines(split, role, tp), stats.request_s / stats.tokens)
            for split, stats in steps
            if stats.tokens
        ]
        latencies[role] = fit(points) if points else TokenLatency(0.0, 0.0)
    return latencies


def fit(points: list[tuple[float, float]]) -> TokenLatency:
    """Least squares through (requests in an engine, seconds a token), newest last, each older one a tenth lighter.

    Where all points have nearly the same k, nothing tells the two numbers apart: a prior says that half of the time
    is fixed.
    """
    weights = [0.9**age for age in reversed(range(len(points)))]
    total = sum(weights)
    k_mean = sum(w * k for w, (k, _) in zip(weights, points, strict=True)) / total
    t_mean = sum(w * t for w, (_, t) in zip(weights, points, strict=True)) / total
    prior, trust = 0.5 * t_mean / max(k_mean, 1e-9), total * (0.2 * k_mean) ** 2
    covariance = sum(w * (k - k_mean) * (t - t_mean) for w, (k, t) in zip(weights, points, strict=True))
    variance = sum(w * (k - k_mean) ** 2 for w, (k, _) in zip(weights, points, strict=True))
    per_request = (covariance + trust * prior) / max(variance + trust, 1e-12)
    per_request = min(max(per_request, 0.0), t_mean / max(k_mean, 1e-9))
    return TokenLatency(t_mean - per_request * k_mean, per_request)
