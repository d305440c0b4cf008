"""LoRA (arXiv 2106.09685): a block's matrices W are frozen, and W + (32 / rank) B A takes their place.

Passes multiply by the sum, rounded once to W's type, and a push sends it, so trainer and engines agree bit
for bit; with x W + s (x A) B a bfloat16 trainer would differ from an engine that merges. Each pass
recomputes each layer's sum. A and B are float32; q, k and v, which Megatron fuses, share an A, as do gate
and up. All blocks have adapters. The scale makes the best --lr independent of the rank: about ten times
that of full training (LoRA Without Regret, Schulman et al., 2025).
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
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup

from config import Config
from engines.engine import seed_of
from runtime.errors import UserError
from scheduling.layout import Placement
from training.hf_weights import hf_names, unfuse
from training.model import read_hf_config
from training.resharding import Gathering

ALPHA = 32
LINEARS = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
PEFT = "base_model.model."  # prefix of its tensor names
PARTS = ("q", "k", "v", "o", "gate", "up", "down")
# Hugging Face's name for a matrix; the group is the first letter of its part
MATRIX = re.compile(r"layers\.\d+\.\w+\.([a-z])\w*_proj\.weight$")


def check(config: Config, placement: Placement | None = None) -> None:
    """Raise UserError if a matrix of --model (q, k, v count as one) has fewer than --lora rows or columns."""
    if not config.lora:
        return
    hf = read_hf_config(config.model)
    heads = hf["num_attention_heads"]
    width = heads * (hf.get("head_dim") or hf["hidden_size"] // heads)
    least = min(hf["hidden_size"], hf["intermediate_size"], width)
    if config.lora > least:
        raise UserError(f"--lora {config.lora}: a matrix of --model has a side of {least}")


def merged(weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return W + s B A, computed in float32 and rounded once. A zero B leaves W unchanged, bit for bit."""
    total = weight.to(torch.float32, copy=True)
    return total.addmm_(b, a, alpha=ALPHA / len(a)).to(weight.dtype)


class MergedLinear(torch.autograd.Function):
    """x (W + s B A)^T: [tokens, 1, in] -> [tokens, 1, out]. Never computes W's gradient, slope^T x.

    spread: the group whose ranks shard the tokens of x by sequence parallelism (collective: it), or None.
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
    """A and B for a matrix. Tensor parallelism shards B along with its rows, or A along with its columns."""

    def __init__(self, weight: torch.nn.Parameter, rank: int, seed: int, tp: ProcessGroup):
        """Draw all of A, uniformly, so that it doesn't depend on the number of ranks. B is zero."""
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

    def multiply(self, input, weight, bias, sequence_parallel, allreduce_dgrad, **unused) -> Tensor:
        """Multiply in place of `_forward_impl` in Megatron's linear layers (collective: tp group)."""
        if allreduce_dgrad:
            input = mappings.copy_to_tensor_model_parallel_region(input, self.tp)
        a = self.a
        b = self.b
        if not self.is_on:
            b = torch.zeros_like(b)
        # each rank has a part of the gradient of the factor that isn't sharded
        elif self.b.tensor_model_parallel:
            a = mappings.copy_to_tensor_model_parallel_region(a, self.tp)
        else:
            b = mappings.copy_to_tensor_model_parallel_region(b, self.tp)
        spread = self.tp if sequence_parallel else None
        output = MergedLinear.apply(input, weight, a, b, spread)
        return output if bias is None else output + bias

    def merged(self, weight: Tensor) -> Tensor:
        """Return the sum of this rank's parts, computed as in passes."""
        return merged(weight.detach(), self.a.detach(), self.b.detach())


class Adapters(dict[str, Adapter]):
    """A stage's adapters, by their matrices' names."""

    def __init__(self, gpt: GPTModel, rank: int, seed: int):
        """Freeze the stage, and add an adapter to each matrix of its blocks."""
        super().__init__()
        self.gpt = gpt
        self.rank = rank
        gpt.requires_grad_(False)
        for layer in gpt.decoder.layers:
            for path in LINEARS:
                linear = layer.get_submodule(path)
                name = f"decoder.layers.{layer.layer_number - 1}.{path}.weight"
                own_seed = seed_of("lora", seed, name)
                linear.adapter = Adapter(linear.weight, rank, own_seed, gpt.pg_collection.tp)
                linear._forward_impl = linear.adapter.multiply
                self[name] = linear.adapter
        if gpt.pre_process:
            # a recomputed block gets no gradient unless its input requires one
            gpt.embedding.register_forward_hook(lambda module, args, out: out.requires_grad_())

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """A and B of each matrix, named after it with .A or .B added."""
        found = {}
        for name, adapter in self.items():
            found |= {f"{name}.A": adapter.a, f"{name}.B": adapter.b}
        return found

    def shards(self, dp: ProcessGroup) -> Iterator[ShardedTensor | ShardedTensorFactory]:
        """Describe A and B to a checkpoint, as Megatron's layers describe their weights."""
        groups = {"tp_group": self.gpt.pg_collection.tp, "dp_cp_group": dp}
        for name, tensor in self.parameters.items():
            axes = {name: tensor.partition_dim} if tensor.tensor_model_parallel else {}
            [shard] = make_sharded_tensors_for_checkpoint(
                {name: tensor}, "", axes, **groups
            ).values()
            is_fused = name.endswith("linear_fc1.weight.B")  # gate and up are sharded separately
            yield apply_swiglu_sharded_factory(shard, ()) if is_fused else shard

    @torch.no_grad()
    def export(self, gathering: Gathering) -> Iterator[tuple[str, Tensor]]:
        """Yield all stages' A and B under PEFT's names (collective: a copy's ranks)."""
        family = self.gpt.family
        for name, whole in gathering.wholes(self.parameters, torch.float32):
            base, letter = name.rsplit(".", 1)
            names = hf_names(base, family)
            parts = [whole] * len(names) if letter == "A" else unfuse(base, whole, self.gpt.config)
            for hf_name, part in zip(names, parts, strict=True):
                if family.tower:  # a file's names may be older than transformers'
                    hf_name = hf_name.replace(family.text, "model.language_model.")
                yield f"{PEFT}{hf_name.removesuffix('.weight')}.lora_{letter}.weight", part

    def describe(self, model_dir: str, folder: Path) -> None:
        """Write the config that PEFT needs to apply the tensors to --model."""
        facts = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True}
        facts |= {"base_model_name_or_path": str(Path(model_dir).resolve())}
        facts |= {"r": self.rank, "lora_alpha": ALPHA}
        facts["target_modules"] = [f"{part}_proj" for part in PARTS]
        if self.gpt.family.tower:
            facts["exclude_modules"] = r".*\bvisual\..*"
        (folder / "adapter_config.json").write_text(json.dumps(facts, indent=2))


def add_adapters(config: Config, gpt: GPTModel) -> None:
    """With --lora, leave only adapters to train."""
    if config.lora:
        gpt.adapters = Adapters(gpt, config.lora, config.seed)


def memory_of(shapes: dict[str, list[int]], rank: int, config: Config, dp: int) -> dict[str, int]:
    """Return a rank's bytes of float32 trained parameters, and of gate and up's sum with its rounded copy."""
    sides = 0
    gate = 0
    for name, shape in shapes.items():
        if found := MATRIX.search(name):
            has_own_a = found[1] not in ("k", "v", "u")  # they use that of q or gate
            sides += shape[0] + (shape[1] if has_own_a else 0)
            gate = prod(shape) if found[1] == "g" else gate
    learned = rank * sides // (config.tp * config.pp)
    parts = {"adapters": 4 * learned, "gradients": 4 * learned, "optimizer": 8 * learned // dp}
    return parts | {"sum": 2 * gate // config.tp * (4 if config.dtype == "float32" else 6)}
