"""Each half of the loop on its own: on fakes and a virtual clock, and the file between the two."""

import dataclasses
import json
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import replay
from commands.replay import read_replay
from sample import Outcome, Sample
from tests.support.fakes import simulate, trained


def rollout_only(out, mode="partial", size=2, done=0, **more):
    """Controllers and device log of a run whose replay is in `out`, after so many steps of another."""

    def record(c):
        c.learn = replay.record
        c.state.step = c.devices.actor.version = done

    return simulate(mode, size, out=out, rollout_only=True, prepare_controller=record, **more)


def train_only(path, size=1, steps=3, done=0, **more):
    """Controllers of a run on a replay, after so many steps of another."""

    def serve_from_file(c):
        c.collect = partial(replay.collect, read_replay(path, c.config.algorithm[0]))
        c.state.step = c.devices.actor.version = done

    more |= dict(train_only=True, replay=str(path), prepare_controller=serve_from_file)
    return simulate("full", size, steps=steps, **more)[0]


def keys(samples):
    return [(s.prompt_id, s.index) for s in samples]


def without_advantages(samples):
    """By key, the samples as they were before the algorithm came to them."""
    bare = [dataclasses.replace(sample, advantages=None, media=()) for sample in samples]
    return dict(zip(keys(bare), bare, strict=True))


@pytest.mark.parametrize("mode,size,tp", [("full", 4, 2), ("partial", 3, 1), ("fused", 4, 1)])
def test_the_replay_holds_every_kept_sample_once_in_drawing_order(tmp_path, mode, size, tp):
    """All controllers' samples of a step, whoever served them; tokens, logprobs and verdicts as they were."""
    controllers, _ = rollout_only(tmp_path, mode, size, tp=tp)
    for number, step in enumerate(read_replay(tmp_path / "replay.jsonl", "grpo")):
        kept = [sample for c in controllers for sample in c.report.steps[number][1].kept]
        assert keys(step) == sorted(keys(kept)) and len(set(keys(step))) == len(step)
        assert without_advantages(step) == without_advantages(kept)
        assert {version for sample in step for version in sample.versions} == {0}


@pytest.mark.parametrize("size,tp", [(1, 1), (4, 2), (3, 1)])
def test_train_only_trains_on_each_sample_once_and_has_no_engine(tmp_path, size, tp):
    """A step of the replay is one of training, on any ranks; groups stay whole, and so do advantages."""
    rollout_only(tmp_path)
    steps = read_replay(tmp_path / "replay.jsonl", "grpo")
    controllers = train_only(tmp_path / "replay.jsonl", size=size, tp=tp, prompts_per_step=12)
    for number, step in enumerate(steps):
        samples = trained(controllers, number)
        assert sorted(samples) == keys(step)
        assert without_advantages(samples.values()) == without_advantages(step)
        for prompt_id in {s.prompt_id for s in step}:  # GRPO: a group's advantages cancel out
            group = [s for s in samples.values() if s.prompt_id == prompt_id]
            assert sum(s.advantages[0] for s in group) == pytest.approx(0.0, abs=1e-5)
            assert any(s.advantages[0] for s in group)
    for c in controllers:
        assert c.devices.actor.version == len(steps) and not c.report.accuracies
        assert not c.devices.rollout.all_engines and not c.devices.genrm.all_engines


def test_a_replay_goes_on_from_the_checkpoint_that_it_was_written_from(tmp_path):
    """After its two steps. Other weights are refused, and more steps than the file has."""
    rollout_only(tmp_path, steps=4, done=2)
    path = tmp_path / "replay.jsonl"
    written = read_replay(path, "grpo")
    assert len(written) == 2 and {2} == {v for sample in written[0] for v in sample.versions}
    (c,) = train_only(path, steps=4, done=2)
    assert [len(batch) for batch in c.devices.actor.batches] == [len(step) for step in written]
    refused = r"--replay .*replay\.jsonl: step 0 is of weights v2, newer than the actor's v0"
    with pytest.raises(ValueError, match=refused):
        train_only(path, steps=2)
    with pytest.raises(ValueError, match="holds 2 steps, but 7 are left up to --steps 9"):
        train_only(path, steps=9, done=2)


def row(step, sample):
    return json.dumps({"step": step, "algorithm": "grpo"} | dataclasses.asdict(sample))


PLACE = (st.integers(0, 9), st.integers(0, 9), st.just([1]))
OUTCOMES = st.builds(
    Outcome, st.integers(0, 9), st.integers(0, 9), st.floats(0, 1), st.none(), st.booleans()
)
FACTS = dict(question=st.text(), logprobs=st.lists(st.floats(-80, 0), max_size=5))
FACTS |= dict(outcomes=st.lists(OUTCOMES, max_size=3))
SAMPLES = st.builds(Sample, *PLACE, verdict=st.none() | st.booleans(), **FACTS)
ROWS = st.lists(SAMPLES, min_size=1, max_size=4)
BETWEEN = st.lists(ROWS | st.just([]), max_size=3)
STEPS = st.builds(lambda first, between, last: [first, *between, last], ROWS, BETWEEN, ROWS)


@settings(deadline=None)
@given(STEPS, st.randoms(use_true_random=False))
def test_what_was_written_comes_back_bit_by_bit(tmp_path_factory, steps, rng):
    """Whatever text and numbers the samples hold, and in whatever order the ranks wrote the steps'
    samples. JSON keeps a float exactly, and a line end in a text isn't one in the file. A step that
    kept nothing has no row, and the steps after it keep their place."""
    path = tmp_path_factory.mktemp("replay") / "replay.jsonl"
    steps = [without_advantages(step) for step in steps]
    placed = [(number, sample) for number, step in enumerate(steps) for sample in step.values()]
    rng.shuffle(placed)
    path.write_text("\n".join(map(row, *zip(*placed, strict=True))))
    expected = [[step[key] for key in sorted(step)] for step in steps]
    assert read_replay(path, "grpo") == expected


GOOD = row(0, Sample(0, 0, [1]))
NO_SAMPLE = "replay.jsonl:1: expected the fields of a Sample, its step and alg"
BAD = [
    ("", "--replay \\S+/replay.jsonl: the file holds no row"),
    (GOOD + "\n" + GOOD[:99], "replay.jsonl:2: not valid JSON"),  # killed while it wrote
    ('{"step": 0}\n', NO_SAMPLE),
    (GOOD.replace('"step": 0', '"step": "0"'), NO_SAMPLE),
    (GOOD.replace('"index"', '"number"'), NO_SAMPLE),
    (GOOD.replace('"algorithm": "grpo", ', ""), NO_SAMPLE),  # of an earlier version
    (GOOD.replace("grpo", "remax"), "replay.jsonl:1: served for --algorithm remax, not grpo"),
]


@pytest.mark.parametrize("text,named", BAD)
def test_a_bad_replay_is_named(tmp_path, text, named):
    """File and line, in one sentence."""
    (tmp_path / "replay.jsonl").write_text(text)
    with pytest.raises(ValueError, match=named):
        read_replay(tmp_path / "replay.jsonl", "grpo")
