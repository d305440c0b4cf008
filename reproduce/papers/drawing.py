"""Draws rows as the papers do: outlined bars are published, filled ones simulated, hatched ones fitted.

A template names columns of a row, and {0}, {1} ... for the words of its setting: "{0} on {gpus} GPUs".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from reproduce.papers.tables import ROOT, Row, errors, read_constants

COLORS = ("#3c9d4e", "#2a78b8", "#e08a1e")
COLOR_OF = read_constants(ROOT / "prose" / "colors.toml")["parts"]
GREYS = ("#8a8a8a", "#b5b5b5", "#5f5f5f")  # for parts that aren't simulated
PALE = "#e6e6e6"
HATCHED = dict(facecolor=PALE, hatch="/////", linewidth=0.6)
CLAIMED = dict(color="#f6dc9a", zorder=0)
SIDES = ("published", "simulated")
FITTED = ("fitted", "follows")
TICKS = (-50, -20, -10, 0, 10, 20, 50, 200)  # percent, on the strip chart
USUAL = dict(group="", per=1, legend=[], second="simulated", even=None)  # even: y of a dotted line
Marks = dict[tuple[Row, str], str]  # (row, side) -> text
Colors = dict[str, str]  # part -> color
About = dict[str, Any]  # how to draw a figure, from reproduce/papers/prose: templates and words


def words(template: str, row: Row) -> str:
    return template.format(*row.setting.split(), **row._asdict())


def grouped(rows: Iterable[Row], template: str) -> dict[str, list[Row]]:
    """Group rows by their text, in order of first appearance."""
    groups = {}
    for row in rows:
        groups.setdefault(words(template, row), []).append(row)
    return groups


def draw(
    rows: list[Row], marks: Marks, published: str, claimed: list[float], about: About
) -> Figure:
    """Draw a figure's panels by the templates of `about`.

    published: the word for that side; claimed: values that span a shaded band.
    """
    about = {"part": about["bar"], **USUAL, **about}
    palettes = {True: iter(COLORS), False: iter(GREYS)}
    colors = {}
    for name, own in grouped(rows, about["part"]).items():
        other = palettes[any(row.simulated for row in own)]
        colors[name] = COLOR_OF.get(name) or next(other)
    several = len(colors) > 1
    handles = [Patch(color=color, label=name) for name, color in colors.items() if several]
    key = GREYS[2] if several else next(iter(colors.values()))
    if about["how"] == "bars" and any(row.published for row in rows):
        outline = Patch(fill=False, edgecolor=key, linewidth=1.5, label=f"outline: {published}")
        handles += [outline, Patch(color=key, label=f"filled: {about['second']}")]
    if about["how"] == "bars" and any(row.kind in FITTED for row in rows):
        handles.append(Patch(label="hatched: fitted", edgecolor=key, **HATCHED))
    if claimed:
        handles.append(Patch(label="claimed", **CLAIMED))
    handles += [Patch(fill=False, linewidth=0, label=text) for text in about["legend"]]
    panels = grouped(rows, about["panel"])
    widths = [len(grouped(own, about["group"])) for own in panels.values()]
    figure = Figure(figsize=(13, 4), dpi=100, layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False, width_ratios=widths)[0]
    all_axes[0].set_ylabel(about["y"])
    for axes, (title, own) in zip(all_axes, panels.items(), strict=True):
        DRAWN[about["how"]](axes, own, marks, colors, about)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(about["x"])
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(0, 1.2 * axes.dataLim.ymax)
        if about["even"]:
            axes.axhline(about["even"], color="black", linewidth=0.8, linestyle=":")
        if claimed:
            axes.axhspan(min(claimed), max(claimed), linewidth=2, **CLAIMED)
    columns = 8 if len(handles) < 8 else 5
    look = dict(frameon=False, fontsize=9, columnspacing=1.2, handlelength=1.6)
    figure.legend(handles=handles, ncols=columns, loc="outside upper center", **look)
    return figure


def look_of(row: Row, side: str, color: str) -> dict[str, Any]:
    """Return the style of a bar."""
    if side == "published":
        return dict(fill=False, edgecolor=color, linewidth=1.5)
    if row.kind in FITTED:
        return dict(edgecolor=color, **HATCHED)
    return dict(facecolor=color, edgecolor=color, linewidth=0.6)


def bars(axes: Axes, rows: list[Row], marks: Marks, colors: Colors, about: About) -> None:
    """Draw groups of bars. Each bar is a stack of its parts."""
    groups = grouped(rows, about["group"])
    if all(name.isdecimal() for name in groups):
        groups = dict(sorted(groups.items(), key=lambda group: int(group[0])))
    for place, members in enumerate(groups.values()):
        stacks = grouped(members, about["bar"]).values()
        beside = [(stack, side) for stack in stacks for side in SIDES if stack[0].at(side)]
        width = 0.86 / max(3, len(beside))
        for number, (stack, side) in enumerate(beside):
            left = place + (number - (len(beside) - 1) / 2) * width
            top = 0.0
            for row in stack:
                height = row.at(side) / about["per"]
                look = look_of(row, side, colors[words(about["part"], row)])
                axes.bar(left, height, 0.9 * width, bottom=top, **look)
                top += height
                mark = marks.get((row, side), "")
                look = dict(rotation=90, fontsize=8) if len(mark) > 1 else dict(fontsize=11)
                look |= dict(ha="center", textcoords="offset points")
                if mark and row == stack[-1]:
                    axes.annotate(mark, (left, top), (0, 2), va="bottom", **look)
                elif mark:  # inside its own part
                    look["bbox"] = dict(facecolor="white", linewidth=0, pad=0.6)
                    axes.annotate(mark, (left, top), (0, -4), va="top", **look)
    many = dict(fontsize=8, rotation=45, ha="right", rotation_mode="anchor")
    long = sum(map(len, groups)) > 60
    axes.set_xticks(range(len(groups)), groups, **many if long else {})


def lines(axes: Axes, rows: list[Row], marks: Marks, colors: Colors, about: About) -> None:
    """Draw lines over a number: dashed for published values, solid for simulated ones."""
    for name, members in grouped(rows, about["bar"]).items():
        for side, style in zip(SIDES, ("--", "-"), strict=True):
            own = [row for row in members if row.at(side)]
            x = [float(words(about["at"], row)) for row in own]
            color = GREYS[2] if side == "published" else colors[name]
            axes.plot(x, [row.at(side) for row in own], style, color=color)
            for place, row in zip(x, own, strict=True):
                star = (row, side) in marks
                look = dict(color=color, ms=15 if star else 8, zorder=3, mfcalt="white")
                hollow = "none" if side == "published" else "full"
                look["fillstyle"] = "left" if row.kind in FITTED and hollow == "full" else hollow
                axes.plot(place, row.at(side), "*" if star else "o", **look)


def strip_chart(strips: dict[str, list[Row]]) -> Figure:
    """Draw every error as a dot, with a row per strip. Beyond 20 percent the scale is logarithmic."""
    figure = Figure(figsize=(15, 1.2 + 0.46 * len(strips)), dpi=100, layout="constrained")
    axes = figure.subplots()
    for y, rows in enumerate(strips.values()):
        for place, row in enumerate(sorted(rows, key=lambda row: row.error)):
            look = dict(color=COLORS[row.how != "simulated"], ms=4.5)
            look["fillstyle"] = "none" if row.kind in FITTED else "full"
            # spread equal errors vertically, so that each dot shows
            axes.plot(100 * row.error, y + 0.7 * (0.618 * place % 1 - 0.5), "o", **look)
    axes.set_xscale("symlog", linthresh=20, linscale=0.7)
    axes.set_xticks(TICKS, [f"{tick:+d}" if tick else "0" for tick in TICKS])
    axes.set_xticks([], minor=True)
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_ylim(len(strips) - 0.4, -0.6)
    axes.set_yticks(range(len(strips)), strips)
    right = axes.secondary_yaxis("right")
    texts = []
    for rows in strips.values():
        own, _, trivial = errors(rows).partition("; ")
        texts.append(f"{own.partition(' (')[0]}\n{trivial}".rstrip())
    right.set_yticks(range(len(strips)), texts, fontsize=8)
    for each in (axes, right):
        each.spines[["top", "left", "right"]].set_visible(False)
        each.tick_params(axis="y", length=0)
    meaning = "error: simulated minus published, % of published (scale compressed beyond 20 %)"
    axes.set_xlabel(f"{meaning}\nright of 0: tokens/s and samples/s too high, seconds too long")
    kinds = "filled: predicted;   hollow: fitted, or follows from fitted points;   green: simulated"
    figure.suptitle(f"{kinds};   blue: a closed form, regression or search", fontsize=10)
    return figure


DRAWN = {"bars": bars, "lines": lines}
