"""Ranks with a pace: what bench/modes.py measures on them, and the same set-up simulated.

For papers/measured.py and papers/wechat_yatt.py, which put one beside the other.
"""

from __future__ import annotations

import csv
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.workloads import WORKLOADS, critique_of, is_kept, length_of
from papers.tables import COLUMNS, ROOT, Point, read_points
from rollout import MEETING_INTERVAL_S
from scheduling.costs import Decode, Passes
from simulation.cluster import Cluster, Lengths, Simulation, StepFacts, Workload
from simulation.engine import Moves

RANKS, STEPS = 4, 5  # the first step isn't counted
MOVING = {"rebalance": ("partial", dict(rollout_ranks=1, rebalance=True)), "auto": ("auto", {})}


@dataclass(frozen=True)
class Given(Workload):
    """A workload of bench/modes.py, whose answers are as long as there."""

    name: str = "short"

    def is_right(self, prompt_id: int, index: int) -> bool:
        return bool(index % 2) or not is_kept(self.name, prompt_id)


@dataclass(frozen=True)
class GivenLengths(Lengths):
    name: str = "short"
    given: Callable[[str, int, int], int] = length_of

    def of(self, *text: object) -> int:
        return self.given(self.name, *text[-2:])


class SetUp(NamedTuple):
    """What paced ranks are. most: tokens of an answer, and of a critique; prompt: its tokens."""

    decode: dict[str, Decode]  # by role
    prompt: int
    most: tuple[int, int]
    swap_s: float  # that two roles take to change places
    more_s: float = 0.0  # that they are told to take beside


def simulate(name: str, side: str, at: SetUp, steps: int) -> list[StepFacts]:
    """A workload on a measured set-up. side: as bench/modes.py names it."""
    work, half_s = WORKLOADS[name], (at.swap_s + at.more_s) / 2
    moved = dict(
        moves=dict.fromkeys(at.decode, Moves(half_s, half_s)), meeting_s=MEETING_INTERVAL_S
    )
    kinds = zip(at.most, (length_of, critique_of), strict=True)
    lengths = (GivenLengths(0, 0, most, name, given) for most, given in kinds)
    mode, _, tail = side.partition(" ")
    mode, choice = MOVING.get(side, (mode, dict(tail=float(tail)) if tail else {}))
    if "|" in side:
        mode, choice = "partial", dict(rollout_ranks=int(side.partition("|")[0]))
    sizes = dict(
        prompts_per_step=work.prompts, answers_per_prompt=8, judgements=work.judgements, steps=steps
    )
    cluster = Cluster(at.decode, Passes(0.0), **moved)
    given = Given(at.prompt, *lengths, work.keep, name=name)
    return Simulation(mode, RANKS, given, cluster, **sizes, **choice).run()


def serving_s(name: str, side: str, at: SetUp, steps=STEPS, first_counted=1) -> float:
    """Seconds of serving a step, in the median."""
    counted = simulate(name, side, at, steps)[first_counted:]
    return statistics.median(step.seconds["serve"] for step in counted)


def command_of(at: SetUp, tokens: dict[str, float], *options: object) -> list[str]:
    """That measures it. tokens: of a prompt that is read, by role."""
    paces = []
    for role, decode in at.decode.items():
        seconds = decode.fixed, decode.each, tokens[role] * decode.prefill
        paces.append(",".join(f"{1000 * each:.2f}" for each in seconds))
    fixed = ["--ranks", RANKS, "--repeats", 1, "--figure", "runs/bench/measured.png"]
    fixed += ["--pace", ";".join(paces), "--swap", f"{at.more_s:.2f}"]
    return [sys.executable, *map(str, ["bench/modes.py", *fixed, *options])]


def measure(
    commands: list[list[str]], path: Path, names: Callable[[int, str, str], tuple[str, str]]
) -> None:
    """Keep the medians of what these commands measure; other points of the file stay as they are.

    Of a side that moves, the last half counts. names: figure and setting of a command's number, a workload
    and a side.
    """
    points = {point.name: point for point in read_points(path)} if path.exists() else {}
    for number, line in enumerate(commands):
        subprocess.run(line, cwd=ROOT.parent, check=True)
        seconds = defaultdict(list)
        for row in json.loads((ROOT.parent / "runs" / "bench" / f"modes-{RANKS}.json").read_text()):
            seconds[row["workload"], row["side"]].append(row["metrics"]["time/serve_s"])
        for (workload, side), every in seconds.items():
            figure, setting = names(number, workload, side)
            each = every[len(every) // 2 if side in MOVING else 1 :]
            low, middle, high = statistics.quantiles(each, n=4, method="inclusive")
            what = (figure, "nanoYATT", setting, str(RANKS), "serving", "s", f"{middle:.3f}")
            made = f"papers/{path.stem.rpartition('_')[0]}.py --real"
            point = Point(
                *what, f"{(high - low) / middle:.3f}", "RUN", made, "-", f"{len(each)} steps"
            )
            points[point.name] = point
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(
                [COLUMNS.split(","), *(point[:-1] for point in points.values())]
            )
