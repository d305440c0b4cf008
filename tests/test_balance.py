"""Who trains on what: the plan against brute force and its promises."""

from itertools import chain

from hypothesis import given, settings
from hypothesis import strategies as st

from config import Config
from sample import flat
from scheduling.balance import karmarkar_karp, pack_evenly, packed_length, plan_batch


def cost(tokens: int) -> int:
    """Multiply-adds of the demo's model: a linear and a quadratic term."""
    return 360_000 * tokens + 288 * tokens**2


def config(budget: int = 8192, updates: int = 1) -> Config:
    sizes = dict(max_new_tokens=1, updates_per_step=updates)
    return Config(max_tokens_per_micro_batch=budget, **sizes)


def sums(costs, shares) -> list[int]:
    return [sum(costs[sample] for sample in share) for share in shares]


@given(costs=st.lists(st.integers(0, 10**6), max_size=60), shares=st.integers(1, 8))
def test_karmarkar_karp(costs, shares):
    """Every sample once, ascending in a share; equal in number to within one, in cost to within a sample."""
    dealt = karmarkar_karp(costs, shares)
    assert dealt == list(map(sorted, dealt))
    assert len(dealt) == shares and sorted(chain(*dealt)) == list(range(len(costs)))
    numbers, loads = [len(share) for share in dealt], sums(costs, dealt)
    assert max(numbers) - min(numbers) <= 1
    assert max(loads) - min(loads) <= max(costs, default=0)


def test_karmarkar_karp_by_hand():
    """The dearest of one deal goes with the cheapest of another: the textbook's five numbers."""
    costs = [8, 7, 6, 5, 4]
    assert sorted(sums(costs, karmarkar_karp(costs, 2))) == [14, 16]


LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=8)


@given(lengths=LENGTHS, budget=st.integers(20, 40), multiple=st.integers(1, 3))
@settings(deadline=None)
def test_even_micro_batches_are_few(lengths, budget, multiple):
    """More than half full but for one, then as many more as the multiple asks for."""
    packed = pack_evenly(lengths, [cost(length) for length in lengths], budget, multiple)
    assert len(packed) % multiple == 0 and len(packed) < 2 * sum(lengths) / budget + 1 + multiple
    assert sorted(chain(*packed)) == list(range(len(lengths)))
    for chosen in packed:
        mine = [lengths[sample] for sample in chosen]
        assert sum(mine) <= budget and mine == sorted(mine, reverse=True)


def test_room_in_a_micro_batch_by_hand():
    """The last token is only a target."""
    assert [packed_length(tokens) for tokens in (2, 10)] == [1, 9]


def test_a_sequence_over_the_budget_raises_it_for_all():
    """Of 31 tokens and more than its half: two micro-batches, the second with room for what is left."""
    packed = pack_evenly([5, 31, 20, 6], [5, 31, 20, 6], 30, 2)
    assert sorted(map(sorted, packed)) == [[0, 2, 3], [1]]


KEYS = st.tuples(st.integers(0, 9), st.integers(0, 7))


@given(
    tokens=st.dictionaries(KEYS, st.integers(2, 60), max_size=40),
    dp_size=st.integers(1, 4),
    updates=st.integers(1, 3),
    budget=st.integers(64, 256),
)
def test_the_plan(tokens, dp_size, updates, budget):
    """Every sample once; a mini-batch is every n-th key; equal numbers of micro-batches in the budget."""
    plan = plan_batch(tokens, cost, config(budget, updates), dp_size)
    backwards = dict(reversed(tokens.items()))
    assert plan_batch(backwards, cost, config(budget, updates), dp_size) == plan
    assert len(plan) == dp_size and all(len(mini_batches) == updates for mini_batches in plan)
    for update in range(updates):
        ranks = [mini_batches[update] for mini_batches in plan]
        assert sorted(flat(ranks)) == sorted(tokens)[update::updates]
        assert len({len(micro_batches) for micro_batches in ranks}) == 1 and ranks[0]
        for micro_batch in (m for micro_batches in ranks for m in micro_batches):
            assert sum(packed_length(tokens[key]) for key in micro_batch) <= budget


def test_the_work_on_images_is_balanced_too():
    """Of 12 answers of equal length 4 are to prompts with images: every rank gets 2 of these."""
    tokens, dear = {(prompt, 0): 10 for prompt in range(12)}, dict.fromkeys((0, 2, 4, 6), 70)

    def shares(image_costs) -> list[int]:
        plan = plan_batch(tokens, lambda length: length, config(1000), 2, image_costs)
        return [sum(prompt in dear for prompt, _ in flat(share)) for share in plan]

    assert shares(dear) == [2, 2] != shares(None)
