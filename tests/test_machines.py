"""Several machines: a run over two of them, made of namespaces, against the same run on one."""

import subprocess
import time

import pytest

import two_machines
from launched import Run
from two_machines import MEETING_PORT, PORT

pytestmark = pytest.mark.long
STEPS = 2
SETTINGS = ("--steps", STEPS, "--save-every", "1", "--save-hf-every", STEPS)
BOTH = ("first", "second")


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """Two of them, on which nothing runs yet; skipped where this user or system may not make any."""
    try:
        with two_machines.two_machines(tmp_path_factory.mktemp("machines")) as made:
            yield made
    except (PermissionError, FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"can't make namespaces: {error}")


@pytest.fixture(scope="module")
def run_and_seen(machines, tmp_path_factory):
    """A run on two, the second of which dies in the middle, and what was seen of it."""
    return two_machines.on_two(machines, tmp_path_factory.mktemp("two") / "out", SETTINGS, 2)


def test_the_numbers_are_those_of_one_machine(run_and_seen, tmp_path):
    """To the last digit, the final weights too, though a machine was replaced."""
    one = Run(tmp_path, *SETTINGS).ended()
    two, path = run_and_seen[0], f"checkpoints/step_{STEPS}/hf/model.safetensors"
    assert two.numbers() == one.numbers()
    assert (two.out / path).read_bytes() == (one.out / path).read_bytes()


def test_engines_are_reached_across_with_their_key(run_and_seen, machines):
    """Rollout is on the first alone, genrm on the second: each rank asks the other's engine, too.

    Asked from the other machine without a key, with a wrong one and with the right one.
    """
    seen = run_and_seen[1]
    places = [(machine.address, PORT + 3 * rank) for rank, machine in enumerate(machines)]
    assert seen.statuses == {place: [401, 401, 200] for place in places}
    for machine in BOTH:
        assert {(machine, "rank", *place) for place in places} <= seen.connected


def test_nothing_listens_where_it_was_not_told_to(run_and_seen, machines):
    """--host and loopback alone; but for torchrun's rendezvous, for which torch knows no address."""
    seen = run_and_seen[1]
    named = {machine.name: {machine.address, "127.0.0.1"} for machine in machines}
    elsewhere = {row for row in seen.listening if row[2] not in named[row[0]]}
    assert {(machine, port) for machine, *_, port in elsewhere} == {("first", MEETING_PORT)}
    assert ("first", "rank", machines[0].address, PORT - 1) in seen.listening
    found = {(machine, program) for machine, program, *_ in seen.listening}
    assert found >= {(machine, program) for machine in BOTH for program in ("rank", "engine")}


def test_it_says_what_can_be_overheard(run_and_seen, machines):
    """At each start, on the first machine."""
    line = f"--host {machines[0].address}: requests with their key, answers, samples and gradients travel"
    said = [machine.log.read_text() for machine in machines]
    assert [text.count("unencrypted") for text in said] == [2, 0] and line in said[0]


def test_nothing_is_left_behind(machines, run_and_seen):
    """Neither a rank nor an engine, nor what these started."""
    deadline = time.monotonic() + 60
    while left := [row for machine in machines for row in machine.family()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
