"""decoder.cpp in place of the layers, the head and the sampler of a model that SGLang has loaded."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

PANEL = 32  # as in decoder.cpp
STOPS = 8  # likewise: tokens that end an answer, at most
# weights in the order of decoder.cpp's Layer; what a family lacks is null there
LAYER = ("input_layernorm.weight", "self_attn.qkv_proj.weight", "self_attn.qkv_proj.bias")
LAYER += ("self_attn.q_norm.weight", "self_attn.k_norm.weight", "self_attn.o_proj.weight")
LAYER += ("post_attention_layernorm.weight", "mlp.gate_up_proj.weight", "mlp.down_proj.weight")


def pack(weight: Tensor) -> Tensor:
    """Return a matrix [rows, width] as [rows / PANEL, width, PANEL], the last panel filled up with zeros."""
    whole = pad(weight.data, (0, 0, 0, -len(weight) % PANEL))
    return whole.view(-1, PANEL, weight.shape[1]).transpose(1, 2).contiguous()


def as_numbers(arguments: Sequence[Tensor | int]) -> list[int]:
    """Return what decoder.cpp takes: of a tensor, contiguous, the address."""
    assert all(isinstance(each, int) or each.is_contiguous() for each in arguments)
    return [each if isinstance(each, int) else each.data_ptr() for each in arguments]


def rules_of(info) -> tuple[Tensor, Tensor, Tensor]:
    """Return temperatures, 1 if greedy, and seeds, each [rows]; without --deterministic, seeds are drawn."""
    seeds = info.sampling_seed
    if seeds is None:
        seeds = torch.randint(2**63 - 1, (len(info.top_ks),))
    return info.temperatures.flatten(), (info.top_ks <= 1).long(), seeds


class Decoder:
    """The model of an SGLang ModelRunner, over its KV cache. Its matrices are kept packed alone."""

    most_steps = 16  # of a window

    def __init__(self, library: Path, runner):
        self._library = ctypes.CDLL(str(library))
        self._runner = runner
        self._model: Tensor | None = None  # decoder.cpp's Model. None: weights have changed since
        self._kept: list[Tensor | int] = []  # what the addresses in `_model` lead to
        # a matrix of SGLang's, emptied; its rows; what it is packed into
        self._packed: list[tuple[Tensor, int, Tensor]] = []
        self._load_weights = runner.model.load_weights
        self._sample_by_torch = runner.sampler.forward
        runner.model.load_weights = self._renew
        runner.model.model.forward = self.run_layers
        runner.sampler.forward = self.sample
        runner.attn_backend.init_forward_metadata = lambda batch: None
        # a scalar reward model has none
        if processor := dict(runner.model.named_children()).get("logits_processor"):
            processor._compute_lm_head = self.logits

    def _call(self, name: str, *arguments: Tensor | int) -> None:
        self._library[name](*map(ctypes.c_int64, as_numbers(arguments)))

    def _renew(self, weights):
        self._model = None  # until the next pass: a push comes in several parts
        self._kept = []
        while self._packed:
            weight, rows, panels = self._packed.pop()
            weight.data = panels.transpose(1, 2).flatten(0, 1)[:rows]
        return self._load_weights(weights)

    def _whole(self) -> Tensor:
        """Return decoder.cpp's Model, of the weights as they are now."""
        if self._model is not None:
            return self._model
        model = self._runner.model
        buffers = self._runner.token_to_kv_pool.get_kv_buffer
        table = self._runner.req_to_token_pool.req_to_token
        angles = model.model.layers[0].self_attn.rotary_emb.cos_sin_cache
        weights = dict(model.named_parameters(remove_duplicate=False))
        embedding = weights["model.embed_tokens.weight"]
        for name, weight in weights.items():
            if name.endswith(("proj.weight", "lm_head.weight")):
                weights[name] = pack(weight)
                if weight is not embedding:
                    self._packed.append((weight, len(weight), weights[name]))
                    weight.data = torch.empty(0)
        c = model.config
        _, kv_heads, dim = buffers(0)[0].shape
        assert angles.shape[1] == dim, "only a part of each head is rotated"
        sizes = [c.num_hidden_layers, c.hidden_size, c.num_attention_heads, kv_heads, dim]
        layers = []
        for i in range(c.num_hidden_layers):
            layers += [weights.get(f"model.layers.{i}.{name}", 0) for name in LAYER]
            layers += buffers(i)
        whole = [torch.tensor(c.rms_norm_eps, dtype=torch.float64)]
        whole += [embedding, weights["model.norm.weight"], angles]
        whole += [weights.get("lm_head.weight", 0), table, torch.tensor(as_numbers(layers))]
        self._kept = layers + whole
        sizes += [c.intermediate_size, c.vocab_size, table.shape[1]]
        self._model = torch.tensor(sizes + as_numbers(whole))
        return self._model

    def run_layers(self, ids, positions, batch, *_, **__) -> Tensor:
        """Return hidden states [tokens, hidden]; keys and values go into the cache."""
        requests = batch.req_pool_indices
        if not batch.forward_mode.is_decode():
            requests = requests.repeat_interleave(batch.extend_seq_lens)
        hidden = torch.empty(len(ids), self._runner.model.config.hidden_size)
        columns = (ids.long(), positions.long(), requests.long())
        self._call("forward", self._whole(), len(ids), *columns, hidden)
        return hidden

    def logits(self, hidden: Tensor, *_, **__) -> Tensor:
        """Return [rows, vocab] of hidden states [rows, hidden]."""
        logits = torch.empty(len(hidden), self._runner.model.config.vocab_size)
        self._call("logits", self._whole(), len(hidden), hidden.contiguous(), logits)
        return logits

    def sample(self, output, info, wants_logprobs, top_nums, lists, positions, **others) -> Tensor:
        """Do Sampler.forward. Rows with top-p and the like are torch's, as are lists of log-probabilities."""
        logits = output.next_token_logits.contiguous()
        tokens = torch.empty(len(logits), dtype=torch.int64)
        logprobs = torch.empty(len(logits))
        columns = (*rules_of(info), positions.long(), tokens, logprobs)
        self._call("sample", *logits.shape, logits, *columns)
        is_ruled = (info.top_ks > 1) & (info.top_ks < info.vocab_size)
        is_ruled |= (info.top_ps < 1) | (info.min_ps > 0)
        if is_ruled.any() or any(top_nums or ()) or any(lists or ()):
            asked = (output, info, wants_logprobs, top_nums, lists, positions)
            by_torch = self._sample_by_torch(*asked, **others)
            tokens = torch.where(is_ruled, by_torch, tokens)
            if wants_logprobs:
                logprobs = torch.where(is_ruled, output.next_token_logprobs, logprobs)
        output.next_token_logprobs = logprobs
        return tokens

    def decode(self, requests: Tensor, temperatures: Tensor, steps: int, limit_ms: int):
        """Return up to `steps` tokens of each request, their log-probabilities, and how many they are.

        requests: int64 [rows, 6 + STOPS], each decoder.cpp's Request. No step begins after limit_ms.
        """
        tokens = torch.zeros(len(requests), steps, dtype=torch.int64)
        logprobs = torch.zeros(len(requests), steps)
        counts = torch.zeros(len(requests), dtype=torch.int64)
        asked = (len(requests), steps, limit_ms, requests, temperatures)
        self._call("decode", self._whole(), *asked, tokens, logprobs, counts)
        return tokens, logprobs, counts
