"""A user's own run beside a published row: what is typed for it, what it came to, what can't be used."""

import json
import re
import shlex
from pathlib import Path

import pytest

import run
from bench import decode
from config import parse_config
from engines.engine import Answer
from papers import own_runs
from papers.tables import ROOT, read_constants, read_points

ROWS = read_constants(own_runs.COMMANDS)
LINES = [(name, line) for name, row in ROWS.items() for line in row["lines"]]
CONFIG = dict(model="here/llama", ranks=8, device_name="H100", algorithm=["ppo"], mode="fused")
CONFIG |= dict(tail=0.2, schedule="fused", updates_per_step=8, prompts_per_step=512)
CONFIG |= dict(answers_per_prompt=1, max_new_tokens=1024, answer_tokens=0)


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


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setattr(own_runs, "KEPT", tmp_path / "own_runs.json")
    return tmp_path


def make_run(folder, seconds, **changes):
    """A run with steps of so many seconds, of 100 tokens of answers and 28 of prompts each."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    tokens = {"rollout/tokens": 100, "rollout/prompt_tokens": 28}
    rows = [{"step": n, "time/step_s": s} | tokens for n, s in enumerate(seconds)]
    rows.append({"step": len(rows), "eval/accuracy": 1.0})
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def test_a_runs_tokens_are_those_of_prompts_and_answers(kept, capsys):
    """Of the steps after the first three, beside figure 9's, which a step of it is simulated for."""
    folder = make_run(kept / "run", [9, 9, 9, 2.0, 3.0], answer_tokens=1024, mode="full")
    assert own_runs.main(["hybridflow-7b-8", str(folder)]) == 0
    found = own_runs.own_rows()["hybridflow-7b-8"]
    assert (found["published"], found["measured"], found["unit"]) == (5500, 256 / 5, "tokens/s")
    assert 5000 < found["simulated"] < 6000 and "measured: 51.2" in capsys.readouterr().out
    unlike = "--algorithm ppo --schedule fused --prompts-per-step 512"
    assert found["run"] == f"llama on 8 x H100, 2 steps, unlike the line to type: {unlike}"


def test_two_runs_make_a_ratio(kept, monkeypatch):
    """Samples a second of the fused run over the other's; the row is kept beside others."""

    def simulated(paper):
        return [paper.row(p, {"RLHFuse": 30.0, "Base": 20.0}[p.system]) for p in paper.points]

    monkeypatch.setitem(own_runs.FIGURES["rlhfuse"], "7", simulated)
    runs = [make_run(kept / "fused", [9, 9, 9, 2.0]), make_run(kept / "base", [9, 9, 9, 3.0])]
    (kept / "own_runs.json").write_text('{"another": {}}')
    found = own_runs.add("rlhfuse-1024-13-33", runs)
    assert (found["measured"], found["unit"]) == (pytest.approx(1.5), "x")
    assert found["published"] == pytest.approx(24.66 / 17.46) and found["simulated"] == 1.5
    assert [*own_runs.own_rows()] == ["another", "rlhfuse-1024-13-33"]


def test_a_decode_pace(kept):
    (kept / "decode.json").write_text('{"fastest": 100.0, "slowest": 50.0, "run": "a run"}')
    paces = [own_runs.add(f"h20-{part}", [kept])["measured"] for part in ("begin", "end")]
    assert paces == [100.0, 50.0]


def test_paces_by_hand():
    """Two answers of a token and four parts of 32: the first part took 1 s, the last 4 s, all four 7 s."""
    parts = []
    for end, count in zip((0.0, 1.0, 2.0, 3.0, 7.0), (1, 32, 32, 32, 32), strict=True):
        parts += [Answer(index, [5] * count, [], "", [], end=end) for index in (0, 1)]
    assert decode.paces(parts) == pytest.approx({"begin": 64, "end": 16, "in all": 256 / 7})


def test_a_run_without_a_counted_step_is_named(kept):
    """It is too short, also with a row that was cut off, or it is an older version's."""
    folder = make_run(kept / "run", [1, 1, 1])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 4, "time/step_s": 1')
    with pytest.raises(ValueError, match="run: no step after the first 3, which"):
        own_runs.add("hybridflow-7b-8", [folder])
    (folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="run is of an older version"):
        own_runs.add("hybridflow-7b-8", [folder])
