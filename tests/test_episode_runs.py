"""Whole runs with an environment, with real engines and trainers: each mode plays the same episodes, and a
run that was killed or stopped plays them again. A step that hangs ends the run."""

import json
import signal
from pathlib import Path

import pytest

from tests.support.launched import Run, rows_done, saved
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.slow

STEPS = 3
SHORT = ("--log-samples", "1000", "--prompts-per-step", "4", "--eval-every", "3")
SHORT += ("--save-every", "1", "--steps", str(STEPS), "--save-hf-every", str(STEPS))
SHORT += ("--max-new-tokens", "96")
FINAL = f"hf/step_{STEPS}/model.safetensors"
HINT = '''
"""After a wrong answer the question comes again; of every third prompt twice."""

import json
from pathlib import Path

from environment import Step

LOG = Path(__file__).with_name("log.jsonl")


class Environment:
    def __init__(self, sample, *, seed):
        self.question, self.sum = sample.question, sample.answer_key
        self.hints = 1 + (seed % 3 == 0)
        self.heard = [seed, sample.prompt_id, sample.index]

    def step(self, text):
        self.heard.append(text)
        if text.endswith(f">{self.sum}"):
            return Step(reward=1.0 + 0.5 * self.hints, done=True)
        if not self.hints:
            return None
        self.hints -= 1
        return Step(self.question, 0.25 * ("=" in text), metrics={"hints": self.hints})

    def score(self):
        return 0.125

    def close(self):
        with LOG.open("a") as file:
            file.write(json.dumps(self.heard) + chr(10))
'''
HANGS = """
import threading


class Environment:
    def __init__(self, sample, *, seed):
        self.is_odd = seed % 2

    def step(self, text):
        if self.is_odd:
            threading.Event().wait()
        return 1.0
"""


def given(folder: Path, text: str = HINT) -> tuple[str, ...]:
    path = folder / "hint.py"
    path.write_text(text)
    return (*SHORT, "--environment", str(path))


@pytest.fixture(scope="module")
def hint(tmp_path_factory) -> tuple[str, ...]:
    return given(tmp_path_factory.mktemp("environment"))


@pytest.fixture(scope="module")
def unbroken(hint, tmp_path_factory):
    """Three steps in partial mode on four ranks: what the others come to."""
    return Run(tmp_path_factory.mktemp("unbroken"), *hint, ranks=4).ended()


def check_as(run: Run, other: Run) -> None:
    """The same numbers, episodes and weights, to the last bit."""
    run.check_as(other)
    assert (run.out / FINAL).read_bytes() == (other.out / FINAL).read_bytes()


def check_episodes(run: Run) -> int:
    """Each that was trained on is, turn for turn, what an environment has heard. Returns their number."""
    path = Path(json.loads((run.out / "config.json").read_text())["environment"])
    heard = {}
    for line in path.with_name("log.jsonl").read_text().splitlines():
        seed, prompt_id, _, *turns = json.loads(line)
        heard.setdefault(prompt_id, []).append(turns)
        assert len(turns) <= 2 + (seed % 3 == 0)
    samples = run.rows("samples.jsonl")
    for sample in samples:
        texts = [sample["question"].join(turns) for turns in heard[sample["prompt_id"]]]
        assert sample["response"] in texts or sample["finish"] == "length"
    return len(samples)


def test_a_run_plays_episodes(unbroken):
    """Engine and trainer agree; each policy's token has been trained on, no reply's."""
    unbroken.check_nothing_is_left()
    assert check_episodes(unbroken) == STEPS * 32
    *rows, last = unbroken.rows()
    for row in rows:
        assert row["train/engine_logprob_diff_max"] <= 1e-4 and row["train/grad_norm"] > 0
        assert 1 < row["environment/turns_mean"] <= 3 and row["environment/tokens"] > 0
        assert row["environment/lost_frac"] == 0 <= row["environment/hints"] <= 1
        assert row["train/tokens"] == row["rollout/tokens_trained"]
    assert {"eval/accuracy", "eval/reward_mean"} <= last.keys()
    spans = json.loads((unbroken.out / "trace.json").read_text())["traceEvents"]
    assert "environment" in {span["name"] for span in spans}


@pytest.mark.parametrize("mode", ["full", "fused"])
def test_all_modes_play_the_same_episodes(tmp_path, hint, unbroken, mode):
    """Also if answers move in fused mode to another engine in the middle of an episode."""
    run = Run(tmp_path, *hint, "--mode", mode, "--tail", "0.5", ranks=4).ended()
    check_as(run, unbroken)
    moved = sum(row.get("rollout/moved", 0) for row in run.rows())
    assert (moved > 0) == (mode == "fused")


def test_a_killed_run_plays_on(tmp_path, hint, unbroken):
    run = Run(tmp_path, *hint, ranks=4).struck((saved(1), Run.kill_all))
    assert len(run.rows()) < STEPS + 1
    check_as(run.again(), unbroken)


def test_served_ahead_a_stopped_run_plays_on(tmp_path, hint):
    """By its own rule, and twice the same."""
    ahead = (*hint, "--placement", "standalone", "--ahead", "1")
    unbroken = Run(tmp_path / "unbroken", *ahead, ranks=4).ended()
    assert check_episodes(unbroken) == STEPS * 32
    stop = (rows_done(1), lambda run: run.launcher().send_signal(signal.SIGTERM))
    run = Run(tmp_path / "run", *ahead, ranks=4).struck(stop)
    run.check_no_traceback_of_ours()
    assert run.status == 1 and len(run.rows()) <= STEPS
    check_as(run.again(), unbroken)


def test_episodes_that_were_cut_off_are_played_again(tmp_path, hint):
    """With over-dispatch, where time decides who is cut off: after kill -9 those are carried on."""
    cut = (*hint, "--over-dispatch", "1.5")
    run = Run(tmp_path, *cut, ranks=2).struck((saved(1), Run.kill_all))
    carried = run.rows()[0]["rollout/carried_groups"]
    again = run.again()
    assert again.status == 0, again.stderr + again.stdout
    again.check_nothing_is_left()
    rows = again.rows()
    assert carried and [row["step"] for row in rows] == list(range(STEPS + 1))
    assert all(row["environment/lost_frac"] == 0 for row in rows[:-1])
    assert sum(row["train/stale_token_frac"] for row in rows[1:-1]) > 0
    assert check_episodes(again) == STEPS * 32


def test_a_step_that_hangs_ends_the_run(tmp_path):
    limit = 60 * PATIENCE
    run = Run(tmp_path, *given(tmp_path, HANGS), "--timeout-s", f"{limit:g}").start().finish()
    said = f"gave no answer for {0.9 * limit:g} s (0.9 --timeout-s) of {tmp_path}/hint.py, class"
    run.check_one_line(said, "Environment")
    run.check_nothing_is_left()
