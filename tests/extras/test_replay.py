"""Replays on fakes: what --record keeps is trained on again, without engines; another record is refused."""

from dataclasses import replace

import pytest

import build
import modes
from extras.replay import check
from tests.support.fakes import all_batches, fake_config, learned, simulate

RUNS = {  # name -> ranks, settings
    "two ranks": (2, {}),
    "answers that are carried": (2, {"over_dispatch": 2.0, "steps": 5}),
    "serving ahead": (4, {"placement": "standalone", "ahead": 1}),
    "costs, and a critic's first steps": (2, {"algorithm": ("safe_rlhf", "critic_warmup=1")}),
}
CHANGES = {  # what another run asks for -> the words of its refusal
    "the rewards": ({"rule": ("length:9",)}, "that run had rule ''"),
    "the temperature": ({"temperature": 0.5}, "that run had temperature '1.0'"),
    "the critics' first steps": (
        {"algorithm": ("ppo", "critic_warmup=1")},
        "that run had critic-warmup '0'",
    ),
    "more steps": ({"steps": 4}, r"step_3/0-of-2.jsonl is missing: .* --steps 4 or more"),
    "no record": ({"samples": "nothing"}, r"step_0/0-of-2.jsonl is missing: .* needs --record, "),
}


def batches(controllers):
    """Return what metrics read of each batch besides the samples that were trained on."""
    parts = ("dropped", "filtered", "tokens", "stats", "latencies", "groups_per_kept")
    carried = [c.report.carried for c in controllers]  # as they were: their answers go on
    return carried, [[vars(batch)[name] for name in parts] for batch in all_batches(controllers)]


@pytest.mark.parametrize("name", RUNS)
def test_it_trains_on_the_same_samples(tmp_path, name):
    ranks, how = RUNS[name]
    expected, _ = simulate("partial", ranks, record=True, out=tmp_path / "run", **how)
    run = str(tmp_path / "run")
    controllers, _ = simulate("partial", ranks, samples=run, out=tmp_path / "replay", **how)
    assert not any(c.devices.rollout.all_engines for c in controllers)
    assert learned(controllers) == learned(expected) != []
    assert batches(controllers) == batches(expected)


def test_a_step_that_was_done_again_counts_once(tmp_path):
    """After a crash a run serves some steps again."""
    run = tmp_path / "run"
    file = run / "record/step_1/0-of-2.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text('{"batch": "of the weights before the crash"}\n')
    expected, _ = simulate("partial", 2, record=True, out=run)
    assert len(file.read_text().splitlines()) == 2
    controllers, _ = simulate("partial", 2, samples=str(run), out=tmp_path / "replay")
    assert learned(controllers) == learned(expected)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return the settings of a replay, and where its models are."""
    run = tmp_path_factory.mktemp("run")
    simulate("partial", 2, record=True, out=run)
    config = fake_config(samples=str(run), out=str(run.with_name("replay")))
    return config, modes.lay_out(config, 2)


def test_no_rank_has_a_server(recorded):
    config, (placement, splits) = recorded
    check(replace(config, steps=2), placement)  # the record has three
    for rank in (0, 1):
        assert build.servers_of(rank, replace(config, samples=""), placement, splits) == []


@pytest.mark.parametrize("name", CHANGES)
def test_another_run_is_refused(recorded, name):
    config, (placement, _) = recorded
    changes, words = CHANGES[name]
    with pytest.raises(ValueError, match=words):
        check(replace(config, **changes), placement)


def test_other_ranks_are_refused(recorded):
    config, _ = recorded
    placement, _ = modes.lay_out(config, 4)
    with pytest.raises(ValueError, match=r"0-of-4.jsonl is missing: .* 4 ranks that serve"):
        check(config, placement)


def test_a_lost_file_is_named(recorded, tmp_path):
    config, (placement, _) = recorded
    run = tmp_path / "run"
    simulate("partial", 2, record=True, out=run)
    (run / "record/step_1/1-of-2.jsonl").unlink()
    with pytest.raises(ValueError, match=r"step_1/1-of-2.jsonl is missing"):
        check(replace(config, samples=str(run)), placement)


def test_a_run_is_not_moved_aside_by_its_replay(recorded):
    config, (placement, _) = recorded
    with pytest.raises(ValueError, match="would move it aside: name another --out"):
        check(replace(config, out=f"{config.samples}/"), placement)
