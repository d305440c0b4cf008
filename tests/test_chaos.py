"""Chaos on the virtual clock: runs that are struck, stopped, crashed and resumed, many seeds a minute.

    python tests/test_chaos.py --seeds 100000 --processes 2    every seed is one run; exit 1 if any broke
    python tests/test_chaos.py --first 4711 --seeds 1          what became of one

A seed draws a run (mode, ranks, who holds what, settings) and its lives: engines die, hang, get slow or
lose a reply; the checkpoint's writers are late or fail; the run is asked to stop, or crashes at a moment or
between two changes of a file; a byte of what it left is flipped. Each next life is started as a user would,
maybe on other ranks, until the steps are done. What must hold is in `check_files`, before each life, in
`check_history`, at the end, and in what fakes.py asserts of every request, hand-over and training step. The
real twin, chaos.py, has the numbers of unbroken runs to compare with.
"""

import argparse
import asyncio
import functools
import json
import logging
import multiprocessing
import random
import sys
import tempfile
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
from fakes import (
    FakeReport,
    FakeWorld,
    fake_config,
    judge_on,
    samples_of,
    simulate,
    to_text,
    write_on,
)
from placement import make_holders
from runtime import atomic_files
from runtime.atomic_files import complete_rows

LAYOUTS = [("full", 1), ("full", 2), ("full", 3)]
LAYOUTS += [("partial", 2), ("partial", 2), ("partial", 3), ("partial", 4)]
LAYOUTS += [("fused", 2), ("fused", 3), ("fused", 4)]
APART = [("full", 2, "engines=0 actor=1"), ("full", 3, "engines=0,2 actor=1")]
APART += [("partial", 3, "engines=0-1 actor=2"), ("partial", 5, "engines=0-2 actor=3-4")]
APART += [("fused", 4, "engines=0-2 actor=3")]
SHARED = [("full", 3, "engines=0-1 actor=1-2"), ("partial", 4, "engines=0-2 actor=2-3")]
PPO = [("full", 2, "split"), ("partial", 4, "engines=0-2 actor=3 critic=1")]
PPO += [("full", 3, "standalone"), ("partial", 5, "engines=0,2 actor=1,3 critic=3-4")]
HOW = dict(answers_per_prompt=2, eval_every=100, write=write_on, verdict=judge_on)
FATES = ("kept", "filtered", "carried")  # of a prompt in a step
MOST_LIVES = 4  # of a run to which something happens; in one more nothing does
LIFE_S = 14.0  # most faults come so early: later ones would find nothing to strike
# of a run to which something happened, which may be started again
CLEAR_STOPS = ("engine is left to ask", "didn't start again", "third failure in a row")
LOST_TRACKS = "no whole checkpoint"  # of a start, after which a person has to decide
MEMORY = "/dev/shm"  # where small files cost little


class Crash(KeyboardInterrupt):
    """kill -9 of the whole run. A kind that an event loop passes on at once."""


# ---------------------------------------------------------------- the disk


class Disk:
    """Counts the changes of files that the real code makes, and strikes at one, before it or in the
    middle. errors: numbers of changes that fail; crash: the one in which the run ends."""

    def __init__(self):
        self.crash, self.errors, self.changes, self.dead = -1, set(), 0, False

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


THE_DISK = [Disk()]  # of the life that is simulated


def cut_short(path):
    """What was written is only on the disk when it is synced."""
    if path.is_file():
        path.write_bytes(path.read_bytes()[:-3])


def leave_new(path):
    path.with_name(f"{path.name}.new").write_text("{")


def struck(function, half=lambda path: None):
    """A function that changes files, and may be struck."""

    def call(path, *args):
        THE_DISK[0].change(lambda: half(path))
        return function(path, *args)

    return call


STRUCK = [(checkpoint, "sync", cut_short), (checkpoint, "make_folders")]
STRUCK += [(atomic_files, "keep_rows", leave_new), (atomic_files, "remove_atomically")]


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

    def __init__(self, out):
        super().__init__()
        self.rows = out / "metrics.jsonl"

    async def step(self, c, step, batch, samples, stats):
        await super().step(c, step, batch, samples, stats)
        fates = {"kept": batch.kept + batch.dropped, "filtered": chain(*batch.filtered)}
        fates["carried"] = chain(*batch.carried)
        # more than carried: also what a stop cut off and this step didn't need
        fates["ahead"] = samples_of([c.ahead] if c.ahead else [])
        fates["held"] = [*chain(*c.prompts.groups.values()), *fates["ahead"]]
        mine = {fate: [facts_of(sample) for sample in samples] for fate, samples in fates.items()}
        mine["batch"] = [(s.prompt_id, s.index) for s in samples]
        facts = await c.world.gather(mine)
        row = {fate: sorted(chain(*(fact[fate] for fact in facts))) for fate in mine}
        row |= {"step": step, "missing": batch.missing_groups, **c.prompts.state()}
        if c.world.rank == 0:
            line = json.dumps(row) + "\n"
            with self.rows.open("a") as file:
                THE_DISK[0].change(lambda: (file.write(line[:-9]), file.flush()))
                file.write(line)


def facts_of(sample):
    return sample.prompt_id, sample.index, to_text(sample.response), sample.versions, sample.reward


# ---------------------------------------------------------------- what must hold


def check_files(out, damaged, best, keep):
    """Checkpoints are whole or invisible, whatever was struck; the newest that a run had is there,
    or newer. A damaged one may have been archived by a start that failed later."""
    steps = {*atomic_files.steps_in(out / "checkpoints")}
    for step in steps - damaged:
        folder = out / "checkpoints" / f"step_{step}"
        assert not atomic_files.verify(folder), f"step {step}: {atomic_files.verify(folder)}"
        common = json.loads((folder / "common.json").read_text())
        shards = {path.read_text() for path in folder.glob("megatron/__*_0.distcp")}
        assert (common["step"], shards) == (step, {str(step)}), "states of two steps are mixed"
        assert len(list(folder.glob("controllers/*"))) == common["ranks"]
    if best not in {None, *steps}:
        was_archived = best in damaged and list(out.glob(f"checkpoints/archived_{best}-*"))
        newer = sum(step > best for step in steps)
        assert was_archived or newer >= keep, f"the complete checkpoint of step {best} is gone"


def check_history(config, rows):
    """Over all lives: every prompt was trained on or filtered once, or waits; steps had their batches."""
    assert [row["step"] for row in rows] == list(range(config.steps))
    used, begun = Counter(), {}
    for row in rows:
        fates = {fate: Counter(prompt for prompt, *_ in row[fate]) for fate in FATES}
        answers = sum(fates.values(), Counter())
        assert {*answers.values()} <= {config.answers_per_prompt}, f"answers: {answers}"
        used += Counter([*fates["kept"], *fates["filtered"]])
        waits = Counter(row["requeued"]) | Counter({prompt for prompt, *_ in row["ahead"]})
        wrong = f"step {row['step']}: a prompt was lost, or is there twice"
        assert used + waits == Counter(range(row["cursor"])), wrong
        assert set(fates["carried"]) <= waits.keys()
        assert len(fates["kept"]) + row["missing"] == config.prompts_per_step
        judged = [[prompt, i] for prompt, i, _, _, reward in row["kept"] if reward is not None]
        assert row["batch"] == judged, f"step {row['step']}: the batch isn't what was kept"
        check_answers(row, begun)


def check_answers(row, begun):
    """Written by the weights of their step, or carried: then they begin as they were when cut off.

    Of a batch that was served ahead the row before has known it: by older weights, but all of it.
    """
    for prompt, index, text, versions, _ in row["kept"] + row["filtered"] + row["carried"]:
        old_text, old_versions = begun.pop((prompt, index), ("", []))
        known = len(old_versions)
        assert text.startswith(old_text), "what was written was lost"
        assert versions == old_versions + [row["step"]] * (len(text) - known), "by other weights"
    begun |= {(prompt, index): (text, versions) for prompt, index, text, versions, _ in row["held"]}


# ---------------------------------------------------------------- one seed


def draw_settings(rng):
    """Of a run, all its lives."""
    settings = dict(steps=rng.choice([2, 2, 3]), prompts_per_step=rng.choice([2, 3]))
    settings |= dict(over_dispatch=rng.choice([1.0, 1.0, 1.5]), max_refill_waves=rng.choice([1, 3]))
    settings |= dict(save_every=rng.choice([1, 1, 2]), keep=rng.choice([1, 2]), tail=rng.random())
    return settings


def draw_fault(rng):
    """(seconds, event): something happens to the engines of a role, to one or all."""
    role, number = rng.choice(["rollout", "genrm"]), rng.choice([None, None, 0, 1, 2])
    verb = rng.choice(["die", "die", "hang", "slow", "drop"])

    def strike(servers, controllers):
        of_role = [server for server in servers if server.role == role]
        for server in of_role if number is None else [of_role[number % len(of_role)]]:
            if verb == "slow":
                server.pace *= 5
            elif verb == "drop":
                server.drops = 1
            else:
                {"die": server.die, "hang": server.hang}[verb]()

    return rng.random() * LIFE_S * rng.random(), strike


def draw_end(rng, disk):
    """(seconds, event) that ends a life: a stop asked of one rank or all, or a crash; or sets a crash."""
    kind, rank = rng.choice(["stop", "crash", "disk", "disk", "disk"]), rng.choice([None, 0, 1, 2])

    def stop(servers, controllers):
        for c in controllers if rank is None else [controllers[rank % len(controllers)]]:
            c.stop.asked = 15

    if kind == "disk":
        disk.crash = rng.randrange(40)
        return []
    return [(rng.random() * LIFE_S, stop if kind == "stop" else disk.end)]


def flip_a_byte(rng, out):
    """In any file of a checkpoint; returns the steps of the complete ones that it damaged: one or none."""
    found = (path for path in out.glob("checkpoints/*/**/*") if path.is_file())
    files = sorted(path for path in found if path.stat().st_size)
    if not files:
        return set()
    path = rng.choice(files)
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= rng.randrange(1, 256)
    path.write_bytes(content)
    name = path.relative_to(out / "checkpoints").parts[0]
    return {atomic_files.step_of(out / "checkpoints" / name)} - {None}


class Trial:
    """A run and its lives, in `out`. crash: the change of a file in which the first one ends."""

    def __init__(self, seed, out, crash=-1):
        self.crash = crash
        self.rng, self.out, self.controllers = random.Random(seed), out, []
        self.settings, self.may_move = draw_settings(self.rng), self.rng.random() < 0.3
        self.interval_s = self.rng.choice([0.1, 0.5])  # between meetings
        self.damaged, self.best = set(), None
        self.algorithm = self.rng.choice([("grpo",), ("grpo",), ("ppo", "kl_coef=0.1")])
        self.draw_layout()

    def run(self):
        """Live until the steps are done. Returns how it ended: done, or the words of a clear stop."""
        for life in range(self.rng.randint(1, MOST_LIVES), -1, -1):
            events = self.draw_life(life)
            try:
                if self.live(events):
                    break
            except Crash:
                pass
            except ValueError as stop:
                if self.damaged and LOST_TRACKS in str(stop):
                    return str(stop)
                clear = (*CLEAR_STOPS * bool(events), *["can't be used"] * bool(THE_DISK[0].errors))
                if not any(words in str(stop) for words in clear):
                    raise
            except OSError:
                assert THE_DISK[0].errors, "no change of a file was to fail"
            self.between_lives()
        rows = list(complete_rows(self.out / "metrics.jsonl"))
        check_history(self.config(), rows)
        steps = self.settings["steps"]
        reached = {(c.placement.actor.version, c.state.step) for c in self.controllers}
        assert reached == {(steps, steps)}
        return "done"

    def draw_layout(self):
        """Where engines have ranks of their own, they may serve ahead."""
        others = APART * 2 + SHARED + (PPO if "ppo" in self.algorithm else [])
        mode, size, *words = self.rng.choice(LAYOUTS + others)
        self.layout, self.holds = (mode, size), dict(algorithm=self.algorithm)
        if words:
            self.holds["placement"] = words[0]
            is_apart = make_holders(self.config(), size).is_apart
            self.holds["ahead"] = self.rng.choice([0, 1]) if is_apart else 0

    def draw_life(self, life):
        """What happens in it: nothing in the last, number 0; number 1 isn't ended."""
        THE_DISK[0] = disk = Disk()
        disk.crash, self.crash = self.crash, -1
        if not life or disk.crash >= 0:
            return []
        events = [draw_fault(self.rng) for _ in range(self.rng.choice([0, 0, 1, 1, 2]))]
        if life > 1:
            events += draw_end(self.rng, disk)
            if self.rng.random() < 0.3:
                disk.errors = {self.rng.randrange(40)}
        return events

    def config(self):
        mode, _ = self.layout
        how = dict(out=str(self.out), rebalance=self.may_move and mode != "full")
        how["answers_per_prompt"] = HOW["answers_per_prompt"]
        return fake_config(mode, **how, **self.settings, **self.holds)

    def start(self):
        """What all ranks do first. Returns the checkpoint that they go on from."""
        meetings, config = {}, self.config()
        worlds = [FakeWorld(rank, self.layout[1], meetings) for rank in range(self.layout[1])]

        async def prepare():
            how = (config, checkpoint.contents_of(config))
            each = [checkpoint.prepare_out(*how, world, lambda line: None) for world in worlds]
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
        rows = [row["step"] for row in complete_rows(self.out / "metrics.jsonl")]
        assert rows == list(range(point.step if point else 0)), "a step has no row"
        if point is None:
            self.best = None
        elif self.best is not None:
            assert point.step >= self.best or self.best in self.damaged, "not the newest was taken"

        def prepare_controller(c):
            c.report, c.checkpoints.newest = Report(self.out), point and point.step

        how = dict(out=self.out, events=events, rebalance=self.config().rebalance)
        how |= dict(prepare_controller=prepare_controller, controllers=self.controllers)
        how |= dict(writer=functools.partial(LateWriter, self.rng), resumed=point and point.folder)
        with patch.object(rollout, "MEETING_INTERVAL_S", self.interval_s):
            simulate(*self.layout, **how, **HOW, **self.settings, **self.holds)
        first = self.controllers[0]
        if first.stopping and not THE_DISK[0].errors:
            failed = any("CHECKPOINT FAILED" in note for note in first.report.notes)
            assert failed or first.checkpoints.newest == first.state.step, "a stop wasn't saved"
        return not first.stopping

    def between_lives(self):
        """What may have happened when the run is started again."""
        saved = [c.checkpoints.newest for c in self.controllers]
        self.best = max((step for step in saved if step is not None), default=self.best)
        if self.rng.random() < 0.12:
            self.damaged |= flip_a_byte(self.rng, self.out)
        if self.rng.random() < 0.4:
            self.draw_layout()


def try_seed(seed, crash=-1):
    """Returns the seed, how its run ended, and what broke: empty if nothing."""
    # tasks that end with a crashed run leave no lines behind
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY))
        for module, name, *half in STRUCK:
            stack.enter_context(patch.object(module, name, struck(vars(module)[name], *half)))
        # few looks at a writer that hangs
        stack.enter_context(patch.object(checkpoint, "POLL_S", 1.0))
        try:
            return seed, Trial(seed, Path(folder) / "run", crash).run(), ""
        # of any kind: a broken invariant, here or in the fakes, or the code's own
        except Exception as error:
            return seed, "", f"{type(error).__name__}: {error}".splitlines()[0]


def test_no_seed_breaks_an_invariant():
    """A sample; the docstring above has the command for more."""
    results = list(map(try_seed, range(60)))
    assert not [(seed, broken) for seed, _, broken in results if broken]
    assert sum(ended == "done" for _, ended, _ in results) > 48


@pytest.mark.parametrize("seed", [115, 120], ids=["together", "ahead"])
def test_a_crash_in_any_change_of_a_file(seed):
    """Of a run with two ranks that saves each of its steps: the next start finds what is whole."""
    results = [try_seed(seed, crash) for crash in range(40)]
    assert [(ended, broken) for _, ended, broken in results] == [("done", "")] * 40


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    seeds, broken = range(given.first, given.first + given.seeds), []
    with multiprocessing.Pool(given.processes) as pool:
        for done, (seed, _, wrong) in enumerate(pool.imap(try_seed, seeds, 100), 1):
            if wrong:
                broken.append(seed)
                print(f"seed {seed}: {wrong}", flush=True)
            if done % 2000 == 0 or done == given.seeds:
                print(f"{done} seeds, broken: {broken or 'none'}", flush=True)
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
