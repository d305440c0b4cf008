"""What the simulation costs: CPU seconds and memory of a step, of all its controllers in one process.

    python bench/simulated.py                          64 ranks, partial colocation, meetings every second
    python bench/simulated.py --ranks 1024 --meeting 10
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

from scheduling.costs import Device, Model, decode_of, passes_of
from simulation.cluster import Cluster, Lengths, Simulation, Workload
from simulation.costs import moves_of

H20 = Device(flops=148e12, memory=96e9, hbm=4e12, network=25e9, host=20e9)
POLICY, JUDGE = Model(7.6e9, 28, 3584, 512), Model(32.5e9, 64, 5120, 1024)
FITTED = dict(weights=0.8, kv=0.252, flops=0.988, prefill=0.5, layer_s=127e-6, sequence_s=27e-6)
WORK = Workload(512, Lengths(600, 1.0, 4096), Lengths(250, 0.5, 1000), keep=0.5)
JUDGE_TP = 4


def cluster_of(chosen: argparse.Namespace) -> Cluster:
    engines = dict(rollout=(POLICY, H20, 1), genrm=(JUDGE, H20, JUDGE_TP))
    decode = {role: decode_of(*engine, **FITTED) for role, engine in engines.items()}
    moves = dict(rollout=moves_of(H20, POLICY.bytes), genrm=moves_of(H20, JUDGE.bytes / JUDGE_TP))
    actor = passes_of(POLICY, H20, 1, mfu=0.4, update=0.5)
    return Cluster(decode, actor, moves=moves, grain=chosen.grain, meeting_s=chosen.meeting)


def main() -> None:
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    parser.add_argument("--ranks", type=int, default=64)
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
    run = Simulation(chosen.mode, chosen.ranks, WORK, cluster_of(chosen), genrm_tp=JUDGE_TP, **sizes)
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
