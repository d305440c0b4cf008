"""Scalar reward model: an SGLang server that writes nothing and scores what it is shown."""

import asyncio
from collections.abc import AsyncIterator

from engines.engine import Answer, Engine, Request, names_of, prompts_of

BIAS = "score.bias"


class ScoringEngine(Engine):
    """The engine of a ...ForSequenceClassification: an Answer's `score` is its number at the last token."""

    flags = ("--is-embedding",)  # SGLang's word for a model that is asked for a vector

    async def ready(self, deadline_s: float) -> None:
        """Wait like Engine.ready."""
        import torch

        await super().ready(deadline_s)
        # SGLang's heads of Qwen models have a bias, which stays at random: the directory has none
        self._shapes = {BIAS: [1]}
        await self.load_weights([(BIAS, torch.zeros(1))], version=0)

    async def generate(self, requests: list[Request]) -> AsyncIterator[Answer]:
        """Yield the score of each prompt, None if it isn't finite. Raises like Engine.generate."""
        clock = asyncio.get_running_loop().time
        sent = clock()
        unknown = [{"embedding": [None]}] * len(requests)
        body = prompts_of(requests) | names_of(requests)
        async with self._open("POST", "/classify", body, also=500) as response:
            # 500 is what FastAPI makes of a number that isn't finite, for which JSON has no word
            replies = await response.json() if response.status == 200 else unknown
        end = clock()
        self._events += 1
        for index, reply in enumerate(replies):
            # a request that was aborted in the queue comes back without a vector
            (score,) = reply.get("embedding", [None])
            finish = "stop" if "embedding" in reply else "abort"
            yield Answer(index, [], [], finish, [], 0, sent, end, end, score, self.rank)
