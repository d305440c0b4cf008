"""HybridFlow's figures: what must agree, what changes them, and that no published value produces ours."""

import statistics
from collections import Counter
from fractions import Fraction
from functools import partial

import pytest

import controller
from reproduce.bench import sensitivity
from reproduce.bench.hybridflow_controllers import step_s
from reproduce.papers import hybridflow, mapping
from reproduce.papers.hybridflow import FIGURES, PPO, REMAX, SAFE, setting_of, table_2
from reproduce.papers.tables import ROOT, Paper, Point, read_constants, read_points, skill
from sample import flat

CONSTANTS = read_constants(ROOT / "hybridflow.toml")
FILES = sorted((ROOT / "published").glob("hybridflow_*.csv"))
POINTS = [point for file in FILES for point in read_points(file)]
PAPER = Paper(POINTS, CONSTANTS)
FORMS = ("14", "table 2")


def point(figure, setting, gpus, system="HybridFlow", metric="throughput", value="1000"):
    source = "0.02", "FIG", "a test", "1", "", "f:2"
    return Point(figure, system, setting, str(gpus), metric, "x", value, *source)


def median_error(rows):
    return statistics.median(abs(row.error) for row in rows if row.kind == "predicted")


def test_forms_are_near():
    """They must match Table 2 to the last digit, and transitions and generation by what was fitted."""
    rows = {figure: FIGURES[figure](PAPER) for figure in (*FORMS, "15")}
    own = [row for row in rows["14"] if row.system == "HybridFlow"]
    assert all(row.simulated == pytest.approx(row.published, rel=1e-12) for row in rows["table 2"])
    kinds = Counter(row.kind for row in own)
    assert kinds == {"fitted": 3, "follows": 4, "predicted": 5, "implied": 2}
    assert median_error(own) <= 0.15
    assert {row.how for row in rows["14"] if row.simulated} == {"closed form"}
    assert {row.kind for row in rows["15"]} == {"fitted"} and len(rows["15"]) == 8
    assert max(abs(row.error) for row in rows["15"]) < 0.2


@pytest.fixture(scope="module")
def figure_9():
    return [row for row in FIGURES["9"](PAPER) if row.published and row.simulated]


def test_figure_9_has_the_placement_that_the_search_finds(figure_9):
    """Its bars must be those of the search, nearer than with everything colocated and than a power law."""
    colocated = partial(hybridflow.throughput, figure="9", placements={"HybridFlow": (PPO,)})(PAPER)
    known = {row.name: row for row in colocated}
    assert any(row.simulated > 1.05 * known[row.name].simulated for row in figure_9)
    assert max(abs(row.error) for row in figure_9 if row.kind == "fitted") <= 0.06
    found = skill(figure_9)
    assert found.simulated.median < 0.045 < 0.07 < found.trivial.median and found.count == 7


def test_the_constants_are_those_of_the_fit():
    """Fitting `compute` again on its four points must find what is written down."""
    fitted = PAPER.fitted("compute")
    assert [p.name for p in fitted] == CONSTANTS["compute"]["fitted_on"] and len(fitted) == 4
    start = sensitivity.changed(PAPER, "compute", half=4400, update_s=0.8)
    found = sensitivity.refit(start, fitted).constants["compute"]
    assert found["half"] == pytest.approx(CONSTANTS["compute"]["half"], rel=1e-3)
    assert found["update_s"] == pytest.approx(CONSTANTS["compute"]["update_s"], rel=1e-3)


def test_sensitivity_names_what_moves(monkeypatch):
    """More memory must change few rows, and may give a placement room; the text's claims stand beside."""
    entered = PAPER._replace(points=[p for p in POINTS if p.value])
    monkeypatch.setattr(sensitivity, "VARIED", {"device": ("memory",), "speeds": ("mfu",)})
    memory, mfu = (line.split(" | ") for line in sensitivity.by_constant(entered).splitlines()[2:])
    assert memory[:2] == ["| memory", "assumed, data sheet"]
    assert float(memory[3]) < 2 and float(mfu[3]) > 10
    claims = sensitivity.claims(entered)
    assert "| 66.8 % | 42.5 % | 42.5 % |" in claims and "| 44.8 % | 38.0 % |" in claims


def test_remax_generates_twice():
    """Its second answer must cost a generation and a scoring more, and no other pass."""
    models, gpus, task, speeds = setting_of(PAPER, point("10", "7B", 8), REMAX)
    assert task.answers == 2
    for role, factors in (("actor", (2, 0, 1)), ("reward", (0, 2, 0)), ("reference", (0, 1, 0))):
        sides = []
        for answers in (1, 2):
            asked = task._replace(answers=answers)
            sides.append([*mapping.choices_of(role, models[role], gpus, 3e9, asked, speeds)])
        assert sides[0]
        for once, twice in zip(*sides, strict=True):
            push_s = (
                mapping.reshard_s(models[role], once.sizes[role], speeds) if role == "actor" else 0
            )
            expected = [factor * each for factor, each in zip(factors, once.stages, strict=True)]
            expected[0] -= push_s
            assert twice.stages == pytest.approx(expected)


def test_every_setting_without_a_value_is_predicted():
    """Figures 9 to 14 and RLHFuse's 7 and 8: none may be skipped, and none has a value."""
    rows = [row for figure in ("9", "11", "12", "14") for row in FIGURES[figure](PAPER)]
    kept = [row for row in rows if row.kind in ("kept back", "implied")]
    assert Counter(row.figure for row in kept) == {"9": 3, "11": 14, "12": 19, "14": 6}
    assert all(row.published is None and row.simulated for row in kept)
    assert {
        (r.figure, r.setting) for r in kept if r.system == "HybridFlow" and r.kind == "implied"
    } == {("9", "13B"), ("9", "34B"), ("12", "34B"), ("14", "70B")}


@pytest.mark.parametrize(
    "roles, figure, setting, gpus",
    [(PPO, "9", "7B", 16), (SAFE, "11", "7B", 16), (PPO, "12", "13B", 24)],
)
def test_controllers_take_what_the_closed_form_says(roles, figure, setting, gpus, monkeypatch):
    """One more scorer must take the time of its pass and the room for its weights; 3 copies get 43 of 128."""
    trained, steps = [], controller.learn

    async def count(c, shares):
        trained.append(len(flat(shares.of(c.devices.actor))))
        return await steps(c, shares)

    monkeypatch.setattr(controller, "learn", count)
    at = setting_of(PAPER, point(figure, setting, gpus), roles)
    found = mapping.best_of((roles,), *at)
    assert step_s(at, found) == pytest.approx(found.seconds, rel=1e-3)
    # the product's own loop ran
    sizes = found.choices[0].sizes["actor"]
    assert len(trained) == gpus and sum(trained) == 1024 * sizes.pp * sizes.tp


def test_no_published_value_makes_ours():
    """With other values, and two models' labels swapped, a setting's row must stay the same."""
    swap, same = {"7B": "13B", "13B": "7B"}, 0
    for figure in FORMS:
        points = [p for p in PAPER.of(figure) if p.system != "OpenRLHF"]
        new = [p._replace(setting=swap.get(p.setting, p.setting), value="77") for p in points]
        before, after = (FIGURES[figure](PAPER._replace(points=each)) for each in (points, new))
        known = {p.name: row.simulated for p, row in zip(points, before, strict=False)}
        for p, row in zip(new, after, strict=False):
            assert known.get(p.name, row.simulated) == row.simulated
            same += p.name in known
    assert same > 50


@pytest.mark.parametrize(
    "sizes, deepspeed, vanilla, ours",
    [
        ((1, 4, 2, 2), ("7/8", 1, "1/8"), ("3/4", 1, "1/4"), ("1/4", "1/2", 0)),
        ((8, 8, 1, 8), ("63/64", 1, "1/64"), ("63/64", 1, "1/64"), ("7/64", "1/8", 0)),
        ((2, 2, 2, 1), ("7/8", 1, "1/8"), ("3/4", 1, "1/4"), ("3/4", 1, 0)),
        ((1, 1, 4, 1), ("3/4", 1, "1/4"), (0, 1, 1), (0, 1, 0)),
    ],
)
def test_table_2_by_hand(sizes, deepspeed, vanilla, ours):
    costs = [tuple(map(Fraction, cost)) for cost in (deepspeed, vanilla, ours)]
    assert list(table_2(*sizes)) == ["DS-Chat", "HybridFlow-V", "HybridFlow"]
    assert [tuple(cost) for cost in table_2(*sizes).values()] == costs
