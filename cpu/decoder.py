"""decoder.cpp in Python: a model that SGLang has loaded, its passes, and the sampling of tokens."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

PANEL = 32  # as in decoder.cpp
STOPS = 8  # likewise: tokens that end an answer, at most
WEIGHTS = (  # of a layer, in the order of decoder.cpp's Layer; what a family lacks is null there
    "input_layernorm.weight",
    "self_attn.qkv_proj.weight",
    "self_attn.qkv_proj.bias",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "self_attn.o_proj.weight",
    "post_attention_layernorm.weight",
    "mlp.gate_up_proj.weight",
    "mlp.down_proj.weight",
)


class Rules(NamedTuple):
    """The ways to sample, [rows] each."""

    temperatures: Tensor  # float32
    greedy: Tensor  # int64: 0 or 1
    seeds: Tensor  # int64


class Decoder:
    """The model of an SGLang ModelRunner, over its KV cache. Matrices are packed copies: see `load`."""

    def __init__(self, library: Path, runner):
        self._library = ctypes.CDLL(str(library))
        self._runner = runner
        self._kept = []  # what the addresses in `_model` lead to
        self._sizes = {}
        self._model = None  # like decoder.cpp's Model
        self.is_stale = True  # the weights have changed since they were packed

    def _call(self, name: str, *arguments: Tensor | int | float) -> None:
        given = []
        for argument in arguments:
            if isinstance(argument, Tensor):
                assert argument.is_contiguous(), name
                given.append(ctypes.c_void_p(argument.data_ptr()))
            else:
                kind = ctypes.c_int64 if isinstance(argument, int) else ctypes.c_double
                given.append(kind(argument))
        self._library[name](*given)

    def load(self) -> None:
        """Take the model's weights as they are now."""
        self._kept = []
        runner = self._runner
        body = runner.model.model
        named = dict(body.named_parameters())
        layers = []
        for i in range(runner.model.config.num_hidden_layers):
            found = [(name, named.get(f"layers.{i}.{name}")) for name in WEIGHTS]
            found += [("cache", cache) for cache in runner.token_to_kv_pool.get_kv_buffer(i)]
            layers.append([self._address(*each) for each in found])
        _, kv_heads, dim = runner.token_to_kv_pool.get_kv_buffer(0)[0].shape
        hidden, q_size = named["layers.0.self_attn.o_proj.weight"].shape
        inter = named["layers.0.mlp.down_proj.weight"].shape[1]
        table = runner.req_to_token_pool.req_to_token
        # a scalar reward model has no head
        head = dict(runner.model.named_children()).get("lm_head")
        vocab = runner.model.config.vocab_size if head else 0
        self._sizes = {"hidden": hidden, "vocab": vocab}
        eps = struct.unpack("q", struct.pack("d", body.norm.variance_epsilon))
        sizes = [
            len(layers),
            hidden,
            q_size // dim,
            kv_heads,
            dim,
            inter,
            vocab,
            table.shape[1],
            *eps,
        ]
        whole = {
            "embedding": named["embed_tokens.weight"],
            "norm": body.norm.weight,
            "cosines and sines": body.layers[0].self_attn.rotary_emb.cos_sin_cache,
            "proj.weight": head.weight[:vocab] if head else None,
            "table": table,
            "layers": torch.tensor(layers),
        }
        self._model = torch.tensor(sizes + [self._address(*each) for each in whole.items()])
        self.is_stale = False

    def _address(self, name: str, tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        if name.endswith("proj.weight"):
            rows, width = tensor.shape
            packed = torch.empty(-(-rows // PANEL) * PANEL * width)
            self._call("pack", tensor, rows, width, packed)
            tensor = packed
        assert tensor.is_contiguous() and tensor.dtype != torch.bfloat16, name
        self._kept.append(tensor)
        return tensor.data_ptr()

    def forward(self, ids: Tensor, positions: Tensor, requests: Tensor) -> Tensor:
        """Return hidden states [tokens, hidden]; keys and values go into the cache.

        requests: of each token, the row in the table of slots.
        """
        if self.is_stale:
            self.load()
        hidden = torch.empty(len(ids), self._sizes["hidden"])
        self._call(
            "forward", self._model, len(ids), ids.long(), positions.long(), requests.long(), hidden
        )
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [rows, vocab] of hidden states [rows, hidden]."""
        logits = torch.empty(len(hidden), self._sizes["vocab"])
        self._call("logits", self._model, len(hidden), hidden.contiguous(), logits)
        return logits

    def sample(self, logits: Tensor, rules: Rules, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return a token of each row of logits [rows, vocab], and its log-probability."""
        tokens = torch.empty(len(logits), dtype=torch.int64)
        logprobs = torch.empty(len(logits))
        columns = (*rules, positions.long(), tokens, logprobs)
        self._call("sample", *logits.shape, logits.contiguous(), *columns)
        return tokens, logprobs

    def decode(
        self, requests: Tensor, temperatures: Tensor, steps: int, limit_s: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return up to `steps` tokens of each request, their log-probabilities, and how many they are.

        requests: int64 [rows, 6 + STOPS], columns as in decoder.cpp's `Request`. No step begins
        after limit_s seconds of CPU time.
        """
        if self.is_stale:
            self.load()
        tokens = torch.zeros(len(requests), steps, dtype=torch.int64)
        logprobs = torch.zeros(len(requests), steps)
        counts = torch.zeros(len(requests), dtype=torch.int64)
        asked = (len(requests), steps, limit_s, requests, temperatures)
        self._call("decode", self._model, *asked, tokens, logprobs, counts)
        return tokens, logprobs, counts
