"""HybridFlow's resharding: its groups and table 2 by hand, and real shards put together on gloo groups."""

from fractions import Fraction
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import training  # noqa: F401  makes Megatron importable without CUDA
from test_actor import make_model
from training.resharding import Layout
from workers import run_worker

layouts = st.builds(
    lambda pp, near, copies, parts: Layout(pp, near * parts, copies, parts),
    *(st.integers(1, 4) for _ in range(4)),
)

# ---------------------------------------------------------------- the rule


@given(layouts)
def test_every_shard_lies_in_its_rank_s_part(layout):
    """As ranges of the cut dimension."""
    for rank in range(layout.pp * layout.tp * layout.copies):
        shard, place = rank % layout.tp, layout.place(rank)
        assert Fraction(place.part, layout.parts) <= Fraction(shard, layout.tp)
        assert Fraction(shard + 1, layout.tp) <= Fraction(place.part + 1, layout.parts)


@given(layouts)
def test_groups_divide_the_ranks(layout):
    """Each kind has every rank once; an engine has all parts of a copy, who gathers all shards of a part."""
    tensor, micro_data = layout.groups()
    ranks = range(layout.pp * layout.tp * layout.copies)
    for groups, size in (
        (tensor, layout.parts),
        (micro_data, layout.pp * layout.tp // layout.parts),
    ):
        assert sorted(chain(*groups)) == [*ranks]
        assert {len(group) for group in groups} == {size} and len(groups) * size == len(ranks)
    for group in tensor:
        places = [layout.place(rank) for rank in group]
        assert [place.part for place in places] == [*range(layout.parts)]
        assert len({place.copy for place in places}) == 1
    for group in micro_data:
        places = [layout.place(rank) for rank in group]
        assert [place.member for place in places] == [*range(len(group))]
        assert len({(place.copy, place.part) for place in places}) == 1
        shards = {(rank // (layout.tp * layout.copies), rank % layout.tp) for rank in group}
        assert len(shards) == len(group)


def test_the_paper_s_example():
    """Training 1-4-2, generation 1-2-2-2 (section 5.3)."""
    tensor, micro_data = Layout(1, 4, 2, 2).groups()
    assert tensor == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert micro_data == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    "layout, deepspeed, vanilla, ours",
    [
        (Layout(1, 4, 2, 2), ("7/8", 1, "1/8"), ("3/4", 1, "1/4"), ("1/4", "1/2", 0)),
        (Layout(8, 8, 1, 8), ("63/64", 1, "1/64"), ("63/64", 1, "1/64"), ("7/64", "1/8", 0)),
        (Layout(2, 2, 2, 1), ("7/8", 1, "1/8"), ("3/4", 1, "1/4"), ("3/4", 1, 0)),
        (Layout(1, 1, 4, 1), ("3/4", 1, "1/4"), (0, 1, 1), (0, 1, 0)),
    ],
)
def test_table_2_by_hand(layout, deepspeed, vanilla, ours):
    costs = [tuple(map(Fraction, cost)) for cost in (deepspeed, vanilla, ours)]
    assert list(layout.costs()) == ["DeepSpeed-Chat", "HybridFlow-V", "HybridFlow"]
    assert [tuple(cost) for cost in layout.costs().values()] == costs


# ---------------------------------------------------------------- real shards

UNTIED, TIED = "qwen3-untied", "qwen3-tied"
OTHERS = ("qwen2-untied", "qwen2-tied", "llama-untied", "llama-tied")
EQUAL = {  # where stages are equal: name -> model, ranks, sizes, ranks of an engine
    "1-4-1": (UNTIED, 4, {"tp": 4}, (1, 2, 4)),
    "1-2-2": (UNTIED, 4, {"tp": 2}, (1, 2)),
    "2-2-1": (UNTIED, 4, {"pp": 2, "tp": 2}, (1, 2)),
    "2-1-2": (UNTIED, 4, {"pp": 2}, (1,)),
    "1-2-2 by context": (UNTIED, 4, {"tp": 2, "cp": 2}, (1, 2)),
    "1-4-2": (UNTIED, 8, {"tp": 4}, (1, 2)),
    "2-4-1": (UNTIED, 8, {"pp": 2, "tp": 4}, (1, 2, 4)),
    "2-2-2": (UNTIED, 8, {"pp": 2, "tp": 2, "sp": True}, (1, 2)),
    "1-4-1 tied": (TIED, 4, {"tp": 4}, (2,)),
    "2-2-1 interleaved": (UNTIED, 4, {"pp": 2, "tp": 2, "schedule": "interleaved"}, (1, 2)),
}
UNEQUAL = {  # embeddings make a stage larger
    "4-1-1": (UNTIED, 4, {"pp": 4}, (1,)),
    "4-2-1": (UNTIED, 8, {"pp": 4, "tp": 2}, (1, 2)),
    "2-2-1 tied": (TIED, 4, {"pp": 2, "tp": 2}, (1, 2)),
}
LAYOUTS = (
    EQUAL | UNEQUAL | {f"2-2-1 {model}": (model, 4, {"pp": 2, "tp": 2}, (1, 2)) for model in OTHERS}
)
CASES = [(name, parts) for name, (*_, engines) in LAYOUTS.items() for parts in engines]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """By layout and ranks of an engine, a dict of each rank: see resharding_worker.py."""
    path = tmp_path_factory.mktemp("resharding")
    sizes = dict(num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=8)
    models = {
        name: make_model(path / name, *kind(name), **sizes) for name in (UNTIED, TIED, *OTHERS)
    }
    torch.save({"models": models, "layouts": LAYOUTS, "sizes": [4, 8]}, path / "case.pt")
    run_worker("resharding_worker.py", path / "case.pt", path / "result")
    return {
        key: ranks
        for size in (4, 8)
        for key, ranks in torch.load(f"{path}/result.{size}", weights_only=False).items()
    }


def kind(name: str) -> tuple[str, bool]:
    family, embeddings = name.split("-")
    return family, embeddings == "tied"


@pytest.mark.slow
@pytest.mark.parametrize("name, parts", CASES)
def test_parts_are_slices_of_the_directory_s_tensors(found, name, parts):
    """All of them, bit for bit, in one order on all ranks; engines of one rank through the trainer's push."""
    for rank in found[name, parts]:
        assert not rank["missing"] and not rank["wrong"]
        assert rank["names"] == found[name, parts][0]["names"]


@pytest.mark.slow
@pytest.mark.parametrize("name, parts", CASES)
def test_a_rank_receives_what_it_lacks_and_nothing_twice(found, name, parts):
    """Its part without its shards, whether stages are equal or not, as collectives carried it."""
    for rank in found[name, parts]:
        assert rank["received"] == rank["carried"] == sum(rank["part"]) - sum(rank["own"])


@pytest.mark.slow
@pytest.mark.parametrize("name, parts", [case for case in CASES if case[0] in EQUAL])
def test_bytes_are_table_2_s(found, name, parts):
    """Norms apart, which tensor parallelism doesn't cut. Whole tensors come to HybridFlow-V's, too."""
    _, ranks, sizes, _ = LAYOUTS[name]
    pp, tp = sizes.get("pp", 1), sizes.get("tp", 1)
    costs = Layout(pp, tp, ranks // (pp * tp), parts).costs()
    for rank in found[name, parts]:
        (part, norms), (own, own_norms), (model, _) = rank["part"], rank["own"], rank["model"]
        received = rank["received"] - (norms - own_norms)
        assert received == costs["HybridFlow"].received * model
        assert part == costs["HybridFlow"].peak * model and own == Fraction(model, pp * tp)
        assert parts > 1 or received == costs["HybridFlow-V"].received * model
