"""Pools: who is asked next, what was asked, and engines that change hands when the split moves."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
from fakes import simulate
from hypothesis import given
from hypothesis import strategies as st

from engines.pool import Pool, RoleLoad
from engines.watch import News


def pool_of(*outstanding, rank=0, models=None):
    """A pool of engines that await so many tokens, as the controller of `rank` sees it."""
    models = models or [0] * len(outstanding)
    engines = [
        SimpleNamespace(rank=r, outstanding=tokens, model=model, capacity=4, awake=True, on_request=None, up=True, role="rollout")
        for r, (tokens, model) in enumerate(zip(outstanding, models, strict=True))
    ]
    return Pool(engines, SimpleNamespace(rank=rank, size=len(engines)), SimpleNamespace())


@pytest.mark.parametrize(
    "outstanding,others,rank,asked",
    [
        ((5, 3, 4), {}, 0, 1),  # the fewest tokens
        ((0, 0, 0), {}, 0, 0),  # ties go round by rank, so that controllers differ
        ((0, 0, 0), {}, 1, 1),
        ((0, 0, 0), {}, 5, 2),
        ((2, 0, 0), {}, 0, 1),
        ((0, 2, 3), {0: 9}, 0, 1),  # what the others await counts
        ((0, 2, 3), {0: 9, 1: 2}, 0, 2),
    ],
)
def test_route(outstanding, others, rank, asked):
    """By what this controller awaits, and the others when they last met."""
    pool = pool_of(*outstanding, rank=rank)
    controllers = [{}] * 6
    controllers[(rank + 1) % 6] = others
    pool.hear([News(awaited, "up") for awaited in controllers])
    assert pool.route().rank == asked


def test_its_own_tokens_are_not_counted_twice():
    """What this controller told the others is in the handle already."""
    pool = pool_of(4, 6, rank=1)
    pool.hear([News({0: 1, 1: 0}, "up"), News({0: 4, 1: 6}, "up")])
    assert pool.route().rank == 0 and pool.outstanding() == {0: 4, 1: 6}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 2), st.booleans()), min_size=1, max_size=8), st.data())
def test_route_is_the_least_of_those_that_may_be_asked(engines, data):
    """Of the model that is asked for, in time before late, by tokens; against all of them sorted."""
    own, others, models, late = zip(*engines, strict=True)
    model, rank = data.draw(st.sampled_from(models)), data.draw(st.integers(0, 7))
    pool = pool_of(*own, rank=rank, models=models)
    pool.hear([News({}, "up")] * 8 + [News(dict(enumerate(others)), "up")])
    for engine, is_late in zip(pool.engines, late, strict=True):
        if is_late:
            pool.avoid(engine)
    asked = pool.route(model)
    may = [r for r in range(len(engines)) if models[r] == model]
    assert asked.model == model
    assert (late[asked.rank], own[asked.rank] + others[asked.rank]) == min((late[r], own[r] + others[r]) for r in may)


def test_late_engines_are_asked_last_until_the_plan_changes():
    """With none in time, the late one is asked."""
    pool = pool_of(0, 50)
    pool.avoid(pool.engines[0])
    assert pool.route().rank == 1
    pool.avoid(pool.engines[1])
    assert pool.route().rank == 0
    pool.awake = False
    pool.assign((0, 1))
    pool.avoid(pool.engines[0])
    assert pool.route().rank == 1


def test_the_split_moves_only_while_all_sleep():
    """An engine that is awake and out of the plan would never be put to sleep."""
    pool = pool_of(0, 0, 0)
    with pytest.raises(AssertionError, match="while every engine sleeps"):
        pool.assign((0,))
    pool.awake = False
    pool.assign((0, 2))
    assert [engine.rank for engine in pool.engines] == [0, 2] and len(pool.all_engines) == 3
    assert [engine.rank for engine in pool.own] == [0]


def test_role_load_by_hand():
    """Two requests of 4 s and 2 s that overlap for 2 s: 6 request-seconds, and 2 x 2 + 2 x 4 over 6 in flight as they see it."""
    load = RoleLoad.of([(0.0, 4.0, 40, 10, 5), (1.0, 3.0, 20, 10, 0)], wakes=1)
    assert load == RoleLoad(60, 40, 6.0, 10 / 6, 20, 5, 1)
    assert RoleLoad.of([]) == RoleLoad()
    assert RoleLoad.total([load, load, RoleLoad()]) == RoleLoad(120, 40, 12.0, 20 / 6, 40, 10, 1)


# ---------------------------------------------------------------- moves, in a whole run


def slow_judges(servers):
    """genrm takes nearly all of the time: another split may seem better."""
    for server in servers:
        server.server.pace = 0.05 if server.role == "genrm" else 0.002


@pytest.mark.parametrize("mode,rollout_tp", [("partial", 1), ("auto", 1), ("auto", 2)])
def test_engines_change_hands_when_the_split_moves(mode, rollout_tp):
    """What is newly asked was pushed the version of its step; the log and the marks tell each move, the same on every rank."""
    size, steps = 4 * rollout_tp, 20
    settings = dict(rebalance=True, rollout_ranks=3 * rollout_tp if mode == "partial" else 0, rollout_tp=rollout_tp)
    jobs, _ = simulate(mode, size, steps=steps, prompts_per_step=16, eval_every=100, prepare=slow_judges, **settings)
    splits = [load.plan.split for load in jobs[0].state.history] + [jobs[0].plan.split]
    moved = [(step, now) for step, (before, now) in enumerate(pairwise(splits)) if before != now]
    assert moved
    for job in jobs:
        assert job.state.history == jobs[0].state.history and job.plan == jobs[0].plan
        assert [mark.text for mark in job.report.marks if mark.kind == "split"] == [split for _, split in moved]
        assert [note.split(":")[0] for note in job.report.notes if "->" in note] == [f"step {step + 1}" for step, _ in moved]
        assert [mark.text for mark in job.report.marks if mark.kind == "weights"] == [f"v{step + 1}" for step in range(steps)]
    for step in range(steps):  # the requests of a step went to the engines of its plan and no others
        plan = jobs[0].state.history[step].plan
        spans = [span for job in jobs for span in job.report.steps[step][3]]
        for role in ("rollout", "genrm"):
            asked = {span.rank for span in spans if span.name == role}
            assert asked and asked <= set(plan.leads(role))
        wrote = {version for job in jobs for s in job.report.steps[step][1].kept for version in s.versions}
        assert wrote <= {step}
    asked = [request for engine in jobs[0].rollout.all_engines for request in engine.server.asked]
    assert {version for _, version in asked} == set(range(steps + 1))  # also the last evaluation's


def test_judges_take_turns_on_the_genrm_engines():
    """Each judge is asked on engines of its own model, as many times as the other; the reward needs both."""
    jobs, _ = simulate("partial", 4, judge=("A", "B"), rollout_ranks=2, steps=2)
    requests = {engine.model: engine.server.requests for engine in jobs[0].genrm.all_engines if engine.server.requests}
    assert set(requests) == {0, 1} and requests[0] == requests[1]
    samples = [s for job in jobs for _, served, _, _ in job.report.steps for s in served.kept]
    assert samples and all(s.reward in (0.0, 1.0) and "judge 1:" in s.critique for s in samples if ">" in "".join(map(chr, s.response)))
