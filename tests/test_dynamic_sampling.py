"""Draws, by hand and as properties: which groups make the batch, which come again, what is drawn next, and who holds a prompt."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import Prompts
from sample import Sample
from scheduling.dynamic_sampling import MOST_CUTS, Draws, Groups, is_written, moving_average
from tests.fakes import FakeSource

SEEDS = st.integers(0, 2**32)
IN_ORDER, FIRST_TO_END = True, False


def drawn(wanted, in_order, waves, ended, **settings):
    """Draws of which wave k dealt waves[k]; `ended` came to what it says."""
    draws = Draws(wanted, in_order, **settings)
    for number, dealt in enumerate(waves):
        draws.add(dealt, number)
    draws.learn(ended)
    return draws


@pytest.mark.parametrize(
    "in_order,ended,chosen,again,complete",
    [
        (IN_ORDER, {}, [], [10, 11, 12, 13], False),
        (IN_ORDER, {11: True, 12: True}, [], [10, 11, 12, 13], False),  # 10 is waited for
        (IN_ORDER, {10: False, 11: True, 12: True}, [11, 12], [13], True),  # 13 wasn't needed, ended or not
        (IN_ORDER, {10: False, 11: True, 12: True, 13: False}, [11, 12], [13], True),  # comes again: it is after the batch's last
        (IN_ORDER, {10: True, 11: False, 12: False, 13: True}, [10, 13], [], True),
        (IN_ORDER, {10: True, 11: False, 12: False, 13: False}, [10], [], False),  # short
        (FIRST_TO_END, {}, [], [10, 11, 12, 13], False),
        (FIRST_TO_END, {11: True, 12: True}, [11, 12], [10, 13], True),  # 10 is cut off
        (FIRST_TO_END, {10: False, 12: True, 13: True}, [12, 13], [11], True),  # a filtered one never comes again
        (FIRST_TO_END, {10: True, 12: True, 13: True}, [10, 12], [11, 13], True),  # one informative too many comes again
        (FIRST_TO_END, {10: False, 12: True, 13: False}, [12], [11], False),
    ],
)
def test_chosen_and_come_again(in_order, ended, chosen, again, complete):
    """Four draws, two wanted."""
    draws = drawn(2, in_order, [[10, 11, 12, 13]], ended)
    assert (draws.chosen(), draws.come_again(), draws.complete) == (chosen, again, complete)
    assert (draws.found, draws.flying) == (sum(ended.values()), 4 - len(ended))


@pytest.mark.parametrize("in_order", [IN_ORDER, FIRST_TO_END])
@pytest.mark.parametrize(
    "waves,ended,limit,wave",
    [
        ([], {}, 0, (0, 4)),  # the first wave is no refill
        ([[0, 1, 2, 3]], {}, 3, None),  # nothing is known
        ([[0, 1, 2, 3]], {0: True}, 3, None),  # nothing lacks: three still fly
        ([[0, 1, 2, 3]], {0: False}, 3, (1, 2)),  # one lacks: 1.2 of it, while three fly
        ([[0, 1, 2, 3]], {0: False}, 0, None),  # no refills are allowed
        ([[0, 1, 2, 3, 4]], {0: False}, 3, None),  # the surplus fills in
        ([[0, 1, 2, 3], [4]], {0: False, 4: False}, 1, (1, 2)),  # one lacks, and its place is in the second wave still, as 0's was
    ],
)
def test_next_wave(in_order, waves, ended, limit, wave):
    """Four are wanted, 1.2 times what lacks is drawn. A replacement belongs to the wave after the one that it replaces."""
    assert drawn(4, in_order, waves, ended, most_refills=limit).next_wave() == wave


@pytest.mark.parametrize("in_order,size", [(FIRST_TO_END, 3), (IN_ORDER, 2)])
def test_in_order_no_more_is_drawn_than_may_be_needed(in_order, size):
    """Two of four were filtered: a second wave has 2.4, so 3. One of them was drawn before, and filtered as well."""
    draws = drawn(4, in_order, [[0, 1, 2, 3], [4]], {0: False, 1: False, 2: True, 3: True, 4: False}, most_refills=1)
    assert draws.next_wave() == (1, size)


@pytest.mark.parametrize(
    "written,ended,wave",
    [
        (0, {}, None),  # all are still being written
        (1, {}, (1, 5)),  # a quarter is written: of four that fly two will be kept, two lack
        (4, {0: True, 1: True}, (1, 3)),  # one of the two that fly will be kept, one lacks
        (4, {0: True, 1: True, 2: True, 3: True}, None),  # nothing lacks
        (0, {0: False}, (1, 6)),  # a filtered group is reason enough: of three that fly 1.5 will be kept, 2.5 lack
    ],
)
def test_experience_says_what_will_be_filtered(written, ended, wave):
    """Four are wanted, it takes two groups to keep one. Replacements are drawn before the verdicts: 2.4 for each that lacks."""
    draws = Draws(4, IN_ORDER, groups_per_kept=2.0)
    draws.add([0, 1, 2, 3], 0)
    draws.written = written
    draws.learn(ended)
    assert draws.next_wave() == wave


def test_a_replacement_is_drawn_once():
    """What was filtered before a wave was dealt is answered by it; what is filtered after is not."""
    draws = drawn(3, FIRST_TO_END, [[0, 1, 2]], {0: False}, most_refills=2)
    assert draws.next_wave() == (1, 2)
    draws.add([3], 1)
    assert draws.next_wave() is None
    draws.learn({1: False, 3: False})
    assert draws.next_wave() == (1, 3)  # 1 is of the first wave
    draws.add([4, 5], 1)
    draws.learn({4: False})
    assert draws.next_wave() == (2, 2)
    draws.most_refills = 1
    assert draws.next_wave() is None


@pytest.mark.parametrize(
    "rewards,groups_per_kept,ends",
    [
        ("TTTT", 1.0, [4]),
        ("TTFT", 1.0, [4, 6, 8, 10]),  # one lacks, 1.2 of it; as far as is known, it lacks still
        ("TTFTFT", 1.0, [4, 6]),
        ("TTFTFTTT", 1.0, [4, 6]),  # what was drawn beyond that plays no part
        ("TTFTFF", 1.0, [4, 6, 8, 10]),
        ("TFFTFTFTF", 1.0, [4, 7, 9]),  # two lack: 2.4; one lacks: 1.2
        ("F?TT", 1.0, [4, 7, 10, 13]),  # the second counts as filtered: more than will be drawn if it isn't
        ("FTTT", 2.0, [4, 7, 10, 13]),  # one lacks: 2.4
    ],
)
def test_wave_ends(rewards, groups_per_kept, ends):
    """By hand, four wanted; `?` hasn't ended."""
    known = {draw: flag == "T" for draw, flag in enumerate(rewards) if flag != "?"}
    assert drawn(4, IN_ORDER, [list(range(len(rewards)))], known, groups_per_kept=groups_per_kept).wave_ends() == ends


def test_what_was_drawn_too_early_comes_again():
    """One wanted and one refill, of two prompts, but four were drawn: the batch stays empty, though the last would have done."""
    draws = drawn(1, IN_ORDER, [[0, 1, 2, 3]], {0: False, 1: False, 2: False, 3: True}, most_refills=1)
    assert draws.complete and draws.chosen() == [] and draws.come_again() == [3] and draws.waves == 2


def test_what_was_cut_off_often_is_waited_for():
    """The batch is full without it, yet not complete until it has ended, however."""
    draws = Draws(1, FIRST_TO_END)
    draws.add([0, 1], 0, awaited={0})
    draws.learn({1: True})
    assert draws.chosen() == [1] and draws.late == {0} and not draws.complete
    draws.learn({0: False})
    assert draws.complete


@given(st.integers(1, 60), st.integers(0, 80), st.integers(0, 60), st.floats(1, 10))
def test_a_wave_is_as_large_as_what_lacks(wanted, flying, found, groups_per_kept):
    """At least 1.2 times that, in groups that experience says it takes, and less than one more."""
    draws = Draws(wanted, FIRST_TO_END, groups_per_kept)
    draws.add(list(range(flying + found)), 0)
    draws.learn(dict.fromkeys(range(found), True))
    draws.written = flying + found
    lacking = wanted - found - flying / groups_per_kept
    wave = draws.next_wave()
    if not flying + found:
        assert wave == (0, wanted)
    elif lacking > 0:
        needed = 1.2 * lacking * groups_per_kept
        assert needed - 1e-6 <= wave[1] < needed + 1 + 1e-6
    else:
        assert wave is None


@pytest.mark.parametrize("ended,kept,expected", [(10, 5, 1.1), (8, 8, 1.0), (40, 0, 1.9), (400, 1, 1.9), (0, 0, 0.9)])
def test_moving_average(ended, kept, expected):
    """From 1, a step counts a tenth: 0.9 + 0.1 x groups per kept, which is taken for 10 at most."""
    draws = drawn(8, FIRST_TO_END, [list(range(ended))], {draw: draw < kept for draw in range(ended)})
    assert moving_average(1.0, draws) == pytest.approx(expected)


def play(draws, truth, rng, take, at_once=3):
    """A step as serving.serve plays it, where groups are written and end in the order that `rng` gives, some of them at once."""
    while not draws.complete:
        wave = draws.next_wave()
        if wave is None and not draws.flying:
            return
        if wave is not None:
            draws.add(take(wave[1]), wave[0])
        flying = [draw for draw in draws.wave_of if draw not in draws.informative]
        ended = rng.sample(flying, min(len(flying), rng.randint(0, at_once)))
        draws.learn({draw: truth(draw) for draw in ended})
        draws.written = rng.randint(len(draws.informative), len(draws.wave_of))


@settings(deadline=None)
@given(SEEDS, st.integers(1, 8), st.booleans(), st.floats(0.1, 1), st.floats(1, 4), st.integers(0, 4))
def test_a_draw_ends_in_one_way(seed, wanted, in_order, keep, groups_per_kept, limit):
    """Chosen, come again or filtered, and all of the chosen are informative, all of the filtered not; a step ends."""
    draws, fresh, rng = Draws(wanted, in_order, groups_per_kept, 1.0, limit), itertools.count(), random.Random(seed)
    play(draws, lambda draw: random.Random(draw).random() < keep, rng, lambda n: list(itertools.islice(fresh, n)))
    chosen, again = draws.chosen(), draws.come_again()
    filtered = [draw for draw in draws.wave_of if draw not in chosen and draw not in again]
    assert sorted(chosen + again + filtered) == sorted(draws.wave_of) and len(set(chosen + again)) == len(chosen + again)
    assert all(draws.informative[draw] for draw in chosen) and not any(draws.informative[draw] for draw in filtered)
    assert len(chosen) <= wanted and draws.waves <= 1 + limit
    if len(chosen) < wanted and not in_order:  # then there is nothing left that could have been chosen
        assert not again and draws.flying == 0


def wave_by_wave(rewards, wanted, groups_per_kept, limit):
    """A step that waits for a whole wave before it draws the next; returns its batch, its waves, and how many draws it used up."""
    batch, position, size = [], 0, wanted
    for wave in range(1, 2 + limit):
        batch += [draw for draw in range(position, position + size) if rewards(draw)]
        position += size
        if len(batch) >= wanted:
            return batch[:wanted], wave, batch[wanted - 1] + 1
        size = math.ceil((wanted - len(batch)) * 1.2 * groups_per_kept)
    return batch, 1 + limit, position


@settings(deadline=None, max_examples=300)
@given(SEEDS, st.integers(1, 6), st.floats(0.1, 1), st.floats(1, 4), st.integers(0, 4), st.integers(1, 9))
def test_in_order_a_step_is_as_if_it_waited_for_every_wave(seed, wanted, keep, groups_per_kept, limit, at_once):
    """Whatever ends first and whenever replacements are drawn, step after step: batch, waves, what is used up and what is learnt."""
    prompts, rng, begin = Prompts(FakeSource()), random.Random(seed), 0
    truth = lambda draw: random.Random(f"{seed} {draw}").random() < keep  # noqa: E731
    for _ in range(4):
        draws = Draws(wanted, IN_ORDER, groups_per_kept, 1.0, limit)
        play(draws, truth, rng, prompts.take, at_once)
        batch, waves, used = wave_by_wave(lambda draw, begin=begin: truth(begin + draw), wanted, groups_per_kept, limit)
        assert draws.chosen() == [begin + draw for draw in batch] and draws.waves == waves
        assert draws.used() == list(range(begin, begin + used))
        groups_per_kept = moving_average(groups_per_kept, draws)
        assert groups_per_kept == pytest.approx(0.9 * draws.groups_per_kept + 0.1 * min(used / max(1, len(batch)), 10))
        prompts.put_back(draws.come_again())
        begin += used


# ---------------------------------------------------------------- who holds a prompt


def group_of(draw, finish=""):
    return [Sample(draw, index, [1], response=[7], finish=finish) for index in range(2)]


def test_a_prompt_goes_to_its_holder():
    """2 and 3 come again: to the controllers that hold what was written, with it; new prompts go where the fewest are."""
    prompts = Prompts(FakeSource())
    all_groups = [Groups(prompts, 2, keep_written=True) for _ in range(2)]
    for groups in all_groups:
        assert groups.deal([0, 1, 2, 3, 4, 5], 2) == {0: 0, 1: 1, 2: 0, 3: 1, 4: 0, 5: 1}
    prompts.take(6)
    begun = group_of(2, "abort")
    all_groups[0].put_back([2, 4], [begun, group_of(4)])
    all_groups[1].put_back([], [])  # one buffer in this test, a copy for each controller in a run
    for groups in all_groups:
        assert groups.deal([2, 4, 6, 7, 8, 9], 2) == {2: 0, 4: 0, 6: 1, 7: 1, 8: 0, 9: 1}
    assert all_groups[0].take(2) is begun
    assert [sample.response for sample in all_groups[0].take(6)] == [[], []]


def test_without_partial_rollout_a_prompt_begins_anew():
    """Nothing of it is kept, and nobody holds it."""
    prompts = Prompts(FakeSource())
    groups = Groups(prompts, 2, keep_written=False)
    groups.deal([0, 1, 2], 2)
    groups.put_back([1, 2], [group_of(1, "abort"), group_of(2, "stop")])
    assert [sample.response for draw in (1, 2) for sample in groups.take(draw)] == [[]] * 4
    assert groups.deal([1, 2], 2) == {1: 0, 2: 1} and prompts.take(3) == [1, 2, 0]


def test_cuts_are_counted_in_a_row():
    """A prompt is waited for once it was cut off MOST_CUTS times, and no longer once it has come to something."""
    prompts = Prompts(FakeSource())
    groups = Groups(prompts, 2, keep_written=True)
    for cuts in range(MOST_CUTS):
        assert groups.awaited([0, 1]) == set(), cuts
        groups.put_back(prompts.take(2), [])
    assert groups.awaited([0, 1]) == {0, 1}
    prompts.take(2)
    groups.put_back([1], [])
    assert groups.awaited([0, 1]) == {1}


@given(st.lists(st.integers(0, 40), unique=True, max_size=40), st.lists(st.integers(0, 40), unique=True), st.integers(1, 6))
def test_every_prompt_is_dealt_and_evenly(first, second, controllers):
    """New prompts to within one each, over all waves; those that come again to their holder, and the others even that out."""
    prompts = Prompts(FakeSource())
    groups = Groups(prompts, 2, keep_written=True)
    owners = groups.deal(first, controllers)
    counts = [list(owners.values()).count(rank) for rank in range(controllers)]
    assert set(owners) == set(first) and max(counts) - min(counts) <= 1
    groups.put_back(first, [])
    again = groups.deal(second, controllers)
    assert set(again) == set(second) and all(again[draw] == owners[draw] for draw in set(first) & set(second))
    everyone = list((owners | again).values())
    counts, held = ([owned.count(rank) for rank in range(controllers)] for owned in (everyone, list(owners.values())))
    assert all(count <= max(mine, min(counts) + 1) for count, mine in zip(counts, held, strict=True))


def test_a_group_is_written_when_all_of_its_answers_are_whole():
    """Stopped or at the limit; one that was aborted may go on."""
    assert is_written(group_of(0, "stop") + group_of(0, "length"))
    assert not is_written(group_of(0, "stop") + group_of(0, "abort")) and not is_written(group_of(0))
