"""Chaos with real processes: seeded faults in real runs of the demo, that must end as the unbroken run.

    python tests/chaos.py --trials 30 --seed 0 [--mode MODE]    a line a trial; exit 1 if one broke
    python tests/chaos.py --first 17 --trials 1                         trial 17 alone

A trial runs the demo with one or two faults: kill -9 or SIGSTOP of any process of the run at any moment (a
stopped launcher or command goes on after a while, a rank once all is written: only torchrun waits for it),
replies of engines that are lost or late (broken_replies.py), a full disk under the checkpoints, a flipped
byte in a checkpoint, a signal to stop. It is started again with the same command until its steps are done.
Then it has the unbroken run's numbers and final weights, to the last bit; or it ended with a clear stop of
docs/faults.md. No process may be left behind. Needs Linux; the full disk, root.
"""

import argparse
import contextlib
import functools
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
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
# a role without engines, an engine that stalls or doesn't come up again, a process that can't be ended
CLEAR_STOPS = (
    "engine is left to ask",
    "third failure in a row",
    "didn't start again",
    "doesn't end:",
)
DAMAGE_STOPS = ("checkpoints is whole",)  # where a person has to decide
KINDS = {  # by words of the command line, the first that fits
    "sglang::scheduler": "scheduler",
    "sglang::detokenizer": "detokenizer",
    "resource_tracker": "other",
    "cpu.sglang": "server",
    "bin/torchrun": "launcher",
    "run.py": "rank",
    "broken_replies.py": "rank",
}


def by_kind(run: Run) -> dict[str, list[psutil.Process]]:
    """What runs now: launcher, rank, writer, server, scheduler, detokenizer or other."""
    found: dict[str, list[psutil.Process]] = {}
    for process, command in run.processes():
        kind = next((kind for words, kind in KINDS.items() if words in command), "other")
        with contextlib.suppress(psutil.NoSuchProcess):
            above = " ".join(process.parent().cmdline()) if process.parent() else ""
            if kind == "rank" and "bin/torchrun" not in above:
                kind = "writer"  # a rank's child, which writes a checkpoint
            if kind == "server" and "cpu.sglang" in above:
                kind = "other"
            found.setdefault(kind, []).append(process)
    return found


def send(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def waited(run: Run, condition: Callable[[], bool]) -> bool:
    """Whether the condition came true while the run was on, in time."""
    deadline = time.monotonic() + DEADLINE_S
    while run.is_running() and time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.005)
    return False


def weights(out: Path) -> str:
    """A hash of the final weights."""
    path = out / "checkpoints" / f"step_{STEPS}" / "hf" / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


@functools.cache
def unbroken(mode: str) -> Run:
    """A run that nothing happens to."""
    folder = PLACE / f"unbroken-{mode}"
    shutil.rmtree(folder, ignore_errors=True)
    run = Run(folder, *SMALL.split(), "--mode", mode).start().finish()
    assert run.status == 0, run.stderr + run.stdout
    return run


def difference(run: Run, expected: Run) -> str:
    """The first thing that differs, empty if nothing does. A full disk has no final weights to compare."""
    rows, others = run.numbers(), expected.numbers()
    if len(rows) != len(others):
        return f"{len(rows)} rows instead of {len(others)}"
    for row, other in zip(rows, others, strict=True):
        for name in sorted(row.keys() | other.keys()):
            if row.get(name) != other.get(name):
                return f"step {row['step']}: {name} {row.get(name)} instead of {other.get(name)}"
    found = weights(run.out)
    return "the final weights" if found and found != weights(expected.out) else ""


# ---------------------------------------------------------------- faults


@dataclass
class Fault:
    """Something that happens once in a run. `strike` waits for its moment, and notes what it did."""

    name: str
    checkpoint_bytes: int
    rng: random.Random
    told: str = ""
    tolerated: tuple[str, ...] = CLEAR_STOPS
    later: list = field(default_factory=list)  # (time, process, whether only at the run's end)

    def strike(self, run: Run) -> None:
        strikes = {
            "kill": self.signal_one,
            "stop": self.signal_one,
            "kill tree": self.kill_in_a_save,
            "writer": self.strike_writer,
            "end": self.ask_to_end,
            "full disk": self.fill_disk,
            "replies": lambda run: "replies of engines are lost or late",
            "flip": self.flip,
        }
        self.told = strikes[self.name](run)

    def moment(self, run: Run) -> str:
        """A while after a step of the run, the first included, or after its start."""
        rows = self.rng.choice([-1, 0, 0, 1, 2, 3, 4])
        seconds = self.rng.uniform(2, 25) if rows < 0 else self.rng.uniform(0, 6)

        def here() -> bool:
            first = rows == 0 and "eval/accuracy" in run.stdout
            return rows < 0 or first or len(run.rows()) > rows

        if waited(run, here):
            until = time.monotonic() + seconds
            waited(run, lambda: time.monotonic() > until)
        return f"{len(run.rows())} steps done"

    def a_save(self, run: Run) -> int:
        """Waits until a checkpoint is written; returns after which step."""
        step = self.rng.randrange(1, STEPS)
        waited(run, lambda: bool(list(run.out.glob(f"checkpoints/step_{step}.partial-*"))))
        return step

    def signal_one(self, run: Run) -> str:
        """kill -9 or SIGSTOP of a random process; each kind is as likely, however many there are of it."""
        when, kinds = self.moment(run), by_kind(run)
        if not kinds or not run.is_running():  # nobody would end a process that is stopped now
            return f"nothing: the run had ended ({when})"
        kind = self.rng.choice(sorted(kinds))
        process = self.rng.choice(kinds[kind])
        number = signal.SIGKILL if self.name == "kill" else signal.SIGSTOP
        send(process, number)
        if self.name == "stop" and kind in ("launcher", "other", "rank"):
            self.later.append((time.monotonic() + 20, process, kind == "rank"))
        return f"{number.name} of a {kind}, {when}"

    def kill_in_a_save(self, run: Run) -> str:
        step = self.a_save(run)
        time.sleep(self.rng.uniform(0, 0.1))
        run.kill_all()
        return f"kill -9 of all processes in the save of step {step}"

    def strike_writer(self, run: Run) -> str:
        """kill -9 or SIGSTOP of a process that writes a checkpoint."""
        step, number = self.a_save(run), self.rng.choice([signal.SIGKILL, signal.SIGSTOP])
        found, until = [], time.monotonic() + 2
        while run.is_running() and not found and time.monotonic() < until:
            found = by_kind(run).get("writer", [])
        for process in found[:1]:
            send(process, number)
        return f"{number.name} of {len(found[:1])} writers in the save of step {step}"

    def ask_to_end(self, run: Run) -> str:
        """SIGTERM to the ranks, or Ctrl-C."""
        when, number = self.moment(run), self.rng.choice([signal.SIGTERM, signal.SIGINT])
        kind = "rank" if number == signal.SIGTERM else "launcher"
        for process in by_kind(run).get(kind, []):
            send(process, number)
        return f"{number.name} to each {kind}, {when}"

    def fill_disk(self, run: Run) -> str:
        """A small disk under the checkpoints, before the first is written."""
        folder = run.out / "checkpoints"
        waited(run, lambda: (run.out / "logs").exists() and not run.rows())
        folder.mkdir(exist_ok=True)
        kilobytes = int(self.checkpoint_bytes * self.rng.uniform(0.3, 2.5) / 1024)
        size = ["-o", f"size={kilobytes}k"]
        subprocess.run(["mount", "-t", "tmpfs", *size, "tmpfs", folder], check=True)
        return f"a disk of {kilobytes / 1024:.1f} MB under the checkpoints"

    def flip(self, run: Run) -> str:
        """kill -9 of everything at a moment, and a byte of what it left is another."""
        when = self.moment(run)
        run.kill_all()
        files = [path for path in run.out.glob("checkpoints/**/*") if path.is_file()]
        files = sorted(path for path in files if path.stat().st_size)
        if not files:
            return f"kill -9 of all processes before the first checkpoint, {when}"
        path = self.rng.choice(files)
        content = bytearray(path.read_bytes())
        content[self.rng.randrange(len(content))] ^= self.rng.randrange(1, 256)
        path.write_bytes(content)
        self.tolerated += DAMAGE_STOPS
        return f"kill -9 of all processes and a flipped byte in {path.relative_to(run.out)}, {when}"

    def go_on(self, run: Run) -> None:
        for moment, process, at_end in self.later:
            if time.monotonic() > moment and (not at_end or f"wrote {run.out}" in run.stdout):
                send(process, signal.SIGCONT)


NAMES = [*["kill"] * 4, *["stop"] * 3, "kill tree", "writer", "writer"]
NAMES += ["end", "full disk", "replies", "flip"]


def one_start(folder: Path, mode: str, fault: Fault | None, number: int, restarts: int) -> Run:
    """The command from its start to the end of its last process."""
    program = "run.py"
    if fault and fault.name == "replies":
        program, os.environ["CHAOS_REPLIES"] = "tests/broken_replies.py", str(number)
    how = dict(launch=("--max-restarts", restarts), program=program, out=folder.parent / "out")
    run = Run(folder, *SMALL.split(), "--mode", mode, **how).start()
    if fault:
        fault.strike(run)
        deadline = time.monotonic() + DEADLINE_S
        while run.is_running() and time.monotonic() < deadline:
            fault.go_on(run)
            time.sleep(0.1)
    return run.finish(DEADLINE_S)


def trial(number: int, mode: str) -> bool:
    """One trial; returns whether all was well."""
    rng, expected = random.Random(f"chaos {number}"), unbroken(mode)
    folder, began, stop, wrong = PLACE / f"trial-{number}", time.monotonic(), "", ""
    saved = (expected.out / "checkpoints" / f"step_{STEPS}").rglob("*")
    size = sum(path.stat().st_size for path in saved)
    names = [NAMES[number % len(NAMES)]] + [rng.choice(NAMES)] * (rng.random() < 0.3)
    faults = [Fault(name, size, rng) for name in names]
    shutil.rmtree(folder, ignore_errors=True)
    runs: list[Run] = []
    try:
        while len(runs) < MOST_STARTS and not stop and not wrong:
            fault = faults[len(runs)] if len(runs) < len(faults) else None
            place = folder / f"start-{len(runs)}"
            runs.append(one_start(place, mode, fault, number, rng.choice([0, 2])))
            tolerated = {words for fault in faults[: len(runs)] for words in fault.tolerated}
            errors = [line for line in runs[-1].stderr.splitlines() if line.startswith("error:")]
            stop = next((line for line in errors if any(words in line for words in tolerated)), "")
            wrong = f"left behind: {runs[-1].left}" if runs[-1].left else ""
            if runs[-1].rows() and runs[-1].rows()[-1]["step"] == STEPS:
                wrong = wrong or difference(runs[-1], expected)
                break
            if fault is None and not stop:
                wrong = f"a start without a fault ended with status {runs[-1].status}"
        else:
            wrong = wrong or ("" if stop else "not done")
    finally:
        subprocess.run(["umount", folder / "out" / "checkpoints"], capture_output=True)
    told = "; ".join(fault.told for fault in faults if fault.told)
    ended = f"BROKEN: {wrong}" if wrong else stop or "the same numbers"
    took = f"{len(runs)} starts, {time.monotonic() - began:.0f} s"
    print(f"trial {number} ({mode}): {told} -> {ended} ({took})", flush=True)
    return not wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--first", "--seed", type=int, default=0)
    parser.add_argument("--mode", choices=MODES)
    given = parser.parse_args()
    numbers = range(given.first, given.first + given.trials)
    modes = {number: given.mode or MODES[number % len(MODES)] for number in numbers}
    broken = [number for number, mode in modes.items() if not trial(number, mode)]
    print(f"{given.trials} trials, broken: {broken or 'none'}", flush=True)
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
