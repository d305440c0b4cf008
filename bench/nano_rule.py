"""nanoYATT's side of vs_trl.py: the plain run.py program with the rule `right` instead of a judge, measured.

    torchrun --nproc-per-node 2 bench/nano_rule.py --measure DIR --launched SECONDS [run.py's settings]

Engines, actor and loop are the project's own. Two things differ, to match what TRL does: every group is
trained on (no dynamic sampling), and the learning rate is constant.
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

import actor
import controller
import run
from reporting import timeline

SPANS = ("serve", "rollout", "train", "switch", "sync")


class MeasuredReport:
    """The run's own report, with a row for the meter after each step."""

    def __init__(self, report, meter: Meter):
        self.report, self.meter, self.last = report, meter, meter.mark()

    def note(self, text: str) -> None:
        self.report.note(text)

    def close(self) -> None:
        self.report.close()

    async def step(self, c, step: int, batch, samples: list, stats: dict) -> None:
        spans = list(c.timeline.spans)
        await self.report.step(c, step, batch, samples, stats)
        now, seconds = self.meter.mark(), {name: timeline.seconds(spans, name) for name in SPANS}
        self.meter.rows[-1] |= {
            "step": self.last.to(now),
            "tokens": sum(len(sample.response) for sample in batch.kept),
            "answers": len(batch.kept),
            "reward": sum(sample.reward for sample in batch.kept),
            "prompt_tokens": sum(len(sample.prompt) for sample in batch.kept),
            "update_s": seconds["train"],
            "spans": seconds,
        }
        self.last = now


def train_measured(meter: Meter, train=controller.train):
    """controller.train, with what a step costs; the rule takes no time, so that collecting is generating."""

    async def measured(c: controller.Controller) -> int:
        collect = c.collect

        async def collect_measured(c: controller.Controller):
            begin = meter.mark()
            batch = await collect(c)
            meter.rows.append({"generate": begin.to(meter.mark())})
            return batch

        meter.start()
        c.prompts.held_out = []  # no evaluation
        algorithm = dataclasses.replace(c.algorithm, filters=False)  # TRL trains on every group
        report = MeasuredReport(c.report, meter)
        stopped = await train(
            dataclasses.replace(c, algorithm=algorithm, report=report, collect=collect_measured)
        )
        meter.write()
        return stopped

    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, required=True, help="folder for rank<r>.json")
    parser.add_argument("--launched", type=float, default=time.monotonic(), help="time.monotonic() at the launch")
    ours, theirs = parser.parse_known_args()
    actor.LR_DECAY_TO = 1.0
    controller.train = train_measured(Meter(ours.measure, int(os.environ["RANK"]), ours.launched))
    run.main(["--rule", "right", "--preset", "tiny", "--max-refill-waves", "0", "--save-every", "0", *theirs])


if __name__ == "__main__":
    main()
