"""HybridFlow's resharding: its groups and table 2 by hand, and real shards put together on gloo groups."""

from fractions import Fraction

import pytest

import training  # noqa: F401  makes Megatron importable without CUDA
from papers.hybridflow import table_2


@pytest.mark.parametrize(
    "sizes, deepspeed, vanilla, ours",
    [
        ((1, 4, 2, 2), ("7/8", 1, "1/8"), ("3/4", 1, "1/4"), ("1/4", "1/2", 0)),
        ((8, 8, 1, 8), ("63/64", 1, "1/64"), ("63/64", 1, "1/64"), ("7/64", "1/8", 0)),
        ((2, 2, 2, 1), ("7/8", 1, "1/8"), ("3/4", 1, "1/4"), ("3/4", 1, 0)),
        ((1, 1, 4, 1), ("3/4", 1, "1/4"), (0, 1, 1), (0, 1, 0)),
    ],
)
def test_table_2_by_hand(sizes, deepspeed, vanilla, ours):
    costs = [tuple(map(Fraction, cost)) for cost in (deepspeed, vanilla, ours)]
    assert list(table_2(*sizes)) == ["DS-Chat", "HybridFlow-V", "HybridFlow"]
    assert [tuple(cost) for cost in table_2(*sizes).values()] == costs
