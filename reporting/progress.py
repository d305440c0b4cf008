"""Progress: the one bar on rank 0's terminal, and a line per step above it."""

from __future__ import annotations

import asyncio

from tqdm import tqdm

from config import printable

BAR = "{desc} {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"
PHASES = dict(
    serve="serving", train="training", sync="pushing weights", save="saving", evaluate="evaluating"
)


class Progress:
    """What the run is doing now, how it does, and the time left. Other ranks than 0 are silent."""

    def __init__(self, steps: int, is_main: bool):
        self._steps, self._is_main = steps, is_main
        disable = None if is_main else True  # None: no bar in a log file, only the lines
        self._bar = tqdm(
            total=steps, bar_format=BAR, disable=disable, dynamic_ncols=True, leave=False
        )

    async def tick(self) -> None:
        """Keep the clock in the bar going while nothing happens."""
        while True:
            await asyncio.sleep(1.0)
            self._bar.refresh()

    def resume_at(self, step: int) -> None:
        self._bar.initial = self._bar.n = step

    def done(self) -> None:
        self._bar.update()

    def doing(self, what: str) -> None:
        self._bar.set_description_str(what)

    def phase(self, name: str, step: int) -> None:
        """A span opened: the phases of a step show up in the bar."""
        if name in PHASES:
            self.doing(f"step {step + 1}: {PHASES[name]}")

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """A step of reinforcement learning is done; --rollout-only has no loss."""
        self.done()
        loss = f"loss {metrics['train/loss']:+.4f}  " if "train/loss" in metrics else ""
        length, waves = metrics["rollout/response_len_mean"], metrics["rollout/waves"]
        seconds = [metrics[f"time/{name}_s"] for name in ("step", "serve", "train")]
        step_s, serve_s, train_s = seconds
        self.line(
            f"step {step + 1:3d}/{self._steps}  reward {metrics['reward/unfiltered_mean']:.3f}  {loss}"
            f"length {length:.0f}  waves {waves:.0f}  {metrics['perf/tokens_per_s']:.0f} tokens/s  "
            f"step {step_s:.1f} s (serve {serve_s:.1f}, train {train_s:.1f})"
        )

    def line(self, text: str) -> None:
        if self._is_main:
            self._bar.write(printable(text))

    def close(self) -> None:
        self._bar.close()
