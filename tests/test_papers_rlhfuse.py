"""RLHFuse's tables: which of the product's functions make them, and what they depend on."""

import copy
from unittest import mock

import pytest

import controller
import placement
from papers import rlhfuse
from papers.rlhfuse import (
    Setting,
    cluster_of,
    fastest,
    inference_s,
    rows_of,
    setting_of,
    simulate,
    speed_up,
)
from papers.tables import ROOT, Paper, command, read_constants, read_points
from scheduling import pipeline
from scheduling.fusion import TAILS

CONSTANTS = read_constants(ROOT / "rlhfuse.toml")
POINTS = [
    point
    for path in sorted((ROOT / "published").glob("rlhfuse_*.csv"))
    for point in read_points(path)
]
BASE = Setting(512, "13", "33", 0.0)
SERVING = "generation + inference"


@pytest.fixture(scope="module")
def base():
    return simulate(CONSTANTS, BASE)


def points_of(figure, system, setting):
    return [p for p in POINTS if (p.figure, p.system, p.setting) == (figure, system, setting)]


def test_the_command(capsys):
    """Few points, within seconds; every figure and every kind has rows."""
    assert command("rlhfuse", rlhfuse.__doc__, rlhfuse.figures(), ["--quick"]) == 0
    said = capsys.readouterr().out
    for figure in (
        "2",
        "7",
        "8 Base serving",
        "8 RLHFuse serving",
        "8 RLHFuse training",
        "9",
        "table 3",
    ):
        assert f"| {figure} |" in said
    assert all(kind in said for kind in ("fitted: ", "predicted: ", "form: ", "not modelled: "))


def test_who_does_the_work():
    """The product's controllers decide who holds the devices; its schedule is what training gains."""
    decides = dict(autospec=True, side_effect=placement.ranks_of_tail)
    follows = dict(autospec=True, side_effect=placement.Placement.follow_the_tail)
    with (
        mock.patch.object(controller, "train", wraps=controller.train) as train,
        mock.patch.object(placement, "ranks_of_tail", **decides) as ranks_of_tail,
        mock.patch.object(placement.Placement, "follow_the_tail", **follows) as follow_the_tail,
        mock.patch.object(pipeline, "evaluate", wraps=pipeline.evaluate) as evaluate,
    ):
        simulate(CONSTANTS, BASE._replace(tail=0.3))
    assert train.call_count == 32
    assert all(called.call_count for called in (follow_the_tail, evaluate))
    assert {call.args[0] for call in ranks_of_tail.call_args_list} == {0.3}


def test_what_is_published_changes_nothing_of_ours(base):
    """Of two settings whose numbers are swapped."""
    first, second = points_of("8", "Base", "512 13/33"), points_of("8", "Base", "1024 13/33")
    both = zip(first + second, second + first, strict=True)
    swapped = [a._replace(value=b.value) for a, b in both]
    steps = {BASE: base}
    ours = [rows_of("8", steps, Paper(points, CONSTANTS)) for points in (first + second, swapped)]
    assert [row.ours for row in ours[0]] == [row.ours for row in ours[1]]
    assert [row.theirs for row in ours[0]] != [row.theirs for row in ours[1]]
    assert len({row.ours for row in ours[0]}) == 8


def test_a_change_of_the_device_moves_generation_alone(base):
    """At half the bandwidth weights and KV caches are read in twice the time; nothing else changes."""
    slow = copy.deepcopy(CONSTANTS)
    slow["device"]["hbm"] /= 2
    layers_s = 40 * CONSTANTS["decode"]["layer_s"] * 512
    after = simulate(slow, BASE)
    assert after["generation"] - layers_s == pytest.approx(
        2 * (base["generation"] - layers_s), rel=0.03
    )
    assert after["inference"] == pytest.approx(base["inference"], rel=0.03)
    assert after["training"] == pytest.approx(base["training"])


def test_base_is_its_parts(base):
    """The longest answer, alone at its end; all judgements, dealt evenly; two models in turns."""
    decode = cluster_of(CONSTANTS, BASE).decode["rollout"]
    assert 512 * decode.fixed < base["generation"] < 1.1 * 512 * decode.fixed
    assert base["inference"] == pytest.approx(inference_s(CONSTANTS, BASE), rel=0.03)
    assert base["training"] == pytest.approx(base["actor training"] + base["critic training"])
    step_s = (base[SERVING] + base["training"]) / 0.97
    assert base["throughput"] == pytest.approx(512 / step_s)


def test_fusing_hides_one_behind_the_other():
    """Where writing takes longer than judging; serving can't end before the longer of both."""
    setting = Setting(1024, "33", "65", 0.0)
    base, fused = (simulate(CONSTANTS, setting._replace(tail=tail)) for tail in (0.0, 0.3))
    assert base["generation"] < fused[SERVING] < 0.85 * base[SERVING]
    assert base["training"] / fused["training"] == pytest.approx(speed_up(CONSTANTS, setting))


def test_training_gains_what_its_instance_of_table_3_does():
    """33B/13B with 16 and 8 micro-batches, 65B/33B with 32 and 16: whoever is the actor."""
    assert speed_up(CONSTANTS, Setting(1024, "33", "13")) == pytest.approx(477 / 372)
    assert speed_up(CONSTANTS, Setting(1024, "33", "65")) == pytest.approx(420 / 330)


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


def test_constants_are_no_more_than_half_of_the_points_they_were_fitted_on():
    names = {point.name for point in POINTS}
    fitted = [table for table in CONSTANTS.values() if "fitted_on" in table]
    assert all(name in names for table in fitted for name in table["fitted_on"])
    assert 2 * sum(len(table) - 1 for table in fitted) <= sum(
        len(table["fitted_on"]) for table in fitted
    )


@pytest.mark.parametrize("setting", ["1024", "1024 33/33", "1024 33/65 tail", "x 33/65"])
def test_a_setting_of_another_form(setting):
    with pytest.raises(ValueError, match=r"here:7: .* isn't as `1024 33/65`"):
        setting_of(POINTS[0]._replace(setting=setting, where="here:7"))


def test_an_unknown_metric_or_instance(base):
    (point, *_) = points_of("8", "Base", "512 13/33")
    paper = Paper([point._replace(metric="sleep", where="here:7")], CONSTANTS)
    with pytest.raises(ValueError, match="here:7: its metric is none of generation, "):
        rows_of("8", {BASE: base}, paper)
    with pytest.raises(ValueError, match="`33B/13B 8/4 1/1` is no instance of"):
        rlhfuse.gain("33B/13B 8/4 1/1")
