"""README's results: run each row's command, one after the other, and write the table from what came of it.

    python bench/results.py                all rows -> docs/results.json, README, its pictures: 30 minutes
    python bench/results.py --only modes   this row again; the others stay as they were
    python bench/results.py --render       README alone, from docs/results.json and the papers' pages

All measured rows have to be of one commit: a table of several isn't written. The rows of the papers are read
from docs/papers/, which `make papers` writes.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.launch import ROOT, TORCHRUN, end_with_us, run_to_its_end

DOCS, FOLDER = ROOT / "docs", ROOT / "runs" / "results"
RESULTS, README = DOCS / "results.json", ROOT / "README.md"
BEGIN, END = "<!-- results: written by bench/results.py -->\n", "<!-- end of results -->"
Values = dict[str, list[float]]  # by name, what was measured one time or several


def demo_values(printed: str, seconds: float) -> Values:
    """The accuracy before and after a run, and its minutes."""
    accuracy = [float(number) for number in re.findall(r"eval/accuracy ([\d.]+)", printed)]
    return {"before": accuracy[:1], "after": accuracy[-1:], "minutes": [seconds / 60]}


def modes_values(printed: str, seconds: float) -> Values:
    """Serving seconds of partial over those of full colocation, a ratio for each round."""
    rows = json.loads((ROOT / "runs" / "bench" / "modes-4.json").read_text())
    ratios = []
    for repeat in sorted({row["repeat"] for row in rows}):
        counted = [row for row in rows if row["repeat"] == repeat and row["step"] > 0]
        serving = {"full": [], "2|2": []}
        for row in counted:
            serving[row["side"]].append(row["metrics"]["time/serve_s"])
        ratios.append(median(serving["2|2"]) / median(serving["full"]))
    return {"ratio": ratios}


def central_values(printed: str, seconds: float) -> Values:
    """The samples that a controller holds, and those of a central one, at each number of ranks."""
    held = {"ours": [], "central": []}
    for way, count in re.findall(r"\| (ours|central) \| [\d,]+ \| ([\d,]+) \|", printed):
        held[way].append(float(count.replace(",", "")))
    return held


def images_values(printed: str, seconds: float) -> Values:
    """MB between controllers in a step; the same through a central one."""
    rows = re.findall(r"\| 2 \| (images|central) \| ([\d.]+) \|", printed)
    return {side: [float(megabytes)] for side, megabytes in rows}


def save_values(printed: str, seconds: float) -> Values:
    """How long a run waits for a save by forked processes, and for one without: median, smallest, largest."""
    size = float(re.search(r"checkpoint of ([\d.]+) GiB", printed)[1])
    rows = re.findall(r"\| (forked|synchronous) \| ([\d.]+) \(([\d.]+)-([\d.]+)\)", printed)
    return {"size": [size]} | {
        kind: [float(number) for number in numbers] for kind, *numbers in rows
    }


def trl_values(printed: str, seconds: float) -> Values:
    """Tokens a second in whole steps, ours over TRL's: median, smallest, largest."""
    label = "tokens per wall-second, whole steps"
    (row,) = (line for line in printed.splitlines() if line.startswith(f"| {label} |"))
    return {"ratio": [float(number) for number in re.findall(r"[\d.]+", row.split("|")[-2])]}


@dataclass(frozen=True)
class Row:
    """A row of the table. text: a sentence with each value's median, and its _low and _high."""

    text: str
    kind: str  # measured, simulated, fitted or predicted
    page: str
    command: str
    # of what the command printed, and the seconds that it took
    values: Callable[[str, float], Values]


ROWS = {
    "demo": Row(
        "The demo answers {before:.3f} of the held-out sums right at its start, and {after:.3f} after 40 "
        "steps and {minutes:.1f} minutes",
        "measured",
        "docs/algorithms.md",
        "torchrun --nproc-per-node 2 run.py --out runs/results/demo",
        demo_values,
    ),
    "modes": Row(
        "Where half of the groups are drawn again, partial colocation on 4 ranks serves a step in "
        "{ratio:.2f} ({ratio_low:.2f} to {ratio_high:.2f}) of full colocation's time; the engines' pace is "
        "set, so this tests scheduling, not hardware",
        "measured",
        "docs/modes.md",
        'python bench/modes.py --ranks 4 --workloads resample --sides full "2|2" --repeats 3 --moving 0 '
        "--pace 20,0.1 --figure runs/results/modes.png",
        modes_values,
    ),
    "central": Row(
        "From 64 to 4,096 ranks a controller holds {ours_low:,.0f} to {ours_high:,.0f} samples at once; a "
        "central one would hold {central_low:,.0f} to {central_high:,.0f}",
        "simulated",
        "docs/papers/scale.md",
        "python bench/central.py",
        central_values,
    ),
    "images": Row(
        "Of the 34 MB of images in a step of 2 ranks none passes between controllers, only {images:.2f} MB "
        "of tokens; with a central one it is {central:.1f} MB",
        "measured",
        "docs/images.md",
        "python bench/media.py --ranks 2 --repeats 1",
        images_values,
    ),
    "save": Row(
        "A run waits {forked:.2f} s ({forked_low:.2f} to {forked_high:.2f}) for a save of {size:.2f} GiB, "
        "which is written beside the next step; {synchronous:.1f} s if it isn't",
        "measured",
        "docs/faults.md",
        "python bench/checkpoint.py",
        save_values,
    ),
    "trl": Row(
        "At 0.37 M parameters on a CPU a whole step makes {ratio:.2f} ({ratio_low:.2f} to {ratio_high:.2f}) "
        "of TRL's tokens a second",
        "measured",
        "docs/trl.md",
        "python bench/vs_trl.py --repeats 3 --steps 8",
        trl_values,
    ),
}


def measure(name: str, commit: str) -> dict:
    """Run a row's command to its end. Returns what docs/results.json keeps of it."""
    row, log = ROWS[name], FOLDER / f"{name}.log"
    load, start = os.getloadavg()[0], time.monotonic()
    program, *options = shlex.split(row.command)
    run_to_its_end([sys.executable if program == "python" else TORCHRUN, *options], log)
    found = {}
    for value, numbers in row.values(log.read_text(), time.monotonic() - start).items():
        found[value] = {"value": median(numbers), "spread": [min(numbers), max(numbers)]}
    return {
        "values": found,
        "kind": row.kind,
        "command": row.command,
        "commit": commit,
        "load": load,
    }


def current_commit() -> str:
    """The commit of the working tree. SystemExit if a file that may change a number isn't committed."""
    changed = [
        "git",
        "status",
        "--porcelain",
        "--untracked-files=no",
        "--",
        ".",
        ":!docs",
        ":!README.md",
    ]
    if names := subprocess.run(
        changed, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout:
        sys.exit(f"error: commit these first, the results name the commit they are of:\n{names}")
    head = ["git", "rev-parse", "--short=10", "HEAD"]
    return subprocess.run(head, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


# ---------------------------------------------------------------- the table and the pictures

PAPERS = {  # page -> whose figures
    "wechat_yatt": "SGLang on H20s, for WeChat-YATT's maps",
    "rlhfuse": "RLHFuse",
    "hybridflow": "HybridFlow",
    "measured": "this project's engines at a set pace, which tests scheduling, not hardware",
}


def paper_rows(folder: Path = DOCS / "papers") -> list[str]:
    """A row for each page of the papers: the errors of all figures that it calls predicted."""
    rows = []
    for page, name in PAPERS.items():
        sentence = r"(\d+) predicted rows: median error ([\d.]+)%, largest ([\d.]+)%"
        count, middle, largest = re.search(sentence, (folder / f"{page}.md").read_text()).groups()
        found = f"{count} figures of {name}: median error {middle} %, largest {largest} %"
        rows.append(f"| {found} | predicted | `make papers`: [page](docs/papers/{page}.md) |")
    return rows


def render(results: dict[str, dict], papers: list[str]) -> str:
    """The table in Markdown. ValueError if its rows are of several commits."""
    commits = sorted({row["commit"] for row in results.values()})
    if len(commits) > 1:
        raise ValueError(
            f"rows of several commits ({', '.join(commits)}): measure all of them again"
        )
    lines = ["| result | how | command, page |", "|---|---|---|"]
    for name, row in ROWS.items():
        if name not in results:
            continue
        numbers = {}
        for value, found in results[name]["values"].items():
            low, high = found["spread"]
            numbers |= {value: found["value"], f"{value}_low": low, f"{value}_high": high}
        command = row.command.replace("|", r"\|")
        lines.append(
            f"| {row.text.format(**numbers)} | {row.kind} | `{command}`: [page]({row.page}) |"
        )
    lines += papers
    if commits:
        loads = [row["load"] for row in results.values()]
        load = f"load average before each {min(loads):.1f} to {max(loads):.1f}"
        lines += ["", f"Rows with a command of their own: commit {commits[0]}, 2 cores, {load}."]
    return "\n".join(lines) + "\n"


def with_table(page: str, table: str) -> str:
    """The page, with the table in the place of the one before."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table + END + after


def draw_pictures() -> None:
    """The processes, and four steps of the demo that was measured."""
    from bench import processes
    from reporting.figure import make_figure, read_run

    processes.draw(processes.PICTURE)
    steps = replace(read_run(FOLDER / "demo", 3, 6), title="The demo: partial colocation, 2 ranks")
    make_figure(steps).savefig(DOCS / "timeline.png")


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ROWS), help="measure these rows alone")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    given = parser.parse_args()
    results = json.loads(RESULTS.read_text())
    if not given.render:
        end_with_us()
        commit, names = current_commit(), given.only or list(ROWS)
        FOLDER.mkdir(parents=True, exist_ok=True)
        if "demo" in names:
            shutil.rmtree(FOLDER / "demo", ignore_errors=True)
        for name in names:
            print(f"measuring {name}", flush=True)
            results[name] = measure(name, commit)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        if "demo" in names:
            draw_pictures()
    try:
        README.write_text(with_table(README.read_text(), render(results, paper_rows())))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
