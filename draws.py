"""Draws: which prompts make up a step, what is known of each, and what is drawn next. Pure: the same on every controller.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2; in waves: WeChat-YATT) drops groups whose rewards are all equal, for they teach
nothing, and draws more prompts in their place.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice, takewhile

from rollout import WRITTEN, Sample

MOST_CUTS = 3  # times that a prompt may be cut off before a step waits for it


@dataclass
class Draws:
    """The draws of one step and what is known of them: the same on every controller."""

    wanted: int  # informative groups that the step is after
    in_order: bool  # the first in drawing order make the batch, not the first to end
    groups_per_kept: float = 1.0  # by experience: groups that it takes to keep one
    wave_of: dict[int, int] = field(default_factory=dict)  # draw -> wave, in drawing order
    informative: dict[int, bool] = field(default_factory=dict)  # ended draw -> whether its rewards differ
    unanswered: list[int] = field(default_factory=list)  # filtered draws since the last wave, which may be replaced
    written: int = 0  # groups of which every answer is whole, judged or not
    awaited: set[int] = field(default_factory=set)  # cut off so often that the step waits for them

    @property
    def waves(self) -> int:
        """Waves begun so far."""
        return 1 + max(self.wave_of.values(), default=-1)

    @property
    def flying(self) -> int:
        """Groups that haven't ended."""
        return len(self.wave_of) - len(self.informative)

    @property
    def found(self) -> int:
        """Informative groups so far."""
        return sum(self.informative.values())

    @property
    def lacking(self) -> float:
        """Groups that the batch lacks, if of those that fly as many are kept as experience says."""
        return self.wanted - self.found - self.flying / self.groups_per_kept

    @property
    def late(self) -> set[int]:
        """Awaited draws that haven't ended."""
        return {draw for draw in self.awaited if draw not in self.informative}

    @property
    def complete(self) -> bool:
        """Whether the batch is full and nothing is waited for."""
        return len(self.chosen()) == self.wanted and not self.late

    def add(self, draws: list[int], wave: int, awaited: set[int] = frozenset()) -> None:
        """Draws were dealt."""
        self.wave_of |= dict.fromkeys(draws, wave)
        self.awaited |= awaited
        self.unanswered = []

    def learn(self, ended: dict[int, bool]) -> None:
        """Groups ended on some controller."""
        self.informative |= ended
        self.unanswered += [draw for draw, informative in ended.items() if not informative]

    def chosen(self) -> list[int]:
        """The batch so far: the first `wanted` informative draws, of those that have ended. In order, it stops at one that hasn't.

        In order, the batch doesn't depend on ranks, mode or timing.
        """
        ended = takewhile(self.informative.__contains__, self.wave_of) if self.in_order else self.wave_of
        return list(islice(filter(self.informative.get, ended), self.wanted))

    def come_again(self) -> list[int]:
        """Draws whose prompts come first in the next step: cut off, or not needed. In order, all after the batch's last."""
        chosen = self.chosen()
        last = list(self.wave_of).index(chosen[-1]) if self.in_order and len(chosen) == self.wanted else len(self.wave_of)
        batch = set(chosen)
        rest = [(i, draw) for i, draw in enumerate(self.wave_of) if draw not in batch]
        return [draw for i, draw in rest if i > last or self.informative.get(draw, True)]

    def next_wave(self, limit: int) -> int | None:
        """The number of the wave that would replace what was filtered since the last one; None at its limit, or if nothing lacks.

        It begins while others are still written and judged: when a group has been filtered, or when half of the groups are written
        and experience says that some will be. A replacement belongs to the wave after the group's own.
        """
        if not self.wave_of:
            return 0
        if self.lacking <= 0 or not (self.unanswered or 2 * self.written >= len(self.wave_of)):
            return None
        wave = 1 + min((self.wave_of[draw] for draw in self.unanswered), default=max(self.wave_of.values()))
        return wave if wave <= limit else None


def wave_size(draws: Draws, scale: float) -> int:
    """Prompts of the next wave: what is lacking times `scale`, rounded up."""
    return math.ceil(draws.lacking * scale)


def moving_average(groups_per_kept: float, draws: Draws) -> float:
    """Groups that it takes to keep one, after a step; a step counts a tenth, and no step for more than 10 (WeChat-YATT)."""
    return 0.9 * groups_per_kept + 0.1 * min(len(draws.informative) / max(1, draws.found), 10.0)


def is_informative(group: list[Sample]) -> bool:
    """Whether the judged answers of a group have more than one reward. Answers that the judge failed on don't count."""
    rewards = {sample.reward for sample in group if sample.reward is not None}
    return len(rewards) > 1


def is_written(group: list[Sample]) -> bool:
    """Whether every answer of a group is whole."""
    return all(sample.finish in WRITTEN for sample in group)


class Groups:
    """The groups of this controller's prompts: new ones, and with `partial_rollout` what was written for prompts that come again.

    What was written stays with the controller that wrote it: `deal` gives it those prompts again.
    """

    def __init__(self, prompts, answers: int, keep_written: bool):
        self._prompts, self._answers, self._keep_written = prompts, answers, keep_written
        self._written: dict[int, list[Sample]] = {}
        self._owners: dict[int, int] = {}  # draw -> data-parallel rank that holds it; the same on every controller
        self._cuts: dict[int, int] = {}  # draw -> steps in a row in which it came to nothing; the same on every controller

    def deal(self, draws: list[int], controllers: int) -> dict[int, int]:
        """Draw -> the data-parallel rank whose controller serves it: its holder, else in turn the one with the fewest."""
        owners = {draw: self._owners[draw] for draw in draws if draw in self._owners}
        held = Counter(self._owners.values())
        heap = [(held[rank], rank) for rank in range(controllers)]
        heapq.heapify(heap)
        for draw in draws:
            if draw not in owners:
                count, owners[draw] = heap[0]
                heapq.heapreplace(heap, (count + 1, owners[draw]))
        self._owners |= owners
        return owners

    def awaited(self, draws: list[int]) -> set[int]:
        """Those that came to nothing in MOST_CUTS steps: a prompt with long answers might never be trained on."""
        return {draw for draw in draws if self._cuts.get(draw, 0) >= MOST_CUTS}

    def take(self, draw: int) -> list[Sample]:
        """The group of a prompt: as far as it was written, or empty samples."""
        return self._written.pop(draw, None) or self._prompts.group(draw, self._answers)

    def put_back(self, draws: list[int], carried: list[list[Sample]]) -> None:
        """The step is over: `draws` come again, on every controller; `carried` are this one's groups of them."""
        self._prompts.put_back(draws)
        cut = set(draws)
        self._cuts = {draw: self._cuts.get(draw, 0) + (draw in cut) for draw in self._prompts.buffer}
        waiting = set(self._prompts.buffer) if self._keep_written else set()
        self._owners = {draw: owner for draw, owner in self._owners.items() if draw in waiting}
        if self._keep_written:
            self._written |= {group[0].prompt_id: group for group in carried}

    def undo(self, drawn: list[int], groups: list[list[Sample]]) -> None:
        """The step didn't happen: `drawn` come again in their order, on every controller; `groups` are this one's of them."""
        self._prompts.buffer[:0] = drawn
        if self._keep_written:
            self._written |= {group[0].prompt_id: group for group in groups}
        else:
            self._owners = {}
