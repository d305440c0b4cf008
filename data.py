"""Prompts and tokens: rows of a file and their order, the cursor over prompts, texts and chats as tokens."""

from __future__ import annotations

import asyncio
import heapq
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import Executor
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from config import Config
from images.reader import IMAGE, VIDEO, ImageReader, check_places, media_file
from images.tokens import Image, expand
from inputs.hf_directory import readable
from inputs.rows import Text, answer_key, as_turns, fill, media_of, prompt_of, read_rows, transcript
from inputs.shuffled import Shuffled, identities
from inputs.templates import apply_settings, break_special_tokens, render
from runtime.errors import UserError
from sample import Sample

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedTokenizerBase as Tokenizer

Pair = tuple[list[int], list[int]]  # tokens of a prompt, and of its response with what ends it
Group = list[Sample]  # the answers to one prompt
READERS = 4  # threads that read prompts: a clip in 1080p takes seconds
ReadKey = Callable[[str], str | None]


@dataclass(frozen=True)
class Prompt:
    tokens: list[int]
    question: str  # the last turn of the user
    answer_key: str | None  # for the accuracy and for rules; no judge sees it
    images: tuple[Image, ...] = field(default=(), compare=False)
    turns: list[dict] = field(default_factory=list)  # as Sample.turns
    row: dict[str, Any] = field(default_factory=dict, compare=False)


class Source(Protocol):
    """A source of prompts: `training` without end, and others held out."""

    held_out: Sequence[Prompt]

    def training(self, prompt_id: int) -> Prompt: ...


@dataclass(eq=False)
class Prompts:
    """A cursor over a source and its requeued prompts, equal on all ranks; `groups` stay where they are."""

    source: Source
    answers: int  # of a group
    keeps_groups: bool = False  # of requeued prompts
    has_greedy: bool = False  # one answer more, which is generated greedily
    has_images: bool = False
    threads: Executor | None = None  # that read prompts with images or clips
    cursor: int = 0  # next prompt_id that was never drawn
    requeued: list[int] = field(default_factory=list)  # drawn, but not used
    groups: dict[int, Group] = field(default_factory=dict)  # of requeued prompts, as generated here
    owners: dict[int, int] = field(
        default_factory=dict
    )  # requeued prompt_id -> the rank that has its group
    _ahead: dict[int, Awaitable[Prompt]] = field(default_factory=dict, init=False)  # being read

    def draw(self, count: int) -> list[int]:
        """Take the next prompt_ids: first those that were requeued, then new ones."""
        again = self.requeued[:count]
        del self.requeued[:count]
        fresh = range(self.cursor, self.cursor + count - len(again))
        self.cursor = fresh.stop
        return again + list(fresh)

    def assign_owners(self, prompt_ids: list[int], controllers: int) -> dict[int, int]:
        """Map prompt_ids to controllers: to the one that has the group, else the one with the fewest."""
        owners = {i: self.owners[i] for i in prompt_ids if i in self.owners}
        counts = dict.fromkeys(range(controllers), 0) | Counter(self.owners.values())
        heap = sorted((count, rank) for rank, count in counts.items())
        for prompt_id in prompt_ids:
            if prompt_id not in owners:
                count, rank = heap[0]
                owners[prompt_id] = rank
                heapq.heapreplace(heap, (count + 1, rank))
        self.owners |= owners
        return owners

    async def read(self, prompt_ids: Collection[int]) -> dict[int, Prompt]:
        """Read prompts for training, several at once. UserError for one that can't be used."""
        self._begin(prompt_ids)
        return {prompt_id: await self._ahead.pop(prompt_id) for prompt_id in prompt_ids}

    def read_ahead(self, count: int, controllers: int, rank: int) -> None:
        """Begin to read what this controller will get of the next `count` prompts, as far as is known now."""
        if self.threads is None:
            return
        preview = replace(self, requeued=list(self.requeued), owners=dict(self.owners))
        owners = preview.assign_owners(preview.draw(count), controllers)
        own = [prompt_id for prompt_id, owner in owners.items() if owner == rank]
        for prompt_id in self._ahead.keys() - own:
            self._ahead.pop(prompt_id).cancel()
        self._begin(own)

    def _begin(self, prompt_ids: Collection[int]) -> None:
        for prompt_id in prompt_ids:
            if prompt_id not in self._ahead:
                read = self.in_thread(self.source.training, prompt_id)
                self._ahead[prompt_id] = asyncio.create_task(read) if self.threads else read

    async def in_thread(self, read: Callable[[int], Prompt], number: int) -> Prompt:
        """Call `read` off the event loop, which a clip would hold up for seconds."""
        if self.threads is None:
            return read(number)
        return await asyncio.get_running_loop().run_in_executor(self.threads, read, number)

    def group(self, prompt_id: int, prompt: Prompt) -> Group:
        """Return the group of a prompt: as far as it was generated, or empty samples."""
        fields = (prompt.tokens, prompt.question, prompt.answer_key, prompt.images, prompt.turns)
        indices = range(self.answers + self.has_greedy)
        group = [Sample(prompt_id, i, *fields, greedy=i == self.answers) for i in indices]
        group = self.groups.pop(prompt_id, group)
        for sample in group:
            sample.media = prompt.images
            sample.row = prompt.row
        return group

    async def attach_images(self, samples: list[Sample]) -> None:
        """Read the images of samples that came without. Images are never sent: all machines have them."""
        if self.has_images:
            prompts = await self.read({sample.prompt_id for sample in samples})
            for sample in samples:
                sample.media = prompts[sample.prompt_id].images

    def requeue(self, prompt_ids: list[int], groups: list[Group]) -> None:
        """Have prompts that weren't used come first in the next step. groups: this controller's of them."""
        self.requeued[:0] = prompt_ids
        kept = self.requeued if self.keeps_groups else []
        self.owners = {i: self.owners[i] for i in kept if i in self.owners}
        if self.keeps_groups:
            self.groups |= {group[0].prompt_id: group for group in groups}

    def state(self) -> dict:
        """Return what a checkpoint keeps beside `groups`. Pairs, because JSON has no numbers for keys."""
        owners = list(self.owners.items())
        return {"cursor": self.cursor, "requeued": list(self.requeued), "owners": owners}

    def load_state(self, state: dict, groups: list[Group], controllers: int, rank: int) -> None:
        """Continue from a `state`. groups: of all controllers. rank: data-parallel; -1 asks no engine."""
        self.cursor = state["cursor"]
        self.requeued = list(state["requeued"])
        if self.keeps_groups:
            self.owners = {prompt_id: owner % controllers for prompt_id, owner in state["owners"]}
        own = [group for group in groups if self.owners.get(group[0].prompt_id) == rank]
        self.groups = {group[0].prompt_id: group for group in own}


class PromptRow(NamedTuple):
    where: str  # file and line
    prompt: Text
    answer_key: str | None
    media: dict[str, Callable[[], list]]  # place -> paths and bytes, as `media_file` takes them
    row: dict[str, Any]  # all columns but media that are bytes


@dataclass(eq=False)
class PromptFile(Sequence[Prompt]):
    """The prompts of a file, each encoded when it is drawn: the tokens of all could fill the memory.

    Rows have `messages` (chat turns) or `prompt` (plain text, or chat turns), and maybe `answer`, `images`,
    `videos`. UserError for what can't be used: file and line.
    """

    path: Path
    tokenizer: Tokenizer
    max_tokens: int  # of a prompt: room in the context; longer ones are left out
    say: Callable[[str], None] = print
    reader: ImageReader | None = None  # of a model that sees
    read_key: ReadKey = str  # as JudgeFormat.read_key
    needs: dict[str, ReadKey] = field(default_factory=dict)  # what needs keys -> how it reads them
    setting: str = "--data"  # or --eval-data
    scorers: Sequence[Tokenizer] = ()  # of scalar judges, which are shown all turns

    def __post_init__(self):
        self._frame = len(encode(self.tokenizer, "x"))  # with what stands before a text
        rows = [self._row(line, row) for line, row in read_rows(self.path, self.setting)]
        self._rows = [row for row in rows if self._most_tokens(row) <= self.max_tokens]
        if not self._rows:
            raise UserError(f"{self.path}: no prompt has at most {self.max_tokens} tokens")
        if longer := len(rows) - len(self._rows):
            room = f"--max-model-len less --max-new-tokens, {self.max_tokens} tokens"
            self.say(f"{longer} of {len(rows)} prompts in {self.path} are left out: over {room}")

    def _row(self, line: int, row: dict) -> PromptRow:
        """Check all of a row that can be checked before its media are read. UserError."""
        where = f"{self.path}:{line}"
        prompt = prompt_of(row, where, self.reader is not None)
        check_prompt(self.tokenizer, prompt, where)
        for tokenizer in self.scorers:
            encode_exchange(tokenizer, prompt, "yes", where=where)
        media = media_of(row, prompt, self.path.parent, where, self.reader is not None)
        columns = {name: value for name, value in row.items() if not callable(value)}
        return PromptRow(where, prompt, self._key(row, where), media, columns)

    def _key(self, row: dict, where: str) -> str | None:
        """Read the answer key in the form of final answers. UserError for one that isn't as needed."""
        key = answer_key(row.get("answer"), where)
        if key is None and self.needs:
            missing = f"`answer` is missing, for {' and '.join(self.needs)}"
            raise UserError(f"{where}: {missing}; the row has {', '.join(row)}")
        for name, read in {"--judge-format": self.read_key, **self.needs}.items():
            if key is not None and read(key) is None:
                form = "; for number a key is one plain number, such as 1,234.5"
                raise UserError(f"{where}: {name} finds no key in {row['answer']!r:.60}{form}")
        return key and self.read_key(key)

    def _read(self, row: PromptRow, decodes: bool = True) -> tuple[Text, list[int], tuple]:
        """Return a row's prompt with its media in place, its tokens, its images: see read_item."""
        text = row.prompt
        images = ()
        if self.reader:
            read = partial(self.reader.read_item, self.path.parent, row.where, decodes)
            text, images = fill(text, row.media, read, row.where)
        return text, encode_prompt(self.tokenizer, self.reader, text, images, row.where), images

    def _files(self, number: int) -> list:
        row = self._rows[number]
        items = row.media[IMAGE]() + row.media[VIDEO]()
        return [media_file(item, self.path.parent, row.where) for item in items]

    def _most_tokens(self, row: PromptRow) -> int:
        """Bound a prompt's tokens by its bytes, and clips' headers; where that is too much, count them."""
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

    def shuffled(self, seed: int, held_out: int) -> Shuffled[Prompt]:
        """Return the rows to train on, with up to `held_out` prompts aside that have a key."""
        prompts = identities([row.prompt for row in self._rows], self._files)
        keyless = {n for n, row in enumerate(self._rows) if row.answer_key is None}
        order = Shuffled(self, seed, held_out, prompts=prompts, keyless=keyless)
        aside = copy(self)
        aside._rows = [self._rows[number] for number in order.held_out]
        order.held_out = aside
        measured = f"{len(aside)} measure, {order.repeats} repeat a prompt"
        self.say(f"{self.path}: {order.count} rows train, {measured}, {len(keyless)} lack a key")
        return order

    def __getitem__(self, number: int) -> Prompt:
        row = self._rows[number]
        text, tokens, images = self._read(row)
        # `_most_tokens` thought too little of a template or normaliser
        if len(tokens) > self.max_tokens:
            room = f"--max-model-len less --max-new-tokens leaves room for {self.max_tokens}"
            raise UserError(f"{row.where}: the prompt has {len(tokens)} tokens, but {room}")
        turns = as_turns(text, "user")
        question = next(turn["content"] for turn in reversed(turns) if turn["role"] == "user")
        several = turns if len(turns) > 1 or "tools" in turns[0] else []
        return Prompt(tokens, question, row.answer_key, images, several, row.row)


def load_tokenizer(model_dir: str) -> Tokenizer:
    """Load a directory's tokenizer; code that it brings along never runs. UserError if none loads."""
    from transformers import AutoTokenizer

    options = {"local_files_only": True, "trust_remote_code": False}
    with readable(f"no tokenizer could be loaded from {model_dir}"):
        tokenizer = AutoTokenizer.from_pretrained(model_dir, **options)
        if not isinstance(tokenizer.chat_template, str | dict | None):
            raise ValueError("its chat template isn't text")
    return tokenizer


def load_tokenizers(config: Config, say: Callable[[str], None]) -> list[Tokenizer]:
    """Load the policy's, then the judges', with --template's settings. UserError."""
    tokenizers = [load_tokenizer(model) for model in (config.model, *config.judge_models)]
    apply_settings(tokenizers, config.template, say)
    return tokenizers


@lru_cache(maxsize=8)  # rendered once for a model, not for each of its rows
def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """Find the token by which the chat template ends an answer: special, or named as an end; or None."""
    if tokenizer.chat_template is None:
        return None
    turns = as_turns("Is it?", "user") + as_turns("yes", "assistant")
    try:
        text = render(tokenizer, turns, "a prompt", is_complete=True)
    except UserError:  # rows of text need no template
        return None
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    ends = special | named_ends(tokenizer.name_or_path)
    behind = tokenizer(text.rpartition("yes")[2], add_special_tokens=False)["input_ids"]
    return next((token for token in behind if token in ends), None)


def check_end(tokenizer: Tokenizer, text: str, where: str, name: str) -> None:
    """Raise UserError if a text, of this name, ends with what ends an answer, which comes by itself."""
    stop = {tokenizer.eos_token_id, end_of_turn(tokenizer)} - {None}
    if text.endswith(tuple(map(tokenizer.decode, stop))):
        raise UserError(f"{where}: the {name} ends with what ends an answer: {text[-20:]!r}")


def check_prompt(tokenizer: Tokenizer, prompt: Text, where: str) -> None:
    """Raise UserError, which says `where`, if no answer can follow the prompt, or none could end."""
    end = end_of_turn(tokenizer)
    if isinstance(prompt, str):
        check_end(tokenizer, prompt, where, "prompt")
    elif end is None and tokenizer.chat_template is not None:
        render(tokenizer, prompt, where)  # UserError, if that is why
        problem = "ends an answer with no special token, so none could end"
        raise UserError(f"{where}: the chat template in {tokenizer.name_or_path} {problem}")


def encode_prompt(
    tokenizer: Tokenizer, reader: ImageReader | None, prompt: Text, images=(), where="a prompt"
) -> list[int]:
    """Encode a prompt; each IMAGE is one of `images`, if the model sees. UserError for too few or many."""
    if reader is None:
        return encode(tokenizer, prompt, where)
    image = "".join(tokenizer.convert_ids_to_tokens(reader.placeholder))
    tokens = encode(tokenizer, prompt, where, image=image)
    check_places(tokens.count(reader.image_token), images, IMAGE, where)
    return expand(tokens, images)


def encode(
    tokenizer: Tokenizer, prompt: Text, where="a prompt", is_complete=False, image: str = IMAGE
) -> list[int]:
    """Encode text, or chat turns as `render` writes them. UserError."""
    if isinstance(prompt, str):
        text = prompt.replace(IMAGE, image)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        framed = tokenizer(text)["input_ids"]
        # behind a BOS that the tokenizer adds, unless the text spells it; no EOS: it is to go on
        return framed[: framed.index(tokens[0])] + tokens if tokens else framed
    text = render(tokenizer, prompt, where, is_complete, image=image)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def encode_pair(tokenizer: Tokenizer, prompt: Text, response: Text, where="a prompt") -> Pair:
    """Encode two texts, or two lists of turns. UserError if the template doesn't put one behind the other."""
    start = encode(tokenizer, prompt, where)
    if isinstance(prompt, str):
        # encoded apart: a token across the border would be none of a prompt's
        answer = tokenizer(response, add_special_tokens=False)["input_ids"]
        return start, [*answer, tokenizer.eos_token_id]
    text = render(tokenizer, prompt + response, where, is_complete=True, is_learned=True)
    both = tokenizer(text, add_special_tokens=False)["input_ids"]
    if both[: len(start)] != start or both == start:
        raise UserError(f"{where}: the chat template doesn't put the answer behind its prompt")
    return start, both[len(start) :]


def encode_exchange(
    tokenizer: Tokenizer, prompt: Text, answer: Text, is_cut=False, where="a prompt"
) -> list[int]:
    """Encode a prompt and an answer as a scalar reward model reads them. is_cut: without the end."""
    turns = [*as_turns(prompt, "user"), *as_turns(answer, "assistant")]
    needs_template = "tools" in turns[0] or "tool_calls" in turns[-1]
    if tokenizer.chat_template is not None or needs_template:
        tokens = encode(tokenizer, turns, where, is_complete=True)
        end = end_of_turn(tokenizer)
    else:
        texts = (transcript(turns[:-1]), turns[-1]["content"])
        pair = encode_pair(tokenizer, *(break_special_tokens(tokenizer, text) for text in texts))
        tokens = pair[0] + pair[1]
        end = tokenizer.eos_token_id
    if is_cut and end in tokens:
        del tokens[-1 - tokens[::-1].index(end) :]  # from the last of them on
    return tokens


def decode(tokenizer: Tokenizer, tokens: list[int], special: bool = False) -> str:
    """Return the text of tokens, `special` ones among them or left out."""
    return tokenizer.decode(tokens, skip_special_tokens=not special)


def named_ends(model_dir: str) -> set[int]:
    """The end-of-sequence tokens of a directory's generation_config.json, if it has one."""
    path = Path(model_dir, "generation_config.json")
    named = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    ends = named if isinstance(named, list) else [named]
    if not all(isinstance(end, int | None) for end in ends):
        raise UserError(f"{path}: eos_token_id is a number, or several, not {named!r:.60}")
    return {*ends} - {None}


def stop_tokens(
    model_dir: str, tokenizer: Tokenizer, reader: ImageReader | None = None, say=lambda line: None
) -> tuple[int, ...]:
    """The ids that end an answer: of a sequence, a turn, generation_config.json's, an image's."""
    end = end_of_turn(tokenizer)
    stop = ({tokenizer.eos_token_id, end} | named_ends(model_dir)) - {None}
    if not stop:
        raise UserError(f"{model_dir} names no end-of-sequence token, so no answer could ever end")
    if end is not None:
        say(f"{model_dir}: its chat template ends an answer with {tokenizer.decode(end)}")
    return tuple(sorted({*stop, *(reader.stop_tokens if reader else ())}))
