"""Chaos with real processes: seeded faults in real runs of the demo, that must end as the unbroken run.

    python tests/chaos.py --trials 30 --first 0 [--mode MODE]    a line a trial; exit 1 if one broke

A trial runs the demo with one or two faults: kill -9 of any process of the run at any moment, SIGSTOP of an
engine's, kill -9 of all in a save. It is started again with the same command until its steps are done. Then
it has the unbroken run's numbers and final weights, to the last bit; or it ended with a clear stop of
docs/faults.md. No process may be left behind. Needs Linux.
"""

import argparse
import contextlib
import functools
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.launched import ROOT, Run

PLACE = ROOT / "runs" / "chaos"
DEADLINE_S = 420.0  # for one start to end: longer than any wait that the settings below allow
MOST_STARTS = 5
STEPS = 6  # of a trial
MODES = ("partial", "full", "fused")
SMALL = f"--steps {STEPS} --save-every 1 --save-hf-every {STEPS} --prompts-per-step 4"
SMALL += " --eval-every 100 --timeout-s 120"
FINAL = f"hf/step_{STEPS}/model.safetensors"
# a role without engines, an engine that stalls or doesn't come up again, a process that can't be ended
CLEAR_STOPS = ("is left to ask", "third failure in a row", "didn't start again", "doesn't end:")
ENGINE = ("sglang::scheduler", "sglang::detokenizer", "-m cpu.sglang")  # words of command lines
RANK = " -u "  # as torchrun starts it; what it forks for a save has the same command line
ALL = (*ENGINE, "bin/torchrun", RANK, "cpu.forks")


def send(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def wait(run: Run, condition: Callable[[], bool]) -> None:
    """Until the condition holds, the run has ended, or the time is up."""
    deadline = time.monotonic() + DEADLINE_S
    while run.is_running() and time.monotonic() < deadline and not condition():
        time.sleep(0.005)


@functools.cache
def unbroken(mode: str) -> Run:
    """A run that nothing happens to."""
    folder = PLACE / f"unbroken-{mode}"
    shutil.rmtree(folder, ignore_errors=True)
    return Run(folder, *SMALL.split(), "--mode", mode).ended()


def moment(run: Run, rng: random.Random) -> str:
    """A while after a step of the run, or after its start."""
    rows = rng.choice([-1, 0, 0, 1, 2, 3, 4])
    seconds = rng.uniform(2, 25) if rows < 0 else rng.uniform(0, 6)
    wait(run, lambda: len(run.rows()) > rows or (rows == 0 and "eval/accuracy" in run.stdout))
    until = time.monotonic() + seconds
    wait(run, lambda: time.monotonic() > until)
    return f"{len(run.rows())} steps done"


def signal_one(run: Run, rng: random.Random, number: int, kinds: tuple[str, ...]) -> str:
    """Each kind of process is as likely, however many there are of it."""
    when, words = moment(run, rng), rng.choice(kinds)
    found = [process for process, command in run.processes() if words in command]
    send(rng.sample(found, min(1, len(found))), number)
    return f"{signal.Signals(number).name} of {words}, {when}"


def kill(run: Run, rng: random.Random) -> str:
    return signal_one(run, rng, signal.SIGKILL, ALL)


def stop(run: Run, rng: random.Random) -> str:
    """Of an engine: nothing but torchrun would wait for a rank, and nothing for torchrun."""
    return signal_one(run, rng, signal.SIGSTOP, ENGINE)


def kill_in_a_save(run: Run, rng: random.Random) -> str:
    step = rng.randrange(1, STEPS)
    wait(run, lambda: any(run.out.glob(f"checkpoints/step_{step}.partial-*")))
    time.sleep(rng.uniform(0, 0.1))
    run.kill_all()
    return f"kill -9 of all processes in the save of step {step}"


FAULTS = [kill] * 4 + [stop] * 3 + [kill_in_a_save] * 2


def trial(number: int, mode: str) -> bool:
    """One trial; returns whether all was well."""
    rng, folder, told, end = random.Random(f"chaos {number}"), PLACE / f"trial-{number}", [], ""
    faults = [FAULTS[number % len(FAULTS)], *rng.choices(FAULTS, k=rng.random() < 0.3)]
    arguments, expected = (*SMALL.split(), "--mode", mode), unbroken(mode)
    shutil.rmtree(folder, ignore_errors=True)
    for start in range(MOST_STARTS):
        fault = faults[start] if start < len(faults) else None
        launch, out = ("--max-restarts", rng.choice([0, 2])), folder / "out"
        run = Run(folder / f"start-{start}", *arguments, launch=launch, out=out).start()
        if fault:
            told.append(fault(run, rng))
        end = end_of(run.finish(DEADLINE_S), expected)
        if end or not fault:
            break
    end = end or f"BROKEN: a start without a fault ended with status {run.status}"
    print(f"trial {number} ({mode}): {'; '.join(told)} -> {end}", flush=True)
    return not end.startswith("BROKEN")


def end_of(run: Run, expected: Run) -> str:
    """What came of a trial with this start, empty if it has to be started again."""
    if run.left:
        return f"BROKEN: left behind: {run.left}"
    if run.rows() and run.rows()[-1]["step"] == STEPS:
        weights, wanted = (each.out / FINAL for each in (run, expected))
        same = weights.read_bytes() == wanted.read_bytes()
        same = same and run.numbers() == expected.numbers()
        return "the same numbers" if same else f"BROKEN: other than {expected.out}: {run.out}"
    errors = [line for line in run.stderr.splitlines() if line.startswith("error:")]
    return next((line for line in errors if any(words in line for words in CLEAR_STOPS)), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--mode", choices=MODES)
    given = parser.parse_args()
    numbers = range(given.first, given.first + given.trials)
    modes = {number: given.mode or MODES[number % len(MODES)] for number in numbers}
    broken = [number for number, mode in modes.items() if not trial(number, mode)]
    print(f"{given.trials} trials, broken: {broken or 'none'}", flush=True)
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
