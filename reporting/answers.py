"""The report of `run.py eval`: OUT/answers.jsonl, a row a prompt; at the end OUT/eval.json, the figures."""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from config import Config
from genrm import none_right
from reporting.metrics import Report
from runtime.atomic_files import append, complete_rows, keep_rows, writing
from runtime.out_folder import archive
from sample import Sample

ROWS = "answers.jsonl"
BEGUN = "eval_begun.json"  # what the rows are of; there until the end


def keep_answers(config: Config, contents: dict, say: Callable[[str], None]) -> None:
    """Make --out ready, on rank 0: rows of the same settings and files stay, all else is moved aside."""
    out = Path(config.out)
    same = json.dumps([asdict(config), contents])
    if not (out / BEGUN).exists() or (out / BEGUN).read_text() != same:
        archive(out, say)
        (out / BEGUN).write_text(same)
    keep_rows(out / ROWS, lambda row: True)  # but one that was cut short
    (out / "spans").mkdir(exist_ok=True)


class AnswersReport(Report):
    """The report of one evaluation. A row is written as soon as its prompt has all of its answers."""

    def __post_init__(self) -> None:
        self._earlier = {row["prompt"] for row in complete_rows(self.out / ROWS)}

    def unanswered(self, numbers: Iterable[int]) -> list[int]:
        """Return those that no earlier try has answered. The bar counts this rank's."""
        left = [number for number in numbers if number not in self._earlier]
        if self._earlier:
            self.note(f"goes on: {len(self._earlier)} prompts are answered")
        self.progress.resume_at(0, len(left))
        return left

    def answers(self, number: int, samples: list[Sample], right: list[bool]) -> None:
        """Write the row of a prompt. RunLost if the disk is full."""
        greedy, *sampled = [self.decode(sample.response) for sample in samples]
        row = {"prompt": number, "question": samples[0].question, "answer": samples[0].answer_key}
        row |= {"greedy": greedy, "sampled": sampled, "right": right}
        row["finish"] = [sample.finish for sample in samples]
        row["tokens"] = sum(len(sample.response) for sample in samples)
        append(self.out / ROWS, [row])
        self.progress.done()

    def evaluation(self, step: int, right: list[tuple[bool, int]], now: float) -> None:
        """Write the figures of all rows, once every rank has written its own."""
        if self.world.rank:
            return
        rows = list(complete_rows(self.out / ROWS))
        right = [(row["right"][0], sum(row["right"][1:])) for row in rows]
        super().evaluation(step, right, now)
        answers = len(rows) * (1 + self.config.eval_samples)
        if not any(first or count for first, count in right):
            self.note(none_right(self.config, answers, rows[0]["greedy"], rows[0]["answer"]))
        tokens = sum(row["tokens"] for row in rows if row["prompt"] not in self._earlier)
        facts = self._evaluated | {
            "eval/truncated_frac": sum(row["finish"].count("length") for row in rows) / answers,
            "eval/tokens_per_s": tokens / now,
            "prompts": len(rows),
            "config": asdict(self.config),
        }
        with writing(self.out / "eval.json") as path:
            path.write_text(json.dumps(facts, indent=1) + "\n")

    def close(self) -> None:
        """The same command begins anew from here on. Call it after a barrier."""
        if self.world.rank == 0:
            (self.out / BEGUN).unlink()
