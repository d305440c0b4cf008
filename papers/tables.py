"""What a paper published beside what comes out here: points, constants, rows, their table and their picture.

Published points are in one CSV a figure, a number a row; constants in TOML, each table of them with the points
that it was fitted on, or with its source. A row's kind says what its agreement is worth:

    fitted         the point was used to choose a constant
    predicted      it wasn't
    form           by a closed form, without the controllers
    measured       by a run of the program itself
    not modelled   with the reason
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

ROOT = Path(__file__).parent
DOCS = ROOT.parent / "docs" / "papers"
KINDS = ("fitted", "predicted", "form", "measured", "not modelled")


class Point(NamedTuple):
    """A published number. label: P stated, FIG digitised, CALC worked out, 2ND from a third party."""

    figure: str
    system: str
    setting: str
    gpus: str
    metric: str
    unit: str
    value: str
    precision: str  # relative
    label: str
    source: str
    page: str
    note: str

    @property
    def name(self) -> str:
        """By which `fitted_on` names it: FIGURE:SYSTEM:SETTING@GPUS:METRIC."""
        return f"{self.figure}:{self.system}:{self.setting}@{self.gpus}:{self.metric}"


class Row(NamedTuple):
    """theirs: as published, None if it isn't."""

    figure: str
    setting: str
    theirs: float | None
    ours: float | None
    unit: str
    kind: str
    note: str = ""

    @property
    def error(self) -> float | None:
        return None if None in (self.theirs, self.ours) else self.ours / self.theirs - 1


@dataclass
class Paper:
    """One paper's points and constants, and the options of its command."""

    name: str
    quick: bool = False
    points: list[Point] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)

    def row(self, point: Point, ours: float | None, kind: str = "predicted", note: str = "") -> Row:
        """Beside a published point; fitted if a constant was chosen by it."""
        fitted_on = {name for table in self.constants.values() for name in table.get("fitted_on", ())}
        setting = f"{point.system}, {point.setting}, {point.gpus} GPUs, {point.metric}"
        kind = "fitted" if kind == "predicted" and point.name in fitted_on else kind
        return Row(point.figure, setting, float(point.value), ours, point.unit, kind, note or point.note)

    def of(self, figure: str, **columns: str) -> list[Point]:
        """A figure's points, those with these columns alone."""
        chosen = [point for point in self.points if point.figure == figure]
        return [p for p in chosen if all(p._asdict()[name] == value for name, value in columns.items())]


def read_points(path: Path) -> list[Point]:
    """Of one CSV. ValueError, which names the line, for a row that lacks a column or a source."""
    points = []
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        if (header := tuple(next(rows, ()))) != Point._fields:
            raise ValueError(f"{path}:1: its columns are {','.join(header)}, not {','.join(Point._fields)}")
        for cells in rows:
            if len(cells) != len(header):
                raise ValueError(f"{path}:{rows.line_num}: {len(cells)} cells, not {len(header)}")
            point = Point(*cells)
            if not (point.label and point.source and point.page):
                raise ValueError(f"{path}:{rows.line_num}: a number needs a label, a source and a page")
            try:
                float(point.value), float(point.precision)
            except ValueError as error:
                raise ValueError(f"{path}:{rows.line_num}: {error}") from None
            points.append(point)
    return points


def read_constants(path: Path) -> dict[str, Any]:
    """Tables of constants. ValueError if one says neither what it was fitted on nor where it is from."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    for name, table in tables.items():
        if not ("fitted_on" in table or "source" in table):
            raise ValueError(f"{path}: [{name}] has neither fitted_on nor source")
    return tables


def table_of(rows: Iterable[Row]) -> list[str]:
    """Markdown, by figure."""
    lines = ["| figure | setting | theirs | ours | error | kind |", "|---|---|--:|--:|--:|---|"]
    for row in rows:
        numbers = ["" if value is None else f"{value:,.4g} {row.unit}" for value in (row.theirs, row.ours)]
        error = "" if row.error is None else f"{row.error:+.1%}"
        cells = (row.figure, row.setting, *numbers, error, row.kind + (f": {row.note}" if row.note else ""))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def summary_of(rows: list[Row], constants: dict[str, Any]) -> list[str]:
    """How many rows of each kind, and how far off the predicted ones are, by figure."""
    counts = [f"{sum(row.kind == kind for row in rows)} {kind}" for kind in KINDS]
    fitted = {name for table in constants.values() for name in table.get("fitted_on", ())}
    chosen = [k for t in constants.values() if "fitted_on" in t for k in t if k not in ("fitted_on", "source")]
    lines = [f"Rows: {', '.join(counts)}. {len(chosen)} constants were fitted on {len(fitted)} points."]
    for figure in dict.fromkeys(row.figure for row in rows):
        errors = [abs(r.error) for r in rows if (r.figure, r.kind) == (figure, "predicted") and r.error is not None]
        if errors:
            numbers = f"median error {statistics.median(errors):.1%}, largest {max(errors):.1%}"
            lines.append(f"- {figure}: {len(errors)} predicted, {numbers}")
    return lines


def picture_of(rows: list[Row], path: Path) -> None:
    """Theirs and ours side by side, a panel a figure."""
    shown = [row for row in rows if row.error is not None]
    figures = list(dict.fromkeys(row.figure for row in shown))
    size = (12, 3.2 * len(figures))
    canvas, panels = pyplot.subplots(len(figures), 1, figsize=size, squeeze=False, layout="constrained")
    for figure, (panel,) in zip(figures, panels, strict=True):
        own = [row for row in shown if row.figure == figure]
        for offset, label, values in ((-0.2, "theirs", [r.theirs for r in own]), (0.2, "ours", [r.ours for r in own])):
            panel.bar([number + offset for number in range(len(own))], values, 0.4, label=label)
        panel.set_xticks(range(len(own)), [row.setting for row in own], rotation=60, ha="right", fontsize=6)
        panel.set(title=figure, ylabel=own[0].unit)
        panel.legend()
    canvas.savefig(path, dpi=90)
    pyplot.close(canvas)


def command(name: str, doc: str, figures: dict[str, Callable[[Paper], list[Row]]], arguments: list[str]) -> int:
    """A paper's command: print its table; with --write, docs/papers/NAME.md and .png, too. Returns a status."""
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=how)
    parser.add_argument("--figure", nargs="+", choices=figures, default=list(figures))
    parser.add_argument("--published", type=Path, nargs="+", help="CSVs of the same form, instead of ours")
    parser.add_argument("--quick", action="store_true", help="fewer points, within seconds")
    parser.add_argument("--write", action="store_true", help="docs/papers/NAME.md and .png, too")
    chosen = parser.parse_args(arguments)
    try:
        files = chosen.published or sorted((ROOT / "published").glob(f"{name}_*.csv"))
        points = [point for file in files for point in read_points(file)]
        paper = Paper(name, chosen.quick, points, read_constants(ROOT / f"{name}.toml"))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    rows = [row for figure in chosen.figure for row in figures[figure](paper)]
    lines = [*summary_of(rows, paper.constants), "", *table_of(rows)]
    print(*lines, sep="\n")
    if chosen.write:
        DOCS.mkdir(parents=True, exist_ok=True)
        picture_of(rows, DOCS / f"{name}.png")
        head = [f"# {doc.splitlines()[0]}", "", f"Made by `python papers/{name}.py --write`.", ""]
        text = "\n".join([*head, *lines, "", f"![Theirs and ours]({name}.png)", ""])
        (DOCS / f"{name}.md").write_text(text, encoding="utf-8")
    return 0
