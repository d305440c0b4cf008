"""A serving mode of your own, side by side, but judged by group: torchrun ... examples/my_mode.py --mode mine"""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import placement
import rollout
import run


async def serve(step):  # the loop
    await step.wake(step.c.placement.genrm)
    while not step.is_over:
        step.start(step.begin_wave(), by_group)
        await step.tasks.poll()
        await rollout.gather_finished_groups(step)


async def by_group(step, group):  # what is done for a group: its answers are judged when all are there
    await rollout.generate(step, group)
    await rollout.judge(step, group)


def plans(*sizes):  # who holds which rank: the splits of partial colocation
    return [dataclasses.replace(plan, mode="mine") for plan in placement.partial_colocation(*sizes)]


placement.PLANS["mine"], rollout.MODES["mine"] = plans, serve
if __name__ == "__main__":
    run.main(sys.argv[1:])
