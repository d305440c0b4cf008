"""A serving mode of your own: torchrun --nproc-per-node 2 examples/my_mode.py --mode by_group"""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import placement
import rollout
import run


def plans(holders, config):  # who holds which engine: the splits of partial colocation
    splits = placement.partial_colocation(holders, config)
    return [dataclasses.replace(plan, mode="by_group") for plan in splits]


async def judge_by_group(step):  # the loop, side by side like partial colocation
    plan = step.c.placement.plan
    await step.c.placement.share(plan.leads("rollout"), plan.leads("genrm"))
    while not step.is_over:
        step.start(step.begin_wave(), serve_group)
        await step.tasks.poll()
        await rollout.gather_finished_groups(step)


async def serve_group(step, group):  # its answers are judged when all of them are there
    await rollout.generate(step, group)
    await rollout.judge(step, group)


placement.PLANS["by_group"] = plans
rollout.MODES["by_group"] = judge_by_group
if __name__ == "__main__":
    run.main(sys.argv[1:])
