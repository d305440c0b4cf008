"""HybridFlow (arXiv 2409.19256): figures 9 to 16 and table 2, theirs beside ours.

    python -m papers.hybridflow                                       all, in some minutes
    python -m papers.hybridflow --quick                               points on at most 16 GPUs alone
    python -m papers.hybridflow --figure 9 11 --published FILE.csv    other points, of the same columns

Figures 9, 11 and 15 are simulated: the controllers that train, in full colocation, with engines and trainers
that take what closed forms say, in sizes that scheduling/mapping.py finds. All else is a closed form.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import NamedTuple

from papers.tables import Paper, Point, Row, command
from scheduling.costs import Decode, Device, Model, Passes
from scheduling.mapping import (
    Choice,
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
SAFE = (*PPO, "cost")
PLACEMENTS = {
    "colocate": (PPO,),
    "split": (("actor", "reference"), ("critic", "reward")),
    "standalone": tuple((role,) for role in PPO),
}
SYSTEMS = {"DS-Chat": "DeepSpeed-Chat", "HybridFlow-V": "HybridFlow-V", "HybridFlow": "HybridFlow"}
OTHER = "another program; no seconds of its stages are published"
NO_ROOM = "by our account of memory it doesn't fit"
REMAX = "published seconds of ReMax and of PPO leave less than none for training a critic, with figure 15's"
SEARCH = "their program's own seconds"


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
        raise ValueError(f"{point.where}: its setting begins with none of {', '.join(known)}, or its gpus")
    models = {role: known[first if role in ("actor", "reference") else second or first] for role in roles}
    generation = paper.values("generation")
    task = Task(prompt=generation.pop("prompt"), **paper.values("task"))
    device = Device(**paper.values("device"), **paper.values("transition"))
    speeds = Speeds(device, **paper.values("speeds"), **paper.values("compute"), **generation)
    return Setting(models, int(point.gpus), task, speeds)


def asked(paper: Paper, figure: str, *systems: str) -> list[Point]:
    """The points of these systems, in a quick run the small ones."""
    points = [point for point in paper.of(figure) if point.system in systems]
    return [p for p in points if not paper.quick or (p.gpus.isdecimal() and int(p.gpus) <= QUICK)]


def not_modelled(paper: Paper, figure: str, why: str, **columns: str) -> list[Row]:
    """One row of all such points, if there are some."""
    points = paper.of(figure, **columns)
    what = f"{', '.join(dict.fromkeys(p.system for p in points))}, {len(points)} points"
    return [Row(figure, what, None, None, "", "not modelled", why)] * bool(points)


def step_of(at: Setting, choice: Choice, scores: bool = True) -> tuple[float, float]:
    """Seconds of generation with scoring, and of a whole step, of the controllers. scores: it takes time."""
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
    settings |= dict(max_tokens_per_micro_batch=text // GRAIN + 8)  # one sequence
    step = Simulation("full", gpus, work, cluster, steps=1, **settings).run()[0]
    return step.seconds["serve"], step.ended_s - push_s  # it begins with a push, and ends with one


def as_dealt(critic: Passes, copies: float) -> Passes:
    """Where samples are dealt to the actor's copies, so many for one of the critic's."""
    stages = 1 + (critic.stages - 1) / copies
    return replace(critic, token=critic.token * copies, square=critic.square * copies, stages=stages)


def throughput(paper: Paper, figure: str, roles: tuple[str, ...]) -> list[Row]:
    """Tokens/s of a step in full colocation."""
    rows = []
    for point in asked(paper, figure, "HybridFlow"):
        at = setting_of(paper, point, roles)
        if found := best_of((roles,), *at):
            seconds = step_of(at, found.choices[0])[1]
            rows.append(paper.row(point, at.task.sequences * at.task.trained / seconds))
        else:
            rows.append(paper.row(point, None, "not modelled", NO_ROOM))
    others = dict.fromkeys(point.system for point in paper.of(figure) if point.system != "HybridFlow")
    return rows + [not_modelled(paper, figure, OTHER, system=name)[0] for name in others]


def placements(paper: Paper, figure: str) -> list[Row]:
    """Tokens/s of each placement in its best sizes, and how many pairs of them are in the right order."""
    rows, pairs = [], {}
    for point in asked(paper, figure, *PLACEMENTS, "HybridFlow"):
        at, placement = setting_of(paper, point), PLACEMENTS.get(point.system)
        found = best_of(placement, *at) if placement else next(iter(search(*at)), None)
        if not found:
            rows.append(paper.row(point, None, "not modelled", NO_ROOM))
            continue
        rows.append(paper.row(point, at.task.sequences * at.task.trained / found.seconds, "form"))
        if placement:
            pairs.setdefault((point.setting, point.gpus), []).append(rows[-1])
    each = [pair for own in pairs.values() for pair in combinations(own, 2)]
    right = sum((a.theirs < b.theirs) == (a.ours < b.ours) for a, b in each)
    return [*rows, Row(figure, "pairs in their order", None, right, f"of {len(each)} pairs", "form")]


def transitions(paper: Paper) -> list[Row]:
    """Seconds from training to generation: table 2's volumes, then an engine's part from the host."""
    rows = []
    for point in asked(paper, "14", *SYSTEMS):
        models, gpus, _, speeds = setting_of(paper, point)
        pp, tp, parts = paper.values("sizes")[point.setting]
        gathering = gpus if point.system == "DS-Chat" else pp * tp
        received = Layout(pp, tp, gpus // (pp * tp), parts).costs()[SYSTEMS[point.system]].received
        seconds = received / speeds.band(gathering) + 1 / parts / speeds.device.host
        kind = "predicted" if point.system == "HybridFlow" else "form"
        rows.append(paper.row(point, models["actor"].bytes * seconds, kind))
    return rows + not_modelled(paper, "14", OTHER, system="OpenRLHF")


def generation(paper: Paper) -> list[Row]:
    """Seconds of an engine of t_g GPUs for its share of the prompts, where all models are cut in 1-8 parts."""
    rows = []
    for point in asked(paper, "15", "HybridFlow"):
        (models, gpus, task, speeds), parts = setting_of(paper, point), number_in(point, "t_g=")
        held = speeds.reserve
        for role in reversed(PPO):  # the actor comes last
            every = choices_of(role, models[role], gpus, held, task, speeds)
            held = next((choice.held for choice in every if choice.sizes[role][:2] == (1, 8)), math.inf)
        if held < speeds.device.memory and gpus % parts == 0:
            own = Setting(models, parts, task._replace(sequences=task.sequences * parts // gpus), speeds)
            choice = Choice(held, (), dict.fromkeys(PPO, Sizes(1, parts, 1, parts)))
            rows.append(paper.row(point, step_of(own, choice, scores=False)[0]))
        else:
            rows.append(paper.row(point, None, "not modelled", NO_ROOM))
    return rows


def table_2(paper: Paper) -> list[Row]:
    """Fractions of the model's bytes M, of each GPU."""
    rows = []
    for point in asked(paper, "table 2", *SYSTEMS):
        sizes = point.setting.split()[0]
        layout = Layout(*map(int, sizes.split("-")), number_in(point, "t_g="))
        ours = layout.costs()[SYSTEMS[point.system]]._asdict()[point.metric]
        rows.append(paper.row(point, float(ours), "form"))
    return rows


def number_in(point: Point, name: str) -> int:
    """Behind a name in its setting. ValueError without one."""
    if not (number := point.setting.partition(name)[2].partition(" ")[0]).isdecimal():
        raise ValueError(f"{point.where}: its setting has no {name}NUMBER")
    return int(number)


FIGURES = {
    "9": partial(throughput, figure="9", roles=PPO),
    "10": partial(not_modelled, figure="10", why=REMAX),
    "11": partial(throughput, figure="11", roles=SAFE),
    "12": partial(placements, figure="12"),
    "13": partial(placements, figure="13"),
    "14": transitions,
    "15": generation,
    "16": partial(not_modelled, figure="16", why=SEARCH),
    "table 2": table_2,
}

if __name__ == "__main__":
    sys.exit(command("hybridflow", __doc__, FIGURES, sys.argv[1:]))
