"""RLHFuse (arXiv 2409.13221): what its two fusions gain, by the same controllers on a virtual clock.

    python papers/rlhfuse.py [--figure 9] [--quick] [--write]    all in five minutes

Figures 8 and 9 are `--mode fused --tail R` on simulated engines of 8 H100; Base is R = 0, and where the paper
searches for the best R, so does this. What it calls inference (reference, reward and critic on each answer)
is one judge, who takes as long over every answer. A fused update gains what the product's own schedule does
on the instance of table 3 that belongs to the two models. Layouts and lengths were fitted: rlhfuse.toml.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import NormalDist, fmean
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from fused import pipelines as fused_pipelines
from fused.tail import TAILS
from papers.tables import ROOT, Constants, Paper, Point, Row, command, known, values
from runtime.errors import UserError
from scheduling import pipeline
from scheduling.pipeline import Pipe
from simulation.cluster import Cluster, Lengths, Simulation, Workload
from simulation.costs import Decode, Device, Model, Passes, decode_of

INSTANCES = ROOT / "published" / "rlhfuse_table3.json"
QUICK = ("1024 33/65", "33B/13B 8/4 16/8")  # settings that are left with --quick
QUICK_TAILS = (0.2, 0.3)
ANSWERS = 2  # of a prompt: fewer the product doesn't take
ORDERS = 4  # of the answers, where a point names its tail: else the search would take minutes


class Setting(NamedTuple):
    most: int  # tokens of an answer
    actor: str  # billions of parameters
    critic: str
    tail: float | None = None
    # seconds are the mean over so many orders of the answers: which rank has the longest is chance
    orders: int = 1


def setting_of(point: Point) -> Setting:
    """Read a point's setting. UserError for another form."""
    pattern = r"(\d+) (?=13/33|33/13|33/65|65/33)(\d\d)/(\d\d)(?: tail (0(?:\.\d+)?))?"
    match = re.fullmatch(pattern, point.setting)
    if not match:
        form = "`1024 33/65` or `1024 33/65 tail 0.2`"
        raise UserError(f"{point.where}: `{point.setting}` isn't as {form}")
    most, actor, critic, tail = match.groups()
    return Setting(int(most), actor, critic, tail and float(tail), ORDERS if tail else 1)


@dataclass(frozen=True)
class Quantiles(Lengths):
    """Lengths of the `count` answers of a step that are quantiles of the log-normal, so that none is luck."""

    count: int = 1

    def of(self, *text: int) -> int:
        """The tokens of (seed, prompt, index). An odd factor makes an order of any even count."""
        seed, prompt_id, index = text
        place = (197 + 66 * seed) * (ANSWERS * prompt_id + index) % self.count
        deviations = NormalDist().inv_cdf((place + 0.5) / self.count)
        return max(1, min(self.most, round(self.median * math.exp(self.sigma * deviations))))


def inference_s(constants: Constants, setting: Setting) -> float:
    """Seconds of a batch on all devices: a reference like the actor, a reward model and a critic alike."""
    fitted = constants["inference"]
    models = constants["models"]
    params = models[setting.actor]["params"] + 2 * models[setting.critic]["params"]
    by_params = fitted["per_1e11_params"] * params / 1e11
    return fitted["once"] + by_params + fitted["per_1k_tokens"] * setting.most / 1024


def training_s(constants: Constants, model: str, most: int) -> float:
    """Seconds of one model over a batch. More parameters are on more stages, too: hence the square."""
    fitted = constants["training"]
    params = constants["models"][model]["params"]
    by_params = fitted["once"] + fitted["per_1e20_params2"] * (params / 1e10) ** 2
    return by_params * (1 + fitted["per_1k_tokens"] * most / 1024)


def read_instances(path: Path) -> dict[str, list[Pipe]]:
    """The instances of a file such as papers/published/rlhfuse_table3.json, by name."""
    found = {}
    for instance in json.loads(path.read_text()):
        rows = (row | {"ranks": tuple(row["ranks"])} for row in instance["pipes"])
        found[instance["name"]] = [Pipe(**row) for row in rows]
    return found


def gain(name: str) -> dict[str, float]:
    """The gain of the product's fused schedule, on an instance of table 3, over one model after the other."""
    pipes = read_instances(INSTANCES).get(name)
    if not pipes:
        raise UserError(f"`{name}` is no instance of {INSTANCES}")
    latency, memory, _ = pipeline.evaluate(pipes, fused_pipelines.fused(pipes))
    # all other pipes are copies, which run at the same time
    serial = sum(pipeline.bound([pipe]) for pipe in pipes[:2])
    return {"speed-up": serial / latency, "memory": memory / pipeline.base_memory(pipes)}


def speed_up(constants: Constants, setting: Setting) -> float:
    """The gain of fused training: micro-batches of one sample, models copied to fill the devices."""
    system = constants["system"]
    large, small = sorted((setting.actor, setting.critic), reverse=True)
    stages = [constants["stages"][model] for model in (large, small)]
    counts = [system["mini_batch"] * system["tp"] * each // system["gpus"] for each in stages]
    return gain("{}B/{}B {}/{} {}/{}".format(large, small, *stages, *counts))["speed-up"]


def cluster_of(constants: Constants, setting: Setting) -> Cluster:
    """The engines and trainers; a rank is the devices of one engine. KV caches move with their answers."""
    system = constants["system"]
    grain = max(1, setting.most // 256)
    rollout = decode_of(
        Model(**constants["models"][setting.actor]),
        Device(**values(constants["device"])),
        system["tp"],
        prefill=math.inf,
        **values(constants["decode"]),
    )
    longest = system["prompt"] + setting.most + 8 * grain  # tokens, and some that `config_of` adds
    rollout = replace(rollout, kv_tokens=constants["fusion"]["at_once"] * longest)
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
    """Seconds of the stages of a step of the real controllers, which take turns if the tail is 0."""
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
    """The setting with its tail: 0 for Base, and the fastest of a few where none is named."""
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


def rows_of(figure: str, steps: dict[Setting, dict], paper: Paper) -> list[Row]:
    """The rows of a figure. steps: what was simulated so far."""
    rows = []
    for point in chosen(paper, figure):
        setting = fastest(steps, paper, point)
        seconds = known(point, point.metric, steps[setting])
        note = "" if point.system == "Base" else f"tail {setting.tail:g}"
        rows.append(paper.row(point, seconds, note=note))
    return rows


def table_3(paper: Paper) -> list[Row]:
    """The gains by the product's own search for a schedule, which bounds the memory: it isn't the least."""
    rows = []
    for point in chosen(paper, "table 3"):
        found = known(point, point.metric, gain(point.setting))
        rows.append(paper.row(point, found, "closed form", point.note))
    return rows


def chosen(paper: Paper, figure: str) -> list[Point]:
    return [p for p in paper.of(figure) if p.setting.startswith(QUICK if paper.quick else "")]


def figures() -> dict[str, Callable[[Paper], list[Row]]]:
    steps = {}  # that were simulated: several figures look at them
    of_steps = {name: partial(rows_of, name, steps) for name in ("7", "8", "9")}
    return of_steps | {"table 3": table_3}


if __name__ == "__main__":
    sys.exit(command("rlhfuse", __doc__, figures(), sys.argv[1:]))
