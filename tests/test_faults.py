"""Faults in a run: engines that die or hang, stops, updates that aren't finite. On fakes and a
virtual clock; test_runs.py has real servers."""

import functools
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fakes import FakeActor, FakeCritic, LateWriter, judge_on, simulate, to_text, write_on
from test_rollout import batches_of, check_prompts, check_tokens

LAYOUTS = [("full", 1), ("full", 2), ("partial", 4)]
ALL_LAYOUTS = [*LAYOUTS, ("full", 4), ("partial", 2), ("partial", 3)]
ALL_LAYOUTS += [("fused", 2), ("fused", 3), ("fused", 4)]
UNBROKEN = dict(steps=4, max_refill_waves=30, eval_every=3, write=write_on, verdict=judge_on)


def strike(verb, role, rank):
    """An event: `die` or `hang` of the engines of a role, on one rank or on all (None)."""

    def strike_now(servers, controllers):
        for server in servers:
            if server.role == role and rank in (None, server.rank):
                {"die": server.die, "hang": server.hang}[verb]()

    return strike_now


def ask_to_stop(rank):
    def ask(servers, controllers):
        controllers[rank % len(controllers)].stop.asked = 15

    return ask


def in_parts_of(tokens):
    """Engines whose answers come a few tokens at a time."""

    def prepare(engines):
        for engine in engines:
            engine.server.part = tokens

    return prepare


def trained(controllers, step):
    """What a step trained on: prompts, answers, their log-probabilities, rewards."""
    samples = [s for batch in batches_of(controllers, step) for s in batch.kept]
    facts = ((s.prompt_id, s.index, to_text(s.response), s.logprobs, s.reward) for s in samples)
    return sorted(facts)


@functools.cache
def without_faults(mode, size):
    """The controllers of a run that nothing happens to."""
    return simulate(mode, size, **UNBROKEN)[0]


def check_as_unbroken(controllers):
    """Samples and accuracies of a run without faults; every prompt and token is accounted for."""
    check_prompts(controllers)
    check_tokens(controllers)
    unbroken = without_faults("full", 1)
    for step in range(UNBROKEN["steps"]):
        assert trained(controllers, step) == trained(unbroken, step)
        assert len(trained(controllers, step)) == 8 * 4
    assert all(c.report.accuracies == unbroken[0].report.accuracies for c in controllers)
    assert all(c.report.restarts == controllers[0].report.restarts for c in controllers)


def engines_of(controllers, role):
    """Of the plan, and by their rank."""
    placement = controllers[0].placement
    pool = {"rollout": placement.rollout, "genrm": placement.genrm}[role]
    return {engine.rank: engine for engine in pool.engines}


def start_of(name, mode, size):
    """Of a span of the second step, on rank 0, in a run without faults."""
    *_, spans = without_faults(mode, size)[0].report.steps[1]
    return next(span.start for span in spans if span.name == name)


LAYOUT = st.sampled_from(ALL_LAYOUTS)
PARTS = st.sampled_from([3, 20, 10**6])
ENGINES = (st.sampled_from(["rollout", "genrm"]), st.sampled_from([None, 0, 1, 2, 3]))
FAULTS = st.tuples(st.floats(0.1, 30), st.sampled_from(["die", "hang"]), *ENGINES)


@settings(max_examples=30, deadline=None)
@given(LAYOUT, st.lists(FAULTS, min_size=1, max_size=3), PARTS)
def test_a_run_with_faults_trains_on_the_same_samples(layout, faults, part):
    """Whichever engine dies or hangs, and whenever: awake, asleep, on its way, or while another one
    starts. Unless a role has none left: then it ends, in one line, with the same steps on every
    rank."""
    events = [(seconds, strike(verb, role, rank)) for seconds, verb, role, rank in faults]
    controllers = []
    how = dict(UNBROKEN, events=events, prepare=in_parts_of(part), controllers=controllers)
    try:
        simulate(*layout, **how)
    except ValueError as error:
        ends = "(?:no|the) (rollout|genrm) engine .*(?:left to ask|the third failure in a row)"
        role = re.match(ends, str(error))[1]
        for rank in engines_of(controllers, role):
            assert any(role == of and struck in (None, rank) for _, _, of, struck in faults)
        assert len({len(c.report.steps) for c in controllers}) == 1
        for step in range(len(controllers[0].report.steps)):
            assert trained(controllers, step) == trained(without_faults("full", 1), step)
    else:
        check_as_unbroken(controllers)


class PromptWriter(LateWriter):
    patience = 0


@pytest.mark.parametrize("mode,size", LAYOUTS)
@pytest.mark.parametrize("role,later_s", [("rollout", 0.35), ("genrm", 0.0), ("genrm", 0.35)])
def test_a_role_without_engines_ends_the_run(tmp_path, mode, size, role, later_s):
    """On every rank at once, naming each and how its log ends. A second start trains on the same samples."""
    saving, controllers = dict(out=tmp_path, save_every=1, writer=PromptWriter), []
    events = [(start_of("serve", mode, size) + later_s, strike("die", role, None))]
    how = rf"the {role} engine of rank \d .*; the end of its log: written by rank \d"
    message = f"^no {role} engine is left to ask: {how}"
    with pytest.raises(ValueError, match=message):
        simulate(mode, size, events=events, controllers=controllers, **saving, **UNBROKEN)
    assert [len(c.report.steps) for c in controllers] == [1] * size
    newest = tmp_path / "checkpoints" / "step_1"
    resumed, _ = simulate(mode, size, resumed=newest, **UNBROKEN)
    unbroken = without_faults("full", 1)
    for step in (1, 2, 3):
        assert trained(resumed, step - 1) == trained(unbroken, step)
    assert resumed[0].report.accuracies.items() <= unbroken[0].report.accuracies.items()


@settings(max_examples=30, deadline=None)
@given(LAYOUT, st.floats(0, 15), st.sampled_from([1.0, 1.5]), st.integers(0, 3))
@example(("partial", 2), 0.0, 1.0, 0)
def test_a_stop_leaves_the_state_of_the_steps_start(layout, seconds, over_dispatch, rank):
    """Of any rank, at any time: all end at one step and save once; the prompts to come are as unbroken."""
    mode, size = layout
    options = dict(UNBROKEN, over_dispatch=over_dispatch)
    controllers, _ = simulate(mode, size, events=[(seconds, ask_to_stop(rank))], **options)
    unbroken, _ = simulate(mode, size, **options)
    (done,) = {c.state.step for c in controllers}
    stopped = done < 4 or controllers[0].stopping
    assert [c.stopping for c in controllers] == ([15] * size if stopped else [0] * size)
    if not stopped:
        return
    for c in controllers:
        ((step, cursor, requeued),) = c.checkpoints.saved
        assert step == done == c.placement.actor.version == len(c.report.steps)
        to_come, before = [*requeued, *range(cursor, 100)], range(100)
        if done:
            waiting, drawn = c.report.requeued[done - 1], c.report.cursors[done - 1]
            before = [*waiting, *range(drawn, 100)]
        assert to_come[:50] == list(before)[:50]
    if over_dispatch == 1:
        assert all(trained(controllers, step) == trained(unbroken, step) for step in range(done))


@pytest.mark.parametrize("model,algorithm", [(FakeActor, "grpo"), (FakeCritic, "ppo")])
@pytest.mark.parametrize("skipped,steps_done", [({0, 2, 3}, 4), ({1, 2, 3}, 3)])
def test_updates_that_are_not_finite(monkeypatch, skipped, steps_done, model, algorithm):
    """Three in a row end the run, the last one's samples in a file. Fewer only cost their update."""
    update, controllers = model.update, []
    options = dict(UNBROKEN, algorithm=(algorithm,), controllers=controllers)

    async def sometimes(self, mini_batches, beside):
        version = self.version
        metrics = await update(self, mini_batches, beside)
        return metrics | {f"{model.__name__}/not_finite": float(version in skipped)}

    monkeypatch.setattr(model, "update", sometimes)
    if steps_done == 4:
        simulate("partial", 2, **options)
    else:
        message = r"of 3 updates in a row was not finite; .* in OUT/skipped_samples\.jsonl"
        with pytest.raises(ValueError, match=message):
            simulate("partial", 2, **options)
        assert all(c.report.dumped == c.placement.actor.batches[-1] for c in controllers)
    assert [len(c.report.steps) for c in controllers] == [steps_done] * 2
    notes = [note for note in controllers[0].report.notes if "the update is skipped" in note]
    assert [note.split(":")[0] for note in notes] == [f"step {step + 1}" for step in skipped]
