"""The cost of the simulation itself: CPU seconds and peak memory of a step of all its controllers.

    python bench/simulated.py                          64 ranks, partial colocation
    python bench/simulated.py --ranks 1024 --mode full

A step trains on 512 prompts of 16 answers; half of the groups are filtered and drawn again. Engines are H20s:
a 7B policy, and a 32B judge on four ranks.
"""

import argparse
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.central import MODELS, cluster_of
from simulation.cluster import Lengths, Simulation, Workload

WORK = Workload(512, Lengths(600, 1.0, 4096), Lengths(250, 0.5, 1000), keep=0.5)
GRAIN = 16  # tokens that one of the simulation stands for


def main() -> None:
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--mode", default="partial")
    chosen = parser.parse_args()
    _, judge_ranks = MODELS["genrm"]
    sizes = dict(prompts_per_step=512, answers_per_prompt=16, genrm_tp=judge_ranks, steps=1)
    cluster = cluster_of(unit=1, grain=GRAIN, meeting_s=1.0)
    run = Simulation(chosen.mode, chosen.ranks, WORK, cluster, **sizes)
    start = time.process_time()
    (step,) = run.run()
    cpu_s = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{chosen.mode}, {chosen.ranks} ranks: {cpu_s:.1f} CPU s a step, peak {peak:.0f} MB")
    print(f"a step of {step.ended_s:.0f} s in {step.waves} waves, {run.network.meetings} meetings")


if __name__ == "__main__":
    main()
