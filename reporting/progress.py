"""Progress: the one bar on rank 0's terminal, and a line per step above it."""

import contextlib

from tqdm import tqdm

from runtime.errors import printable

BAR = "{desc} {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]"
PHASES = dict(serve="serving", train="training", sync="pushing weights", save="saving")
PHASES["evaluate"] = "evaluating"
# parts of the answers that nothing is learned from: named in a step's line if above a tenth
MISSING = {"environment/lost_frac": "lost episodes", "genrm/failed_frac": "failed judgements"}


class Progress:
    """The bar: what the run is doing, how far it is, and the time left. Only rank 0 prints."""

    def __init__(self, steps: int, is_main: bool):
        self._steps = steps
        self._is_main = is_main
        self.what = "starting"
        off = None if is_main else True  # None: only the lines in a log file, no bar
        self._bar = tqdm(total=steps, bar_format=BAR, disable=off, dynamic_ncols=True, leave=False)

    def resume_at(self, done: int, total: int | None = None) -> None:
        """Continue at `done`, timing from now. total: how many things to count instead of steps."""
        self._bar.reset(total)
        self._bar.initial = self._bar.n = done

    def done(self) -> None:
        self._bar.update()

    def doing(self, what: str) -> None:
        self.what = what
        self._bar.set_description_str(what)

    def phase(self, name: str, step: int) -> None:
        """Show a step's phase in the bar when its span opens."""
        if name in PHASES:
            self.doing(f"step {step + 1}: {PHASES[name]}")

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self.done()
        loss = f"loss {metrics['train/loss']:+.4f}  " if "train/loss" in metrics else ""
        parts = {words: metrics.get(name, 0.0) for name, words in MISSING.items()}
        lost = "".join(f"{words} {part:.0%}  " for words, part in parts.items() if part > 0.1)
        self.line(
            f"step {step + 1:3d}/{self._steps}  reward {metrics['reward/unfiltered_mean']:.3f}  {lost}{loss}"
            f"length {metrics['rollout/response_len_mean']:.0f}  waves {metrics['rollout/waves']:.0f}  "
            f"{metrics['perf/tokens_per_s']:.0f} tokens/s  step {metrics['time/step_s']:.1f} s "
            f"(serve {metrics['time/serve_s']:.1f}, train {metrics['time/train_s']:.1f})"
        )

    def line(self, text: str) -> None:
        if self._is_main:
            with contextlib.suppress(OSError):  # the terminal is gone, or the log's disk is full
                self._bar.write(printable(text))

    def close(self) -> None:
        self._bar.close()
