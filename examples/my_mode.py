"""Your own serving mode: torchrun --nproc-per-node 2 examples/my_mode.py --mode by_group"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import modes
import rollout
import run


def splits(placement, config):  # ranks per role, as in partial colocation
    found = modes.partial_colocation(placement, config)
    return [split._replace(mode="by_group") for split in found]


async def judge_by_group(step):  # the roles run side by side, as in partial colocation
    devices = step.c.devices
    await devices.set_awake(devices.leads("rollout"), devices.leads("genrm"))
    while not step.is_over:
        step.start(await step.draw_prompts(), serve_group)
        await step.tasks.poll()
        await rollout.gather_finished_groups(step)


async def serve_group(step, group):  # judges a group's answers once all of them are finished
    await rollout.generate(step, group)
    await rollout.judge(step, group)


modes.MODES["by_group"] = modes.Mode(splits, judge_by_group)
if __name__ == "__main__":
    run.main(sys.argv[1:])
