"""The plain command: what it says about bad input, how it ends on Ctrl-C, a user's own models and prompts.

Each run is `torchrun run.py ...` in a session of its own, under a guard that sees every process it starts.
The runs go two at a time in the background, the longest first, while the tests wait for theirs.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

import models

ROOT = Path(__file__).parent.parent
SMALL = [
    "--steps",
    "2",
    "--prompts-per-step",
    "4",
    "--answers-per-prompt",
    "4",
    "--max-new-tokens",
    "12",
]
SMALL += ["--judge-max-new-tokens", "32"]
SMALL += ["--max-running-requests", "32", "--eval-every", "2"]
METRICS = [
    *("reward/mean", "reward/unfiltered_mean", "reward/zero_std_frac", "rollout/response_len_mean"),
    *("rollout/response_len_max", "rollout/truncated_frac", "rollout/waves", "rollout/aborted"),
    *(
        "genrm/accept_frac",
        "genrm/failed",
        "genrm/p50_s",
        "genrm/p99_s",
        "genrm/false_positive_frac",
    ),
    *("train/loss", "train/grad_norm", "train/entropy", "train/kl", "train/clip_frac", "train/lr"),
    *(
        "train/engine_logprob_diff_max",
        "balance/max_over_mean",
        "time/step_s",
        "time/serve_s",
        "time/rollout_s",
    ),
    *(
        "time/genrm_s",
        "time/train_s",
        "time/switch_s",
        "time/sync_s",
        "occupancy/rollout",
        "occupancy/genrm",
    ),
    *("perf/tokens_per_s", "split/rollout_ranks"),
]


TORCHRUNS = re.compile(r"[WE]\d{4} .*torch/distributed/")
OURS = re.compile(rf'File "{ROOT}/(?!\.venv)')  # in a traceback

# ---------------------------------------------------------------- one run


@dataclass
class Run:
    """One `torchrun run.py` under guard.py, to which all that it starts belongs, whoever dies first."""

    folder: Path
    port: int
    arguments: list[str] = field(default_factory=list)
    ranks: int = 2
    launch: tuple[str, ...] = ()  # for torchrun itself
    program: str = "run.py"
    needles: tuple[str, ...] = ()  # what its one line on stderr must name
    status: int | None = None
    left: list[str] = field(default_factory=list)  # command lines of what outlived it
    bystander_spared: bool = False  # whether it killed nobody else's process

    def start(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, ROOT / "tests" / "guard.py", self.folder / "result.json"]
        command += [Path(sys.executable).with_name("torchrun"), "--nproc-per-node", str(self.ranks)]
        command += ["--master-port", str(self.port + 9), *self.launch]
        command += [self.program, "--out", str(self.folder / "out"), "--port", str(self.port)]
        command += self.arguments
        with (self.folder / "stdout").open("wb") as out, (self.folder / "stderr").open("wb") as err:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            pipes = dict(stdout=out, stderr=err, env=environment, start_new_session=True)
            self.guard = psutil.Popen(command, cwd=ROOT, **pipes)
        self.seen = set()
        return self

    def processes(self):
        """What runs now: (process, command line)."""
        self.seen.update(self.guard.children(recursive=True))
        for process in list(self.seen):
            with contextlib.suppress(psutil.NoSuchProcess):
                yield process, " ".join(process.cmdline())

    def finish(self, timeout_s=500.0):
        """Wait for the end. A guard that was killed itself leaves no result."""
        try:
            self.guard.wait(timeout_s)
            if (result := self.folder / "result.json").is_file():
                vars(self).update(json.loads(result.read_text()))
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.seen.update(self.guard.children(recursive=True))
            for process in (*self.seen, self.guard):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        return self

    def wait_for(self, condition, timeout_s=300.0):
        deadline = time.monotonic() + timeout_s
        while not condition(self):
            is_late = time.monotonic() > deadline or not self.guard.is_running()
            assert not is_late, f"never came so far: {self.stderr}{self.stdout}"
            time.sleep(0.05)
        return self

    def press_ctrl_c(self):
        """As a terminal does: SIGINT to the foreground process group."""
        list(self.processes())
        os.killpg(self.guard.pid, signal.SIGINT)

    @property
    def stdout(self):
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self):
        return (self.folder / "stderr").read_text()

    def check_nothing_is_left(self):
        """No process and no port; and nothing that belongs to others was touched."""
        assert self.bystander_spared, "it ended processes that aren't its own"
        assert not self.left, self.left
        for offset in (*range(2 * self.ranks), 9):
            with socket.socket() as probe:
                is_taken = probe.connect_ex(("127.0.0.1", self.port + offset)) == 0
            assert not is_taken, f"port {self.port + offset} is taken"

    @property
    def ours(self):
        """Lines on stderr that aren't torchrun's: it logs some, its own traceback and report come last."""
        before = self.stderr.partition("Traceback (most recent call last):")[0]
        return [line for line in before.splitlines() if not TORCHRUNS.match(line)]

    def check_no_traceback_of_ours(self):
        assert "Traceback" not in self.stdout and not OURS.search(self.stderr), self.stderr

    def check_one_line(self, *needles):
        """Said once, in one line; ranks leave with status 2, and torchrun, which quotes the line, with 1."""
        assert self.status == 1 and len(self.ours) == 1, self.stderr
        for needle in ("error: ", *needles):
            assert needle in self.ours[0], f"{needle!r} not in: {self.stderr}"
        assert "exitcode  : 2 " in self.stderr and f"traceback : {self.ours[0]}" in self.stderr, (
            self.stderr
        )
        self.check_no_traceback_of_ours()


# ---------------------------------------------------------------- a user's own models and prompts


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """actor: answers with some digit. judge: large digits are correct. prompts: 24 chat rows with answers."""
    home = tmp_path_factory.mktemp("own")
    models.save_model(home / "actor", models.any_digit, steps=40)
    models.save_model(home / "judge", models.verdict, steps=140)
    rows = [
        {"messages": [{"role": "user", "content": models.question(i, 2)}], "answer": str(i + 2)}
        for i in range(24)
    ]
    (home / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return home


def with_own(own, *more, judge="judge", model="actor", data="prompts.jsonl"):
    return [
        "--model",
        str(own / model),
        "--judge",
        str(own / judge),
        "--data",
        str(own / data),
        *SMALL,
        *more,
    ]


# ---------------------------------------------------------------- bad input: arguments, ranks, what is named

WEIGHTS = "model.safetensors"
GOOD_ROW = '{"prompt": "What is 3+4?"}\n'
LONG_ROW = json.dumps({"prompt": "What is 3+4? " * 100}) + "\n"
GPT2 = json.dumps(
    {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "vocab_size": 384}
)


def bad_model(own, name, file, change, *needles):
    """The actor's directory with one file changed, or left out."""
    shutil.copytree(own / "actor", own / name)
    content = change((own / name / file).read_bytes())
    (own / name / file).unlink()
    if content:
        (own / name / file).write_bytes(content)
    return with_own(own, "--mode", "full", model=name), 1, name, *needles


def bad_data(own, name, text, *needles):
    (own / name).write_text(text)
    return with_own(own, "--mode", "full", data=name), 1, *needles


BAD_INPUT = {
    # what only running engines tell
    "judge never parses": lambda own: (
        with_own(own, "--steps", "100", judge="actor"),
        2,
        "--judge",
        "none of the first",
        "--judge-format chat",
    ),
    # what the files tell
    "weights cut short": lambda own: bad_model(
        own, "cut", WEIGHTS, lambda old: old[:-1000], WEIGHTS
    ),
    "unsupported architecture": lambda own: bad_model(
        own, "other", "config.json", lambda old: GPT2.encode(), "gpt2"
    ),
    "no weights": lambda own: bad_model(
        own, "no-weights", WEIGHTS, lambda old: None, "safetensors"
    ),
    "config.json isn't JSON": lambda own: bad_model(
        own, "not-json", "config.json", lambda old: b"{"
    ),
    "missing model": lambda own: (
        with_own(own, "--mode", "full", model="nowhere"),
        1,
        str(own / "nowhere"),
    ),
    "malformed JSONL": lambda own: bad_data(
        own, "bad.jsonl", GOOD_ROW + "{nope}\n", "bad.jsonl:2", "not valid"
    ),
    "no prompt": lambda own: bad_data(own, "empty.jsonl", "\n", "empty.jsonl", "holds no row"),
    "prompt too long": lambda own: bad_data(
        own, "long.jsonl", GOOD_ROW + LONG_ROW, "long.jsonl:2", "--max-model-len"
    ),
    "out can't be written": lambda own: (
        with_own(own, "--out", str(own / "prompts.jsonl" / "out")),
        2,
        "--out ",
        "prompts.jsonl/out can't be used",
    ),
    # what the settings alone tell: before torch is imported
    "one rank": lambda own: (["--mode", "partial"], 1, "--mode partial needs at least 2 ranks"),
    "no rank for genrm": lambda own: (
        ["--rollout-ranks", "2"],
        2,
        "--rollout-ranks 2 leaves 0 of 2 ranks",
    ),
    "unknown algorithm": lambda own: (
        ["--algorithm", "ppp"],
        2,
        "--algorithm ppp is unknown; choose one of",
    ),
    "unknown flag": lambda own: (["--stepz", "3"], 2, "--stepz"),
    "unknown preset": lambda own: (
        ["--preset", "huge"],
        2,
        "--preset huge is unknown; choose one of base, tiny",
    ),
}


# ---------------------------------------------------------------- moments for Ctrl-C


def handles_sigterm(process):
    """Whether the process has installed its handlers: bit 14 of the signals it catches."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("SigCgt:")[1].split()[0], 16) >> (signal.SIGTERM - 1) & 1


def importing(run):
    """Both ranks run and have installed their handlers, and no more."""
    ranks = [
        process
        for process, command in run.processes()
        if "run.py" in command and "torchrun" not in command
    ]
    return len(ranks) == run.ranks and all(handles_sigterm(rank) for rank in ranks)


def starting_engines(run):
    """Both servers run, and import."""
    return sum("cpu.sglang" in command for _, command in run.processes()) >= 2


def serving(run):
    """One step is done."""
    return (run.folder / "out" / "metrics.jsonl").is_file()


MOMENTS = {"serving": serving, "starting engines": starting_engines, "importing": importing}


# ---------------------------------------------------------------- all runs


def to_the_end(own, run):
    """With a batch that the two ranks can't share evenly."""
    run.arguments = with_own(own, "--prompts-per-step", "5")
    return run.start().finish()


def by_a_rule(own, run):
    """One step on one rank, in whose mode there would be nobody to judge; in bfloat16."""
    files = ["--model", str(own / "actor"), "--data", str(own / "prompts.jsonl")]
    run.arguments, run.ranks = [*files, *SMALL, "--rule", "forbidden:7", "--steps", "1"], 1
    run.arguments += ["--dtype", "bfloat16", "--algorithm", "gspo", "kl_coef=0.01", "kl_in=reward"]
    return run.start().finish()


def interrupted_when(moment):
    def scenario(own, run):
        run.arguments = with_own(own, "--steps", "100000")
        run.start()
        try:
            run.wait_for(moment)
            run.press_ctrl_c()
        finally:
            run.finish(30)
        return run

    return scenario


def launcher_killed(own, run):
    """kill -9 of torchrun alone."""
    run.arguments = with_own(own)
    run.start()
    try:
        run.wait_for(importing)
        [torchrun] = [
            p
            for p, command in run.processes()
            if "torchrun" in command and p.ppid() == run.guard.pid
        ]
        torchrun.kill()
    finally:
        run.finish(90)
    return run


def port_taken(own, run):
    """Rank 1's engine finds its port taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", run.port + 3))
        taken.listen()
        return to_the_end(own, run)


def badly(name):
    def scenario(own, run):
        run.arguments, run.ranks, *run.needles = BAD_INPUT[name](own)
        return run.start().finish()

    return scenario


SCENARIOS = {"own": to_the_end, "rule": by_a_rule, "port": port_taken, "orphans": launcher_killed}
SCENARIOS |= {name: interrupted_when(moment) for name, moment in MOMENTS.items()}
SCENARIOS |= {name: badly(name) for name in BAD_INPUT}


@pytest.fixture(scope="module")
def runs(request, own, tmp_path_factory):
    """name -> the run, two at a time; only those that this session's tests ask for."""
    asked = {
        item.callspec.params["name"] for item in request.session.items if item.path == request.path
    }
    home, pool = tmp_path_factory.mktemp("runs"), ThreadPoolExecutor(2)
    begun = {
        name: pool.submit(scenario, own, Run(home / str(number), 21000 + 20 * number))
        for number, (name, scenario) in enumerate(SCENARIOS.items())
        if name in asked
    }
    yield begun
    pool.shutdown(cancel_futures=True)


@pytest.fixture
def run(runs, name):
    """The run that a test is about, ended."""
    return runs[name].result()


# ---------------------------------------------------------------- what is to be seen


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input(run):
    """One line that names the setting or the file, no traceback of ours, and nothing left behind."""
    run.check_one_line(*run.needles)
    run.check_nothing_is_left()


@pytest.mark.parametrize("name", ["port"])
def test_a_taken_port_is_named(run):
    """By number; the engine of the other rank, which had found its port free, is gone too."""
    run.check_one_line(str(run.port + 3), "--port")
    run.check_nothing_is_left()


@pytest.mark.parametrize("name", MOMENTS)
def test_ctrl_c(run, name):
    """One line and nothing left within half a minute, whenever it is pressed. While it trains, it saves."""
    assert run.status == 1  # torchrun's, after a signal
    run.check_no_traceback_of_ours()
    if name == "serving":
        (line,) = run.ours
        assert re.match(
            r"stopped after \d+ of 100000 steps; go on with: torchrun --nproc-per-node 2 run.py ",
            line,
        )
        done = int(line.split()[2])
        assert (run.folder / "out" / "checkpoints" / f"step_{done}" / "SHA256SUMS").is_file()
    else:
        assert run.ours == ["interrupted"]
    run.check_nothing_is_left()


@pytest.mark.parametrize("name", ["orphans"])
def test_when_the_launcher_is_killed_the_ranks_go_and_nobody_else(run):
    """A rank ends with its launcher, its engines with it, and no process of others."""
    run.check_nothing_is_left()


@pytest.mark.parametrize("name", ["own"])
def test_a_users_own_models_and_prompts(own, run):
    """Two steps in partial mode: exit status 0, no process left, every file that was promised."""
    assert run.status == 0, run.stderr + run.stdout
    run.check_nothing_is_left()
    assert "Traceback" not in run.stderr and "warning" not in (run.stderr + run.stdout).lower()
    out = run.folder / "out"
    config = json.loads((out / "config.json").read_text())
    assert (config["model"], config["judge"]) == (str(own / "actor"), [str(own / "judge")])
    assert (config["judge_format"], config["steps"], config["ranks"]) == (["chat"], 2, 2)
    assert config["algorithm_settings"]["clip_high"] == 0.28 and config["commit"]
    assert {"torch", "megatron-core", "sglang", "transformers"} <= config["versions"].keys()
    trace = json.loads((out / "trace.json").read_text())
    lanes = {(event["name"], event["pid"]) for event in trace["traceEvents"]}
    assert lanes >= {("rollout", 0), ("genrm", 1), ("train", 0), ("train", 1)}
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((out / "tensorboard").iterdir())) == 1
    assert {path.name for path in (out / "logs").iterdir()} == {"rollout-0.log", "genrm-1.log"}


@pytest.mark.parametrize("name", ["own"])
def test_its_metrics(run):
    """A row a step, every promised name, engine and trainer agree, and what they say fits together."""
    *rows, last = [json.loads(line) for line in (run.folder / "out" / "metrics.jsonl").open()]
    assert [row["step"] for row in (*rows, last)] == [0, 1, 2]
    for row in rows:
        assert not set(METRICS) - row.keys()
        assert row["train/engine_logprob_diff_max"] <= 1e-4
        assert row["split/rollout_ranks"] == 1 and 1 <= row["rollout/waves"] <= 4
        assert (
            row["reward/unfiltered_mean"] == row["genrm/accept_frac"] and 0 < row["reward/mean"] < 1
        )
        assert row["genrm/failed"] == 0 and row["train/grad_norm"] > 0
        assert row["time/step_s"] >= row["time/serve_s"] + row["time/train_s"]
    assert 0 <= rows[0]["eval/accuracy"] <= 1 and 0 <= last["eval/accuracy"] <= 1
    assert "eval/accuracy" not in rows[1]


@pytest.mark.parametrize("name", ["rule"])
def test_a_step_in_bfloat16(run):
    """Engine and trainer disagree, as they do in 16 bits; that costs no answer its gradient, and no KL."""
    row, _ = [json.loads(line) for line in (run.folder / "out" / "metrics.jsonl").open()]
    mean, most = (row[f"train/engine_logprob_diff_{name}"] for name in ("mean", "max"))
    assert 1e-5 < mean < 0.05 and mean <= row["train/engine_logprob_diff_p999"] <= most
    assert row["train/clip_frac"] == 0 and row["train/grad_norm"] > 0
    assert row["train/reference_kl"] == pytest.approx(0, abs=1e-6)  # at the start weights


@pytest.mark.parametrize("name", ["rule"])
def test_a_rule_rewards_without_a_judge(run):
    """It trains, no genrm was started, and the reward is the rule's word on the text."""
    assert run.status == 0, run.stderr + run.stdout
    run.check_nothing_is_left()
    assert {path.name for path in (run.folder / "out" / "logs").iterdir()} == {"rollout-0.log"}
    row, last = [json.loads(line) for line in (run.folder / "out" / "metrics.jsonl").open()]
    assert row["train/grad_norm"] > 0 and last["step"] == 1
    assert "genrm/accept_frac" not in row and "rollout/correct_frac" in row
    samples = [json.loads(line) for line in (run.folder / "out" / "samples.jsonl").open()]
    assert samples and all(s["verdict"] is None for s in samples)
    assert all(s["reward"] == float("7" in s["response"]) for s in samples)


@pytest.mark.parametrize("name", ["own"])
def test_its_samples(run):
    """Questions from the file, answers in text, the judge's own words beside the verdict read from them."""
    samples = [json.loads(line) for line in (run.folder / "out" / "samples.jsonl").open()]
    assert {sample["step"] for sample in samples} == {0, 1}
    judged = set()
    for sample in samples:
        assert sample["question"].startswith("What is ") and sample["answer_key"].isdigit()
        if sample["finish"] == "stop" and sample["response"].strip():
            verdict = "correct" if sample["verdict"] else "incorrect"
            assert sample["critique"].splitlines()[-1] == f"Verdict: {verdict}"
            assert sample["reward"] == float(sample["verdict"])
            expected = models.verdict_on(sample["response"]) == "correct"
            judged.add((sample["response"], expected, sample["verdict"]))
        else:
            assert (sample["verdict"], sample["reward"], sample["critique"]) == (
                False,
                0.0,
                "no final answer",
            )
    digits = [(expected, verdict) for response, expected, verdict in judged if len(response) == 1]
    assert sum(expected == verdict for expected, verdict in digits) > 0.7 * len(
        digits
    )  # it was taught for seconds
