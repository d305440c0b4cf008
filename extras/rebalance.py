"""--rebalance in partial mode: an engine moves to the busier role. Pure.

The idea is from a reader's notes on WeChat-YATT's withdrawn text; the timing of moves is ours. A split serves
for COOL_DOWN steps. Then the first rule that applies decides:

1. If an earlier split was faster, use it again. This also undoes moves that made steps slower.
2. If one role's engines are UNEVEN times as busy as the other's, it gets one of them, unless that was tried.
3. Otherwise keep the split.
"""

from statistics import fmean

from scheduling.measured import LEAST_GAIN, MOVES, Decision, Split, StepStats, newest_of_split

COOL_DOWN = 3  # steps to measure a split before the next move
UNEVEN = 1.1  # ratio of loads above which a role is busier


def to_the_busier_role(
    history: list[StepStats], splits: list[Split], capacity: int, tp: dict[str, int]
) -> Decision:
    now = history[-1].split
    newest = newest_of_split(history)[:COOL_DOWN]
    if len(newest) < COOL_DOWN:
        return Decision(now, f"{now} stays: measured for {len(newest)} of {COOL_DOWN} steps")
    measured = {step.split for step in history}
    paces = {split: pace(history, split) for split in splits if split in measured}
    best = min(paces, key=paces.__getitem__)
    gain = paces[now] / paces[best]
    if gain > 1 + LEAST_GAIN:
        return Decision(best, f"{now} -> {best}: it was {gain:.2f} times as fast")
    load = {}
    for role, ranks in tp.items():
        load[role] = fmean(step.engine_load(role, ranks) for step in newest)
    idler, busier = sorted(load, key=load.__getitem__)
    more = [s for s in splits if s != now and (s.rollout > now.rollout) == (busier == "rollout")]
    following = min(more, key=lambda split: abs(split.rollout - now.rollout), default=now)
    if load[busier] < UNEVEN * load[idler]:
        return Decision(now, f"{now} stays: both roles are equally busy")
    if following in paces:
        return Decision(now, f"{now} stays: {busier} is busier, the next split isn't faster")
    return Decision(following, f"{now} -> {following}: {busier} is busier")


def pace(history: list[StepStats], split: Split) -> float:
    """Return seconds of serving per token of a mean answer, in the newest steps of a split.

    Not per token generated: every split trains on equally many answers, but some waste more.
    """
    newest = [step for step in history if step.split == split][-COOL_DOWN:]
    tokens = sum(step.answer_tokens for step in newest)
    return sum(step.serve_s for step in newest) / max(1.0, tokens)


MOVES["partial"] = to_the_busier_role
