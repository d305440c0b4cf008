"""GenRM: the generative judge. It writes a critique and a verdict on a question and its final answer; the verdict is the reward.

What a judge is asked and how its text is read is a `Format`: three small pure functions, and the place to edit for a judge of one's
own. `addition` is the built-in task's; `chat` suits any instruction-following model.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from rollout import Sample

BACKOFF_S = 2.5  # before a call that was given up is made again: SGLang aborts a request 2 s after its client has left
LONGEST_BACKOFF_S = 30.0


@dataclass(frozen=True)
class Format:
    """How one kind of judge is spoken to.

    final_answer(response text) -> the answer to be judged, or None when the response has none (reward 0 without asking)
    prompt(question, answer)    -> plain text, or chat messages for the judge's own chat template
    parse(judge text)           -> True (accept), False (reject), or None when there's no verdict to be read
    min_logprob                 an accept counts as a reject if any token of the critique was less likely (natural log)
    """

    final_answer: Callable[[str], str | None]
    prompt: Callable[[str, str], str | list[dict]]
    parse: Callable[[str], bool | None]
    min_logprob: float = -math.inf


# ---------------------------------------------------------------- the built-in addition task: 57+68=>125? -> 7+8+0=15:5. ... 1:1.Y


def addition_answer(text: str) -> str | None:
    """What follows the last '>', up to 12 characters: `7+8+0=15;5+6+1=12;>125` -> `125`."""
    return text.rsplit(">", 1)[1][:12] if ">" in text else None


def addition_prompt(question: str, answer: str) -> str:
    """`57+68=` and `125` -> `57+68=>125?`. The judge sees the final answer only, not the working."""
    return f"{question}>{answer}?"


def addition_parse(text: str) -> bool | None:
    """Y or N at the very end. A Y after an `x` (a digit that the judge itself flagged as wrong) contradicts its critique: rejected."""
    if text[-1:] not in ("Y", "N"):
        return None
    return text[-1] == "Y" and "x" not in text


# ---------------------------------------------------------------- any chat model

CHAT_JUDGE = """You are a strict grader. Decide whether the final answer to the question is correct.
First work the question out yourself in a few sentences. Then write one last line: Verdict: correct, or Verdict: incorrect.

Question:
{question}

Final answer:
{answer}"""

VERDICT = re.compile(r"verdict[\s*]*:[\s*]*(correct|incorrect|yes|no)\b", re.IGNORECASE)
BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")  # braces inside up to two deep


def chat_answer(text: str) -> str | None:
    r"""The last \boxed{...}, else what follows the last ####, else the last line that isn't empty."""
    if boxed := BOXED.findall(text):
        return boxed[-1].strip()
    tail = text.rsplit("####", 1)[-1].strip()
    return tail.splitlines()[-1].strip() if tail else None


def chat_prompt(question: str, answer: str) -> list[dict]:
    """One user turn with the grading instruction."""
    return [{"role": "user", "content": CHAT_JUDGE.format(question=question, answer=answer)}]


def chat_parse(text: str) -> bool | None:
    """The `Verdict:` line. Two that disagree are no verdict."""
    verdicts = {word.lower() in ("correct", "yes") for word in VERDICT.findall(text)}
    return verdicts.pop() if len(verdicts) == 1 else None


FORMATS = {
    "addition": Format(addition_answer, addition_prompt, addition_parse, min_logprob=-0.36),
    "chat": Format(chat_answer, chat_prompt, chat_parse),
}


@dataclass(frozen=True)
class Calls:
    """How the judge is called: the settings `judgements` and `judge_*` of config.py, which says what they mean."""

    judgements: int = 1
    vote: bool = False
    timeout_s: float = math.inf
    retries: int = 1
    at_once: int = 1024


@dataclass(frozen=True)
class Judgement:
    """What the critiques of one pair came to. reward None: none of them could be read, and the sample is dropped, not scored 0."""

    critique: str
    reward: float | None


def combine(verdicts: list[bool], vote: bool) -> float | None:
    """Reward of several verdicts: their mean, or the majority's (a tie rejects); None of nothing."""
    if not verdicts:
        return None
    mean = sum(verdicts) / len(verdicts)
    return float(mean > 0.5) if vote else mean


class Judge:
    """Fills `critique, verdict, reward` of samples by asking the genrm engines; identical (question, answer) pairs are asked once."""

    def __init__(
        self,
        format: Format,
        encode: Callable[[str | list[dict]], list[int]],  # judge prompt -> token ids of the judge's tokenizer
        decode: Callable[[list[int]], str],  # judge's tokens -> text
        decode_response: Callable[[list[int]], str],  # actor's tokens -> text
        sampling,
        max_prompt_tokens: int,  # what the judge's context leaves for a prompt; a longer one is a failed judgement
        calls: Calls,
    ):
        self.format, self.sampling, self.max_prompt_tokens, self.calls = format, sampling, max_prompt_tokens, calls
        self._encode, self._decode, self._decode_response = encode, decode, decode_response
        self._asked: dict[tuple[str, str], asyncio.Task] = {}
        self._free = asyncio.Semaphore(calls.at_once)
        self.failed = self.parsed = 0  # since the run's start: a judge that never parses stops the run
        self.latencies: list[float] = []  # seconds of each judgement of this step
        self.timeouts = 0  # calls of this step that were given up

    def forget(self) -> None:
        """New step: judgements are asked for anew, because engines may have changed; this step's counts start again."""
        self._asked.clear()
        self.latencies, self.timeouts = [], 0

    async def cancel(self) -> None:
        """Give up every judgement that isn't finished."""
        tasks = [task for task in self._asked.values() if not task.done()]
        self._asked = {key: task for key, task in self._asked.items() if task.done()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def final_answer(self, sample: Sample) -> str | None:
        """The answer in the sample's response; None when it has none or was cut off before its end."""
        if sample.finish != "stop":
            return None
        return self.format.final_answer(self._decode_response(sample.response))

    async def judge(self, sample: Sample, pool) -> None:
        """Fill `critique, verdict, reward` of one finished sample; reward 1 for an accepted answer, 0 for a rejected one.

        With several judgements it may lie between, and the verdict is the majority's. A sample whose judge failed keeps None.
        """
        answer = self.final_answer(sample)
        if answer is None:
            sample.critique, sample.verdict, sample.reward = "no final answer", False, 0.0
            return
        key = (sample.question, answer)
        if key not in self._asked:
            self._asked[key] = asyncio.create_task(self._ask(*key, pool))
        judgement = await self._asked[key]
        sample.critique, sample.reward = judgement.critique, judgement.reward
        sample.verdict = None if judgement.reward is None else judgement.reward > 0.5

    async def _ask(self, question: str, answer: str, pool) -> Judgement:
        """Call until every judgement can be read, 1 + retries times. What a greedy judge wrote it would only repeat."""
        prompt = self._encode(self.format.prompt(question, answer))
        texts, verdicts = [], []
        for attempt in range(1 + self.calls.retries if len(prompt) <= self.max_prompt_tokens else 0):
            missing = self.calls.judgements - len(verdicts)
            replies = await self._call(prompt, missing, pool)
            written = [self._decode(reply.tokens) for reply in replies]
            read = [self._read(reply, text) for reply, text in zip(replies, written, strict=True)]
            texts, verdicts = texts + written, verdicts + [verdict for verdict in read if verdict is not None]
            if len(verdicts) == self.calls.judgements or (len(replies) == missing and self.sampling.temperature == 0):
                break
            if len(replies) < missing and attempt < self.calls.retries:  # given up: the engine gets time, twice as much each time
                await asyncio.sleep(min(BACKOFF_S * 2**attempt, LONGEST_BACKOFF_S))
        self.parsed += len(verdicts)
        self.failed += not verdicts
        return Judgement("\n".join(texts), combine(verdicts, self.calls.vote))

    async def _call(self, prompt: list[int], count: int, pool) -> list:
        """One request for `count` critiques, which share the prompt's KV cache; returns those that came in time."""
        clock, replies = asyncio.get_running_loop().time, []
        async with self._free:
            start = clock()
            try:
                async with asyncio.timeout(self.calls.timeout_s):
                    async for reply in pool.route().generate([prompt] * count, self.sampling):
                        self.latencies.append(clock() - start)
                        replies.append(reply)
            except TimeoutError:  # leaving the request has closed it, and its server will abort it
                self.timeouts += 1
        return replies

    def _read(self, reply, text: str) -> bool | None:
        """The verdict of one critique, None when there is none to be read."""
        verdict = self.format.parse(text) if reply.finish == "stop" else None
        # an accept that the judge itself was unsure of, at its weakest token, counts as a reject
        return verdict and min(reply.logprobs, default=0.0) > self.format.min_logprob
