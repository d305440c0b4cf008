"""RLHFuse's tables: which of the product's functions make them, and what they depend on."""

from unittest import mock

import pytest

import controller
import fused
from papers import rlhfuse
from papers.rlhfuse import Setting, cluster_of, fastest, inference_s, setting_of, simulate
from papers.tables import ROOT, Paper, read_constants, read_points
from scheduling import pipeline
from scheduling.fusion import TAILS

CONSTANTS = read_constants(ROOT / "rlhfuse.toml")
FILES = sorted((ROOT / "published").glob("rlhfuse_*.csv"))
POINTS = [point for file in FILES for point in read_points(file)]
BASE = Setting(512, "13", "33", 0.0)
SERVING = "generation + inference"


@pytest.fixture(scope="module")
def base():
    return simulate(CONSTANTS, BASE)


def points_of(figure, system, setting):
    return [p for p in POINTS if (p.figure, p.system, p.setting) == (figure, system, setting)]


def test_who_does_the_work():
    """The product's controllers decide who holds the devices; its schedule is what training gains."""
    decides = dict(autospec=True, side_effect=fused.ranks_of_tail)
    follows = dict(autospec=True, side_effect=fused.follow_the_tail)
    with (
        mock.patch.object(controller, "train", wraps=controller.train) as train,
        mock.patch.object(fused, "ranks_of_tail", **decides) as ranks_of_tail,
        mock.patch.object(fused, "follow_the_tail", **follows) as follow_the_tail,
        mock.patch.object(pipeline, "evaluate", wraps=pipeline.evaluate) as evaluate,
    ):
        simulate(CONSTANTS, BASE._replace(tail=0.3))
    assert train.call_count == 32
    assert all(called.call_count for called in (follow_the_tail, evaluate))
    assert {call.args[0] for call in ranks_of_tail.call_args_list} == {0.3}


def test_inference_by_hand():
    """A reference of 13.0 billion parameters, a reward model and a critic of 32.5 billion each."""
    assert inference_s(CONSTANTS, BASE) == pytest.approx(2.99 + 1.80 * 0.780 + 2.06 * 0.5)


def test_base_is_its_parts(base):
    """The longest answer, alone at its end; all judgements, dealt evenly; two models in turns."""
    decode = cluster_of(CONSTANTS, BASE).decode["rollout"]
    assert 512 * decode.fixed < base["generation"] < 1.1 * 512 * decode.fixed
    assert base["inference"] == pytest.approx(inference_s(CONSTANTS, BASE), rel=0.03)
    assert base["training"] == pytest.approx(base["actor training"] + base["critic training"])
    step_s = (base[SERVING] + base["training"]) / 0.97
    assert base["throughput"] == pytest.approx(512 / step_s)


def test_training_gains_what_its_instance_of_table_3_does():
    """33B/13B with 16 and 8 micro-batches, 65B/33B with 32 and 16: whoever is the actor."""
    found = [rlhfuse.speed_up(CONSTANTS, Setting(1024, "33", actor)) for actor in ("13", "65")]
    assert found == pytest.approx([477 / 372, 420 / 330])


def test_the_best_tail_is_searched():
    """For a setting without a tail; Base has 0."""
    (point, *_) = points_of("8", "RLHFuse", "1024 33/65")
    setting = setting_of(point)
    took = dict(zip((0.0, *TAILS), (10, 9, 8, 7, 6, 7, 8, 9), strict=True))
    steps = {setting._replace(tail=tail): {SERVING: seconds} for tail, seconds in took.items()}
    paper = Paper([], CONSTANTS)
    steps |= {each._replace(orders=rlhfuse.ORDERS): took for each, took in steps.items()}
    assert fastest(steps, paper, point).tail == 0.3
    assert fastest(steps, paper._replace(quick=True), point).tail == 0.3
    assert fastest(steps, paper, point._replace(system="Base")).tail == 0.0
    assert fastest(steps, paper, point._replace(setting="1024 33/65 tail 0.5")).tail == 0.5


def test_the_numbers_of_figure_7_are_the_sums_of_figure_8():
    """512 answers over its parts and the others, which take less than 3 %, or 5 % of a fused iteration."""
    for point in (p for p in POINTS if p.figure == "7"):
        seconds = sum(float(p.value) for p in points_of("8", point.system, point.setting))
        assert 0.95 < seconds * float(point.value) / 512 < 1
