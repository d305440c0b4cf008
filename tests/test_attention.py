"""Attention on packed sequences, and context-parallel parts of them, against plain softmax of whole ones.

Torch's variable-length attention runs on CUDA alone: here a fake of it, in plain arithmetic, checks what it
is given.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from training import model
from training.model import packing_of, rotate
from training.packing import MicroBatch, make_micro_batches, zigzag

HEADS, DIM, SCALE = 4, 8, 0.3
LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=5)  # in pieces of a token


def plain(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """[tokens, heads, dim]; the last query stands at the last key."""
    key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
    ahead = torch.ones(len(query), len(key), dtype=torch.bool).triu(len(key) - len(query) + 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(ahead, -torch.inf).softmax(-1), value)


def varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **how) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn`, which refuses other types and takes window_size for causal."""
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


def batch_of(lengths: list[int], cp: int, rank: int) -> MicroBatch:
    """Of padded sequences of these lengths."""
    packed = [[([0], [0] * length) for length in lengths]]
    return make_micro_batches(packed, cp, rank, tp_with_sp=1)[0]


@pytest.mark.parametrize("way", ["attend_by_length", "attend_at_once"])
def test_the_ranks_attend_as_the_whole_sequences_do(monkeypatch, way):
    """Outputs, and gradients: of keys and values summed over the ranks, as the all-gather's backward does."""

    monkeypatch.setattr(model, "varlen_attn", varlen)

    @given(LENGTHS, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, HEADS]), st.integers(0, 9))
    def check(sizes, cp, kv_heads, seed):
        torch.manual_seed(seed)
        lengths = [size * (2 * cp if cp > 1 else 1) for size in sizes]
        tensors = [torch.randn(sum(lengths), heads, DIM) for heads in (HEADS, kv_heads, kv_heads)]
        whole = [x.clone().requires_grad_() for x in tensors]
        pieces = zip(*(x.split(lengths) for x in whole), strict=True)
        expected = torch.cat([plain(*parts, SCALE) for parts in pieces])
        slope = torch.randn_like(expected)
        (expected * slope).sum().backward()
        query, key, value = ours = [x.clone().requires_grad_() for x in tensors]
        gathered = torch.cat([zigzag(lengths, cp, rank) for rank in range(cp)])
        for rank in range(cp):
            batch, mine = batch_of(lengths, cp, rank), zigzag(lengths, cp, rank)
            assert len(batch.keys) <= (1 + 1 / (2 * cp)) * sum(lengths)
            seen = (x[gathered][batch.keys] for x in (key, value))
            output = getattr(model, way)(query[mine], *seen, batch, SCALE)
            assert torch.allclose(output, expected[mine], rtol=0, atol=1e-5)
            (output * slope[mine]).sum().backward()
        for x, other in zip(ours, whole, strict=True):
            assert torch.allclose(x.grad, other.grad, rtol=0, atol=1e-5)

    check()


def test_rotary_embedding_rounds_once():
    """In bfloat16, far into a long text: as float64 does it with the same angles, to the last bit."""
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


@pytest.mark.slow
def test_rotation_compiled_is_one_kernel_and_no_other_numbers():
    """As on CUDA, where Inductor joins the halves without a copy; eager it is seven kernels."""
    from torch._dynamo.utils import counters
    from torch._inductor import config, metrics

    counters.clear()
    metrics.reset()
    fused = torch.compile(rotate, dynamic=True)
    with config.patch(force_pointwise_cat=True):
        for tokens in (64, 96, 33):
            angles = torch.rand(tokens, 1, DIM) * 6
            for heads in (4, 2):
                x = torch.randn(tokens, heads, DIM, dtype=torch.bfloat16)
                table = (angles.cos(), angles.sin())
                assert torch.equal(fused(x, *table), rotate(x, *table))
    assert metrics.generated_kernel_count == counters["stats"]["unique_graphs"] <= 2
