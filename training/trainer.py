"""One Megatron-Core model that is trained: what the policy (actor.py) and the value models (critic.py) share.

Parallelism is Megatron's: tensor, pipeline, context, sequence; and for data DistributedDataParallel (DDP)
with the DistributedOptimizer, which shards AdamW over the ranks.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from config import Config
from sample import Sample
from scheduling.balance import flat, pack_evenly, packed_length
from training import hf_weights, sharded_checkpoint, vision
from training import model as models
from training.executor import Phase, Update, Work, join_pipeline, run, together
from training.lm_head import LMOutput
from training.offload import HostCopies
from training.packing import NO_TARGET, MicroBatch, Sequence, make_micro_batches
from training.resharding import Gathering

ADAM_BETAS = (0.9, 0.95)
CLIP_GRAD = 1.0  # largest norm of the gradient
MEASURED = 8  # optimizer steps whose durations are known

Packed = list[list[Sequence]]  # micro-batches of a pass
# the sum of the loss, what the sum over all micro-batches and ranks is divided by, statistics: their sums, or
# maxima where a name ends with _max
Stats = dict[str, Tensor]
LossSums = tuple[Tensor, int | Tensor, Stats]
Output = Tensor | LMOutput  # values, [1, T, 1], or what log-probabilities are read from
OutputLoss = Callable[[MicroBatch, Output], LossSums]
# (slots, logprobs, entropy), each [targets] -> the loss of each target and a micro-batch's statistics, among
# them `divisor`: what the sum of the loss is divided by
TokenLoss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Stats]]


class Trainer:
    """One rank's part of a model. The tp * pp * cp ranks of a model-parallel group get the same samples.

    The part is a chunk of the layers, or several: chunk c of the n-th of pp ranks is stage c * pp + n.
    `version` counts updates; `dp_rank` of `dp_size` is this rank's share of the samples; `is_head` marks the
    rank of its model-parallel group that talks to engines; `cost(tokens)` is the work of a sequence,
    `image_cost(prompt)` that on its images.
    """

    title = "model"

    def __init__(self, config: Config, model_dir: str, reverse: bool = False):
        """Load a directory (collective: every rank), else UserError. reverse: stage 0 on the last rank."""
        self.config, self.model_dir = config, model_dir
        hf = models.read_hf_config(model_dir)
        if not mpu.model_parallel_is_initialized():  # by the first trainer, for all
            sizes = dict(
                tensor_model_parallel_size=config.tp, pipeline_model_parallel_size=config.pp
            )
            sizes |= dict(context_parallel_size=config.cp)
            minutes = math.ceil(config.timeout_s / 60)  # Megatron's unit
            mpu.initialize_model_parallel(**sizes, distributed_timeout_minutes=minutes)
            model_parallel_cuda_manual_seed(config.seed)
        self.dp_rank = mpu.get_data_parallel_rank()
        self.dp_size = mpu.get_data_parallel_world_size()
        tp_rank = mpu.get_tensor_model_parallel_rank()
        pp_rank = mpu.get_pipeline_model_parallel_rank()
        self.is_head = (tp_rank, pp_rank, mpu.get_context_parallel_rank()) == (0, 0, 0)
        on_gpu = torch.cuda.is_available()
        where = ("cuda", torch.cuda.current_device()) if on_gpu else ("cpu",)
        self.device = torch.device(*where)
        self.cost = partial(models.forward_cost, hf)
        self.image_cost = vision.image_cost(hf) if "vision" in hf else lambda prompt: 0
        self.awake, self.version = True, 0
        self.stop_tokens: tuple[int, ...] = ()  # for generation_config.json of an export
        self._host_copies = HostCopies()
        self.pipeline, self.reverse = join_pipeline(self.device), reverse
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        self.groups.pp = self.pipeline.down if reverse else self.pipeline.up
        self.measured: list[tuple[float, float]] = []  # of the last steps, see `durations`
        self.phases: list[Phase] = []  # of the last `update`
        model_config = models.transformer_config(hf, config)
        # about, to tell models apart
        self.activations = model_config.num_layers * model_config.hidden_size
        self.frequencies = models.rotary_frequencies(hf, model_config).to(self.device)
        count = model_config.virtual_pipeline_model_parallel_size or 1
        self.chunks = [self._load_chunk(hf, model_config, number) for number in range(count)]
        self.gathering = Gathering(self.chunks, self.groups.tp)  # whole tensors: t_g = 1
        self.overlaps = models.overlaps(self.device)
        self.ddps = [self._wrapped(chunk) for chunk in self.chunks]
        self._build_optimizer(model_config)

    def _load_chunk(self, hf: dict, model_config: TransformerConfig, number: int) -> GPTModel:
        """One on this rank's device, with its weights (collective over the pipeline group)."""
        gpt = models.build_chunk(hf, model_config, self.groups, number).to(self.device)
        hf_weights.load_weights(gpt, hf_weights.HFWeights(self.model_dir))
        return gpt

    def _wrapped(self, gpt: GPTModel) -> DistributedDataParallel:
        for name, parameter in gpt.named_parameters():
            frozen = self.config.freeze_vision and name.startswith(hf_weights.TOWER)
            parameter.requires_grad_(not frozen)
        flags = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True}
        overlaps = self.overlaps and self.groups.dp_cp.size() > 1  # else a loss must reach all
        settings = DistributedDataParallelConfig(**flags, overlap_grad_reduce=overlaps)
        inner = Float16Module(gpt.config, gpt) if self.config.dtype == "bfloat16" else gpt
        return DistributedDataParallel(gpt.config, settings, inner, pg_collection=self.groups)

    def module_of(self, stage: int) -> DistributedDataParallel:
        return self.ddps[stage // len(self.pipeline.ranks)]

    def _build_optimizer(self, model_config: TransformerConfig) -> None:
        betas = dict(adam_beta1=ADAM_BETAS[0], adam_beta2=ADAM_BETAS[1])
        adamw = dict(optimizer="adam", lr=self.config.lr, **betas)
        adamw |= dict(weight_decay=self.config.weight_decay, use_distributed_optimizer=True)
        adamw |= dict(bf16=model_config.bf16, params_dtype=model_config.params_dtype)
        groups = dict(use_gloo_process_groups=False, pg_collection=self.groups)
        self.optimizer = get_megatron_optimizer(OptimizerConfig(**adamw), self.ddps, **groups)
        model_config.grad_scale_func = self.optimizer.scale_loss

    def close(self) -> None:
        """Destroy the model and the process groups of all trainers, so that others can be built (collective).

        DDP's hooks hold the model and C++ holds the hooks, a cycle that the collector doesn't see. Megatron
        only forgets its groups; each is a pair of threads that wake up all the time.
        """
        dist.barrier()  # nobody may still talk in a group that another has destroyed
        for node in (node for ddp in self.ddps for node in ddp.grad_accs):
            node.register_hook(print).hooks_dict_ref().clear()
        if self.pipeline.down is not self.pipeline.up:
            dist.destroy_process_group(self.pipeline.down)
        if mpu.model_parallel_is_initialized():  # not closed with another trainer
            for group in mpu._global_process_group_list[1:]:  # the first is None, the world's
                dist.destroy_process_group(group)
            mpu.destroy_model_parallel()

    def sleep(self) -> None:
        """Weights and optimizer go to the host, gradients are freed; on CPU nothing moves. Not collective."""
        assert self.awake, f"the {self.title} already sleeps"
        if self.device.type == "cuda":  # run on CPU tensors by the tests, not yet on a GPU
            self.trim()
            self._host_copies.move_out(self._state_tensors())
            torch.cuda.ipc_collect()  # the buckets of the last push
            torch.cuda.empty_cache()
        self.awake = False

    def trim(self) -> None:
        """Gradients, and the memory that passes left, leave the device until it wakes. Not collective."""
        if self.device.type == "cuda":
            for ddp in self.ddps:
                ddp.offload_grad_buffers()
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Undo `sleep`. Not collective. UserError if others hold the memory, and keep it."""
        assert not self.awake, f"the {self.title} is already awake"
        if self.device.type == "cuda":  # run on CPU tensors by the tests, not yet on a GPU
            gradients = sum(buffer.grad_data.nbytes for ddp in self.ddps for buffer in ddp.buffers)
            models.check_room(self._host_copies.size + gradients, f"the {self.title}")
            self._host_copies.move_in()
            for ddp in self.ddps:
                ddp.restore_grad_buffers()
        self.awake = True

    def _state_tensors(self) -> Iterator[Tensor]:
        """Weights, and the optimizer's own copies and moments of them, but not its counts of steps."""
        yield from (buffer.param_data for ddp in self.ddps for buffer in ddp.buffers)
        yield from (parameter for parameter in self.parameters() if not parameter.requires_grad)
        for adam in (part.optimizer for part in self.optimizer.chained_optimizers):
            yield from (parameter for group in adam.param_groups for parameter in group["params"])
            yield from (x for state in adam.state.values() for x in state.values() if x.ndim)

    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for chunk in self.chunks for parameter in chunk.parameters()]

    def update(self, mini_batches: list, beside: Iterable[Trainer] = ()) -> dict[str, float]:
        """The metrics of an update of this model and of each beside it (collective over all ranks)."""
        updates = [trainer.updating(mini_batches) for trainer in (self, *beside)]
        results, self.phases = together(updates, self.config.schedule)
        return {name: value for metrics in results for name, value in metrics.items()}

    def updating(self, mini_batches: list) -> Update:
        """An update of this data-parallel rank's samples, which asks for its passes (collective)."""
        raise NotImplementedError

    def optimizer_step(self, *arguments: Any) -> dict[str, float]:
        """`step` by itself (collective over all ranks)."""
        (stats,), _ = together([self.step(*arguments)], self.config.schedule)
        return stats

    def step(
        self,
        packed: Packed,
        output_loss: OutputLoss,
        names: Iterable[str],
        lr: float,
        check: Callable[[dict[str, float]], None] | None = None,
    ) -> Update:
        """One optimizer step on this data-parallel rank's micro-batches (collective over all ranks).

        names: the loss's statistics. check: sees all before the weights move, and may raise, on all ranks
        alike. A step without a target, or whose loss or gradient isn't finite, is skipped: weights and
        optimizer stay. Returns over all ranks the statistics, `loss` and `divisor` (sums), seconds of a
        rank's own work, `grad_norm` before clipping, `not_finite` and `skipped` (1 or 0).
        """
        assert self.awake, f"the {self.title} sleeps: wake it before it learns"
        work = self._work(packed, output_loss)
        yield work
        stats = self._reduce(work.stats, names)
        is_finite = math.isfinite(stats["loss"])  # the sum over all ranks, so they agree
        if check and is_finite:
            check(stats)
        learns = is_finite and stats["divisor"] > 0
        grad_norm = self._apply_gradients(lr) if learns else 0.0
        is_finite &= math.isfinite(grad_norm)
        skipped = {"not_finite": float(not is_finite), "skipped": float(not (learns and is_finite))}
        stats |= self._seconds(work) | skipped | {"grad_norm": grad_norm}
        return {name: value if math.isfinite(value) else 0.0 for name, value in stats.items()}

    def measure(
        self, packed: Packed, output_loss: OutputLoss, names: Iterable[str]
    ) -> dict[str, float]:
        """`loss`, `divisor` and the statistics alone, of examples (collective)."""
        assert self.awake, f"the {self.title} sleeps: wake it before a pass"
        return self._reduce(self._passes(packed, output_loss, forward_only=True), names)

    def _seconds(self, work: Work) -> dict[str, float]:
        """Of a rank's own passes, at most and at least. Takes note of their durations (collective)."""
        forward, backward = work.seconds(backward=False), work.seconds(backward=True)
        medians = {"forward": median(forward), "backward": median(backward)}
        sums = all_reduce(medians, dist.ReduceOp.SUM)
        self.measured = [*self.measured, tuple(sums.values())][-MEASURED:]
        own = sum(forward) + sum(backward)
        seconds = all_reduce({"slowest_s": own, "fastest_s": -own}, dist.ReduceOp.MAX)
        return {name: abs(value) for name, value in seconds.items()}

    @property
    def durations(self) -> tuple[float, float]:
        """Of a forward and a backward pass: as measured, summed over ranks; before that multiply-adds."""
        cost = self.cost(self.config.max_tokens_per_micro_batch)
        return tuple(map(median, zip(*self.measured or [(cost, 2.0 * cost)], strict=True)))

    def read_tokens(
        self, micro_batches: list[list[Sample]], read: Callable[[MicroBatch, Output], Tensor]
    ) -> list[list[float]]:
        """What `read` takes of each response token, a row a sample (collective: the model-parallel group)."""
        assert self.awake, f"the {self.title} sleeps: wake it before a pass"
        lengths = [len(sample.response) for sample in flat([micro_batches])]
        result = torch.zeros(sum(lengths), device=self.device)

        def collect(batch: MicroBatch, output: Output) -> LossSums:
            result[batch.slots[batch.slots != NO_TARGET]] = read(batch, output)
            return result.new_zeros(()), 1, {}

        self._passes(as_sequences(micro_batches), collect, forward_only=True)
        for group in (self.groups.cp, self.groups.pp):
            dist.all_reduce(result, group=group)  # each rank filled in its part, the rest is zeros
        return [row.tolist() for row in result.split(lengths)]

    def pack(self, sequences: list[Sequence]) -> list[list[int]]:
        """This rank's own micro-batches, where ranks need not do equal work. UserError as pack_evenly."""
        lengths = [
            packed_length(len(prompt) + len(r), self.config.cp) for prompt, r, *_ in sequences
        ]
        return pack_evenly(lengths, lengths, self.config.max_tokens_per_micro_batch, multiple=1)

    def _passes(
        self, packed: Packed, output_loss: OutputLoss, forward_only: bool = False
    ) -> list[Stats]:
        """A pass by itself: each micro-batch's statistics on the last stage. Collective as executor.run."""
        work = self._work(packed, output_loss, forward_only)
        run([work], self.config.schedule)
        return work.stats

    def _work(self, packed: Packed, output_loss: OutputLoss, forward_only: bool = False) -> Work:
        """A rank without sequences takes part with an empty micro-batch."""
        config, cp_rank = self.config, mpu.get_context_parallel_rank()
        tp_with_sp = config.tp if config.sp else 1
        micro_batches = make_micro_batches(packed or [[]], config.cp, cp_rank, tp_with_sp)

        def forward(batch: MicroBatch, module: DistributedDataParallel):
            batch = batch.to(self.device)
            packing = models.packing_of(batch, self.frequencies)
            output = module(batch.tokens, None, None, packed_seq_params=packing)
            return output, lambda output: _with_sums(output_loss, batch, self._as_output(output))

        return Work(self, micro_batches, forward, forward_only)

    def _as_output(self, tensor: Tensor) -> Output:
        """The model's, on the last pipeline stage, as losses take it."""
        return tensor

    def _reduce(self, passes: list[Stats], names: Iterable[str]) -> dict[str, float]:
        """Micro-batches' statistics over all ranks (collective)."""
        sums = {name: 0.0 for name in ("loss", "divisor", *names) if not name.endswith("_max")}
        maxima = {name: 0.0 for name in names if name.endswith("_max")}
        for stats in passes:
            values = torch.stack([value.to(self.device, torch.float64) for value in stats.values()])
            for name, value in zip(stats, values.tolist(), strict=True):
                if name in maxima:
                    maxima[name] = max(maxima[name], value)
                elif mpu.get_tensor_model_parallel_rank() == 0:  # the others hold copies
                    sums[name] += value
        return all_reduce(sums, dist.ReduceOp.SUM) | all_reduce(maxima, dist.ReduceOp.MAX)

    def _apply_gradients(self, lr: float) -> float:
        """AdamW on DDP's gradients, if they are finite. Returns their norm before clipping (collective)."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            group["fused"] = self.overlaps  # a checkpoint of another device brings its own
            # 0 for biases and norms
            group["weight_decay"] = self.config.weight_decay * group["wd_mult"]
        # not Megatron's check_for_nan_in_grad, which raises on one rank and leaves the others waiting for it
        self.optimizer.prepare_grads()
        grad_norm = self.optimizer.get_grad_norm()  # over all ranks, so they agree
        if math.isfinite(grad_norm):  # not optimizer.step(), which would do both of the above again
            for part in self.optimizer.chained_optimizers:
                clip_grad_by_total_norm_fp32(part.get_parameters(), CLIP_GRAD, grad_norm)
            self.optimizer.step_with_ready_grads()
        return grad_norm

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, or a live view, by its Hugging Face name (collective: the model-parallel group)."""
        assert self.awake, f"the {self.title} sleeps: its weights are not there"
        return iter(self.gathering)

    def export(self, path: str | Path) -> None:
        """Write a Hugging Face directory: weights, config.json, `stop_tokens`, other files (collective)."""
        if weights := self.whole_weights():
            self.write_hf(weights, path)
        dist.barrier()

    def whole_weights(self) -> dict[str, Tensor]:
        """A copy of the tensors on the one rank that writes them, nothing on the others (collective)."""
        weights = self.named_weights() if self.dp_rank == 0 else ()
        return {name: tensor.to("cpu", copy=True) for name, tensor in weights if self.is_head}

    def write_hf(self, weights: dict[str, Tensor], path: str | Path) -> None:
        """Write what `export` promises. Not collective."""
        from safetensors.torch import save_file

        Path(path).mkdir(parents=True, exist_ok=True)
        for file in Path(self.model_dir).iterdir():
            if file.is_file() and not file.name.endswith((".safetensors", ".bin", ".index.json")):
                shutil.copyfile(file, Path(path, file.name))  # not its mode: it may be read-only
        hf = json.loads(Path(self.model_dir, "config.json").read_text())
        Path(path, "config.json").write_text(json.dumps(self._hf_config(hf), indent=2))
        if self.stop_tokens:
            file = Path(path, "generation_config.json")
            named = json.loads(file.read_text()) if file.is_file() else {}
            file.write_text(json.dumps(named | {"eos_token_id": list(self.stop_tokens)}, indent=2))
        save_file(weights, Path(path, "model.safetensors"), metadata={"format": "pt"})

    def _hf_config(self, hf: dict) -> dict:
        return hf | {"dtype": self.config.dtype}

    def snapshot(self, folder: Path) -> tuple[Callable[[], list], Callable[[list[list]], None]]:
        """What writes model and optimizer, and what completes it (collective): see sharded_checkpoint.py."""
        assert self.awake, f"the {self.title} sleeps: wake it before a save"
        return sharded_checkpoint.plan_save(self, folder)

    def restore(self, folder: Path) -> None:
        """Load what a snapshot wrote, on any number of ranks (collective)."""
        assert self.awake, f"the {self.title} sleeps: wake it before a load"
        sharded_checkpoint.load(self, folder)


def _with_sums(output_loss: OutputLoss, batch: MicroBatch, output: Output) -> LossSums:
    """The loss as Megatron asks for it; its sum and divisor are statistics, too."""
    loss, divisor, stats = output_loss(batch, output)
    divisor = torch.as_tensor(divisor, dtype=torch.int32, device=loss.device)
    return loss, divisor, stats | {"loss": loss.detach(), "divisor": divisor}


def as_sequences(micro_batches: list[list[Sample]]) -> Packed:
    return [[Sequence(s.prompt, s.response, s.media) for s in samples] for samples in micro_batches]


def all_reduce(values: dict[str, float], op: dist.ReduceOp) -> dict[str, float]:
    """Name by name over all ranks (collective)."""
    tensor = torch.tensor(list(values.values()), dtype=torch.float64)
    if values:
        dist.all_reduce(tensor, op)
    return dict(zip(values, tensor.tolist(), strict=True))
