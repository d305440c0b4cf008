"""Dynamic sampling: which prompts make up a step, how many are drawn next. Pure.

Groups whose rewards are all equal teach nothing: they are dropped, and more prompts are drawn in their place.
Source: DAPO (arXiv 2503.14476), section 3.2; in waves: WeChat-YATT. What a step still needs, beyond groups in
flight, is estimated from experience (`groups_per_kept`), so that a refill begins before all are judged.
"""

from __future__ import annotations

import math
from bisect import bisect
from itertools import islice, takewhile
from typing import NamedTuple

from sample import Sample

MARGIN = 1.2  # a refill, over what should do by experience
SHARE_GENERATED = 0.25  # of the groups: from then on experience alone may begin a refill
MAX_GROUPS_PER_KEPT = 10.0  # that one step can show


def is_informative(group: list[Sample]) -> bool:
    """Whether the judged answers of a group differ in reward, the greedy one, its baseline, among them."""
    return len(judged_rewards(group)) > 1


def is_judged(group: list[Sample]) -> bool:
    """Whether a group has an answer to learn from: of algorithms that judge each answer by itself."""
    return len(judged_rewards(group)) > 0


def judged_rewards(group: list[Sample]) -> set[float]:
    """The different rewards of a group, none if its greedy answer, so its baseline, has none."""
    if any(sample.greedy and sample.reward is None for sample in group):
        return set()
    return {sample.reward for sample in group if sample.reward is not None}


def is_generated(group: list[Sample]) -> bool:
    return all(sample.is_finished for sample in group)


class Wave(NamedTuple):
    number: int
    size: int  # prompts


class DynamicSampler:
    """The prompts of one step; its batch is the first `target` informative groups to finish.

    groups_per_kept: groups that it took to keep one, by experience. over_dispatch: size of the first wave,
    over `target`. max_refills: waves after the first. A replacement is of the wave after the group's own.
    """

    def __init__(self, target: int, groups_per_kept=1.0, over_dispatch=1.0, max_refills=3):
        self.target, self.groups_per_kept = target, groups_per_kept
        self.first_size, self.max_refills = math.ceil(target * over_dispatch), max_refills
        self.wave_of: dict[int, int] = {}  # prompt_id -> wave, in the order of drawing
        self.informative: dict[int, bool] = {}  # finished prompt_id -> whether its rewards differ
        self.to_replace: list[int] = []  # filtered since the last wave
        self.num_generated = 0  # groups of which every answer is finished, judged or not

    def add(self, prompt_ids: list[int], wave: int) -> None:
        self.wave_of |= dict.fromkeys(prompt_ids, wave)
        self.to_replace = []

    def record(self, finished: dict[int, bool]) -> None:
        """Groups finished on some controller: prompt_id -> whether it is informative."""
        self.informative |= finished
        self.to_replace += [number for number, informative in finished.items() if not informative]

    @property
    def waves(self) -> int:
        return 1 + max(self.wave_of.values(), default=-1)

    @property
    def num_in_flight(self) -> int:
        return len(self.wave_of) - len(self.informative)

    @property
    def num_informative(self) -> int:
        return sum(self.informative.values())

    @property
    def is_complete(self) -> bool:
        """Whether the batch is full, or can't become fuller."""
        return len(self.chosen()) == self.target

    def candidates(self) -> list[int]:
        """Finished prompts that the batch is chosen from, in the order of drawing."""
        return [prompt_id for prompt_id in self.wave_of if prompt_id in self.informative]

    def chosen(self) -> list[int]:
        """The batch so far."""
        return list(islice(filter(self.informative.get, self.candidates()), self.target))

    def used(self) -> list[int]:
        """Prompts that are trained on or filtered in this step."""
        batch = set(self.chosen())
        return [p for p in self.candidates() if p in batch or not self.informative[p]]

    def requeued(self) -> list[int]:
        """Prompts that come first in the next step: unfinished, or not needed."""
        used = set(self.used())
        return [prompt_id for prompt_id in self.wave_of if prompt_id not in used]

    def next_wave(self) -> Wave | None:
        """The wave to begin now; None if nothing is missing, it is too early, or there were enough waves."""
        if not self.wave_of:
            return Wave(0, self.first_size)
        missing = self.target - self.num_informative - self.num_in_flight / self.groups_per_kept
        may_tell = self.to_replace or self.num_generated >= SHARE_GENERATED * len(self.wave_of)
        return self.refill(self.refill_size(missing)) if missing > 0 and may_tell else None

    def refill(self, size: int) -> Wave | None:
        newest = max(self.wave_of.values())
        wave = 1 + min((self.wave_of[prompt_id] for prompt_id in self.to_replace), default=newest)
        return Wave(wave, size) if wave <= self.max_refills else None

    def refill_size(self, missing: float) -> int:
        """Prompts that should make up for `missing` groups."""
        return math.ceil(missing * MARGIN * self.groups_per_kept)

    def updated_groups_per_kept(self) -> float:
        """The moving average after this step, which counts a tenth (WeChat-YATT)."""
        groups, kept = self.groups_and_kept()
        return 0.9 * self.groups_per_kept + 0.1 * min(groups / max(1, kept), MAX_GROUPS_PER_KEPT)

    def groups_and_kept(self) -> tuple[int, int]:
        return len(self.informative), self.num_informative


class OrderedSampler(DynamicSampler):
    """Keeps the first `target` informative groups in the order of drawing, whatever finishes first.

    The batch comes from the waves of a step that knows each wave's rewards before it draws the next (see
    `wave_ends`), so it depends on no rank, mode or timing, whatever was drawn before that was known.
    """

    @property
    def waves(self) -> int:
        """Those that it takes, however they were drawn."""
        return len(self.wave_ends())

    @property
    def is_complete(self) -> bool:
        return len(self.candidates()) == self.wave_ends()[-1] or super().is_complete

    def wave_ends(self) -> list[int]:
        """How many prompts there are by the end of each wave, if it replaces what those before it lack.

        Prompts in flight count as filtered: an end behind one is the most that may be drawn so far.
        """
        kept = [self.informative.get(prompt_id, False) for prompt_id in self.wave_of]
        ends = [self.first_size]
        while (
            len(ends) <= self.max_refills and (missing := self.target - sum(kept[: ends[-1]])) > 0
        ):
            ends.append(ends[-1] + self.refill_size(missing))
        return ends

    def candidates(self) -> list[int]:
        """They stop at one that hasn't finished, and where the waves end."""
        drawn = islice(self.wave_of, self.wave_ends()[-1])
        return list(takewhile(self.informative.__contains__, drawn))

    def used(self) -> list[int]:
        """They end with the batch's last."""
        candidates, chosen = self.candidates(), self.chosen()
        if len(chosen) < self.target:
            return candidates
        return candidates[: candidates.index(chosen[-1]) + 1]

    def refill(self, size: int) -> Wave | None:
        """Early, but no more than may be needed."""
        drawn, ends = len(self.wave_of), self.wave_ends()
        return Wave(bisect(ends, drawn), min(size, ends[-1] - drawn)) if drawn < ends[-1] else None

    def groups_and_kept(self) -> tuple[int, int]:
        return len(self.used()), len(self.chosen())
