"""RLHFuse (arXiv 2409.13221): what its two fusions gain, by the same controllers on a virtual clock.

    python papers/rlhfuse.py [--figure 9] [--quick] [--write]    all in five minutes

Figures 8 and 9 are `--mode fused --tail R` on simulated engines of 8 H100; Base is R = 0, and where the paper
searches for the best R, so does this. What it calls inference (reference, reward and critic on each answer)
is one judge, who takes as long over every answer. A fused update gains what the product's own schedule does
on the instance of table 3 that belongs to the two models. Layouts and lengths were fitted: rlhfuse.toml.
"""

from __future__ import annotations

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

from config import UserError
from papers.tables import ROOT, Constants, Paper, Point, Row, command, known, values
from scheduling import pipeline
from scheduling.costs import Decode, Device, Model, Passes, decode_of
from scheduling.fusion import TAILS
from simulation.cluster import Cluster, Lengths, Simulation, Workload

INSTANCES = ROOT / "published" / "rlhfuse_table3.json"
QUICK, QUICK_TAILS = ("1024 33/65", "33B/13B 8/4 16/8"), (0.2, 0.3)  # what is left with --quick
ANSWERS = 2  # of a prompt: fewer the product doesn't take
ORDERS = 4  # of the answers, where a point names its tail: else the search would take minutes
OTHER, NO_SIZE = (
    "another program: no times of its stages are published",
    "nor size nor lengths are published",
)
NOT_MODELLED = {
    "2": {"an internal model": NO_SIZE},
    "7": {"DeepSpeed-Chat": OTHER, "ReaLHF": OTHER},
}


class Setting(NamedTuple):
    most: int  # tokens of an answer
    actor: str  # billions of parameters
    critic: str
    tail: float | None = None
    # of the answers, that seconds are the mean of: who writes the longest is chance
    orders: int = 1


def setting_of(point: Point) -> Setting:
    """UserError for another form."""
    pattern = r"(\d+) (?=13/33|33/13|33/65|65/33)(\d\d)/(\d\d)(?: tail (0(?:\.\d+)?))?"
    if not (match := re.fullmatch(pattern, point.setting)):
        raise UserError(
            f"{point.where}: `{point.setting}` isn't as `1024 33/65` or `1024 33/65 tail 0.2`"
        )
    most, actor, critic, tail = match.groups()
    return Setting(int(most), actor, critic, tail and float(tail), ORDERS if tail else 1)


@dataclass(frozen=True)
class Quantiles(Lengths):
    """The `count` answers of a step are quantiles of the log-normal: no lucky draw."""

    count: int = 1

    def of(self, *text: int) -> int:
        """Of (seed, prompt, index). An odd factor makes an order of any even count."""
        place = (197 + 66 * text[0]) * (ANSWERS * text[1] + text[2]) % self.count
        tokens = self.median * math.exp(
            self.sigma * NormalDist().inv_cdf((place + 0.5) / self.count)
        )
        return max(1, min(self.most, round(tokens)))


def inference_s(constants: Constants, setting: Setting) -> float:
    """Of a batch on all devices: a reference like the actor, a reward model and a critic of one size."""
    fitted, models = constants["inference"], constants["models"]
    params = models[setting.actor]["params"] + 2 * models[setting.critic]["params"]
    by_params = fitted["per_1e11_params"] * params / 1e11
    return fitted["once"] + by_params + fitted["per_1k_tokens"] * setting.most / 1024


def training_s(constants: Constants, model: str, most: int) -> float:
    """Of one model over a batch. More parameters are on more stages, too: hence the square."""
    fitted, params = constants["training"], constants["models"][model]["params"]
    by_params = fitted["once"] + fitted["per_1e20_params2"] * (params / 1e10) ** 2
    return by_params * (1 + fitted["per_1k_tokens"] * most / 1024)


def gain(name: str) -> tuple[float, float]:
    """Of the product's fused schedule: speed-up over one model after the other, memory over 1F1B's."""
    if not (pipes := pipeline.read_instances(str(INSTANCES)).get(name)):
        raise UserError(f"`{name}` is no instance of {INSTANCES}")
    latency, memory, _ = pipeline.evaluate(pipes, pipeline.fused(pipes))
    # others are copies, at the same time
    serial = sum(pipeline.bound([pipe]) for pipe in pipes[:2])
    return serial / latency, memory / pipeline.base_memory(pipes)


def speed_up(constants: Constants, setting: Setting) -> float:
    """Of fused training: micro-batches of one sample, as many copies of a model as there are devices for."""
    system, stages = constants["system"], constants["stages"]
    models = sorted((setting.actor, setting.critic), reverse=True)
    counts = [
        system["mini_batch"] * system["tp"] * stages[model] // system["gpus"] for model in models
    ]
    return gain(
        "{}B/{}B {}/{} {}/{}".format(*models, *(stages[model] for model in models), *counts)
    )[0]


def cluster_of(constants: Constants, setting: Setting) -> Cluster:
    """What serves and trains; a rank is the devices of one engine. KV caches move with their answers."""
    system, fitted = constants["system"], constants["decode"]
    model = constants["models"][setting.actor]
    device = Device(**values(constants["device"]))
    how = dict(weights=fitted["weights"], layer_s=fitted["layer_s"], prefill=math.inf)
    rollout = decode_of(Model(**model), device, system["tp"], **how)
    judgement_s = inference_s(constants, setting) * system["gpus"] / system["tp"] / system["batch"]
    updates, grain = system["batch"] / system["mini_batch"], max(1, setting.most // 256)
    longest = system["prompt"] + setting.most + 8 * grain  # tokens, and some that `config_of` adds
    seconds = [
        training_s(constants, model, setting.most) for model in (setting.actor, setting.critic)
    ]
    rollout = replace(rollout, kv_tokens=constants["fusion"]["at_once"] * longest)
    engines = dict(rollout=rollout, genrm=Decode(0.0, judgement_s / grain))
    passes = (Passes(0.0, update=each_s / updates) for each_s in seconds)
    rest = dict(speed_up=speed_up(constants, setting), grain=grain, meeting_s=setting.most / 10_000)
    return Cluster(engines, *passes, **rest)


def simulate(constants: Constants, setting: Setting) -> dict[str, float]:
    """Seconds of the stages of a step of the real controllers, which take turns if the tail is 0."""
    system, fitted = constants["system"], constants["fusion"]
    cluster = cluster_of(constants, setting)
    lengths = Quantiles(
        fitted["median"], constants["lengths"]["sigma"], setting.most, system["batch"]
    )
    how = dict(
        tail=setting.tail, schedule="fused" if setting.tail else "1f1b", algorithm=("ppo",), steps=1
    )
    how |= dict(
        updates_per_step=system["batch"] // system["mini_batch"], answers_per_prompt=ANSWERS
    )
    ranks, prompts, runs = system["gpus"] // system["tp"], system["batch"] // ANSWERS, []
    for seed in range(setting.orders):
        work = Workload(
            system["prompt"], lengths, Lengths(cluster.grain, 0.0, cluster.grain), seed=seed
        )
        run = Simulation("fused", ranks, work, cluster, prompts_per_step=prompts, **how)
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
    """With the tail of its setting; Base has none, and else it is the best of a few."""
    setting, tails = setting_of(point), QUICK_TAILS if paper.quick else TAILS
    setting = setting._replace(orders=1) if paper.quick else setting
    tails = tails if setting.tail is None else (setting.tail,)
    tried = [setting._replace(tail=tail) for tail in ((0.0,) if point.system == "Base" else tails)]
    steps |= {each: simulate(paper.constants, each) for each in tried if each not in steps}
    return min(tried, key=lambda each: steps[each]["generation + inference"])


def rows_of(figure: str, steps: dict[Setting, dict], paper: Paper) -> list[Row]:
    rows = []
    for point in chosen(paper, figure):
        ours = steps[setting := fastest(steps, paper, point)]
        seconds = known(point, point.metric, ours)
        stage = f" {point.system} {'training' if 'training' in point.metric else 'serving'}"
        row = paper.row(point, seconds, note=f"tail {setting.tail:g}" * (point.system != "Base"))
        rows.append(row._replace(figure=figure + stage * (figure == "8")))
    missing = NOT_MODELLED.get(figure, {}).items()
    return rows + [Row(figure, name, None, None, "", "not modelled", why) for name, why in missing]


def table_3(paper: Paper) -> list[Row]:
    """By the product's own search for a schedule, which bounds the memory and doesn't minimise it."""
    metrics = ("speed-up", "memory")
    return [
        paper.row(p, gain(p.setting)[metrics.index(p.metric)], "form")
        for p in chosen(paper, "table 3")
    ]


def chosen(paper: Paper, figure: str) -> list[Point]:
    return [p for p in paper.of(figure) if p.setting.startswith(QUICK if paper.quick else "")]


def figures() -> dict[str, Callable[[Paper], list[Row]]]:
    steps = {}  # that were simulated: several figures look at them
    return {name: partial(rows_of, name, steps) for name in ("2", "7", "8", "9")} | {
        "table 3": table_3
    }


if __name__ == "__main__":
    sys.exit(command("rlhfuse", __doc__, figures(), sys.argv[1:]))
