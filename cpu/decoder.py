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
    """The model of an SGLang ModelRunner, over its KV cache. Matrices are packed copies."""

    def __init__(self, library: Path, runner):
        self.is_stale = True  # the weights have changed since they were packed
        self._library = ctypes.CDLL(str(library))
        self._runner = runner
        self._kept: list[Tensor] = []  # what the addresses in `_model` lead to
        self._model = torch.empty(0)  # int64, read as decoder.cpp's Model

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

    def _pack(self) -> None:
        """Take the weights as they are now."""
        self._kept = []
        body = self._runner.model.model
        config = self._runner.model.config
        buffers = self._runner.token_to_kv_pool.get_kv_buffer
        table = self._runner.req_to_token_pool.req_to_token
        named = dict(body.named_parameters())
        layers = []
        for i in range(config.num_hidden_layers):
            weights = [self._address(name, named.get(f"layers.{i}.{name}")) for name in WEIGHTS]
            layers.append(weights + [self._address("cache", cache) for cache in buffers(i)])
        _, kv_heads, dim = buffers(0)[0].shape
        hidden, width = named["layers.0.self_attn.o_proj.weight"].shape
        inter = named["layers.0.mlp.down_proj.weight"].shape[1]
        eps = struct.unpack("q", struct.pack("d", body.norm.variance_epsilon))
        sizes = [len(layers), hidden, width // dim, kv_heads, dim, inter, config.vocab_size]
        whole = {
            "embedding": named["embed_tokens.weight"],
            "norm": named["norm.weight"],
            "cosines and sines": body.layers[0].self_attn.rotary_emb.cos_sin_cache,
            "head_proj.weight": None,  # a scalar reward model has none
            "table": table,
            "layers": torch.tensor(layers),
        }
        if "lm_head" in (children := dict(self._runner.model.named_children())):
            whole["head_proj.weight"] = children["lm_head"].weight[: config.vocab_size]
        addresses = [self._address(*each) for each in whole.items()]
        self._model = torch.tensor([*sizes, table.shape[1], *eps, *addresses])
        self.is_stale = False

    def _address(self, name: str, tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        assert tensor.is_contiguous() and tensor.dtype != torch.bfloat16, name
        if name.endswith("proj.weight"):
            rows, width = tensor.shape
            packed = torch.empty(-(-rows // PANEL) * PANEL * width)
            self._call("pack", tensor, rows, width, packed)
            tensor = packed
        self._kept.append(tensor)
        return tensor.data_ptr()

    def forward(self, ids: Tensor, positions: Tensor, requests: Tensor) -> Tensor:
        """Return hidden states [tokens, hidden]; keys and values go into the cache.

        requests: of each token, the row in the table of slots.
        """
        if self.is_stale:
            self._pack()
        hidden = torch.empty(len(ids), self._runner.model.config.hidden_size)
        columns = (ids.long(), positions.long(), requests.long())
        self._call("forward", self._model, len(ids), *columns, hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [rows, vocab] of hidden states [rows, hidden]."""
        logits = torch.empty(len(hidden), self._runner.model.config.vocab_size)
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

        requests: int64 [rows, 6 + STOPS], each decoder.cpp's Request. No step begins after limit_s
        seconds of CPU time.
        """
        if self.is_stale:
            self._pack()
        tokens = torch.zeros(len(requests), steps, dtype=torch.int64)
        logprobs = torch.zeros(len(requests), steps)
        counts = torch.zeros(len(requests), dtype=torch.int64)
        asked = (len(requests), steps, limit_s, requests, temperatures)
        self._call("decode", self._model, *asked, tokens, logprobs, counts)
        return tokens, logprobs, counts
