# ruff: noqa: E402
"""The policy as a Megatron-Core GPTModel: built from, loaded from and named like a Hugging Face directory.

Dense Qwen2, Qwen3 and Llama. Two modules are our own, given to Megatron through its ModuleSpec, because its own ones that need
neither Transformer Engine nor Apex refuse what we need: RMSNorm under sequence parallelism, attention on packed sequences.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cpu.megatron import install

install()

from megatron.core import parallel_state as mpu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

FAMILIES = {  # config.json's model_type -> what sets the architecture apart
    "qwen2": {"add_qkv_bias": True, "qk_layernorm": False},
    "qwen3": {"add_qkv_bias": False, "qk_layernorm": True},
    "llama": {"add_qkv_bias": False, "qk_layernorm": False},
}
NOT_FUSED = {  # kernels that need Apex, Transformer Engine or a compiler
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
}
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fixed in Megatron


class RMSNorm:
    """torch's RMSNorm, marked so that Megatron sums its gradient over the tensor-parallel ranks under sequence parallelism."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused) -> torch.nn.RMSNorm:
        norm = torch.nn.RMSNorm(hidden_size, eps=eps)
        norm.weight.sequence_parallel = config.sequence_parallel
        norm.weight.tensor_model_parallel = False
        return norm


class PackedAttention(MegatronModule):
    """Causal attention within each sequence of a packed micro-batch, by torch's scaled_dot_product_attention (SDPA).

    One call for each length that occurs: batch.pack puts sequences of equal length side by side, so nothing is padded. Padding
    all to the longest, or runs of similar length to the longest of the run, was no faster (128 sequences of 10 to 75 tokens).
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, softmax_scale=None, pg_collection=None, **unused):
        super().__init__(config=config)
        self.cp_group = pg_collection.cp
        self.scale = softmax_scale

    def forward(self, query, key, value, attention_mask, *, packed_seq_params, **unused) -> Tensor:
        """query [tokens, heads, dim], key and value [tokens, kv heads, dim] -> [tokens, heads, dim].

        With context parallelism every rank holds a part of every sequence and `attention_mask` says who sees whom
        (see batch.py); collective over the context-parallel group. Without, the mask is None.
        """
        if self.cp_group.size() > 1:
            key, value = (gather_from_sequence_parallel_region(x.contiguous(), group=self.cp_group) for x in (key, value))
            return self._sdpa(query[None], key[None], value[None], attn_mask=attention_mask)[0]
        runs = [(length, len(list(run))) for length, run in groupby(packed_seq_params.cu_seqlens_q.diff().tolist())]
        parts = (x.split([length * count for length, count in runs]) for x in (query, key, value))
        outputs = [
            self._sdpa(*(x.unflatten(0, (count, length)) for x in run), is_causal=True).flatten(0, 1)
            for (length, count), *run in zip(runs, *parts, strict=True)
        ]
        return torch.cat(outputs)

    def _sdpa(self, query, key, value, **how) -> Tensor:
        """[batch, tokens, heads, dim] in and out."""
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        grouped = query.size(1) != key.size(1)
        return F.scaled_dot_product_attention(query, key, value, scale=self.scale, enable_gqa=grouped, **how).transpose(1, 2)


# ---------------------------------------------------------------------------------------------- the Hugging Face directory


def read_hf_config(model_dir: str, setting: str = "--model") -> dict:
    """config.json with transformers' defaults filled in. ValueError names setting and directory if we cannot train what is in it."""
    from transformers import AutoConfig

    path = Path(model_dir) / "config.json"
    if not path.is_file():
        raise ValueError(f"{setting} {model_dir}: not a Hugging Face model directory, it has no config.json")
    try:
        model_type = json.loads(path.read_text()).get("model_type")
    except json.JSONDecodeError as error:
        raise ValueError(f"{setting} {model_dir}: config.json is not valid JSON ({error})") from error
    if model_type not in FAMILIES:
        raise ValueError(f"{setting} {model_dir}: model_type {model_type!r} is not supported, only {', '.join(FAMILIES)}")
    hf = AutoConfig.from_pretrained(model_dir, trust_remote_code=False).to_dict()
    rope = hf["rope_parameters"]
    unsupported = {
        "hidden_act other than silu": hf["hidden_act"] != "silu",
        "sliding-window attention": hf.get("use_sliding_window", False),
        "attention_bias": hf.get("attention_bias", False),
        "mlp_bias": hf.get("mlp_bias", False),
        f"rope_type {rope['rope_type']!r}": rope["rope_type"] not in ("default", "llama3"),
        "other llama3 rope factors": rope["rope_type"] == "llama3" and any(rope[k] != v for k, v in LLAMA3_ROPE.items()),
    }
    if any(unsupported.values()):
        reasons = ", ".join(reason for reason, found in unsupported.items() if found)
        raise ValueError(f"{setting} {model_dir}: config.json asks for what is not supported: {reasons}")
    return hf


def transformer_config(hf: dict, config) -> TransformerConfig:
    """Megatron's description of the model. ValueError if the parallel sizes do not divide it."""
    check_sizes(hf, config)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
    return TransformerConfig(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        kv_channels=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        normalization="RMSNorm",
        layernorm_epsilon=hf["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=config.tp,
        pipeline_model_parallel_size=config.pp,
        context_parallel_size=config.cp,
        sequence_parallel=config.sp and config.tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,  # divide by the global token count once, after all micro-batches
        variable_seq_lengths=True,  # micro-batches differ in length, which pipeline stages must tell each other ...
        moe_token_dispatcher_type="alltoall",  # ... and which Megatron accepts only with this, even without experts
        cuda_graph_scope=[],  # none; the default is a deprecated word for it
        use_cpu_initialization=not torch.cuda.is_available(),
        **NOT_FUSED,
        **FAMILIES[hf["model_type"]],
    )


def forward_cost(hf: dict, tokens: int) -> int:
    """Multiply-adds of a forward pass over a sequence of `tokens`: every matrix once a token, and causal attention."""
    hidden, layers, heads = hf["hidden_size"], hf["num_hidden_layers"], hf["num_attention_heads"]
    dim = hf.get("head_dim") or hidden // heads
    layer = hidden * dim * 2 * (heads + hf["num_key_value_heads"]) + 3 * hidden * hf["intermediate_size"]
    attention = layers * heads * dim  # times tokens^2: scores and weighted values, half of each masked
    return tokens * (layers * layer + hidden * hf["vocab_size"]) + tokens**2 * attention


def check_sizes(hf: dict, config) -> None:
    for flag, size, names in (
        ("--tp", config.tp, ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")),
        ("--pp", config.pp, ("num_hidden_layers",)),
    ):
        for name in names:
            if hf[name] % size:
                raise ValueError(f"{flag} {size} does not divide {name} = {hf[name]} of --model")


def check_critic(config) -> None:
    """ValueError if the value model of --critic can't read the actor's tokens, or the sizes don't divide it."""
    hf, tokens = read_hf_config(config.critic, "--critic"), read_hf_config(config.model)["vocab_size"]
    if hf["vocab_size"] < tokens:
        raise ValueError(f"--critic {config.critic}: it knows {hf['vocab_size']} tokens, and --model has {tokens}")
    check_sizes(hf, config)


def build_model(hf: dict, model_config: TransformerConfig) -> GPTModel:
    """This rank's part of the model, with random weights. Collective over the pipeline group if embeddings are tied."""
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=model_config.qk_layernorm)
    attention = layer.submodules.self_attention.submodules
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    if model_config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    attention.core_attention = PackedAttention
    layers = [layer] * get_num_layers_to_build(model_config)
    rope = hf["rope_parameters"]
    return GPTModel(
        model_config,
        TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm),
        vocab_size=hf["vocab_size"],
        max_sequence_length=hf["max_position_embeddings"],
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=hf["tie_word_embeddings"],
        position_embedding_type="rope",
        rotary_base=rope["rope_theta"],
        rope_scaling=rope["rope_type"] == "llama3",
        rope_scaling_factor=rope.get("factor", 1.0),
    )


class HFWeights:
    """Reads a directory's safetensors files tensor by tensor, by name. ValueError names what is missing, the directory and its setting.

    own: tensors that are taken in place of the files'.
    """

    def __init__(self, model_dir: str, setting: str = "--model"):
        from safetensors import safe_open

        paths = sorted(Path(model_dir).glob("*.safetensors"))
        if not paths:
            raise ValueError(f"{setting} {model_dir}: no *.safetensors file in it")
        for path in paths:
            check_safetensors(path, setting)
        files = [safe_open(path, framework="pt") for path in paths]
        self.model_dir, self.setting, self.own = model_dir, setting, {}
        self.file_of = {name: file for file in files for name in file.keys()}

    def __getitem__(self, name: str) -> Tensor:
        if name in self.own:
            return self.own[name]
        if name not in self.file_of:
            raise ValueError(f"{self.setting} {self.model_dir}: its safetensors files lack {name}")
        return self.file_of[name].get_tensor(name)


def check_safetensors(path: Path, setting: str) -> None:
    """ValueError if the file was cut short, as by a broken download. Format: 8 bytes of header size, JSON header, tensor data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        complete = 8 + header_size <= size
        header = json.loads(file.read(header_size)) if complete else {}
    data_size = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    if not complete or size != 8 + header_size + data_size:
        raise ValueError(f"{setting} {path.parent}: {path.name} is damaged or incomplete ({size} bytes)")


# ------------------------------------------------------------------------- weights: Hugging Face <-> Megatron, full tensors

TOP_NAMES = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}


def hf_names(name: str) -> list[str]:
    """The Hugging Face tensors that Megatron's parameter `name` is made of: one, or those that Megatron fuses."""
    if name in TOP_NAMES:
        return [TOP_NAMES[name]]
    layer, rest = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name).groups()
    prefix, kind = f"model.layers.{layer}.", rest.rsplit(".", 1)[1]  # kind: weight or bias
    if "linear_qkv" in rest:
        return [f"{prefix}self_attn.{part}_proj.{kind}" for part in "qkv"]
    if "linear_fc1" in rest:
        return [f"{prefix}mlp.{part}_proj.{kind}" for part in ("gate", "up")]
    return [prefix + LAYER_NAMES[rest]]


def fuse(name: str, tensors: list[Tensor], model_config: TransformerConfig) -> Tensor:
    """Hugging Face's tensors -> Megatron's, which orders q, k, v by group: the group's query heads, then its key, its value."""
    if "linear_qkv" in name:
        rest = tensors[0].shape[1:]
        by_group = [x.reshape(model_config.num_query_groups, -1, model_config.kv_channels, *rest) for x in tensors]
        return torch.cat(by_group, dim=1).reshape(-1, *rest)
    return torch.cat(tensors)


def unfuse(name: str, tensor: Tensor, model_config: TransformerConfig) -> list[Tensor]:
    """The inverse of `fuse`."""
    if "linear_qkv" in name:
        rest = tensor.shape[1:]
        queries_per_group = model_config.num_attention_heads // model_config.num_query_groups
        by_group = tensor.reshape(model_config.num_query_groups, queries_per_group + 2, model_config.kv_channels, *rest)
        return [x.reshape(-1, *rest) for x in by_group.split([queries_per_group, 1, 1], dim=1)]
    return list(tensor.chunk(2)) if "linear_fc1" in name else [tensor]


def global_parameters(model: GPTModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """This rank's parameters, layers numbered over the whole model instead of within the pipeline stage."""
    offset = get_transformer_layer_offset(model.config)
    for name, param in model.named_parameters():
        yield re.sub(r"(?<=^decoder\.layers\.)\d+", lambda match: str(int(match[0]) + offset), name), param


def tp_shard(name: str, param: torch.nn.Parameter, full: Tensor) -> Tensor:
    """This tensor-parallel rank's part of a full tensor."""
    size, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    if size == 1 or not param.tensor_model_parallel:
        return full
    if "linear_fc1" in name:  # gate and up are split each, so that a rank holds matching halves of both
        return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])
    return full.chunk(size, param.partition_dim)[rank]


def tp_gather(name: str, param: torch.nn.Parameter) -> Tensor:
    """The inverse of `tp_shard`. Collective over the tensor-parallel group."""
    size = mpu.get_tensor_model_parallel_world_size()
    if size == 1 or not param.tensor_model_parallel:
        return param.detach()
    shards = [torch.empty_like(param) for _ in range(size)]
    dist.all_gather(shards, param.detach().contiguous(), group=mpu.get_tensor_model_parallel_group())
    if "linear_fc1" in name:
        shards = [half for halves in zip(*(shard.chunk(2) for shard in shards), strict=True) for half in halves]
    return torch.cat(shards, param.partition_dim)


@torch.no_grad()
def load_weights(model: GPTModel, weights: HFWeights) -> None:
    """Fill this rank's parameters. Not collective."""
    for name, param in global_parameters(model):
        names = hf_names("embedding.word_embeddings.weight" if is_tied_copy(model, name) else name)
        shard = tp_shard(name, param, fuse(name, [weights[hf_name] for hf_name in names], model.config))
        if shard.shape != param.shape:
            raise ValueError(f"{weights.setting} {weights.model_dir}: {names[0]} does not have the shape that config.json says")
        param.copy_(shard)


@torch.no_grad()
def named_weights(model: GPTModel) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the whole model under its Hugging Face name. Collective over the tensor- and pipeline-parallel group.

    Stages take turns to broadcast theirs, so that every rank of the group yields every tensor, in the same order. The tensors
    may be views of the live weights: use or copy them before the next update.
    """
    group, stages = mpu.get_pipeline_model_parallel_group(), mpu.get_pipeline_model_parallel_world_size()
    mine = {name: param for name, param in global_parameters(model) if not is_tied_copy(model, name)}
    for stage, source in enumerate(dist.get_process_group_ranks(group)):
        own = stage == mpu.get_pipeline_model_parallel_rank()
        listing = [[(name, full_shape(param)) for name, param in mine.items()] if own else None]
        if stages > 1:
            dist.broadcast_object_list(listing, src=source, group=group)
        for name, shape in listing[0]:
            tensor = tp_gather(name, mine[name]) if own else torch.empty(shape, dtype=model.config.params_dtype, device=device())
            if stages > 1:
                dist.broadcast(tensor, src=source, group=group)
            yield from zip(hf_names(name), unfuse(name, tensor, model.config), strict=True)


def full_shape(param: torch.nn.Parameter) -> list[int]:
    """The shape of the tensor that `tp_gather` returns."""
    shape = list(param.shape)
    if param.tensor_model_parallel:
        shape[param.partition_dim] *= mpu.get_tensor_model_parallel_world_size()
    return shape


def is_tied_copy(model: GPTModel, name: str) -> bool:
    """True of the last stage's copy of tied embeddings, which Hugging Face does not store."""
    return name == "output_layer.weight" and model.share_embeddings_and_output_weights


def device() -> torch.device:
    """Where this rank trains."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def check_room(needed: int, who: str) -> None:
    """ValueError with who holds what if the GPU has no `needed` bytes left for `who` to wake. Not yet run on a GPU."""
    free, total = torch.cuda.mem_get_info()
    own = torch.cuda.memory_reserved()
    if needed > free:
        gib = [f"{size / 2**30:.1f}" for size in (needed, free, total, own, total - free - own)]
        raise ValueError(
            "{} needs {} GiB to wake, and {} of {} GiB are free: this rank holds {} GiB, engines and others {} GiB; "
            "lower --mem-fraction, or spread the model over more ranks (--tp, --pp)".format(who, *gib)
        )
