"""Trains one Megatron-Core model: the common base of policy and value models.

Megatron does tensor, pipeline and sequence parallelism; DistributedDataParallel (DDP) does data parallelism,
with the DistributedOptimizer, which shards AdamW over the ranks.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import save_file
from torch import Tensor

from config import Config
from runtime import devices
from runtime.timeline import Pass
from sample import Sample
from scheduling.balance import pack_evenly, packed_length
from scheduling.layout import Shape
from scheduling.pipeline import schedule_of
from training import hf_weights, sharded_checkpoint
from training import model as models
from training.groups import Groups, make_groups, own_device
from training.offload import HostCopies
from training.packing import MicroBatch, Packed, Sequence, make_micro_batches
from training.passes import Loss, LossSums, Stats, Work
from training.resharding import Gathering

ADAM_BETAS = (0.9, 0.95)
CLIP_GRAD = 1.0  # largest gradient norm
# reduce gradients during the backward pass, and fuse AdamW, which saves 4 bytes per parameter
OVERLAPS = torch.cuda.is_available()
# files that an export copies: tokenizer, processor, generation config, license
COPIED = """tokenizer*.json special_tokens_map.json added_tokens.json vocab.* merges.txt *.model *.tiktoken
chat_template.* additional_chat_templates/* *processor_config.json generation_config.json LICENSE* NOTICE*"""
ADAPTER = "adapter/adapter_model.safetensors"

# an engine reports that it sleeps as soon as its first rank does: time for the others to follow
RELEASE_S = 10.0

Read = Callable[[MicroBatch, Tensor], Tensor]  # one number per target: [targets]


class PlannedStep(NamedTuple):
    """An optimizer step that is prepared but not run: the arguments of Trainer.take_step."""

    work: Work
    names: Iterable[str]  # the loss's statistics
    lr: float
    check: Callable[[dict[str, float]], None] | None = None


class Trainer:
    """One rank's part of a model. All ranks of a model-parallel group get the same samples.

    `version` counts updates; `dp_rank` of `dp_size` is this rank's share of the samples; `is_lead` marks the
    rank of a model-parallel group that sends requests to engines; `macs(tokens)` counts the multiply-adds of
    a sequence's forward pass; `prefix_of(prompt)` is what a prompt's answers share; `title` names the model
    in messages.

    A subclass adds `plan_steps(mini_batches)`, which returns a PlannedStep per mini-batch and runs before the
    first of them: it may read the weights at the update's start, not those that an earlier step leaves;
    `metrics_of(results)`, which turns `take_step`'s results into the update's metrics; and `read_targets`, a
    `Read`.
    """

    holds = True  # this rank has a part of the model; see Elsewhere

    def __init__(
        self,
        config: Config,
        model_dir: str,
        groups: Groups | None = None,
        reverse: bool = False,
        learns: bool = True,
    ):
        """Load a directory (collective: the model's ranks). Raises UserError if it can't.

        groups: the model's, by default of all ranks. reverse: stage 0 is on the last rank. learns: otherwise
        the model is frozen, without gradients or optimizer.
        """
        self.config = config
        self.model_dir = model_dir
        self.reverse = reverse
        self.version = 0
        self.awake = True
        self.schedule = schedule_of(config)
        self.passes: list[Pass] = []  # the last update's
        self.stop_tokens: tuple[int, ...] = ()  # for an export's generation_config.json
        self._host_copies = HostCopies()
        self.device = own_device()
        hf = models.read_hf_config(model_dir)
        self.macs = partial(models.forward_macs, hf)
        self.prefix_of = partial(models.prefix_of, hf, models.image_macs(hf))
        self._join(groups)
        model_config = models.transformer_config(hf, config)
        self.frequencies = models.rotary_frequencies(hf, model_config).to(self.device)
        self.gpt = self._load_stage(hf, model_config)
        self.gathering = Gathering(self.gpt)
        self.module = self.gpt  # what passes run
        if config.dtype == "bfloat16":
            self.module = Float16Module(model_config, self.gpt)
        self.learns = learns
        if learns:
            self._build_optimizer(model_config)
        else:
            self.gpt.requires_grad_(False)

    def _join(self, groups: Groups | None) -> None:
        """Set this rank's place in the model's groups (collective: the model's ranks)."""
        if groups is None:
            shape = Shape.of(self.config, tuple(range(dist.get_world_size())))
            groups = make_groups(shape, self.config.timeout_s)
        self.own_groups = groups
        self.shape = groups.shape
        self.dp_rank, self.is_lead = self.shape.position_of(dist.get_rank())
        self.dp_size = self.shape.dp
        self.pipeline = groups.pipeline
        self.groups = groups.collection(self.reverse)
        tp = self.groups.tp.rank()
        model_parallel_cuda_manual_seed(self.config.seed, tp_rank=tp, ep_rank=0, etp_rank=tp)

    def _load_stage(self, hf: dict, model_config: TransformerConfig) -> GPTModel:
        """Build the stage on this rank's device and load its weights (collective: pipeline)."""
        gpt = models.build_stage(hf, model_config, self.groups).to(self.device)
        hf_weights.load_weights(gpt, hf_weights.HFWeights(self.model_dir))
        return gpt

    def _build_optimizer(self, model_config: TransformerConfig) -> None:
        """Wrap the stage in DDP, which reduces gradients over data-parallel ranks, and create AdamW."""
        settings = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=True,
            # on a single rank DDP would require that every parameter gets a gradient
            overlap_grad_reduce=OVERLAPS and self.groups.dp.size() > 1,
        )
        parts = (model_config, settings, self.module)
        self.module = self.ddp = DistributedDataParallel(*parts, pg_collection=self.groups)
        adamw = OptimizerConfig(
            optimizer="adam",
            lr=self.config.lr,
            adam_beta1=ADAM_BETAS[0],
            adam_beta2=ADAM_BETAS[1],
            weight_decay=self.config.weight_decay,
            use_distributed_optimizer=True,
            bf16=model_config.bf16,
            params_dtype=model_config.params_dtype,
        )
        groups = dict(use_gloo_process_groups=False, pg_collection=self.groups)
        self.optimizer = get_megatron_optimizer(adamw, [self.ddp], **groups)
        model_config.grad_scale_func = self.optimizer.scale_loss
        model_config.no_sync_func = self.ddp.no_sync  # gradients are summed in the last micro-batch

    def sleep(self) -> None:
        """Move weights and optimizer to the host, and free all else; no-op on a CPU. Not collective."""
        assert self.awake, f"the {self.title} already sleeps"
        if self.device.type == "cuda":
            self.trim()
            self._host_copies.move_out(self._state_tensors())
            torch.cuda.empty_cache()
        self.awake = False

    def trim(self, keeps_gradients: bool = False) -> None:
        """Free what only passes need: gradients and cached memory; no-op on a CPU. Not collective."""
        if self.device.type == "cuda":
            if self.learns and not keeps_gradients:
                self.ddp.offload_grad_buffers()
            torch.cuda.ipc_collect()  # the last bucket of the last push
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Undo `sleep`. Raises UserError if other processes don't release enough memory. Not collective."""
        assert not self.awake, f"the {self.title} is already awake"
        if self.device.type == "cuda":
            buffers = self.ddp.buffers if self.learns else ()
            gradients = sum(buffer.grad_data.nbytes for buffer in buffers)
            needed = self._host_copies.size + gradients
            devices.wait_for_room(needed, f"the {self.title} that wakes", RELEASE_S)
            self._host_copies.move_in()
            if self.learns:
                self.ddp.restore_grad_buffers()
        self.awake = True

    def _state_tensors(self) -> Iterator[Tensor]:
        """Yield the weights, and the optimizer's copies and moments, but not its step counts."""
        yield from (weight for weight in self.gpt.parameters() if not weight.requires_grad)
        if not self.learns:
            return
        yield from (buffer.param_data for buffer in self.ddp.buffers)
        for part in self.optimizer.chained_optimizers:
            for group in part.optimizer.param_groups:
                yield from group["params"]
            for state in part.optimizer.state.values():
                yield from (tensor for tensor in state.values() if tensor.ndim)

    def update(self, mini_batches: list) -> dict[str, float]:
        """Learn samples, an optimizer step per mini-batch; return metrics (collective: the model's ranks)."""
        results = []
        self.passes = []
        for step in self.plan_steps(mini_batches):
            self.schedule.run([step.work])
            results.append(self.take_step(*step))
            self.passes += step.work.passes
        metrics = self.metrics_of(results)
        self.version += 1
        return metrics

    def run_step(
        self, packed: Packed, loss: Loss, names: Iterable[str], lr: float
    ) -> dict[str, float]:
        """Run one optimizer step's passes, then `take_step` (collective: the model's ranks)."""
        return self.take_step(self._passes(packed, loss), names, lr)

    def take_step(
        self, work: Work, names: Iterable[str], lr: float, check: Callable | None = None
    ) -> dict[str, float]:
        """Take an optimizer step with the gradient of finished work (collective: the model's ranks).

        names: the losses' statistics. check: receives them before the weights change, and may raise on all
        ranks. A step without targets, or whose loss or gradient isn't finite, is skipped. Returns, over all
        ranks, the statistics, `loss` and `divisor` (sums), `slowest_s` and `fastest_s` of ranks' own work,
        `grad_norm` before clipping, `not_finite`, `skipped` (1 or 0), and this rank's `micro_batches`.
        """
        stats = self._reduce(work.stats, names)
        is_finite = math.isfinite(stats["loss"])  # summed over all ranks, so they agree
        if check and is_finite:
            check(stats)
        learns = is_finite and stats["divisor"] > 0
        grad_norm = self._apply_gradients(lr) if learns else 0.0
        is_finite = is_finite and math.isfinite(grad_norm)
        own = sum(done.end - done.start for done in work.passes)
        extremes = self.all_reduce({"slowest": own, "fastest": -own}, dist.ReduceOp.MAX)
        stats["slowest_s"] = extremes["slowest"]
        stats["fastest_s"] = -extremes["fastest"]
        stats["grad_norm"] = grad_norm if is_finite else math.nan
        stats["not_finite"] = float(not is_finite)
        stats["skipped"] = float(not (learns and is_finite))
        stats["micro_batches"] = float(len(work.micro_batches))
        return {name: value if math.isfinite(value) else math.nan for name, value in stats.items()}

    def measure(self, packed: Packed, loss: Loss, names: Iterable[str]) -> dict[str, float]:
        """Return `loss`, `divisor` and `names`, without learning (collective: the model's ranks)."""
        return self._reduce(self._passes(packed, loss, forward_only=True).stats, names)

    def read_tokens(self, micro_batches: list[list[Sample]]) -> list[list[float]]:
        """Read every response token, one list per sample (collective: a copy's ranks)."""
        lengths = [len(sample.response) for samples in micro_batches for sample in samples]
        result = torch.zeros(sum(lengths), device=self.device)

        def collect(batch: MicroBatch, output: Tensor) -> LossSums:
            result[batch.slots] = self.read_targets(batch, output)
            return loss_sums(result.new_zeros(()), 1, {})

        self._passes(as_sequences(micro_batches), collect, forward_only=True)
        dist.all_reduce(result, group=self.groups.pp)  # zeros except on the last stage
        return [row.tolist() for row in result.split(lengths)]

    def pack(self, sequences: list[Sequence]) -> list[list[int]]:
        """Pack sequences, given by index; ranks may get unequal work."""
        lengths = [packed_length(len(tokens) + len(more)) for tokens, more, *_ in sequences]
        return pack_evenly(lengths, lengths, self.config.max_tokens_per_micro_batch, multiple=1)

    def work(self, packed: Packed, loss: Loss, forward_only: bool = False) -> Work:
        """Prepare passes. A rank without sequences gets an empty micro-batch."""
        assert self.awake, f"the {self.title} sleeps: wake it before a pass"
        tp_with_sp = self.config.tp if self.config.sp else 1
        micro_batches = make_micro_batches(packed or [[]], tp_with_sp)
        return Work(self, micro_batches, [loss] * len(micro_batches), forward_only)

    def _passes(self, packed: Packed, loss: Loss, forward_only: bool = False) -> Work:
        """Run passes. Collective as Work.run."""
        work = self.work(packed, loss, forward_only)
        self.schedule.run([work])
        return work

    def _reduce(self, passes: list[Stats], names: Iterable[str]) -> dict[str, float]:
        """Sum `loss`, `divisor` and `names`; of `_max` the maxima (collective: the model's ranks)."""
        sums = {name: 0.0 for name in ("loss", "divisor", *names) if not name.endswith("_max")}
        maxima = {name: 0.0 for name in names if name.endswith("_max")}
        for stats in passes:
            values = torch.stack([value.to(self.device, torch.float64) for value in stats.values()])
            for name, value in zip(stats, values.tolist(), strict=True):
                if name in maxima:
                    maxima[name] = max(maxima[name], value)
                elif self.groups.tp.rank() == 0:  # the other ranks have copies
                    sums[name] += value
        sums = self.all_reduce(sums, dist.ReduceOp.SUM)
        return sums | self.all_reduce(maxima, dist.ReduceOp.MAX)

    def all_reduce(self, values: dict[str, float], op: dist.ReduceOp) -> dict[str, float]:
        """Reduce each value over these ranks (collective: the model's ranks)."""
        tensor = torch.tensor(list(values.values()), dtype=torch.float64)
        if values:
            dist.all_reduce(tensor, op, group=self.own_groups.everyone)
        return dict(zip(values, tensor.tolist(), strict=True))

    def _apply_gradients(self, lr: float) -> float:
        """Take AdamW's step if gradients are finite; return their norm (collective: the model's ranks)."""
        for group in self.optimizer.param_groups:
            decay = self.config.weight_decay * group["wd_mult"]  # wd_mult is 0 for biases and norms
            group |= {"lr": lr, "fused": OVERLAPS, "weight_decay": decay}
        # not Megatron's check_for_nan_in_grad, which raises on one rank and leaves the others waiting
        self.optimizer.prepare_grads()
        grad_norm = self.optimizer.get_grad_norm()  # over all ranks, so they agree
        if math.isfinite(grad_norm):  # not optimizer.step(), which would repeat both calls
            for part in self.optimizer.chained_optimizers:
                clip_grad_by_total_norm_fp32(part.get_parameters(), CLIP_GRAD, grad_norm)
            self.optimizer.step_with_ready_grads()
        return grad_norm

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor, or a view, with its Hugging Face name (collective: a copy's ranks)."""
        assert self.awake, f"the {self.title} sleeps: its weights are not there"
        return iter(self.gathering)

    @property
    def received_bytes(self) -> int:
        """The bytes that this rank received when it last gathered the tensors."""
        return self.gathering.received

    def export(self, path: str | Path) -> None:
        """Write a Hugging Face directory, with the COPIED files (collective: the model's ranks)."""
        if weights := self.whole_weights():
            self.write_hf(weights, path)
        dist.barrier(self.own_groups.everyone)

    def whole_weights(self) -> dict[str, dict[str, Tensor]]:
        """Copy each file's tensors to copy 0's lead's host; {} elsewhere (collective: that copy's ranks)."""
        if self.dp_rank > 0:
            return {}
        files = {"model.safetensors": self.named_weights()}
        if self.gpt.adapters:
            files[ADAPTER] = self.gpt.adapters.export(self.gathering)
        found = {}
        for file, weights in files.items():
            found[file] = {name: x.to("cpu", copy=True) for name, x in weights if self.is_lead}
        return found if self.is_lead else {}

    def write_hf(self, weights: dict[str, dict[str, Tensor]], path: str | Path) -> None:
        """Write the directory of `export`. Not collective."""
        Path(path).mkdir(parents=True, exist_ok=True)
        for pattern in COPIED.split():
            for file in filter(Path.is_file, Path(self.model_dir).glob(pattern)):
                copy = Path(path, file.relative_to(self.model_dir))
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)  # not copy, which would keep a read-only mode
        hf = json.loads(Path(self.model_dir, "config.json").read_text())
        Path(path, "config.json").write_text(json.dumps(self._hf_config(hf), indent=2))
        if self.stop_tokens:
            file = Path(path, "generation_config.json")
            named = json.loads(file.read_text()) if file.is_file() else {}
            file.write_text(json.dumps(named | {"eos_token_id": list(self.stop_tokens)}, indent=2))
        if self.gpt.adapters:
            Path(path, "adapter").mkdir(exist_ok=True)
            self.gpt.adapters.describe(self.model_dir, Path(path, "adapter"))
        # safetensors writes with 0600, whatever the umask
        mode = Path(path, "config.json").stat().st_mode
        for file, tensors in weights.items():
            save_file(tensors, Path(path, file), metadata={"format": "pt"})
            Path(path, file).chmod(mode)

    def _hf_config(self, hf: dict) -> dict:
        return hf | {"dtype": self.config.dtype}

    def snapshot(self, folder: Path) -> tuple[Callable, Callable]:
        """Plan a save: see sharded_checkpoint.take_snapshot. Not collective."""
        return sharded_checkpoint.take_snapshot(self, folder)

    def restore(self, folder: Path) -> None:
        """Load a save by any number of ranks: see sharded_checkpoint.load. Not collective."""
        sharded_checkpoint.load(self, folder)


def loss_sums(loss: Tensor, divisor: int | Tensor, stats: Stats) -> LossSums:
    """Return a micro-batch's loss for Megatron, which divides the total by the sum of all divisors."""
    divisor = torch.as_tensor(divisor, dtype=torch.int32, device=loss.device)
    return loss, divisor, stats | {"loss": loss.detach(), "divisor": divisor}


def as_sequences(micro_batches: list[list[Sample]]) -> Packed:
    return [
        [Sequence(s.prompt, s.response, s.media, s.replies) for s in batch]
        for batch in micro_batches
    ]


def totals(results: list[dict[str, float]]) -> dict[str, float]:
    """Sum each statistic of `take_step`'s results; `grad_norm` is the mean over steps with targets."""
    total = dict.fromkeys(results[0], 0.0)
    for result in results:
        for name, value in result.items():
            total[name] += value
    total["grad_norm"] /= max(1, sum(result["divisor"] > 0 for result in results))
    return total


def means(total: dict[str, float], names: Iterable[str], divisor: str) -> dict[str, float]:
    """Divide statistics by `divisor`, the one that counts their terms; 0 if there are none."""
    return {name: total[name] / max(total[divisor], 1.0) for name in names}
