"""Ranks with a pace: what bench/modes.py measures on them, and the same set-up simulated.

For papers/measured.py, which puts one beside the other.
"""

import csv
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from bench.workloads import ANSWERS, CRITIQUE, PROMPTS, WORKLOADS, is_kept, length_of
from genrm import FORMATS
from papers.tables import COLUMNS, ROOT, Point, read_points
from rollout import MEETING_INTERVAL_S
from simulation.cluster import Cluster, Lengths, Simulation, StepFacts, Workload
from simulation.costs import Decode, Passes
from simulation.engine import Moves

RANKS = 4
STEPS = 5  # the first isn't counted


@dataclass(frozen=True)
class Given(Workload):
    """A workload of bench/modes.py, whose answers are worth as much as there."""

    name: str = "short"

    def is_right(self, prompt_id: int, index: int) -> bool:
        return bool(index % 2) or not is_kept(self.name, prompt_id)


@dataclass(frozen=True)
class GivenLengths(Lengths):
    """The lengths of a workload's answers."""

    name: str = "short"

    def of(self, *text: object) -> int:
        return length_of(self.name, *text[-2:])


class SetUp(NamedTuple):
    """A set-up of paced ranks."""

    decode: dict[str, Decode]  # by role
    prompt: int  # tokens of a prompt
    most: tuple[int, int]  # tokens of an answer, and of a critique
    swap_s: float  # that two roles take to change places
    train: Passes = Passes(0.0)  # of each model that is trained


def simulate(name: str, side: str, at: SetUp, steps: int, **more: object) -> list[StepFacts]:
    """Steps of a workload on a set-up. side: as bench/modes.py names it; more: settings."""
    work = WORKLOADS[name]
    most_answer, most_critique = at.most
    answers = GivenLengths(0, 0, most_answer, name)
    critiques = Lengths(CRITIQUE, 0, most_critique)
    given = Given(at.prompt, answers, critiques, work.keep, name=name)
    moves = dict.fromkeys(at.decode, Moves(at.swap_s / 2, at.swap_s / 2))
    cluster = Cluster(at.decode, at.train, moves=moves, meeting_s=MEETING_INTERVAL_S)
    mode, settings = settings_of(side)
    settings |= dict(prompts_per_step=PROMPTS, answers_per_prompt=ANSWERS)
    judged = f"simulated {work.judgements} times"
    FORMATS[judged] = replace(FORMATS["simulated"], judgements=work.judgements)
    settings |= dict(judge_format=(judged,), steps=steps) | more
    return Simulation(mode, RANKS, given, cluster, **settings).run()


def settings_of(side: str) -> tuple[str, dict]:
    """The mode and the settings of a side, which is named as in bench/modes.py."""
    if "|" in side:
        return "partial", dict(rollout_ranks=int(side.partition("|")[0]))
    mode, _, tail = side.partition(" ")
    return mode, dict(tail=float(tail)) if tail else {}


def serving_s(name: str, side: str, at: SetUp, steps=STEPS, first_counted=1) -> float:
    """Seconds of serving a step, in the median."""
    counted = simulate(name, side, at, steps)[first_counted:]
    return statistics.median(step.seconds["serve"] for step in counted)


def pace_of(at: SetUp, tokens: float) -> str:
    """The pace of rollout's engines, as bench/modes.py takes it. tokens: of a prompt that is read."""
    decode = at.decode["rollout"]
    seconds = (decode.fixed, decode.each, tokens * decode.prefill)
    return ",".join(f"{1000 * each:.2f}" for each in seconds)


def command_of(at: SetUp, tokens: dict[str, float], *options: object) -> list[str]:
    """The command that measures a set-up, of which all roles have one pace.

    tokens: of a prompt that is read, by role.
    """
    pace = pace_of(at, tokens["rollout"])
    fixed = ["--ranks", RANKS, "--repeats", 1, "--figure", "runs/bench/measured.png"]
    return [sys.executable, *map(str, ["bench/modes.py", *fixed, "--pace", pace, *options])]


def measure(
    commands: list[list[str]], path: Path, names: Callable[[int, str, str], tuple[str, str]]
) -> None:
    """Keep the medians of what these commands measure; other points of the file stay as they are.

    names: figure and setting of a command's number, a workload and a side.
    """
    points = {point.name: point for point in read_points(path)} if path.exists() else {}
    for number, line in enumerate(commands):
        subprocess.run(line, cwd=ROOT.parent, check=True)
        rows = json.loads((ROOT.parent / "runs" / "bench" / f"modes-{RANKS}.json").read_text())
        seconds = defaultdict(list)
        for row in rows:
            if row["step"] > 0:
                seconds[row["workload"], row["side"]].append(row["metrics"]["time/serve_s"])
        for (workload, side), measured in seconds.items():
            point = point_of(*names(number, workload, side), measured)
            points[point.name] = point
        with path.open("w", newline="", encoding="utf-8") as file:
            lines = [point[:-1] for point in points.values()]
            csv.writer(file).writerows([COLUMNS.split(","), *lines])


def point_of(figure: str, setting: str, seconds: list[float]) -> Point:
    """The median of what was measured, as a line of the file."""
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    what = (figure, "nanoYATT", setting, str(RANKS), "serving", "s", f"{middle:.3f}")
    width = f"{(high - low) / middle:.3f}"
    return Point(*what, width, "RUN", "papers/measured.py --real", "-", f"{len(seconds)} steps")
