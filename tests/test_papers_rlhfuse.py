"""RLHFuse's tables: which of the product's functions make them, and what they depend on."""

import copy
from unittest import mock

import pytest

import controller
import placement
from papers import rlhfuse
from papers.rlhfuse import Setting, Steps, cluster_of, inference_s, setting_of, simulate, speed_up
from papers.tables import ROOT, Paper, read_constants, read_points
from scheduling import pipeline
from scheduling.fusion import TAILS

CONSTANTS = read_constants(ROOT / "rlhfuse.toml")
POINTS = [point for path in sorted((ROOT / "published").glob("rlhfuse_*.csv")) for point in read_points(path)]
SMALL = Setting(512, "13", "33")


def changed(table, **values):
    constants = copy.deepcopy(CONSTANTS)
    constants[table] |= values
    return constants


def paper(points=POINTS, constants=CONSTANTS):
    return Paper(points, constants, quick=True)


def test_the_command(capsys):
    """Few points, within seconds; each kind has its row; nothing is left of a figure's picture."""
    assert rlhfuse.main(["--quick"]) == 0
    said = capsys.readouterr().out
    for figure in ("8 RLHFuse serving", "8 RLHFuse training", "8 Base serving", "9", "7", "table 3"):
        assert f"| {figure} |" in said
    assert all(kind in said for kind in ("fitted", "predicted", "form:", "not modelled:"))


def test_who_does_the_work():
    """The product's controllers decide who holds the devices; its schedule is what training gains."""
    calls = dict(autospec=True, side_effect=placement.Placement.follow_the_tail)
    with (
        mock.patch.object(controller, "train", wraps=controller.train) as train,
        mock.patch.object(placement, "ranks_of_tail", wraps=placement.ranks_of_tail) as ranks_of_tail,
        mock.patch.object(placement.Placement, "follow_the_tail", **calls) as follow,
        mock.patch.object(pipeline, "evaluate", wraps=pipeline.evaluate) as evaluate,
    ):
        simulate(CONSTANTS, SMALL, 0.2)
    assert train.call_count == 32
    assert all(mocked.call_count for mocked in (ranks_of_tail, follow, evaluate))
    assert {call.args[0] for call in ranks_of_tail.call_args_list} == {0.2}


def test_what_is_published_changes_nothing_of_ours():
    """Of two settings whose labels are swapped."""
    base = [point for point in POINTS if (point.figure, point.system) == ("8", "Base")]
    first, second = (
        [p for p in base if p.setting == setting] for setting in ("512 13/33", "512 33/13")
    )
    swapped = [a._replace(value=b.value) for a, b in zip(first + second, second + first, strict=True)]
    rows, others = ([row.ours for row in Steps().rows("8", Paper(p, CONSTANTS))] for p in (first + second, swapped))
    assert rows == others and len(rows) == 8
    assert len({*rows}) == 8


def test_a_change_of_the_device_moves_generation_alone():
    """At half the bandwidth weights and KV cache take twice as long to read, and the layers' own time stays."""
    before = simulate(CONSTANTS, SMALL, 0.0)
    after = simulate(changed("device", hbm=CONSTANTS["device"]["hbm"] / 2), SMALL, 0.0)
    own_s, inference = 40 * CONSTANTS["decode"]["layer_s"] * 512, inference_s(CONSTANTS, SMALL)
    generation, slower = before.serve_s - inference, after.serve_s - inference
    assert slower - own_s == pytest.approx(2 * (generation - own_s), rel=0.02)
    assert after.train_s == before.train_s


def test_fusing_hides_inference_behind_the_tail():
    """Not below what is never hidden: the writing of the longest answer, or all judging."""
    turns, fused = simulate(CONSTANTS, SMALL, 0.0), simulate(CONSTANTS, SMALL, 0.3)
    decode, inference = cluster_of(CONSTANTS, SMALL).decode["rollout"], inference_s(CONSTANTS, SMALL)
    assert max(512 * decode.fixed, inference) < fused.serve_s < turns.serve_s
    assert turns.train_s / fused.train_s == pytest.approx(speed_up(CONSTANTS, SMALL))


def test_the_published_speed_up_of_training_is_table_3s():
    """33B/13B with 16 and 8 micro-batches, 65B/33B with 32 and 16."""
    assert speed_up(CONSTANTS, Setting(1024, "33", "13")) == pytest.approx(477 / 372)
    assert speed_up(CONSTANTS, Setting(1024, "33", "65")) == pytest.approx(420 / 330)


def test_the_best_tail_is_searched():
    """For a setting without a tail; Base has none."""
    point = next(p for p in POINTS if (p.figure, p.system, p.setting) == ("8", "RLHFuse", "1024 33/65"))
    took = dict(zip(TAILS, (9, 8, 7, 6, 7, 8, 9), strict=True)) | {0.0: 10}
    steps = [rlhfuse.Step(took[tail], 1.0, tail) for tail in took]
    with mock.patch.object(rlhfuse, "simulate", side_effect=lambda c, s, tail: rlhfuse.Step(took[tail], 1.0, tail)):
        found = Steps()
        assert found.of(Paper([], CONSTANTS), point) == steps[3]
        assert found.of(Paper([], CONSTANTS), point._replace(system="Base")) == steps[-1]
        assert found.of(Paper([], CONSTANTS), point._replace(setting="1024 33/65 tail 0.5")) == steps[4]


def test_figure_7_is_the_sum_of_figure_8():
    """512 answers over its parts and the others, within 3 % of the iteration."""
    for point in (p for p in POINTS if p.figure == "7"):
        parts = [p for p in POINTS if (p.figure, p.system, p.setting) == ("8", point.system, point.setting)]
        seconds = sum(float(p.value) for p in parts)
        assert 512 / float(point.value) * 0.96 < seconds < 512 / float(point.value)


@pytest.mark.parametrize("setting", ["1024", "1024 34/65", "1024 33/65 tail", "x 33/65"])
def test_a_setting_of_another_form(setting):
    with pytest.raises(ValueError, match=r"here:7: .* isn't as `1024 33/65`"):
        setting_of(POINTS[0]._replace(setting=setting, where="here:7"))
