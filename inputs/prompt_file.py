"""A file of prompts: all rows are checked at the start, and each is encoded when it is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm import tqdm

from inputs.rows import PLACES, Text, answer_key, as_turns, prompt_of, read_rows
from inputs.shuffled import Shuffled, identities
from inputs.templates import IMAGE, VIDEO, render
from inputs.tokenization import Reader, check_prompt, encode, encode_prompt
from runtime.errors import UserError
from runtime.shared import once_a_machine
from sample import Prompt

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedTokenizerBase as Tokenizer


ReadKey = Callable[[str], str | None]


class PromptRow(NamedTuple):
    where: str  # file and line
    prompt: Text
    answer_key: str | None
    media: dict[str, Callable[[], list]] | None  # IMAGE or VIDEO -> a function that reads the files
    row: dict[str, Any]  # all columns except media bytes


@dataclass(eq=False)
class PromptFile(Sequence[Prompt]):
    """The prompts of a file, encoded only when drawn: the tokens of all of them could fill the memory.

    Rows have `messages` (chat turns) or `prompt` (plain text, or chat turns), and optionally `answer`,
    `images`, `videos`. Raises UserError, naming file and line, if a row is invalid.
    """

    path: Path
    tokenizer: Tokenizer
    max_tokens: int  # longest prompt that fits the context; longer ones are left out
    say: Callable[[str], None] = print
    reader: Reader | None = None  # for models with vision
    read_key: ReadKey = str  # as JudgeFormat.read_key
    needs: dict[str, ReadKey] = field(default_factory=dict)  # a setting -> how it reads its keys
    setting: str = "--data"  # or --eval-data
    # the judges' and the environment's; they raise UserError
    checks: Sequence[Callable[[Text, str], None]] = ()
    keeps_turns: bool = False  # also for one-turn chats; rows without a key may be held out

    def __post_init__(self):
        self._frame = len(encode(self.tokenizer, "x"))  # includes what the tokenizer adds to a text
        self._rows = once_a_machine(f"rows of {self.setting}", self._checked())

    def _checked(self) -> Iterator[PromptRow]:
        """Yield the rows that fit, and report the others. Raises UserError if a row can't be used."""
        counts = Counter()
        rows = read_rows(self.path, self.setting, self.say)
        bar = dict(unit=" rows", delay=5.0, mininterval=5.0)  # also drawn in a log file
        for line, columns in tqdm(rows, f"checks of {self.setting}", **bar):
            row = self._row(line, columns)
            fits = self._most_tokens(row) <= self.max_tokens
            counts[fits] += 1
            if fits:
                yield row
        if not counts[True]:
            raise UserError(
                f"{self.path}: no prompt fits: --max-model-len less --max-new-tokens leaves room "
                f"for {self.max_tokens} tokens"
            )
        if longer := counts[False]:
            self.say(
                f"{longer} of {counts.total()} prompts in {self.path} are left out: "
                f"over --max-model-len less --max-new-tokens, {self.max_tokens} tokens"
            )

    def _row(self, line: int, row: dict) -> PromptRow:
        """Raise UserError if a row can't be used, as far as that shows without reading its media."""
        where = f"{self.path}:{line}"
        prompt = prompt_of(row, where, self.reader is not None)
        check_prompt(self.tokenizer, prompt, where)
        for check in self.checks:
            check(prompt, where)
        media = self.reader and self.reader.media_of(row, prompt, self.path.parent, where)
        for name in filter(row.get, () if self.reader else PLACES):
            raise UserError(f"{where}: it has {name}, and --model only reads text")
        columns = {name: value for name, value in row.items() if not callable(value)}
        return PromptRow(where, prompt, self._key(row, where), media, columns)

    def _key(self, row: dict, where: str) -> str | None:
        """Return the key in the form of final answers. Raises UserError if it is missing or unreadable."""
        key = answer_key(row.get("answer"), where)
        if key is None and self.needs:
            raise UserError(
                f"{where}: `answer` is missing, for {' and '.join(self.needs)}; "
                f"the row has {', '.join(row)}"
            )
        for name, read in {"--judge-format": self.read_key, **self.needs}.items():
            if key is not None and read(key) is None:
                raise UserError(
                    f"{where}: {name} finds no key in {row['answer']!r:.60}; "
                    "for number a key is one plain number, such as 1,234.5"
                )
        return key and self.read_key(key)

    def _read(self, row: PromptRow, decodes: bool = True) -> tuple[Text, list[int], tuple]:
        """Return a row's prompt with its media filled in, its tokens, and its images."""
        text = row.prompt
        images = ()
        if self.reader:
            text, images = self.reader.fill(text, row.media, row.where, decodes)
        return text, encode_prompt(self.tokenizer, self.reader, text, images, row.where), images

    def _files(self, number: int) -> list:
        """Return the files of a prompt's images and clips."""
        media = self._rows[number].media or {}
        return [file for files in media.values() for file in files()]

    def _most_tokens(self, row: PromptRow) -> int:
        """Bound a prompt's tokens by its bytes and clips' headers; if the bound is too large, count them."""
        if self.reader and row.media[VIDEO]():
            most = len(self._read(row, decodes=False)[1])
        else:
            text = row.prompt
            if not isinstance(text, str):
                text = render(self.tokenizer, text, row.where)
            most = len(text.encode()) + self._frame
            if self.reader:
                most += text.count(IMAGE) * self.reader.most_features
        return most if most <= self.max_tokens else len(self._read(row)[1])

    def __len__(self) -> int:
        return len(self._rows)

    def shuffled(self, seed: int, held_out: int) -> Shuffled:
        """Return the training rows; up to `held_out` prompts with a key are in its `held_out`."""
        [order] = once_a_machine("order", map(self._order, [seed], [held_out]))
        order.rows = self
        aside = copy(self)
        aside._rows = [self._rows[number] for number in order.held_out]
        order.held_out = aside
        return order

    def _order(self, seed: int, held_out: int) -> Shuffled:
        """Return the order of the rows' numbers, and report it."""
        prompts = identities((row.prompt for row in self._rows), self._files)
        keyless = {n for n, row in enumerate(self._rows) if row.answer_key is None}
        kept = () if self.keeps_turns else keyless
        order = Shuffled(range(len(self)), seed, held_out, prompts=prompts, keyless=kept)
        self.say(
            f"{self.path}: {order.count} rows train, {len(order.held_out)} measure, "
            f"{order.repeats} repeat a prompt, {len(keyless)} lack a key"
        )
        return order

    def compare(self, trained: PromptFile | None) -> None:
        """Report how many prompts repeat one of this file, or are also in the one that is trained on."""
        rows = trained._rows if trained else []

        def files(number: int) -> list:
            return self._files(number) if number < len(self) else trained._files(number - len(self))

        found = identities((row.prompt for row in chain(self._rows, rows)), files)
        own = Counter(found[: len(self)])
        repeats = len(self) - len(own)
        known = sum(own[each] for each in {*found[len(self) :]})
        if repeats or known:
            counts = f"{repeats} repeat another, {known} are also trained on"
            self.say(f"{self.path}: of {len(self)} prompts that measure {counts}")

    def __getitem__(self, number: int) -> Prompt:
        row = self._rows[number]
        text, tokens, images = self._read(row)
        # a template or normalizer can exceed the bound of `_most_tokens`
        if len(tokens) > self.max_tokens:
            raise UserError(
                f"{row.where}: the prompt has {len(tokens)} tokens, but "
                f"--max-model-len less --max-new-tokens leaves room for {self.max_tokens}"
            )
        turns = as_turns(text, "user")
        question = next(turn["content"] for turn in reversed(turns) if turn["role"] == "user")
        is_kept = self.keeps_turns and not isinstance(text, str)
        several = turns if is_kept or len(turns) > 1 or "tools" in turns[0] else []
        return Prompt(tokens, question, row.answer_key, images, several, row.row)
