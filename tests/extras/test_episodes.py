"""Episodes of whole runs on fakes: a seed is a run, cut-off episodes go on, and lost ones have no reward."""

import gc
import json
import random
from collections import Counter
from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import evaluation
from inputs.prompt_file import PromptFile
from runtime.errors import UserError
from scheduling.measured import histogram
from tests.root.test_data import Characters
from tests.root.test_rollout import check_continued, check_prompts, check_tokens
from tests.support.episodes import END, game, judge_by_chance, play, texts_of
from tests.support.fakes import (
    FakeSource,
    all_batches,
    at_random_paces,
    batches_of,
    samples_of,
    to_text,
    trained,
)


def facts_of(controllers):
    """Return by step all samples trained on."""
    names = ["response", "logprobs", "versions", "replies", "turn_rewards", "reward"]
    found = []
    for step in range(len(controllers[0].report.steps)):
        samples = trained(controllers, step)
        found.append({key: [vars(samples[key])[name] for name in names] for key in sorted(samples)})
    return found


def check_played(kind, controllers, before=()):
    """Check that each object was closed once and saw each turn of its episode once, in order.

    before: keys of those that were finished before a restart.
    """
    assert {each.closed for each in kind.made} == {1}
    shown = {}
    for each in kind.made:
        shown.setdefault(each.key, []).append(each.turns)
    samples = samples_of(all_batches(controllers))
    assert samples
    for sample in samples:
        assert len(sample.logprobs) == len(sample.versions) == len(sample.response)
        if sample.finish == "stop" and sample.key not in before:
            assert texts_of(sample) in shown[sample.key]
            assert len(sample.earned) == len(sample.replies) + 1


LAYOUTS = [("full", 1), ("full", 3), ("partial", 2), ("partial", 4), ("fused", 2), ("fused", 4)]


@settings(max_examples=6, deadline=None)
@given(
    layouts=st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS)),
    algorithm=st.sampled_from([("grpo",), ("ppo",), ("remax",)]),
    seed=st.integers(0, 10**6),
    tail=st.floats(0, 1),
)
def test_samples_don_t_depend_on_who_answers_first(layouts, algorithm, seed, tail):
    """All modes must train on the same episodes, however long engines and environments take."""
    found = []
    for number, layout in enumerate(layouts):
        kind = game((0.0, 0.01, 0.4), seed + number)
        how = dict(prepare=at_random_paces(seed + number), tail=tail, algorithm=algorithm, steps=2)
        controllers = play(kind, *layout, **how)
        check_played(kind, controllers)
        check_prompts(controllers)
        check_tokens(controllers)
        found.append(facts_of(controllers))
    assert found[0] == found[1]
    samples = samples_of(all_batches(controllers))
    assert {len(sample.replies) for sample in samples} == {0, 1, 2, 3}
    assert all(to_text(s.tokens).count("]") == len(s.replies) for s in samples)


def awaken(engines):
    """An evaluation uses the weights of its own directory."""
    for engine in engines:
        engine.version = 0


def slowly(engines):
    for engine in engines:
        engine.pace = 0.2


@pytest.mark.parametrize("mode", ["partial", "full"])
def test_episodes_that_are_cut_off_go_on_with_their_objects(mode):
    """No object may be made again and no step taken twice, in a turn or while the environment answers."""
    kind = game((0.0, 0.5, 3.0))
    how = dict(over_dispatch=4.0, prompts_per_step=2, steps=10, prepare=slowly, eval_every=99)
    controllers = play(kind, mode, **how)
    check_played(kind, controllers)
    check_prompts(controllers)
    check_tokens(controllers)
    check_continued(controllers)
    assert max(Counter(each.key for each in kind.made if each.key[0] >= 0).values()) == 1
    assert sum(c.environment.waited for c in controllers) > 0, "cut off while it answers"
    assert sum(batch.aborted for batch in all_batches(controllers)) > 0, "cut off in a turn"
    kept = list(chain.from_iterable(batch.kept for batch in all_batches(controllers)))
    assert any(sample.replies and len({*sample.versions}) > 1 for sample in kept)


def carried_in(folder):
    """Return by key how far the samples in a checkpoint's groups are."""
    own = [json.loads(path.read_text()) for path in folder.glob("controllers/*")]
    samples = chain.from_iterable(group for each in own for group in each["groups"])
    return {(s["prompt_id"], s["index"]): s["finish"] for s in samples}


def test_a_restart_plays_carried_episodes_again_and_trains_on_the_same(tmp_path):
    how = dict(over_dispatch=2.0, prompts_per_step=4, steps=4, save_every=2, eval_every=99)
    first = play(game(), out=tmp_path, **how)
    folder = tmp_path / "checkpoints" / "step_2"
    begun = carried_in(folder)
    assert {*begun.values()} & {"abort", "turn"}
    kind = game()
    again = play(kind, out=tmp_path / "again", resumed=folder, **how)
    check_played(kind, again, {key for key, finish in begun.items() if finish == "stop"})
    assert facts_of(again) == facts_of(first)[2:]
    # replies that differ lose the episodes that go on
    other = game()
    step = other.step

    async def says_otherwise(self, text):
        found = await step(self, text)
        return found if found.done else found._replace(reply=found.reply.upper() + "!]")

    other.step = says_otherwise
    controllers = play(other, out=tmp_path / "other", resumed=folder, **how)
    lost = {s.key for s in samples_of(all_batches(controllers)) if s.finish == "lost"}
    went_on = {key for key, finish in begun.items() if finish not in ("stop", "length")}
    assert lost and lost <= went_on and not any(lost & {*trained(controllers, n)} for n in (0, 1))


def without_held_out(c):
    c.prompts.source.held_out = ()


def lose_some(kind, part, turn):
    """Make the world of a part of the episodes unreachable in this turn, from 0."""
    step = kind.step

    async def step_or_lose(self, text):
        if len(self.turns) == turn and random.Random(f"{self.key}").random() < part:
            raise random.choice([ConnectionResetError, TimeoutError])
        return await step(self, text)

    kind.step = step_or_lose
    return kind


@pytest.mark.parametrize("mode", ["partial", "full"])
def test_what_is_lost_is_dropped_and_counted_never_0(mode):
    kind = lose_some(game(), 0.3, 1)
    controllers = play(kind, mode, prompts_per_step=4, prepare_controller=without_held_out)
    assert {each.closed for each in kind.made} == {1}
    samples = samples_of(all_batches(controllers))
    lost = [sample for sample in samples if sample.finish == "lost"]
    assert lost and {sample.reward for sample in lost} == {None}
    kept = [sample for batch in all_batches(controllers) for sample in batch.kept]
    assert kept and not any(sample.finish == "lost" for sample in kept)
    assert sum(c.environment.failed for c in controllers) == len(lost)
    assert all(len(sample.outcomes) < 5 for sample in kept)
    for sample in kept:
        assert sample.index in {outcome.index for outcome in sample.outcomes}
    found = controllers[0].environment.means(samples)
    assert sum(found["environment/lost_frac"]) == len(lost)
    assert len(found["environment/reward_mean"]) == len(samples) - len(lost)
    assert found["environment/text"], "its own metrics"


def test_a_world_that_nobody_reaches_ends_the_run():
    """It must end once half of a step is lost, or after 64 episodes of an evaluation, of all controllers."""
    of_a_step = (r"\d+ of a step's \d+ episodes", 17, dict(eval_every=99))
    once = dict(eval_samples=7, prepare=awaken, loop=evaluation.evaluate_once)
    for lost, least, how in (of_a_step, (r"each of the first \d+ episodes", 64, once)):
        controllers = []
        kind = lose_some(game(), 1.0, 0)
        line = rf"^--environment g.py lost {lost}, the last one by [CT]\w+Error: "
        with pytest.raises(UserError, match=line):
            play(kind, size=4, controllers=controllers, **how)
        failed = [c.environment.failed for c in controllers]
        assert sum(failed) >= least > max(failed) and {each.closed for each in kind.made} == {1}


def test_a_limit_is_the_whole_episode_s_with_its_replies():
    kind = game()
    controllers = play(kind, max_new_tokens=20, steps=2, eval_every=99)
    samples = samples_of(all_batches(controllers))
    finished = [sample for sample in samples if sample.is_finished]
    assert {sample.finish for sample in finished} == {"stop", "length"}
    assert max(sample.begun for sample in samples) <= 20
    cut = [s for s in finished if s.finish == "length"]
    assert {to_text(sample.response).endswith(END) for sample in cut} == {True, False}
    scores = {each.key: each.score() for each in kind.made}
    for sample in finished:
        *_, last = sample.earned
        steps = [len(text) % 3 / 4 for text in texts_of(sample)]
        shown = sample.begun < 20 or to_text(sample.response).endswith(END)
        assert last == steps[-1] * shown + scores[sample.key]
        assert sample.earned[:-1] == steps[:-1]


def test_lengths_are_of_the_policy_s_tokens():
    controllers = play(game(), steps=1, eval_every=99)
    samples = [s for s in samples_of(all_batches(controllers)) if s.is_finished]
    assert any(sample.replies for sample in samples)
    lengths = histogram(len(sample.response) for sample in samples)
    assert controllers[0].state.history[0].lengths == lengths
    for sample in trained(controllers, 0).values():
        own = {outcome.index: outcome.length for outcome in sample.outcomes}
        assert own[sample.index] == len(sample.response)
        assert len(sample.advantages) == len(sample.response)


def test_a_judge_sees_all_turns_and_judges_the_last():
    asked = set()

    def verdict(prompt, index, sampling):
        asked.add(to_text(prompt).split("?")[0])
        return judge_by_chance(prompt, index, sampling)

    controllers = play(game(), verdict=verdict, steps=1, eval_every=99)
    samples = [s for batch in batches_of(controllers, 0) for s in batch.kept]
    for sample in samples:
        turns = texts_of(sample)
        lines = [f"user: {sample.question}"] * (len(turns) > 1) or [sample.question]
        for number, text in enumerate(turns[:-1], 1):
            lines += [f"assistant: {text}{END}", f"user: [{number}]"]
        shown = turns[-1].split(">")[1]
        assert "\n".join(lines) + f">{shown}{END}" in asked


class HalfWithKeys(FakeSource):
    """Every second held-out prompt has a key."""

    def __init__(self):
        super().__init__()
        keyed = [replace(prompt, answer_key=f"3{END}") for prompt in self.held_out[::2]]
        keyless = [replace(prompt, answer_key=None) for prompt in self.held_out[1::2]]
        self.held_out = (*keyed, *keyless)


def test_an_evaluation_plays_episodes():
    """Each must have a reward, and an accuracy of the last turn where there is a key."""
    rows = []

    def watch(c):
        c.prompts.source = HalfWithKeys()
        c.report.answers = lambda *row: rows.append(row)
        read = c.rewards.final_answer  # none is found where there is no key
        c.rewards.final_answer = lambda sample: read(sample) if sample.answer_key else None

    kind = game((0.0, 0.3))
    controllers = play(
        kind,
        size=3,
        eval_samples=2,
        prepare=awaken,
        loop=evaluation.evaluate_once,
        prepare_controller=watch,
    )
    assert {each.closed for each in kind.made} == {1} and len(kind.made) == 30 == 3 * len(rows)
    assert any(samples[0].replies for _, samples, _ in rows)
    assert all(sample.finish == "stop" for _, samples, _ in rows for sample in samples)
    earned = sorted(sum(samples[0].earned) for _, samples, _ in rows)
    keyed = [samples for number, samples, _ in rows if number < 5]
    right = [[texts_of(s)[-1].endswith(">3") for s in samples] for samples in keyed]
    assert not any(any(flags) for number, _, flags in rows if number >= 5), "right without a key"
    for c in controllers[:1]:
        assert c.report.earned[0] == pytest.approx(earned)
        assert c.report.sampled[0] == sorted((first, sum(others)) for first, *others in right)


def test_held_out_episodes_that_are_lost_are_counted():
    """Else accuracies of different prompts would be compared."""
    found = []

    def watch(c):
        c.report.answers = lambda number, samples, right: found.append(samples)

    controllers = play(
        lose_some(game(), 0.3, 1),
        size=3,
        eval_samples=1,
        prepare=awaken,
        loop=evaluation.evaluate_once,
        prepare_controller=watch,
    )
    lost = sum(any(sample.finish == "lost" for sample in samples) for samples in found)
    assert 0 < lost < len(found)
    assert all(c.report.lost[0] == lost for c in controllers)


def test_an_error_in_close_ends_the_run(caplog):
    """It must do so in one line; asyncio must not report an unretrieved error."""
    kind = game()

    def close(self):
        self.closed += 1
        raise ZeroDivisionError("of the user")

    kind.close = close
    with pytest.raises(UserError, match=r"^--environment g.py: ZeroDivisionError: of the user"):
        play(kind, eval_every=99)
    assert {each.closed for each in kind.made} == {1}
    gc.collect()
    assert not caplog.records


def test_rows_without_a_key_are_held_out_with_an_environment(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(40)))
    for keeps_turns in (True, False):
        rows = PromptFile(path, Characters(), 1000, keeps_turns=keeps_turns)
        assert bool(len(rows.shuffled(0, 10).held_out)) == keeps_turns
