"""Pictures of rows as the papers draw them: published hollow, simulated full, hatched where fitted.

A template has columns of a row, and {0}, {1} ... for the words of its setting: "{0} on {gpus} GPUs".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from papers.tables import Row

COLORS = ("#3c9d4e", "#2a78b8", "#e08a1e", "#7d62a8", "#c0571a", "#8fce9a")
GREYS = ("#8a8a8a", "#b5b5b5", "#5f5f5f")  # of what isn't simulated
PALE = "#e6e6e6"
CLAIMED = dict(color="#f2c14e", alpha=0.5)
SIDES = ("published", "simulated")
FITTED = ("fitted", "follows")
TICKS = (-70, -40, -20, -10, 0, 10, 20, 40, 100, 200)  # of the strip chart, per cent


class Shown(NamedTuple):
    """What a picture shows. marks: texts above bars, by row and side. published: the word for it."""

    rows: list[Row]
    marks: dict[tuple[Row, str], str]
    legend: str  # what the marks are
    published: str
    claimed: list[float]  # a band


def words(template: str, row: Row) -> str:
    return template.format(*row.setting.split(), **row._asdict())


def grouped(rows: Iterable[Row], template: str) -> dict[str, list[Row]]:
    """The rows by their text, in the order in which texts appear."""
    groups = {}
    for row in rows:
        groups.setdefault(words(template, row), []).append(row)
    return groups


def colors_of(rows: list[Row], template: str) -> dict[str, str]:
    """By text: colours for what is simulated, greys for the rest."""
    names = grouped([row for row in rows if row.simulated], template)
    rest = [name for name in grouped(rows, template) if name not in names]
    return dict(zip(names, COLORS, strict=False)) | dict(zip(rest, GREYS, strict=False))


def panels_of(
    shown: Shown, colors: dict[str, str], panel: str, x: str, y: str, group: str = ""
) -> tuple[Figure, list[tuple[Axes, list[Row]]]]:
    """An empty picture, with a legend, and its panels with their rows; one is as wide as it has groups."""
    panels = grouped(shown.rows, panel)
    widths = [len(grouped(own, group)) for own in panels.values()]
    figure = Figure(figsize=(13, 4), dpi=100, layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False, width_ratios=widths)[0]
    all_axes[0].set_ylabel(y)
    handles = [Patch(color=color, label=name) for name, color in colors.items()]
    if any(row.published for row in shown.rows):
        handles += [
            Patch(fill=False, label=shown.published),
            Patch(color="black", label="simulated"),
        ]
    if any(row.kind in FITTED for row in shown.rows):
        handles.append(Patch(label="simulated, fitted", facecolor=PALE, hatch="/////"))
    for axes, title in zip(all_axes, panels, strict=True):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(x)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.2)
        if shown.claimed:
            axes.axhspan(min(shown.claimed), max(shown.claimed), linewidth=2, **CLAIMED)
    if shown.claimed:
        handles.append(Patch(label="claimed", **CLAIMED))
    if shown.legend:
        handles.append(Patch(fill=False, linewidth=0, label=shown.legend))
    look = dict(frameon=False, fontsize=9, columnspacing=1.2, handlelength=1.6)
    figure.legend(handles=handles, ncols=8, loc="outside upper center", **look)
    return figure, list(zip(all_axes, panels.values(), strict=True))


def look_of(row: Row, side: str, color: str) -> dict[str, Any]:
    """How a bar is drawn."""
    if side == "published":
        return dict(fill=False, edgecolor=color, linewidth=1.5)
    if row.kind in FITTED:
        return dict(facecolor=PALE, edgecolor=color, hatch="/////", linewidth=0.6)
    return dict(facecolor=color, edgecolor=color, linewidth=0.6)


def bars(
    shown: Shown, group: str, bar: str, part: str = "", per: float = 1.0, **how: str
) -> Figure:
    """Draw bars in groups, by templates. part: of what a bar is a stack of. per: a unit of y."""
    colors = colors_of(shown.rows, part or bar)
    figure, panels = panels_of(shown, colors, group=group, **how)
    for axes, own in panels:
        groups = grouped(own, group)
        for place, members in enumerate(groups.values()):
            pairs = [(stack, side) for stack in grouped(members, bar).values() for side in SIDES]
            beside = [(stack, side) for stack, side in pairs if stack[0].at(side)]
            width = 0.86 / max(4, len(beside))
            for number, (stack, side) in enumerate(beside):
                left = place + (number - (len(beside) - 1) / 2) * width
                top = 0.0
                for row in stack:
                    look = look_of(row, side, colors[words(part or bar, row)])
                    axes.bar(left, row.at(side) / per, 0.9 * width, bottom=top, **look)
                    top += row.at(side) / per
                mark = shown.marks.get((stack[-1], side), "")
                look = dict(ha="center", va="bottom", fontsize=11 if len(mark) == 1 else 7.5)
                axes.annotate(mark, (left, top), rotation=90 if len(mark) > 1 else 0, **look)
        size = 9 if len(panels) * len(groups) < 20 else 7
        axes.set_xticks(range(len(groups)), groups, fontsize=size)
    return figure


def lines(shown: Shown, at: str, line: str, **how: str) -> Figure:
    """Draw lines over the number `at`, by templates; a point with a mark is a star."""
    colors = colors_of(shown.rows, line)
    figure, panels = panels_of(shown, colors, **how)
    for axes, own in panels:
        for name, members in grouped(own, line).items():
            for side, style in zip(SIDES, ("--", "-"), strict=True):
                rows = [row for row in members if row.at(side)]
                points = [(float(words(at, row)), row.at(side)) for row in rows]
                for row, point in zip(rows, points, strict=True):
                    fill = look_of(row, side, colors[name]).get("facecolor", "white")
                    star = (row, side) in shown.marks
                    look = dict(color=colors[name], mfc=fill, ms=15 if star else 7, zorder=3)
                    axes.plot(*point, "*" if star else "o", **look)
                axes.plot(*zip(*points, strict=True) or ((), ()), style, color=colors[name])
        axes.set_ylim(bottom=0)
    return figure


def strip_chart(strips: dict[str, list[Row]]) -> Figure:
    """Draw every error, a line of dots for each strip; beyond 20 per cent the scale is logarithmic."""
    figure = Figure(figsize=(13, 1 + 0.45 * len(strips)), dpi=100, layout="constrained")
    axes = figure.subplots()
    for y, rows in enumerate(strips.values()):
        for place, row in enumerate(sorted(rows, key=lambda row: row.error)):
            color = GREYS[0] if row.kind == "closed form" else COLORS[0]
            look = dict(color=color, mfc="none" if row.kind in FITTED else color, ms=5)
            axes.plot(100 * row.error, y + 0.12 * (place % 5 - 2), "o", **look)
    axes.set_xscale("symlog", linthresh=20, linscale=0.7)
    axes.set_xticks(TICKS, [f"{tick:+d} %" for tick in TICKS])
    axes.set_xticks([], minor=True)
    axes.axvspan(-10, 10, color=PALE, zorder=0)
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_yticks(range(len(strips)), strips, fontsize=8.5)
    axes.set_ylim(len(strips) - 0.4, -0.6)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.set_xlabel("simulated over published")
    kinds = "full: predicted; hollow: fitted, or it follows from fitted ones; grey: a closed form"
    axes.set_title(f"{kinds}, without controllers", fontsize=10, loc="left")
    return figure


DRAWN = {"bars": bars, "lines": lines}
