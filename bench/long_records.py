"""What the records of a long run cost: CPU seconds and memory of a resume, and of the end.

python bench/long_records.py --steps 10000 --answers 512     0.25 MB a step on the disk; nothing is trained
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))

from checkpoint import truncate_to
from config import Config
from reporting import timeline as tl
from reporting.metrics import Report

STEP = 7777777  # stands for a step, and for the second that it began in
STATES = (("queued", 0.1), ("decoding", 0.5), ("queued", 0.6), ("judging", 0.9), ("done", 0.9))
RUN = {"mode": "full", "ranks": 1, "max_running_requests": 512}


def write_run(out: Path, steps: int, answers: int) -> None:
    """What one rank leaves, its times made up: seven records an answer, as in the demo."""
    rows = [["span", "train", 0, STEP + 0.91, STEP + 0.99, STEP]]
    for index in range(answers):
        for role in ("rollout", "genrm"):
            rows.append(tl.Event("span", role, 0, STEP, STEP + 0.9, STEP))
        for state, part in STATES:
            begin, end = STEP + 0.05 * index / answers, STEP + 0.1 * index / answers + 0.8 * part
            answer = {"answer": f"{STEP}.{index}"}
            rows.append(tl.Event("sample", state, 0, begin, end, STEP, answer))
    metrics = {"step": STEP} | {f"group/metric_{number}": 0.123456 for number in range(70)}
    files = {"spans": rows, "metrics": [metrics]}
    files["samples"] = 2 * [{"step": STEP, "response": 2000 * "x"}]
    texts = {name: "".join(json.dumps(row) + "\n" for row in files[name]) for name in files}
    (out / "spans").mkdir()
    for step in range(steps):
        names = {"spans": f"spans/rank0.{step // tl.STEPS_PER_FILE * tl.STEPS_PER_FILE}"}
        for kind, text in texts.items():
            with (out / f"{names.get(kind, kind)}.jsonl").open("a") as file:
                file.write(text.replace(str(STEP), str(step)))


def measure(what: str, work, *args) -> None:
    """The peak is the process's, so the smaller work comes first."""
    before = time.process_time()
    work(*args)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{what}: {time.process_time() - before:.1f} s CPU, peak {peak:.0f} MB", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--answers", type=int, default=512)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_run(out := Path(folder), given.steps, given.answers)
        (out / "config.json").write_text(json.dumps(RUN))
        rank_0, progress = SimpleNamespace(rank=0), SimpleNamespace(line=print)
        report = Report(Config(steps=given.steps), rank_0, out, progress, str)
        measure("before", lambda: None)
        measure("a resume", truncate_to, out, given.steps - tl.STEPS_PER_FILE // 2)
        measure("the end", report.close)
