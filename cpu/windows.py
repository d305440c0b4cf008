"""SGLang's scheduler with decoder.cpp: several decode steps in one pass, a window, sampled inside.

Between two steps a scheduler takes longer than a small model does. A window ends where an answer is to be
streamed, and after LIMIT_S; a request that ends leaves it. Its tokens are those of single steps, to the last
bit. What no window has (top-p, penalties, grammars, lists of log-probabilities, stop strings) is decoded by
single steps, of all that run beside it. Imports sglang: in the process that owns the model alone.
"""

import torch
from sglang.srt.managers import scheduler
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocation import alloc_token_slots
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from cpu import compiler
from cpu.decoder import STOPS, Decoder, Rules

MOST_STEPS = 16
LIMIT_S = 0.02  # of CPU time: what is asked meanwhile, an abort above all, waits so long


class ModelDecoder(Decoder):
    """The decoder of an SGLang model, in place of its layers, its head and its sampler."""

    def __init__(self, library, runner):
        super().__init__(library, runner)
        self._load_weights = runner.model.load_weights
        self._sample_by_torch = runner.sampler.forward
        runner.model.load_weights = self._renew
        runner.model.model.forward = self._run_layers
        runner.sampler.forward = self._sample_batch
        runner.attn_backend.init_forward_metadata = lambda batch: None
        if processor := dict(runner.model.named_children()).get("logits_processor"):
            processor._compute_lm_head = lambda hidden, *_, **__: self.logits(hidden)

    def _renew(self, weights):
        self.is_stale = True  # until the next pass: a push comes in several parts
        return self._load_weights(weights)

    def _run_layers(self, input_ids, positions, forward_batch, *_, **__):
        requests = forward_batch.req_pool_indices
        if not forward_batch.forward_mode.is_decode():
            requests = requests.repeat_interleave(forward_batch.extend_seq_lens)
        return self.forward(input_ids, positions, requests)

    def _sample_batch(self, output, info, wants_logprobs, top_nums, lists, positions, **others):
        """Do Sampler.forward. Rows with top-p and the like are torch's, as are lists of log-probabilities."""
        tokens, logprobs = self.sample(output.next_token_logits, rules_of(info), positions)
        is_ruled = (info.top_ks > 1) & (info.top_ks < info.vocab_size)
        is_ruled |= (info.top_ps < 1) | (info.min_ps > 0)
        if is_ruled.any() or any(top_nums or ()) or any(lists or ()):
            asked = (output, info, wants_logprobs, top_nums, lists, positions)
            by_torch = self._sample_by_torch(*asked, **others)
            tokens = torch.where(is_ruled, by_torch, tokens)
            if wants_logprobs:
                logprobs = torch.where(is_ruled, output.next_token_logprobs, logprobs)
        output.next_token_logprobs = logprobs if wants_logprobs else None
        return tokens.to(torch.int32)


def rules_of(info) -> Rules:
    """Return how the rows of a SamplingBatchInfo are sampled; without --deterministic, seeds are drawn."""
    seeds = info.sampling_seed
    if seeds is None:
        seeds = torch.randint(2**63 - 1, (len(info.top_ks),))
    return Rules(info.temperatures.flatten(), (info.top_ks <= 1).to(torch.int64), seeds)


class Window(GenerationBatchResult):
    """The result of several steps: for each request its new tokens, and their log-probabilities."""

    def __init__(self, tokens, logprobs, counts):
        newest = tokens.gather(1, counts[:, None] - 1).flatten()
        super().__init__(next_token_ids=newest)
        self.num_correct_drafts = int(counts.sum()) - len(counts)  # tokens beyond one a request
        both = zip(tokens.tolist(), logprobs.tolist(), counts.tolist(), strict=True)
        self.written = [(ids[:count], values[:count]) for ids, values, count in both]


class WindowProcessor(SchedulerBatchResultProcessor):
    """SGLang's, which takes several tokens of a request at once from speculative decoding."""

    def _normalize_decode_outputs(self, *, batch, result, **others):
        if isinstance(result, Window):
            return tuple(zip(*result.written, strict=True))
        return super()._normalize_decode_outputs(batch=batch, result=result, **others)

    def _apply_decode_logprobs(self, *, req, i, next_token_id, next_token_logprobs, **others):
        found = next_token_logprobs[i]
        if isinstance(found, list):
            req.logprob.output_token_logprobs_val.extend(found)
            req.logprob.output_token_logprobs_idx.extend(next_token_id)
            return
        given = {"next_token_id": next_token_id, "next_token_logprobs": next_token_logprobs}
        super()._apply_decode_logprobs(req=req, i=i, **given, **others)


def stops_of(req: Req) -> list[int] | None:
    """Return the tokens that end the answer, filled up with -1; None if a window can't write it."""
    rule = req.sampling_params
    is_filtered = rule.top_p < 1 or rule.min_p > 0 or 1 < rule.top_k < TOP_K_ALL
    is_penalized = rule.frequency_penalty or rule.presence_penalty or rule.repetition_penalty != 1
    is_shaped = req.grammar is not None or rule.min_new_tokens or rule.logit_bias is not None
    ends_by_text = rule.stop_strs or rule.stop_regex_strs
    lists = req.logprob.top_logprobs_num or req.logprob.token_ids_logprob is not None
    asks_more = lists or req.return_hidden_states or req.custom_logit_processor is not None
    if is_filtered or is_penalized or is_shaped or ends_by_text or asks_more or req.to_finish:
        return None
    stops = {*(rule.stop_token_ids or ()), *(req.eos_token_ids or ())}
    stops = [] if rule.ignore_eos else sorted(stops)
    return stops + [-1] * (STOPS - len(stops)) if len(stops) <= STOPS else None


class WindowScheduler(scheduler.Scheduler):
    """SGLang's scheduler, whose decode steps are windows where they can be."""

    def __init__(self, server_args, port_args):
        super().__init__(server_args, port_args)
        library = compiler.choose(server_args.model_path, server_args.dtype).library
        self.decoder = ModelDecoder(library, self.tp_worker.model_runner)
        self._take_step = self.model_worker.forward_batch_generation
        self.model_worker.forward_batch_generation = self._take_steps
        # decode passes between two prefills, each of which was a step
        self.prefill_decode_interval = min(1, self.prefill_decode_interval)

    def _take_steps(self, batch: ScheduleBatch, **others) -> GenerationBatchResult:
        """Do the model worker's pass: a window if all requests can have one and there is room."""
        if not batch.forward_mode.is_decode():
            return self._take_step(batch, **others)
        stops = [stops_of(req) for req in batch.reqs]
        left = [req.sampling_params.max_new_tokens - len(req.output_ids) for req in batch.reqs]
        steps = min(MOST_STEPS, max(left), *map(self._steps_to_event, batch.reqs))
        # slots of the KV cache, besides the one that each has
        more = torch.tensor(left).clamp(max=steps) - 1
        room = self.token_to_kv_pool_allocator.available_size() + self.tree_cache.evictable_size()
        if steps == 1 or None in stops or more.sum() > room:
            return self._take_step(batch, **others)
        return self._take_window(batch, stops, left, steps, more)

    def _steps_to_event(self, req: Req) -> int:
        """Count the tokens until the next ones are streamed."""
        if not req.stream:
            return MOST_STEPS
        interval = req.sampling_params.stream_interval or self.stream_interval
        return max(1, interval - len(req.output_ids) + req.send_token_offset)

    def _take_window(self, batch, stops, left, steps, more) -> Window:
        """Reserve the slots that the requests may need, decode, and free what they didn't need."""
        slots = alloc_token_slots(self.tree_cache, int(more.sum()))
        row, step = (torch.arange(steps - 1) < more[:, None]).nonzero(as_tuple=True)  # of each slot
        table = self.req_to_token_pool.req_to_token
        table[batch.req_pool_indices[row], batch.seq_lens[row] + step] = slots.to(table.dtype)
        rules = rules_of(batch.sampling_info)
        columns = [batch.input_ids, batch.seq_lens - 1, batch.req_pool_indices, rules.seeds]
        columns += [rules.greedy, torch.tensor(left), *torch.tensor(stops).T]
        requests = torch.stack(columns, 1)
        tokens, logprobs, counts = self.decoder.decode(requests, rules.temperatures, steps, LIMIT_S)
        self.token_to_kv_pool_allocator.free(slots[step >= counts[row] - 1])
        batch.seq_lens = batch.seq_lens + counts - 1
        batch.seq_lens_cpu = batch.seq_lens_cpu + counts - 1
        batch.orig_seq_lens = batch.orig_seq_lens + counts - 1
        for req, count in zip(batch.reqs, counts.tolist(), strict=True):
            req.kv.kv_allocated_len += count - 1
            req.kv.kv_committed_len += count - 1
        return Window(tokens, logprobs, counts)


def install():
    """Have SGLang's process that owns the model make such a scheduler."""
    scheduler.Scheduler = WindowScheduler
    scheduler.SchedulerBatchResultProcessor = WindowProcessor
