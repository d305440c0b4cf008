"""Resume: what a run does with what an earlier one left under --out: go on from its newest checkpoint, or move it aside.

Rank 0 alone looks and decides, before any engine starts. A checkpoint is taken only whole; a run never starts from 0 over
checkpoints that it can't read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from checkpoint import COMMON, TRACKER, settings_of
from config import as_text, dashed
from reporting import timeline
from runtime.atomic_files import PARTIAL, damage, put_away, read_canonical, step_of, steps_in, write_whole

# else the numbers are another run's
SAME = ("seed", "model", "critic", "judge", "rule", "cost_rule", "data", "algorithm", "prompts_per_step", "answers_per_prompt")
FREE = ("preset", "out", "resume", "port")  # nobody needs to hear that these differ


@dataclass(frozen=True)
class Found:
    """A whole checkpoint that the run goes on from, and where on the run's own clock (seconds) its record ends."""

    folder: Path
    step: int
    ended_s: float = 0.0


def prepare(config, out: Path, say: Callable[[str], None]) -> Found | None:
    """Make `out` ready for this run (rank 0): None for one that starts from nothing. `say` is told what was done.

    Raises ValueError for what the user has to decide.
    """
    found = find(config, out, say)
    if found:
        compare(config, found, say)
    checkpoints = out / "checkpoints"
    if found is None or found.folder.parent.resolve() != checkpoints.resolve():
        move_aside(out, say)
    for name in ("spans", "logs"):
        (out / name).mkdir(parents=True, exist_ok=True)
    if found is None:
        return None
    say(f"goes on from {found.folder}, after {found.step} steps")
    return Found(found.folder, found.step, rewind(out, found.step))


# ---------------------------------------------------------------- which checkpoint


def find(config, out: Path, say: Callable[[str], None]) -> Found | None:
    """The checkpoint that --resume asks for. Raises ValueError if there should be one and none is whole."""
    if config.resume == "never":
        return None
    if config.resume != "auto":
        return named(Path(config.resume))
    checkpoints = out / "checkpoints"
    tracker, steps = read_canonical(checkpoints / TRACKER), steps_in(checkpoints)
    if not steps and (tracker == {"step": 0} or not (checkpoints / TRACKER).exists()):
        return None  # none has ever been completed here
    give_up = "; --resume never moves them aside and starts anew, --resume DIR takes one of your choice"
    if tracker is None:
        raise ValueError(f"{checkpoints}/ holds checkpoints, but {TRACKER} is missing or was changed{give_up}")
    for step in steps:
        folder = checkpoints / f"step_{step}"
        if wrong := damage(folder):
            say(f"DAMAGED CHECKPOINT {folder}: {wrong}; the one before is used")
            continue
        if is_finished(out, step, config.steps):
            return None
        return Found(folder, step)
    raise ValueError(f"{checkpoints}/: none of its {len(steps)} checkpoints is whole, and {TRACKER} names {tracker}{give_up}")


def named(folder: Path) -> Found:
    """The checkpoint in a folder that the user names."""
    step = step_of(folder)
    if step is None:
        raise ValueError(f"--resume {folder}: not the folder of a checkpoint, which is called step_<n>; or say auto or never")
    if wrong := damage(folder):
        raise ValueError(f"--resume {folder}: the checkpoint is damaged: {wrong}")
    return Found(folder, step)


def is_finished(out: Path, step: int, steps: int) -> bool:
    """Whether the run did its --steps: it leaves a last row then, after its last checkpoint."""
    rows = list(whole_rows(out / "metrics.jsonl"))
    return step > steps or (step == steps and bool(rows) and rows[-1]["step"] >= step)


def compare(config, found: Found, say: Callable[[str], None]) -> None:
    """Raises ValueError for a setting that would make another run of it; says which others differ."""
    if found.step > config.steps:
        raise ValueError(f"--steps {config.steps}: the checkpoint {found.folder} has more steps behind it")
    saved, now = json.loads((found.folder / COMMON).read_text())["config"], settings_of(config)
    differ = {name: saved[name] for name in now if name in saved and saved[name] != now[name]}
    for name in SAME:
        if name in differ:
            raise ValueError(
                f"--{dashed(name)} {shown(now[name])}: the checkpoint {found.folder} was made with {shown(differ[name])}; "
                f"--resume never starts anew"
            )
    if changed := [f"--{dashed(name)} {shown(now[name])} (was {shown(old)})" for name, old in differ.items() if name not in FREE]:
        say(f"changed since {found.folder}: {', '.join(changed)}")


def shown(value) -> str:
    """A setting's value as JSON has it, in the words of the command line."""
    return as_text(tuple(value) if isinstance(value, list) else value) or '""'


# ---------------------------------------------------------------- what is there


def move_aside(out: Path, say: Callable[[str], None]) -> None:
    """What an earlier run left is moved, not overwritten."""
    if any((out / name).exists() for name in ("metrics.jsonl", "checkpoints", "eval.json")):
        aside = next(path for i in range(1, 10**6) if not (path := out.with_name(f"{out.name}-{i}")).exists())
        out.rename(aside)
        say(f"moved the earlier run in {out} to {aside}")


def rewind(out: Path, step: int) -> float:
    """Drop what was recorded of steps from `step` on, which are done again; returns when the rest ended (s, on the run's clock).

    Later checkpoints are of a future that won't be: they are put aside, and never read again.
    """
    for name in ("metrics.jsonl", "samples.jsonl"):
        keep_rows(out / name, lambda row: row["step"] < step)
    for path in (out / "spans").glob("rank*.jsonl"):
        keep_rows(path, lambda row: row[-1] < step)  # a record's last field is its step
    checkpoints = out / "checkpoints"
    for folder in checkpoints.glob(f"step_*{PARTIAL}*"):
        put_away(folder)
    for later in steps_in(checkpoints):
        if later > step:
            (checkpoints / f"step_{later}").rename(next_free(checkpoints / f"aside_{later}"))
    if (checkpoints / f"step_{step}").exists():
        write_whole(checkpoints / TRACKER, {"step": step})
    return max((span.end for span in timeline.read(out / "spans").spans), default=0.0)


def next_free(path: Path) -> Path:
    """The path, or with a number behind it if that is taken."""
    return next(p for i in range(10**6) if not (p := path.with_name(f"{path.name}-{i}") if i else path).exists())


def keep_rows(path: Path, keep: Callable) -> None:
    """Drop the other rows of a JSONL file, and a last one that was cut short."""
    if path.exists():
        rows = [row for row in whole_rows(path) if keep(row)]
        new = path.with_name(f"{path.name}.new")
        new.write_text("".join(json.dumps(row) + "\n" for row in rows))
        new.replace(path)


def whole_rows(path: Path):
    """The rows of a JSONL file, but one at its end that was cut short."""
    for line in path.open() if path.exists() else ():
        if line.endswith("\n"):
            yield json.loads(line)
