"""Report: what a step came to, as numbers, texts and pictures, and the one progress bar.

Controllers gather small facts; every rank works out the same metrics; rank 0 writes them. Files under --out: metrics.jsonl,
samples.jsonl, tensorboard/, trace.json, timeline.png.
"""

from __future__ import annotations

import asyncio
import html
import json
from pathlib import Path
from statistics import fmean

from config import printable
from reporting import figure
from reporting import timeline as tl

TEXTS_PER_STEP = 2  # whole groups written to samples.jsonl and TensorBoard a step
BAR = "{desc} {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"
TOKENS = ("tokens", "tokens_trained", "tokens_filtered", "tokens_carried")  # written in a step, and what became of groups
PHASES = {"serve": "serving", "train": "training", "sync": "pushing weights", "save": "saving", "evaluate": "evaluating"}


class Progress:
    """One bar on rank 0's terminal: what the run is doing now, how it does, time left; and a line per step. Other ranks are silent."""

    def __init__(self, steps: int, is_main: bool):
        from tqdm import tqdm

        self._steps, self._is_main = steps, is_main
        disable = None if is_main else True  # None: no bar in a log file, only the lines
        self._bar = tqdm(total=steps, bar_format=BAR, disable=disable, dynamic_ncols=True, leave=False)

    async def tick(self) -> None:
        """Keep the clock in the bar going while nothing happens."""
        while True:
            await asyncio.sleep(1.0)
            self._bar.refresh()

    def go_on(self, step: int) -> None:
        """The run goes on after so many steps."""
        self._bar.initial = self._bar.n = step

    def done(self) -> None:
        """One more step is."""
        self._bar.update()

    def doing(self, what: str) -> None:
        """Say what the run is doing now."""
        self._bar.set_description_str(what)

    def phase(self, name: str, step: int) -> None:
        """A span opened: the phases of a step show up in the bar."""
        if name in PHASES:
            self.doing(f"step {step + 1}: {PHASES[name]}")

    def step(self, step: int, metrics: dict[str, float], accuracy: float | None) -> None:
        """A step is done."""
        reward, rate = metrics["reward/unfiltered_mean"], metrics["perf/tokens_per_s"]
        shown = {"reward": f"{reward:.2f}", "tokens/s": f"{rate:.0f}"}
        if accuracy is not None:
            shown["accuracy"] = f"{accuracy:.2f}"
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update()
        loss = f"loss {metrics['train/loss']:+.4f}  " if "train/loss" in metrics else ""  # --rollout-only has none
        self.line(
            f"step {step + 1:3d}/{self._steps}  reward {reward:.3f}  {loss}"
            f"length {metrics['rollout/response_len_mean']:.0f}  waves {metrics['rollout/waves']:.0f}  {rate:.0f} tokens/s  "
            f"step {metrics['time/step_s']:.1f} s (serve {metrics['time/serve_s']:.1f}, train {metrics['time/train_s']:.1f})"
        )

    def line(self, text: str) -> None:
        """A line of its own, above the bar."""
        if self._is_main:
            self._bar.write(printable(text))

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()


class Report:
    """Metrics, texts and pictures of a run. `step` is collective; only rank 0 writes."""

    def __init__(self, config, world, out: Path, progress: Progress, decode, found=None):
        """found: the checkpoint that the run goes on from (resume.Found), None of a new one."""
        self.config, self.world, self.out, self.progress = config, world, out, progress
        self.decode = decode  # actor tokens -> text
        self._accuracy: float | None = None
        self._evaluated: dict[str, float] = {}  # waits for the other metrics of its step: one row a step
        self._ended = found.ended_s if found else 0.0  # when the step before ended, on the timeline's clock
        self._writer = None
        if found:
            progress.go_on(found.step)
        if world.rank == 0:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(out / "tensorboard"), purge_step=found and found.step)

    def accuracy(self, step: int, value: float, now: float) -> None:
        """Greedy accuracy on held-out prompts after `step` updates; the step's own time begins now."""
        self._accuracy, self._ended = value, now
        self._evaluated = {"eval/accuracy": value}
        self.progress.line(f"after {step:3d} steps: eval/accuracy {value:.3f} on held-out prompts")

    async def step(self, step: int, served, samples: list, stats: dict[str, float], job) -> None:
        """Gather the step's facts, work out its metrics and write them (collective)."""
        spans, now = job.timeline.take(), job.timeline.now()
        facts = await self.world.gather(local_facts(served, samples, spans, job))
        load = job.state.history[-1]
        capacity = {role: len(load.plan.leads(role)) * self.config.max_running_requests for role in ("rollout", "genrm")}
        metrics = summarize(facts, capacity) | load.metrics() | stats
        metrics |= {"rollout/groups_per_kept": job.state.groups_per_kept, "split/rollout_ranks": float(len(load.plan.rollout))}
        metrics["time/step_s"], self._ended = now - self._ended, now
        metrics["perf/tokens_per_s"] = metrics["rollout/tokens"] / metrics["time/step_s"]
        self._write(step, metrics | self._evaluated)  # row k: what was measured with k updates done, and the update that followed
        self._evaluated = {}
        self._write_samples(step, served)
        self.progress.step(step, metrics, self._accuracy)
        if served.lacking:
            lacking = f"{served.lacking} of {self.config.prompts_per_step} groups are lacking after {served.waves} waves"
            self.note(f"step {step + 1}: {lacking}: the other prompts' answers had equal rewards")

    def note(self, text: str) -> None:
        """A line for people, from rank 0."""
        self.progress.line(text)

    def flush(self) -> None:
        """Nothing that was reported may be lost when the process ends now."""
        if self._writer is not None:
            self._writer.close()

    def dump(self, samples: list) -> Path:
        """Add whole samples to skipped_samples.jsonl, from any rank; returns its path."""
        path = self.out / "skipped_samples.jsonl"
        rows = "".join(json.dumps(vars(sample) | {"text": self.decode(sample.response), "media": None}) + "\n" for sample in samples)
        with path.open("ab", buffering=0) as file:  # one write: ranks don't mix their lines
            file.write(rows.encode())
        return path

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        if self._writer is None:
            return
        with (self.out / "metrics.jsonl").open("a") as file:
            numbers = {name: value if isinstance(value, str) else round(value, 6) for name, value in sorted(metrics.items())}
            file.write(json.dumps({"step": step} | numbers) + "\n")
        for name, value in metrics.items():
            (self._writer.add_text if isinstance(value, str) else self._writer.add_scalar)(name, value, step)

    def _write_samples(self, step: int, served) -> None:
        """A few whole samples of this controller. TensorBoard renders Markdown, so text from a model is escaped."""
        if self._writer is None:
            return
        rows = []
        for sample in served.kept[:: self.config.answers_per_prompt][:TEXTS_PER_STEP]:
            rows.append(
                {"step": step, "prompt_id": sample.prompt_id, "question": sample.question, "answer_key": sample.answer_key}
                | {"response": self.decode(sample.response), "finish": sample.finish, "critique": sample.critique}
                | {"verdict": sample.verdict, "reward": sample.reward, "cost": sample.cost}
            )
        with (self.out / "samples.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        for number, row in enumerate(rows):
            text = "\n".join(f"    {line}" for line in html.escape(json.dumps(row, indent=1)).splitlines())
            self._writer.add_text(f"samples/{number}", text, step)

    def close(self, capacity: int, title: str) -> None:
        """Merge the ranks' records into the trace and the picture. Rank 0 only writes; call it after a barrier."""
        if self._writer is None:
            return
        self._write(self.config.steps, self._evaluated)
        records = tl.read(self.out / "spans")
        tl.write_trace(records, self.out / "trace.json")
        figure.draw([figure.Picture(title, figure.of_steps(records, -4, -1), capacity)], self.out / "timeline.png")
        import matplotlib.image

        picture = matplotlib.image.imread(self.out / "timeline.png")[..., :3]
        self._writer.add_image("timeline", picture, self.config.steps, dataformats="HWC")
        self._writer.close()


def local_facts(served, samples: list, spans: list[tl.Span], job) -> dict:
    """What one controller saw in a step: counts, lengths, seconds. `samples` are those it trained on; `served` those it had written.

    A carried group is counted as such alone; its answers are when it comes again: how many of it are whole by now is up to timing.
    """
    filtered = [sample for group in served.filtered for sample in group]
    everything = served.kept + served.dropped + filtered
    keyed = [s for s in everything if s.answer_key is not None and s.reward is not None]
    wrong = [s for s in keyed if job.judge.final_answer(s) != s.answer_key]
    return {
        "kept_rewards": [s.reward for s in served.kept],
        "costs": [s.cost for s in everything if s.cost is not None],
        "rewards": [s.reward for s in everything if s.reward is not None],
        "verdicts": [s.verdict for s in everything if s.verdict is not None],
        "lengths": [len(s.response) for s in everything],
        "truncated": sum(s.finish == "length" for s in everything),
        "aborted": served.aborted,
        "tokens": served.tokens,
        "tokens_trained": sum(len(s.response) for s in served.kept),
        "tokens_filtered": sum(len(s.response) for s in served.dropped + filtered),
        "tokens_carried": sum(len(s.response) for group in served.carried for s in group),
        "trained_lengths": [len(s.response) for s in served.kept],
        "filtered": len(served.filtered),
        "groups": len({s.prompt_id for s in served.kept + served.dropped}) + len(served.filtered),
        "carried": len(served.carried),
        "waves": served.waves,
        "lacking": served.lacking,
        "answers_keyed": len(keyed),
        "answers_wrong": len(wrong),
        "wrong_accepted": sum(s.verdict is True for s in wrong),
        "failed": sum(s.reward is None for s in served.dropped + filtered),
        "latencies": job.judge.latencies,
        "timeouts": job.judge.timeouts,
        "dp_rank": job.actor.dp_rank,
        "work": sum(job.actor.cost(len(s.prompt) + len(s.response)) for s in samples),
        "seconds": {name: tl.seconds(spans, name) for name in ("serve", "rollout", "genrm", "train", "switch", "sync", "save")},
        "request_seconds": {role: sum(s.end - s.start for s in spans if s.name == role) for role in ("rollout", "genrm")},
    }


def summarize(facts: list[dict], capacity: dict[str, int]) -> dict[str, float]:
    """The metrics of a step from every controller's facts (pure). Times are the slowest controller's, in seconds.

    capacity: answers that the engines of each role decode at once, all together.
    """
    shown = {"aborted": "rollout", "failed": "genrm", "timeouts": "genrm"} | dict.fromkeys(TOKENS, "rollout")
    total = {name: sum(f[name] for f in facts) for name in ("truncated", "filtered", "groups", "carried", *shown)}
    lists = ("kept_rewards", "rewards", "costs", "verdicts", "lengths", "trained_lengths", "latencies")
    merged = {name: [value for f in facts for value in f[name]] for name in lists}
    slowest = {name: max(f["seconds"][name] for f in facts) for name in facts[0]["seconds"]}
    keyed, wrong, accepted_wrong = (sum(f[name] for f in facts) for name in ("answers_keyed", "answers_wrong", "wrong_accepted"))
    work = {f["dp_rank"]: f["work"] for f in facts}.values()
    metrics = {
        "reward/mean": _mean(merged["kept_rewards"]),
        "reward/unfiltered_mean": _mean(merged["rewards"]),
        "reward/zero_std_frac": total["filtered"] / max(1, total["groups"]),
        "rollout/response_len_mean": _mean(merged["lengths"]),
        "rollout/response_len_max": float(max(merged["lengths"], default=0)),
        "rollout/trained_len_mean": _mean(merged["trained_lengths"]),
        "rollout/truncated_frac": total["truncated"] / max(1, len(merged["lengths"])),
        "rollout/waves": float(facts[0]["waves"]),
        "rollout/lacking_groups": float(facts[0]["lacking"]),
        "rollout/carried_groups": float(total["carried"]),
        "genrm/p50_s": _quantile(merged["latencies"], 0.5),
        "genrm/p99_s": _quantile(merged["latencies"], 0.99),
        "balance/max_over_mean": max(work) / max(1e-9, fmean(work)),
    } | {f"{role}/{name}": float(total[name]) for name, role in shown.items()}
    if merged["costs"]:
        metrics["cost/unfiltered_mean"] = _mean(merged["costs"])
    if keyed:  # only prompts with an answer key can tell
        metrics["rollout/correct_frac"] = 1 - wrong / keyed
    if merged["verdicts"]:  # none where rules alone reward
        metrics["genrm/accept_frac"] = _mean(merged["verdicts"])
    if merged["verdicts"] and keyed:
        metrics["genrm/false_positive_frac"] = accepted_wrong / max(1, wrong)
    for role in ("rollout", "genrm"):
        work = sum(f["request_seconds"][role] for f in facts)
        metrics[f"occupancy/{role}"] = work / max(1e-9, capacity[role] * slowest["serve"])
    return metrics | {f"time/{name}_s": value for name, value in slowest.items()}


def _mean(values: list[float]) -> float:
    return fmean(values) if values else 0.0


def _quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else 0.0
