"""Measurements of a step of serving, and the table of rules that choose the next split from them. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import takewhile, zip_longest
from typing import Any, NamedTuple

from runtime.timeline import Event, in_flight

ROLES = ("rollout", "genrm")
LEAST_GAIN = 0.05  # a smaller gain in speed isn't worth a move


def total(reports: Sequence[Any]) -> Any:
    """Add up controllers' reports of one form: named tuples and lists by place; a dict is the union."""
    match reports[0]:
        case Counter():
            counts = Counter()
            for report in reports:
                counts.update(report)  # much faster than +
            return counts
        case dict():
            return {key: value for report in reports for key, value in report.items()}
        case list():
            return [total(column) for column in zip(*reports, strict=True)]
        case tuple() as named:
            return type(named)(*(total(column) for column in zip(*reports, strict=True)))
        case bool():
            return any(reports)
    return sum(reports)


class Split(NamedTuple):
    """The number of ranks that serve each role. As text: `full`, `fused 0.2`, or the ranks, `3|1`."""

    mode: str  # full: the roles take turns; partial: in parallel; fused: one, then the other
    rollout: int
    genrm: int
    tail: float = 0.0  # fused: fraction of the answers that are written while others are judged

    def __str__(self) -> str:
        ranks = f"{self.rollout}|{self.genrm}"
        texts = {"full": "full", "fused": f"fused {self.tail:g}", "partial": ranks}
        return texts.get(self.mode, f"{self.mode} {ranks}")


@dataclass(frozen=True)
class RequestStats:
    """The requests of one role in a serving phase: one controller's, or all controllers' (`total`)."""

    tokens: int = 0  # generated
    longest: int = 0  # tokens of the longest answer
    request_s: float = 0.0  # seconds from sent to finished, summed over the requests
    in_flight: float = 0.0  # requests in flight as a request sees them: mean over request-seconds
    prompt_tokens: int = 0  # prompts of finished requests, each counted once even if it moves
    cached_tokens: int = 0
    requests: int = 0
    wakes: int = 0  # how often the role's engines woke while serving

    @staticmethod
    def of(events: Sequence[Event], wakes: int = 0) -> RequestStats:
        """Summarize one controller's requests, from the timeline's spans and parts of engines."""
        levels = [(end - start, count) for start, end, count in in_flight(events)]
        request_s = sum(count * seconds for seconds, count in levels)
        second_moment = sum(count**2 * seconds for seconds, count in levels)
        whole = [event.args for event in events if event.kind == "span"]
        return RequestStats(
            tokens=sum(event.args["tokens"] - event.args["begun"] for event in events),
            longest=max((event.args["tokens"] for event in events), default=0),
            request_s=request_s,
            in_flight=second_moment / max(request_s, 1e-9),
            prompt_tokens=sum(args["prompt"] for args in whole),
            cached_tokens=sum(args["cached"] for args in whole),
            requests=len(whole),
            wakes=wakes,
        )

    @staticmethod
    def total(parts: list[RequestStats]) -> RequestStats:
        """Add up all controllers' requests. Each controller sees only its own requests in flight."""
        sums = RequestStats(*map(sum, zip(*map(astuple, parts), strict=True)))
        longest = max(part.longest for part in parts)
        return replace(sums, longest=longest, wakes=parts[0].wakes)  # all wake engines together


@dataclass(frozen=True)
class StepStats:
    """One serving phase under `split`: one controller's, or all controllers' (`total`)."""

    split: Split
    rollout: RequestStats
    genrm: RequestStats
    waves: int
    serve_s: float
    swap_s: float  # the part of serve_s in which roles were swapped
    lengths: tuple[float, ...] = ()  # the lengths of answers: see `histogram`

    @staticmethod
    def total(parts: list[StepStats]) -> StepStats:
        """Combine all controllers' measurements. Times are those of the slowest one."""
        rollout = RequestStats.total([part.rollout for part in parts])
        genrm = RequestStats.total([part.genrm for part in parts])
        serve_s = max(part.serve_s for part in parts)
        swap_s = max(part.swap_s for part in parts)
        lengths = tuple(map(sum, zip_longest(*(part.lengths for part in parts), fillvalue=0)))
        return StepStats(parts[0].split, rollout, genrm, parts[0].waves, serve_s, swap_s, lengths)

    @staticmethod
    def of_json(row: dict) -> StepStats:
        """Read the JSON of `asdict`."""
        fields = {role: RequestStats(**row[role]) for role in ROLES}
        fields |= {"split": Split(*row["split"]), "lengths": tuple(row["lengths"])}
        return StepStats(**row | fields)

    @property
    def answer_tokens(self) -> float:
        """The mean number of tokens of an answer, as exact as the bins."""
        tokens = sum(number * 2 ** (place / 4) for place, number in enumerate(self.lengths))
        return tokens / max(1, sum(self.lengths))

    def ranks_and_stats(self, role: str) -> tuple[int, RequestStats]:
        return self.split._asdict()[role], vars(self)[role]

    def engine_load(self, role: str, tp: int) -> float:
        """Return the mean number of requests in flight per engine of a role. tp: ranks per engine."""
        ranks, stats = self.ranks_and_stats(role)
        return stats.request_s / max(1e-9, ranks // tp * self.serve_s)


def histogram(lengths: Iterable[int]) -> tuple[int, ...]:
    """Count the answers in bins of length, 4 bins per doubling, up to the longest."""
    counts = Counter(round(4 * math.log2(max(1, length))) for length in lengths)
    return tuple(counts[number] for number in range(1 + max(counts, default=0)))


class Decision(NamedTuple):
    split: Split  # the next step's
    reason: str  # for the log


# mode -> the rule of --rebalance, applied after each step: (history, splits, capacity, tp) -> Decision
# history: newest last; splits: all that the run may use; capacity, tp: requests and ranks of an engine
MOVES: dict[str, Callable[..., Decision]] = {}


def newest_of_split(history: list[StepStats]) -> list[StepStats]:
    """Return the steps since the split last changed, newest first."""
    return [*takewhile(lambda step: step.split == history[-1].split, reversed(history))]


class Remaining(NamedTuple):
    """The step's remaining answers, over all controllers."""

    unwritten: int = 0
    judging: int = 0  # including those that wait for genrm
    begun: int = 0  # all answers of the step so far
