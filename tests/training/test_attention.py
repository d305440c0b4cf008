"""Attention on packed sequences, also those that share keys, against plain softmax of each.

Torch's variable-length attention runs only on CUDA: here a fake in plain arithmetic checks its inputs.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from training import model
from training.model import PackedAttention, rotate
from training.packing import MicroBatch, Packing, make_micro_batches, packing_of, starts_of

HEADS, DIM, SCALE = 4, 8, 0.3
LENGTHS = st.lists(st.integers(1, 5), max_size=4)
GROUPS = st.lists(st.tuples(st.integers(1, 6), LENGTHS), min_size=1, max_size=3)  # prompt, answers


def plain(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Compute plain attention, [tokens, heads, dim]; the last query is at the last key."""
    key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
    ahead = torch.ones(len(query), len(key), dtype=torch.bool).triu(len(key) - len(query) + 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(ahead, -torch.inf).softmax(-1), value)


def varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **how) -> Tensor:
    """Stand in for `torch.nn.attention.varlen.varlen_attn`: refuse other types; window_size means causal."""
    scale, window_size, enable_gqa = how["scale"], how["window_size"], how["enable_gqa"]
    for starts, x, most in ((cu_seq_q, query, max_q), (cu_seq_k, key, max_k)):
        assert starts.dtype == torch.int32 and starts.ndim == 1 and starts.is_contiguous()
        assert starts[0] == 0 and starts[-1] == len(x) and most is int(most) == starts.diff().max()
    assert window_size == (-1, 0) and value.shape == key.shape and len(cu_seq_q) == len(cu_seq_k)
    assert enable_gqa == (query.size(1) != key.size(1)) and query.stride(-1) == key.stride(-1) == 1
    parts = [query.split(cu_seq_q.diff().tolist())]
    parts += [x.split(cu_seq_k.diff().tolist()) for x in (key, value)]
    scale = query.size(-1) ** -0.5 if scale is None else scale
    return torch.cat([plain(*piece, scale) for piece in zip(*parts, strict=True)])


def shared(groups: list[tuple[int, list[int]]]) -> MicroBatch:
    """Return a prompt's tokens once, then its answers: each answer is a piece that also sees the prompt."""
    lengths, keys = [], []
    start = 0
    for prompt, answers in groups:
        own = [*range(start, start + prompt)]
        lengths.append((prompt, prompt))
        keys += own
        start += prompt
        for answer in answers:
            lengths.append((answer, prompt + answer))
            keys += [*own, *range(start, start + answer)]
            start += answer
    facts = dict(lengths=lengths, starts=starts_of(lengths), keys=torch.tensor(keys))
    return MicroBatch(*[torch.arange(start)] * 5, **facts)


def plain_groups(query, key, value, groups) -> Tensor:
    """Compute each sequence separately, prompt and answer, without sharing."""
    outputs = []
    start = 0
    for prompt, answers in groups:
        own = [*range(start, start + prompt)]
        outputs.append(plain(query[own], key[own], value[own], SCALE))
        start += prompt
        for answer in answers:
            seen = [*own, *range(start, start + answer)]
            outputs.append(plain(query[seen], key[seen], value[seen], SCALE)[prompt:])
            start += answer
    return torch.cat(outputs)


@pytest.mark.parametrize("way", ["attend_by_length", "attend_at_once"])
def test_packed_sequences_attend_as_each_by_itself(monkeypatch, way):
    """Outputs and gradients must agree in float64 for whole sequences and for answers that share a prompt."""
    monkeypatch.setattr(model, "varlen_attn", varlen)
    # PackedAttention's way without CUDA
    monkeypatch.setattr(model, "attend_by_length", getattr(model, way))
    attention = PackedAttention(None, softmax_scale=SCALE)

    @given(GROUPS, st.booleans(), st.sampled_from([1, 2, HEADS]), st.integers(0, 9))
    def check(groups, shares, kv_heads, seed):
        if shares:
            batch = shared(groups)
        else:
            groups = sorted(((prompt, []) for prompt, _ in groups), reverse=True)
            [batch] = make_micro_batches([[([0], [0] * n) for n, _ in groups]], tp_with_sp=1)
            assert batch.keys is None
        torch.manual_seed(seed)
        tokens = batch.tokens.numel()
        sizes = [(tokens, heads, DIM) for heads in (HEADS, kv_heads, kv_heads)]
        ours = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes]
        expected = [x.detach().clone().requires_grad_() for x in ours]
        zeros = torch.zeros(tokens, 1, DIM, dtype=torch.float64)
        packing = Packing("thd", batch=batch, rope=(zeros + 1, zeros))
        output = attention(*ours, None, packed_seq_params=packing)
        wanted = plain_groups(*expected, groups)
        assert torch.allclose(output, wanted, rtol=0, atol=1e-12)
        slope = torch.randn_like(output)
        (output * slope).sum().backward()
        (wanted * slope).sum().backward()
        for x, other in zip(ours, expected, strict=True):
            assert torch.allclose(x.grad, other.grad, rtol=0, atol=1e-12)

    check()


def test_rotary_embedding_rounds_once():
    """In bfloat16, far into a long text, it must equal float64 with the same angles, to the last bit."""
    positions = torch.arange(30_000, 30_512)[:, None]
    frequencies = (10_000.0 ** -(torch.arange(0, 64) / 64))[None]
    batch = SimpleNamespace(positions=positions.T)  # [axes, tokens]
    x = torch.randn(512, 4, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    rotated = rotate(x, *packing_of(batch, frequencies).rope)
    angles = (positions.float() * frequencies).double()[:, None]
    first, second = x.double().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    expected = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).bfloat16()
    assert rotated.dtype == torch.bfloat16
    assert (rotated == expected).float().mean() > 0.999
