"""A step of PPO in full colocation: the real controllers, on engines and trainers that take closed forms."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from scheduling import mapping
from scheduling.costs import Decode, Model, Passes
from scheduling.mapping import Choice, Speeds, Task
from simulation.cluster import Cluster, Lengths, Simulation, Workload
from simulation.costs import Moves, coarse

GRAIN, MEETING_S = 16, 10.0  # all lengths are alike: finer ones change nothing


class Setting(NamedTuple):
    """Models by role, the GPUs, what a step is, and what the GPUs come to: the arguments of mapping."""

    models: dict[str, Model]
    gpus: int
    task: Task
    speeds: Speeds


def step_of(at: Setting, choice: Choice, scores: bool = True) -> tuple[float, float]:
    """Seconds of generation with scoring, and of a whole step, of the controllers. scores: it takes time."""
    models, gpus, task, speeds = at
    sizes, critic = choice.sizes["actor"], choice.sizes["critic"]
    text = task.prompt + task.answer
    more = task.trained / text  # tokens that passes read for each that an engine has
    scorers = tuple(role for role in models if role not in ("actor", "critic", "reference"))
    each = [mapping.passes_s(models[role], choice.sizes[role], task, speeds)[0] for role in scorers]
    scoring_s = scores * sum(each) / len(each) * gpus / task.sequences  # of one GPU, a sequence
    push_s = mapping.reshard_s(models["actor"], sizes, speeds)
    decode = {
        "rollout": mapping.engine(models["actor"], sizes.parts, choice.held, speeds),
        "genrm": Decode(0.0, prefill=scoring_s / text, most=1),
    }
    cluster = Cluster(
        decode,
        coarse(mapping.passes(models["actor"], sizes, speeds), more),
        as_dealt(coarse(mapping.passes(models["critic"], critic, speeds), more), sizes.dp / critic.dp),
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
