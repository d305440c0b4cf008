"""Pipeline schedules: by hand, against every constraint, and on RLHFuse's published instances."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.schedules import draw_passes, print_instances
from reporting.timeline import PassSpan, Records
from scheduling.pipeline import (
    MOST_MEMORY,
    SCHEDULES,
    Pipe,
    Task,
    base_memory,
    bound,
    evaluate,
    fused,
    interleaved,
    one_after_another,
    read_instances,
)

ROOT = Path(__file__).parent.parent
TABLE3 = Path(__file__).parent.parent / "papers" / "published" / "rlhfuse_table3.json"
INSTANCES = read_instances(str(TABLE3))
PUBLISHED = {instance["name"]: instance for instance in json.loads(TABLE3.read_text())}


def words(tasks: list[Task]) -> str:
    """F10 is the forward pass of stage 1 over micro-batch 0."""
    return " ".join(
        f"{'B' if task.backward else 'F'}{task.stage}{task.micro_batch}" for task in tasks
    )


def table_from(*ranks: str) -> list[list[Task]]:
    return [[Task(0, int(w[1]), w[0] == "B", int(w[2])) for w in rank.split()] for rank in ranks]


# ---------------------------------------------------------------- by hand


def test_1f1b_by_hand():
    """Two ranks, three micro-batches; forward 1, backward 2."""
    pipes = [Pipe((0, 1), 3)]
    table = one_after_another(pipes)
    assert [words(tasks) for tasks in table] == [
        "F00 F01 B00 F02 B01 B02",
        "F10 B10 F11 B11 F12 B12",
    ]
    latency, memory, starts = evaluate(pipes, table)
    assert (latency, memory) == (12, 2) == (bound(pipes), base_memory(pipes))
    assert [starts[task] for task in table[0]] == [0, 1, 4, 6, 7, 10]
    assert [starts[task] for task in table[1]] == [1, 2, 4, 5, 7, 8]


def test_interleaved_by_hand():
    """Megatron-LM's order for two ranks with two stages each and four micro-batches; a sixth less idle."""
    pipes = [Pipe((0, 1, 0, 1), 4)]
    assert [words(tasks) for tasks in interleaved(pipes)] == [
        "F00 F01 F20 F21 F02 B20 F03 B21 F22 B00 F23 B01 B22 B23 B02 B03",
        "F10 F11 F30 B30 F31 B31 F12 B10 F13 B11 F32 B32 F33 B33 B12 B13",
    ]
    plain = [Pipe((0, 1), 4, forward=2, backward=4)]
    assert evaluate(pipes, interleaved(pipes)).latency == 27
    assert evaluate(plain, one_after_another(plain)).latency == 30


def test_fused_fills_the_idle_time_of_two_ranks():
    """Two pipes of opposite directions over two micro-batches: no rank is ever idle."""
    pipes = [Pipe((0, 1), 2), Pipe((1, 0), 2)]
    assert evaluate(pipes, one_after_another(pipes)).latency == 17
    assert evaluate(pipes, fused(pipes)).latency == 12 == bound(pipes)


@pytest.mark.parametrize("make", [one_after_another, fused])
def test_two_stages_of_a_pipe_on_a_rank_are_for_the_interleaved_schedule(make):
    with pytest.raises(ValueError, match="pipe 0 has several stages on a rank"):
        make([Pipe((0, 1, 0, 1), 4)])


def test_interleaved_stages_go_round():
    with pytest.raises(ValueError, match=r"pipe 0 don't go round its ranks: \(0, 1, 1, 0\)"):
        interleaved([Pipe((0, 1, 1, 0), 4)])


def test_ranks_that_wait_for_each_other():
    """Rank 0 for rank 1's backward pass, which has its forward pass after that."""
    table = table_from("F00 B00 F01 B01", "F11 B11 F10 B10")
    with pytest.raises(ValueError, match="ranks wait for each other"):
        evaluate([Pipe((0, 1), 2)], table)


@pytest.mark.parametrize(
    "ranks",
    [
        ("F00", "F10 B10"),  # lacks a task
        ("F00 B00 B00", "F10 B10"),  # repeats one
        ("F00 B00 F10", "B10"),  # has one on another rank
        ("F00 B00",),  # lacks a rank
        ("F00 B00", "F10 B10", ""),  # has one too many
    ],
)
def test_a_table_of_other_tasks(ranks):
    with pytest.raises(ValueError, match="lacks tasks, repeats them or has them on other ranks"):
        evaluate([Pipe((0, 1), 1)], table_from(*ranks))


# ---------------------------------------------------------------- against every constraint


def check(pipes: list[Pipe], table) -> tuple[float, float]:
    """Latency and peak memory, and every constraint, straight from the definition.

    Each task once, in its rank; no start that could be earlier, none that is too early; a stage's forward
    passes in the order of the micro-batches, as its backward passes: sums of gradients depend on it.
    """
    starts = evaluate(pipes, table).starts
    duration = {
        task: pipes[task.pipe].backward if task.backward else pipes[task.pipe].forward
        for task in starts
    }
    count = 0
    for number, pipe in enumerate(pipes):
        last = len(pipe.ranks) - 1
        for stage, rank in enumerate(pipe.ranks):
            for backward in (False, True):
                same = [t for t in table[rank] if t[:3] == (number, stage, backward)]
                assert [t.micro_batch for t in same] == list(range(pipe.micro_batches))
                count += len(same)
        for i in range(pipe.micro_batches):
            path = [Task(number, s, False, i) for s in range(last + 1)]
            path += [Task(number, s, True, i) for s in range(last, -1, -1)]
            for task, after in itertools.pairwise(path):
                assert starts[after] >= starts[task] + duration[task]
    assert count == len(starts) == sum(map(len, table))
    peak = 0.0
    for tasks in table:
        held = 0.0
        for i, task in enumerate(tasks):
            ready = [0.0] if i == 0 else [starts[tasks[i - 1]] + duration[tasks[i - 1]]]
            forward = not task.backward
            before = task._replace(stage=task.stage + (-1 if forward else 1))
            ready += [starts[before] + duration[before]] if before in starts else []
            ready += (
                []
                if forward
                else [starts[task._replace(backward=False)] + pipes[task.pipe].forward]
            )
            assert starts[task] == max(ready)
            held += pipes[task.pipe].memory * (1 if forward else -1)
            peak = max(peak, held)
        assert abs(held) < 1e-9
    return max(starts[task] + duration[task] for task in starts), peak


durations = st.sampled_from([0.3, 0.5, 1.0, 1.7, 2.0, 5.0])


@st.composite
def several_pipes(draw, stages_per_rank: int = 1) -> list[Pipe]:
    """One to three, over all of up to five ranks or some neighbours, in one direction or the other."""
    size, found = draw(st.integers(1, 5)), []
    for _ in range(draw(st.integers(1, 3))):
        first = draw(st.integers(0, size - 1))
        ranks = tuple(range(first, draw(st.integers(first + 1, size))))
        ranks = (ranks[::-1] if draw(st.booleans()) else ranks) * stages_per_rank
        found.append(
            Pipe(ranks, draw(st.integers(1, 6)), draw(durations), draw(durations), draw(durations))
        )
    return found


@pytest.mark.parametrize("name", SCHEDULES)
@given(data=st.data())
def test_every_schedule(name, data):
    """Valid, evaluated exactly, no faster than the bound; fused no slower than one after another."""
    schedule = SCHEDULES[name]
    pipes = data.draw(several_pipes(schedule.stages_per_rank))
    table = schedule.table(pipes)
    latency, memory, _ = evaluate(pipes, table)
    assert (latency, memory) == check(pipes, table)
    assert latency >= bound(pipes) * (1 - 1e-9)
    if schedule.fuses:
        assert latency <= evaluate(pipes, one_after_another(pipes)).latency * (1 + 1e-9)
        assert memory <= MOST_MEMORY * base_memory(pipes) * (1 + 1e-6)


@given(p=st.integers(1, 5), chunks=st.integers(1, 4), micro_batches=st.integers(1, 13))
def test_interleaved_takes_any_number_of_micro_batches(p, chunks, micro_batches):
    """At the bound where Megatron's rule holds; a short last turn costs at most its missing micro-batches."""
    pipes = [Pipe(tuple(range(p)) * chunks, micro_batches)]
    latency, memory = check(pipes, interleaved(pipes))
    whole = [pipes[0]._replace(micro_batches=-(-micro_batches // p) * p)]
    assert latency <= evaluate(whole, interleaved(whole)).latency
    assert memory <= min(micro_batches * chunks, p * (chunks + 1))
    if micro_batches % p == 0:
        assert latency == bound(pipes) == 3 * (micro_batches * chunks + p - 1)


def test_every_process_finds_the_same_table():
    """Whatever the order of its sets: ranks that disagreed would wait for each other."""
    pipes = [Pipe((0, 1, 2), 5, 1.0, 1.7), Pipe((2, 1, 0), 3, 0.6, 1.1), Pipe((1, 0), 2)]
    program = f"from scheduling.pipeline import *; print(repr(fused({pipes!r})))"
    answers = [
        subprocess.check_output(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            text=True,
        )
        for seed in ("1", "2")
    ]
    assert answers[0].strip() == answers[1].strip() == repr(fused(pipes))


# ---------------------------------------------------------------- RLHFuse's table 3


@pytest.mark.parametrize("name", INSTANCES)
def test_fused_is_as_fast_as_published(name):
    """By an order that meets the bound; 65B/33B 16/16 64/64 is faster than published."""
    pipes, published = INSTANCES[name], PUBLISHED[name]
    latency, memory = check(pipes, fused(pipes))
    assert latency == published["bound"] <= published["published"]["latency"]
    assert memory <= MOST_MEMORY * base_memory(pipes) * (1 + 1e-9)


# ---------------------------------------------------------------- bench/schedules.py


def test_a_row_of_each_instance(tmp_path, capsys):
    """Two ranks: worked out by hand."""
    path = tmp_path / "pipes.json"
    two = [
        {"ranks": [0, 1], "micro_batches": 2},
        {"ranks": [1, 0], "micro_batches": 2, "memory": 0.5},
    ]
    path.write_text(json.dumps([{"name": "two", "pipes": two}]))
    print_instances(path)
    assert capsys.readouterr().out.splitlines()[-1].startswith("| two | 12 | 17 | 12 | ")


def test_the_passes_of_a_step_are_drawn(tmp_path):
    """Only those of the step."""
    done = [
        PassSpan("actor", 0, False, 0, 0, 1.0, 2.0, 3),
        PassSpan("reward critic", 1, True, 4, 1, 2.0, 4.0, 3),
        PassSpan("actor", 0, False, 0, 0, 9.0, 9.5, 4),
    ]
    draw_passes(Records(passes=done), 3, tmp_path / "passes.png")
    assert (tmp_path / "passes.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no pass of a pipeline was recorded in step 5"):
        draw_passes(Records(passes=done), 5, tmp_path / "none.png")
