"""RLHFuse's tables: which of the product's functions compute them, and what they depend on."""

from unittest import mock

import pytest

import controller
from extras.fused import mode as fused
from extras.pipelines import tables
from reproduce.papers import rlhfuse
from reproduce.papers.rlhfuse import Setting, cluster_of, inference_s, simulate
from reproduce.papers.tables import ROOT, read_constants

CONSTANTS = read_constants(ROOT / "rlhfuse.toml")
BASE = Setting(512, "13", "33", 0.0)
SERVING = "generation + inference"


@pytest.fixture(scope="module")
def base():
    return simulate(CONSTANTS, BASE)


def test_who_does_the_work():
    """The product's controllers must decide who holds the devices; its schedule is training's gain."""
    decides = dict(autospec=True, side_effect=fused.ranks_of_tail)
    follows = dict(autospec=True, side_effect=fused.follow_the_tail)
    with (
        mock.patch.object(controller, "train", wraps=controller.train) as train,
        mock.patch.object(fused, "ranks_of_tail", **decides) as ranks_of_tail,
        mock.patch.object(fused, "follow_the_tail", **follows) as follow_the_tail,
        mock.patch.object(tables, "evaluate", wraps=tables.evaluate) as evaluate,
    ):
        simulate(CONSTANTS, BASE._replace(tail=0.3))
    assert train.call_count == 32
    assert all(called.call_count for called in (follow_the_tail, evaluate))
    assert {call.args[0] for call in ranks_of_tail.call_args_list} == {0.3}


def test_base_is_its_parts(base):
    """They are the longest answer by itself at its end, all judgements dealt evenly, two models in turns."""
    decode = cluster_of(CONSTANTS, BASE).decode["rollout"]
    assert 512 * decode.fixed < base["generation"] < 1.1 * 512 * decode.fixed
    assert base["inference"] == pytest.approx(inference_s(CONSTANTS, BASE), rel=0.03)
    assert base["training"] == pytest.approx(base["actor training"] + base["critic training"])
    step_s = (base[SERVING] + base["training"]) / 0.97
    assert base["throughput"] == pytest.approx(512 / step_s)


def test_training_gains_what_its_instance_of_table_3_does():
    """33B/13B has 16 and 8 micro-batches, 65B/33B 32 and 16, whichever is the actor."""
    found = [rlhfuse.speed_up(CONSTANTS, Setting(1024, "33", actor)) for actor in ("13", "65")]
    assert found == pytest.approx([477 / 372, 420 / 330])
