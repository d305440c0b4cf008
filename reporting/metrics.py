"""A step's metrics and sample texts.

Controllers send small facts to rank 0, which computes the metrics and writes them. Files under --out:
metrics.jsonl (one object per step), history.jsonl (measurements while serving), samples.jsonl,
tensorboard/; at the end timeline.png.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from math import comb
from pathlib import Path
from statistics import fmean
from textwrap import indent
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from config import Config
from genrm import none_right
from reporting.progress import Progress
from runtime import atomic_files
from runtime import timeline as tl
from runtime.devices import fragments
from runtime.hooks import added
from runtime.world import World
from sample import Key, Sample, parts_of
from scheduling.measured import StepStats
from state import Controller, RolloutBatch

if TYPE_CHECKING:
    from runtime.out_folder import ResumePoint

SAMPLE_FIELDS = ("prompt_id", "question", "answer_key", "response", "finish")
SAMPLE_FIELDS += ("critique", "verdict", "reward", "cost")
TEXTS = ("question", "answer_key", "response", "critique")
PHASES = ("serve", "read", "rollout", "genrm")  # time/*_s
PHASES += ("train", "reference", "switch", "sync", "save")
# missing without costs, judges, keys
MAY_LACK = ("cost/unfiltered_mean", "genrm/accept_frac", "rollout/correct_frac")

Metrics = dict[str, float | str]  # name -> value; some are texts, such as the split
Details = dict[str, Any]  # more columns of a sample in samples.jsonl


class MetricsWriter:
    """Writes metrics.jsonl and TensorBoard's files, from which it drops earlier data from `purge_step` on."""

    def __init__(self, out: Path, purge_step: int = 0):
        from torch.utils.tensorboard import SummaryWriter  # slow to import; only rank 0 writes

        self._path = out / "metrics.jsonl"
        with atomic_files.writing(out / "tensorboard") as path:
            self._board = SummaryWriter(str(path), purge_step=purge_step)

    def write(self, step: int, metrics: Metrics, samples: str = "") -> None:
        """Write row k: the evaluation after k steps and the next step. Raises RunLost if the disk is full."""
        row = {"step": step}
        for name, value in sorted(metrics.items()):
            is_exact = isinstance(value, str) or float(value).is_integer()
            row[name] = value if is_exact else float(f"{value:.6g}")
        atomic_files.append(self._path, [row])
        with atomic_files.writing(Path(self._board.log_dir)):
            for name, value in row.items():
                if name != "step" and not isinstance(value, str):
                    self._board.add_scalar(name, value, step)
            if samples:
                self._board.add_text("samples", samples, step)
            self._board.flush()

    def show(self, step: int, path: Path) -> None:
        """Add a PNG to TensorBoard's images. Raises OSError if the disk is full."""
        from PIL import Image  # only rank 0 needs it

        pixels = numpy.asarray(Image.open(path))
        self._board.add_image(path.stem, pixels, step, dataformats="HWC")

    def close(self) -> None:
        self._board.close()


def as_markdown(row: dict[str, Any]) -> str:
    """Return a row of samples.jsonl as Markdown. Its texts are indented, so they aren't parsed as markup."""
    texts = [f"{name}:\n\n{indent(row[name], '    ')}" for name in TEXTS if row[name]]
    return "\n\n".join([f"## prompt {row['prompt_id']}: reward {row['reward']:g}", *texts])


@dataclass
class Report:
    """A run's metrics, texts and pictures. `step` is collective; only rank 0 writes."""

    config: Config
    world: World
    out: Path
    progress: Progress
    decode: Callable[[list[int]], str]  # the policy's tokens -> text
    found: ResumePoint | None = None  # the checkpoint that the run resumes from
    prompts: int = 0  # held-out ones, on all ranks

    def __post_init__(self) -> None:
        begin, ended = (self.found.step, self.found.ended_s) if self.found else (0, 0.0)
        # kept until the step's other metrics are there: one row per step
        self._evaluated: dict[str, float] = {}
        self._ended = ended  # end of the previous step, on the timeline's clock
        self._writer = MetricsWriter(self.out, begin) if self.world.rank == 0 else None
        self._writing: Awaitable[None] | None = None  # writes the newest step's rows
        if begin:
            self.progress.resume_at(begin)

    def answers(self, number: int, samples: list[Sample], right: list[bool]) -> None:
        """Take the answers to a held-out prompt, greedy first, and which of them are right."""

    def evaluation(
        self, step: int, right: list[tuple[bool, int]], earned: list[float], lost: int, now: float
    ) -> None:
        """Take the evaluation after `step` steps; the next step begins now.

        right: per prompt, if greedy is right and how many samples are. earned: an environment's rewards.
        lost: how many prompts aren't counted, because an episode was lost.
        """
        self._evaluated = {}
        if right:
            self._evaluated["eval/accuracy"] = fmean(greedy for greedy, _ in right)
            self._evaluated |= pass_at_k(self.config.eval_samples, [count for _, count in right])
        if earned:
            self._evaluated["eval/reward_mean"] = fmean(earned)
        if lost:
            self._evaluated["eval/lost_frac"] = lost / self.prompts
        self._ended = now
        shown = "  ".join(f"{name} {value:.3f}" for name, value in self._evaluated.items())
        self.note(f"after {step:3d} steps: {shown} on held-out prompts")

    async def step(
        self, c: Controller, step: int, batch: RolloutBatch, samples: list[Sample], stats: Metrics
    ) -> None:
        """Write a step's metrics in the background (collective: all ranks). Raises RunLost like `written`."""
        facts = local_facts(c, batch, samples, c.timeline.drain())
        now = c.timeline.now()
        gathered = await self.world.gather_on_0(facts)
        if not self._writer:
            return
        served = c.state.history[-1]
        metrics = summarize(gathered) | serving_metrics(served, self.config) | stats
        read_and_written = metrics["rollout/prompt_tokens"] + metrics["rollout/tokens"]
        metrics |= {
            "rollout/groups_per_kept": batch.groups_per_kept,
            "rollout/lacking_groups": float(batch.missing_groups),
            "time/step_s": now - self._ended,
            "perf/tokens_per_s": metrics["rollout/tokens"] / (now - self._ended),
            "perf/prompt_and_answer_tokens_per_s": read_and_written / (now - self._ended),
        }
        # each group's first answer, then each group's second, ...
        own = batch.kept[: len(batch.kept) - batch.from_others]
        shown = sorted(own, key=lambda sample: sample.index)[: self.config.log_samples]
        await self.written()
        details = dict(chain.from_iterable(each.details.items() for each in gathered))
        shown = [(sample, details.get(sample.key, {})) for sample in shown]
        work = partial(self._write, step, metrics | self._evaluated, served, shown)
        self._writing = asyncio.get_running_loop().run_in_executor(None, work)
        self._evaluated = {}
        self._ended = now
        if c.checkpoints.saving:
            await self.written()  # the checkpoint gets its name after the step's rows
        self.progress.step(step, metrics)
        if metrics["rollout/truncated_frac"] == 1:
            limit = self.config.max_new_tokens
            self.note(f"step {step + 1}: all answers were cut off after --max-new-tokens {limit}")
        if batch.missing_groups:
            self.note(
                f"step {step + 1}: {batch.missing_groups} of {self.config.prompts_per_step} groups "
                f"are missing after {batch.waves} waves: too many had equal rewards"
            )

    def _write(
        self, step: int, metrics: Metrics, served: StepStats, shown: list[tuple[Sample, Details]]
    ) -> None:
        rows = []
        for sample, details in shown:
            row = {"step": step} | {name: vars(sample)[name] for name in SAMPLE_FIELDS}
            row["response"] = self.decode(sample.tokens[len(sample.prompt) :])
            if sample.replies:  # the policy's turns alternate with replies
                parts = parts_of(sample.response, sample.replies)
                row["turns"] = [self.decode(part) for part, _ in parts]
            if sample.earned:  # by the turns of an episode
                row |= {"earned": sample.earned, "noted": sample.noted}
            rows.append(row | details)
        atomic_files.append(self.out / "samples.jsonl", rows)
        atomic_files.append(self.out / "history.jsonl", [{"step": step} | asdict(served)])
        self._writer.write(step, metrics, "\n\n".join(map(as_markdown, rows)))

    async def written(self) -> None:
        """Return once all rows are written. Not collective. Raises RunLost if the disk is full."""
        if self._writing:
            await self._writing

    def note(self, text: str) -> None:
        self.progress.line(text)

    def dump(self, samples: list[Sample]) -> Path:
        """Append whole samples to skipped_samples.jsonl, on any rank; return its path."""
        path = self.out / "skipped_samples.jsonl"
        rows = [vars(s) | {"text": self.decode(s.response), "media": None} for s in samples]
        atomic_files.append(path, rows)
        return path

    def close(self) -> None:
        """Write the last row, then the picture. Call it after a barrier: it reads all ranks' spans."""
        if not self._writer:
            return
        # first: a run that has this row did all its steps, and isn't resumed
        self._writer.write(self.config.steps, self._evaluated)
        try:
            for draw in added("picture"):
                draw(self.out).savefig(self.out / "timeline.png")
                self._writer.show(self.config.steps, self.out / "timeline.png")
            self._writer.close()
        except OSError as error:
            self.note(f"{self.out}: timeline.png could not be written: {error}")


def pass_at_k(samples: int, right: list[int]) -> dict[str, float]:
    """Return the unbiased pass@k of Codex (arXiv 2107.03374), equation 1. right: right answers by prompt."""
    metrics = {}
    for k in sorted({2**power for power in range(samples.bit_length())} | {samples} - {0}):
        passed = (1 - comb(samples - count, k) / comb(samples, k) for count in right)
        metrics[f"eval/pass@{k}"] = fmean(passed)
    return metrics


class Facts(NamedTuple):
    """One controller's facts about a step, by how they are reduced over the controllers."""

    means: dict[str, list[float]]  # averaged over all controllers' values
    sums: dict[str, int]
    maxima: dict[str, float]
    latencies: list[float]  # seconds per judgement
    details: dict[Key, Details]


def local_facts(
    c: Controller, batch: RolloutBatch, samples: list[Sample], events: list[tl.Event]
) -> Facts:
    """Return this controller's facts: it collected `batch` and trained on `samples`."""
    filtered = [sample for group in batch.filtered for sample in group]
    # a carried group counts when it comes again: how much of it is finished by now depends on timing
    finished = batch.kept + batch.dropped + filtered
    judged = [s for s in finished if s.reward is not None]
    rewards = defaultdict(set)  # group -> its different rewards
    for sample in judged:
        rewards[sample.prompt_id].add(sample.reward)
    keyed = [s for s in judged if s.answer_key is not None]
    wrong = [s for s in keyed if c.rewards.final_answer(s) != s.answer_key]
    if c.state.step == 1 and wrong and len(wrong) == len(keyed):
        one = (c.report.decode(wrong[0].response), wrong[0].answer_key)
        c.report.note(none_right(c.config, len(wrong), *one))
    means = {
        "reward/mean": [s.reward for s in batch.kept],
        "reward/unfiltered_mean": [s.reward for s in judged],
        "reward/zero_std_frac": [len(values) == 1 for values in rewards.values()],
        "rollout/response_len_mean": [len(s.response) for s in finished],
        "rollout/trained_len_mean": [len(s.response) for s in batch.kept],
        "rollout/truncated_frac": [s.finish == "length" for s in finished],
        "rollout/correct_frac": [0] * len(wrong) + [1] * (len(keyed) - len(wrong)),
        "genrm/accept_frac": [s.verdict for s in finished if s.verdict is not None],
        "genrm/false_positive_frac": [s.verdict is True for s in wrong],
        "genrm/failed_frac": [s.reward is None and s.finish != "lost" for s in finished],
        "cost/unfiltered_mean": [s.cost for s in finished if s.cost is not None],
    }
    sums = {
        "rollout/tokens": batch.tokens,
        "rollout/prompt_tokens": sum(len(s.prompt) for s in finished),
        "rollout/tokens_trained": sum(len(s.response) for s in batch.kept),
        "rollout/tokens_filtered": sum(len(s.response) for s in batch.dropped + filtered),
        "rollout/tokens_carried": sum(len(s.response) for group in batch.carried for s in group),
        "rollout/moved": batch.moved,
        "rollout/aborted": batch.aborted,
        "rollout/carried_groups": len(batch.carried),
        "genrm/failed": sum(
            s.reward is None and s.finish != "lost" for s in batch.dropped + filtered
        ),
    }
    means |= c.environment.means(finished)
    sums |= c.environment.sums(finished)
    maxima = {f"time/{name}_s": tl.seconds(events, name) for name in PHASES}
    maxima |= {
        "rollout/response_len_max": float(max((len(s.response) for s in finished), default=0)),
        "rollout/waves": float(batch.waves),  # same on all controllers
        "sync/received_mb": c.devices.received_bytes / 1e6,
    }
    if c.config.device == "cuda":
        maxima |= {"memory/fragments_gb": fragments() / 1e9}
    details = defaultdict(dict)
    for columns_of in added("sample_columns"):
        for sample in samples:
            if sample.index < c.config.log_samples:
                details[sample.key] |= columns_of(c.config, sample, c.report.decode)
    return Facts(means, sums, maxima, batch.latencies, details)


def summarize(facts: list[Facts]) -> dict[str, float]:
    """Return a step's metrics from every controller's facts. Times are the slowest controller's."""
    metrics = {}
    for name in dict.fromkeys(chain.from_iterable(each.means for each in facts)):
        values = [value for each in facts for value in each.means.get(name, ())]
        if values or name not in MAY_LACK:
            metrics[name] = fmean(values) if values else 0.0
    if not {"genrm/accept_frac", "rollout/correct_frac"} <= metrics.keys():
        # there is no judge, or no answer key to check it
        del metrics["genrm/false_positive_frac"]
    for name in facts[0].sums:
        metrics[name] = float(sum(each.sums[name] for each in facts))
    for name in facts[0].maxima:
        metrics[name] = max(each.maxima[name] for each in facts)
    latencies = sorted(latency for each in facts for latency in each.latencies)
    for name, part in (("genrm/p50_s", 0.5), ("genrm/p99_s", 0.99)):
        place = min(len(latencies) - 1, int(part * len(latencies)))
        metrics[name] = latencies[place] if latencies else 0.0
    return metrics


def serving_metrics(stats: StepStats, config: Config) -> dict[str, float]:
    """Return the requests' metrics. Occupancy: requests in flight / requests that engines decode at once."""
    metrics = {
        "time/swap_s": stats.swap_s,
        "split/swaps": float(stats.rollout.wakes + stats.genrm.wakes),
        "split/rollout_ranks": float(stats.split.rollout),
        "split/tail": stats.split.tail,
        "genrm/tokens": float(stats.genrm.tokens),
        "genrm/response_len_max": float(stats.genrm.longest),
    }
    for role, tp in (("rollout", config.rollout_tp), ("genrm", config.genrm_tp)):
        _, requests = stats.ranks_and_stats(role)
        metrics[f"{role}/cache_hit_frac"] = requests.cached_tokens / max(1, requests.prompt_tokens)
        metrics[f"occupancy/{role}"] = stats.engine_load(role, tp) / config.max_running_requests
    return metrics
