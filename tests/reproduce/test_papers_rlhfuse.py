"""RLHFuse's tables: which of the product's functions compute them, and what they depend on."""

import json
from unittest import mock

import pytest

import controller
from extras.fused import mode as fused
from extras.pipelines import tables
from reproduce.papers import rlhfuse
from reproduce.papers.rlhfuse import Setting, cluster_of, inference_s, simulate
from reproduce.papers.tables import ROOT, Paper, read_constants, read_points
from reproduce.simulation.cluster import Lengths, Simulation, Workload

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


def test_an_engine_of_the_tail_keeps_what_its_cache_holds():
    """m = Rt M / C: smaller models and shorter answers must leave more room; the fitted 33B has 15."""
    sizes = {}
    for actor, critic, most in (
        ("13", "33", 1024),
        ("33", "13", 1024),
        ("65", "33", 1024),
        ("33", "65", 512),
    ):
        cluster = cluster_of(CONSTANTS, Setting(most, actor, critic))
        sizes[actor, most] = cluster.decode["rollout"].kept
    assert [*sizes.values()] == [31, 15, 8, 27]
    short = Workload(8, Lengths(4, 0.0, 8), Lengths(4, 0.0, 4))
    run = Simulation("fused", 2, short, cluster, prompts_per_step=2, answers_per_prompt=2)
    assert {engine.capacity for engine in run.engines["rollout"]} == {27}
    assert {engine.capacity for engine in run.engines["genrm"]} == {1}


def test_the_greedy_schedule_is_the_papers():
    """Its latency and memory must be those of the released traces, to the last digit."""
    for instance in json.loads(rlhfuse.INSTANCES.read_text()):
        pipes = rlhfuse.read_instances(rlhfuse.INSTANCES)[instance["name"]]
        latency, memory, _ = tables.evaluate(pipes, rlhfuse.greedy(pipes))
        assert (latency, pytest.approx(memory)) == (*instance["greedy"].values(),)


def test_the_trivial_predictor_by_hand():
    """RLHFuse must hide the inference and train 1.25 times as fast; a tail must follow the fitted curve."""
    points = [
        p for file in (ROOT / "published").glob("rlhfuse_fig*.csv") for p in read_points(file)
    ]
    seconds = rlhfuse.trivial_of(Paper(points, CONSTANTS))
    base, fused = (seconds(Setting(512, "13", "33"), side) for side in (False, True))
    assert base["inference"] == pytest.approx((5.41 + 6.44) / 2)
    assert base["generation"] == pytest.approx(5.23, rel=0.01)
    assert fused["generation + inference"] == base["generation"]
    assert base["generation + inference"] == base["generation"] + base["inference"]
    assert fused["training"] == pytest.approx(base["training"] / 1.25)
    step_s = fused["generation + inference"] + fused["training"]
    assert fused["throughput"] == pytest.approx(512 / step_s * 0.97)
    tails = [seconds(Setting(1024, "33", "65", tail), True) for tail in (0.0, 0.2)]
    assert [each["generation + inference"] for each in tails] == pytest.approx([25.5, 18.7])
