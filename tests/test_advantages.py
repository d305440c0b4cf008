"""From rewards to advantages in the real loop, under fakes on a virtual clock: every row, on any layout, ReMax's greedy answers."""

import copy
import re
import sys
from pathlib import Path
from statistics import fmean, pstdev

import pytest
import torch
from fakes import simulate, to_text, write_answer

import run
from algorithms import ALGORITHMS, moments, multiplier_of, rewards_of, set_advantages, signals_of, update_multiplier, whiten
from controller import State
from engines.engine import Answer
from losses import Tokens

LAYOUTS = [("full", 1, 1), ("partial", 4, 2), ("partial", 3, 1)]
README = (Path(__file__).parent.parent / "README.md").read_text()


def trained_on(controllers, step):
    """By key, what each data-parallel rank trained on; the ranks of a model-parallel group must hold the same."""
    samples = {}
    for c in controllers:
        for sample in c.report.steps[step][2]:
            known = samples.setdefault((sample.prompt_id, sample.index), sample)
            assert known.advantages == sample.advantages, "two ranks of one model-parallel group disagree"
    return samples


@pytest.mark.parametrize("mode,size,tp", LAYOUTS)
@pytest.mark.parametrize("row", ALGORITHMS)
def test_every_row_runs_in_the_same_loop(row, mode, size, tp):
    """Advantages are those of whole groups, though their answers are trained on by several ranks; whitened over all of them."""
    controllers, _ = simulate(mode, size, tp=tp, algorithm=row, kl_coef=0.1, prompts_per_step=6 * (3 if size == 3 else 1))
    for c in controllers:
        assert [critic.name for critic in c.placement.critics] == list(ALGORITHMS[row].critics)
        assert [model.log for model in c.reference] == [["appraise"] * 3]
        assert all(critic.log == ["appraise", "update"] * 3 for critic in c.placement.critics)
    state = State()
    for step in range(3):
        samples = trained_on(controllers, step)
        groups = {}
        for (prompt_id, _), sample in samples.items():
            groups.setdefault(prompt_id, []).append(sample)
        advantages = [a for sample in samples.values() for a in sample.advantages]
        if not ALGORITHMS[row].filters:
            assert not any(c.report.steps[step][1].filtered for c in controllers)
        if ALGORITHMS[row].whiten:
            assert fmean(advantages) == pytest.approx(0, abs=1e-9) and pstdev(advantages) == pytest.approx(1, abs=1e-6)
            together = copy.deepcopy(list(samples.values()))  # by the same mean and deviation on all ranks
            parts = [signals_of(together, controllers[0].config)]
            update_multiplier(state, parts, controllers[0].config)
            set_advantages(together, parts, controllers[0].config, multiplier_of(state, controllers[0].config))
            whiten(together, [moments([a for sample in together for a in sample.advantages])])
            for sample in together:
                assert samples[sample.prompt_id, sample.index].advantages == pytest.approx(sample.advantages, abs=1e-9)
        else:
            for group in groups.values():
                group.sort(key=lambda sample: sample.index)
                scores = ALGORITHMS[row].score([sample.reward - sample.baseline for sample in group])
                assert [sample.advantages for sample in group] == [[s] * len(g.response) for s, g in zip(scores, group, strict=True)]
        assert len({sample.advantages[0] for sample in samples.values()}) > 1


@pytest.mark.parametrize("mode,size,tp", LAYOUTS)
def test_the_kl_in_the_reward_comes_off_before_the_score_or_off_its_token(mode, size, tp):
    """GRPO: off the answer's reward; ReMax: off the token's, so that early tokens are told of it all."""
    for row in ("grpo", "remax"):
        kl = dict(kl_coef=0.1, kl_in="reward", kl_estimator="k1")
        controllers, _ = simulate(mode, size, tp=tp, algorithm=row, prompts_per_step=6, steps=1, **kl)
        for sample in trained_on(controllers, 0).values():
            kls = [0.1 * (a - b) for a, b in zip(sample.logprobs, sample.reference_logprobs, strict=True)]
            reward = rewards_of([sample], controllers[0].config)[sample.prompt_id][sample.index]
            if row == "grpo":
                assert reward == pytest.approx(sample.reward - sum(kls)) and len(set(sample.advantages)) == 1
            else:
                expected = [sample.reward - sample.baseline - sum(kls[t:]) for t in range(len(kls))]
                assert sample.advantages == pytest.approx(expected)


# ---------------------------------------------------------------------------------------------------------------- ReMax


def write_or_settle(prompt, index, sampling):
    """As the fakes write, but a greedy answer is right for even prompts and wrong for odd ones."""
    if sampling.temperature > 0:
        return write_answer(prompt, index, sampling)
    number = int(to_text(prompt).split("+")[0])
    text = f"   >{number + number % 2}"
    return Answer(index, [ord(c) for c in text], [-0.5] * len(text), "stop", [])


@pytest.mark.parametrize(
    "mode,size,more",
    [("full", 2, {}), ("partial", 4, {}), ("partial", 2, {"over_dispatch": 1.5, "partial_rollout": True}), ("full", 2, {"tp": 2})],
)
def test_remax_s_greedy_answer_is_judged_and_never_trained_on(mode, size, more):
    """One a group, beside the sampled ones; its reward is their baseline, also of a group that was cut off and came again."""
    controllers, _ = simulate(mode, size, algorithm="remax", write=write_or_settle, steps=4, answers_per_prompt=3, **more)
    for step in range(4):
        samples, served = trained_on(controllers, step), [c.report.steps[step][1] for c in controllers]
        assert samples and not any(sample.greedy for sample in samples.values()) and {index for _, index in samples} <= {0, 1, 2}
        greedy = {s.prompt_id: s for each in served for s in each.dropped if s.greedy}
        assert greedy.keys() == {prompt_id for prompt_id, _ in samples}
        for (prompt_id, _), sample in samples.items():
            assert greedy[prompt_id].index == 3 and greedy[prompt_id].reward == sample.baseline == 1.0 - prompt_id % 2
            assert sample.advantages == [sample.reward - sample.baseline] * len(sample.response)
        for prompt_id in greedy:
            assert any(sample.advantages[0] for (draw, _), sample in samples.items() if draw == prompt_id), "it teaches nothing"
        for group in (group for each in served for group in each.filtered):
            assert [sample.greedy for sample in group] == [False, False, False, True] and len({sample.reward for sample in group}) == 1


def test_a_group_whose_greedy_answer_has_no_verdict_is_filtered():
    """It has no baseline, though the others differ; nothing stops."""

    def settle_elsewhere(prompt, index, sampling):
        number = int(to_text(prompt).split("+")[0])
        if sampling.temperature > 0 or number % 4 != 1:
            return write_or_settle(prompt, index, sampling)
        text = f"   >{number + 2}"
        return Answer(index, [ord(c) for c in text], [-0.5] * len(text), "stop", [])

    def unreadable_when_settled(prompt, index, sampling):
        from fakes import write_verdict

        question, answer = to_text(prompt).rstrip("?").split(">")
        number = int(question.split("+")[0])
        if answer == str(number + 2):  # the greedy answers to prompts 1, 5, 9 ...
            return Answer(0, [ord("?")], [-0.1], "stop", [])
        return write_verdict(prompt, index, sampling)

    controllers, _ = simulate("partial", 2, algorithm="remax", write=settle_elsewhere, verdict=unreadable_when_settled, max_judge_failures=500)
    filtered = [group for c in controllers for step in range(3) for group in c.report.steps[step][1].filtered]
    assert any(group[-1].reward is None and len({sample.reward for sample in group[:-1]}) == 2 for group in filtered)
    for step in range(3):
        assert all(prompt_id % 4 != 1 for prompt_id, _ in trained_on(controllers, step))


# ---------------------------------------------------------------------------------------------------------------- your own


def test_the_readme_s_algorithm_of_one_s_own_is_short_and_runs(monkeypatch):
    """As printed: it registers its row, starts the program with its arguments, and trains."""
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert code.count("\n") <= 15
    started = []
    monkeypatch.setattr(run, "main", started.append)
    monkeypatch.setattr(sys, "argv", ["my_algorithm.py", "--algorithm", "mine"])
    monkeypatch.setattr("algorithms.ALGORITHMS", dict(ALGORITHMS))
    exec(compile(code, "my_algorithm.py", "exec"), {"__name__": "__main__"})
    assert started == [["--algorithm", "mine"]]
    controllers, _ = simulate("partial", 2, algorithm="mine", steps=2)
    samples = trained_on(controllers, 1)
    assert len({sample.advantages[0] for sample in samples.values()}) > 1
    now = torch.tensor([-1.0, -0.5], requires_grad=True)
    one = torch.ones(1)
    tokens = Tokens(now, torch.tensor([-1.0, -1.0]), torch.tensor([1.0, -1.0]), torch.tensor([0, 0]), 2 * one)
    from algorithms import get_algorithm

    loss, clipped = get_algorithm("mine").loss(tokens, controllers[0].config)
    loss.sum().backward()
    assert loss.shape == clipped.shape == (2,) and now.grad[0] < 0 < now.grad[1]
