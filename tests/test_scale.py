"""bench/central.py: what is counted, by hand; flat or not, and with which exponent; who decides."""

from pathlib import Path
from statistics import fmean

import pytest

from bench import central
from bench.central import exponents

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def found():
    """way -> ranks -> figures, and the seconds of a step."""
    runs = {ranks: central.Scaled(ranks) for ranks in central.QUICK}
    step_s = {ranks: run.run()[-1].ended_s for ranks, run in runs.items()}
    ways = {ranks: run.ways() for ranks, run in runs.items()}
    by_way = {way: {ranks: each[way] for ranks, each in ways.items()} for way in central.WAYS}
    return by_way, step_s, runs


def test_what_ours_holds_and_sends_is_flat(found):
    """Within a tenth of the mean: of 8 units each keeps an eighth at home. It thinks for little of a step."""
    ways, step_s, _ = found
    for name in ("samples", "sent"):
        values = [busiest._asdict()[name] for busiest in ways["ours"].values()]
        assert all(abs(value - fmean(values)) < 0.1 * fmean(values) for value in values), name
    assert exponents(ways["ours"])["requests"] < 0.2
    for ranks, busiest in ways["ours"].items():
        assert 0 < busiest.seconds < 0.01 * step_s[ranks]


def test_what_grows_is_named(found):
    """Through one process all goes with the ranks. Of ours, others' facts grow: few beside the samples."""
    ways, step_s, _ = found
    for way in ("coordinator", "central"):
        for name in ("samples", "sent", "heard", "requests"):
            assert exponents(ways[way])[name] == pytest.approx(1.0, abs=0.05), (way, name)
    ours = exponents(ways["ours"])
    assert 0.9 < ours["relayed"] < 1.5 and ours["heard"] < 0.3
    lines = {tuple(line.split(" | ")[:2]): line for line in central.table_of(ways, step_s)}
    assert f"relayed ranks^{ours['relayed']:.2f}" in lines["| ours", "grows:"]
    assert "samples" not in lines["| ours", "grows:"]
    assert "samples ranks^" in lines["| central", "grows:"]


@pytest.mark.slow
def test_media_go_through_one_controller_alone():
    """1 MB each: none of ours (tests/fakes.py asserts it of every simulated run); the one process all."""
    for ranks in (64, 128):
        plain, with_media = (central.Scaled(ranks, media) for media in (0.0, 1e6))
        steps = [run.run()[0] for run in (plain, with_media)]
        assert steps[0].trained == steps[1].trained
        kept = central.PROMPTS * central.ANSWERS * ranks // central.UNIT
        more = with_media.ways()["central"].sent - plain.ways()["central"].sent
        assert more == pytest.approx(kept * 1e6)
        assert with_media.ways()["ours"][:5] == plain.ways()["ours"][:5]
