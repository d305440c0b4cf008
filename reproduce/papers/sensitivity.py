"""What HybridFlow's predicted throughputs depend on: each constant, each fitted point, the choice of four points.

    python reproduce/papers/sensitivity.py [--fit] [--write]    four minutes; also write docs/papers/sensitivity.md
    python reproduce/papers/sensitivity.py --fit                only refit `compute` on its points

It takes the mapping's closed form: it also counts the rows in which the simulation differs from it.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from reproduce.papers import hybridflow, mapping
from reproduce.papers.tables import (
    DOCS,
    ROOT,
    Constants,
    Paper,
    Point,
    Row,
    read_constants,
    read_points,
    read_rows,
)
from reproduce.papers.trivial import skill

FIGURES = {"9": hybridflow.SEARCHED, "12": hybridflow.PLACEMENTS, "13": hybridflow.PLACEMENTS}
FITTED = {"half": 1.0, "update_s": 0.01}  # table `compute` -> least value
VARIED = {
    "speeds": ("mfu", "hbm"),
    "compute": ("half", "update_s"),
    "generation": ("prompt", "layer_s", "reduce_s", "reserve"),
    "transition": ("host",),
    "device": ("memory", "network", "link"),
}
GROUPS = {
    "figure 9": lambda row: row.figure == "9",
    "colocate, HybridFlow (12, 13)": lambda row: (
        row.figure != "9" and row.system in ("colocate", "HybridFlow")
    ),
    "split": lambda row: row.system == "split",
    "standalone": lambda row: row.system == "standalone",
    "all": lambda row: True,
}


def changed(paper: Paper, table: str, **new: object) -> Paper:
    return paper._replace(constants=paper.constants | {table: paper.constants[table] | new})


def rows_of(paper: Paper) -> list[Row]:
    """Return the entered throughputs of figures 9, 12 and 13, by the mapping's closed form."""
    rows = []
    for figure, placements in FIGURES.items():
        rows += hybridflow.throughput(paper, figure, placements, how="closed form")
    return rows


def refit(paper: Paper, points: list[Point]) -> Paper:
    """Fit `compute` on points of figure 9, by least squares of relative errors. Their placements are searched."""
    paper = changed(paper, "compute", fitted_on=[point.name for point in points])

    def errors_of(constants: np.ndarray, placements: list[mapping.Placement]) -> np.ndarray:
        own = changed(paper, "compute", **dict(zip(FITTED, constants.tolist(), strict=True)))
        errors = []
        for point, placement in zip(points, placements, strict=True):
            at = hybridflow.setting_of(own, point)
            tokens = at.task.sequences * at.task.trained
            errors.append(tokens / hybridflow.found_for(placement, at).seconds / float(point.value))
        return np.array(errors) - 1

    for _ in range(2):
        found = [mapping.search(*hybridflow.setting_of(paper, point))[0] for point in points]
        placements = [tuple(tuple(choice.sizes) for choice in each.choices) for each in found]
        now = np.array([paper.constants["compute"][name] for name in FITTED])
        for _ in range(5):  # Gauss-Newton
            errors = errors_of(now, placements)
            steps = np.diag(0.01 * now)
            slopes = [(errors_of(now + step, placements) - errors) / step.sum() for step in steps]
            change, *_ = np.linalg.lstsq(np.array(slopes).T, -errors)
            now = np.maximum(now + change, [*FITTED.values()])
        paper = changed(paper, "compute", **dict(zip(FITTED, now.tolist(), strict=True)))
    return paper


def table(head: str, rows: Iterable[tuple]) -> list[str]:
    lines = [head, "|---" * head.count("|") + "|"]
    return [*lines, *("| ".join(["", *map(str, row)]) + " |" for row in rows), ""]


def by_constant(paper: Paper) -> list[str]:
    """Return the table of errors with each constant at 0.8 and 1.25 times its value, nothing refitted."""
    known = {(row.name): row.simulated for row in rows_of(paper)}
    found = []
    for group, names in VARIED.items():
        for name in names:
            cells = []
            for factor in (0.8, 1.25):
                rows = rows_of(
                    changed(paper, group, **{name: paper.constants[group][name] * factor})
                )
                moved = [abs(row.simulated / known[row.name] - 1) for row in rows if row.simulated]
                cells += [
                    f"{100 * skill(rows).simulated.median:.1f}",
                    f"{100 * np.median(moved):.1f}",
                ]
            origin = "fitted" if "fitted_on" in paper.constants[group] else "assumed or data sheet"
            found.append((name, origin, *cells))
    return table("| constant | from | error x 0.8 | moves | error x 1.25 | moves |", found)


def by_point(paper: Paper, points: list[Point]) -> list[str]:
    """Return the table of what each fitted point decides."""
    found = []
    for left in points:
        own = refit(paper, [point for point in points if point != left])
        (row,) = hybridflow.throughput(
            own._replace(points=[left]), "9", hybridflow.SEARCHED, how=""
        )
        compute = own.constants["compute"]
        numbers = f"{compute['half']:,.0f}", f"{compute['update_s']:.2f}"
        found.append((f"{left.setting}@{left.gpus}", f"{100 * row.error:+.1f}", *numbers))
    return table("| left out | its error | half | update_s |", found)


def by_fit_set(paper: Paper) -> list[str]:
    """Return the table of errors over all sets of four fitted points of figure 9, one for each model."""
    own = [point for point in paper.of("9") if point.system == "HybridFlow"]
    sizes = {point.setting: [p for p in own if p.setting == point.setting] for point in own}
    skills = {name: [] for name in GROUPS}
    for points in product(*sizes.values()):
        rows = rows_of(refit(paper, list(points)))
        for name, belongs in GROUPS.items():
            skills[name].append(skill(filter(belongs, rows)))
    found = []
    for name, each in skills.items():
        cells = []
        for side in ("simulated", "trivial"):
            medians = [100 * one._asdict()[side].median for one in each]
            low, middle, high = np.percentile(medians, [10, 50, 90])
            cells.append(f"{middle:.1f} ({low:.1f} to {high:.1f})")
        wins = sum(one.simulated.median < one.trivial.median for one in each)
        found.append((name, *cells, f"{wins} of {len(each)}"))
    return table("| rest of | simulation | power law | simulation nearer |", found)


def same_as_simulated(paper: Paper) -> str:
    """Count the simulated rows in docs/papers/rows that equal the mapping's closed form."""
    closed = {row.name: row.simulated for row in rows_of(paper) if row.simulated}
    kept = [row for row in read_rows(DOCS / "rows" / "hybridflow.csv") if row.name in closed]
    off = [abs(row.simulated / closed[row.name] - 1) for row in kept if row.simulated]
    near = sum(each < 0.0002 for each in off)
    return f"{near} of {len(off)} rows to 0.02 %, the others to {100 * max(off):.1f} %"


def main(given: list[str]) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="only refit `compute`")
    parser.add_argument(
        "--write", action="store_true", help="also write docs/papers/sensitivity.md"
    )
    chosen = parser.parse_args(given)
    files = sorted((ROOT / "published").glob("hybridflow_*.csv"))
    points = [point for file in files for point in read_points(file) if point.value]
    paper = Paper(points, read_constants(ROOT / "hybridflow.toml"))
    fitted = paper.fitted("compute")
    if chosen.fit:
        print({name: refit(paper, fitted).constants["compute"][name] for name in FITTED})
        return
    text = (ROOT / "prose" / "sensitivity.md").read_text(encoding="utf-8")
    page = text.format(
        same=same_as_simulated(paper),
        constants="\n".join(by_constant(paper)),
        points="\n".join(by_point(paper, fitted)),
        sets="\n".join(by_fit_set(paper)),
    )
    print(page)
    if chosen.write:
        (DOCS / "sensitivity.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
