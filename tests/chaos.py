"""Chaos with real processes: seeded faults in real runs of the demo, that must end as the unbroken run.

    python tests/chaos.py --trials 30 --seed 0 [--mode MODE]    a line a trial; exit 1 if one broke
    python tests/chaos.py --first 17 --trials 1                         trial 17 alone
    python tests/chaos.py --exact [--steps 40] [--mode MODE]    4 resumes of 4 kinds, and all modes
    python tests/chaos.py --counted [--steps 40] [--mode MODE]  4 resumes where timing decides

A trial runs the demo with one or two faults: kill -9 or SIGSTOP of any process of the run at any moment (a
stopped launcher or command goes on after a while, a rank once all is written: only torchrun waits for it),
replies of engines that are lost or late (broken_replies.py), a full disk under the checkpoints, a flipped
byte in a checkpoint, a signal to stop. It
is started again with the same command until its steps are done. Then metrics.jsonl equals the unbroken run's
in every column that doesn't depend on timing, and the final weights are bit-equal; or it ended with a clear
stop of docs/faults.md. No process may be left behind, and no start may take longer than DEADLINE_S. What the
unbroken runs came to is kept under runs/chaos, by settings and source. Needs Linux; the full disk, root.
"""

import argparse
import contextlib
import ctypes
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from columns import timing_free

ROOT = Path(__file__).parent.parent
PLACE = ROOT / "runs" / "chaos"
PR_SET_CHILD_SUBREAPER = 36
DEADLINE_S = (
    420.0  # for one start of a trial to end: longer than any wait that the settings below allow
)
LONG_S = 1800.0  # for any other
GONE_S = 60.0  # for all processes of a start to be gone after its launcher
MOST_STARTS = 5
STEPS = 6  # of a trial
MODES = ("partial", "full", "fused")
SMALL = (
    f"--steps {STEPS} --save-every 1 --save-hf-every {STEPS} --prompts-per-step 4 --eval-every 100"
)
WAITS = "--timeout-s 120"
# a role without engines, an engine that stalls or doesn't come up again, a process that can't be ended
CLEAR_STOPS = (
    "engine is left to ask",
    "third failure in a row",
    "didn't start again",
    "doesn't end:",
)
DAMAGE_STOPS = ("checkpoints is whole",)  # where a person has to decide
PARTS = (
    "tokens_trained",
    "tokens_filtered",
    "tokens_carried",
)  # what becomes of the tokens that are written
LAUNCHERS = set()  # process ids, for whose end subprocess asks


# ---------------------------------------------------------------- processes


def family():
    """All living descendants of this process: whatever a run starts stays among them, whoever dies first."""
    reap()
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def reap():
    """Orphans came to this process, and it has to ask for their end."""
    for process in psutil.Process().children():
        try:
            if process.status() == psutil.STATUS_ZOMBIE and process.pid not in LAUNCHERS:
                os.waitpid(process.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            continue


def kind_of(process):
    """launcher, rank, writer, server, scheduler, detokenizer or other; gone of a process that has ended."""
    try:
        command, parent = " ".join(process.cmdline()), process.parent()
        above = " ".join(parent.cmdline()) if parent else ""
    except psutil.NoSuchProcess:
        return "gone"
    for name in ("scheduler", "detokenizer"):
        if f"sglang::{name}" in command:
            return name
    if "resource_tracker" in command or not command:
        return "other"
    if "cpu.sglang" in command:
        return "other" if "cpu.sglang" in above else "server"
    if "torchrun" in command:
        return "launcher"
    if "run.py" in command or "broken_replies.py" in command:
        return "writer" if "torchrun" not in above else "rank"
    return "other"


def kill_all(processes):
    """kill -9 of all at one moment."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in processes:
            send(process, number)


def send(process, number):
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


# ---------------------------------------------------------------- one start of the command


@dataclass
class Start:
    """torchrun, from its start to the end of its last process."""

    out: Path
    port: int
    arguments: list[str]
    ranks: int = 2
    restarts: int = 0
    replies: int | None = None  # seed of broken_replies.py
    deadline_s: float = LONG_S

    def __post_init__(self):
        program = "run.py" if self.replies is None else "tests/broken_replies.py"
        command = [Path(sys.executable).with_name("torchrun"), "--nproc-per-node", self.ranks]
        command += ["--master-port", self.port + 90, "--max-restarts", self.restarts, program]
        command += ["--out", self.out, "--port", self.port, *self.arguments]
        # seconds for a save after a signal, as the Makefile says
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"}
        environment |= {} if self.replies is None else {"CHAOS_REPLIES": str(self.replies)}
        self.log = self.out.with_suffix(".log")
        self.began, self.said_before = (
            time.monotonic(),
            self.log.stat().st_size if self.log.exists() else 0,
        )
        with self.log.open("ab") as log:
            how = dict(cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
            self.process = psutil.Popen([*map(str, command)], **how)
        LAUNCHERS.add(self.process.pid)

    def said(self):
        """What this start has printed so far."""
        with self.log.open("rb") as log:
            log.seek(self.said_before)
            return log.read().decode(errors="replace")

    def runs(self):
        return self.process.poll() is None

    def seconds(self):
        return time.monotonic() - self.began

    def wait_for(self, condition):
        """Returns whether the condition came true while the start ran, in time."""
        while self.runs() and self.seconds() < self.deadline_s:
            if condition():
                return True
            time.sleep(0.005)
        return False

    def end(self):
        """Wait for its end; returns its exit status, and what was wrong: too late, not all of it."""
        wrong = []
        while self.runs() and self.seconds() < self.deadline_s:
            time.sleep(0.1)
        if self.runs():
            wrong.append(f"longer than {self.deadline_s:.0f} s")
            kill_all(family())
        status, gone_by = self.process.wait(), time.monotonic() + GONE_S
        while (left := family()) and time.monotonic() < gone_by:
            time.sleep(0.1)
        wrong += [f"left behind: {kind_of(process)} {process.pid}" for process in left]
        kill_all(left)
        while family():
            time.sleep(0.05)
        return status, wrong


def rows_of(out):
    """The whole rows of a run's metrics.jsonl."""
    path = out / "metrics.jsonl"
    return (
        [json.loads(line) for line in path.open() if line.endswith("\n")] if path.exists() else []
    )


def is_done(out, steps):
    rows = rows_of(out)
    return bool(rows) and rows[-1]["step"] == steps


# ---------------------------------------------------------------- the unbroken run, and what differs from it


def fingerprint(out, steps):
    """What a run came to: its rows, and a hash of its final weights."""
    weights = out / "checkpoints" / f"step_{steps}" / "hf" / "model.safetensors"
    found = hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else None
    return {"rows": rows_of(out), "weights": found}


def source():
    """A hash of everything that a run's numbers may come from."""
    rooms = (
        "engines",
        "training",
        "scheduling",
        "runtime",
        "reporting",
        "commands",
        "recipes",
        "cpu",
    )
    files = sorted(
        [*ROOT.glob("*.py"), *(path for room in rooms for path in (ROOT / room).rglob("*.py"))]
    )
    return hashlib.sha256(
        b"".join(str(path).encode() + path.read_bytes() for path in files)
    ).hexdigest()


def unbroken(name, arguments, steps, port):
    """The fingerprint of a run that nothing happens to, from runs/chaos if it is there."""
    key = hashlib.sha256(json.dumps([source(), arguments]).encode()).hexdigest()[:12]
    kept = PLACE / f"unbroken-{name}-{key}.json"
    if not kept.exists():
        out = PLACE / f"unbroken-{name}"
        shutil.rmtree(out, ignore_errors=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        start = Start(out, port, arguments)
        status, wrong = start.end()
        assert status == 0 and not wrong, f"the unbroken run failed: {wrong} {start.said()[-3000:]}"
        size = sum(
            path.stat().st_size for path in (out / "checkpoints" / f"step_{steps}").rglob("*")
        )
        facts = fingerprint(out, steps) | {"seconds": start.seconds(), "checkpoint_bytes": size}
        kept.write_text(json.dumps(facts))
        took = f"{start.seconds():.0f} s, a checkpoint of {size / 1e6:.1f} MB"
        print(f"unbroken run {name}: {took}", flush=True)
    return json.loads(kept.read_text())


def same_in_both(row):
    """A row of metrics.jsonl without what depends on timing or tells of faults."""
    return {
        name: value for name, value in timing_free(row).items() if not name.startswith("faults/")
    }


def difference(found, expected):
    """The first thing that differs, empty if nothing does.

    A run whose disk was full has no final weights to compare.
    """
    if len(found["rows"]) != len(expected["rows"]):
        return f"steps {[row['step'] for row in found['rows']]} instead of {len(expected['rows'])} rows"
    for row, other in zip(
        map(same_in_both, found["rows"]), map(same_in_both, expected["rows"]), strict=True
    ):
        for name in sorted(row.keys() | other.keys()):
            if row.get(name) != other.get(name):
                return f"step {row['step']}: {name} {row.get(name)} instead of {other.get(name)}"
    if found["weights"] is not None and found["weights"] != expected["weights"]:
        return "the final weights"
    return ""


# ---------------------------------------------------------------- faults


@dataclass
class Fault:
    """Something that happens once in a start.

    `strike(start, rng)` waits for its moment, and returns what it did.
    """

    name: str
    checkpoint_bytes: int
    told: str = ""
    tolerated: tuple[str, ...] = CLEAR_STOPS
    later: list = field(
        default_factory=list
    )  # (time, process, only at the run's end): they go on then

    def strike(self, start, rng):
        strikes = {"kill": self.signal_one, "stop": self.signal_one, "kill tree": self.kill_tree}
        strikes |= {
            "writer": self.strike_writer,
            "end": self.ask_to_end,
            "full disk": self.fill_disk,
        }
        strikes |= {"flip": self.flip, "replies": lambda *_: "replies of engines are lost or late"}
        self.told = strikes[self.name](start, rng)

    def moment(self, start, rng):
        """A while after a step of the run, the first included, or after its start."""
        rows = rng.choice([-1, 0, 0, 1, 2, 3, 4])
        seconds = rng.uniform(2, 25) if rows < 0 else rng.uniform(0, 6)

        def here():
            first = rows == 0 and "eval/accuracy" in start.said()
            return rows < 0 or first or len(rows_of(start.out)) > rows

        if start.wait_for(here):
            until = time.monotonic() + seconds
            start.wait_for(lambda: time.monotonic() > until)
        return f"{start.seconds():.0f} s after the start, {len(rows_of(start.out))} steps done"

    def signal_one(self, start, rng):
        """kill -9 or SIGSTOP of a random process; each kind is as likely, however many there are of it."""
        when, by_kind = self.moment(start, rng), {}
        for process in family():
            by_kind.setdefault(kind_of(process), []).append(process)
        by_kind.pop("gone", None)
        if not by_kind or not start.runs():  # nobody would end a process that is stopped now
            return f"nothing: the run had ended ({when})"
        kind = rng.choice(sorted(by_kind))
        process = rng.choice(by_kind[kind])
        send(process, signal.SIGKILL if self.name == "kill" else signal.SIGSTOP)
        if self.name == "stop" and kind in ("launcher", "other", "rank"):
            self.later.append((time.monotonic() + 20, process, kind == "rank"))
        return f"{'kill -9' if self.name == 'kill' else 'SIGSTOP'} of a {kind}, {when}"

    def kill_tree(self, start, rng):
        """kill -9 of everything while a checkpoint is written, if one is."""
        step = rng.randrange(1, 6)
        start.wait_for(lambda: list(start.out.glob(f"checkpoints/step_{step}.partial-*")))
        time.sleep(rng.uniform(0, 0.1))
        kill_all(family())
        return f"kill -9 of all processes in the save of step {step}"

    def strike_writer(self, start, rng):
        """kill -9 or SIGSTOP of a process that writes a checkpoint."""
        step, number = rng.randrange(1, 6), rng.choice([signal.SIGKILL, signal.SIGSTOP])
        start.wait_for(lambda: list(start.out.glob(f"checkpoints/step_{step}.partial-*")))
        found, until = [], time.monotonic() + 2
        while start.runs() and not found and time.monotonic() < until:
            found = [process for process in family() if kind_of(process) == "writer"]
        for process in found[:1]:
            send(process, number)
        return f"{number.name} of {'a' if found else 'no'} writer in the save of step {step}"

    def ask_to_end(self, start, rng):
        """SIGTERM to the ranks, or Ctrl-C."""
        when, number = self.moment(start, rng), rng.choice([signal.SIGTERM, signal.SIGINT])
        ranks = [process for process in family() if kind_of(process) == "rank"]
        for process in ranks if number == signal.SIGTERM else [start.process]:
            send(process, number)
        return f"{number.name} to {'the ranks' if number == signal.SIGTERM else 'the launcher'}, {when}"

    def fill_disk(self, start, rng):
        """A small disk under the checkpoints, before the first is written."""
        folder = start.out / "checkpoints"
        start.wait_for(lambda: (start.out / "logs").exists() and not rows_of(start.out))
        folder.mkdir(exist_ok=True)
        kilobytes = int(self.checkpoint_bytes * rng.uniform(0.3, 2.5) / 1024)
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", folder], check=True
        )
        return f"a disk of {kilobytes / 1024:.1f} MB under the checkpoints"

    def flip(self, start, rng):
        """kill -9 of everything at a moment, and a byte of what it left is another."""
        when = self.moment(start, rng)
        kill_all(family())
        files = [path for path in start.out.glob("checkpoints/**/*") if path.is_file()]
        files = sorted(path for path in files if path.stat().st_size)
        if not files:
            return f"kill -9 of all processes before the first checkpoint, {when}"
        path = rng.choice(files)
        content = bytearray(path.read_bytes())
        content[rng.randrange(len(content))] ^= rng.randrange(1, 256)
        path.write_bytes(content)
        self.tolerated += DAMAGE_STOPS
        where = path.relative_to(start.out / "checkpoints")
        return f"kill -9 of all processes and a flipped byte in {where}, {when}"

    def go_on(self, start):
        for moment, process, at_end in self.later:
            if time.monotonic() > moment and (not at_end or f"wrote {start.out}" in start.said()):
                send(process, signal.SIGCONT)


NAMES = [*["kill"] * 4, *["stop"] * 3, "kill tree", "writer", "writer"]
NAMES += ["end", "full disk", "replies", "flip"]


def trial(number, mode, port):
    """One trial; returns what was wrong, a list of lines, empty if nothing."""
    rng, arguments = (
        random.Random(f"chaos {number}"),
        [*SMALL.split(), *WAITS.split(), "--mode", mode],
    )
    expected = unbroken(mode, arguments, STEPS, port)
    names = [NAMES[number % len(NAMES)]] + [rng.choice(NAMES)] * (rng.random() < 0.3)
    faults = [Fault(name, expected["checkpoint_bytes"]) for name in names]
    out, wrong, starts, stop, began = PLACE / f"trial-{number}", [], 0, "", time.monotonic()
    for path in PLACE.glob(f"trial-{number}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    try:
        while starts < MOST_STARTS and not stop and not wrong and not is_done(out, STEPS):
            fault = faults[starts] if starts < len(faults) else None
            replies = number if fault and fault.name == "replies" else None
            here = port + 100 * (starts % 2)
            how = dict(restarts=rng.choice([0, 2]), replies=replies, deadline_s=DEADLINE_S)
            start = Start(out, here, arguments, **how)
            if fault:
                fault.strike(start, rng)
                start.wait_for(lambda fault=fault, start=start: fault.go_on(start))
            status, wrong = start.end()
            starts += 1
            said = start.said()
            tolerated = {words for fault in faults[:starts] for words in fault.tolerated}
            errors = [line for line in said.splitlines() if line.startswith("error:")]
            stop = next((line for line in errors if any(words in line for words in tolerated)), "")
            if starts > len(faults) and not is_done(out, STEPS) and not stop:
                wrong.append(
                    f"start {starts} had no fault and ended with status {status}: {said[-1500:]}"
                )
        if not stop and not wrong:
            different = (
                difference(fingerprint(out, STEPS), expected) if is_done(out, STEPS) else "not done"
            )
            wrong += [f"differs from the unbroken run: {different}"] * bool(different)
    finally:
        subprocess.run(["umount", out / "checkpoints"], capture_output=True)
    how = "; ".join(fault.told for fault in faults if fault.told)
    ended = (
        f"BROKEN: {' | '.join(wrong)}"
        if wrong
        else f"clear stop: {stop}"
        if stop
        else "the same numbers"
    )
    took = f"{starts} starts, {time.monotonic() - began:.0f} s"
    print(f"trial {number} ({mode}): {how} -> {ended} ({took})", flush=True)
    if not wrong:
        for path in PLACE.glob(f"trial-{number}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return wrong


# ---------------------------------------------------------------- four resumes


def broken_run(out, mode, steps, arguments, port):
    """A Ctrl-C, a SIGTERM, a kill -9 of a rank and one of everything in a save; each is started again."""
    marks = [steps * part // 5 for part in range(1, 6)]

    def reached(start, mark):
        return start.wait_for(lambda: len(rows_of(out)) >= mark)

    def end(start, name, may=(0,)):
        status, wrong = start.end()
        assert status in may and not wrong, (
            f"{name}: status {status} {wrong} {start.said()[-3000:]}"
        )
        print(f"  {mode}: {name} after {len(rows_of(out))} rows", flush=True)

    start = Start(out, port, arguments)
    reached(start, marks[0])
    send(start.process, signal.SIGINT)
    end(start, "Ctrl-C", (1,))
    start = Start(out, port + 100, arguments)
    reached(start, marks[1])
    for process in family():
        if kind_of(process) == "rank":
            send(process, signal.SIGTERM)
    end(start, "SIGTERM")
    start = Start(out, port, arguments)
    reached(start, marks[2])
    send(next(process for process in family() if kind_of(process) == "rank"), signal.SIGKILL)
    end(start, "kill -9 of a rank", (1,))
    start = Start(out, port + 100, arguments)
    reached(start, marks[3])
    assert start.wait_for(lambda: list(out.glob("checkpoints/step_*.partial-*"))), start.said()[
        -3000:
    ]
    kill_all(family())
    end(start, "kill -9 of all in a save", (-9,))
    end(Start(out, port, arguments), "the end")


def settings_of(mode, steps):
    """Of a run that is broken four times."""
    saves = ["--save-every", str(max(1, steps // 10)), "--save-hf-every", str(steps)]
    return ["--steps", str(steps), "--mode", mode, *saves, *["--rebalance"] * (mode == "partial")]


def compare(name, found, expected):
    """Print what differs between two runs; returns whether anything does that may not."""
    worst, exact = {}, []
    for row, other in zip(
        map(same_in_both, found["rows"]), map(same_in_both, expected["rows"]), strict=True
    ):
        for column in sorted(row.keys() | other.keys()):
            a, b = row.get(column), other.get(column)
            if a != b and column in ("train/loss", "train/grad_norm"):
                worst[column] = max(worst.get(column, 0.0), abs(a - b) / max(abs(b), 1e-12))
            elif a != b:
                exact.append(f"step {row['step']} {column}: {a} and {b}")
    weights = found["weights"] == expected["weights"] and found["weights"] is not None
    losses = ", ".join(f"{column} {value:.1e}" for column, value in worst.items()) or "equal"
    print(
        f"{name}: {len(found['rows'])} rows; losses and gradient norms: {losses}; "
        f"final weights bit-equal: {weights}; "
        f"other columns that differ: {len(exact)} {exact[:5]}",
        flush=True,
    )
    return bool(exact) or not weights or any(value > 1e-6 for value in worst.values())


def exact(modes, steps, port, extra):
    """Returns whether anything differs."""
    found, differs = {}, False
    for mode in modes:
        arguments = [*settings_of(mode, steps), *extra]
        runs = PLACE / f"exact-{mode}"
        shutil.rmtree(runs, ignore_errors=True)
        runs.mkdir(parents=True)
        found[mode, "unbroken"] = unbroken(f"exact-{mode}", arguments, steps, port)
        start = Start(runs / "again", port, arguments)
        status, wrong = start.end()
        assert status == 0 and not wrong, f"the second run failed: {wrong} {start.said()[-3000:]}"
        found[mode, "again"] = fingerprint(runs / "again", steps)
        print(f"  {mode}: a second unbroken run took {start.seconds():.0f} s", flush=True)
        broken_run(runs / "broken", mode, steps, arguments, port)
        found[mode, "broken"] = fingerprint(runs / "broken", steps)
        for name in ("again", "broken"):
            differs |= compare(
                f"{mode}: {name} against unbroken", found[mode, name], found[mode, "unbroken"]
            )
    for mode in modes[1:]:
        first = modes[0]
        differs |= compare(
            f"{mode} against {first}", found[mode, "unbroken"], found[first, "unbroken"]
        )
    return differs


def counted(modes, steps, port):
    """The 4 resumes with over-dispatch, beside an unbroken run. Returns whether something is missing."""
    missing = False
    for mode in modes:
        arguments = [*settings_of(mode, steps), "--over-dispatch", "1.25"]
        runs = PLACE / f"counted-{mode}"
        shutil.rmtree(runs, ignore_errors=True)
        runs.mkdir(parents=True)
        status, wrong = Start(runs / "unbroken", port, arguments).end()
        assert status == 0 and not wrong, f"the unbroken run failed: {wrong}"
        broken_run(runs / "broken", mode, steps, arguments, port)
        for name, stops in (("unbroken", 0), ("broken", 2)):
            missing |= account(f"{mode}: {name}", runs / name, steps, stops)
    return missing


def account(name, out, steps, stops):
    """Print what became of a run's prompts and tokens; returns whether any is missing or used twice.

    A stop may leave answers of the step that it ended in the checkpoint: so many tokens come on top, in as
    many steps as stops.
    """
    rows = rows_of(out)
    curve = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    rows, folder = rows[:steps], out / "checkpoints" / f"step_{steps}"
    state = json.loads((folder / "common.json").read_text())
    trained = [
        state["config"]["prompts_per_step"] - int(row["rollout/lacking_groups"]) for row in rows
    ]
    assert all(trained), "a step that kept nothing doesn't tell how many groups it filtered"
    shares = [row["reward/zero_std_frac"] for row in rows]
    filtered = [round(n * share / (1 - share)) for n, share in zip(trained, shares, strict=True)]
    drawn, waiting = state["prompts"]["cursor"], len(state["prompts"]["requeued"])
    tokens = {part: [int(row[f"rollout/{part}"]) for row in rows] for part in ("tokens", *PARTS)}
    before = [0, *tokens["tokens_carried"][:-1]]
    steps_of_tokens = zip(tokens["tokens"], before, *map(tokens.get, PARTS), strict=True)
    extra = [sum(parts) - new - old for new, old, *parts in steps_of_tokens]
    became = f"{sum(trained)} trained + {sum(filtered)} filtered + {waiting} waiting"
    print(f"{name}: {drawn} prompts drawn = {became}", flush=True)
    sums = [sum(tokens[part]) for part in ("tokens", *PARTS[:2])]
    print(
        f"  {sums[0]} tokens written + {[n for n in extra if n]} in a step that was stopped "
        f"= {sums[1]} trained + {sums[2]} filtered "
        f"+ {tokens[PARTS[2]][-1]} carried; accuracy {curve}",
        flush=True,
    )
    return (
        drawn != sum(trained) + sum(filtered) + waiting
        or min(extra) < 0
        or sum(map(bool, extra)) > stops
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--first", "--seed", type=int, default=0)
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("--port", type=int, default=28000)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--counted", action="store_true")
    parser.add_argument("--steps", type=int, default=40)
    arguments, extra = parser.parse_known_args()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    modes = [arguments.mode] if arguments.mode else MODES
    if arguments.counted:
        sys.exit(counted(modes, arguments.steps, arguments.port))
    if arguments.exact:
        sys.exit(exact(modes, arguments.steps, arguments.port, extra))
    broken = []
    for number in range(arguments.first, arguments.first + arguments.trials):
        mode = arguments.mode or MODES[number % len(MODES)]
        broken += [number] * bool(trial(number, mode, arguments.port + 200 * (number % 2)))
    print(f"{arguments.trials} trials, broken: {broken or 'none'}", flush=True)
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
