"""The load that reproduce/bench/modes.py measures: one rank of a run whose answers have given lengths, on
real engines.

Prompts are the demo's. A seed decides an answer's length and reward; rollout engines generate that many
tokens, no matter which, and the judge's engines generate critiques of a given length. Training steps and
weight pushes are real, but the learning rate is nearly zero, so that the load stays the same. Sides alternate
within one run, on the same engines and prompts.
"""

import asyncio
import copy
import dataclasses
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import build
import data
import modes
import rewards
import run
from config import Config
from controller import train
from engines.engine import Answer, Engine, Request, seed_of
from engines.pool import Pool
from reporting.metrics import local_facts, serving_metrics, summarize
from reproduce.bench.measuring import parser_of
from reproduce.bench.workloads import PROMPTS, WORKLOADS, Side, is_kept, length_of
from sample import Key, Prompt, Sample
from state import Controller, RolloutBatch, State


class GivenPrompts(data.Prompts):
    """The demo's prompts, with none held out. `keys` maps a request's seed to the key of its sample."""

    def __init__(self, c: Controller, config: Config):
        c.prompts.source.held_out = []  # no evaluation
        super().__init__(c.prompts.source, config.answers_per_prompt)
        self.keys: dict[int, Key] = {}
        self._seed = config.seed

    def group(self, prompt_id: int, prompt: Prompt) -> list[Sample]:
        group = super().group(prompt_id, prompt)
        for sample in group:
            self.keys[seed_of(self._seed, *sample.key)] = sample.key
        return group


class GivenLengths:
    """The rollout pool's `generate` with a given length for each answer."""

    def __init__(self, generate: Callable, workload: str, keys: dict[int, Key]):
        self._generate = generate
        self._workload = workload
        self._keys = keys

    def given(self, request: Request) -> Request:
        """Return the same request, limited to the tokens that the answer still lacks."""
        written = request.sampling.max_new_tokens - request.limit
        length = length_of(self._workload, *self._keys[request.seed])
        sampling = dataclasses.replace(request.sampling, ignore_eos=True)
        return request._replace(sampling=sampling, limit=length - written)

    async def __call__(self, requests: list[Request]) -> AsyncIterator[Answer]:
        async for answer in self._generate([self.given(request) for request in requests]):
            yield answer


class GivenRewards(rewards.Rewards):
    """The real judge writes critiques of a given length; the load sets rewards. Each answer is unique."""

    def __init__(self, c: Controller, workload: str):
        super().__init__(c.config, c.rewards.judges, [], c.report.decode)
        self._workload = workload

    async def score(self, sample: Sample, pool: Pool) -> None:
        (judge,) = self.judges
        exactly = copy.copy(judge)
        length = WORKLOADS[self._workload].critique
        exact = dict(ignore_eos=True, max_new_tokens=length)
        exactly.sampling = dataclasses.replace(judge.sampling, **exact)
        answer = f"{sample.prompt_id}+{sample.index}"
        task = asyncio.create_task(exactly.judge(sample.question, answer, pool))
        self._tasks[answer] = task
        await asyncio.shield(task)
        informs = is_kept(self._workload, sample.prompt_id)
        sample.reward = float(sample.index % 2) if informs else 1.0
        sample.verdict = True


class Collector:
    """Replaces the run's report: keeps each step's metrics, and writes them at the end."""

    def __init__(self, c: Controller, out: Path):
        self.decode = c.report.decode
        self._out = out
        self._is_main = c.world.rank == 0
        self._rows: list[dict] = []

    def begin(self, side: Side, now: float) -> None:
        """Label all steps from now on with a side."""
        self._labels = {"workload": side.workload, "side": side.name, "repeat": side.repeat}
        self._ended = now

    def note(self, text: str) -> None:
        """Print why the split moved."""
        if self._is_main:
            print(f"{self._labels['workload']}, {self._labels['side']}: {text}", flush=True)

    async def step(
        self, c: Controller, step: int, batch: RolloutBatch, samples: list[Sample], stats: dict
    ) -> None:
        """Gather and keep the step's metrics (collective: all ranks)."""
        facts = local_facts(c, batch, samples, c.timeline.drain())
        gathered = await c.world.gather(facts)
        if not self._is_main:
            return
        now = c.timeline.now()
        newest = c.state.history[-1]
        metrics = summarize(gathered) | serving_metrics(newest, c.config) | stats
        metrics["time/step_s"] = now - self._ended
        row = {"step": step, "split": str(newest.split), "metrics": metrics}
        row["from_to"] = (self._ended, now)  # seconds on the run's timeline
        self._rows.append(self._labels | row)
        self._ended = now

    async def written(self) -> None: ...

    def close(self) -> None:
        if self._is_main:
            self._out.write_text(json.dumps(self._rows))


class MeasuredSides:
    """Replaces controller.train in a run: serves every side in the order given."""

    def __init__(self, sides: list[Side], out: Path):
        self._sides = sides
        self._out = out

    async def __call__(self, c: Controller) -> bool:
        """Return True if a stop ended it (collective: all ranks)."""
        splits = {}
        for mode in modes.MODES.values():
            splits |= {str(split): split for split in mode.splits(c.devices.placement, c.config)}
        c.report = Collector(c, self._out)
        for side in self._sides:
            c.devices.splits = [splits[text] for text in side.plans]
            if await measure_side(c, side):
                return True
        return False


async def measure_side(c: Controller, side: Side) -> bool:
    """Run the steps of one side, starting with the first of its splits (collective: all ranks)."""
    rollout = c.devices.rollout
    workload = WORKLOADS[side.workload]
    c.devices.next = c.devices.splits[0]
    c.timeline.step = 0
    config = dataclasses.replace(c.config, steps=side.steps, prompts_per_step=PROMPTS)
    prompts = GivenPrompts(c, config)
    state = State(groups_per_kept=1 / workload.keep)
    parts = dict(prompts=prompts, rewards=GivenRewards(c, side.workload))
    given = dataclasses.replace(c, config=config, state=state, **parts)
    c.report.begin(side, c.timeline.now())
    generate = rollout.generate
    rollout.generate = GivenLengths(generate, side.workload, prompts.keys)
    was_stopped = await train(given)
    rollout.generate = generate
    if not was_stopped:
        await c.devices.to_training()  # `train` expects sleeping engines
    return was_stopped


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--sides", type=Path, required=True, help="JSON: a list of sides, each a row of `Side`"
    )
    parser.add_argument(
        "--measured", type=Path, required=True, help="each step's metrics are written here"
    )
    ours, theirs = parser.parse_known_args()
    rows = json.loads(ours.sides.read_text())
    sides = MeasuredSides([Side(*row) for row in rows], ours.measured)
    build.TRAINING = build.TRAINING._replace(run=sides)
    rewards.MAX_FAILURES = 10**9
    if "BENCH_PACE_MS" in os.environ:
        Engine.module = "reproduce.bench.paced_server"
    # in full mode each rank has both engines; --tail 0 adds a split
    fixed = ["--mode", "full", "--tail", "0", "--lr", "1e-12", "--save-every", "0"]
    run.main([*fixed, *theirs])


if __name__ == "__main__":
    main()
