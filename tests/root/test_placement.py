"""Splits: the ranks of each role, which splits a run may take, and which can't be."""

import pytest

import placement
from config import Config
from extras.fused.tail import TAILS
from modes import lay_out
from scheduling.measured import Split

FUSED = [f"fused {tail:g}" for tail in dict.fromkeys((0.2, *TAILS))]
RULED = dict(model="m", rule=("right",), judge=())  # no judge, only rules


def judged(**settings):
    return Config(**dict(judge=("j",)) | settings)


def everyone(size):
    return placement.colocate(tuple(range(size)), Config())


def test_splits():
    """A split is the ranks of each role and their number; its text is one rank or a range."""
    split = Split("partial", 3, 1)
    assert lay_out(judged(mode="partial", rollout_ranks=3), 4) == (everyone(4), [split])
    words = "rollout on ranks 0-2, genrm on ranks 3, actor on ranks 0-3"
    assert everyone(4).in_words(split) == words
    assert lay_out(judged(mode="full"), 2) == (everyone(2), [Split("full", 2, 2)])
    assert everyone(2).ranks("rollout", Split("full", 2, 2)) == (0, 1)
    assert everyone(1).in_words(Split("partial", 0, 0)) == "actor on ranks 0"


MOVES = dict(mode="partial", rebalance=True)
THREE_JUDGES = dict(judge=("a", "b", "c"), model="m")
FULL = dict(mode="full")
TWO_JUDGES = dict(judge=("a", "b"), model="m")
TAILED = dict(mode="fused", tail=0.25)
POSSIBLE = [
    (MOVES | dict(rollout_ranks=3), 4, ["3|1", "1|3", "2|2"]),
    (dict(mode="partial"), 5, ["3|2"]),  # half, rounded up
    (dict(mode="full"), 1, ["full"]),  # nothing to split
    (MOVES | dict(rollout_tp=2), 8, ["4|4", "2|6", "6|2"]),
    (MOVES | THREE_JUDGES, 6, ["3|3", "1|5", "2|4"]),
    (MOVES | TWO_JUDGES | dict(genrm_tp=2), 8, ["4|4", "2|6"]),
    (TAILED | dict(rebalance=True), 2, ["fused 0.25", *(f"fused {t:g}" for t in TAILS)]),
    (dict(MOVES, **RULED), 3, ["3|0"]),
    (dict(mode="full", **RULED), 3, ["3|0"]),
    (dict(mode="full", placement="engines=0,2 actor=1,3", **TWO_JUDGES), 4, ["full"]),
    (dict(mode="full", placement="engines=0 actor=1-2", tp=2), 3, ["full"]),
]


@pytest.mark.parametrize("changes,size,expected", POSSIBLE)
def test_splits_that_a_run_may_take(changes, size, expected):
    """The first is where it starts; every judge must have an engine in each, and no engine is cut."""
    config = judged(**changes)
    placed, splits = lay_out(config, size)
    papers = [str(split) for split in splits if split.mode in ("partial", "full", "fused")]
    assert papers == expected
    judges = len(config.judge_models)
    for split in splits:
        for lead in placed.leads("rollout", split):
            assert lead + config.rollout_tp <= size and lead % config.rollout_tp == 0
        asked = [placed.judge_of(lead, judges) for lead in placed.leads("genrm", split)]
        assert {*asked} == {*range(judges)}


REFUSED = [
    (dict(FULL, rebalance=True), 2, "--rebalance: no rule moves the split of --mode full"),
    (dict(mode="x"), 2, "--mode x is unknown; choose one of .*partial, .*full, .*fused"),
    (dict(rollout_tp=4), 6, "--rollout-tp 4 doesn't divide 6 ranks"),
    (dict(genrm_tp=4), 6, "--genrm-tp 4 doesn't divide 6 ranks"),
    (dict(), 1, "--mode partial needs more ranks than 1 for a rollout engine and a genrm"),
    (dict(rollout_tp=2, genrm_tp=3), 6, "--mode partial needs more ranks than 6"),
    (dict(FULL, placement="engines=0-2 actor=3", rollout_tp=2), 4, "on adjacent ranks that"),
    (dict(FULL, placement="engines=0,2 actor=1,3", genrm_tp=2), 4, "needs more ranks than 2"),
    (THREE_JUDGES, 3, r"more ranks than 3 for .* for each judge \(3\)"),
    (dict(rollout_ranks=4), 4, "--rollout-ranks 4 leaves 0 of 4 ranks for genrm"),
    (dict(rollout_ranks=3, rollout_tp=2), 8, "leaves 5 of 8 ranks .*; this run takes 2, 4, 6"),
    (dict(rollout_ranks=1, **RULED), 2, "leaves 1 of 2 ranks for genrm; this run takes 2"),
]


@pytest.mark.parametrize("changes,size,message", REFUSED)
def test_splits_that_cannot_be(changes, size, message):
    """The message must name the setting and the ranks that would work."""
    with pytest.raises(ValueError, match=message):
        lay_out(judged(**changes), size)
