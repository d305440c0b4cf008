"""Is no controller a bottleneck? What the busiest process of a step comes to, from 64 to 4,096 ranks

    python papers/scale.py [--quick] [--write]    64 to 256 ranks alone; docs/papers/scale.md and .png, too

Partial colocation at equal work a rank. A node of 8 ranks is a unit: a controller, engines over 8 devices, a
model-parallel group. A step keeps 8 groups of 4 answers a unit, and as many are filtered. Three ways:

    ours         nothing goes through one process: counted, of the real controllers in the simulation
    coordinator  all samples' metadata go through one (DistFlow, siiRL): a closed form over the same counts
    central      everything goes through one controller (HybridFlow's kind): likewise

The closed forms are kind: a sample comes to the one process once and leaves it once; a coordinator thinks
of the deal alone. `relayed`: others' facts, in totals that it passes on. `thinks`: CPU of all that it
decides and merges, and its part of all else that the simulation did.
"""

from __future__ import annotations

import argparse
import pickle
import sys
from math import log
from pathlib import Path
from statistics import linear_regression
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from matplotlib import pyplot

from papers.tables import DOCS, ROOT, read_constants, values
from papers.wechat_yatt import JUDGES, POLICY
from scheduling.costs import Device, decode_of, passes_of
from simulation.cluster import Cluster
from simulation.costs import moves_of
from simulation.counting import Alike, Counted, Counting, Even

RANKS, QUICK, UNIT, PROMPTS, ANSWERS, GRAIN = (64, 256, 1024, 4096), (64, 128, 256), 8, 8, 4, 32
H20 = Device(**values(read_constants(ROOT / "wechat_yatt.toml")["h20"]))
MODELS = dict(rollout=POLICY, genrm=JUDGES["32B"][0])
METADATA = len(pickle.dumps((10**6, 3, 10**3, 511, bytes(28))))  # of a sample: key, tokens, rank, reference
WAYS = ("ours", "coordinator", "central")


class Busiest(NamedTuple):
    samples: float  # held at once
    sent: float  # bytes, as the next two
    relayed: float
    heard: float
    requests: float  # to and from it
    seconds: float  # that it thinks in a step


class Scaled(Counted):
    def __init__(self, ranks: int):
        units = ranks // UNIT
        lengths = Alike(600, 1.0, 4096, units), Alike(250, 0.5, 1000, units)
        decode = {role: decode_of(model, H20, UNIT, weights=0.8) for role, model in MODELS.items()}
        moves = {role: moves_of(H20, model.bytes / UNIT) for role, model in MODELS.items()}
        actor = passes_of(MODELS["rollout"], H20, UNIT, mfu=0.4, update=0.5)
        cluster = Cluster(decode, actor, moves=moves, grain=GRAIN, meeting_s=1.0)
        sizes = dict(prompts_per_step=PROMPTS * units, answers_per_prompt=ANSWERS, steps=1)
        work = Even(512, *lengths, keep=0.5, units=units)
        super().__init__("partial", units, work, cluster, Counting(GRAIN), **sizes)

    def ways(self) -> dict[str, Busiest]:
        """A controller works out every decision, merges as unit 0 does, and has its part of the rest."""
        network, decisions = self.network, sum(self.thinking_s.values())
        rest = self.cpu_s - decisions - sum(network.spent.values())
        counts = (self.held, network.sent, network.relayed, network.heard, self.requests)
        own = decisions + network.spent["first"] + rest / len(self.controllers)
        drawn, requests, dealt = sum(self.drawn.values()), sum(self.requests.values()), network.dealt
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
            lines += [f"| {way} | {n:,} | {b.samples:,} | {megabytes} | {b.requests:,.0f} | {thinks} |"]
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
    chosen = parser.parse_args(arguments)
    step_s, found = {}, {}
    for ranks, run in ((ranks, Scaled(ranks)) for ranks in (QUICK if chosen.quick else RANKS)):
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
