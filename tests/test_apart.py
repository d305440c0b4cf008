"""Actor, critic and reference on ranks and in sizes of their own, against one rank that holds all."""

import pytest

from parallel_worker import far
from test_actor import make_model
from test_critic import make_value_model
from workers import train_layouts

SP = dict(tp=2, sp=True)
CROSSED = "actor=1,3:tp1:cp2 critic=0,2:cp1:tp2"
LAYOUTS = {  # name -> ranks, what is said of it
    "one": (1, dict(placement="colocate")),
    "equal": (2, dict(placement="actor=0-1:tp2 critic=0-1:tp1:pp2")),
    "reference": (3, dict(placement="actor=0 critic=1 reference=2", saves=True, meets=True)),
    "resumed together": (4, dict(placement="colocate", resumes="reference")),
    "interleaved": (4, dict(placement=CROSSED, sizes=SP, meets=True)),
    "disjoint": (5, dict(placement="engines=0-4 actor=0-1 critic=2-3", meets=True)),
    "apart": (5, dict(placement="engines=0 actor=1-2 critic=3-4:tp1:pp2", sizes=SP, meets=True)),
}
LAYOUTS["resumed apart"] = (5, LAYOUTS["apart"][1] | dict(resumes="reference"))
LAYOUTS |= {"two receivers": (6, dict(placement="engines=0,3,5 actor=1-2 critic=4", meets=True))}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("apart")
    reference = {"model": make_model(path / "actor", "qwen3", tied=False)}
    reference["critic"] = make_value_model(path / "value", "qwen3", tied=False)
    layouts = {name: ("qwen3", *layout) for name, layout in LAYOUTS.items()}
    return train_layouts("apart_worker.py", path, layouts, references={"qwen3": reference})


def exact(metrics: dict) -> dict:
    """Those that don't depend on how the samples were dealt, or on the hour."""
    return {name: x for name, x in metrics.items() if "seconds" not in name and "micro" not in name}


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_learn_as_on_one_rank(name, results):
    """Two updates of each model, or one after a load; where they meet, both learn at the same time.
    Megatron's global state stays empty, and every rank counts all updates and has all metrics."""
    found, one = results[name], results["one"]
    steps = range(1, 2) if "resumes" in LAYOUTS[name][1] else range(2)
    for metrics, step in zip(found["metrics"], steps, strict=True):
        expected = exact(one["metrics"][step])
        assert {"train/loss", "train/reference_kl", "critic/value_loss"} <= expected.keys()
        assert expected["train/grad_norm"] > 0.01 and expected["critic/grad_norm"] > 0.01
        # a small difference of sums, whose order is another
        variance = expected.pop("critic/explained_variance")
        learned = exact(metrics)
        assert learned.pop("critic/explained_variance") == pytest.approx(variance, rel=1e-6)
        assert learned == pytest.approx(expected, rel=2e-7, abs=2e-7), f"update {step}"
    for trainer, weights in one["weights"].items():
        assert far(found["weights"][trainer], weights) < 2e-5
    assert len(found["versions"]) == LAYOUTS[name][0]
    assert found["versions"] == [[2, 2]] * LAYOUTS[name][0]
    assert not any(found["global_state"])
    assert all(columns == found["columns"][0] for columns in found["columns"])


ENGINES = {"disjoint": range(5), "apart": [0], "two receivers": [0, 3, 5], "interleaved": range(4)}
# those of them that don't hold the actor
RECEIVERS = {"disjoint": [2, 3, 4], "apart": [0], "two receivers": [0, 3, 5], "interleaved": [0, 2]}


@pytest.mark.parametrize("name,engines", ENGINES.items())
def test_every_engine_gets_the_actors_weights(name, engines, results):
    """Bit for bit, on whatever rank, from whichever copy's head; who has neither gets nothing."""
    digests, weights = results[name]["digests"], results[name]["weights"]["megatron"]
    got = [digests[rank] for rank in engines]
    assert all(each == got[0] for each in got) and got[0].keys() == weights.keys()
    assert len({*got[0].values()}) > len(weights) / 2
    placement = LAYOUTS[name][1]["placement"]
    critics_alone = {"apart": (3, 4), "two receivers": (4,)}.get(name, ())
    assert not any(digests[rank] for rank in critics_alone), placement
    everything = sum(tensor.nbytes for tensor in weights.values())
    received = results[name]["received"]
    assert {rank: size for rank, size in enumerate(received) if size} == dict.fromkeys(
        RECEIVERS[name], everything
    )
