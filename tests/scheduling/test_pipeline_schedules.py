"""Pipeline schedules: by hand, against every constraint, and on RLHFuse's published instances."""

import json
import os
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config import Config
from extras.pipelines import tables
from extras.pipelines.fused import MOST_MEMORY, fused
from extras.pipelines.tables import Pipe, Task, bound, evaluate, one_after_another
from reproduce.papers.rlhfuse import read_instances
from runtime.errors import UserError
from scheduling.pipeline import SCHEDULES, schedule_of
from tests import ROOT
from tests.support.patience import run_process

TABLE3 = ROOT / "reproduce/papers/published" / "rlhfuse_table3.json"
INSTANCES = read_instances(TABLE3)
PUBLISHED = {instance["name"]: instance for instance in json.loads(TABLE3.read_text())}


def words(tasks: list[Task]) -> str:
    """Read tasks: F10 is the forward pass of stage 1 over micro-batch 0."""
    named = [f"{'FB'[task.backward]}{task.stage}{task.micro_batch}" for task in tasks]
    return " ".join(named)


def table_from(*ranks: str) -> list[list[Task]]:
    return [[Task(0, int(w[1]), w[0] == "B", int(w[2])) for w in rank.split()] for rank in ranks]


def test_1f1b_by_hand():
    """Two ranks, three micro-batches; forward takes 1, backward 2."""
    pipes = [Pipe((0, 1), 3)]
    table = one_after_another(pipes)
    assert list(map(words, table)) == ["F00 F01 B00 F02 B01 B02", "F10 B10 F11 B11 F12 B12"]
    latency, memory, starts = evaluate(pipes, table)
    assert (latency, memory) == (12, 2) == (bound(pipes), tables.base_memory(pipes))
    assert [starts[task] for task in table[0]] == [0, 1, 4, 6, 7, 10]
    assert [starts[task] for task in table[1]] == [1, 2, 4, 5, 7, 8]


def test_a_table_that_cannot_be_run():
    with pytest.raises(ValueError, match="ranks wait for each other"):
        evaluate([Pipe((0, 1), 1)], table_from("F00 B00", "B10 F10"))


def check_order(pipes: list[Pipe], table) -> None:
    """Check that each task is once in its rank, and a stage's passes in order, because sums depend on it."""
    count = 0
    for number, pipe in enumerate(pipes):
        for stage, rank in enumerate(pipe.ranks):
            for backward in (False, True):
                same = [t for t in table[rank] if t[:3] == (number, stage, backward)]
                assert [t.micro_batch for t in same] == list(range(pipe.micro_batches))
                count += len(same)
    assert count == sum(map(len, table))


def check(pipes: list[Pipe], table) -> tuple[float, float]:
    """Check latency and peak memory by definition: a task starts as soon as what it needs has ended."""
    check_order(pipes, table)
    starts, ends, peak = evaluate(pipes, table).starts, {}, 0.0
    for task, start in starts.items():
        pipe = pipes[task.pipe]
        ends[task] = start + (pipe.backward if task.backward else pipe.forward)
    for tasks in table:
        held = 0.0
        for i, task in enumerate(tasks):
            forward = not task.backward
            needed = [task._replace(stage=task.stage + (-1 if forward else 1))]
            if task.backward:
                needed.append(task._replace(backward=False))
            if i > 0:
                needed.append(tasks[i - 1])
            assert starts[task] == max([ends[one] for one in needed if one in ends], default=0.0)
            held += pipes[task.pipe].memory * (1 if forward else -1)
            peak = max(peak, held)
        assert abs(held) < 1e-9
    return max(ends.values()), peak


durations = st.sampled_from([0.3, 0.5, 1.0, 1.7, 2.0, 5.0])


@st.composite
def several_pipes(draw) -> list[Pipe]:
    """Draw one to three pipelines over all of up to five ranks or neighboring ones, in either direction."""
    size, found = draw(st.integers(1, 5)), []
    for _ in range(draw(st.integers(1, 3))):
        first = draw(st.integers(0, size - 1))
        ranks = tuple(range(first, draw(st.integers(first + 1, size))))
        ranks = ranks[::-1] if draw(st.booleans()) else ranks
        numbers = draw(st.tuples(st.integers(1, 6), durations, durations, durations))
        found.append(Pipe(ranks, *numbers))
    return found


@pytest.mark.parametrize("schedule", [one_after_another, fused])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_schedule(schedule, data):
    """It must be valid, evaluated exactly, and no faster than the bound; fused is no slower than in turns."""
    pipes = data.draw(several_pipes())
    table = schedule(pipes)
    latency, memory, _ = evaluate(pipes, table)
    assert (latency, memory) == check(pipes, table)
    assert latency >= bound(pipes) * (1 - 1e-9)
    if schedule is fused:
        assert latency <= evaluate(pipes, one_after_another(pipes)).latency * (1 + 1e-9)
        assert memory <= MOST_MEMORY * tables.base_memory(pipes) * (1 + 1e-6)


def test_stages_need_an_extra(monkeypatch):
    """Without it, the core must refuse a size of pipelines instead of running stages as whole models."""
    assert schedule_of(Config(pp=2)) is SCHEDULES["1f1b"]
    monkeypatch.delitem(SCHEDULES, "1f1b")
    with pytest.raises(UserError, match=r"--pp 2.*no extra has the row '1f1b'"):
        schedule_of(Config(pp=2))


def test_every_process_finds_the_same_table():
    """The order of a process's sets must not matter: ranks that disagreed would wait for each other."""
    pipes = [Pipe((0, 1, 2), 5, 1.0, 1.7), Pipe((2, 1, 0), 3, 0.6, 1.1), Pipe((1, 0), 2)]
    program = f"from extras.pipelines.fused import *; print(repr(fused({pipes!r})))"
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        found = run_process(sys.executable, "-c", program, env=environment).stdout
        assert found.strip() == repr(fused(pipes))


@pytest.mark.parametrize("name", INSTANCES)
def test_fused_is_as_fast_as_published(name):
    """An order must meet the bound; 65B/33B 16/16 64/64 is faster than published."""
    pipes, published = INSTANCES[name], PUBLISHED[name]
    latency, memory = check(pipes, fused(pipes))
    assert latency == published["bound"] <= published["published"]["latency"]
    assert memory <= MOST_MEMORY * tables.base_memory(pipes) * (1 + 1e-9)
