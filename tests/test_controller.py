"""The real controllers under fakes on a virtual clock: hand-overs, dynamic sampling, balance, in both modes."""

from collections import Counter

import pytest
from fakes import FakeSource, simulate, write_answer
from hypothesis import given, settings
from hypothesis import strategies as st

import placement
from config import Config
from engines.engine import Answer
from sample import Sample
from scheduling import dynamic_sampling

LAYOUTS = [("full", 1, 1), ("full", 2, 1), ("full", 4, 2), ("partial", 2, 1), ("partial", 4, 1), ("partial", 4, 4)]


def trained(controllers, step):
    """prompt ids of the groups that a step trained on, over all data-parallel ranks."""
    heads = [c for c in controllers if c.placement.actor.is_head]
    return Counter((s.prompt_id, s.index) for c in heads for s in c.report.steps[step][2] if s.advantages is not None)


@pytest.mark.parametrize("mode,size,tp", LAYOUTS)
def test_devices_change_hands_in_order(mode, size, tp):
    """Nobody takes a device that another role holds (the fakes assert it), and the KV cache comes back only once the actor is out."""
    controllers, log = simulate(mode, size, tp=tp)
    for rank in range(size):
        mine = [(verb, who) for r, verb, who in log if r == rank]
        assert mine.count(("take", "actor")) == mine.count(("give", "actor")) == controllers[0].config.steps + 1
        for position, event in enumerate(mine):
            if event == ("take", "actor"):
                until = mine.index(("give", "actor"), position)
                assert {who for verb, who in mine[position + 1 : until] if verb == "take"} <= {"rollout weights"}
    assert all(c.placement.actor.version == controllers[0].config.steps for c in controllers)


@pytest.mark.parametrize("mode,size,tp", LAYOUTS)
def test_a_critic_has_the_devices_with_the_actor(mode, size, tp):
    """It leaves before the rollout weights come back. It is asked before there are advantages (the fakes assert it), and all learn."""
    controllers, log = simulate(mode, size, tp=tp, algorithm="ppo", kl_coef=0.1, kl_in="reward", kl_estimator="k1")
    for rank in range(size):
        mine = [(verb, who) for r, verb, who in log if r == rank and who in ("actor", "reward critic", "rollout weights")]
        trainers = [event for event in mine if event[1] != "rollout weights"]
        hand_over = [("take", "actor"), ("take", "reward critic"), ("give", "reward critic"), ("give", "actor")]
        assert trainers == hand_over * (controllers[0].config.steps + 1)
        taken = [event for event in mine if event != ("give", "rollout weights")]
        assert all(taken[i + 1] == ("give", "reward critic") for i, event in enumerate(taken) if event == ("take", "reward critic"))
    for c in controllers:
        (critic,) = c.placement.critics
        assert critic.version == c.placement.actor.version == 3 and critic.batches == c.placement.actor.batches
        for sample in critic.batches[0]:
            kl = sum(a - b for a, b in zip(sample.logprobs, sample.reference_logprobs, strict=True))
            assert sample.returns["reward"][0] == pytest.approx(sample.reward - 0.1 * kl)


@pytest.mark.parametrize("mode,size,tp", LAYOUTS)
def test_every_prompt_is_accounted_for(mode, size, tp):
    """Each prompt drawn is kept, filtered or carried by exactly one controller; what is kept is trained on once; the batch is full."""
    controllers, _ = simulate(mode, size, tp=tp, steps=4)
    config = controllers[0].config
    for step in range(config.steps):
        served = [c.report.steps[step][1] for c in controllers]
        kept = Counter((s.prompt_id, s.index) for each in served for s in each.kept)
        assert kept == trained(controllers, step) and max(kept.values()) == 1
        groups = len({prompt for prompt, _ in kept})
        assert groups + served[0].lacking == config.prompts_per_step
        fates = Counter(s.prompt_id for each in served for s in each.kept if s.index == 0)
        fates += Counter(group[0].prompt_id for each in served for group in each.filtered + each.carried)
        assert set(fates.values()) == {1}
    # over the run: a draw is trained on or filtered at most once, and what was carried came again or still waits in the buffer
    done = Counter(s.prompt_id for step in range(config.steps) for c in controllers for s in c.report.steps[step][1].kept if s.index == 0)
    done += Counter(g[0].prompt_id for step in range(config.steps) for c in controllers for g in c.report.steps[step][1].filtered)
    waiting = Counter(controllers[0].prompts.buffer)
    assert done + waiting == Counter(range(controllers[0].prompts.cursor))


def test_the_batch_does_not_depend_on_ranks_or_mode():
    """The same prompts make up every step on 1, 2 and 4 ranks, in both modes."""
    runs = [simulate(mode, size)[0] for mode, size in (("full", 1), ("full", 2), ("full", 4), ("partial", 2), ("partial", 4))]
    for step in range(3):
        first, *others = [trained(controllers, step) for controllers in runs]
        assert first and all(other == first for other in others)


@pytest.mark.parametrize("mode,size,tp", LAYOUTS)
def test_ranks_share_the_batch_evenly(mode, size, tp):
    """Data-parallel ranks train on as many samples each, to within one; ranks of one model-parallel group on the same ones."""
    controllers, _ = simulate(mode, size, tp=tp)
    batches = [[(s.prompt_id, s.index) for s in c.placement.actor.batches[0]] for c in controllers]
    counts = {len(batch) for batch in batches}
    assert max(counts) - min(counts) <= 1
    assert all(batches[rank] == batches[rank - rank % tp] for rank in range(size))


def test_partial_mode_judges_while_others_are_written():
    """Side by side, the first verdict comes before the last answer; in turns, after it."""
    for mode, overlaps in (("partial", True), ("full", False)):
        spans = simulate(mode, 2, max_refill_waves=0)[0][0].report.steps[0][3]
        first_verdict = min(s.start for s in spans if s.name == "genrm")
        last_answer = max(s.end for s in spans if s.name == "rollout")
        assert (first_verdict < last_answer) == overlaps


def test_a_wave_costs_a_swap_in_full_mode_only():
    """genrm sleeps and wakes once for every wave in full mode, once a step in partial mode."""
    for mode, once_a_wave in (("full", True), ("partial", False)):
        controllers, log = simulate(mode, 2)
        waves = [served.waves for _, served, _, _ in controllers[0].report.steps]
        assert max(waves) > 1
        wakes = sum(event == (1, "take", "genrm cache") for event in log)
        assert wakes == (sum(waves) if once_a_wave else len(waves))


def test_a_short_batch_is_trained_on_as_it_is():
    """When no group has variance, the waves end, padding is counted and not trained on, and the loop goes on."""

    def always_right(prompt, index, sampling):
        question = "".join(map(chr, prompt))
        text = ">" + question.split("+")[0]
        return Answer(index, [ord(c) for c in text], [-0.5] * len(text), "stop", [])

    controllers, _ = simulate("partial", 2, write=always_right, steps=2)
    for c in controllers:
        for _, served, samples, _ in c.report.steps:
            assert served.waves == 1 + c.config.max_refill_waves and served.lacking == c.config.prompts_per_step
            assert not samples


def test_a_judge_that_never_parses_stops_every_rank():
    """The limit is named, and no controller is left waiting."""

    def gibberish(prompt, index, sampling):
        return Answer(0, [ord("?")], [-0.1], "stop", [])

    with pytest.raises(ValueError, match="--max-judge-failures 5"):
        simulate("partial", 2, verdict=gibberish)


def test_samples_of_a_failed_judgement_are_dropped_not_scored():
    """One unreadable verdict in a group: its sample leaves the batch, the rest of the group is trained on."""

    def sometimes(prompt, index, sampling):
        from fakes import write_verdict

        answer = write_verdict(prompt, index, sampling)
        unreadable = "".join(map(chr, prompt)).startswith("1")
        return Answer(0, [ord("?")], [-0.1], "stop", []) if unreadable else answer

    controllers, _ = simulate("partial", 2, verdict=sometimes)
    for c in controllers:
        for _, served, samples, _ in c.report.steps:
            assert all(s.reward is not None for s in served.kept)
            assert not any(str(s.prompt_id).startswith("1") for s in samples if s.advantages is not None)


def test_identical_answers_are_judged_once():
    """The judge gets one request for each distinct (question, answer) of a group."""
    controllers, _ = simulate("partial", 2, steps=1, eval_every=1)
    (c,) = [c for c in controllers if c.genrm.own]
    served = [j.report.steps[0][1] for j in controllers]
    samples = [s for each in served for s in each.kept + [s for g in each.filtered + each.carried for s in g]]
    distinct = {(s.question, "".join(map(chr, s.response)).rsplit(">", 1)[1]) for s in samples}
    assert c.genrm.own[0].server.requests == len(distinct) < len(samples)


def test_evaluation_is_on_time_and_counts_all_held_out_prompts():
    """Before step 0, every eval_every steps, and after the last; one greedy answer each."""
    greedy = []

    def write(prompt, index, sampling):
        if sampling.temperature == 0:
            greedy.append(tuple(prompt))
        return write_answer(prompt, index, sampling)

    controllers, _ = simulate("full", 2, steps=3, eval_every=2, write=write)
    assert sorted(greedy) == sorted([tuple(prompt.tokens) for prompt in FakeSource.held_out] * 3)
    right = sum(
        "".join(map(chr, write_answer([ord(c) for c in f"{i}+0="], 0, None).tokens)).rsplit(">", 1)[1] == str(i) for i in range(10)
    )
    assert controllers[0].report.accuracies == {0: right / 10, 2: right / 10, 3: right / 10}


@pytest.mark.parametrize("mode,size", [("full", 2), ("partial", 4)])
def test_controllers_get_equal_work(mode, size):
    """Of a ragged batch: as far apart as one sample can be, where padding is no work; and all that was served is there."""
    controllers, _ = simulate(mode, size, steps=3)
    for step in range(3):
        trained_on = [[s for s in c.report.steps[step][2] if s.advantages is not None] for c in controllers]
        work = [[controllers[0].placement.actor.cost(len(s.prompt) + len(s.response)) for s in samples] for samples in trained_on]
        every = [cost for rank in work for cost in rank]
        assert len(set(every)) > 3 and max(map(sum, work)) - min(map(sum, work)) <= max(every)


@settings(max_examples=25, deadline=None)
@given(
    mode=st.sampled_from(["full", "partial"]),
    size=st.sampled_from([2, 4]),
    refills=st.integers(0, 3),
    answers=st.integers(2, 5),
    split=st.integers(0, 1),
)
def test_the_loop_holds_its_invariants(mode, size, refills, answers, split):
    """Any layout: full batches or counted padding, and no draw in two places."""
    controllers, _ = simulate(mode, size, rollout_ranks=split, max_refill_waves=refills, answers_per_prompt=answers, steps=2)
    for step in range(2):
        served = [c.report.steps[step][1] for c in controllers]
        groups = {s.prompt_id for each in served for s in each.kept}
        assert len(groups) + served[0].lacking == 8
        assert all(each.waves == served[0].waves <= 1 + refills for each in served)
