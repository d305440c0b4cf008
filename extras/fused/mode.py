"""`--mode fused`: rollout holds all ranks until few answers are left, then genrm holds most of them.

RLHFuse (arXiv 2409.13221), section 4. The decisions are in extras/fused/tail.py.
"""

from __future__ import annotations

from collections import Counter

from config import Config
from engines.pool import Call, Pool
from extras.fused.tail import TAILS, kept_engines, ranks_of_tail, token_latency
from modes import MODES, Mode
from rollout import RolloutStep, gather_finished_groups, generate_and_judge
from scheduling.layout import Placement
from scheduling.measured import Remaining, Split
from state import Controller


def inter_stage_fusion(placement: Placement, config: Config) -> list[Split]:
    """Return a split for each tail: 0 is like full mode, 1 like partial."""
    ranks = len(placement.engines)
    if ranks <= placement.least_ranks:
        return []
    return [Split("fused", ranks, ranks, tail) for tail in dict.fromkeys((config.tail, *TAILS))]


async def judge_beside_the_tail(step: RolloutStep) -> None:
    """Inter-stage fusion: rollout holds all ranks, then genrm holds most of them once few answers are left.

    Critiques are requested at once, and wait in the pool until judges wake. To move an answer, it is aborted,
    and another engine prefills the prompt and the tokens so far: KV caches don't move.
    """
    c = step.c
    rollout = c.devices.rollout
    latency = token_latency(c.state.history, rollout.role, c.config.rollout_tp)
    capacity = rollout.capacity
    while not step.is_over:
        step.start(await step.draw_prompts(), generate_and_judge)
        await step.tasks.poll()
        remaining, outstanding = await gather_finished_groups(step)
        if not step.is_over:
            keep = kept_engines(remaining.unwritten, latency, capacity)
            await follow_the_tail(c, remaining, keep, outstanding)


async def follow_the_tail(
    c: Controller, remaining: Remaining, keep: int, outstanding: Counter[int]
) -> None:
    """Divide the ranks by the answers that are left (collective: ranks that serve). See ranks_of_tail."""
    devices = c.devices
    placement = devices.placement
    tp = placement.rollout_tp
    awake = devices.rollout.awake
    held = tuple(sorted(rank for lead in awake for rank in placement.ranks_of("rollout", lead)))
    ranks = ranks_of_tail(
        devices.split.tail,
        rank_groups=placement.rank_groups,
        held=held,
        remaining=remaining,
        most_ranks=keep * tp,
        outstanding=outstanding,
        writers={engine.rank: engine.model for engine in devices.rollout.engines},
        judges={engine.rank: engine.model for engine in devices.genrm.engines},
    )
    if ranks != held:
        c.timeline.mark("tail", f"{len(ranks)}|{devices.split.rollout - len(ranks)}")
        rollout = tuple(sorted({*devices.leads("rollout")} & {*ranks}))
        genrm = tuple(sorted({*devices.leads("genrm")} - {*ranks}))
        await devices.set_awake(rollout, genrm, newest)


def newest(pool: Pool, staying: set[int], joining: set[int]) -> list[Call]:
    """Return this controller's newest calls on staying engines, those that the joining ones take over."""
    joins = Counter(engine.model for engine in pool.engines if engine.rank in joining)
    stays = Counter(engine.model for engine in pool.engines if engine.rank in staying)
    chosen = []
    for model, count in joins.items():
        calls = [call for call in pool.calls_on(staying) if call[0].model == model]
        part = count / (count + stays[model])
        # rounded so that the controllers' total is right even if each has few calls
        most = int(part * len(calls) + (pool.world.index + 0.5) / pool.world.size)
        chosen += calls[len(calls) - most :]
    return chosen


MODES["fused"] = Mode(inter_stage_fusion, judge_beside_the_tail)
