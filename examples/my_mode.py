"""A serving mode of your own: torchrun --nproc-per-node 2 examples/my_mode.py --mode by_group

Side by side like partial colocation, but a group is judged when all of its answers are there.
"""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import placement
import rollout
import run


def by_group(*sizes):  # the plans: those of partial colocation, under the name of the loop below
    return [dataclasses.replace(plan, mode="by_group") for plan in placement.partial_colocation(*sizes)]


async def judge_by_group(step):
    await step.wake(step.c.placement.genrm)
    while not step.is_over:
        step.start(step.begin_wave(), generate_and_judge)
        await step.tasks.poll()
        await rollout.gather_finished_groups(step)


async def generate_and_judge(step, group):
    await rollout.generate(step, group)
    await rollout.judge(step, group)


placement.PLANS["by_group"], rollout.MODES["by_group"] = by_group, judge_by_group
if __name__ == "__main__":
    run.main(sys.argv[1:])
