"""The real controllers on fakes, with models and engines on ranks of their own, and serving ahead: every
placement must train on the same samples."""

import functools
import itertools

import pytest

import modes
from scheduling.measured import MOVES, Decision
from tests.support.fakes import at_random_paces, simulate, trained

PPO = ("ppo", "kl_coef=0.1", "kl_in=reward", "kl_estimator=k1")
SAFE = ("safe_rlhf", "kl_coef=0.1")
APART = "engines=0-1 actor=2-3"  # the actor as in a colocated run of two
PLACEMENTS = {  # name -> ranks, words; the actor's samples may be dealt to any number of copies
    "colocate": (2, "colocate"),
    "split": (4, "split"),
    "standalone": (4, "standalone"),
    "interleaved": (5, "engines=0,3 actor=2,4 critic=1"),
    "other sizes on the same ranks": (4, "engines=0-3 actor=0-3:tp2 critic=0-3:pp2"),
    "a reference, too": (6, "engines=0-1 actor=2-3 critic=4 reference=5"),
    "a reference beside engines": (3, "engines=0,2 actor=0-1 critic=1 reference=2"),
    "overlapping": (4, "engines=0-1 actor=1-2 critic=2-3:tp2"),
}
IS_APART = ("standalone", "interleaved")


def columns_of(controllers, step, digits=20):
    """Return by key what a step trained on: the answer, and all models' numbers for it, on whatever rank."""
    found = {}
    for c in controllers:
        for trainer in (c.devices.actor, *c.devices.critics):
            for sample in trainer.batches[step] if trainer.holds else []:
                advantages = [round(advantage, digits) for advantage in sample.advantages]
                made = (advantages, sample.values, sample.returns, sample.reference_logprobs)
                facts = (sample.response, sample.logprobs, sample.reward, *made)
                assert found.setdefault(sample.key, facts) == facts, "ranks differ in a sample"
    return found


def keys_of(controllers, step, trainer_of):
    """Return the samples that the leads of one model trained on, in order."""
    trainers = [trainer_of(c) for c in controllers]
    batches = [trainer.batches[step] for trainer in trainers if trainer.is_lead]
    return sorted(sample.key for sample in itertools.chain(*batches))


def serving(controllers):
    return [c for c in controllers if c.devices.serves]


@functools.cache
def colocated(algorithm, digits=20):
    """Return each of three steps' samples where all models share their ranks."""
    controllers, _ = simulate("full", 2, algorithm=algorithm)
    return [columns_of(controllers, step, digits) for step in range(3)]


def check_same(controllers, algorithm, digits=20):
    """Check that all models trained once on a colocated run's samples, and sent each other the same."""
    for step in range(3):
        expected = colocated(algorithm, digits)[step]
        assert columns_of(controllers, step, digits) == expected
        assert trained(controllers, step).keys() == expected.keys()
        for number in range(len(controllers[0].devices.critics)):
            keys = keys_of(controllers, step, lambda c: c.devices.critics[number])  # noqa: B023
            assert keys == sorted(expected)
    assert {c.devices.actor.version for c in controllers} == {3}
    assert {critic.version for c in controllers for critic in c.devices.critics} <= {3}
    assert all(c.report.steps[2][0] == 2 for c in controllers)


@pytest.mark.parametrize("algorithm", [PPO, SAFE], ids=["one critic", "two"])
@pytest.mark.parametrize("mode", modes.MODES)
@pytest.mark.parametrize("name", PLACEMENTS)
def test_all_train_on_the_same_samples(name, mode, algorithm):
    """Values, returns and advantages must be equal on every rank that trains on a sample."""
    size, words = PLACEMENTS[name]
    controllers, _ = simulate(mode, size, algorithm=algorithm, placement=words)
    # the mean and the spread of all advantages are summed over as many ranks as the actor has
    check_same(controllers, algorithm, 20 if controllers[0].devices.actor.shape.dp == 2 else 9)


@pytest.mark.parametrize("mode", modes.MODES)
@pytest.mark.parametrize("name", IS_APART)
def test_ahead_the_same_samples_are_by_older_weights(name, mode):
    """A batch must be served entirely by the weights with which the step before began."""
    size, words = PLACEMENTS[name]
    controllers, _ = simulate(mode, size, algorithm=PPO, placement=words, ahead=1)
    check_same(controllers, PPO, 9)
    for step in range(3):
        versions = {v for s in trained(controllers, step).values() for v in s.versions}
        assert versions == {max(0, step - 1)}
    assert [c.ahead for c in controllers] == [None] * size


def test_ahead_serves_while_others_train():
    """The next step's answers must be generated during an update; without it they come after."""
    for ahead, is_beside in ((1, True), (0, False)):
        controllers, _ = simulate("full", 2, placement="standalone", ahead=ahead)
        training = spans_of(controllers[1], "train")
        asked = [span.start for span in spans_of(controllers[0], "rollout")]
        inside = [any(span.start <= start < span.end for start in asked) for span in training]
        assert inside == [is_beside, is_beside, False]


def spans_of(controller, name):
    spans = itertools.chain(*(spans for *_, spans in controller.report.steps))
    return [span for span in spans if span.name == name]


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_same_seed_gives_the_same_run(ahead):
    runs = []
    for prepare in (at_random_paces(1), at_random_paces(2), at_random_paces(2)):
        how = dict(placement=APART, ahead=ahead, prepare=prepare, steps=4)
        controllers, _ = simulate("partial", 4, **how)
        runs.append([columns_of(controllers, step) for step in range(4)])
    assert runs[0] == runs[1] == runs[2]


def test_the_split_moves_between_two_pushes():
    """Engines that serve ahead are busy when it is decided, so the plan must change at the hand-over."""
    how = dict(placement="engines=0-3 actor=4", rebalance=True, steps=9)
    plain, _ = simulate("partial", 5, **how)
    controllers, _ = simulate("partial", 5, **how, ahead=1)
    for c in (plain, controllers):
        splits = [stats.split for stats in c[0].state.history]
        assert len({*splits}) > 1
        assert all(each.devices.split == c[0].devices.split for each in serving(c))
    assert columns_of(plain, 8) == columns_of(controllers, 8)


def test_a_batch_that_was_served_before_a_move_does_not_undo_it(monkeypatch):
    """The rule must see that its split is that of a run that has moved meanwhile."""

    def moves_once(history, splits, *_):
        return Decision(splits[1] if len(history) == 1 else history[-1].split, "")

    monkeypatch.setitem(MOVES, "partial", moves_once)
    how = dict(placement="engines=0-3 actor=4", rebalance=True, steps=5)
    controllers, _ = simulate("partial", 5, **how, ahead=1)
    _, _, *others = [stats.split for stats in controllers[0].state.history]
    assert {*others} == {controllers[0].devices.splits[1]}


STEPS = 5


@pytest.mark.parametrize("mode", ["full", "partial"])
@pytest.mark.parametrize("step", [1, 3])
def test_a_checkpoint_with_a_batch_served_ahead(tmp_path, mode, step):
    """Any placement on any number of ranks must resume from it with the batch unchanged."""
    how = dict(algorithm=PPO, steps=STEPS)
    ahead = how | dict(placement="engines=0-1 actor=2 critic=3", ahead=1)
    expected, _ = simulate(mode, 4, save_every=1, keep=9, out=tmp_path, **ahead)
    folder = tmp_path / "checkpoints" / f"step_{step}"
    others = [PLACEMENTS["colocate"], PLACEMENTS["split"], PLACEMENTS["interleaved"], (3, "split")]
    for size, words in others:
        controllers, _ = simulate(mode, size, resumed=folder, placement=words, **how)
        check_rest(controllers, expected, step)
    for size, words in ((4, "engines=0-1 actor=2-3"), (6, "engines=0-3 actor=4 critic=5")):
        controllers, _ = simulate(mode, size, resumed=folder, placement=words, ahead=1, **how)
        check_rest(controllers, expected, step)
        versions = {v for s in trained(controllers, 0).values() for v in s.versions}
        assert versions == {step - 1}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_checkpoint_of_one_placement_is_of_all(tmp_path, name):
    size, words = PLACEMENTS[name]
    how = dict(algorithm=PPO, steps=4)
    expected, _ = simulate("full", size, save_every=2, placement=words, out=tmp_path, **how)
    folder = tmp_path / "checkpoints" / "step_2"
    for size, words in PLACEMENTS.values():
        controllers, _ = simulate("full", size, resumed=folder, placement=words, **how)
        check_rest(controllers, expected, 2)


def check_rest(controllers, expected, first):
    """Check that from this step on they train on the same, and that all models count all updates."""
    steps = controllers[0].config.steps
    for step in range(first, steps):
        assert columns_of(controllers, step - first, 9) == columns_of(expected, step, 9)
    trainers = itertools.chain(*((c.devices.actor, *c.devices.critics) for c in controllers))
    assert {trainer.version for trainer in trainers} == {steps}
