"""Published points, the constants fitted on them, and the rows that compare them with the simulation.

Each figure has a CSV of published points, one per row. Constants are in TOML; each table names its source or
the points that it was fitted on. A row's kind is `fitted` (on this point), `follows` (computed from fitted
points or equal to one), `predicted` (neither), `seen` (predicted after the value was seen), `kept back` (its
value isn't entered), `implied` (nor is this one, but text or other bars imply it), `own setting` (nothing is
published) or `not modelled` (its note has the reason). A row also has how it was made, and the value of a
trivial predictor with the same fitted points. Rows are kept in docs/papers/rows; reproduce/papers/pages.py
makes the pages from them.
"""

from __future__ import annotations

import csv
import statistics
import sys
import tomllib
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import namedtuple
from collections.abc import Callable, Iterable
from functools import cache
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from runtime.errors import UserError

ROOT = Path(__file__).parent
DOCS = ROOT.parents[1] / "docs" / "papers"
COLUMNS = "figure,system,setting,gpus,metric,unit,value,precision,label,source,page,note"
WITHOUT_VALUE = {"BACK": "kept back", "TOLD": "implied"}  # label of a point -> kind of its row
Constants = dict[str, dict[str, Any]]  # table -> its keys
Figures = dict[str, Callable[["Paper"], list["Row"]]]  # name -> maker of its rows


class Point(namedtuple("Point", f"{COLUMNS},where", defaults=[""])):
    """A published number: the text of its CSV's columns, and its file and line.

    precision: relative. label: P (stated), FIG (digitized), CALC (computed), 2ND (from a third party) or RUN
    (measured here). Without a value: BACK (kept back for a blind check) or TOLD (implied by
    text or other bars).
    """

    @property
    def name(self) -> str:
        """The name by which `fitted_on` lists it."""
        return f"{self.figure}:{self.system}:{self.setting}@{self.gpus}:{self.metric}"


class Row(NamedTuple):
    """A line of docs/papers/rows/*.csv."""

    figure: str
    system: str
    setting: str
    gpus: str
    metric: str
    published: float | None  # None: not entered, or nothing is published
    simulated: float | None  # None: not modelled
    unit: str
    kind: str
    note: str = ""
    how: str = ""  # `simulated`, `closed form`, `regression` or `search`
    trivial: float | None = None  # the trivial predictor's value

    @property
    def error(self) -> float | None:
        return self.error_of("simulated")

    def error_of(self, side: str) -> float | None:
        """Return the relative error of `simulated` or `trivial`, if it and the published value are known."""
        value = self.at(side)
        return None if self.published is None or value is None else value / self.published - 1

    @property
    def devices(self) -> str:
        """For example `1 GPU` or `64 GPUs`; for this program's own points, `4 ranks`."""
        unit = "rank" if self.system == "nanoYATT" else "GPU"
        return f"{self.gpus} {unit}{'s' * (self.gpus != '1')}"

    @property
    def name(self) -> str:
        figure = f"figure {self.figure}" if self.figure.isdecimal() else self.figure
        return f"{figure}: {self.system}, {self.setting}, {self.devices}, {self.metric}"

    def at(self, side: str) -> float | None:
        """Return the value of `published` or `simulated`."""
        return self._asdict()[side]


class Paper(NamedTuple):
    points: list[Point]
    constants: Constants
    quick: bool = False  # --quick: fewer points
    every: bool = False  # --all: more points than the page shows

    def row(
        self,
        point: Point,
        simulated: float | None,
        note: str = "",
        how: str = "closed form",
        trivial: float | None = None,
    ) -> Row:
        """Return a point's row."""
        published = float(point.value) if point.value else None
        own = (published, simulated, point.unit, self._kind(point), note, how, trivial)
        return Row(*point[:5], *own)

    def _kind(self, point: Point) -> str:
        if point.label in WITHOUT_VALUE:
            return WITHOUT_VALUE[point.label]
        for kind in ("follows", "fitted_on"):
            if point.name in fitted_on(self.constants, kind):
                return kind.removesuffix("_on")
        return "seen" if point.figure in fitted_on(self.constants, "seen") else "predicted"

    def left_out(self, point: Point, why: str) -> Row:
        """Return the row of a point that isn't simulated."""
        return self.row(point, None, why, "")._replace(kind="not modelled")

    def of(self, figure: str) -> list[Point]:
        return [point for point in self.points if point.figure == figure]

    def fitted(self, table: str) -> list[Point]:
        """Return the points that a table's constants were fitted on, whatever points are asked for."""
        return [p for p in all_published() if p.name in self.constants[table]["fitted_on"]]


def values(table: dict[str, Any]) -> dict[str, Any]:
    """Return the constants of a table, without their sources."""
    sources = ("source", "fitted_on", "follows", "seen")
    return {name: value for name, value in table.items() if name not in sources}


def fitted_on(constants: Constants, key: str = "fitted_on") -> set[str]:
    """Return the names of all points that constants were fitted on; key `follows`: that follow from those.

    Key `seen`: figures that were simulated only after their values had been entered.
    """
    return {name for table in constants.values() for name in table.get(key, ())}


@cache
def all_published() -> list[Point]:
    return [p for path in sorted((ROOT / "published").glob("*.csv")) for p in read_points(path)]


def read_points(path: Path) -> list[Point]:
    """Read one CSV. Raises UserError, which names the line, unless each line is a point above 0."""
    points = []
    with path.open(newline="", encoding="utf-8") as file:
        lines = csv.DictReader(file, restval="")
        try:
            for cells in lines:
                point = Point(**cells, where=f"{path}:{lines.line_num}")
                known = point.label not in WITHOUT_VALUE or point.value
                if known and not 0 < float(point.value) < float("inf"):
                    raise ValueError(f"{point.value} isn't a number above 0")
                points.append(point)
        except (TypeError, ValueError, csv.Error) as error:
            raise UserError(f"{path}:{lines.line_num}: {error} (columns: {COLUMNS})") from None
    return points


def keep_measured(
    path: Path, what: tuple[str, ...], seconds: list[float], middle: float, source: str
) -> None:
    """Put a measured point into a CSV, replacing a point of the same name.

    what: its cells from figure to unit; middle: median or mean seconds; source: the measuring command.
    """
    points = {point.name: point for point in read_points(path)} if path.exists() else {}
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    precision = f"{(high - low) / middle:.3f}"
    note = f"{len(seconds)} steps"
    point = Point(*what, f"{middle:.3f}", precision, "RUN", source, "-", note)
    points[point.name] = point
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([COLUMNS.split(","), *(each[:-1] for each in points.values())])


def known(point: Point, name: str, table: dict[str, Any]) -> Any:
    if name not in table:
        raise UserError(f"{point.where}: {name} isn't one of {', '.join(table)}")
    return table[name]


def read_constants(path: Path) -> Constants:
    """Read a TOML file of constants."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write a CSV with numbers to six digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(Row._fields)
        for row in rows:
            lines.writerow(f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row)


def read_rows(path: Path) -> list[Row]:
    """Read the CSV that `write_rows` wrote."""
    rows = []
    with path.open(newline="", encoding="utf-8") as file:
        for cells in csv.DictReader(file):
            numbers = {}
            for name in ("published", "simulated", "trivial"):
                numbers[name] = float(cells[name]) if cells[name] else None
            rows.append(Row(**cells | numbers))
    return rows


def table_of(rows: list[Row], published: str = "published") -> list[str]:
    """Return a Markdown table. published: that column's header. A column with one value becomes a line."""
    names = ("figure", "system", "setting", "on", "metric", "kind", "how", published, "simulated")
    names += ("error, %", "trivial's", "note")
    table = []
    for row in rows:
        sides = [row.error_of(side) for side in ("simulated", "trivial")]
        both = ["" if error is None else f"{100 * error:+.1f}" for error in sides]
        what = (row.figure, row.system, row.setting, row.devices, f"{row.metric}, {row.unit}")
        values = (row.kind, row.how, number(row.published), number(row.simulated), *both, row.note)
        table.append([*what, *values])
    found = [{*column} - {""} for column in zip(*table, strict=True)]
    shared = [f"{names[n]}: {next(iter(found[n]))}" for n in range(1, 7) if len(found[n]) == 1]
    used = [len(each) > (1 if n < 7 else 0) for n, each in enumerate(found)]
    lines = [f"{'; '.join(shared)}.", ""] if shared else []
    for cells in (names, ["---"] * len(names), *table):
        shown = [cell.replace("|", "\\|") for cell in compress(cells, used)]
        lines.append(f"| {' | '.join(shown)} |")
    return [*lines, ""]


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value > 999 else f"{value:.4g}"


def percent(part: float, form: str = ".0f") -> str:
    return f"{100 * part:{form}} %"


def power_law(known: list[tuple[float, ...]]) -> Callable[..., float]:
    """Fit y = k * a**p * b**q ... to rows of (a, b, ..., y), by least squares of logarithms."""
    logs = np.log(np.array(known))
    inputs = np.column_stack([np.ones(len(logs)), logs[:, :-1]])
    powers, *_ = np.linalg.lstsq(inputs, logs[:, -1])
    return lambda *at: float(np.exp(powers @ [1.0, *np.log(at)]))


class Spread(NamedTuple):
    """Relative errors: their median and 90th percentile without sign, and the largest."""

    median: float
    ninth: float
    largest: float

    def __str__(self) -> str:
        return (
            f"median error {percent(self.median, '.1f')}, largest {percent(self.largest, '+.1f')}"
        )


def spread(own: Iterable[float]) -> Spread:
    own = [*own]
    return Spread(*np.percentile(np.abs(own), [50, 90]).tolist(), max(own, key=abs))


class Skill(NamedTuple):
    """How near predicted rows are, beside a trivial predictor with the same fitted points."""

    count: int
    simulated: Spread
    trivial: Spread
    closer: int  # rows in which the simulation is nearer


def skill(rows: Iterable[Row]) -> Skill | None:
    """Compare the predicted rows that have both errors; None without any."""
    own = [row for row in rows if row.kind == "predicted" and row.error is not None]
    both = [(row.error, row.error_of("trivial")) for row in own if row.trivial is not None]
    if not both:
        return None
    closer = sum(abs(ours) < abs(trivial) for ours, trivial in both)
    return Skill(len(both), *map(spread, zip(*both, strict=True)), closer)


def errors(rows: Iterable[Row]) -> str:
    """Summarize the errors of predicted rows, or of all rows if none is predicted; "" without any."""
    known = [row for row in rows if row.error is not None]
    own = [row for row in known if row.kind == "predicted"] or known
    if not own:
        return ""
    far = max(own, key=lambda row: abs(row.error))
    if not far.error:
        return f"{len(own)} {own[0].kind} points, all exact"
    text = f"{len(own)} {own[0].kind} points: {spread(row.error for row in own)} ({far.name})"
    if found := skill(own):
        text += f"; trivial predictor: {found.trivial}"
        text += f"; the prediction is nearer in {found.closer} of {found.count}"
    return text


def command(
    name: str, doc: str, figures: Figures, given: list[str], measure: Any = None, every: str = ""
) -> int:
    """Print a paper's rows; --write also writes docs/papers/rows/NAME.csv. Returns a status.

    figures: each makes a figure's rows or raises UserError; measure: called by --real, with the value of
    --quick; every: help text of --all.
    """
    others = "CSVs with the same columns, instead of reproduce/papers/published"
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    parser.set_defaults(all=False, real=False)
    parser.add_argument("--figure", nargs="+", choices=figures, default=list(figures))
    parser.add_argument("--published", type=Path, nargs="+", help=others)
    parser.add_argument("--quick", action="store_true", help="fewer points, within seconds")
    parser.add_argument("--write", action="store_true", help="also write docs/papers/rows")
    if every:
        parser.add_argument("--all", action="store_true", help=every)
    if measure:
        parser.add_argument("--real", action="store_true", help="measure on this machine first")
    chosen = parser.parse_args(given)
    if chosen.write and (chosen.published or chosen.quick or chosen.all):
        parser.error("--write works only without --published, --quick and --all")
    if chosen.real:
        measure(chosen.quick)
    try:
        files = chosen.published or sorted((ROOT / "published").glob(f"{name}_*.csv"))
        points = [point for file in files for point in read_points(file)]
        if unknown := [point for point in points if point.figure not in figures]:
            raise UserError(f"{unknown[0].where}: its figure isn't one of {', '.join(figures)}")
        constants = read_constants(ROOT / f"{name}.toml")
        paper = Paper(points, constants, chosen.quick, chosen.all)
        rows = [row for figure in chosen.figure for row in figures[figure](paper)]
    except (OSError, UserError) as error:
        print(error, file=sys.stderr)
        return 2
    print(errors(rows))
    for figure in dict.fromkeys(row.figure for row in rows):
        print(f"\n## {figure}\n", *table_of([r for r in rows if r.figure == figure]), sep="\n")
    if chosen.write:
        path = DOCS / "rows" / f"{name}.csv"
        before = read_rows(path) if path.exists() else []
        kept = [row for row in before if row.figure not in chosen.figure]
        order = list(figures)
        write_rows(path, sorted(rows + kept, key=lambda row: order.index(row.figure)))
    return 0
