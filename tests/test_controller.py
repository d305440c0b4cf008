"""The real controllers on fakes and a virtual clock: hand-overs, dynamic sampling, balance, in all modes."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import genrm
from engines.engine import Answer
from fakes import FakeSource, simulate, write_answer, write_verdict

LAYOUTS = [
    ("full", 1, 1),
    ("full", 2, 1),
    ("full", 4, 2),
    ("partial", 2, 1),
    ("partial", 4, 1),
    ("partial", 4, 4),
]
PPO = ("ppo", "kl_coef=0.1", "kl_in=reward", "kl_estimator=k1")


def text_answer(index, text):
    return Answer(index, [ord(c) for c in text], [-0.5] * len(text), "stop", [])


def always_right(prompt, index, sampling):
    return text_answer(index, ">" + "".join(map(chr, prompt)).split("+")[0])


def batches_of(controllers, step):
    """What a step came to on every rank."""
    return [c.report.steps[step][1] for c in controllers]


def trained(controllers, step):
    """What a step trained on, over all data-parallel ranks: prompt_id and index of each sample."""
    heads = [c for c in controllers if c.placement.actor.is_head]
    samples = [s for c in heads for s in c.report.steps[step][2] if s.advantages is not None]
    return Counter((s.prompt_id, s.index) for s in samples)


@pytest.mark.parametrize("mode,size,tp", LAYOUTS)
def test_devices_change_hands_in_order(mode, size, tp):
    """Nobody takes a device that another role holds (the fakes assert it).

    The KV cache comes back only once the actor is out.
    """
    controllers, log = simulate(mode, size, tp=tp)
    steps = controllers[0].config.steps
    for rank in range(size):
        mine = [(verb, who) for r, verb, who in log if r == rank]
        assert mine.count(("take", "actor")) == mine.count(("give", "actor")) == steps + 1
        for position, event in enumerate(mine):
            if event == ("take", "actor"):
                until = mine.index(("give", "actor"), position)
                taken = {who for verb, who in mine[position + 1 : until] if verb == "take"}
                assert taken <= {"rollout weights"}
    assert all(c.placement.actor.version == steps for c in controllers)


@pytest.mark.parametrize("mode,size,tp", LAYOUTS)
def test_trainers_take_turns_on_the_devices(mode, size, tp):
    """The actor for its reference, the critic for its values and its update, the actor for its own.

    A critic is asked before there are advantages (the fakes assert it), and all learn.
    """
    controllers, log = simulate(mode, size, tp=tp, algorithm=PPO)
    turns = ["actor"] + ["actor", "reward critic", "actor"] * controllers[0].config.steps
    for rank in range(size):
        mine = [(verb, who) for r, verb, who in log if r == rank and who in turns]
        assert mine == [(verb, who) for who in turns for verb in ("take", "give")]
    for c in controllers:
        (critic,), actor = c.placement.critics, c.placement.actor
        assert critic.version == actor.version == 3 and critic.batches == actor.batches
        for sample in critic.batches[0]:
            kl = sum(a - b for a, b in zip(sample.logprobs, sample.reference_logprobs, strict=True))
            assert sample.returns["reward"][0] == pytest.approx(sample.reward - 0.1 * kl)


def test_trainers_that_share_a_table_share_the_device():
    """With --schedule fused all learn at once, from the same samples as one after another."""
    alone, _ = simulate("full", 2, algorithm=PPO)
    controllers, log = simulate("full", 2, algorithm=PPO, schedule="fused")
    step = [("take", "actor"), ("give", "actor"), ("take", "reward critic"), ("take", "actor")]
    step += [("give", "reward critic"), ("give", "actor")]
    for rank in range(2):
        mine = [
            (verb, who) for r, verb, who in log if r == rank and who in ("actor", "reward critic")
        ]
        assert mine == step[:2] + step * controllers[0].config.steps
    for before, now in zip(alone, controllers, strict=True):
        (critic,), actor = now.placement.critics, now.placement.actor
        assert critic.batches == actor.batches == before.placement.actor.batches


@pytest.mark.parametrize("mode,size,tp", LAYOUTS)
def test_every_prompt_is_accounted_for(mode, size, tp):
    """Each prompt drawn is kept, filtered or carried by exactly one controller.

    What is kept is trained on once; the batch is full, or what it is short of is counted.
    """
    controllers, _ = simulate(mode, size, tp=tp, steps=4)
    config, done = controllers[0].config, Counter()
    for step in range(config.steps):
        batches = batches_of(controllers, step)
        kept = Counter((s.prompt_id, s.index) for batch in batches for s in batch.kept)
        assert kept == trained(controllers, step) and max(kept.values()) == 1
        groups = len({prompt_id for prompt_id, _ in kept})
        assert groups + batches[0].missing_groups == config.prompts_per_step
        used = Counter(s.prompt_id for batch in batches for s in batch.kept if s.index == 0)
        used += Counter(group[0].prompt_id for batch in batches for group in batch.filtered)
        carried = Counter(group[0].prompt_id for batch in batches for group in batch.carried)
        assert set((used + carried).values()) == {1}
        done += used
    # over the run: a prompt is trained on or filtered at most once; what was carried came again or waits
    prompts = controllers[0].prompts
    assert done + Counter(prompts.requeued) == Counter(range(prompts.cursor))


def test_the_batch_does_not_depend_on_ranks_or_mode():
    """The same prompts make up every step on 1, 2, 3 and 4 ranks, in both modes."""
    layouts = [
        ("full", 1),
        ("full", 2),
        ("full", 4),
        ("partial", 2),
        ("partial", 3),
        ("partial", 4),
    ]
    runs = [simulate(mode, size)[0] for mode, size in layouts]
    for step in range(3):
        first, *others = [trained(controllers, step) for controllers in runs]
        assert first and all(other == first for other in others)


@pytest.mark.parametrize("mode,size,tp", LAYOUTS)
def test_ranks_share_the_batch_evenly(mode, size, tp):
    """Data-parallel ranks train on as many samples each, to within one.

    Ranks of one model-parallel group train on the same ones.
    """
    controllers, _ = simulate(mode, size, tp=tp)
    batches = [[(s.prompt_id, s.index) for s in c.placement.actor.batches[0]] for c in controllers]
    counts = {len(batch) for batch in batches}
    assert max(counts) - min(counts) <= 1
    assert all(batches[rank] == batches[rank - rank % tp] for rank in range(size))


@pytest.mark.parametrize("mode", ["full", "partial"])
@pytest.mark.parametrize("size,prompts", [(3, 16), (4, 6), (3, 1)])
def test_ranks_need_not_divide_the_prompts(mode, size, prompts):
    """All are served, and all that was kept is trained on once: micro-batches are dealt, not prompts.

    The ranks differ by one prompt that they serve at most, by one sample that they train on, and its work.
    """
    controllers, _ = simulate(mode, size, prompts_per_step=prompts, max_refill_waves=30)
    for step in range(3):
        batches = batches_of(controllers, step)
        kept = [s for batch in batches for s in batch.kept]
        assert len({s.prompt_id for s in kept}) == prompts
        served = [
            len({s.prompt_id for s in b.kept}) + len(b.filtered) + len(b.carried) for b in batches
        ]
        assert max(served) - min(served) <= 1
        assert trained(controllers, step) == Counter((s.prompt_id, s.index) for s in kept)
        assert max(trained(controllers, step).values()) == 1
        shares = [c.placement.actor.batches[step] for c in controllers]
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        cost = controllers[0].placement.actor.cost
        work = [[cost(len(s.prompt) + len(s.response)) for s in share] for share in shares]
        assert max(map(sum, work)) - min(map(sum, work)) <= max(map(max, work))


def test_partial_mode_judges_while_others_are_generated():
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
        waves = [batch.waves for _, batch, _, _ in controllers[0].report.steps]
        assert max(waves) > 1
        wakes = sum(event == (1, "take", "genrm cache") for event in log)
        assert wakes == (sum(waves) if once_a_wave else len(waves))
        history = controllers[0].state.history
        assert [stats.genrm.wakes for stats in history] == (
            waves if once_a_wave else [1] * len(waves)
        )


def test_a_short_batch_is_trained_on_as_it_is():
    """When no group has variance, the waves end, what is missing is counted, and the loop goes on."""
    controllers, _ = simulate("partial", 2, write=always_right, steps=2)
    for c in controllers:
        for _, batch, samples, _ in c.report.steps:
            assert batch.waves == 1 + c.config.max_refill_waves
            assert batch.missing_groups == c.config.prompts_per_step and not samples


def test_a_judge_that_never_parses_stops_every_rank(monkeypatch):
    """In one line that says how it was read, and no controller is left waiting."""
    monkeypatch.setattr(genrm, "MAX_JUDGE_FAILURES", 5)

    def gibberish(prompt, index, sampling):
        return text_answer(0, "?")

    with pytest.raises(ValueError, match=r"none of the first \d+ answers got a verdict"):
        simulate("partial", 2, verdict=gibberish)


def test_samples_of_a_failed_judgement_are_dropped_not_scored():
    """One unreadable verdict in a group: its sample leaves the batch, the rest of the group is trained on."""

    def sometimes(prompt, index, sampling):
        unreadable = "".join(map(chr, prompt)).startswith("1")
        return text_answer(0, "?") if unreadable else write_verdict(prompt, index, sampling)

    controllers, _ = simulate("partial", 2, verdict=sometimes)
    for c in controllers:
        for _, batch, samples, _ in c.report.steps:
            assert all(s.reward is not None for s in batch.kept)
            assert not any(
                str(s.prompt_id).startswith("1") for s in samples if s.advantages is not None
            )


def test_identical_answers_are_judged_once():
    """The judge gets one request for each distinct (question, answer) of a group."""
    controllers, _ = simulate("partial", 2, steps=1, eval_every=1)
    (c,) = [c for c in controllers if c.placement.genrm.own]
    batches = batches_of(controllers, 0)
    samples = [s for batch in batches for s in batch.kept]
    samples += [s for batch in batches for group in batch.filtered + batch.carried for s in group]
    distinct = {(s.question, "".join(map(chr, s.response)).rsplit(">", 1)[1]) for s in samples}
    assert c.placement.genrm.own.server.requests == len(distinct) < len(samples)


def test_evaluation_is_on_time_and_counts_all_held_out_prompts():
    """Before step 0, every eval_every steps, and after the last; one greedy answer each."""
    greedy = []

    def write(prompt, index, sampling):
        if sampling.temperature == 0:
            greedy.append(tuple(prompt))
        return write_answer(prompt, index, sampling)

    controllers, _ = simulate("full", 2, steps=3, eval_every=2, write=write)
    assert sorted(greedy) == sorted([tuple(prompt.tokens) for prompt in FakeSource().held_out] * 3)
    answers = [write_answer([ord(c) for c in f"{i}+0="], 0, None).tokens for i in range(10)]
    texts = ["".join(map(chr, tokens)).rsplit(">", 1)[1] for tokens in answers]
    right = sum(text == str(i) for i, text in enumerate(texts))
    assert controllers[0].report.accuracies == {0: right / 10, 2: right / 10, 3: right / 10}


def test_a_held_out_answer_that_an_engine_aborts_is_continued():
    """By nobody's wish, half generated: the accuracies are those of a run in which nothing was aborted."""

    def aborted_once(prompt, index, sampling):
        if sampling.temperature > 0:
            return write_answer(prompt, index, sampling)
        begun = len(prompt) - prompt.index(ord("=")) - 1
        answer = write_answer(prompt[: len(prompt) - begun], index, sampling)
        half = len(answer.tokens) // 2
        tokens, finish = (
            (answer.tokens[begun:], "stop") if begun else (answer.tokens[:half], "abort")
        )
        return Answer(index, tokens, [-0.5] * len(tokens), finish, [])

    undisturbed, _ = simulate("full", 2)
    controllers, _ = simulate("full", 2, write=aborted_once)
    assert controllers[0].report.accuracies == undisturbed[0].report.accuracies
    assert all(undisturbed[0].report.accuracies.values())


@pytest.mark.parametrize("mode,size", [("full", 2), ("partial", 4)])
def test_controllers_get_equal_work(mode, size):
    """Of a ragged batch: as far apart as one sample can be; and all that was served is there."""
    controllers, _ = simulate(mode, size, steps=3)
    cost = controllers[0].placement.actor.cost
    for step in range(3):
        trained_on = [c.report.steps[step][2] for c in controllers]
        work = [[cost(len(s.prompt) + len(s.response)) for s in samples] for samples in trained_on]
        every = [cost for rank in work for cost in rank]
        assert len(set(every)) > 3 and max(map(sum, work)) - min(map(sum, work)) <= max(every)
        assert len(every) == sum(len(batch.kept) for batch in batches_of(controllers, step))


@settings(max_examples=25, deadline=None)
@given(
    mode=st.sampled_from(["full", "partial"]),
    size=st.sampled_from([2, 3, 4]),
    refills=st.integers(0, 3),
    answers=st.integers(2, 5),
    split=st.integers(0, 1),
)
def test_the_loop_holds_its_invariants(mode, size, refills, answers, split):
    """Any layout: full batches or counted padding, and no prompt in two places."""
    controllers, _ = simulate(
        mode,
        size,
        rollout_ranks=split,
        max_refill_waves=refills,
        answers_per_prompt=answers,
        steps=2,
    )
    for step in range(2):
        batches = batches_of(controllers, step)
        groups = {s.prompt_id for batch in batches for s in batch.kept}
        assert len(groups) + batches[0].missing_groups == 8
        assert all(batch.waves == batches[0].waves <= 1 + refills for batch in batches)
