"""Checkpoints: complete or invisible, never loaded when damaged, the same run afterwards; and a save that fails costs a line."""

import asyncio
import copy
import ctypes
import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from fakes import AwaitedWriter, FakeActor, FakeSource, LateWriter, simulate
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import checkpoint
import placement
from controller import State
from data import Prompts
from engines.pool import RoleLoad
from runtime import atomic_files
from runtime.background_writer import BackgroundWriter
from sample import Sample
from scheduling.dynamic_sampling import Groups
from scheduling.rebalance import Load

ROOT = Path(__file__).parent.parent
EVERY_FILE = {"manifest.json", "common.json", "controllers/rank_0.json", "controllers/rank_1.json", "megatron/common.pt"}
EVERY_FILE |= {"megatron/.metadata", "megatron/metadata.json", "megatron/__0_0.distcp"}


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def saved_steps(out: Path) -> list[int]:
    """Of the whole checkpoints; the tracker names the newest, and nothing else lies there."""
    checkpoints = out / "checkpoints"
    steps = [step for step in atomic_files.steps_in(checkpoints) if not atomic_files.damage(checkpoints / f"step_{step}")]
    assert atomic_files.read_canonical(checkpoints / checkpoint.TRACKER) == {"step": steps[0]}
    assert {path.name for path in checkpoints.iterdir()} == {"latest.json", *(f"step_{step}" for step in steps)}
    return steps


# ---------------------------------------------------------------- a run that goes on is the run that was not stopped


def trained(jobs, first=0) -> list[list[tuple]]:
    """By step from `first` on: what was trained on, over all ranks."""
    steps = [[s for job in jobs for s in job.report.steps[i][2]] for i in range(len(jobs[0].report.steps))]
    facts = [sorted((s.prompt_id, s.index, s.response, s.logprobs, s.versions, s.reward) for s in step) for step in steps]
    return facts[first:]


RUNS = {  # name -> settings of a run
    "full": dict(mode="full", size=2),
    "partial": dict(mode="partial", size=2),
    "tp": dict(mode="partial", size=4, tp=2),
    "the tail isn't waited for": dict(mode="partial", size=4, over_dispatch=1.5, partial_rollout=True),
    "the same in turns": dict(mode="full", size=3, over_dispatch=1.5, partial_rollout=True, prompts_per_step=9),
    "a critic": dict(mode="partial", size=2, algorithm="ppo", kl_coef=0.1),
    "the split moves": dict(mode="partial", size=4, over_dispatch=1.25, rebalance=True),
}


def exact_times(servers):
    """Every duration is a sum of powers of two, and no two servers are equally fast: so what happens doesn't depend on the hour."""
    for number, server in enumerate(servers):
        server.server.pace, server.server.swap_s = 1 / 128 + number / 4096, 1 / 8 + number / 512


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(list(RUNS)), stop=st.integers(1, 5), offset=st.integers(0, 10**6))
def test_a_resumed_run_trains_on_the_same(tmp_path_factory, name, stop, offset):
    """N steps are k steps and, from their checkpoint, N - k: the same samples by the same weights, carried answers among them.

    And saving changes nothing of a run.
    """
    out = tmp_path_factory.mktemp("run")

    class Shifted(FakeSource):
        def training(self, draw):
            return super().training(draw + offset)

    def other_prompts(job):
        job.prompts.source = Shifted()

    run = RUNS[name] | dict(prepare=exact_times, prepare_job=other_prompts, meet_every_s=1 / 16)
    whole, _ = simulate(**run, steps=6)
    saving, _ = simulate(**run, steps=6, save_every=1, keep=9, out=out)
    jobs, _ = simulate(**run, steps=6, resumed=out / "checkpoints" / f"step_{stop}")
    assert trained(jobs) == trained(whole, stop) and trained(jobs)
    assert trained(saving) == trained(whole)
    assert [job.report.buffers for job in jobs] == [job.report.buffers[stop:] for job in whole]
    assert [job.report.carried for job in jobs] == [job.report.carried[stop:] for job in whole]
    assert jobs[0].state.groups_per_kept == whole[0].state.groups_per_kept
    assert jobs[0].plan == whole[0].plan
    assert all(critic.version == 6 for job in (*jobs, *whole) for critic in job.critics)
    shutil.rmtree(out)


def test_some_runs_carry_answers_over_the_checkpoint():
    """Else the test above would say nothing about them."""
    for name in ("the tail isn't waited for", "the same in turns"):
        jobs, _ = simulate(**RUNS[name], steps=6, prepare=exact_times, meet_every_s=1 / 16)
        assert sum(any(job.report.carried[step] for job in jobs) for step in range(5)), name


@pytest.mark.parametrize("before,after", [(4, 2), (2, 4), (4, 1)])
def test_on_another_number_of_ranks_the_same_prompts_are_trained_on(tmp_path, before, after):
    """With every answer as it was, and nothing trained twice."""
    simulate("full", before, steps=2, save_every=1, out=tmp_path)
    whole, _ = simulate("full", before, steps=4)
    jobs, _ = simulate("full", after, steps=4, resumed=tmp_path / "checkpoints" / "step_2")
    assert trained(jobs) == trained(whole, 2)


def test_a_save_is_taken_between_two_steps_and_written_in_the_next(tmp_path):
    """With the actor awake; it is complete at the earliest when its step is reported, at the latest at the end; --keep are left."""
    LateWriter.patience, patience = 2, LateWriter.patience
    try:
        jobs, _ = simulate("partial", 2, steps=7, save_every=2, keep=2, out=tmp_path)
    finally:
        LateWriter.patience = patience
    assert saved_steps(tmp_path) == [7, 6]
    assert jobs[0].checkpoints.newest == 7
    folder = tmp_path / "checkpoints" / "step_6"
    common = json.loads((folder / "common.json").read_text())
    assert (common["step"], common["ranks"], common["split"], common["config"]["keep"]) == (6, 2, "1|1", 2)
    assert files_of(folder) == EVERY_FILE | {"megatron/__1_0.distcp"}
    assert set(json.loads((folder / "manifest.json").read_text())) == files_of(folder) - {"manifest.json"}


def test_a_critic_has_a_folder_of_its_own(tmp_path):
    """In the manifest, and restored; what it takes for its own is missed."""
    jobs, _ = simulate("partial", 2, steps=2, save_every=1, algorithm="ppo", out=tmp_path)
    folder = tmp_path / "checkpoints" / "step_2"
    ours = {"critic_reward/.metadata", "critic_reward/metadata.json", "critic_reward/common.pt"}
    ours |= {f"critic_reward/__{rank}_0.distcp" for rank in range(2)}
    assert files_of(folder) == EVERY_FILE | ours | {"megatron/__1_0.distcp"}
    assert set(json.loads((folder / "manifest.json").read_text())) == files_of(folder) - {"manifest.json"}
    assert {critic.version for job in jobs for critic in job.critics} == {2}
    jobs, _ = simulate("partial", 2, steps=3, save_every=1, algorithm="ppo", out=tmp_path / "more", resumed=folder)
    assert {critic.version for job in jobs for critic in job.critics} == {3}
    (folder / "critic_reward" / "__0_0.distcp").unlink()
    assert "critic_reward/__0_0.distcp" in atomic_files.damage(folder)


@pytest.mark.parametrize(
    "every,hf,steps,due", [(10, 0, 25, [10, 20, 25]), (0, 0, 25, []), (10, 15, 30, [10, 15, 20, 30]), (0, 10, 25, [10, 20, 25])]
)
def test_when_a_save_is_due(every, hf, steps, due):
    """Every so many steps and at the end; never without either setting."""
    config = SimpleNamespace(save_every=every, save_hf_every=hf, steps=steps)
    checkpoints = checkpoint.Checkpoints(config, None, Path())
    assert [step for step in range(1, steps + 1) if checkpoints.is_due(step)] == due


def test_a_stop_saves_once(tmp_path):
    """`save_now` completes a checkpoint, and does nothing where the step has one; a state kept from before is saved as it was."""
    jobs, _ = simulate("full", 1, steps=2, save_every=100, out=tmp_path)
    (job,) = jobs
    loop = asyncio.new_event_loop()
    folder = tmp_path / "checkpoints" / "step_2"
    written = (folder / "manifest.json").stat().st_mtime_ns
    job.world._meetings.clear()
    job.actor.wake = lambda: None
    job.actor.awake = True
    assert loop.run_until_complete(job.checkpoints.save_now(job))
    assert (folder / "manifest.json").stat().st_mtime_ns == written
    job.state.step = 3
    kept, cursor = checkpoint.state_of(job), job.prompts.cursor
    job.prompts.take(5)
    job.prompts.put_back([1, 2])
    assert loop.run_until_complete(job.checkpoints.save_now(job, kept))
    assert saved_steps(tmp_path) == [3, 2]
    common = json.loads((tmp_path / "checkpoints" / "step_3" / "common.json").read_text())
    assert common["prompts"]["cursor"] == cursor and common["prompts"]["buffer"] == json.loads(json.dumps(kept[0]["prompts"]["buffer"]))
    job.config.save_every, job.state.step = 0, 4
    assert not loop.run_until_complete(job.checkpoints.save_now(job))
    loop.close()


# ---------------------------------------------------------------- the controllers' state, there and back

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
PLANS = placement.auto(4, 1, 1)
LOADS = st.builds(
    Load, plan=st.sampled_from(PLANS), rollout=st.builds(RoleLoad, st.integers(0, 10**9), request_s=FLOATS, in_flight=FLOATS),
    genrm=st.builds(RoleLoad, st.integers(0, 10**9)), waves=st.integers(1, 4), serve_s=FLOATS, swap_s=FLOATS, hand_over_s=FLOATS,
)  # fmt: skip
TEXT = st.text(max_size=5)
SAMPLES = st.builds(
    Sample, st.just(0), st.integers(0, 9), st.lists(st.integers(0, 10**6), max_size=3), TEXT, st.none() | TEXT,
    response=st.lists(st.integers(0, 10**6), max_size=3), logprobs=st.lists(FLOATS, max_size=3), finish=TEXT, critique=TEXT,
    verdict=st.none() | st.booleans(), reward=st.none() | FLOATS,
)  # fmt: skip


def controllers_with(ranks: int, groups: dict[int, tuple[int, list[Sample]]], **state) -> list[SimpleNamespace]:
    """Jobs between two steps: draw -> (its owner, its group)."""
    jobs = []
    for rank in range(ranks):
        prompts = Prompts(FakeSource())
        job = SimpleNamespace(prompts=prompts, groups=Groups(prompts, 1, True), plans=PLANS, plan=PLANS[0], state=State(**state))
        job.actor, job.world = SimpleNamespace(dp_rank=rank, dp_size=ranks, is_head=True), SimpleNamespace(rank=rank, size=ranks)
        job.config, job.judge = SimpleNamespace(seed=1), SimpleNamespace(failed=[rank, 0], parsed=[0, 3 * rank])
        job.groups._owners = {draw: owner for draw, (owner, _) in groups.items()}
        job.groups.put_back(list(groups), [group for owner, group in groups.values() if owner == rank])
        jobs.append(job)
    return jobs


@settings(deadline=None, max_examples=50)
@given(
    owners=st.dictionaries(st.integers(0, 99), st.tuples(st.integers(0, 3), st.lists(SAMPLES, min_size=1, max_size=2)), max_size=6),
    ranks=st.sampled_from([1, 2, 3, 4, 6]), history=st.lists(LOADS, max_size=3), plan=st.sampled_from(PLANS),
    kept=FLOATS, cursor=st.integers(0, 10**12),
)  # fmt: skip
def test_the_state_comes_back_whole(owners, ranks, history, plan, kept, cursor):
    """On as many ranks as it was; on any number every carried group exactly once, with the holder that every controller knows."""
    for draw, (_, group) in owners.items():
        for sample in group:
            sample.prompt_id = draw
    before = controllers_with(4, owners, step=7, groups_per_kept=kept, history=history, empty_steps=2, skips=1)
    for job in before:
        job.plan, job.prompts.cursor = plan, cursor
    states = [json.loads(json.dumps(checkpoint.state_of(job))) for job in before]
    common, own = states[0][0], [own for _, own in states]
    after = controllers_with(ranks, {})
    for job in after:
        checkpoint.restore_controller(job, common, copy.deepcopy(own))
    if ranks == 4:
        assert [json.loads(json.dumps(checkpoint.state_of(job)))[0] for job in after] == [common for common, _ in states]
        assert [json.loads(json.dumps(checkpoint.state_of(job)))[1]["carried"] for job in after] == [own["carried"] for own in own]
        assert after[0].state.history == history
    held = {group[0].prompt_id: (rank, group) for rank, job in enumerate(after) for group in job.groups.carried}
    assert held == {draw: (owner % ranks, group) for draw, (owner, group) in owners.items()}
    assert all(job.groups.deal([draw], ranks) == {draw: held[draw][0]} for job in after for draw in held)
    assert [sum(counts) for counts in zip(*(job.judge.failed for job in after), strict=True)] == [6, 0]
    assert [sum(counts) for counts in zip(*(job.judge.parsed for job in after), strict=True)] == [0, 18]
    assert all(job.plan == (plan if ranks == 4 else PLANS[0]) for job in after)
    assert all(job.state.history == [] for job in after) or ranks == 4
    assert {(job.prompts.cursor, job.state.step, job.state.groups_per_kept, job.state.skips) for job in after} == {(cursor, 7, kept, 1)}


def test_without_partial_rollout_nothing_is_carried():
    """A run may be resumed without it: the prompts come again, and are written anew."""
    (job,) = controllers_with(1, {5: (0, [Sample(5, 0, [1], response=[2])])})
    common, own = checkpoint.state_of(job)
    (after,) = controllers_with(1, {})
    after.groups = Groups(after.prompts, 1, False)
    checkpoint.restore_controller(after, common, [own])
    assert after.prompts.buffer == [5] and not after.groups.carried


# ---------------------------------------------------------------- files


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.integers())), st.integers(0), st.integers(1, 255))
def test_any_changed_byte_of_a_json_file_shows(tmp_path_factory, value, where, byte):
    """It reads as nothing, or as something else, white space included."""
    path = tmp_path_factory.getbasetemp() / "canonical.json"
    atomic_files.write_whole(path, value)
    assert atomic_files.read_canonical(path) == value
    content = bytearray(path.read_bytes())
    content[where % len(content)] ^= byte
    path.write_bytes(content)
    assert atomic_files.read_canonical(path) != value


def test_the_name_of_a_checkpoint(tmp_path):
    """What is being written has another."""
    for name in ("step_3", "step_12", "step_12.partial-77", "step_x", "steps", "7"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_99").write_text("no folder")
    assert atomic_files.steps_in(tmp_path) == [12, 3]
    assert atomic_files.step_of(tmp_path / "7") is None


# ---------------------------------------------------------------- the process that writes


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "never came so far"
        time.sleep(0.01)


def ended(writer: BackgroundWriter):
    wait_for(writer.result)
    writer.close()
    return writer.result()


def test_a_writer_sees_what_was_there_when_it_was_forked():
    """However long the rank goes on; and a result that is larger than a pipe comes back whole."""
    value = bytearray(200_000)
    writer = BackgroundWriter(lambda: (time.sleep(0.2), bytes(value))[1])
    assert writer.result() is None
    value[:] = b"x" * len(value)
    assert ended(writer) == (bytes(200_000), "")


def test_a_writer_is_nice_and_hears_no_signal_of_the_terminal():
    """It is in a group of its own, and its signals don't reach the rank's event loop."""
    writer = BackgroundWriter(lambda: (os.nice(0), os.getpgid(0) == os.getpid(), signal.getsignal(signal.SIGTERM) == signal.SIG_DFL))
    assert ended(writer) == ((min(os.nice(0) + 10, 19), True, True), "")


def test_how_a_writer_fails():
    """An error, and a death: both are told."""
    assert ended(BackgroundWriter(lambda: Path("/nowhere/file").write_text("x")))[1].startswith("FileNotFoundError: [Errno 2]")
    assert ended(BackgroundWriter(lambda: os.kill(os.getpid(), signal.SIGKILL)))[1] == "the process that writes ended with status -9"
    writer = BackgroundWriter(lambda: time.sleep(100))
    start = time.monotonic()
    writer.close()
    assert time.monotonic() - start < 5


def test_a_writer_dies_with_its_rank(tmp_path):
    """Although nobody tells it to."""
    program = (
        "import os, sys, time; sys.path.insert(0, sys.argv[1]); from forked import BackgroundWriter; from pathlib import Path\n"
        "writer = BackgroundWriter(lambda: (Path(sys.argv[2]).write_text(str(os.getpid())), time.sleep(100)))\n"
        "time.sleep(100)"
    )
    rank = subprocess.Popen([sys.executable, "-c", program, str(ROOT), str(tmp_path / "pid")])
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    writer = psutil.Process(int((tmp_path / "pid").read_text()))
    rank.kill()
    rank.wait()
    wait_for(lambda: not writer.is_running() or writer.status() == psutil.STATUS_ZOMBIE)


# ---------------------------------------------------------------- saves that fail


class Failing(FakeActor):
    """Writes its part under a limit of the file size from the second save on, as on a disk that is full."""

    saves = 0

    def snapshot(self, folder):
        write, complete = super().snapshot(folder)
        self.saves += 1
        if self.saves != 2:
            return write, complete

        def write_too_much():
            write()
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
            (folder / f"__{self.device.rank}_0.distcp").write_bytes(bytes(100_000))

        return write_too_much, complete


def test_a_writer_that_hangs_is_not_waited_for_for_ever(tmp_path):
    """Its disk doesn't answer: the save is given up, and later ones work again."""

    class Hanging(LateWriter):
        started = 0

        def __init__(self, work):
            super().__init__(work)
            Hanging.started += 1
            self.patience = 10**9 if Hanging.started == 2 else 0  # one rank's, in the first save

    jobs, _ = simulate("partial", 2, steps=3, save_every=1, keep=9, out=tmp_path, writer=Hanging, collective_timeout_s=2.0)
    (note,) = [note for note in jobs[0].report.notes if "CHECKPOINT" in note]
    assert note.startswith("CHECKPOINT FAILED: step 1 could not be saved: not written after 2 s; no checkpoint yet")
    assert saved_steps(tmp_path) == [3, 2] and len(jobs[0].report.steps) == 3


def test_a_full_disk_costs_a_line_and_no_step(tmp_path):
    """The rank that fails says why, the checkpoint before stays, what was begun goes, and later saves work again."""

    def fail_on_rank_1(job):
        job.checkpoints._start_writer = AwaitedWriter
        if job.world.rank == 1:
            job.actor.__class__ = Failing

    jobs, _ = simulate("full", 2, steps=3, save_every=1, out=tmp_path, prepare_job=fail_on_rank_1)
    (note,) = jobs[0].report.notes
    assert note.startswith("CHECKPOINT FAILED: step 2 could not be saved: OSError: [Errno 27] File too large")
    assert "the checkpoint of step 1 stays the newest, and training goes on" in note
    assert len(jobs[0].report.steps) == 3 and saved_steps(tmp_path) == [3, 1]


def test_a_folder_that_cannot_be_written_costs_a_line_and_no_step(tmp_path):
    """As rank 0 finds out; the others don't wait for it."""
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    jobs, _ = simulate("partial", 2, steps=2, save_every=1, out=tmp_path)
    assert len(jobs[0].report.steps) == 2
    assert [note.split(":")[2] for note in jobs[1].report.notes] == [" NotADirectoryError", " NotADirectoryError"]
    assert "no checkpoint yet, and training goes on" in jobs[0].report.notes[0]


@pytest.mark.parametrize("name", ["complete_shards", "write_whole", "sync_folder"])
def test_a_disk_that_is_full_at_the_very_end(tmp_path, monkeypatch, name):
    """Of a save, when rank 0 alone completes it: the others hear of it, and it stays invisible."""
    full = OSError(28, "No space left on device")

    def fail(*args):
        raise full

    if name == "complete_shards":
        whole = FakeActor.snapshot
        monkeypatch.setattr(FakeActor, "snapshot", lambda self, folder: (whole(self, folder)[0], fail))
    elif name == "write_whole":
        original = atomic_files.write_whole
        monkeypatch.setattr(checkpoint, name, lambda path, value: fail() if path.name == "manifest.json" else original(path, value))
    else:
        monkeypatch.setattr(checkpoint, name, fail)
    jobs, _ = simulate("full", 2, steps=2, save_every=100, out=tmp_path)
    assert "OSError: [Errno 28] No space left on device; no checkpoint yet" in jobs[1].report.notes[0]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["latest.json"]


KILLED = """
import os, sys, time
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests"]
from pathlib import Path
from fakes import AwaitedWriter, FakeActor, simulate
whole = FakeActor.snapshot
def slow(self, folder):
    write, complete = whole(self, folder)
    def write_slowly():
        result = write()
        if "step_2" in str(folder):
            Path(sys.argv[2], "writing").touch()
            time.sleep(100)
        return result
    return write_slowly, complete
FakeActor.snapshot = slow
def forking(job):
    job.checkpoints._start_writer = AwaitedWriter
simulate("full", 2, steps=3, save_every=1, out=Path(sys.argv[2]), prepare_job=forking)
"""


def test_kill_9_in_the_middle_of_a_save(tmp_path):
    """The checkpoint before is whole and the newest; what was begun has a name that is never read, and nobody writes on."""
    run = psutil.Popen([sys.executable, "-c", KILLED, str(ROOT), str(tmp_path)])
    wait_for((tmp_path / "writing").exists, 60)
    writers = run.children()
    run.kill()
    run.wait()
    for writer in writers:
        wait_for(lambda writer=writer: not writer.is_running() or writer.status() == psutil.STATUS_ZOMBIE)
    checkpoints = tmp_path / "checkpoints"
    assert writers and atomic_files.steps_in(checkpoints) == [1] and not atomic_files.damage(checkpoints / "step_1")
    assert atomic_files.read_canonical(checkpoints / "latest.json") == {"step": 1}
    assert any(path.name.startswith("step_2.partial-") for path in checkpoints.iterdir())


# ---------------------------------------------------------------- the policy, on other ranks


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A checkpoint of two ranks, and what every layout made of it."""
    import torch
    from test_actor import make_model, make_samples

    out = tmp_path_factory.mktemp("saved")
    batches = [[sample for sample in make_samples(seed) if sample.advantages] for seed in (0, 1, 3)]
    for step, batch in enumerate(batches):
        for sample in batch:
            sample.versions, sample.logprobs = [step] * len(sample.response), [-4.0] * len(sample.response)
    case = {"model_dir": make_model(out / "model", "qwen3", tied=True), "batches": [[vars(s) for s in batch] for batch in batches]}
    torch.save(case, out / "case.pt")
    command = [sys.executable, str(ROOT / "tests" / "checkpoint_worker.py"), str(out / "case.pt"), str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        output, _ = process.communicate(timeout=500)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output.decode()[-4000:]
    return out


def result(saved: Path, name: str, rank: int = 0) -> dict:
    import torch

    return torch.load(saved / f"{name}.{rank}")


RANKS = {"dp2": 2, "tp2": 2, "pp2": 2, "dp1": 1, "dp4": 4, "tp2_dp2": 4, "dp1_of_tp2_pp2": 1, "dp2_of_tp2_dp2": 2}


@pytest.mark.parametrize("name,ranks", RANKS.items())
def test_the_next_update_is_the_same_under_every_layout(saved, name, ranks):
    """Saved on two data-parallel ranks (or as the name says), while the update that follows was already under way."""
    expected, got = result(saved, "save"), result(saved, name)
    parsed = {"dp1_of_tp2_pp2": 5 + 6 + 7 + 8, "dp2_of_tp2_dp2": 5 + 6 + 7 + 8}.get(name, 5 + 6)
    assert (got["version"], got["step"]) == (3, 2)
    for metric in ("loss", "grad_norm", "entropy", "kl", "tokens", "lr"):
        assert got["metrics"][f"train/{metric}"] == pytest.approx(expected["metrics"][f"train/{metric}"], abs=1e-4), metric
    for metric in ("value_loss", "explained_variance", "grad_norm", "lr"):
        assert got["metrics"][f"critic/{metric}"] == pytest.approx(expected["metrics"][f"critic/{metric}"], abs=1e-4), metric
    for model in ("weights", "critic"):
        for weight, tensor in expected[model].items():
            assert (got[model][weight] - tensor).abs().max() < 5e-5, weight
    assert got["prompts"] == {"cursor": 9, "buffer": list(range(9))}
    assert sum(result(saved, name, rank)["parsed"] for rank in range(ranks)) == parsed
    owners = dict(got["groups"]["owners"])
    held = {draw: facts for rank in got["held"] for draw, facts in rank.items()}
    assert sum(map(len, got["held"])) == len(held) == 9, "every carried group is held once"
    assert held == {draw: ([draw], [-draw / 3], [1], owners[draw]) for draw in range(9)}


def test_on_the_same_ranks_the_next_update_is_the_same_bit_for_bit(saved):
    """Metrics, weights and random numbers."""
    import torch

    for rank in range(2):
        expected, got = result(saved, "save", rank), result(saved, "dp2", rank)
        timed = {name for name in got["metrics"] if "seconds" in name}
        assert {k: v for k, v in got["metrics"].items() if k not in timed} == {
            k: v for k, v in expected["metrics"].items() if k not in timed
        }
        for model in ("weights", "critic"):
            assert all(torch.equal(got[model][name], tensor) for name, tensor in expected[model].items())
        assert torch.equal(got["random"], expected["random"])
    assert not torch.equal(result(saved, "dp2", 0)["random"], result(saved, "dp2", 1)["random"])


def test_the_hugging_face_directory_holds_the_weights_of_its_step(saved):
    """Not those of the update that went on meanwhile; transformers loads it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kinds = (("hf", AutoModelForCausalLM, "saved"), ("hf_critic_reward", AutoModelForSequenceClassification, "saved_critic"))
    for folder, kind, which in kinds:
        model, weights = kind.from_pretrained(saved / "checkpoints" / "step_2" / folder), result(saved, "save")[which]
        assert dict(model.named_parameters()).keys() == weights.keys()
        assert all(torch.equal(param, weights[name]) for name, param in model.named_parameters())
    manifest = atomic_files.read_canonical(saved / "checkpoints" / "step_2" / "manifest.json")
    assert {"hf/model.safetensors", "hf/config.json", "hf/tokenizer_config.json"} <= manifest.keys()


def test_one_flipped_byte_in_any_file_shows(saved, tmp_path):
    """In each file once, and at 100 random places over all of them."""
    folder, rng = tmp_path / "step_2", random.Random(0)
    shutil.copytree(saved / "checkpoints" / "step_2", folder)
    assert files_of(folder) >= EVERY_FILE and atomic_files.damage(folder) == ""
    paths = [folder / name for name in sorted(files_of(folder)) if (folder / name).stat().st_size]
    for path in paths + rng.choices(paths, [path.stat().st_size for path in paths], k=100):
        at, bit = rng.randrange(path.stat().st_size), 1 << rng.randrange(8)
        flip(path, at, bit)
        assert atomic_files.damage(folder), f"byte {at} of {path.name} changed by {bit} unseen"
        flip(path, at, bit)
    assert atomic_files.damage(folder) == ""


def flip(path: Path, at: int, bits: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ bits]))


@settings(deadline=None)
@given(columns=st.integers(1, 7), start=st.integers(0, 40), length=st.integers(0, 40))
def test_a_stretch_of_a_matrix_is_up_to_three_rectangles(columns, start, length):
    """Which are the stretch, element for element and in order; 6 of 3 columns from 2 on by hand: a tail, a row, a head."""
    from training import sharded_checkpoint

    found = list(sharded_checkpoint.rectangles(start, start + length, columns))
    elements = [(row + r) * columns + column + c for row, column, rows, wide in found for r in range(rows) for c in range(wide)]
    assert elements == list(range(start, start + length)) and len(found) <= 3
    assert all(column + wide <= columns for _, column, _, wide in found)
    assert list(sharded_checkpoint.rectangles(2, 8, 3)) == [(0, 2, 1, 1), (1, 0, 1, 3), (2, 0, 1, 2)]


class Evil:
    def __reduce__(self):
        return (os.system, (f"touch {self.path}",))


def test_a_checkpoint_never_executes_code(saved, tmp_path):
    """The one pickle in it names descriptions of tensors and nothing else."""
    from training import sharded_checkpoint

    shutil.copytree(saved / "checkpoints" / "step_2" / "megatron", tmp_path / "megatron")
    metadata = tmp_path / "megatron" / ".metadata"
    with metadata.open("rb") as file:
        sharded_checkpoint.OnlyDescriptions(file).load()
    evil = Evil()
    evil.path = tmp_path / "executed"
    metadata.write_bytes(pickle.dumps(evil))
    with pytest.raises(ValueError, match=r"posix.system, which has no place there"):
        sharded_checkpoint.load(None, tmp_path / "megatron")
    assert not (tmp_path / "executed").exists()


# ---------------------------------------------------------------- a disk that is really full


def test_a_disk_that_is_really_full(tmp_path):
    """A file system of a few pages, where this is allowed: the run goes on without its checkpoint, and has room to."""
    small = tmp_path / "small"
    small.mkdir()
    if ctypes.CDLL(None, use_errno=True).mount(b"tmpfs", str(small).encode(), b"tmpfs", 0, b"size=80k"):
        pytest.skip(f"mounting a file system: {os.strerror(ctypes.get_errno())}")
    try:

        def forking(job):
            job.checkpoints._start_writer = AwaitedWriter
            write_more = FakeActor.snapshot

            def snapshot(folder):
                write, complete = write_more(job.actor, folder)
                return lambda: (write(), (folder / f"__{job.world.rank}_1.distcp").write_bytes(bytes(10**6)))[0], complete

            job.actor.snapshot = snapshot

        jobs, _ = simulate("full", 2, steps=2, save_every=1, out=small, prepare_job=forking)
        assert len(jobs[0].report.steps) == 2
        assert all("No space left on device" in note for note in jobs[0].report.notes) and len(jobs[0].report.notes) == 2
        assert shutil.disk_usage(small).free > 60_000
    finally:
        ctypes.CDLL(None).umount2(str(small).encode(), 2)
