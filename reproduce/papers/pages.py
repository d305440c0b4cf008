"""Make the pages, README and pictures in docs/papers from docs/papers/rows, without simulating.

    python reproduce/papers/pages.py

reproduce/papers/prose holds the texts: claims of the papers, what was simulated, and why points miss. All
numbers of the simulation are computed here, from the rows, beside a trivial predictor's.
"""

from __future__ import annotations

import sys
import textwrap
import tomllib
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[2]))

from reproduce.papers import own_runs
from reproduce.papers.drawing import (
    FITTED,
    SIDES,
    Marks,
    draw,
    grouped,
    strip_chart,
    words,
)
from reproduce.papers.tables import (
    DOCS,
    ROOT,
    WITHOUT_VALUE,
    Row,
    errors,
    number,
    percent,
    read_constants,
    read_rows,
    skill,
    spread,
    table_of,
)

PAGES = ("hybridflow", "rlhfuse", "wechat_yatt", "measured")
TIE = 0.02  # a smaller lead, published and simulated, counts as a tie
FORMS = (".1f", ".1f", "+.1f")  # a median, a 90th percentile, the largest error
APART = 0.05  # pairs whose published numbers are closer aren't compared
Prose = dict[str, Any]  # reproduce/papers/prose/NAME.toml, or one of its figures


class Finding(NamedTuple):
    """The result of a question about a figure's rows."""

    sentences: list[str]
    marks: Marks  # for the picture


def agreement(what: str, cases: dict[str, tuple[str, bool, bool]], trivial: str) -> list[str]:
    """Count the predicted cases in which `what` holds, beside a trivial predictor.

    cases: (text of both sides, whether the simulation is right, whether the trivial predictor is).
    """
    wrong = [f"{name} ({both})" for name, (both, ok, _) in cases.items() if not ok]
    known = sum(ok for *_, ok in cases.values())
    right = len(cases) - len(wrong)
    text = f"{what} in {right} of {len(cases)} predicted cases; {trivial}: in {known}."
    return [text, *([f"Exceptions: {'; '.join(wrong)}."] if wrong else [])]


def best(
    rows: list[Row],
    case: str,
    named: str,
    what: str,
    trivial: str,
    of: Sequence[str] = (),
    least: bool = False,
) -> Finding:
    """Ask whether the best of each case is the same. case, named: templates. of: systems; default: all.

    trivial: what the trivial predictor calls the best of every case. least: less is better.
    """
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
        both = f"published: {texts[0]} {percent(leads[0])} ahead of {texts[1]}; "
        both += f"simulated: {texts[1]} {percent(leads[1])} ahead"
        if any(row.kind == "predicted" for row in compared):
            guess = [row for row in compared if words(named, row) == trivial]
            near = [
                max(g.published / first.published, first.published / g.published) for g in guess
            ]
            cases[name] = (both, max(leads) < TIE, bool(near) and near[0] < 1 + TIE)
    text = f"The prediction finds the {what}"
    return Finding(agreement(text, cases, f"`{trivial}` is it"), marks)


def gains(
    rows: list[Row], case: str, who: str, of: str, over: Sequence[str], what: str, constant: float
) -> Finding:
    """Ask how near the gain of the row `of` over the rows `over` is in each case. case, who: templates.

    Seconds of several rows are added. constant: the trivial predictor's gain, in every case.
    """
    marks = {}
    found = []
    errors = []
    for own in grouped(rows, case).values():
        mine = [row for row in own if words(who, row) == of and row.error is not None]
        compared = [row for row in own if words(who, row) in over]
        for row in mine if compared else ():
            ratios = [row.at(side) / sum(other.at(side) for other in compared) for side in SIDES]
            ratios = [ratio if row.metric == "throughput" else 1 / ratio for ratio in ratios]
            marks |= {
                (row, side): f"×{ratio:.2f}" for side, ratio in zip(SIDES, ratios, strict=True)
            }
            found.append(ratios)
            if any(each.kind == "predicted" for each in (row, *compared)):
                published, simulated = ratios
                errors.append((simulated / published - 1, constant / published - 1))
    ours, theirs = map(spread, zip(*errors, strict=True))
    closer = sum(abs(one) < abs(other) for one, other in errors)
    ranges = [f"×{min(own):.2f} to ×{max(own):.2f}" for own in zip(*found, strict=True)]
    text = f"The {what}, {ranges[0]} as published and {ranges[1]} simulated: {ours}"
    text += f"; a constant ×{constant}: {theirs}"
    text += f"; the prediction is nearer in {closer} of {len(errors)} predicted cases."
    return Finding([text], marks)


def band(rows: list[Row], claimed: list[float]) -> Finding:
    """Ask how many rows save as much as claimed."""
    own = [row.simulated for row in rows]
    more = sum(each < min(claimed) for each in own)
    less = sum(each > max(claimed) for each in own)
    same = len(own) - more - less
    text = f"The simulated ratio is {min(own):.2f} to {max(own):.2f}. It beats the claim in {more}"
    rest = f"of {len(own)} settings, matches it in {same} and falls short in {less}."
    return Finding([f"{text} {rest}"], {})


def saved(rows: list[Row], case: str, what: str) -> Finding:
    """Ask how much time rows save whose numbers are ratios of times. case: a template."""
    texts = []
    for name, own in grouped(rows, case).items():
        least, most = (1 - end(row.simulated for row in own) for end in (max, min))
        texts.append(f"{percent(least, '.1f')} to {percent(most, '.1f')} {name}")
    return Finding([f"Simulated {what}: {', '.join(texts)}."], {})


def order(rows: list[Row], case: str, trivial: Sequence[str] = ()) -> Finding:
    """Ask how many pairs of predicted rows are in the published order. case: a template.

    trivial: the systems, best first, as the trivial predictor has them everywhere; without it, no others.
    """
    right = []
    guessed = []
    compared = [r for r in rows if r.kind == "predicted" and r.system in (trivial or [r.system])]
    for own in grouped(compared, case).values():
        for one, two in combinations(own, 2):
            if abs(one.published / two.published - 1) > APART:
                less = one.published < two.published
                right.append(less == (one.simulated < two.simulated))
                if trivial:
                    guessed.append(less == (trivial.index(one.system) > trivial.index(two.system)))
    pairs = f"{len(right)} predicted pairs that are more than {percent(APART)} apart"
    other = f"; always {' > '.join(trivial)}: {sum(guessed)}" if trivial else ""
    return Finding([f"{sum(right)} of {pairs} are in the right order{other}."], {})


QUESTIONS = {"best": best, "gains": gains, "order": order, "saved": saved}


def paragraph(*sentences: str) -> list[str]:
    text = " ".join(sentence.strip() for sentence in sentences if sentence)
    return [textwrap.fill(text, 110, break_long_words=False, break_on_hyphens=False), ""]


def rows_of(name: str, about: Prose, rows: list[Row]) -> list[Row]:
    own = [row for row in rows if row.figure in about.get("rows", [name])]
    assert own, f"no rows of figure {name}: run its paper's command with --write"
    return own


def section(
    page: str, name: str, about: Prose, published: str, rows: list[Row]
) -> tuple[list[str], Figure | None]:
    """Return a figure's section (claim, findings, picture, misses, rows) and its picture."""
    own = rows_of(name, about, rows)
    claims = about.get("claims")
    claimed = [row.published for row in rows if claims and row.setting.startswith(claims)]
    findings = [band(own, claimed)] if claimed else []
    marks = {}
    for question, asked in about.get("ask", {}).items():
        findings.append(QUESTIONS[question.split("_")[0]](own, **asked))
        marks |= findings[-1].marks
    sentences = [sentence for finding in findings for sentence in finding.sentences]
    lines = [f"## {about['title']}", "", *paragraph(about["claim"], *sentences)]
    figure = None
    if "draw" in about:
        figure = draw(own, marks, published, claimed, about["draw"])
        lines += [f"![{about['title']}]({picture_of(page, name)})", ""]
    fitted = sum(row.kind in FITTED for row in own)
    count = f"Points that were fitted or follow from fitted ones: {fitted}." if fitted else ""
    parts = grouped(own, about.get("apiece", "")).items()
    far = [f"{part}{errors(each)}." for part, each in parts if errors(each)]
    far += [f"The trivial predictor is {about['trivial']}."] if "trivial" in about else []
    kept = Counter(row.kind for row in own if row.kind in WITHOUT_VALUE.values())
    if kept:
        counts = " and ".join(f"{count} {kind}" for kind, count in kept.items())
        far.append(f"Predicted, value not entered: {counts}.")
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
    lines += ["</details>", "", f"    python reproduce/papers/{page}.py --figure {figures}", ""]
    return lines, figure


def own_gpus(page: str, rows: list[Row]) -> list[str]:
    """Return the commands that measure points of a page on your GPUs, and results. See
    reproduce/papers/own_runs.py."""
    points = {f"{r.figure}:{r.system}:{r.setting}@{r.gpus}:{r.metric}": r for r in rows}
    lines = []
    for name, about in read_constants(own_runs.COMMANDS).items():
        if about["paper"] != page:
            continue
        found = [points[each] for each in about["points"]]
        beside = "; ".join(f"{row.name} ({number(row.published)} {row.unit})" for row in found)
        lines += paragraph(f"**{name}** compares with {beside}.", about["assumed"])
        folders = " ".join(["RUN", "BASE"][: len(about["lines"])])
        for line in (*about["lines"], f"python reproduce/papers/own_runs.py {name} {folders}"):
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
    """Return the rows with an error, by their label in the strip chart."""
    strips = {}
    for name, about in prose["figures"].items():
        own = [row for row in rows_of(name, about, rows) if row.error is not None]
        for label, each in grouped(own, about.get("strip", "")).items():
            strips[f"{prose['short']}, {label}"] = each
    return strips


def without_repeats(rows: list[Row], figures: Sequence[str]) -> list[Row]:
    """Return these figures' rows, one of those that repeat a run of the same setting under another name."""
    runs = {}
    for row in rows:
        if row.figure in figures and row.simulated:
            runs.setdefault((row.setting, row.gpus, row.metric, f"{row.simulated:.4g}"), row)
    return [*runs.values()]


def headline_of(prose: Prose, rows: list[Row]) -> str:
    return errors(without_repeats(rows, prose["headline"]))


def prose_of(page: str) -> Prose:
    return tomllib.loads((ROOT / "prose" / f"{page}.toml").read_text(encoding="utf-8"))


def skills_of(prose: Prose, rows: list[Row]) -> list[str]:
    """Return README's lines for a page: predicted rows by figure and the way they were made, and all."""
    parts = {}
    for name, about in prose["figures"].items():
        title = about["title"].partition(":")[0]
        parts |= grouped(rows_of(name, about, rows), f"{title}, {{how}}{about.get('groups', '')}")
    every = [row for row in rows if row.figure in prose["headline"]]
    if len(without_repeats(rows, prose["headline"])) < len(every):
        parts["the same with repeated bars"] = every
    parts[f"**{prose['headlined']}**"] = without_repeats(rows, prose["headline"])
    lines = []
    for part, own in parts.items():
        if found := skill(own):
            sides = [
                [percent(each, form)[:-2] for each, form in zip(side, FORMS, strict=True)]
                for side in found[1:3]
            ]
            cells = [f"{middle} ({ninth}; {most})" for middle, ninth, most in sides]
            lines.append(
                f"| {prose['short']}: {part} | {found.count} | {' | '.join(cells)} | {found.closer} |"
            )
    return lines


def main() -> None:
    strips = {}
    every = []
    index = []
    skills = []
    for page in PAGES:
        prose = prose_of(page)
        rows = read_rows(DOCS / "rows" / f"{page}.csv")
        strips |= strips_of(prose, rows)
        every += rows
        index.append(f"- [{prose['title']}]({page}.md){prose['of']}")
        skills += skills_of(prose, rows)
        headline = f"{prose['headlined']}: {headline_of(prose, rows)}"
        lines = [f"# {prose['title']}", "", *paragraph(prose["intro"]), f"{headline}.", ""]
        for name, about in prose["figures"].items():
            text, figure = section(page, name, about, prose["published"], rows)
            lines += text
            if figure:
                figure.savefig(DOCS / picture_of(page, name), metadata={"Software": None})
        notes = ROOT / "prose" / f"{page}.md"
        lines += [*notes.read_text(encoding="utf-8").splitlines(), ""] if notes.exists() else []
        lines += own_gpus(page, rows)
        (DOCS / f"{page}.md").write_text("\n".join(lines), encoding="utf-8")
    strip_chart(strips).savefig(DOCS / "errors.png", metadata={"Software": None})
    text = (ROOT / "prose" / "README.md").read_text(encoding="utf-8")
    kinds = Counter(row.kind for row in every)
    counts = {kind.replace(" ", "_"): count for kind, count in kinds.items()}
    filled = text.format(pages="\n".join(index), skills="\n".join(skills), **counts)
    (DOCS / "README.md").write_text(filled, encoding="utf-8")


if __name__ == "__main__":
    main()
