"""An evaluation's report: a row per prompt in OUT/answers.jsonl, the metrics in metrics.jsonl."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from build import Work
from config import Config
from evaluation import evaluate_once
from genrm import none_right
from reporting.metrics import Report
from runtime import out_folder
from runtime.atomic_files import append, whole_rows
from runtime.errors import UserError
from runtime.world import World, on_rank_0
from sample import Sample
from state import Controller

ROWS = "answers.jsonl"


async def open_saves(
    config: Config, world: World, say: Callable[[str], None]
) -> out_folder.NoSaves:
    return await on_rank_0(world, start_evaluation, Path(config.out), say, vars(config))


def start_evaluation(out: Path, say: Callable[[str], None], settings: dict) -> out_folder.NoSaves:
    """Move an earlier run in --out aside, on rank 0. Raises UserError if there are weights."""
    for weights in chain.from_iterable(map(out.glob, out_folder.WEIGHTS)):
        raise UserError(
            f"--out {out}: {weights.relative_to(out)} belongs to a run, and --steps 0 only "
            "evaluates --model: name another folder"
        )
    return out_folder.start_over(out, say, settings)


@dataclass
class AnswersReport(Report):
    """One evaluation's report. It writes a prompt's row as soon as all of its answers are there."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.progress.resume_at(0, math.ceil(self.prompts / self.world.size))

    def answers(self, number: int, samples: list[Sample], right: list[bool]) -> None:
        """Write a prompt's row. Raises RunLost if the disk is full."""
        texts = [self.decode(sample.tokens[len(sample.prompt) :]) for sample in samples]
        greedy, *sampled = texts
        row = {"prompt": number, "question": samples[0].question, "answer": samples[0].answer_key}
        row |= {"greedy": greedy, "sampled": sampled, "right": right}
        row["finish"] = [sample.finish for sample in samples]
        row["tokens"] = sum(len(sample.response) for sample in samples)
        if self.config.environment:
            row["reward"] = [math.fsum(sample.earned) for sample in samples]
        append(self.out / ROWS, [row])
        self.progress.done()

    def evaluation(
        self, step: int, right: list[tuple[bool, int]], earned: list[float], lost: int, now: float
    ) -> None:
        """Compute metrics from all rows, once every rank has written its own."""
        if self.world.rank:
            return
        super().evaluation(step, right, earned, lost, now)
        rows = list(whole_rows(self.out / ROWS))
        answers = len(rows) * (1 + self.config.eval_samples)
        if right and not any(first or count for first, count in right):
            keyed = next(row for row in rows if row["answer"] is not None)
            self.note(none_right(self.config, answers, keyed["greedy"], keyed["answer"]))
        cut_off = sum(row["finish"].count("length") for row in rows)
        self._evaluated["eval/truncated_frac"] = cut_off / answers
        self._evaluated["eval/tokens_per_s"] = sum(row["tokens"] for row in rows) / now

    def close(self) -> None:
        """Write the row of metrics. Without a step there is no picture."""
        if self._writer:
            self._writer.write(0, self._evaluated)
            self._writer.close()


def last_line(c: Controller) -> str:
    return "stopped; the same command starts over"


EVALUATION = Work(evaluate_once, open_saves, AnswersReport, last_line)
