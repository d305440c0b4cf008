"""From rewards to advantages in the real loop, on fakes and a virtual clock: every row, on any layout."""

from statistics import fmean, pstdev

import pytest

from algorithms import ALGORITHMS
from tests.support.fakes import batches_of, number_in, simulate, text_answer, trained, write_on

LAYOUTS = [("full", 1, 1), ("partial", 4, 2)]


def check_whitened(samples):
    """Check that all ranks used the same mean and deviation, as if one had held all samples."""
    advantages = [a for sample in samples.values() for a in sample.advantages]
    assert fmean(advantages) == pytest.approx(0, abs=1e-9)
    assert pstdev(advantages) == pytest.approx(1, abs=1e-6)


def check_scores(samples, algorithm):
    """Check scores of whole groups, whichever ranks train on their answers; all tokens have the same."""
    groups = {}
    for (prompt_id, _), sample in sorted(samples.items()):
        groups.setdefault(prompt_id, []).append(sample)
    for group in groups.values():
        greedy = sum(answer.reward for answer in group[0].outcomes if answer.greedy)
        scores = algorithm.score([sample.reward - greedy for sample in group], [], algorithm)
        for sample, score in zip(group, scores, strict=True):
            assert sample.advantages == [score] * len(sample.response)


def check_distilled(samples, algorithm):
    """Check that advantages are the teacher's log-ratio per token, plus a judge's reward on the last one."""
    for sample in samples.values():
        pairs = zip(sample.reference_logprobs, sample.policy_logprobs, strict=True)
        expected = [algorithm.kl_coef * (teacher - student) for teacher, student in pairs]
        expected[-1] += sample.reward
        assert sample.advantages == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("mode,size,tp", LAYOUTS)
@pytest.mark.parametrize("row", ALGORITHMS)
def test_every_row_runs_in_the_same_loop(row, mode, size, tp):
    """Critics and a reference must each be called once per step, before the update."""
    teacher = {} if ALGORITHMS[row].needs_reward else {"teacher": "T"}
    controllers, _ = simulate(mode, size, tp=tp, algorithm=(row, "kl_coef=0.1"), **teacher)
    for c in controllers:
        assert [critic.name for critic in c.devices.critics] == list(ALGORITHMS[row].critics)
        assert [model.log for model in c.devices.references] == [["reference"] * 3]
        assert all(critic.log == ["values", "update"] * 3 for critic in c.devices.critics)
    algorithm = controllers[0].algorithm
    for step in range(3):
        samples = trained(controllers, step)
        if not algorithm.filters:
            assert not any(batch.filtered for batch in batches_of(controllers, step))
        if algorithm.whiten:
            check_whitened(samples)
        elif not algorithm.needs_reward:
            check_distilled(samples, algorithm)
        else:
            check_scores(samples, algorithm)
        assert len({sample.advantages[-1] for sample in samples.values()}) > 1


def write_or_settle(prompt, index, sampling):
    """Answer as the fakes do, but make a greedy answer right for even prompts and wrong for odd ones."""
    if sampling.temperature > 0:
        return write_on(prompt, index, sampling)
    number = number_in(prompt)
    return text_answer(f"   >{number + number % 2}", index)


@pytest.mark.parametrize("mode,more", [("full", {"tp": 2}), ("partial", {"over_dispatch": 1.5})])
def test_remax_s_greedy_answer_is_judged_and_never_trained_on(mode, more):
    """Each group must have one as its baseline, also a group that was cut off and came again."""
    options = dict(write=write_or_settle, steps=4, answers_per_prompt=3, **more)
    controllers, _ = simulate(mode, 2, algorithm=("remax",), **options)
    for step in range(4):
        samples, batches = trained(controllers, step), batches_of(controllers, step)
        assert samples and {index for _, index in samples} <= {0, 1, 2}
        greedy = {s.prompt_id: s for batch in batches for s in batch.dropped if s.greedy}
        assert greedy.keys() == {prompt_id for prompt_id, _ in samples}
        for (prompt_id, _), sample in samples.items():
            assert greedy[prompt_id].index == 3 and not sample.greedy
            baseline = greedy[prompt_id].reward
            assert baseline == 1.0 - prompt_id % 2
            assert sample.advantages == [sample.reward - baseline] * len(sample.response)
        for prompt_id in greedy:
            group = [sample for (of, _), sample in samples.items() if of == prompt_id]
            assert any(sample.advantages[0] for sample in group), "it teaches nothing"
        for group in (group for batch in batches for group in batch.filtered):
            assert [sample.greedy for sample in group] == [False, False, False, True]
            assert len({sample.reward for sample in group}) == 1
