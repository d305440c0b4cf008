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
from papers.drawing import FITTED, FORMULA, SIDES, Marks, draw, grouped, strip_chart, words
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
TIE = 0.02  # who is less ahead, published and simulated, is as good
APART = 0.05  # what is measured closer is as fast
PLACED = ("12", "13")  # figures of placements
CLOSE = 0.1  # so close a simulated gain agrees with the published one
Prose = dict[str, Any]  # papers/prose/NAME.toml, or one of its figures
Finding = tuple[list[str], Marks]  # sentences, and what they mark in the picture


def agreement(what: str, cases: dict[str, tuple[str, bool, bool]]) -> list[str]:
    """Say how often `what` is so. cases: the words of both sides, if it is so, if a point is predicted."""
    fitted = [agrees for _, agrees, predicted in cases.values() if not predicted]
    wrong = [f"{name} ({both})" for name, (both, ok, new) in cases.items() if new and not ok]
    count = len(cases) - len(fitted)
    sentences = [f"{what} in {count - len(wrong)} of {count} predicted cases."]
    sentences += [f"Not so: {'; '.join(wrong)}."] if wrong else []
    return sentences + ([f"Where fitted, in {sum(fitted)} of {len(fitted)}."] if fitted else [])


def best(
    rows: list[Row], case: str, named: str, what: str, of: Sequence[str] = (), least: bool = False
) -> Finding:
    """Is the best of each case the same? case, named: templates. of: systems, all if none is named."""
    choose = min if least else max
    marks = {}
    cases = {}
    for name, own in grouped(rows, case).items():
        compared = [r for r in own if r.error is not None and r.system in (of or [r.system])]
        if len(compared) < 2:
            continue
        first, second = (choose(compared, key=lambda row: row.at(side)) for side in SIDES)
        marks |= {(first, "published"): "★", (second, "simulated"): "★"}
        ratios = [first.at(side) / second.at(side) for side in SIDES]
        leads = [max(ratio, 1 / ratio) - 1 for ratio in ratios]
        texts = [words(named, each) for each in (first, second)]
        both = f"{texts[0]} {percent(leads[0])} ahead of {texts[1]}; "
        both += f"simulated: {texts[1]} {percent(leads[1])} ahead"
        predicted = any(row.kind == "predicted" for row in compared)
        cases[name] = (both, max(leads) < TIE, predicted)
    return agreement(f"The simulation names the {what}", cases), marks


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
            both = "; ".join(f"{side} {marks[row, side]}" for side in SIDES)
            predicted = any(each.kind == "predicted" for each in (row, *beside))
            cases[name] = (both, agrees, predicted)
    sentences = agreement(f"The {what} is within {percent(CLOSE)} of the published", cases)
    ranges = [f"×{min(own):.2f} to ×{max(own):.2f} {side}" for side, own in found.items()]
    return [*sentences, f"All are {' and '.join(ranges)}."], marks


def band(rows: list[Row], claimed: list[float]) -> str:
    """How many rows gain as much as claimed?"""
    own = [row.simulated for row in rows]
    more = sum(each < min(claimed) for each in own)
    less = sum(each > max(claimed) for each in own)
    text = f"Simulated it is {min(own):.2f} to {max(own):.2f}. Of {len(own)} settings {more} come out below"
    return f"{text} what is claimed, {len(own) - more - less} as claimed, {less} above."


def order(rows: list[Row], case: str, of: Sequence[str] = ()) -> Finding:
    """Of predicted rows of a case whose published numbers differ, how many pairs are in the same order?"""
    right = []
    compared = [r for r in rows if r.kind == "predicted" and r.system in (of or [r.system])]
    for own in grouped(compared, case).values():
        for one, two in combinations(own, 2):
            if abs(one.published / two.published - 1) > APART:
                right.append((one.published < two.published) == (one.simulated < two.simulated))
    pairs = f"{len(right)} predicted pairs that are more than {percent(APART)} apart"
    return [f"{sum(right)} of {pairs} are in the same order."], {}


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
) -> tuple[list[str], Figure | None, list[str]]:
    """A figure: what is claimed, whether the simulation agrees, the picture, what misses, the rows.

    Also returns the sentences that say whether it agrees.
    """
    own = rows_of(name, about, rows)
    # of systems that stand apart, what is published is drawn
    apart = [r for r in rows if r.figure == name and r.system in about.get("apart", ())]
    shown = own + [row._replace(simulated=None) for row in apart]
    claims = about.get("claims")
    claimed = [row.published for row in rows if claims and row.setting.startswith(claims)]
    sentences = [band(shown, claimed)] if claimed else []
    marks = {}
    for question, asked in about.get("ask", {}).items():
        found, own_marks = QUESTIONS[question.split("_")[0]](shown, **asked)
        sentences += found
        marks |= own_marks
    lines = [f"## {about['title']}", "", *paragraph(about["claim"], *sentences)]
    figure = None
    if "draw" in about:
        figure = draw(shown, marks, published, claimed, about["draw"])
        lines += [f"![{about['title']}]({picture_of(page, name)})", ""]
    fitted = sum(row.kind in FITTED for row in own)
    count = f"Points that were fitted, or follow from fitted ones: {fitted}." if fitted else ""
    parts = grouped(own, about.get("apiece", "")).items()
    far = [f"{part}{errors(each)}." for part, each in parts if errors(each)]
    without = grouped([row for row in own if row.kind == "not modelled"], "{note}").items()
    template = about.get("left_out", "{system}")
    reasons = [
        f"{', '.join(grouped(each, template))} ({note})" for note, each in without if template
    ]
    left_out = f"Not simulated: {'; '.join(reasons)}." if reasons else ""
    lines += paragraph(about.get("set_up", ""), count, *far, about.get("misses", ""), left_out)
    listed = [row._replace(note="") if row.kind == "not modelled" else row for row in own]
    lines += [
        f"<details><summary>The {len(own)} numbers</summary>",
        "",
        *table_of(listed, published),
    ]
    figures = " ".join(f'"{each}"' if " " in each else each for each in about.get("rows", [name]))
    lines += ["</details>", "", f"    python papers/{page}.py --figure {figures}", ""]
    return lines, figure, sentences


def own_gpus(page: str, rows: list[Row]) -> list[str]:
    """What to type for points of a page on one's own GPUs, and what runs came to. See papers/own_runs.py."""
    points = {f"{r.figure}:{r.system}:{r.setting}@{r.gpus}:{r.metric}": r for r in rows}
    lines = []
    for name, about in read_constants(own_runs.COMMANDS).items():
        if about["paper"] != page:
            continue
        found = [points[each] for each in about["points"]]
        beside = "; ".join(f"{row.name} ({number(row.published)} {row.unit})" for row in found)
        lines += paragraph(f"**{name}** compares with {beside}.", about["assumed"])
        folders = " ".join(["RUN", "BASE"][: len(about["lines"])])
        for line in (*about["lines"], f"python papers/own_runs.py {name} {folders}"):
            parts = textwrap.wrap(line, 100, break_long_words=False, break_on_hyphens=False)
            code = "    " + " \\\n      ".join(parts)
            lines += [code, ""] if code not in lines else []
        if found := own_runs.own_rows().get(name):
            numbers = [f"{number(found[each])} {each}" for each in (*SIDES, "measured")]
            lines += paragraph(f"{found['run']}: {', '.join(numbers)} ({found['unit']}).")
    text = (ROOT / "prose" / "own_gpus.md").read_text(encoding="utf-8")
    return [*text.splitlines(), "", *lines] if lines else []


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
    said = {}  # whether it agrees, by page and figure
    for page in PAGES:
        prose = tomllib.loads((ROOT / "prose" / f"{page}.toml").read_text(encoding="utf-8"))
        rows = read_rows(DOCS / "rows" / f"{page}.csv")
        strips |= strips_of(prose, rows)
        every += rows
        index.append(f"- [{prose['title']}]({page}.md): {prose['of']}{errors(rows)}")
        all_errors = f"All {errors(rows)}{prose['which']}."
        lines = [f"# {prose['title']}", "", *paragraph(prose["intro"]), all_errors, ""]
        for name, about in prose["figures"].items():
            text, figure, sentences = section(page, name, about, prose["published"], rows)
            lines += text
            said[f"{page} {name}"] = " ".join(sentences[:1])
            if figure:
                figure.savefig(DOCS / picture_of(page, name), metadata={"Software": None})
        lines += own_gpus(page, rows)
        (DOCS / f"{page}.md").write_text("\n".join(lines), encoding="utf-8")
    order = sorted(strips.items(), key=lambda strip: FORMULA in strip[0])
    strip_chart(dict(order)).savefig(DOCS / "errors.png", metadata={"Software": None})
    own = [abs(row.error) for row in every if row.kind == "predicted" and row.error is not None]
    tenths = [percent(part, ".1f") for part in quantiles(own, n=10, method="inclusive")]
    counts = dict(count=len(own), half=tenths[4], most=tenths[8])
    counts["without"] = sum(row.kind == "not modelled" for row in every)
    placed = [row for row in every if row.figure in PLACED]
    places = grouped(placed, "{system}") | grouped(placed, "{system} on {gpus}")
    off = {name: errors(each).split(": ")[1].split(" (")[0] for name, each in places.items()}
    text = (ROOT / "prose" / "README.md").read_text(encoding="utf-8")
    filled = text.format(pages="\n".join(index), said=said, off=off, **counts)
    (DOCS / "README.md").write_text(filled, encoding="utf-8")


if __name__ == "__main__":
    main()
