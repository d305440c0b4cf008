"""An algorithm of your own: torchrun --nproc-per-node 2 examples/my_algorithm.py --algorithm mine"""

import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

import algorithms
import run


def less_median(rewards):  # of one group: the reward over the group's median
    return [reward - median(rewards) for reward in rewards]


def unclipped(inputs, algorithm):  # of each token: its loss, and whether it was clipped
    ratio = (inputs.logprobs - inputs.old_logprobs).exp()
    return -ratio * inputs.advantages, ratio.isnan()


algorithms.ALGORITHMS["mine"] = algorithms.Algorithm(score=less_median, loss=unclipped)
if __name__ == "__main__":
    run.main(sys.argv[1:])
