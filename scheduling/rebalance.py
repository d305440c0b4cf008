"""--rebalance in partial mode: an engine moves to the busier role. Pure.

From a reader's notes on WeChat-YATT's withdrawn text; when an engine moves is ours. A split serves for
COOL_DOWN steps. Then the first rule that fits:

1. Another split of the history was faster: the run goes there. So a move that made steps slower is undone.
2. A role's engines have UNEVEN times as many requests in flight as the other's: it gets one of its engines,
   unless the history has that split.
3. The split stays.
"""

from statistics import fmean

from scheduling.measured import LEAST_GAIN, MOVES, Decision, Split, StepStats, newest_of_split

COOL_DOWN = 3  # steps to measure a split before the next move
UNEVEN = 1.1  # from here on a role is the busier one


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
        return Decision(now, f"{now} stays: both roles are as busy")
    if following in paces:
        return Decision(now, f"{now} stays: {busier} is busier, the next split isn't faster")
    return Decision(following, f"{now} -> {following}: {busier} is busier")


def pace(history: list[StepStats], split: Split) -> float:
    """Seconds of serving for each token of a mean answer, in the newest steps of a split.

    A step trains on as many answers in every split, however many more one writes in vain.
    """
    newest = [step for step in history if step.split == split][-COOL_DOWN:]
    tokens = sum(step.answer_tokens for step in newest)
    return sum(step.serve_s for step in newest) / max(1.0, tokens)


MOVES["partial"] = to_the_busier_role
