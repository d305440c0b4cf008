"""The executor: every table trains as Megatron-Core's own schedule does, to the last bit; messages."""

import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from actor import Actor
from examples.make_demo.closing import close
from extras.critic import Critic
from extras.pipelines import executor
from extras.pipelines.fused import fused
from extras.pipelines.tables import Pipe, one_after_another
from sample import flat
from scheduling.pipeline import SCHEDULES, Schedule
from tests.support.plain import make_model, make_samples
from tests.support.rounding import apart
from tests.workers.parallel import actor_config, balanced, critic_config, set_overlap
from tests.workers.start import trained_by_tier
from training import groups, trainer
from training.passes import Pass

ALL = ("megatron", "1f1b", "fused")
FIRST = {  # name -> family, ranks, sizes
    "pp2_tied": ("qwen2", 2, {"pp": 2, "schedules": ALL}),
    "pp2_bf16": ("qwen3", 2, {"pp": 2, "dtype": "bfloat16", "schedules": ALL}),
}
OTHERS = {
    "pp2": ("qwen3", 2, {"pp": 2, "schedules": ALL}),
    # one data-parallel rank has nothing to sum, so a pass may leave a parameter out
    "tp2": ("qwen3", 2, {"tp": 2, "schedules": ALL, "bucket": 500}),
    "pp4": ("qwen3", 4, {"pp": 4, "schedules": ALL}),
    "tp2_pp2_sp": ("qwen3", 4, {"tp": 2, "pp": 2, "sp": True, "schedules": ALL}),
    # gradients are summed during the backward pass, in buckets of that many parameters, as on CUDA
    "dp2_pp2": ("qwen3", 4, {"pp": 2, "schedules": ALL, "bucket": 500}),
}
SETTINGS = dict(row="ppo", updates_per_step=2, max_tokens_per_micro_batch=32)
# sums of squares, one per tensor, in another order
NORMS = ("critic/grad_norm", "train/grad_norm")


@pytest.fixture(scope="module")
def result_of(tmp_path_factory):
    models = tmp_path_factory.mktemp("models")
    batches = [make_samples(step) for step in range(3)]
    references = {}
    for family, tied in (("qwen3", False), ("qwen2", True)):
        model_dir = make_model(models / family, family, tied, num_hidden_layers=8)
        references[family] = {"model_dir": model_dir, "batches": batches}
    return trained_by_tier(
        "tests.training.test_executor", tmp_path_factory, FIRST, OTHERS, references
    )


def megatron_run(works: list):
    """Run Megatron-Core's own schedule."""
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    for work in works:
        module, config = work.trainer.ddp, work.trainer.ddp.config
        config.finalize_model_grads_func = finalize_model_grads
        module.zero_grad_buffer()
        with torch.set_grad_enabled(not work.forward_only):
            numbers = iter(range(len(work.micro_batches)))
            how = dict(data_iterator=numbers, forward_only=work.forward_only)
            how |= dict(seq_length=0, micro_batch_size=1, num_microbatches=len(work.micro_batches))
            groups = work.trainer.groups
            how["pg_collection"] = groups
            if groups.pp.size() > 1:
                how["p2p_communicator"] = P2PCommunicator(groups.pp, config)
            run = get_forward_backward_func(groups.pp.size(), None)
            work.stats = run(forward_step_func=work.forward, model=module, **how)
        config.finalize_model_grads_func = None
        work.passes = [Pass("", "", 0, 0.0, 1.0)]


SCHEDULES["megatron"] = Schedule(megatron_run)


def build(model_dir: str, schedule: str, layout: dict) -> tuple:
    settings = SETTINGS | layout | {"schedule": schedule}
    return Actor(actor_config(**settings), model_dir), Critic(critic_config(**settings), model_dir)


def batch_of(step: int, samples: list) -> list:
    """Make a batch of samples by weights `step`, with PPO's columns except the values."""
    kept = [sample for sample in samples if sample.advantages is not None]
    samples = [replace(sample, versions=[step] * len(sample.response)) for sample in kept]
    rng = random.Random(step)
    for sample in samples:
        sample.logprobs = [-3.0] * len(sample.response)
        sample.returns = {"reward": [rng.gauss(0, 1) for _ in sample.response]}
    return samples


def ppo_step(trainers: tuple, step: int, samples: list) -> tuple[dict, list]:
    """Make a step as controller.learn does. Return metrics without seconds, and the critic's values."""
    actor, critic = trainers
    mini_batches = balanced(batch_of(step, samples), actor)
    critic.compute_values(mini_batches)
    fuses = SCHEDULES[actor.config.schedule].fuses
    metrics = {}
    for first, *others in [(critic, actor)] if fuses else [(critic,), (actor,)]:
        metrics |= first.update(mini_batches, *others)
    metrics = {name: value for name, value in metrics.items() if "seconds" not in name}
    return metrics, [sample.values["reward"] for sample in flat(mini_batches)]


def weights_of(trainers: tuple) -> dict:
    named = ((str(number), trainer) for number, trainer in enumerate(trainers))
    return {(n, name): each.clone() for n, of in named for name, each in of.named_weights()}


def train(reference: dict, layout: dict, path: str) -> dict:
    # the norm's last bit depends on where its parts are, and would show in weights
    trainer.CLIP_GRAD = 100.0
    layout, batches, results = dict(layout), reference["batches"], {}
    model_dir = reference["model_dir"]
    set_overlap(layout.pop("bucket", None))
    for name in layout.pop("schedules"):
        trainers = build(model_dir, name, layout)
        history = [ppo_step(trainers, step, batch) for step, batch in enumerate(batches)]
        results[name] = {"history": history, "weights": weights_of(trainers)}
        for each in trainers:
            close(each)
    return results


def cases() -> Iterator:
    for layouts, marks in ((FIRST, ()), (OTHERS, pytest.mark.slow)):
        for layout, (*_, sizes) in layouts.items():
            for schedule in sizes["schedules"][1:]:
                yield pytest.param(layout, schedule, marks=marks)


@pytest.mark.parametrize("layout,schedule", list(cases()))
def test_a_schedule_trains_as_megatron_s_own(result_of, layout, schedule):
    """Over three steps of two mini-batches, values, metrics and weights must have the same bits."""
    ours, expected = result_of(layout)[schedule], result_of(layout)["megatron"]
    steps = zip(ours["history"], expected["history"], strict=True)
    near = apart(len(expected["weights"]))
    for (metrics, values), (others, other_values) in steps:
        assert values == other_values and metrics.keys() == others.keys()
        assert others["critic/grad_norm"] > 0.1 and others["train/tokens"] > 0
        for name, value in others.items():
            expects = pytest.approx(value, rel=near) if name in NORMS else value
            assert metrics[name] == expects, name
    assert ours["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        assert torch.equal(ours["weights"][name], weight), name


class Wires:
    """Records what each rank of a table posts and awaits, in order, as the executor requests it."""

    def __init__(self, monkeypatch, table, pipes, connects=True):
        monkeypatch.setattr(executor, "shape_of", lambda work, task: (1,))
        calls = dict(irecv=self.irecv, isend=self.isend, recv=self.irecv, send=self.isend)
        for module in (executor, groups):
            monkeypatch.setattr(module, "dist", SimpleNamespace(**calls))
        self.steps = [[] for _ in table]  # for each rank: (kind, pair, group, direction)
        self.most = 0  # tensors that a rank holds at once for messages in flight
        for self.rank, tasks in enumerate(table):
            trainer = SimpleNamespace(
                pipeline=groups.Pipeline(self.rank, list(range(len(table))), "up", "down"),
                gpt=SimpleNamespace(config=SimpleNamespace(pipeline_dtype=torch.float32)),
                device="cpu",
            )
            if connects:
                groups.connect(trainer.pipeline, torch.device("cpu"))
            work = SimpleNamespace(trainer=trainer)
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
        """Return True if all end by NCCL's rule: a group's first post on one rank waits for the other's."""
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
@pytest.mark.parametrize("schedule", [one_after_another, fused])
def test_no_table_waits_for_a_first_meeting(monkeypatch, schedule, ranks):
    """Two NCCL ranks must not deadlock when neighbors first met in one order. A fused table would wait."""
    places = tuple(range(ranks))
    pipes = [Pipe(places, 2 * ranks), Pipe(places[::-1], 2 * ranks)]
    pipes = pipes[: 2 if schedule is fused else 1]
    table = schedule(pipes)
    assert Wires(monkeypatch, table, pipes).end()
    assert Wires(monkeypatch, table, pipes, connects=False).end() == (schedule is not fused)


def test_what_has_arrived_is_let_go(monkeypatch):
    """Only messages in flight may be held, however many micro-batches a table has."""
    held = {}
    for count in (8, 32):
        pipes = [Pipe((0, 1, 2), count), Pipe((2, 1, 0), count)]
        held[count] = Wires(monkeypatch, one_after_another(pipes), pipes).most
    assert held[8] == held[32] <= 8
