"""Who trains on what: the plan's promises, and comparisons with brute force."""

from functools import partial
from itertools import chain
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from config import Config
from sample import flat
from scheduling.balance import (
    Measure,
    Prefix,
    karmarkar_karp,
    pack_evenly,
    packed_length,
    plan_batch,
)
from scheduling.dealing import Deal, Shares
from scheduling.layout import Shape
from training.model import forward_macs


def macs(tokens: int) -> int:
    """Return the multiply-adds of the demo's model: a linear and a quadratic term."""
    return 360_000 * tokens + 288 * tokens**2


def config(budget: int = 8192, updates: int = 1) -> Config:
    sizes = dict(max_new_tokens=1, updates_per_step=updates)
    return Config(max_tokens_per_micro_batch=budget, **sizes)


def sums(work, shares) -> list[int]:
    return [sum(work[sample] for sample in share) for share in shares]


@given(work=st.lists(st.integers(0, 10**6), max_size=60), shares=st.integers(1, 8))
def test_karmarkar_karp(work, shares):
    """It must deal every sample once, ascending per share; sizes within one, work within one sample."""
    dealt = karmarkar_karp(work, shares)
    assert dealt == list(map(sorted, dealt))
    assert len(dealt) == shares and sorted(chain(*dealt)) == list(range(len(work)))
    numbers, loads = [len(share) for share in dealt], sums(work, dealt)
    assert max(numbers) - min(numbers) <= 1
    assert max(loads) - min(loads) <= max(work, default=0)


def test_karmarkar_karp_by_hand():
    """The largest of one deal must go with the smallest of another: the textbook's five numbers."""
    work = [8, 7, 6, 5, 4]
    assert sorted(sums(work, karmarkar_karp(work, 2))) == [14, 16]


LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=8)


@given(lengths=LENGTHS, budget=st.integers(20, 40), multiple=st.integers(1, 3))
@settings(deadline=None)
def test_even_micro_batches_are_few(lengths, budget, multiple):
    """All but one must be more than half full, and their number is only rounded up to the multiple."""
    packed = pack_evenly(lengths, [macs(length) for length in lengths], budget, multiple)
    assert len(packed) % multiple == 0 and len(packed) < 2 * sum(lengths) / budget + 1 + multiple
    assert sorted(chain(*packed)) == list(range(len(lengths)))
    for chosen in packed:
        assert sum(lengths[sample] for sample in chosen) <= budget


def test_room_in_a_micro_batch_by_hand():
    """A sequence's last token needs no room, because it is only a target."""
    assert [packed_length(tokens) for tokens in (2, 10)] == [1, 9]


def test_a_sequence_over_the_budget_raises_it_for_all():
    """With 31 tokens over half the budget: two micro-batches, and the second has room for the rest."""
    packed = pack_evenly([5, 31, 20, 6], [5, 31, 20, 6], 30, 2)
    assert sorted(map(sorted, packed)) == [[0, 2, 3], [1]]


KEYS = st.tuples(st.integers(0, 9), st.integers(0, 7))


def works(plan, measure) -> list[int]:
    return [sum(map(measure.works, mini_batches)) for mini_batches in plan]


@given(
    answers=st.dictionaries(KEYS, st.integers(1, 40), max_size=40),
    prompts=st.lists(st.integers(1, 30), min_size=10, max_size=10),
    shares=st.booleans(),
    dp_size=st.integers(1, 4),
    updates=st.integers(1, 3),
    budget=st.integers(70, 256),
)
def test_the_plan(answers, prompts, shares, dp_size, updates, budget):
    """Every sample once; a mini-batch is every n-th key; equal numbers of micro-batches within the budget."""
    tokens = {key: prompts[key[0]] + length for key, length in answers.items()}
    prefixes = {
        number: Prefix(length - 1, macs(length - 1)) for number, length in enumerate(prompts)
    }
    measure = Measure(tokens, macs, prefixes if shares else None)
    plan = plan_batch(measure, config(budget, updates), dp_size)
    backwards = measure._replace(tokens=dict(reversed(tokens.items())))
    assert plan_batch(backwards, config(budget, updates), dp_size) == plan
    assert len(plan) == dp_size and all(len(mini_batches) == updates for mini_batches in plan)
    for update in range(updates):
        ranks = [mini_batches[update] for mini_batches in plan]
        assert sorted(flat(ranks)) == sorted(tokens)[update::updates]
        assert len({len(micro_batches) for micro_batches in ranks}) == 1 and ranks[0]
        for micro_batch in (m for micro_batches in ranks for m in micro_batches):
            own = {prompt: prompts[prompt] - 1 for prompt, _ in micro_batch}
            computed = sum(own.values()) + sum(answers[key] for key in micro_batch)
            lone = sum(packed_length(tokens[key]) for key in micro_batch)
            assert measure.length(micro_batch) == (computed if shares else lone) <= budget
    one_by_one = plan_batch(Measure(tokens, macs), config(budget, updates), dp_size)
    if updates == 1:
        assert max(works(plan, measure)) <= max(works(one_by_one, measure))


def test_whole_groups_by_hand():
    """With four prompts of 9 tokens and four answers each, a rank must get two groups: 2 x 9 + 8 x 4.

    A group of only one prompt must be split between the ranks, so that neither has all the work.
    """
    tokens = {(prompt, index): 14 for prompt in range(4) for index in range(4)}
    measure = Measure(tokens, lambda length: length, dict.fromkeys(range(4), Prefix(9, 9)))
    plan = plan_batch(measure, config(1000), 2)
    prompts = [{prompt for prompt, _ in flat(share)} for share in plan]
    assert list(map(len, prompts)) == [2, 2] and not prompts[0] & prompts[1]
    # each answer's last prompt token and 4 of its own: the last token is only a target
    assert works(plan, measure) == [2 * 9 + 8 * 5] * 2
    [micro_batch] = plan[0][0]
    assert measure.length(micro_batch) == 2 * 9 + 8 * 4
    one = measure._replace(tokens={(0, index): 14 for index in range(4)})
    assert [len(flat(share)) for share in plan_batch(one, config(1000), 2)] == [2, 2]
    # 9 + 2 * 4 tokens: two answers of a group, and two in another micro-batch
    [parts, _] = plan_batch(measure, config(17), 2)
    assert {len(micro_batch) for micro_batch in parts[0]} == {2}


def test_the_work_on_images_is_balanced_too():
    """With 12 answers of equal length, 4 of them to prompts with images, every rank must get 2 of the 4."""
    tokens, dear = {(prompt, 0): 10 for prompt in range(12)}, dict.fromkeys((0, 2, 4, 6), 70)

    def shares(prefixes) -> list[int]:
        plan = plan_batch(Measure(tokens, lambda length: length, prefixes), config(1000), 2)
        return [sum(prompt in dear for prompt, _ in flat(share)) for share in plan]

    with_images = {prompt: Prefix(5, 5 + dear.get(prompt, 0)) for prompt in range(12)}
    assert shares(with_images) == [2, 2] != shares(None)


def test_the_share_of_prompts():
    """For Qwen2.5-7B's shape, 8 answers of 1,024 tokens to a prompt of 512 must take 29% less work."""
    shape = dict(hidden_size=3584, num_hidden_layers=28, num_attention_heads=28)
    shape |= dict(num_key_value_heads=4, intermediate_size=18944, vocab_size=152064)
    keys = [(0, index) for index in range(8)]
    before = Measure(dict.fromkeys(keys, 1536), partial(forward_macs, shape))
    after = before._replace(prefixes={0: Prefix(511, forward_macs(shape, 511))})
    assert round(1 - after.work(keys) / before.work(keys), 2) == 0.29


def test_imbalance_by_hand():
    shape = Shape.of(Config(max_new_tokens=1), (0, 1))
    shares = Shares({shape: Deal([], {}, [100, 300])}, {}, [])
    assert shares.imbalance(SimpleNamespace(shape=shape)) == 1.5
