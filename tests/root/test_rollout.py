"""Rollout on fakes and a virtual clock: what is cut off and comes again, where every token goes, meetings,
and judges that are wrong."""

import random
from collections import Counter
from unittest import mock

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import controller
import rewards
import rollout
from tests.support import fakes
from tests.support.fakes import all_batches, batches_of, samples_of, simulate, text_answer, to_text


def tokens_of(groups):
    return sum(len(sample.response) for group in groups for sample in group)


def check_prompts(controllers):
    """Check that every prompt was trained on, filtered or waits: exactly one, and all controllers agree."""
    done = Counter()
    for step in range(controllers[0].config.steps):
        fates = Counter()
        for batch in batches_of(controllers, step):
            kept = {s.prompt_id for s in batch.kept + batch.dropped}
            used_up = [*kept, *(group[0].prompt_id for group in batch.filtered)]
            fates += Counter(used_up + [group[0].prompt_id for group in batch.carried])
            done += Counter(used_up)
        assert set(fates.values()) <= {1}, "a prompt was served twice in one step"
        assert len({tuple(c.report.carried_ids[step]) for c in controllers}) == 1
    prompts = controllers[0].prompts
    assert done + Counter(prompts.carried) == Counter(range(prompts.cursor))


def check_tokens(controllers):
    """Check that generated tokens are trained on, filtered, held, or discarded with a repeated prompt."""
    batches, continues = all_batches(controllers), controllers[0].config.over_dispatch > 1
    used = sum(tokens_of([batch.kept, batch.dropped, *batch.filtered]) for batch in batches)
    thrown = sum(tokens_of(batch.carried) for batch in batches)
    held = sum(tokens_of(c.prompts.groups.values()) for c in controllers)
    assert held == 0 or continues
    assert sum(batch.tokens for batch in batches) == used + (held if continues else thrown)


def check_continued(controllers):
    """Check that answers begin with what they had when cut off, on the controller that holds them."""
    begun = {}
    for step in range(controllers[0].config.steps):
        for rank, batch in enumerate(batches_of(controllers, step)):
            for sample in samples_of([batch]):
                owner, *before = begun.pop((sample.prompt_id, sample.index), (rank, [], [], []))
                now = (sample.response, sample.logprobs, sample.versions)
                assert owner == rank
                assert all(new[: len(old)] == old for old, new in zip(before, now, strict=True))
                assert before[0] or not sample.versions or min(sample.versions) >= step
        for rank, c in enumerate(controllers):
            begun |= {key: (rank, *facts) for key, facts in c.report.carried[step].items()}


def check_come_first(controllers):
    """Check that what waited is dealt first in the next step."""
    for step in range(controllers[0].config.steps - 1):
        served = {s.prompt_id for s in samples_of(batches_of(controllers, step + 1))}
        first = controllers[0].report.carried_ids[step][: controllers[0].config.prompts_per_step]
        assert served >= {*first}


@settings(max_examples=30, deadline=None)
@given(
    mode=st.sampled_from(["full", "partial", "fused"]),
    size=st.sampled_from([1, 2, 3, 4]),
    tp=st.sampled_from([1, 2]),
    over_dispatch=st.sampled_from([1.0, 1.25, 2.0, 4.0]),
    refills=st.integers(0, 3),
    interval_s=st.sampled_from([0.01, 0.05, 0.5]),
    seed=st.integers(0, 10**6),
)
def test_nothing_is_lost(mode, size, tp, over_dispatch, refills, interval_s, seed):
    """No prompt or token may be, whatever is cut off. The fakes assert that no sleeping engine is used."""
    assume(size % tp == 0 and (size > 1 or mode == "full"))
    options = dict(tp=tp, steps=5, prepare=fakes.at_random_paces(seed), rebalance=mode == "partial")
    options |= dict(over_dispatch=over_dispatch, max_refill_waves=refills)
    with mock.patch.object(rollout, "MEETING_INTERVAL_S", interval_s):
        controllers, _ = simulate(mode, size, **options)
    check_prompts(controllers)
    check_tokens(controllers)
    check_come_first(controllers)
    if over_dispatch > 1:
        check_continued(controllers)


def one_in_ten(prompt, index, sampling):
    """Return answers of 10 tokens, 100 for prompt 7; every group has both rewards."""
    length = 98 if fakes.number_in(prompt) == 7 else 8
    return text_answer("#" * length + ">" + str(index % 2), index, to_text(prompt).split("=")[1])


def parity(prompt, index, sampling):
    return text_answer("Y" if to_text(prompt).rstrip("?")[-1] == "1" else "N")


TAIL = dict(write=one_in_ten, verdict=parity, eval_every=100)


def serving_seconds(controllers, step):
    spans = [span for c in controllers for span in c.report.steps[step][3]]
    return [span.end - span.start for span in spans if span.name == "serve"]


@pytest.mark.parametrize(
    "mode,size,over_dispatch,seconds",
    [
        # 0.1 s for genrm to wake, 100 tokens of 0.01 s, a verdict of one token
        ("partial", 2, 1.0, 0.1 + 1.0 + 0.01),
        # 10 tokens and a verdict; controllers meet at most 0.05 s after the first of their answers ended
        ("partial", 2, 1.25, 0.1 + 0.1 + 0.01),
        # 100 tokens, rollout sleeps (0.1 s) and genrm wakes (0.1 s), a verdict
        ("full", 2, 1.0, 1.0 + 0.1 + 0.1 + 0.01),
        ("full", 2, 1.25, 0.1 + 0.1 + 0.1 + 0.01),
    ],
)
def test_over_dispatch_cuts_the_tail(mode, size, over_dispatch, seconds):
    """One of eight prompts takes ten times as long: ten prompts for eight must not wait for it. By hand."""
    controllers, _ = simulate(mode, size, over_dispatch=over_dispatch, steps=1, **TAIL)
    for taken in (*serving_seconds(controllers, 0), controllers[0].state.history[0].serve_s):
        assert seconds - 1e-9 <= taken <= seconds + 2 * rollout.MEETING_INTERVAL_S
    swap_s = 0.2 if mode == "full" else 0.1
    assert controllers[0].state.history[0].swap_s == pytest.approx(swap_s)
    kept = {s.prompt_id for batch in batches_of(controllers, 0) for s in batch.kept}
    assert len(kept) == 8 and (7 in kept) == (over_dispatch == 1)
    assert (7 in controllers[0].prompts.carried) == (over_dispatch > 1)


def test_garbage_of_a_judge_is_dropped(monkeypatch):
    """The samples of about one pair in twenty must be neither scored nor trained on, but the rest is."""
    monkeypatch.setattr(rewards, "MAX_FAILURES", 1000)

    def varied(prompt, index, sampling):
        wrong_by = random.Random(f"{to_text(prompt)} {index}").choice([0, 0, 1, 2, 3])
        return text_answer(f">{fakes.number_in(prompt) + wrong_by}", index)

    def garbage(prompt, index, sampling):
        unreadable = random.Random(to_text(prompt)).random() < 0.05
        return text_answer("?") if unreadable else fakes.judge_on(prompt, index, sampling)

    controllers, _ = simulate("partial", 4, write=varied, verdict=garbage, steps=6)
    check_prompts(controllers)
    check_tokens(controllers)
    batches = all_batches(controllers)
    assert {sample.reward for batch in batches for sample in batch.dropped} == {None}
    assert {sample.reward for batch in batches for sample in batch.kept} == {0.0, 1.0}
    assert sum(failed for c in controllers for failed in c.rewards.counts()[0]) > 0


@pytest.mark.parametrize("mode,size,over_dispatch", [("full", 2, 1.0), ("partial", 4, 2.0)])
def test_prompts_that_teach_nothing_stop_every_rank(mode, size, over_dispatch, monkeypatch):
    """At MAX_EMPTY_STEPS in a row all must stop; groups_per_kept moves a tenth of the way to 10 each time."""
    monkeypatch.setattr(controller, "MAX_EMPTY_STEPS", 5)
    options, controllers = dict(over_dispatch=over_dispatch, steps=12), []
    with pytest.raises(ValueError, match="in 5 steps in a row no prompt"):
        simulate(mode, size, write=fakes.always_right, controllers=controllers, **options)
    for c in controllers:
        assert c.devices.actor.version == len(c.report.steps) == c.state.empty_steps == 5
        assert c.state.groups_per_kept == pytest.approx(10 - 9 * 0.9**5)
        for _, batch, _, _ in c.report.steps:
            assert not batch.kept and batch.missing_groups == 8 and batch.waves == 4
