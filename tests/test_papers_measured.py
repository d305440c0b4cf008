"""The simulation beside what real engines took, on the set-up of bench/modes.py with a pace."""

import json
import random
import statistics
import time
from types import SimpleNamespace

import pytest

from bench import paced
from bench.paced import serving_s
from bench.paced_server import at_pace
from bench.workloads import WORKLOADS, is_kept, length_of
from papers import measured
from papers.tables import ROOT, Paper, Row, read_constants, read_points

PAPER = Paper(read_points(measured.MEASURED), read_constants(ROOT / "measured.toml"))


def test_the_simulation_says_what_was_measured():
    """One constant, fitted on `short`: the other workloads' seconds, and which of two modes is faster."""
    tables = [measured.FIGURES[name](PAPER) for name in ("tail", "resample", "judge-heavy")]
    rows = [row for table in tables for row in table if row.theirs]
    assert len(rows) == 15 and {row.kind for row in rows} == {"predicted"}
    assert statistics.median(abs(row.error) for row in rows) < 0.10
    right, apart = map(sum, zip(*(measured.ordered(table[:5]) for table in tables), strict=True))
    assert apart > 20 and right >= 0.8 * apart


BEST = [("tail-judged", "fused 0.2"), ("judge-heavy", "full"), ("resample", "2|2")]


@pytest.mark.parametrize("name,best", BEST)
def test_auto_ends_near_the_best(name, best):
    """Also where each prompt that is read holds up what is written, so that modes have other paces."""
    at = measured.set_up_of(PAPER.constants)
    assert serving_s(name, "auto", at, steps=22, first_counted=14) < 1.05 * serving_s(
        name, best, at
    )


def test_pairs_in_order():
    kinds = dict(figure="a", setting="", unit="s", kind="predicted")
    rows = [
        Row(theirs=theirs, ours=ours, **kinds)
        for theirs, ours in [(1.0, 5.0), (1.02, 4.0), (2.0, 4.5)]
    ]
    assert measured.ordered(rows) == (1, 2)  # the first two are as good as each other
    assert measured.ordered([rows[0], rows[2]._replace(kind="fitted")]) == (0, 0)


def test_workloads_are_the_same_in_every_run():
    lengths = [length_of("tail", prompt_id, 0) for prompt_id in range(2000)]
    assert 20 < sum(length >= 80 for length in lengths) < 90  # one in forty
    assert all(10 <= length <= 20 or 80 <= length <= 100 for length in lengths)
    assert 900 < sum(is_kept("resample", prompt_id) for prompt_id in range(2000)) < 1100
    group, answer = random.Random("short 1"), random.Random("short (1, 2)")
    assert length_of("short", 1, 2) == WORKLOADS["short"].length(group, answer)


def test_what_is_measured_is_kept(tmp_path, monkeypatch):
    """Medians without the first step, or of the last half; another cell's point stays as it was."""
    path = tmp_path / "papers" / "mine_real.csv"
    (tmp_path / "runs" / "bench").mkdir(parents=True)
    path.parent.mkdir()
    monkeypatch.setattr(paced, "ROOT", path.parent)
    took = [{"full": [9.0, 1.0, 2.0, 3.0], "auto": [9.0, 9.0, 4.0, 6.0]}, {"full": [9.0, 8.0, 8.0]}]

    def run(line, cwd, check):
        rows = [
            dict(workload="short", side=side, metrics={"time/serve_s": seconds})
            for side, each in took[int(line[0])].items()
            for seconds in each
        ]
        (cwd / "runs" / "bench" / "modes-4.json").write_text(json.dumps(rows))

    monkeypatch.setattr(paced.subprocess, "run", run)
    paced.measure(
        [["0"], ["1"]], path, lambda number, name, side: ("real", f"{number} {name}, {side}")
    )
    paced.measure([["1"]], path, lambda number, name, side: ("real", f"0 {name}, {side}"))
    found = {point.setting: (point.value, point.note, point.source) for point in read_points(path)}
    assert found == {
        "0 short, full": ("8.000", "2 steps", "papers/mine.py --real"),
        "0 short, auto": ("5.000", "2 steps", "papers/mine.py --real"),
        "1 short, full": ("8.000", "2 steps", "papers/mine.py --real"),
    }


def test_the_pace_is_that_of_the_set_up():
    """bench/modes.py is told of 20 ms and 1 ms, as the simulation is."""
    at = measured.set_up_of(PAPER.constants)
    line = paced.command_of(at, dict.fromkeys(at.decode, at.prompt), "--moving", 0)
    assert line[line.index("--pace") + 1] == "20.00,1.00,0.00;20.00,1.00,0.00"
    assert line[-2:] == ["--moving", "0"]


def test_a_prompt_that_is_read_takes_its_own_time():
    """100 ms more for each of two; decoding them doesn't."""
    step = at_pace(lambda *_: None, "20,0,100")
    start = time.perf_counter()
    step(
        None,
        0,
        0,
        SimpleNamespace(batch_size=2, forward_mode=SimpleNamespace(is_extend=lambda: True)),
    )
    read_s = time.perf_counter() - start
    step(
        None,
        0,
        0,
        SimpleNamespace(batch_size=2, forward_mode=SimpleNamespace(is_extend=lambda: False)),
    )
    assert read_s >= 0.22 and time.perf_counter() - start < read_s + 0.1
