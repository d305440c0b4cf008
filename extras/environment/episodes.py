"""A controller's episodes: calls of the user's objects, and how they end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from config import Config
from engines.engine import Answer, seed_of
from extras.environment import Step
from inputs import tokenization
from inputs.rows import Text, as_turns
from inputs.templates import render
from rewards import seen_by_rules
from runtime.errors import UserError
from runtime.hooks import needed
from sample import Key, Reply, Sample
from state import Environment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

    from extras.worker import UserCode

CLOSE_S = 5.0  # how long the end of a run waits for objects to close
RESERVED = {  # names that a class may not have -> what to do instead
    "reset": "an object is one episode, which begins in __init__",
    "start": "an object is one episode, which begins in __init__",
    "tools": "a row's `tools` go to the chat template, and step reads what the policy writes",
}


class Taken(NamedTuple):
    """The outcome of a step. finish: the sample's, or "" if there is a reply for the policy to answer."""

    finish: str
    reply: Reply | None = None
    reward: float = 0.0
    metrics: Mapping[str, float] = {}


@dataclass
class Episode:
    """An object of the user's class, and its current step."""

    has_begun: bool = False  # at its first step
    step: asyncio.Task[Taken] | None = None


@dataclass(eq=False)
class Episodes(Environment):
    """The user's class and this controller's episodes."""

    keeps_turns: ClassVar[bool] = True
    code: UserCode
    tokenizer: Tokenizer
    config: Config
    stop_tokens: Collection[int]
    failed: int = 0  # episodes lost since the run's start
    succeeded: int = 0  # episodes played to the end
    why: str = "an error on another rank"  # the last one was lost
    seconds: list[float] = field(default_factory=list)  # each step's, since the last `means`
    _episodes: dict[Key, Episode] = field(default_factory=dict)
    _closing: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.config.max_running_requests)
        self._encoder = ThreadPoolExecutor(1)  # a tokenizer isn't safe in several threads
        self._let_go = asyncio.Event()  # set to make every pending `answer` return

    async def answer(self, sample: Sample) -> None:
        """Answer a turn. If `let_go` ends it, the step keeps running, and the next call takes its result.

        Raises UserError if the user's code fails, returns an invalid value or exceeds the time limit.
        """
        episode = self._episodes.setdefault(sample.key, Episode())
        if episode.step is None:
            episode.step = asyncio.create_task(self._step(episode, sample))
        let_go = asyncio.create_task(self._let_go.wait())
        try:
            await asyncio.wait({episode.step, let_go}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            let_go.cancel()
        if not episode.step.done():
            return
        taken = episode.step.result()
        episode.step = None
        self.failed += taken.finish == "lost"
        self.succeeded += taken.finish in ("stop", "length")
        sample.finish = taken.finish
        sample.earned = [*sample.earned, taken.reward]
        sample.noted = [*sample.noted, dict(taken.metrics)]
        if taken.reply:
            sample.replies = [*sample.replies, taken.reply]
        else:
            self._close(sample.key)

    def let_go(self) -> None:
        self._let_go.set()
        self._let_go = asyncio.Event()

    def keep(self, prompt_ids: Collection[int]) -> None:
        for key in [key for key in self._episodes if key[0] not in prompt_ids]:
            self._close(key)
        for task in [task for task in self._closing if task.done()]:
            self._closing.remove(task)
            task.result()

    async def close(self) -> None:
        """Close all objects, abandoning slow ones. Raises UserError if one fails. Not collective."""
        for key in [*self._episodes]:
            self._close(key)
        if self._closing:
            done, _ = await asyncio.wait(self._closing, timeout=CLOSE_S)
            for error in filter(None, [task.exception() for task in done]):
                raise error

    def never_succeeded(self, failures: int) -> UserError:
        """Return the error that ends a run whose first episodes were all lost."""
        return UserError(
            f"{self.code.title} lost each of the first {failures} episodes, the last one by {self.why}"
        )

    def check(self, lost: int, begun: int) -> None:
        """Raise UserError if more than half of a step's episodes are lost: the rest would be too few."""
        if 2 * lost > begun:
            raise UserError(
                f"{self.code.title} lost {lost} of a step's {begun} episodes, the last one by {self.why}"
            )

    @property
    def counted(self) -> tuple[Episodes]:
        return (self,)

    def row_checks(self, say: Callable[[str], None]) -> list[Callable]:
        return [chat_check(self.code.title, self.tokenizer, say)]

    def finish_of(self, answer: Answer) -> str:
        """Return `turn`, also after a truncated one."""
        return answer.finish if answer.finish == "abort" else "turn"

    def sums(self, samples: list[Sample]) -> dict[str, int]:
        return {"environment/tokens": sum(s.begun - len(s.response) for s in samples)}

    def means(self, samples: list[Sample]) -> dict[str, list[float]]:
        """Return the values to average for each environment/* metric. step_s: since the last call."""
        played = [sample for sample in samples if sample.finish != "lost"]
        found = {
            "environment/turns_mean": [1 + len(sample.replies) for sample in samples],
            "environment/reward_mean": [math.fsum(sample.earned) for sample in played],
            "environment/lost_frac": [sample.finish == "lost" for sample in samples],
            "environment/step_s": self.seconds,
        }
        for sample in samples:
            for name, number in chain.from_iterable(metrics.items() for metrics in sample.noted):
                found.setdefault(f"environment/{name}", []).append(number)
        self.seconds = []
        return found

    async def _step(self, episode: Episode, sample: Sample) -> Taken:
        """Take a step, or lose the episode."""
        try:
            if not episode.has_begun:
                await self._begin(episode, sample)
            return await self._take(sample)
        except ConnectionError as error:
            self.why = str(error)
            return Taken("lost")

    async def _begin(self, episode: Episode, sample: Sample) -> None:
        """Begin an episode and replay it up to its last turn. Raises ConnectionError if a reply differs."""
        first = Sample(*sample.key, sample.prompt, sample.question, sample.answer_key)
        first.turns, first.row = sample.turns, sample.row
        seen = seen_by_rules(first, partial(tokenization.decode, self.tokenizer))
        seed = seed_of(self.config.seed, "environment", sample.prompt_id)
        await self._call("begin", sample, seen, seed)
        episode.has_begun = True
        for text, reply in zip(self._turns(sample), sample.replies, strict=False):
            again = Step(*await self._call("step", sample, sample.key, text))
            if again.done or await self._tokens(sample, again.reply, reply.start) != reply.tokens:
                raise ConnectionError("a reply that differs after a restart")

    async def _take(self, sample: Sample) -> Taken:
        """Pass the last turn to the user's object, unless the token limit cut that turn off."""
        step = Step(done=True)
        finish = "length"
        is_cut = sample.begun == self.config.max_new_tokens
        if not is_cut or sample.response[-1] in self.stop_tokens:
            clock = asyncio.get_running_loop().time
            start = clock()
            text = self._turns(sample)[-1]
            step = Step(*await self._call("step", sample, sample.key, text))
            self.seconds.append(clock() - start)
            finish = "stop"
        if not step.done:
            place = len(sample.response)
            tokens = await self._tokens(sample, step.reply, place)
            # a reply that leaves no room for the next turn is dropped: cutting it could change its meaning
            if tokens is not None and sample.begun + len(tokens) < self.config.max_new_tokens:
                return Taken("", Reply(place, tokens, step.reply), step.reward, step.metrics)
            finish = "length"
        reward = step.reward
        if "score" in self.code.names:
            reward += await self._call("score", sample, sample.key)
        return Taken(finish, None, reward, step.metrics)

    def _close(self, key: Key) -> None:
        self._closing.add(asyncio.create_task(self._close_object(self._episodes.pop(key), key)))

    async def _close_object(self, episode: Episode, key: Key) -> None:
        try:
            if episode.step:
                await episode.step
        finally:
            if episode.has_begun:
                with suppress(ConnectionError):  # it is already gone
                    await self._call("close", Sample(*key, []), key)

    async def _call(self, verb: str, sample: Sample, *given: Any) -> Any:
        """Call the user's object. Raises UserError, or ConnectionError if that loses the episode."""
        what = f"{self.code.title}: {verb} on the prompt {sample.question[:60]!r}"
        async with self._free:
            return await self.code.call(verb, *given, what=what)

    def _turns(self, sample: Sample) -> list[str]:
        """Return the policy's turns as text, without end tokens but with other special tokens."""
        starts = [0, *(reply.start for reply in sample.replies)]
        ends = [*starts[1:], len(sample.response)]
        decode = partial(tokenization.decode, self.tokenizer, special=True)
        without_end = [slice(start, end - 1) for start, end in zip(starts, ends, strict=True)]
        return [decode(sample.response[turn]) for turn in without_end]

    async def _tokens(self, sample: Sample, turns: list[dict], place: int) -> list[int] | None:
        """Encode a reply, after the template's end if the turn ended otherwise; None if it can't fit."""
        title = self.code.title
        if not sample.turns and (len(turns) > 1 or turns[0]["role"] != "user"):
            role = turns[0]["role"]
            raise UserError(f"{title}: a reply to a prompt of text is text, not the {role}'s turn")
        characters = sum(1 + len(turn["content"]) for turn in turns)
        if characters > self.config.max_new_tokens * tokenization.longest_token(self.tokenizer):
            return None
        tokens = await self._encode(sample.turns, turns)
        end = tokenization.end_of_turn(self.tokenizer)
        return [end, *tokens] if sample.turns and sample.response[place - 1] != end else tokens

    async def _encode(self, prompt: list[dict], reply: list[dict]) -> list[int]:
        """Encode in a thread: a long reply would block the event loop."""
        encode = partial(tokenization.encode_reply, self.tokenizer, prompt, reply, self.code.title)
        return await asyncio.get_running_loop().run_in_executor(self._encoder, encode)


def build(config: Config, tokenizer: Tokenizer, stop_tokens: Collection[int]) -> Episodes | None:
    """Load the user's class, if there is one. Raises UserError if it can't be found or uses a reserved
    name."""
    if not config.environment:
        return None
    title = f"--environment {config.environment}"
    specs = "FILE.py or FILE.py:Class"
    load = needed("user_code", title)
    code = load(title, config.environment, "Environment", "class {}", specs, config.timeout_s)
    for name in RESERVED.keys() & {*code.names}:
        raise UserError(f"{title}: {name} is reserved: {RESERVED[name]}")
    if "step" not in code.names:
        raise UserError(f"{title}: the class has no step(self, text)")
    return Episodes(code, tokenizer, config, stop_tokens)


def chat_check(
    title: str, tokenizer: Tokenizer, say: Callable[[str], None]
) -> Callable[[Text, str], None]:
    """Return a check of prompts, which raises UserError if the template rewrites earlier turns."""
    seen = set()

    def check(prompt: Text, where: str) -> None:
        if isinstance(prompt, str):
            return
        roles = ("tools" in prompt[0], *(turn["role"] for turn in prompt))
        if roles in seen:
            return
        asked = as_turns("So?", "user")
        tokenization.encode_reply(tokenizer, prompt, asked, where)
        thought = as_turns("<think>\nHm.\n</think>\n\nyes", "assistant")
        if not seen and "Hm." not in render(tokenizer, [*prompt, *thought, *asked], where):
            say(
                f"{title}: the chat template leaves out earlier reasoning; "
                "earlier turns keep it as it was sampled"
            )
        seen.add(roles)

    return check
