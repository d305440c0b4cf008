"""Chaos with real processes: seeded faults in real runs of the demo, which must end like the unbroken run.

    python tests/runs/chaos.py --trials 30 --first 0 [--mode MODE]    a line per trial; exit 1 if one broke

A trial strikes the demo once or twice: kill -9 of any process of the run at any moment, SIGSTOP of an
engine's, or kill -9 of all during a save. The same command is repeated until the run's steps are done. Then
the numbers and final weights must equal the unbroken run's to the last bit, and no start may leave a process
running. Needs Linux.
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

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests import ROOT
from tests.support.launched import Run
from tests.support.patience import LIMIT_S

PLACE = ROOT / "runs" / "chaos"
STEPS = 6  # steps of a trial
MODES = ("partial", "full", "fused")
SMALL = f"--steps {STEPS} --save-every 1 --save-hf-every {STEPS} --prompts-per-step 4"
SMALL += " --eval-every 100 --timeout-s 120"
FINAL = f"hf/step_{STEPS}/model.safetensors"
# words that identify command lines
ENGINE = ("sglang::scheduler", "sglang::detokenizer", "-m engines.server_main")
RANK = " -u "  # torchrun starts ranks with it; forked writers have the same command line
ALL = (*ENGINE, "bin/torchrun", RANK, "extras.fast_cpu.forks")
IN_A_SAVE = "kill -9 of all processes in a save"
FAULTS = [signal.SIGKILL] * 4 + [signal.SIGSTOP] * 3 + [IN_A_SAVE] * 2


def wait(run: Run, condition: Callable[[], bool]) -> None:
    """Wait until the condition holds, the run has ended, or the time is up."""
    deadline = time.monotonic() + LIMIT_S
    while run.is_running() and time.monotonic() < deadline and not condition():
        time.sleep(0.005)


@functools.cache
def unbroken(mode: str) -> Run:
    """Return a run without faults."""
    folder = PLACE / f"unbroken-{mode}"
    shutil.rmtree(folder, ignore_errors=True)
    return Run(folder, *SMALL.split(), "--mode", mode).ended()


def strike(run: Run, rng: random.Random, fault: str | signal.Signals) -> str:
    """Strike at a random moment; return what was done, and when."""
    if fault == IN_A_SAVE:
        step = rng.randrange(1, STEPS)
        wait(run, lambda: any(run.out.glob(f"checkpoints/step_{step}.partial-*")))
        time.sleep(rng.uniform(0, 0.1))
        run.kill_all()
        return f"{fault}, of step {step}"
    rows = rng.choice([-1, 0, 0, 1, 2, 3, 4])  # a while after a step or after the start
    seconds = rng.uniform(2, 25) if rows < 0 else rng.uniform(0, 6)
    wait(run, lambda: len(run.rows()) > rows or (rows == 0 and "eval/accuracy" in run.stdout))
    until = time.monotonic() + seconds
    wait(run, lambda: time.monotonic() > until)
    # only torchrun would wait for a stopped rank, and nothing would wait for torchrun
    words = rng.choice(ALL if fault == signal.SIGKILL else ENGINE)
    found = [process for process, command in run.processes() if words in command]
    for process in rng.sample(found, min(1, len(found))):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(fault)
    return f"{fault.name} of {words}, {len(run.rows())} steps done"


def trial(number: int, mode: str) -> bool:
    """Run one trial; return True if all was well."""
    rng, folder, told = random.Random(f"chaos {number}"), PLACE / f"trial-{number}", []
    faults = [FAULTS[number % len(FAULTS)], *rng.choices(FAULTS, k=rng.random() < 0.3), None]
    arguments, expected = (*SMALL.split(), "--mode", mode), unbroken(mode)
    shutil.rmtree(folder, ignore_errors=True)
    for start, fault in enumerate(faults):
        launch, out = ("--max-restarts", rng.choice([0, 2])), folder / "out"
        run = Run(folder / f"start-{start}", *arguments, launch=launch, out=out).start()
        if fault:
            told.append(strike(run, rng, fault))
        run.finish()
        if run.left or (run.rows() and run.rows()[-1]["step"] == STEPS):
            break
    end = end_of(run, expected)
    print(f"trial {number} ({mode}): {'; '.join(told)} -> {end}", flush=True)
    return not end.startswith("BROKEN")


def end_of(run: Run, expected: Run) -> str:
    """Describe how this start of a trial ended."""
    if run.left:
        return f"BROKEN: processes left: {run.left}"
    if not (run.out / FINAL).is_file():
        return f"BROKEN: a start without a fault ended with status {run.status}"
    same = (run.out / FINAL).read_bytes() == (expected.out / FINAL).read_bytes()
    same = same and run.numbers() == expected.numbers()
    return "the same numbers" if same else f"BROKEN: other than {expected.out}: {run.out}"


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
