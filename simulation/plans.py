"""What would my run take? The settings of a run, by modes and placements, on the virtual clock.

    WORLD_SIZE=8 python run.py --dry-run --simulate --like runs/mine SETTINGS      as fast as a finished run
    WORLD_SIZE=8 python run.py --dry-run --simulate --devices FILE.toml SETTINGS   as a data sheet says

run.py starts this as a process of its own: `python -m simulation.plans`. Loop, modes and placements are the
product's; engines and trainers take the seconds that the finished run or FILE says. OUT/plans.png shows it.
"""

from __future__ import annotations

import csv
import multiprocessing
import os
import statistics
import sys
import tomllib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import demo.task  # noqa: F401 (it adds a judge format)
import genrm
import modes
import rollout
from algorithms import algorithm_of
from commands import memory
from config import Config, Parser, parse_config
from inputs.hf_directory import read_model_config, readable
from placement import PLACEMENTS, make_placement
from runtime.errors import UserError, printable
from scheduling.layout import Placement, Shape
from scheduling.measured import Split
from simulation.cluster import Cluster, Lengths, Simulation, Workload
from simulation.costs import BF16_BYTES, Decode, Device, Model, Passes, decode_of, passes_of
from simulation.engine import EngineCosts, Moves
from simulation.finished import APART, Drawn, Known, config_from, read_run

MOST_PLANS = 20
TAILS = (0.1, 0.2, 0.5)
STEPS = (3, 20)  # at least, at most; the first isn't counted
WORK = 2500  # of samples, and of 8 for each rank, in all steps together
GRAINS = 256  # tokens of the longest answer, at most: one stands for several
SETTINGS = (
    "algorithm",
    "prompts_per_step",
    "answers_per_prompt",
    "over_dispatch",
    "updates_per_step",
)
SETTINGS += ("rollout_tp", "genrm_tp", "tp", "pp", "cp", "schedule", "seed", "placement", "ahead")
SETTINGS += ("tail", "rollout_ranks")
# those that change what a token takes, and models, which may be others of the same size
SAME = ("tp", "pp", "cp", "rollout_tp", "genrm_tp", "dtype", "device", "recompute", "schedule")
ALIKE = ("model", "judge", "cost_judge", "critic")
PHASES = {"serve": "#2a78b8", "train": "#3c9d4e", "switch": "#9a9a9a", "push": "#8a4fb0"}
SHEET = {  # the tables of a devices file, and their keys
    "device": Device._fields,
    "engine": ("weights", "kv", "prefill", "layer_s", "sequence_s"),
    "trainer": ("mfu", "update_s"),
}
ROWS = Path(__file__).parents[1] / "docs" / "papers" / "rows" / "measured.csv"


class Plan(NamedTuple):
    name: str  # for people
    config: Config


class Costs(NamedTuple):
    """The work of a step, and who does it how fast."""

    work: Workload
    cluster_of: Callable[[Config, Placement], Cluster]
    said: list[str]  # what is assumed
    device: float = 0.0  # bytes of one, if it is known


class Result(NamedTuple):
    plan: Plan
    seconds: float  # of a step
    tokens: float  # of the answers that a step trains on, and ...
    prompts: float  # ... of their prompts
    idle: float  # part of all ranks' time
    phases: dict[str, float]  # seconds of a step's slowest rank, by PHASES


# ---------------------------------------------------------------- as fast as a finished run


def costs_like(known: Known, config: Config) -> Costs:
    """The costs of a finished run. UserError if a setting that they depend on is another."""
    there = known.settings
    for name in SAME:
        if there[name] != vars(config)[name]:
            here = f"it is {vars(config)[name]}: a token takes other seconds"
            raise UserError(
                f"--like: --{name.replace('_', '-')} was {there[name]} there, here {here}"
            )
    counts = [len(config_from(there).judge_models), len(config.judge_models)]
    if counts[0] != counts[1]:
        raise UserError(f"--like: {counts[0]} judges were there, {counts[1]} are here")
    work = work_of(known, config)
    own = own_config(known)
    learning = Cluster(engines_of(known, own), Passes(1e-6, stages=own.pp), **judges_of(known, own))
    facts = simulation_of(own, known.ranks, work_of(known, own), learning).run()
    token_s = 1e-6 * known.learning_s / statistics.fmean(f.seconds["train"] for f in facts[1:])
    said = [f"lengths: of {sum(known.lengths):.0f} answers of its last {known.steps} steps"]
    said += [f"{known.critique:.0f} tokens a critique, {known.asked:.2f} critiques an answer"]
    for name, (fixed, each, read, prefill) in known.paces.items():
        role = name if name == "rollout" else f"judge {name}"
        pace = f"{1e3 * fixed:.3g} ms a decode step and {1e3 * each:.3g} ms a sequence"
        said.append(f"{role}: {pace}, {1e3 * read:.3g} ms to read, {1e3 * prefill:.3g} ms a token")
    said += [f"training: {1e6 * token_s:.3g} us a token forward, whatever the number of ranks"]
    moves = (
        f"an engine sleeps or wakes in {known.engine_s:.3g} s, a trainer in {known.trainer_s:.3g} s"
    )
    said += [f"{moves}, a push takes {known.seconds['sync']:.3g} s"]
    differs = [name for name in ALIKE if as_list(there[name]) != as_list(vars(config)[name])]
    said += [f"--{name.replace('_', '-')} is as large as it was there" for name in differs]
    return Costs(work, partial(cluster_like, known, token_s), said)


def as_list(value: str | list | tuple) -> list[str]:
    """Return model directories, wherever the run was started."""
    return [os.path.realpath(each) for each in ([value] if isinstance(value, str) else value)]


def work_of(known: Known, config: Config) -> Workload:
    most = config.max_new_tokens
    critique = Lengths(known.critique, 0.0, max(1, config.judge_max_new_tokens))
    answer = Drawn(0, 0, most, tuple(known.lengths))
    differ = known.asked if known.asked < 0.95 else 1.0
    return Workload(known.prompt, answer, critique, known.keep, judged=known.judged, differ=differ)


def own_config(known: Known) -> Config:
    """The settings of the finished run, by the split of its last step."""
    mode, ranks, _, tail = known.split
    mode = dict(mode=mode, rollout_ranks=ranks if mode == "partial" else 0, rebalance=False)
    return replace(config_from(known.settings), **mode, tail=tail or known.settings["tail"])


def engines_of(known: Known, config: Config) -> dict[str, EngineCosts]:
    """The engines of both roles; of several judges each has its own (judges_of)."""
    found = {}
    for name, (fixed, each, read, prefill) in known.paces.items():
        most = config.max_running_requests
        found[name] = EngineCosts(fixed, each, 0.0, prefill, most, read=read, apart=APART)
    return {"rollout": found["rollout"], "genrm": found.get("0", found["rollout"])}


def judges_of(known: Known, config: Config) -> dict[str, tuple[EngineCosts, ...]]:
    judges = []
    for number in range(len(config.judge_models)):
        fixed, each, read, prefill = known.paces[str(number)]
        most = config.max_running_requests
        judges.append(EngineCosts(fixed, each, 0.0, prefill, most, read=read, apart=APART))
    return {"judges": tuple(judges)}


def cluster_like(known: Known, token_s: float, config: Config, placement: Placement) -> Cluster:
    engine = Moves(known.engine_s, known.engine_s)
    moves = {"genrm": engine, "rollout": engine._replace(push_s=known.seconds["sync"])}
    moves["train"] = Moves(known.trainer_s, known.trainer_s)
    learned = Passes(token_s, stages=config.pp)
    return Cluster(engines_of(known, config), learned, moves=moves, **judges_of(known, config))


# ---------------------------------------------------------------- as a data sheet says


def costs_of_sheet(path: Path, config: Config) -> Costs:
    """The costs of a devices file, and lengths that are a guess. UserError names the file and the key."""
    where = f"--devices {path}"
    try:
        sheet = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: {error}") from None
    if unknown := sheet.keys() - SHEET.keys() - {"source"}:
        raise UserError(f"{where}: {min(unknown)} is none of source, {', '.join(SHEET)}")
    for name, keys in SHEET.items():
        table = sheet.get(name, {})
        if not isinstance(table, dict) or (unknown := table.keys() - {*keys}):
            raise UserError(f"{where}: {min(unknown)} in [{name}] is none of {', '.join(keys)}")
        for key in keys:
            if not (isinstance(table.get(key), int | float) and 0 <= table[key] < float("inf")):
                raise UserError(f"{where}: [{name}] needs {key}, a number")
    models = (config.model, *config.judge_models, *([config.critic] if config.critic else []))
    for each in models:
        model_of(each)
    most = config.max_new_tokens
    answer = Lengths(most / 6, 0.8, most)
    critique = Lengths(config.judge_max_new_tokens / 4, 0.5, config.judge_max_new_tokens)
    keep = 0.7 if algorithm_of(config).filters else 1.0
    work = Workload(512, answer, critique, keep)
    said = [f"GUESSED: answers of {most / 6:.0f} tokens in the median, log-normal with sigma 0.8"]
    said += [f"GUESSED: critiques of {critique.median:.0f}, prompts of 512 tokens"]
    said += [f"GUESSED: {keep:.0%} of the groups are trained on; give --like RUN once you have one"]
    said += [f"devices: {sheet.get('source', 'no source is named')}"]
    device = sheet["device"]["memory"]
    return Costs(work, partial(cluster_of_sheet, sheet), said, device)


def model_of(path: str) -> Model:
    """The sizes of a model by its config.json alone. UserError."""
    found = read_model_config(path)
    with readable(f"{path}/config.json"):
        hf = found.get("text_config", found)  # of a model that sees
        heads = hf["num_attention_heads"]
        head = hf.get("head_dim") or hf["hidden_size"] // heads
        keys = head * hf["num_key_value_heads"]
        table = hf["vocab_size"] * (1 if hf.get("tie_word_embeddings") else 2)
        layer = 2 * head * heads + 2 * keys + 3 * hf["intermediate_size"]
        params = hf["hidden_size"] * (table + hf["num_hidden_layers"] * layer)
        return Model(params, hf["num_hidden_layers"], hf["hidden_size"], keys)


def cluster_of_sheet(sheet: dict, config: Config, placement: Placement) -> Cluster:
    """UserError if an engine's weights don't fit."""
    device = Device(**sheet["device"])
    policy = model_of(config.model)
    rates = {name: sheet["engine"][name] for name in ("weights", "kv", "prefill", "layer_s")}

    def engine(model: Model, tp: int) -> Decode:
        found = decode_of(model, device, tp, memory=config.mem_fraction, **rates)
        own = dict(each=found.each + sheet["engine"]["sequence_s"])
        return replace(found, most=config.max_running_requests, **own)

    def learned(model: Model, shape: Shape) -> Passes:
        sent = (4 + BF16_BYTES) * model.params / (shape.tp * shape.pp) * (shape.dp - 1) / shape.dp
        band = device.link if len(shape.ranks) <= 8 else device.network
        update = sheet["trainer"]["update_s"] + sent / band
        how = (device, shape.tp * shape.pp, sheet["trainer"]["mfu"], shape.tp)
        return passes_of(model, *how, stages=shape.pp, update=update)

    actor = placement.actor
    critic = model_of(config.critic or config.model)
    states = policy.params / (actor.tp * actor.pp) * (2 + 4 + 12 / actor.dp) / device.host
    serve = policy.bytes / config.rollout_tp
    push = serve / (device.network if placement.is_apart else device.host)
    judges = [model_of(path) for path in config.judge_models]
    judge = max((each.bytes / config.genrm_tp for each in judges), default=0.0) / device.host
    moves = {"rollout": Moves(serve / device.host, serve / device.host, push)}
    moves |= {"genrm": Moves(judge, judge), "train": Moves(states, states)}
    rollouts = engine(policy, config.rollout_tp)
    return Cluster(
        {"rollout": rollouts, "genrm": rollouts},
        learned(policy, actor),
        learned(critic, placement.critic),
        learned(policy, placement.reference),
        moves=moves,
        judges=tuple(engine(each, config.genrm_tp) for each in judges),
    )


# ---------------------------------------------------------------- plans


def plans_of(config: Config, ranks: int) -> tuple[list[Plan], list[str]]:
    """The plans that are tried, and what is left out. Of the first placement nearly all modes are."""
    left_out = []
    places = []
    for name in dict.fromkeys((config.placement, *PLACEMENTS)):
        try:
            placement = make_placement(replace(config, placement=name, ahead=0), ranks)
        except UserError as error:
            left_out.append(str(error).removeprefix("--placement "))
            continue
        for ahead in range(1 + placement.is_apart):
            own = replace(config, placement=name, ahead=ahead, rebalance=False)
            splits = splits_of(own, placement)
            if splits:
                places.append((f"{name}, ahead" if ahead else name, own, splits))
    plans = []
    for number, (words, own, splits) in enumerate(places):
        cuts = [split for split in splits if split.mode == "partial" and split.genrm]
        others = [split for split in splits if split not in cuts]
        room = 1
        if number:
            others = [split for split in others if split.tail in (0, config.tail)]
        else:
            room = MOST_PLANS - len(others) - 3 * (len(places) - 1)
        chosen = thinned(cuts, max(1, room))
        if len(chosen) < len(cuts):
            left_out.append(f"{len(cuts) - len(chosen)} of {len(cuts)} splits of {words}")
        for split in splits:
            if split in others or split in chosen:
                mode = dict(mode=split.mode, tail=split.tail or own.tail, rollout_ranks=0)
                if split in cuts:
                    mode["rollout_ranks"] = split.rollout
                text = f"{words}: {split}" if config.judge_models else words
                plans.append(Plan(text, replace(own, **mode)))
    return plans, left_out


def splits_of(config: Config, placement: Placement) -> list[Split]:
    """All splits of all modes. Without a judge there is one."""
    ranks = len(placement.engines)
    if not config.judge_models:
        return [Split("partial", ranks, 0)]
    found = []
    for mode in ("full", "partial"):
        found += modes.MODES[mode].splits(placement, config)
    if ranks > placement.unit:
        tails = sorted({config.tail, *TAILS} - {0.0})
        found += [Split("fused", ranks, ranks, tail) for tail in tails]
    return [split for split in found if placement.serves_all(split, len(config.judge_models))]


def thinned(items: list, most: int) -> list:
    """So many of them, evenly spaced; the one in the middle, of one."""
    if len(items) <= most:
        return items
    if most == 1:
        return [items[(len(items) - 1) // 2]]
    return [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]


def simulation_of(config: Config, ranks: int, work: Workload, cluster: Cluster) -> Simulation:
    """The controllers of a run. Rules beside judges take no time; without judges one stands for all."""
    settings = {name: vars(config)[name] for name in SETTINGS}
    least, most = STEPS
    steps = WORK // (config.prompts_per_step * config.answers_per_prompt + 8 * ranks)
    # the last step serves nothing ahead, and isn't counted either
    settings["steps"] = max(least, min(most, steps)) + config.ahead
    settings |= dict(
        judge=("JUDGE",) * len(config.judge), cost_judge=("JUDGE",) * len(config.cost_judge)
    )
    rule = (f"simulated:{work.keep:.6f}",)
    settings["rule"] = () if config.judge else rule
    if "cost" in algorithm_of(config).signals and not config.cost_judge:
        settings["cost_rule"] = rule
    formats = []
    for judge in genrm.formats_of(config):
        name = "simulated scores" if judge.scores else "simulated"
        formats.append(f"{name}, {judge.judgements}")
        genrm.FORMATS[formats[-1]] = replace(genrm.FORMATS[name], judgements=judge.judgements)
    settings["judge_format"] = tuple(formats)
    most = work.answer.most
    longest_s = cluster.decode["rollout"].seconds(most, 1, 0)
    # few ranks meet after a 200th of the longest answer at least, many, whose meetings cost, after a 25th
    meeting_s = max(rollout.MEETING_INTERVAL_S, longest_s * min(ranks, 64) / 1600)
    cluster = replace(cluster, grain=max(1, most // GRAINS), meeting_s=meeting_s)
    return Simulation(config.mode, ranks, work, cluster, **settings)


def simulate(costs: Costs, ranks: int, plan: Plan) -> Result | str:
    """The step that a plan takes, or why it can't be."""
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
    for name in ("serve", "train", "switch", "sync"):
        mean[name] = statistics.fmean(step.seconds[name] for step in counted)
    if not config.ahead:  # what else sleeps and wakes is a part of serving or training
        between = seconds - mean["serve"] - mean["train"] - mean["sync"]
        mean["switch"] = min(mean["switch"], max(0.0, between))
    mean["push"] = mean.pop("sync")
    tokens = statistics.fmean(step.stats.rollout.tokens for step in counted) * run.cluster.grain
    answers = statistics.fmean(sum(step.stats.lengths) for step in counted)
    prompts = answers * costs.work.prompt
    return Result(plan, seconds, tokens, prompts, 1 - busy_s / (ranks * whole_s), mean)


# ---------------------------------------------------------------- for people


def memory_of(config: Config, ranks: int, device: float) -> str:
    """The GB that a device needs, or without CUDA the host. device: bytes, if they are known."""
    from training.memory import peaks_of, with_micro_batch

    try:
        placement, splits = modes.place(config, ranks)
        config = with_micro_batch(config)
        needs = memory.needs_of(config, placement, splits)
        need = needs[-1] if config.device == "cuda" else needs[0]
        if config.device == "cuda" and device:
            peaks = peaks_of(config, placement, splits, device)
            need = need._replace(needed=max(peaks.values()), free=device)
    except UserError as error:
        return f"? ({error})"
    return f"{need.needed / 1e9:.1f} GB{' TOO LITTLE' if need.needed > need.free else ''}"


def table_of(results: list[Result], memories: list[str]) -> list[str]:
    head = ("plan", "s a step", "answer tokens/s", "with prompts", "idle", "memory")
    rows = [head]
    for result, needed in zip(results, memories, strict=True):
        speed = result.tokens / result.seconds
        whole = (result.tokens + result.prompts) / result.seconds
        mark = " *" if result.plan.config.ahead else ""
        rows.append(
            (
                result.plan.name + mark,
                f"{result.seconds:.3g}",
                f"{speed:,.0f}",
                f"{whole:,.0f}",
                f"{result.idle:.0%}",
                needed,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        right = "  ".join(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append(f"  {name.ljust(widths[0])}  {right}".rstrip())
    return lines


def checked() -> str:
    """Say how far such predictions were off, of plans that were measured on this project's machine."""
    if not ROWS.is_file():
        return "Such predictions weren't checked against real runs yet."
    with ROWS.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["figure"].startswith("plans")]
    errors = []
    for row in rows:
        if row["kind"] == "predicted":
            errors.append(abs(float(row["simulated"]) / float(row["published"]) - 1))
    if not errors:
        return "Such predictions weren't checked against real runs yet."
    far = f"{statistics.median(errors):.0%} in the median, {max(errors):.0%} at most"
    where = "docs/papers/measured.md, plans that were measured on paced ranks"
    return f"Such predictions were off by {far} ({len(errors)} of {where})."


def draw(results: list[Result], path: Path) -> None:
    """Bars of the plans by phases; a mark where a step ends: what is beside it reaches further."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.3 * len(results)), layout="constrained")
    for place, result in enumerate(results):
        left = 0.0
        for name, color in PHASES.items():
            label = name if place == 0 else None
            axes.barh(place, result.phases[name], left=left, color=color, label=label)
            left += result.phases[name]
        axes.plot([result.seconds] * 2, [place - 0.45, place + 0.45], color="black")
    axes.plot([], [], color="black", label="a step ends")
    axes.set_yticks(range(len(results)), [result.plan.name for result in results])
    axes.invert_yaxis()
    axes.set(xlabel="simulated seconds of a step, of the slowest rank")
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def report(arguments: list[str]) -> None:
    """Simulate what the words ask for, and print it. UserError."""
    parser = Parser(allow_abbrev=False, add_help=False)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--like", type=Path)
    parser.add_argument("--devices", type=Path)
    given, words = parser.parse_known_args(arguments)
    if bool(given.like) == bool(given.devices):
        needed = "--like RUN, the folder of a finished run, or --devices FILE.toml"
        raise UserError(f"--simulate needs one of {needed}")
    if given.devices and "--device" not in words:
        words += ["--device", "cuda"]
    config = parse_config(words)
    ranks = int(os.environ.get("WORLD_SIZE", "2"))
    if config.command != "rl" or config.rollout_only or config.train_only:
        raise UserError("--simulate is for whole runs, that serve and train")
    modes.place(config, ranks)
    known = given.like and read_run(given.like)
    costs = costs_like(known, config) if known else costs_of_sheet(given.devices, config)
    plans, left_out = plans_of(config, ranks)
    work = partial(simulate, costs, ranks)
    own = Plan("its own", own_config(known)) if known else None
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as processes:
        again = processes.submit(simulate, costs, known.ranks, own) if known else None
        found = [*processes.map(work, plans)]
    results = sorted((r for r in found if isinstance(r, Result)), key=lambda r: r.seconds)
    left_out += [r for r in found if isinstance(r, str)]
    memories = [memory_of(result.plan.config, ranks, costs.device) for result in results]
    samples = f"{config.prompts_per_step} prompts of {config.answers_per_prompt} answers"
    print(f"SIMULATED on {ranks} ranks (WORLD_SIZE), steps of {samples}, the fastest plan first:")
    print(*table_of(results, memories), sep="\n")
    if any(result.plan.config.ahead for result in results):
        print("  * answers are one update old: --ahead 1 trains on other numbers")
    print(*(f"  left out: {text}" for text in left_out), sep="\n", end="\n" if left_out else "")
    print("assumed:", *costs.said, "nothing else runs on these devices", sep="\n  ")
    print("  saves and evaluations aren't counted; rules take no time")
    if again:
        seconds = known.seconds["step"] - known.seconds["save"]
        ours = again.result().seconds
        off = f"simulated {ours:.3g}, {ours / seconds - 1:+.0%}"
        print(f"  a step of {given.like} itself: {seconds:.3g} s, {off}")
    print(checked())
    path = Path(config.out, "plans.png")
    draw(results, path)
    print(f"wrote {path}; nothing was started")


def main(arguments: list[str]) -> int:
    """Returns a status: 2 for a user's error, said in one line."""
    try:
        report(arguments)
    except UserError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
