"""SGLang's scheduler with decoder.cpp: one pass is a window of several decode steps, sampled inside.

Between two steps, a scheduler takes longer than a small model does. A window ends after LIMIT_MS; a request
that ends leaves it. Its tokens are bit-identical to single steps'. If any request needs what windows lack
(top-p, penalties, grammars, lists of log-probabilities, stop strings), the whole batch decodes in single
steps. Imports sglang: only in the process that owns the model.
"""

from functools import partial
from pathlib import Path

import torch
from msgspec import structs
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers import scheduler
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocation import alloc_token_slots
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams
from sglang.srt.server_args import ServerArgs

from extras.fast_cpu.compiler import library_for
from extras.fast_cpu.decoder import STOPS, Decoder, rules_of

LIMIT_MS = 20  # CPU time after which no step begins: an abort waits that long, plus a step
# settings that a window's request may choose; all others must be PLAIN's
FREE = dict(max_new_tokens=1, temperature=1.0, stop_token_ids=None, ignore_eos=False)
FREE |= dict(sampling_seed=None, stream_interval=None, top_k=1)
PLAIN = SamplingParams(**FREE)
PLAIN.normalize(None)


def stops_of(req: Req) -> list[int]:
    """Return the tokens that end the answer."""
    rule = req.sampling_params
    return [] if rule.ignore_eos else [*{*(rule.stop_token_ids or ()), *(req.eos_token_ids or ())}]


def is_plain(req: Req) -> bool:
    """True if a window can generate the answer."""
    rule = req.sampling_params
    has_lists = req.logprob.top_logprobs_num or req.logprob.token_ids_logprob is not None
    asks_more = has_lists or req.return_hidden_states or req.custom_logit_processor is not None
    is_whole = rule.top_k in (1, TOP_K_ALL) and structs.replace(rule, **FREE) == PLAIN
    return is_whole and not asks_more and len(stops_of(req)) <= STOPS


class WindowScheduler(scheduler.Scheduler):
    """SGLang's scheduler with windows as decode passes where possible."""

    def __init__(self, library: Path, server_args, port_args):
        super().__init__(server_args, port_args)
        self.decoder = Decoder(library, self.tp_worker.model_runner)
        self._take_step = self.model_worker.forward_batch_generation
        self.model_worker.forward_batch_generation = self._take_steps
        # passes between two prefills: a window has many steps, so one is enough
        self.prefill_decode_interval = min(1, self.prefill_decode_interval)

    def _take_steps(self, batch: ScheduleBatch, **others) -> GenerationBatchResult:
        """Run the model worker's pass: a window if all requests can have one and there is room."""
        if batch.forward_mode.is_decode() and all(map(is_plain, batch.reqs)):
            left = [req.sampling_params.max_new_tokens - len(req.output_ids) for req in batch.reqs]
            # KV cache slots in addition to the one that each has
            more = torch.tensor(left).clamp(max=self.decoder.most_steps) - 1
            room = self.token_to_kv_pool_allocator.available_size()
            if 0 < more.sum() <= room + self.tree_cache.evictable_size():
                return take_window(self.decoder, batch, left, more)
        return self._take_step(batch, **others)


def take_window(decoder: Decoder, batch: ScheduleBatch, left: list[int], more):
    """Decode, record all steps' tokens but the last's, and return its result, which SGLang handles."""
    steps = int(more.max()) + 1
    row, step = (torch.arange(steps) < more[:, None]).nonzero(as_tuple=True)  # each slot's
    slots = alloc_token_slots(batch.tree_cache, len(row))
    table = batch.req_to_token_pool.req_to_token
    table[batch.req_pool_indices[row], batch.seq_lens[row] + step] = slots.to(table.dtype)
    temperatures, greedy, seeds = rules_of(batch.sampling_info)
    stops = [stops_of(req) for req in batch.reqs]
    stops = torch.tensor([some + [-1] * (STOPS - len(some)) for some in stops])
    columns = [batch.input_ids, batch.seq_lens - 1, batch.req_pool_indices, seeds, greedy]
    requests = torch.stack([*columns, torch.tensor(left), *stops.T], 1)
    tokens, logprobs, counts = decoder.decode(requests, temperatures, steps, LIMIT_MS)
    batch.token_to_kv_pool_allocator.free(slots[step >= counts[row] - 1])
    batch.seq_lens = batch.seq_lens + counts - 1
    batch.seq_lens_cpu = batch.seq_lens_cpu + counts - 1
    batch.orig_seq_lens = batch.orig_seq_lens + counts - 1
    written = zip(batch.reqs, counts.tolist(), tokens.tolist(), logprobs.tolist(), strict=True)
    for req, count, ids, values in written:
        req.output_ids.extend(ids[: count - 1])
        if req.return_logprob:
            req.logprob.output_token_logprobs_val += values[: count - 1]
            req.logprob.output_token_logprobs_idx += ids[: count - 1]
        req.kv.kv_allocated_len += count - 1
        req.kv.kv_committed_len += count - 1
    last = counts[:, None] - 1
    output = LogitsProcessorOutput(None, next_token_logprobs=logprobs.gather(1, last).flatten())
    newest = tokens.gather(1, last).flatten()
    return GenerationBatchResult(logits_output=output, next_token_ids=newest)


def install(settings: ServerArgs) -> None:
    """Replace SGLang's scheduler if decoder.cpp can serve the model."""
    if library := library_for(settings.model_path, settings.dtype, settings.tp_size):
        scheduler.Scheduler = partial(WindowScheduler, library)
