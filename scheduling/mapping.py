"""HybridFlow's mapping: which models share devices, and how each is cut, for the least seconds a step. Pure.

HybridFlow (arXiv 2409.19256), section 6. Algorithm 1 goes through all partitions of the models into sets
that share devices, and all numbers of devices for the sets; algorithm 2 finds a model's sizes on its devices.
A stage of the step takes what its models of one set take together, and of several sets the slowest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import combinations, pairwise, product
from typing import NamedTuple

from config import UserError
from scheduling.costs import BF16_BYTES, Decode, Device, Model, Passes, decode_of, passes_of

STAGES = ("generation", "preparation", "training")
LEARNERS = ("actor", "critic")  # ends of the roles that are trained; all others only read
FINEST = 16  # parts of the devices that sets are dealt: more take minutes

Placement = tuple[tuple[str, ...], ...]  # sets of roles


class Task(NamedTuple):
    """A step's sequences, all of a length: engines read `prompt` tokens, passes `trained` of each."""

    sequences: int
    prompt: int
    answer: int
    trained: int
    updates: int = 1


class Speeds(NamedTuple):
    """What devices come to. A model that is `half` wide reaches half of `mfu`."""

    device: Device
    mfu: float = 0.5
    half: float = 0.0
    hbm: float = 0.9  # part of the bandwidth
    layer_s: float = 0.0  # in a decode step; this and the next as in decode_of
    reduce_s: float = 0.0
    update_s: float = 0.0  # of a model, beside what its copies send
    reserve: float = 5e9  # bytes of a device for everything else
    machine: int = 8  # devices that `link` connects

    def mfu_of(self, model: Model) -> float:
        return self.mfu * model.hidden / (model.hidden + self.half)

    def band(self, ranks: int) -> float:
        return self.device.link if ranks <= self.machine else self.device.network


class Sizes(NamedTuple):
    """Pipeline stages, shards of each, copies of all; of the actor also the parts of an engine (t_g)."""

    pp: int
    tp: int
    dp: int
    parts: int = 0


class Choice(NamedTuple):
    """Of models that share devices."""

    held: float  # bytes of each device, throughout
    stages: tuple[float, ...]  # seconds of STAGES
    sizes: dict[str, Sizes]  # by role


class Mapping(NamedTuple):
    seconds: float
    stages: tuple[float, ...]
    choices: tuple[Choice, ...]  # of each set


def passes(model: Model, sizes: Sizes, speeds: Speeds) -> Passes:
    """An update reduces float32 gradients and gathers the weights between copies."""
    pp, tp, dp, _ = sizes
    sent = (4 + BF16_BYTES) * model.params / (pp * tp) * (dp - 1) / dp
    update = speeds.update_s + sent / speeds.band(pp * tp * dp)
    return passes_of(
        model, speeds.device, pp * tp, speeds.mfu_of(model), tp, stages=pp, update=update
    )


def passes_s(model: Model, sizes: Sizes, task: Task, speeds: Speeds) -> tuple[float, float]:
    """To read a step's sequences, and to learn from them, a mini-batch after the other."""
    costs, own = passes(model, sizes, speeds), task.sequences / task.updates / sizes.dp
    ends = (sizes.pp - 1) / max(1.0, own)  # filling and draining, with a sequence a micro-batch
    reading = task.updates * own * costs.cost(task.trained) * (1 + ends)
    return reading, (1 + costs.backward) * reading + task.updates * costs.update


def engine(model: Model, parts: int, held: float, speeds: Speeds) -> Decode:
    """Beside what holds so many bytes of each device. UserError if that leaves no room."""
    how = dict(memory=1 - held / speeds.device.memory, weights=speeds.hbm, kv=speeds.hbm)
    how |= dict(prefill=speeds.mfu_of(model), layer_s=speeds.layer_s, reduce_s=speeds.reduce_s)
    return decode_of(model, speeds.device, parts, **how)


def generate_s(decode: Decode, sequences: int, task: Task) -> float:
    """Of one engine, in as many rounds as its room makes necessary. UserError if one finds none."""
    if not (at_once := min(decode.most, int(decode.kv_tokens // (task.prompt + task.answer)))):
        raise UserError("the KV cache has no room for a sequence")
    rounds = [*[at_once] * (sequences // at_once), sequences % at_once]
    reading = sequences * task.prompt * decode.prefill
    return reading + sum(decode.seconds(task.answer, n, n * task.prompt) for n in rounds if n)


def reshard_s(model: Model, sizes: Sizes, speeds: Speeds) -> float:
    """A rank receives what table 2 says; its engine's part comes to it through the host's memory."""
    part, ranks = 1 / sizes.parts, sizes.pp * sizes.tp
    return model.bytes * ((part - 1 / ranks) / speeds.band(ranks) + part / speeds.device.host)


def choices_of(
    role: str, model: Model, devices: int, held: float, task: Task, speeds: Speeds
) -> Iterator[Choice]:
    """Algorithm 2, beside what others hold: shards stay in a machine, at most as many stages as machines."""
    learns, most = role.endswith(LEARNERS), max(1, devices // speeds.machine)
    for tp, pp in product(powers_of_2(speeds.machine), range(1, most + 1)):
        dp, rest = divmod(devices, pp * tp)
        if rest or model.layers % pp or model.cuts % tp or dp > task.sequences:
            continue
        # weights; of a learner gradients, and the optimizer's states, which its copies share
        own = held + model.params / (pp * tp) * (BF16_BYTES + learns * (4 + 12 / dp))
        reading, learning = passes_s(model, Sizes(pp, tp, dp), task, speeds)
        if role != "actor" and own <= speeds.device.memory:
            yield Choice(own, (0.0, reading, learns * learning), {role: Sizes(pp, tp, dp)})
        for parts in powers_of_2(tp) if role == "actor" else ():
            sizes, engines = Sizes(pp, tp, dp, parts), devices // parts
            with suppress(UserError):  # no room
                decode = engine(model, parts, own, speeds)
                serving = generate_s(decode, math.ceil(task.sequences / engines), task)
                yield Choice(
                    own, (serving + reshard_s(model, sizes, speeds), 0.0, learning), {role: sizes}
                )


@cache
def choice_of_set(models: tuple[tuple[str, Model], ...], devices: int, task: Task, speeds: Speeds):
    """The fastest Choice of models that share devices, None if they don't fit.

    The actor comes last and serves in what the others leave: their shards are tried at 1, 2, 4 ... at least.
    """
    found = []
    for least in powers_of_2(devices):
        held, stages, sizes = speeds.reserve, (0.0,) * len(STAGES), {}
        for role, model in sorted(models, key=lambda item: item[0] == "actor"):
            every = choices_of(role, model, devices, held, task, speeds)
            cut = [
                c for c in every if role == "actor" or c.sizes[role].pp * c.sizes[role].tp >= least
            ]
            if cut:
                held, more, size = min(cut, key=lambda choice: sum(choice.stages))
                stages, sizes = tuple(map(sum, zip(stages, more, strict=True))), sizes | size
        found += [Choice(held, stages, sizes)] * (len(sizes) == len(models))
    return min(found, key=lambda choice: sum(choice.stages), default=None)


def placements(roles: tuple[str, ...]) -> Iterator[Placement]:
    """All partitions: 15 of four roles."""
    for smaller in placements(roles[1:]) if roles[1:] else [()]:
        yield (roles[:1], *smaller)
        for number, group in enumerate(smaller):
            yield (*smaller[:number], (roles[0], *group), *smaller[number + 1 :])


def best_of(
    placement: Placement, models: dict[str, Model], devices: int, task: Task, speeds: Speeds
):
    """The fastest Mapping of one placement, None if it doesn't fit. Algorithm 1, the inner loops."""
    sets, found = [tuple((role, models[role]) for role in roles) for roles in placement], []
    unit = 1 << max(0, (devices // FINEST).bit_length() - 1)
    for cuts in combinations(range(unit, devices, unit), len(sets) - 1):
        shares = zip(sets, pairwise((0, *cuts, devices)), strict=True)
        choices = [choice_of_set(own, end - first, task, speeds) for own, (first, end) in shares]
        if None not in choices:
            stages = tuple(map(max, zip(*(choice.stages for choice in choices), strict=True)))
            found.append(Mapping(sum(stages), stages, tuple(choices)))
    return min(found, key=lambda mapping: mapping.seconds, default=None)


def search(models: dict[str, Model], devices: int, task: Task, speeds: Speeds) -> list[Mapping]:
    """Algorithm 1: the best of each placement that fits, the fastest first."""
    every = placements(tuple(models))
    found = [best_of(placement, models, devices, task, speeds) for placement in every]
    return sorted((mapping for mapping in found if mapping), key=lambda mapping: mapping.seconds)


def as_text(mapping: Mapping) -> str:
    """Sizes as pp-tp-dp, the actor's with t_g; a bar parts sets."""
    stages = " + ".join(f"{name} {s:.3g}" for name, s in zip(STAGES, mapping.stages, strict=True))
    cuts = [
        ", ".join(
            f"{role} {'-'.join(str(n) for n in sizes if n)}" for role, sizes in choice.sizes.items()
        )
        for choice in mapping.choices
    ]
    return f"{mapping.seconds:.3g} s = {stages}: {' | '.join(cuts)}"


def powers_of_2(most: int) -> list[int]:
    return [1 << n for n in range(most.bit_length())]
