"""Scalar reward models as judges: they write no critique; their one number per answer is the reward."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from demo.task import addition_answer
from engines.engine import Answer, Engine, Request, body_of
from genrm import FORMATS, Judge, JudgeFormat, Judgement, chat_answer, chat_key
from inputs import tokenization
from inputs.rows import Text, as_turns, transcript
from inputs.templates import break_tokens, map_texts

BIAS = "score.bias"


class ScoringEngine(Engine):
    """An engine for a ...ForSequenceClassification: `Answer.score` is its number at the last token."""

    flags = ("--is-embedding",)  # SGLang's name for models that return a vector

    async def ready(self, deadline_s: float) -> None:
        """Wait like Engine.ready."""
        import torch

        await super().ready(deadline_s)
        # SGLang gives Qwen heads a bias; the directory has none, so it would stay random
        self._shapes = {BIAS: [1]}
        await self.load_weights([(BIAS, torch.zeros(1))], version=0)

    async def generate(self, requests: list[Request]) -> AsyncIterator[Answer]:
        """Yield each prompt's score, None if it isn't finite. Raises like Engine.generate."""
        clock = asyncio.get_running_loop().time
        sent = clock()
        unknown = [{"embedding": [None]}] * len(requests)
        async with self._open("POST", "/classify", body_of(requests), also=500) as response:
            # FastAPI answers 500 if a number isn't finite: JSON can't represent it
            replies = await response.json() if response.status == 200 else unknown
        end = clock()
        for index, reply in enumerate(replies):
            # a request aborted in the queue comes back without a vector
            (score,) = reply.get("embedding", [None])
            finish = "stop" if "embedding" in reply else "abort"
            yield Answer(index, [], [], finish, [], 0, sent, end, end, score, self.rank)


@dataclass(frozen=True)
class ScalarFormat(JudgeFormat):
    """The request to a scalar reward model: the whole conversation, as TRL's RewardTrainer trains it."""

    prompt: None = None
    full_response: bool = True
    is_scalar: ClassVar[bool] = True
    engine: ClassVar[type[Engine]] = ScoringEngine

    def read(self, judge: Judge, reply: Answer) -> Judgement:
        score = math.nan if reply.score is None else reply.score
        return Judgement(f"score {score:.6g}", score if math.isfinite(score) else None)

    def check(self, tokenizer: tokenization.Tokenizer, prompt: Text, where: str) -> None:
        encode_exchange(tokenizer, prompt, "yes", where=where)

    def encode(
        self, judge: Judge, prompt: Text, answer: str, images: tuple, is_cut: bool
    ) -> tuple[list[int], tuple]:
        return encode_exchange(judge.tokenizer, prompt, answer, is_cut), ()


def encode_exchange(
    tokenizer: tokenization.Tokenizer, prompt: Text, answer: Text, is_cut=False, where="a prompt"
) -> list[int]:
    """Encode a prompt and an answer for a scalar reward model. is_cut: omit the end token."""
    turns = [*as_turns(prompt, "user"), *as_turns(answer, "assistant")]
    turns = map_texts(partial(break_tokens, tokenizer), turns)
    needs_template = "tools" in turns[0] or "tool_calls" in turns[-1]
    if tokenizer.chat_template is not None or needs_template:
        tokens = tokenization.encode(tokenizer, turns, where, has_answer=True)
        end = tokenization.end_of_turn(tokenizer)
    else:
        texts = (transcript(turns[:-1]), turns[-1]["content"])
        pair = tokenization.encode_pair(tokenizer, *texts)
        tokens = pair[0] + pair[1]
        end = tokenizer.eos_token_id
    if is_cut and end in tokens:
        del tokens[-1 - tokens[::-1].index(end) :]
    return tokens


FORMATS["score"] = ScalarFormat(chat_answer, read_key=chat_key)
FORMATS["addition_score"] = ScalarFormat(addition_answer)
