"""RLHFuse (arXiv 2409.13221): what its two fusions gain, by the same controllers on a virtual clock.

Figures 8 and 9 are `--mode full` (Base) and `--mode fused --tail R` on simulated engines of 8 H100; where the
paper searches for the best tail, so does this. What it calls inference (reference, reward and critic on each
answer) is one judge here, who takes as long over every answer. A fused update gains what the product's own
schedule does on the instance of table 3 that belongs to the two models. Figure 7 follows from figure 8.
Layouts and lengths aren't published: what rlhfuse.toml says of them was fitted.
"""

from __future__ import annotations

import math
import re
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

from papers.tables import Constants, Paper, Point, Row, command, fitted_on
from scheduling import pipeline
from scheduling.fusion import TAILS
from simulation.cluster import Cluster, Lengths, Simulation, Workload
from simulation.costs import Decode, Device, Model, Passes, decode_of

INSTANCES = Path(__file__).parent.parent / "tests" / "rlhfuse_table3.json"
QUICK, QUICK_TAILS = ("1024 33/65", "33B/13B 8/4 16/8"), (0.2, 0.3)  # what is left with --quick
ANSWERS = 2  # of a prompt, at least, as the product has it
OTHERS = "another program, of which no times of its stages are published"
NOT_MODELLED = [
    Row("2", "an internal model", None, None, "", "not modelled", "its size, lengths and devices are unknown"),
    Row("7", "DeepSpeed-Chat", None, None, "", "not modelled", OTHERS),
    Row("7", "ReaLHF", None, None, "", "not modelled", OTHERS),
]


class Setting(NamedTuple):
    most: int  # tokens of an answer
    actor: str  # billions of parameters
    critic: str


def setting_of(point: Point) -> tuple[Setting, float | None]:
    """And its tail, if it has one. ValueError for another form."""
    if not (match := re.fullmatch(r"(\d+) (13|33|65)/(13|33|65)(?: tail (0(?:\.\d+)?))?", point.setting)):
        raise ValueError(f"{point.where}: `{point.setting}` isn't as `1024 33/65` or `1024 33/65 tail 0.2`")
    most, actor, critic, tail = match.groups()
    return Setting(int(most), actor, critic), tail and float(tail)


@dataclass(frozen=True)
class Quantiles(Lengths):
    """The `count` answers of a step are quantiles of the log-normal, in a fixed order: no lucky draw."""

    count: int = 1

    def of(self, *text: int) -> int:
        """Of (seed, prompt, index). 197: it makes an order of any even count that looks like none."""
        _, prompt_id, index = text
        place = 197 * (ANSWERS * prompt_id + index) % self.count
        tokens = self.median * math.exp(self.sigma * NormalDist().inv_cdf((place + 0.5) / self.count))
        return max(1, min(self.most, round(tokens)))


def inference_s(constants: Constants, setting: Setting) -> float:
    """Of a batch on all devices: a reference like the actor, a reward model and a critic of one size."""
    fitted, models = constants["inference"], constants["models"]
    params = models[setting.actor]["params"] + 2 * models[setting.critic]["params"]
    by_tokens = fitted["per_1k_tokens"] * setting.most / 1024
    return fitted["once"] + fitted["per_1e11_params"] * params / 1e11 + by_tokens


def training_s(constants: Constants, model: str, most: int) -> float:
    """Of one model over a batch. More parameters are on more stages, too: hence the square."""
    fitted, params = constants["training"], constants["models"][model]["params"]
    by_params = fitted["once"] + fitted["per_1e20_params2"] * (params / 1e10) ** 2
    return by_params * (1 + fitted["per_1k_tokens"] * most / 1024)


def gain(pipes: list[pipeline.Pipe]) -> tuple[float, float]:
    """Of the product's fused schedule: speed-up over one model after the other, memory over 1F1B's."""
    latency, memory, _ = pipeline.evaluate(pipes, pipeline.fused(pipes))
    serial = sum(pipeline.bound([pipe]) for pipe in pipes[:2])  # others are copies, at the same time
    return serial / latency, memory / pipeline.base_memory(pipes)


def speed_up(constants: Constants, setting: Setting) -> float:
    """Of fused training: micro-batches of one sample, as many copies of a model as there are devices for."""
    system, stages = constants["system"], constants["stages"]
    models = sorted((setting.actor, setting.critic), reverse=True)
    counts = [system["mini_batch"] * system["tp"] * stages[model] // system["gpus"] for model in models]
    name = "{}B/{}B {}/{} {}/{}".format(*models, *(stages[model] for model in models), *counts)
    return gain(pipeline.read_instances(str(INSTANCES))[name])[0]


def cluster_of(constants: Constants, setting: Setting) -> Cluster:
    """What serves and trains; a rank is the devices of one engine. KV caches move with their answers."""
    system, fitted, sizes = constants["system"], constants["decode"], constants["models"]
    device = Device(**{name: constants["device"][name] for name in Device._fields})
    how = dict(weights=fitted["weights"], layer_s=fitted["layer_s"], prefill=math.inf)
    at_once, model = constants["fusion"]["at_once"], Model(**sizes[setting.actor])
    judgement_s = inference_s(constants, setting) * system["gpus"] / system["tp"] / system["batch"]
    updates = system["batch"] / system["mini_batch"]
    actor, critic = (Passes(0.0, update=training_s(constants, m, setting.most) / updates) for m in setting[1:])
    rollout, grain = decode_of(model, device, system["tp"], at_once, **how), max(1, setting.most // 256)
    return Cluster(
        dict(rollout=rollout, genrm=Decode(0.0, judgement_s / grain)), actor, critic,
        speed_up=speed_up(constants, setting), grain=grain, meeting_s=setting.most / 10_000,
    )  # fmt: skip


class Step(NamedTuple):
    serve_s: float
    train_s: float
    tail: float
    generation_s: float  # that the busiest engine wrote


def simulate(constants: Constants, setting: Setting, tail: float) -> Step:
    """A step of the real controllers. Tail 0: stages take turns, and so do the models in training."""
    system, fitted, cluster = constants["system"], constants["fusion"], cluster_of(constants, setting)
    lengths = Quantiles(fitted["median"], constants["lengths"]["sigma"], setting.most, system["batch"])
    work = Workload(system["prompt"], lengths, Lengths(cluster.grain, 0.0, cluster.grain))
    how = dict(mode="fused", tail=tail, schedule="fused" if tail else "1f1b")
    how |= dict(prompts_per_step=system["batch"] // ANSWERS, answers_per_prompt=ANSWERS, algorithm=("ppo",), steps=1)
    how |= dict(updates_per_step=system["batch"] // system["mini_batch"])
    run = Simulation(ranks=system["gpus"] // system["tp"], workload=work, cluster=cluster, **how)
    (facts,) = run.run()
    generation_s = max(engine.batch.busy_s for engine in run.engines["rollout"])
    return Step(facts.stats.serve_s, facts.seconds["train"], tail, generation_s)


class Steps(dict[tuple[Setting, float], Step]):
    """Those that were simulated: several figures look at them."""

    def of(self, paper: Paper, point: Point) -> Step:
        """With the tail of its setting; Base has none, and else it is the best of a few."""
        setting, tail = setting_of(point)
        tails = QUICK_TAILS if paper.quick else TAILS
        tails = (0.0,) if point.system == "Base" else tails if tail is None else (tail,)
        for missing in [tail for tail in tails if (setting, tail) not in self]:
            self[setting, missing] = simulate(paper.constants, setting, missing)
        return min(self[setting, tail] for tail in tails)

    def rows(self, figure: str, paper: Paper) -> list[Row]:
        """Of figures 7 to 9. What follows from a fitted setting in figure 7 is fitted, too."""
        rows, fitted = [], " ".join(fitted_on(paper.constants))
        for point in chosen(paper, figure):
            step, (setting, _) = self.of(paper, point), setting_of(point)
            if point.metric not in (ours := seconds_of(paper.constants, setting, step)):
                raise ValueError(f"{point.where}: its metric is none of {', '.join(ours)}")
            follows = figure == "7" and f":{point.system}:{point.setting}@" in fitted
            kind, note = "fitted" if follows else "predicted", f"tail {step.tail:g}"
            row = paper.row(point, ours[point.metric], kind, note)
            stage = "training" if "training" in point.metric else "serving"
            rows.append(row._replace(figure=f"8 {point.system} {stage}") if figure == "8" else row)
        return rows + [row for row in NOT_MODELLED if row.figure == figure]


def seconds_of(constants: Constants, setting: Setting, step: Step) -> dict[str, float]:
    """By metric; the throughput in samples/s."""
    others = constants["others"]["part"]
    return {
        "generation": step.generation_s,
        "inference": step.serve_s - step.generation_s,
        "generation + inference": step.serve_s,
        "actor training": training_s(constants, setting.actor, setting.most),
        "critic training": training_s(constants, setting.critic, setting.most),
        "training": step.train_s,
        "throughput": constants["system"]["batch"] * (1 - others) / (step.serve_s + step.train_s),
    }


def table_3(paper: Paper) -> list[Row]:
    """By the product's own search for a schedule, which bounds the memory and doesn't minimise it."""
    instances, rows = pipeline.read_instances(str(INSTANCES)), []
    for point in chosen(paper, "table 3"):
        start = time.process_time()
        ours = dict(zip(("speed-up", "memory"), gain(instances[point.setting]), strict=True))[point.metric]
        rows.append(paper.row(point, ours, "form", f"in {time.process_time() - start:.1f} s"))
    return rows


def chosen(paper: Paper, figure: str) -> list[Point]:
    return [p for p in paper.of(figure) if not paper.quick or p.setting.startswith(QUICK)]


def main(arguments: list[str]) -> int:
    steps = Steps()
    figures = {name: partial(steps.rows, name) for name in ("2", "7", "8", "9")} | {"table 3": table_3}
    return command("rlhfuse", __doc__, figures, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
