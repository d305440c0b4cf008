"""Scoring: an SGLang server that holds a scalar reward model, which writes nothing and says one number of what it is shown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from engines import server
from engines.engine import Answer, Engine

HEAD, BIAS = "score.weight", "score.bias"


class ScoringEngine(Engine):
    """A handle on a server of a Hugging Face directory ...ForSequenceClassification of one number, as `run.py rm` writes it.

    `generate` yields an Answer without tokens for each prompt: its `score` is the number at the prompt's last token.
    """

    flags = ("--is-embedding",)  # SGLang's word for a model that is asked for a vector

    async def ready(self, deadline_s: float = 300.0):
        """As an Engine's. Raises ValueError, too, if the model has no scalar head."""
        is_owner = self._process is not None
        if is_owner and self._shapes.get(HEAD, [0])[0] != 1:
            raise ValueError(f"the {self.name} serves no scalar reward model: its directory has no {HEAD} of one row")
        await super().ready(deadline_s)
        if is_owner:
            await self._clear_bias()

    async def _clear_bias(self):
        """SGLang's heads of Qwen models have a bias, which stays at random: the directory has none. Other models ignore it."""
        import torch

        bucket = [(BIAS, torch.zeros(1))]
        await self._post("/begin_weight_update")
        try:
            await self._post(
                "/update_weights_from_tensor", serialized_named_tensors=[server.serialize_bucket(bucket)] * self._tp,
                load_format="flattened_bucket", flush_cache=True,
            )
        finally:
            await self._post("/end_weight_update")

    async def _stream(self, prompts, rules, indices: tuple[int, ...], sent: float) -> AsyncIterator[Answer]:
        """One request for the numbers of all prompts that are owed."""
        if not indices:
            return
        async with self._http().post(self.url + "/classify", json={"input_ids": [prompts[index] for index in indices]}) as response:
            await self._check(response, "/classify")
            replies, end = await response.json(), asyncio.get_running_loop().time()
        self._events += 1
        for index, reply in zip(indices, replies, strict=True):
            (score,) = reply["embedding"]
            yield Answer(index, [], [], "stop", [], 0, sent, end, end, score)
