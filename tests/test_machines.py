"""Several machines: a run over two of them, made of namespaces, against the same run on one."""

import subprocess
import time
from functools import partial

import pytest

import two_machines

STEPS = 2
BOTH = {"first", "second"}


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """Two of them, on which nothing runs yet; skipped where this user or system may not make any."""
    try:
        with two_machines.two_machines(tmp_path_factory.mktemp("machines")) as made:
            yield made
    except (PermissionError, FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"can't make namespaces: {error}")


@pytest.fixture(scope="module")
def runs(machines, tmp_path_factory):
    """What came of the run on one; on two, and what was seen of that; all ranks of the second are killed."""
    out = tmp_path_factory.mktemp("out")
    one, strike = two_machines.on_one(out / "one", STEPS), partial(two_machines.kill_ranks, 1)
    return one, *two_machines.on_two(machines, out / "two", STEPS, strike)


def test_a_run_over_two_machines_has_the_numbers_of_one(runs):
    """To the last digit, the final weights too; its checkpoints went to the disk that both share."""
    one, two, seen = runs
    assert len(one["rows"]) == STEPS + 1 and one["weights"]
    assert seen.killed == 1 and not two_machines.difference(two, one)


def test_engines_are_reached_across(runs, machines):
    """Rollout is on the first alone, genrm on the second: ranks ask the other's engine for answers."""
    _, _, seen = runs
    first, second = (machine.address for machine in machines)
    places = {(first, two_machines.PORT), (second, two_machines.PORT + 3)}
    assert seen.statuses.keys() == places
    for machine in BOTH:
        assert {(machine, "rank", *place) for place in places} <= seen.connected


def test_the_key_is_asked_for_across(runs):
    """By every engine, from the other machine."""
    _, _, seen = runs
    assert len(seen.statuses) == 2
    assert all(
        found == {"none": 401, "wrong": 401, "right": 200} for found in seen.statuses.values()
    )


def test_nothing_listens_where_it_was_not_told_to(runs, machines):
    """--host and loopback alone; but for torchrun's rendezvous, for which torch knows no address."""
    _, _, seen = runs
    named = {machine.name: {machine.address, "127.0.0.1"} for machine in machines}
    elsewhere = {row for row in seen.listening if row[2] not in named[row[0]]}
    assert {(machine, port) for machine, _, _, port in elsewhere} == {
        ("first", two_machines.MEETING_PORT)
    }
    assert ("first", "rank", machines[0].address, two_machines.PORT - 1) in seen.listening
    assert {(machine, program) for machine, program, *_ in seen.listening} >= {
        (machine, program) for machine in BOTH for program in ("rank", "engine")
    }


def test_it_says_what_can_be_overheard(runs, machines):
    """Once, on the first machine; a run on loopback doesn't."""
    line = f"--host {machines[0].address}: requests with their key, answers, samples and gradients travel"
    said = [machine.log.read_text() for machine in machines]
    assert [text.count("unencrypted") for text in said] == [2, 0]  # one of each start
    assert line in said[0]


def test_nothing_is_left_behind(machines, runs):
    """Neither a rank nor an engine, nor what these started, is left behind by a run."""
    gone_by = time.monotonic() + 10
    while (
        left := [row for machine in machines for row in machine.family()]
    ) and time.monotonic() < gone_by:
        time.sleep(0.1)
    assert not left
