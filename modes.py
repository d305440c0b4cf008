"""Modes: how rollout and genrm share the engines' ranks while a step is served.

A mode is a row of MODES: the splits that it may use, and a short loop that serves a step.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from config import Config
from placement import make_placement
from rollout import (
    RolloutStep,
    cut_off,
    gather_finished_groups,
    generate,
    generate_and_judge,
    judge,
    partition,
    wait_for_all,
    wait_for_enough,
)
from runtime.errors import UserError
from runtime.hooks import added
from runtime.shutdown import Stopped
from scheduling.dynamic_sampling import FirstFinishedSampler, OrderedSampler
from scheduling.layout import Placement
from scheduling.measured import MOVES, Split, StepStats, histogram
from state import Controller, RolloutBatch


async def collect(c: Controller, step: int) -> RolloutBatch:
    """Serve a step, as an extra does if there is one for it (collective: ranks that serve)."""
    if not c.devices.serves:
        return RolloutBatch()
    for served in added("served"):
        return await served(c, step)
    return await serve(c)


async def serve(c: Controller) -> RolloutBatch:
    """Draw prompts, serve them, and replace groups that teach nothing (collective: ranks that serve).

    The first wave has `prompts_per_step` * `over_dispatch` prompts; up to `max_refill_waves` waves replace
    filtered groups. The batch is the first informative groups as drawn (as finished, if `over_dispatch` > 1).
    Unused prompts come first in the next step. A stop abandons the step, and all of its prompts come again.
    """
    config = c.config
    start = c.timeline.now()
    kind = FirstFinishedSampler if config.over_dispatch > 1 else OrderedSampler
    waves = dict(over_dispatch=config.over_dispatch, max_refills=c.algorithm.max_refill_waves)
    sampler = kind(config.prompts_per_step, c.state.groups_per_kept, **waves)
    step = RolloutStep(c, sampler)
    c.rewards.reset()
    failed, parsed = c.rewards.counts()
    try:
        with c.timeline.span("serve"):
            async with step.tasks:
                await MODES[c.devices.split.mode].serve(step)
                if sampler.num_in_flight:
                    await cut_off(c, step.tasks)
    except Stopped:
        step.without_media()
        c.prompts.carry_over(list(sampler.wave_of), list(step.groups.values()))
        # answers that will be continued keep their verdicts; others are judged again
        stays = c.rewards.counts()[1] if config.over_dispatch > 1 else parsed
        c.rewards.load_counts([(failed, stays)])
        raise
    finally:
        await c.rewards.cancel()
    samples = step.without_media()
    c.state.groups_per_kept = step.batch.groups_per_kept = sampler.updated_groups_per_kept()
    step.batch.latencies = c.rewards.latencies
    partition(step)
    c.environment.keep(c.prompts.groups)
    devices = c.devices
    step.batch.stats = StepStats(
        split=devices.split,
        rollout=devices.rollout.pop_stats(),
        genrm=devices.genrm.pop_stats(),
        waves=sampler.waves,
        serve_s=c.timeline.now() - start,
        swap_s=devices.swap_s,
        lengths=histogram(len(sample.response) for sample in samples if sample.is_finished),
    )
    return step.batch


async def generate_then_judge(step: RolloutStep) -> None:
    """Full colocation: rollout holds all ranks until a wave is generated, then genrm holds them."""
    c = step.c
    devices = c.devices
    while not step.is_over:
        unfinished = [p for p, count in step.unwritten.items() if count]  # with --over-dispatch
        drawn = await step.draw_prompts()
        unwritten = drawn + unfinished
        await devices.set_awake(rollout=devices.leads("rollout"))
        step.start(unwritten, generate)
        await wait_for_enough(step)
        await devices.set_awake(genrm=devices.leads("genrm"))
        step.start([p for p in unwritten if not step.unwritten[p]], judge)
        await wait_for_all(c, step.tasks)
        await gather_finished_groups(step)


async def judge_as_generated(step: RolloutStep) -> None:
    """Partial colocation: other ranks judge answers as they finish; a wave costs no swap."""
    devices = step.c.devices
    await devices.set_awake(devices.leads("rollout"), devices.leads("genrm"))
    while not step.is_over:
        step.start(await step.draw_prompts(), generate_and_judge)
        await step.tasks.poll()
        await gather_finished_groups(step)


def full_colocation(placement: Placement, config: Config) -> list[Split]:
    """Let rollout and genrm take turns on all ranks of engines. WeChat-YATT, full colocation."""
    ranks = len(placement.engines)
    return [Split("full", ranks, ranks)]


def partial_colocation(placement: Placement, config: Config) -> list[Split]:
    """Let the first S ranks write and the rest judge, for each S that splits no engine. WeChat-YATT."""
    ranks = len(placement.engines)
    cuts = range(placement.least_ranks, ranks, placement.least_ranks)
    return [Split("partial", cut, ranks - cut) for cut in cuts]


class Mode(NamedTuple):
    """The splits that a mode may use on the engines' ranks, and the loop that serves a step."""

    splits: Callable[[Placement, Config], list[Split]]
    # until step.is_over: draw prompts, wake engines, start tasks that write and judge, gather groups;
    # a draw comes after a gather, which needs judged groups
    serve: Callable[[RolloutStep], Awaitable[None]]


MODES = {  # --mode -> its row, which lay_out reads with the settings, and collect at each step
    "partial": Mode(partial_colocation, judge_as_generated),
    "full": Mode(full_colocation, generate_then_judge),
}


def lay_out(config: Config, world_size: int, on_machine: int = 0) -> tuple[Placement, list[Split]]:
    """Return the placement and the splits to use, the initial one first (pure, but for --model's config).

    Raises UserError if the mode is unknown, or if the ranks don't hold its engines.
    """
    placement = make_placement(config, world_size, on_machine)
    if config.mode not in MODES:
        raise UserError(f"--mode {config.mode} is unknown; choose one of {', '.join(MODES)}")
    if config.rebalance and config.mode not in MOVES:
        raise UserError(f"--rebalance: no rule moves the split of --mode {config.mode}")
    for choose in added("push_kind"):
        placement = choose(placement, config, on_machine)
    return placement, splits_of(placement, config)


def splits_of(placement: Placement, config: Config) -> list[Split]:
    """Return the splits to use, the initial one first (pure). Raises UserError if there is none."""
    if config.samples:
        return [Split(config.mode, 0, 0)]  # no rank has an engine
    splits = MODES[config.mode].splits(placement, config)
    ranks = len(placement.engines)
    judges = len(config.judge_models)
    if not judges:
        splits = [Split("partial", ranks, 0)]  # without a judge rollout has all ranks
    splits = [split for split in splits if placement.serves_all(split, judges)]
    if not splits:
        if placement.least_ranks > 1:
            raise UserError(
                f"--mode {config.mode} needs more ranks than {ranks} for a rollout engine of "
                f"{config.rollout_tp} and a genrm engine of {config.genrm_tp} for each judge "
                f"({judges}), on adjacent ranks that start at a multiple of {placement.least_ranks}"
            )
        raise UserError(
            f"--mode {config.mode} needs more ranks than {ranks} for a rollout engine and "
            f"a genrm engine for each judge ({judges})"
        )
    first = first_split(splits, config, ranks)
    others = [split for split in splits if split != first] if config.rebalance else []
    return [first, *others]


def first_split(splits: list[Split], config: Config, ranks: int) -> Split:
    """Return the split of --rollout-ranks (default: half, rounded up) or, on shared ranks, of --tail."""
    cuts = [split.rollout for split in splits if split.rollout + split.genrm <= ranks]
    if not cuts:
        return splits[0]  # full mode, or fused mode with --tail
    half = min(cuts, key=lambda cut: (abs(2 * cut - ranks), -cut))
    wanted = config.rollout_ranks or half
    for split in splits:
        if split.rollout == wanted:
            return split
    raise UserError(
        f"--rollout-ranks {wanted} leaves {ranks - wanted} of {ranks} ranks for genrm; "
        f"this run takes {', '.join(map(str, cuts))}"
    )
