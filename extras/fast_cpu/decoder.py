"""Run decoder.cpp instead of the layers, the head and the sampler of a model that SGLang has loaded."""

import ctypes
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from extras.fast_cpu import compiler
from inputs.hf_directory import read_model_config

PANEL = 32  # as in decoder.cpp
STOPS = 8  # as in decoder.cpp: most tokens that can end an answer
# weights in the order of decoder.cpp's Layer, where those that a family lacks are null
LAYER = ("input_layernorm.weight", "self_attn.qkv_proj.weight", "self_attn.qkv_proj.bias")
LAYER += ("self_attn.q_norm.weight", "self_attn.k_norm.weight", "self_attn.o_proj.weight")
LAYER += ("post_attention_layernorm.weight", "mlp.gate_up_proj.weight", "mlp.down_proj.weight")


def pack(weight: Tensor) -> Tensor:
    """Return a matrix [rows, width] as [rows / PANEL, width, PANEL], the last panel padded with zeros."""
    whole = pad(weight.data, (0, 0, 0, -len(weight) % PANEL))
    return whole.view(-1, PANEL, weight.shape[1]).transpose(1, 2).contiguous()


def as_numbers(arguments: Sequence[Tensor | int]) -> list[int]:
    """Return arguments for decoder.cpp: integers, and the addresses of contiguous tensors."""
    assert all(isinstance(each, int) or each.is_contiguous() for each in arguments)
    return [each if isinstance(each, int) else each.data_ptr() for each in arguments]


def rules_of(info) -> tuple[Tensor, Tensor, Tensor]:
    """Return temperatures, 1 if greedy, and seeds, each [rows]; without --deterministic, seeds are drawn."""
    seeds = info.sampling_seed
    if seeds is None:
        seeds = torch.randint(2**63 - 1, (len(info.top_ks),))
    return info.temperatures.flatten(), (info.top_ks <= 1).long(), seeds


def product_rates(library: Path, rows: int, width: int, columns: int) -> tuple[float, float]:
    """Return decoder.cpp's and torch's GFLOP/s in CPU time for [rows, width] @ [width, columns]."""
    torch.set_num_threads(1)
    x = torch.randn(rows, width)
    weight = torch.randn(columns, width)
    head = pack(weight)
    # decoder.cpp's Model: `logits` reads only these
    model = torch.tensor([0, width, 0, 0, 0, 0, columns, 0, 0, 0, 0, 0, head.data_ptr(), 0, 0])
    scores = torch.empty(rows, columns)
    numbers = map(ctypes.c_int64, as_numbers((model, rows, x, scores)))
    sides = (partial(ctypes.CDLL(str(library)).logits, *numbers), partial(linear, x, weight))
    operations = 2 * rows * width * columns
    calls = 1 + 10**8 // operations

    def rate(product: Callable) -> float:
        begin = time.thread_time()
        for _ in range(calls):
            product()
        return calls * operations / (time.thread_time() - begin) / 1e9

    rounds = [tuple(map(rate, sides)) for _ in range(5)]
    ours, theirs = map(median, zip(*rounds, strict=True))
    return ours, theirs


def rates_of(model_dir: str, dtype: str) -> str:
    """Return what serves a model; for decoder.cpp, with its speed and torch's on this processor."""
    name = compiler.program_for(model_dir, dtype)
    library = compiler.library_for(model_dir, dtype)
    if library is None:
        return name
    hf = read_model_config(model_dir)
    shape = (64, hf["hidden_size"], 2 * hf["intermediate_size"])
    ours, theirs = product_rates(library, *shape)
    warning = " (slower than torch!)" if ours < theirs else ""
    return f"{name}, {ours:.0f} GFLOP/s on a core{warning}; torch reaches {theirs:.0f}"


class Decoder:
    """The model of an SGLang ModelRunner, over its KV cache. Only packed matrices are kept."""

    most_steps = 16  # longest window

    def __init__(self, library: Path, runner):
        self._library = ctypes.CDLL(str(library))
        self._runner = runner
        self._model: Tensor | None = None  # decoder.cpp's Model; None once weights change
        self._kept: list[Tensor | int] = []  # keeps alive what `_model` points to
        # (SGLang's matrix, emptied; its rows; its packed copy)
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
        """Return decoder.cpp's Model of the current weights."""
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
        """Return logits [rows, vocab] of hidden states [rows, hidden]."""
        logits = torch.empty(len(hidden), self._runner.model.config.vocab_size)
        self._call("logits", self._whole(), len(hidden), hidden.contiguous(), logits)
        return logits

    def sample(self, output, info, wants_logprobs, top_nums, lists, positions, **others) -> Tensor:
        """Replace Sampler.forward. Torch still samples rows with top-p and the like, and lists logprobs."""
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
        """Return up to `steps` tokens of each request, their log-probabilities, and their counts.

        requests: int64 [rows, 6 + STOPS], rows as decoder.cpp's Request. No step begins after limit_ms.
        """
        tokens = torch.zeros(len(requests), steps, dtype=torch.int64)
        logprobs = torch.zeros(len(requests), steps)
        counts = torch.zeros(len(requests), dtype=torch.int64)
        asked = (len(requests), steps, limit_ms, requests, temperatures)
        self._call("decode", self._whole(), *asked, tokens, logprobs, counts)
        return tokens, logprobs, counts
