"""What one controller holds and sends as ranks are added: the parallel controllers, and a central one.

    python bench/central.py                     2, 64 and 1,024 ranks: a table, within two minutes and 2 GB
    python bench/central.py --ranks 2 16 128
    python bench/central.py --uneven            chance decides which prompts are informative, so some
                                                controllers keep more than others

The loop is the real controller.train; engines, trainers and world are the fakes of tests/, many ranks in one
process on a virtual clock. Work grows with the ranks: a step trains on 2 prompts of 8 answers a rank, and
every sample carries 1 MB of media.

`parallel` is controller.exchange: a sample goes straight from the rank that has it to the rank that trains on
it. `central` is for comparison only: rank 0 receives all samples, deals them and sends each rank its share.
It takes the place of `exchange` alone; answers are still generated and judged in parallel, so that a
controller at the centre of everything would hold and send more.

Columns, of the busiest controller and, but for the first, a step:
    samples   the most it held at once: what it drew, and what it received to train on
    dealt     MB of samples that it gives to ranks, those to itself among them
    sent      MB of them that leave
    received  MB of samples that come in
    gathers   gathers and reductions, some of them meetings while serving; in a run, every 0.05 s
    facts     kB of lengths, prompt numbers and rewards that it puts into them, all of a step together
    heard     kB that it receives of them from others: grows with the ranks
    CPU       ms, the mean over controllers, of the whole process: with fakes and counting, without the deal
    deal      ms of one balance.plan_batch. Every parallel controller works it out alike; the simulation once,
              and shares the result.
Requests to engines are not counted: one for each group and judgement, whatever the number of ranks.
"""

from __future__ import annotations

import argparse
import gc
import pickle
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import fakes

import algorithms
import controller
import rollout
from data import Prompts, Source
from engines.engine import Answer
from sample import Sample
from scheduling import balance

RANKS = (2, 64, 1024)
STEPS = 2  # nothing of the first may be held in the second
PROMPTS_A_RANK, ANSWERS = 2, 8
KEPT_ONE_IN = 3  # groups; the others are drawn again
MEDIA_BYTES = 1_000_000  # of a sample
MEETING_INTERVAL_S = 1.0  # on the virtual clock, on which an answer takes up to 0.6 s


# ---------------------------------------------------------------- the central controller


async def central_exchange(samples: list[Sample], c: controller.Controller) -> controller.MiniBatches:
    """What controller.exchange does (collective), by way of rank 0, which holds the whole batch."""
    algorithms.set_scores(samples, [algorithms.signals_of(samples, c.algorithm)], c.algorithm)
    facts = await c.world.gather((c.placement.actor.dp_rank, bool(samples)))
    senders = [rank for rank, (_, has_some) in enumerate(facts) if has_some]
    batch = await c.world.exchange({0: samples} if samples else {}, () if c.world.rank else senders)
    members = [dp_rank for dp_rank, _ in facts]
    incoming = await c.world.exchange(shares_of(batch, members, c) if c.world.rank == 0 else {}, {0})
    return incoming[0]


def shares_of(
    batch: dict[int, list[Sample]], members: list[int], c: controller.Controller
) -> dict[int, controller.MiniBatches]:
    """What rank 0 sends to each rank.

    batch: all samples, by the rank that sent them; members: every rank's data-parallel rank.
    """
    actor, samples = c.placement.actor, [sample for part in batch.values() for sample in part]
    found = {sample.key: sample for sample in samples}
    tokens = {key: len(sample.prompt) + len(sample.response) for key, sample in found.items()}
    plan = controller.plan_batch(tokens, actor.cost, c.config, actor.dp_size)
    shares = [
        [[[found[key] for key in keys] for keys in mini_batch] for mini_batch in share] for share in plan
    ]
    return {rank: shares[dp_rank] for rank, dp_rank in enumerate(members)}


EXCHANGE = {"parallel": controller.exchange, "central": central_exchange}


# ---------------------------------------------------------------- counting


@dataclass(frozen=True)
class Image:
    """Stands for an image: has its size, but none of its bytes, so that 1,024 ranks fit into one process."""

    size: int = MEDIA_BYTES


def samples_in(parcel) -> list[Sample]:
    """The samples of a parcel: a list of them, or of lists."""
    return (
        [parcel] if isinstance(parcel, Sample) else [sample for part in parcel for sample in samples_in(part)]
    )


def size_of(pickled: bytes, samples: list[Sample]) -> int:
    """Bytes of a pickled parcel, with those of its samples' media."""
    return len(pickled) + sum(image.size for sample in samples for image in sample.media)


@dataclass
class Tally:
    """What one controller came to in a run: samples that it holds, and bytes."""

    held: int = 0  # alive now, of those that it made or received
    peak: int = 0
    dealt: int = 0
    sent: int = 0
    received: int = 0
    facts: int = 0
    heard: int = 0
    gathers: int = 0  # meetings

    def hold(self, samples: list[Sample]) -> None:
        """Count each sample until the last reference to it is gone."""
        self.held += len(samples)
        self.peak = max(self.peak, self.held)
        for sample in samples:
            weakref.finalize(sample, self._let_go)

    def _let_go(self) -> None:
        self.held -= 1


class CountingWorld(fakes.FakeWorld):
    """FakeWorld that counts. Like World it pickles what goes to another rank, whose samples are its own."""

    def __init__(self, rank, size, meetings):
        super().__init__(rank, size, meetings)
        self.tally = Tally()

    def _tell(self, value):
        size = len(pickle.dumps(value))
        self.tally.facts += size
        self.tally.gathers += 1
        return size

    async def gather(self, value):
        sizes, values = zip(*await super().gather((self._tell(value), value)), strict=True)
        self.tally.heard += sum(sizes) - sizes[self.rank]
        return list(values)

    async def reduce(self, value, total):
        self._tell(value)
        heard, result = await self._meet(value, partial(reduced, total))
        self.tally.heard += heard[self.rank]
        return pickle.loads(result)

    async def barrier(self):
        await super().gather(None)  # no facts

    async def exchange(self, outgoing, senders):
        pickled = {rank: pickle.dumps(parcel) for rank, parcel in outgoing.items()}
        sizes = {rank: size_of(pickled[rank], samples_in(parcel)) for rank, parcel in outgoing.items()}
        self.tally.dealt += sum(sizes.values())
        self.tally.sent += sum(size for rank, size in sizes.items() if rank != self.rank)
        self.tally.heard += 8 * len({*senders} - {self.rank})  # as in world.World, the size of each parcel
        everyones = await super().gather(pickled)
        incoming = {
            rank: parcels[self.rank] for rank, parcels in enumerate(everyones) if self.rank in parcels
        }
        return {
            rank: outgoing[rank] if rank == self.rank else self._unpack(parcel)
            for rank, parcel in incoming.items()
        }

    def _unpack(self, pickled: bytes):
        parcel = pickle.loads(pickled)
        samples = samples_in(parcel)
        self.tally.received += size_of(pickled, samples)
        self.tally.hold(samples)
        return parcel


def reduced(total, values: list) -> tuple[list[int], bytes]:
    """What World.reduce has each rank hear, in bytes, and what all have in the end."""
    heard, distance = [0] * len(values), 1
    while distance < len(values):
        for rank in range(0, len(values) - distance, 2 * distance):
            heard[rank] += len(pickle.dumps(values[rank + distance]))
            values[rank] = total([values[rank], values[rank + distance]])
        distance *= 2
    result = pickle.dumps(values[0])
    return [size + len(result) * (rank > 0) for rank, size in enumerate(heard)], result


class CountedPrompts(Prompts):
    """Prompts whose samples carry media, each its own, and are counted.

    None are held out: evaluation is left out.
    """

    def __init__(self, source: Source, tally: Tally):
        super().__init__(source, ANSWERS)
        self.held_out, self._tally = [], tally

    def group(self, prompt_id):
        group = super().group(prompt_id)
        for sample in group:
            sample.media = (Image(),)
        self._tally.hold(group)
        return group


# ---------------------------------------------------------------- measuring


@dataclass
class Figures:
    """What a run of `steps` steps came to. tallies: by rank; seconds are those of a step."""

    variant: str
    ranks: int
    steps: int
    tallies: list[Tally]
    cpu_s: float
    deal_s: float

    def row(self) -> str:
        """A line of the table: the busiest controller."""
        peak = max(tally.peak for tally in self.tallies)
        dealt, sent = max(tally.dealt for tally in self.tallies), max(tally.sent for tally in self.tallies)
        received, facts = (
            max(tally.received for tally in self.tallies),
            max(tally.facts for tally in self.tallies),
        )
        heard = max(tally.heard for tally in self.tallies)
        gathers = max(tally.gathers for tally in self.tallies) / self.steps
        mb, kb = 1e6 * self.steps, 1e3 * self.steps
        return (
            f"{self.variant:9}{self.ranks:6d}{peak:9d}{dealt / mb:10.1f}{sent / mb:9.1f}{received / mb:10.1f}"
            f"{gathers:9.1f}{facts / kb:8.2f}{heard / kb:8.1f}{1e3 * self.cpu_s:7.1f}{1e3 * self.deal_s:7.1f}"
        )


HEADER = "           ranks  samples  dealt MB  sent MB  recvd MB  gathers  facts   heard    CPU   deal"


def measure(variant: str, ranks: int, steps: int = STEPS, uneven: bool = False) -> Figures:
    """Run the controllers with a row of EXCHANGE in place of controller.exchange.

    uneven: see the top of this file.
    """
    deal_s, known = [], []

    def plan_once(tokens: dict, *rest) -> list:
        """The same on every controller: worked out by the first that asks."""
        if not known or known[0] != tokens:
            start = time.process_time()
            known[:] = tokens, balance.plan_batch(tokens, *rest)
            deal_s.append(time.process_time() - start)
        return known[1]

    start = time.process_time()
    with (
        without_collector(),
        mock.patch.object(controller, "exchange", EXCHANGE[variant]),
        mock.patch.object(controller, "plan_batch", plan_once),
        mock.patch.object(rollout, "MEETING_INTERVAL_S", MEETING_INTERVAL_S),
    ):
        settings = dict(steps=steps, prompts_per_step=PROMPTS_A_RANK * ranks, answers_per_prompt=ANSWERS)
        settings |= dict(write=fakes.write_answer if uneven else every_rank_alike(ranks))
        settings |= dict(world_class=CountingWorld, prepare_controller=prepare)
        controllers, _ = fakes.simulate("partial", ranks, **settings)
        cpu_s = time.process_time() - start - sum(deal_s)
    tallies = [c.world.tally for c in controllers]
    return Figures(variant, ranks, steps, tallies, cpu_s / ranks / steps, fmean(deal_s))


@contextmanager
def without_collector() -> Iterator[None]:
    """Without Python's cycle collector, which would look through the objects of all ranks."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def prepare(c: controller.Controller) -> None:
    """Count the samples that are made. The fakes keep none that the real report and actor wouldn't."""
    c.prompts = CountedPrompts(c.prompts.source, c.world.tally)
    c.state.groups_per_kept = KEPT_ONE_IN  # as a run has learnt after some steps
    c.report.steps = c.placement.actor.batches = deque(maxlen=0)


def every_rank_alike(ranks: int):
    """A writer of answers of many lengths: one in KEPT_ONE_IN of every rank's prompts is informative.

    The k-th prompts of all controllers are alike, so that the figures are their own and not the luck of the
    draw: on any number of ranks a step has the same waves and meetings.
    """

    def write(prompt, index, sampling):
        draw = int("".join(map(chr, prompt)).split("+")[0])
        right = (draw // ranks) % KEPT_ONE_IN == 0 and index % 2 == 0
        length = 10 + (draw // ranks * 7919 + index * 104729) % 53
        text = f">{draw if right else draw + 1}".rjust(length)
        return Answer(index, [ord(c) for c in text], [-0.5] * len(text), "stop", [])

    return write


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--uneven", action="store_true")
    chosen = parser.parse_args()
    measure("parallel", 2)  # the first run in a process is slower
    print(HEADER)
    for variant in EXCHANGE:
        for ranks in chosen.ranks:
            print(measure(variant, ranks, uneven=chosen.uneven).row(), flush=True)


if __name__ == "__main__":
    main()
