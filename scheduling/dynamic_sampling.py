"""Dynamic sampling: which prompts make up a step, how many are drawn next. Pure.

Groups whose rewards are all equal teach nothing: they are filtered, and others are drawn in their place.
Source: DAPO (arXiv 2503.14476), section 3.2; in waves: WeChat-YATT. What a step still needs, beyond groups in
flight, is estimated from experience (`groups_per_kept`), so that a refill begins before all are judged.
"""

import math
from bisect import bisect
from itertools import islice, takewhile
from typing import NamedTuple

MARGIN = 1.2  # a refill, over what should do by experience
SHARE_GENERATED = 0.25  # of the groups: from then on experience alone may begin a refill
MAX_GROUPS_PER_KEPT = 10.0  # that one step can show


class Draw(NamedTuple):
    """Prompts to draw now. A wave may be drawn in several parts."""

    wave: int  # which they belong to, from 0
    size: int  # prompts


class FirstFinishedSampler:
    """The prompts of one step; with --over-dispatch the first `target` informative groups that finish.

    A wave after the first replaces groups that were filtered: a replacement belongs to the wave after that of
    the group it replaces. Each rank has a sampler, and all are told the same, so all draw the same prompts.
    groups_per_kept: groups that it took to keep one, by experience. over_dispatch: size of the first wave,
    over `target`. max_refills: waves after the first.
    """

    def __init__(self, target: int, groups_per_kept=1.0, over_dispatch=1.0, max_refills=3):
        self.target = target
        self.groups_per_kept = groups_per_kept
        self.first_size = math.ceil(target * over_dispatch)
        self.max_refills = max_refills
        self.wave_of: dict[int, int] = {}  # prompt_id -> wave, in the order of drawing
        self.finished: dict[int, bool] = {}  # prompt_id -> whether the group is informative
        self.to_replace: list[int] = []  # filtered since the last wave
        self.num_generated = 0  # groups of which every answer is finished, judged or not

    def add(self, prompt_ids: list[int], wave: int) -> None:
        self.wave_of |= dict.fromkeys(prompt_ids, wave)
        self.to_replace = []

    def record(self, finished: dict[int, bool]) -> None:
        """Note groups that finished on any controller: prompt_id -> whether it is informative."""
        self.finished |= finished
        self.to_replace += [p for p, is_informative in finished.items() if not is_informative]

    @property
    def waves(self) -> int:
        return 1 + max(self.wave_of.values(), default=-1)

    @property
    def num_in_flight(self) -> int:
        return len(self.wave_of) - len(self.finished)

    @property
    def num_informative(self) -> int:
        return sum(self.finished.values())

    @property
    def is_complete(self) -> bool:
        return len(self.chosen()) == self.target

    def candidates(self) -> list[int]:
        """Finished prompts that the batch is chosen from, in the order of drawing."""
        return [prompt_id for prompt_id in self.wave_of if prompt_id in self.finished]

    def chosen(self) -> list[int]:
        """The batch so far, in the order of drawing."""
        return list(islice(filter(self.finished.get, self.candidates()), self.target))

    def used(self) -> list[int]:
        """Prompts that are trained on or filtered in this step."""
        batch = set(self.chosen())
        return [p for p in self.candidates() if p in batch or not self.finished[p]]

    def carried(self) -> list[int]:
        """Prompts that come first in the next step: unfinished, or not needed."""
        used = set(self.used())
        return [prompt_id for prompt_id in self.wave_of if prompt_id not in used]

    def next_draw(self) -> Draw | None:
        """Return the prompts to draw now; None if nothing is missing, it is too early, or no wave is left.

        The first draw is a whole wave. Later, missing is what `target` lacks beyond informative groups and
        those in flight that experience says will be kept. While no group is to be replaced, it is too early
        until SHARE_GENERATED of the groups are generated.
        """
        if not self.wave_of:
            return Draw(0, self.first_size)
        will_be_kept = self.num_in_flight / self.groups_per_kept
        missing = self.target - self.num_informative - will_be_kept
        knows_enough = self.to_replace or self.num_generated >= SHARE_GENERATED * len(self.wave_of)
        if missing <= 0 or not knows_enough:
            return None
        return self.refill(self.refill_size(missing))

    def refill(self, size: int) -> Draw | None:
        """The draw of `size` prompts, in the wave that replaces the earliest of the groups to replace."""
        newest = max(self.wave_of.values())
        wave = 1 + min((self.wave_of[prompt_id] for prompt_id in self.to_replace), default=newest)
        return Draw(wave, size) if wave <= self.max_refills else None

    def refill_size(self, missing: float) -> int:
        return math.ceil(missing * MARGIN * self.groups_per_kept)

    def updated_groups_per_kept(self) -> float:
        """The moving average after this step, which counts a tenth (WeChat-YATT)."""
        groups, kept = self.groups_and_kept()
        return 0.9 * self.groups_per_kept + 0.1 * min(groups / max(1, kept), MAX_GROUPS_PER_KEPT)

    def groups_and_kept(self) -> tuple[int, int]:
        return len(self.finished), self.num_informative


class OrderedSampler(FirstFinishedSampler):
    """The default: draws early, but chooses as if each wave had finished before the next was drawn.

    So the batch doesn't depend on ranks, mode or timing. Example, with target 4 and max_refills 1:
        The first wave is 0 to 3. Prompts 0 and 2 are informative, 1 is filtered, 3 is in flight.
        If 3 is filtered, too, 2 groups are missing: refill_size(2) = 3, wave_ends() = [4, 7].
        By experience 1 is missing: refill_size(1) = 2. Prompts 4 and 5 are drawn: 6 is within 7.
        Both finish and are informative, but 3 comes before them: the batch isn't complete.
        Then 3 finishes and is informative, so 1 was missing: wave_ends() = [4, 6].
        The batch is 0, 2, 3, 4, as if 4 and 5 had been drawn now; 5 comes first in the next step.
    """

    @property
    def waves(self) -> int:
        """The waves so far, as if each had been drawn once the one before it was finished."""
        return len(self.wave_ends())

    @property
    def is_complete(self) -> bool:
        """True also once every group of its last possible wave is finished: the batch stays short."""
        return len(self.candidates()) == self.wave_ends()[-1] or super().is_complete

    def wave_ends(self) -> list[int]:
        """How many prompts are drawn in all by the end of each wave: [waves].

        A wave replaces what the waves before it lack. A prompt in flight counts as filtered: an end is then
        the most prompts that may be needed, and falls once its group turns out to be informative.
        """
        kept = [self.finished.get(prompt_id, False) for prompt_id in self.wave_of]
        ends = [self.first_size]
        for _ in range(self.max_refills):
            missing = self.target - sum(kept[: ends[-1]])
            if missing <= 0:
                break
            ends.append(ends[-1] + self.refill_size(missing))
        return ends

    def candidates(self) -> list[int]:
        """Finished prompts in the order of drawing, up to the first in flight or the end of the waves."""
        drawn = islice(self.wave_of, self.wave_ends()[-1])
        return list(takewhile(self.finished.__contains__, drawn))

    def used(self) -> list[int]:
        """The candidates up to the last one of the batch; all of them while the batch isn't full."""
        candidates = self.candidates()
        chosen = self.chosen()
        if len(chosen) < self.target:
            return candidates
        return candidates[: candidates.index(chosen[-1]) + 1]

    def refill(self, size: int) -> Draw | None:
        """The prompts to draw early, no more than may be needed."""
        drawn = len(self.wave_of)
        ends = self.wave_ends()
        if drawn >= ends[-1]:
            return None
        return Draw(bisect(ends, drawn), min(size, ends[-1] - drawn))

    def groups_and_kept(self) -> tuple[int, int]:
        return len(self.used()), len(self.chosen())
