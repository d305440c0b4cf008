"""HybridFlow's mapping: which models share devices, and each model's sizes, for the fastest step. Pure.

HybridFlow (arXiv 2409.19256), section 6. Algorithm 1 tries all partitions of the models into sets that share
devices, and all numbers of devices for these sets. Algorithm 2 finds a model's sizes on its devices. In a
stage of the step, models of one set run one after the other; the slowest set decides the time.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import combinations, pairwise, product
from typing import NamedTuple

from reproduce.simulation.costs import (
    BF16_BYTES,
    Decode,
    Device,
    Model,
    Passes,
    decode_of,
    passes_of,
)
from runtime.errors import UserError

STAGES = ("generation", "preparation", "training")
LEARNERS = ("actor", "critic")  # suffixes of trained roles; the other roles only read
FINEST = 16  # parts into which devices are divided among sets; more would take minutes

Placement = tuple[tuple[str, ...], ...]  # sets of roles


class Task(NamedTuple):
    """A step's sequences, all equally long. Engines read `prompt` tokens of each, passes `trained`.

    answers: times that each prompt is answered and scored; only one of these is trained on.
    """

    sequences: int
    prompt: int
    answer: int
    trained: int
    updates: int = 1
    answers: int = 1


class Speeds(NamedTuple):
    """The speeds that devices reach. A model of hidden size `half` reaches half of `mfu`."""

    device: Device
    mfu: float = 0.5
    half: float = 0.0
    hbm: float = 0.9  # fraction of the bandwidth
    layer_s: float = 0.0  # in a decode step; see decode_of, also for reduce_s
    reduce_s: float = 0.0
    update_s: float = 0.0  # seconds of a model's update, without communication
    reserve: float = 5e9  # bytes of a device for everything else
    machine: int = 8  # devices connected by `link`

    def mfu_of(self, model: Model) -> float:
        return self.mfu * model.hidden / (model.hidden + self.half)

    def band(self, ranks: int) -> float:
        return self.device.link if ranks <= self.machine else self.device.network


class Sizes(NamedTuple):
    """Pipeline stages, tensor shards, copies; for the actor also parts of an engine (t_g)."""

    pp: int
    tp: int
    dp: int
    parts: int = 0


class Choice(NamedTuple):
    """Sizes of models that share devices, and their costs."""

    held: float  # bytes used on each device throughout
    stages: tuple[float, ...]  # seconds, in the order of STAGES
    sizes: dict[str, Sizes]  # role -> sizes


class Mapping(NamedTuple):
    seconds: float  # for a step
    stages: tuple[float, ...]
    choices: tuple[Choice, ...]  # one for each set


def passes(model: Model, sizes: Sizes, speeds: Speeds) -> Passes:
    """Return the costs of a trainer with these sizes."""
    pp, tp, dp, _ = sizes
    sent = model.updated_bytes(pp * tp, dp)
    update = speeds.update_s + sent / speeds.band(pp * tp * dp)
    mfu = speeds.mfu_of(model)
    return passes_of(model, speeds.device, pp * tp, mfu, tp, stages=pp, update=update)


def passes_s(model: Model, sizes: Sizes, task: Task, speeds: Speeds) -> tuple[float, float]:
    """Return the seconds to read a step's sequences, and to learn from all of its mini-batches."""
    costs = passes(model, sizes, speeds)
    # a mini-batch's, one per micro-batch
    own = math.ceil(task.sequences / task.updates / sizes.dp)
    ends = (sizes.pp - 1) / own  # filling and draining
    reading = task.updates * own * costs.cost(task.trained) * (1 + ends)
    return reading, (1 + costs.backward) * reading + task.updates * costs.update


def engine(model: Model, parts: int, held: float, speeds: Speeds) -> Decode:
    """Return an engine on devices with `held` bytes in use. Raises UserError if that leaves no room."""
    memory = 1 - held / speeds.device.memory
    rates = dict(weights=speeds.hbm, kv=speeds.hbm, prefill=speeds.mfu_of(model))
    more = dict(layer_s=speeds.layer_s, reduce_s=speeds.reduce_s)
    return decode_of(model, speeds.device, parts, memory=memory, **rates, **more)


def generate_s(decode: Decode, sequences: int, task: Task) -> float:
    """Return one engine's seconds, in as many rounds as its KV cache needs. Raises UserError without room."""
    at_once = min(decode.most, int(decode.kv_tokens // (task.prompt + task.answer)))
    if not at_once:
        raise UserError("the KV cache has no room for a sequence")
    rounds = [*[at_once] * (sequences // at_once), sequences % at_once]
    reading = sequences * task.prompt * decode.prefill
    return reading + sum(decode.seconds(task.answer, n, n * task.prompt) for n in rounds if n)


def reshard_s(model: Model, sizes: Sizes, speeds: Speeds) -> float:
    """Return the seconds to receive table 2's bytes, then to load the engine's part from host memory."""
    part = 1 / sizes.parts
    ranks = sizes.pp * sizes.tp
    return model.bytes * ((part - 1 / ranks) / speeds.band(ranks) + part / speeds.device.host)


def held_by(role: str, model: Model, sizes: Sizes) -> float:
    """Return a model's bytes on each device: weights; if it learns, gradients and optimizer states."""
    learns = role.endswith(LEARNERS)
    return model.params / (sizes.pp * sizes.tp) * (BF16_BYTES + learns * (4 + 12 / sizes.dp))


def choices_of(
    role: str, model: Model, devices: int, held: float, task: Task, speeds: Speeds
) -> Iterator[Choice]:
    """Yield a model's choices by algorithm 2. held: bytes that other models use on each device.

    Tensor shards stay within a machine, and there are at most as many stages as machines.
    """
    learns = role.endswith(LEARNERS)
    most = max(1, devices // speeds.machine)
    for tp, pp in product(powers_of_2(speeds.machine), range(1, most + 1)):
        dp, rest = divmod(devices, pp * tp)
        if rest or model.layers % pp or model.cuts % tp or dp > task.sequences:
            continue
        own = held + held_by(role, model, Sizes(pp, tp, dp))
        reading, learning = passes_s(model, Sizes(pp, tp, dp), task, speeds)
        if role != "actor":
            if role not in ("reference", *LEARNERS):
                reading *= task.answers
            if own <= speeds.device.memory:
                yield Choice(own, (0.0, reading, learns * learning), {role: Sizes(pp, tp, dp)})
            continue
        for parts in powers_of_2(tp):
            sizes = Sizes(pp, tp, dp, parts)
            with suppress(UserError):  # no room
                sequences = math.ceil(task.sequences / (devices // parts))
                serving = generate_s(engine(model, parts, own, speeds), sequences, task)
                generation = task.answers * serving + reshard_s(model, sizes, speeds)
                yield Choice(own, (generation, 0.0, learning), {role: sizes})


@cache
def choice_of_set(models: tuple[tuple[str, Model], ...], devices: int, task: Task, speeds: Speeds):
    """Return the fastest Choice of models that share devices, or None if they don't fit.

    The actor comes last and serves in the remaining memory. The other models are tried with at least 1, 2,
    4 ... parts.
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
    """Yield all partitions of the roles; four roles have 15."""
    for smaller in placements(roles[1:]) if roles[1:] else [()]:
        yield (roles[:1], *smaller)
        for number, group in enumerate(smaller):
            yield (*smaller[:number], (roles[0], *group), *smaller[number + 1 :])


def best_of(
    placement: Placement, models: dict[str, Model], devices: int, task: Task, speeds: Speeds
):
    """Return a placement's fastest Mapping, or None if it doesn't fit: algorithm 1's inner loops."""
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
    """Return the best Mapping of each placement that fits, fastest first: algorithm 1."""
    every = placements(tuple(models))
    found = [best_of(placement, models, devices, task, speeds) for placement in every]
    return sorted((mapping for mapping in found if mapping), key=lambda mapping: mapping.seconds)


def powers_of_2(most: int) -> list[int]:
    return [1 << n for n in range(most.bit_length())]
