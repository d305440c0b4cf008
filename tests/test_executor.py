"""The executor: every table trains as Megatron-Core's own schedule does, to the last bit; messages."""

from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from scheduling.pipeline import SCHEDULES, Pipe
from test_actor import make_model, make_samples
from workers import train_layouts

ALL = ("megatron", "1f1b", "fused")
FIRST = {  # name -> family, ranks, sizes
    "pp2_tied": ("qwen2", 2, {"pp": 2, "schedules": ALL}),
    "pp2_bf16": ("qwen3", 2, {"pp": 2, "dtype": "bfloat16", "schedules": ALL}),
}
OTHERS = {
    "pp2": ("qwen3", 2, {"pp": 2, "schedules": ALL}),
    # one data-parallel rank has nothing to sum: a pass may leave a parameter out
    "tp2": ("qwen3", 2, {"tp": 2, "schedules": ALL[:3], "bucket": 500}),
    "pp4": ("qwen3", 4, {"pp": 4, "schedules": ALL}),
    "tp2_pp2_sp": ("qwen3", 4, {"tp": 2, "pp": 2, "sp": True, "schedules": ALL}),
    # gradients are summed during the backward pass, in buckets of so many parameters, as on CUDA
    "dp2_pp2": ("qwen3", 4, {"pp": 2, "schedules": ALL, "bucket": 500}),
}
# sums of squares in another order: their last bit may differ
NORMS = ("critic/grad_norm", "train/grad_norm")


@pytest.fixture(scope="module")
def results_of(tmp_path_factory):
    """By layout and schedule what a tier's layouts made."""
    models = tmp_path_factory.mktemp("models")
    batches = [make_samples(step) for step in range(3)]
    references = {}
    for family, tied in (("qwen3", False), ("qwen2", True)):
        model_dir = make_model(models / family, family, tied, num_hidden_layers=8)
        references[family] = {"model_dir": model_dir, "batches": batches}

    @cache
    def trained(are_first: bool) -> dict:
        path, layouts = tmp_path_factory.mktemp("executor"), FIRST if are_first else OTHERS
        return train_layouts("executor_worker.py", path, layouts, references=references)

    return trained


def cases() -> Iterator:
    """Layouts and schedules."""
    for layouts, marks in ((FIRST, ()), (OTHERS, pytest.mark.slow)):
        for layout, (*_, sizes) in layouts.items():
            for schedule in sizes["schedules"][1:]:
                yield pytest.param(layout, schedule, marks=marks)


@pytest.mark.parametrize("layout,schedule", list(cases()))
def test_a_schedule_trains_as_megatron_s_own(results_of, layout, schedule):
    """Actor and critic, three steps of two mini-batches, the critic twice over each: values, metrics and
    weights have the same bits."""
    results = results_of(layout in FIRST)
    ours, expected = results[layout][schedule], results[layout]["megatron"]
    steps = zip(ours["history"], expected["history"], strict=True)
    for (metrics, values), (others, other_values) in steps:
        assert values == other_values and metrics.keys() == others.keys()
        assert others["critic/grad_norm"] > 0.1 and others["train/tokens"] > 0
        for name, value in others.items():
            expects = pytest.approx(value, rel=1e-7) if name in NORMS else value
            assert metrics[name] == expects, name
    assert ours["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        assert torch.equal(ours["weights"][name], weight), name


# ---------------------------------------------------------------- the order of messages


class Wires:
    """What each rank of a table posts and awaits, in its order, as the executor asks for it."""

    def __init__(self, monkeypatch, table, pipes, connects=True):
        from training import executor, groups

        calls = dict(irecv=self.irecv, isend=self.isend, recv=self.irecv, send=self.isend)
        for module in (executor, groups):
            monkeypatch.setattr(module, "dist", SimpleNamespace(**calls))
        self.steps = [[] for _ in table]  # of each rank: (kind, pair, group, direction)
        self.most = 0  # tensors that a rank holds at once for messages under way
        for self.rank, tasks in enumerate(table):
            trainer = SimpleNamespace(
                pipeline=groups.Pipeline(self.rank, list(range(len(table))), "up", "down"),
                gpt=SimpleNamespace(config=SimpleNamespace(pipeline_dtype=torch.float32)),
                device="cpu",
            )
            if connects:
                groups.connect(trainer.pipeline, torch.device("cpu"))
            work = SimpleNamespace(trainer=trainer, shape=lambda task: (1,))
            messages = executor.Messages(table, pipes, [work] * len(pipes))
            for task in tasks:
                messages.receive(task)
                messages.send(task, torch.zeros(1))
                self.most = max(self.most, sum(map(len, messages.leaving.values())))
            messages.finish()
            assert not any(messages.leaving.values())

    def irecv(self, buffer, sender, group):
        return self.post("arrived", sender, group)

    def isend(self, tensor, receiver, group):
        return self.post("taken", receiver, group)

    def post(self, kind, other, group):
        steps, where = self.steps[self.rank], (frozenset((self.rank, other)), group)
        steps.append(("post", where, kind))
        number = steps.count(("post", where, kind))
        return SimpleNamespace(wait=lambda: steps.append((kind, where, number)))

    def end(self):
        """Whether all come to their end by NCCL's rule: of two ranks in a group the first post waits for
        the other's."""
        known, done, moves = set(), [0] * len(self.steps), True
        while moves:
            moves = False
            pairs = zip(self.steps, done, strict=True)
            heads = [steps[at] if at < len(steps) else None for steps, at in pairs]
            meet = [head[1] for head in heads if head and head[0] == "post"]
            known |= {where for where in meet if meet.count(where) == 2}
            for rank, head in enumerate(heads):
                if head and self.may_go(head, rank, known, done):
                    done[rank], moves = done[rank] + 1, True
        return done == [len(steps) for steps in self.steps]

    def may_go(self, head, rank, known, done):
        kind, where, number = head
        if kind == "post":
            return where in known
        (other,) = where[0] - {rank}
        post = ("post", where, "taken" if kind == "arrived" else "arrived")
        return self.steps[other][: done[other]].count(post) >= number


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_table_waits_for_a_first_meeting(monkeypatch, schedule, ranks):
    """Of two ranks in NCCL, because neighbours have met in one order before. A fused table would wait."""
    places = tuple(range(ranks))
    pipes = [Pipe(places, 2 * ranks), Pipe(places[::-1], 2 * ranks)]
    pipes = pipes[: 2 if schedule == "fused" else 1]
    table = SCHEDULES[schedule].table(pipes)
    assert Wires(monkeypatch, table, pipes).end()
    assert Wires(monkeypatch, table, pipes, connects=False).end() == (schedule != "fused")


def test_what_has_arrived_is_let_go(monkeypatch):
    """Nothing but what is under way is held, however many micro-batches a table has."""
    held = {}
    for count in (8, 32):
        pipes = [Pipe((0, 1, 2), count), Pipe((2, 1, 0), count)]
        held[count] = Wires(monkeypatch, SCHEDULES["1f1b"].table(pipes), pipes).most
    assert held[8] == held[32] <= 8
