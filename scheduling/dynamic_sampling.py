"""Dynamic sampling: which prompts make up a step, how many are drawn next. Pure.

Groups with equal rewards teach nothing, so they are filtered and replaced. Source: DAPO (arXiv 2503.14476),
section 3.2; in waves: WeChat-YATT. How many to draw is estimated from experience (`groups_per_kept`), so that
a refill can begin before all groups are judged.
"""

import math
from itertools import islice, takewhile
from typing import NamedTuple

MARGIN = 1.2  # draw 20% more than the moving average predicts
FIRST_REFILL = 0.25  # the fraction of groups generated before the average may cause a refill
MAX_GROUPS_PER_KEPT = 10.0  # limits one step's influence on the average


class Draw(NamedTuple):
    """Prompts to draw now. A wave may be drawn in several parts."""

    wave: int  # counted from 0
    size: int  # number of prompts


class FirstFinishedSampler:
    """Chooses a step's prompts; with --over-dispatch, the first `target` informative groups that finish.

    Later waves replace filtered groups: a replacement is in the wave after that of the group it replaces.
    Every rank has a sampler with the same inputs, so all draw the same prompts. groups_per_kept: groups per
    group kept, by experience. over_dispatch: size of wave 1 divided by `target`. max_refills: later waves.
    """

    def __init__(self, target: int, groups_per_kept=1.0, over_dispatch=1.0, max_refills=3):
        self.target = target
        self.groups_per_kept = groups_per_kept
        self.first_size = math.ceil(target * over_dispatch)
        self.max_refills = max_refills
        self.wave_of: dict[int, int] = {}  # prompt_id -> wave, in the order of drawing
        self.finished: dict[int, bool] = {}  # prompt_id -> whether the group is informative
        self.to_replace: list[int] = []  # filtered since the last draw
        self.num_generated = 0  # groups with only finished answers, judged or not

    def add(self, prompt_ids: list[int], wave: int) -> None:
        self.wave_of |= dict.fromkeys(prompt_ids, wave)
        self.to_replace = []

    def record(self, finished: dict[int, bool], num_generated: int) -> None:
        """Record groups that finished on any controller: prompt_id -> whether it is informative."""
        self.num_generated = num_generated
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
    def is_decided(self) -> bool:
        return len(self.chosen()) == self.target

    def candidates(self) -> list[int]:
        """Return the finished prompts that the batch may be chosen from now, in the order of drawing."""
        return [prompt_id for prompt_id in self.wave_of if prompt_id in self.finished]

    def chosen(self) -> list[int]:
        """Return the batch so far, in the order of drawing."""
        return list(islice(filter(self.finished.get, self.candidates()), self.target))

    def used(self) -> list[int]:
        """Return the prompts that are trained on or filtered in this step."""
        batch = set(self.chosen())
        return [p for p in self.candidates() if p in batch or not self.finished[p]]

    def carried(self) -> list[int]:
        """Return the prompts that come first in the next step: unfinished, or not needed."""
        used = set(self.used())
        return [prompt_id for prompt_id in self.wave_of if prompt_id not in used]

    def next_draw(self) -> Draw | None:
        """Return what to draw now; None if nothing is missing, it is too early, or no wave is left.

        The first draw is a whole wave. Later ones replace what `target` lacks beyond informative groups and
        the expected yield of those in flight. Before FIRST_REFILL a draw needs a group to replace.
        """
        if not self.wave_of:
            return Draw(0, self.first_size)
        will_be_kept = self.num_in_flight / self.groups_per_kept
        missing = self.target - self.num_informative - will_be_kept
        is_early = self.num_generated < FIRST_REFILL * len(self.wave_of)
        if missing <= 0 or (is_early and not self.to_replace):
            return None
        return self.refill(self.refill_size(missing))

    def refill(self, size: int) -> Draw | None:
        """Return a draw in the wave after that of the earliest group to replace, if there may be such a wave.

        Without a group to replace (the moving average asks for more) it is the wave after the newest one.
        """
        newest = max(self.wave_of.values())
        wave = 1 + min((self.wave_of[prompt_id] for prompt_id in self.to_replace), default=newest)
        return Draw(wave, size) if wave <= self.max_refills else None

    def refill_size(self, missing: float) -> int:
        return math.ceil(missing * MARGIN * self.groups_per_kept)

    def updated_groups_per_kept(self) -> float:
        """Return the moving average after this step, which has a weight of 0.1 (WeChat-YATT)."""
        groups, kept = self.groups_and_kept()
        return 0.9 * self.groups_per_kept + 0.1 * min(groups / max(1, kept), MAX_GROUPS_PER_KEPT)

    def groups_and_kept(self) -> tuple[int, int]:
        return len(self.finished), self.num_informative


class OrderedSampler(FirstFinishedSampler):
    """The default: draws early, but chooses as if each wave had finished before the next was drawn.

    So the batch doesn't depend on ranks, mode or timing. Example, with target 4 and max_refills 1:
        The first wave is 0 to 3. Prompts 0 and 2 are informative, 1 is filtered, 3 is in flight.
        If 3 were also filtered, 2 groups would be missing: refill_size(2) = 3, wave_ends() = [4, 7].
        By experience 1 is missing: refill_size(1) = 2. So 4 and 5 are drawn, which stays within 7.
        Both finish and are informative, but 3 comes before them: the batch isn't decided.
        Then 3 finishes and is informative, so only 1 was missing: wave_ends() = [4, 6].
        The batch is 0, 2, 3, 4, as if 4 and 5 had been drawn now; 5 comes first in the next step.
    """

    @property
    def waves(self) -> int:
        """The number of waves so far, as if each had been drawn after the one before had finished."""
        return len(self.wave_ends())

    @property
    def is_decided(self) -> bool:
        """True if the batch is full, or if all possible waves are finished and it stays short."""
        return len(self.candidates()) == self.wave_ends()[-1] or super().is_decided

    def wave_ends(self) -> list[int]:
        """Return the total number of prompts drawn by the end of each wave: [waves].

        A wave replaces what earlier waves lack. Prompts in flight count as filtered, so an end is the most
        prompts that may be needed; it falls when a group turns out to be informative.
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
        """Return them: all before the first prompt in flight, and before the end of the last wave."""
        drawn = islice(self.wave_of, self.wave_ends()[-1])
        return list(takewhile(self.finished.__contains__, drawn))

    def used(self) -> list[int]:
        """Return the candidates up to the batch's last one; all candidates while the batch isn't full."""
        candidates = self.candidates()
        chosen = self.chosen()
        if len(chosen) < self.target:
            return candidates
        return candidates[: candidates.index(chosen[-1]) + 1]

    def refill(self, size: int) -> Draw | None:
        """Return an early draw: at most what is needed if every group in flight is filtered.

        Its wave is that of its first prompt, although a large draw may reach into the next wave.
        """
        drawn = len(self.wave_of)
        ends = self.wave_ends()
        room = ends[-1] - drawn
        wave = sum(end <= drawn for end in ends)  # how many waves are drawn completely
        return Draw(wave, min(size, room)) if room > 0 else None

    def groups_and_kept(self) -> tuple[int, int]:
        return len(self.used()), len(self.chosen())
