"""Whole runs with an environment, real engines and trainers: modes play the same episodes, and a run that
was killed or stopped plays them again. A step that hangs ends the run."""

import json
import signal
from pathlib import Path

import pytest

from runtime import timeline
from tests.support.launched import Run, rows_done, saved

pytestmark = pytest.mark.slow

STEPS = 3
SHORT = ("--log-samples", "1000", "--prompts-per-step", "16", "--eval-every", "3")
SHORT += ("--save-every", "1", "--steps", str(STEPS), "--save-hf-every", str(STEPS))
SHORT += ("--max-new-tokens", "96")
TRAINED = STEPS * 16 * 8  # episodes
FINAL = f"hf/step_{STEPS}/model.safetensors"
HINT = '''
"""After a wrong answer the question comes again; of every third prompt twice."""

import json
from pathlib import Path

from extras.environment import Step

LOG = Path(__file__).with_name("heard.jsonl")


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
# so that a cut-off finds episodes in the middle
SLOW = HINT.replace("import json\n", "import json\nimport time\n")
SLOW = SLOW.replace(
    "self.hints = ", "self.wait_s = 0.5 * (sample.prompt_id % 6 == 0)\n        self.hints = "
)
SLOW = SLOW.replace("        if text.ends", "        time.sleep(self.wait_s)\n        if text.ends")
RECORD = """
import json
from pathlib import Path

FIELDS = ("prompt_id", "index", "versions", "response", "logprobs", "replies", "earned", "finish")


def reward(sample):
    with Path(__file__).with_name("judged.jsonl").open("a") as file:
        file.write(json.dumps([vars(sample)[name] for name in FIELDS]) + chr(10))
"""


class PacedRun(Run):
    program = "tests/support/paced_run.py"


def episodic(
    folder: Path, *arguments, text: str = HINT, ranks: int = 4, run: type[Run] = Run
) -> Run:
    """Make a run with an environment, and with a rule that gives no reward and records all that is judged."""
    folder.mkdir(exist_ok=True)
    (folder / "hint.py").write_text(text)
    (folder / "record.py").write_text(RECORD)
    given = ("--environment", str(folder / "hint.py"), "--rule", str(folder / "record.py"))
    return run(folder, *SHORT, *given, *arguments, ranks=ranks)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Run three steps in partial mode on four ranks, the reference for the others."""
    return episodic(tmp_path_factory.mktemp("unbroken")).ended()


def lines_of(run: Run, name: str) -> list[list]:
    return [json.loads(line) for line in (run.out.parent / name).read_text().splitlines()]


def judged(run: Run) -> dict[tuple, list]:
    """Return by starting weights, prompt and index each judged episode, checking that repeats are equal."""
    found = {}
    for prompt_id, index, versions, *more in lines_of(run, "judged.jsonl"):
        episode = [versions, *more]
        assert found.setdefault((versions[0], prompt_id, index), episode) == episode
    return found


def check_as(run: Run, other: Run) -> None:
    """Check that numbers, episodes and weights are equal, to the last bit."""
    run.check_as(other)
    assert (run.out / FINAL).read_bytes() == (other.out / FINAL).read_bytes()
    one, two = judged(run), judged(other)
    both = one.keys() & two.keys()  # a mode may have judged one more group, which no step needed
    assert len(both) >= TRAINED
    assert [one[key] for key in both] == [two[key] for key in both]
    print(f"{len(both)} episodes are the same, {sum(len(one[key][3]) for key in both)} replies")


def check_episodes(run: Run) -> None:
    """Check that each matches, turn by turn, what an environment received and rewarded."""
    heard = {}
    for seed, prompt_id, index, *turns in lines_of(run, "heard.jsonl"):
        heard.setdefault((prompt_id, index), []).append(turns)
        assert len(turns) <= 2 + (seed % 3 == 0)
    counts = set()
    for *key, _, response, logprobs, replies, earned, finish in lines_of(run, "judged.jsonl"):
        assert len(response) == len(logprobs) and len(earned) == len(replies) + 1
        lengths = [len(turns) for turns in heard[tuple(key)]]
        assert len(replies) + (finish == "stop") in lengths or finish == "length"
        assert earned[:-1] == [0.25 * (reward > 0) for reward in earned[:-1]]
        counts.add(len(replies))
    assert counts == {0, 1, 2}


def test_a_run_plays_episodes(unbroken):
    """Engine and trainer must agree; each policy token is trained on, and no reply token."""
    unbroken.check_nothing_is_left()
    check_episodes(unbroken)
    *rows, last = unbroken.rows()
    for row in rows:
        assert row["train/engine_logprob_diff_max"] <= 1e-4 and row["train/grad_norm"] > 0
        assert 1 < row["environment/turns_mean"] <= 3 and row["environment/tokens"] > 0
        assert row["environment/lost_frac"] == 0 <= row["environment/hints"] <= 1
        assert row["train/tokens"] == row["rollout/tokens_trained"]
    assert {"eval/accuracy", "eval/reward_mean"} <= last.keys()
    spans = timeline.read(unbroken.out / "spans")
    assert "environment" in {span.name for span in spans}


@pytest.mark.parametrize("mode", ["full", "fused"])
def test_all_modes_play_the_same_episodes(tmp_path, unbroken, mode):
    """Modes must agree, even if fused mode moves answers to another engine in the middle of an episode."""
    run = episodic(tmp_path, "--mode", mode, "--tail", "0.5", run=PacedRun).ended()
    check_as(run, unbroken)
    moved = sum(row.get("rollout/moved", 0) for row in run.rows())
    print(f"{moved} answers moved")
    assert (moved > 0) == (mode == "fused")


def test_a_killed_run_plays_on(tmp_path, unbroken):
    run = episodic(tmp_path).struck((saved(1), Run.kill_all))
    assert len(run.rows()) < STEPS + 1
    check_as(run.again(), unbroken)


def test_served_ahead_a_stopped_run_plays_on(tmp_path):
    """It must follow its own rule, and give the same result twice."""
    ahead = ("--placement", "standalone", "--ahead", "1")
    unbroken = episodic(tmp_path / "unbroken", *ahead).ended()
    check_episodes(unbroken)
    stop = (rows_done(1), lambda run: run.launcher().send_signal(signal.SIGTERM))
    run = episodic(tmp_path / "run", *ahead).struck(stop)
    run.check_no_traceback_of_ours()
    assert run.status == 1 and len(run.rows()) <= STEPS
    check_as(run.again(), unbroken)


def test_episodes_that_were_cut_off_are_played_again(tmp_path):
    """With over-dispatch, where timing decides which are cut off, these must go on after kill -9."""
    run = episodic(tmp_path, "--over-dispatch", "3", text=SLOW, ranks=2)
    run.struck((saved(1), Run.kill_all))
    carried = run.rows()[0]["rollout/carried_groups"]
    again = run.again()
    assert again.status == 0, again.stderr + again.stdout
    again.check_nothing_is_left()
    rows = again.rows()
    assert carried and [row["step"] for row in rows] == list(range(STEPS + 1))
    assert all(row["environment/lost_frac"] == 0 for row in rows[:-1])
    check_episodes(again)
    continued = answered = 0  # by later weights; after a reply, which was given to earlier ones
    for _, _, versions, _, _, replies, _, _ in lines_of(again, "judged.jsonl"):
        continued += len({*versions}) > 1
        answered += any(versions[place - 1] < versions[-1] for place, _, _ in replies)
    print(f"{continued} episodes continued, {answered} after a reply")
    assert answered
