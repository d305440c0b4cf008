"""HybridFlow (arXiv 2409.19256): figures 9 to 16 and table 2, theirs beside ours.

    python -m papers.hybridflow                                       all, in some minutes
    python -m papers.hybridflow --quick                               points on at most 16 GPUs alone
    python -m papers.hybridflow --figure 9 11 --published FILE.csv    other points, of the same columns

Figures 9, 11 and 15 are simulated: the controllers that train, in full colocation, with engines and trainers
that take what closed forms say, in sizes that scheduling/mapping.py finds. All else is a closed form.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import NamedTuple

from papers.tables import Paper, Point, Row, command
from scheduling.costs import Decode, Device, Model, Passes
from scheduling.mapping import (
    Choice,
    Mapping,
    Sizes,
    Speeds,
    Task,
    best_of,
    choices_of,
    engine,
    passes,
    passes_s,
    reshard_s,
    search,
)
from simulation.cluster import Cluster, Lengths, Simulation, Workload
from simulation.costs import Moves, coarse
from training.resharding import Layout

GRAIN, MEETING_S = 16, 10.0  # all lengths are alike: finer ones change nothing
QUICK = 16  # GPUs
PPO = ("actor", "critic", "reference", "reward")
PLACEMENTS = {
    "colocate": (PPO,),
    "split": (("actor", "reference"), ("critic", "reward")),
    "standalone": tuple((role,) for role in PPO),
}
OTHER = "another program, of which no seconds by stage are published"


class Setting(NamedTuple):
    """Of a point: its models by role, the GPUs, what a step is, and what the GPUs come to."""

    models: dict[str, Model]
    gpus: int
    task: Task
    speeds: Speeds


def setting_of(paper: Paper, point: Point, roles: tuple[str, ...] = PPO) -> Setting:
    """By the first word of its setting: a model, or the actor's + the critic's. ValueError if unknown."""
    known = {name: Model(*numbers) for name, numbers in paper.values("models").items()}
    first, _, second = point.setting.partition(" ")[0].partition("+")
    if not {first, second or first} <= known.keys() or not point.gpus.isdecimal() or not int(point.gpus):
        raise ValueError(f"{point.where}: needs GPUs and a setting that begins with one of {', '.join(known)}")
    models = {role: known[first if role in ("actor", "reference") else second or first] for role in roles}
    generation = paper.values("generation")
    task = Task(prompt=generation.pop("prompt"), **paper.values("task"))
    device = Device(**paper.values("device"), **paper.values("transition"))
    speeds = Speeds(device, **paper.values("speeds"), **paper.values("compute"), **generation)
    return Setting(models, int(point.gpus), task, speeds)


def asked(paper: Paper, figure: str, **columns: str) -> list[Point]:
    """The points to show, in a quick run the small ones."""
    points = paper.of(figure, **columns)
    return [p for p in points if not paper.quick or (p.gpus.isdecimal() and int(p.gpus) <= QUICK)]


def step_of(at: Setting, choice: Choice, scores: bool = True) -> tuple[float, float]:
    """Seconds of generation and scoring, and of a whole step, of the controllers. scores: scorers take time."""
    models, gpus, task, speeds = at
    sizes, critic = choice.sizes["actor"], choice.sizes["critic"]
    text = task.prompt + task.answer
    more = task.trained / text  # tokens that passes read for each that an engine has
    scorers = tuple(role for role in models if role not in ("actor", "critic", "reference"))
    scoring_s = sum(passes_s(models[role], choice.sizes[role], task, speeds)[0] for role in scorers)
    scorer = Decode(0.0, prefill=scores * scoring_s * gpus / task.sequences / text, most=1)
    push_s = reshard_s(models["actor"], sizes, speeds)
    cluster = Cluster(
        dict(rollout=engine(models["actor"], sizes.parts, choice.held, speeds), genrm=scorer),
        coarse(passes(models["actor"], sizes, speeds), more),
        as_dealt(coarse(passes(models["critic"], critic, speeds), more), sizes.dp / critic.dp),
        dict(rollout=Moves(push_s=push_s)),
        group=sizes.pp * sizes.tp, scores=True, grain=GRAIN, meeting_s=MEETING_S,
    )  # fmt: skip
    work = Workload(task.prompt, Lengths(task.answer, 0.0, task.answer), Lengths(1, 0.0, 1))
    settings = dict(algorithm=("ppo", "kl_coef=0.1"), rollout_tp=sizes.parts, judge=scorers)
    settings |= dict(prompts_per_step=task.sequences, answers_per_prompt=1, updates_per_step=task.updates)
    settings |= dict(max_tokens_per_micro_batch=task.micro_batch * text // GRAIN)
    step = Simulation("full", gpus, work, cluster, steps=1, **settings).run()[0]
    return step.seconds["serve"], step.ended_s - push_s  # it begins with a push, and ends with one


def as_dealt(critic: Passes, copies: float) -> Passes:
    """Where samples are dealt to the actor's copies, so many for one of the critic's."""
    stages = 1 + (critic.stages - 1) / copies
    return replace(critic, token=critic.token * copies, square=critic.square * copies, stages=stages)


def throughput(paper: Paper, figure: str, roles: tuple[str, ...]) -> list[Row]:
    """Tokens/s of a step in full colocation."""
    rows, others = [], dict.fromkeys(p.system for p in paper.of(figure) if p.system != "HybridFlow")
    for point in asked(paper, figure, system="HybridFlow"):
        at = setting_of(paper, point, roles)
        if not (found := best_of((roles,), *at)):
            rows.append(paper.row(point, None, "not modelled", "by our account it doesn't fit"))
            continue
        seconds = step_of(at, found.choices[0])[1]
        rows.append(paper.row(point, at.task.sequences * at.task.trained / seconds))
    return rows + [Row(figure, name, None, None, "", "not modelled", OTHER) for name in others]
