"""How a run treats an earlier one's files: what it resumes from, what it refuses, what it repeats."""

import asyncio
import json
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import checkpoint
from config import parse_config
from runtime import atomic_files, timeline
from runtime.atomic_files import CHECKSUMS
from runtime.out_folder import ResumePoint
from tests.support.fakes import FakeWorld

CONFIG = replace(parse_config([]), model="M", judge=("J",))
SETTINGS = vars(CONFIG)
RECORDS = ("metrics.jsonl", "history.jsonl", "samples.jsonl")
FILES = {"common.json", "megatron/__0_0.distcp", "megatron/.metadata"}


def make_checkpoint(out: Path, step: int, config: dict = SETTINGS, **more) -> Path:
    """Make a checkpoint that is whole, as far as its files show."""
    folder = out / "checkpoints" / f"step_{step}"
    (folder / "megatron").mkdir(parents=True)
    (folder / "megatron" / "__0_0.distcp").write_bytes(bytes(range(100)))
    (folder / "megatron" / ".metadata").touch()
    common = {"layout": checkpoint.LAYOUT, "step": step, "config": dict(config)}
    common |= {"contents": checkpoint.contents_of(SimpleNamespace(**config))} | more
    (folder / "common.json").write_text(json.dumps(common))
    lines = [f"{atomic_files.sha256(folder / name)}  {name}\n" for name in FILES]
    (folder / CHECKSUMS).write_text("".join(lines))
    return folder


def make_run(out: Path, steps=(10, 20), rows=25) -> Path:
    """Make a run of 40 that saved at `steps` and died in the middle of a line. Its last row has no step."""
    for step in steps:
        make_checkpoint(out, step)
    (out / "spans").mkdir(parents=True)
    timed = [{"time/step_s": 1.0}] * 40 + [{}]
    facts = [{"step": step, "x": 0.1 + step} | timed[step] for step in range(rows)]
    lines = [json.dumps(row) + "\n" for row in facts]
    for name in RECORDS:
        (out / name).write_text("".join(lines) + '{"step": 25, "x": 0.')
    for step in range(rows):
        events = [timeline.Event("span", "train", 0, step, step + 0.5, step)]
        events.append(timeline.Event("weights", f"v{step + 1}", 0, step + 1, step + 1, step))
        atomic_files.append(out / "spans" / f"rank0.{step}.jsonl", events)
    return out


def prepared(out: Path, ranks=2, **settings) -> tuple[ResumePoint | None, list[str]]:
    """Return every rank's result, or the error that all raise; and the messages, once for all of them."""
    meetings, lines, config = {}, [], replace(CONFIG, out=str(out), **settings)

    async def point_of(world):
        return (await checkpoint.open_checkpoints(config, world, lines.append)).point

    async def prepare():
        worlds = [FakeWorld(rank, ranks, meetings) for rank in range(ranks)]
        return await asyncio.gather(*map(point_of, worlds), return_exceptions=True)

    points = asyncio.run(prepare())
    assert len(set(map(repr, points))) == 1
    if isinstance(points[0], Exception):
        raise points[0]
    return points[0], lines


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.open()]


def is_untouched(run: Path) -> bool:
    return len((run / "metrics.jsonl").read_text().splitlines()) == 26


def spoil(folder: Path) -> None:
    path = folder / "megatron" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1] + b"x")


@pytest.mark.parametrize("name", ["spans/rank1.jsonl", "checkpoints/step_1.partial-1"])
def test_what_a_run_left_without_a_checkpoint_is_moved(tmp_path, name):
    """Otherwise later rows would follow its own, and be read with them. Logs of a failed start stay."""
    out = tmp_path / "run"
    assert prepared(out) == (None, [])
    (out / "logs" / "rollout-0.log").touch()
    assert prepared(out) == (None, [])
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("[]\n")
    assert prepared(out) == (None, [f"moved the earlier run in {out} to {out}-1"])
    assert (out / "spans").is_dir() and (tmp_path / "run-1" / name).exists()


def test_the_newest_checkpoint_is_continued(tmp_path):
    """Later records and partial rows must be dropped, the clock goes on; killed saves are removed unread.

    Exports stay, but those of repeated steps are renamed.
    """
    out = make_run(tmp_path / "run")
    left = ("checkpoints/step_30.partial-123", "checkpoints/step_10.partial-123.old")
    for name in (*left, "hf/step_30.partial-7", "hf/step_10", "hf/step_30", "hf_critic_r/step_30"):
        (out / name).mkdir(parents=True)
    point, lines = prepared(out)
    assert point == ResumePoint(out / "checkpoints" / "step_20", 20, 19.5, newest=20)
    assert lines == [f"resuming from {out}/checkpoints/step_20, after 20 steps"]
    assert [steps_of(out / name) for name in RECORDS] == [list(range(20))] * 3
    assert [event.step for event in timeline.read(out / "spans")] == [n // 2 for n in range(40)]
    row = json.loads((out / "metrics.jsonl").read_text().splitlines()[3])
    assert row == {"step": 3, "x": 3.1, "time/step_s": 1.0}
    left = {str(path.relative_to(out)) for path in (*out.glob("checkpoints/*"), *out.glob("hf*/*"))}
    exports = {"hf/step_10", "hf/archived_30-1", "hf_critic_r/archived_30-1"}
    assert left == {"checkpoints/step_10", "checkpoints/step_20", *exports}


@pytest.mark.parametrize("step", [16, 20])
def test_only_the_last_records_are_read(tmp_path, monkeypatch, step):
    """Anything may be there in place of a row, and in older and later files."""
    out, read, real = make_run(tmp_path / "run", steps=(step,)), set(), timeline.events_in
    with (out / "spans" / f"rank0.{step - 1}.jsonl").open("ab") as file:
        # what a crash of the machine corrupts
        file.write(b'["span", "tr["mark"]\n{"a": 1}\n3\n\0\xff\n["none", 1]\n["span", 1]\n["span"')
    monkeypatch.setattr(timeline, "events_in", lambda path: read.add(path.name) or real(path))
    assert prepared(out)[0].ended_s == step - 0.5 and read == {f"rank0.{step - 1}.jsonl"}
    kept = [(event.kind, event.step) for event in timeline.read(out / "spans")]
    assert kept == [(kind, number) for number in range(step) for kind in ("span", "weights")]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, monkeypatch, ranks):
    """Each rank reads a share, and all get the result. Its rows go; it is archived, and never used again."""
    out, read, real = make_run(tmp_path / "run"), [], atomic_files.sha256
    monkeypatch.setattr(atomic_files, "sha256", lambda path: read.append(path.name) or real(path))
    assert prepared(out, ranks)[0].step == 20
    assert sorted(read) == sorted(Path(name).name for name in FILES)
    spoil(out / "checkpoints" / "step_20")
    point, lines = prepared(out, ranks)
    damage = "step_20: megatron/__0_0.distcp is missing or was changed"
    assert lines[0] == f"DAMAGED CHECKPOINT {out}/checkpoints/{damage}" and len(lines) == 2
    assert point.step == 10 and steps_of(out / "metrics.jsonl") == list(range(10))
    assert atomic_files.steps_in(out / "checkpoints") == [10]
    assert (out / "checkpoints" / "archived_20-1").is_dir()


def test_it_never_starts_from_nothing_over_checkpoints(tmp_path):
    """One line must name --resume never, and nothing is touched; with that setting the run is moved away."""
    out = make_run(tmp_path / "run")
    for folder in (out / "checkpoints").iterdir():
        spoil(folder)
    with pytest.raises(ValueError, match=r"no complete checkpoint: megatron.*; --resume never.*$"):
        prepared(out)
    assert is_untouched(out)
    assert prepared(out, resume="never") == (None, [f"moved the earlier run in {out} to {out}-1"])
    assert is_untouched(tmp_path / "run-1") and not (out / "metrics.jsonl").exists()


@pytest.mark.parametrize("steps, rises", [(24, False), (40, True)])
def test_a_learning_rate_that_rises_again_is_said(tmp_path, steps, rises):
    out = make_run(tmp_path / "run", steps=())
    make_checkpoint(out, 20, vars(replace(CONFIG, steps=24, lr_decay_to=0.1)))
    _, lines = prepared(out, steps=steps, lr_decay_to=0.1)
    said = "with more --steps the learning rate rises again, from 0.000144737 to 0.000294286"
    assert (said in lines) == rises


@pytest.mark.parametrize("rows, steps", [(41, 40), (40, 40), (41, 50), (41, 30)])
def test_a_run_that_did_its_steps_is_moved_away(tmp_path, rows, steps):
    """It must be, unless more steps are requested. Its last row follows its last checkpoint if it ended."""
    out = make_run(tmp_path / "run", steps=(30, 40), rows=rows)
    goes_on = rows == 40 or steps == 50
    point, _ = prepared(out, steps=steps)
    assert (point and point.step) == (40 if goes_on else None)
    assert (tmp_path / "run-1").exists() != goes_on


def test_a_checkpoint_by_name(tmp_path):
    """Newer checkpoints of this run must be archived, because their steps will differ. Other runs stay."""
    out, other = make_run(tmp_path / "run"), make_run(tmp_path / "other")
    point, _ = prepared(out, resume=str(out / "checkpoints" / "step_10"))
    assert point.newest == point.step == 10 and steps_of(out / "metrics.jsonl") == list(range(10))
    assert atomic_files.steps_in(out / "checkpoints") == [10]
    assert not atomic_files.verify(out / "checkpoints" / "archived_20-1")
    point, lines = prepared(out, resume=str(other / "checkpoints" / "step_10"))
    assert point.folder == other / "checkpoints" / "step_10" and point[1:] == (10, 0.0, None)
    assert lines[0] == f"moved the earlier run in {out} to {tmp_path}/run-1"
    assert atomic_files.steps_in(other / "checkpoints") == [20, 10] and is_untouched(other)
    assert not (out / "checkpoints").exists()


@pytest.mark.parametrize("resume", ["never", "other/checkpoints/step_10"])
@pytest.mark.parametrize("restarts, saved_s, again", [(1, 9, False), (1, -9, True), (0, 9, True)])
def test_a_choice_is_obeyed_once(tmp_path, monkeypatch, resume, restarts, saved_s, again):
    """It must not be obeyed again when torchrun restarts the ranks, once there is a newer checkpoint."""
    out, _ = make_run(tmp_path / "run", steps=[20]), make_run(tmp_path / "other")
    saved = psutil.Process(os.getppid()).create_time() + saved_s
    os.utime(out / "checkpoints" / "step_20", (saved, saved))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
    if not restarts:  # a container's first process has no parent
        monkeypatch.setattr(os, "getppid", lambda: 0)
    monkeypatch.chdir(tmp_path)
    point, _ = prepared(out, resume=resume)
    chosen = None if resume == "never" else Path(resume)
    assert (point and point.folder) == (chosen if again else out / "checkpoints" / "step_20")
    assert (tmp_path / "run-1").exists() == again


REFUSED = [
    (dict(resume="run/checkpoints/step_10.partial-1"), ".*: needs auto, never, or a folder"),
    (dict(resume="run/checkpoints/step_10"), ".*step_10: no complete checkpoint: megatron"),
    (dict(resume="run/checkpoints/step_20", steps=15), "--steps 15: .*step_20 has done more"),
    # it isn't done, so it isn't moved away
    (dict(steps=15), "--steps 15: .*step_20 has done more"),
    (dict(judge=("K", "L")), "--judge K L: the checkpoint .*step_20 was made with J; --resume"),
    (dict(rule=("length:9",)), '--rule length:9: .* was made with ""'),
    (dict(algorithm=("rloo",)), "--algorithm rloo: .* was made with grpo"),
    (dict(eval_data="other.jsonl"), '--eval-data other.jsonl: .* was made with ""'),
    (dict(template=("a=1",)), '--template a=1: .* was made with ""'),
    (dict(prompts_per_step=8), "--prompts-per-step 8: .* was made with 16"),
    ({}, ".*step_20 is from another version of nanoYATT; --resume never starts over"),
]


@pytest.mark.parametrize("settings, line", REFUSED)
def test_what_cannot_be_continued_is_one_line(tmp_path, monkeypatch, settings, line):
    """Before anything is touched, it must name the setting, and what makes it another run."""
    monkeypatch.chdir(tmp_path)
    out = make_run(Path("run"))
    monkeypatch.setattr(checkpoint, "LAYOUT", checkpoint.LAYOUT + (settings == {}))
    (out / "checkpoints" / "step_10.partial-1").mkdir()
    spoil(out / "checkpoints" / "step_10")
    with pytest.raises(ValueError, match=f"^(--resume )?{line}.*$"):
        prepared(out, **settings)
    assert is_untouched(out) and not Path("run-1").exists()


def make_inputs(folder: Path) -> dict:
    """Make settings that name two models, rows and a rule in a folder."""
    for name in ("actor/config.json", "actor/model.safetensors", "judge/config.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("as it was")
    (folder / "actor" / "README.md").write_text(f"nobody reads {folder}")
    for name in ("rows.jsonl", "own.jsonl", "rule.py"):
        (folder / name).write_text("as it was")
    named = dict(data="rows.jsonl", eval_data="own.jsonl", model="actor")
    found = {setting: str(folder / name) for setting, name in named.items()}
    return found | dict(judge=(str(folder / "judge"),), rule=(f"{folder}/rule.py:score",))


def test_what_files_hold_decides_and_not_where_they_lie(tmp_path, monkeypatch):
    """From elsewhere, and from another working folder, they must make the same run. Each is read once."""
    here, _ = make_inputs(tmp_path / "here"), make_inputs(tmp_path / "there")
    out, read, real = make_run(tmp_path / "run", steps=()), [], atomic_files.sha256
    make_checkpoint(out, 20, vars(replace(CONFIG, **here)))
    monkeypatch.setattr(atomic_files, "sha256", lambda path: read.append(path.name) or real(path))
    monkeypatch.chdir(tmp_path / "there")
    moved, lines = prepared(out, **make_inputs(Path()))
    assert moved.step == 20 and f"--data rows.jsonl (was {tmp_path}/here/rows.jsonl)" in lines[0]
    assert read.count("model.safetensors") == 1 and "README.md" not in read


@pytest.mark.parametrize(
    "name, setting",
    [
        ("rows.jsonl", "data"),
        ("own.jsonl", "eval-data"),
        ("rule.py", "rule"),
        ("actor/model.safetensors", "model"),
        ("judge/config.json", "judge"),
    ],
)
def test_files_that_were_changed_make_another_run(tmp_path, name, setting):
    """They must, changed in place or elsewhere."""
    here, there = make_inputs(tmp_path / "here"), make_inputs(tmp_path / "there")
    out = make_run(tmp_path / "run", steps=())
    make_checkpoint(out, 20, vars(replace(CONFIG, **here)))
    for settings, made in ((here, "other content"), (there, f"{tmp_path}/here")):
        Path(settings["data"]).parent.joinpath(name).write_text("another")
        line = f"^--{setting} {tmp_path}.*: the checkpoint .*step_20 was made with {made}"
        with pytest.raises(ValueError, match=line):
            prepared(out, **settings)


WAITING = {  # two controllers' states -> whether answers wait there
    "served": ({"ahead": {"kept": []}, "groups": []}, True),
    "carried": ({"ahead": None, "groups": [[{"response": []}, {"response": [7]}]]}, True),
    "not begun": ({"ahead": None, "groups": [[{"response": []}]]}, False),
}


@pytest.mark.parametrize("state", WAITING)
def test_what_waiting_answers_were_made_with_stays(tmp_path, state):
    """Otherwise the answers would be read as if made differently. If none wait, these settings are free."""
    out = make_run(tmp_path / "run", steps=())
    folder = make_checkpoint(out, 20) / "controllers"
    folder.mkdir()
    for rank, name in enumerate(("not begun", state)):
        (folder / f"rank_{rank}.json").write_text(json.dumps(WAITING[name][0]))
    for name, value in dict(
        temperature=0.7, max_new_tokens=71, answer_tokens=72, video_fps=1.0, video_frames=4
    ).items():
        line = f"--{name.replace('_', '-')} .* was made with {SETTINGS[name]}, as were answers that"
        with pytest.raises(ValueError, match=line) if WAITING[state][1] else nullcontext():
            assert prepared(out, **{name: value})[0].step == 20
    assert prepared(out, lr=1.0)[0].step == 20


def test_other_settings_may_change_and_are_listed(tmp_path):
    """Changes with an effect must be listed; a setting that the checkpoint doesn't know hasn't changed."""
    out = make_run(tmp_path / "run", steps=())
    make_checkpoint(out, 20, {name: SETTINGS[name] for name in SETTINGS if name != "keep"})
    changes = dict(steps=50, lr=1e-3, port=31000, algorithm=("grpo", "kl_coef=0.01"), keep=7)
    before, _, changed = prepared(out, **changes)[1][0].partition(": ")
    assert before == f"changed since {out}/checkpoints/step_20"
    names = "--algorithm grpo kl_coef=0.01 (was grpo), --steps 50 (was 40), --lr 0.001 (was 0.0005)"
    assert sorted(changed.split(", ")) == sorted(names.split(", "))
