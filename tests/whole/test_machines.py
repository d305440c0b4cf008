"""Several machines: a run over two of them, made of namespaces, against the same run on one."""

import subprocess

import pytest

from tests.runs import two_machines
from tests.runs.two_machines import MEETING_PORT, PORT
from tests.support.launched import Run
from tests.support.patience import wait_for

pytestmark = pytest.mark.long
STEPS = 2
SETTINGS = ("--steps", STEPS, "--save-every", "1", "--save-hf-every", STEPS)


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """Make two of them, with nothing running; skip where this user or system may not."""
    try:
        with two_machines.two_machines(tmp_path_factory.mktemp("machines")) as made:
            yield made
    except (PermissionError, FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"can't make namespaces: {error}")


@pytest.fixture(scope="module")
def run_and_seen(machines, tmp_path_factory):
    """Run on two machines and kill the second in the middle; return the run and what was seen."""
    return two_machines.on_two(machines, tmp_path_factory.mktemp("two") / "out", SETTINGS, 2)


def test_the_numbers_are_those_of_one_machine(run_and_seen, tmp_path):
    """They must agree to the last digit, final weights included, though a machine was replaced."""
    one = Run(tmp_path, *SETTINGS).ended()
    two, path = run_and_seen[0], f"hf/step_{STEPS}/model.safetensors"
    assert two.numbers() == one.numbers()
    assert (two.out / path).read_bytes() == (one.out / path).read_bytes()


def test_nothing_listens_where_it_was_not_told_to(run_and_seen, machines):
    """Only loopback and --host may be used, except by torchrun. Each machine reaches the other's engine."""
    first, second = machines
    for machine in machines:
        there = run_and_seen[1][machine.name]
        elsewhere = {each for each in there if each.rsplit(":", 1)[0] not in named(machine)}
        ports = {each.rsplit(":", 1)[1] for each in elsewhere}
        assert ports == ({str(MEETING_PORT)} if machine is first else set())
    places = {f"{first.address}:{PORT}", f"{first.address}:{PORT - 1}"}
    assert places <= run_and_seen[1]["first"]
    assert f"{second.address}:{PORT + 3}" in run_and_seen[1]["second"]


def named(machine):
    return (machine.address, "127.0.0.1")


def test_it_says_what_can_be_overheard(run_and_seen, machines):
    line = f"--host {machines[0].address}: requests with their key, answers, samples and gradients travel"
    said = [machine.log.read_text() for machine in machines]
    assert [text.count("unencrypted") for text in said] == [2, 0] and line in said[0]


def test_nothing_is_left_behind(machines, run_and_seen):
    wait_for(lambda: not [row for machine in machines for row in machine.family()])
