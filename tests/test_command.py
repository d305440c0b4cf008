"""The plain command: what it says about bad input, how it ends on Ctrl-C, and a user's own models and prompts from start to end.

Each run is `torchrun run.py ...` in a session of its own, followed by a watcher that remembers every process the run starts.
The runs that fail go two at a time in the background while the tests wait for them in order.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import models
import psutil
import pytest

ROOT = Path(__file__).parent.parent
SMALL = ["--steps", "2", "--prompts-per-step", "4", "--answers-per-prompt", "4", "--max-new-tokens", "12"]
SMALL += ["--judge-max-new-tokens", "32"]
SMALL += ["--max-total-tokens", "8192", "--max-running-requests", "32", "--eval-every", "2"]
METRICS = [
    *("reward/mean", "reward/unfiltered_mean", "reward/zero_std_frac", "rollout/response_len_mean", "rollout/response_len_max"),
    *("rollout/truncated_frac", "rollout/waves", "rollout/aborted", "genrm/accept_frac", "genrm/failed", "genrm/p50_s", "genrm/p99_s"),
    *("genrm/false_positive_frac", "train/loss", "train/grad_norm", "train/entropy", "train/kl", "train/clip_frac", "train/lr"),
    *("train/engine_logprob_diff_max", "balance/max_over_mean", "time/step_s", "time/serve_s", "time/rollout_s"),
    *("time/genrm_s", "time/train_s", "time/switch_s", "time/sync_s", "occupancy/rollout", "occupancy/genrm"),
    *("perf/tokens_per_s", "split/rollout_ranks"),
]


# ---------------------------------------------------------------- one run


@dataclass
class Run:
    """One `torchrun run.py`; `processes` are all that it started, `left` those that outlived it."""

    arguments: list[str]
    folder: Path
    port: int
    ranks: int = 2
    processes: set[psutil.Process] = field(default_factory=set)
    status: int | None = None
    left: list[str] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def start(self):
        self.folder.mkdir(parents=True)
        command = [Path(sys.executable).with_name("torchrun"), "--nproc-per-node", str(self.ranks), "--master-port", str(self.port + 9)]
        command += ["run.py", "--out", str(self.folder / "out"), "--port", str(self.port), *self.arguments]
        with (self.folder / "stdout").open("wb") as out, (self.folder / "stderr").open("wb") as err:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            self._launcher = psutil.Popen(command, cwd=ROOT, stdout=out, stderr=err, env=environment, start_new_session=True)
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def _watch(self):
        """Remember every descendant. psutil knows a process by its id and its start, so a reused id is no false alarm."""
        while not self._over.wait(0.1):
            for process in [self._launcher, *self.processes]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.processes.update(process.children(recursive=True))

    def finish(self, timeout_s=400.0):
        """Wait for the end; what is left 5 seconds later is noted and killed."""
        try:
            self.status = self._launcher.wait(timeout_s)
        finally:
            if self._launcher.is_running() and self._launcher.status() != psutil.STATUS_ZOMBIE:
                os.killpg(self._launcher.pid, signal.SIGKILL)
            time.sleep(0.3)
            _, alive = psutil.wait_procs(self.processes, timeout=5)
            self._over.set()
            self._watcher.join()
            for process in alive:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.left.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
                    process.kill()
        return self

    def wait_for(self, condition, timeout_s=240.0):
        deadline = time.monotonic() + timeout_s
        while not condition(self):
            assert time.monotonic() < deadline and self._launcher.is_running(), f"never came so far: {self.stderr}{self.stdout}"
            time.sleep(0.05)
        return self

    def press_ctrl_c(self):
        """As a terminal does: SIGINT to the foreground process group."""
        os.killpg(self._launcher.pid, signal.SIGINT)

    @property
    def stdout(self):
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self):
        return (self.folder / "stderr").read_text()

    def commands(self):
        """Command lines of what runs now."""
        for process in list(self.processes):
            with contextlib.suppress(psutil.NoSuchProcess):
                yield process, " ".join(process.cmdline())

    def check_nothing_is_left(self):
        assert not self.left, self.left
        for offset in (*range(2 * self.ranks), 9):
            with socket.socket() as probe:
                assert probe.connect_ex(("127.0.0.1", self.port + offset)) != 0, f"port {self.port + offset} is taken"

    def check_one_line(self, *needles):
        assert self.status != 0
        for needle in needles:
            assert needle in self.stderr, f"{needle!r} not in: {self.stderr}"
        assert len(self.stderr.splitlines()) == 1, self.stderr
        assert "Traceback" not in self.stderr + self.stdout


# ---------------------------------------------------------------- a user's own models and prompts


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """actor: answers with some digit. judge: large digits are correct. prompts: 24 chat rows with answers."""
    home = tmp_path_factory.mktemp("own")
    models.save_model(home / "actor", models.any_digit, steps=40)
    models.save_model(home / "judge", models.verdict, steps=100)
    rows = [{"messages": [{"role": "user", "content": models.question(i, 2)}], "answer": str(i + 2)} for i in range(24)]
    (home / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return home


def with_own(own, *more, judge="judge", model="actor", data="prompts.jsonl"):
    return ["--model", str(own / model), "--judge", str(own / judge), "--data", str(own / data), *SMALL, *more]


def broken_model(own, name, **files):
    """A copy of the actor's directory with some files replaced (or left out: None)."""
    home = own / name
    shutil.copytree(own / "actor", home, dirs_exist_ok=True)
    for file, content in files.items():
        (path := home / file.replace("_json", ".json").replace("_safetensors", ".safetensors")).unlink()
        if content is not None:
            path.write_bytes(content)
    return name


def broken_data(own, name, text):
    (own / name).write_text(text)
    return name


def truncated(own):
    return (own / "actor" / "model.safetensors").read_bytes()[:-1000]


def changed_config(own, **changes):
    return json.dumps(json.loads((own / "actor" / "config.json").read_text()) | changes).encode()


# ---------------------------------------------------------------- bad input: name -> (arguments, what the one line names, ranks)

GOOD_ROW = '{"prompt": "What is 3+4?"}\n'
LONG_ROW = json.dumps({"prompt": "What is 3+4? " * 100}) + "\n"
BAD_INPUT = {
    # what the settings alone tell: no import of torch, no engine
    "one rank": lambda own: (["--mode", "partial"], ["--mode partial needs at least 2 ranks"], 1),
    "no rank for genrm": lambda own: (["--rollout-ranks", "2"], ["--rollout-ranks 2 leaves 0 of 2 ranks"], 2),
    "uneven batch": lambda own: (["--prompts-per-step", "15"], ["--prompts-per-step 15", "2 data-parallel ranks"], 2),
    "unknown flag": lambda own: (["--stepz", "3"], ["--stepz"], 2),
    "unknown preset": lambda own: (["--preset", "huge"], ["--preset huge is unknown; choose one of tiny, cuda"], 2),
    # what the files tell
    "missing model": lambda own: (with_own(own, "--mode", "full", model="nowhere"), [str(own / "nowhere")], 1),
    "config.json isn't JSON": lambda own: (
        with_own(own, "--mode", "full", model=broken_model(own, "not-json", config_json=b"{")), ["not-json"], 1),
    "no weights": lambda own: (
        with_own(own, "--mode", "full", model=broken_model(own, "no-weights", model_safetensors=None)), ["no-weights"], 1),
    "weights cut short": lambda own: (
        with_own(own, model=broken_model(own, "cut-short", model_safetensors=truncated(own))), ["cut-short", "model.safetensors"], 2),
    "unsupported architecture": lambda own: (
        with_own(own, model=broken_model(own, "mamba", config_json=changed_config(own, model_type="mamba"))), ["mamba"], 2),
    "malformed JSONL": lambda own: (
        with_own(own, "--mode", "full", data=broken_data(own, "bad.jsonl", GOOD_ROW + "{nope}\n")), ["bad.jsonl:2", "not valid JSON"], 1),
    "no prompt": lambda own: (
        with_own(own, "--mode", "full", data=broken_data(own, "empty.jsonl", "\n")), ["empty.jsonl", "no prompt"], 1),
    "prompt too long": lambda own: (
        with_own(own, "--mode", "full", data=broken_data(own, "long.jsonl", GOOD_ROW + LONG_ROW)), ["long.jsonl:2", "-len"], 1),
    # what only running engines tell
    "judge never parses": lambda own: (
        with_own(own, "--max-judge-failures", "4", judge="actor"), ["--judge", "--judge-format chat", "--max-judge-failures 4"], 2),
}  # fmt: skip


@pytest.fixture(scope="module")
def bad_runs(request, own, tmp_path_factory):
    """name -> the run, begun two at a time, slow ones first; only those that this session asks for."""
    asked = [item.callspec.params["case"] for item in request.session.items if item.originalname == "test_bad_input"]
    home, pool = tmp_path_factory.mktemp("bad"), ThreadPoolExecutor(2)

    def one(number, name):
        arguments, needles, ranks = BAD_INPUT[name](own)
        return Run(arguments, home / str(number), 33000 + 20 * number, ranks).start().finish(), needles

    begun = {name: pool.submit(one, number, name) for number, name in enumerate(BAD_INPUT) if name in asked}
    yield begun
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(bad_runs, case):
    """Exit status not 0, one line that names the setting or the file, no traceback, and nothing left behind."""
    run, needles = bad_runs[case].result()
    run.check_one_line(*needles)
    run.check_nothing_is_left()


def test_a_taken_port_is_named(own, tmp_path):
    """The second rank's engine finds its port taken: the line names it, and no engine is left, the first rank's included."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 34003))
        taken.listen()
        run = Run(with_own(own), tmp_path / "run", 34000).start().finish()
    run.check_one_line("34003", "--port")
    run.check_nothing_is_left()


# ---------------------------------------------------------------- Ctrl-C


def handles_sigterm(process):
    """Whether the process has installed its handlers: bit 14 of the signals it catches."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("SigCgt:")[1].split()[0], 16) >> (signal.SIGTERM - 1) & 1


def importing(run):
    """Both ranks run and have installed their handlers, and no more."""
    ranks = [process for process, command in run.commands() if "run.py" in command and "torchrun" not in command]
    return len(ranks) == run.ranks and all(handles_sigterm(rank) for rank in ranks)


def starting_engines(run):
    """Both servers run, and import."""
    return sum("cpu.sglang" in command for _, command in run.commands()) >= 2


def serving(run):
    """One step is done."""
    return (run.folder / "out" / "metrics.jsonl").is_file()


MOMENTS = [importing, starting_engines, serving]


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
def test_ctrl_c(own, tmp_path, moment):
    """No traceback and nothing left within half a minute, whenever it is pressed."""
    run = Run(with_own(own, "--steps", "100000"), tmp_path / "run", 34100 + 20 * MOMENTS.index(moment)).start()
    try:
        run.wait_for(moment)
        run.press_ctrl_c()
    finally:
        run.finish(30)
    assert run.status != 0 and "Traceback" not in run.stderr + run.stdout, run.stderr
    assert "interrupted" in run.stderr.splitlines()
    assert len(run.stderr.splitlines()) <= 1 + run.ranks, run.stderr
    run.check_nothing_is_left()


# ---------------------------------------------------------------- from start to end


@pytest.fixture(scope="module")
def own_run(own, tmp_path_factory):
    return Run(with_own(own), tmp_path_factory.mktemp("own-run") / "run", 34300).start().finish()


def test_a_users_own_models_and_prompts(own, own_run):
    """Two steps in partial mode: exit status 0, no process left, every file that was promised."""
    assert own_run.status == 0, own_run.stderr + own_run.stdout
    own_run.check_nothing_is_left()
    assert "Traceback" not in own_run.stderr and "warning" not in (own_run.stderr + own_run.stdout).lower()
    out = own_run.folder / "out"
    config = json.loads((out / "config.json").read_text())
    assert (config["model"], config["judge_format"], config["steps"], config["ranks"]) == (str(own / "actor"), "chat", 2, 2)
    assert {"torch", "megatron-core", "sglang", "transformers"} <= config["versions"].keys() and config["commit"]
    trace = json.loads((out / "trace.json").read_text())
    lanes = {(event["name"], event["pid"]) for event in trace["traceEvents"]}
    assert lanes >= {("rollout", 0), ("genrm", 1), ("train", 0), ("train", 1)}
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((out / "tensorboard").iterdir())) == 1
    assert {path.name for path in (out / "logs").iterdir()} == {"rollout-0.log", "genrm-1.log"}


def test_its_metrics(own_run):
    """A row a step, every promised name, engine and trainer agree, and what they say fits together."""
    *rows, last = [json.loads(line) for line in (own_run.folder / "out" / "metrics.jsonl").open()]
    assert [row["step"] for row in (*rows, last)] == [0, 1, 2]
    for row in rows:
        assert not set(METRICS) - row.keys()
        assert row["train/engine_logprob_diff_max"] <= 1e-4
        assert row["split/rollout_ranks"] == 1 and 1 <= row["rollout/waves"] <= 4
        assert row["reward/unfiltered_mean"] == row["genrm/accept_frac"] and 0 < row["reward/mean"] < 1
        assert row["genrm/failed"] == 0 and row["train/grad_norm"] > 0
        assert row["time/step_s"] >= row["time/serve_s"] + row["time/train_s"]
    assert 0 <= rows[0]["eval/accuracy"] <= 1 and 0 <= last["eval/accuracy"] <= 1 and "eval/accuracy" not in rows[1]


def test_its_samples(own_run):
    """Questions from the file, answers in text, and the judge's own words beside the verdict that was read from them."""
    samples = [json.loads(line) for line in (own_run.folder / "out" / "samples.jsonl").open()]
    assert {sample["step"] for sample in samples} == {0, 1}
    judged = set()
    for sample in samples:
        assert sample["question"].startswith("What is ") and sample["answer_key"].isdigit()
        if sample["finish"] == "stop" and sample["response"].strip():
            assert sample["critique"].splitlines()[-1] == f"Verdict: {'correct' if sample['verdict'] else 'incorrect'}"
            assert sample["reward"] == float(sample["verdict"])
            judged.add((sample["response"], models.verdict_on(sample["response"]) == "correct", sample["verdict"]))
        else:
            assert (sample["verdict"], sample["reward"], sample["critique"]) == (False, 0.0, "no final answer")
    digits = [(expected, verdict) for response, expected, verdict in judged if len(response) == 1]
    assert digits and all(expected == verdict for expected, verdict in digits)
