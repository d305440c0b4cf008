"""The slowest data-parallel rank's work over the mean, with and without the balance of a batch.

    python reproduce/bench/balance.py     a few seconds; computed from lengths only, on any machine

A step's 512 answers have log-normal lengths (median 600 tokens, at most 4,096) after prompts of 512 tokens.
Work is the multiply-adds of a 7B model's forward passes. `on` deals as training does, `off` in order. All
wait for the slowest one, so `off / on` is how much longer an update takes without the balance.
"""

import random
import sys
from math import exp, log
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[2]))

from config import parse_config
from reproduce.bench.measuring import print_table
from sample import Key
from scheduling.balance import Measure, plan_batch

PROMPT, MEDIAN, SIGMA, MOST = 512, 600, 1.0, 4096
PARAMS, LAYERS, HIDDEN = 7.6e9, 28, 3584
BUDGET = 16384  # tokens of a micro-batch
SEEDS = 5


def macs(tokens: int) -> int:
    return int(PARAMS * tokens + LAYERS * HIDDEN * tokens**2)


def lengths(seed: int) -> dict[Key, int]:
    rng = random.Random(seed)
    drawn = ((divmod(n, 8), exp(rng.gauss(log(MEDIAN), SIGMA))) for n in range(512))
    return {key: PROMPT + min(MOST, max(1, round(length))) for key, length in drawn}


def over_mean(works: list[int]) -> float:
    return max(works) / fmean(works)


def slowest(seed: int, ranks: int) -> tuple[float, float]:
    """Return the slowest rank's work over the mean: with the balance, and without."""
    tokens = lengths(seed)
    measure = Measure(tokens, macs)
    config = parse_config(["--max-tokens-per-micro-batch", str(BUDGET)])
    plan = plan_batch(measure, config, ranks)
    on = [sum(map(measure.works, mini_batches)) for mini_batches in plan]
    keys = sorted(tokens)
    off = [measure.work(keys[rank::ranks]) for rank in range(ranks)]
    return over_mean(on), over_mean(off)


def main() -> None:
    rows = []
    for ranks in (4, 16, 64):
        sides = [
            fmean(side) for side in zip(*(slowest(n, ranks) for n in range(SEEDS)), strict=True)
        ]
        rows.append([str(ranks), *(f"{side:.3f}" for side in (*sides, sides[1] / sides[0]))])
    print_table(["ranks", "on", "off", "off / on"], rows)


if __name__ == "__main__":
    main()
