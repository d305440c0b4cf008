"""Plans as data: the ranks of each role, which plans a run may take, and which can't be."""

import pytest

import placement
from config import Config
from scheduling.fusion import TAILS
from scheduling.measured import Split

FUSED = [f"fused {tail:g}" for tail in dict.fromkeys((0.2, *TAILS))]
RULED = dict(model="m", rule=("right",), judge=())  # no judge: rules alone


def judged(**settings):
    """The settings of a run that has a judge, if they don't say that it has none."""
    return Config(**dict(judge=("j",)) | settings)


def everyone(size):
    """All models and engines on all ranks."""
    return placement.colocate(tuple(range(size)), Config())


def test_plans():
    """The ranks of each role, and how many they are; in words one rank or a range."""
    expected = placement.Plan("partial", (0, 1, 2), (3,), holders=everyone(4))
    assert placement.make_plans(judged(mode="partial", rollout_ranks=3), 4) == [expected]
    assert expected.split == Split("partial", 3, 1)
    assert str(expected) == "rollout on ranks 0-2, genrm on ranks 3, actor on ranks 0-3"
    expected = placement.Plan("full", (0, 1), (0, 1), holders=everyone(2))
    assert placement.make_plans(judged(mode="full"), 2) == [expected]
    assert str(placement.Plan("partial", (), (), everyone(1))) == "actor on ranks 0"


MOVES = dict(mode="partial", rebalance=True)
THREE_JUDGES = dict(judge=("a", "b", "c"), model="m")
FULL = dict(mode="full")
TWO_JUDGES = dict(judge=("a", "b"), model="m")
TAILED = dict(mode="fused", tail=0.25)
POSSIBLE = [
    (MOVES | dict(rollout_ranks=3), 4, ["3|1", "1|3", "2|2"]),
    (dict(mode="partial"), 5, ["3|2"]),  # the half, rounded up
    (dict(mode="auto"), 4, ["2|2", "1|3", "3|1", "full", *FUSED]),
    (dict(mode="auto"), 1, ["full"]),  # nothing to split
    (MOVES | dict(rollout_tp=2), 8, ["4|4", "2|6", "6|2"]),
    (MOVES | THREE_JUDGES, 6, ["3|3", "1|5", "2|4"]),
    (MOVES | TWO_JUDGES | dict(genrm_tp=2), 8, ["4|4", "2|6"]),
    (TAILED | dict(rebalance=True), 2, ["fused 0.25", *(f"fused {t:g}" for t in TAILS)]),
    (dict(mode="auto", **RULED), 3, ["3|0"]),
    (dict(mode="full", **RULED), 3, ["full"]),
    (dict(mode="full", placement="engines=0,2 actor=1,3", **TWO_JUDGES), 4, ["full"]),
    (dict(mode="full", placement="engines=0 actor=1-2", tp=2), 3, ["full"]),
]


@pytest.mark.parametrize("changes,size,expected", POSSIBLE)
def test_plans_that_a_run_may_take(changes, size, expected):
    """The first is where it starts; every judge has an engine in each, and no engine is cut."""
    config = judged(**changes)
    plans = placement.make_plans(config, size)
    assert [str(plan.split) for plan in plans] == expected
    judges = len(config.judge_models)
    for plan in plans:
        for lead in plan.leads("rollout"):
            assert lead + config.rollout_tp <= size and lead % config.rollout_tp == 0
        asked = [plan.judge_of(lead, judges) for lead in plan.leads("genrm")]
        assert {*asked} == {*range(judges)}


def test_train_only_has_no_engine():
    """Whatever the mode: every rank trains."""
    config = Config(mode="full", train_only=True, replay="r.jsonl")
    holders = everyone(2)._replace(engines=())
    assert placement.make_plans(config, 2) == [placement.Plan("partial", (), (), holders)]


REFUSED = [
    (dict(mode="x"), 2, "--mode x is unknown; choose one of full, partial, fused, auto"),
    (dict(rollout_tp=4), 6, "--rollout-tp 4 doesn't divide 6 ranks"),
    (dict(genrm_tp=4), 6, "--genrm-tp 4 doesn't divide 6 ranks"),
    (dict(), 1, "--mode partial needs at least 2 ranks, for a rollout engine of 1 and a genrm"),
    (dict(rollout_tp=2, genrm_tp=3), 6, "--mode partial needs at least 12 ranks"),
    (dict(FULL, placement="engines=0-2 actor=3", rollout_tp=2), 4, "on neighbours from a mul"),
    (dict(FULL, placement="engines=0,2 actor=1,3", genrm_tp=2), 4, "has 2 of 4 for engines"),
    (THREE_JUDGES, 3, "at least 4 ranks, .* for each of 3 judges; this run has 3"),
    (dict(rollout_ranks=4), 4, "--rollout-ranks 4 leaves 0 of 4 ranks for genrm"),
    (dict(rollout_ranks=3, rollout_tp=2), 8, "leaves 5 of 8 ranks .*; this run takes 2, 4, 6"),
    (dict(rollout_ranks=1, **RULED), 2, "leaves 1 of 2 ranks for genrm; this run takes 2"),
]


@pytest.mark.parametrize("changes,size,message", REFUSED)
def test_plans_that_cannot_be(changes, size, message):
    """The message names the setting and the ranks that would do."""
    with pytest.raises(ValueError, match=message):
        placement.make_plans(judged(**changes), size)
