"""Make docs/papers/*.md, their pictures and README.md of docs/papers/rows, without simulating.

    python papers/pages.py

What a paper claims, what was simulated, and why a point misses are words in papers/prose/*.toml. Every number
of the simulation is computed here, of the rows.
"""

from __future__ import annotations

import sys
import textwrap
import tomllib
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import quantiles
from typing import Any

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parent.parent))

from papers import own_runs
from papers.drawing import FITTED, SIDES, Marks, draw, grouped, strip_chart, words
from papers.tables import (
    DOCS,
    ROOT,
    Row,
    errors,
    number,
    percent,
    read_constants,
    read_rows,
    table_of,
)

PAGES = ("hybridflow", "rlhfuse", "wechat_yatt", "measured")
TIE = 0.02  # who is less behind is as good
APART = 0.05  # what is measured closer is as fast
CLOSE = 0.1  # so close a simulated gain agrees with the published one
Prose = dict[str, Any]  # papers/prose/NAME.toml, or one of its figures
Finding = tuple[str, Marks]  # a sentence, and what it marks in the picture


def agreement(what: str, cases: dict[str, tuple[str, str, bool]]) -> str:
    """Say in which cases what was published, and what was simulated, agree."""
    wrong = [f"{name}: {one} and {two}" for name, (one, two, agrees) in cases.items() if not agrees]
    text = f"The simulation agrees in {len(cases) - len(wrong)} of {len(cases)} cases on the {what}"
    return f"{text}, but not in (simulated last) {'; '.join(wrong)}." if wrong else f"{text}."


def best(
    rows: list[Row], case: str, named: str, what: str, of: Sequence[str] = (), least: bool = False
) -> Finding:
    """Is the best of each case the same? case, named: templates. of: systems, all if none is named."""
    choose = min if least else max
    marks = {}
    cases = {}
    for name, own in grouped(rows, case).items():
        compared = [r for r in own if r.error is not None and r.system in (of or [r.system])]
        if len(compared) > 1:
            first, second = (choose(compared, key=lambda row: row.at(side)) for side in SIDES)
            marks |= {(first, "published"): "★", (second, "simulated"): "★"}
            behind = abs(second.simulated / first.simulated - 1)
            second_words = f"{words(named, second)}, {percent(behind)} better"
            cases[name] = (words(named, first), second_words, behind < TIE)
    return agreement(f"{what}, give or take {percent(TIE)}", cases), marks


def gains(
    rows: list[Row], case: str, who: str, of: str, over: Sequence[str], what: str, how: str
) -> Finding:
    """How many times the rows `over` of each case has the row `of`? case, who: templates.

    how: max, of those is taken; min, too, where less is better; or their sum. Where they aren't simulated,
    what is published of them is taken.
    """
    marks = {}
    cases = {}
    found = {side: [] for side in SIDES}
    for name, own in grouped(rows, case).items():
        mine = [row for row in own if words(who, row) == of and row.error is not None]
        beside = [row for row in own if words(who, row) in over]
        for row in mine if beside else ():
            for side in SIDES:
                others = [other.at(side) or other.published for other in beside]
                ratio = row.at(side) / {"max": max, "min": min, "sum": sum}[how](others)
                found[side].append(ratio if how == "max" else 1 / ratio)
                marks[row, side] = f"×{found[side][-1]:.2f}"
            agrees = abs(found["simulated"][-1] / found["published"][-1] - 1) < CLOSE
            cases[name] = (marks[row, "published"], marks[row, "simulated"], agrees)
    ranges = [f"×{min(own):.2f} to ×{max(own):.2f} {side}" for side, own in found.items()]
    sentence = agreement(f"{what}, give or take {percent(CLOSE)}", cases)
    return f"{sentence} It is {' and '.join(ranges)}.", marks


def band(rows: list[Row], claimed: list[float]) -> str:
    """How many rows gain as much as claimed?"""
    own = [row.simulated for row in rows]
    more = sum(each < min(claimed) for each in own)
    less = sum(each > max(claimed) for each in own)
    text = f"Simulated it is {number(min(own))} to {number(max(own))}: of {len(own)} cells {more} gain more"
    return f"{text} than claimed, {less} less, {len(own) - more - less} as much."


def order(rows: list[Row], case: str) -> Finding:
    """Of predicted rows of a case whose published numbers differ, how many pairs are in the same order?"""
    right = []
    for own in grouped([row for row in rows if row.kind == "predicted"], case).values():
        for one, two in combinations(own, 2):
            if abs(one.published / two.published - 1) > APART:
                right.append((one.published < two.published) == (one.simulated < two.simulated))
    text = f"Of {len(right)} pairs that were measured more than {percent(APART)} apart"
    return f"{text}, {sum(right)} are in the same order.", {}


QUESTIONS = {"best": best, "gains": gains, "order": order}


def paragraph(*sentences: str) -> list[str]:
    text = " ".join(sentence.strip() for sentence in sentences if sentence)
    return [textwrap.fill(text, 110, break_long_words=False, break_on_hyphens=False), ""]


def rows_of(name: str, about: Prose, rows: list[Row]) -> list[Row]:
    """The rows of a figure, without those of systems that have a section of their own."""
    own = [row for row in rows if row.figure in about.get("rows", [name])]
    own = [row for row in own if row.system in about.get("systems", [row.system])]
    assert own, f"no rows of figure {name}: its paper's command makes them with --write"
    return [row for row in own if row.system not in about.get("apart", ())]


def section(
    page: str, name: str, about: Prose, published: str, rows: list[Row]
) -> tuple[list[str], Figure | None]:
    """A figure: what is claimed, whether the simulation agrees, the picture, what misses, the rows."""
    own = rows_of(name, about, rows)
    # of systems that stand apart, what is published is drawn
    apart = [r for r in rows if r.figure == name and r.system in about.get("apart", ())]
    shown = own + [row._replace(simulated=None) for row in apart]
    claims = about.get("claims")
    claimed = [row.published for row in rows if claims and row.setting.startswith(claims)]
    found = [(band(shown, claimed), {})] if claimed else []
    for question, asked in about.get("ask", {}).items():
        found.append(QUESTIONS[question.split("_")[0]](shown, **asked))
    lines = [f"## {about['title']}", "", *paragraph(about["claim"], *(text for text, _ in found))]
    figure = None
    if "draw" in about:
        marks = found[0][1] if found else {}
        figure = draw(shown, marks, published, claimed, about["draw"])
        lines += [f"![{about['title']}]({picture_of(page, name)})", ""]
    fitted = sum(row.kind in FITTED for row in own)
    count = f"{fitted} points were fitted, or follow from fitted ones (hatched)." if fitted else ""
    far = f"{errors(own)}." if errors(own) else ""
    without = grouped([row for row in own if row.kind == "not modelled"], "{note}").items()
    reasons = [f"{', '.join(grouped(each, '{system}'))} ({note})" for note, each in without]
    left_out = f"Not modelled: {'; '.join(reasons)}." if reasons else ""
    lines += paragraph(about.get("set_up", ""), count, far, about.get("misses", ""), left_out)
    lines += [f"<details><summary>The {len(own)} numbers</summary>", "", *table_of(own, published)]
    figures = " ".join(f'"{each}"' if " " in each else each for each in about.get("rows", [name]))
    return [*lines, "</details>", "", f"    python papers/{page}.py --figure {figures}", ""], figure


def own_gpus(page: str) -> list[str]:
    """What to type for points of a page on one's own GPUs, and what runs came to. See papers/own_runs.py."""
    lines = []
    for name, row in read_constants(own_runs.COMMANDS).items():
        if row["paper"] == page:
            lines += paragraph(f"**{name}** ({', '.join(row['points'])}).", row["assumed"])
            for line in row["lines"]:
                parts = textwrap.wrap(line, 100, break_long_words=False, break_on_hyphens=False)
                lines += ["    " + " \\\n      ".join(parts), ""]
            if found := own_runs.own_rows().get(name):
                numbers = [f"{number(found[each])} {each}" for each in (*SIDES, "measured")]
                lines += paragraph(f"{found['run']}: {', '.join(numbers)} ({found['unit']}).")
    if not lines:
        return []
    keep = "    python papers/own_runs.py NAME RUN [BASE]    # puts what runs came to beside the points"
    return ["## On your own GPUs", "", *lines, keep, ""]


def picture_of(page: str, name: str) -> str:
    return f"{page}_{name.replace(' ', '_')}.png"


def strips_of(prose: Prose, rows: list[Row]) -> dict[str, list[Row]]:
    """The rows with an error, by the text that they have in the strip chart."""
    strips = {}
    for name, about in prose["figures"].items():
        own = [row for row in rows_of(name, about, rows) if row.error is not None]
        for label, each in grouped(own, about.get("strip", "")).items():
            strips[f"{prose['short']}, {label}"] = each
    return strips


def main() -> None:
    strips = {}
    every = []
    index = []
    for page in PAGES:
        prose = tomllib.loads((ROOT / "prose" / f"{page}.toml").read_text(encoding="utf-8"))
        rows = read_rows(DOCS / "rows" / f"{page}.csv")
        strips |= strips_of(prose, rows)
        every += rows
        index.append(f"- [{prose['title']}]({page}.md): {errors(rows)}")
        lines = [f"# {prose['title']}", "", *paragraph(prose["intro"]), f"All {errors(rows)}.", ""]
        for name, about in prose["figures"].items():
            text, figure = section(page, name, about, prose["published"], rows)
            lines += text
            if figure:
                figure.savefig(DOCS / picture_of(page, name), metadata={"Software": None})
        lines += own_gpus(page)
        (DOCS / f"{page}.md").write_text("\n".join(lines), encoding="utf-8")
    order = sorted(strips.items(), key=lambda strip: strip[1][0].kind == "closed form")
    strip_chart(dict(order)).savefig(DOCS / "errors.png", metadata={"Software": None})
    own = [abs(row.error) for row in every if row.kind == "predicted" and row.error is not None]
    tenths = [percent(part) for part in quantiles(own, n=10, method="inclusive")]
    text = (ROOT / "prose" / "README.md").read_text(encoding="utf-8")
    filled = text.format(count=len(own), half=tenths[4], most=tenths[8], pages="\n".join(index))
    (DOCS / "README.md").write_text(filled, encoding="utf-8")


if __name__ == "__main__":
    main()
