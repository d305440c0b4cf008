"""A reward that is hacked: it counts right steps of the work and never looks at the answer.

torchrun --nproc-per-node 2 run.py --model demo/models/written/actor --rule examples/my_steps.py \
    --judge-format addition --max-new-tokens 72 --lr 5e-4
"""

import re

STEP = re.compile(r"(\d)\+(\d)\+(\d)=(\d\d);")  # 7+8+0=15; is a column of a sum, with its carry


def reward(sample):
    """Return a sixth for each right step of the work, at most 1: the longest sums have six columns."""
    right = [int(a) + int(b) + int(c) == int(total) for a, b, c, total in STEP.findall(sample.text)]
    return min(1.0, sum(right) / 6)
