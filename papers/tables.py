"""What a paper published beside what comes out here: points, constants, rows, their table and their picture.

Published points are in one CSV a figure, a number a row; constants in TOML, each table with its source or the
points that it was fitted on: their rows are `fitted`. Rows that are made of these, or have the value of one,
are marked as `follows`, others are `predicted`; `form`: by a closed form, without controllers; `measured`: by
a run of the program; `not modelled`, with the reason.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import tomllib
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from config import UserError

ROOT = Path(__file__).parent
DOCS = ROOT.parent / "docs" / "papers"
KINDS = ("fitted", "follows", "predicted", "form", "measured", "not modelled")
LABELS = ("P", "FIG", "CALC", "2ND", "RUN")  # stated, digitised, worked out, from others, run here
COLUMNS = "figure,system,setting,gpus,metric,unit,value,precision,label,source,page,note"
Constants = dict[str, dict[str, Any]]  # by table


class Point(namedtuple("Point", f"{COLUMNS},where", defaults=[""])):
    """A published number: the text of its CSV's columns, its file and line. precision: relative."""

    @property
    def name(self) -> str:
        """By which `fitted_on` names it."""
        return f"{self.figure}:{self.system}:{self.setting}@{self.gpus}:{self.metric}"


class Row(NamedTuple):
    figure: str
    setting: str
    theirs: float | None  # None if it isn't published
    ours: float | None
    unit: str
    kind: str  # one of KINDS
    note: str = ""

    @property
    def error(self) -> float | None:
        return None if None in (self.theirs, self.ours) else self.ours / self.theirs - 1


class Paper(NamedTuple):
    points: list[Point]
    constants: Constants
    quick: bool = False  # fewer points are asked for

    def row(self, point: Point, ours: float | None, kind: str = "predicted", note: str = "") -> Row:
        """Beside a published point; `predicted` only if neither it nor its like was fitted."""
        setting = f"{point.system}, {point.setting}, {point.gpus} GPUs, {point.metric}"
        if kind == "predicted" and point.name in fitted_on(self.constants, "follows"):
            kind = "follows"
        if kind == "predicted" and point.name in fitted_on(self.constants):
            kind = "fitted"
        return Row(point.figure, setting, float(point.value), ours, point.unit, kind, note)

    def of(self, figure: str) -> list[Point]:
        return [point for point in self.points if point.figure == figure]


def values(table: dict[str, Any]) -> dict[str, Any]:
    """Its constants alone."""
    return {
        name: value
        for name, value in table.items()
        if name not in ("source", "fitted_on", "follows")
    }


def fitted_on(constants: Constants, key: str = "fitted_on") -> set[str]:
    """The names of points; key: or `follows`."""
    return {name for table in constants.values() for name in table.get(key, ())}


def read_points(path: Path) -> list[Point]:
    """Of one CSV. UserError, which names the line, for what is no number above 0 or lacks its source."""
    points = []
    with path.open(newline="", encoding="utf-8") as file:
        lines = csv.reader(file)
        try:
            if (header := ",".join(next(lines, []))) != COLUMNS:
                raise UserError(f"its columns are {header}, not {COLUMNS}")
            for cells in lines:
                if len(cells) != len(Point._fields) - 1:
                    raise UserError(f"{len(cells)} cells, not {len(Point._fields) - 1}")
                points.append(point := Point(*cells, f"{path}:{lines.line_num}"))
                if not (point.label in LABELS and point.source and point.page):
                    raise UserError(
                        f"a number needs a source, a page and a label of {', '.join(LABELS)}"
                    )
                if not (0 < float(point.value) < float("inf") and 0 <= float(point.precision) < 1):
                    raise UserError(
                        f"{point.value}, precision {point.precision}: no number above 0"
                    )
        except (ValueError, csv.Error) as error:
            raise UserError(f"{path}:{lines.line_num}: {error}") from None
    return points


def known(point: Point, name: str, table: dict[str, Any]) -> Any:
    if name not in table:
        raise UserError(f"{point.where}: {name} is none of {', '.join(table)}")
    return table[name]


def read_constants(path: Path) -> Constants:
    """UserError for a table that says neither what it was fitted on nor where it is from."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    for name, table in tables.items():
        if not table.keys() & {"fitted_on", "source"}:
            raise UserError(f"{path}: [{name}] has neither fitted_on nor source")
    return tables


def sections_of(rows: list[Row]) -> list[str]:
    """Markdown, a table a figure; exact closed forms, and what isn't modelled, are a line below it."""
    lines = []
    for figure in dict.fromkeys(row.figure for row in rows):
        own = [row for row in rows if row.figure == figure]
        exact = [row for row in own if row.kind == "form" and row.theirs and abs(row.error) < 1e-9]
        shown = [row for row in own if row.kind != "not modelled" and row not in exact]
        lines += [f"## {figure}", "", *(table_of(shown) if shown else [])]
        lines += [f"{len(exact)} closed forms agree to the last digit.", ""] if exact else []
        left_out = [row for row in own if row.kind == "not modelled"]
        for why in dict.fromkeys(row.note for row in left_out):
            names = [
                f"{r.setting} {number(r.theirs, r.unit)}".strip() for r in left_out if r.note == why
            ]
            lines += [f"Not modelled: {'; '.join(names)} ({why})", ""]
    return lines


def table_of(rows: list[Row]) -> list[str]:
    """Of a figure. What rows share is said once, above it; a row names its kind and unit if they differ."""
    parts = [[*row.setting.split(", "), row.note] for row in rows]
    told = [own for own, row in zip(parts, rows, strict=True) if row.theirs is not None] or parts
    shared = [
        part for part in told[0] if part and len(rows) > 1 and all(part in own for own in told)
    ]
    kind = statistics.mode(row.kind for row in rows)
    unit = statistics.mode(row.unit for row in rows)
    columns = {
        "setting": [", ".join(part for part in own[:-1] if part not in shared) for own in parts],
        "theirs": [number(row.theirs, row.unit, unit) for row in rows],
        "ours": [number(row.ours, row.unit, unit) for row in rows],
        "error": ["" if row.error is None else f"{row.error:+.1%}" for row in rows],
        "kind": ["" if row.kind == kind else row.kind for row in rows],
        "note": ["" if row.note in shared else row.note for row in rows],
    }
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    above = ", ".join(
        [kind.capitalize() + " if no other kind is named" * ("kind" in columns), *shared, unit]
    )
    table = [[*columns], ["---"] * len(columns), *zip(*columns.values(), strict=True)]
    lines = [" | ".join(cell.replace("|", "\\|") for cell in cells) for cells in table]
    return [f"{above}. {errors(rows)}".strip(), "", *(line.rstrip(" |") for line in lines), ""]


def number(value: float | None, unit: str, usual: str = "") -> str:
    own_unit = f" {unit}" * (unit != usual)
    return "" if value is None else f"{value:{',.0f' if value > 999 else '.4g'}}{own_unit}"


def summary_of(rows: list[Row], constants: Constants) -> list[str]:
    """How far off all predicted rows are, which README quotes; how many rows of each kind there are."""
    kinds = ", ".join(f"{sum(row.kind == kind for row in rows)} {kind}" for kind in KINDS)
    chosen = sum(len(values(table)) for table in constants.values() if "fitted_on" in table)
    fitted = f"{chosen} constants were fitted on {len(fitted_on(constants))} points."
    return [errors(rows), "", f"Rows: {kinds}. {fitted}"]


def errors(rows: list[Row]) -> str:
    own = [abs(row.error) for row in rows if row.kind == "predicted" and row.error is not None]
    if not own:
        return ""
    return f"{len(own)} predicted rows: median error {statistics.median(own):.1%}, largest {max(own):.1%}."


def picture_of(rows: list[Row], path: Path) -> None:
    """The error of each row, the first on top."""
    both = [row for row in rows if row.error is not None][::-1]
    canvas = Figure(figsize=(9, 1.5 + 0.15 * len(both)), layout="constrained")
    axes = canvas.subplots()
    for kind in dict.fromkeys(row.kind for row in both):
        own = {number: 100 * row.error for number, row in enumerate(both) if row.kind == kind}
        axes.plot(own.values(), own.keys(), "o", label=f"{len(own)} {kind}")
    axes.set_yticks(range(len(both)), [f"{row.figure}: {row.setting}" for row in both], fontsize=6)
    axes.set_xlabel("ours against theirs, %")
    axes.axvline(0, color="black")
    axes.legend()
    canvas.savefig(path, dpi=90)


def command(
    name: str,
    doc: str,
    figures: dict[str, Callable[[Paper], list[Row]]],
    arguments: list[str],
    measure: Callable[[bool], None] | None = None,
) -> int:
    """Print a paper's table; with --write, docs/papers/NAME.md and .png, too. Returns a status.

    figures: what makes a figure's rows, or raises UserError for a point. measure: what --real does first.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figure", nargs="+", choices=figures, default=list(figures))
    parser.add_argument(
        "--published", type=Path, nargs="+", help="CSVs of the same form, instead of ours"
    )
    parser.add_argument("--quick", action="store_true", help="fewer points, within seconds")
    parser.add_argument("--write", action="store_true", help="docs/papers/NAME.md and .png, too")
    if measure:
        parser.add_argument("--real", action="store_true", help="measure on this machine first")
    chosen = parser.parse_args(arguments)
    if measure and chosen.real:
        measure(chosen.quick)
    try:
        files = chosen.published or sorted((ROOT / "published").glob(f"{name}_*.csv"))
        points = [point for file in files for point in read_points(file)]
        if unknown := [point for point in points if point.figure not in figures]:
            raise UserError(f"{unknown[0].where}: its figure is none of {', '.join(figures)}")
        paper = Paper(points, read_constants(ROOT / f"{name}.toml"), chosen.quick)
        rows = [row for figure in chosen.figure for row in figures[figure](paper)]
    except (OSError, UserError) as error:
        print(error, file=sys.stderr)
        return 2
    print(*(lines := [*summary_of(rows, paper.constants), "", *sections_of(rows)]), sep="\n")
    if chosen.write:
        DOCS.mkdir(parents=True, exist_ok=True)
        picture_of(rows, DOCS / f"{name}.png")
        (DOCS / f"{name}.md").write_text(
            "\n".join([f"# {doc}", *lines, f"![Errors]({name}.png)", ""])
        )
    return 0
