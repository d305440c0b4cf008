"""A user's own run beside a published row: what is typed for it."""

import re
import shlex
from pathlib import Path

import pytest

import run
from bench import decode
from config import parse_config
from papers import own_runs
from papers.tables import ROOT, read_constants, read_points

ROWS = read_constants(own_runs.COMMANDS)
LINES = [(name, line) for name, row in ROWS.items() for line in row["lines"]]


@pytest.mark.parametrize("name,line", LINES)
def test_every_line_can_be_typed(name, line):
    """Its flags are the program's, its ranks can have such a placement, and its points are published."""
    for words in re.findall(r"--nnodes (\d+)", line) or ["1"]:
        machines = int(words)
    before, is_run, flags = line.partition(" run.py ")
    if is_run:
        a_machine = int(re.search(r"--nproc-per-node (\d+)", before)[1])
        config = parse_config(shlex.split(flags))
        run.check_settings(config, machines * a_machine, a_machine)
        assert config.steps > own_runs.WARM_UP and config.out in ("RUN", "BASE")
    else:
        _, script, *flags = shlex.split(line)
        assert script == "bench/decode.py" and decode.parse(flags).out == Path("RUN")
    files = (ROOT / "published").glob(f"{ROWS[name]['paper']}_*.csv")
    assert {*ROWS[name]["points"]} <= {point.name for file in files for point in read_points(file)}
    assert len(ROWS[name]["points"]) == len(ROWS[name]["lines"])
