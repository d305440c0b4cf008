"""Checkpoints: complete or invisible, never loaded damaged, then the same run; a failed save costs a line."""

import contextlib
import io
import json
import os
import pickle
import re
import resource
import shutil
from functools import partial
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader

import checkpoint
import rollout
from config import Config
from runtime import atomic_files
from runtime.atomic_files import CHECKSUMS
from runtime.background_writer import BackgroundWriter
from runtime.errors import RunLost, UserError
from tests.support.fakes import FakeSource, LateWriter, learned, simulate
from tests.workers.parallel import far
from tests.workers.start import train_layouts

EVERY_FILE = {CHECKSUMS, "common.json", "controllers/rank_0.json", "controllers/rank_1.json"}
EVERY_FILE |= {"megatron/.metadata", "megatron/__0_0.distcp"}


class AwaitedWriter(BackgroundWriter):
    """A real process, during which the virtual clock stands still, or it would seem to take hours."""

    def result(self):
        if self._result is None:
            self._receiver.poll(60)
        return super().result()


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def listed_in(folder: Path) -> set[str]:
    """Return the files that have a checksum."""
    return {line.split("  ")[1] for line in (folder / CHECKSUMS).read_text().splitlines()}


def saved_steps(out: Path) -> list[int]:
    """Return the saved steps; check that all are whole and that nothing else is there."""
    checkpoints = out / "checkpoints"
    steps = atomic_files.steps_in(checkpoints)
    assert not any(atomic_files.verify(checkpoints / f"step_{step}") for step in steps)
    assert {path.name for path in checkpoints.iterdir()} == {f"step_{step}" for step in steps}
    return steps


RUNS = {  # name -> a run's settings
    "full": dict(mode="full", size=2),
    "partial": dict(mode="partial", size=2),
    "tp": dict(mode="partial", size=4, tp=2),
    "the tail isn't waited for": dict(mode="partial", size=4, over_dispatch=1.5),
    "the same in turns": dict(mode="full", size=3, over_dispatch=1.5, prompts_per_step=9),
    "a critic": dict(mode="partial", size=2, algorithm=("ppo", "kl_coef=0.1")),
    "the split moves": dict(mode="partial", size=4, over_dispatch=1.25, rebalance=True),
}


def exact_times(engines):
    """Make times sums of powers of two, which are exact; no answer ends at a meeting, every 512 units."""
    for number, engine in enumerate(engines):
        engine.pace, engine.swap_s = (65 + 2 * number) / 8192, 1 / 8 + number / 512


@contextlib.contextmanager
def exact_meetings():
    """Make controllers meet on the same grid."""
    meetings = patch.object(rollout, "MEETING_INTERVAL_S", 1 / 16)
    with meetings, patch.object(checkpoint, "POLL_S", 1 / 16):
        yield


@settings(max_examples=12, deadline=None)
@given(name=st.sampled_from(list(RUNS)), stop=st.integers(1, 5), offset=st.integers(0, 10**6))
@example(name="the same in turns", stop=1, offset=211275)  # an answer ended as controllers met
@example(name="the same in turns", stop=1, offset=744211)
@example(name="the same in turns", stop=4, offset=762795)
@example(name="the tail isn't waited for", stop=3, offset=695061)  # others' tokens were kept
@example(name="tp", stop=3, offset=123649)
@exact_meetings()
def test_a_resumed_run_trains_on_the_same(tmp_path_factory, name, stop, offset):
    """Samples and weights must be the unbroken run's, carried answers included. Saving changes nothing."""
    out = tmp_path_factory.mktemp("run")

    class Shifted(FakeSource):
        def training(self, draw):
            return super().training(draw + offset)

    def other_prompts(c):
        c.prompts.source = Shifted()

    run = RUNS[name] | dict(prepare=exact_times, prepare_controller=other_prompts)
    unbroken, _ = simulate(**run, steps=6)
    saving, _ = simulate(**run, steps=6, save_every=1, keep=9, out=out)
    resumed, _ = simulate(**run, steps=6, resumed=out / "checkpoints" / f"step_{stop}")
    assert learned(resumed) == learned(unbroken)[stop:]
    assert learned(saving) == learned(unbroken)
    assert [c.report.carried_ids for c in resumed] == [
        c.report.carried_ids[stop:] for c in unbroken
    ]
    assert resumed[0].state.groups_per_kept == unbroken[0].state.groups_per_kept
    assert resumed[0].devices.split == unbroken[0].devices.split
    assert all(critic.version == 6 for c in (*resumed, *unbroken) for critic in c.devices.critics)
    shutil.rmtree(out)


def test_a_save_is_taken_between_two_steps_and_written_in_the_next(tmp_path):
    """The actor is awake; the save is complete at its step's report at the earliest, or by the end."""
    with patch.object(LateWriter, "patience", 2):
        controllers, _ = simulate("partial", 2, steps=7, save_every=2, keep=2, out=tmp_path)
    assert saved_steps(tmp_path) == [7, 6]
    assert controllers[0].checkpoints.newest == 7
    folder = tmp_path / "checkpoints" / "step_6"
    common = json.loads((folder / "common.json").read_text())
    assert (common["step"], common["ranks"], common["config"]["keep"]) == (6, 2, 2)
    assert common["split"] == ["partial", 1, 1, 0.0]
    assert common["contents"] == checkpoint.contents_of(controllers[0].config)
    assert files_of(folder) == EVERY_FILE | {"megatron/__1_0.distcp"}
    assert listed_in(folder) == files_of(folder) - {CHECKSUMS}


@pytest.mark.parametrize("fails_at, every, left", [(2, 1, [3]), (3, 1, [2]), (1, 3, [])])
def test_a_save_that_fails_costs_a_line_and_the_last_one_the_status(
    tmp_path, fails_at, every, left
):
    """Rank 1 gives the reason, the old checkpoint stays, partial files go, and later saves succeed.

    The same holds for exports, but all of them are kept while old checkpoints go. (1, 3): at a stop.
    """
    controllers = []

    def fail_on_rank_1(c):
        snapshot = c.devices.actor.snapshot

        def write_too_much(path):
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
            path.write_bytes(bytes(100_000))

        def or_fail(folder):
            write, complete = snapshot(folder)
            fails = c.world.rank and f"step_{fails_at}." in str(folder)
            return partial(write_too_much, folder / "big") if fails else write, complete

        c.devices.actor.snapshot = or_fail
        c.checkpoints.start_writer = AwaitedWriter
        if fails_at < every:
            c.timeline.on_open = lambda *_: vars(c.stop).update(asked=15 * c.state.step)

    why = f"step {fails_at} could not be saved: OSError: [Errno 27] File too large"
    how = dict(steps=3, save_every=every, save_hf_every=every, keep=1, out=tmp_path)
    how |= dict(prepare_controller=fail_on_rank_1, controllers=controllers)
    with contextlib.nullcontext() if 3 in left else pytest.raises(RunLost, match=re.escape(why)):
        simulate("full", 2, **how)
    (note,) = controllers[0].report.notes
    newest = f"that of step {fails_at - 1}" if fails_at > 1 else "none"
    assert note == f"CHECKPOINT FAILED: {why}; the newest is {newest}"
    assert len(controllers[0].report.steps) == max(fails_at, *left, 0)
    assert saved_steps(tmp_path) == left
    exported = [step for step in (1, 2, 3) if every == 1 and step != fails_at]
    exports = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("hf*/*/*"))
    assert exports == [f"hf/step_{step}/model.safetensors" for step in exported]


def test_a_stop_before_the_first_step_exports_nothing(tmp_path):
    """It would be the model that the run began with."""
    how = dict(steps=3, save_every=1, save_hf_every=1, out=tmp_path)
    simulate("full", 1, **how, prepare_controller=lambda c: vars(c.stop).update(asked=15))
    assert saved_steps(tmp_path) == [0] and not [*tmp_path.glob("hf*")]


def test_a_save_without_all_numbers_ends_the_run(tmp_path):
    """No disk causes that: the plan is wrong, and every later save would also be."""

    def lose_numbers(c):
        complete = Mock(side_effect=ValueError("invalid fill"))
        c.devices.actor.snapshot = lambda folder: (lambda: [], complete)

    how = dict(steps=2, save_every=1, out=tmp_path, prepare_controller=lose_numbers)
    with pytest.raises(ValueError, match="invalid fill"):
        simulate("full", 1, **how)
    assert atomic_files.steps_in(tmp_path / "checkpoints") == []


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Every file and folder, exports included, must be synced before names change, the checkpoint's last."""
    synced, renamed = [], []
    real_sync, real_rename = os.fsync, Path.rename

    def sync(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_sync(descriptor)

    def rename(*paths):
        renamed.append(len(synced))
        real_rename(*paths)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", rename)
    simulate("full", 1, steps=1, save_every=1, save_hf_every=1, out=tmp_path)
    folder, export = tmp_path / "checkpoints" / "step_1", tmp_path / "hf" / "step_1"
    at, last = renamed
    before = [Path(path).name if ".partial" not in Path(path).name else "." for path in synced[:at]]
    expected = {path.name for path in (*folder.rglob("*"), *export.rglob("*"))} | {"."}
    assert {"model.safetensors", "megatron", "controllers", CHECKSUMS} < expected
    assert set(before) == expected and before.count(".") == 2
    assert (synced[at:last], synced[last:]) == ([str(export.parent)], [str(folder.parent)])


# what a checkpoint holds: if these lines change, increase LAYOUT
LAYOUT_9 = """\
ahead: aborted carried dropped filtered from_others groups_per_kept kept latencies missing_groups moved \
stats tokens waves
common: config contents empty_steps groups_per_kept history layout log_multiplier prompts ranks skips \
split step
genrm: cached_tokens in_flight longest prompt_tokens request_s requests tokens wakes
groups: advantages answer_key cost critique earned finish greedy index logprobs media noted outcomes \
policy_logprobs prompt prompt_id question reference_logprobs replies response returns reward row \
turn_rewards turns values verdict versions
history: genrm lengths rollout serve_s split swap_s waves
own: ahead groups random rewards
prompts: carried cursor owners
"""
ALIKE = {"kept", "carried", "filtered", "dropped", "stats", "rollout"}  # as groups, history, genrm
# names of settings, models and metrics
NOT_OURS = {"config", "contents", "noted", "returns", "row", "values"}


def names_in(value, place: str) -> dict[str, set[str]]:
    """Return the names of every object in JSON, grouped by the object's own name."""
    found = {}
    if isinstance(value, dict):
        found[place] = set(value)
        for name in value.keys() - ALIKE - NOT_OURS:
            found |= names_in(value[name], name)
    for each in value if isinstance(value, list) else ():
        found |= names_in(each, place)
    return found


def test_the_layout_has_another_number_when_its_names_change(tmp_path):
    """A checkpoint of another layout must be refused in one line, and only the number identifies it."""
    how = dict(size=3, placement="engines=0-1 actor=2", ahead=1, over_dispatch=1.5, steps=4)
    simulate("partial", **how, save_every=2, keep=9, out=tmp_path)
    folder = tmp_path / "checkpoints" / "step_2"
    found = names_in(json.loads((folder / "common.json").read_text()), "common")
    for path in folder.glob("controllers/*"):
        found = names_in(json.loads(path.read_text()), "own") | found
    lines = [f"{place}: {' '.join(sorted(found[place]))}\n" for place in sorted(found)]
    assert ("".join(lines), checkpoint.LAYOUT) == (LAYOUT_9, 9)


def test_a_batch_that_waits_shows_the_same_however_often_it_was_stopped(tmp_path):
    """Rank 0 must show its own answers, though it has those of all ranks from the first stop on."""
    how = dict(size=3, placement="engines=0-1 actor=2", ahead=1, steps=4, save_every=1, keep=9)

    def stop_at_once(c):
        c.stop.asked = 15

    whole, _ = simulate("partial", **how, out=tmp_path / "0")
    how["resumed"] = tmp_path / "0" / "checkpoints" / "step_2"
    for number in "12":
        simulate("partial", **how, out=tmp_path / number, prepare_controller=stop_at_once)
        assert saved_steps(tmp_path / number) == [2]
        how["resumed"] = tmp_path / number / "checkpoints" / "step_2"
    resumed, _ = simulate("partial", **how, out=tmp_path / "3")
    batches = [whole[0].report.steps[2][1], resumed[0].report.steps[0][1]]
    shown = [
        [s.key for s in batch.kept[: len(batch.kept) - batch.from_others]] for batch in batches
    ]
    assert shown[0] == shown[1] != [] and batches[1].from_others > batches[0].from_others == 0


LAYOUTS = {"save": (3, {"saves": True}), "dp3": (3, {}), "dp2": (2, {})}  # name -> ranks, sizes
LAYOUTS |= {"tp2": (2, {"tp": 2}), "pp2": (2, {"pp": 2})}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, dict[str, list[dict]]]:
    """Return a checkpoint of three ranks, each layout's results after loading it, and the saving ranks'."""
    from tests.support.plain import make_model, make_samples

    out = tmp_path_factory.mktemp("saved")
    batches = [[sample for sample in make_samples(seed) if sample.advantages] for seed in (0, 1, 3)]
    for step, batch in enumerate(batches):
        for sample in batch:
            sample.versions = [step] * len(sample.response)
            sample.logprobs = [-4.0] * len(sample.response)
    model_dir = make_model(out / "model", "qwen3", tied=True)
    references = {"both": {"batches": batches, "model_dir": model_dir}}
    layouts = {name: ("both", *layout) for name, layout in LAYOUTS.items()}
    results = train_layouts("tests.workers.checkpoint", out, layouts, references)
    return out / "checkpoints" / "step_2", results


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "save"])
def test_the_next_update_is_the_same_under_every_layout(saved, name):
    """The ranks saved during that update; on three ranks it must be equal bit for bit."""
    _, results = saved
    expected, ranks = results["save"][0], results[name]
    metrics = [f"train/{name}" for name in ("loss", "grad_norm", "entropy", "kl", "tokens", "lr")]
    metrics += [f"critic/{name}" for name in ("value_loss", "grad_norm", "lr")]
    near, nearer = 1e-4, 5e-5
    if name == "dp3":
        near = nearer = 0.0
        metrics = [metric for metric in expected["metrics"] if "seconds" not in metric]
        random = [rank["random"].tolist() for rank in ranks]
        assert random == [rank["random"].tolist() for rank in results["save"]]
        assert random[0] != random[1]
    for metric in metrics:
        wanted = pytest.approx(expected["metrics"][metric], rel=0, abs=near)
        assert ranks[0]["metrics"][metric] == wanted, metric
    for weights, wanted in zip(ranks[0]["weights"], expected["weights"], strict=True):
        assert far(weights, wanted) <= nearer
    counts = [rank["counts"] for rank in ranks]  # what one judge's counts were
    assert counts == [[[5, 6, 7]], *[[[]] for _ in ranks[1:]]]
    got = ranks[0]["prompts"]
    assert (ranks[0]["step"], got["cursor"], got["carried"]) == (2, 9, list(range(9)))
    owners = dict(got["owners"])
    held = {prompt_id: facts for rank in ranks for prompt_id, facts in rank["held"].items()}
    assert sum(len(rank["held"]) for rank in ranks) == 9, "every carried group is held once"
    assert held == {number: ([number], [-number / 3], [1], owners[number]) for number in range(9)}


def test_each_rank_writes_a_stretch_of_the_weights_and_each_file_has_its_checksum(saved):
    """The checksums must reveal any changed byte."""
    folder, _ = saved
    assert atomic_files.verify(folder) == ""
    assert listed_in(folder) == files_of(folder) - {CHECKSUMS}
    found = FileSystemReader(folder / "megatron").read_metadata().storage_data
    files = {info.relative_path for index, info in found.items() if "optimizer" not in index.fqn}
    assert files == {f"__{rank}_0.distcp" for rank in range(3)}


class Evil:
    def __reduce__(self):
        return (os.system, (f"touch {self.path}",))


def test_a_checkpoint_never_executes_code(tmp_path):
    """The only pickle in it must name nothing but descriptions of tensors."""
    from training import sharded_checkpoint

    evil = Evil()
    evil.path = tmp_path / "executed"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(evil))
    with pytest.raises(ValueError, match=r"posix.system: was it changed"):
        sharded_checkpoint.load(None, tmp_path)
    assert not evil.path.exists()


def test_a_checkpoint_of_another_python_is_read():
    """3.11.2 names a member of an Enum by getattr, and 3.13 the module in which PosixPath is."""
    from training.sharded_checkpoint import OnlyDescriptions

    kind = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    member = b"cbuiltins\ngetattr\n(" + kind + b"S'TORCH_CONTIGUOUS_FORMAT'\ntR."
    assert OnlyDescriptions(io.BytesIO(member)).load().name == "TORCH_CONTIGUOUS_FORMAT"
    path = b"cpathlib._local\nPosixPath\n(S'step_2'\ntR."
    assert OnlyDescriptions(io.BytesIO(path)).load() == Path("step_2")


def test_what_a_setting_stands_for_is_read_or_refused(tmp_path, monkeypatch):
    """A folder, and a link to nothing, aren't files of a model."""
    for folder in ("chat_template.jinja", "deep.json"):
        (tmp_path / folder).mkdir()
    (tmp_path / "gone.json").symlink_to("/nowhere/gone.json")
    (tmp_path / "config.json").write_text("{}")
    config = Config(model=str(tmp_path), rule=("right",), judge_format=("chat",))
    assert len(checkpoint.contents_of(config)["model"]) == 2  # its name and one file
    monkeypatch.setattr(checkpoint.atomic_files, "sha256", os.listdir)
    with pytest.raises(UserError, match=rf"^--model {tmp_path} can't be read: .*config\.json"):
        checkpoint.contents_of(config)
