"""What a finished run tells of the next one: lengths, and the seconds that its engines and trainers took.

They come from its folder: config.json, metrics.jsonl, history.jsonl, the newest spans. The first step isn't
counted: engines warm up in it.
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
from reporting import timeline as tl
from runtime.atomic_files import complete_rows
from runtime.errors import UserError
from scheduling.layout import Placement
from scheduling.measured import ROLES, RequestStats, StepStats, histogram
from simulation.cluster import Cluster, Costs, Lengths, Workload, simulation_of
from simulation.costs import Decode, Passes
from simulation.engine import FULL, Moves

APART = 8  # decode steps between two reads of a full engine: engines/server.py
# settings that change the seconds of a token
SAME = ("tp", "pp", "rollout_tp", "genrm_tp", "dtype", "device", "recompute", "schedule")
MODELS = ("model", "judge", "cost_judge", "critic")  # settings; others of the same size will do
LAST = 10  # steps that count: lengths change as a policy learns
LAST_SPANS = 5  # of these, the newest, whose requests are looked at one by one
PRIOR = 1e-2  # weight of the guess beside what was measured
TIMES = ("step", "serve", "train", "switch", "sync", "save")


@dataclass(frozen=True)
class Drawn(Lengths):
    """Lengths drawn from a `histogram`. A text's is always the same."""

    counts: tuple[float, ...] = ()

    def of(self, *text: object) -> int:
        place = random.Random(repr(text))
        (number,) = place.choices(range(len(self.counts)), self.counts)
        return max(1, min(self.most, round(2 ** ((number + place.uniform(-0.5, 0.5)) / 4))))


class Pace(NamedTuple):
    """The pace of an engine, in seconds."""

    fixed: float  # of a decode step
    each: float  # more for a sequence
    read: float  # of a pass that reads prompts
    prefill: float  # more for a token of them


@dataclass(frozen=True)
class Known:
    """What a run tells. It can be kept as JSON, so that the run's folder isn't needed again."""

    settings: dict[str, Any]  # of Config
    ranks: int
    split: list  # the last step's
    steps: int  # how many counted
    lengths: list[float]  # of the answers: see `histogram`
    critiques: list[float]  # likewise, but of the last LAST_SPANS steps
    prompt: int  # tokens
    judged: int  # tokens that a judge reads of an answer
    asked: float  # critiques of each judge for an answer: fewer than 1 where answers are alike
    keep: float  # part of the groups whose rewards differ
    paces: list[list[float]]  # each as Pace: of rollout's engines, then of each judge's
    seconds: dict[str, float]  # of the slowest rank, by TIMES
    learning_s: float  # of `train`, without what sleeps and wakes in it
    engine_s: float  # in which an engine falls asleep, or wakes
    trainer_s: float  # in which a trainer falls asleep, or wakes


def read_run(run: Path) -> Known:
    """Read a run's folder. UserError, which names the file, if it isn't one that served and trained."""
    where = f"--like {run}"
    for name in ("config.json", "metrics.jsonl", "history.jsonl"):
        if not (run / name).is_file():
            needed = "the folder of a finished run of this version is needed"
            raise UserError(f"{where}: no {name} in it: {needed}")
    found = read_object(run / "config.json", where)
    names = {field.name for field in fields(Config)}
    settings = {name: value for name, value in found.items() if name in names}
    with readable(f"{where}: config.json"):
        config = config_from(settings)
        ranks = int(found["ranks"])
    if config.command != "rl":
        kind = f"a run of {config.command}"
        raise UserError(f"{where}: {kind}: one is needed that served and trained")
    rows = rows_of(run / "metrics.jsonl", "time/step_s", where)
    served = rows_of(run / "history.jsonl", "serve_s", where)
    with readable(f"{where}: history.jsonl"):
        history = []
        for row in served:
            del row["step"]
            history.append(StepStats.of_json(row))
    newest = rows[-LAST_SPANS:]
    events = tl.read(run / "spans", newest[0]["step"], newest[-1]["step"])
    with readable(f"{where}: what is in metrics.jsonl, history.jsonl, spans/"):
        return known_of(settings, ranks, rows, history, events)


def rows_of(path: Path, key: str, where: str) -> list[dict]:
    """Return the rows of the last steps that have this key. UserError if there is none that counts."""
    with readable(f"{where}: {path.name}"):
        rows = [row for row in complete_rows(path) if key in row]
    counted = [row for row in rows if row["step"] > 0][-LAST:]
    if not counted:
        raise UserError(f"{where}: {path.name} has {len(rows)} steps, and the first isn't counted")
    return counted


def known_of(
    settings: dict, ranks: int, rows: list[dict], history: list[StepStats], events: list[tl.Event]
) -> Known:
    """Work out what a run tells of the rows and spans that it left. ValueError if an engine's are missing."""
    config = config_from(settings)
    placement = make_placement(config, ranks)
    judges = formats_of(config)[: len(config.judge_models)]
    total = StepStats.total(history)
    rollout = total.rollout
    genrm = total.genrm
    requests = requests_of(events, placement, len(judges))
    if ("rollout", 0) not in requests:
        raise ValueError("no request of an engine is there")
    paces = [pace_of(requests["rollout", 0], config, unread_of(rollout))]
    spans = tl.of_kind(events, "span")
    critiques = [span.args["tokens"] for span in spans if span.name == "genrm"]
    for number in range(len(judges)):
        own = requests.get(("genrm", number), {})
        paces.append(pace_of(own, config, unread_of(genrm), paces[0]))
    learning_s, inside_s, outside_s = learning_and_moves(events)
    # in partial mode judges wake while rollout stays awake, else one role sleeps and the other wakes
    moves = sum(step.genrm.wakes + step.rollout.wakes for step in history)
    moves *= 1 if history[-1].split.mode == "partial" else 2
    engine_s = sum(step.swap_s for step in history) / moves if moves else outside_s / 2
    # models that sleep and wake for training, by rank
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
    """Return the settings of a config.json, whose lists were tuples."""
    return Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()})


def unread_of(stats: RequestStats) -> float:
    """Return the tokens of a request's prompt that its engine had to read."""
    return (stats.prompt_tokens - stats.cached_tokens) / max(1, stats.requests)


def requests_of(events: list[tl.Event], placement: Placement, judges: int) -> dict:
    """Return rows [start, end, tokens written] of each engine: by role and judge, then by its rank."""
    found = defaultdict(lambda: defaultdict(list))
    for span in tl.of_kind(events, *tl.WORK):
        if span.name in ROLES:
            model = placement.judge_of(span.rank, judges) if span.name == "genrm" else 0
            row = (span.start, span.end, span.args["tokens"] - span.args["begun"])
            found[span.name, model][span.rank].append(row)
    return found


def learning_and_moves(events: list[tl.Event]) -> tuple[float, float, float]:
    """Return seconds of a step, each the mean of the slowest ranks': learning, sleeping and waking between
    models that learn, sleeping and waking between serving and learning."""
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


# ---------------------------------------------------------------- the costs of a run like it


def costs_like(known: Known, config: Config) -> Costs:
    """The costs of a run like a finished one. UserError if a setting that they depend on is another."""
    there = config_from(known.settings)
    for name in SAME:
        was = vars(there)[name]
        here = vars(config)[name]
        if here not in (was, AS_FITS):
            why = "a token takes other seconds"
            raise UserError(f"--like: --{dashed(name)} was {was} there, here it is {here}: {why}")
    judges = len(there.judge_models)
    if judges != len(config.judge_models):
        raise UserError(f"--like: {judges} judges were there, {len(config.judge_models)} are here")
    # the run itself is simulated with trainers that never sleep, to see how many tokens learning_s is for
    own = own_config(known)
    cluster = cluster_like(replace(known, trainer_s=0.0), 1e-6, own)
    facts = simulation_of(own, known.ranks, work_of(known, own), cluster).run()
    token_s = 1e-6 * known.learning_s / fmean(step.seconds["train"] for step in facts[1:])
    lines = [f"lengths: of {sum(known.lengths):.0f} answers of its last {known.steps} steps"]
    lines.append(f"{known.asked:.2f} critiques an answer; their lengths are those there, too")
    for number, pace in enumerate(known.paces):
        role = f"judge {number - 1}" if number else "rollout"
        step, each, read, prefill = (f"{1000 * seconds:.3g} ms" for seconds in pace)
        decode = f"{step} a decode step, {each} more a sequence"
        lines.append(f"{role}: {decode}; {read} to read prompts, {prefill} more a token")
    lines.append(f"training: {1e6 * token_s:.3g} us a token forward, of any model, on any ranks")
    moves = f"engines sleep and wake in {known.engine_s:.2g} s, trainers in {known.trainer_s:.2g} s"
    lines.append(f"{moves}; a push takes {known.seconds['sync']:.2g} s")
    for name in MODELS:
        if real(vars(there)[name]) != real(vars(config)[name]):
            lines.append(f"--{dashed(name)} is another: as large as the one there")
    return Costs(work_of(known, config), partial(cluster_like, known, token_s), lines)


def real(value: str | tuple[str, ...]) -> list[str]:
    """Return absolute directories of models."""
    return [os.path.realpath(each) for each in ([value] if isinstance(value, str) else value)]


def own_config(known: Known) -> Config:
    """The settings of the finished run, fixed to the split of its last step."""
    mode, ranks, _, tail = known.split
    own = config_from(known.settings)
    ranks = ranks if mode == "partial" and own.judge_models else 0
    return replace(own, mode=mode, rollout_ranks=ranks, tail=tail or own.tail, rebalance=False)


def work_of(known: Known, config: Config) -> Workload:
    """The texts of a run whose lengths are those of the finished one."""
    critique = Drawn(0, 0, config.judge_max_new_tokens, tuple(known.critiques))
    answer = Drawn(0, 0, config.max_new_tokens, tuple(known.lengths))
    differ = known.asked if known.asked < 0.95 else 1.0
    return Workload(known.prompt, answer, critique, known.keep, judged=known.judged, differ=differ)


def cluster_like(known: Known, token_s: float, config: Config, _: object = None) -> Cluster:
    """Engines and trainers as fast as the finished run's. token_s: of a token forward."""
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
    """Fit the seconds of requests by reads of prompts and by decode steps, longer with more sequences.

    engines: requests_of one model; unread: tokens of a prompt. Least squares, with a weak guess that decides
    where all requests were alike: half of a step is fixed, or the proportions are those of `like`.
    """
    engines = [np.array(rows, dtype=float) for rows in engines.values()]
    if not engines:
        return like
    took = np.concatenate([rows[:, 1] - rows[:, 0] for rows in engines])
    tokens = np.concatenate([rows[:, 2] for rows in engines])
    most = config.max_running_requests
    step_s = took.sum() / max(1.0, tokens.sum())
    # seconds of a step, and more for each sequence; in the beginning all steps are alike
    fixed = step_s
    each = 0.0
    for _ in range(5):
        columns = [columns_of(rows, fixed, each, most) for rows in engines]
        reads, beside = map(np.concatenate, zip(*columns, strict=True))
        # reads of prompts, decode steps, sequences of all steps
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
        if min(found) < 0:  # nothing takes less than no time: it is left out
            left = found > 0
            found = np.zeros(3)
            found[left] = np.maximum(0.0, np.linalg.lstsq(rows[:, left], right)[0])
        read, fixed, each = guess * found
    burst = len(took) / max(1, sum(len(bursts_of(rows, fixed)) for rows in engines))
    # a pass that reads prompts takes a decode step at least
    prefill = max(0.0, read - fixed) / max(1.0, unread * burst)
    return Pace(*map(float, (fixed, each, min(read, fixed), prefill)))


def bursts_of(rows: np.ndarray, step_s: float) -> np.ndarray:
    """Return when each burst of requests began: those within a decode step are read together."""
    bursts = []
    for start in np.sort(rows[:, 0]):
        if not bursts or start > bursts[-1] + step_s:
            bursts.append(start)
    return np.array(bursts)


def columns_of(rows: np.ndarray, fixed: float, each: float, most: int) -> tuple:
    """Return for each request of an engine: passes that read prompts while it ran, and sequences beside it
    in the mean."""
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
    # a full engine reads prompts once in APART steps
    full = 1 + rows[:, 2] / APART
    mean = during(steps * beside) / np.maximum(1e-12, during(steps))
    return np.where(mean >= FULL, np.minimum(reads, full), reads), mean
