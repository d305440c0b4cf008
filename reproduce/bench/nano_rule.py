"""nanoYATT's side of vs_trl.py: run.py with the rule `right` instead of a judge, measured.

It takes run.py's settings; `Meter` in measuring.py describes what is measured. Engines, actor and loop are
the project's own. Two things differ, to match TRL: every group is trained on (no dynamic sampling), and the
learning rate is constant.
"""

import dataclasses
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import build
import modes
import run
from controller import train
from modes import collect
from reproduce.bench.measuring import Meter
from runtime import timeline
from sample import Sample
from state import Controller, RolloutBatch


class MeasuredRun:
    """Replaces controller.train and the run's report, and gives the meter a row after each step."""

    def __init__(self, meter: Meter):
        self._meter = meter

    async def __call__(self, c: Controller) -> bool:
        self._own = c
        self._meter.start()
        self._last = time.monotonic()
        c.prompts.source.held_out = []  # no evaluation
        algorithm = dataclasses.replace(c.algorithm, filters=False)  # TRL trains on every group
        parts = dict(algorithm=algorithm, report=self)
        was_stopped = await train(dataclasses.replace(c, **parts))
        self._meter.write()
        return was_stopped

    async def collect(self, c: Controller, step: int) -> RolloutBatch:
        """Collect as the run does. The rule takes no time, so the seconds measured here are generation's."""
        begin = time.monotonic()
        batch = await collect(c, step)
        self._meter.rows.append({"generate_s": time.monotonic() - begin})
        return batch

    def note(self, text: str) -> None:
        self._own.report.note(text)

    async def written(self) -> None:
        await self._own.report.written()

    async def step(
        self, c: Controller, step: int, batch: RolloutBatch, samples: list[Sample], stats: dict
    ) -> None:
        spans = list(c.timeline.events)
        own = dataclasses.replace(c, report=self._own.report)
        await own.report.step(own, step, batch, samples, stats)
        now = time.monotonic()
        self._meter.rows[-1] |= {
            "step_s": now - self._last,
            "tokens": sum(len(sample.response) for sample in batch.kept),
            "answers": len(batch.kept),
            "reward": sum(sample.reward for sample in batch.kept),
            "prompt_tokens": sum(len(sample.prompt) for sample in batch.kept),
            "update_s": timeline.seconds(spans, "train"),
        }
        self._last = now


if __name__ == "__main__":
    measured = MeasuredRun(Meter())
    build.TRAINING = build.TRAINING._replace(run=measured)
    modes.collect = measured.collect
    settings = "--preset tiny --rule right --save-every 0 --lr-decay-to 1"
    run.main([*settings.split(), *sys.argv[1:]])
