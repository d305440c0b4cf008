"""The real controllers on fakes and a virtual clock: hand-overs, dynamic sampling, balance, in all modes."""

from collections import Counter
from types import SimpleNamespace

import pytest

import genrm
from config import Config
from controller import State, advance
from engines.engine import Answer
from fakes import FakeSource, simulate, write_answer
from rollout import RolloutBatch

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


def test_a_judge_that_never_parses_stops_every_rank(monkeypatch):
    """In one line that says how it was read, and no controller is left waiting."""
    monkeypatch.setattr(genrm, "MAX_JUDGE_FAILURES", 5)

    def gibberish(prompt, index, sampling):
        return text_answer(0, "?")

    with pytest.raises(ValueError, match=r"none of the first \d+ answers got a verdict"):
        simulate("partial", 2, verdict=gibberish)


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


def test_empty_steps_count_in_a_row():
    """One step that has a group, and the count begins anew."""
    c = SimpleNamespace(state=State(), config=Config(prompts_per_step=8))
    counts = []
    for missing in (8, 8, 7, 8):
        advance(c, RolloutBatch(missing_groups=missing))
        counts.append(c.state.empty_steps)
    assert counts == [1, 2, 0, 1] and c.state.step == 4
