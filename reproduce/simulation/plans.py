"""How long would a step of my run take? Simulates its settings under each mode and placement.

    WORLD_SIZE=8 python run.py --dry-run --simulate --like runs/mine SETTINGS      timed like a finished run
    WORLD_SIZE=8 python run.py --dry-run --simulate --devices FILE.toml SETTINGS   timed from a data sheet

run.py starts this as a separate process: `python -m reproduce.simulation.plans`. The loop, modes and
placements are the
product's own code, on a virtual clock. The finished run or FILE sets how long engines and trainers take.
OUT/plans.png shows a bar for each plan.
"""

from __future__ import annotations

import csv
import multiprocessing
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import modes
from config import Config, Parser, parse_config
from extras.memory import check as memory
from extras.memory import estimate
from placement import PLACEMENTS, make_placement
from reproduce.simulation.cluster import PHASES, Costs, simulation_of
from reproduce.simulation.finished import LAST, costs_like, own_config, read_run, work_of
from reproduce.simulation.sheet import costs_of_sheet
from runtime.devices import FULL
from runtime.errors import UserError, printable
from scheduling.layout import Placement
from scheduling.measured import Split

MOST_PLANS = 20
TAILS = (0.1, 0.2, 0.5)
MOST_OFF = 0.1  # a larger error for the run itself makes the table unreliable
COLORS = {"serve": "#2a78b8", "train": "#3c9d4e", "switch": "#9a9a9a", "push": "#8a4fb0"}
# measured plans and their predictions
ROWS = Path(__file__).parents[2] / "docs" / "papers" / "rows" / "measured.csv"


class Plan(NamedTuple):
    name: str  # shown to people
    config: Config


class Result(NamedTuple):
    plan: Plan
    seconds: float  # for a step
    tokens: float  # answer tokens that a step trains on
    prompts: float  # prompt tokens of the same samples
    idle: float  # fraction of all ranks' time
    phases: dict[str, float]  # phase in COLORS -> seconds in a step on the slowest rank


# ---------------------------------------------------------------- plans


def plans_of(config: Config, ranks: int) -> tuple[list[Plan], list[str]]:
    """Return the plans to try, and a line for whatever is left out.

    Nearly all splits of the first placement are tried, and about three of each other placement.
    """
    left_out = []
    places = []
    # the row `ranks` reads words such as engines=0-1
    named = [name for name in PLACEMENTS if name != "ranks"]
    for name in dict.fromkeys((config.placement, *named)):
        try:
            placement = make_placement(replace(config, placement=name, ahead=0), ranks)
        except UserError as error:
            left_out.append(str(error).removeprefix("--placement "))
            continue
        for ahead in range(1 + placement.is_apart):
            own = replace(config, placement=name, ahead=ahead, rebalance=False)
            if splits := splits_of(own, placement):
                places.append((f"{name}, ahead" if ahead else name, own, splits))
    plans = []
    for name, own, splits in places:
        cuts = [split for split in splits if split.mode == "partial" and split.genrm]
        others = [split for split in splits if split not in cuts]
        room = MOST_PLANS - len(others) - 3 * (len(places) - 1)
        if plans:
            others = [split for split in others if split.tail in (0, config.tail)]
            room = 1
        chosen = thinned(cuts, max(1, room))
        if len(chosen) < len(cuts):
            left_out.append(f"{len(cuts) - len(chosen)} of {len(cuts)} splits of {name}")
        for split in splits:
            if split in others or split in chosen:
                rollout_ranks = split.rollout if split in cuts else 0
                tail = split.tail or own.tail
                plan = replace(own, mode=split.mode, tail=tail, rollout_ranks=rollout_ranks)
                plans.append(Plan(f"{name}: {split}" if config.judge_models else name, plan))
    return plans, left_out


def splits_of(config: Config, placement: Placement) -> list[Split]:
    """Return every split of every mode, or the only split if there is no judge."""
    ranks = len(placement.engines)
    if not config.judge_models:
        return [Split("partial", ranks, 0)]
    found = []
    for mode in ("full", "partial"):
        found += modes.MODES[mode].splits(placement, config)
    if ranks > placement.least_ranks:
        tails = sorted({config.tail, *TAILS} - {0.0})
        found += [Split("fused", ranks, ranks, tail) for tail in tails]
    return [split for split in found if placement.serves_all(split, len(config.judge_models))]


def thinned(items: list, most: int) -> list:
    """Return at most `most` of the items, evenly spaced. If most is 1, return the middle one."""
    if len(items) <= most:
        return items
    if most == 1:
        return [items[(len(items) - 1) // 2]]
    return [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]


def simulate(costs: Costs, ranks: int, plan: Plan) -> Result | str:
    """Simulate a plan. Returns the reason as text if the plan isn't possible."""
    config = plan.config
    try:
        cluster = costs.cluster_of(config, make_placement(config, ranks))
        run = simulation_of(config, ranks, costs.work, cluster)
    except UserError as error:
        return f"{plan.name}: {error}"
    facts = run.run()
    whole_s = facts[-1].ended_s
    learners = len(run.placement.learners)
    busy_s = sum(step.seconds["train"] for step in facts) * learners
    for role, engines in run.engines.items():
        busy_s += sum(engine.batch.busy_s for engine in engines) * vars(config)[f"{role}_tp"]
    first, *counted = facts[: -1 if config.ahead else None]
    seconds = (counted[-1].ended_s - first.ended_s) / len(counted)
    mean = {}
    for name in PHASES:
        mean[name] = statistics.fmean(step.seconds[name] for step in counted)
    # "switch" counts only time between phases; sleeping and waking inside a phase belongs to that phase
    if not config.ahead:
        between = seconds - mean["serve"] - mean["train"] - mean["sync"]
        mean["switch"] = min(mean["switch"], max(0.0, between))
    mean["push"] = mean.pop("sync")
    tokens = statistics.fmean(step.stats.rollout.tokens for step in counted) * run.cluster.grain
    answers = statistics.fmean(sum(step.stats.lengths) for step in counted)
    prompts = answers * costs.work.prompt
    return Result(plan, seconds, tokens, prompts, 1 - busy_s / (ranks * whole_s), mean)


# ---------------------------------------------------------------- for people


def memory_of(config: Config, ranks: int, device: float) -> str:
    """Return the GB that a device needs, "" for a CPU. device: its bytes, 0 if unknown."""
    if config.device == "cpu":
        return ""
    try:
        placement, splits = modes.lay_out(config, ranks)
        size, peaks = memory.device_peaks(config, placement, splits)
        free = FULL * size
        if device:
            free, peaks = device, estimate.peaks_of(config, placement, splits, device)
    except UserError as error:
        return f"? ({error})"
    needed = max(peaks.values())
    return f"{needed / 1e9:.1f} GB{' TOO LITTLE' if needed > free else ''}"


def table_of(results: list[Result], memories: list[str]) -> list[str]:
    """Return the lines of the table of plans."""
    rows = [("plan", "s a step", "answer tokens/s", "with prompts", "idle", "memory")]
    for result, needed in zip(results, memories, strict=True):
        name = result.plan.name + " *" * result.plan.config.ahead
        answers = f"{result.tokens / result.seconds:,.0f}"
        whole = f"{(result.tokens + result.prompts) / result.seconds:,.0f}"
        rows.append((name, f"{result.seconds:.3g}", answers, whole, f"{result.idle:.0%}", needed))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        right = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append(f"  {name.ljust(widths[0])}  {right}".rstrip())
    return lines


def checked(off: float = 0.0, steps: int = LAST) -> str:
    """Return how far off such predictions are, or a warning if the known run's own is too far off.

    off: the relative error of the run's own simulation; steps: how many of its steps were counted.
    """
    if abs(off) > MOST_OFF:
        few = f"few steps (only {steps} counted), " if steps < LAST else ""
        why = f"{few}other load on its machine, work that isn't modelled (such as rules)"
        speed = "slower" if off > 0 else "faster"
        return f"Don't trust this table: it is {abs(off):.0%} {speed} than that run. Possible causes: {why}."
    errors = []
    for row in csv.DictReader(ROWS.read_text(encoding="utf-8").splitlines()):
        if row["figure"].startswith("plans") and row["kind"] == "predicted":
            errors.append(abs(float(row["simulated"]) / float(row["published"]) - 1))
    if not errors:
        return "No such prediction has been compared with a real run yet."
    far = f"a median of {statistics.median(errors):.0%}, at most {max(errors):.0%}"
    where = f"{len(errors)} plans measured on paced ranks, docs/papers/measured.md"
    return f"Such predictions were off by {far} ({where})."


def draw(results: list[Result], path: Path) -> None:
    """Draw a bar of phases for each plan, and a mark where its step ends, as --ahead overlaps phases."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.3 * len(results)), layout="constrained")
    for place, result in enumerate(results):
        left = 0.0
        for name, color in COLORS.items():
            label = name if place == 0 else None
            axes.barh(place, result.phases[name], left=left, color=color, label=label)
            left += result.phases[name]
        axes.plot([result.seconds] * 2, [place - 0.45, place + 0.45], color="black")
    axes.plot([], [], color="black", label="a step ends")
    axes.set_yticks(range(len(results)), [result.plan.name for result in results])
    axes.invert_yaxis()
    axes.set(xlabel="simulated seconds for a step, on the slowest rank")
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def parser_of_words() -> Parser:
    """Return the parser of the flags that aren't settings of a run."""
    parser = Parser(allow_abbrev=False, add_help=False)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--like", type=Path)
    parser.add_argument("--devices", type=Path)
    return parser


def report(arguments: list[str]) -> None:
    """Simulate the plans and print them. Raises UserError if the arguments don't allow that."""
    given, words = parser_of_words().parse_known_args(arguments)
    if bool(given.like) == bool(given.devices):
        needed = "--like RUN, the folder of a finished run, or --devices FILE.toml"
        raise UserError(f"--simulate needs one of {needed}")
    if given.devices and "--device" not in words:
        words += ["--device", "cuda"]
    config = parse_config(words)
    ranks = int(os.environ.get("WORLD_SIZE", "2"))
    if config.evaluates:
        raise UserError("--simulate works only for runs that serve and train")
    modes.lay_out(config, ranks)
    known = given.like and read_run(given.like)
    costs = costs_like(known, config) if known else costs_of_sheet(given.devices, config)
    plans, left_out = plans_of(config, ranks)
    work = partial(simulate, costs, ranks)
    own = own_config(known) if known else config
    # the finished run's own token limits, not those of this command
    own_costs = costs._replace(work=work_of(known, own)) if known else costs
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as processes:
        again = None
        if known:
            again = processes.submit(simulate, own_costs, known.ranks, Plan("its own", own))
        found = [*processes.map(work, plans)]
    results = sorted((r for r in found if isinstance(r, Result)), key=lambda r: r.seconds)
    left_out += [r for r in found if isinstance(r, str)]
    memories = [memory_of(result.plan.config, ranks, costs.device) for result in results]
    samples = f"{config.prompts_per_step} prompts of {config.answers_per_prompt} answers"
    print(f"SIMULATED on {ranks} ranks (WORLD_SIZE), steps of {samples}, the fastest plan first:")
    print(*table_of(results, memories), sep="\n")
    if any(result.plan.config.ahead for result in results):
        print("  * answers are one update old, so --ahead 1 changes what is learned")
    print(*(f"  left out: {text}" for text in left_out), sep="\n", end="\n" if left_out else "")
    print("assumed:", *costs.assumptions, "nothing else runs on these devices", sep="\n  ")
    print("  saves and evaluations aren't counted; rules take no time")
    trust = "How far predictions from a data sheet are off wasn't measured: no such run was made."
    if again:
        seconds = known.seconds["step"] - known.seconds["save"]
        ours = again.result().seconds
        off = ours / seconds - 1
        print(f"  a step of {given.like} itself: {seconds:.3g} s, simulated {ours:.3g}, {off:+.0%}")
        trust = checked(off, known.steps)
    print(trust)
    path = Path(config.out, "plans.png")
    draw(results, path)
    print(f"wrote {path}; nothing was started")


def main(arguments: list[str]) -> int:
    """Return a status: 2 for a user's error, which is printed as one line."""
    try:
        report(arguments)
    except UserError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
