"""What a start costs without a GPU: ranks that torchrun starts, and ranks that `make run`'s launcher forks.

    python reproduce/bench/starting.py                   2 and 8 ranks, three repeats: a table, in 5 minutes
    python reproduce/bench/starting.py --repeats 1 --most-ranks 2     a quick look

Each run is the demo; its first step begins with an evaluation of 200 prompts. When the line of that step is
printed, all processes are measured: seconds since the command, CPU-seconds, and memory (a page that n
processes share counts 1/n in each). Sides alternate after an unmeasured run of each.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil

from reproduce.bench.measuring import ROOT, TORCHRUN, parser_of, print_table, pss_mb, spread
from runtime.parent import adopt_orphans

SIDES = {
    "torchrun": [TORCHRUN],
    "make run": [sys.executable, ROOT / "examples" / "quiet_torchrun.py"],
}
PORT = 30500
LINE = "step   1/"


def measure(launcher: list, ranks: int) -> tuple[float, float, float]:
    """Start a run, and return seconds, CPU-seconds and MB at its first step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*launcher, "--standalone", "--nproc-per-node", ranks, "run.py", "--steps", 3]
        command += ["--save-every", 0, "--port", PORT, "--out", Path(folder, "run")]
        while descendants():  # the run before ends
            time.sleep(0.1)
        before = cpu_seconds()
        start = time.monotonic()
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        with subprocess.Popen([*map(str, command)], cwd=ROOT, **pipes) as run:
            printed = ""
            for line in run.stdout:
                printed += line
                if line.startswith(LINE):
                    seconds = time.monotonic() - start
                    spent = cpu_seconds() - before
                    memory = sum(pss_mb(process.pid) for process in descendants())
            assert LINE in printed, printed
        return seconds, spent, memory


def descendants() -> list[psutil.Process]:
    """Return those that run: this process adopts orphans, and doesn't wait for them."""
    found = psutil.Process().children(recursive=True)
    return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


def cpu_seconds() -> float:
    """Return the CPU-seconds of all descendants so far, also of those that have ended."""
    spent = sum(psutil.Process().cpu_times()[2:4])
    for process in descendants():
        spent += sum(process.cpu_times()[:4])
    return spent


def main() -> None:
    settings = parser_of(__doc__, repeats=3, most_ranks=8).parse_args()
    adopt_orphans()
    rows = []
    for ranks in (2, 8):
        if ranks > settings.most_ranks:
            continue
        found = {side: [] for side in SIDES}
        for repeat in range(settings.repeats + 1):
            for side, launcher in SIDES.items():
                figures = measure(launcher, ranks)
                if repeat:
                    found[side].append(figures)
        for number, what in enumerate(("seconds", "CPU-seconds", "MB (PSS)")):
            digits = 0 if what.startswith("MB") else 1
            columns = [[figures[number] for figures in found[side]] for side in SIDES]
            ratios = [after / before for before, after in zip(*columns, strict=True)]
            texts = [spread(column, digits) for column in columns]
            rows.append([f"{ranks} ranks: {what}", *texts, spread(ratios)])
    print_table(["median (smallest-largest)", *SIDES, "ratio"], rows)


if __name__ == "__main__":
    main()
