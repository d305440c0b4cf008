"""The real controllers on a cluster of simulated engines and trainers.

A `Simulation` builds every rank's controller as run.py does, then runs controller.train. Its workload is in
real tokens. Controllers and engines see a coarser version: one token for every `grain` real ones.
"""

from __future__ import annotations

import asyncio
import gc
import math
import random
import re
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest import mock

import controller
import demo.task  # noqa: F401 (adds judge formats)
import extras
import genrm
import modes
import placement
import rewards
import rollout
from algorithms import algorithm_of
from config import Config
from data import Prompts
from engines import pool
from engines.engine import Request, Sampling, seed_of
from engines.server import SPARE
from reproduce.simulation.clock import VirtualClock, end_all
from reproduce.simulation.costs import Decode, Passes
from reproduce.simulation.engine import Moves, Reply, SimulatedEngine
from reproduce.simulation.meetings import Network, SimulatedWorld
from reproduce.simulation.shared import deciding_once
from reproduce.simulation.trainers import SimulatedTrainer
from runtime import timeline as tl
from sample import Key, Prompt, Sample
from scheduling.layout import Placement
from scheduling.measured import StepStats
from state import Controller, RolloutBatch

extras.load()

PHASES = ("serve", "train", "switch", "sync")  # names of the spans that are timed
# settings that a simulation takes from a user's run
SAMPLES = ("algorithm", "seed", "prompts_per_step", "answers_per_prompt", "over_dispatch")
SERVING = ("placement", "ahead", "tail", "rollout_ranks", "rollout_tp", "genrm_tp")
TRAINING = ("updates_per_step", "schedule", "tp", "pp")
STEPS = (3, 20)  # fewest and most steps of such a simulation
WORK = 2500  # samples to simulate over all steps; each rank counts as 8 samples a step
GRAINS = 256  # most simulated tokens in the longest answer; each stands for several real ones
WRITER = genrm.JudgeFormat(str, genrm.chat_prompt, "right".__eq__, full_response=True)
genrm.FORMATS["simulated"] = WRITER
if "scalar judges" in extras.EXTRAS:
    scorer = replace(genrm.FORMATS["score"], final_answer=str, read_key=str)
    genrm.FORMATS["simulated scores"] = scorer
rewards.RULES[r"simulated:(?P<keep>[\d.]+)"] = lambda sample, keep: float(
    is_right(float(keep), 0, sample.prompt_id, sample.index)
)


def is_right(keep: float, seed: int, prompt_id: int, index: int) -> bool:
    """Return whether an answer is right. In a group whose rewards don't differ, all answers are."""
    differs = random.Random(repr(("keep", seed, prompt_id))).random() < keep
    return index % 2 == 0 or not differs


@dataclass(frozen=True)
class Lengths:
    """Log-normal token counts, all equal if sigma is 0. A given text always has the same length."""

    median: float
    sigma: float
    most: int

    def of(self, *text: object) -> int:
        drawn = random.Random(repr(text)).gauss(0.0, self.sigma) if self.sigma else 0.0
        return max(1, min(self.most, round(self.median * math.exp(drawn))))


@dataclass(frozen=True)
class Workload:
    """The texts of a run, in real tokens."""

    prompt: int
    answer: Lengths
    critique: Lengths
    keep: float = 1.0  # fraction of groups whose rewards differ
    seed: int = 0
    judged: int = 0  # tokens that a judge reads per answer; 0: prompt and answer
    differ: float = (
        1.0  # fraction of a group's answers that are distinct; judges see each text once
    )

    def is_right(self, prompt_id: int, index: int) -> bool:
        return is_right(self.keep, self.seed, prompt_id, index)


@dataclass(frozen=True)
class Cluster:
    """How fast the engines and trainers are."""

    decode: dict[str, Decode]  # role -> costs
    actor: Passes
    critic: Passes | None = None  # default: same as the actor
    reference: Passes | None = None  # default: same as the actor
    moves: dict[str, Moves] = field(default_factory=dict)  # role or "train" -> costs
    speed_up: float = 1.0  # gain from running actor and critics in one pipeline
    scores: bool = False  # whether the judge is a scalar reward model
    judges: tuple[Decode, ...] = ()  # one for each judge's engines; default: decode["genrm"]
    grain: int = 1
    meeting_s: float = 1.0  # longest time between meetings of serving controllers


class Costs(NamedTuple):
    """The known costs of a user's run."""

    work: Workload
    cluster_of: Callable[[Config, Placement], Cluster]
    assumptions: list[str]  # lines to print
    device: float = 0.0  # bytes of memory on a device; 0: unknown


class Author:
    """Writes all prompts, answers and critiques, and stands in for the judges' tokenizer.

    A prompt's first token is its number. Every token of an answer is its index + 1; its text is its index and
    length. A judge's prompt begins with the prompt's number and the answer's index. A critique's first token
    is the verdict.
    """

    held_out = all_special_tokens = ()
    chat_template = "turns"
    eos_token_id = -1  # in no reply
    name_or_path = ""

    def __init__(self, workload: Workload, config: Config, grain: int):
        self.workload = workload
        self.added_tokens_decoder = {}
        self._config = config
        self._grain = grain
        self._prompt = self._coarse(workload.prompt)
        self._indices = {}  # prompt_id -> seed -> index

    def _coarse(self, tokens: int) -> int:
        return max(1, round(tokens / self._grain))

    def training(self, prompt_id: int) -> Prompt:
        return Prompt([prompt_id] + [0] * (self._prompt - 1), str(prompt_id), None)

    def _index(self, prompt_id: int, seed: int) -> int:
        """Return the index of the answer with this seed. Each group has one extra, greedy answer."""
        if prompt_id not in self._indices:
            indices = range(self._config.answers_per_prompt + 1)
            seeds = {seed_of(self._config.seed, prompt_id, index): index for index in indices}
            self._indices[prompt_id] = seeds
        return self._indices[prompt_id][seed]

    def answer(self, request: Request) -> Reply:
        """Return the rest of an answer; the prompt may already contain its beginning."""
        work = self.workload
        prompt_id = request.prompt[0]
        index = self._index(prompt_id, request.seed)
        tokens = self._coarse(work.answer.of(work.seed, prompt_id, index))
        return Reply([index + 1] * (tokens + self._prompt - len(request.prompt)))

    def critique(self, request: Request) -> Reply:
        """Return the rest of a critique; the prompt may already contain its beginning."""
        work = self.workload
        which = request.prompt[:2]
        tokens = self._coarse(work.critique.of("critique", work.seed, *which))
        written = request.sampling.max_new_tokens - request.limit
        return Reply([work.is_right(*which)] * (tokens - written))

    def rate(self, request: Request) -> Reply:
        return Reply([], float(self.workload.is_right(*request.prompt[:2])))

    def text_of(self, answer: list[int], **_: Any) -> str:
        index = answer[-1] - 1
        if self.workload.differ < 1:
            number, part = divmod(self.workload.differ * self._config.answers_per_prompt, 1)
            number = max(2, number + (random.Random(repr(answer)).random() < part))
            index = int(index % number)
        judged = self.workload.judged
        tokens = self._coarse(judged) - self._prompt if judged else len(answer)
        return f"{index} {max(0, tokens)}"

    def decode(self, critique: list[int], **_: Any) -> str:
        return "right" if critique[0] else "wrong"

    def apply_chat_template(self, turns: list[dict], **_: Any) -> str:
        return " ".join(turn["content"] for turn in turns)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        numbers = re.findall(r"\d+", text) or (0, 0, 0)  # some texts have no numbers
        prompt_id, index, tokens = map(int, numbers)
        return {"input_ids": [prompt_id, index] + [0] * max(0, self._prompt + tokens - 2)}


@dataclass
class StepFacts:
    """The outcome of a step."""

    waves: int = 0
    stats: StepStats | None = None  # includes the split
    decision: dict[str, float | str] = field(default_factory=dict)  # the next split and why
    seconds: Counter[str] = field(default_factory=Counter)  # on the slowest rank, by phase
    ended_s: float = 0.0  # virtual time
    trained: dict[int, list[Key]] = field(default_factory=dict)  # rank -> its samples


class Simulation:
    """The real controllers of a run, all on one event loop.

    settings: fields of Config, with lengths in coarse tokens. The simulation also stands in for the
    controllers' Report and Checkpoints; it saves nothing.
    """

    def __init__(
        self,
        mode: str,
        ranks: int,
        workload: Workload,
        cluster: Cluster,
        network: Network | None = None,
        **settings: Any,
    ):
        self.cluster = cluster
        self.network = network or Network()
        self.clock = VirtualClock()
        self.config = config_of(mode, workload, cluster, settings)
        self.placement, self.splits = modes.lay_out(self.config, ranks)
        self.steps: list[StepFacts] = []
        self._author = Author(workload, self.config, cluster.grain)
        self.engines = {role: self._engines(role) for role in cluster.decode}
        meetings = {}
        of_trainers = {}
        self.controllers = []
        for rank in range(ranks):
            world = SimulatedWorld(rank, ranks, meetings, self.network)
            models = self._models(SimulatedWorld(rank, ranks, of_trainers))
            self.controllers.append(self._controller(world, **models))

    def _engines(self, role: str) -> list[SimulatedEngine]:
        """Make a role's engines: one on each rank that leads an engine in any split."""
        cluster = self.cluster
        formats = genrm.formats_of(self.config)
        moves = cluster.moves.get(role, Moves())
        engines = []
        for rank in sorted({r for split in self.splits for r in self.placement.leads(role, split)}):
            model = 0
            decode = cluster.decode[role]
            write = self._author.answer
            if role == "genrm":
                model = self.placement.judge_of(rank, len(self.config.judge_models))
                decode = cluster.judges[model] if cluster.judges else decode
                scores = formats[model].is_scalar
                write = self._author.rate if scores else self._author.critique
            costs = coarse(decode, cluster.grain)
            room = int(min(costs.most, costs.kv_tokens // (self.config.max_model_len - SPARE)))
            capacity = costs.kept or max(1, room)
            how = (model, costs, moves, capacity, write, self.clock)
            engines.append(SimulatedEngine(role, rank, *how))
        return engines

    def _models(self, world: SimulatedWorld) -> dict[str, SimulatedTrainer]:
        """Make one rank's models by name: reference, actor, critics. world: for trainers only."""
        cluster = self.cluster
        held = self.placement
        costs = {"reference": cluster.reference or cluster.actor, "actor": cluster.actor}
        costs |= dict.fromkeys(algorithm_of(self.config).critics, cluster.critic or cluster.actor)
        moves = cluster.moves.get("train", Moves())
        parts = {shape.ranks: world.part(shape.ranks) for shape in held.models}
        models = {}
        for name, each in costs.items():
            shape = held._asdict().get(name, held.critic)
            how = (coarse(each, cluster.grain), moves, shape, cluster.speed_up)
            models[name] = SimulatedTrainer(name, parts[shape.ranks], *how)
        if held.reference == held.actor:
            models["reference"] = models["actor"]
        return models

    def _controller(
        self, world: SimulatedWorld, reference: SimulatedTrainer, **trainers: SimulatedTrainer
    ) -> Controller:
        """Build one rank's controller as run.py does."""
        config = self.config
        author = self._author
        algorithm = algorithm_of(config)
        timeline = tl.Timeline(world.rank, self.clock.time)
        same_duty = world.part(self.placement.servers)
        pools = {}
        for role, engines in self.engines.items():
            pools[role] = pool.Pool(engines, same_duty, timeline, config)
        models = placement.Models([*trainers.values()], [reference] if algorithm.kl_coef else [])
        c = Controller(
            config,
            algorithm,
            world,
            placement.Devices(config, self.placement, self.splits, models, pools, world, timeline),
            rewards.build(
                config,
                rewards.load_rules(config),
                [author] * len(config.judge_models),
                author.text_of,
            ),
            Prompts(author, config.answers_per_prompt, config.over_dispatch > 1, algorithm.greedy),
            sampling=Sampling(1.0, config.max_new_tokens),
            timeline=timeline,
            report=self,
            checkpoints=self,
            same_duty=same_duty,
        )
        if algorithm.filters:  # a real run estimates this in its first steps
            c.state.groups_per_kept = 1 / max(0.1, author.workload.keep)
        return c

    def run(self, once: bool = True) -> list[StepFacts]:
        """Run all steps, the only call. once: see reproduce/simulation/shared.py."""

        async def all_ranks() -> None:
            await asyncio.gather(*map(controller.train, self.controllers))

        with ExitStack() as stack:
            gc.disable()  # it would scan the objects of all ranks
            stack.callback(gc.enable)
            stack.callback(end_all, self.clock)
            for module, name in ((rollout, "MEETING_INTERVAL_S"), (pool, "WAIT_S")):
                stack.enter_context(mock.patch.object(module, name, self.cluster.meeting_s))
            if once:
                stack.enter_context(deciding_once())
            self.clock.run_until_complete(all_ranks())
        return self.steps

    # ---- the methods of Report and Checkpoints that controllers call

    def note(self, text: str) -> None: ...

    async def step(
        self, c: Controller, step: int, batch: RolloutBatch, samples: list[Sample], stats: dict
    ) -> None:
        if step == len(self.steps):
            self.steps.append(StepFacts())
        facts = self.steps[step]
        if c.devices.serves:
            facts.waves = batch.waves
            facts.stats = c.state.history[-1]
            facts.decision = stats
        spans = c.timeline.drain()
        facts.seconds |= {name: tl.seconds(spans, name) for name in PHASES}
        facts.ended_s = c.timeline.now()
        facts.trained[c.world.rank] = [sample.key for sample in samples]

    async def written(self) -> None: ...

    async def save(self, c: Controller) -> None: ...

    async def finish(self, c: Controller) -> None: ...

    async def close(self, c: Controller) -> None: ...


def config_of(mode: str, workload: Workload, cluster: Cluster, settings: dict) -> Config:
    """Return the settings of a run whose answers all end before they reach --max-new-tokens."""
    grain = cluster.grain
    most = workload.answer.most // grain + 2
    judge_most = workload.critique.most // grain + 2
    context = workload.prompt // grain + most + judge_most + 2
    own = dict(
        mode=mode,
        model="MODEL",
        judge=("JUDGE",),
        judge_format=("simulated scores" if cluster.scores else "simulated",),
        save_every=0,
        timeout_s=1e6,
        max_new_tokens=most,
        judge_max_new_tokens=judge_most,
        max_model_len=context + SPARE,
        max_running_requests=cluster.decode["rollout"].most,
        max_tokens_per_micro_batch=max(context + SPARE, 16384 // grain),
    )
    return Config(**own | settings)


def coarse(costs: Decode | Passes, grain: float) -> Decode | Passes:
    """Return the same costs where one simulated token stands for `grain` real ones."""
    if isinstance(costs, Passes):
        return replace(costs, token=costs.token * grain, square=costs.square * grain**2)
    scaled = {name: vars(costs)[name] * grain for name in ("fixed", "each", "prefill", "steps")}
    scaled |= dict(context=costs.context * grain**2, kv_tokens=costs.kv_tokens / grain)
    return replace(costs, **scaled)


def simulation_of(config: Config, ranks: int, work: Workload, cluster: Cluster) -> Simulation:
    """Return a simulation of a user's run. Rules take no time; a simulated one replaces them."""
    settings = {name: vars(config)[name] for name in SAMPLES + SERVING + TRAINING}
    least, most = STEPS
    steps = WORK // (config.prompts_per_step * config.answers_per_prompt + 8 * ranks)
    # with --ahead the last step serves nothing, so it isn't counted
    settings["steps"] = max(least, min(most, steps)) + config.ahead
    settings["judge"] = ("JUDGE",) * len(config.judge)
    settings["cost_judge"] = ("JUDGE",) * len(config.cost_judge)
    formats = genrm.formats_of(config)
    names = ["simulated scores" if judge.is_scalar else "simulated" for judge in formats]
    settings["judge_format"] = tuple(names)
    rule = (f"simulated:{work.keep:.6f}",)
    settings["rule"] = () if config.judge else rule
    if "cost" in algorithm_of(config).signals and not config.cost_judge:
        settings["cost_rule"] = rule
    most = work.answer.most
    longest_s = cluster.decode["rollout"].seconds(most, 1, 0)
    # 8 ranks meet after 1/200 of the longest answer, 64 and more after 1/25, as their meetings cost more
    meeting_s = max(rollout.MEETING_INTERVAL_S, longest_s * min(ranks, 64) / 1600)
    cluster = replace(cluster, grain=max(1, most // GRAINS), meeting_s=meeting_s)
    return Simulation(config.mode, ranks, work, cluster, **settings)
