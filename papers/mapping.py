"""HybridFlow's mapping: which models share devices, and how each is cut, for the least seconds a step. Pure.

HybridFlow (arXiv 2409.19256), section 6. Algorithm 1 goes through all partitions of the models into sets
that share devices, and all numbers of devices for the sets; algorithm 2 finds a model's sizes on its devices.
A stage of the step takes what its models of one set take together, and of several sets the slowest.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import combinations, pairwise, product
from typing import NamedTuple

from runtime.errors import UserError
from simulation.costs import BF16_BYTES, Decode, Device, Model, Passes, decode_of, passes_of

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
    """The speeds that devices reach. A model that is `half` wide reaches half of `mfu`."""

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
    """The sizes of models that share devices, and what they come to."""

    held: float  # bytes of each device, throughout
    stages: tuple[float, ...]  # seconds of STAGES
    sizes: dict[str, Sizes]  # by role


class Mapping(NamedTuple):
    seconds: float  # of a step
    stages: tuple[float, ...]
    choices: tuple[Choice, ...]  # of each set


def passes(model: Model, sizes: Sizes, speeds: Speeds) -> Passes:
    """A trainer of these sizes."""
    pp, tp, dp, _ = sizes
    sent = model.updated_bytes(pp * tp, dp)
    update = speeds.update_s + sent / speeds.band(pp * tp * dp)
    mfu = speeds.mfu_of(model)
    return passes_of(model, speeds.device, pp * tp, mfu, tp, stages=pp, update=update)


def passes_s(model: Model, sizes: Sizes, task: Task, speeds: Speeds) -> tuple[float, float]:
    """Seconds to read a step's sequences, and to learn from them, a mini-batch after the other."""
    costs = passes(model, sizes, speeds)
    own = task.sequences / task.updates / sizes.dp
    ends = (sizes.pp - 1) / max(1.0, own)  # filling and draining, with a sequence a micro-batch
    reading = task.updates * own * costs.cost(task.trained) * (1 + ends)
    return reading, (1 + costs.backward) * reading + task.updates * costs.update


def engine(model: Model, parts: int, held: float, speeds: Speeds) -> Decode:
    """An engine beside what holds so many bytes of each device. UserError if that leaves no room."""
    memory = 1 - held / speeds.device.memory
    rates = dict(weights=speeds.hbm, kv=speeds.hbm, prefill=speeds.mfu_of(model))
    more = dict(layer_s=speeds.layer_s, reduce_s=speeds.reduce_s)
    return decode_of(model, speeds.device, parts, memory=memory, **rates, **more)


def generate_s(decode: Decode, sequences: int, task: Task) -> float:
    """Seconds of one engine, in as many rounds as its room makes necessary. UserError if one has none."""
    at_once = min(decode.most, int(decode.kv_tokens // (task.prompt + task.answer)))
    if not at_once:
        raise UserError("the KV cache has no room for a sequence")
    rounds = [*[at_once] * (sequences // at_once), sequences % at_once]
    reading = sequences * task.prompt * decode.prefill
    return reading + sum(decode.seconds(task.answer, n, n * task.prompt) for n in rounds if n)


def reshard_s(model: Model, sizes: Sizes, speeds: Speeds) -> float:
    """A rank receives what table 2 says; its engine's part comes to it through the host's memory."""
    part = 1 / sizes.parts
    ranks = sizes.pp * sizes.tp
    return model.bytes * ((part - 1 / ranks) / speeds.band(ranks) + part / speeds.device.host)


def choices_of(
    role: str, model: Model, devices: int, held: float, task: Task, speeds: Speeds
) -> Iterator[Choice]:
    """Algorithm 2, beside what others hold: shards stay in a machine, at most as many stages as machines."""
    learns = role.endswith(LEARNERS)
    most = max(1, devices // speeds.machine)
    for tp, pp in product(powers_of_2(speeds.machine), range(1, most + 1)):
        dp, rest = divmod(devices, pp * tp)
        if rest or model.layers % pp or model.cuts % tp or dp > task.sequences:
            continue
        # weights; of a learner gradients, and the optimizer's states, which its copies share
        own = held + model.params / (pp * tp) * (BF16_BYTES + learns * (4 + 12 / dp))
        reading, learning = passes_s(model, Sizes(pp, tp, dp), task, speeds)
        if role != "actor":
            if own <= speeds.device.memory:
                yield Choice(own, (0.0, reading, learns * learning), {role: Sizes(pp, tp, dp)})
            continue
        for parts in powers_of_2(tp):
            sizes = Sizes(pp, tp, dp, parts)
            with suppress(UserError):  # no room
                sequences = math.ceil(task.sequences / (devices // parts))
                serving = generate_s(engine(model, parts, own, speeds), sequences, task)
                generation = serving + reshard_s(model, sizes, speeds)
                yield Choice(own, (generation, 0.0, learning), {role: sizes})


@cache
def choice_of_set(models: tuple[tuple[str, Model], ...], devices: int, task: Task, speeds: Speeds):
    """The fastest Choice of models that share devices, None if they don't fit.

    The actor comes last and serves in what the others leave: their shards are tried at 1, 2, 4 ... at least.
    """
    in_order = sorted(models, key=lambda item: item[0] == "actor")
    found = []
    for least in powers_of_2(devices):
        whole = Choice(speeds.reserve, (0.0,) * len(STAGES), {})
        for role, model in in_order:
            fit = [*choices_of(role, model, devices, whole.held, task, speeds)]
            if role != "actor":
                fit = [each for each in fit if each.sizes[role].pp * each.sizes[role].tp >= least]
            if not fit:
                break
            best = min(fit, key=lambda choice: sum(choice.stages))
            stages = tuple(map(sum, zip(whole.stages, best.stages, strict=True)))
            whole = Choice(best.held, stages, whole.sizes | best.sizes)
        else:
            found.append(whole)
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
    unit = 1 << max(0, (devices // FINEST).bit_length() - 1)
    found = []
    for cuts in combinations(range(unit, devices, unit), len(placement) - 1):
        choices = []
        for roles, (first, end) in zip(placement, pairwise((0, *cuts, devices)), strict=True):
            own = tuple((role, models[role]) for role in roles)
            choices.append(choice_of_set(own, end - first, task, speeds))
        if None not in choices:
            stages = tuple(map(max, zip(*(choice.stages for choice in choices), strict=True)))
            found.append(Mapping(sum(stages), stages, tuple(choices)))
    return min(found, key=lambda mapping: mapping.seconds, default=None)


def search(models: dict[str, Model], devices: int, task: Task, speeds: Speeds) -> list[Mapping]:
    """Algorithm 1: the best of each placement that fits, the fastest first."""
    every = placements(tuple(models))
    found = [best_of(placement, models, devices, task, speeds) for placement in every]
    return sorted((mapping for mapping in found if mapping), key=lambda mapping: mapping.seconds)


def powers_of_2(most: int) -> list[int]:
    return [1 << n for n in range(most.bit_length())]
