# ruff: noqa: E402
"""The policy in Megatron-Core: log-probabilities, update, weights out.

Tensor, pipeline, context and sequence parallelism are Megatron's, by the sizes in the config; data parallelism is its
DistributedDataParallel (DDP) with the DistributedOptimizer, which shards torch's AdamW over the data-parallel ranks.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from cpu.megatron import install

install()

from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed, vocab_parallel_cross_entropy
from megatron.core.transformer.module import Float16Module

import model as models
from algorithms import get_algorithm
from batch import NO_TARGET, MicroBatch, deal, make_micro_batches
from rollout import Sample

Sequence = tuple[list[int], list[int]]  # the tokens of a prompt and of the response to it
# (slots, logprobs, entropy), each [targets] -> the loss of each target, and this micro-batch's statistics
TokenLoss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]


class Actor:
    """One rank's part of the policy. The tp * pp * cp ranks of a model-parallel group are always given the same samples.

    Attributes: `version` counts the calls of `update`; `dp_rank` of `dp_size` says which share of the samples this rank trains
    on; `is_head` marks the one rank of its model-parallel group that talks to engines; `cost(tokens)` is the work of a sequence.
    """

    shards_optimizer = True  # a subclass with an optimizer that needs whole gradients says False

    def __init__(self, config, model_dir: str):
        """Load the Hugging Face directory `model_dir` (collective over all ranks, after torch.distributed is initialised).

        ValueError if the directory or the parallel sizes cannot be used.
        """
        self.config, self.model_dir = config, model_dir
        self.algorithm = get_algorithm(config.algorithm)
        group_size = config.tp * config.pp * config.cp
        if dist.get_world_size() % group_size:
            raise ValueError(f"--tp * --pp * --cp = {group_size} does not divide the {dist.get_world_size()} ranks")
        hf = models.read_hf_config(model_dir)
        mpu.initialize_model_parallel(config.tp, config.pp, context_parallel_size=config.cp)
        model_parallel_cuda_manual_seed(config.seed)
        self.dp_rank, self.dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        tp_rank, pp_rank = mpu.get_tensor_model_parallel_rank(), mpu.get_pipeline_model_parallel_rank()
        self.is_head = (tp_rank, pp_rank, mpu.get_context_parallel_rank()) == (0, 0, 0)
        self.device = models.device()
        self.cost = partial(models.forward_cost, hf)
        self.awake, self.version = True, 0
        self._build(hf)

    def _build(self, hf: dict) -> None:
        config, bf16 = self.config, self.config.dtype == "bfloat16"
        model_config = models.transformer_config(hf, config)
        self.gpt = models.build_model(hf, model_config).to(self.device)
        models.load_weights(self.gpt, self.model_dir)
        ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=self.shards_optimizer, grad_reduce_in_fp32=True)
        wrapped = Float16Module(model_config, self.gpt) if bf16 else self.gpt
        self.ddp = DistributedDataParallel(model_config, ddp_config, wrapped)
        model_config.finalize_model_grads_func = finalize_model_grads
        self._build_optimizer(model_config)

    def _build_optimizer(self, model_config) -> None:
        config = self.config
        optimizer_config = OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.adam_beta1,
            adam_beta2=config.adam_beta2,
            clip_grad=config.clip_grad,
            use_distributed_optimizer=self.shards_optimizer,
            bf16=config.dtype == "bfloat16",
            params_dtype=model_config.params_dtype,
        )
        self.optimizer = get_megatron_optimizer(optimizer_config, [self.ddp], use_gloo_process_groups=False)
        model_config.grad_scale_func = self.optimizer.scale_loss

    def close(self) -> None:
        """Destroy the process groups, so that another actor can be built. Collective over all ranks."""
        mpu.destroy_model_parallel()

    # ------------------------------------------------------------------------------------------------------ wake and sleep

    def sleep(self) -> None:
        """Give the device's memory back: weights and optimizer state go to the host, gradients are freed. Not collective.

        On CPU there is nothing to give back to, and only `awake` changes.
        """
        assert self.awake, "the actor already sleeps"
        if self.device.type == "cuda":  # run on CPU tensors by the tests, not yet on a GPU
            self.ddp.offload_grad_buffers()
            for buffer in self.ddp.buffers:
                buffer.offload_to_cpu(move_params=True, move_grads=False)
            if self.config.dtype == "bfloat16":  # with float32 the optimizer's parameters are views of the weight buffer,
                self.optimizer.offload_to_cpu()  # and moving them would cut that tie, so its state stays on the device
            torch.cuda.empty_cache()
        self.awake = False

    def wake(self) -> None:
        """Undo `sleep`. Not collective."""
        assert not self.awake, "the actor is already awake"
        if self.device.type == "cuda":  # run on CPU tensors by the tests, not yet on a GPU
            for buffer in self.ddp.buffers:
                buffer.reload_from_cpu(move_params=True, move_grads=False)
            self.ddp.restore_grad_buffers()
            if self.config.dtype == "bfloat16":
                self.optimizer.restore_from_cpu()
        self.awake = True

    # ------------------------------------------------------------------------------------------------------------ training

    def update(self, samples: list[Sample]) -> dict[str, float]:
        """Train on this data-parallel rank's samples: `updates_per_step` optimizer steps. Collective over all ranks.

        A sample whose `advantages` are None is padding and is left out. Returns metrics that are the same on every rank; the
        table in the README says what they mean. ValueError if the trainer and the engine disagree about log-probabilities.
        """
        assert self.awake, "the actor sleeps: wake it before update"
        assert samples, "every rank needs samples: pad a short batch with one whose advantages are None"
        for sample in samples:
            assert set(sample.versions) <= {self.version}, f"a sample of weights {sample.versions} meets weights {self.version}"
        lr = learning_rate(self.version, self.config)
        steps = [
            self._policy_step(mini_batch, lr, compare_engine=number == 0)
            for number, mini_batch in enumerate(deal(samples, self.config.updates_per_step))
        ]
        self.version += 1
        return self._metrics(steps, lr)

    def _policy_step(self, samples: list[Sample], lr: float, compare_engine: bool) -> dict[str, float]:
        """One optimizer step on one mini-batch. Returns sums and maxima over all ranks (see `_reduce`) and the gradient norm."""
        # padding is left out, except where there is nothing else: a rank must take part in the collectives
        samples = [sample for sample in samples if sample.advantages is not None] or samples[:1]
        masked = [sample.advantages is None for sample in samples]
        old_logprobs, advantages = [], []  # by slot, see batch.py
        for sample in samples:
            nothing = [0.0] * len(sample.response)
            old_logprobs += nothing if sample.advantages is None else sample.logprobs
            advantages += nothing if sample.advantages is None else sample.advantages
        loss = partial(
            self._policy_loss,
            torch.tensor(old_logprobs, device=self.device),
            torch.tensor(advantages, device=self.device),
        )
        sequences = [(sample.prompt, sample.response) for sample in samples]
        stats = self._forward_backward(sequences, masked, self.config.temperature, loss)
        sums, maxima = self._reduce(stats)
        if compare_engine and not maxima["engine_logprob_diff_max"] <= self.config.max_logprob_diff:
            raise ValueError(
                f"the trainer's log-probabilities differ from the engine's by up to {maxima['engine_logprob_diff_max']:.2e}, "
                f"more than --max-logprob-diff {self.config.max_logprob_diff:.2e}"
            )
        grad_norm = self._optimizer_step(lr) if sums["tokens"] > 0 else 0.0
        return {**sums, **maxima, "grad_norm": grad_norm}

    def _policy_loss(
        self, all_old_logprobs: Tensor, all_advantages: Tensor, slots: Tensor, logprobs: Tensor, entropy: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        old_logprobs, advantages = all_old_logprobs[slots], all_advantages[slots]
        loss, clipped = self.algorithm.loss(logprobs, old_logprobs, advantages, self.config.clip_low, self.config.clip_high)
        log_ratio = logprobs.detach() - old_logprobs
        stats = {
            "loss": loss.detach().sum(),
            "entropy": entropy.sum(),
            "kl": -log_ratio.sum(),  # the k1 estimator of KL(old || new)
            "clipped": clipped.sum(),
            "engine_logprob_diff_max": largest(log_ratio.abs()),
        }
        return loss, stats

    def supervised(self, sequences: list[Sequence], lr: float) -> float:
        """One optimizer step of cross-entropy on the response tokens of (prompt, response) pairs. Collective over all ranks.

        Returns the loss before the step in nats: the mean over the response tokens of all ranks.
        """
        assert self.awake, "the actor sleeps: wake it before supervised"

        def cross_entropy(slots, logprobs, entropy):
            return -logprobs, {"loss": -logprobs.detach().sum()}

        sums, _ = self._reduce(self._forward_backward(sequences, [False] * len(sequences), 1.0, cross_entropy))
        self._optimizer_step(lr)
        return sums["loss"] / sums["tokens"]

    def logprobs(self, samples: list[Sample]) -> list[list[float]]:
        """Log-probability of every response token under the current weights. Collective over the model-parallel group."""
        assert self.awake, "the actor sleeps: wake it before logprobs"
        lengths = [len(sample.response) for sample in samples]
        result = torch.zeros(sum(lengths), device=self.device)

        def collect(slots, logprobs, entropy):
            result[slots] = logprobs
            return torch.zeros_like(logprobs), {}

        sequences = [(sample.prompt, sample.response) for sample in samples]
        self._forward_backward(sequences, [False] * len(samples), self.config.temperature, collect, forward_only=True)
        for group in (mpu.get_context_parallel_group(), mpu.get_pipeline_model_parallel_group()):
            dist.all_reduce(result, group=group)  # each rank filled in what it computed and left zeros elsewhere
        return [part.tolist() for part in result.split(lengths)]

    def _forward_backward(
        self, sequences: list[Sequence], masked: list[bool], temperature: float, token_loss: TokenLoss, forward_only: bool = False
    ) -> list[dict[str, Tensor]]:
        """Run Megatron's schedule over packed micro-batches. Leaves the gradient of the mean loss of all ranks' targets in DDP.

        Returns the statistics of each micro-batch, and nothing on other than the last pipeline stage. Collective over all ranks
        (the model-parallel group with `forward_only`).
        """
        config = self.config
        micro_batches = make_micro_batches(
            sequences,
            masked,
            config.max_tokens_per_micro_batch,
            cp=config.cp,
            cp_rank=mpu.get_context_parallel_rank(),
            tp_with_sp=config.tp if config.sp else 1,
        )

        def forward_step(remaining: Iterator[MicroBatch], model):
            batch = next(remaining).to(self.device)
            cu_seqlens = {"cu_seqlens_q": batch.starts, "cu_seqlens_kv": batch.starts}
            packed = PackedSeqParams("thd", **cu_seqlens, max_seqlen_q=batch.longest, max_seqlen_kv=batch.longest)
            logits = model(batch.tokens, None, batch.attention_mask, packed_seq_params=packed)  # [1, T, vocab / tp]
            return logits, partial(_sum_loss, batch, temperature, token_loss)

        self.ddp.zero_grad_buffer()
        with torch.set_grad_enabled(not forward_only):
            return get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(micro_batches),
                model=self.ddp,
                num_microbatches=len(micro_batches),
                seq_length=config.max_tokens_per_micro_batch,  # not used: stages tell each other the real length
                micro_batch_size=1,
                forward_only=forward_only,
            )

    def _optimizer_step(self, lr: float) -> float:
        """AdamW on the gradients in DDP. Returns their norm before clipping. Collective over all ranks."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self.config.weight_decay * group["wd_mult"]  # 0 for biases and norms
        _, grad_norm, _ = self.optimizer.step()
        # not Megatron's own check_for_nan_in_grad, which raises on one rank and leaves the others waiting for it
        assert math.isfinite(grad_norm), f"the gradient norm is {grad_norm}: the weights are lost, resume from a checkpoint"
        return grad_norm

    def _reduce(self, stats: list[dict[str, Tensor]]) -> tuple[dict[str, float], dict[str, float]]:
        """Sums and maxima of the micro-batches' statistics over all ranks (collective)."""
        maxima = {"engine_logprob_diff_max": 0.0, "micro_batches": float(len(stats))}
        sums = dict.fromkeys(("loss", "entropy", "kl", "clipped", "tokens"), 0.0)
        for stat in stats:
            for name, value in stat.items():
                if name in maxima:
                    maxima[name] = max(maxima[name], value.item())
                elif mpu.get_tensor_model_parallel_rank() == 0:  # the other tensor-parallel ranks hold copies
                    sums[name] += value.item()
        return all_reduce(sums, dist.ReduceOp.SUM), all_reduce(maxima, dist.ReduceOp.MAX)

    def _metrics(self, steps: list[dict[str, float]], lr: float) -> dict[str, float]:
        """The metrics of one update from what its optimizer steps returned: token means, and means over the steps."""
        total = {name: sum(step[name] for step in steps) for name in steps[0]}
        tokens = max(total["tokens"], 1.0)
        return {
            "train/loss": total["loss"] / tokens,
            "train/entropy": total["entropy"] / tokens,
            "train/kl": total["kl"] / tokens,
            "train/clip_frac": total["clipped"] / tokens,
            "train/grad_norm": total["grad_norm"] / len(steps),
            "train/lr": lr,
            "train/tokens": total["tokens"],
            "train/micro_batches": total["micro_batches"],  # of the rank that had the most
            "train/skipped": float(sum(step["tokens"] == 0 for step in steps)),  # optimizer steps that had no token to train on
            "train/engine_logprob_diff_max": steps[0]["engine_logprob_diff_max"],
        }

    # -------------------------------------------------------------------------------------------------------- weights, state

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the policy under its Hugging Face name, on every rank. Collective over the model-parallel group.

        The tensors may be views of the live weights: use or copy them before the next update.
        """
        assert self.awake, "the actor sleeps: its weights are not there"
        return models.named_weights(self.gpt)

    def export(self, path: str) -> None:
        """Write a Hugging Face directory: weights, config.json, the tokenizer's files as they were. Collective over all ranks."""
        from safetensors.torch import save_file

        weights = {}
        if self.dp_rank == 0:
            for name, tensor in self.named_weights():
                if self.is_head:
                    weights[name] = tensor.to("cpu", copy=True)
        if weights:
            Path(path).mkdir(parents=True, exist_ok=True)
            for file in Path(self.model_dir).iterdir():
                if file.is_file() and file.suffix not in (".safetensors", ".bin") and not file.name.endswith(".index.json"):
                    shutil.copy(file, path)
            hf = json.loads(Path(self.model_dir, "config.json").read_text())
            Path(path, "config.json").write_text(json.dumps({**hf, "dtype": self.config.dtype}, indent=2))
            save_file(weights, Path(path, "model.safetensors"), metadata={"format": "pt"})
        dist.barrier()

    def state(self, loading: bool = False) -> dict:
        """What a checkpoint holds, as sharded tensors for megatron.core.dist_checkpointing. Collective over all ranks.

        `loading`: the state is the template for a load instead of what to save.
        """
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",  # the default type is broken in Megatron-Core 0.16.1
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
        }
        model = self.gpt.sharded_state_dict(metadata=metadata)
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
        return {"version": self.version, "model": model, "optimizer": optimizer}

    def load_state(self, state: dict) -> None:
        """Take over what dist_checkpointing.load(actor.state(loading=True), path) returned. Collective over all ranks."""
        self.gpt.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.version = state["version"]


def learning_rate(version: int, config) -> float:
    """Linear warm-up over `lr_warmup_steps` updates, then linear to `lr_decay_to` * lr at the last of `steps` updates."""
    if version < config.lr_warmup_steps:
        return config.lr * (version + 1) / config.lr_warmup_steps
    progress = (version - config.lr_warmup_steps + 1) / max(1, config.steps - config.lr_warmup_steps)
    return config.lr * (1 - min(progress, 1.0) * (1 - config.lr_decay_to))


def _sum_loss(batch: MicroBatch, temperature: float, token_loss: TokenLoss, logits: Tensor) -> tuple[Tensor, Tensor, dict]:
    """What Megatron's schedule asks of a loss: its sum, the number of tokens, and the statistics to return."""
    chosen = batch.slots != NO_TARGET
    # log_softmax(logits / temperature) is also what SGLang reports, so that the two can be compared
    logits = logits[0, chosen].float() / temperature  # [targets, vocab / tp]
    entropy = vocab_parallel_entropy(logits.detach())
    logprobs = -vocab_parallel_cross_entropy(logits, batch.targets[chosen])  # overwrites logits
    loss, stats = token_loss(batch.slots[chosen], logprobs, entropy)
    tokens = chosen.sum()
    return loss.sum(), tokens.int(), {**stats, "tokens": tokens}


def vocab_parallel_entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits) per row; logits [rows, vocab / tp]. Collective over the tensor-parallel group.

    With Z = sum(exp(l)): H = log(Z) - sum(l * exp(l)) / Z, where l is shifted by its maximum.
    """
    group = mpu.get_tensor_model_parallel_group()
    maximum = logits.amax(-1, keepdim=True)
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
    shifted = logits - maximum
    weights = shifted.exp()
    sums = torch.stack([weights.sum(-1), (weights * shifted).sum(-1)])
    dist.all_reduce(sums, group=group)
    return sums[0].log() - sums[1] / sums[0]


def largest(values: Tensor) -> Tensor:
    """The maximum, 0 of nothing; infinity stands for NaN, which a maximum over ranks could lose."""
    return torch.nan_to_num(values, nan=math.inf, posinf=math.inf).max() if values.numel() else values.new_zeros(())


def all_reduce(values: dict[str, float], op: dist.ReduceOp) -> dict[str, float]:
    """Element by element over all ranks (collective)."""
    tensor = torch.tensor(list(values.values()), dtype=torch.float64)
    dist.all_reduce(tensor, op)
    return dict(zip(values, tensor.tolist(), strict=True))
