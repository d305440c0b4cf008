"""Compares your own GPUs with a published row and its simulation.

    python reproduce/papers/own_runs.py                    list the rows: commands to type, and assumptions
    python reproduce/papers/own_runs.py ROW RUN [BASE]     print and keep the result of your runs

RUN and BASE are the folders (--out) of a row's commands. The first three steps don't count.
"""

import json
import shlex
import sys
from functools import reduce
from operator import truediv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from config import as_text, dashed, parse_config
from inputs.hf_directory import read_object
from reproduce.papers import hybridflow, rlhfuse, wechat_yatt
from reproduce.papers.tables import ROOT, Paper, Point, read_constants, read_points
from runtime.atomic_files import whole_rows
from runtime.errors import UserError

COMMANDS = ROOT / "published" / "commands.toml"
KEPT = ROOT / "published" / "own_runs.json"
FIGURES = {
    "hybridflow": hybridflow.FIGURES,
    "rlhfuse": rlhfuse.figures(),
    "wechat_yatt": wechat_yatt.FIGURES,
}
WARM_UP = 3  # steps that compile kernels
# settings that decide a row's number: the samples of a step, and how it serves and trains
SAMPLES = ("prompts_per_step", "answers_per_prompt", "max_new_tokens", "answer_tokens")
LOOP = ("algorithm", "mode", "tail", "schedule", "updates_per_step")


def own_rows() -> dict[str, dict]:
    """Return row of COMMANDS -> its numbers `published`, `simulated`, `measured`, their `unit`, the `run`."""
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def measured(point: Point, folder: Path, line: str) -> tuple[float, str]:
    """Return a run's number in a point's unit, and the run's description.

    Raises UserError if the folder has no such run, or no step that counts.
    """
    is_decode = point.figure == "h20"
    name = "decode.json" if is_decode else "config.json"
    if not (folder / name).is_file():
        raise UserError(
            f"{folder}: no {name} in it: give the folder that a run of this point wrote"
        )
    found = read_object(folder / name, str(folder))
    if is_decode:
        return found[point.metric], found["run"]
    if "device_name" not in found:
        raise UserError(f"{folder} is from an older version, which doesn't record the device")
    rows = [row for row in whole_rows(folder / "metrics.jsonl") if "time/step_s" in row]
    counted = rows[WARM_UP:]
    if not counted:
        raise UserError(f"{folder}: no step after the first {WARM_UP}, which don't count")
    size = len(counted) * found["prompts_per_step"] * found["answers_per_prompt"]
    if point.unit == "tokens/s":
        names = ("rollout/tokens", "rollout/prompt_tokens")
        size = sum(row[name] for row in counted for name in names)
    asked = vars(parse_config(shlex.split(line.partition(" run.py ")[2])))
    unlike = [name for name in LOOP + SAMPLES if as_text(found[name]) != as_text(asked[name])]
    others = " ".join(f"--{dashed(name)} {as_text(found[name])}" for name in unlike)
    run = f"{Path(found['model']).name} on {found['ranks']} x {found['device_name']}"
    run += f", {len(counted)} steps" + f", unlike the command: {others}" * bool(others)
    return size / sum(row["time/step_s"] for row in counted), run


def add(name: str, folders: list[Path]) -> dict:
    """Keep the number of a row's runs, or their ratio if there are two.

    Raises UserError if the row is unknown, or if its folders are missing or not usable.
    """
    rows = read_constants(COMMANDS)
    if name not in rows:
        raise UserError(f"{name} isn't one of {', '.join(rows)}")
    row = rows[name]
    if len(folders) != len(row["lines"]):
        raise UserError(f"{name} takes {len(row['lines'])} folders, one for each command")
    files = (ROOT / "published").glob(f"{row['paper']}_*.csv")
    points = {point.name: point for file in files for point in read_points(file)}
    constants = read_constants(ROOT / f"{row['paper']}.toml")
    numbers = []
    runs = []
    for each, folder, line in zip(row["points"], folders, row["lines"], strict=True):
        point = points[each]
        own, run = measured(point, folder, line)
        simulated = FIGURES[row["paper"]][point.figure](Paper([point], constants))[0]
        numbers.append((simulated.published, simulated.simulated, own))
        runs.append(run)
    published, simulated, own = (reduce(truediv, column) for column in zip(*numbers, strict=True))
    found = dict(published=published, simulated=simulated, measured=own)
    found |= {"unit": point.unit if len(runs) == 1 else "x", "run": ", over ".join(runs)}
    KEPT.write_text(json.dumps(own_rows() | {name: found}, indent=1) + "\n")
    return found


def main(arguments: list[str]) -> int:
    """Return a status: 2 if the row or a folder can't be used."""
    if not arguments:
        for name, row in read_constants(COMMANDS).items():
            print(name, *row["lines"], row["assumed"], "", sep="\n")
        return 0
    try:
        found = add(arguments[0], [*map(Path, arguments[1:])])
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    for name, value in found.items():
        print(f"{name}: {value:,.4g}" if isinstance(value, float) else f"{name}: {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
