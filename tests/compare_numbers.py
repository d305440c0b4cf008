"""The numbers of real runs before and after a change: equal but for times and who served what.

    python tests/compare_numbers.py record DIR        10 steps of each of RUNS, a folder each: 12 minutes
    python tests/compare_numbers.py compare DIR DIR2  a line a run; exit status 1 if any number differs

A run that is there already (a file `done` in its folder) is kept, so that a recording goes on where it
stopped. Columns that a change renames, drops or adds on purpose go into RENAMED and GONE for the comparison.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from columns import timing_free

ROOT = Path(__file__).parent.parent
RL = ("--steps", "10", "--save-every", "0", "--resume", "never")
RUNS = {
    "grpo-partial": (*RL, "--mode", "partial"),
    "grpo-full": (*RL, "--mode", "full"),
    "dr_grpo": (*RL, "--algorithm", "dr_grpo"),
    "rloo": (*RL, "--algorithm", "rloo"),
    "reinforce++": (*RL, "--algorithm", "reinforce++"),
    "remax": (*RL, "--algorithm", "remax"),
    "gspo": (*RL, "--algorithm", "gspo"),
    "ppo": (*RL, "--algorithm", "ppo"),
    "safe_rlhf": (*RL, "--algorithm", "safe_rlhf", "cost_limit=0.45", "--cost-rule", "length:72"),
    "sft": ("sft", "--steps", "10"),
    "rm": ("rm", "--steps", "10"),
    "dpo": ("dpo", "--steps", "10"),
}
RENAMED: dict[str, str] = {}
GONE = {"train/engine_logprob_diff_mean", "train/engine_logprob_diff_p999", "sync/received_mb"}


def record(folder: Path) -> None:
    """Every run that isn't there yet, one after the other."""
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2", "run.py"]
    for name, arguments in RUNS.items():
        out = folder / name
        if (out / "done").exists():
            continue
        with (folder / f"{name}.log").open("w") as log:
            command = [*torchrun, *arguments, "--out", str(out)]
            # strict: else MKL has other last bits for few rows on some processors
            environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_CBWR": "AUTO,STRICT"}
            subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, check=True)
        (out / "done").touch()
        print(f"recorded {name}", flush=True)


def rows_of(run: Path) -> list[dict]:
    """What is to be equal, row by row."""
    rows = [timing_free(json.loads(line)) for line in (run / "metrics.jsonl").open()]
    return [
        {RENAMED.get(name, name): row[name] for name in row if name not in GONE} for row in rows
    ]


def differences(before: Path, after: Path) -> list[str]:
    """Each number that isn't the same."""
    one, two = rows_of(before), rows_of(after)
    found = [f"{len(one)} rows and {len(two)}"] if len(one) != len(two) else []
    for row, other in zip(one, two, strict=False):
        for name in sorted(row.keys() | other.keys()):
            if row.get(name) != other.get(name):
                found.append(f"step {row['step']}: {name} {row.get(name)} and {other.get(name)}")
    return found


def compare(before: Path, after: Path) -> bool:
    """Print a line a run; returns whether anything differs."""
    differs = False
    for name in (name for name in RUNS if (after / name / "done").exists()):
        found = differences(before / name, after / name)
        differs |= bool(found)
        count = sum(map(len, rows_of(before / name)))
        print(
            f"{name}: {f'{len(found)} differ: {found[:3]}' if found else f'all {count} numbers are equal'}"
        )
    return differs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("folders", type=Path, nargs="+")
    given = parser.parse_args()
    if given.what == "record":
        given.folders[0].mkdir(parents=True, exist_ok=True)
        record(given.folders[0].absolute())
    else:
        sys.exit(compare(*given.folders))


if __name__ == "__main__":
    main()
