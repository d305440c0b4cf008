"""WeChat-YATT (arXiv 2508.07970): when partial colocation beats full, and parallel controllers a central one.

    python papers/wechat_yatt.py [--figure partial] [--quick] [--write]

The paper names no model, length, batch or cluster, so its three percentages are lines on our maps and no
targets. Ours: 64 H20 devices, a 7B policy, 128 prompts of 8 answers, judges of 7B, 32B and 72B. The engines'
pace was fitted to throughputs that WeChat-YATT's repository gives for an H20 (figure h20).
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

from papers.tables import Constants, Paper, Row, command, known, values
from scheduling.costs import Device, Model, decode_of, passes_of
from simulation.cluster import Cluster, Lengths, Simulation, StepFacts, Workload
from simulation.engine import Moves, SimulatedEngine
from simulation.meetings import SimulatedWorld

RANKS, GRAIN, MEETING_S = 64, 16, 0.25
POLICY = Model(7.6e9, 28, 3584, 512)
JUDGES = {  # model, ranks of an engine
    "7B": (POLICY, 1),
    "32B": (Model(32.5e9, 64, 5120, 1024), 4),
    "72B": (Model(72.7e9, 80, 8192, 1024), 8),
}
MODELS = {"1.5B": Model(1.54e9, 28, 1536, 256), "32B": JUDGES["32B"][0]}
MODELS |= {"30B-A3B": Model(30.5e9, 48, 2048, 512, active=3.3e9)}
CONTEXTS = {"fastest": 100, "slowest": 2048}  # tokens: at an answer's begin, at its end
KEEPS, SWAPS_S, SPLITS = (1.0, 0.7, 0.5), (1, 20), (8, 16, 24, 32, 40)
PUBLISHED = (-0.241, -0.162)  # partial against full
# of a sample's media: generation, judging, reference, old log-probabilities, training
DISPATCHES = 5


def engine_of(constants: Constants, model: Model, tp: int):
    assumed, fitted = constants["assumed"], constants["engine"]
    rates = {name: fitted[name] for name in ("kv", "layer_s", "sequence_s")}
    device = Device(**values(constants["h20"]))
    return decode_of(
        model, device, tp, weights=assumed["weights"], prefill=assumed["prefill"], **rates
    )


def simulate(
    constants: Constants, judge: str, mode: str, swap_s: float, keep=1.0, steps=1, **settings: Any
) -> list[StepFacts]:
    """Steps of our workload. swap_s: a role sleeps and another wakes."""
    assumed, (model, tp) = constants["assumed"], JUDGES[judge]
    decode = {"rollout": engine_of(constants, POLICY, 1), "genrm": engine_of(constants, model, tp)}
    moves = dict.fromkeys(decode, Moves(swap_s / 2, swap_s / 2))
    actor = passes_of(POLICY, Device(**values(constants["h20"])), 1, mfu=assumed["mfu"], update=0.5)
    cluster = Cluster(decode, actor, moves=moves, grain=GRAIN, meeting_s=MEETING_S)
    lengths = Lengths(*assumed["answer"]), Lengths(*assumed["critique"])
    work = Workload(assumed["prompt"], *lengths, keep)
    sizes = dict(prompts_per_step=128, answers_per_prompt=8, genrm_tp=tp, steps=steps)
    return Simulation(mode, RANKS, work, cluster, **sizes | settings).run()


def partial_s(constants: Constants, judge: str, swap_s: float, keep: float, split: int) -> float:
    """Seconds of serving."""
    return simulate(constants, judge, "partial", swap_s, keep, rollout_ranks=split)[0].seconds[
        "serve"
    ]


def regime_of(change: float) -> str:
    """By the published range."""
    names = ((PUBLISHED[0], "gains more"), (PUBLISHED[1], "as published"), (0.0, "gains less"))
    return next((name for bound, name in names if change < bound), "full wins")


def partial(paper: Paper) -> list[Row]:
    """A cell is a judge, a keep rate and the seconds of a swap; partial in its best split, and in halves."""
    rows, cells, spreads = [], {}, [1.0]
    for judge, keep in [("32B", 1.0)] if paper.quick else itertools.product(JUDGES, KEEPS):
        splits = SPLITS[2:4] if paper.quick else SPLITS
        took = {s: partial_s(paper.constants, judge, SWAPS_S[0], keep, s) for s in splits}
        best, spread = min(took, key=took.__getitem__), max(took.values()) / min(took.values())
        spreads.append(spread)
        for swap_s in SWAPS_S[:1] if paper.quick else SWAPS_S:
            full_s = simulate(paper.constants, judge, "full", swap_s, keep)[0].seconds["serve"]
            for split in dict.fromkeys((best, RANKS // 2)):
                again = swap_s != SWAPS_S[0]
                own = (
                    partial_s(paper.constants, judge, swap_s, keep, split) if again else took[split]
                )
                cell = f"{judge} judge, keep {keep:g}, swap {swap_s} s, {split}|{RANKS - split}"
                ratio = own / full_s
                rows.append(
                    Row("partial", cell, None, ratio, "x full", "predicted", regime_of(ratio - 1))
                )
                if split == best:
                    cells[judge, keep, swap_s] = ratio
    return rows + decisive(cells, max(spreads))


def decisive(cells: dict[tuple, float], spread: float) -> list[Row]:
    """What decides: how far cells that differ in one thing alone are apart, at most. cells: best splits."""
    rows = [
        Row(
            "partial",
            "what decides: the split",
            None,
            spread,
            "x",
            "predicted",
            "seconds of partial",
        )
    ]
    for place, name in enumerate(("the judge", "the keep rate", "the swap")):
        alike = [
            max(b / a, a / b)
            for (x, a), (y, b) in itertools.combinations(cells.items(), 2)
            if all(
                (i == j) == (number != place)
                for number, (i, j) in enumerate(zip(x, y, strict=True))
            )
        ]
        if alike:
            rows.append(
                Row(
                    "partial", f"what decides: {name}", None, max(alike), "x", "predicted", "x full"
                )
            )
    return rows


def moving(paper: Paper) -> list[Row]:
    """--rebalance from halves, and --mode auto, with a 32B judge and swaps of 5 s."""
    if paper.quick:
        return []
    rows, how = [], (paper.constants, "32B")
    best = min(partial_s(*how, 5, 1.0, split) for split in SPLITS)
    best = min(best, simulate(*how, "full", 5)[0].seconds["serve"])
    for name, mode, settings in (
        ("rebalance", "partial", dict(rebalance=True)),
        ("auto", "auto", {}),
    ):
        steps = simulate(*how, mode, 5, steps=20, **settings)
        last = [step.seconds["serve"] for step in steps[-5:]]
        note = f"ends in {steps[-1].stats.split}; the best static one takes {best:.1f} s"
        ours = fmean(last) / best
        rows.append(
            Row("moving", f"{name}, steps 16 to 20", None, ours, "x best", "predicted", note)
        )
    return rows


class Link:
    """One process's way in and out: first come, first served."""

    def __init__(self, bytes_per_s: float):
        self._bytes_per_s, self._free = bytes_per_s, 0.0

    async def carry(self, size: float) -> None:
        now = asyncio.get_running_loop().time()
        self._free = max(self._free, now) + size / self._bytes_per_s
        await asyncio.sleep(self._free - now)


def step_s(
    constants: Constants, carried: Callable[[float], Any], media: float, dispatches: int
) -> float:
    """A step in full colocation whose samples' media are `carried` at each of so many dispatches."""
    generate, exchange = SimulatedEngine.generate, SimulatedWorld.exchange

    async def carry_and_generate(self, requests):
        if dispatches > 1:
            await carried(len(requests) * media)
        async for answer in generate(self, requests):
            yield answer

    async def carry_and_exchange(self, outgoing, senders):
        moved = sum(
            len(parcel) for rank, parcel in outgoing.items() if dispatches > 1 or rank != self.rank
        )
        await carried(max(1, dispatches - 2) * moved * media)
        return await exchange(self, outgoing, senders)

    with (
        mock.patch.object(SimulatedEngine, "generate", carry_and_generate),
        mock.patch.object(SimulatedWorld, "exchange", carry_and_exchange),
    ):
        return simulate(constants, "32B", "full", 5)[0].ended_s


def central(paper: Paper) -> list[Row]:
    """Parallel controllers against one that every sample's media pass: a scenario over its bytes and rate."""
    rows, network = [], paper.constants["h20"]["network"]
    for rate in (0.3e9,) if paper.quick else (0.3e9, 1e9, 3e9):
        for megabytes in (15,) if paper.quick else (0.05, 1, 4, 15):
            media = megabytes * 1e6
            ours = step_s(paper.constants, lambda size: asyncio.sleep(size / network), media, 1)
            theirs = step_s(paper.constants, Link(rate).carry, media, DISPATCHES)
            cell = f"{megabytes:g} MB a sample, one process passes on {rate / 1e9:g} GB/s"
            rows.append(Row("central", cell, None, ours / theirs, "x central", "predicted"))
    return rows


def h20(paper: Paper) -> list[Row]:
    """Tokens a second of an engine, by the closed form of a decode step."""
    rows = []
    for point in paper.of("h20"):
        name, tp, batch, *_ = point.setting.split()
        model, size = known(point, name, MODELS), int(batch)
        decode = engine_of(paper.constants, model, int(tp.removeprefix("TP")))
        context = CONTEXTS[point.metric]
        rows.append(
            paper.row(point, size / decode.seconds(1, size, context * size), note=point.note)
        )
    return rows


def claims(paper: Paper) -> list[Row]:
    return [
        paper.row(p, None, "not modelled", "set-up unknown: lines on maps")
        for p in paper.of("claims")
    ]


FIGURES = dict(claims=claims, partial=partial, moving=moving, central=central, h20=h20)


if __name__ == "__main__":
    sys.exit(command("wechat_yatt", __doc__, FIGURES, sys.argv[1:]))
