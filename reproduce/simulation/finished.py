"""Costs measured in a finished run: lengths of texts, and the pace of its engines and trainers.

They come from its folder: config.json, metrics.jsonl, history.jsonl and the newest spans. The first step
isn't counted, because engines warm up in it.
"""

from __future__ import annotations

import os
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from algorithms import algorithm_of
from config import AS_FITS, Config, dashed
from genrm import formats_of
from inputs.hf_directory import read_object, readable
from placement import make_placement
from reproduce.simulation.cluster import Cluster, Costs, Lengths, Workload, simulation_of
from reproduce.simulation.costs import Decode, Passes
from reproduce.simulation.engine import FULL, Moves
from runtime import timeline as tl
from runtime.atomic_files import whole_rows
from runtime.errors import UserError
from scheduling.layout import Placement
from scheduling.measured import ROLES, RequestStats, StepStats, histogram

APART = 8  # decode steps between two reads of a full engine, as set in engines/server.py
# settings that change how long a token takes
SAME = ("tp", "pp", "rollout_tp", "genrm_tp", "dtype", "device", "recompute", "schedule")
MODELS = (
    "model",
    "judge",
    "cost_judge",
    "critic",
)  # settings; another model of the same size will do
LAST = 10  # newest steps that count: lengths change as a policy learns
LAST_SPANS = 5  # newest steps whose individual requests are used
PRIOR = 1e-2  # weight of the guess against the measurements
TIMES = ("step", "serve", "train", "switch", "sync", "save")


@dataclass(frozen=True)
class Drawn(Lengths):
    """Lengths drawn from a `histogram`. A given text always has the same length."""

    counts: tuple[float, ...] = ()

    def of(self, *text: object) -> int:
        place = random.Random(repr(text))
        (number,) = place.choices(range(len(self.counts)), self.counts)
        return max(1, min(self.most, round(2 ** ((number + place.uniform(-0.5, 0.5)) / 4))))


class Pace(NamedTuple):
    """The pace of an engine, in seconds."""

    fixed: float  # for a decode step
    each: float  # extra for each sequence in it
    read: float  # for a pass that reads prompts
    prefill: float  # extra for each prompt token in it


@dataclass(frozen=True)
class Known:
    """Everything that is used from a run. Saved as JSON, it replaces the run's folder."""

    settings: dict[str, Any]  # fields of Config
    ranks: int
    split: list  # the last step's
    steps: int  # counted steps
    lengths: list[float]  # answer lengths as a `histogram`
    critiques: list[float]  # critique lengths in the last LAST_SPANS steps, as a `histogram`
    prompt: int  # tokens
    judged: int  # tokens that a judge reads per answer
    asked: float  # critiques per answer from each judge; below 1 if some answers are equal
    keep: float  # fraction of groups whose rewards differ
    paces: list[list[float]]  # Pace of rollout's engines, then of each judge's
    seconds: dict[str, float]  # on the slowest rank, by TIMES
    learning_s: float  # `train` without sleeping and waking
    engine_s: float  # for an engine to fall asleep or to wake
    trainer_s: float  # for a trainer to fall asleep or to wake


def read_run(run: Path) -> Known:
    """Read a run's folder. Raises UserError, which names the file, if the run didn't serve and train."""
    where = f"--like {run}"
    for name in ("config.json", "metrics.jsonl", "history.jsonl"):
        if not (run / name).is_file():
            needed = "it has to be the folder of a finished run of this version"
            raise UserError(f"{where}: no {name} in it: {needed}")
    found = read_object(run / "config.json", where)
    names = {field.name for field in fields(Config)}
    settings = {name: value for name, value in found.items() if name in names}
    with readable(f"{where}: config.json"):
        config = config_from(settings)
        ranks = int(found["ranks"])
    if config.command != "rl":
        kind = f"a run of {config.command}"
        raise UserError(f"{where}: this is {kind}, but a run that served and trained is needed")
    rows = rows_of(run / "metrics.jsonl", "time/step_s", where)
    served = rows_of(run / "history.jsonl", "serve_s", where)
    with readable(f"{where}: history.jsonl"):
        history = []
        for row in served:
            del row["step"]
            history.append(StepStats.of_json(row))
    newest = rows[-LAST_SPANS:]
    events = tl.read(run / "spans", newest[0]["step"], newest[-1]["step"])
    with readable(f"{where}: metrics.jsonl, history.jsonl, spans/"):
        return known_of(settings, ranks, rows, history, events)


def rows_of(path: Path, key: str, where: str) -> list[dict]:
    """Return the rows of the last steps that have this key. Raises UserError if none counts."""
    with readable(f"{where}: {path.name}"):
        rows = [row for row in whole_rows(path) if key in row]
    counted = [row for row in rows if row["step"] > 0][-LAST:]
    if not counted:
        raise UserError(f"{where}: {path.name} has {len(rows)} steps, and the first doesn't count")
    return counted


def known_of(
    settings: dict, ranks: int, rows: list[dict], history: list[StepStats], events: list[tl.Event]
) -> Known:
    """Derive the costs from a run's rows and spans. Raises ValueError if no rollout engine has requests."""
    config = config_from(settings)
    placement = make_placement(config, ranks)
    judges = formats_of(config)[: len(config.judge_models)]
    total = StepStats.total(history)
    rollout = total.rollout
    genrm = total.genrm
    requests = requests_of(events, placement, len(judges))
    if ("rollout", 0) not in requests:
        raise ValueError("there is no request to a rollout engine")
    paces = [pace_of(requests["rollout", 0], config, unread_of(rollout))]
    spans = tl.of_kind(events, "span")
    critiques = [span.args["tokens"] for span in spans if span.name == "genrm"]
    for number in range(len(judges)):
        own = requests.get(("genrm", number), {})
        paces.append(pace_of(own, config, unread_of(genrm), paces[0]))
    learning_s, inside_s, outside_s = learning_and_moves(events)
    # in partial mode judges wake while rollout stays awake; otherwise one role sleeps as the other wakes
    moves = sum(step.genrm.wakes + step.rollout.wakes for step in history)
    moves *= 1 if history[-1].split.mode == "partial" else 2
    engine_s = sum(step.swap_s for step in history) / moves if moves else outside_s / 2
    # how many models on each rank sleep and wake for training
    algorithm = algorithm_of(config)
    shapes = [placement.actor] + [placement.critic] * len(algorithm.critics)
    if algorithm.kl_coef:
        shapes.append(placement.reference)
    held = Counter(rank for shape in shapes for rank in shape.ranks)
    asked = genrm.requests / max(1, len(judges))
    seconds = {}
    for name in TIMES:
        seconds[name] = fmean(row[f"time/{name}_s"] for row in rows)
    return Known(
        settings=settings,
        ranks=ranks,
        split=[*history[-1].split],
        steps=len(rows),
        lengths=[*total.lengths],
        critiques=[*histogram(critiques)] or [1],
        prompt=round(rollout.prompt_tokens / max(1, rollout.requests)),
        judged=round(genrm.prompt_tokens / max(1, genrm.requests)),
        asked=min(1.0, asked / max(1, sum(total.lengths))),
        keep=1 - fmean(row["reward/zero_std_frac"] for row in rows),
        paces=[[*pace] for pace in paces],
        seconds=seconds,
        learning_s=learning_s,
        engine_s=engine_s,
        trainer_s=(inside_s + max(0.0, outside_s - 2 * engine_s)) / (2 * max(held.values())),
    )


def config_from(settings: dict[str, Any]) -> Config:
    """Return the settings from a config.json, with its lists turned back into tuples."""
    return Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()})


def unread_of(stats: RequestStats) -> float:
    """Return the mean number of prompt tokens per request that weren't cached."""
    return (stats.prompt_tokens - stats.cached_tokens) / max(1, stats.requests)


def requests_of(events: list[tl.Event], placement: Placement, judges: int) -> dict:
    """Return each engine's requests as (start, end, tokens written): by (role, judge), then by rank."""
    found = defaultdict(lambda: defaultdict(list))
    for span in tl.of_kind(events, *tl.WORK):
        if span.name in ROLES:
            model = placement.judge_of(span.rank, judges) if span.name == "genrm" else 0
            row = (span.start, span.end, span.args["tokens"] - span.args["begun"])
            found[span.name, model][span.rank].append(row)
    return found


def learning_and_moves(events: list[tl.Event]) -> tuple[float, float, float]:
    """Return three times in a step: learning, moves within training, moves between serving and training.

    A move is a model that falls asleep or wakes. Times are the slowest rank's, averaged over steps.
    """
    spans = defaultdict(list)
    for span in tl.of_kind(events, "span"):
        if span.name in ("serve", "train", "switch"):
            spans[span.step, span.rank].append(span)
    slowest = defaultdict(lambda: (0.0, 0.0, 0.0))
    for (step, _), own in spans.items():
        moved = Counter()
        phases = [span for span in own if span.name != "switch"]
        for switch in (span for span in own if span.name == "switch"):
            around = [s.name for s in phases if s.start <= switch.start and switch.end <= s.end]
            moved[around[0] if around else "between"] += switch.end - switch.start
        facts = (tl.seconds(own, "train") - moved["train"], moved["train"], moved["between"])
        slowest[step] = tuple(map(max, slowest[step], facts))
    return tuple(map(fmean, zip(*slowest.values(), strict=True)))


# ---------------------------------------------------------------- the costs of a similar run


def costs_like(known: Known, config: Config) -> Costs:
    """Return a run's costs from a finished one. Raises UserError if a setting that they depend on differs."""
    there = config_from(known.settings)
    for name in SAME:
        was = vars(there)[name]
        here = vars(config)[name]
        if here not in (was, AS_FITS):
            why = "which changes how long a token takes"
            raise UserError(f"--like: --{dashed(name)} was {was} there and is {here} here, {why}")
    judges = len(there.judge_models)
    if judges != len(config.judge_models):
        here = f"{len(config.judge_models)} here: --judge and --cost-judge must name as many"
        raise UserError(f"--like: {judges} judges there, {here}")
    # simulate the run itself with trainers that never sleep, to find how many tokens learning_s covers
    own = own_config(known)
    cluster = cluster_like(replace(known, trainer_s=0.0), 1e-6, own)
    facts = simulation_of(own, known.ranks, work_of(known, own), cluster).run()
    token_s = 1e-6 * known.learning_s / fmean(step.seconds["train"] for step in facts[1:])
    lines = [f"lengths: as {sum(known.lengths):.0f} answers in its last {known.steps} steps"]
    lines.append(f"{known.asked:.2f} critiques per answer, as long as in that run")
    for number, pace in enumerate(known.paces):
        role = f"judge {number - 1}" if number else "rollout"
        step, each, read, prefill = (f"{1000 * seconds:.3g} ms" for seconds in pace)
        decode = f"{step} per decode step and {each} per sequence in it"
        lines.append(f"{role}: {decode}; {read} to read prompts and {prefill} per token")
    lines.append(f"training: {1e6 * token_s:.3g} us per token forward, for any model on any ranks")
    moves = f"engines sleep or wake in {known.engine_s:.2g} s, trainers in {known.trainer_s:.2g} s"
    lines.append(f"{moves}; a push takes {known.seconds['sync']:.2g} s")
    for name in MODELS:
        if real(vars(there)[name]) != real(vars(config)[name]):
            lines.append(f"--{dashed(name)} differs; it is taken to be as large as in that run")
    return Costs(work_of(known, config), partial(cluster_like, known, token_s), lines)


def real(value: str | tuple[str, ...]) -> list[str]:
    """Return the absolute directories of models."""
    return [os.path.realpath(each) for each in ([value] if isinstance(value, str) else value)]


def own_config(known: Known) -> Config:
    """Return the finished run's settings, fixed to the split of its last step."""
    mode, ranks, _, tail = known.split
    own = config_from(known.settings)
    ranks = ranks if mode == "partial" and own.judge_models else 0
    return replace(own, mode=mode, rollout_ranks=ranks, tail=tail or own.tail, rebalance=False)


def work_of(known: Known, config: Config) -> Workload:
    """Return the texts of a run with the finished one's lengths."""
    critique = Drawn(0, 0, config.judge_max_new_tokens, tuple(known.critiques))
    answer = Drawn(0, 0, config.max_new_tokens, tuple(known.lengths))
    differ = known.asked if known.asked < 0.95 else 1.0
    return Workload(known.prompt, answer, critique, known.keep, judged=known.judged, differ=differ)


def cluster_like(known: Known, token_s: float, config: Config, _: object = None) -> Cluster:
    """Return engines and trainers as fast as the finished run's. token_s: forward seconds per token."""
    how = dict(most=config.max_running_requests, apart=APART)
    rollout, *judges = [Decode(**Pace(*pace)._asdict(), **how) for pace in known.paces]
    moves = {
        "rollout": Moves(known.engine_s, known.engine_s, known.seconds["sync"]),
        "genrm": Moves(known.engine_s, known.engine_s),
        "train": Moves(known.trainer_s, known.trainer_s),
    }
    roles = {"rollout": rollout, "genrm": rollout}
    return Cluster(roles, Passes(token_s, stages=config.pp), moves=moves, judges=tuple(judges))


# ---------------------------------------------------------------- the pace of engines


def pace_of(engines: dict, config: Config, unread: float, like: Pace | None = None) -> Pace:
    """Fit how long requests take: reads of prompts, plus decode steps that slow down with more sequences.

    engines: one model's entry in requests_of; unread: uncached tokens per prompt. Least squares, with a weak
    guess that decides if all requests were alike: half of a step is fixed, or proportions are as in `like`.
    """
    engines = [np.array(rows, dtype=float) for rows in engines.values()]
    if not engines:
        return like
    took = np.concatenate([rows[:, 1] - rows[:, 0] for rows in engines])
    tokens = np.concatenate([rows[:, 2] for rows in engines])
    most = config.max_running_requests
    step_s = took.sum() / max(1.0, tokens.sum())
    # seconds of a step, and extra seconds for each sequence; the first guess has only the former
    fixed = step_s
    each = 0.0
    for _ in range(5):
        columns = [columns_of(rows, fixed, each, most) for rows in engines]
        reads, beside = map(np.concatenate, zip(*columns, strict=True))
        # columns: reads of prompts, decode steps, sequences summed over steps
        matrix = np.stack([reads, tokens, beside * tokens], axis=1)
        load = max(1.0, (beside * tokens).sum() / max(1.0, tokens.sum()))
        guess = np.array([step_s, step_s / 2, step_s / 2 / load])
        if like:
            guess = np.array([like.fixed + like.each * load, like.fixed, like.each])
            guess *= took.sum() / max(1e-9, (matrix @ guess).sum())
        scale = np.sqrt(PRIOR * np.square(took).sum())
        rows = np.concatenate([matrix * guess, scale * np.eye(3)])
        right = np.concatenate([took, scale * np.ones(3)])
        found = np.linalg.lstsq(rows, right)[0]
        if min(found) < 0:  # a negative time is impossible: drop its column and fit again
            left = found > 0
            found = np.zeros(3)
            found[left] = np.maximum(0.0, np.linalg.lstsq(rows[:, left], right)[0])
        read, fixed, each = guess * found
    burst = len(took) / max(1, sum(len(bursts_of(rows, fixed)) for rows in engines))
    # a pass that reads prompts takes at least a decode step
    prefill = max(0.0, read - fixed) / max(1.0, unread * burst)
    return Pace(*map(float, (fixed, each, min(read, fixed), prefill)))


def bursts_of(rows: np.ndarray, step_s: float) -> np.ndarray:
    """Return when each burst of requests began. Requests within a decode step are read together."""
    bursts = []
    for start in np.sort(rows[:, 0]):
        if not bursts or start > bursts[-1] + step_s:
            bursts.append(start)
    return np.array(bursts)


def columns_of(rows: np.ndarray, fixed: float, each: float, most: int) -> tuple:
    """Return two arrays over an engine's requests: reads of prompts while each ran, and mean batch size."""
    edges = np.unique(rows[:, :2])
    beside = np.searchsorted(np.sort(rows[:, 0]), edges[:-1], side="right")
    beside = beside - np.searchsorted(np.sort(rows[:, 1]), edges[:-1], side="right")
    beside = np.clip(beside, 1, most)
    steps = np.diff(edges) / (fixed + each * beside + 1e-12)

    def during(values: np.ndarray) -> np.ndarray:
        total = np.concatenate([[0.0], np.cumsum(values)])
        return total[np.searchsorted(edges, rows[:, 1])] - total[np.searchsorted(edges, rows[:, 0])]

    bursts = bursts_of(rows, fixed + each * beside.mean())
    ends = np.searchsorted(bursts, rows[:, 1])
    reads = 1.0 + np.maximum(0, ends - np.searchsorted(bursts, rows[:, 0], side="right"))
    # a full engine reads prompts once every APART steps
    full = 1 + rows[:, 2] / APART
    mean = during(steps * beside) / np.maximum(1e-12, during(steps))
    return np.where(mean >= FULL, np.minimum(reads, full), reads), mean
