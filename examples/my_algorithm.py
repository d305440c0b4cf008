"""Your own algorithm: torchrun --nproc-per-node 2 examples/my_algorithm.py --algorithm mine tau=0.2"""

import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

import algorithms
import run


def short_ones_gain(rewards, lengths, algorithm):  # a group's advantages
    numbers = [r - algorithm.own["brevity"] * n for r, n in zip(rewards, lengths, strict=True)]
    return [number - median(numbers) for number in numbers]


def unclipped(inputs, algorithm):  # per token: the loss, and whether it was clipped
    log_ratio = inputs.logprobs - inputs.old_logprobs
    loss = algorithm.own["tau"] / 2 * log_ratio.square() - log_ratio.exp() * inputs.advantages
    return loss, log_ratio.isnan()


own = {"tau": 0.1, "brevity": 0.001}  # settings that only this row has
algorithms.ALGORITHMS["mine"] = algorithms.Algorithm(short_ones_gain, unclipped, own=own)
if __name__ == "__main__":
    run.main(sys.argv[1:])
