"""README's results: run the rows' commands one after another, and write the table from their output.

    python reproduce/bench/results.py                all rows -> docs/results.json, README: 30 minutes
    python reproduce/bench/results.py --only modes   measure this row again; the others stay
    python reproduce/bench/results.py --render       measure nothing; write README, CONTRIBUTING and the pages

It also counts the lines of README's reading path and of CONTRIBUTING's rooms.

All measured rows must be from one commit; otherwise no table is written. Each row's sentence is also on its
page, so both have the same numbers. Simulated rows come from docs/papers (`make papers`).
"""

import ast
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2]))

from reproduce.bench.measuring import ROOT, TORCHRUN, parser_of, run_to_its_end
from reproduce.papers.pages import headline_of, prose_of
from reproduce.papers.tables import read_rows

DOCS = ROOT / "docs"
FOLDER = ROOT / "runs" / "results"
RESULTS = DOCS / "results.json"
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
CORE = ("engines", "training", "scheduling", "inputs", "runtime", "reporting", "demo", "cpu")
SCALE = DOCS / "papers" / "scale.md"
END = "<!-- end of result -->"
Values = dict[str, list[float]]  # name -> one or several measurements


def numbers_in(pattern: str, text: str) -> list[float]:
    """Return the numbers that a pattern finds."""
    return [float(number.replace(",", "")) for number in re.findall(pattern, text)]


def demo_values(printed: str, seconds: float) -> Values:
    """Return the accuracy before and after a run, and its minutes."""
    accuracy = numbers_in(r"eval/accuracy ([\d.]+)", printed)
    return {"before": accuracy[:1], "after": accuracy[-1:], "minutes": [seconds / 60]}


def modes_values(printed: str, seconds: float) -> Values:
    """Return partial colocation's serving seconds over full colocation's, one ratio per round."""
    rows = json.loads((ROOT / "runs" / "bench" / "modes-4.json").read_text())
    ratios = []
    for repeat in sorted({row["repeat"] for row in rows}):
        serving = {"full": [], "2|2": []}
        for row in rows:
            if row["repeat"] == repeat and row["step"] > 0:
                serving[row["side"]].append(row["metrics"]["time/serve_s"])
        ratios.append(median(serving["2|2"]) / median(serving["full"]))
    return {"ratio": ratios}


def media_values(printed: str, seconds: float) -> Values:
    """Return the MB between controllers in a step, and with a central controller."""
    sides = ("media", "central")
    return {side: numbers_in(rf"\| 2 \| {side} \| ([\d.]+) \|", printed) for side in sides}


def save_values(printed: str, seconds: float) -> Values:
    """Return how long a forked and a synchronous save stall the run: median, smallest, largest."""
    found = {"size": numbers_in(r"checkpoint of ([\d.]+) GiB", printed)}
    for kind in ("forked", "synchronous"):
        (stall,) = re.findall(rf"\| {kind} \| (.*?) \|", printed)
        found[kind] = numbers_in(r"[\d.]+", stall)
    return found


def trl_values(printed: str, seconds: float) -> Values:
    """Return our tokens per second in whole steps over TRL's: median, smallest, largest."""
    (cells,) = re.findall(r"\| tokens per wall-second, whole steps \|(.*)\|", printed)
    return {"ratio": numbers_in(r"[\d.]+", cells.split("|")[-1])}


@dataclass(frozen=True)
class Row:
    """A row of the table. text: a sentence with each value's median, and its _low and _high."""

    text: str
    page: str
    command: str
    # (the command's output, its seconds) -> the values
    values: Callable[[str, float], Values]
    kind: str = "measured"
    shows_table: bool = False  # the page also shows the table that the command prints
    in_readme: bool = True


ROWS = {
    "demo": Row(
        "The demo's accuracy on held-out sums rises from {before:.3f} to {after:.3f} in 40 steps and "
        "{minutes:.1f} minutes",
        "docs/algorithms.md",
        "torchrun --nproc-per-node 2 run.py --out runs/results/demo",
        demo_values,
    ),
    "modes": Row(
        "Where half of the groups are drawn again, partial colocation on 4 ranks serves a step in "
        "{ratio:.2f} ({ratio_low:.2f} to {ratio_high:.2f}) of full colocation's time",
        "docs/modes.md",
        'python reproduce/bench/modes.py --ranks 4 --workloads resample --sides full "2|2" '
        "--repeats 3 --moving 0 --pace 20,0.1 --figure runs/results/modes.png",
        modes_values,
        kind="measured at a set pace",
    ),
    "images": Row(
        "In a step of 2 ranks with 34 MB of images, only {media:.2f} MB of tokens pass between controllers; "
        "with a central controller it is {central:.1f} MB",
        "docs/images.md",
        "python reproduce/bench/media.py --ranks 2 --repeats 1",
        media_values,
        shows_table=True,
        in_readme=False,
    ),
    "save": Row(
        "A save of {size:.2f} GiB delays a run by {forked:.2f} s ({forked_low:.2f} to {forked_high:.2f}), "
        "because it is written during the next step; a synchronous one by {synchronous:.1f} s",
        "docs/faults.md",
        "python reproduce/bench/checkpoint.py",
        save_values,
    ),
    "trl": Row(
        "On a CPU, with 0.37 M parameters, whole steps produce {ratio:.2f} ({ratio_low:.2f} to "
        "{ratio_high:.2f}) times as many tokens a second as TRL's",
        "docs/trl.md",
        "python reproduce/bench/vs_trl.py --repeats 3 --steps 8",
        trl_values,
        shows_table=True,
    ),
}


def measure(name: str, commit: str) -> dict:
    """Run a row's command to its end. Return its entry in docs/results.json."""
    row = ROWS[name]
    log = FOLDER / f"{name}.log"
    load = os.getloadavg()[0]
    start = time.monotonic()
    program, *options = shlex.split(row.command)
    run_to_its_end([sys.executable if program == "python" else TORCHRUN, *options], log)
    seconds = time.monotonic() - start
    printed = log.read_text()
    found = {}
    for value, numbers in row.values(printed, seconds).items():
        found[value] = {"value": median(numbers), "spread": [min(numbers), max(numbers)]}
    about = {"kind": row.kind, "command": row.command, "commit": commit, "load": load}
    if row.shows_table:
        about["table"] = [line for line in printed.splitlines() if line.startswith("|")]
    return {"values": found, "machine": machine()} | about


def machine() -> str:
    """Return what seconds depend on most: the number of cores, their model, their widest vectors."""
    text = Path("/proc/cpuinfo").read_text()
    name = re.search(r"^model name\s*: (.*)", text, re.MULTILINE)
    widths = {"avx512f": "AVX-512", "avx2": "AVX2", "asimd": "NEON"}
    widest = next((words for flag, words in widths.items() if flag in text.split()), "SSE")
    return f"{os.cpu_count()} cores of {name[1] if name else platform.machine()} with {widest}"


def current_commit() -> str:
    """Return the working tree's commit. Exits if a file that may change a number isn't committed."""
    changed = git("status", "--porcelain", "-uno", "--", ".", ":!docs", ":!README.md")
    if changed:
        sys.exit(f"error: commit these first, because results name their commit:\n{changed}")
    return git("rev-parse", "--short=10", "HEAD").strip()


def git(*words: str) -> str:
    ran = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return ran.stdout


# ---------------------------------------------------------------- the table and the pictures

PAPERS = {  # page -> what its predicted points are, and the trivial predictor
    "hybridflow": ("HybridFlow's throughputs, a closed form", "a power law's"),
    "rlhfuse": ("RLHFuse's stages, simulations and regressions", "power laws'"),
    "measured": (
        "This project's engines at a set pace, simulated",
        "the known run's, repeated or scaled,",
    ),
}


def paper_row(folder: Path = DOCS / "papers") -> str:
    """Return the papers' row: each page's errors of predicted points, beside a trivial predictor's."""
    pages = []
    for page, (name, trivial) in PAPERS.items():
        text = headline_of(prose_of(page), read_rows(folder / "rows" / f"{page}.csv"))
        found, _, rest = text.partition(" (")
        beside = rest.rpartition(")")[2].replace("trivial predictor:", trivial)
        pages.append(f"{name}: {found}{beside}")
    pages_of = "`make papers`: [pages](docs/papers/README.md)"
    return f"| {'. '.join(pages)} | predicted | {pages_of} |"


def scale_at(ranks: str) -> tuple[str, str]:
    """Return how many samples the busiest and a central controller hold, from docs/papers/scale.md."""
    ways = ("parallel", "central")
    found = [re.search(rf"\| {way} \| {ranks} \| ([\d,]+) \|", SCALE.read_text()) for way in ways]
    return found[0][1], found[1][1]


def scale_row() -> str:
    """Return the row of docs/papers/scale.md: how many samples a controller holds at two scales."""
    few, few_central = scale_at("64")
    many, many_central = scale_at("4,096")
    text = (
        f"The busiest controller holds {few} samples on 64 GPUs and {many} on 4,096; a central one "
    )
    text += f"all that the step draws, {few_central} and {many_central}"
    command = "python reproduce/bench/central.py --write"
    return f"| {text} | simulated | `{command}`: [page](docs/papers/scale.md) |"


def step_times() -> tuple[list[float], list[float]]:
    """Return step times over a central controller's, from docs/papers/wechat_yatt.md: text, images."""
    rows = [
        row for row in read_rows(DOCS / "papers/rows/wechat_yatt.csv") if row.figure == "central"
    ]
    text = [row.simulated for row in rows if row.setting.startswith("0.05 MB")]
    images = [row.simulated for row in rows if not row.setting.startswith("0.05 MB")]
    return text, images


def time_row() -> str:
    """Return the row with the time that parallel controllers save."""
    text_only, images = step_times()
    text = f"With parallel controllers a step of text takes {min(text_only):.2f} to {max(text_only):.2f} "
    text += "of a central one's time, and with 1 to 15 MB of images a sample "
    text += f"{min(images):.2f} to {max(images):.2f}; a third party reports 0.408 for training "
    text += "against VeRL, with unknown settings"
    command = "python reproduce/papers/wechat_yatt.py --figure central --write"
    return f"| {text} | simulated | `{command}`: [page](docs/papers/wechat_yatt.md) |"


def sentence(name: str, result: dict) -> str:
    """Return a row's sentence with the numbers of its last run."""
    numbers = {}
    for value, found in result["values"].items():
        low, high = found["spread"]
        numbers |= {value: found["value"], f"{value}_low": low, f"{value}_high": high}
    return ROWS[name].text.format(**numbers)


def render(results: dict[str, dict], simulated: list[str]) -> str:
    """Return the table in Markdown. Raises ValueError if its rows are from several commits or machines."""
    origins = sorted({f"commit {row['commit']}, {row['machine']}" for row in results.values()})
    if len(origins) > 1:
        named = "; ".join(origins)
        raise ValueError(f"rows from several origins ({named}): measure all of them again")
    lines = ["| result | how | command, page |", "|---|---|---|"]
    for name, row in ROWS.items():
        if name not in results or not row.in_readme:
            continue
        command = row.command.replace("|", r"\|")
        text = sentence(name, results[name])
        lines.append(f"| {text} | {row.kind} | `{command}`: [page]({row.page}) |")
    lines += simulated
    if origins:
        loads = [row["load"] for row in results.values()]
        load = f"load average before each {min(loads):.1f} to {max(loads):.1f}"
        lines += ["", f"Measured rows: {origins[0]}, {load}."]
    return "\n".join(lines) + "\n"


def with_result(page: str, name: str, text: str) -> str:
    """Return the page with the text of one result replaced."""
    begin = f"<!-- result: {name} -->\n"
    before, found, rest = page.partition(begin)
    assert found, f"a page has no place for the result {name}"
    _, _, after = rest.partition(END)
    return before + begin + text + END + after


def simulated_rows() -> list[str]:
    return [scale_row(), time_row(), paper_row()]


PATH_ROW = re.compile(r"^\| ([\w/]+\.py)(?:: (.*?))? \| (\d+) \|", re.MULTILINE)


def lines_of(path: str, part: str | None) -> int:
    """Count the lines of a file, of `f`, `g` in it, or of all from `f` to `g`."""
    text = (ROOT / path).read_text()
    if part is None:
        return len(text.splitlines())
    places = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            places[node.name] = (node.lineno, node.end_lineno)
    found = [places[name.split(".")[-1]] for name in re.findall("`(.*?)`", part)]
    if " to " in part:
        found = [(found[0][0], found[1][1])]
    return sum(end - begin + 1 for begin, end in found)


def with_path(readme: str) -> str:
    """Return README with the lines of each row of its reading path, and their sum in front."""
    total = 0

    def counted(row: re.Match) -> str:
        nonlocal total
        lines = lines_of(row[1], row[2])
        total += lines
        return row[0].removesuffix(f"{row[3]} |") + f"{lines} |"

    readme = PATH_ROW.sub(counted, readme)
    return re.sub(r"(?<=in this order,\n)[\d,]+(?= lines)", f"{total:,}", readme)


ROOM_ROW = re.compile(r"^\| (\S.*?) \| (\*?)[\d,]+(\*?) \|", re.MULTILINE)


def lines_of_room(names: str) -> int:
    """Count the lines of a room's files and folders, such as `extras/apart, fused, rebalance.py`."""
    if names in ("the root", "*the core*"):
        found = [*ROOT.glob("*.py")]
        if names == "*the core*":
            found += [path for room in CORE for path in (ROOT / room).rglob("*.py")]
    else:
        first, *others = names.strip("*").replace("the extras", "extras/").split(", ")
        folder = first.partition("/")[0] if others and not others[0].endswith("/") else ""
        found = []
        for place in [ROOT / first, *(ROOT / folder / other for other in others)]:
            files = place.rglob("*") if place.is_dir() else [place]
            found += [path for path in files if path.suffix in (".py", ".cpp")]
    return sum(len(path.read_text().splitlines()) for path in found)


def with_rooms(page: str) -> str:
    """Return CONTRIBUTING with the lines of each room, to the nearest hundred."""
    before, found, rest = page.partition("| room | lines |")
    table, end, after = rest.partition("\n\n")
    table = ROOM_ROW.sub(
        lambda row: f"| {row[1]} | {row[2]}{round(lines_of_room(row[1]), -2):,}{row[3]} |", table
    )
    return before + found + table + end + after


def paragraph(name: str, result: dict) -> str:
    """Return a row as its page shows it."""
    row = ROWS[name]
    origin = f"{row.kind}: `{row.command}`; {result['machine']}, commit {result['commit']}"
    lines = [f"{sentence(name, result)} ({origin})."]
    if row.shows_table:
        lines += ["", *result["table"], ""]
    return "\n".join(lines) + "\n"


def pages(results: dict[str, dict]) -> dict[Path, str]:
    """Return README and the pages that its rows link to, with the latest measurements. Raises as `render`."""
    readme = with_result(README.read_text(), "all", render(results, simulated_rows()))
    texts = {README: with_path(readme), CONTRIBUTING: with_rooms(CONTRIBUTING.read_text())}
    for name, result in results.items():
        path = ROOT / ROWS[name].page
        text = texts.get(path, path.read_text())
        texts[path] = with_result(text, name, paragraph(name, result))
    return texts


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(ROWS), help="measure only these rows")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    given = parser.parse_args()
    results = json.loads(RESULTS.read_text())
    if not given.render:
        commit = current_commit()
        names = given.only or list(ROWS)
        FOLDER.mkdir(parents=True, exist_ok=True)
        if "demo" in names:
            shutil.rmtree(FOLDER / "demo", ignore_errors=True)
        for name in names:
            print(f"measuring {name}", flush=True)
            results[name] = measure(name, commit)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    try:
        texts = pages(results)
    except ValueError as error:
        sys.exit(f"error: {error}")
    for path, text in texts.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
