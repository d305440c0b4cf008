"""Each half of the loop on its own: under fakes on a virtual clock, and the file between the two."""

import dataclasses
import json
from functools import partial

import pytest
from fakes import FakeActor, simulate
from hypothesis import given, settings
from hypothesis import strategies as st

import controller
from commands import replay
from commands.replay import choose, read_replay, rollout_only, train_only
from sample import Sample

LAYOUTS = [("full", 1, 1), ("full", 4, 2), ("partial", 2, 1), ("partial", 4, 4), ("auto", 4, 1)]


def rollout(out, mode, size, **more):
    """Jobs and device log of a --rollout-only run whose replay is in `out`."""

    def write_there(c):
        c.report.out = out

    return simulate(mode, size, loop=rollout_only, prepare_job=write_there, **more)


def keys(samples):
    return [(s.prompt_id, s.index) for s in samples]


def without_advantages(samples):
    """By key, the samples as they were before the algorithm came to them."""
    return {(s.prompt_id, s.index): dataclasses.replace(s, advantages=None) for s in samples}


# ---------------------------------------------------------------- serve and judge


@pytest.mark.parametrize("mode,size,tp", LAYOUTS)
def test_rollout_only_serves_what_a_run_would_train_on(tmp_path, mode, size, tp):
    """Its first step is the first step of the whole loop, sample by sample; the actor is handed the devices but never trains."""
    controllers, _ = rollout(tmp_path, mode, size, tp=tp)
    whole, _ = simulate(mode, size, tp=tp)
    steps = read_replay(tmp_path / "replay.jsonl")
    assert len(steps) == controllers[0].config.steps
    trained = [sample for c in whole if c.placement.actor.is_head for sample in c.report.steps[0][2]]
    assert without_advantages(steps[0]) == without_advantages(trained)
    assert all(c.placement.actor.version == 0 and not c.placement.actor.batches for c in controllers)


@pytest.mark.parametrize("mode,size,tp", LAYOUTS)
def test_the_replay_holds_every_kept_sample_once_in_drawing_order(tmp_path, mode, size, tp):
    """All controllers' samples of a step, whoever served them; the tokens, logprobs and verdicts as they were."""
    controllers, _ = rollout(tmp_path, mode, size, tp=tp)
    for number, step in enumerate(read_replay(tmp_path / "replay.jsonl")):
        kept = [sample for c in controllers for sample in c.report.steps[number][1].kept]
        assert keys(step) == sorted(keys(kept)) and len(set(keys(step))) == len(step)
        assert without_advantages(step) == without_advantages(kept)
        assert {version for sample in step for version in sample.versions} == {0}


# ---------------------------------------------------------------- train


@pytest.mark.parametrize("size,tp", [(1, 1), (2, 1), (4, 2), (4, 4), (3, 1)])
def test_train_only_trains_on_each_sample_once_and_asks_no_engine(tmp_path, size, tp):
    """A step of the replay is a step of training, on any number of ranks; groups stay whole, so advantages are the group's."""
    rollout(tmp_path, "partial", 2)
    steps = read_replay(tmp_path / "replay.jsonl")
    servers = []
    loop = partial(train_only, steps=steps)
    controllers, _ = simulate("full", size, tp=tp, loop=loop, prepare=servers.extend, partial_rollout=True, prompts_per_step=12)
    heads = [c for c in controllers if c.placement.actor.is_head]
    for number, step in enumerate(steps):
        trained = [sample for c in heads for sample in c.placement.actor.batches[number]]
        assert sorted(keys(trained)) == keys(step)
        assert without_advantages(trained) == without_advantages(step)
        for prompt_id in {s.prompt_id for s in step}:  # GRPO: a group's advantages cancel out
            group = [s for s in trained if s.prompt_id == prompt_id]
            assert sum(s.advantages[0] for s in group) == pytest.approx(0.0, abs=1e-5) and any(s.advantages[0] for s in group)
    assert all(c.placement.actor.version == len(steps) for c in controllers)
    assert not any(server.server.requests for server in servers)


def test_train_only_stops_at_steps_or_at_the_end_of_the_replay(tmp_path):
    """Fewer steps when fewer are asked for; when the file has fewer, a line says so."""
    rollout(tmp_path, "partial", 2, steps=3)
    loop = partial(train_only, steps=read_replay(tmp_path / "replay.jsonl"))
    (c, *_), _ = simulate("full", 1, loop=loop, steps=2, partial_rollout=True)
    assert c.placement.actor.version == 2 and not c.report.notes
    (c, *_), _ = simulate("full", 1, loop=loop, steps=9, partial_rollout=True, replay="r.jsonl")
    assert c.placement.actor.version == 3 and c.report.notes == ["r.jsonl holds 3 steps, fewer than --steps 9: all are trained on"]


def test_train_only_ends_when_it_is_asked_to(tmp_path):
    """On all ranks after the same step, whichever was asked."""
    rollout(tmp_path, "partial", 2, steps=3)
    loop, ended = partial(train_only, steps=read_replay(tmp_path / "replay.jsonl")), []

    async def noted(c):
        ended.append(await loop(c))

    def ask(servers, controllers):
        controllers[1].stop.asked = 15

    controllers, _ = simulate("full", 2, loop=noted, partial_rollout=True, events=[(0.7, ask)])
    assert ended == [15, 15] and [c.placement.actor.version for c in controllers] == [2, 2]


def test_train_only_stops_when_nothing_can_be_learnt(tmp_path, monkeypatch):
    """As the whole loop does after --max-skips updates."""
    rollout(tmp_path, "partial", 2, steps=3)

    async def update(actor, mini_batches):
        actor.version += 1
        return {"train/not_finite": 1.0}

    monkeypatch.setattr(FakeActor, "update", update)
    with pytest.raises(ValueError, match="--max-skips 2"):
        simulate("full", 1, loop=partial(train_only, steps=read_replay(tmp_path / "replay.jsonl")), partial_rollout=True, max_skips=2)


def test_a_step_that_kept_nothing_is_a_step_of_the_replay_too(tmp_path):
    """It has no row in the file. The steps after it keep their place, and it trains on nothing."""
    rollout(tmp_path, "partial", 2, steps=3)
    path = tmp_path / "replay.jsonl"
    whole = read_replay(path)
    path.write_text("".join(row + "\n" for row in path.read_text().splitlines() if json.loads(row)["step"] != 1))
    steps = read_replay(path)
    assert steps == [whole[0], [], whole[2]]
    (c, *_), _ = simulate("full", 1, loop=partial(train_only, steps=steps), steps=3, partial_rollout=True)
    assert [len(batch) for batch in c.placement.actor.batches] == [len(step) for step in steps]


def test_samples_of_weights_to_come_are_refused():
    """They can't be on-policy nor stale: another checkpoint wrote them."""
    sample = Sample(0, 0, [1], response=[2], logprobs=[-0.5], versions=[5], finish="stop", verdict=True, reward=1.0)
    with pytest.raises(ValueError, match="--replay r: step 0 is of weights v5, newer than the actor's v0"):
        simulate("full", 1, loop=partial(train_only, steps=[[sample]]), partial_rollout=True, replay="r")


def test_the_settings_choose_the_loop(tmp_path):
    """The whole one by default; a replay is read at once."""
    rollout(tmp_path, "partial", 2, steps=1)
    (c, *_), _ = simulate("full", 1)
    config = c.config
    config.rollout_only = config.train_only = False
    assert choose(config) is controller.train
    config.rollout_only = True
    assert choose(config) is rollout_only
    config.rollout_only, config.train_only, config.replay = False, True, str(tmp_path / "replay.jsonl")
    assert choose(config).keywords == {"steps": read_replay(tmp_path / "replay.jsonl")}


# ---------------------------------------------------------------- the file

TOKENS = st.lists(st.integers(0, 2**31), max_size=5)
LOGPROBS = st.lists(st.floats(-80, 0), max_size=5)
SAMPLES = st.builds(
    Sample, st.integers(0, 9), st.integers(0, 9), TOKENS, question=st.text(), answer_key=st.none() | st.text(), response=TOKENS,
    logprobs=LOGPROBS, finish=st.sampled_from(["stop", "length"]), versions=TOKENS, critique=st.text(),
    verdict=st.none() | st.booleans(), reward=st.none() | st.floats(0, 1),
)  # fmt: skip


@settings(deadline=None)
@given(st.lists(st.lists(SAMPLES, min_size=1, max_size=4), min_size=1, max_size=4))
def test_what_was_written_comes_back_bit_by_bit(tmp_path_factory, steps):
    """Whatever text and numbers the samples hold: JSON keeps a float exactly, and a line end in a text isn't one in the file."""
    path = tmp_path_factory.mktemp("replay") / "replay.jsonl"
    rows = [{"step": number} | dataclasses.asdict(sample) for number, step in enumerate(steps) for sample in step]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_replay(path) == steps


GOOD = json.dumps({"step": 0} | dataclasses.asdict(Sample(0, 0, [1])))


@pytest.mark.parametrize(
    "text,named",
    [
        ("", "replay.jsonl: the file holds no sample"),
        (GOOD + "\n{nope}\n", "replay.jsonl:2: not valid JSON"),
        (GOOD + "\n" + GOOD[: len(GOOD) // 2], "replay.jsonl:2: not valid JSON"),  # the run was killed while it wrote
        ('{"step": 0}\n', "replay.jsonl:1: expected the fields of a Sample"),
        ("3\n", "replay.jsonl:1: expected the fields of a Sample"),
        (GOOD.replace('"step": 0', '"step": "0"'), "replay.jsonl:1: expected the fields of a Sample"),
        (GOOD.replace('"index"', '"number"'), "replay.jsonl:1: expected the fields of a Sample"),
    ],
)
def test_a_bad_replay_is_named(tmp_path, text, named):
    """File and line, in one sentence."""
    (tmp_path / "replay.jsonl").write_text(text)
    with pytest.raises(ValueError, match=named):
        read_replay(tmp_path / "replay.jsonl")


def test_a_missing_replay_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"--replay .*nowhere: no such file"):
        replay.read_replay(tmp_path / "nowhere")
