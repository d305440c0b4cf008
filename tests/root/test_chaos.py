"""Chaos on the virtual clock: runs that lose engines, stop, crash and resume, many seeds per minute.

    python tests/root/test_chaos.py --seeds 100000 --processes 2    every seed is one run; exit 1 if any broke
    python tests/root/test_chaos.py --first 4711 --seeds 1          shows the result of one

A seed draws a run's settings and its lives. Each life ends with a lost engine, a stop requested on one rank
or all, or a crash at a moment or between two changes of a file; writers may be late. The next life starts as
a user would start it, perhaps on other ranks, until the steps are done. `check_files` must hold before each
life, `check_history` at the end, and fakes.py asserts on every request, hand-over and training step. The real
twin is chaos.py.
"""

import argparse
import asyncio
import functools
import json
import logging
import multiprocessing
import random
import re
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from unittest.mock import patch

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import checkpoint
import extras
import rollout
from placement import make_placement
from runtime import atomic_files, checkpoint_files
from runtime.atomic_files import whole_rows
from runtime.errors import RunLost
from tests.root.test_faults import TROUBLES, PromptWriter, strike
from tests.support.fakes import (
    FakeReport,
    FakeWorld,
    LateWriter,
    fake_config,
    judge_on,
    samples_of,
    simulate,
    to_text,
    write_on,
)

LAYOUTS = [("full", 1), ("full", 2), ("full", 3), ("partial", 2), ("partial", 3), ("partial", 4)]
LAYOUTS += [("fused", 2), ("fused", 3), ("fused", 4)]
LAYOUTS += [("full", 3, "engines=0-1 actor=1-2"), ("partial", 4, "engines=0-2 actor=2-3")]
# from here on apart
LAYOUTS += [("full", 2, "engines=0 actor=1"), ("full", 3, "engines=0,2 actor=1")]
LAYOUTS += [("partial", 5, "engines=0-2 actor=3-4"), ("fused", 4, "engines=0-2 actor=3")]
PPO = [("full", 2, "split"), ("full", 3, "standalone")]
PPO += [("partial", 5, "engines=0,2 actor=1,3 critic=3-4")]
HOW = dict(answers_per_prompt=2, eval_every=2, write=write_on, verdict=judge_on)
FATES = ("kept", "filtered", "carried")  # a prompt's fate in a step
MOST_LIVES = 4  # lives with faults; the last life has none
LIFE_S = 14.0  # most faults come within this time; later ones would find nothing to strike
MEMORY = "/dev/shm"  # small files cost little there


class Crash(KeyboardInterrupt):
    """kill -9 of the whole run, as an exception that an event loop passes on at once."""


class Disk:
    """Counts the changes that the real code makes to files, and ends the run before or during one."""

    def __init__(self, crash=-1):
        self.crash, self.changes, self.dead = crash, 0, False

    def change(self, half=lambda: None):
        """Count a change, and perhaps crash; `half` leaves what a crash in the middle of the change would."""
        number, self.changes = self.changes, self.changes + 1
        if number == self.crash:
            half()
            self.end()

    def end(self, *_):
        self.dead = True
        raise Crash


THE_DISK = [Disk()]  # the disk of the simulated life


def cut_short(path):
    """Drop what was written but not synced."""
    if path.is_file():
        path.write_bytes(path.read_bytes()[:-3])


def leave_new(path):
    path.with_name(f"{path.name}.new").write_text("{")


def struck(function, half=lambda path: None):
    def call(path, *args):
        THE_DISK[0].change(lambda: half(path))
        return function(path, *args)

    return call


STRUCK = [(checkpoint_files, "sync", cut_short), (checkpoint, "make_folders")]
STRUCK += [(atomic_files, "keep_rows", leave_new), (atomic_files, "remove_atomically")]


class SlowWriter(LateWriter):
    """A writer that sometimes takes longer than --timeout-s."""

    def __init__(self, rng, work):
        super().__init__(work)
        self.patience = rng.choice([0, 1, 5, 10**6])


class Report(FakeReport):
    """Writes a row per step: every prompt's fate. Like the real report, it does so before the checkpoint."""

    def __init__(self, out):
        super().__init__()
        self.rows = out / "metrics.jsonl"

    async def step(self, c, step, batch, samples, stats):
        await super().step(c, step, batch, samples, stats)
        fates = {"kept": batch.kept + batch.dropped, "filtered": chain(*batch.filtered)}
        fates["carried"] = chain(*batch.carried)
        # more than carried: includes groups that a stop cut off and that this step didn't need
        fates["ahead"] = samples_of([c.ahead] if c.ahead is not None else [])
        fates["held"] = [*chain(*c.prompts.groups.values()), *fates["ahead"]]
        mine = {fate: [facts_of(sample) for sample in samples] for fate, samples in fates.items()}
        mine["batch"] = [(s.prompt_id, s.index) for s in samples]
        facts = await c.world.gather(mine)
        row = {fate: sorted(chain(*(fact[fate] for fact in facts))) for fate in mine}
        row |= {"step": step, "missing": batch.missing_groups, "prompts": c.prompts.state()}
        row["time/step_s"] = 0.0
        if c.world.rank == 0:
            line = json.dumps(row) + "\n"
            with self.rows.open("a") as file:
                THE_DISK[0].change(lambda: (file.write(line[:-9]), file.flush()))
                file.write(line)


def facts_of(sample):
    return sample.prompt_id, sample.index, to_text(sample.response), sample.versions, sample.reward


def check_files(out, best, keep):
    """Check that checkpoints are whole or invisible, and that the newest one is there."""
    steps = {*atomic_files.steps_in(out / "checkpoints")}
    for step in steps:
        folder = out / "checkpoints" / f"step_{step}"
        assert not atomic_files.verify(folder), f"step {step}: {atomic_files.verify(folder)}"
        common = json.loads((folder / "common.json").read_text())
        shards = {path.read_text() for path in folder.glob("megatron/__*_0.distcp")}
        assert (common["step"], shards) == (step, {str(step)}), "states of two steps are mixed"
        assert len(list(folder.glob("controllers/*"))) == common["ranks"]
    newer = sum(step > (best or 0) for step in steps)
    assert best in {None, *steps} or newer >= keep, f"the checkpoint of step {best} is gone"


@functools.cache
def unbroken(**settings):
    """Return what each step of a run without faults keeps, on one rank, and its accuracies."""
    controllers, _ = simulate("full", 1, steps=3, **settings, **HOW)
    report = controllers[0].report
    batches = [batch for _, batch, *_ in report.steps]
    kept = [kept_of(map(facts_of, batch.kept + batch.dropped)) for batch in batches]
    return kept, report.accuracies


def kept_of(rows):
    """Return prompt, number, text and reward of kept answers, without their ranks and weights."""
    return sorted((prompt, number, text, reward) for prompt, number, text, _, reward in rows)


def check_history(config, rows, accuracies):
    """Check that over all lives every prompt was trained on, filtered or waits, and that batches are full.

    Without over-dispatch batches and accuracies are an unbroken run's.
    """
    assert [row["step"] for row in rows] == list(range(config.steps))
    if config.over_dispatch == 1:
        sizes = ("prompts_per_step", "algorithm")
        kept, known = unbroken(**{name: vars(config)[name] for name in sizes})
        assert [kept_of(row["kept"]) for row in rows] == kept[: config.steps]
        assert accuracies == {step: known[step] for step in (0, 2, 3) if step <= config.steps}
    used, begun = Counter(), {}
    for row in rows:
        fates = {fate: Counter(prompt for prompt, *_ in row[fate]) for fate in FATES}
        answers = sum(fates.values(), Counter())
        assert {*answers.values()} <= {config.answers_per_prompt}, f"answers: {answers}"
        used += Counter([*fates["kept"], *fates["filtered"]])
        waits = Counter(row["prompts"]["carried"]) | Counter(
            {prompt for prompt, *_ in row["ahead"]}
        )
        wrong = f"step {row['step']}: a prompt was lost, or is there twice"
        assert used + waits == Counter(range(row["prompts"]["cursor"])), wrong
        assert set(fates["carried"]) <= waits.keys()
        assert len(fates["kept"]) + row["missing"] == config.prompts_per_step
        judged = [[prompt, i] for prompt, i, _, _, reward in row["kept"] if reward is not None]
        assert row["batch"] == judged, f"step {row['step']}: the batch isn't what was kept"
        check_answers(row, begun)


def check_answers(row, begun):
    """Check that answers are by their step's weights, or carried: then they begin as they were when cut off.

    A batch that was served ahead must be in the row before: by older weights, and complete.
    """
    for prompt, index, text, versions, _ in row["kept"] + row["filtered"] + row["carried"]:
        old_text, old_versions = begun.pop((prompt, index), ("", []))
        known = len(old_versions)
        assert text.startswith(old_text), "what was written was lost"
        assert versions == old_versions + [row["step"]] * (len(text) - known), "by other weights"
    begun |= {(prompt, index): (text, versions) for prompt, index, text, versions, _ in row["held"]}


class Trial:
    """A run and its lives, in `out`. layout: of all; crash: the change of a file that ends the first."""

    def __init__(self, seed, out, layout=None, crash=-1):
        rng = self.rng = random.Random(seed)
        self.out, self.layout, self.crash = out, layout, crash
        self.controllers, self.best, self.accuracies = [], None, {}
        self.settings = dict(
            steps=rng.choice([2, 3]),
            prompts_per_step=rng.choice([2, 3]),
            over_dispatch=rng.choice([1.0, 1.0, 1.5]),
            save_every=1 if layout else rng.choice([1, 1, 2, 3]),
            keep=rng.choice([1, 2]),
            tail=rng.random(),
            algorithm=rng.choice(
                [("grpo",), ("grpo", "max_refill_waves=1"), ("ppo", "kl_coef=0.1")]
            ),
        )
        self.moves = rng.random() < 0.3  # the split moves
        self.interval_s = rng.choice([0.1, 0.5])  # between meetings

    def run(self):
        lives = 1 if self.layout else self.rng.randint(1, MOST_LIVES)
        for life in range(lives, -1, -1):
            events = self.draw_life(life)
            try:
                if self.live(life, events):
                    break
            except Crash:
                pass
            except RunLost as error:
                late = "could not be saved" in str(error)
                assert life and (late or re.match(self.loss, str(error))), f"not lost: {error}"
            finally:
                for c in self.controllers[:1]:
                    self.accuracies |= c.report.accuracies
            saved = [c.checkpoints.newest for c in self.controllers]
            self.best = max((step for step in saved if step is not None), default=self.best)
        rows = list(whole_rows(self.out / "metrics.jsonl"))
        check_history(self.config, rows, self.accuracies)
        steps = self.settings["steps"]
        reached = {(c.devices.actor.version, c.state.step) for c in self.controllers}
        assert reached == {(steps, steps)}

    def draw_life(self, life):
        """Draw a life's ranks and faults: none in the last life, number 0. Return the events."""
        THE_DISK[0] = disk = Disk(self.crash if life else -1)
        self.draw_layout()
        self.loss = "no engine is struck"
        if not life or disk.crash >= 0:
            return []
        kind = self.rng.choice(["lost", "lost", "stop", "stop", "crash", "disk", "disk"])
        number = self.rng.choice([None, 0, 1, 2])  # a rank; None means all
        when = self.rng.random() * LIFE_S * self.rng.random()

        def stop(engines, controllers):
            for c in controllers if number is None else [controllers[number % len(controllers)]]:
                c.stop.asked = 15

        if kind == "disk":
            disk.crash = self.rng.randrange(40)
            return []
        if kind == "lost":
            verb, role = self.rng.choice([*TROUBLES]), self.rng.choice(["rollout", "genrm"])
            self.loss = f"the {role} engine of rank {number or 0} {TROUBLES[verb]}"
            return [(when, strike(verb, role, number or 0))]
        return [(when, stop if kind == "stop" else disk.end)]

    def draw_layout(self):
        """Draw a layout. Engines with their own ranks may serve ahead."""
        others = PPO * ("ppo" in self.settings["algorithm"])
        mode, size, *words = self.layout or self.rng.choice(LAYOUTS + others)
        self.size = size
        how = dict(out=str(self.out), rebalance=self.moves and mode != "full")
        how |= dict(placement=words[0] if words else "colocate")
        config = fake_config(mode, answers_per_prompt=2, **how, **self.settings)
        how["ahead"] = self.rng.choice([0, 1]) * make_placement(config, size).is_apart
        self.how = how
        self.config = fake_config(mode, answers_per_prompt=2, **how, **self.settings)

    def start(self):
        """Do what all ranks do first. Return the checkpoint from which they resume."""
        meetings = {}
        worlds = [FakeWorld(rank, self.size, meetings) for rank in range(self.size)]

        async def prepare():
            opened = (checkpoint.open_checkpoints(self.config, world, str) for world in worlds)
            return [saves.point for saves in await asyncio.gather(*opened)]

        point, *others = asyncio.run(prepare())
        assert {*others} <= {point}
        return point

    def live(self, life, events):
        check_files(self.out, self.best, self.settings["keep"])
        self.controllers.clear()  # those of the previous life
        point = self.start()
        assert not list(self.out.glob(f"checkpoints/*{atomic_files.PARTIAL}*"))
        first = point.step if point else 0
        rows = [row["step"] for row in whole_rows(self.out / "metrics.jsonl")]
        assert rows == list(range(first)), "a step has no row"
        assert first >= (self.best or 0), "not the newest was taken"

        def prepare_controller(c):
            c.report, c.checkpoints.newest = Report(self.out), point and point.step

        how = dict(events=events, controllers=self.controllers, resumed=point and point.folder)
        how |= dict(prepare_controller=prepare_controller)
        how |= dict(writer=functools.partial(SlowWriter, self.rng) if life else PromptWriter)
        how |= self.how | {"out": self.out}
        with patch.object(rollout, "MEETING_INTERVAL_S", self.interval_s):
            simulate(self.config.mode, self.size, **how, **HOW, **self.settings)
        (was_stopped,) = {c.was_stopped for c in self.controllers}
        newest = {c.checkpoints.newest for c in self.controllers}
        assert newest == {c.state.step for c in self.controllers}, "the end wasn't saved"
        return not was_stopped


def try_seed(seed, *layout_and_crash):
    # tasks that end with a crashed run log nothing
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY))
        for module, name, *half in STRUCK:
            stack.enter_context(patch.object(module, name, struck(vars(module)[name], *half)))
        # few checks of a writer that hangs
        stack.enter_context(patch.object(checkpoint, "POLL_S", 1.0))
        try:
            Trial(seed, Path(folder) / "run", *layout_and_crash).run()
        # any kind: a broken invariant here or in the fakes, or the code's own error
        except Exception as error:
            return seed, f"{type(error).__name__}: {error}".splitlines()[0]
    return seed, ""


def test_no_seed_breaks_an_invariant():
    results = list(map(try_seed, range(60)))
    assert not [result for result in results if result[1]]


@pytest.mark.parametrize("layout", [("full", 2), ("full", 2, "engines=0 actor=1")])
def test_a_crash_in_any_change_of_a_file(layout):
    """In a run that saves each step, the next start must find a whole checkpoint after any crash."""
    assert {try_seed(1, layout, crash) for crash in range(40)} == {(1, "")}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    extras.load()
    seeds, broken = range(given.first, given.first + given.seeds), []
    with multiprocessing.Pool(given.processes) as pool:
        for done, (seed, wrong) in enumerate(pool.imap(try_seed, seeds, 100), 1):
            if wrong:
                broken.append(seed)
                print(f"seed {seed}: {wrong}", flush=True)
            if done % 2000 == 0 or done == given.seeds:
                print(f"{done} seeds, broken: {broken or 'none'}", flush=True)
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
