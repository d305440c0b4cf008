"""nanoYATT's side of vs_trl.py: the plain run.py program with the rule `right` instead of a judge, measured.

    torchrun --nproc-per-node 2 bench/nano_rule.py --measure DIR --launched SECONDS [run.py's settings]

Engines, actor and loop are the project's own. Two things differ, to match what TRL does: every group is
trained on (no dynamic sampling), and the learning rate is constant.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from meter import Meter

import controller
import run
from controller import Controller, train
from reporting import timeline
from reporting.metrics import Report
from rollout import RolloutBatch
from sample import Sample


class MeasuredReport:
    """The run's own report, with a row for the meter after each step."""

    def __init__(self, report: Report, meter: Meter):
        self._report, self._meter, self._last = report, meter, meter.mark()

    def note(self, text: str) -> None:
        self._report.note(text)

    async def step(
        self, c: Controller, step: int, batch: RolloutBatch, samples: list[Sample], stats: dict
    ) -> None:
        spans = list(c.timeline.events)
        await self._report.step(c, step, batch, samples, stats)
        now = self._meter.mark()
        self._meter.rows[-1] |= {
            "step": self._last.to(now),
            "tokens": sum(len(sample.response) for sample in batch.kept),
            "answers": len(batch.kept),
            "reward": sum(sample.reward for sample in batch.kept),
            "prompt_tokens": sum(len(sample.prompt) for sample in batch.kept),
            "update_s": timeline.seconds(spans, "train"),
        }
        self._last = now


def train_measured(meter: Meter):
    """controller.train, with what a step costs; the rule takes no time, so that collecting is generating."""

    async def measured(c: Controller) -> int:
        async def collect(side_c: Controller) -> RolloutBatch:
            begin = meter.mark()
            batch = await c.collect(side_c)
            meter.rows.append({"generate": begin.to(meter.mark())})
            return batch

        meter.start()
        c.prompts.held_out = []  # no evaluation
        algorithm = dataclasses.replace(c.algorithm, filters=False)  # TRL trains on every group
        report = MeasuredReport(c.report, meter)
        stopped_by = await train(
            dataclasses.replace(c, algorithm=algorithm, report=report, collect=collect)
        )
        meter.write()
        return stopped_by

    return measured


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, required=True, help="folder for rank<r>.json")
    launched = "time.monotonic() at the launch"
    parser.add_argument("--launched", type=float, default=time.monotonic(), help=launched)
    ours, theirs = parser.parse_known_args()
    controller.train = train_measured(Meter(ours.measure, int(os.environ["RANK"]), ours.launched))
    settings = [
        "--rule",
        "right",
        "--preset",
        "tiny",
        "--max-refill-waves",
        "0",
        "--save-every",
        "0",
    ]
    run.main([*settings, "--lr-decay-to", "1", *theirs])


if __name__ == "__main__":
    main()
