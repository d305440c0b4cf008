"""HybridFlow's resharding: its groups and table 2 by hand, and real shards put together on gloo groups."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import training  # noqa: F401  makes Megatron importable without CUDA
from actor import Actor
from examples.make_demo.closing import close
from papers.hybridflow import table_2
from tests.support.plain import make_model
from tests.workers.parallel import actor_config, gathered
from tests.workers.start import train_layouts
from training.hf_weights import HFWeights


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


LAYOUTS = {  # name -> model, ranks, sizes
    "1-4-1": ("untied", 4, {"tp": 4}),
    "2-1-2": ("untied", 4, {"pp": 2}),
    "1-2-2": ("untied", 4, {"tp": 2}),
    "2-2-1": ("untied", 4, {"pp": 2, "tp": 2}),
    "2-4-1": ("untied", 8, {"pp": 2, "tp": 4, "sp": True}),
    "2-2-1 tied": ("tied", 4, {"pp": 2, "tp": 2}),  # embeddings make a stage larger
}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """By layout a dict of each rank, see `gather`."""
    path = tmp_path_factory.mktemp("resharding")
    sizes = dict(num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=8)
    ties = {"untied": False, "tied": True}
    models = {name: make_model(path / name, "qwen3", ties[name], **sizes) for name in ties}
    return train_layouts("tests.test_resharding", path, LAYOUTS, models)


@contextmanager
def counted() -> Iterator[Counter]:
    """Bytes of tensors that collectives bring to this rank, counted where torch is called."""
    carried, all_gather, broadcast = Counter(), dist.all_gather, dist.broadcast

    def count_all_gather(outputs, tensor, group):
        carried["bytes"] += sum(output.nbytes for output in outputs) - tensor.nbytes
        all_gather(outputs, tensor, group=group)

    def count_broadcast(tensor, group, group_src):
        carried["bytes"] += tensor.nbytes * (group.rank() != group_src)
        broadcast(tensor, group=group, group_src=group_src)

    with mock.patch.multiple(dist, all_gather=count_all_gather, broadcast=count_broadcast):
        yield carried


def gather(actor) -> dict:
    """By a push: bytes received, those of what tensor parallelism cuts, and what came out wrong."""
    whole = HFWeights(actor.model_dir)
    with counted() as carried:
        found = {name: tensor.clone() for name, tensor in actor.named_weights()}
    norms = {name for name in found if "norm" in name}
    return {
        "received": actor.gathering.received,
        "carried": carried["bytes"],
        "cut": sum(found[name].nbytes for name in found.keys() - norms),
        "norms": sum(found[name].nbytes for name in norms),
        "missing": whole.file_of.keys() - found.keys(),
        "wrong": [name for name in found if not torch.equal(found[name], whole[name])],
    }


def train(model_dir: str, sizes: dict, path: str) -> list[dict]:
    actor = Actor(actor_config(**sizes), model_dir)
    found = gathered(gather(actor))
    close(actor)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_push_brings_each_rank_what_it_lacks_and_nothing_twice(found, name):
    """Tensors bit for bit, collectives' bytes as in table 2; norms apart, which tp doesn't cut."""
    model, ranks, sizes = LAYOUTS[name]
    pp, tp = sizes.get("pp", 1), sizes.get("tp", 1)
    cost = table_2(pp, tp, ranks // (pp * tp), 1)["HybridFlow"].received
    for rank in found[name]:
        assert not rank["missing"] and not rank["wrong"]
        assert rank["received"] == rank["carried"]
        if model == "untied":  # else stages aren't equal
            norms = rank["received"] - cost * rank["cut"]
            assert 0 <= norms < rank["norms"] and (norms > 0) == (pp > 1)
