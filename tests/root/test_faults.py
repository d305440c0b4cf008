"""Faults in a run: lost engines, stops, updates that aren't finite. On fakes and a virtual clock;
test_chaos.py draws faults at random, test_runs.py has real servers."""

import functools
import gc
import re

import pytest

import modes
import rollout
from runtime.errors import RunLost, UserError
from tests.root.test_rollout import check_prompts, check_tokens
from tests.support.fakes import (
    FakeActor,
    FakeCritic,
    FakeEngine,
    LateWriter,
    judge_on,
    learned,
    simulate,
    write_on,
)

UNBROKEN = dict(steps=4, max_refill_waves=30, eval_every=3, write=write_on, verdict=judge_on)
TROUBLES = {  # the trouble of an engine -> its owner's message, or who asked
    "die": r"died \(signal 9: ",
    "hang": r"(has \d+ tokens outstanding and sent none for 50 s|didn't answer)",
    "lose": r"has \d+ tokens outstanding and sent none for 50 s",
    "break_off": "broke the connection",
}


def strike(verb, role, rank):
    """Return an event: one of TROUBLES for a role's engine on one rank."""
    verbs = dict(die=FakeEngine.die, hang=FakeEngine.hang, lose=FakeEngine.lose)
    verbs["break_off"] = FakeEngine.break_off

    def strike_now(engines, controllers):
        for engine in engines:
            if (engine.role, engine.rank) == (role, rank):
                verbs[verb](engine)

    return strike_now


def in_parts_of(tokens):
    def prepare(engines):
        for engine in engines:
            engine.part = tokens

    return prepare


@functools.cache
def without_faults(mode, size):
    return simulate(mode, size, **UNBROKEN)[0]


def check_as_unbroken(controllers):
    """Check samples and accuracies against a run on one rank, and account for every prompt and token."""
    check_prompts(controllers)
    check_tokens(controllers)
    unbroken = without_faults("full", 1)
    assert learned(controllers) == learned(unbroken)
    assert list(map(len, learned(unbroken))) == [8 * 4] * UNBROKEN["steps"]
    assert all(c.report.accuracies == unbroken[0].report.accuracies for c in controllers)


def start_of(name, mode, size):
    """Return a span's start in the second step on rank 0, in a run without faults."""
    *_, spans = without_faults(mode, size)[0].report.steps[1]
    return next(span.start for span in spans if span.name == name)


class PromptWriter(LateWriter):
    patience = 0


def line_of(error, caplog, *layout, **how):
    """Return the one line with which a run ends; check for forgotten tasks and exceptions."""
    line = ""
    try:
        simulate(*layout, **how)
    except error as found:
        line = str(found)
    gc.collect()
    assert not caplog.records and "\n" not in line
    return line


@pytest.mark.parametrize("verb", TROUBLES)
@pytest.mark.parametrize("role", ["rollout", "genrm"])
@pytest.mark.parametrize("mode,size", [("full", 2), ("partial", 4), ("fused", 4)])
def test_a_lost_engine_ends_the_run(tmp_path, caplog, mode, size, role, verb):
    """All ranks must end in the same step, with a line that names it. A restart trains on the same."""
    controllers = []
    rank = 1 if (mode, role) == ("partial", "rollout") else size - 1
    how = UNBROKEN | dict(out=tmp_path, save_every=1, writer=PromptWriter, controllers=controllers)
    how["events"] = [(start_of("serve", mode, size) + 0.01, strike(verb, role, rank))]
    line = line_of(RunLost, caplog, mode, size, **how)
    assert re.match(rf"the {role} engine of rank {rank} {TROUBLES[verb]}", line)
    assert line.endswith(f"the end of its log: written by rank {rank}")
    assert [len(c.report.steps) for c in controllers] == [1] * size
    resumed, _ = simulate(mode, size, resumed=tmp_path / "checkpoints" / "step_1", **UNBROKEN)
    unbroken = without_faults("full", 1)
    assert learned(resumed) == learned(unbroken)[1:]
    assert resumed[0].report.accuracies.items() <= unbroken[0].report.accuracies.items()


async def judges_are_forgotten(step):
    await step.c.devices.set_awake(step.c.devices.leads("rollout"))
    while not step.is_over:
        step.start(await step.draw_prompts(), rollout.generate_and_judge)
        await step.tasks.poll()
        await rollout.gather_finished_groups(step)


def test_a_mode_that_never_wakes_its_judges_ends_in_a_line(monkeypatch, caplog):
    """It must end after half of --timeout-s in which no engine had anything to write."""
    mistaken = modes.MODES["partial"]._replace(serve=judges_are_forgotten)
    monkeypatch.setitem(modes.MODES, "partial", mistaken)
    controllers = []
    line = line_of(UserError, caplog, "partial", 2, controllers=controllers, **UNBROKEN)
    waits = r"0 answers and \d+ critiques wait for an engine that --mode partial doesn't wake, "
    assert re.fullmatch(waits + "and no engine has had anything to write for 50 s", line)
    assert 50 < controllers[0].timeline.now() < 60


def test_judges_may_wait_while_others_write():
    """In fused mode they may wait longer than half of --timeout-s."""

    def slowly(engines):
        for engine in engines:
            engine.part = 3
            engine.pace = 0.3 if engine.role == "rollout" else 0.01

    how = UNBROKEN | dict(steps=1, timeout_s=10.0, prepare=slowly)
    controllers, _ = simulate("fused", 4, tail=0.1, **how)
    moves = [mark.start for mark in controllers[0].report.marks if mark.kind == "tail"]
    assert moves[0] > 10
    assert learned(controllers) == learned(without_faults("full", 1))[:1]


@pytest.mark.parametrize("model,algorithm", [(FakeActor, "grpo"), (FakeCritic, "ppo")])
@pytest.mark.parametrize("skipped,steps_done", [({0, 2, 3}, 4), ({1, 2, 3}, 3)])
def test_updates_that_are_not_finite(monkeypatch, skipped, steps_done, model, algorithm):
    """Three in a row must end the run and save the last one's samples. Fewer only lose their update."""
    update, controllers = model.update, []
    options = dict(UNBROKEN, algorithm=(algorithm,), controllers=controllers)

    async def sometimes(self, mini_batches, *beside):
        version = self.version
        metrics = await update(self, mini_batches, *beside)
        return metrics | {f"{model.__name__}/not_finite": float(version in skipped)}

    monkeypatch.setattr(model, "update", sometimes)
    if steps_done == 4:
        simulate("partial", 2, **options)
    else:
        message = r"of 3 updates in a row was not finite; .* in OUT/skipped_samples\.jsonl"
        with pytest.raises(ValueError, match=message):
            simulate("partial", 2, **options)
        assert all(c.report.dumped == c.devices.actor.batches[-1] for c in controllers)
    assert [len(c.report.steps) for c in controllers] == [steps_done] * 2
    notes = [note for note in controllers[0].report.notes if "the update is skipped" in note]
    assert [note.split(":")[0] for note in notes] == [f"step {step + 1}" for step in skipped]
