"""The load that bench/modes.py measures: one rank of a run whose answers have given lengths, on real engines
with real weights.

Prompts are the demo's. How long an answer is and what reward it gets come from a seed; the engines write as
many tokens, whatever they are, and the judge's as many for each critique. Training steps and weight pushes
are real, with a learning rate of nearly nothing, so that the load stays the same. Sides take turns within one
run, on the same engines and prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import meter

import controller
import data
import genrm
import rewards
import run
from engines.engine import seed_of
from reporting.metrics import local_facts, serving_metrics, summarize
from sample import Sample

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
    """A workload on a controller: how long its answers are and what they are worth."""

    def __init__(self, name: str, c: controller.Controller):
        self._names, self._c = name.split("+"), c
        self._lengths: dict[tuple[int, int], int] = {}
        self._starts: Counter[tuple[int, int]] = Counter()

    @property
    def name(self) -> str:
        """The workload of the step that runs: of several, `a+b`, each has its part of the steps."""
        part = self._c.timeline.step * len(self._names) // self._c.config.steps
        return self._names[min(part, len(self._names) - 1)]

    @property
    def workload(self) -> Workload:
        return WORKLOADS[self.name]

    def length(self, key: tuple[int, int], written: int) -> int:
        """Tokens of this answer. One that is begun anew gets another length, as with real sampling."""
        if not written:
            self._starts[key] += 1
            group = random.Random(f"{self.name} {key[0]}")
            answer = random.Random(f"{self.name} {key} {self._starts[key]}")
            self._lengths[key] = self.workload.length(group, answer)
        return self._lengths[key]

    def reward(self, sample: Sample) -> float:
        """Half of the answers are right, in a group that is kept; all of them in another."""
        informative = random.Random(f"{self.name} keep {sample.prompt_id}").random() < self.workload.keep
        return float(sample.index % 2) if informative else 1.0


def generate_lengths(load: Load, c: controller.Controller):
    """The rollout pool's `generate`, but for how many tokens each answer gets. A seed tells whose answer it is."""
    generate, most, keys = c.placement.rollout.generate, c.sampling.max_new_tokens, {}

    async def generated(prompts, sampling, *, limits, seeds, greedy=(), model=0):
        for prompt_id in c.prompts.owners:
            for index in range(c.config.answers_per_prompt):
                keys.setdefault(seed_of(c.config.seed, prompt_id, index), (prompt_id, index))
        written = [most - limit for limit in limits]
        lengths = [load.length(keys[seed], n) - n for seed, n in zip(seeds, written, strict=True)]
        exactly = dataclasses.replace(sampling, ignore_eos=True)
        async for answer in generate(prompts, exactly, limits=lengths, seeds=seeds, greedy=greedy, model=model):
            yield answer

    return generated


class GivenRewards(rewards.Rewards):
    """Critiques of a given length by the real judge, numbers from the seed; no two answers pass for the same."""

    def __init__(self, load: Load, c: controller.Controller):
        vars(self).update(vars(c.rewards))
        (judge,), self._load, self._tasks = self.judges, load, {}
        judge.sampling = dataclasses.replace(judge.sampling, ignore_eos=True, max_new_tokens=CRITIQUE)
        judge.judgements = load.workload.judgements

    async def score(self, sample: Sample, pool) -> None:
        (judge,), answer = self.judges, f"{sample.prompt_id}+{sample.index}"
        judge.judgements = self._load.workload.judgements
        task = self._tasks[answer] = asyncio.create_task(judge.ask(sample.question, answer, pool))
        await asyncio.shield(task)
        sample.reward, sample.verdict = self._load.reward(sample), True


class Collector:
    """Stands in for the run's report: keeps each step's metrics."""

    def __init__(self, c: controller.Controller, collected: list[dict], labels: dict):
        self._collected, self._labels, self.ended, self.moves = collected, labels, c.timeline.now(), []
        self._meter = meter.Meter(Path(), 1, 0.0)
        self._meter.start()
        self._mark = self._meter.mark()

    def note(self, text: str) -> None:
        """A move of the split."""
        self.moves.append(text)

    async def step(self, c, step: int, batch, samples: list[Sample], stats: dict) -> None:
        """Gather and keep (collective)."""
        facts, now = local_facts(c, batch, samples, c.timeline.drain()), c.timeline.now()
        metrics = summarize(await c.world.gather(facts))
        metrics |= serving_metrics(c.state.history[-1], c.config) | stats
        metrics |= {"time/step_s": now - self.ended, "rollout/waves": float(batch.waves)}
        mark, self.ended = self._meter.mark(), now
        metrics["time/cpu_s"] = sum(await c.world.gather(self._mark.to(mark)["cpu"]))
        row = {"step": step, "split": str(c.state.history[-1].split), "moves": self.moves, "metrics": metrics}
        self._collected.append(self._labels | row)
        self._mark, self.moves = mark, []


async def measure_side(c: controller.Controller, side: dict, collected: list[dict]) -> None:
    """Some steps of one side: a plan, or the plans among which `rebalance` chooses (collective)."""
    placement = c.placement
    plans = [next(plan for plan in ALL_PLANS if str(plan.split) == split) for split in side["splits"]]
    placement.plans, placement.plan = plans, plans[0]
    c.timeline.step = 0
    settings = {"over_dispatch": 1.0, "steps": side["steps"]} | side.get("settings", {})
    config = dataclasses.replace(c.config, **settings)
    prompts = data.Prompts(c.prompts.source, config.answers_per_prompt, config.continues_answers)
    prompts.held_out = []
    side_c = dataclasses.replace(c, config=config, prompts=prompts)
    load = Load(side["workload"], side_c)
    side_c.rewards, side_c.state = GivenRewards(load, c), controller.State(groups_per_kept=1 / load.workload.keep)
    side_c.report = Collector(c, collected, {name: side[name] for name in ("workload", "side", "repeat")})
    generate, placement.rollout.generate = placement.rollout.generate, generate_lengths(load, side_c)
    await TRAIN(side_c)
    placement.rollout.generate = generate
    await c.world.run(placement.actor.wake)  # as `train` finds it


TRAIN, ALL_PLANS = controller.train, []


def measure(sides: list[dict], out: Path):
    """In place of controller.train: every side, in the order given."""

    async def measured(c: controller.Controller) -> int:
        collected: list[dict] = []
        ALL_PLANS.extend(c.placement.plans)
        for side in sides:
            await measure_side(c, side, collected)
        if c.world.rank == 0:
            out.write_text(json.dumps(collected))
        return signal.SIGTERM  # nothing is to be drawn at the end

    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", type=Path, required=True, help="JSON: a list of workload, side, repeat, splits, steps, settings")
    parser.add_argument("--measured", type=Path, required=True, help="where to write each step's metrics")
    ours, theirs = parser.parse_known_args()
    controller.train = measure(json.loads(ours.sides.read_text()), ours.measured)
    genrm.MAX_JUDGE_FAILURES = 10**9
    # --over-dispatch lets the actor take tokens of older weights; whether there are any is up to each side
    run.main(["--lr", "1e-12", "--save-every", "0", "--over-dispatch", "1.25", *theirs])


if __name__ == "__main__":
    main()
