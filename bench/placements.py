"""A comparison of placements: seconds of a step by the ranks of engines and models, and by their number

    python bench/placements.py [--quick] [--write]    8 to 128 H20s; docs/papers/placements.md, too
    python bench/placements.py --real [--write]       4 ranks of this machine at a device's pace, too

Simulated: PPO with a reference, a 7B actor and critic in shards of two, 64 prompts of 8 answers (median 600
tokens, at most 4,096), rewards by a rule. Engines and trainers that share ranks take turns, and what sleeps
goes to the host. In `ahead` the next batch is served while one is trained on. In brackets: the ranks that
train, half of them the actor's, best of what was tried. Real: engines and trainers with a pace, and a judge.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.central import H20
from bench.modes import run_sides
from bench.paced import SetUp, pace_of, settings_of, simulate
from bench.workloads import Side
from config import Config
from papers.mapping import Sizes, Speeds, passes
from papers.measured import set_up_of
from papers.tables import DOCS, ROOT, read_constants
from papers.wechat_yatt import POLICY
from placement import PLACEMENTS, make_placement
from simulation.cluster import Cluster, Lengths, Simulation, Workload
from simulation.costs import Decode, Passes, decode_of
from simulation.engine import Moves

RANKS = (8, 16, 32, 64, 128)
QUICK = (8, 16)
TP = 2
STEPS = 4  # the first isn't counted
PACED_STEPS = 6
PARTS = (1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)  # of the ranks, that train
PPO = ("ppo", "kl_coef=0.05")
PACE = Passes(4e-4)  # of a paced trainer: seconds of a token forward
SIDES = {  # of the paced ranks: what bench/modes.py calls it, and other settings
    "colocate, full": ("full", {}),
    "colocate, partial": ("2|2", {}),
    "colocate, fused": ("fused 0.2", {}),
    "split": ("full", dict(placement="split")),
    "standalone": ("full", dict(placement="standalone")),
    "standalone, ahead": ("full", dict(placement="standalone", ahead=1)),
}
WORK = Workload(512, Lengths(600, 1.0, 4096), Lengths(1, 0.0, 1))
SPEEDS = Speeds(H20._replace(link=200e9), mfu=0.4, update_s=0.5)


# ---------------------------------------------------------------- simulated


def step_s(ranks: int, placement: str, ahead: int = 0) -> float:
    """Seconds of a step. UserError if there is no such placement."""
    settings: dict[str, Any] = dict(placement=placement, ahead=ahead, tp=TP, algorithm=PPO)
    placement = make_placement(Config(**settings), ranks)
    copies = placement.actor.dp
    learned = passes(POLICY, Sizes(1, TP, copies), SPEEDS)
    train_s = POLICY.params / TP * (2 + 4 + 12 / copies) / H20.host
    serve_s = POLICY.bytes / H20.host
    push_s = POLICY.bytes / (H20.network if placement.is_apart else H20.host)
    engine = decode_of(POLICY, H20, 1, weights=0.8, kv=0.26, prefill=0.5, layer_s=130e-6)
    moves = dict(rollout=Moves(serve_s, serve_s, push_s), train=Moves(train_s, train_s))
    decode = dict(rollout=engine, genrm=Decode(0.0))
    cluster = Cluster(decode, learned, moves=moves, scores=True, grain=16, meeting_s=1.0)
    settings |= dict(prompts_per_step=64, answers_per_prompt=8, updates_per_step=2, steps=STEPS)
    return between(Simulation("full", ranks, WORK, cluster, **settings).run())


def between(steps: list) -> float:
    """The mean seconds of a step."""
    return (steps[-1].ended_s - steps[0].ended_s) / (len(steps) - 1)


def row_of(ranks: int) -> list[str]:
    """The cells of a number of ranks."""
    cells = [str(ranks), *(f"{step_s(ranks, name):.1f}" for name in PLACEMENTS)]
    placements = {}  # by the ranks that train, the last ones
    for part in PARTS:
        each = max(TP, int(ranks * part) // (2 * TP) * TP)
        critic = ranks - each
        first = critic - each
        words = f"engines=0-{first - 1} actor={first}-{critic - 1} critic={critic}-{ranks - 1}"
        placements[2 * each] = words
    for ahead in (0, 1):
        took = {n: step_s(ranks, words, ahead) for n, words in placements.items()}
        best = min(took, key=took.__getitem__)
        cells.append(f"{took[best]:.1f} ({best})")
    return cells


# ---------------------------------------------------------------- paced


def paced_row(name: str, at: SetUp) -> list[str]:
    """The cells of a side: seconds of a step, measured and simulated."""
    side, settings = SIDES[name]
    mode, named = settings_of(side)
    options = ["--mode", mode, "--algorithm", "ppo"]
    for setting, value in (named | settings).items():
        options += [f"--{setting.replace('_', '-')}", value]
    sides = [Side("tail", side, 0, [side], PACED_STEPS)]
    rows = run_sides(sides, 4, pace_of(at, at.prompt), *options)
    seconds = [row["metrics"]["time/step_s"] for row in rows if row["step"] > 0]
    steps = simulate("tail", side, at, PACED_STEPS, algorithm=("ppo",), **settings)
    return [name, f"{statistics.median(seconds):.2f}", f"{between(steps):.2f}"]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    for name in ("--quick", "--real", "--write"):
        parser.add_argument(name, action="store_true")
    chosen = parser.parse_args(arguments)
    head = ("ranks", "colocate", "split", "standalone", "best standalone", "best ahead")
    lines = [" | ".join(head), "---:|" * len(head)]
    lines += [" | ".join(row_of(ranks)) for ranks in (QUICK if chosen.quick else RANKS)]
    if chosen.real:
        os.environ["BENCH_TRAIN_MS"] = str(1000 * PACE.token)
        at = set_up_of(read_constants(ROOT / "measured.toml"))._replace(train=PACE)
        lines += ["", "4 paced ranks | measured, s | simulated, s", "---|--:|--:"]
        lines += [" | ".join(paced_row(name, at)) for name in SIDES]
    print(*lines, sep="\n")
    if chosen.write:
        (DOCS / "placements.md").write_text("\n".join([f"# {__doc__}", *lines, ""]))


if __name__ == "__main__":
    main(sys.argv[1:])
