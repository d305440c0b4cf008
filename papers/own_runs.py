"""A published row on your own GPUs: what to type for it; its number beside both.

    python papers/own_runs.py                    the rows: what to type for each, and what is assumed
    python papers/own_runs.py ROW RUN [BASE]     what runs came to: printed, and kept beside the published

RUN and BASE are the folders (--out) of a row's lines. Steps count after the first three.
"""

import json
import shlex
import sys
from functools import reduce
from operator import truediv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from config import as_text, dashed, parse_config
from papers import hybridflow, rlhfuse, wechat_yatt
from papers.tables import ROOT, Paper, Point, read_constants, read_points
from runtime.errors import UserError

COMMANDS = ROOT / "published" / "commands.toml"
KEPT = ROOT / "published" / "own_runs.json"
FIGURES = {"hybridflow": hybridflow.FIGURES, "rlhfuse": rlhfuse.figures()}
FIGURES["wechat_yatt"] = wechat_yatt.FIGURES
WARM_UP = 3  # steps, in which kernels are compiled
ALIKE = ("algorithm", "mode", "tail", "schedule", "updates_per_step", "prompts_per_step")
ALIKE += ("answers_per_prompt", "max_new_tokens", "answer_tokens")


def own_rows() -> dict[str, dict]:
    """By row of COMMANDS: the numbers `published`, `simulated`, `measured`, their `unit`, and the `run`."""
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def read_run(folder: Path) -> tuple[dict, list[dict]]:
    """A run's settings, and the metrics of its counted steps. UserError if there are none."""
    path = folder / "metrics.jsonl"
    rows = []
    try:
        config = json.loads((folder / "config.json").read_text())
        for line in path.read_text().splitlines():
            rows.append(json.loads(line))
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}: no folder of a run") from None
    except ValueError:
        raise UserError(f"{path}:{len(rows) + 1} is cut off") from None
    if "device_name" not in config:
        raise UserError(f"{folder} is of an older version, which names no device")
    counted = [row for row in rows if "time/step_s" in row][WARM_UP:]
    if not counted:
        raise UserError(f"{path}: no step after the first {WARM_UP}, which don't count")
    return config, counted


def measured(point: Point, folder: Path, line: str) -> tuple[float, str]:
    """A run's number in a point's unit, and what the run was. UserError if it has none."""
    if point.figure == "h20":
        path = folder / "decode.json"
        if not path.exists():
            raise UserError(f"{path}: no such file: bench/decode.py writes it")
        found = json.loads(path.read_text())
        return found[point.metric], found["run"]
    config, rows = read_run(folder)
    size = len(rows) * config["prompts_per_step"] * config["answers_per_prompt"]
    if point.unit == "tokens/s":
        names = ("rollout/tokens", "rollout/prompt_tokens")
        size = sum(row[name] for row in rows for name in names)
    asked = vars(parse_config(shlex.split(line.partition(" run.py ")[2])))
    unlike = [name for name in ALIKE if as_text(config[name]) != as_text(asked[name])]
    others = " ".join(f"--{dashed(name)} {as_text(config[name])}" for name in unlike)
    run = f"{Path(config['model']).name} on {config['ranks']} x {config['device_name']}"
    run += f", {len(rows)} steps" + f", unlike the line to type: {others}" * bool(others)
    return size / sum(row["time/step_s"] for row in rows), run


def add(name: str, folders: list[Path]) -> dict:
    """Put what runs came to beside the row, a ratio if it has two points; keep it. UserError: it can't be."""
    rows = read_constants(COMMANDS)
    if name not in rows:
        raise UserError(f"{name} is none of {', '.join(rows)}")
    row = rows[name]
    if len(folders) != len(row["lines"]):
        raise UserError(f"{name} takes {len(row['lines'])} folders, one of each line to type")
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
    """Return a status: 2 for a row or a folder that can't be used."""
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
