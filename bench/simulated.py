"""What the simulation costs: CPU seconds and memory of a step, of all its controllers in one process.

    python bench/simulated.py                          64 ranks, partial colocation, meetings every second
    python bench/simulated.py --ranks 1024 --meeting 10
    python bench/simulated.py --ranks 4096 --unit 8 --meeting 10    a rank of the simulation is a node of 8
    python bench/simulated.py --alone                  every controller works out everything itself
    python bench/simulated.py --profile 30             where the time goes: the 30 dearest functions

A step trains on 512 prompts of 16 answers; half of the groups are filtered and drawn again. Engines are H20s:
a 7B policy, a 32B judge on four ranks. `thinking` is what one controller alone would spend on the decisions
that all take alike, of the CPU seconds of the run.
"""

import argparse
import cProfile
import pstats
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.central import MODELS, cluster_of
from simulation.cluster import Lengths, Simulation, Workload

WORK = Workload(512, Lengths(600, 1.0, 4096), Lengths(250, 0.5, 1000), keep=0.5)


def main() -> None:
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--unit", type=int, default=1, help="ranks that one controller stands for")
    parser.add_argument("--mode", default="partial")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--answers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--meeting", type=float, default=1.0)
    parser.add_argument("--grain", type=int, default=16)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--profile", type=int, default=0)
    chosen = parser.parse_args()
    sizes = dict(prompts_per_step=chosen.prompts, answers_per_prompt=chosen.answers, steps=chosen.steps)
    sizes |= dict(genrm_tp=max(1, MODELS["genrm"][1] // chosen.unit))
    cluster = cluster_of(chosen.unit, chosen.grain, chosen.meeting)
    run = Simulation(chosen.mode, chosen.ranks // chosen.unit, WORK, cluster, **sizes)
    profile = cProfile.Profile()
    if chosen.profile:
        profile.runcall(run.run, share=not chosen.alone)
        pstats.Stats(profile).sort_stats("tottime").print_stats(chosen.profile)
    else:
        run.run(share=not chosen.alone)
    cpu_s, memory = run.cpu_s / chosen.steps, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{chosen.mode}, {chosen.ranks} ranks: {cpu_s:.1f} CPU s a step, {memory:.0f} MB")
    for number, step in enumerate(run.steps):
        seconds = ", ".join(f"{name} {value:.3f} s" for name, value in step.seconds.items())
        print(f"step {number + 1}: {step.waves} waves, {step.stats.rollout.requests} answers, {seconds}")
    thinking = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in run.thinking_s.items())
    print(f"{run.network.meetings} meetings; thinking: {thinking or 'not shared'}")


if __name__ == "__main__":
    main()
