"""LoRA (arXiv 2106.09685): the matrices W of a block stay as they are; W + (32 / rank) B A is learned.

Passes multiply by the sum, rounded once to W's type, and a push sends it: trainer and engines have the same
numbers, bit for bit. With x W + s (x A) B a bfloat16 trainer would have others than an engine that merges. A
pass makes each layer's sum from W again, and keeps none. A and B are float32; q, k and v, which Megatron
fuses, share an A, and so do gate and up. All blocks have adapters, and the scale makes the best --lr
independent of the rank, about ten times that of all weights (LoRA Without Regret, Schulman et al., 2025).
"""

import json
import re
from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup

from config import Config
from engines.engine import seed_of
from inputs.hf_directory import checkpoint_shapes
from runtime.errors import UserError
from training.hf_weights import global_parameters, hf_names, unfuse
from training.resharding import Gathering

ALPHA = 32
FILE = "adapter/adapter_model.safetensors"  # of an export, for PEFT, whose names begin with
PEFT = "base_model.model."
PARTS = ("q", "k", "v", "o", "gate", "up", "down")
# of a block, by Hugging Face's name; the letter is of q, k, v, o, gate, up, down
MATRIX = re.compile(r"layers\.\d+\.\w+\.([a-z])\w*_proj\.weight$")


def check(config: Config) -> None:
    """Raise UserError for a rank that a matrix of --model doesn't have."""
    sides = []
    for name, shape in checkpoint_shapes(config.model).items():
        found = MATRIX.search(name)
        if found and found[1] not in "kv":  # which are a part of a fused matrix
            sides += shape
    if config.lora > min(sides):
        least = f"a matrix of --model has only {min(sides)} rows or columns"
        raise UserError(f"--lora {config.lora}: {least}")


def merged(weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """W + s B A in float32, rounded once. B of zeros leaves W as it is, bit for bit."""
    return torch.addmm(weight.float(), b, a, alpha=ALPHA / len(a)).to(weight.dtype)


class MergedLinear(torch.autograd.Function):
    """x (W + s B A)^T: [tokens, 1, in] -> [tokens, 1, out]. The gradient of W, s slope^T x, is never made.

    spread: the ranks over which sequence parallelism spreads the tokens of x, or None (collective over them).
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, spread: ProcessGroup | None):
        ctx.save_for_backward(x, weight, a, b)
        ctx.spread = spread
        if spread:
            x = mappings.gather_from_sequence_parallel_region(x, group=spread)
        return F.linear(x, merged(weight, a, b))

    @staticmethod
    def backward(ctx, slope: Tensor) -> tuple:
        x, weight, a, b = ctx.saved_tensors
        x_slope = slope @ merged(weight, a, b)
        if ctx.spread:
            x = mappings.gather_from_sequence_parallel_region(x, group=ctx.spread)
            x_slope = mappings.reduce_scatter_to_sequence_parallel_region(x_slope, group=ctx.spread)
        x = x.flatten(0, -2)
        slope = slope.flatten(0, -2)
        scale = ALPHA / len(a)
        a_slope = (slope @ b.to(x.dtype)).T @ x
        b_slope = slope.T @ (x @ a.to(x.dtype).T)
        return x_slope, None, scale * a_slope.float(), scale * b_slope.float(), None


class Adapter(torch.nn.Module):
    """A and B of a matrix. Where tensor parallelism cuts its rows it cuts B's, where its columns A's."""

    def __init__(self, weight: torch.nn.Parameter, rank: int, seed: int, tp: ProcessGroup):
        """A is uniform, drawn whole, so that it doesn't depend on the ranks. B is zero."""
        super().__init__()
        cuts_columns = weight.partition_dim == 1
        columns = weight.shape[1] * (tp.size() if cuts_columns else 1)
        a = torch.empty(rank, columns).uniform_(generator=torch.Generator().manual_seed(seed))
        a = (2 * a - 1) / columns**0.5
        if cuts_columns:
            a = a.chunk(tp.size(), 1)[tp.rank()].contiguous()
        self.a = torch.nn.Parameter(a.to(weight.device))
        self.b = torch.nn.Parameter(torch.zeros(len(weight), rank, device=weight.device))
        set_tensor_model_parallel_attributes(self.a, cuts_columns, 1, 1)
        set_tensor_model_parallel_attributes(self.b, not cuts_columns, 0, 1)
        self.tp = tp
        self.is_on = True

    def multiply(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sequence_parallel: bool,
        allreduce_dgrad: bool,
        **unused,
    ) -> Tensor:
        """Multiply in the place of `_forward_impl` of Megatron's linear layers (collective: tp)."""
        if allreduce_dgrad:
            input = mappings.copy_to_tensor_model_parallel_region(input, self.tp)
        a = self.a
        b = self.b
        if not self.is_on:
            b = torch.zeros_like(b)
        # each rank has a part of the gradient of what isn't cut
        elif self.b.tensor_model_parallel:
            a = mappings.copy_to_tensor_model_parallel_region(a, self.tp)
        else:
            b = mappings.copy_to_tensor_model_parallel_region(b, self.tp)
        spread = self.tp if sequence_parallel else None
        output = MergedLinear.apply(input, weight, a, b, spread)
        return output if bias is None else output + bias

    def merged(self, weight: Tensor) -> Tensor:
        """The sum of this rank's parts, as passes make it."""
        return merged(weight.detach(), self.a.detach(), self.b.detach())


def attach(gpt: GPTModel, rank: int, seed: int) -> None:
    """Freeze a stage, and give each matrix of its blocks an adapter. Not collective."""
    gpt.requires_grad_(False)
    linears = {}
    for module in gpt.decoder.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            linears[module.weight] = module
    for name, weight in list(global_parameters(gpt)):
        if weight in linears:
            adapter = Adapter(weight, rank, seed_of("lora", seed, name), gpt.pg_collection.tp)
            linears[weight].adapter = gpt.adapters[name] = adapter
            linears[weight]._forward_impl = adapter.multiply
    if gpt.pre_process:
        # a block that is computed again has no gradient unless its input has one
        gpt.embedding.register_forward_hook(lambda module, args, output: output.requires_grad_())


def parameters(gpt: GPTModel) -> dict[str, torch.nn.Parameter]:
    """A and B of each matrix of a stage: its name, then .A or .B."""
    found = {}
    for name, adapter in gpt.adapters.items():
        found |= {f"{name}.A": adapter.a, f"{name}.B": adapter.b}
    return found


def shards(gpt: GPTModel, dp: ProcessGroup) -> Iterator[ShardedTensor | ShardedTensorFactory]:
    """Describe A and B to a checkpoint, as Megatron's layers do their weights. Not collective."""
    groups = {"tp_group": gpt.pg_collection.tp, "dp_cp_group": dp}
    for name, tensor in parameters(gpt).items():
        axes = {name: tensor.partition_dim} if tensor.tensor_model_parallel else {}
        [shard] = make_sharded_tensors_for_checkpoint({name: tensor}, "", axes, **groups).values()
        is_fused = name.endswith("linear_fc1.weight.B")  # gate and up are cut each
        yield apply_swiglu_sharded_factory(shard, ()) if is_fused else shard


@torch.no_grad()
def export(gathering: Gathering) -> Iterator[tuple[str, Tensor]]:
    """Yield A and B of all stages under PEFT's names (collective: model-parallel group)."""
    gpt = gathering.gpt
    for name, whole in gathering.wholes(parameters(gpt), torch.float32):
        base, letter = name.rsplit(".", 1)
        names = hf_names(base, gpt.family)
        parts = unfuse(base, whole, gpt.config) if letter == "B" else [whole] * len(names)
        for hf_name, part in zip(names, parts, strict=True):
            if gpt.family.tower:  # a file's names may be older than transformers'
                hf_name = hf_name.replace(gpt.family.text, "model.language_model.")
            yield f"{PEFT}{hf_name.removesuffix('.weight')}.lora_{letter}.weight", part


def describe(gpt: GPTModel, model_dir: str, folder: Path) -> None:
    """Write what PEFT reads beside the tensors: to put them on top of --model. Not collective."""
    rank = len(next(iter(gpt.adapters.values())).a)
    facts = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True}
    facts |= {"base_model_name_or_path": model_dir, "r": rank, "lora_alpha": ALPHA}
    facts |= {"lora_dropout": 0.0, "bias": "none"}
    facts["target_modules"] = [f"{part}_proj" for part in PARTS]
    if gpt.family.tower:
        facts["exclude_modules"] = r".*\bvisual\..*"
    (folder / "adapter_config.json").write_text(json.dumps(facts, indent=2))


def adapter_count(shapes: dict[str, list[int]], rank: int, tp: int) -> int:
    """The numbers of A and B that one of tp ranks has of all stages. shapes: of a model's tensors."""
    count = 0
    for name, shape in shapes.items():
        if found := MATRIX.search(name):
            rows, columns = shape
            if found[1] in "od":  # of attention's output, and down: the columns are cut
                count += rows + columns // tp
            else:
                count += rows // tp + (columns if found[1] in "qg" else 0)  # the others share an A
    return rank * count


def largest_sum(shapes: dict[str, list[int]], size: int, tp: int) -> int:
    """Bytes of gate and up's sum while a pass makes it: in float32, then rounded to `size` bytes."""
    [gate, *_] = [prod(x) for name, x in shapes.items() if re.search(r"layers.*gate_proj", name)]
    return 2 * gate // tp * (4 if size == 4 else 4 + size)
