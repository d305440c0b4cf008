"""RLHFuse (arXiv 2409.13221): simulates what its two fusions gain, with the real controllers.

    python reproduce/papers/rlhfuse.py [--figure 9] [--quick] [--write]    everything, in five minutes

Figures 8 and 9 are `--mode fused --tail R` on simulated engines of 8 H100. Base is R = 0; where the paper
searches for the best R, so does this. The paper's inference (reference, reward and critic on each answer) is
one judge that takes the same time for every answer. A fused update gains as much as the product's schedule
does on the instance of table 3 for the two models. Layouts and lengths were fitted: rlhfuse.toml.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import NormalDist, fmean
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from extras.fused.tail import TAILS
from extras.pipelines import tables
from extras.pipelines.fused import fused
from extras.pipelines.tables import Pipe, Table, Task
from reproduce.papers.tables import (
    ROOT,
    Constants,
    Paper,
    Point,
    Row,
    command,
    known,
    power_law,
    values,
)
from reproduce.simulation.cluster import Cluster, Lengths, Simulation, Workload
from reproduce.simulation.costs import Decode, Device, Model, Passes, decode_of
from runtime.errors import UserError

INSTANCES = ROOT / "published" / "rlhfuse_table3.json"
QUICK = ("1024 33/65", "33B/13B 8/4 16/8")  # settings that --quick keeps
QUICK_TAILS = (0.2, 0.3)
REGRESSIONS = ("inference", "actor training", "critic training", "training")  # metrics
ANSWERS = 2  # per prompt; the product accepts no fewer
ORDERS = (
    4  # shuffles of the answers, for points that name a tail; a search over tails has time for one
)


class Setting(NamedTuple):
    most: int  # tokens in an answer
    actor: str  # billions of parameters
    critic: str
    tail: float | None = None
    # average over this many shuffles of the answers, since the rank with the longest one is random
    orders: int = 1


PAIR = Setting(1024, "33", "65")  # figure 9's fitted curve


def setting_of(point: Point) -> Setting:
    """Read a point's setting. Raises UserError if its form is wrong."""
    pattern = r"(\d+) (?=13/33|33/13|33/65|65/33)(\d\d)/(\d\d)(?: tail (0(?:\.\d+)?))?"
    match = re.fullmatch(pattern, point.setting)
    if not match:
        form = "`1024 33/65` or `1024 33/65 tail 0.2`"
        raise UserError(f"{point.where}: `{point.setting}` doesn't look like {form}")
    most, actor, critic, tail = match.groups()
    return Setting(int(most), actor, critic, tail and float(tail), ORDERS if tail else 1)


@dataclass(frozen=True)
class Quantiles(Lengths):
    """Lengths of a step's `count` answers: quantiles of a log-normal, which removes sampling noise."""

    count: int = 1

    def of(self, *text: int) -> int:
        """Return the tokens of (seed, prompt, index). An odd factor permutes any even count."""
        seed, prompt_id, index = text
        place = (197 + 66 * seed) * (ANSWERS * prompt_id + index) % self.count
        deviations = NormalDist().inv_cdf((place + 0.5) / self.count)
        return max(1, min(self.most, round(self.median * math.exp(self.sigma * deviations))))


def inference_s(constants: Constants, setting: Setting) -> float:
    """Return a batch's seconds on all devices: reference as the actor, reward model as the critic."""
    fitted = constants["inference"]
    models = constants["models"]
    params = models[setting.actor]["params"] + 2 * models[setting.critic]["params"]
    by_params = fitted["per_1e11_params"] * params / 1e11
    return fitted["once"] + by_params + fitted["per_1k_tokens"] * setting.most / 1024


def training_s(constants: Constants, model: str, most: int) -> float:
    """Return one model's seconds over a batch. More parameters also have more stages: hence the square."""
    fitted = constants["training"]
    params = constants["models"][model]["params"]
    by_params = fitted["once"] + fitted["per_1e20_params2"] * (params / 1e10) ** 2
    return by_params * (1 + fitted["per_1k_tokens"] * most / 1024)


def read_instances(path: Path) -> dict[str, list[Pipe]]:
    """Read instances by name from a file such as reproduce/papers/published/rlhfuse_table3.json."""
    found = {}
    for instance in json.loads(path.read_text()):
        rows = (row | {"ranks": tuple(row["ranks"])} for row in instance["pipes"])
        found[instance["name"]] = [Pipe(**row) for row in rows]
    return found


def gain(name: str, schedule: Callable[[list[Pipe]], Table] = fused) -> dict[str, float]:
    """Return a schedule's gain over one model after the other, on an instance of table 3."""
    pipes = read_instances(INSTANCES).get(name)
    if not pipes:
        raise UserError(f"`{name}` isn't an instance in {INSTANCES}")
    latency, memory, _ = tables.evaluate(pipes, schedule(pipes))
    # the other pipes are copies that run at the same time
    serial = sum(tables.bound([pipe]) for pipe in pipes[:2])
    return {"speed-up": serial / latency, "memory": memory / tables.base_memory(pipes)}


def greedy(pipes: list[Pipe]) -> Table:
    """Return the schedule that RLHFuse's annealing starts from: always the task that can start first.

    A smaller model's task must end before its rank could start one of the large model's. Backward goes first.
    """
    table = tables.empty_table(pipes)
    free = [0.0] * len(table)
    ends = {}
    done = Counter()  # (pipe, stage, backward) -> micro-batches
    total = 2 * sum(pipe.micro_batches * len(pipe.ranks) for pipe in pipes)
    while len(ends) < total:
        able = []
        least = {}  # rank -> first possible start of the large model's next task
        for number, pipe in enumerate(pipes):
            for (stage, rank), backward in product(enumerate(pipe.ranks), (True, False)):
                task = Task(number, stage, backward, done[number, stage, backward])
                before = tables.needs(pipes, task)
                if task.micro_batch == pipe.micro_batches or not ends.keys() >= {*before}:
                    continue
                start = max([free[rank], *(ends[each] for each in before)])
                end = start + (pipe.backward if backward else pipe.forward)
                if not number:
                    least[rank] = min(start, least.get(rank, math.inf))
                if not number or end <= least.get(rank, math.inf):
                    able.append((start, not backward, number, stage, task, rank, end))
        *_, task, rank, end = min(able)
        table[rank].append(task)
        free[rank] = ends[task] = end
        done[task[:3]] += 1
    return table


def speed_up(constants: Constants, setting: Setting) -> float:
    """Return the gain of fused training, with one sample per micro-batch and copies on all devices."""
    system = constants["system"]
    large, small = sorted((setting.actor, setting.critic), reverse=True)
    stages = [constants["stages"][model] for model in (large, small)]
    counts = [system["mini_batch"] * system["tp"] * each // system["gpus"] for each in stages]
    return gain("{}B/{}B {}/{} {}/{}".format(large, small, *stages, *counts))["speed-up"]


def cluster_of(constants: Constants, setting: Setting) -> Cluster:
    """Return the engines and trainers. A rank is one engine's devices. KV caches move with their answers."""
    system = constants["system"]
    grain = max(1, setting.most // 256)
    rollout = decode_of(
        Model(**constants["models"][setting.actor]),
        Device(**values(constants["device"])),
        system["tp"],
        prefill=math.inf,
        **values(constants["decode"]),
    )
    # section 4, m = Rt M / C: an engine's KV room C and a full answer's share M depend on the model
    model = Model(**constants["models"][setting.actor])
    room = (system["tp"] * constants["device"]["memory"] - model.bytes) / model.kv_bytes
    full = room / (system["prompt"] + setting.most)  # answers
    rollout = replace(rollout, kv_tokens=room, kept=max(1, int(constants["fusion"]["room"] * full)))
    judgement_s = inference_s(constants, setting) * system["gpus"] / system["tp"] / system["batch"]
    updates = system["batch"] / system["mini_batch"]
    return Cluster(
        decode=dict(rollout=rollout, genrm=Decode(0.0, judgement_s / grain, most=1)),
        actor=Passes(0.0, update=training_s(constants, setting.actor, setting.most) / updates),
        critic=Passes(0.0, update=training_s(constants, setting.critic, setting.most) / updates),
        speed_up=speed_up(constants, setting),
        grain=grain,
        meeting_s=setting.most / 10_000,
    )


def simulate(constants: Constants, setting: Setting) -> dict[str, float]:
    """Return the seconds of a step's stages. With a tail of 0 they run one after the other."""
    system = constants["system"]
    cluster = cluster_of(constants, setting)
    spread = (constants["fusion"]["median"], constants["lengths"]["sigma"])
    lengths = Quantiles(*spread, setting.most, system["batch"])
    critique = Lengths(cluster.grain, 0.0, cluster.grain)
    schedule = "fused" if setting.tail else "1f1b"
    how = dict(tail=setting.tail, schedule=schedule, algorithm=("ppo",), steps=1)
    how |= dict(prompts_per_step=system["batch"] // ANSWERS, answers_per_prompt=ANSWERS)
    how |= dict(updates_per_step=system["batch"] // system["mini_batch"])
    runs = []
    for seed in range(setting.orders):
        work = Workload(system["prompt"], lengths, critique, seed=seed)
        run = Simulation("fused", system["gpus"] // system["tp"], work, cluster, **how)
        (facts,) = run.run()
        written = max(engine.batch.busy_s for engine in run.engines["rollout"])
        runs.append((written, facts.stats.serve_s, facts.seconds["train"]))
    written, served, trained = map(fmean, zip(*runs, strict=True))
    return {
        "generation": written,
        "inference": served - written,
        "generation + inference": served,
        "actor training": training_s(constants, setting.actor, setting.most),
        "critic training": training_s(constants, setting.critic, setting.most),
        "training": trained,
        "throughput": system["batch"] / (served + trained) * (1 - constants["others"]["part"]),
    }


def fastest(steps: dict[Setting, dict], paper: Paper, point: Point) -> Setting:
    """Return the setting with its tail: 0 for Base, or the fastest of a few if none is named."""
    setting = setting_of(point)
    tails = QUICK_TAILS if paper.quick else TAILS
    if paper.quick:
        setting = setting._replace(orders=1)
    if setting.tail is not None:
        tails = (setting.tail,)
    if point.system == "Base":
        tails = (0.0,)
    tried = [setting._replace(tail=tail) for tail in tails]
    for each in tried:
        if each not in steps:
            steps[each] = simulate(paper.constants, each)
    return min(tried, key=lambda each: steps[each]["generation + inference"])


def trivial_of(paper: Paper) -> Callable[[Setting, bool], dict[str, float]]:
    """Return the trivial predictor of all stages, from the points that the constants were fitted on.

    Power laws in parameters and length, inference by length only. RLHFuse hides all of its inference, and
    trains 1.25 times as fast as Base. In figure 9 both pairs have one curve, scaled by Base's seconds.
    """
    of = paper.constants

    def size(setting: Setting, metric: str) -> tuple[float, int]:
        model = setting.critic if metric == "critic training" else setting.actor
        return of["models"][model]["params"], setting.most

    def fitted(table: str) -> list[tuple[Setting, str, float]]:
        return [(setting_of(p), p.metric, float(p.value)) for p in paper.fitted(table)]

    laws = {}
    for table in ("decode", "training"):
        laws[table] = power_law([(*size(at, metric), value) for at, metric, value in fitted(table)])
    curve = {at.tail: value for at, _, value in fitted("fusion")}

    def seconds(setting: Setting, is_fused: bool) -> dict[str, float]:
        found = {}
        for metric in ("actor training", "critic training"):
            found[metric] = laws["training"](*size(setting, metric))
        training = sum(found.values()) / (1.25 if is_fused else 1)
        found["generation"] = laws["decode"](*size(setting, "generation"))
        known = fitted("inference")
        found["inference"] = fmean(value for at, _, value in known if at.most == setting.most)
        serving = found["generation"] + (0 if is_fused else found["inference"])
        if is_fused and setting.tail is not None:
            of_pairs = [seconds(pair, False)["generation + inference"] for pair in (setting, PAIR)]
            serving = curve[setting.tail] * of_pairs[0] / of_pairs[1]
        step_s = (serving + training) / (1 - of["others"]["part"])
        found |= {"generation + inference": serving, "training": training}
        return found | {"throughput": of["system"]["batch"] / step_s}

    return seconds


def rows_of(figure: str, steps: dict[Setting, dict], paper: Paper) -> list[Row]:
    """Return the rows of a figure. steps: cache of simulated steps."""
    rows = []
    trivial = trivial_of(paper)
    for point in chosen(paper, figure):
        setting = fastest(steps, paper, point)
        seconds = known(point, point.metric, steps[setting])
        note = "" if point.system == "Base" else f"tail {setting.tail:g}"
        how = "regression" if point.metric in REGRESSIONS else "simulated"
        guess = trivial(setting_of(point), point.system == "RLHFuse")[point.metric]
        rows.append(paper.row(point, seconds, note, how, guess))
    return rows


def table_3(paper: Paper) -> list[Row]:
    """Return the gains of the product's schedule search. It bounds the memory but doesn't minimize it."""
    rows = []
    for point in chosen(paper, "table 3"):
        found = known(point, point.metric, gain(point.setting))
        trivial = gain(point.setting, greedy)[point.metric]
        rows.append(paper.row(point, found, point.note, "search", trivial))
    return rows


def chosen(paper: Paper, figure: str) -> list[Point]:
    return [p for p in paper.of(figure) if p.setting.startswith(QUICK if paper.quick else "")]


def figures() -> dict[str, Callable[[Paper], list[Row]]]:
    steps = {}  # simulated steps, which several figures use
    of_steps = {name: partial(rows_of, name, steps) for name in ("7", "8", "9")}
    return of_steps | {"table 3": table_3}


if __name__ == "__main__":
    sys.exit(command("rlhfuse", __doc__, figures(), sys.argv[1:]))
