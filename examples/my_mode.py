"""A serving mode of your own: torchrun --nproc-per-node 2 examples/my_mode.py --mode by_group"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import modes
import rollout
import run


def splits(placement, config):  # how many ranks each role has: as in partial colocation
    found = modes.partial_colocation(placement, config)
    return [split._replace(mode="by_group") for split in found]


async def judge_by_group(step):  # the loop, side by side like partial colocation
    devices = step.c.devices
    await devices.set_awake(devices.leads("rollout"), devices.leads("genrm"))
    while not step.is_over:
        step.start(await step.draw_prompts(), serve_group)
        await step.tasks.poll()
        await rollout.gather_finished_groups(step)


async def serve_group(step, group):  # its answers are judged when all of them are there
    await rollout.generate(step, group)
    await rollout.judge(step, group)


modes.MODES["by_group"] = modes.Mode(splits, judge_by_group)
if __name__ == "__main__":
    run.main(sys.argv[1:])
