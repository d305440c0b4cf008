"""Checkpoints: the whole state of a run, written while engines serve; complete or invisible.

    OUT/checkpoints/step_<n>/                 n steps done
        manifest.json                         size and SHA-256 of every other file
        megatron/                             the policy and its optimizer (see shards.py)
        critic_<name>/                        the same of a critic, where the algorithm has one
        common.json                           what is the same on every controller
        controllers/rank_<r>.json             what is one controller's own: answers that were cut off, random states, counts
        hf/, hf_critic_<name>/                on request: Hugging Face directories
    OUT/checkpoints/step_<n>.partial-<pid>/   one that is being written, or was when the run died; never read
    OUT/checkpoints/latest.json               {"step": n}: the newest that is complete; 0 when there is none yet

A save takes its snapshot while the actor is awake: each rank forks a process, whose memory stays as it was, and goes on. Once all of
these have ended well, rank 0 alone completes the checkpoint: manifest, rename, tracker, each on the disk before the next. A save that
fails costs a line, not the run.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any


from runtime.atomic_files import MANIFEST, PARTIAL, canonical, digest, put_away, steps_in, sync_folder, write_whole
from runtime.background_writer import BackgroundWriter
from sample import Sample
from scheduling.rebalance import RequestStats as RoleLoad, StepStats as Load

FORMAT = 1  # of the JSON files
TRACKER, COMMON = "latest.json", "common.json"
HF = {"megatron": "hf"}  # the Hugging Face directory beside a trainer's folder; a critic's has its name
POLL_S = 0.05
COUNTERS = ("step", "groups_per_kept", "empty_steps", "skips", "log_multiplier")  # of the State
COUNTS = ("failed", "parsed")  # of a Judge


# ---------------------------------------------------------------- what is saved


def state_of(job) -> tuple[dict, dict]:
    """The run's state between two steps: what is the same on every controller, and this one's own. JSON, floats exactly.

    Later changes of the job don't change it, so it may be kept through a step that is given up.
    """
    state, judge = job.state, job.judge
    history = [asdict(load) | {"plan": load.plan.split} for load in state.history]
    common = {"format": FORMAT, "ranks": job.world.size, "config": settings_of(job.config), "split": job.plan.split}
    common |= {name: vars(state)[name] for name in COUNTERS} | {"history": history}
    common |= {"prompts": job.prompts.state(), "groups": job.groups.state()}
    carried = [[dict(vars(sample)) for sample in group] for group in job.groups.carried]
    own = {"carried": carried, "failed": list(judge.failed), "parsed": list(judge.parsed), "random": random_state()}
    return common, own


def trainers_of(job) -> dict[str, Any]:
    """The models that are trained, by the folder of a checkpoint that holds them."""
    return {"megatron": job.actor} | {f"critic_{critic.name}": critic for critic in job.critics}


async def restore(job, folder: Path) -> None:
    """Take a checkpoint over, on any number of ranks (collective). Actor and critics must be awake."""
    for name, trainer in trainers_of(job).items():
        await job.world.run(trainer.restore, folder / name)
    restore_controller(job, json.loads((folder / COMMON).read_text()), read_controllers(folder))


def restore_controller(job, common: dict, controllers: list[dict]) -> None:
    """Give this controller back what `state_of` returned on all of them, maybe another number. Not collective.

    What was written for a group goes to its new holder. The split falls back to the run's first when it doesn't exist any more, and
    what was measured on other ranks is forgotten.
    """
    state, judge, rank = job.state, job.judge, job.world.rank
    vars(state).update({name: common[name] for name in COUNTERS if name in common})  # those that came later may not be there
    job.prompts.load_state(common["prompts"])
    carried = [[Sample(**sample) for sample in group] for own in controllers for group in own["carried"]]
    job.groups.load_state(common["groups"], job.actor.dp_size, carried, job.actor.dp_rank if job.actor.is_head else -1)
    totals = ([sum(counts) for counts in zip(*(own[name] for own in controllers), strict=True)] for name in COUNTS)
    judge.failed, judge.parsed = ([count * (rank == 0) for count in counts] for counts in totals)  # they are only ever summed
    plans = {plan.split: plan for plan in job.plans}
    if common["ranks"] == job.world.size and {common["split"], *(load["plan"] for load in common["history"])} <= plans.keys():
        job.plan = plans[common["split"]]
        state.history = [load_from(row, plans) for row in common["history"]]
    if rank < len(controllers):
        set_random_state(controllers[rank]["random"])


def load_from(row: dict, plans: dict) -> Load:
    """The inverse of asdict, the plan by its split."""
    return Load(**row | {"plan": plans[row["plan"]], "rollout": RoleLoad(**row["rollout"]), "genrm": RoleLoad(**row["genrm"])})


def read_controllers(folder: Path) -> list[dict]:
    """What each controller saved as its own, by rank."""
    paths = folder.glob("controllers/rank_*.json")
    return [json.loads(path.read_text()) for path in sorted(paths, key=lambda path: int(path.stem.removeprefix("rank_")))]


def settings_of(config) -> dict:
    """Every setting, as JSON gives it back."""
    return json.loads(json.dumps(vars(config)))


def random_state() -> dict[str, str]:
    """Of this process's torch generators: device -> hexadecimal. Nothing else in a rank draws random numbers."""
    import torch

    states = {"cpu": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})
    return {device: state.numpy().tobytes().hex() for device, state in states.items()}


def set_random_state(states: dict[str, str]) -> None:
    """The inverse of `random_state`."""
    import torch

    tensors = {device: torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8) for device, state in states.items()}
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])


# ---------------------------------------------------------------- how it is saved


def write_part(
    folder: Path, rank: int, state: tuple[dict, dict], write_shards: dict[str, Callable[[], list]], write_hf: dict[str, Callable]
) -> tuple[dict[str, list], dict[str, list]]:
    """Write one rank's files; returns the descriptions of its shards, and size and SHA-256 of each file. Runs in the forked process.

    Both by folder; write_hf is empty on ranks that write no Hugging Face directory.
    """
    common, own = state
    mine = [f"controllers/rank_{rank}.json", *(f"{name}/__{rank}_*" for name in write_shards), *(f"{name}/*" for name in write_hf)]
    mine += [COMMON, *(f"{name}/common.pt" for name in write_shards)] if rank == 0 else []
    try:
        described = {name: write() for name, write in write_shards.items()}
        (folder / mine[0]).write_text(canonical(own))
        if rank == 0:
            (folder / COMMON).write_text(canonical(common))
        for name, write in write_hf.items():
            write(folder / name)
        return described, {str(path.relative_to(folder)): digest(path) for name in mine for path in folder.glob(name)}
    except OSError:  # a disk that is full: the run needs what is left of it
        for path in [path for name in mine for path in folder.glob(name)]:
            path.unlink()
        raise


@dataclass
class Saving:
    """A checkpoint on its way."""

    step: int
    folder: Path
    writer: Any
    complete_shards: dict[str, Callable[[list[list]], None]]  # by the folder of a trainer


class Checkpoints:
    """Saves one run's state under `out`, one checkpoint at a time. Its methods are collective.

    newest: step of the newest checkpoint of this run that is complete; None before the first. writer: how `work` is run.
    """

    def __init__(self, config, world, out: Path, newest: int | None = None, writer=BackgroundWriter):
        self.config, self.world, self.newest = config, world, newest
        self.folder = out / "checkpoints"
        self._start_writer = writer
        self._saving: Saving | None = None

    def is_due(self, step: int) -> bool:
        """Whether a run saves after `step` steps: every --save-every and --save-hf-every, and at the end."""
        every = [n for n in (self.config.save_every, self.config.save_hf_every) if n]
        return any(step % n == 0 or step == self.config.steps for n in every)

    async def save(self, job) -> None:
        """Begin a checkpoint of the job as it is, if one is due; the actor must be awake. Returns when the snapshot is taken."""
        if not self.is_due(job.state.step):
            return
        with job.timeline.span("save"):
            await self.finish(job, wait=True)
            await self._begin(job, state_of(job))

    async def save_now(self, job, state: tuple[dict, dict] | None = None) -> bool:
        """Save and wait for it, before the run stops; the actor must be awake. Nothing to do if this step is saved already.

        state: what `state_of` returned when the step began, of a job that has gone on since; default: the job as it is. Returns
        whether the step's checkpoint is there, whole; without --save-every there is none.
        """
        await self.finish(job, wait=True)
        if self.newest != job.state.step and self.config.save_every:
            await self._begin(job, state or state_of(job))
            await self.finish(job, wait=True)
        return self.newest == job.state.step

    async def finish(self, job, wait: bool = False) -> None:
        """Complete what all ranks have written, if they have; `wait` until they have. A failure is told, and the run goes on.

        A writer that hangs (its disk does) has failed when it was waited for as long as for a controller.
        """
        waited_s = 0.0  # counted, not measured: the same on every rank
        while self._saving:
            results = await self.world.gather(self._saving.writer.result() and self._saving.writer.result()[1])
            late = "" if waited_s < self.config.collective_timeout_s or None not in results else f"not written after {waited_s:.0f} s"
            if any(results) or late or None not in results:  # one failed, or all are done
                saving, self._saving = self._saving, None
                await self._end(job, saving, next(filter(None, results), late))
            elif wait:
                await asyncio.sleep(POLL_S)
                waited_s += POLL_S
            else:
                break

    async def _end(self, job, saving: Saving, error: str) -> None:
        """Complete a checkpoint that all ranks have written, or give up one that a rank couldn't write."""
        parts = await self.world.gather(None if error else saving.writer.result()[0])
        saving.writer.close()
        await self.world.barrier()  # nobody writes any more
        if self.world.rank == 0 and not error:
            error = await self.world.run(reason, self._complete, saving, parts)
        if error := await self.world.broadcast(error):
            self._give_up(job, saving.step, saving.folder, error)
        else:
            self.newest = saving.step

    async def _begin(self, job, state: tuple[dict, dict]) -> None:
        """Take the snapshot and start to write it."""
        step, rank = state[0]["step"], self.world.rank
        folder = self.folder / await self.world.broadcast(f"step_{step}{PARTIAL}{os.getpid()}")
        trainers, write_shards, complete_shards = trainers_of(job), {}, {}
        if error := await self.world.broadcast(reason(self._make, folder, trainers) if rank == 0 else ""):
            return self._give_up(job, step, folder, error)
        for name, trainer in trainers.items():
            write_shards[name], complete_shards[name] = await self.world.run(trainer.snapshot, folder / name)
        work = partial(write_part, folder, rank, state, write_shards, await self._hf_writers(trainers, step))
        writer = await self.world.run(self._start_writer, work)  # by the thread that lives as long as the run: its end is the process's
        self._saving = Saving(step, folder, writer, complete_shards)

    async def _hf_writers(self, trainers: dict[str, Any], step: int) -> dict[str, Callable]:
        """What writes the Hugging Face directories, by folder, if they are due; nothing on most ranks. Takes their weights now."""
        every = self.config.save_hf_every
        if not every or (step % every and step != self.config.steps):
            return {}
        weights = {name: await self.world.run(trainer.whole_weights) for name, trainer in trainers.items()}
        return {HF.get(name, f"hf_{name}"): partial(trainers[name].write_hf, of) for name, of in weights.items() if of}

    def _make(self, folder: Path, trainers) -> None:
        folder.mkdir(parents=True)
        for name in (*trainers, "controllers"):
            (folder / name).mkdir()
        if not (self.folder / TRACKER).exists():
            write_whole(self.folder / TRACKER, {"step": 0})

    def _complete(self, saving: Saving, parts: list[tuple[dict, dict]]) -> None:
        """Rank 0: every rank's data is on the disk. In this order, because it may die between any two lines."""
        manifest = {name: entry for _, files in parts for name, entry in files.items()}
        for trainer, complete in saving.complete_shards.items():
            complete([described[trainer] for described, _ in parts])
            names = (f"{trainer}/.metadata", f"{trainer}/metadata.json")
            manifest |= {name: digest(saving.folder / name) for name in names}
        write_whole(saving.folder / MANIFEST, manifest)
        for name in (*saving.complete_shards, "controllers", "."):
            sync_folder(saving.folder / name)
        target = self.folder / f"step_{saving.step}"
        put_away(target)  # a damaged one, or one that this run has left behind
        saving.folder.rename(target)
        write_whole(self.folder / TRACKER, {"step": saving.step})
        for step in reversed([step for step in steps_in(self.folder) if step < saving.step][self.config.keep - 1 :]):  # oldest first
            put_away(self.folder / f"step_{step}")

    def _give_up(self, job, step: int, folder: Path, error: str) -> None:
        if self.world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        kept = "no checkpoint yet" if self.newest is None else f"the checkpoint of step {self.newest} stays the newest"
        job.report.note(f"CHECKPOINT FAILED: step {step} could not be saved: {error}; {kept}, and training goes on")


def reason(function, *args) -> str:
    """Call; returns why the files couldn't be written, empty if they were."""
    try:
        function(*args)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return ""
