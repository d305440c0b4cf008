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
class Judgement:
    """One critique. verdict None: the judge failed (nothing to be read, or no reply), and the sample is dropped, not scored 0."""

    critique: str
    verdict: bool | None


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
        retries: int = 1,
    ):
        self.format, self.sampling, self.max_prompt_tokens, self.retries = format, sampling, max_prompt_tokens, retries
        self._encode, self._decode, self._decode_response = encode, decode, decode_response
        self._asked: dict[tuple[str, str], asyncio.Task] = {}
        self.failed = self.parsed = 0  # since the run's start: a judge that never parses stops the run
        self.latencies: list[float] = []  # seconds of each judgement of this step

    def forget(self) -> None:
        """New step: judgements are asked for anew, because engines may have changed; latencies start again."""
        self._asked.clear()
        self.latencies = []

    def final_answer(self, sample: Sample) -> str | None:
        """The answer in the sample's response; None when it has none or was cut off before its end."""
        if sample.finish != "stop":
            return None
        return self.format.final_answer(self._decode_response(sample.response))

    async def judge(self, sample: Sample, pool) -> None:
        """Fill `critique, verdict, reward` of one finished sample; reward 1 for an accepted answer, 0 for a rejected one.

        A sample whose judge failed keeps verdict and reward None.
        """
        answer = self.final_answer(sample)
        if answer is None:
            sample.critique, sample.verdict, sample.reward = "no final answer", False, 0.0
            return
        key = (sample.question, answer)
        if key not in self._asked:
            self._asked[key] = asyncio.create_task(self._ask(*key, pool))
        judgement = await self._asked[key]
        sample.critique, sample.verdict = judgement.critique, judgement.verdict
        sample.reward = None if judgement.verdict is None else float(judgement.verdict)

    async def _ask(self, question: str, answer: str, pool) -> Judgement:
        """Ask until a verdict can be read, 1 + retries times. A greedy judge only repeats itself, so it is asked once."""
        prompt = self._encode(self.format.prompt(question, answer))
        tries = 1 if self.sampling.temperature == 0 else 1 + self.retries
        clock, text = asyncio.get_running_loop().time, ""
        for _ in range(tries if len(prompt) <= self.max_prompt_tokens else 0):
            start = clock()
            async for reply in pool.least_loaded().generate(prompt, 1, self.sampling):
                self.latencies.append(clock() - start)
                text = self._decode(reply.tokens)
                verdict = self.format.parse(text) if reply.finish == "stop" else None
            if verdict is not None:
                self.parsed += 1
                # an accept that the judge itself was unsure of, at its weakest token, counts as a reject
                sure = min(reply.logprobs, default=0.0) > self.format.min_logprob
                return Judgement(text, verdict and sure)
        self.failed += 1
        return Judgement(text, None)
