"""The load that bench/modes.py measures: one rank of a run whose answers have given lengths, on real engines.

Prompts are the demo's. How long an answer is and what reward it gets come from a seed; the engines generate
as many tokens, whatever they are, and the judge's as many for each critique. Training steps and weight pushes
are real, with a learning rate of nearly nothing, so that the load stays the same. Sides take turns within one
run, on the same engines and prompts.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import json
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import meter
from workloads import WORKLOADS, Workload, critique_of, is_kept, length_of

import controller
import data
import genrm
import rewards
import run
from config import Config
from controller import Controller, State, train
from engines import fleet
from engines.engine import Answer, Engine, Request, seed_of
from engines.pool import Pool
from placement import Plan
from reporting.metrics import local_facts, serving_metrics, summarize
from reporting.timeline import Timeline
from rollout import RolloutBatch
from sample import Sample


class Load:
    """Workloads in a run: how long its answers are and what they are worth."""

    def __init__(self, name: str, config: Config, timeline: Timeline):
        """name: of several, `a+b`, each has its part of the steps."""
        self._names, self._config, self._timeline = name.split("+"), config, timeline
        self._keys: dict[int, tuple[int, int]] = {}  # seed of an answer -> whose it is

    @property
    def name(self) -> str:
        """The workload of the step that runs."""
        part = self._timeline.step * len(self._names) // self._config.steps
        return self._names[min(part, len(self._names) - 1)]

    @property
    def workload(self) -> Workload:
        return WORKLOADS[self.name]

    def add(self, group: list[Sample]) -> None:
        """Answers that will be asked for."""
        for sample in group:
            self._keys[seed_of(self._config.seed, *sample.key)] = sample.key

    def tokens_left(self, seed: int, done: int) -> int:
        """Of an answer, `done` tokens of which are there."""
        return length_of(self.name, *self._keys[seed]) - done

    def critique(self, sample: Sample) -> int:
        return critique_of(self.name, *sample.key)

    def reward(self, sample: Sample) -> float:
        return float(sample.index % 2) if is_kept(self.name, sample.prompt_id) else 1.0


class PlayedEngine(Engine):
    """At the pace of BENCH_PACE_MS if that is set: rollout's, and behind a semicolon genrm's.

    swap_s: more that two roles take to change places.
    """

    swap_s = 0.0

    @classmethod
    def launch(cls, role: str, *arguments: Any, **more: Any) -> PlayedEngine:
        paces = os.environ.get("BENCH_PACE_MS", "").split(";")
        # a server has a copy of ours
        os.environ["BENCH_PACE_MS"] = paces[-1 if role == "genrm" else 0]
        engine = super().launch(role, *arguments, **more)
        os.environ["BENCH_PACE_MS"] = ";".join(paces)
        return engine

    async def sleep(self, deadline_s: float | None = None) -> None:
        await super().sleep(deadline_s)
        await asyncio.sleep(self.swap_s / 2)

    async def wake_weights(self) -> None:
        await super().wake_weights()
        await asyncio.sleep(self.swap_s / 2)


# ---------------------------------------------------------------- parts of a controller


class LoadPrompts(data.Prompts):
    """The demo's prompts, none held out. The load hears of their answers."""

    def __init__(self, load: Load, c: Controller, config: Config):
        super().__init__(c.prompts.source, config.answers_per_prompt, config.continues_answers)
        self._load, self.held_out = load, []

    def group(self, prompt_id: int) -> list[Sample]:
        group = super().group(prompt_id)
        self._load.add(group)
        return group


class GivenRewards(rewards.Rewards):
    """Critiques of a given length by the real judge, numbers from the load. No two answers are the same."""

    def __init__(self, load: Load, c: Controller):
        super().__init__(c.config, c.rewards.judges, [], c.report.decode)
        self._load = load

    def reset(self) -> None:
        super().reset()
        self.judges[0].judgements = self._load.workload.judgements

    async def score(self, sample: Sample, pool: Pool) -> None:
        (judge,), answer = self.judges, f"{sample.prompt_id}+{sample.index}"
        exactly = copy.copy(judge)  # of other lengths for each sample
        lengths = dict(ignore_eos=True, max_new_tokens=self._load.critique(sample))
        exactly.sampling = dataclasses.replace(judge.sampling, **lengths)
        task = self._tasks[answer] = asyncio.create_task(exactly.ask(sample.question, answer, pool))
        await asyncio.shield(task)
        sample.reward, sample.verdict = self._load.reward(sample), True


def with_given_lengths(generate: Callable, load: Load) -> Callable:
    """The rollout pool's `generate`, but for how many tokens each answer gets."""

    def given(request: Request) -> Request:
        rule = request.sampling
        left = load.tokens_left(request.seed, rule.max_new_tokens - request.limit)
        return request._replace(sampling=dataclasses.replace(rule, ignore_eos=True), limit=left)

    async def generate_given(requests: list[Request]) -> AsyncIterator[Answer]:
        async for answer in generate([*map(given, requests)]):
            yield answer

    return generate_given


class Collector:
    """Stands in for the run's report: keeps each step's metrics, and writes them at the end."""

    def __init__(self, c: Controller, out: Path):
        self.decode, self._out, self._is_main = c.report.decode, out, c.world.rank == 0
        self._rows: list[dict] = []
        self._meter = meter.Meter(Path(), 1, 0.0)
        self._meter.start()

    def begin(self, labels: dict, now: float) -> None:
        """Steps from now on have these labels."""
        self._labels, self._ended, self._moves, self._mark = labels, now, [], self._meter.mark()

    def note(self, text: str) -> None:
        """Of a step: the split moved, or an engine was lost."""
        self._moves.append(text)

    async def step(
        self, c: Controller, step: int, batch: RolloutBatch, samples: list[Sample], stats: dict
    ) -> None:
        """Gather and keep (collective)."""
        facts, now = local_facts(c, batch, samples, c.timeline.drain()), c.timeline.now()
        metrics = summarize(await c.world.gather(facts))
        metrics |= serving_metrics(c.state.history[-1], c.config) | stats
        mark = self._meter.mark()
        metrics["time/cpu_s"] = sum(await c.world.gather(self._mark.to(mark)["cpu"]))
        metrics["time/step_s"] = now - self._ended
        row = {"step": step, "split": str(c.state.history[-1].split), "moves": self._moves}
        self._rows.append(self._labels | row | {"metrics": metrics})
        self._mark, self._ended, self._moves = mark, now, []

    def close(self) -> None:
        if self._is_main:
            self._out.write_text(json.dumps(self._rows))


# ---------------------------------------------------------------- measuring


async def measure_side(c: Controller, side: dict, plans: list[Plan]) -> int:
    """Some steps of one side: a plan, or those among which `rebalance` chooses (collective)."""
    placement, rollout = c.placement, c.placement.rollout
    placement.plans, placement.plan, c.timeline.step = plans, plans[0], 0
    PlayedEngine.swap_s = side.get("swap_s", 0.0)
    prompts = WORKLOADS[side["workload"].partition("+")[0]].prompts
    settings = dict(over_dispatch=1.0, steps=side["steps"], prompts_per_step=prompts)
    settings |= side.get("settings", {})
    config = dataclasses.replace(c.config, **settings)
    load = Load(side["workload"], config, c.timeline)
    parts = dict(prompts=LoadPrompts(load, c, config), rewards=GivenRewards(load, c))
    state = State(groups_per_kept=1 / load.workload.keep)
    c.report.begin({name: side[name] for name in ("workload", "side", "repeat")}, c.timeline.now())
    generate, rollout.generate = rollout.generate, with_given_lengths(rollout.generate, load)
    stopped_by = await train(dataclasses.replace(c, config=config, state=state, **parts))
    rollout.generate = generate
    if not stopped_by:
        await placement.to_training()  # engines sleep, as `train` finds them
    return stopped_by


def measure(sides: list[dict], out: Path) -> Callable:
    """In place of controller.train: every side, in the order given."""

    async def measured(c: Controller) -> int:
        plans = {str(plan.split): plan for plan in c.placement.plans}
        c.report = Collector(c, out)
        for side in sides:
            if stopped_by := await measure_side(
                c, side, [plans[split] for split in side["splits"]]
            ):
                return stopped_by
        return 0

    return measured


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    sides = "JSON: a list of workload, side, repeat, splits, steps, settings, swap_s"
    parser.add_argument("--sides", type=Path, required=True, help=sides)
    parser.add_argument(
        "--measured", type=Path, required=True, help="where to write each step's metrics"
    )
    ours, theirs = parser.parse_known_args()
    controller.train = measure(json.loads(ours.sides.read_text()), ours.measured)
    genrm.MAX_JUDGE_FAILURES = 10**9
    if "BENCH_PACE_MS" in os.environ:
        PlayedEngine.module = "bench.paced_server"
    fleet.Engine = PlayedEngine
    # --over-dispatch lets the actor take tokens of older weights; whether there are any is up to each side.
    # --tail adds a plan to those of auto
    run.main(
        ["--lr", "1e-12", "--save-every", "0", "--over-dispatch", "1.25", "--tail", "0", *theirs]
    )


if __name__ == "__main__":
    main()
