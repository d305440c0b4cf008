"""One seed, one run: the same samples are trained on, to the last bit, in both modes and whatever the engines' speed.

That a token doesn't depend on the requests beside it is shown in test_rollout.py, on a real server.
"""

import json
import random

import pytest
from columns import timing_free
from fakes import FakeReport, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.engine import seed_of
from reporting.metrics import local_facts, summarize
from tests.test_demo import train

# ---------------------------------------------------------------- seeds


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-300, 10**6), st.integers(0, 64)), unique=True, max_size=50))
def test_seeds_differ_and_fit(keys):
    """63 bits, and no two answers share one; a question that holds a comma or a quote is not taken for two."""
    seeds = [seed_of(*key) for key in keys]
    assert len(set(seeds)) == len(keys) and all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(0, "a', 'b") != seed_of(0, "a", "b")


def test_a_seed_is_the_same_in_every_process():
    """The first 63 bits of SHA-256 of `(1, 2, 3)`, as `printf '(1, 2, 3)' | sha256sum` gives them: dfd5..."""
    assert seed_of(1, 2, 3) == 0xDFD5726D86ED2C8B >> 1


@pytest.mark.parametrize("mode,settings", [("full", {}), ("partial", dict(over_dispatch=2.0, partial_rollout=True))])
def test_an_answer_is_asked_for_by_its_own_seed(mode, settings):
    """From the run's seed, prompt and index: the same whoever asks whom, and when it is cut off and asked for again."""
    controllers, _ = simulate(mode, 2, seed=5, eval_every=100, **settings)
    served = [c.report.steps[step][1] for c in controllers for step in range(3)]
    samples = [s for each in served for s in each.kept + each.dropped + [s for g in each.filtered + each.carried for s in g]]
    asked = [seed for engine in controllers[0].rollout.all_engines for seed in engine.server.seeds]
    held_out = {seed_of(5, -1 - i, 0) for i in range(len(controllers[0].prompts.held_out))}
    asked = [seed for seed in asked if seed not in held_out]
    assert set(asked) == {seed_of(5, s.prompt_id, s.index) for s in samples} and len(asked) > len(set(asked))


# ---------------------------------------------------------------- simulated runs


class MeasuredReport(FakeReport):
    """Keeps each step's metrics, too, as report.py works them out."""

    def __init__(self):
        super().__init__()
        self.metrics = []

    async def step(self, c, step, batch, samples, stats):
        facts = await c.world.gather(local_facts(c, batch, samples, c.timeline.spans))
        metrics = summarize(facts) | stats
        self.metrics.append(metrics | {"rollout/groups_per_kept": c.state.groups_per_kept})
        await super().step(c, step, batch, samples, stats)


def measured(mode, size, seed, steps=4, **settings):
    """A run on engines of random speed; returns every rank's c. The servers' speeds change with `seed`, nothing else does."""

    def prepare(servers):
        rng = random.Random(seed)
        for server in servers:
            server.server.pace = 0.005 * 10 ** rng.random()

    def with_metrics(c):
        c.report = MeasuredReport()

    return simulate(mode, size, steps=steps, prepare=prepare, prepare_job=with_metrics, **settings)[0]


def trained_on(controllers, step):
    """Every sample of a step's batch, whoever trained on it: tokens, log-probabilities, reward, advantages, and in which place."""
    heads = [c for c in controllers if c.placement.actor.is_head]
    return sorted(
        (s.prompt_id, s.index, s.response, s.logprobs, s.reward, s.advantages, c.placement.actor.dp_rank, place)
        for c in heads
        for place, s in enumerate(c.placement.actor.batches[step])
    )


def used_up(controllers, step):
    """Draws that a step trained on or filtered, by their owner; and what report.py would write to samples.jsonl first."""
    served = [c.report.steps[step][1] for c in controllers]
    filtered = sorted((rank, group[0].prompt_id) for rank, each in enumerate(served) for group in each.filtered)
    return filtered, [(s.prompt_id, s.index) for s in served[0].kept]


LAYOUTS = st.sampled_from([("full", 2), ("partial", 2), ("full", 4), ("partial", 4), ("auto", 4)])


@settings(max_examples=40, deadline=None)
@given(LAYOUTS, LAYOUTS, st.integers(0, 10**6), st.integers(0, 3), st.sampled_from([0.01, 0.05, 0.5]), st.booleans())
def test_both_modes_train_on_the_same_samples(one, other, seed, refills, meet_every_s, rebalance):
    """Whatever the engines' speed, also where a step may have few waves or none: batches, metrics and what comes next are equal."""
    runs = []
    for number, (mode, size) in enumerate((one, other)):
        moves = rebalance and mode == "partial"
        runs.append(measured(mode, size, seed + number, max_refill_waves=refills, meet_every_s=meet_every_s, rebalance=moves))
    first, second = runs
    for step in range(4):
        batches = [[entry[:6] for entry in trained_on(controllers, step)] for controllers in runs]
        assert batches[0] == batches[1] and first[0].state.groups_per_kept == second[0].state.groups_per_kept
        metrics = [timing_free(controllers[0].report.metrics[step]) for controllers in runs]
        if one[1] == other[1]:  # then who trains on what is the same, too
            assert trained_on(first, step) == trained_on(second, step) and used_up(first, step) == used_up(second, step)
        else:
            for row in metrics:
                del row["balance/max_over_mean"]
        assert metrics[0] == metrics[1]
    assert len({s[0] for s in trained_on(first, 0)}) + first[0].report.steps[0][1].lacking == 8


def test_the_metrics_tell_runs_apart():
    """The comparison above could fail: another source of prompts' rewards, or a step that is cut short, makes other numbers."""
    one, other = measured("partial", 2, 0), measured("partial", 2, 0, max_refill_waves=0)
    assert timing_free(one[0].report.metrics[0]) != timing_free(other[0].report.metrics[0])


# ---------------------------------------------------------------- real runs


def test_real_runs_are_equal(tmp_path):
    """Three steps of the demo on two ranks, in both modes: every number that isn't about time, and every text."""
    rows, texts = [], []
    for mode, port in (("full", 21000), ("partial", 21020)):
        train(tmp_path / mode, "--mode", mode, "--steps", "3", "--eval-every", "3", port=port)
        rows.append([timing_free(json.loads(line)) for line in (tmp_path / mode / "metrics.jsonl").open()])
        texts.append((tmp_path / mode / "samples.jsonl").read_text())
    assert len(rows[0]) == 4 and {"train/loss", "train/grad_norm", "eval/accuracy", "reward/mean"} <= rows[0][0].keys()
    assert rows[0] == rows[1]
    assert texts[0] == texts[1] and len(texts[0].splitlines()) == 6
