"""Do controllers change HybridFlow's throughputs? The closed form's steps, run by the product's controllers.

python reproduce/bench/hybridflow_controllers.py     all entered points of figures 9, 12 and 13: five minutes
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from engines.server import SPARE
from reproduce.bench.sensitivity import FIGURES
from reproduce.papers import hybridflow, mapping
from reproduce.papers.hybridflow import PPO, Setting
from reproduce.papers.mapping import Mapping
from reproduce.papers.tables import ROOT, Paper, all_published, read_constants
from reproduce.simulation.cluster import Cluster, Lengths, Simulation, Workload, coarse
from reproduce.simulation.costs import Decode
from reproduce.simulation.engine import Moves
from scheduling.layout import Shape, ranks_in_words

GRAIN = 16  # all lengths are equal, so a finer grain changes nothing
MEETING_S = 10.0
LEARNT = ("actor", "critic", "reference")  # run by trainers; the other roles score


def shapes_of(found: Mapping) -> dict[str, Shape]:
    """Return the ranks and sizes of each role. The actor's set has the first ranks, the scorers' the next."""
    shapes = {}
    first = 0
    served = ("actor", "reward")
    for choice in sorted(found.choices, key=lambda choice: [r not in choice.sizes for r in served]):
        for role, (pp, tp, dp, _) in choice.sizes.items():
            shapes[role] = Shape(tuple(range(first, first + pp * tp * dp)), tp, pp)
        first += pp * tp * dp
    return shapes


def step_s(at: Setting, found: Mapping) -> float:
    """Simulate a step and return its seconds."""
    models, gpus, task, speeds = at
    sizes = {role: each for choice in found.choices for role, each in choice.sizes.items()}
    (own,) = (choice for choice in found.choices if "actor" in choice.sizes)
    shapes = shapes_of(found)
    text = task.prompt + task.answer
    more = task.trained / text  # tokens read by passes / tokens held by engines
    passes = {}
    for role in LEARNT:
        passes[role] = coarse(mapping.passes(models[role], sizes[role], speeds), more)
    scorers = tuple(role for role in models if role not in LEARNT)
    # HybridFlow's order: scoring costs the time that it adds to the stage of reference and critic
    readers = ("reference", "critic")
    reading_s = {r: mapping.passes_s(models[r], sizes[r], task, speeds)[0] for r in readers}
    unscored = [sum(map(reading_s.get, c.sizes.keys() & reading_s.keys())) for c in found.choices]
    _, preparation_s, _ = found.stages
    added_s = preparation_s - max(unscored)
    together = shapes["actor"].ranks == shapes["reward"].ranks
    # HybridFlow's stages don't overlap, but judges on their own ranks would score while others write
    after_s = 0.0 if together else added_s
    # GPU-seconds per sequence and scorer
    scoring_s = (added_s - after_s) / len(scorers) * len(shapes["reward"].ranks) / task.sequences
    push_s = mapping.reshard_s(models["actor"], sizes["actor"], speeds)
    parts = sizes["actor"].parts
    cluster = Cluster(
        decode={
            "rollout": mapping.engine(models["actor"], parts, own.held, speeds),
            "genrm": Decode(0.0, prefill=scoring_s / text, most=1),
        },
        **passes,
        moves=dict(rollout=Moves(push_s=push_s)),
        scores=True,
        grain=GRAIN,
        meeting_s=MEETING_S,
    )
    engines = sorted({*shapes["actor"].ranks, *shapes["reward"].ranks})
    words = [f"engines={ranks_in_words(tuple(engines))}"]
    for role in LEARNT:
        ranks, tp, pp = shapes[role]
        words.append(f"{role}={ranks_in_words(ranks)}:tp{tp}:pp{pp}")
    mode = "full" if together else "partial"
    work = Workload(task.prompt, Lengths(task.answer, 0.0, task.answer), Lengths(1, 0.0, 1))
    settings = dict(algorithm=("ppo", "kl_coef=0.1"), rollout_tp=parts, judge=scorers)
    settings |= dict(placement=" ".join(words), rollout_ranks=len(shapes["actor"].ranks))
    settings |= dict(prompts_per_step=task.sequences, answers_per_prompt=1)
    settings |= dict(updates_per_step=task.updates, steps=1)
    settings |= dict(max_tokens_per_micro_batch=text // GRAIN + 8 + SPARE)  # one sequence
    step = Simulation(mode, gpus, work, cluster, **settings).run()[0]
    return step.ended_s - push_s + after_s  # the simulated step pushes at its start and its end


def main() -> None:
    published = [point for point in all_published() if point.value]
    paper = Paper(published, read_constants(ROOT / "hybridflow.toml"))
    off = []
    for figure, placements in FIGURES.items():
        for point in hybridflow.asked(paper, figure, placements):
            placement = placements[point.system]
            at = hybridflow.setting_of(paper, point, sum(placement, ()) or PPO)
            if found := hybridflow.found_for(placement, at):
                off.append(abs(found.seconds / step_s(at, found) - 1))
    same = sum(each < 0.0002 for each in off)
    print(f"{same} of {len(off)} throughputs are equal to 0.02 %, all to {100 * max(off):.1f} %")


if __name__ == "__main__":
    main()
