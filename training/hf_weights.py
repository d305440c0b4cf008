"""Converts weights from and to Hugging Face's names and layout, tensor by tensor. Not collective."""

import re
from collections.abc import Iterator

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from torch.distributed import ProcessGroup

from inputs.hf_directory import Family, tensor_files

EMBEDDING = "embedding.word_embeddings.weight"
TOP_NAMES = {EMBEDDING: "embed_tokens.weight", "decoder.final_layernorm.weight": "norm.weight"}
TOWER = "visual."  # image tower; every tensor-parallel rank has all of it
LAYER_NAMES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}


class HFWeights:
    """The tensors of a directory's safetensors files, by name; those in `own` override the files'."""

    def __init__(self, model_dir: str):
        self.own: dict[str, Tensor] = {}
        self.file_of = tensor_files(model_dir, framework="pt")

    def __getitem__(self, name: str) -> Tensor:
        return self.own[name] if name in self.own else self.file_of[name].get_tensor(name)


def hf_names(name: str, family: Family) -> list[str]:
    """Return the names of the Hugging Face tensors that make up Megatron's parameter `name`."""
    if name == "output_layer.weight":
        return ["lm_head.weight"]
    if name in TOP_NAMES:
        return [family.text + TOP_NAMES[name]]
    if name.startswith(TOWER):
        return [family.tower + name.removeprefix(TOWER)]
    layer, rest = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name).groups()
    prefix = f"{family.text}layers.{layer}."
    kind = rest.rsplit(".", 1)[1]  # weight or bias
    if "linear_qkv" in rest:
        return [f"{prefix}self_attn.{part}_proj.{kind}" for part in "qkv"]
    if "linear_fc1" in rest:
        return [f"{prefix}mlp.{part}_proj.{kind}" for part in ("gate", "up")]
    return [prefix + LAYER_NAMES[rest]]


def fuse(name: str, tensors: list[Tensor], config: TransformerConfig) -> Tensor:
    """Make Megatron's tensor, which orders q, k, v by group: its query heads, its key, its value."""
    if "linear_qkv" not in name:
        return torch.cat(tensors)
    rest = tensors[0].shape[1:]
    shape = (config.num_query_groups, -1, config.kv_channels, *rest)
    return torch.cat([x.reshape(shape) for x in tensors], dim=1).reshape(-1, *rest)


def unfuse(name: str, tensor: Tensor, config: TransformerConfig) -> list[Tensor]:
    """Undo `fuse`."""
    if "linear_qkv" in name:
        queries = config.num_attention_heads // config.num_query_groups  # per group
        rest = tensor.shape[1:]
        by_group = tensor.reshape(-1, queries + 2, config.kv_channels, *rest)
        return [x.reshape(-1, *rest) for x in by_group.split([queries, 1, 1], dim=1)]
    is_fused = "linear_fc1" in name and not name.startswith(TOWER)
    return list(tensor.chunk(2)) if is_fused else [tensor]


def global_parameters(model: GPTModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield a stage's weights, with layers numbered over the whole model."""
    offset = get_transformer_layer_offset(model.config, pp_rank=model.pg_collection.pp.rank())
    for name, param in model.named_parameters():
        if ".adapter." in name:
            continue  # see extras/lora.py
        if found := re.fullmatch(r"(decoder\.layers\.)(\d+)(.+)", name):
            name = f"{found[1]}{int(found[2]) + offset}{found[3]}"
        yield name, param


def tp_shard(name: str, param: torch.nn.Parameter, full: Tensor, tp: ProcessGroup) -> Tensor:
    """Return this tensor-parallel rank's part of a full tensor."""
    size = tp.size()
    rank = tp.rank()
    if size == 1 or not param.tensor_model_parallel:
        return full
    # gate and up are sharded separately, so that a rank holds matching parts of both
    if "linear_fc1" in name:
        return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])
    return full.chunk(size, param.partition_dim)[rank]


def join(name: str, shards: list[Tensor], dim: int) -> Tensor:
    """Undo `tp_shard`."""
    if "linear_fc1" in name:
        halves = zip(*(shard.chunk(2) for shard in shards), strict=True)
        shards = [half for both in halves for half in both]
    return torch.cat(shards, dim)


def is_tied_copy(model: GPTModel, name: str) -> bool:
    """Return whether `name` is the last stage's copy of tied embeddings, which Hugging Face doesn't store."""
    return name == "output_layer.weight" and model.share_embeddings_and_output_weights


@torch.no_grad()
def load_weights(model: GPTModel, weights: HFWeights) -> None:
    for name, param in global_parameters(model):
        own = EMBEDDING if is_tied_copy(model, name) else name
        names = hf_names(own, model.family)
        full = fuse(name, [weights[hf_name] for hf_name in names], model.config)
        shard = tp_shard(name, param, full, model.pg_collection.tp)
        # copy_ would broadcast a smaller one
        assert shard.shape == param.shape, f"{names[0]}: see check_directory"
        param.copy_(shard)
