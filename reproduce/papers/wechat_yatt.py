"""WeChat-YATT (arXiv 2508.07970): when do partial colocation and parallel controllers save time?

    python reproduce/papers/wechat_yatt.py [--figure partial] [--quick] [--all] [--write]

We know three of the paper's percentages (`claims`), from a third party's summary, and none of its settings.
The percentages are therefore lines in pictures, not targets. We assume 64 H20 devices, a 7B policy, 128
prompts of 8 answers, and judges of 7B, 32B and 72B. The engines' pace was fitted to throughputs on an H20
from WeChat-YATT's repository (figure h20).
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

from reproduce.papers.tables import Constants, Paper, Point, Row, command, known, values
from reproduce.simulation.cluster import Cluster, Lengths, Simulation, StepFacts, Workload
from reproduce.simulation.costs import Decode, Device, Model, decode_of, passes_of
from reproduce.simulation.engine import Moves, SimulatedEngine
from reproduce.simulation.meetings import SimulatedWorld


class Judge(NamedTuple):
    model: Model
    tp: int  # ranks per engine


RANKS = 64
GRAIN = 16
MEETING_S = 0.25
POLICY = Model(7.6e9, 28, 3584, 512)
JUDGES = {
    "7B": Judge(POLICY, 1),
    "32B": Judge(Model(32.5e9, 64, 5120, 1024), 4),
    "72B": Judge(Model(72.7e9, 80, 8192, 1024), 8),
}
MODELS = {  # in figure h20
    "1.5B": Model(1.54e9, 28, 1536, 256),
    "32B": JUDGES["32B"].model,
    "30B-A3B": Model(30.5e9, 48, 2048, 512, active=3.3e9),
}
CONTEXTS = {"fastest": 100, "slowest": 2048}  # tokens: early in an answer, and at its end
KEEPS = (1.0, 0.5)
MORE_KEEPS = (1.0, 0.7, 0.5)
SWAPS_S = (1, 20)
SPLITS = (8, 16, 24, 32, 40)
# times that a sample's media pass: generation, judging, reference, old log-probabilities, training
DISPATCHES = 5


def engine_of(constants: Constants, model: Model, tp: int) -> Decode:
    """Return an engine of tp H20s."""
    h20 = Device(**values(constants["h20"]))
    assumed = {name: constants["assumed"][name] for name in ("weights", "prefill")}
    return decode_of(model, h20, tp, **assumed, **values(constants["engine"]))


def simulate(
    constants: Constants, judge: str, mode: str, swap_s: float, keep: float = 1.0, **settings: Any
) -> StepFacts:
    """Simulate a step of our workload. swap_s: seconds until one role sleeps and the other is awake."""
    assumed = constants["assumed"]
    model, tp = JUDGES[judge]
    decode = {"rollout": engine_of(constants, POLICY, 1), "genrm": engine_of(constants, model, tp)}
    moves = dict.fromkeys(decode, Moves(swap_s / 2, swap_s / 2))
    actor = passes_of(POLICY, Device(**values(constants["h20"])), 1, mfu=assumed["mfu"], update=0.5)
    cluster = Cluster(decode, actor, moves=moves, grain=GRAIN, meeting_s=MEETING_S)
    answer = Lengths(*assumed["answer"])
    work = Workload(assumed["prompt"], answer, Lengths(*assumed["critique"]), keep)
    sizes = dict(prompts_per_step=128, answers_per_prompt=8, genrm_tp=tp, steps=1)
    return Simulation(mode, RANKS, work, cluster, **sizes, **settings).run()[0]


def partial_s(constants: Constants, judge: str, swap_s: float, keep: float, split: int) -> float:
    """Return the seconds of serving. split: number of writing ranks."""
    step = simulate(constants, judge, "partial", swap_s, keep, rollout_ranks=split)
    return step.seconds["serve"]


def partial(paper: Paper) -> list[Row]:
    """Return partial / full for the best split and for halves, by judge, groups kept and swap time."""
    keeps = MORE_KEEPS if paper.every else KEEPS
    cells = [("32B", 1.0)] if paper.quick else itertools.product(JUDGES, keeps)
    splits = SPLITS[2:4] if paper.quick else SPLITS
    swaps_s = SWAPS_S[:1] if paper.quick else SWAPS_S
    rows = []
    for judge, keep in cells:
        took = {s: partial_s(paper.constants, judge, SWAPS_S[0], keep, s) for s in splits}
        sides = {"best split": min(took, key=took.__getitem__), "half each": RANKS // 2}
        for swap_s in swaps_s:
            full_s = simulate(paper.constants, judge, "full", swap_s, keep).seconds["serve"]
            if swap_s != SWAPS_S[0]:
                own = {*sides.values()}
                took = {s: partial_s(paper.constants, judge, swap_s, keep, s) for s in own}
            for side, split in sides.items():
                cell = f"{judge} judge, {keep:.0%} of groups kept, {swap_s} s to swap"
                note = f"{split} ranks write, {RANKS - split} judge"
                what = (side, cell, str(RANKS), "serving", None, took[split] / full_s)
                rows.append(Row("partial", *what, "x full", "own setting", note, "simulated"))
    return rows


class Link:
    """The network of one process: first come, first served."""

    def __init__(self, bytes_per_s: float):
        self._bytes_per_s = bytes_per_s
        self._free = 0.0  # time at which it becomes free

    async def carry(self, size: float) -> None:
        now = asyncio.get_running_loop().time()
        self._free = max(self._free, now) + size / self._bytes_per_s
        await asyncio.sleep(self._free - now)


def step_s(
    constants: Constants, carried: Callable[[float], Any], media: float, dispatches: int
) -> float:
    """Return a step's seconds in full colocation. Media are `carried` at each of `dispatches`."""
    generate = SimulatedEngine.generate
    exchange = SimulatedWorld.exchange

    async def carry_and_generate(self, requests):
        if dispatches > 1:
            await carried(len(requests) * media)
        async for answer in generate(self, requests):
            yield answer

    async def carry_and_exchange(self, outgoing):
        stays = self.rank if dispatches == 1 else None
        moved = sum(len(parcel) for rank, parcel in outgoing.items() if rank != stays)
        await carried(max(1, dispatches - 2) * moved * media)
        return await exchange(self, outgoing)

    with (
        mock.patch.object(SimulatedEngine, "generate", carry_and_generate),
        mock.patch.object(SimulatedWorld, "exchange", carry_and_exchange),
    ):
        return simulate(constants, "32B", "full", 5).ended_s


def central(paper: Paper) -> list[Row]:
    """Return parallel / central step times, by MB per sample and rate of the central process."""
    network = paper.constants["h20"]["network"]
    sizes_mb = (15,) if paper.quick else (0.05, 1, 4, 15)
    rates = (0.3e9,) if paper.quick else (0.3e9, 1e9, 3e9)
    parallel_s = {}  # MB per sample -> seconds without a central process
    for mb in sizes_mb:
        parallel_s[mb] = step_s(
            paper.constants, lambda size: asyncio.sleep(size / network), mb * 1e6, 1
        )
    rows = []
    for rate, mb in itertools.product(rates, sizes_mb):
        central_s = step_s(paper.constants, Link(rate).carry, mb * 1e6, DISPATCHES)
        cell = f"{mb:g} MB a sample, a central process of {rate / 1e9:g} GB/s"
        what = ("parallel", cell, str(RANKS), "step", None, parallel_s[mb] / central_s)
        rows.append(Row("central", *what, "x central", "own setting", "", "simulated"))
    return rows


def h20(paper: Paper) -> list[Row]:
    """Return an engine's tokens/s, by the closed form of a decode step."""
    rows = []
    for point in paper.of("h20"):
        name, tp, batch, *_ = point.setting.split()
        size = int(batch)
        model = known(point, name, MODELS)
        decode = engine_of(paper.constants, model, int(tp.removeprefix("TP")))
        # an engine keeps room for whole answers; the other requests wait
        size = min(size, int(decode.kv_tokens // CONTEXTS["slowest"]))
        tokens_s = size / decode.seconds(1, size, CONTEXTS[point.metric] * size)
        trivial = saturated(paper, point)
        rows.append(paper.row(point, tokens_s, point.note, trivial=trivial))
    return rows


def saturated(paper: Paper, point: Point) -> float:
    """Return the trivial predictor: a fitted engine's tokens/s per GPU, of the same model or as many GPUs."""
    model, tp, *_ = point.setting.split()
    like = [each for each in paper.fitted("engine") if each.metric == point.metric]
    nearest = max(like, key=lambda each: (model in each.setting, tp in each.setting))
    return float(nearest.value) * int(point.gpus) / int(nearest.gpus)


def claims(paper: Paper) -> list[Row]:
    return [paper.left_out(point, "its set-up isn't known") for point in paper.of("claims")]


FIGURES = dict(claims=claims, partial=partial, central=central, h20=h20)


if __name__ == "__main__":
    every = "add partial colocation with 70 %% of the groups kept"
    sys.exit(command("wechat_yatt", __doc__, FIGURES, sys.argv[1:], every=every))
