"""The predicted step of each plan: from a finished run's folder, or from a data sheet."""

import json
import os
import sys
from dataclasses import asdict, replace

import pytest

from config import parse_config
from reproduce.simulation import plans
from reproduce.simulation.cluster import Cluster, Lengths, Simulation, Workload
from reproduce.simulation.costs import Decode, Passes
from reproduce.simulation.engine import Moves
from reproduce.simulation.finished import APART, config_from, costs_like, read_run
from reproduce.simulation.plans import Plan, main, plans_of, simulate
from tests import ROOT
from tests.support.patience import run_process

H20 = ROOT / "examples" / "h20.toml"
ROLLOUT = Decode(0.02, 0.001, read=0.02, apart=APART)
JUDGE = Decode(0.03, 0.004, read=0.03, apart=APART)
CLUSTER = Cluster(
    dict(rollout=ROLLOUT, genrm=JUDGE),
    Passes(3e-4),
    moves=dict(rollout=Moves(0.4, 0.4, 0.2), genrm=Moves(0.4, 0.4), train=Moves(0.3, 0.3)),
    meeting_s=0.05,
)
WORK = Workload(20, Lengths(60, 0.6, 200), Lengths(30, 0.0, 60), keep=0.8)
SIZES = dict(prompts_per_step=16, answers_per_prompt=8)
RANKS = 4


def simulated(mode, steps=5, work=WORK, cluster=CLUSTER, **settings):
    return Simulation(mode, RANKS, work, cluster, steps=steps, **SIZES | settings)


def seconds_of(facts):
    return (facts[-1].ended_s - facts[0].ended_s) / (len(facts) - 1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return finish(simulated("full", algorithm=("ppo",)), tmp_path_factory.mktemp("run"))


def finish(run, out):
    """Run it; return its folder, with what the next one needs of it."""
    (out / "spans").mkdir()
    for c in run.controllers:
        c.timeline.folder = out / "spans"
    facts = run.run()
    (out / "config.json").write_text(json.dumps(asdict(run.config) | {"ranks": RANKS}))
    metrics, history = [], []
    for number, step in enumerate(facts):
        began = facts[number - 1].ended_s if number else 0.0
        times = {f"time/{name}_s": step.seconds[name] for name in ("save", *plans.PHASES)}
        times |= {"time/step_s": step.ended_s - began, "reward/zero_std_frac": 0.2}
        metrics.append(json.dumps({"step": number} | times) + "\n")
        history.append(json.dumps({"step": number} | asdict(step.stats)) + "\n")
    (out / "metrics.jsonl").write_text("".join(metrics))
    (out / "history.jsonl").write_text("".join(history))
    return out


PLANS = [
    dict(mode="full"),
    dict(mode="partial", rollout_ranks=1),
    dict(mode="partial", rollout_ranks=3),
    dict(mode="fused", tail=0.2),
    dict(mode="full", placement="split"),
    dict(mode="full", placement="standalone", ahead=1),
]


def test_a_run_tells_what_other_plans_take(finished):
    """No setting has an engine's step time: one mode's requests must yield it, checked by simulation."""
    known = read_run(finished)
    rollout, _ = known.paces
    assert rollout[:2] == pytest.approx([0.02, 0.001], rel=0.15)
    assert known.keep == pytest.approx(0.8) and known.seconds["sync"] == pytest.approx(0.2)
    assert known.engine_s == pytest.approx(0.4, rel=0.1)
    costs = costs_like(known, config_from(known.settings))
    for settings in PLANS:
        true = simulated(**settings, algorithm=("ppo",)).run()
        true = seconds_of(true[:-1] if "ahead" in settings else true)
        config = replace(config_from(known.settings), **settings)
        ours = simulate(costs, RANKS, Plan("", config))
        assert ours.seconds == pytest.approx(true, rel=0.12), settings


def test_the_plans_of_many_ranks():
    config = parse_config(["--algorithm", "ppo"])
    found, left_out = plans_of(config, 64)
    names = [plan.name for plan in found]
    assert len(names) == len({*names}) == 20
    assert {"colocate: full", "colocate: 32|32", "split: full"} < {*names}
    assert "56 of 63 splits of colocate" in left_out
    found, left_out = plans_of(parse_config(["--placement", "engines=0 actor=1"]), 2)
    first, second, *_ = (plan.name for plan in found)
    assert (first, second) == ("engines=0 actor=1: full", "engines=0 actor=1, ahead: full")
    assert any("has no critic" in line for line in left_out)
    assert not any("is not one of" in line for line in left_out), "a row that isn't a name"


def test_rules_alone_need_no_judge(tmp_path, capsys, monkeypatch):
    """A plan is then a placement; rewards must differ as often as the settings specify."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = str(ROOT / "demo" / "models" / "written" / "actor")
    words = ["--devices", str(H20), "--model", model, "--rule", "right", "--out", str(tmp_path)]
    sizes = "--max-new-tokens 64 --prompts-per-step 4 --max-model-len 256"
    assert main(["--dry-run", "--simulate", *words, *sizes.split()]) == 0
    said = capsys.readouterr().out
    assert [line.split("  ")[1] for line in said.splitlines()[2:5]].count("colocate") == 1
    assert "GUESSED" in said and "* answers are one update old" in said
    assert "from a data sheet are off wasn't measured" in said
    assert "Such predictions were off" not in said, "that is the error of --like"
    assert (tmp_path / "plans.png").stat().st_size > 1000


@pytest.mark.parametrize(
    "factor, shown", [(1.0, [True, False, False]), (0.75, [False, True, True])]
)
def test_a_table_that_misses_the_run_itself(finished, capsys, monkeypatch, factor, shown):
    """If the run itself is 10% off or more, a warning with reasons must replace the usual error."""
    known = read_run(finished)
    known.seconds["step"] *= factor
    monkeypatch.setattr(plans, "read_run", lambda run: known)
    monkeypatch.setattr(plans, "plans_of", lambda config, ranks: ([Plan("own", config)], []))
    plans.report(["--like", str(finished), "--algorithm", "ppo", "--out", str(finished)])
    texts = ("Such predictions were off by", "% slower than that run. Possible", "only 4 counted")
    printed = capsys.readouterr().out
    assert [text in printed for text in texts] == shown


def test_the_words_are_run_pys():
    """They are removed before the settings are read, which know none of them; a mistake is one line."""
    env = os.environ | {"WORLD_SIZE": "2"}
    for words, said in (
        ("--simulate --like x", "--simulate needs --dry-run"),
        ("--dry-run --simulate", "--simulate needs one of --like RUN"),
        ("--dry-run --simulate --like none", "--like none: no config.json in it"),
        ("--dry-run --like x", "unrecognized arguments: --like x"),
    ):
        done = run_process(sys.executable, "run.py", *words.split(), env=env)
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1
