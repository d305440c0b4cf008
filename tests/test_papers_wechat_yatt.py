"""papers/wechat_yatt.py: its map, its scenario and its engines' pace."""

import asyncio

import pytest

from papers import wechat_yatt as paper_of_yatt
from papers.tables import ROOT, Paper, read_constants, read_points
from papers.wechat_yatt import FIGURES, Link, simulate, step_s
from simulation.costs import Decode

FILES = sorted((ROOT / "published").glob("wechat_yatt_*.csv"))
POINTS = [point for file in FILES for point in read_points(file)]
PAPER = Paper(POINTS, read_constants(ROOT / "wechat_yatt.toml"), quick=True)


@pytest.mark.slow
def test_one_process_passes_on_every_sample_five_times():
    """It is busy for all of their bytes; more than that and a step without them a step can't take."""
    constants, media, rate = PAPER.constants, 15e6, 0.3e9
    busy_s = 5 * 128 * 8 * media / rate
    alone_s = simulate(constants, "32B", "full", 5).ended_s
    assert busy_s < step_s(constants, Link(rate).carry, media, 5) < busy_s + alone_s
    beside_s = step_s(constants, lambda size: asyncio.sleep(size / 25e9), media, 1)
    assert alone_s < beside_s < 1.05 * alone_s


def test_an_engines_pace_is_its_closed_form(monkeypatch):
    """And what is published changes nothing of ours: not with all values the same, either."""
    ours = [row.simulated for row in FIGURES["h20"](PAPER)]
    same = PAPER._replace(points=[point._replace(value="1000") for point in POINTS])
    assert [row.simulated for row in FIGURES["h20"](same)] == ours
    monkeypatch.setattr(paper_of_yatt, "engine_of", lambda *_: Decode(0.01, 1e-4, 1e-8))
    (row, *_) = FIGURES["h20"](PAPER)  # 1,024 at once, 100 tokens each
    assert row.simulated == pytest.approx(1024 / (0.01 + 1024 * (1e-4 + 100 * 1e-8)))
