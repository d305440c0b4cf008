"""Prompts: from a JSONL or Parquet file or from the built-in addition task; dealt by one global cursor; some
held out for evaluation.

Every controller holds the same `Prompts` and takes the same decisions on it, so that a draw number alone says
which prompt is meant: no prompt text ever travels between controllers, and which prompts make up a step
doesn't depend on the number of ranks.
"""

from __future__ import annotations

import heapq
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sample import Sample


@dataclass(frozen=True)
class Prompt:
    """One prompt, tokenized. `question` is what the judge reads; `answer_key` is for measuring and for rules, no judge sees it."""

    tokens: list[int]
    question: str
    answer_key: str | None


class Source(Protocol):
    """Where prompts come from: `training(draw)` for draw = 0, 1, 2, ... without end, and `held_out`, which training never draws."""

    held_out: list[Prompt]

    def training(self, draw: int) -> Prompt: ...


class Prompts:
    """The global cursor over a source; prompts that come first next time, and what was generated for them.

    The same on every controller but for `groups`. Unfinished groups stay with the controller that has them.
    """

    def __init__(self, source: Source, answers: int, keeps_groups: bool = False, has_greedy: bool = False):
        """answers: of a group, one more with has_greedy. keeps_groups: requeued prompts keep what was generated."""
        self.source, self.held_out = source, source.held_out
        self._answers, self._keeps_groups, self._has_greedy = answers, keeps_groups, has_greedy
        self.cursor = 0  # next prompt_id that was never drawn
        self.requeued: list[int] = []  # drawn, but not used
        self.groups: dict[int, list[Sample]] = {}  # of requeued prompts, as far as they were generated here
        self.owners: dict[int, int] = {}  # requeued prompt_id -> data-parallel rank that has its group

    def draw(self, count: int) -> list[int]:
        """The next `count` prompt_ids: first those that were requeued, then new ones."""
        again, self.requeued = self.requeued[:count], self.requeued[count:]
        fresh = range(self.cursor, self.cursor + count - len(again))
        self.cursor = fresh.stop
        return again + list(fresh)

    def assign_owners(self, prompt_ids: list[int], controllers: int) -> dict[int, int]:
        """prompt_id -> the data-parallel rank that serves it: who has its group, else who has the fewest."""
        owners = {prompt_id: self.owners[prompt_id] for prompt_id in prompt_ids if prompt_id in self.owners}
        counts = Counter(self.owners.values())
        heap = [(counts[rank], rank) for rank in range(controllers)]
        heapq.heapify(heap)
        for prompt_id in prompt_ids:
            if prompt_id not in owners:
                count, owners[prompt_id] = heap[0]
                heapq.heapreplace(heap, (count + 1, owners[prompt_id]))
        self.owners |= owners
        return owners

    def group(self, prompt_id: int) -> list[Sample]:
        """The group of a prompt: as far as it was generated, or empty samples."""
        if prompt_id in self.groups:
            return self.groups.pop(prompt_id)
        prompt, count = self.source.training(prompt_id), self._answers + self._has_greedy
        return [
            Sample(prompt_id, i, prompt.tokens, prompt.question, prompt.answer_key, greedy=i == self._answers)
            for i in range(count)
        ]

    def requeue(self, prompt_ids: list[int], groups: list[list[Sample]]) -> None:
        """Prompts that weren't used come first in the next step; `groups` are this controller's of them."""
        self.requeued[:0] = prompt_ids
        waiting = set(self.requeued) if self._keeps_groups else set()
        self.owners = {prompt_id: owner for prompt_id, owner in self.owners.items() if prompt_id in waiting}
        if self._keeps_groups:
            self.groups |= {group[0].prompt_id: group for group in groups}

    def state(self) -> dict:
        """What a checkpoint keeps beside `groups`. Pairs, because JSON has no numbers for keys."""
        return {"cursor": self.cursor, "requeued": list(self.requeued), "owners": list(self.owners.items())}

    def load_state(self, state: dict, groups: list[list[Sample]], controllers: int, rank: int) -> None:
        """Continue where `state` was taken, on any number of controllers, with the groups of all of them.

        rank: this controller's data-parallel rank; -1 of one that asks no engine.
        """
        self.cursor, self.requeued = state["cursor"], list(state["requeued"])
        if self._keeps_groups:
            self.owners = {prompt_id: owner % controllers for prompt_id, owner in state["owners"]}
        self.groups = {group[0].prompt_id: group for group in groups if self.owners.get(group[0].prompt_id) == rank}


# ---------------------------------------------------------------- the built-in task

DIGITS = {1: 3.0, 2: 4.0, 3: 4.0, 4: 3.0, 5: 2.5, 6: 2.0}  # digits of the longer summand: relative frequency
HELD_OUT = 200  # problems; independent of the seed, so that runs are compared on the same ones


def random_problem(rng: random.Random) -> tuple[int, int]:
    """Two summands of 1 to 6 digits; six in ten have the same length."""
    longer = rng.choices(list(DIGITS), list(DIGITS.values()))[0]
    shorter = longer if rng.random() < 0.6 else rng.randint(1, longer)
    a, b = (rng.randrange(10 ** (n - 1) if n > 1 else 0, 10**n) for n in (longer, shorter))
    return (a, b) if rng.random() < 0.5 else (b, a)


def distinct_problems(count: int) -> list[tuple[int, int]]:
    """Problems of which no two are the same sum, either way round."""
    rng, found = random.Random("held out"), {}
    while len(found) < count:
        a, b = random_problem(rng)
        found.setdefault((min(a, b), max(a, b)), (a, b))
    return list(found.values())


HELD_OUT_PROBLEMS = distinct_problems(HELD_OUT)
_HELD_OUT_SUMS = frozenset((min(problem), max(problem)) for problem in HELD_OUT_PROBLEMS)


def training_problem(rng: random.Random) -> tuple[int, int]:
    """A problem that isn't held out, nor its twin b + a."""
    while True:
        a, b = random_problem(rng)
        if (min(a, b), max(a, b)) not in _HELD_OUT_SUMS:
            return a, b


class Addition:
    """`57+68=`, to be answered `>125` or, better, with the work shown: `7+8+0=15;5+6+1=12;>125`."""

    def __init__(self, seed: int, encode: Callable[[str], list[int]]):
        self._seed, self._encode = seed, encode
        self.held_out = [self._prompt(problem) for problem in HELD_OUT_PROBLEMS]

    def training(self, draw: int) -> Prompt:
        """Problem number `draw` of this seed."""
        return self._prompt(training_problem(random.Random(f"problem {self._seed} {draw}")))

    def _prompt(self, problem: tuple[int, int]) -> Prompt:
        a, b = problem
        question = f"{a}+{b}="
        return Prompt(self._encode(question), question, str(a + b))


# ---------------------------------------------------------------- a user's own file


class PromptFile:
    """Rows of a JSONL or Parquet file, in a new seeded order every epoch.

    A row has `messages` (chat turns, rendered with the model's own chat template) or `prompt` (plain text, or
    chat turns), and may have `answer`. A seeded choice of `held_out` rows, at most a tenth, is set aside for
    evaluation. Raises ValueError naming file and line for what can't be used; `max_prompt_tokens` is the room
    that the context leaves.
    """

    def __init__(self, path: Path, encode: Callable[[str | list[dict]], list[int]], seed: int, held_out: int, max_prompt_tokens: int):
        rows = read_rows(path)
        prompts = []
        for line, row in rows:
            tokens = encode(_prompt_of(row, f"{path}:{line}"))
            if len(tokens) > max_prompt_tokens:
                raise ValueError(
                    f"{path}:{line}: the prompt has {len(tokens)} tokens, but --max-model-len less --max-new-tokens leaves room for "
                    f"{max_prompt_tokens}"
                )
            answer = row.get("answer")
            prompts.append(Prompt(tokens, _question_of(row), None if answer is None else str(answer).strip()))
        self.prompts = prompts  # all of them, in the file's order
        order = list(range(len(prompts)))
        random.Random(f"held out {seed}").shuffle(order)
        aside = min(held_out, len(prompts) // 10)
        self.held_out = [prompts[i] for i in order[:aside]]
        self._training = [prompts[i] for i in sorted(order[aside:])]
        self._seed, self._orders = seed, {}

    def training(self, draw: int) -> Prompt:
        """Row number `draw`, counted through the epochs."""
        epoch, position = divmod(draw, len(self._training))
        if epoch not in self._orders:
            order = list(range(len(self._training)))
            random.Random(f"epoch {self._seed} {epoch}").shuffle(order)
            self._orders = {kept: self._orders[kept] for kept in self._orders if kept == epoch - 1} | {epoch: order}
        return self._training[self._orders[epoch][position]]


def read_rows(path: Path) -> list[tuple[int, dict]]:
    """(line or row number from 1, row) of a .jsonl/.json (one object a line) or .parquet file, through the
    `datasets` library.

    Raises ValueError naming the file, and the line of the first row that isn't a JSON object.
    """
    if not path.is_file():
        raise ValueError(f"--data {path}: no such file")
    if path.suffix == ".parquet":
        rows = _parquet_rows(path)
    elif path.suffix in (".jsonl", ".json"):
        # read line by line, not through datasets.load_dataset: its errors don't say which line is at fault
        lines = enumerate(path.read_bytes().splitlines(), 1)
        rows = [(number, _json_row(line, f"{path}:{number}")) for number, line in lines if line.strip()]
    else:
        raise ValueError(f"--data {path}: expected a .jsonl, .json or .parquet file")
    if not rows:
        raise ValueError(f"--data {path}: the file holds no row")
    return rows


def _parquet_rows(path: Path) -> list[tuple[int, dict]]:
    import pyarrow
    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        return list(enumerate(Dataset.from_parquet(str(path), keep_in_memory=True), 1))
    except (pyarrow.ArrowException, DatasetGenerationError):
        raise ValueError(f"--data {path}: not a Parquet file that can be read") from None


def _json_row(line: bytes, where: str) -> dict:
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        raise ValueError(f"{where}: not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object with `messages` or `prompt`, found {type(row).__name__}")
    return row


def _prompt_of(row: dict, where: str) -> str | list[dict]:
    prompt = row.get("messages") or row.get("prompt")
    if prompt and (isinstance(prompt, str) or is_chat(prompt)):
        return prompt
    raise ValueError(f"{where}: needs `messages` (a list of {{role, content}}, both text) or `prompt` (text, or such a list)")


def is_chat(prompt) -> bool:
    """Whether it is a list of chat turns."""
    return isinstance(prompt, list) and all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str) for turn in prompt
    )


def _question_of(row: dict) -> str:
    prompt = row.get("messages") or row["prompt"]
    return prompt if isinstance(prompt, str) else next((t["content"] for t in reversed(prompt) if t["role"] == "user"), "")


# ---------------------------------------------------------------- tokens


def load_tokenizer(model_dir: str, trust_remote_code: bool = False):
    """The tokenizer of a model directory, whose own code runs only if it is trusted.

    Raises ValueError naming the directory when it has none that loads.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_dir, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, AttributeError) as error:  # AttributeError: an odd config.json beside it
        reason = str(error).splitlines()[0]
        raise ValueError(f"no tokenizer could be loaded from {model_dir}: {reason}") from None


def encode(tokenizer, prompt: str | list[dict]) -> list[int]:
    """Token ids of a prompt: chat turns through the chat template, plain text as it is."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    if tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer in {tokenizer.name_or_path} has no chat template, which prompts of chat turns need")
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]


def encode_exchange(tokenizer, turns: list[dict]) -> list[int]:
    """Token ids of a question and its answer, with what ends it: as `run.py rm` has them. Plain text without a chat template."""
    if tokenizer.chat_template is not None:
        return tokenizer.apply_chat_template(turns, return_dict=True)["input_ids"]
    question, answer = (turn["content"] for turn in turns)
    return [*encode(tokenizer, question), *tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def decode(tokenizer, tokens: list[int]) -> str:
    """Text of token ids, without special tokens."""
    return tokenizer.decode(tokens, skip_special_tokens=True)


def stop_tokens(model_dir: str, tokenizer) -> tuple[int, ...]:
    """The ids that end an answer: the tokenizer's end-of-sequence token and those that the model's generation settings name."""
    from transformers import GenerationConfig

    stop = {tokenizer.eos_token_id}
    if (Path(model_dir) / "generation_config.json").is_file():
        named = GenerationConfig.from_pretrained(model_dir, local_files_only=True).eos_token_id
        stop |= set(named if isinstance(named, list) else [named])
    stop.discard(None)
    if not stop:
        raise ValueError(f"{model_dir} names no end-of-sequence token, so no answer could ever end")
    return tuple(sorted(stop))
