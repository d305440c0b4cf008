"""Several machines: a run over two of them, made of namespaces, against the same run on one."""

import subprocess
import time
from functools import partial

import pytest

import two_machines
from launched import Run

pytestmark = pytest.mark.long
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
def one(tmp_path_factory):
    """The run on one machine."""
    folder = tmp_path_factory.mktemp("one")
    run = Run(folder, *two_machines.settings(STEPS)).start().finish()
    assert run.status == 0, run.stderr + run.stdout
    return run


@pytest.fixture(scope="module")
def seen(machines, one, tmp_path_factory):
    """What was seen of a run on two, all ranks of the second of which are killed."""
    out, strike = tmp_path_factory.mktemp("out"), partial(two_machines.kill_ranks, 1)
    run, found = two_machines.on_two(machines, out / "two", STEPS, strike)
    check_as(run, one)
    assert found.killed == 1
    return found


def check_as(run, one):
    """The numbers of one machine to the last digit, the final weights too."""
    assert run.numbers() == one.numbers()
    assert weights(run) == weights(one)


def weights(run):
    return (run.out / f"checkpoints/step_{STEPS}/hf/model.safetensors").read_bytes()


def test_a_machine_is_replaced(one, tmp_path):
    """It dies as when its power fails, and the torchruns meet in a file: the same numbers."""
    (tmp_path / "machines").mkdir()
    meeting = ("--rdzv-conf", "store_type=file", "--rdzv-endpoint", str(tmp_path / "meeting"))
    with two_machines.two_machines(tmp_path / "machines") as pair:
        how = dict(strike=two_machines.replace_second, meeting=meeting)
        check_as(two_machines.on_two(pair, tmp_path / "two", STEPS, **how)[0], one)


def test_engines_are_reached_across(seen, machines):
    """Rollout is on the first alone, genrm on the second: ranks ask the other's engine for answers."""
    first, second = (machine.address for machine in machines)
    places = {(first, two_machines.PORT), (second, two_machines.PORT + 3)}
    assert seen.statuses.keys() == places
    for machine in BOTH:
        assert {(machine, "rank", *place) for place in places} <= seen.connected


def test_the_key_is_asked_for_across(seen):
    """By every engine, from the other machine."""
    assert len(seen.statuses) == 2
    assert all(
        found == {"none": 401, "wrong": 401, "right": 200} for found in seen.statuses.values()
    )


def test_nothing_listens_where_it_was_not_told_to(seen, machines):
    """--host and loopback alone; but for torchrun's rendezvous, for which torch knows no address."""
    named = {machine.name: {machine.address, "127.0.0.1"} for machine in machines}
    elsewhere = {row for row in seen.listening if row[2] not in named[row[0]]}
    assert {(machine, port) for machine, _, _, port in elsewhere} == {
        ("first", two_machines.MEETING_PORT)
    }
    assert ("first", "rank", machines[0].address, two_machines.PORT - 1) in seen.listening
    assert {(machine, program) for machine, program, *_ in seen.listening} >= {
        (machine, program) for machine in BOTH for program in ("rank", "engine")
    }


def test_it_says_what_can_be_overheard(seen, machines):
    """Once, on the first machine; a run on loopback doesn't."""
    line = f"--host {machines[0].address}: requests with their key, answers, samples and gradients travel"
    said = [machine.log.read_text() for machine in machines]
    assert [text.count("unencrypted") for text in said] == [2, 0]  # one of each start
    assert line in said[0]


def test_nothing_is_left_behind(machines, seen):
    """Neither a rank nor an engine, nor what these started, is left behind by a run."""
    gone_by = time.monotonic() + 60
    while (
        left := [row for machine in machines for row in machine.family()]
    ) and time.monotonic() < gone_by:
        time.sleep(0.1)
    assert not left
