"""Is no controller a bottleneck? What the busiest process of a step comes to, from 64 to 4,096 ranks

    python bench/central.py [--quick] [--write]    64 to 256 ranks alone; docs/papers/scale.md and .png, too
    python bench/central.py --media 1              with images, so many MB a sample

Partial colocation at equal work a rank. A node of 8 ranks is a unit: a controller, engines over 8 devices, a
model-parallel group. A step keeps 8 groups of 4 answers a unit, and as many are filtered. Three ways:

    ours         nothing goes through one process: counted, of the real controllers in the simulation
    coordinator  all samples' metadata go through one (DistFlow, siiRL): a closed form over the same counts
    central      everything goes through one controller (HybridFlow's kind): likewise

The closed forms are kind: a sample comes to the one process once and leaves it once; a coordinator thinks
of the deal alone. Of ours no image passes from controller to controller. `relayed`: others' facts, in totals
that it passes on. `thinks`: CPU of all that it decides and merges, and its part of all else that the
simulation did.
"""

from __future__ import annotations

import argparse
import pickle
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import log
from pathlib import Path
from statistics import linear_regression
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from matplotlib import pyplot

from controller import Controller
from papers.tables import DOCS, ROOT, read_constants, values
from papers.wechat_yatt import JUDGES, POLICY
from rollout import RolloutBatch
from sample import Sample
from scheduling.costs import Device, decode_of, passes_of
from simulation.cluster import Cluster, Lengths, Simulation, Workload
from simulation.engine import Moves
from simulation.meetings import Network

RANKS, QUICK, UNIT, PROMPTS, ANSWERS, GRAIN = (64, 256, 1024, 4096), (64, 128, 256), 8, 8, 4, 32
H20 = Device(**values(read_constants(ROOT / "wechat_yatt.toml")["h20"]))
MODELS = dict(rollout=(POLICY, 1), genrm=JUDGES["32B"])  # with the devices of an engine, at least
# of a sample: key, tokens, rank, reference
METADATA = len(pickle.dumps((10**6, 3, 10**3, 511, bytes(28))))
WAYS = ("ours", "coordinator", "central")
TOKEN_BYTES = 5 + 9 + 2  # pickled: a token id, its logprob, the version that wrote it


# ---------------------------------------------------------------- work alike, and what it comes to


@dataclass(frozen=True)
class Alike(Lengths):
    """The k-th prompts of all units have texts alike: figures are a unit's own, not the luck of the draw.

    To a tenth: of equal ones the deal would leave every unit its own.
    """

    units: int = 1

    def of(self, *text: Any) -> int:
        *_, prompt_id, index = text
        part = random.Random(repr(text)).uniform(0.9, 1.0)
        return max(1, round(part * super().of(prompt_id // self.units, index)))


@dataclass(frozen=True)
class Even(Workload):
    """And of every unit as many groups are kept."""

    units: int = 1

    def is_right(self, prompt_id: int, index: int) -> bool:
        return super().is_right(prompt_id // self.units, index)


class Counting(Network):
    """By unit. sent: its own facts and samples; relayed: others' facts, in totals that it passes on.

    dealt: all samples, those that stay, too, and their bytes. grain: tokens that one of theirs stands for.
    spent: CPU seconds of `counting`, and of merging at the `first` unit, which merges the most, and at
    `others`.
    """

    def __init__(self, grain: int):
        super().__init__()
        self.grain, self.dealt, self.spent = grain, (0, 0), Counter()
        self.sent, self.relayed, self.heard = Counter(), Counter(), Counter()

    def _bytes(self, value: Any) -> int:
        start = time.process_time()
        if isinstance(value, list) and value and isinstance(value[0], Sample):
            tokens = (
                5 * len(sample.prompt) + TOKEN_BYTES * len(sample.response) for sample in value
            )
            size = 200 * len(value) + self.grain * sum(tokens)  # 200: its names and numbers
        else:
            size = 0 if value is None else len(pickle.dumps(value))
        self.spent["counting"] += time.process_time() - start
        return size

    def gather_s(self, values: list) -> float:
        sizes = dict(enumerate(map(self._bytes, values)))
        self.sent.update(sizes)
        self.heard.update({unit: sum(sizes.values()) - size for unit, size in sizes.items()})
        return super().gather_s(values)

    def reduced(self, total: Callable[[list], Any], values: list) -> Any:
        """Unit 0 has its total merged with a neighbour's at each distance, and tells all the result."""
        own, values, distance = list(map(self._bytes, values)), list(values), 1
        self.sent.update(dict(enumerate(own)))
        while distance < len(values):
            for unit in range(0, len(values) - distance, 2 * distance):
                sender = unit + distance
                size = self._bytes(values[sender]) if distance > 1 else own[sender]
                self.heard[unit] += size
                self.relayed[sender] += max(0, size - own[sender])
                start = time.process_time()
                values[unit] = total([values[unit], values[sender]])
                self.spent["others" if unit else "first"] += time.process_time() - start
            distance *= 2
        size = self._bytes(values[0])
        self.relayed[0] += max(0, size - own[0])
        self.heard.update(dict.fromkeys(range(1, len(values)), size))
        return values[0]

    def exchange_s(self, parcels: list[dict[int, Any]]) -> float:
        for sender, receiver in [(s, r) for s, to in enumerate(parcels) for r in to]:
            size = self._bytes(parcels[sender][receiver])
            self.dealt = self.dealt[0] + len(parcels[sender][receiver]), self.dealt[1] + size
            self.sent[sender] += size * (sender != receiver)
            self.heard[receiver] += size * (sender != receiver)
        return super().exchange_s(parcels)


class Counted(Simulation):
    """By unit: samples drawn, and held at once; requests to and from it."""

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        self.drawn, self.held, self.requests = Counter(), Counter(), Counter()

    async def step(
        self, c: Controller, step: int, batch: RolloutBatch, samples: list[Sample], stats: dict
    ) -> None:
        unit, mine = c.world.rank, {sample.key for sample in batch.kept}
        self.drawn[unit] = len(batch.kept + batch.dropped) + sum(
            map(len, batch.filtered + batch.carried)
        )
        self.held[unit] = self.drawn[unit] + sum(sample.key not in mine for sample in samples)
        self.requests[unit] += batch.stats.rollout.requests + batch.stats.genrm.requests
        served = (span.rank for span in c.timeline.events if span.name in self.engines)
        self.requests.update(served)
        await super().step(c, step, batch, samples, stats)


# ---------------------------------------------------------------- three ways


class Busiest(NamedTuple):
    samples: float  # held at once
    sent: float  # bytes, as the next two
    relayed: float
    heard: float
    requests: float  # to and from it
    seconds: float  # that it thinks in a step


def cluster_of(unit: int, grain: int, meeting_s: float) -> Cluster:
    """H20s, so many a controller. Weights go to the host and back when their engine sleeps and wakes."""
    decode, moves = {}, {}
    for role, (model, tp) in MODELS.items():
        devices = max(unit, tp)
        decode[role] = decode_of(model, H20, devices, weights=0.8)
        swap_s = model.bytes / devices / H20.host
        moves[role] = Moves(swap_s, swap_s)
    actor = passes_of(POLICY, H20, unit, mfu=0.4, update=0.5)
    return Cluster(decode, actor, moves=moves, grain=grain, meeting_s=meeting_s)


class Scaled(Counted):
    """media: bytes of a sample's images. Only what goes through one process takes them along."""

    def __init__(self, ranks: int, media: float = 0.0, steps: int = 1):
        self.media = media
        units, cluster = ranks // UNIT, cluster_of(UNIT, GRAIN, 1.0)
        lengths = Alike(600, 1.0, 4096, units), Alike(250, 0.5, 1000, units)
        sizes = dict(prompts_per_step=PROMPTS * units, answers_per_prompt=ANSWERS, steps=steps)
        work = Even(512, *lengths, keep=0.5, units=units)
        super().__init__("partial", units, work, cluster, Counting(GRAIN), **sizes)

    def ways(self) -> dict[str, Busiest]:
        """A controller works out every decision, merges as unit 0 does, and has its part of the rest."""
        network, decisions = self.network, sum(self.thinking_s.values())
        rest = self.cpu_s - decisions - sum(network.spent.values())
        counts = (self.held, network.sent, network.relayed, network.heard, self.requests)
        own = decisions + network.spent["first"] + rest / len(self.controllers)
        drawn, requests, (count, dealt) = (
            sum(self.drawn.values()),
            sum(self.requests.values()),
            network.dealt,
        )
        dealt += count * self.media
        through, puts = drawn * METADATA, drawn + len(self.controllers)
        ours = Busiest(*(max(count.values()) for count in counts), own)
        coordinator = Busiest(drawn, through, 0, through, puts, self.thinking_s["deal"])
        central = Busiest(drawn, dealt, 0, dealt, requests / 2, decisions + rest)
        return dict(zip(WAYS, (ours, coordinator, central), strict=True))


def exponents(found: dict[int, Busiest]) -> dict[str, float]:
    """x of ranks**x, by what is counted: the slope through the logarithms; 0 of what never is."""
    ranks, columns = [log(n) for n in found], zip(*found.values(), strict=True)
    logs = [[log(n) for n in column] if all(column) else [0.0] * len(ranks) for column in columns]
    slopes = [linear_regression(ranks, column).slope for column in logs]
    return dict(zip(Busiest._fields, slopes, strict=True))


def table_of(ways: dict[str, dict[int, Busiest]], step_s: dict[int, float]) -> list[str]:
    """Markdown, with what grows and what is constant."""
    head = "| way | ranks | samples | sent MB | relayed MB | heard MB | requests | thinks, part of the step |"
    lines = [head, "|---|" + "--:|" * 7]
    for way, found in ways.items():
        for n, b in found.items():
            megabytes = " | ".join(f"{size / 1e6:,.3f}" for size in (b.sent, b.relayed, b.heard))
            thinks = f"{b.seconds:.2f} s, {b.seconds / step_s[n]:.2%}"
            lines += [
                f"| {way} | {n:,} | {b.samples:,} | {megabytes} | {b.requests:,.0f} | {thinks} |"
            ]
        grows = [f"{name} ranks^{x:.2f}" for name, x in exponents(found).items() if abs(x) >= 0.05]
        lines += [f"| {way} | grows: | " + ", ".join(grows or ["nothing"]) + " | | | | | |"]
    return lines


def picture_of(ways: dict[str, dict[int, Busiest]], path: Path) -> None:
    canvas, panels = pyplot.subplots(1, 6, figsize=(18, 3), layout="constrained")
    for panel, name in zip(panels, Busiest._fields, strict=True):
        for way, found in ways.items():
            column = [each._asdict()[name] or None for each in found.values()]
            panel.loglog(list(found), column, "o-", label=way)
        panel.set(title=name, xlabel="ranks")
    panels[0].legend()
    canvas.savefig(path, dpi=90)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--media", type=float, default=0.0, metavar="MB", help="of a sample")
    chosen = parser.parse_args(arguments)
    step_s, found = {}, {}
    for ranks in QUICK if chosen.quick else RANKS:
        run = Scaled(ranks, 1e6 * chosen.media)
        step_s[ranks], found[ranks] = run.run()[-1].ended_s, run.ways()
    ways = {way: {ranks: each[way] for ranks, each in found.items()} for way in WAYS}
    lines = table_of(ways, step_s)
    print(*lines, sep="\n")
    if chosen.write:
        DOCS.mkdir(parents=True, exist_ok=True)
        picture_of(ways, DOCS / "scale.png")
        text = "\n".join([f"# {__doc__}", *lines, "", "![By ranks](scale.png)", ""])
        (DOCS / "scale.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
