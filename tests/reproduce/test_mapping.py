"""HybridFlow's mapping: closed forms against loops, and its search against brute force."""

import pytest

from reproduce.papers import mapping
from reproduce.papers.mapping import Sizes, Speeds, Task
from reproduce.simulation.costs import Device, Model
from reproduce.simulation.trainers import forward_s, update_s

DEVICE = Device(flops=312e12, memory=80e9, hbm=2e12, network=3e9, host=2e10, link=2e11)
SPEEDS = Speeds(DEVICE, mfu=0.8, half=2000, layer_s=2e-4, reduce_s=1e-4, update_s=0.3)
TASK = Task(sequences=256, prompt=128, answer=512, trained=1024, updates=4)
LLAMA = Model(6.74e9, 32, 4096, 4096)


@pytest.mark.parametrize("sizes", [Sizes(1, 1, 8), Sizes(2, 4, 1), Sizes(4, 8, 4), Sizes(8, 8, 64)])
def test_passes_are_the_sum_over_mini_batches(sizes):
    """They must equal the simulation's trainers' sum, one sequence per micro-batch, for rank 0's share."""
    passes, own = mapping.passes(LLAMA, sizes, SPEEDS), max(1, 256 // 4 // sizes.dp)
    reading = sum(forward_s(passes, [[1024]] * own) for _ in range(4))
    learning = sum(update_s(passes, [[1024]] * own) for _ in range(4))
    assert mapping.passes_s(LLAMA, sizes, TASK, SPEEDS) == pytest.approx((reading, learning))


def test_an_update_by_hand():
    """It takes 6 FLOPs per parameter and token, 4 all-reduces per layer, 6 bytes a parameter to replicas."""
    speeds = SPEEDS._replace(half=0.0)
    _, seconds = mapping.passes_s(LLAMA, Sizes(1, 8, 4), TASK._replace(updates=1), speeds)
    tokens = 256 / 4 * 1024
    compute = tokens * (6 * 6.74e9 + 3 * 2 * 32 * 4096 * 1024) / (8 * 0.8 * 312e12)
    reducing = tokens * 32 * (2 + 2) * (2 * 7 / 8 * 4096 * 2) / 2e11
    copies = 6 * 6.74e9 / 8 * 3 / 4 / 3e9
    # attention counts like the rest
    square = (1 + mapping.passes(LLAMA, Sizes(1, 8, 4), speeds).backward) / 3
    attention = tokens * 3 * 2 * 32 * 4096 * 1024 / (8 * 0.8 * 312e12)
    expected = compute + (square - 1) * attention + reducing + copies + 0.3
    assert seconds == pytest.approx(expected, rel=1e-3)


def test_generation_is_the_sum_of_its_steps():
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
