"""The numbers of real runs before and after a change: equal but for times and who served what.

    python tests/compare_numbers.py record DIR        10 steps of each of RUNS, a folder each: 12 minutes
    python tests/compare_numbers.py compare DIR DIR2  a line a run; exit status 1 if any number differs

A run that is done (a file `done` in its folder) is kept, so that a recording goes on where it stopped.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.launched import Run

RL = "--steps 10 --save-every 0 --resume never"
ALGORITHMS = ("dr_grpo", "rloo", "reinforce++", "remax", "gspo", "ppo")
RUNS = {f"grpo-{mode}": f"{RL} --mode {mode}" for mode in ("partial", "full")}
RUNS |= {name: f"{RL} --algorithm {name}" for name in ALGORITHMS}
RUNS["safe_rlhf"] = f"{RL} --cost-rule length:72 --algorithm safe_rlhf cost_limit=0.45"
RUNS |= {recipe: f"{recipe} --steps 10" for recipe in ("sft", "rm", "dpo")}


def record(folder: Path) -> None:
    """Every run that isn't there yet, one after the other."""
    # strict: else MKL has other last bits for few rows on some processors
    os.environ["MKL_CBWR"] = "AUTO,STRICT"
    for name, arguments in RUNS.items():
        if (folder / name / "done").exists():
            continue
        run = Run(folder / name, *arguments.split()).ended()
        (run.folder / "done").touch()
        print(f"recorded {name}", flush=True)


def differences(before: list[dict], after: list[dict]) -> list[str]:
    """Each number that isn't the same."""
    found = [f"{len(before)} rows and {len(after)}"] if len(before) != len(after) else []
    for row, other in zip(before, after, strict=False):
        for name in sorted(row.keys() | other.keys()):
            if row.get(name) != other.get(name):
                found.append(f"step {row['step']}: {name} {row.get(name)} and {other.get(name)}")
    return found


def compare(before: Path, after: Path) -> bool:
    """Print a line a run; returns whether anything differs."""
    differs = False
    for name in (name for name in RUNS if (after / name / "done").exists()):
        rows, others = Run(before / name).numbers(), Run(after / name).numbers()
        found = differences(rows, others)
        differs |= bool(found)
        equal = f"all {sum(map(len, rows))} numbers are equal"
        print(f"{name}: {f'{len(found)} differ: {found[:3]}' if found else equal}")
    return differs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("folders", type=Path, nargs="+")
    given = parser.parse_args()
    if given.what == "record":
        record(given.folders[0].absolute())
    else:
        sys.exit(compare(*given.folders))
