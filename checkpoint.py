"""Checkpoints: the whole state of a run, complete or invisible; saved while engines serve, and gone on from.

    OUT/checkpoints/step_<n>/                 n steps done
        SHA256SUMS                            of every other file
        megatron/, critic_<name>/             trainers and optimizers (see training/sharded_checkpoint.py)
        common.json                           what is the same on every controller
        controllers/rank_<r>.json             what isn't: answers that were cut off, counts, random states
        hf/, hf_critic_<name>/                on request: Hugging Face directories
    OUT/checkpoints/step_<n>.partial-<pid>/   being written, or was when the run died; never read
    OUT/checkpoints/archived_<n>-<i>/         damaged, or of steps that were done again; never read

A save takes its snapshot while the trainers have the device: each rank forks a process, whose memory stays
as it was, and goes on. Once all have ended well, rank 0 completes it: checksums, then the folder's name, each
on the disk before the next. A save that fails costs a line, not the run.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from config import Config, UserError, as_text, dashed
from reporting import timeline
from runtime import atomic_files
from runtime.atomic_files import PARTIAL, step_of, steps_in, sync
from runtime.background_writer import BackgroundWriter
from runtime.out_folder import archive, next_free
from runtime.world import World, on_rank_0
from sample import sample_from_json
from scheduling.rebalance import RequestStats, Split, StepStats

if TYPE_CHECKING:
    from controller import Controller
    from training.trainer import Trainer

COMMON = "common.json"
POLL_S = 0.05
# of the controller's State
COUNTERS = ("step", "groups_per_kept", "empty_steps", "skips", "log_multiplier")
# settings whose change makes another run of it; of the algorithm, its row
SAME = ("seed", "model", "critic", "judge", "cost_judge", "rule", "cost_rule", "reward_weights")
SAME += ("data", "algorithm", "prompts_per_step", "answers_per_prompt")
FREE = ("preset", "out", "resume", "port")  # nobody needs to hear that these differ

Writers = dict[str, Callable[..., Any]]  # by the folder that each writes
Part = tuple[dict[str, list], dict[str, str]]  # descriptions of shards by folder; SHA-256 by file


def state_of(c: Controller) -> tuple[dict, dict]:
    """What is the same on every controller between two steps, and this one's own. JSON, floats exactly."""
    import torch

    common = {"ranks": c.world.size, "config": dict(vars(c.config)), "files": c.checkpoints.files}
    common |= {"prompts": c.prompts.state()} | {name: vars(c.state)[name] for name in COUNTERS}
    common |= {
        "split": c.placement.plan.split,
        "history": [asdict(stats) for stats in c.state.history],
    }
    own = {
        "groups": [[dict(vars(sample)) for sample in group] for group in c.prompts.groups.values()]
    }
    return common, own | {"rewards": c.rewards.state(), "random": torch.get_rng_state().tolist()}


def trainers_of(c: Controller) -> dict[str, Trainer]:
    """The models that are trained, by their folder in a checkpoint."""
    return {"megatron": c.placement.actor} | {
        f"critic_{each.name}": each for each in c.placement.critics
    }


async def restore(c: Controller, folder: Path) -> None:
    """Take a checkpoint over, on any number of ranks, while all engines sleep (collective)."""
    for name, trainer in trainers_of(c).items():
        await c.placement.give_device_to(trainer)
        await c.world.run(trainer.restore, folder / name)
    common = json.loads((folder / COMMON).read_text())
    paths = [folder / f"controllers/rank_{rank}.json" for rank in range(common["ranks"])]
    restore_controller(c, common, [json.loads(path.read_text()) for path in paths])


def restore_controller(c: Controller, common: dict, controllers: list[dict]) -> None:
    """Take what `state_of` returned on all. On another number of ranks the run begins with its first plan."""
    import torch

    actor, rank = c.placement.actor, c.world.rank
    vars(c.state).update({name: common[name] for name in COUNTERS})
    rows = [group for own in controllers for group in own["groups"]]
    groups = [[sample_from_json(row) for row in group] for group in rows]
    c.prompts.load_state(
        common["prompts"], groups, actor.dp_size, actor.dp_rank if actor.is_head else -1
    )
    # to be summed
    c.rewards.load_state([own["rewards"] for own in controllers] if rank == 0 else [])
    split, history = Split(*common["split"]), [stats_from(row) for row in common["history"]]
    plans = {plan.split: plan for plan in c.placement.plans}
    if (
        common["ranks"] == c.world.size
        and {split, *(stats.split for stats in history)} <= plans.keys()
    ):
        c.placement.plan, c.state.history = plans[split], history
    if rank < len(controllers):
        torch.set_rng_state(torch.tensor(controllers[rank]["random"], dtype=torch.uint8))


def stats_from(row: dict) -> StepStats:
    """The inverse of asdict."""
    roles = {role: RequestStats(**row[role]) for role in ("rollout", "genrm")}
    return StepStats(
        **row | roles | {"split": Split(*row["split"]), "lengths": tuple(row["lengths"])}
    )


def write_part(
    folder: Path, rank: int, state: tuple[dict, dict], shards: Writers, hf: Writers
) -> Part:
    """Write one rank's files. Runs in the forked process. hf: empty on most ranks."""
    common = {COMMON: state[0]} if rank == 0 else {}
    own = {f"controllers/rank_{rank}.json": state[1]}
    mine = [*common, *own, *(f"{name}/__{rank}_*" for name in shards)]
    mine += [f"{name}/*" for name in hf]
    mine += [f"{name}/common.pt" for name in shards if rank == 0]
    try:
        described = {name: write() for name, write in shards.items()}
        for name, value in (common | own).items():
            (folder / name).write_text(json.dumps(value))
        for name, write in hf.items():
            write(folder / name)
        return described, sync_and_hash(folder, mine)
    except OSError:  # a disk that is full: the run needs what is left of it
        for path in [path for name in mine for path in folder.glob(name)]:
            path.unlink()
        raise


def sync_and_hash(folder: Path, patterns: list[str]) -> dict[str, str]:
    """Put files of a checkpoint on the disk; returns their SHA-256 by name."""
    files = [path for pattern in patterns for path in folder.glob(pattern)]
    for path in files:
        sync(path)
    return {str(path.relative_to(folder)): atomic_files.sha256(path) for path in files}


@dataclass
class Saving:
    """A checkpoint on its way."""

    step: int
    folder: Path
    writer: BackgroundWriter
    complete_shards: Writers


@dataclass
class Checkpoints:
    """Saves one run's state under `out` (collective). newest: step of its newest complete checkpoint."""

    config: Config
    world: World
    out: Path
    newest: int | None = None
    start_writer: Callable[[Callable[[], Part]], BackgroundWriter] = BackgroundWriter
    saving: Saving | None = None

    def __post_init__(self) -> None:
        # as they are at the start; rank 0 alone saves them
        self.files = {} if self.world.rank else sums_of_files(self.config)

    def is_due(self, step: int, *every: int) -> bool:
        """Whether `step` is one of those every so many (0: never), or the last."""
        return any(n and (step % n == 0 or step == self.config.steps) for n in every)

    async def save(self, c: Controller) -> None:
        """Begin a checkpoint, if one is due. Returns once the snapshot is taken. All engines sleep."""
        if self.is_due(c.state.step, self.config.save_every, self.config.save_hf_every):
            with c.timeline.span("save"):
                await self.finish(c, wait=True)
                await self._begin(c)

    async def save_now(self, c: Controller) -> None:
        """Save and wait for it, before a run with --save-every stops. All engines sleep."""
        await self.finish(c, wait=True)
        if self.newest != c.state.step and self.config.save_every:
            await self._begin(c)
            await self.finish(c, wait=True)

    async def finish(self, c: Controller, wait: bool = False) -> None:
        """Complete what all ranks have written, if they have, or `wait` for it, --timeout-s at most."""
        waited_s = 0.0  # counted, not measured: the same on every rank
        while self.saving:
            result = self.saving.writer.result()
            # None of a rank that still writes
            errors = await self.world.gather(result and result[1])
            error = next(filter(None, errors), "")
            if not error and None in errors and waited_s >= self.config.timeout_s:
                error = f"not written after {waited_s:.0f} s"
            if error or None not in errors:
                await self._end(c, error)
            elif not wait:
                return
            else:
                await asyncio.sleep(POLL_S)
                waited_s += POLL_S

    async def _begin(self, c: Controller) -> None:
        step, rank, state, trainers = c.state.step, self.world.rank, state_of(c), trainers_of(c)
        folder_name = await self.world.broadcast(f"step_{step}{PARTIAL}{os.getpid()}")
        folder = self.out / "checkpoints" / folder_name
        try:
            await on_rank_0(self.world, make_folders, folder, "controllers", *trainers)
        except OSError as error:
            return self._give_up(c, step, folder, str(error))
        shards, complete_shards, hf = {}, {}, {}
        # the actor last, whose weights are pushed next
        for name, trainer in reversed(trainers.items()):
            await c.placement.give_device_to(trainer)
            shards[name], complete_shards[name] = await self.world.run(
                trainer.snapshot, folder / name
            )
            if self.is_due(step, self.config.save_hf_every):
                weights = await self.world.run(trainer.whole_weights)
                as_hf = "hf" if name == "megatron" else f"hf_{name}"
                hf |= {as_hf: partial(trainer.write_hf, weights)} if weights else {}
        work = partial(write_part, folder, rank, state, shards, hf)
        # its thread lives as long as the run
        writer = await self.world.run(self.start_writer, work)
        self.saving = Saving(step, folder, writer, complete_shards)

    async def _end(self, c: Controller, error: str) -> None:
        """Complete the checkpoint that all ranks have written, or give up one that a rank couldn't write."""
        saving, self.saving = self.saving, None
        parts = await self.world.gather_on_0(None if error else saving.writer.result()[0])
        saving.writer.close()
        await self.world.barrier()  # nobody writes any more
        if error:
            return self._give_up(c, saving.step, saving.folder, error)
        try:
            await on_rank_0(self.world, complete, saving, parts, self.config.keep)
        except OSError as caught:
            return self._give_up(c, saving.step, saving.folder, str(caught))
        self.newest = saving.step

    def _give_up(self, c: Controller, step: int, folder: Path, error: str) -> None:
        if self.world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        left = (
            "there is none yet"
            if self.newest is None
            else f"that of step {self.newest} stays the newest"
        )
        c.report.note(
            f"CHECKPOINT FAILED: step {step} could not be saved: {error}; {left}, training goes on"
        )


def make_folders(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)


def complete(saving: Saving, parts: list[Part], keep: int) -> None:
    """Every rank's files are on the disk. In this order, because rank 0 may die between any two lines."""
    folder, checkpoints = saving.folder, saving.folder.parent
    checksums = {name: checksum for _, files in parts for name, checksum in files.items()}
    for trainer, complete_shards in saving.complete_shards.items():
        complete_shards([described[trainer] for described, _ in parts])
        checksums |= sync_and_hash(folder, [f"{trainer}/.metadata", f"{trainer}/metadata.json"])
    lines = [f"{checksum}  {name}\n" for name, checksum in checksums.items()]
    (folder / atomic_files.CHECKSUMS).write_text("".join(lines))
    for path in (folder / atomic_files.CHECKSUMS, *{(folder / name).parent for name in checksums}):
        sync(path)
    atomic_files.remove_atomically(checkpoints / f"step_{saving.step}")  # a damaged one
    folder.rename(checkpoints / f"step_{saving.step}")
    sync(checkpoints)
    older = [step for step in steps_in(checkpoints) if step < saving.step]
    for step in reversed(older[keep - 1 :]):  # oldest first
        atomic_files.remove_atomically(checkpoints / f"step_{step}")


class ResumePoint(NamedTuple):
    """A whole checkpoint that the run goes on from, and where on the run's own clock (s) its record ends."""

    folder: Path
    step: int
    ended_s: float = 0.0


async def prepare_out(
    config: Config, world: World, say: Callable[[str], None]
) -> ResumePoint | None:
    """Make --out ready for this run; None for one from nothing. All raise rank 0's error (collective)."""
    try:
        if any(await world.gather(was_obeyed(config))):
            # what that has led to is in the newest checkpoint
            config = replace(config, resume="auto")
        folder = await find_checkpoint(config, world, say)
        return await on_rank_0(world, make_ready, config, folder, say)
    except OSError as error:
        raise UserError(f"--out {config.out} can't be used: {error}") from None


def was_obeyed(config: Config) -> bool:
    """Whether --resume was: torchrun has started this rank again, and a checkpoint since it began."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        # without torchrun the parent may be outside the container, where psutil can't look
        return False
    folder, began = Path(config.out, "checkpoints"), psutil.Process(os.getppid()).create_time()
    return any((folder / f"step_{n}").stat().st_mtime > began for n in steps_in(folder))


async def find_checkpoint(config: Config, world: World, say: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint, or that of --resume (collective: each reads a share). UserError: none."""
    resume, checkpoints = config.resume, Path(config.out) / "checkpoints"
    steps = await world.broadcast(steps_in(checkpoints)) if resume == "auto" else []
    named = [Path(resume)] if resume not in ("auto", "never") else []
    if named and step_of(named[0]) is None:
        choice = "which is called step_<n>; or say auto or never"
        raise UserError(f"--resume {resume}: not the folder of a checkpoint, {choice}")
    for folder in named or [checkpoints / f"step_{step}" for step in steps]:
        found = await world.gather(
            await world.run(atomic_files.verify, folder, world.rank, world.size)
        )
        if not (damage := next(filter(None, found), "")):
            return folder
        if named:
            raise UserError(f"--resume {folder}: the checkpoint is damaged: {damage}")
        if world.rank == 0:
            say(f"DAMAGED CHECKPOINT {folder}: {damage}; the one before is used")
    if steps:
        choice = (
            "--resume never moves them aside and starts anew, --resume DIR takes one of your choice"
        )
        raise UserError(f"{checkpoints}/: none of its {len(steps)} checkpoints is whole; {choice}")
    return None


def make_ready(
    config: Config, folder: Path | None, say: Callable[[str], None]
) -> ResumePoint | None:
    """Move away what an earlier run left, or cut it back to the checkpoint that this one goes on from."""
    out, step = Path(config.out), step_of(folder) if folder else 0
    last = max(
        (row["step"] for row in atomic_files.complete_rows(out / "metrics.jsonl")), default=-1
    )
    if config.resume == "auto" and (step > config.steps or step == config.steps <= last):
        folder = None  # the run did its steps: it left a last row then, after its last checkpoint
    if folder:
        compare(config, folder, say)
    if folder is None or folder.parent.resolve() != (out / "checkpoints").resolve():
        archive(out, say)
    for name in ("spans", "logs"):
        (out / name).mkdir(parents=True, exist_ok=True)
    if folder is None:
        return None
    say(f"goes on from {folder}, after {step} steps")
    return ResumePoint(folder, step, truncate_to(out, step))


def compare(config: Config, folder: Path, say: Callable[[str], None]) -> None:
    """Raises UserError for a setting or file that would make another run of it; says what else differs."""
    common, now = json.loads((folder / COMMON).read_text()), json.loads(json.dumps(vars(config)))
    if common["step"] > config.steps:
        raise UserError(f"--steps {config.steps}: the checkpoint {folder} has more steps behind it")
    # before there was --lr-decay-to, all rates fell to a tenth
    before, changed = now | {"lr_decay_to": 0.1} | common["config"], []
    for name in [name for name in now if name not in FREE and now[name] != before[name]]:
        new, old = (as_text(settings[name]) or '""' for settings in (now, before))
        if name in SAME and (name != "algorithm" or now[name][0] != before[name][0]):
            made = f"the checkpoint {folder} was made with {old}"
            raise UserError(f"--{dashed(name)} {new}: {made}; --resume never starts anew")
        changed.append(f"--{dashed(name)} {new} (was {old})")
    for path, checksum in sums_of_files(config).items():
        if common.get("files", {}).get(path, checksum) != checksum:  # an older checkpoint has none
            raise UserError(
                f"{path} has changed since {folder} was made; --resume never starts anew"
            )
    if changed:
        say(f"changed since {folder}: {', '.join(changed)}")


def sums_of_files(config: Config) -> dict[str, str]:
    """SHA-256 by path of --data and of the files with rules, which may be spelled FILE.py:name."""
    specs = (config.data, *config.rule, *config.cost_rule)
    paths = [spec if Path(spec).is_file() else spec.rpartition(":")[0] for spec in specs]
    return {path: atomic_files.sha256(Path(path)) for path in paths if Path(path).is_file()}


def truncate_to(out: Path, step: int) -> float:
    """Drop what is recorded of steps from `step` on, to be done again. Returns when the rest ended (s)."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        atomic_files.keep_rows(out / name, lambda row: row["step"] < step)
    for folder in (out / "checkpoints").glob(f"step_*{PARTIAL}*"):
        shutil.rmtree(folder)
    for later in [later for later in steps_in(out / "checkpoints") if later > step]:
        target = next_free(out / "checkpoints" / f"archived_{later}")
        (out / "checkpoints" / f"step_{later}").rename(target)
    return timeline.truncate(out / "spans", step)
