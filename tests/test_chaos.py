"""Chaos on the virtual clock: runs that are struck, stopped, crashed and resumed, many seeds a minute.

    python tests/test_chaos.py --seeds 100000 --processes 2    every seed is one run; exit 1 if any broke
    python tests/test_chaos.py --first 4711 --seeds 1          what became of one

A seed draws a run (mode, ranks, settings) and its lives: engines die, hang, get slow or lose a reply; the
checkpoint's writers are late or fail; the run is asked to stop, or crashes at a moment or between two changes
of a file; a byte of what it left is flipped. Each next life is started as a user would, maybe on other
ranks, until the steps are done. What must hold is in `check_moment`, asked whenever the clock moves, in
`check_files`, before each life, and in `check_history`, at the end. The real twin is chaos.py.
"""

import argparse
import asyncio
import contextlib
import functools
import gc
import json
import logging
import multiprocessing
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

import checkpoint
import rollout
from engines.pool import MAX_STALLS
from fakes import FakeReport, FakeWorld, fake_config, judge_on, simulate, to_text, write_on
from runtime import atomic_files
from runtime.atomic_files import complete_rows

LAYOUTS = [("full", 1), ("full", 2), ("full", 3)]
LAYOUTS += [("partial", 2), ("partial", 2), ("partial", 3), ("partial", 4)]
LAYOUTS += [("fused", 2), ("fused", 3), ("fused", 4)]
HELD_OUT = 2  # prompts of an evaluation
MOST_LIVES = 3  # before the last one, in which no run is ended
LIFE_S = 14.0  # most faults come so early: later ones would find nothing to strike
CLEAR_STOPS = (
    "engine is left to ask",
    "didn't start again",
)  # of a run, which may be started again
LOST_TRACKS = "checkpoints is whole"  # of a start, after which a person has to decide


class Crash(KeyboardInterrupt):
    """kill -9 of the whole run. A kind that an event loop passes on at once."""


# ---------------------------------------------------------------- the disk


class Disk:
    """Counts the changes of files that the real code makes, and strikes at one, before it or in the middle.

    errors: numbers of changes that fail; crash: the one in which the run ends.
    """

    def __init__(self, crash=-1, errors=()):
        self.crash, self.errors = crash, errors
        self.changes, self.dead = 0, False

    def change(self, half=lambda: None):
        """Called before a change; `half` leaves what a change in the middle would."""
        number, self.changes = self.changes, self.changes + 1
        if number in self.errors:
            raise OSError(28, "No space left on device")
        if number == self.crash:
            half()
            self.end()

    def end(self, *_):
        self.dead = True
        raise Crash


THE_DISK = [Disk()]  # of the run that is simulated


def cut_short(path, *_):
    """What was written is only on the disk when it is synced."""
    if path.is_file():
        path.write_bytes(path.read_bytes()[:-3])


def leave_new(path, *_):
    path.with_name(f"{path.name}.new").write_text("{")


def struck(function, half=lambda *_: None):
    """A function that changes files, and may be struck."""

    def call(path, *args):
        THE_DISK[0].change(lambda: half(path))
        return function(path, *args)

    return call


STRUCK = [(checkpoint, "sync", cut_short), (atomic_files, "keep_rows", leave_new)]
STRUCK += [(atomic_files, "remove_atomically", lambda *_: None)]
STRUCK += [(checkpoint, "make_folders", lambda *_: None)]


class LateWriter:
    """A forked process that writes its part later, as things were when it was forked; or fails."""

    def __init__(self, rng, work):
        self._work, self._result = work, None
        delay_s = rng.choice([0.0, 0.3, 2.0, 8.0, 400.0]) * rng.random()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._write)

    def _write(self):
        if not THE_DISK[0].dead:
            try:
                THE_DISK[0].change()
                self._result = (self._work(), "")
            except OSError as error:
                self._result = (None, f"OSError: {error}")

    def result(self):
        return self._result

    def close(self):
        self._timer.cancel()


class Report(FakeReport):
    """Writes a row a step, as the real one before a checkpoint is completed: what became of which prompt."""

    def __init__(self, c, out):
        super().__init__()
        self.c, self.rows = c, out / "metrics.jsonl"

    def accuracy(self, step, value, now):
        super().accuracy(step, value, now)
        if step == self.c.config.steps:
            self.write({"step": step, "accuracy": value})

    async def step(self, c, step, batch, samples, stats):
        await super().step(c, step, batch, samples, stats)
        fates = {"kept": batch.kept + batch.dropped, "filtered": chain(*batch.filtered)}
        fates["carried"] = chain(*batch.carried)
        # more than carried: also what a stop cut off and this step didn't need
        fates["held"] = chain(*c.prompts.groups.values())
        mine = {fate: [facts_of(sample) for sample in samples] for fate, samples in fates.items()}
        mine["batch"] = [(s.prompt_id, s.index) for s in samples]
        facts = await c.world.gather(mine)
        row = {fate: sorted(chain(*(fact[fate] for fact in facts))) for fate in mine}
        self.write({"step": step, "missing": batch.missing_groups, **row, **c.prompts.state()})

    def write(self, row):
        if self.c.world.rank == 0:
            line = json.dumps(row) + "\n"
            with self.rows.open("a") as file:
                THE_DISK[0].change(lambda: (file.write(line[:-9]), file.flush()))
                file.write(line)


def facts_of(sample):
    return sample.prompt_id, sample.index, to_text(sample.response), sample.versions, sample.reward


# ---------------------------------------------------------------- what must hold


def check_moment(servers, controllers):
    """No rank in two roles, no engine asleep at work, none with other weights than its actor's."""
    actors = [c.placement.actor for c in controllers]
    newest = max(actor.version for actor in actors)
    for server in servers:
        assert server.version is None or server.version <= newest, (
            "an engine has weights that no actor has"
        )
        if server.aborts and server.runs:
            assert server.awake, "an engine is asked while it sleeps"
            is_new = server.role == "genrm" or server.version == actors[server.rank].version
            assert is_new, "an engine writes with old weights"
    for actor in actors:
        holders = actor.device.holders
        assert ("actor" in holders) == actor.awake
        loading = {"rollout"} if "rollout cache" not in holders else set()
        assert len({holder.split()[0] for holder in holders} - loading) <= 1, holders


def check_files(out, damaged, best, keep):
    """Checkpoints are whole or invisible, whatever was struck; the newest that a run had is there, or newer.

    A damaged one may have been archived by a start that failed later.
    """
    steps = atomic_files.steps_in(out / "checkpoints")
    for step in steps:
        folder = out / "checkpoints" / f"step_{step}"
        if step not in damaged:
            assert not atomic_files.verify(folder), f"step {step}: {atomic_files.verify(folder)}"
            common = json.loads((folder / "common.json").read_text())
            shards = {path.read_text() for path in folder.glob("megatron/__*_0.distcp")}
            assert (common["step"], shards) == (step, {str(step)}), "states of two steps are mixed"
            assert len(list(folder.glob("controllers/*"))) == common["ranks"]
    was_archived = best in damaged and list(out.glob(f"checkpoints/archived_{best}-*"))
    has_best = (
        best is None or best in steps or was_archived or sum(step > best for step in steps) >= keep
    )
    assert has_best, f"the checkpoint of step {best} was complete, and is gone"


def check_history(config, rows, controllers):
    """Over all lives: every prompt was trained on or filtered once, or waits; steps had their batches."""
    *rows, last = rows
    assert [row["step"] for row in rows] == list(range(config.steps)) and last[
        "step"
    ] == config.steps
    used, begun = Counter(), {}
    for row in rows:
        names = ("kept", "filtered", "carried")
        fates = {fate: Counter(prompt for prompt, *_ in row[fate]) for fate in names}
        for prompt, answers in sum(fates.values(), Counter()).items():
            wrong = f"step {row['step']}: prompt {prompt} has {answers} answers"
            assert answers == config.answers_per_prompt, wrong
        used += Counter([*fates["kept"], *fates["filtered"]])
        accounted = used + Counter(row["requeued"])
        wrong = f"step {row['step']}: a prompt was lost, or is there twice"
        assert accounted == Counter(range(row["cursor"])), wrong
        assert set(fates["carried"]) <= set(row["requeued"])
        assert len(fates["kept"]) + row["missing"] == config.prompts_per_step
        judged = [
            [prompt, index] for prompt, index, _, _, reward in row["kept"] if reward is not None
        ]
        assert row["batch"] == judged, f"step {row['step']}: the batch isn't what was kept"
        check_answers(row, begun)
    assert {c.placement.actor.version for c in controllers} == {config.steps}
    assert {c.state.step for c in controllers} == {config.steps}


def check_answers(row, begun):
    """Written by the weights of their step, or carried: then they begin as they were when cut off."""
    for prompt, index, text, versions, _ in row["kept"] + row["filtered"] + row["carried"]:
        old_text, old_versions = begun.pop((prompt, index), ("", []))
        kept = text.startswith(old_text) and versions[: len(old_versions)] == old_versions
        assert kept, "what was written was lost"
        is_of_step = len(text) == len(versions) and set(versions[len(old_versions) :]) <= {
            row["step"]
        }
        assert is_of_step, "written by other weights"
    begun |= {(prompt, index): (text, versions) for prompt, index, text, versions, _ in row["held"]}


# ---------------------------------------------------------------- one seed


def draw_settings(rng):
    """Of a run, all its lives."""
    return dict(
        steps=rng.choice([2, 2, 3]),
        prompts_per_step=rng.choice([2, 3]),
        answers_per_prompt=2,
        eval_every=100,
        over_dispatch=rng.choice([1.0, 1.0, 1.5]),
        max_refill_waves=rng.choice([1, 3]),
        save_every=rng.choice([1, 1, 2]),
        keep=rng.choice([1, 2]),
        tail=rng.random(),
    )


class Fault:
    """Something happens to the engines of a role, to one or all, or to one request of theirs."""

    def __init__(self, rng):
        self.role, self.number = rng.choice(["rollout", "genrm"]), rng.choice([None, None, 0, 1, 2])
        self.verb = rng.choice(["die", "die", "hang", "slow", "drop"])
        self.seconds, self.lost_replies = rng.random() * LIFE_S * rng.random(), 0

    def __call__(self, servers, controllers):
        of_role = [server for server in servers if server.role == self.role]
        for server in of_role if self.number is None else [of_role[self.number % len(of_role)]]:
            if self.verb == "slow":
                server.pace *= 5
            elif self.verb == "drop":
                server.drops, self.lost_replies = 1, self.lost_replies + 1
            else:
                {"die": server.die, "hang": server.hang}[self.verb]()


def draw_end(rng, disk):
    """(seconds, event) that ends a life: a stop asked of one rank or all, or a crash; or sets a crash."""
    kind, rank = rng.choice(["stop", "stop", "crash", "disk", "disk"]), rng.choice([None, 0, 1])
    seconds = rng.random() * LIFE_S

    def stop(servers, controllers):
        for c in controllers if rank is None else [controllers[rank % len(controllers)]]:
            c.stop.asked = 15

    if kind == "disk":
        disk.crash = rng.randrange(60)
        return []
    return [(seconds, stop if kind == "stop" else disk.end)]


def flip_a_byte(rng, out):
    """In any file of a checkpoint; returns the step of the one that is damaged, if it is one."""
    files = sorted(
        path for path in out.glob("checkpoints/*/**/*") if path.is_file() and path.stat().st_size
    )
    if not files:
        return []
    path = rng.choice(files)
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= rng.randrange(1, 256)
    path.write_bytes(content)
    name = path.relative_to(out / "checkpoints").parts[0]
    return [step] if (step := atomic_files.step_of(out / "checkpoints" / name)) is not None else []


class Trial:
    """A run and its lives, in `out`."""

    def __init__(self, seed, out):
        self.rng, self.out, self.controllers = random.Random(seed), out, []
        self.settings, self.may_move = draw_settings(self.rng), self.rng.random() < 0.3
        self.interval_s = self.rng.choice([0.1, 0.5])  # between meetings
        self.damaged, self.best, self.lines = set(), None, []
        self.is_exact = self.settings["over_dispatch"] == 1
        self.layout = self.rng.choice(LAYOUTS)

    def run(self):
        """Live until the steps are done. Returns how it ended: done, or the words of a clear stop."""
        for life in range(self.rng.randint(0, MOST_LIVES), -1, -1):
            THE_DISK[0] = disk = Disk()
            faults = [Fault(self.rng) for _ in range(self.rng.choice([0, 0, 1, 1, 2]))]
            events = [(fault.seconds, fault) for fault in faults] + (
                draw_end(self.rng, disk) if life else []
            )
            if life and self.rng.random() < 0.3:
                disk.errors = {self.rng.randrange(40)}
            try:
                if self.live(events):
                    break
            except Crash:
                self.lines.append("crash")
            except ValueError as stop:
                if not self.is_clear(str(stop), disk, faults):
                    raise
                if LOST_TRACKS in str(stop):
                    return str(stop)
                self.lines.append("clear stop")
            except OSError:
                assert disk.errors, "no change of a file was to fail"  # in the report it may not
            self.between_lives()
        else:
            try:
                self.live([])
            except ValueError as stop:
                if not (self.damaged and LOST_TRACKS in str(stop)):
                    raise
                return str(stop)
        rows = list(complete_rows(self.out / "metrics.jsonl"))
        check_history(self.config(), rows, self.controllers)
        if self.is_exact:
            self.check_as_unbroken(rows)
        return "done"

    def config(self):
        mode, _ = self.layout
        rebalance = self.may_move and mode != "full"
        return fake_config(mode, out=str(self.out), rebalance=rebalance, **self.settings)

    def start(self):
        """What all ranks do first. Returns the checkpoint that they go on from."""
        meetings, config = {}, self.config()
        worlds = [FakeWorld(rank, self.layout[1], meetings) for rank in range(self.layout[1])]

        async def prepare():
            each = [checkpoint.prepare_out(config, world, self.lines.append) for world in worlds]
            return await asyncio.gather(*each, return_exceptions=True)

        points = asyncio.run(prepare())
        assert len(set(map(str, points))) == 1, f"ranks came to different ends: {points}"
        if isinstance(points[0], Exception):
            raise points[0]
        return points[0]

    def live(self, events):
        """One life. Returns whether the steps are done."""
        check_files(self.out, self.damaged, self.best, self.settings["keep"])
        self.controllers.clear()  # those of the life before
        point = self.start()
        assert not list(self.out.glob(f"checkpoints/*{atomic_files.PARTIAL}*"))
        rows = list(complete_rows(self.out / "metrics.jsonl"))
        assert [row["step"] for row in rows] == list(range(point.step if point else 0)), (
            "a step has no row"
        )
        if point is None:
            self.best = None
        elif self.best is not None:
            assert point.step >= self.best or self.best in self.damaged, "not the newest was taken"

        def prepare_controller(c):
            c.prompts.held_out = c.prompts.held_out[:HELD_OUT]
            c.report, c.checkpoints.newest = Report(c, self.out), point and point.step

        how = dict(
            prepare_controller=prepare_controller, controllers=self.controllers, look=check_moment
        )
        how |= dict(writer=functools.partial(LateWriter, self.rng), resumed=point and point.folder)
        how |= dict(write=write_on, verdict=judge_on)
        rebalance = self.config().rebalance
        with patch.object(rollout, "MEETING_INTERVAL_S", self.interval_s):
            simulate(
                *self.layout,
                out=self.out,
                events=events,
                rebalance=rebalance,
                **how,
                **self.settings,
            )
        first = self.controllers[0]
        failed = THE_DISK[0].errors or any(
            "CHECKPOINT FAILED" in note for note in first.report.notes
        )
        if first.stopping and not failed:
            assert first.checkpoints.newest == first.state.step, "a stop wasn't saved"
        return not first.stopping

    def between_lives(self):
        """What may have happened when the run is started again."""
        newest = [
            c.checkpoints.newest for c in self.controllers if c.checkpoints.newest is not None
        ]
        self.best = max(newest, default=self.best)
        if self.rng.random() < 0.12:
            self.damaged |= set(flip_a_byte(self.rng, self.out))
        if self.rng.random() < 0.4:
            self.layout = self.rng.choice(LAYOUTS)

    def is_clear(self, words, disk, faults):
        """Whether a run may end like that: after what was done to it."""
        clear = (
            *CLEAR_STOPS,
            *[LOST_TRACKS] * bool(self.damaged),
            *["can't be used"] * bool(disk.errors),
        )
        if sum(fault.lost_replies for fault in faults) >= MAX_STALLS:
            clear += ("the third failure in a row",)
        return any(stop in words for stop in clear)

    def check_as_unbroken(self, rows):
        """The same samples, whatever happened; and the same prompts come next."""
        shape = {
            name: self.settings[name] for name in ("steps", "prompts_per_step", "max_refill_waves")
        }
        for row, expected in zip(rows, unbroken(**shape), strict=True):
            names = ("step", "kept", "filtered", "missing", "accuracy")
            facts = {name: [row.get(name), expected.get(name)] for name in names}
            wrong = {name: pair for name, pair in facts.items() if pair[0] != pair[1]}
            assert not wrong, f"other numbers than without faults: {wrong}"


@functools.cache
def unbroken(**shape):
    """The rows of a run that nothing happens to, on one rank."""
    THE_DISK[0] = Disk()
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        (out := Path(folder) / "run").mkdir()

        def prepare_controller(c):
            c.prompts.held_out = c.prompts.held_out[:HELD_OUT]
            c.report = Report(c, out)

        how = dict(prepare_controller=prepare_controller, answers_per_prompt=2, eval_every=100)
        how |= dict(write=write_on, verdict=judge_on)
        simulate("full", 1, **how, **shape)
        return list(complete_rows(out / "metrics.jsonl"))


def memory():
    """A folder in memory, where thousands of small files cost little."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def try_seed(seed, folder):
    """Returns how a seed's run ended, and what broke: empty if nothing."""
    out = folder / "run"
    trial = Trial(seed, out)
    try:
        with ExitStack() as stack:
            for module, name, half in STRUCK:
                stack.enter_context(patch.object(module, name, struck(vars(module)[name], half)))
            stack.enter_context(
                patch.object(checkpoint, "POLL_S", 1.0)
            )  # few looks at a writer that hangs
            return trial.run(), ""
    except (
        Exception
    ) as error:  # of any kind: a broken invariant, here or in the fakes, or the code's own
        return "", f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        for path in folder.glob("run*"):
            shutil.rmtree(path)
        gc.collect()


def try_seeds(seeds):
    """(seed, how it ended, what broke) of each. Tasks that end with a crashed run leave no lines behind."""
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    gc.freeze()  # else it looks through all that torch has imported, again and again
    gc.disable()  # a fifth of the time; a seed's garbage is collected when it has ended
    try:
        with tempfile.TemporaryDirectory(dir=memory()) as folder:
            return [(seed, *try_seed(seed, Path(folder))) for seed in seeds]
    finally:
        gc.enable()


# ---------------------------------------------------------------- what pytest runs


@pytest.mark.parametrize(
    "first,count", [(0, 60), pytest.param(60, 600, marks=pytest.mark.long)], ids=["few", "many"]
)
def test_no_seed_breaks_an_invariant(first, count):
    """A sample; the docstring above has the command for more."""
    results = try_seeds(range(first, first + count))
    assert not [(seed, broken) for seed, _, broken in results if broken]
    assert sum(ended == "done" for _, ended, _ in results) > 0.8 * count


# ---------------------------------------------------------------- the long run


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    last = arguments.first + arguments.seeds
    blocks = [range(start, min(start + 100, last)) for start in range(arguments.first, last, 100)]
    start, ends, broken = time.monotonic(), Counter(), []
    with multiprocessing.Pool(arguments.processes) as pool:
        for done, results in enumerate(pool.imap_unordered(try_seeds, blocks), 1):
            for _, ended, _ in results:
                ends["done" if ended == "done" else "clear stop" if ended else "BROKEN"] += 1
            broken += [(seed, what) for seed, _, what in results if what]
            for seed, what in [(seed, what) for seed, _, what in results if what]:
                print(f"seed {seed}: {what}", flush=True)
            if done % 20 == 0 or done == len(blocks):
                minutes = (time.monotonic() - start) / 60
                count = sum(ends.values())
                print(f"{count} seeds, {count / minutes:.0f} a minute: {dict(ends)}", flush=True)
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
