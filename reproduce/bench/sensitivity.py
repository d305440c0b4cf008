"""What HybridFlow's throughputs depend on: each constant, each fitted point, the choice of the fitted points.

    python reproduce/bench/sensitivity.py [--write]    six minutes; also write docs/papers/sensitivity.md
    python reproduce/bench/sensitivity.py --fit        only fit table `compute` again, on its own points

The page also has numbers of the paper's text beside the closed form's.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from reproduce.papers import hybridflow, mapping
from reproduce.papers.hybridflow import PLACEMENTS, SEARCHED, setting_of
from reproduce.papers.mapping import Placement
from reproduce.papers.tables import (
    DOCS,
    ROOT,
    Paper,
    Point,
    Row,
    read_constants,
    read_points,
    skill,
)

FIGURES = {"9": SEARCHED, "12": PLACEMENTS, "13": PLACEMENTS}
LEAST = {"half": 1.0, "update_s": 0.01}  # the constants of `compute` -> their least values
VARIED = {
    "speeds": ("mfu", "hbm"),
    "compute": ("half", "update_s"),
    "generation": ("prompt", "layer_s", "reduce_s", "reserve"),
    "transition": ("host",),
    "device": ("memory", "network", "link"),
}
GROUPS = ("figure 9", "colocate, HybridFlow (12, 13)", "split", "standalone", "all")


def group_of(row: Row) -> str:
    if row.figure == "9":
        return "figure 9"
    return row.system if row.system in ("split", "standalone") else GROUPS[1]


def changed(paper: Paper, table: str, **new: Any) -> Paper:
    return paper._replace(constants=paper.constants | {table: paper.constants[table] | new})


def rows_of(paper: Paper) -> list[Row]:
    """Return the entered throughputs of figures 9, 12 and 13, by the mapping's closed form."""
    rows = []
    for figure, placements in FIGURES.items():
        rows += hybridflow.throughput(paper, figure, placements)
    return [row for row in rows if row.simulated]


def errors_of(paper: Paper, points: list[Point], placements: list[Placement]) -> np.ndarray:
    rows = []
    for point, placement in zip(points, placements, strict=True):
        one = paper._replace(points=[point])
        rows += hybridflow.throughput(one, "9", {"HybridFlow": placement})
    return np.array([row.error for row in rows])


def refit(paper: Paper, points: list[Point]) -> Paper:
    """Fit `compute` on points of figure 9: least squares of relative errors, with searched placements."""
    paper = changed(paper, "compute", fitted_on=[point.name for point in points])
    for _ in range(2):
        found = [mapping.search(*setting_of(paper, point))[0] for point in points]
        placements = [tuple(tuple(choice.sizes) for choice in each.choices) for each in found]
        for _ in range(5):  # Gauss-Newton
            now = np.array([paper.constants["compute"][name] for name in LEAST])
            errors = errors_of(paper, points, placements)
            slopes = []
            for name, value in zip(LEAST, now.tolist(), strict=True):
                more = changed(paper, "compute", **{name: 1.01 * value})
                slopes.append((errors_of(more, points, placements) - errors) / (0.01 * value))
            change, *_ = np.linalg.lstsq(np.array(slopes).T, -errors)
            new = np.maximum(now + change, [*LEAST.values()])
            paper = changed(paper, "compute", **dict(zip(LEAST, new.tolist(), strict=True)))
    return paper


def table(head: str, rows: list[tuple]) -> str:
    lines = [head, "|---" * (head.count("|") - 1) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows), ""])


def by_constant(paper: Paper) -> str:
    """Return the table of errors with each constant at 0.8 and 1.25 times its value, nothing fitted again."""
    known = {row.name: row.simulated for row in rows_of(paper)}
    found = []
    for group, names in VARIED.items():
        origin = "fitted" if "fitted_on" in paper.constants[group] else "assumed, data sheet"
        for name in names:
            cells = []
            for factor in (0.8, 1.25):
                value = paper.constants[group][name] * factor
                rows = rows_of(changed(paper, group, **{name: value}))
                pairs = [(row.simulated, known[row.name]) for row in rows if row.name in known]
                moved = np.median([abs(one / other - 1) for one, other in pairs])
                cells += [f"{100 * skill(rows).simulated.median:.1f}", f"{100 * moved:.1f}"]
            found.append((name, origin, *cells))
    return table("| constant | from | x 0.8: error | moves | x 1.25: error | moves |", found)


def by_point(paper: Paper, points: list[Point]) -> str:
    """Return the table of what each fitted point decides."""
    found = []
    for left in points:
        own = refit(paper, [point for point in points if point != left])
        (error,) = errors_of(own, [left], [()])
        half, update_s = (own.constants["compute"][name] for name in LEAST)
        name = f"{left.setting}@{left.gpus}"
        found.append((name, f"{100 * error:+.1f}", f"{half:,.0f}", f"{update_s:.2f}"))
    return table("| left out | its error | half | update_s |", found)


def by_fit_set(paper: Paper) -> str:
    """Return the table of errors over all sets of four points of figure 9, one for each model."""
    own = hybridflow.asked(paper, "9", SEARCHED)
    sizes = [
        [p for p in own if p.setting == size] for size in dict.fromkeys(p.setting for p in own)
    ]
    skills = {name: [] for name in GROUPS}
    for points in product(*sizes):
        rows = rows_of(refit(paper, [*points]))
        for name in GROUPS:
            skills[name].append(skill(row for row in rows if name in ("all", group_of(row))))
    found = []
    for name, each in skills.items():
        medians = np.array([(one.simulated.median, one.trivial.median) for one in each])
        low, middle, high = 100 * np.percentile(medians, [10, 50, 90], axis=0)
        cells = [f"{middle[n]:.1f} ({low[n]:.1f} to {high[n]:.1f})" for n in range(2)]
        found.append((name, *cells, f"{sum(medians[:, 0] < medians[:, 1])} of {len(each)}"))
    return table("| rest of | closed form | power law | prediction nearer in |", found)


def claims(paper: Paper) -> str:
    """Return the table of what the paper's text states, beside the closed form."""
    entered = {(row.figure, row.system, row.gpus, row.setting): row for row in rows_of(paper)}
    ends = [entered["9", "HybridFlow", gpus, "7B"] for gpus in ("8", "128")]
    less = []
    for (figure, system, gpus, _), row in entered.items():
        if figure == "13" and int(gpus) <= 64 and system in ("split", "standalone"):
            less.append((entered["13", "colocate", gpus, row.setting], row))
    found = []
    for side in ("published", "simulated"):
        scaling = ends[1].at(side) / ends[0].at(side) / 16
        gap = fmean(1 - other.at(side) / best.at(side) for best, other in less)
        found.append((f"{100 * scaling:.1f} %", f"{100 * gap:.1f} %"))
    largest = {point.setting: point for point in hybridflow.asked(paper, "9", SEARCHED)}
    least, shares = [], []
    for point in largest.values():
        tried = [setting_of(paper, point._replace(gpus=str(1 << n))) for n in range(8)]
        least.append(str(next(at.gpus for at in tried if mapping.search(*at))))
        best = mapping.search(*tried[-1])[0]
        (own,) = (choice for choice in best.choices if "actor" in choice.sizes)
        actor = tried[-1].models["actor"]
        _, learning_s = mapping.passes_s(actor, own.sizes["actor"], *tried[-1][2:])
        shares.append((best.stages[0] + learning_s) / best.seconds)
    move = actor.bytes / tried[-1].speeds.device.network / best.seconds
    scaling, gap = zip(*found, strict=True)
    rows = [
        ("strong scaling; bars: 7B from 8 to 128 GPUs", "66.8 %", *scaling),
        ("figure 13 to 64 GPUs: less than colocate; bars: the 3 simulated pairs", "44.8 %", *gap),
        ("smallest clusters for 7B, 13B, 34B, 70B", "8, 16, 32, 64", "", ", ".join(least)),
        ("actor's share of a step; here on 128 GPUs", "58.9 %", "", f"{100 * fmean(shares):.1f} %"),
        ("70B moved whole, at a GPU's share of the network", "36.4 %", "", f"{100 * move:.1f} %"),
    ]
    return table("| what | text | bars | closed form |", rows)


def main(given: list[str]) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit `compute` again, and print it")
    parser.add_argument(
        "--write", action="store_true", help="also write docs/papers/sensitivity.md"
    )
    chosen = parser.parse_args(given)
    files = sorted((ROOT / "published").glob("hybridflow_*.csv"))
    points = [point for file in files for point in read_points(file) if point.value]
    paper = Paper(points, read_constants(ROOT / "hybridflow.toml"))
    fitted = paper.fitted("compute")
    if chosen.fit:
        compute = refit(paper, fitted).constants["compute"]
        print({name: compute[name] for name in LEAST})
        return
    text = (ROOT / "prose" / "sensitivity.md").read_text(encoding="utf-8")
    page = text.format(
        constants=by_constant(paper),
        points=by_point(paper, fitted),
        sets=by_fit_set(paper),
        claims=claims(paper),
    )
    print(page)
    if chosen.write:
        (DOCS / "sensitivity.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
