"""What a run does with what an earlier one left: which checkpoint it goes on from, what it refuses, what it records anew."""

import asyncio
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import resume
from config import Config, parse_config
from reporting import timeline
from runtime import atomic_files

ROOT = Path(__file__).parent.parent
CONFIG = replace(parse_config([]), model="M", judge=("J",))


def make_checkpoint(out: Path, step: int, config: Config = CONFIG) -> Path:
    """A whole one, as far as its files tell."""
    folder = out / "checkpoints" / f"step_{step}"
    (folder / "megatron").mkdir(parents=True)
    (folder / "megatron" / "__0_0.distcp").write_bytes(bytes(range(100)))
    (folder / "common.json").write_text(atomic_files.canonical({"step": step, "config": resume.settings_of(config)}))
    files = ("common.json", "megatron/__0_0.distcp")
    atomic_files.write_whole(folder / "manifest.json", {name: atomic_files.digest(folder / name) for name in files})
    atomic_files.write_whole(out / "checkpoints" / "latest.json", {"step": step})
    return folder


def make_run(out: Path, steps=(10, 20), rows=25) -> Path:
    """A run that saved at `steps` and died after `rows` steps, in the middle of a line."""
    for step in steps:
        make_checkpoint(out, step)
    (out / "spans").mkdir(parents=True)
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (out / name).open("w") as file:
            file.writelines(json.dumps({"step": step, "x": 0.1 + step}) + "\n" for step in range(rows))
            file.write('{"step": 25, "x": 0.')
    with (out / "spans" / "rank0.jsonl").open("w") as file:
        records = [row for step in range(rows) for row in (timeline.Span("train", 0, step, step + 0.5, step),)]
        file.writelines(json.dumps(timeline.row_of("span", record)) + "\n" for record in records)
        file.write(json.dumps(timeline.row_of("mark", timeline.Mark("weights", "v25", 0, 25.0, 24))) + "\n")
    return out


def prepared(out: Path, **settings) -> tuple[resume.Found | None, list[str]]:
    said = []
    return resume.prepare(replace(CONFIG, **settings), out, said.append), said


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.open()]


def spoil(folder: Path) -> None:
    path = folder / "megatron" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1] + b"x")


# ---------------------------------------------------------------- which checkpoint


def test_a_new_run_starts_from_nothing(tmp_path):
    """And has its folders."""
    assert prepared(tmp_path / "run") == (None, [])
    assert (tmp_path / "run" / "spans").is_dir() and (tmp_path / "run" / "logs").is_dir()


def test_the_newest_checkpoint_is_continued(tmp_path):
    """In one line; what was recorded after it is dropped, as is a row that was cut short, and the clock goes on where the rest ends."""
    out = make_run(tmp_path / "run")
    found, said = prepared(out)
    assert found == resume.Found(out / "checkpoints" / "step_20", 20, 19.5)
    assert said == [f"goes on from {out}/checkpoints/step_20, after 20 steps"]
    assert steps_of(out / "metrics.jsonl") == steps_of(out / "samples.jsonl") == list(range(20))
    records = timeline.read(out / "spans")
    assert [span.step for span in records.spans] == list(range(20)) and not records.marks
    assert json.loads((out / "metrics.jsonl").read_text().splitlines()[3]) == {"step": 3, "x": 3.1}


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path):
    """Its rows go too; it is put aside, so that no later run takes it for the newest."""
    out = make_run(tmp_path / "run")
    spoil(out / "checkpoints" / "step_20")
    found, said = prepared(out)
    assert found.step == 10
    assert said[0].startswith("DAMAGED CHECKPOINT") and "step_20: megatron/__0_0.distcp is missing or was changed" in said[0]
    assert steps_of(out / "metrics.jsonl") == list(range(10))
    assert atomic_files.steps_in(out / "checkpoints") == [10] and (out / "checkpoints" / "aside_20").is_dir()
    assert atomic_files.read_canonical(out / "checkpoints" / "latest.json") == {"step": 10}
    assert prepared(out)[0].step == 10


@pytest.mark.parametrize("what", ["no tracker", "a changed tracker", "all damaged", "all gone"])
def test_it_never_starts_from_nothing_over_checkpoints(tmp_path, what):
    """One line that names --resume never, and nothing is touched; with that the run is moved aside."""
    out = make_run(tmp_path / "run")
    tracker = out / "checkpoints" / "latest.json"
    if what == "no tracker":
        tracker.unlink()
    elif what == "a changed tracker":
        tracker.write_text('{"step": 20}\n')
    for step in (10, 20) * (what == "all damaged"):
        spoil(out / "checkpoints" / f"step_{step}")
    for step in (10, 20) * (what == "all gone"):
        atomic_files.put_away(out / "checkpoints" / f"step_{step}")
    with pytest.raises(ValueError, match="--resume never") as error:
        prepared(out)
    assert len(str(error.value).splitlines()) == 1 and len((out / "metrics.jsonl").read_text().splitlines()) == 26
    assert prepared(out, resume="never") == (None, [f"moved the earlier run in {out} to {tmp_path}/run-1"])
    assert (tmp_path / "run-1" / "metrics.jsonl").exists() and not (out / "metrics.jsonl").exists()


def test_a_run_that_died_before_its_first_checkpoint_starts_anew(tmp_path):
    """What it had begun to write is moved aside with it."""
    out = make_run(tmp_path / "run", steps=(), rows=3)
    (out / "checkpoints" / "step_10.partial-1").mkdir(parents=True)
    atomic_files.write_whole(out / "checkpoints" / "latest.json", {"step": 0})
    found, said = prepared(out)
    assert found is None and said == [f"moved the earlier run in {out} to {tmp_path}/run-1"]


def test_a_checkpoint_without_its_tracker_s_update_is_still_the_newest(tmp_path):
    """The run died between the two."""
    out = make_run(tmp_path / "run")
    atomic_files.write_whole(out / "checkpoints" / "latest.json", {"step": 10})
    assert prepared(out)[0].step == 20
    assert atomic_files.read_canonical(out / "checkpoints" / "latest.json") == {"step": 20}


@pytest.mark.parametrize("rows,steps,goes_on", [(41, 40, False), (40, 40, True), (41, 50, True), (41, 30, False)])
def test_a_run_that_did_its_steps_is_moved_aside(tmp_path, rows, steps, goes_on):
    """Unless more are asked for. Its last row is written after its last checkpoint: without it the end is still to come."""
    out = make_run(tmp_path / "run", steps=(30, 40), rows=rows)
    found, _ = prepared(out, steps=steps)
    assert (found and found.step) == (40 if goes_on else None)
    assert (tmp_path / "run-1").exists() != goes_on


def test_what_a_killed_save_left_is_swept(tmp_path):
    """It has another name, and isn't read."""
    out = make_run(tmp_path / "run")
    (out / "checkpoints" / "step_30.partial-123").mkdir()
    (out / "checkpoints" / "step_10.partial-123.old").mkdir()
    assert prepared(out)[0].step == 20
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["latest.json", "step_10", "step_20"]


# ---------------------------------------------------------------- a checkpoint by name


def test_an_older_checkpoint_of_this_run_by_name(tmp_path):
    """The newer ones are put aside: they belong to a future that won't be."""
    out = make_run(tmp_path / "run")
    found, _ = prepared(out, resume=str(out / "checkpoints" / "step_10"))
    assert found.step == 10 and steps_of(out / "metrics.jsonl") == list(range(10))
    assert atomic_files.steps_in(out / "checkpoints") == [10] and not atomic_files.damage(out / "checkpoints" / "aside_20")
    assert prepared(out)[0].step == 10


def test_a_checkpoint_of_another_run_by_name(tmp_path):
    """It stays as it is, and what was under --out is moved aside."""
    other, out = make_run(tmp_path / "other"), make_run(tmp_path / "run")
    found, said = prepared(out, resume=str(other / "checkpoints" / "step_10"))
    assert found == resume.Found(other / "checkpoints" / "step_10", 10, 0.0)
    assert said[0] == f"moved the earlier run in {out} to {tmp_path}/run-1"
    assert atomic_files.steps_in(other / "checkpoints") == [20, 10] and len((other / "metrics.jsonl").read_text().splitlines()) == 26
    assert not (out / "checkpoints").exists()


@pytest.mark.parametrize("name", ["nowhere", "run", "run/checkpoints/step_10.partial-1"])
def test_a_name_that_is_no_checkpoint(tmp_path, name):
    """Is named, and nothing is touched."""
    out = make_run(tmp_path / "run")
    (out / "checkpoints" / "step_10.partial-1").mkdir()
    with pytest.raises(ValueError, match="not the folder of a checkpoint"):
        prepared(out, resume=str(tmp_path / name))
    spoil(out / "checkpoints" / "step_10")
    with pytest.raises(ValueError, match="step_10: the checkpoint is damaged: megatron"):
        prepared(out, resume=str(out / "checkpoints" / "step_10"))
    with pytest.raises(ValueError, match=r"--steps 15: the checkpoint .*step_20 has more steps behind it"):
        prepared(out, resume=str(out / "checkpoints" / "step_20"), steps=15)
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 26


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "change,line",
    [
        ({"seed": 1}, "--seed 1: the checkpoint .*step_20 was made with 0"),
        ({"judge": ("K", "L")}, "--judge K L: the checkpoint .*step_20 was made with J"),
        ({"data": "file"}, '--data file: the checkpoint .*step_20 was made with ""'),
        ({"prompts_per_step": 8}, "--prompts-per-step 8: the checkpoint .*step_20 was made with 16"),
    ],
)
def test_a_setting_that_makes_another_run_of_it_is_named(tmp_path, change, line):
    """Before anything is touched."""
    out = make_run(tmp_path / "run")
    with pytest.raises(ValueError, match=line):
        prepared(out, **change, judge_format=(), judge_weights=(), judge_signal=())
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 26


def test_other_settings_may_change_and_are_listed(tmp_path):
    """But for those that nobody asks about."""
    out = make_run(tmp_path / "run")
    _, said = prepared(out, steps=50, lr=1e-3, port=31000)
    assert said[0] == f"changed since {out}/checkpoints/step_20: --steps 50 (was 40), --lr 0.001 (was 0.0005)"


# ---------------------------------------------------------------- a real run


class Launched:
    """torchrun in a session of its own, so that its whole tree can be killed at once."""

    def __init__(self, out: Path, *arguments: str, port: int):
        command = [Path(sys.executable).with_name("torchrun"), "--nproc-per-node", "2", "--master-port", str(port + 9), "run.py"]
        command += ["--out", out, "--port", str(port), "--eval-every", "100", "--prompts-per-step", "4", *arguments]
        self.log = out.with_suffix(f".{port}.log")
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as log:
            self.process = psutil.Popen([*map(str, command)], cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)

    def wait(self) -> str:
        """Its output, once it has ended well."""
        assert self.process.wait(400) == 0, self.log.read_text()[-4000:]
        return self.log.read_text()

    def kill_all(self) -> None:
        """kill -9, every process of the run at one moment."""
        tree = [self.process, *self.process.children(recursive=True)]
        for process in tree:
            process.send_signal(signal.SIGSTOP)
        for process in tree:
            process.kill()
        psutil.wait_procs(tree, 10)


def rows_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").open()]


def test_a_killed_run_goes_on_by_itself(tmp_path):
    """Real servers: kill -9 of everything after some saves, then the same command again; every step has one row, the clock goes on.

    A run that has done its steps is moved aside, and with more steps it goes on.
    """
    out = tmp_path / "run"
    run = Launched(out, "--steps", "4", "--save-every", "1", "--save-hf-every", "4", port=22000)
    try:
        deadline = time.monotonic() + 300
        while not (out / "checkpoints" / "step_2").is_dir():
            assert time.monotonic() < deadline and run.process.is_running(), run.log.read_text()
            time.sleep(0.05)
    finally:
        run.kill_all()
    said = Launched(out, "--steps", "4", "--save-every", "1", "--save-hf-every", "4", port=22020).wait()
    assert f"goes on from {out}/checkpoints/step_" in said and "4/4" in said
    rows = rows_of(out)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(0 < row["time/save_s"] < row["time/step_s"] for row in rows[:4])
    starts = [min(s.start for s in timeline.read(out / "spans").spans if s.step == step and s.name == "serve") for step in range(4)]
    assert starts == sorted(starts)
    assert atomic_files.steps_in(out / "checkpoints") == [4, 3] and (out / "checkpoints" / "step_4" / "hf" / "model.safetensors").is_file()
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["latest.json", "step_3", "step_4"]
    said = Launched(out, "--steps", "5", "--save-every", "1", port=22040).wait()
    assert "step_4, after 4 steps" in said and "--steps 5 (was 4)" in said
    assert [row["step"] for row in rows_of(out)] == [0, 1, 2, 3, 4, 5]


def test_prepare_is_told_to_every_rank(tmp_path):
    """Rank 0 looks; a refusal is raised on all of them, so that nobody waits."""
    from fakes import FakeWorld

    import run

    out, meetings = make_run(tmp_path / "run"), {}
    worlds = [FakeWorld(rank, 2, meetings) for rank in range(2)]

    async def both(config):
        return await asyncio.gather(*(run.prepare_out(config, world, print) for world in worlds), return_exceptions=True)

    first, second = asyncio.run(both(replace(CONFIG, out=str(out))))
    assert first == second == (out, resume.Found(out / "checkpoints" / "step_20", 20, 19.5))
    errors = asyncio.run(both(replace(CONFIG, out=str(out), seed=3)))
    assert [type(error) for error in errors] == [ValueError] * 2 and str(errors[0]) == str(errors[1])
