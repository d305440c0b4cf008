"""Does one controller carry too much? The load on a step's busiest process, from 64 to 4,096 ranks

    python reproduce/bench/central.py              64, 256, 1,024 and 4,096 ranks
    python reproduce/bench/central.py --quick      64, 128 and 256 ranks
    python reproduce/bench/central.py --write      also write docs/papers/scale.md
    python reproduce/bench/central.py --media 1    add 1 MB of images to each sample

Partial colocation, with the same work on every rank. A node has 8 ranks and is one controller, engines on
8 devices, and a model-parallel group. In a step, each node keeps 8 groups of 4 answers and filters out as
many. Three ways:

    parallel   no process carries everything: counted in a simulation of the real controllers
    split      the same, but half of the nodes train an actor, the others a critic (--placement split)
    central    one controller carries everything, as in HybridFlow: a closed form over the same counts

`samples` is the most that a process holds at once. A central controller holds every sample drawn in the step,
even those that are filtered out. `sent` counts a controller's own facts and samples; `received` counts all
that reaches it. The closed form favors the central controller: each sample reaches and leaves it only once.
With parallel controllers, no images pass between controllers.

This table counts load, not time. The [WeChat-YATT page](wechat_yatt.md) simulates time: with text, parallel
controllers save almost none; they save time where samples carry images, most where a central process is slow.
"""

import argparse
import pickle
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from reproduce.papers.tables import DOCS, ROOT, read_constants, values
from reproduce.papers.wechat_yatt import JUDGES, POLICY
from reproduce.simulation.cluster import Cluster, Lengths, Simulation, Workload
from reproduce.simulation.costs import Device, decode_of, passes_of
from reproduce.simulation.engine import Moves
from reproduce.simulation.meetings import Network
from sample import Sample
from state import Controller, RolloutBatch

RANKS = (64, 256, 1024, 4096)
QUICK = (64, 128, 256)
NODE = 8  # ranks per controller
PROMPTS = 8  # per node and step
ANSWERS = 4
GRAIN = 32  # real tokens per simulated token
H20 = Device(**values(read_constants(ROOT / "wechat_yatt.toml")["h20"]))
MODELS = dict(rollout=(POLICY, 1), genrm=JUDGES["32B"])  # (model, fewest devices per engine)
SPLIT = dict(algorithm=("ppo",), placement="split")
TOKEN_BYTES = 5 + 9 + 2  # pickled: a token id, its logprob, the version that wrote it
SAMPLE_BYTES = 200  # a sample's names and numbers


@dataclass(frozen=True)
class Alike(Lengths):
    """Lengths that are similar for the k-th prompts of all nodes, so that nodes don't differ by chance.

    They differ by up to a tenth. If they were equal, no sample would move to another node.
    """

    nodes: int = 1

    def of(self, *text: Any) -> int:
        *_, prompt_id, index = text
        part = random.Random(repr(text)).uniform(0.9, 1.0)
        return max(1, round(part * super().of(prompt_id // self.nodes, index)))


@dataclass(frozen=True)
class Even(Workload):
    """A workload that keeps the same number of groups in every node."""

    nodes: int = 1

    def is_right(self, prompt_id: int, index: int) -> bool:
        return super().is_right(prompt_id // self.nodes, index)


class Counting(Network):
    """Counts each node's bytes: `sent` (its own facts and samples) and `received` (all that reaches it).

    grain: real tokens per simulated token.
    """

    def __init__(self, grain: int):
        super().__init__()
        self.grain = grain
        self.sent = Counter()
        self.received = Counter()
        self.arrived = Counter()  # samples from other nodes
        self.samples_dealt = 0  # including those that stay
        self.bytes_dealt = 0

    def _bytes(self, value: Any) -> int:
        if value is None:
            return 0
        if isinstance(value, list) and value and isinstance(value[0], Sample):
            prompts = sum(len(sample.prompt) for sample in value)
            answers = sum(len(sample.response) for sample in value)
            tokens = 5 * prompts + TOKEN_BYTES * answers
            return SAMPLE_BYTES * len(value) + self.grain * tokens
        return len(pickle.dumps(value))

    def gathered(self, values: list) -> list:
        sizes = [self._bytes(value) for value in values]
        for node, size in enumerate(sizes):
            self.sent[node] += size
            self.received[node] += sum(sizes) - size
        return super().gathered(values)

    def reduced(self, total: Callable[[list], Any], values: list) -> Any:
        """Merge pairs at growing distances into node 0, which then sends the result to all."""
        values = list(values)
        for node, value in enumerate(values):
            self.sent[node] += self._bytes(value)
        distance = 1
        while distance < len(values):
            for node in range(0, len(values) - distance, 2 * distance):
                theirs = values[node + distance]
                self.received[node] += self._bytes(theirs)
                values[node] = total([values[node], theirs])
            distance *= 2
        size = self._bytes(values[0])
        for node in range(1, len(values)):
            self.received[node] += size
        return values[0]

    def exchanged(self, parcels: list[dict[int, Any]]) -> list[dict[int, Any]]:
        for sender, outgoing in enumerate(parcels):
            for receiver, parcel in outgoing.items():
                if isinstance(parcel, list):
                    size = self._bytes(parcel)
                    self.samples_dealt += len(parcel)
                    self.bytes_dealt += size
                    self.arrived[receiver] += len(parcel) * (sender != receiver)
                else:  # a model's numbers for each token
                    size = self.grain * self._bytes(parcel)
                if sender != receiver:
                    self.sent[sender] += size
                    self.received[receiver] += size
        return super().exchanged(parcels)


class Busiest(NamedTuple):
    samples: float  # held at once
    sent: float  # bytes
    received: float  # bytes
    requests: float  # sent and received


def cluster_of(gpus: int, grain: int, meeting_s: float) -> Cluster:
    """Return `gpus` H20s for each controller. Weights move to host memory while their engine sleeps."""
    decode = {}
    moves = {}
    for role, (model, tp) in MODELS.items():
        devices = max(gpus, tp)
        decode[role] = decode_of(model, H20, devices, weights=0.8)
        swap_s = model.bytes / devices / H20.host
        moves[role] = Moves(swap_s, swap_s)
    actor = passes_of(POLICY, H20, gpus, mfu=0.4, update=0.5)
    return Cluster(decode, actor, moves=moves, grain=grain, meeting_s=meeting_s)


class Scaled(Simulation):
    """One step. media: bytes of images per sample, which only a central controller carries."""

    def __init__(self, ranks: int, media: float = 0.0, **settings: Any):
        self.media = media
        # node -> samples drawn, samples held at once, requests sent and received
        self.drawn = Counter()
        self.held = Counter()
        self.requests = Counter()
        nodes = ranks // NODE
        answers = Alike(600, 1.0, 4096, nodes)
        critiques = Alike(250, 0.5, 1000, nodes)
        work = Even(512, answers, critiques, keep=0.5, nodes=nodes)
        cluster = cluster_of(NODE, GRAIN, 1.0)
        sizes = dict(prompts_per_step=PROMPTS * nodes, answers_per_prompt=ANSWERS, steps=1)
        super().__init__("partial", nodes, work, cluster, Counting(GRAIN), **sizes | settings)

    async def step(
        self, c: Controller, step: int, batch: RolloutBatch, samples: list[Sample], stats: dict
    ) -> None:
        node = c.world.rank
        unused = sum(len(group) for group in batch.filtered + batch.carried)
        self.drawn[node] = len(batch.kept) + len(batch.dropped) + unused
        self.held[node] = self.drawn[node] + self.network.arrived[node]
        self.requests[node] += batch.stats.rollout.requests + batch.stats.genrm.requests
        for span in c.timeline.events:
            if span.name in self.engines:
                self.requests[span.rank] += 1
        await super().step(c, step, batch, samples, stats)

    def ways(self) -> dict[str, Busiest]:
        """Return the busiest process's load for each way."""
        network = self.network
        counters = (self.held, network.sent, network.received, self.requests)
        dealt = network.bytes_dealt + network.samples_dealt * self.media
        requests = sum(self.requests.values()) / 2
        return {
            "parallel": Busiest(*(max(counter.values()) for counter in counters)),
            "central": Busiest(sum(self.drawn.values()), dealt, dealt, requests),
        }


def row_of(way: str, ranks: int, busiest: Busiest) -> str:
    """Return a line of the table."""
    cells = [way, f"{ranks:,}", f"{busiest.samples:,}", f"{busiest.sent / 1e6:,.3f}"]
    cells += [f"{busiest.received / 1e6:,.3f}", f"{busiest.requests:,.0f}"]
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--media", type=float, default=0.0, metavar="MB", help="per sample")
    chosen = parser.parse_args(arguments)
    rows = {"parallel": [], "split": [], "central": []}
    for ranks in QUICK if chosen.quick else RANKS:
        run = Scaled(ranks, 1e6 * chosen.media)
        run.run()
        split = Scaled(ranks, **SPLIT)
        split.run()
        for way, busiest in (run.ways() | {"split": split.ways()["parallel"]}).items():
            rows[way].append(row_of(way, ranks, busiest))
        print(f"up to {ranks:,} ranks: done", flush=True)
    lines = ["| way | ranks | samples | sent MB | received MB | requests |", "|---|" + "--:|" * 5]
    lines += [line for of_way in rows.values() for line in of_way]
    print(*lines, sep="\n")
    if chosen.write:
        (DOCS / "scale.md").write_text("\n".join([f"# {__doc__}", *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
