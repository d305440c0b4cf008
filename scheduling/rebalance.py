"""Rebalance: which plan serves the next step, from what the last steps measured (WeChat-YATT's dynamic placement).

The signal is the load of each role. One request of a role gains a token in `fixed + each * k` seconds while its engine holds k of
them; both numbers are fitted to what requests took. With W tokens on n engines and a longest answer of L tokens, a role needs

    seconds(n) = fixed * max(waves * L, W / (n * capacity)) + each * W / n

side by side (partial) a serving phase takes max(rollout(S) + a last critique, genrm(N - S)); in turns (full) it takes
rollout(N) + genrm(N) + a swap for each wave. What a plan really took, over what the model says of it, corrects the model: a plan that
has been tried is judged by its own measurements, any other by its nearest neighbour's.

The paper says that utilisation is the signal and that devices move one after another; the model, the threshold and the pause after a
move are ours. Everything here is a pure function of gathered facts, so that every controller takes the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot
from statistics import fmean, median, stdev

from engines.pool import RoleLoad
from placement import Plan

HISTORY = 200  # steps that are remembered
FITTED = 40  # steps that paces are fitted to
RECENT = 6  # steps of a plan that its correction is taken from, and of any plan that say what the work is now
COOL_DOWN = 3  # steps to measure a plan before the next move
LEAST_GAIN = 0.05  # of the serving time: less is noise, and so is less than the estimates' standard error
HOPE = 0.10  # part of its predicted time by which a plan may be faster that was never tried: only so is it tried
ALIKE = 0.1  # judges' share of the tokens may differ by so much, or a plan's trial says nothing of the work now
TRY_AGAIN = 100  # steps after which auto measures the other mode again


@dataclass(frozen=True)
class Load:
    """One serving phase under `plan`."""

    plan: Plan
    rollout: RoleLoad
    genrm: RoleLoad
    waves: int
    serve_s: float  # of the slowest controller
    swap_s: float  # of it, sleeping and waking between roles
    hand_over_s: float  # waking and pushing weights: what a move may cost

    def metrics(self) -> dict[str, float]:
        """Of the step, as report.py names them."""
        metrics = {"time/swap_s": self.swap_s, "split/swaps": float(self.rollout.wakes + self.genrm.wakes)}
        for role, part in (("rollout", self.rollout), ("genrm", self.genrm)):
            metrics[f"{role}/cache_hit_frac"] = part.cached_tokens / max(1, part.prompt_tokens)
        return metrics | {"genrm/tokens": float(self.genrm.tokens), "genrm/response_len_max": float(self.genrm.longest)}


@dataclass(frozen=True)
class Pace:
    """Seconds for one more token of a request: fixed + each * (requests in its engine)."""

    fixed: float
    each: float


@dataclass(frozen=True)
class Decision:
    """The plan of the next step, why, in a line for people, and the serving seconds predicted for it."""

    plan: Plan
    reason: str
    predicted_s: float


@dataclass(frozen=True)
class Estimate:
    """Serving seconds of a plan, and their standard error as far as steps of one plan differed for no reason that the model knows."""

    seconds: float
    error: float


def fit(points: list[tuple[float, float]]) -> Pace:
    """Least squares through (requests in an engine, seconds a token), the newest last and each older one counting a tenth less.

    Where all points have nearly the same k, nothing tells the two numbers apart: a prior says that half of the time is fixed.
    """
    weights = [0.9**age for age in reversed(range(len(points)))]
    total = sum(weights)
    k_mean = sum(w * k for w, (k, _) in zip(weights, points, strict=True)) / total
    t_mean = sum(w * t for w, (_, t) in zip(weights, points, strict=True)) / total
    prior, trust = 0.5 * t_mean / max(k_mean, 1e-9), total * (0.2 * k_mean) ** 2
    covariance = sum(w * (k - k_mean) * (t - t_mean) for w, (k, t) in zip(weights, points, strict=True))
    variance = sum(w * (k - k_mean) ** 2 for w, (k, _) in zip(weights, points, strict=True))
    each = (covariance + trust * prior) / max(variance + trust, 1e-12)
    each = min(max(each, 0.0), t_mean / max(k_mean, 1e-9))
    return Pace(t_mean - each * k_mean, each)


def paces(history: list[Load]) -> dict[str, Pace]:
    """The pace of both roles."""
    points = {"rollout": [], "genrm": []}
    for load in history[-FITTED:]:
        for role, part in (("rollout", load.rollout), ("genrm", load.genrm)):
            if part.tokens:
                points[role].append((part.in_flight / len(load.plan.leads(role)), part.request_s / part.tokens))
    return {role: fit(found) if found else Pace(0.0, 0.0) for role, found in points.items()}


def role_seconds(pace: Pace, part: RoleLoad, engines: int, capacity: int, waves: int) -> float:
    """How long a role is at work on `engines` engines that hold `capacity` requests each."""
    if not part.tokens:
        return 0.0  # nobody was asked, and there may be no engine
    steps = max(waves * part.longest, part.tokens / (engines * capacity))
    return pace.fixed * steps + pace.each * part.tokens / engines


def model_seconds(plan: Plan, work: Load, pace: dict[str, Pace], capacity: int, swap_s: float) -> float:
    """Serving seconds of `plan` for the work of `work`. swap_s: of one wave in full mode."""
    rollout = role_seconds(pace["rollout"], work.rollout, len(plan.leads("rollout")), capacity, work.waves)
    genrm = role_seconds(pace["genrm"], work.genrm, len(plan.leads("genrm")), capacity, work.waves)
    if plan.mode == "full":
        return rollout + genrm + work.waves * swap_s
    return max(rollout + pace["genrm"].fixed * work.genrm.longest, genrm)


def mean_work(history: list[Load]) -> Load:
    """The work that lies ahead: the mean of the newest steps."""
    recent = history[-RECENT:]
    parts = {}
    for role in ("rollout", "genrm"):
        each = [{"rollout": load.rollout, "genrm": load.genrm}[role] for load in recent]
        parts[role] = RoleLoad(round(fmean(p.tokens for p in each)), round(fmean(p.longest for p in each)))
    last, waves = recent[-1], max(1, round(fmean(load.waves for load in recent)))
    return Load(last.plan, parts["rollout"], parts["genrm"], waves, last.serve_s, last.swap_s, fmean(x.hand_over_s for x in recent))


def predictions(history: list[Load], plans: list[Plan], capacity: int) -> dict[Plan, Estimate]:
    """What each plan would take for the work of the newest steps, corrected by what plans did take."""
    pace, work = paces(history), mean_work(history)
    in_turns = [load.swap_s / max(1, load.waves) for load in history if load.plan.mode == "full"]
    swap_s = median(in_turns[-RECENT:]) if in_turns else 0.0
    ratios = {}  # what a plan's newest steps took, over what the model says of them
    for load in history:
        ratio = load.serve_s / max(1e-9, model_seconds(load.plan, load, pace, capacity, swap_s))
        ratios[load.plan] = [*ratios.get(load.plan, []), ratio][-RECENT:]

    def estimate(plan: Plan) -> Estimate:
        tried = [p for p in ratios if p.mode == plan.mode] or list(ratios)
        nearest = ratios[min(tried, key=lambda p: abs(len(p.rollout) - len(plan.rollout)))]
        scatter = stdev(nearest) if len(nearest) > 1 else 0.0
        modelled = model_seconds(plan, work, pace, capacity, swap_s)
        return Estimate(modelled * median(nearest), modelled * scatter / len(nearest) ** 0.5)

    return {plan: estimate(plan) for plan in plans}


def rebalance(history: list[Load], plans: list[Plan], capacity: int, steps_left: int) -> Decision:
    """The plan of the next step (pure). history: what the steps so far measured, newest last; plans: those that the run may take.

    A move must be worth it: the gain over the steps that are left exceeds what a hand-over costs, and the noise. What was never
    tried with work like this has the benefit of the doubt, or the model's errors would keep a run in the first good place. After a
    move a few steps are measured before the next. Ranks move one engine at a time. Each mode has its turn to be measured.
    """
    now, estimates = history[-1].plan, predictions(history, plans, capacity)
    seconds = {plan: estimate.seconds for plan, estimate in estimates.items()}
    at_plan = next((age for age, load in enumerate(reversed(history)) if load.plan != now), len(history))
    if len(plans) == 1:
        return Decision(now, f"{now.split}: the only plan", seconds[now])
    if at_plan < COOL_DOWN:
        return Decision(now, f"{now.split} stays: measured for {at_plan} of {COOL_DOWN} steps", seconds[now])
    if steps_left > COOL_DOWN and (untried := mode_to_measure(history, plans)):
        plan = min((p for p in plans if p.mode == untried), key=seconds.__getitem__)
        return Decision(plan, f"{now.split} -> {plan.split}: to measure {untried} colocation for {COOL_DOWN} steps", seconds[plan])
    share = judges_share(mean_work(history))
    tried = {now} | {load.plan for load in history if abs(judges_share(load) - share) < ALIKE}
    hoped = {plan: took if plan in tried else (1 - HOPE) * took for plan, took in seconds.items()}
    best = min(plans, key=hoped.__getitem__)
    gain, cost = seconds[now] - hoped[best], history[-1].hand_over_s
    may = "should" if best in tried else "may"
    what = f"serving {may} take {hoped[best]:.2f} s instead of {seconds[now]:.2f} s with {best.split}"
    noise = max(LEAST_GAIN * seconds[now], hypot(estimates[now].error, estimates[best].error))
    if gain < noise or gain * steps_left < cost:
        why = "it is the best plan" if best == now else f"too little to gain, {what}"
        return Decision(now, f"{now.split} stays: {why}", seconds[now])
    plan = one_engine_towards(now, best, plans)
    return Decision(plan, f"{now.split} -> {plan.split}: {what}", seconds[plan])


def judges_share(work: Load) -> float:
    """Of the tokens, the part that genrm wrote."""
    return work.genrm.tokens / max(1, work.rollout.tokens + work.genrm.tokens)


def mode_to_measure(history: list[Load], plans: list[Plan]) -> str | None:
    """A mode that hasn't been measured for long enough, or not for too long; None when both are known."""
    for mode in {plan.mode: None for plan in plans}:
        measured = [age for age, load in enumerate(reversed(history)) if load.plan.mode == mode]
        if len(measured) < COOL_DOWN or measured[0] >= TRY_AGAIN:
            return mode
    return None


def one_engine_towards(now: Plan, best: Plan, plans: list[Plan]) -> Plan:
    """`best` itself if it has another mode, else the next split on the way to it."""
    if now.mode != best.mode:
        return best
    low, high = sorted((len(now.rollout), len(best.rollout)))
    between = [p for p in plans if p.mode == now.mode and p != now and low <= len(p.rollout) <= high]
    return min(between, key=lambda p: abs(len(p.rollout) - len(now.rollout)))
