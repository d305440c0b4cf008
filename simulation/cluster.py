"""A cluster of simulated engines and trainers, around which the real controllers run.

A `Simulation` builds every rank's controller, as run.py does, and runs controller.train. Its workload is
given in real tokens; what controllers and engines see is coarse: one token for every `grain` of them.
"""

from __future__ import annotations

import asyncio
import gc
import math
import random
import re
import time
from collections import Counter
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import controller
import genrm
import placement
import rewards
import rollout
from algorithms import algorithm_of
from config import Config
from controller import Controller
from data import Prompt, Prompts
from engines import pool
from engines.engine import Request, Sampling, seed_of
from reporting import timeline as tl
from rollout import RolloutBatch
from sample import Key, Sample
from scheduling.costs import Decode, Passes
from scheduling.rebalance import StepStats
from simulation.clock import LONGEST_RUN_S, VirtualClock, end_all
from simulation.engine import Moves, Reply, SimulatedEngine
from simulation.meetings import Network, SimulatedWorld
from simulation.shared import sharing
from simulation.trainers import SimulatedTrainer

PHASES = ("serve", "train", "switch", "sync")  # spans whose seconds are kept
SCORER = genrm.JudgeFormat(str, None, full_response=True, scores=True)
WRITER = replace(SCORER, prompt=genrm.chat_prompt, parse="right".__eq__, scores=False)
genrm.FORMATS |= {"simulated": WRITER, "simulated scores": SCORER}


@dataclass(frozen=True)
class Lengths:
    """Log-normal tokens of texts; sigma 0: all alike. A text's are always the same."""

    median: float
    sigma: float
    most: int

    def of(self, *text: object) -> int:
        drawn = random.Random(repr(text)).gauss(0.0, self.sigma) if self.sigma else 0.0
        return max(1, min(self.most, round(self.median * math.exp(drawn))))


@dataclass(frozen=True)
class Workload:
    """What is asked and written, in real tokens. keep: part of the groups whose rewards differ."""

    prompt: int
    answer: Lengths
    critique: Lengths
    keep: float = 1.0
    seed: int = 0

    def is_right(self, prompt_id: int, index: int) -> bool:
        differs = random.Random(repr(("keep", self.seed, prompt_id))).random() < self.keep
        return index % 2 == 0 or not differs


@dataclass(frozen=True)
class Cluster:
    """What serves and trains, and how fast: decode of each role, moves also of "train"."""

    decode: dict[str, Decode]
    actor: Passes
    critic: Passes | None = None  # default: as the actor
    moves: dict[str, Moves] = field(default_factory=dict)
    group: int = 1  # ranks of a trainer's model-parallel group
    speed_up: float = 1.0  # of actor and critics in one pipeline
    scores: bool = False  # the judge is a scalar reward model
    grain: int = 1
    meeting_s: float = 1.0  # controllers that serve meet at least this often


class Author:
    """What engines write, and how judges are spoken to: tokenizer and source of prompts, too.

    A prompt's first token is its number. An answer's tokens are all its index + 1, and its text is its index
    and its length; a judge's prompt begins with both numbers, and its first token is the verdict.
    """

    held_out = all_special_tokens = ()
    chat_template = "turns"
    eos_token_id = 0
    name_or_path = ""

    def __init__(self, workload: Workload, config: Config, grain: int):
        self.workload, self._config, self._grain = workload, config, grain
        self._prompt, self._indices = self._coarse(workload.prompt), {}
        self.added_tokens_decoder = {}

    def _coarse(self, tokens: int) -> int:
        return max(1, round(tokens / self._grain))

    def training(self, prompt_id: int) -> Prompt:
        return Prompt([prompt_id] + [0] * (self._prompt - 1), str(prompt_id), None)

    def _index(self, prompt_id: int, seed: int) -> int:
        """Which answer of its group a seed stands for; the last may be greedy."""
        if prompt_id not in self._indices:
            indices = range(self._config.answers_per_prompt + 1)
            self._indices[prompt_id] = {
                seed_of(self._config.seed, prompt_id, i): i for i in indices
            }
        return self._indices[prompt_id][seed]

    def answer(self, request: Request) -> Reply:
        """The rest of one that may have been begun."""
        index = self._index(request.prompt[0], request.seed)
        tokens = self._coarse(self.workload.answer.of(self.workload.seed, request.prompt[0], index))
        return Reply([index + 1] * (tokens + self._prompt - len(request.prompt)))

    def critique(self, request: Request) -> Reply:
        which, work = request.prompt[:2], self.workload
        return Reply(
            [work.is_right(*which)] * self._coarse(work.critique.of("critique", work.seed, *which))
        )

    def rate(self, request: Request) -> Reply:
        return Reply([], float(self.workload.is_right(*request.prompt[:2])))

    def text_of(self, answer: list[int]) -> str:
        return f"{answer[-1] - 1} {len(answer)}"

    def decode(self, critique: list[int], **_: Any) -> str:
        return "right" if critique[0] else "wrong"

    def apply_chat_template(self, turns: list[dict], **_: Any) -> dict[str, list[int]]:
        numbers = re.findall(r"\d+", str(turns)) or (0, 0, 0)  # other words say nothing
        prompt_id, index, tokens = map(int, numbers)
        return {"input_ids": [prompt_id, index] + [0] * max(0, self._prompt + tokens - 2)}


@dataclass
class StepFacts:
    """What a step came to. seconds: of the slowest rank, by phase. trained: who on what, by rank."""

    waves: int
    missing_groups: int
    stats: StepStats  # with the split
    decision: dict[str, float | str]  # about the next one
    seconds: Counter[str] = field(default_factory=Counter)
    ended_s: float = 0.0  # on the virtual clock
    trained: dict[int, list[Key]] = field(default_factory=dict)


class Simulation:
    """The real controllers of a run, on one loop. settings: of Config, their lengths coarse.

    It takes the place of their Report, and of their Checkpoints, of which it writes none. cpu_s: of the
    process, once it ran. thinking_s: one controller's own seconds by decision, if these are shared.
    """

    def __init__(
        self,
        mode: str,
        ranks: int,
        workload: Workload,
        cluster: Cluster,
        network: Network | None = None,
        longest_s: float = LONGEST_RUN_S,
        **settings: Any,
    ):
        self.cluster, self.network, self.clock = (
            cluster,
            network or Network(),
            VirtualClock(longest_s),
        )
        self.config = config_of(mode, workload, cluster, settings)
        self.plans = placement.make_plans(self.config, ranks)
        self.steps, self.cpu_s, self.thinking_s = [], 0.0, Counter()
        self._author = Author(workload, self.config, cluster.grain)
        leads = {
            r: sorted({rank for plan in self.plans for rank in plan.leads(r)})
            for r in cluster.decode
        }
        self.engines = {
            role: [self._engine(role, rank) for rank in ranks] for role, ranks in leads.items()
        }
        meetings, of_trainers = {}, {}
        self.controllers = [
            self._controller(
                SimulatedWorld(rank, ranks, meetings, self.network),
                SimulatedWorld(rank, ranks, of_trainers),
            )
            for rank in range(ranks)
        ]

    def _engine(self, role: str, rank: int) -> SimulatedEngine:
        config, cluster, author = self.config, self.cluster, self._author
        costs, write, model = coarse(cluster.decode[role], cluster.grain), author.answer, 0
        if role == "genrm":
            write = author.rate if cluster.scores else author.critique
            model = placement.judge_of(rank, config.genrm_tp, len(config.judge_models))
        capacity = max(1, int(min(costs.most, costs.kv_tokens // config.max_model_len)))
        moves = cluster.moves.get(role, Moves())
        return SimulatedEngine(role, rank, model, costs, moves, capacity, write, self.clock)

    def _controller(self, world: SimulatedWorld, of_trainers: SimulatedWorld) -> Controller:
        """Of one rank, as run.py builds it."""
        config, cluster, author = self.config, self.cluster, self._author
        timeline, algorithm = tl.Timeline(world.rank, self.clock.time), algorithm_of(config)
        pools = {
            role: pool.Pool(each, world, timeline, config) for role, each in self.engines.items()
        }
        passes = {"actor": cluster.actor} | dict.fromkeys(
            algorithm.critics, cluster.critic or cluster.actor
        )
        how = cluster.moves.get("train", Moves()), cluster.group, cluster.speed_up
        trainers = [
            SimulatedTrainer(name, of_trainers, coarse(each, cluster.grain), *how)
            for name, each in passes.items()
        ]
        prompts = Prompts(
            author, config.answers_per_prompt, config.continues_answers, algorithm.greedy
        )
        sampling = Sampling(1.0, config.max_new_tokens)
        c = Controller(
            config,
            algorithm,
            world,
            placement.Placement(self.plans, trainers, pools, world, timeline),
            rewards.build(config, [author] * len(config.judge_models), author.text_of),
            prompts,
            sampling,
            sampling,
            timeline,
            report=self,
            checkpoints=self,
            references=trainers[:1] if algorithm.kl_coef else [],
        )
        # as a run has learnt after some steps
        c.state.groups_per_kept = 1 / max(0.1, author.workload.keep)
        return c

    def run(self, share: bool = True) -> list[StepFacts]:
        """All steps, once. share: see simulation/shared.py."""

        async def all_ranks() -> None:
            await asyncio.gather(*map(controller.train, self.controllers))

        start = time.process_time()
        with ExitStack() as stack:
            gc.disable()  # it would look through the objects of all ranks
            stack.callback(gc.enable)
            stack.callback(end_all, self.clock)
            stack.enter_context(
                mock.patch.object(rollout, "MEETING_INTERVAL_S", self.cluster.meeting_s)
            )
            stack.enter_context(mock.patch.object(pool, "WAIT_S", self.cluster.meeting_s))
            self.thinking_s = stack.enter_context(sharing() if share else nullcontext(Counter()))
            self.clock.run_until_complete(all_ranks())
        self.cpu_s = time.process_time() - start
        return self.steps

    # ---- what controllers tell it

    def note(self, text: str) -> None: ...

    async def step(
        self, c: Controller, step: int, batch: RolloutBatch, samples: list[Sample], stats: dict
    ) -> None:
        if step == len(self.steps):
            self.steps.append(
                StepFacts(batch.waves, batch.missing_groups, c.state.history[-1], stats)
            )
        facts, spans = self.steps[step], c.timeline.drain()
        facts.seconds |= {name: tl.seconds(spans, name) for name in PHASES}
        facts.ended_s = c.timeline.now()
        facts.trained[c.world.rank] = [sample.key for sample in samples]

    async def save(self, c: Controller) -> None: ...

    async def finish(self, c: Controller, wait: bool = False) -> None: ...


def config_of(mode: str, workload: Workload, cluster: Cluster, settings: dict) -> Config:
    """Of a run whose answers all end by themselves: the most that they may have is never reached."""
    most = workload.answer.most // cluster.grain + 2
    judge_most = workload.critique.most // cluster.grain + 2
    context = workload.prompt // cluster.grain + most + judge_most + 2
    how = dict(
        mode=mode, model="MODEL", judge=("JUDGE",), eval_every=10**9, save_every=0, timeout_s=1e6
    )
    how |= dict(judge_format=("simulated scores" if cluster.scores else "simulated",))
    how |= dict(max_new_tokens=most, judge_max_new_tokens=judge_most, max_model_len=context)
    how |= dict(max_running_requests=cluster.decode["rollout"].most)
    how |= dict(max_tokens_per_micro_batch=max(context, 16384 // cluster.grain))
    return Config(**how | settings)


def coarse(costs: Decode | Passes, grain: float) -> Decode | Passes:
    """The same, where one token of the simulation stands for `grain` real ones."""
    if isinstance(costs, Passes):
        return replace(costs, token=costs.token * grain, square=costs.square * grain**2)
    scaled = {name: vars(costs)[name] * grain for name in ("fixed", "each", "prefill", "steps")}
    return replace(
        costs, **scaled, context=costs.context * grain**2, kv_tokens=costs.kv_tokens / grain
    )
