"""The episodes of a controller: their objects, the threads in which these run, and what becomes of them."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from config import Config
from engines.engine import seed_of
from environment import Step, is_number, read_step
from inputs import tokenization
from inputs.rows import Text, as_turns
from inputs.templates import render
from rewards import seen_by_rules
from runtime import user_code
from runtime.errors import UserError
from runtime.user_code import UserCode
from sample import Key, Reply, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

CLOSE_S = 5.0  # that the end of a run waits for objects to close
RESERVED = {  # names that a class may not have -> what to do instead
    "reset": "an object is one episode, which begins in __init__",
    "start": "an object is one episode, which begins in __init__",
    "tools": "a row's `tools` go to the chat template, and step reads what the policy writes",
}


class Taken(NamedTuple):
    """What a step came to. finish: of the sample; "" with a reply, to which the policy answers."""

    finish: str
    reply: Reply | None = None
    reward: float = 0.0
    metrics: Mapping[str, float] = {}


@dataclass
class Episode:
    """An instance of the user's class, and the step that it takes now."""

    instance: Any = None  # of the class, once it is made
    step: asyncio.Task[Taken] | None = None


@dataclass(eq=False)
class Episodes:
    """The user's class, and the episodes of this controller. The user's code never runs in its thread."""

    kind: type
    code: UserCode
    tokenizer: Tokenizer
    config: Config
    stop_tokens: Collection[int]
    failed: int = 0  # episodes that were lost, since the run's start
    succeeded: int = 0  # episodes that were played to their end
    seconds: list[float] = field(default_factory=list)  # of each step since they were last taken
    _episodes: dict[Key, Episode] = field(default_factory=dict)
    _closing: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        at_once = self.config.max_running_requests
        self._limit_s = 0.9 * self.config.timeout_s  # other ranks wait for all of it
        self._free = asyncio.Semaphore(at_once)
        self._threads = ThreadPoolExecutor(at_once)
        self._loop = asyncio.new_event_loop()  # for what is async, in a thread of its own
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._going = asyncio.Event()  # set when those who wait for a step are to go

    async def answer(self, sample: Sample) -> None:
        """Answer a turn that has ended: the sample goes on or is finished. As it was after `let_go`.

        A step that nobody waits for any more goes on, and the next call takes what it came to. UserError for
        an error in the user's code, for what it may not return, and for no answer in time.
        """
        episode = self._episodes.setdefault(sample.key, Episode())
        if episode.step is None:
            episode.step = asyncio.create_task(self._step(episode, sample))
        going = asyncio.create_task(self._going.wait())
        try:
            await asyncio.wait({episode.step, going}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            going.cancel()
        if not episode.step.done():
            return
        taken = episode.step.result()
        episode.step = None
        self.failed += taken.finish == "lost"
        self.succeeded += taken.finish in ("stop", "length")
        sample.finish = taken.finish
        sample.earned = [*sample.earned, taken.reward]
        for name, number in taken.metrics.items():
            sample.noted[name] = [*sample.noted.get(name, []), float(number)]
        if taken.reply:
            sample.replies = [*sample.replies, taken.reply]
        else:
            self._close(sample.key)

    def let_go(self) -> None:
        """Have all who wait for a step return now."""
        self._going.set()
        self._going = asyncio.Event()

    def keep(self, prompt_ids: Collection[int]) -> None:
        """Close all episodes but those of these prompts, which go on in a later step."""
        for key in [key for key in self._episodes if key[0] not in prompt_ids]:
            self._close(key)
        for task in [task for task in self._closing if task.done()]:
            self._closing.remove(task)
            task.result()

    async def close(self) -> None:
        """Close all objects; those that take too long are left. Not collective. UserError of one of them."""
        for key in [*self._episodes]:
            self._close(key)
        if self._closing:
            done, _ = await asyncio.wait(self._closing, timeout=CLOSE_S)
            for error in filter(None, [task.exception() for task in done]):
                raise error

    def never_succeeded(self, failures: int) -> str:
        """Return what ends the run after so many lost episodes, if none was played to its end."""
        lost = f"{self.code.title} lost each of the first {failures} episodes"
        return f"{lost}: it raised ConnectionError or TimeoutError, or differed"

    def means(self, samples: list[Sample]) -> dict[str, list[float]]:
        """The values of environment/* that are averaged over finished samples; of step_s, since last time."""
        played = [sample for sample in samples if sample.finish != "lost"]
        found = {
            "environment/turns_mean": [1 + len(sample.replies) for sample in samples],
            "environment/reward_mean": [math.fsum(sample.earned) for sample in played],
            "environment/lost_frac": [sample.finish == "lost" for sample in samples],
            "environment/step_s": self.seconds,
        }
        for sample in samples:
            for name, values in sample.noted.items():
                found[f"environment/{name}"] = found.get(f"environment/{name}", []) + values
        self.seconds = []
        return found

    async def _step(self, episode: Episode, sample: Sample) -> Taken:
        """Take a step. If the world can't be reached, the episode is lost."""
        try:
            if episode.instance is None:
                await self._begin(episode, sample)
            return await self._take(episode.instance, sample)
        except (ConnectionError, TimeoutError):
            return Taken("lost")

    async def _begin(self, episode: Episode, sample: Sample) -> None:
        """Begin an episode, and play it up to its last turn. ConnectionError: a reply differs."""
        own = deepcopy((sample.turns, sample.row))
        first = Sample(*sample.key, [*sample.prompt], sample.question, sample.answer_key)
        first.turns, first.row = own
        seen = seen_by_rules(first, partial(tokenization.decode, self.tokenizer))
        seed = seed_of(self.config.seed, "environment", sample.prompt_id)
        episode.instance = await self._call(partial(self.kind, seen, seed=seed), sample)
        for text, reply in zip(self._turns(sample), sample.replies, strict=False):
            again = self._read(await self._call(partial(episode.instance.step, text), sample))
            if again.done or self._tokens(sample, again.reply, reply.start) != reply.tokens:
                raise ConnectionError("it isn't where it was")

    async def _take(self, instance: Any, sample: Sample) -> Taken:
        """Have an object answer the last turn. One that the limit of tokens cut off it doesn't see."""
        step = Step(done=True)
        finish = "length"
        is_cut = sample.begun == self.config.max_new_tokens
        if not is_cut or sample.response[-1] in self.stop_tokens:
            clock = asyncio.get_running_loop().time
            start = clock()
            text = self._turns(sample)[-1]
            step = self._read(await self._call(partial(instance.step, text), sample))
            self.seconds.append(clock() - start)
            finish = "stop"
        if not step.done:
            place = len(sample.response)
            tokens = self._tokens(sample, step.reply, place)
            # one that leaves the next turn no room isn't cut: it would say something else
            if sample.begun + len(tokens) < self.config.max_new_tokens:
                return Taken("", Reply(place, tokens, step.reply), float(step.reward), step.metrics)
            finish = "length"
        reward = float(step.reward)
        if "score" in dir(self.kind):
            score = await self._call(instance.score, sample)
            if not is_number(score):
                self._refuse("score", score, "a finite number is needed")
            reward += float(score)
        return Taken(finish, None, reward, step.metrics)

    def _close(self, key: Key) -> None:
        self._closing.add(asyncio.create_task(self._close_object(self._episodes.pop(key), key)))

    async def _close_object(self, episode: Episode, key: Key) -> None:
        try:
            if episode.step:
                await episode.step
        finally:
            if episode.instance is not None and "close" in dir(self.kind):
                with suppress(ConnectionError, TimeoutError):  # it is gone
                    await self._call(episode.instance.close, Sample(*key, []))

    async def _call(self, function: Callable[[], Any], sample: Sample) -> Any:
        """Call the user's code in a thread, or what is async in the loop for that. UserError."""
        async with self._free:
            future = asyncio.wrap_future(
                self._threads.submit(call, self.code, function, self._loop)
            )
            done, _ = await asyncio.wait({future}, timeout=self._limit_s)
        if not done:
            silent = f"{self.code.title} gave no answer for {self._limit_s:g} s (0.9 --timeout-s)"
            of = f" of {self.code.file}, class {self.kind.__name__}"
            raise UserError(f"{silent}{of}, on the prompt {sample.question[:60]!r}")
        return future.result()

    def _read(self, value: Any) -> Step:
        try:
            return read_step(value)
        except ValueError as error:
            self._refuse("step", value, str(error))

    def _refuse(self, method: str, value: Any, why: str) -> None:
        shown = " ".join(repr(value).split())[:60]
        raise UserError(f"{self.code.title}: {method} returned {shown}: {why}")

    def _turns(self, sample: Sample) -> list[str]:
        """The policy's turns without what ended each, but with other special tokens."""
        ends = [*(reply.start for reply in sample.replies), len(sample.response)]
        starts = [0, *ends[:-1]]
        decode = partial(tokenization.decode, self.tokenizer, special=True)
        return [decode(sample.response[a : b - 1]) for a, b in zip(starts, ends, strict=True)]

    def _tokens(self, sample: Sample, turns: list[dict], place: int) -> list[int]:
        """Encode a reply; before it stands the template's end of a turn, if the policy ended it otherwise."""
        title = self.code.title
        if not sample.turns and (len(turns) > 1 or turns[0]["role"] != "user"):
            role = turns[0]["role"]
            raise UserError(f"{title}: a reply to a prompt of text is text, not the {role}'s turn")
        tokens = tokenization.encode_reply(self.tokenizer, sample.turns, turns, title)
        end = tokenization.end_of_turn(self.tokenizer)
        return [end, *tokens] if sample.turns and sample.response[place - 1] != end else tokens


def call(code: UserCode, function: Callable[[], Any], loop: asyncio.AbstractEventLoop) -> Any:
    """Run the user's code in this thread; what it awaits in the loop, which another thread runs."""
    with code:
        found = function()
    if not inspect.isawaitable(found):
        return found

    async def waited() -> Any:
        with code:
            return await found

    return asyncio.run_coroutine_threadsafe(waited(), loop).result()


def build(config: Config, tokenizer: Tokenizer, stop_tokens: Collection[int]) -> Episodes:
    """Load the user's class. UserError for no file, no class, or a name in it that is reserved."""
    title = f"--environment {config.environment}"
    specs = "FILE.py or FILE.py:Class"
    how = ("Environment", "class {}", inspect.isclass, specs)
    kind, code = user_code.load(title, config.environment, *how)
    for name in RESERVED.keys() & {*dir(kind)}:
        raise UserError(f"{title}: {name} is reserved: {RESERVED[name]}")
    if "step" not in dir(kind) or not callable(kind.step):
        raise UserError(f"{title}: the class {kind.__name__} has no step(self, text)")
    code = replace(code, passes=(ConnectionError, TimeoutError))
    return Episodes(kind, code, tokenizer, config, stop_tokens)


def chat_check(
    title: str, tokenizer: Tokenizer, say: Callable[[str], None]
) -> Callable[[Text, str], None]:
    """Return a check of prompts, which looks at a chat of each sequence of roles.

    UserError for a template that rewrites earlier turns. One that leaves out reasoning is named by a line.
    """
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
            kept = "earlier turns keep it as it was sampled"
            say(f"{title}: the chat template leaves out earlier reasoning; {kept}")
        seen.add(roles)

    return check
