"""WeChat-YATT's page: the formula of an engine on H20s, and its trivial predictor."""

import pytest

from reproduce.papers import wechat_yatt
from reproduce.papers.tables import ROOT, Paper, read_constants, read_points

POINTS = read_points(ROOT / "published" / "wechat_yatt_h20.csv")
ROWS = wechat_yatt.h20(Paper(POINTS, read_constants(ROOT / "wechat_yatt.toml")))
BY = {(row.setting.partition(" at once")[0], row.metric): row for row in ROWS}


def test_an_engine_holds_room_for_whole_answers():
    """32B on one H20 must serve few of its 128 requests at once; an engine with room must serve all."""
    tight, wide = BY["32B TP1 128", "fastest"], BY["32B TP4 128", "fastest"]
    assert tight.simulated < wide.simulated / 8
    assert all(abs(row.error) < 0.35 for row in ROWS if row.setting.startswith(("32B", "1.5B")))
    assert (
        BY["1.5B TP1 2048", "fastest"].simulated < 1.02 * BY["1.5B TP1 1024", "fastest"].simulated
    )


def test_the_trivial_predictor_is_the_most_similar_engine():
    """The same model and GPUs if fitted, else the model, else as many GPUs: per GPU, for any batch."""
    assert BY["1.5B TP2 2048", "fastest"].trivial == 23243
    assert BY["32B TP1 128", "slowest"].trivial == pytest.approx(2590 / 4)
    assert BY["30B-A3B TP4 512", "fastest"].trivial == 4121
