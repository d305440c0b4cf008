"""One seed, one run: the same samples are trained on, to the last bit, in every mode, at any speed.

That a token doesn't depend on the requests beside it is shown in test_engine.py, on a real server.
"""

import json
import random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rollout
from columns import timing_free
from engines.engine import seed_of
from fakes import FakeReport, judge_on, simulate, write_on
from reporting import metrics
from reporting.timeline import Records
from tests.test_demo import train

# ---------------------------------------------------------------- seeds


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(-300, 10**6), st.integers(0, 64)),
        unique=True,
        max_size=50,
    )
)
def test_seeds_differ_and_fit(keys):
    """63 bits, and no two answers share one; a question with a comma or a quote is not taken for two."""
    seeds = [seed_of(*key) for key in keys]
    assert len(set(seeds)) == len(keys) and all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(0, "a', 'b") != seed_of(0, "a", "b")


def test_a_seed_is_the_same_in_every_process():
    """The first 63 bits of SHA-256 of `(1, 2, 3)`, as `printf '(1, 2, 3)' | sha256sum` gives them: dfd5..."""
    assert seed_of(1, 2, 3) == 0xDFD5726D86ED2C8B >> 1


@pytest.mark.parametrize("mode,settings", [("full", {}), ("partial", dict(over_dispatch=2.0))])
def test_an_answer_is_asked_for_by_its_own_seed(mode, settings):
    """From the run's seed, prompt and index: the same whoever asks whom.

    Also when it is cut off and asked for again.
    """
    controllers, _ = simulate(mode, 2, seed=5, eval_every=100, **settings)
    batches = [c.report.steps[step][1] for c in controllers for step in range(3)]
    samples = [s for batch in batches for s in batch.kept + batch.dropped]
    samples += [s for batch in batches for group in batch.filtered + batch.carried for s in group]
    engines = controllers[0].placement.rollout.all_engines
    held_out = {seed_of(5, -1 - i, 0) for i in range(len(controllers[0].prompts.held_out))}
    asked = [seed for engine in engines for seed in engine.server.seeds if seed not in held_out]
    assert set(asked) == {seed_of(5, s.prompt_id, s.index) for s in samples}
    assert len(asked) > len(set(asked))


# ---------------------------------------------------------------- simulated runs


class MeasuredReport(FakeReport):
    """Keeps each step's metrics, too, as reporting/metrics.py works them out."""

    def __init__(self):
        super().__init__()
        self.metrics = []

    async def step(self, c, step, batch, samples, stats):
        facts = await c.world.gather(
            metrics.local_facts(c, batch, samples, Records(c.timeline.spans))
        )
        row = (
            metrics.summarize(facts)
            | metrics.serving_metrics(c.state.history[-1], c.config)
            | stats
        )
        self.metrics.append(row | {"rollout/groups_per_kept": c.state.groups_per_kept})
        await super().step(c, step, batch, samples, stats)


def measured(mode, size, seed, steps=4, **settings):
    """A run on engines of random speed; returns its controllers. The speeds change with `seed` alone."""

    def prepare(engines):
        rng = random.Random(seed)
        for engine in engines:
            engine.server.pace = 0.005 * 10 ** rng.random()

    def with_metrics(c):
        c.report = MeasuredReport()

    settings |= dict(
        write=write_on, verdict=judge_on, prepare=prepare, prepare_controller=with_metrics
    )
    return simulate(mode, size, steps=steps, **settings)[0]


def trained_on(controllers, step):
    """Every sample of a step's batch, and who trained on it, in which place."""
    heads = [c.placement.actor for c in controllers if c.placement.actor.is_head]
    return sorted(
        (s.prompt_id, s.index, s.response, s.logprobs, s.reward, s.advantages, actor.dp_rank, place)
        for actor in heads
        for place, s in enumerate(actor.batches[step])
    )


def used_up(controllers, step):
    """Prompts that a step filtered, by their owner; and what would be written to samples.jsonl first."""
    batches = [c.report.steps[step][1] for c in controllers]
    filtered = [
        (rank, group[0].prompt_id) for rank, batch in enumerate(batches) for group in batch.filtered
    ]
    return sorted(filtered), [(s.prompt_id, s.index) for s in batches[0].kept]


LAYOUTS = [
    ("full", 2),
    ("partial", 2),
    ("full", 3),
    ("partial", 3),
    ("full", 4),
    ("partial", 4),
    ("auto", 4),
]
LAYOUTS += [("fused", 2), ("fused", 4)]
INTERVALS_S = st.sampled_from([0.01, 0.05, 0.5])


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from(LAYOUTS),
    st.integers(0, 10**6),
    st.integers(0, 3),
    INTERVALS_S,
    st.booleans(),
)
def test_both_modes_train_on_the_same_samples(one, other, seed, refills, interval_s, rebalance):
    """Whatever the engines' speed, also where a step may have few waves or none.

    Batches, metrics and what comes next are equal.
    """
    runs = []
    with mock.patch.object(rollout, "MEETING_INTERVAL_S", interval_s):
        for number, (mode, size) in enumerate((one, other)):
            moves = dict(rebalance=rebalance and mode == "partial")
            runs.append(measured(mode, size, seed + number, max_refill_waves=refills, **moves))
    first, second = runs
    for step in range(4):
        batches = [[entry[:6] for entry in trained_on(controllers, step)] for controllers in runs]
        assert batches[0] == batches[1]
        rows = [timing_free(controllers[0].report.metrics[step]) for controllers in runs]
        if one[1] == other[1]:  # then who trains on what is the same, too
            assert trained_on(first, step) == trained_on(second, step)
            assert used_up(first, step) == used_up(second, step)
        else:
            for row in rows:
                del row["balance/max_over_mean"]
        assert rows[0] == rows[1]
    prompts = {prompt_id for prompt_id, *_ in trained_on(first, 0)}
    assert len(prompts) + first[0].report.steps[0][1].missing_groups == 8


def test_the_metrics_tell_runs_apart():
    """The comparison above could fail: a step that is cut short makes other numbers."""
    one, other = measured("partial", 2, 0), measured("partial", 2, 0, max_refill_waves=0)
    assert timing_free(one[0].report.metrics[0]) != timing_free(other[0].report.metrics[0])


# ---------------------------------------------------------------- real runs


def test_real_runs_are_equal(tmp_path):
    """Three steps of the demo on two ranks, in every mode: every number but times, and every text."""
    rows, texts = [], []
    for mode, port in (("full", 21000), ("partial", 21020), ("fused", 21040)):
        train(tmp_path / mode, "--mode", mode, "--steps", "3", "--eval-every", "3", port=port)
        rows.append(
            [timing_free(json.loads(line)) for line in (tmp_path / mode / "metrics.jsonl").open()]
        )
        texts.append((tmp_path / mode / "samples.jsonl").read_text())
    needed = {"train/loss", "train/grad_norm", "eval/accuracy", "reward/mean"}
    assert len(rows[0]) == 4 and needed <= rows[0][0].keys()
    assert rows[0] == rows[1] == rows[2]
    assert texts[0] == texts[1] == texts[2] and len(texts[0].splitlines()) == 6
