"""The real controllers on fakes and a virtual clock: hand-overs, dynamic sampling, balance, in all modes."""

from collections import Counter
from itertools import chain
from signal import SIGTERM
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

import controller
import evaluation
from config import Config
from controller import advance
from runtime.errors import UserError
from scheduling.balance import Measure
from state import RolloutBatch, State
from tests.support.fakes import (
    FakeSource,
    batches_of,
    judge_on,
    number_in,
    part_of,
    simulate,
    text_answer,
    to_text,
    trained,
    write_on,
)

LAYOUTS = [("full", 1, 1), ("full", 4, 2), ("partial", 2, 1), ("partial", 4, 4)]
APART = "engines=0-2 actor=3"
PPO = ("ppo", "kl_coef=0.1", "kl_in=reward", "kl_estimator=k1")


def events_of(log, rank, *who):
    """Return these holders' events on a rank's device, or on all devices with None."""
    return [(verb, holder) for r, verb, holder in log if r == rank and (not who or holder in who)]


@pytest.mark.parametrize("mode,size,tp", LAYOUTS)
def test_trainers_take_turns_on_the_devices(mode, size, tp):
    """The actor goes before its reference; the critic wakes for values and its update; then the actor's.

    A critic must compute values before advantages exist (the fakes assert it), and all learn."""
    controllers, log = simulate(mode, size, tp=tp, algorithm=PPO)
    turns = ["actor"] + ["actor", "reward critic", "actor"] * controllers[0].config.steps
    for rank in range(size):
        expected = [(verb, who) for who in turns for verb in ("take", "give")]
        assert events_of(log, rank, "actor", "reward critic") == expected
    for c in controllers:
        (critic,), actor = c.devices.critics, c.devices.actor
        assert critic.version == actor.version == 3 and critic.batches == actor.batches
        for sample in critic.batches[0]:
            kl = sum(a - b for a, b in zip(sample.logprobs, sample.reference_logprobs, strict=True))
            assert sample.returns["reward"][0] == pytest.approx(sample.reward - 0.1 * kl)


def test_trainers_that_share_a_table_share_the_device():
    """With --schedule fused all must learn at once, from the same samples as one after another."""
    alone, _ = simulate("full", 2, algorithm=PPO)
    controllers, log = simulate("full", 2, algorithm=PPO, schedule="fused")
    step = [("take", "actor"), ("give", "actor"), ("take", "reward critic"), ("take", "actor")]
    step += [("give", "reward critic"), ("give", "actor")]
    for rank in range(2):
        expected = step[:2] + step * controllers[0].config.steps
        assert events_of(log, rank, "actor", "reward critic") == expected
    for before, now in zip(alone, controllers, strict=True):
        (critic,), actor = now.devices.critics, now.devices.actor
        assert critic.batches == actor.batches == before.devices.actor.batches


@pytest.mark.parametrize("schedule", ["1f1b", "fused"])
def test_the_policy_makes_no_update_while_the_critic_warms_up(schedule):
    """After that it must learn as if the run began there; the critic learns in every step."""
    algorithm = (*PPO, "critic_warmup=2")
    controllers, _ = simulate("full", 2, algorithm=algorithm, schedule=schedule, steps=5)
    for c in controllers:
        (critic,), actor = c.devices.critics, c.devices.actor
        assert (critic.version, actor.version) == (5, 3) and critic.batches[2:] == actor.batches
        (weights,) = {version for sample in actor.batches[0] for version in sample.versions}
        assert weights == 0


@pytest.mark.parametrize("mode,size,prompts", [("full", 3, 16), ("partial", 4, 6), ("full", 3, 1)])
def test_ranks_need_not_divide_the_prompts(mode, size, prompts):
    """All must be trained on once; ranks differ by at most one served prompt, one group, and its work."""
    controllers, _ = simulate(mode, size, prompts_per_step=prompts, max_refill_waves=30)
    for step in range(3):
        batches = batches_of(controllers, step)
        kept = [s for batch in batches for s in batch.kept]
        assert len({s.prompt_id for s in kept}) == prompts
        served = [len({s.prompt_id for s in b.kept}) + len(b.filtered + b.carried) for b in batches]
        assert max(served) - min(served) <= 1
        assert trained(controllers, step).keys() == {(s.prompt_id, s.index) for s in kept}
        shares = [c.devices.actor.batches[step] for c in controllers]
        assert max(map(len, shares)) - min(map(len, shares)) <= 4  # answers per prompt
        actor = controllers[0].devices.actor
        tokens = {s.key: len(s.tokens) for share in shares for s in share}
        measure = Measure(
            tokens, actor.macs, {s.prompt_id: actor.prefix_of(s.prompt) for s in kept}
        )
        groups = {s.prompt_id: [] for s in kept}
        for key in tokens:
            groups[key[0]].append(key)
        work = [measure.work([s.key for s in share]) for share in shares]
        assert max(work) - min(work) <= max(map(measure.work, groups.values()))


@pytest.mark.parametrize("mode", ["full", "partial"])
def test_partial_mode_judges_while_others_are_generated(mode):
    """Side by side, a verdict must come before the last answer; in turns, after it, with a swap per wave."""
    controllers, log = simulate(mode, 2)
    waves = [batch.waves for _, batch, _, _ in controllers[0].report.steps]
    assert max(waves) > 1
    expected = waves if mode == "full" else [1] * len(waves)
    assert events_of(log, 1).count(("take", "genrm cache")) == sum(expected)
    assert [stats.genrm.wakes for stats in controllers[0].state.history] == expected
    spans = simulate(mode, 2, max_refill_waves=0)[0][0].report.steps[0][3]
    first_verdict = min(s.start for s in spans if s.name == "genrm")
    last_answer = max(s.end for s in spans if s.name == "rollout")
    assert (first_verdict < last_answer) == (mode == "partial")


def test_evaluation_is_on_time_and_counts_all_held_out_prompts():
    """It runs before step 0, every eval_every steps, and after the last; aborts of others don't affect it."""
    greedy, held_out = [], FakeSource().held_out

    def write(prompt, index, sampling):
        answer = write_on(prompt, index, sampling)
        if sampling.temperature > 0 or to_text(prompt)[-1] != "=":
            return answer
        greedy.append(prompt)
        return part_of(answer, 0, len(answer.tokens) // 2, "abort")

    controllers, _ = simulate("full", 2, steps=3, eval_every=2, write=write)
    assert sorted(greedy) == sorted([prompt.tokens for prompt in held_out] * 3)
    answers = [to_text(write_on(prompt.tokens, 0, None).tokens) for prompt in held_out]
    right = sum(answer.endswith(f">{number}") for number, answer in enumerate(answers))
    assert controllers[0].report.accuracies == {0: right / 10, 2: right / 10, 3: right / 10}


class Watched(list):
    """Held-out prompts that are read one after another; `read` counts them."""

    read = 0

    def __getitem__(self, number):
        self.read += 1
        return super().__getitem__(number)


@pytest.mark.parametrize(
    "mode,size,more",
    [("full", 3, {}), ("partial", 4, {}), ("partial", 4, dict(placement=APART, ahead=1))],
)
def test_evaluation_asks_for_samples_too(mode, size, more, monkeypatch):
    """There are three at the run's temperature besides the greedy one, by hand.

    They run one prompt at a time where engines decode one request, because all could fill the
    memory. Training stays the same."""
    monkeypatch.setattr(evaluation, "QUEUED", 1)
    asked, held_out = Counter(), Watched(FakeSource().held_out)

    def write(prompt, index, sampling):
        if any(prompt == each.tokens for each in held_out) and len(asked) < 40:
            assert held_out.read - len({question for question, *_ in asked}) <= size
        asked[to_text(prompt), index, sampling.temperature] += 1
        return write_on(prompt, index, sampling)

    def watch(c):
        c.prompts.source.held_out = held_out
        c.prompts.source.training = lambda number: FakeSource().training(100 + number)

    more |= dict(max_running_requests=1, steps=2, prepare_controller=watch)
    controllers, _ = simulate(mode, size, eval_samples=3, write=write, **more)
    for prompt in held_out:
        counts = [asked[prompt.question, index, float(index > 0)] for index in range(4)]
        assert counts == [2] * 4, prompt.question
    right = []
    for number, prompt in enumerate(held_out):
        texts = [to_text(write_on(prompt.tokens, index, None).tokens) for index in range(4)]
        first, *others = [text.endswith(f">{number}") for text in texts]
        right.append((first, sum(others)))
    assert controllers[0].report.sampled == {0: sorted(right), 2: sorted(right)}
    assert len({count for _, count in right}) > 2
    plain, _ = simulate(mode, size, **more)
    assert plain[0].report.accuracies == controllers[0].report.accuracies
    for step in range(2):
        assert trained(plain, step) == trained(controllers, step)


def test_empty_steps_count_in_a_row():
    """After a step that has a group, the count must restart."""
    c = SimpleNamespace(state=State(), config=Config(prompts_per_step=8))
    counts = []
    for missing in (8, 8, 7, 8):
        advance(c, RolloutBatch(missing_groups=missing))
        counts.append(c.state.empty_steps)
    assert counts == [1, 2, 0, 1] and c.state.step == 4


def test_a_stop_while_others_train_ends_that_step(tmp_path):
    """No rank may serve another step first. test_chaos.py has stops at any moment."""
    how = dict(mode="partial", size=4, placement=APART, save_every=9, out=tmp_path)
    spans = simulate(**how)[0][-1].report.steps[1][3]
    [start] = [span.start for span in spans if span.name == "train"]
    ask = lambda _, controllers: vars(controllers[-1].stop).update(asked=SIGTERM)  # noqa: E731
    controllers, _ = simulate(**how, events=[(start + 0.1, ask)])
    found = {(c.was_stopped, c.state.step, c.ahead) for c in controllers}
    assert found == {(True, 2, None)}


JUDGED = {  # name -> how engines and trainers share the ranks
    "in turns": dict(mode="full", size=2, prompts_per_step=4),
    "side by side": dict(mode="partial", size=2, prompts_per_step=4),
    "fused": dict(mode="fused", size=4),
}


def mostly_readable(prompt, index, sampling):
    """Judge rightly, but unreadably where the number is a multiple of 3."""
    return judge_on(prompt, index, sampling) if number_in(prompt) % 3 else text_answer("?")


def stopped_after(seconds, **how):
    ask = lambda _, controllers: vars(controllers[1].stop).update(asked=SIGTERM)  # noqa: E731
    return simulate(**how, verdict=mostly_readable, events=[(seconds, ask)], save_every=9)[0]


@pytest.mark.parametrize("name", JUDGED)
def test_judges_counts_are_as_without_a_stop(tmp_path, name):
    """An answer that is judged again must count once, whenever a step is given up."""
    how = JUDGED[name] | dict(max_refill_waves=0)
    unbroken, _ = simulate(**how, verdict=mostly_readable)
    assert min(counts_of(unbroken)) > 0
    for seconds in (1.0, 1.25, 1.5, 1.75, 3.0, 3.5):
        out = tmp_path / str(seconds)
        before = stopped_after(seconds, **how, out=out)
        (folder,) = out.glob("checkpoints/step_*")
        after, _ = simulate(**how, verdict=mostly_readable, resumed=folder)
        assert all(c.was_stopped for c in before) and counts_of(after) == counts_of(unbroken)


def test_verdicts_of_answers_that_go_on_stay_counted(tmp_path):
    """They aren't requested again, but unreadable ones are."""
    how = dict(mode="partial", size=2, over_dispatch=1.5, out=tmp_path)
    controllers = stopped_after(1.5, **how)
    pairs = set()
    for c in controllers:
        for sample in chain(*c.prompts.groups.values()):
            if sample.verdict is not None:
                pairs.add((sample.prompt_id, c.rewards.final_answer(sample)))
    assert counts_of(controllers) == (0, len(pairs)) and len(pairs) > 5


def counts_of(controllers):
    """Return the only judge's failures and verdicts."""
    counts = [c.rewards.counts() for c in controllers]
    return tuple(sum(number for (number,) in column) for column in zip(*counts, strict=True))


def test_rows_are_written_before_an_error_ends_the_run(monkeypatch):
    """They are written while the next step is served, and may explain the error."""
    waited = []

    def fail_to_learn(c):
        async def written():
            waited.append(c.world.rank)

        c.report.written = written

    monkeypatch.setattr(controller, "learn", AsyncMock(side_effect=UserError("no")))
    with pytest.raises(UserError, match="no"):
        simulate("full", 1, steps=1, prepare_controller=fail_to_learn)
    assert waited == [0]
