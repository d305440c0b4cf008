"""nanoYATT's side of vs_trl.py: the plain run.py program with a rule instead of a judge, measured.

    torchrun --nproc-per-node 2 bench/nano_rule.py --measure DIR --launched SECONDS [run.py's settings]

Engines, actor and loop are the project's own. Three things differ, to match what TRL does: rollout holds all ranks and nobody
holds genrm, every group is trained on (no dynamic sampling), and there is no evaluation.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from meter import Meter

import controller
import placement
import rollout
import run
from reporting import timeline

SPANS = ("serve", "rollout", "train", "switch", "sync")


class RuleJudge:
    """Judge's interface, without engines: reward 1 for the exact answer."""

    def __init__(self, judge):
        self.final_answer = judge.final_answer
        self.failed, self.parsed = [0], [0]  # of one judge
        self.latencies: list[float] = []
        self.timeouts = 0

    def forget(self) -> None:
        """There is nothing to forget."""

    async def cancel(self) -> None:
        """There is nothing to cancel."""

    async def judge(self, sample, pool) -> None:
        sample.verdict = self.final_answer(sample) == sample.answer_key
        sample.reward = float(sample.verdict)
        self.parsed[0] += 1


class MeasuredReport:
    """The run's own report, with a row for the meter after each step."""

    def __init__(self, report, meter: Meter):
        self.report, self.meter = report, meter
        self.last = meter.mark()

    def note(self, text: str) -> None:
        self.report.note(text)

    async def step(self, step: int, served, samples: list, stats: dict[str, float], job) -> None:
        spans = list(job.timeline.spans)
        await self.report.step(step, served, samples, stats, job)
        now, seconds = self.meter.mark(), {name: timeline.seconds(spans, name) for name in SPANS}
        answers = served.kept
        facts = {"step": self.last.to(now), "tokens": sum(len(s.response) for s in answers), "answers": len(answers)}
        rewards = {"reward": sum(s.reward for s in answers), "prompt_tokens": sum(len(s.prompt) for s in answers)}
        self.meter.rows[-1] |= facts | rewards | {"update_s": seconds["train"], "spans": seconds}
        self.last = now


class RolloutOnly(placement.Plan):
    """Nobody holds genrm."""

    def __str__(self) -> str:
        return "rollout and actor on all ranks, a rule instead of genrm"


def rollout_everywhere(config, world_size: int) -> list[placement.Plan]:
    """In place of placement.make_plans: the only plan of --mode rule."""
    everyone = tuple(range(world_size))
    return [RolloutOnly("rule", rollout=everyone, genrm=(), actor=everyone)]


def serve_by_rule(meter: Meter):
    """The serve function of --mode rule: full colocation without the turn of genrm."""

    async def serve(step: rollout.Step, mine: list[int]) -> None:
        begin = meter.mark()
        step.start(mine, rollout.write)
        await step.settle()
        await step.job.world.barrier()  # an engine may still write for another controller: its CPU time belongs to this phase
        meter.rows.append({"generate": begin.to(meter.mark())})
        step.go_on(mine, rollout.have_judged)
        await step.settle()

    return serve


def train_measured(meter: Meter):
    """controller.train, on a job whose judge is the rule."""
    train = controller.train

    async def measured(job: controller.Job) -> None:
        meter.start()
        job.prompts.held_out = []  # no evaluation
        await train(dataclasses.replace(job, judge=RuleJudge(job.judge), report=MeasuredReport(job.report, meter)))
        meter.write()

    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, required=True, help="folder for rank<r>.json")
    parser.add_argument("--launched", type=float, default=time.monotonic(), help="time.monotonic() at the launch")
    ours, theirs = parser.parse_known_args()
    meter = Meter(ours.measure, int(os.environ["RANK"]), ours.launched)
    placement.make_plans = rollout_everywhere
    rollout.SERVE["rule"] = serve_by_rule(meter)
    rollout.is_informative = lambda group, filters: True  # TRL trains on every group
    controller.train = train_measured(meter)
    run.main(["--mode", "rule", "--max-refill-waves", "0", *theirs])


if __name__ == "__main__":
    main()
