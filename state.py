"""The state of one controller: what it works with, and what it carries from step to step."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from algorithms import Algorithm
from config import Config
from data import Prompts
from engines.engine import Answer, Sampling
from placement import Devices
from rewards import Counted, Rewards
from runtime.out_folder import NoSaves
from runtime.shutdown import Stop
from runtime.timeline import Timeline
from runtime.world import World
from sample import Sample
from scheduling.measured import StepStats


@dataclass
class RolloutBatch:
    """The fate of this controller's groups in one step: each is kept, filtered or carried."""

    kept: list[Sample] = field(default_factory=list)  # samples to train on
    from_others: int = 0  # how many (the last of `kept`) other ranks served; metrics skip them
    dropped: list[Sample] = field(default_factory=list)  # from kept groups: no reward, or greedy
    filtered: list[list[Sample]] = field(default_factory=list)  # groups that teach nothing
    carried: list[list[Sample]] = field(default_factory=list)  # groups whose prompts come again
    waves: int = 0
    missing_groups: int = 0  # how many the batch lacks, over all controllers
    tokens: int = 0  # generated in this step
    moved: int = 0  # answers that an engine aborted and that were continued in this step
    aborted: int = 0  # answers that were cut off
    stats: StepStats | None = None  # this controller's measurements
    latencies: list[float] = field(default_factory=list)  # seconds of its critiques
    groups_per_kept: float = 1.0  # State's value after this step


@dataclass
class State:
    """The state that is carried from step to step; the same on every controller."""

    step: int = 0
    groups_per_kept: float = 1.0  # groups generated per group kept, a moving average
    history: list[StepStats] = field(default_factory=list)  # measurements of the newest steps
    empty_steps: int = 0  # consecutive
    skips: int = 0  # consecutive
    log_multiplier: float = 0.0  # ln(lambda / lagrange_init), if the cost is constrained


class Reporter(Protocol):
    """Takes what happened; reporting.metrics.Report writes it."""

    async def step(
        self, c: Controller, step: int, batch: RolloutBatch, samples: list[Sample], stats: dict
    ) -> None: ...
    def answers(self, number: int, samples: list[Sample], right: list[bool]) -> None: ...
    def evaluation(
        self, step: int, right: list[tuple[bool, int]], earned: list[float], lost: int, now: float
    ) -> None: ...
    def note(self, text: str) -> None: ...
    def dump(self, samples: list[Sample]) -> Path: ...
    async def written(self) -> None: ...
    def close(self) -> None: ...


class Environment:
    """Replies to the policy's turns. This one is for answers of one turn: it never replies."""

    keeps_turns = False  # a prompt's chat turns are kept for later ones
    counted: tuple[Counted, ...] = ()  # itself, if its episodes may fail

    def row_checks(self, say: Callable[[str], None]) -> list[Callable]:
        """Return checks of rows: (prompt, where), which raise UserError."""
        return []

    def finish_of(self, answer: Answer) -> str:
        """Return the state of a sample to which an engine's answer was added: see Sample.finish."""
        return answer.finish

    async def answer(self, sample: Sample) -> None:
        """Reply to a finished turn, or finish the sample. `let_go` makes it return early."""

    def let_go(self) -> None:
        """Make every pending `answer` return now."""

    def keep(self, prompt_ids: Collection[int]) -> None:
        """Close all episodes except those of these prompts, which continue in a later step."""

    def check(self, lost: int, begun: int) -> None:
        """Raise UserError if too many of a step's episodes are lost, over all controllers."""

    def means(self, samples: list[Sample]) -> dict[str, list[float]]:
        """Return the values to average for each metric. Times: since the last call."""
        return {}

    def sums(self, samples: list[Sample]) -> dict[str, int]:
        """Return the numbers to add up for each metric."""
        return {}

    async def close(self) -> None:
        """Close all episodes. Not collective."""


@dataclass
class Controller:
    """Everything that one controller works with: the real parts under torchrun, fakes in tests."""

    config: Config
    algorithm: Algorithm
    world: World
    devices: Devices  # the actor, critics and engines, which take turns on this rank's device
    rewards: Rewards
    prompts: Prompts
    sampling: Sampling  # how answers are sampled; greedy ones use temperature 0
    timeline: Timeline
    report: Reporter
    checkpoints: NoSaves
    # every rank; with --placement standalone only the serving ranks, or the training ranks
    same_duty: World
    environment: Environment = field(default_factory=Environment)
    ahead: RolloutBatch | None = None  # a batch that is served but not yet trained on
    state: State = field(default_factory=State)
    stop: Stop = field(default_factory=Stop)  # whether this process was asked to stop
    stopping: bool = False  # the controllers have agreed to stop
