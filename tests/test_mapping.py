"""HybridFlow's mapping: its closed forms against loops, its search against trying everything."""

import itertools

import pytest

from papers import mapping
from papers.mapping import Sizes, Speeds, Task
from simulation.costs import Device, Model
from simulation.trainers import forward_s, update_s

DEVICE = Device(flops=312e12, memory=80e9, hbm=2e12, network=3e9, host=2e10, link=2e11)
SPEEDS = Speeds(DEVICE, mfu=0.8, half=2000, layer_s=2e-4, reduce_s=1e-4, update_s=0.3)
TASK = Task(sequences=256, prompt=128, answer=512, trained=1024, updates=4)
LLAMA = Model(6.74e9, 32, 4096, 4096)
ROLES = ("actor", "critic", "reference", "reward")


@pytest.mark.parametrize("sizes", [Sizes(1, 1, 8), Sizes(2, 4, 1), Sizes(4, 8, 4), Sizes(8, 8, 64)])
def test_passes_are_the_sum_over_mini_batches(sizes):
    """As the trainers of the simulation add them up, a sequence a micro-batch; rank 0's share."""
    passes, own = mapping.passes(LLAMA, sizes, SPEEDS), max(1, 256 // 4 // sizes.dp)
    reading = sum(forward_s(passes, [[1024]] * own) for _ in range(4))
    learning = sum(update_s(passes, [[1024]] * own) for _ in range(4))
    assert mapping.passes_s(LLAMA, sizes, TASK, SPEEDS) == pytest.approx((reading, learning))


def test_an_update_by_hand():
    """6 FLOPs a parameter and token, four all-reduces a layer, 6 bytes a parameter to other copies."""
    speeds = SPEEDS._replace(half=0.0)
    _, seconds = mapping.passes_s(LLAMA, Sizes(1, 8, 4), TASK._replace(updates=1), speeds)
    tokens = 256 / 4 * 1024
    compute = tokens * (6 * 6.74e9 + 3 * 2 * 32 * 4096 * 1024) / (8 * 0.8 * 312e12)
    reducing = tokens * 32 * (2 + 2) * (2 * 7 / 8 * 4096 * 2) / 2e11
    copies = 6 * 6.74e9 / 8 * 3 / 4 / 3e9
    # attention counts as the rest
    square = (1 + mapping.passes(LLAMA, Sizes(1, 8, 4), speeds).backward) / 3
    attention = tokens * 3 * 2 * 32 * 4096 * 1024 / (8 * 0.8 * 312e12)
    expected = compute + (square - 1) * attention + reducing + copies + 0.3
    assert seconds == pytest.approx(expected, rel=1e-3)


def test_generation_is_the_sum_of_its_steps():
    """In rounds of what finds room."""
    decode = mapping.engine(LLAMA, 2, 70e9, SPEEDS)
    at_once = int(decode.kv_tokens // 640)
    assert 1 < at_once < 60
    left, seconds = 100, 100 * 128 * decode.prefill
    while left:
        batch = min(left, at_once)
        for step in range(512):
            seconds += decode.fixed + decode.each * batch + decode.context * batch * (128 + step)
        left -= batch
    assert mapping.generate_s(decode, 100, TASK) == pytest.approx(seconds)
    with pytest.raises(ValueError, match="no room"):
        mapping.generate_s(mapping.engine(LLAMA, 2, 73.2e9, SPEEDS), 100, TASK)


def test_bytes_that_a_model_holds_by_hand():
    """Weights 2 a parameter; of a learner 4 of gradients, and 12 of the optimizer, which its copies share."""
    for role, learns in (("critic", 1), ("reward", 0)):
        choices = [*mapping.choices_of(role, LLAMA, 8, 1e9, TASK, SPEEDS)]
        assert {choice.sizes[role][:3] for choice in choices} >= {(1, 1, 8), (1, 8, 1)}
        for choice in choices:
            pp, tp, dp, _ = choice.sizes[role]
            each = 2 + learns * (4 + 12 / dp)
            assert choice.held == pytest.approx(1e9 + 6.74e9 / (pp * tp) * each)


def test_placements_are_all_partitions():
    """As many as Bell's numbers say; each has every role once."""
    for count, bell in enumerate((1, 2, 5, 15, 52), 1):
        roles = tuple("abcde"[:count])
        found = {frozenset(map(frozenset, placement)) for placement in mapping.placements(roles)}
        assert len(found) == len([*mapping.placements(roles)]) == bell
        assert all(sorted(itertools.chain(*placement)) == [*roles] for placement in found)


def test_a_mapping_keeps_to_memory_machines_and_heads():
    """Whatever is taken: bytes fit, shards stay in a machine and divide what must be divided."""
    odd = LLAMA._replace(cuts=12)
    for devices, model in itertools.product((8, 32), (LLAMA, odd)):
        found = mapping.search(dict.fromkeys(ROLES, model), devices, TASK, SPEEDS)
        assert len(found) <= 15
        for choice in (choice for each in found for choice in each.choices):
            assert choice.held <= DEVICE.memory
            counts = {sizes.pp * sizes.tp * sizes.dp for sizes in choice.sizes.values()}
            assert len(counts) == 1  # of a set
            for sizes in choice.sizes.values():
                assert sizes.tp <= 8 and not model.cuts % sizes.tp
                assert sizes.pp <= max(1, devices // 8)
        for each in found:
            total = sum(max(c.stages[stage] for c in each.choices) for stage in range(3))
            assert each.seconds == pytest.approx(total)
            used = [next(iter(choice.sizes.values())) for choice in each.choices]
            assert sum(sizes.pp * sizes.tp * sizes.dp for sizes in used) == devices
