"""HybridFlow (arXiv 2409.19256): compares figures 9 to 16 and table 2 with closed forms.

    python reproduce/papers/hybridflow.py                                       everything, in a minute
    python reproduce/papers/hybridflow.py --figure 9 11 --published FILE.csv    other points with the same
    columns

Throughputs are those of reproduce/papers/mapping.py's placements and sizes. They follow HybridFlow's order:
answers are scored while reference and critic read them. This program's controllers score them earlier; with
HybridFlow's order they take as long (reproduce/bench/hybridflow_controllers.py).
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from reproduce.papers import mapping
from reproduce.papers.mapping import Mapping, Placement, Sizes, Speeds, Task
from reproduce.papers.tables import Paper, Point, Row, command, known, power_law, values
from reproduce.simulation.costs import Device, Model
from runtime.errors import UserError

PPO = ("actor", "critic", "reference", "reward")
SAFE = (*PPO, "cost")
REMAX = ("actor", "reference", "reward")
PLACEMENTS = {
    "colocate": (PPO,),
    "split": (("actor", "reference"), ("critic", "reward")),
    "standalone": tuple((role,) for role in PPO),
    "HybridFlow": (),  # the search chooses
}
SEARCHED = {"HybridFlow": ()}
SYSTEMS = ("DS-Chat", "HybridFlow-V", "HybridFlow")  # in table 2
SETTING_OF_TABLE_2 = r"p=([1-9]\d*) t=([1-9]\d*) d=([1-9]\d*) t_g=([1-9]\d*)"
NO_ROOM = "reproduce/papers/mapping.py finds too little memory for it"
OTHER = "another program; the times of its stages aren't published"


class Cost(NamedTuple):
    """The cost of resharding for a rank, in fractions of the model's bytes M."""

    received: Fraction
    peak: Fraction  # generation weights and the buffers that they are built from
    redundant: Fraction  # its training shard, if its generation part doesn't include that


def table_2(pp: int, tp: int, copies: int, parts: int) -> dict[str, Cost]:
    """Compute table 2 for training in `copies` of `pp` stages with `tp` shards, and engines of `parts`.

    Assumes equal stages, and that tensor parallelism splits every tensor. DeepSpeed-Chat gathers the model
    over all ranks, HybridFlow-V over each model-parallel group.
    """
    part = Fraction(1, parts)
    shard = Fraction(1, pp * tp)
    return {
        "DS-Chat": Cost(1 - shard / copies, Fraction(1), shard / copies),
        "HybridFlow-V": Cost(1 - shard, Fraction(1), shard),
        "HybridFlow": Cost(part - shard, part, Fraction(0)),
    }


class Setting(NamedTuple):
    """A point's setting, in the order of the arguments in reproduce/papers/mapping.py. models: role ->
    model."""

    models: dict[str, Model]
    gpus: int
    task: Task
    speeds: Speeds


def setting_of(paper: Paper, point: Point, roles: tuple[str, ...] = PPO) -> Setting:
    """Read a point's setting. Its first word is a model, or ACTOR+CRITIC.

    Raises UserError for an unknown model or number of GPUs.
    """
    of = {name: values(table) for name, table in paper.constants.items()}
    first, _, second = point.setting.partition(" ")[0].partition("+")
    names = {role: first if role in ("actor", "reference") else second or first for role in roles}
    models = {role: Model(*known(point, name, of["models"])) for role, name in names.items()}
    if not point.gpus.isdecimal() or not int(point.gpus):
        raise UserError(f"{point.where}: {point.gpus} isn't a number of GPUs")
    generation = of["generation"]
    task = Task(prompt=generation.pop("prompt"), **of["task"], answers=1 + (roles == REMAX))
    device = Device(**of["device"], **of["transition"])
    speeds = Speeds(device, **of["speeds"], **of["compute"], **generation)
    return Setting(models, int(point.gpus), task, speeds)


def asked(paper: Paper, figure: str, systems: Iterable[str]) -> list[Point]:
    """Return the points of these systems."""
    return [point for point in paper.of(figure) if point.system in systems]


def not_modelled(paper: Paper, figure: str, but: Iterable[str] = ()) -> list[Row]:
    """Return `not modelled` rows for all systems except `but`."""
    points = [point for point in paper.of(figure) if point.system not in but]
    return [paper.left_out(point, OTHER) for point in points]


def found_for(placement: Placement, at: Setting) -> Mapping | None:
    """Return the fastest Mapping of a placement, or of all placements; None if nothing fits."""
    if placement:
        return mapping.best_of(placement, *at)
    return next(iter(mapping.search(*at)), None)


def mean_params(models: dict[str, Model]) -> float:
    return fmean(model.params for model in models.values())


def scaling_law(paper: Paper) -> Callable[..., float]:
    """Return the trivial predictor: tokens/s by GPUs and parameters, from the points of `compute`."""
    points = [(setting_of(paper, point), float(point.value)) for point in paper.fitted("compute")]
    return power_law([(at.gpus, mean_params(at.models), value) for at, value in points])


def throughput(
    paper: Paper, figure: str, placements: dict[str, Placement], roles: tuple[str, ...] = PPO
) -> list[Row]:
    """Return the rows of a figure in tokens/s. Placement () is the search's choice."""
    rows = []
    law = scaling_law(paper)
    for point in asked(paper, figure, placements):
        placement = placements[point.system]
        at = setting_of(paper, point, sum(placement, ()) or roles)
        found = found_for(placement, at)
        if not found:
            rows.append(paper.left_out(point, NO_ROOM))
            continue
        tokens_s = at.task.sequences * at.task.trained / found.seconds
        rows.append(paper.row(point, tokens_s, trivial=law(at.gpus, mean_params(at.models))))
    return rows + not_modelled(paper, figure, but=placements)


def transitions(paper: Paper) -> list[Row]:
    """Return the rows of figure 14, in seconds: table 2's volumes, then an engine's part from the host."""
    rows = []
    fitted = {point.setting: float(point.value) for point in paper.fitted("transition")}
    for point in asked(paper, "14", SYSTEMS):
        models, gpus, _, speeds = setting_of(paper, point)
        pp, tp, parts = known(point, point.setting, values(paper.constants["sizes"]))
        if gpus % (pp * tp):
            raise UserError(f"{point.where}: {gpus} GPUs can't be divided into {pp} x {tp} parts")
        gathering = gpus if point.system == "DS-Chat" else pp * tp
        cost = table_2(pp, tp, gpus // (pp * tp), parts)[point.system]
        seconds = float(cost.received) / speeds.band(gathering) + 1 / parts / speeds.device.host
        seconds *= models["actor"].bytes
        rows.append(paper.row(point, seconds, trivial=fitted.get(point.setting)))
    return rows + not_modelled(paper, "14", but=SYSTEMS)


def generation(paper: Paper) -> list[Row]:
    """Return figure 15's rows, on which the engine's constants were fitted. All models share the GPUs."""
    rows = []
    for point in asked(paper, "15", ("HybridFlow",)):
        models, gpus, task, speeds = setting_of(paper, point)
        pp, tp, _ = known(point, point.setting.split()[0], values(paper.constants["sizes"]))
        parts = int(point.setting.rpartition("=")[2])
        sizes = Sizes(pp, tp, gpus // (pp * tp))
        held = speeds.reserve + sum(mapping.held_by(*each, sizes) for each in models.items())
        decode = mapping.engine(models["actor"], parts, held, speeds)
        seconds = mapping.generate_s(decode, math.ceil(task.sequences * parts / gpus), task)
        rows.append(paper.row(point, seconds))
    return rows


def rows_of_table_2(paper: Paper) -> list[Row]:
    """Return the rows of table 2 from its closed form."""
    rows = []
    for point in asked(paper, "table 2", SYSTEMS):
        sizes = re.fullmatch(SETTING_OF_TABLE_2, point.setting)
        if not sizes:
            raise UserError(f"{point.where}: its setting must look like `p=1 t=8 d=2 t_g=2`")
        cost = table_2(*map(int, sizes.groups()))[point.system]
        part = float(known(point, point.metric, cost._asdict()))
        rows.append(paper.row(point, part))
    return rows + not_modelled(paper, "table 2", but=SYSTEMS)


FIGURES = {
    # section 8.2: HybridFlow's bars have the placement that its search finds
    "9": partial(throughput, figure="9", placements=SEARCHED),
    "10": partial(throughput, figure="10", placements=SEARCHED, roles=REMAX),
    "11": partial(throughput, figure="11", placements=SEARCHED, roles=SAFE),
    "12": partial(throughput, figure="12", placements=PLACEMENTS),
    "13": partial(throughput, figure="13", placements=PLACEMENTS),
    "14": transitions,
    "15": generation,
    "16": partial(not_modelled, figure="16"),
    "table 2": rows_of_table_2,
}

if __name__ == "__main__":
    sys.exit(command("hybridflow", __doc__, FIGURES, sys.argv[1:]))
