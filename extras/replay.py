"""Replays: --record keeps what a run serves, and --samples RUN trains on it again, without engines."""

from dataclasses import asdict
from itertools import product
from pathlib import Path

from algorithms import algorithm_of
from checkpoint import ANSWERED, NAMED, SAME, batch_from
from config import Config, as_text, dashed
from modes import serve
from runtime.atomic_files import append, whole_rows, writing
from runtime.errors import UserError
from scheduling.layout import Placement
from state import Controller, RolloutBatch

FILE = "record/step_{}/{}-of-{}.jsonl"  # step, controller, controllers that serve
TRAINING = {"algorithm", "lora", "critic", "teacher", "eval_data", "samples"}  # these may change
FIXED = sorted({*SAME, *NAMED, *ANSWERED, "ahead", "over_dispatch", "critic_warmup"} - TRAINING)


def settings_of(config: Config) -> dict[str, str]:
    known = vars(algorithm_of(config)) | vars(config)
    return {name: as_text(known[name]) for name in FIXED}


async def served(c: Controller, step: int) -> RolloutBatch:
    """Return a step's batch from --samples, or serve it and, with --record, keep it as exact JSON."""
    name = FILE.format(step, c.same_duty.index, c.same_duty.size)
    if c.config.samples:
        *_, row = whole_rows(Path(c.config.samples, name))  # a step that was done again has two
        return batch_from(row["batch"])
    batch = await serve(c)
    if c.config.record:
        with writing(Path(c.config.out, name)) as path:
            path.parent.mkdir(parents=True, exist_ok=True)
        append(path, [{"settings": settings_of(c.config), "batch": asdict(batch)}])
    return batch


def check(config: Config, placement: Placement) -> None:
    """Raise UserError unless --samples has each step of this run, served with its settings."""
    if not config.samples:
        return
    where = f"--samples {config.samples}"
    if Path(config.samples).resolve() == Path(config.out).resolve():
        raise UserError(f"{where}: this run would move it aside: name another --out")
    now = settings_of(config)
    ranks = len(placement.servers)
    for step, rank in product(range(config.steps), range(ranks)):
        path = Path(config.samples, FILE.format(step, rank, ranks))
        rows = [*whole_rows(path)]
        if not rows:
            raise UserError(
                f"{where}: {path} is missing: that run needs --record, "
                f"{ranks} ranks that serve, and --steps {config.steps} or more"
            )
        before = rows[-1]["settings"]
        for name in FIXED:
            if before.get(name) != now[name]:
                raise UserError(f"{where}: that run had {dashed(name)} {before.get(name)!r}")
