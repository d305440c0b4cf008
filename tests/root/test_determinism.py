"""One seed, one run: the same samples are trained on, to the last bit, in every mode, at any speed.
test_engine.py shows on a real server that a token doesn't depend on concurrent requests."""

from unittest import mock

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import rollout
from engines.engine import seed_of
from reporting import metrics
from scheduling.measured import MOVES
from tests.support.columns import timing_free
from tests.support.fakes import FakeReport, all_batches, at_random_paces, samples_of, simulate


def test_a_seed_is_the_same_in_every_process():
    """The 63 bits must be those of `printf '(1, 2, 3)' | sha256sum`. Commas and quotes are unambiguous."""
    assert seed_of(1, 2, 3) == 0xDFD5726D86ED2C8B >> 1
    assert seed_of(0, "a', 'b") != seed_of(0, "a", "b")


@pytest.mark.parametrize("mode,settings", [("full", {}), ("partial", dict(over_dispatch=2.0))])
def test_an_answer_is_asked_for_by_its_own_seed(mode, settings):
    """It must depend on run, prompt and index, whichever ranks serve it, even if it is cut off."""
    controllers, _ = simulate(mode, 2, seed=5, eval_every=100, **settings)
    samples = samples_of(all_batches(controllers))
    engines = controllers[0].devices.rollout.all_engines
    held_out = {seed_of(5, -1 - i, 0) for i in range(len(controllers[0].prompts.source.held_out))}
    requests = [each for engine in engines for call in engine.requests for each in call]
    asked = [request.seed for request in requests if request.seed not in held_out]
    assert set(asked) == {seed_of(5, s.prompt_id, s.index) for s in samples}
    assert len(asked) > len(set(asked))


STEPS = 3


class MeasuredReport(FakeReport):
    """A report that also keeps each step's metrics, as reporting/metrics.py computes them."""

    def __init__(self):
        super().__init__()
        self.metrics = []

    async def step(self, c, step, batch, samples, stats):
        mine = metrics.local_facts(c, batch, samples, c.timeline.events)
        row = metrics.summarize(await c.world.gather(mine)) | stats
        row |= metrics.serving_metrics(c.state.history[-1], c.config)
        self.metrics.append(row | {"rollout/groups_per_kept": batch.groups_per_kept})
        await super().step(c, step, batch, samples, stats)


def measured(mode, size, seed, **settings):
    """Run on engines of random speed; return the controllers. Only the speeds depend on `seed`."""

    def with_metrics(c):
        c.report = MeasuredReport()

    settings |= dict(prepare=at_random_paces(seed), prepare_controller=with_metrics)
    return simulate(mode, size, steps=STEPS, **settings)[0]


def trained_on(controllers, step):
    """Return every sample of a step's batch, with the rank and the place where it was trained on."""
    leads = [c.devices.actor for c in controllers if c.devices.actor.is_lead]
    return sorted(
        (s.prompt_id, s.index, s.response, s.logprobs, s.reward, s.advantages, actor.dp_rank, place)
        for actor in leads
        for place, s in enumerate(actor.batches[step])
    )


LAYOUTS = [("full", size) for size in (1, 2, 3, 4)] + [("partial", size) for size in (2, 3, 4)]
LAYOUTS += [("fused", size) for size in (2, 3, 4, 8)]
JUDGES = [{}, dict(judge=("a", "b"), model="m", judge_format=("addition",) * 2)]


@settings(max_examples=15, deadline=None)
@given(
    layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
    seed=st.integers(0, 10**6),
    refills=st.integers(0, 3),
    interval_s=st.sampled_from([0.01, 0.05, 0.5]),
    rebalance=st.booleans(),
    tail=st.floats(0, 1),
    judges=st.sampled_from(JUDGES),
)
def test_all_modes_train_on_the_same(layouts, seed, refills, interval_s, rebalance, tail, judges):
    """Batches, metrics and what follows must agree at any speed, whether a step has few waves or none."""
    assume(not judges or (("full", 1) not in layouts and ("partial", 2) not in layouts))
    runs = []
    with mock.patch.object(rollout, "MEETING_INTERVAL_S", interval_s):
        for number, (mode, size) in enumerate(layouts):
            how = dict(rebalance=rebalance and mode in MOVES, tail=tail, **judges)
            runs.append(measured(mode, size, seed + number, max_refill_waves=refills, **how))
    first, second = runs
    for step in range(STEPS):
        batches = [[entry[:6] for entry in trained_on(controllers, step)] for controllers in runs]
        assert batches[0] == batches[1]
        rows = [timing_free(controllers[0].report.metrics[step]) for controllers in runs]
        if len(first) == len(second):  # then the assignment of samples to ranks is also the same
            assert trained_on(first, step) == trained_on(second, step)
            kept = [[s.key for s in run[0].report.steps[step][1].kept] for run in runs]
            assert kept[0] == kept[1]  # the first samples in samples.jsonl
        else:
            for row in rows:
                del row["balance/max_over_mean"]
        assert rows[0] == rows[1]
    prompts = {prompt_id for prompt_id, *_ in trained_on(first, 0)}
    assert len(prompts) + first[0].report.steps[0][1].missing_groups == 8
