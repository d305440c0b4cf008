"""Checkpoints: the complete state of a run. They are atomic, and are written while engines serve.

    OUT/checkpoints/step_<n>/                 the state after n steps
        SHA256SUMS                            checksums of all other files
        megatron/, critic_<name>/             trainers and optimizers (see training/sharded_checkpoint.py)
        common.json                           the state that is the same on every controller
        controllers/rank_<r>.json             the rest: answers that were cut off, counts, random states
    OUT/checkpoints/step_<n>.partial-<pid>/   still being written, or left when the run died; never read
    OUT/checkpoints/archived_<n>-<i>/         damaged, or its steps were done again; never read
    OUT/hf/step_<n>/, OUT/hf_critic_<name>/   on request: Hugging Face directories, which are all kept

A save takes a snapshot while the trainers are awake: GPU memory is copied to the host. Then each rank forks a
process to write it, and continues. When all writers have succeeded, rank 0 finishes the save at the end of a
step: it syncs the checksums to the disk, then the folder's new name. If a save fails, the run continues.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from config import Config, as_text, dashed
from runtime import atomic_files, timeline
from runtime.atomic_files import PARTIAL, step_of, steps_in
from runtime.background_writer import BackgroundWriter
from runtime.checkpoint_files import Part, make_folders, name_folders, write_part
from runtime.errors import RunLost, UserError
from runtime.out_folder import ResumePoint, archive, next_free
from runtime.world import World, on_rank_0
from sample import sample_from_json
from scheduling.measured import RequestStats, Split, StepStats
from state import Controller, RolloutBatch

if TYPE_CHECKING:
    from training.trainer import Trainer

COMMON = "common.json"
LAYOUT = 9  # increase it when the contents of checkpoints change
POLL_S = 0.05
# Changing one of these makes it a different run. Algorithms are compared by name, files by their contents.
SAME = ("seed", "template", "reward_weights", "algorithm", "prompts_per_step", "answers_per_prompt")
SAME += ("lora", "samples")
NAMED = ("model", "critic", "judge", "cost_judge", "rule", "cost_rule", "data", "eval_data")
NAMED += ("environment", "teacher")
READ = (".json", ".jinja", ".model", ".safetensors", ".txt")  # files that make a model
# These mustn't change while answers that were made with them wait to be trained on.
ANSWERED = ("temperature", "max_new_tokens", "answer_tokens", "max_model_len")
ANSWERED += ("judge_format", "judge_max_new_tokens", "video_fps", "video_frames")
FREE = ("preset", "out", "resume", "port")  # a change isn't reported when a run resumes

Say = Callable[[str], None]


def state_of(c: Controller) -> tuple[dict, dict]:
    """Return the state that all controllers share between two steps, and this one's own, as exact JSON."""
    import torch

    common = {
        "layout": LAYOUT,
        "ranks": c.world.size,
        "config": dict(vars(c.config)),
        "contents": c.checkpoints.contents,
        "prompts": c.prompts.state(),
        "split": c.devices.next,
    } | asdict(c.state)
    own = {
        "groups": [list(map(vars, group)) for group in c.prompts.groups.values()],
        "rewards": c.rewards.counts(),
        "random": torch.get_rng_state().tolist(),
        "ahead": asdict(c.ahead) if c.ahead is not None else None,
    }
    return common, own


def trainers_of(c: Controller) -> dict[str, Trainer]:
    """Return the trained models by their folder in a checkpoint."""
    critics = {f"critic_{critic.name}": critic for critic in c.devices.critics}
    return {"megatron": c.devices.actor} | critics


async def restore(c: Controller, folder: Path) -> None:
    """Load a checkpoint, on any number of ranks, while all engines sleep (collective: all ranks)."""
    import torch

    for name, trainer in trainers_of(c).items():
        await c.devices.give_device_to(trainer)
        await c.world.run(trainer.restore, folder / name)
    common = json.loads((folder / COMMON).read_text())
    paths = [folder / f"controllers/rank_{rank}.json" for rank in range(common["ranks"])]
    controllers = [json.loads(path.read_text()) for path in paths]
    vars(c.state).update({name: common[name] for name in vars(c.state).keys() - {"history"}})
    rows_of_groups = [rows for own in controllers for rows in own["groups"]]
    groups = [list(map(sample_from_json, rows)) for rows in rows_of_groups]
    holder = c.same_duty.index if c.devices.serves else -1
    c.prompts.load_state(common["prompts"], groups, c.same_duty.size, holder)
    c.ahead = c.checkpoints.newest_ahead = restored_ahead(c, [own["ahead"] for own in controllers])
    # they are summed over the ranks, so only rank 0 loads them
    c.rewards.load_counts([own["rewards"] for own in controllers] if c.world.rank == 0 else [])
    split = Split(*common["split"])
    history = [StepStats.of_json(row) for row in common["history"]]
    splits = {split, *(stats.split for stats in history)}
    if common["ranks"] == c.world.size and splits <= {*c.devices.splits}:
        c.devices.next = split
        c.state.history = history
    if c.world.rank < len(controllers):
        random = controllers[c.world.rank]["random"]
        torch.set_rng_state(torch.tensor(random, dtype=torch.uint8))


def restored_ahead(c: Controller, rows: list[dict | None]) -> RolloutBatch | None:
    """Return a batch that was served but not trained on, or None. Rank 0 gets all of its samples."""
    if not rows[0]:
        return None
    parts = [batch_from(row) for row in rows]
    actor = c.devices.actor
    wrote = max((v for part in parts for s in part.kept for v in s.versions), default=actor.version)
    if wrote < actor.version:
        actor.lag = actor.version - wrote  # the batch is older than the next step's weights
    total = StepStats.total([part.stats for part in parts if part.stats])
    if total.split not in c.devices.splits:
        total = replace(total, split=c.devices.split)
    same = {name: vars(parts[0])[name] for name in ("missing_groups", "groups_per_kept")}
    batch = RolloutBatch(waves=total.waves, **same)
    added = ("kept", "dropped", "filtered", "carried", "tokens", "moved", "aborted", "latencies")
    if c.world.rank == 0:
        batch.stats = total
        batch.from_others = parts[0].from_others + sum(len(part.kept) for part in parts[1:])
        for part in parts:
            for name in added:
                vars(batch)[name] += vars(part)[name]
    elif c.devices.serves:
        batch.stats = replace(total, rollout=RequestStats(), genrm=RequestStats(), lengths=())
    return batch


def batch_from(row: dict) -> RolloutBatch:
    """Read a batch from the JSON of `asdict`."""
    read = {name: list(map(sample_from_json, row[name])) for name in ("kept", "dropped")}
    for name in ("filtered", "carried"):
        read[name] = [list(map(sample_from_json, group)) for group in row[name]]
    read["stats"] = row["stats"] and StepStats.of_json(row["stats"])
    return RolloutBatch(**row | read)


@dataclass
class Saving:
    """A checkpoint that is being written."""

    step: int
    folder: Path
    writer: BackgroundWriter
    # folder -> function that writes the index of all ranks' files there: see take_snapshot
    write_index: dict[str, Callable[[list[list]], None]]
    ahead: RolloutBatch | None


@dataclass
class Checkpoints:
    """The checkpoints of one run under `out`. newest: the step of the newest complete one."""

    config: Config
    world: World
    out: Path
    contents: dict[str, list[str]]  # the result of contents_of at the start
    point: ResumePoint | None = None  # where the run continues from
    newest: int | None = None
    newest_ahead: RolloutBatch | None = None  # the batch in the newest one
    failure: RunLost | None = None  # why the last save failed
    start_writer: Callable[[Callable[[], Part]], BackgroundWriter] = BackgroundWriter
    saving: Saving | None = None

    async def restore(self, c: Controller) -> None:
        """Load the checkpoint that the run continues from, if there is one (collective: all ranks)."""
        if self.point:
            await restore(c, self.point.folder)

    def is_due(self, step: int, *every: int) -> bool:
        """Return whether `step`, from 1, is the last, or a multiple of one of `every` (0: never)."""
        return any(n and step and (step % n == 0 or step == self.config.steps) for n in every)

    async def save(self, c: Controller) -> None:
        """Begin a checkpoint if one is due, and return once the snapshot is taken (collective: all ranks)."""
        if self.is_due(c.state.step, self.config.save_every, self.config.save_hf_every):
            with c.timeline.span("save"):
                await self.finish(c, wait=True)
                await self._begin(c)

    async def save_now(self, c: Controller) -> None:
        """Save, and wait for its end, before a run with --save-every stops (collective: all ranks)."""
        await self.finish(c, wait=True)
        is_saved = self.newest == c.state.step and self.newest_ahead is c.ahead
        if self.config.save_every and not is_saved:
            await self._begin(c)

    async def close(self, c: Controller) -> None:
        """Wait until the last save is finished (collective: all ranks). Raises RunLost if it failed."""
        await self.finish(c, wait=True)
        if self.failure:
            raise self.failure

    async def finish(self, c: Controller, wait: bool = False) -> None:
        """Finish a save that all ranks have written (collective: all ranks). wait: at most --timeout-s."""
        waited_s = 0.0  # counted, not measured, so that it is the same on every rank
        while self.saving:
            result = self.saving.writer.result()
            # from each rank: None while it writes, "" when it is done, or an error message
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
        """Take a snapshot, and start the process that writes it."""
        step = c.state.step
        common, own = state_of(c)
        trainers = trainers_of(c)
        folder_name = await self.world.broadcast(f"step_{step}{PARTIAL}{os.getpid()}")
        folder = self.out / "checkpoints" / folder_name
        try:
            await on_rank_0(self.world, make_folders, folder, "controllers", *trainers)
        except OSError as error:
            return self._give_up(c, step, folder, str(error))
        writes = {}
        write_index = {}
        hf = {}
        # the actor comes last, because its weights are pushed next
        for name, trainer in reversed(trainers.items()):
            await c.devices.give_device_to(trainer)
            snapshot = await self.world.run(trainer.snapshot, folder / name)
            writes[name], write_index[name] = snapshot
            if self.is_due(step, self.config.save_hf_every):
                kind = "hf" if name == "megatron" else f"hf_{name}"
                if weights := await self.world.run(trainer.whole_weights):
                    hf[self.out / kind / folder_name] = partial(trainer.write_hf, weights)
        state = {f"controllers/rank_{self.world.rank}.json": own}
        if self.world.rank == 0:
            state[COMMON] = common
        work = partial(write_part, folder, self.world.rank, state, writes, hf)
        # fork in the world's thread, which lives as long as the run: a writer dies with the forking thread
        writer = await self.world.run(self.start_writer, work)
        self.saving = Saving(step, folder, writer, write_index, c.ahead)

    async def _end(self, c: Controller, error: str) -> None:
        """Finish a checkpoint that all ranks have written, or give up one with an error."""
        saving = self.saving
        self.saving = None
        written = None if error else saving.writer.result()[0]
        parts = await self.world.gather_on_0(written)
        saving.writer.close()
        await self.world.barrier()  # all writers have ended
        if not error:
            # the last step, on rank 0: the index, the checksums, then the folder's name
            folders = (saving.folder, saving.step, saving.write_index)
            try:
                await on_rank_0(self.world, name_folders, *folders, parts, self.config.keep)
            except OSError as caught:
                error = str(caught)
        if error:
            return self._give_up(c, saving.step, saving.folder, error)
        self.newest = saving.step
        self.newest_ahead = saving.ahead
        self.failure = None

    def _give_up(self, c: Controller, step: int, folder: Path, error: str) -> None:
        for unnamed in self.out.glob(f"*/{folder.name}") if self.world.rank == 0 else ():
            shutil.rmtree(unnamed, ignore_errors=True)
        newest = "none" if self.newest is None else f"that of step {self.newest}"
        self.failure = RunLost(f"step {step} could not be saved: {error}")
        c.report.note(f"CHECKPOINT FAILED: {self.failure}; the newest is {newest}")


async def open_checkpoints(config: Config, world: World, say: Say) -> Checkpoints:
    """Prepare --out, and find where to continue (collective: all ranks). Raises UserError if it can't."""
    contents = await on_rank_0(world, contents_of, config)
    try:
        if any(await world.gather(was_restarted_after_a_save(config))):
            config = replace(config, resume="auto")
        folder = await find_checkpoint(config, world, say)
        point = await on_rank_0(world, prepare_out, config, contents, folder, say)
    except OSError as error:
        raise UserError(f"--out {config.out} can't be used: {error}") from None
    newest = point.newest if point else None
    return Checkpoints(config, world, Path(config.out), contents, point, newest)


def was_restarted_after_a_save(config: Config) -> bool:
    """Return whether torchrun has restarted this rank after a save.

    Then --resume has had its effect: `never` or a folder were for the first start.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        # without torchrun the parent process may be outside the container, hidden from psutil
        return False
    folder = Path(config.out, "checkpoints")
    began = psutil.Process(os.getppid()).create_time()
    return any((folder / f"step_{n}").stat().st_mtime > began for n in steps_in(folder))


async def find_checkpoint(config: Config, world: World, say: Say) -> Path | None:
    """Return the checkpoint to resume from (collective: all ranks). Raises UserError if all are damaged."""
    if config.resume == "never":
        return None
    folders = [Path(config.resume)]
    if config.resume == "auto":
        steps = await world.broadcast(steps_in(Path(config.out, "checkpoints")))
        folders = [Path(config.out, f"checkpoints/step_{step}") for step in steps]
    elif step_of(folders[0]) is None:
        raise UserError(f"--resume {config.resume}: needs auto, never, or a folder step_<n>")
    for folder in folders:
        found = await world.run(atomic_files.verify, folder, world.rank, world.size)
        damage = next(filter(None, await world.gather(found)), "")  # each rank verifies some files
        if not damage:
            return folder
        if world.rank == 0:
            say(f"DAMAGED CHECKPOINT {folder}: {damage}")
    if not folders:
        return None
    raise UserError(
        f"--resume {config.resume}: no complete checkpoint: {damage}; "
        "--resume never moves all aside and starts over, --resume DIR uses another"
    )


def prepare_out(
    config: Config, contents: dict, folder: Path | None, say: Say
) -> ResumePoint | None:
    """Archive an earlier run's files, or cut them back to the checkpoint that this run continues from."""
    out = Path(config.out)
    step = step_of(folder) if folder else 0
    rows = atomic_files.whole_rows(out / "metrics.jsonl")
    # a finished run's last row is an evaluation after its last step
    is_done = any("time/step_s" not in row for row in rows)
    if config.resume == "auto" and is_done and step >= config.steps:
        folder = None
    if folder:
        compare(config, contents, folder, say)
    is_own = folder is not None and folder.parent.resolve() == (out / "checkpoints").resolve()
    if not is_own:
        archive(out, say, vars(config))
    for name in ("spans", "logs"):
        (out / name).mkdir(parents=True, exist_ok=True)
    if folder is None:
        return None
    say(f"resuming from {folder}, after {step} steps")
    return ResumePoint(folder, step, truncate_to(out, step), step if is_own else None)


def compare(config: Config, contents: dict, folder: Path, say: Say) -> None:
    """Raise UserError if a setting or file would make it a different run; report other changes."""
    common = json.loads((folder / COMMON).read_text())
    if common.get("layout") != LAYOUT:
        raise UserError(f"{folder} is from another version of nanoYATT; --resume never starts over")
    if common["step"] > config.steps:
        raise UserError(f"--steps {config.steps}: the checkpoint {folder} has done more than that")
    now = json.loads(json.dumps(vars(config)))
    before = now | common["config"]
    known = before | contents | common["contents"]
    fixed = SAME + NAMED + (ANSWERED if has_answers(folder) else ())
    changed = []
    for name in now:
        old = as_text(before[name]) or '""'
        new = as_text(now[name]) or '""'
        if name in fixed and contents.get(name, now[name]) != known[name]:
            if now[name] == before[name]:
                raise UserError(
                    f"--{dashed(name)} {new}: the checkpoint {folder} was made with other content; "
                    "--resume never starts over"
                )
            if name in ANSWERED:
                raise UserError(
                    f"--{dashed(name)} {new}: the checkpoint {folder} was made with {old}, "
                    "as were answers that wait in it; --resume never starts over"
                )
            raise UserError(
                f"--{dashed(name)} {new}: the checkpoint {folder} was made with {old}; "
                "--resume never starts over"
            )
        if now[name] != before[name] and name not in FREE:
            changed.append(f"--{dashed(name)} {new} (was {old})")
    if changed:
        say(f"changed since {folder}: {', '.join(changed)}")
    from actor import rates_around

    old, new = rates_around(common["step"], before["steps"], config)
    if new > old:
        say(f"with more --steps the learning rate rises again, from {old:g} to {new:g}")


def has_answers(folder: Path) -> bool:
    """Return whether a checkpoint holds answers: a batch that was served, or carried groups."""
    states = [json.loads(path.read_text()) for path in folder.glob("controllers/*.json")]
    carried = [sample for own in states for group in own["groups"] for sample in group]
    return any(own["ahead"] for own in states) or any(sample["response"] for sample in carried)


def contents_of(config: Config) -> dict[str, list[str]]:
    """Return what settings stand for, to compare: the algorithm's name, and the files' SHA-256."""
    contents = {"algorithm": [config.algorithm[0]]} | {name: [] for name in NAMED}
    with ThreadPoolExecutor() as threads:
        for name in NAMED:
            value = vars(config)[name]
            for spec in [value] if isinstance(value, str) else value:
                files = files_of(spec)
                _, _, function = spec.partition(".py:")  # none in a model's directory
                # files may move: only the function's name in FILE.py:name counts
                contents[name].append(function if files else spec)
                try:
                    contents[name] += threads.map(atomic_files.sha256, files)
                except OSError as error:
                    raise UserError(f"--{dashed(name)} {spec} can't be read: {error}") from None
    return contents


def files_of(spec: str) -> list[Path]:
    """Return the files of FILE, FILE.py:name, or a model's directory; none if it isn't a file."""
    if spec and Path(spec, "config.json").is_file():
        files = filter(Path.is_file, Path(spec).iterdir())
        return sorted(file for file in files if file.suffix in READ)
    return [path for path in map(Path, (spec, spec.rpartition(":")[0])) if path.is_file()]


def truncate_to(out: Path, step: int) -> float:
    """Drop the records of `step` and later ones, which are done again. Returns when the rest ended (s)."""
    for name in ("metrics.jsonl", "history.jsonl", "samples.jsonl"):
        atomic_files.keep_rows(out / name, lambda row: row["step"] < step)
    for folder in [*out.glob("checkpoints/step_*"), *out.glob("hf*/step_*")]:
        if PARTIAL in folder.name:
            shutil.rmtree(folder)
        elif (later := step_of(folder) or 0) > step:
            folder.rename(next_free(folder.with_name(f"archived_{later}")))
    return timeline.truncate(out / "spans", step)
