"""Dynamic sampling, by hand and as properties; and data.Prompts: which prompts come, and who holds them."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import Prompts
from sample import Sample
from scheduling.dynamic_sampling import FirstFinishedSampler, OrderedSampler
from tests.support.fakes import FakeSource as Numbers

SEEDS = st.integers(0, 2**32)
KINDS = [OrderedSampler, FirstFinishedSampler]


def sampler_of(kind, target, waves, finished, **settings):
    """Return a sampler whose wave k has the prompts waves[k]; `finished`: group -> is it informative."""
    sampler = kind(target, **settings)
    for number, prompt_ids in enumerate(waves):
        sampler.add(prompt_ids, number)
    sampler.record(finished, 0)
    return sampler


@pytest.mark.parametrize(
    "kind,finished,chosen,again,complete",
    [
        (OrderedSampler, {10: False, 11: True, 12: True}, [11, 12], [13], True),
        (OrderedSampler, {10: True, 11: False, 12: False, 13: True}, [10, 13], [], True),
        (OrderedSampler, {10: True, 11: False, 12: False, 13: False}, [10], [], False),  # short
        (FirstFinishedSampler, {11: True, 12: True}, [11, 12], [10, 13], True),  # 10 is cut off
        # a filtered prompt never comes again; a surplus informative one does
        (FirstFinishedSampler, {10: False, 12: True, 13: True}, [12, 13], [11], True),
        (FirstFinishedSampler, {10: False, 12: True, 13: False}, [12], [11], False),
    ],
)
def test_chosen_and_requeued(kind, finished, chosen, again, complete):
    """Four groups were drawn, and two are wanted."""
    sampler = sampler_of(kind, 2, [[10, 11, 12, 13]], finished)
    assert (sampler.chosen(), sampler.carried(), sampler.is_decided) == (chosen, again, complete)
    assert sampler.num_informative == sum(finished.values())
    assert sampler.num_in_flight == 4 - len(finished)


@pytest.mark.parametrize("kind", KINDS)
def test_next_wave(kind):
    """Four are wanted; 1.2 times the missing number must be drawn, for the wave after the one it replaces."""

    def next_draw(waves, finished, limit):
        return sampler_of(kind, 4, waves, finished, max_refills=limit).next_draw()

    assert next_draw([], {}, 0) == (0, 4)  # the first wave is no refill
    assert next_draw([[0, 1, 2, 3]], {0: True}, 3) is None  # three are still in flight
    # one is missing: draw 1.2 of it, while three are in flight
    assert next_draw([[0, 1, 2, 3]], {0: False}, 3) == (1, 2)
    assert next_draw([[0, 1, 2, 3]], {0: False}, 0) is None  # no refills are allowed
    assert next_draw([[0, 1, 2, 3], [4]], {0: False, 4: False}, 1) == (1, 2)


def test_experience_says_what_will_be_filtered():
    """Four are wanted and two groups keep one: 2.4 must be drawn per missing one, before the verdicts."""

    def next_draw(generated, finished):
        sampler = sampler_of(OrderedSampler, 4, [[0, 1, 2, 3]], finished, groups_per_kept=2.0)
        sampler.num_generated = generated
        return sampler.next_draw()

    assert next_draw(0, {}) is None  # all are still being generated
    # a quarter is generated: two of the four in flight will be kept, two are missing
    assert next_draw(1, {}) == (1, 5)
    # one of the two in flight will be kept, one is missing
    assert next_draw(4, {0: True, 1: True}) == (1, 3)
    # a filtered group is reason enough: of three in flight 1.5 will be kept, 2.5 are missing
    assert next_draw(0, {0: False}) == (1, 6)


def play(sampler, truth, rng, draw, at_once=3):
    """Play a step as modes.collect does; groups finish in the order that `rng` gives, some together."""
    while not sampler.is_decided:
        drawn = sampler.next_draw()
        if drawn is None and not sampler.num_in_flight:
            return
        if drawn is not None:
            sampler.add(draw(drawn.size), drawn.wave)
        in_flight = [key for key in sampler.wave_of if key not in sampler.finished]
        finished = rng.sample(in_flight, min(len(in_flight), rng.randint(0, at_once)))
        done = len(sampler.finished) + len(finished)
        generated = rng.randint(done, len(sampler.wave_of))
        sampler.record({prompt_id: truth(prompt_id) for prompt_id in finished}, generated)


STEP = dict(seed=SEEDS, target=st.integers(1, 6), keep=st.floats(0.1, 1))
STEP |= dict(groups_per_kept=st.floats(1, 4), limit=st.integers(0, 4))


@settings(deadline=None)
@given(kind=st.sampled_from(KINDS), **STEP)
def test_a_prompt_ends_in_one_way(kind, seed, target, keep, groups_per_kept, limit):
    """It is chosen, carried or filtered; chosen ones inform, filtered ones don't; a step always ends."""
    sampler, fresh = kind(target, groups_per_kept, 1.0, limit), itertools.count()
    truth = lambda prompt_id: random.Random(prompt_id).random() < keep  # noqa: E731
    play(sampler, truth, random.Random(seed), lambda n: list(itertools.islice(fresh, n)))
    chosen, again, informative = sampler.chosen(), sampler.carried(), sampler.finished
    filtered = [prompt_id for prompt_id in sampler.wave_of if prompt_id not in chosen + again]
    assert sorted(chosen + again + filtered) == sorted(sampler.wave_of)
    assert len(set(chosen + again)) == len(chosen + again)
    assert all(map(informative.get, chosen)) and not any(map(informative.get, filtered))
    assert len(chosen) <= target and sampler.waves <= 1 + limit
    # no prompt is left that could be chosen
    if len(chosen) < target and kind is FirstFinishedSampler:
        assert not again and sampler.num_in_flight == 0


def wave_by_wave(is_kept, target, groups_per_kept, limit):
    """Play a step that waits for each wave before the next; return its batch, waves and used prompts."""
    batch, position, size = [], 0, target
    for wave in range(1, 2 + limit):
        batch += [prompt_id for prompt_id in range(position, position + size) if is_kept(prompt_id)]
        position += size
        if len(batch) >= target:
            return batch[:target], wave, batch[target - 1] + 1
        size = math.ceil((target - len(batch)) * 1.2 * groups_per_kept)
    return batch, 1 + limit, position


@settings(deadline=None, max_examples=200)
@given(at_once=st.integers(1, 9), **STEP)
def test_in_order_a_step_is_as_wave_by_wave(seed, target, keep, groups_per_kept, limit, at_once):
    """Batch, waves, used prompts and the average must agree, whatever finishes first and is drawn when."""
    prompts, rng, begin = Prompts(Numbers(), 2), random.Random(seed), 0
    truth = lambda prompt_id: random.Random(f"{seed} {prompt_id}").random() < keep  # noqa: E731
    for _ in range(4):
        sampler = OrderedSampler(target, groups_per_kept, 1.0, limit)
        play(sampler, truth, rng, prompts.draw, at_once)
        from_begin = lambda prompt_id, begin=begin: truth(begin + prompt_id)  # noqa: E731
        batch, waves, used = wave_by_wave(from_begin, target, groups_per_kept, limit)
        assert sampler.chosen() == [begin + prompt_id for prompt_id in batch]
        assert sampler.waves == waves
        assert sampler.used() == list(range(begin, begin + used))
        expected = 0.9 * groups_per_kept + 0.1 * min(used / max(1, len(batch)), 10)
        groups_per_kept = sampler.updated_groups_per_kept()
        assert groups_per_kept == pytest.approx(expected)
        prompts.carry_over(sampler.carried(), [])
        begin += used


def group_of(prompt_id, *finishes):
    """Return a group with one answer for each way to finish."""
    answers = enumerate(finishes)
    return [Sample(prompt_id, i, [1], response=[7], finish=finish) for i, finish in answers]


PROMPT_IDS = st.lists(st.integers(0, 40), unique=True, max_size=40)


@given(PROMPT_IDS, PROMPT_IDS, st.integers(1, 6))
def test_every_prompt_is_dealt_and_evenly(first, second, controllers):
    """New prompts are dealt to within one; repeated ones go to their owner, and others even that out."""

    def counts(owners):
        return [list(owners.values()).count(rank) for rank in range(controllers)]

    prompts = Prompts(Numbers(), 2, keeps_groups=True)
    owners = prompts.assign_owners(first, controllers)
    held = counts(owners)
    assert set(owners) == set(first) and max(held) - min(held) <= 1
    prompts.carry_over(first, [])
    again = prompts.assign_owners(second, controllers)
    assert set(again) == set(second)
    assert all(again[prompt_id] == owners[prompt_id] for prompt_id in set(first) & set(second))
    everyone = counts(owners | again)
    for count, mine in zip(everyone, held, strict=True):
        assert count <= max(mine, min(everyone) + 1)
