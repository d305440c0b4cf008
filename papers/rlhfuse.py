"""RLHFuse (arXiv 2409.13221): what its two fusions gain, by the same controllers on a virtual clock.

Figures 8 and 9 are `--mode full` (Base) and `--mode fused --tail R` on simulated engines of 8 H100. What the
paper calls inference (reference, reward and critic, on every answer) is one judge here, whose pass over an
answer takes as long whatever its length. Where the paper searches for the best tail, so does this. A fused
update gains what the product's own schedule does on the instance of table 3 of these models. Figure 7 follows
from figure 8. Sizes, lengths and layouts that aren't published were fitted: see rlhfuse.toml.
"""

from __future__ import annotations

import math
import random
import sys
import time
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

from papers.tables import Paper, Point, Row, command
from scheduling import pipeline
from scheduling.fusion import TAILS
from simulation.cluster import Cluster, Lengths, Simulation, Workload
from simulation.costs import Decode, Device, Model, Passes, decode_of

INSTANCES = Path(__file__).parent.parent / "tests" / "rlhfuse_table3.json"
QUICK_TAILS = (0.2, 0.3)
QUICK = ("1024 33/65", "33B/13B 8/4 16/8")  # settings that are left with --quick
PASSES = 64  # parts in which a judge's engine takes turns between answers
NOT_MODELLED = {
    "DeepSpeed-Chat": "another program, of which no times of its stages are published",
    "ReaLHF": "another program, of which no times of its stages are published",
    "stages of an internal model": "its size, lengths, batch and devices aren't published",
}


class Setting(NamedTuple):
    """As the CSVs spell it: `1024 33/65`, or `1024 33/65 tail 0.2`."""

    most: int  # tokens of an answer
    actor: str  # billions of parameters
    critic: str

    @staticmethod
    def of(point: Point) -> Setting:
        most, pair = point.setting.split()[:2]
        return Setting(int(most), *pair.split("/"))


@dataclass(frozen=True)
class Quantiles(Lengths):
    """A step's `count` answers are the quantiles of the log-normal, in one random order: no draw is lucky."""

    count: int = 1

    def of(self, seed: int, prompt_id: int, index: int) -> int:
        place = shuffled(self.count)[prompt_id % self.count]
        drawn = NormalDist().inv_cdf((place + 0.5) / self.count)
        return max(1, min(self.most, round(self.median * math.exp(self.sigma * drawn))))


@lru_cache
def shuffled(count: int) -> list[int]:
    return random.Random(0).sample(range(count), count)


class Step(NamedTuple):
    serve_s: float
    train_s: float
    tail: float


def inference_s(constants: dict[str, Any], setting: Setting) -> float:
    """Of a batch on all devices: reference, reward and critic, which have the sizes of actor and critic."""
    fitted, sizes = constants["inference"], constants["models"]
    params = sizes[setting.actor]["params"] + 2 * sizes[setting.critic]["params"]
    return fitted["once"] + fitted["per_1e11_params"] * params / 1e11 + fitted["per_1k_tokens"] * setting.most / 1024


def training_s(constants: dict[str, Any], model: str, most: int) -> float:
    """Of one model over a batch. A larger one has more stages, too: hence the square."""
    fitted, params = constants["training"], constants["models"][model]["params"]
    return (fitted["once"] + fitted["square"] * (params / 1e10) ** 2) * (1 + fitted["per_1k_tokens"] * most / 1024)


def speed_up(pipes: list[pipeline.Pipe]) -> tuple[float, float]:
    """Of the product's fused schedule over one model after the other; its memory over 1F1B's."""
    latency, memory, _ = pipeline.evaluate(pipes, pipeline.fused(pipes))
    serial = sum(pipeline.bound([pipe]) for pipe in pipes[:2])  # a second copy of the critic runs beside it
    return serial / latency, memory / pipeline.base_memory(pipes)


def fused_training(constants: dict[str, Any], setting: Setting) -> float:
    """The speed-up on the instance of table 3 that follows from devices, stages and the mini-batch."""
    system, stages = constants["system"], constants["stages"]
    large, small = sorted((setting.actor, setting.critic), reverse=True)
    copies = system["gpus"] // system["tp"]  # of a stage: a micro-batch is one sample
    counts = [system["mini_batch"] * stages[model] // copies for model in (large, small)]
    name = f"{large}B/{small}B {stages[large]}/{stages[small]} {counts[0]}/{counts[1]}"
    return speed_up(pipeline.read_instances(str(INSTANCES))[name])[0]


def cluster_of(constants: dict[str, Any], setting: Setting, judged: bool) -> Cluster:
    """What serves and trains. A rank stands for the devices of one engine."""
    system, fitted = constants["system"], constants["decode"]
    engines, updates = system["gpus"] // system["tp"], system["batch"] // system["mini_batch"]
    model, device = Model(**constants["models"][setting.actor]), Device(**constants["device"])
    how = dict(weights=fitted["hbm"], kv=fitted["hbm"], layer_s=fitted["layer_s"], prefill=math.inf)
    each = judged * inference_s(constants, setting) * engines / system["batch"] / PASSES
    actor, critic = (
        Passes(0.0, update=training_s(constants, size, setting.most) / updates) for size in setting[1:]
    )
    return Cluster(
        dict(
            rollout=decode_of(model, device, system["tp"], constants["fusion"]["at_once"], **how),
            genrm=Decode(0.0, each, most=system["batch"]),
        ),
        actor, critic, speed_up=fused_training(constants, setting), grain=setting.most // 128,
        meeting_s=setting.most / 10_000,
    )  # fmt: skip


def simulate(constants: dict[str, Any], setting: Setting, tail: float, judged: bool = True) -> Step:
    """A step of the real controllers. tail 0: in turns, and both models are trained in turns."""
    system, cluster = constants["system"], cluster_of(constants, setting, judged)
    sigma, median = constants["lengths"]["sigma"], constants["fusion"]["median"]
    answers = Quantiles(median, sigma, setting.most, system["batch"])
    work = Workload(system["prompt"], answers, Lengths(PASSES, 0.0, PASSES))
    how = dict(mode="fused", tail=tail, schedule="fused") if tail else dict(mode="full")
    how |= dict(prompts_per_step=system["batch"], answers_per_prompt=1, algorithm=("ppo",), steps=1)
    how |= dict(updates_per_step=system["batch"] // system["mini_batch"])
    (facts,) = Simulation(
        ranks=system["gpus"] // system["tp"], workload=work, cluster=cluster, **how
    ).run()
    return Step(facts.stats.serve_s, facts.seconds["train"], tail)


@dataclass
class Tables:
    """The figures, of which several want the same simulated steps."""

    done: dict[tuple, Step] = field(default_factory=dict)

    def step(self, paper: Paper, *what: Any) -> Step:
        if what not in self.done:
            self.done[what] = simulate(paper.constants, *what)
        return self.done[what]

    def best(self, paper: Paper, setting: Setting) -> Step:
        """With the tail that the paper's search would find: of a few the one that is fastest."""
        return min(self.step(paper, setting, tail) for tail in (QUICK_TAILS if paper.quick else TAILS))

    def figure_8(self, paper: Paper) -> list[Row]:
        """Seconds of the stages; with --quick of one setting and two tails."""
        rows = []
        for point in chosen(paper, "8 Base", "8 serving", "8 training"):
            setting, note = Setting.of(point), ""
            if point.metric.endswith(" training"):
                size = setting.actor if point.metric.startswith("actor") else setting.critic
                ours = training_s(paper.constants, size, setting.most)
            elif point.system == "Base":
                ours = self.step(paper, setting, 0.0, False).serve_s
                if point.metric == "inference":
                    ours = self.step(paper, setting, 0.0).serve_s - ours
            else:
                best = self.best(paper, setting)
                ours, note = (best.train_s, "") if point.metric == "training" else (best.serve_s, f"tail {best.tail:g}")
            rows.append(paper.row(point, ours, note=note))
        return rows

    def figure_9(self, paper: Paper) -> list[Row]:
        """Over the tail."""
        points = chosen(paper, "9")
        tails = [float(point.setting.split()[-1]) for point in points]
        return [
            paper.row(point, self.step(paper, Setting.of(point), tail).serve_s)
            for point, tail in zip(points, tails, strict=True)
        ]

    def figure_7(self, paper: Paper) -> list[Row]:
        """Answers over the seconds of figure 8's stages. Base is fitted where these were."""
        rows, parts = [], " ".join(paper.constants["training"]["fitted_on"])
        for point in chosen(paper, "7"):
            setting, is_base = Setting.of(point), point.system == "Base"
            step = self.step(paper, setting, 0.0) if is_base else self.best(paper, setting)
            seconds = (step.serve_s + step.train_s) / (1 - paper.constants["others"]["part"])
            kind = "fitted" if is_base and f"Base:{point.setting}@" in parts else "predicted"
            rows.append(paper.row(point, paper.constants["system"]["batch"] / seconds, kind))
        missing = [Row("7", name, None, None, "", "not modelled", NOT_MODELLED[name]) for name in BASELINES]
        return rows + missing


def table_3(paper: Paper) -> list[Row]:
    """By the product's own search for a schedule, which only bounds the memory."""
    instances, rows, found = pipeline.read_instances(str(INSTANCES)), [], {}
    for point in chosen(paper, "table 3"):
        if point.setting not in found:
            start = time.process_time()
            found[point.setting] = speed_up(instances[point.setting]), time.process_time() - start
        (gain, memory), seconds = found[point.setting]
        ours = gain if point.metric == "speed-up" else memory
        rows.append(paper.row(point, ours, "form", f"found in {seconds:.1f} s"))
    return rows


def chosen(paper: Paper, *figures: str) -> list[Point]:
    points = [point for figure in figures for point in paper.of(figure)]
    return [point for point in points if not paper.quick or point.setting.startswith(QUICK)]


def main(arguments: list[str]) -> int:
    tables = Tables()
    figures = {"2": figure_2, "7": tables.figure_7, "8": tables.figure_8, "9": tables.figure_9, "table 3": table_3}
    return command("rlhfuse", __doc__, figures, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
