"""The load that bench/modes.py measures: one rank of a run whose answers have given lengths, on real engines with real weights.

Prompts are the demo's. How long an answer is and what reward it gets come from a seed; the engines write as many tokens, whatever they
are, and the judge's as many for each critique. Training steps and weight pushes are real, with a learning rate of nearly nothing, so
that the load stays the same. Sides take turns within one run, on the same engines and prompts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import meter

import controller
import data
import genrm
import run
from engines import engine as engine_module
from reporting.metrics import local_facts, summarize
from scheduling import dynamic_sampling

CRITIQUE = 32  # tokens


@dataclass(frozen=True)
class Workload:
    """What is asked of the engines. Lengths in tokens."""

    length: Callable[[random.Random, random.Random], int]  # of one answer; the first generator is its group's
    judgements: int = 1
    keep: float = 1.0  # part of the groups whose rewards differ


def uniform(group: random.Random, answer: random.Random) -> int:
    """22 to 26."""
    return answer.randint(22, 26)


def long_tail(group: random.Random, answer: random.Random) -> int:
    """Most between 10 and 20; one in forty from 80 to 100: ten times the shortest."""
    return answer.randint(80, 100) if answer.random() < 0.025 else answer.randint(10, 20)


def by_prompt(group: random.Random, answer: random.Random) -> int:
    """8 to 60: some prompts have long answers, and those of one prompt differ by a quarter."""
    return round(group.uniform(10, 48) * answer.uniform(0.8, 1.25))


WORKLOADS = {
    "short": Workload(uniform),
    "tail": Workload(long_tail),
    "resample": Workload(by_prompt, keep=0.5),
    "judge-heavy": Workload(by_prompt, judgements=4),
}


class Load:
    """A workload on a job: it stands in for the sampling and the judge's verdicts."""

    def __init__(self, name: str, steps: int, timeline):
        self._names, self._steps, self._timeline = name.split("+"), steps, timeline
        self._lengths: dict[tuple[int, int], int] = {}
        self._starts: dict[tuple[int, int], int] = {}

    @property
    def name(self) -> str:
        """The workload of the step that runs: of several, `a+b`, each has its part of the steps."""
        return self._names[min(self._timeline.step * len(self._names) // self._steps, len(self._names) - 1)]

    @property
    def workload(self) -> Workload:
        """Its row."""
        return WORKLOADS[self.name]

    def length(self, sample) -> int:
        """Tokens of this answer. An answer that is begun anew gets another length, as with real sampling."""
        key = (sample.prompt_id, sample.index)
        if not sample.response:
            self._starts[key] = self._starts.get(key, 0) + 1
            group, answer = random.Random(f"{self.name} {key[0]}"), random.Random(f"{self.name} {key} {self._starts[key]}")
            self._lengths[key] = self.workload.length(group, answer)
        return self._lengths[key]

    def reward(self, sample) -> float:
        """Half of the answers are right, in a group that is kept; all of them in another."""
        informative = random.Random(f"{self.name} keep {sample.prompt_id}").random() < self.workload.keep
        return float(sample.index % 2) if informative else 1.0

    def sampling(self, job):
        """Answers of given lengths."""
        load = self

        class Lengths(engine_module.Sampling):
            def room(self, sample) -> int:
                return load.length(sample) - len(sample.response)

        return Lengths(**dataclasses.asdict(job.sampling) | {"ignore_eos": True})

    def judge(self, job) -> genrm.Judge:
        """Critiques of a given length by the real judge, verdicts from the seed; no two answers are taken for the same."""
        load = self

        class GivenVerdicts(genrm.Judge):
            def final_answer(self, sample, number=0):
                return f"{sample.prompt_id}+{sample.index}"

            def forget(self):
                super().forget()
                self.calls = dataclasses.replace(self.calls, judgements=load.workload.judgements)

            async def judge(self, sample, pool):
                await super().judge(sample, pool)
                sample.reward, sample.verdict = load.reward(sample), True

        (model,) = job.judge.models
        critique = dataclasses.replace(model.sampling, ignore_eos=True, max_new_tokens=CRITIQUE)
        return GivenVerdicts([dataclasses.replace(model, sampling=critique)], job.report.decode, job.judge.calls)


class Collector:
    """Stands in for the run's report: keeps each step's metrics."""

    def __init__(self, config, collected: list[dict], labels: dict):
        self.config, self._collected, self._labels = config, collected, labels
        self.ended, self.moves = 0.0, []
        self._meter = meter.Meter(Path(), 1, 0.0)
        self._meter.start()
        self._mark = self._meter.mark()

    def note(self, text: str) -> None:
        """A move of the split."""
        self.moves.append(text)

    def accuracy(self, step: int, value: float, now: float) -> None:
        """There is no evaluation."""

    async def step(self, step: int, served, samples, stats: dict, job) -> None:
        """Gather and keep (collective)."""
        load = job.state.history[-1]
        spans, now = job.timeline.drain(), job.timeline.now()
        capacity = {role: len(load.plan.leads(role)) * job.config.max_running_requests for role in ("rollout", "genrm")}
        facts = await job.world.gather(local_facts(served, samples, spans, job))
        metrics = summarize(facts, capacity) | load.metrics() | stats
        metrics["time/step_s"], self.ended = now - self.ended, now
        mark = self._meter.mark()
        metrics["time/cpu_s"], self._mark = sum(await job.world.gather(self._mark.to(mark)["cpu"])), mark
        moves, self.moves = self.moves, []
        self._collected.append(self._labels | {"step": step, "split": load.plan.split, "moves": moves, "metrics": metrics})


async def measure_side(job, load: Load, side: dict, labels: dict, collected: list[dict]) -> None:
    """Some steps of one side: a plan, or the plans among which `rebalance` chooses (collective)."""
    plans = [next(plan for plan in job.plans if plan.split == split) for split in side["splits"]]
    job.timeline.step = 0
    settings = {"steps": side["steps"], "partial_rollout": False} | side.get("settings", {})
    config = dataclasses.replace(job.config, **settings)
    prompts = data.Prompts(job.prompts.source)
    prompts.held_out = []
    groups = dynamic_sampling.Groups(prompts, config.answers_per_prompt, config.partial_rollout)
    collector = Collector(config, collected, labels)
    collector.ended = job.timeline.now()
    state = controller.State(groups_per_kept=1 / load.workload.keep)
    parts = dict(config=config, plans=plans, plan=plans[0], prompts=prompts, groups=groups, report=collector, state=state)
    await TRAIN(dataclasses.replace(job, sampling=load.sampling(job), judge=load.judge(job), **parts))
    await job.world.run(job.actor.wake)  # as `train` finds it


TRAIN = controller.train


def measure(sides: list[dict], out: Path):
    """In place of controller.train: every side, in the order given."""

    async def measured(job) -> None:
        collected: list[dict] = []
        for side in sides:
            labels = {name: side[name] for name in ("workload", "side", "repeat")}
            load = Load(side["workload"], side["steps"], job.timeline)
            await measure_side(job, load, side, labels, collected)
        if job.world.rank == 0:
            out.write_text(json.dumps(collected))

    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", type=Path, required=True, help="JSON: a list of workload, side, repeat, splits, steps, settings")
    parser.add_argument("--measured", type=Path, required=True, help="where to write each step's metrics")
    ours, theirs = parser.parse_known_args()
    controller.train = measure(json.loads(ours.sides.read_text()), ours.measured)
    # --partial-rollout lets the actor take tokens of older weights; whether there are any is up to each side
    run.main(["--lr", "1e-12", "--max-judge-failures", "1000000000", "--rebalance", "--partial-rollout", *theirs])


if __name__ == "__main__":
    main()
