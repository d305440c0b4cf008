"""Batch invariance without CUDA: a token's bits don't depend on the other requests in its batch.

They don't depend on the KV cache's contents or on decode or prefill either: the same prompt and seed give the
same answer. SGLang ships GPU kernels for this. The sizes here were measured for float32 with torch 2.13 and
its MKL on one thread (tests/engines/test_engine.py). Attention is batched, as a call per request costs more.
"""

import torch
from torch.nn import functional as F

LEAST = 4  # MKL multiplies fewer rows or columns with other code: sums differ in the last bits
UNSPLIT = 192  # MKL cuts a longer sum into nearly equal parts, which depend on its whole length


def at_least_four(linear):
    """Pad x [rows, width] and weight in `linear(x, weight, bias)`: other rows don't change a row's bits."""

    def padded(x, weight, bias=None):
        rows = x.shape[0]
        columns = weight.shape[0]
        if rows < LEAST and x.ndim == 2:  # an image's [1, patches, width] has at least four
            x = F.pad(x, (0, 0, 0, LEAST - rows))
        if columns < LEAST:
            weight = F.pad(weight, (0, 0, 0, LEAST - columns))
            bias = bias if bias is None else F.pad(bias, (0, LEAST - columns))
        return linear(x, weight, bias)[:rows, ..., :columns]

    return padded


def group_by_length(req_to_token, req_pool_indices, seq_lens, new_lens):
    """Group requests by padded length. The last new_lens [n] of their seq_lens [n] tokens are queries.

    A request's padding depends only on its own length, not on a longer neighbor. Returns for each group the
    query tokens [b, q], padding included, KV slots [b, k], and an additive mask [b, 1, q, k].
    """
    members_of = {}
    for i, (length, new) in enumerate(zip(seq_lens.tolist(), new_lens.tolist(), strict=True)):
        rows = LEAST if new == 1 else round_up(new)
        members_of.setdefault((rows, padded_keys(length)), []).append(i)
    first_row = new_lens.cumsum(0) - new_lens
    groups = []
    for (q, k), members in members_of.items():
        members = torch.tensor(members)
        new = new_lens[members, None]
        position = torch.arange(q).minimum(new - 1)  # [b, q]: padding repeats the last query
        slots = req_to_token[req_pool_indices[members], :k]
        slots = F.pad(slots, (0, k - slots.shape[1]))  # the table is as wide as the context
        hidden = torch.arange(k) > (seq_lens[members, None] - new + position)[:, None, :, None]
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        groups.append((first_row[members, None] + position, slots, mask))
    return groups


def padded_keys(length):
    """Return the padded number of keys, for which sums have the same bits in decode and prefill."""
    return round_up(length, 16) if length <= UNSPLIT else round_up(length, 512)


def round_up(length, multiple=16):
    return -(-length // multiple) * multiple


def attend(query, k_cache, v_cache, groups, scaling, enable_gqa):
    """Attend from query [tokens, heads, dim] to caches [slots, kv heads, dim]; return query's shape."""

    def gather(cache, slots):  # an embedding lookup: twice as fast as indexing
        found = F.embedding(slots, cache.flatten(1))
        return found.unflatten(-1, cache.shape[1:]).transpose(1, 2)

    output = torch.empty_like(query)
    for rows, slots, mask in groups:
        q = query[rows].transpose(1, 2)  # [b, heads, q, dim]
        k = gather(k_cache, slots)
        v = gather(v_cache, slots)
        mask = mask.to(q.dtype)
        out = F.scaled_dot_product_attention(q, k, v, mask, scale=scaling, enable_gqa=enable_gqa)
        output[rows] = out.transpose(1, 2)  # padding has the bits of the query that it repeats
    return output


def batched_attention():
    """Return SGLang's `torch_native` backend with one call per group of requests. Needs cpu/sglang.py."""
    from sglang.srt.layers.attention.torch_native_backend import KVWriteLoc, TorchNativeAttnBackend
    from sglang.srt.layers.radix_attention import AttentionType

    class BatchedAttention(TorchNativeAttnBackend):
        def init_forward_metadata(self, batch):
            super().init_forward_metadata(batch)
            decodes = batch.forward_mode.is_decode()
            new_lens = torch.ones_like(batch.seq_lens) if decodes else batch.extend_seq_lens
            table = self.req_to_token_pool.req_to_token
            self.groups = group_by_length(table, batch.req_pool_indices, batch.seq_lens, new_lens)

        def forward(self, q, k, v, layer, batch, save_kv_cache=True):
            is_plain = layer.attn_type == AttentionType.DECODER and layer.sliding_window_size == -1
            assert is_plain, "only decoder models without a sliding window can run without a GPU"
            pool = self.token_to_kv_pool
            if save_kv_cache:
                pool.set_kv_buffer(layer, KVWriteLoc(batch.out_cache_loc, None), k, v)
            query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
            grouped = layer.tp_q_head_num != layer.tp_k_head_num
            k_cache, v_cache = pool.get_kv_buffer(layer.layer_id)
            return attend(query, k_cache, v_cache, self.groups, layer.scaling, grouped).flatten(1)

    return BatchedAttention


def image_by_image(tower):
    """Call `tower(self, patches, grids)` image by image: its attention sums over all images in a call."""

    def each(self, x, grid_thw):
        grids = torch.as_tensor(grid_thw)  # [images, 3]: frames, rows, columns of patches
        images = zip(x.split(grids.prod(-1).tolist()), grids.split(1), strict=True)
        return torch.cat([tower(self, patches, grid) for patches, grid in images])

    return each


def sum_in_order(group, x):
    """Add up all ranks' x in the order of ranks: gloo's order depends on a value's place in the batch."""
    if group.world_size == 1:
        return x
    first, *others = group.all_gather(x[None], 0)
    return x.copy_(sum(others, first))


def repair_sampling():
    """Sample each request by its own rule: a greedy one would change its neighbors' tokens."""
    from sglang.srt.layers.sampler import Sampler

    sample = Sampler._sample_from_probs

    def sample_each(self, probs, rules, positions, is_simple):
        if is_simple:
            return sample(self, probs, rules, positions, True)
        plain, _ = sample(self, probs, rules, positions, True)
        ruled, capture = sample(self, probs, rules, positions, False)
        has_rule = (rules.top_ks < probs.shape[1]) | (rules.top_ps < 1) | (rules.min_ps > 0)
        return torch.where(has_rule, ruled, plain), capture

    Sampler._sample_from_probs = sample_each


def install():
    """Patch SGLang with all of this: in the process that owns the model, before loading it, without CUDA."""
    from sglang.srt import batch_invariant_ops
    from sglang.srt.configs import update_config
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers import logits_processor
    from sglang.srt.layers.attention import attention_registry

    parallel_state.GroupCoordinator.all_reduce = sum_in_order
    parallel_state.is_shm_available = lambda *_: False  # on arm64 it would call a compiled kernel
    # only without a GPU it pads MLPs of several ranks; then shards of a push wouldn't fit
    update_config.DEFAULT_MOE_PADDING_SIZE = 1
    # these are triton kernels
    batch_invariant_ops.enable_batch_invariant_mode = lambda *args, **kwargs: None
    F.linear = at_least_four(F.linear)
    processor = logits_processor.LogitsProcessor
    processor._compute_lm_head = lambda self, x, head, *_, **__: F.linear(x, head.weight)
    attention_registry.register_attention_backend("torch_native")(batched_attention())
    from sglang.srt.models import qwen2_5_vl, qwen3_vl

    for tower in (qwen2_5_vl.Qwen2_5_VisionTransformer, qwen3_vl.Qwen3VLMoeVisionModel):
        tower.forward = image_by_image(tower.forward)
