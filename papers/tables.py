"""Published numbers beside ours: points, constants, rows, their table and their picture.

Published points are in one CSV a figure, a number a row; constants in TOML, each table with its source or the
points that it was fitted on: their rows are `fitted`. Rows that are made of these, or have the value of one,
are marked as `follows`, others are `predicted`; `form`: by a closed form, without controllers; `measured`: by
a run of the program; `not modelled`, with the reason.
"""

from __future__ import annotations

import csv
import statistics
import sys
import tomllib
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter, namedtuple
from collections.abc import Callable
from itertools import compress, groupby
from pathlib import Path
from typing import Any, NamedTuple

from runtime.errors import UserError

ROOT = Path(__file__).parent
DOCS = ROOT.parent / "docs" / "papers"
KINDS = ("fitted", "follows", "predicted", "form", "measured", "not modelled")
COLUMNS = "figure,system,setting,gpus,metric,unit,value,precision,label,source,page,note"
Constants = dict[str, dict[str, Any]]  # by table
Figures = dict[str, Callable[["Paper"], list["Row"]]]  # by name


class Point(namedtuple("Point", f"{COLUMNS},where", defaults=[""])):
    """A published number: the text of its CSV's columns, its file and line. precision: relative.

    label: P is stated, FIG digitised, CALC worked out, 2ND from others, RUN run here.
    """

    @property
    def name(self) -> str:
        """The name that `fitted_on` calls it by."""
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
        """The row of a point; `predicted` only if neither it nor its like was fitted."""
        setting = f"{point.system}, {point.setting}, {point.gpus} GPUs, {point.metric}"
        if kind == "predicted" and point.name in fitted_on(self.constants, "follows"):
            kind = "follows"
        if kind == "predicted" and point.name in fitted_on(self.constants):
            kind = "fitted"
        return Row(point.figure, setting, float(point.value), ours, point.unit, kind, note)

    def of(self, figure: str) -> list[Point]:
        return [point for point in self.points if point.figure == figure]


def values(table: dict[str, Any]) -> dict[str, Any]:
    """The constants of a table, without their sources."""
    sources = ("source", "fitted_on", "follows")
    return {name: value for name, value in table.items() if name not in sources}


def fitted_on(constants: Constants, key: str = "fitted_on") -> set[str]:
    """The names of points; key: or `follows`."""
    return {name for table in constants.values() for name in table.get(key, ())}


def read_points(path: Path) -> list[Point]:
    """Read one CSV. UserError, which names the line, for one that is no point of a number above 0."""
    points = []
    with path.open(newline="", encoding="utf-8") as file:
        lines = csv.DictReader(file, restval="")
        try:
            for cells in lines:
                point = Point(**cells, where=f"{path}:{lines.line_num}")
                if not 0 < float(point.value) < float("inf"):
                    raise ValueError(f"{point.value}: no number above 0")
                points.append(point)
        except (TypeError, ValueError, csv.Error) as error:
            raise UserError(f"{path}:{lines.line_num}: {error} (columns: {COLUMNS})") from None
    return points


def known(point: Point, name: str, table: dict[str, Any]) -> Any:
    if name not in table:
        raise UserError(f"{point.where}: {name} is none of {', '.join(table)}")
    return table[name]


def read_constants(path: Path) -> Constants:
    """Read a TOML, each table with what it was fitted on or where it is from."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def sections_of(rows: list[Row]) -> list[str]:
    """Markdown, a table a figure; exact closed forms, and what isn't modelled, are a line below it."""
    lines = []
    for figure in dict.fromkeys(row.figure for row in rows):
        own = [row for row in rows if row.figure == figure]
        exact = [row for row in own if row.kind == "form" and row.theirs and abs(row.error) < 1e-9]
        left_out = [row for row in own if row.kind == "not modelled"]
        shown = [row for row in own if row not in exact + left_out]
        lines += [f"## {figure}", "", *(table_of(shown) if shown else [])]
        lines += [f"{len(exact)} closed forms agree to the last digit.", ""] if exact else []
        for why, others in groupby(left_out, lambda row: row.note):
            settings = [f"{row.setting} {number(row.theirs, row.unit)}".strip() for row in others]
            lines += [f"Not modelled: {'; '.join(settings)} ({why})", ""]
    return lines


def table_of(rows: list[Row]) -> list[str]:
    """The table of a figure. What rows share is said once, above it, as are the usual kind and unit."""
    shared = shared_by(rows)
    kind = statistics.mode(row.kind for row in rows)
    unit = statistics.mode(row.unit for row in rows)
    head = ("setting", "theirs", "ours", "error", "kind", "note")
    table = []
    for row in rows:
        setting = ", ".join(part for part in row.setting.split(", ") if part not in shared)
        theirs = number(row.theirs, row.unit, unit)
        ours = number(row.ours, row.unit, unit)
        error = "" if row.error is None else f"{row.error:+.1%}"
        own_kind = "" if row.kind == kind else row.kind
        note = "" if row.note in shared else row.note
        table.append((setting, theirs, ours, error, own_kind, note))
    used = [any(column) for column in zip(*table, strict=True)]
    if "kind" in compress(head, used):
        kind += " if no other kind is named"
    above = ", ".join([kind.capitalize(), *shared, unit])
    lines = []
    for cells in (head, ["---"] * len(head), *table):
        cells = [cell.replace("|", "\\|") for cell in compress(cells, used)]
        lines.append(" | ".join(cells).rstrip(" |"))
    return [f"{above}. {errors(rows)}".strip(), "", *lines, ""]


def shared_by(rows: list[Row]) -> list[str]:
    """The parts of settings, and the note, that all published rows share; of one row nothing."""
    published = [row for row in rows if row.theirs is not None] or rows
    parts = [[*row.setting.split(", "), row.note] for row in published]
    if len(rows) == 1:
        return []
    everywhere = set(parts[0]).intersection(*parts)
    return [part for part in parts[0] if part and part in everywhere]


def number(value: float | None, unit: str, usual: str = "") -> str:
    """A number and its unit, if that isn't the usual one."""
    if value is None:
        return ""
    text = f"{value:,.0f}" if value > 999 else f"{value:.4g}"
    return text if unit == usual else f"{text} {unit}"


def summary_of(rows: list[Row], constants: Constants) -> list[str]:
    """The errors of all predicted rows, which README quotes; the rows of each kind."""
    counts = Counter(row.kind for row in rows)
    kinds = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS)
    chosen = sum(len(values(table)) for table in constants.values() if "fitted_on" in table)
    fitted = f"{chosen} constants were fitted on {len(fitted_on(constants))} points."
    return [errors(rows), "", f"Rows: {kinds}. {fitted}"]


def errors(rows: list[Row]) -> str:
    own = [abs(row.error) for row in rows if row.kind == "predicted" and row.error is not None]
    if not own:
        return ""
    return f"{len(own)} predicted rows: median error {statistics.median(own):.1%}, largest {max(own):.1%}."


def command(
    name: str, doc: str, figures: Figures, arguments: list[str], measure: Callable | None = None
) -> int:
    """Print a paper's table; with --write, docs/papers/NAME.md, too. Returns a status.

    figures: make a figure's rows, or raise UserError for a point. measure: --real calls it, with --quick.
    """
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--figure", nargs="+", choices=figures, default=list(figures))
    others = "CSVs of the same form, instead of ours"
    parser.add_argument("--published", type=Path, nargs="+", help=others)
    parser.add_argument("--quick", action="store_true", help="fewer points, within seconds")
    parser.add_argument("--write", action="store_true", help="docs/papers/NAME.md, too")
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
    lines = [*summary_of(rows, paper.constants), "", *sections_of(rows)]
    print(*lines, sep="\n")
    if chosen.write:
        (DOCS / f"{name}.md").write_text("\n".join([f"# {doc}", *lines, ""]))
    return 0
