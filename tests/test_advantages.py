"""From rewards to advantages in the real loop, on fakes and a virtual clock: every row, on any layout."""

import copy
from statistics import fmean, pstdev

import pytest

import algorithms
import genrm
from algorithms import ALGORITHMS
from controller import State
from engines.engine import Answer
from fakes import simulate, to_text, write_answer, write_verdict

LAYOUTS = [("full", 1, 1), ("partial", 4, 2), ("partial", 3, 1)]


def trained_on(controllers, step):
    """By key, what data-parallel ranks trained on; ranks of one model-parallel group must hold the same."""
    samples = {}
    for c in controllers:
        for sample in c.report.steps[step][2]:
            known = samples.setdefault((sample.prompt_id, sample.index), sample)
            assert known.advantages == sample.advantages, (
                "ranks of one model-parallel group disagree"
            )
    return samples


def batches_of(controllers, step):
    """What a step came to on every rank."""
    return [c.report.steps[step][1] for c in controllers]


def check_whitened(samples, state, algorithm):
    """By the same mean and deviation on all ranks: as if one had held all samples."""
    advantages = [a for sample in samples.values() for a in sample.advantages]
    assert fmean(advantages) == pytest.approx(0, abs=1e-9)
    assert pstdev(advantages) == pytest.approx(1, abs=1e-6)
    together = copy.deepcopy(list(samples.values()))
    parts = [algorithms.signals_of(together, algorithm)]
    algorithms.update_multiplier(state, parts, algorithm)
    multiplier = algorithms.lagrange_multiplier(state, algorithm)
    algorithms.set_scores(together, parts, algorithm)
    algorithms.set_advantages(together, algorithm, multiplier)
    moments = algorithms.moments([a for sample in together for a in sample.advantages])
    algorithms.whiten(together, [moments])
    for sample in together:
        found = samples[sample.prompt_id, sample.index].advantages
        assert found == pytest.approx(sample.advantages, abs=1e-9)


def check_scores(samples, algorithm):
    """Of whole groups, though their answers are trained on by several ranks; the same for every token."""
    groups = {}
    for (prompt_id, _), sample in sorted(samples.items()):
        groups.setdefault(prompt_id, []).append(sample)
    for group in groups.values():
        scores = algorithm.score([sample.reward - sample.baseline for sample in group])
        for sample, score in zip(group, scores, strict=True):
            assert sample.advantages == [score] * len(sample.response)


@pytest.mark.parametrize("mode,size,tp", LAYOUTS)
@pytest.mark.parametrize("row", ALGORITHMS)
def test_every_row_runs_in_the_same_loop(row, mode, size, tp):
    """With its critics and a reference, each asked once a step, before the update."""
    controllers, _ = simulate(mode, size, tp=tp, algorithm=(row, "kl_coef=0.1"))
    for c in controllers:
        assert [critic.name for critic in c.placement.critics] == list(ALGORITHMS[row].critics)
        assert [model.log for model in c.references] == [["reference"] * 3]
        assert all(critic.log == ["values", "update"] * 3 for critic in c.placement.critics)
    algorithm, state = controllers[0].algorithm, State()
    for step in range(3):
        samples = trained_on(controllers, step)
        if not algorithm.filters:
            assert not any(batch.filtered for batch in batches_of(controllers, step))
        if algorithm.whiten:
            check_whitened(samples, state, algorithm)
        else:
            check_scores(samples, algorithm)
        assert len({sample.advantages[0] for sample in samples.values()}) > 1


@pytest.mark.parametrize("mode,size,tp", LAYOUTS)
def test_the_kl_in_the_reward_comes_off_before_the_score_or_off_its_token(mode, size, tp):
    """GRPO: off the answer's reward; ReMax: off the token's, so that it counts for all tokens before it."""
    for row in ("grpo", "remax"):
        setup = (row, "kl_coef=0.1", "kl_in=reward", "kl_estimator=k1")
        controllers, _ = simulate(mode, size, tp=tp, algorithm=setup, steps=1)
        for sample in trained_on(controllers, 0).values():
            pairs = zip(sample.logprobs, sample.reference_logprobs, strict=True)
            kls = [0.1 * (logprob - reference) for logprob, reference in pairs]
            signals = algorithms.signals_of([sample], controllers[0].algorithm)
            reward = signals["reward"][sample.prompt_id][sample.index]
            if row == "grpo":
                assert (
                    reward == pytest.approx(sample.reward - sum(kls))
                    and len(set(sample.advantages)) == 1
                )
            else:
                expected = [sample.reward - sample.baseline - sum(kls[t:]) for t in range(len(kls))]
                assert sample.advantages == pytest.approx(expected)


# ---------------------------------------------------------------- ReMax


def text_answer(index, text):
    return Answer(index, [ord(c) for c in text], [-0.5] * len(text), "stop", [])


def write_or_settle(prompt, index, sampling):
    """As the fakes write, but a greedy answer is right for even prompts and wrong for odd ones."""
    if sampling.temperature > 0:
        return write_answer(prompt, index, sampling)
    number = int(to_text(prompt).split("+")[0])
    return text_answer(index, f"   >{number + number % 2}")


@pytest.mark.parametrize(
    "mode,size,more",
    [
        ("full", 2, {}),
        ("partial", 4, {}),
        ("partial", 2, {"over_dispatch": 1.5}),
        ("full", 2, {"tp": 2}),
    ],
)
def test_remax_s_greedy_answer_is_judged_and_never_trained_on(mode, size, more):
    """One a group, beside the sampled ones; its reward is their baseline.

    Also of a group that was cut off and came again.
    """
    options = dict(
        algorithm=("remax",), write=write_or_settle, steps=4, answers_per_prompt=3, **more
    )
    controllers, _ = simulate(mode, size, **options)
    for step in range(4):
        samples, batches = trained_on(controllers, step), batches_of(controllers, step)
        assert samples and not any(sample.greedy for sample in samples.values())
        assert {index for _, index in samples} <= {0, 1, 2}
        greedy = {s.prompt_id: s for batch in batches for s in batch.dropped if s.greedy}
        assert greedy.keys() == {prompt_id for prompt_id, _ in samples}
        for (prompt_id, _), sample in samples.items():
            assert greedy[prompt_id].index == 3
            assert greedy[prompt_id].reward == sample.baseline == 1.0 - prompt_id % 2
            assert sample.advantages == [sample.reward - sample.baseline] * len(sample.response)
        for prompt_id in greedy:
            group = [sample for (of, _), sample in samples.items() if of == prompt_id]
            assert any(sample.advantages[0] for sample in group), "it teaches nothing"
        for group in (group for batch in batches for group in batch.filtered):
            assert [sample.greedy for sample in group] == [False, False, False, True]
            assert len({sample.reward for sample in group}) == 1


def test_a_group_whose_greedy_answer_has_no_verdict_is_filtered(monkeypatch):
    """It has no baseline, though the others differ; nothing stops."""
    monkeypatch.setattr(genrm, "MAX_JUDGE_FAILURES", 500)

    def settle_elsewhere(prompt, index, sampling):
        number = int(to_text(prompt).split("+")[0])
        if sampling.temperature > 0 or number % 4 != 1:
            return write_or_settle(prompt, index, sampling)
        return text_answer(index, f"   >{number + 2}")

    def unreadable_when_settled(prompt, index, sampling):
        question, answer = to_text(prompt).rstrip("?").split(">")
        number = int(question.split("+")[0])
        if answer == str(number + 2):  # the greedy answers to prompts 1, 5, 9 ...
            return text_answer(0, "?")
        return write_verdict(prompt, index, sampling)

    options = dict(write=settle_elsewhere, verdict=unreadable_when_settled)
    controllers, _ = simulate("partial", 2, algorithm=("remax",), **options)
    filtered = [
        group for step in range(3) for b in batches_of(controllers, step) for group in b.filtered
    ]
    assert any(
        group[-1].reward is None and len({sample.reward for sample in group[:-1]}) == 2
        for group in filtered
    )
    for step in range(3):
        assert all(prompt_id % 4 != 1 for prompt_id, _ in trained_on(controllers, step))
