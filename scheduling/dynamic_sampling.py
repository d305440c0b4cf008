"""Draws: which prompts make up a step, what is known of each, and what is drawn next. Pure: the same on every controller.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2; in waves: WeChat-YATT) drops groups whose rewards are all equal, for they teach
nothing, and draws more prompts in their place.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice, takewhile

from engines.engine import WRITTEN
from sample import Sample

MARGIN = 1.2  # a refill, over what should do by experience
MOST_CUTS = 3  # times that a prompt may be cut off before a step waits for it


@dataclass
class Draws:
    """The draws of one step and what is known of them: the same on every controller.

    In order, the batch is the first `wanted` informative draws in the order of drawing, among those of the waves that a step has which
    knows each wave's rewards before it draws the next (`wave_ends`). So it doesn't depend on ranks, mode or timing, whatever was
    drawn before it had to be. Else it is the first to end.
    """

    wanted: int  # informative groups that the step is after
    in_order: bool
    groups_per_kept: float = 1.0  # by experience: groups that it takes to keep one
    over_dispatch: float = 1.0  # the first wave, over `wanted`
    most_refills: int = 3  # waves after the first
    wave_of: dict[int, int] = field(default_factory=dict)  # draw -> wave, in drawing order
    informative: dict[int, bool] = field(default_factory=dict)  # ended draw -> whether its rewards differ
    unanswered: list[int] = field(default_factory=list)  # filtered draws since the last wave, which may be replaced
    written: int = 0  # groups of which every answer is whole, judged or not
    awaited: set[int] = field(default_factory=set)  # cut off so often that the step waits for them

    @property
    def waves(self) -> int:
        """Waves begun so far. In order, those that it takes, however they were drawn."""
        return len(self.wave_ends()) if self.in_order else 1 + max(self.wave_of.values(), default=-1)

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
        """Whether the batch is full, or as full as it may become, and nothing is waited for."""
        used_up = self.in_order and len(self.ended()) == self.wave_ends()[-1]
        return (used_up or len(self.chosen()) == self.wanted) and not self.late

    def add(self, draws: list[int], wave: int, awaited: set[int] = frozenset()) -> None:
        """Draws were dealt."""
        self.wave_of |= dict.fromkeys(draws, wave)
        self.awaited |= awaited
        self.unanswered = []

    def learn(self, ended: dict[int, bool]) -> None:
        """Groups ended on some controller."""
        self.informative |= ended
        self.unanswered += [draw for draw, informative in ended.items() if not informative]

    def wave_ends(self) -> list[int]:
        """How many draws there are by the end of each wave, where a wave replaces what the ones before it lack.

        Draws that haven't ended count as filtered: an end that lies after one of those is only the most that may be drawn so far.
        """
        kept = [self.informative.get(draw, False) for draw in self.wave_of]
        ends = [math.ceil(self.wanted * self.over_dispatch)]
        while len(ends) <= self.most_refills and (lacking := self.wanted - sum(kept[: ends[-1]])) > 0:
            ends.append(ends[-1] + self._refill(lacking))
        return ends

    def _refill(self, lacking: float) -> int:
        """Draws that should make up for `lacking` groups."""
        return math.ceil(lacking * MARGIN * self.groups_per_kept)

    def ended(self) -> list[int]:
        """Draws that the batch is chosen from. In order, they stop at one that hasn't ended, and where the waves end."""
        if not self.in_order:
            return [draw for draw in self.wave_of if draw in self.informative]
        return list(takewhile(self.informative.__contains__, islice(self.wave_of, self.wave_ends()[-1])))

    def chosen(self) -> list[int]:
        """The batch so far: the first `wanted` informative draws, of those that have ended."""
        return list(islice(filter(self.informative.get, self.ended()), self.wanted))

    def used(self) -> list[int]:
        """Draws that are trained on or filtered in this step. In order, they end with the batch's last."""
        ended, chosen = self.ended(), self.chosen()
        if self.in_order:
            return ended[: ended.index(chosen[-1]) + 1] if len(chosen) == self.wanted else ended
        batch = set(chosen)
        return [draw for draw in ended if draw in batch or not self.informative[draw]]

    def come_again(self) -> list[int]:
        """Draws whose prompts come first in the next step: cut off, or not needed."""
        used = set(self.used())
        return [draw for draw in self.wave_of if draw not in used]

    def next_wave(self) -> tuple[int, int] | None:
        """The next wave, which replaces what was filtered: its number, and how many prompts. None at the limit, or if nothing lacks.

        It begins while others are still written and judged: when a group has been filtered, or when a quarter of the groups is written
        and experience says that some will be. A replacement belongs to the wave after the group's own.
        """
        drawn, ends = len(self.wave_of), self.wave_ends()
        if not drawn:
            return 0, ends[0]
        if self.lacking <= 0 or not (self.unanswered or 4 * self.written >= drawn):
            return None
        size = self._refill(self.lacking)
        if self.in_order:  # early, but no more than may be needed
            return (bisect(ends, drawn), min(size, ends[-1] - drawn)) if drawn < ends[-1] else None
        wave = 1 + min((self.wave_of[draw] for draw in self.unanswered), default=max(self.wave_of.values()))
        return (wave, size) if wave <= self.most_refills else None


def moving_average(groups_per_kept: float, draws: Draws) -> float:
    """Groups that it takes to keep one, after a step; a step counts a tenth, and no step for more than 10 (WeChat-YATT)."""
    groups, kept = (len(draws.used()), len(draws.chosen())) if draws.in_order else (len(draws.informative), draws.found)
    return 0.9 * groups_per_kept + 0.1 * min(groups / max(1, kept), 10.0)


def is_informative(group: list[Sample], filters: bool = True) -> bool:
    """Whether the judged answers of a group have more than one reward: one differs from the baseline, where there is one.

    Answers that the judge failed on don't count; without the greedy one there is no baseline, and nothing to learn. filters: see
    algorithms.py; if not, one judged answer will do.
    """
    rewards = {sample.reward for sample in group if sample.reward is not None}
    return len(rewards) > filters and not any(sample.greedy and sample.reward is None for sample in group)


def is_written(group: list[Sample]) -> bool:
    """Whether every answer of a group is whole."""
    return all(sample.finish in WRITTEN for sample in group)


class Groups:
    """The groups of this controller's prompts: new ones, and with `partial_rollout` what was written for prompts that come again.

    What was written stays with the controller that wrote it: `deal` gives it those prompts again.
    """

    def __init__(self, prompts, answers: int, keep_written: bool, greedy: bool = False):
        """greedy: every group has one answer more, a greedy one."""
        self._prompts, self._answers, self._keep_written, self._greedy = prompts, answers, keep_written, greedy
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
        if draw in self._written:
            return self._written.pop(draw)
        group = self._prompts.group(draw, self._answers + self._greedy)
        for sample in group[self._answers :]:
            sample.greedy = True
        return group

    @property
    def carried(self) -> list[list[Sample]]:
        """The groups that this controller holds for prompts that come again."""
        return list(self._written.values())

    def state(self) -> dict:
        """What a checkpoint keeps beside `carried`; the same on every controller. Pairs, because JSON has no numbers for keys."""
        return {"owners": list(self._owners.items()), "cuts": list(self._cuts.items())}

    def load_state(self, state: dict, controllers: int, carried: list[list[Sample]], rank: int) -> None:
        """Continue where `state` was taken. carried: of all controllers; what is held goes round the `controllers` of now.

        rank: this controller's data-parallel rank; -1 of one that deals with no engine.
        """
        self._cuts = dict(state["cuts"])
        self._owners = {draw: owner % controllers for draw, owner in state["owners"]} if self._keep_written else {}
        self._written = {group[0].prompt_id: group for group in carried if self._owners.get(group[0].prompt_id, -2) == rank}

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
