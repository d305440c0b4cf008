"""A Megatron-Core GPTModel as a Hugging Face directory describes it. hf_weights.py fills it.

Dense Qwen2, Qwen3 and Llama. Two modules are our own: Megatron's that need neither Transformer Engine nor
Apex refuse RMSNorm under sequence parallelism, and attention on packed sequences.
"""

from __future__ import annotations

import time
from itertools import groupby

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

import data
from config import Config, UserError
from engines.reward_model import HEAD
from images.reader import ImageReader, read_model_config
from training import lm_head
from training.hf_weights import Family, check_tensors
from training.packing import MicroBatch
from training.vision import Packing, VisionModel, deep_features

QWEN2 = {"add_qkv_bias": True, "qk_layernorm": False}
QWEN3 = {"add_qkv_bias": False, "qk_layernorm": True}
LLAMA = {"add_qkv_bias": False, "qk_layernorm": False}
NESTED = ("model.language_model.", "model.visual.")  # text and tower of what sees, for transformers
FAMILIES = {  # by config.json's model_type
    "qwen2": Family("Qwen2ForCausalLM", QWEN2),
    "qwen3": Family("Qwen3ForCausalLM", QWEN3),
    "llama": Family("LlamaForCausalLM", LLAMA),
    "qwen2_5_vl": Family("Qwen2_5_VLForConditionalGeneration", QWEN2, tower="visual."),
    "qwen3_vl": Family("Qwen3VLForConditionalGeneration", QWEN3, *NESTED),
}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform"}
RECOMPUTE |= {"recompute_num_layers": 1}
FUSIONS = ("gradient_accumulation", "masked_softmax", "bias_dropout", "apply_rope")
SPLIT_BY_TP = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
# for an engine to give its memory back: of its ranks the first to sleep says that it does
RELEASE_S = 10.0
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ROPE |= {"original_max_position_embeddings": 8192}


class RMSNorm:
    """torch's, marked so that sequence parallelism sums its gradient over the tensor-parallel ranks."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused):
        norm = torch.nn.RMSNorm(hidden_size, eps=eps)
        norm.weight.sequence_parallel = config.sequence_parallel
        norm.weight.tensor_model_parallel = False
        return norm


def packing_of(batch: MicroBatch, frequencies: Tensor) -> Packing:
    """frequencies: `rotary_frequencies`. Megatron's layers would make the table anew, with a wait each."""
    angles = (batch.positions[..., None].float() * frequencies[:, None]).sum(0)
    table = torch.cat((angles, angles), -1)[:, None]
    return Packing("thd", batch=batch, rope=(table.cos(), table.sin()))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of [tokens, heads, dim], in float32 and rounded once, as engines do it."""
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


class PackedAttention(MegatronModule):
    """Rotary embedding, then causal attention within each sequence of a packed micro-batch."""

    def __init__(self, config: TransformerConfig, softmax_scale=None, pg_collection=None, **unused):
        super().__init__(config=config)
        self.cp_group, self.scale = pg_collection.cp, softmax_scale

    def forward(
        self, query, key, value, attention_mask, *, packed_seq_params: Packing, **unused
    ) -> Tensor:
        """query [tokens, heads, dim], key and value [tokens, kv heads, dim] -> [tokens, heads, dim].

        With context parallelism a rank gathers the keys and values of all (collective over that group).
        """
        batch, rope = packed_seq_params.batch, packed_seq_params.rope
        query, key = rotate(query, *rope), rotate(key, *rope)
        if self.cp_group.size() > 1:
            parts = (x.contiguous() for x in (key, value))
            whole = (gather_from_sequence_parallel_region(x, group=self.cp_group) for x in parts)
            key, value = (x.index_select(0, batch.keys) for x in whole)
        attend = attend_at_once if has_varlen(query) else attend_by_length
        return attend(query, key, value, batch, self.scale)


def has_varlen(query: Tensor) -> bool:
    """Whether torch's variable-length attention can do it: FlashAttention, of 16 bits on CUDA."""
    return query.is_cuda and query.dtype != torch.float32


def attend_at_once(query, key, value, batch: MicroBatch, scale: float | None) -> Tensor:
    """All pieces in one call. Not yet run on a GPU."""
    longest = [max(sizes) for sizes in zip(*batch.lengths, strict=True)]
    options = {"scale": scale, "enable_gqa": query.size(1) != key.size(1)}
    # window: all keys behind, none ahead; a piece's last query stands at its last key
    causal = (-1, 0)
    return varlen_attn(query, key, value, *batch.starts, *longest, window_size=causal, **options)


def attend_by_length(query, key, value, batch: MicroBatch, scale: float | None) -> Tensor:
    """A call of scaled_dot_product_attention for each length: balance.py puts equal ones side by side."""
    runs = [(*sizes, len(list(run))) for sizes, run in groupby(batch.lengths)]
    queries = query.split([count * length for length, _, count in runs])
    keys, values = (x.split([count * length for _, length, count in runs]) for x in (key, value))
    outputs = []
    for (length, seen, count), *parts in zip(runs, queries, keys, values, strict=True):
        q, k, v = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in parts)
        options = {
            "scale": scale,
            "enable_gqa": q.size(1) != k.size(1),
            "is_causal": length == seen,
        }
        if length < seen:  # is_causal would put the first query at the first key
            ones = torch.ones(length, seen, dtype=torch.bool, device=q.device)
            options["attn_mask"] = ones.tril(seen - length)
        outputs.append(
            F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(0, 1)
        )
    return torch.cat(outputs)


def read_family(model_dir: str, setting: str) -> str:
    """config.json's model_type. UserErrors name the setting and the directory."""
    found = read_model_config(model_dir, setting)
    where = f"{setting} {model_dir}"
    if (model_type := found.get("model_type")) not in FAMILIES:
        raise UserError(
            f"{where}: model_type {model_type!r} is not supported, only {', '.join(FAMILIES)}"
        )
    # a class that SGLang lacks it would look for in the directory's code; unnamed, it fails
    known = FAMILIES[model_type].architecture, f"{model_type.capitalize()}ForSequenceClassification"
    if (named := found.get("architectures")) not in ([known[0]], [known[1]]):
        raise UserError(f"{where}: architectures {named} are not {' or '.join(known)}")
    return model_type


def read_hf_config(model_dir: str, setting: str = "--model") -> dict:
    """config.json with transformers' defaults. UserErrors name the setting and the directory."""
    from transformers import AutoConfig

    where = f"{setting} {model_dir}"
    model_type = read_family(model_dir, setting)
    try:
        whole = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
    except ValueError as error:
        raise UserError(f"{where}: config.json: {str(error).splitlines()[0]}") from None
    whole._attn_implementation = "sdpa"  # a tower's, too; a file may name kernels that a hub has
    hf = whole.get_text_config().to_dict()
    hf |= {"model_type": model_type, "tie_word_embeddings": whole.tie_word_embeddings}
    hf["whole"] = whole
    if FAMILIES[model_type].tower:
        hf |= {"vision": whole.vision_config, "reader": ImageReader(model_dir)}
    rope, kind = hf["rope_parameters"], hf["rope_parameters"]["rope_type"]
    unsupported = {
        "hidden_act other than silu": hf["hidden_act"] != "silu",
        "quantized weights": bool((hf | whole.to_dict()).get("quantization_config")),
        "sliding-window attention": hf.get("use_sliding_window", False),
        "attention_bias": hf.get("attention_bias", False),
        "mlp_bias": hf.get("mlp_bias", False),
        f"rope_type {kind!r}": kind not in ("default", "llama3"),
        "other llama3 rope factors": kind == "llama3" and not LLAMA3_ROPE.items() <= rope.items(),
    }
    if reasons := ", ".join(reason for reason, found in unsupported.items() if found):
        raise UserError(f"{where}: config.json asks for what is not supported: {reasons}")
    return hf


def transformer_config(hf: dict, config: Config) -> TransformerConfig:
    """Megatron's description of the model. UserError if the parallel sizes do not divide it."""
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
        sequence_parallel=config.sp and config.tp > 1,
        pipeline_model_parallel_size=config.pp,
        context_parallel_size=config.cp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # divide by the global token count once, after all micro-batches
        calculate_per_token_loss=True,
        # micro-batches differ in length: pipeline stages tell each other ...
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # ... which Megatron accepts only with this
        cuda_graph_scope=[],  # none; the default is a deprecated word for it
        use_cpu_initialization=not torch.cuda.is_available(),
        persist_layer_norm=False,
        **(RECOMPUTE if config.recompute else {}),
        # SwiGLU compiled by torch, which keeps 2 of 4 copies for the backward pass; not yet run on a GPU
        bias_activation_fusion=torch.cuda.is_available(),
        **{f"{name}_fusion": False for name in FUSIONS},  # without Apex and Transformer Engine
        **FAMILIES[hf["model_type"]].layers,
    )


def rotary_frequencies(hf: dict, config: TransformerConfig) -> Tensor:
    """Of the rotary embedding, radians a token: [axes, dim / 2], 0 where another axis turns the pair.

    Megatron's; with images of frame, row and column (Qwen2-VL, 2409.12191, section 2.1), in sections, which
    Qwen3-VL deals in turns.
    """
    rope = hf["rope_parameters"]
    scaling = dict(
        rope_scaling=rope["rope_type"] == "llama3", rope_scaling_factor=rope.get("factor", 1.0)
    )
    base = dict(rotary_percent=1.0, rotary_base=rope["rope_theta"], use_cpu_initialization=True)
    frequencies = RotaryEmbedding(config.kv_channels, **base, **scaling).inv_freq
    sections, pairs = rope.get("mrope_section", [len(frequencies)]), range(len(frequencies))
    turns = [axis for axis, size in enumerate(sections) for _ in range(size)]
    if rope.get("mrope_interleaved"):
        turns = [pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in pairs]
    return torch.stack(
        [frequencies.where(torch.tensor(turns) == axis, 0) for axis in range(len(sections))]
    )


def forward_cost(hf: dict, tokens: int) -> int:
    """Multiply-adds of a forward pass over a sequence: every matrix once a token, and causal attention."""
    hidden, layers, heads = hf["hidden_size"], hf["num_hidden_layers"], hf["num_attention_heads"]
    dim = hf.get("head_dim") or hidden // heads
    layer = (
        hidden * dim * 2 * (heads + hf["num_key_value_heads"])
        + 3 * hidden * hf["intermediate_size"]
    )
    # times tokens^2: scores and weighted values, half of each masked
    attention = layers * heads * dim
    return tokens * (layers * layer + hidden * hf["vocab_size"]) + tokens**2 * attention


def check_sizes(hf: dict, config: Config) -> None:
    sizes = dict.fromkeys(SPLIT_BY_TP, (f"--tp {config.tp}", config.tp))
    sizes["num_hidden_layers"] = (f"--pp {config.pp}", config.pp)
    for name, (setting, size) in sizes.items():
        if hf[name] % size:
            raise UserError(f"{setting} does not divide {name} = {hf[name]} of --model")
    deep = deep_features(hf.get("vision"))
    layers = hf["num_hidden_layers"] // config.pp
    if layers < deep:
        raise UserError(
            f"--pp {config.pp} leaves {layers} layers a stage: images enter the first {deep} of --model"
        )


def tensor_names(hf: dict) -> set[str]:
    """As a directory has them of the whole model, with its output layer's, be it tied or not."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    family = FAMILIES[hf["model_type"]]
    kind = AutoModelForImageTextToText if family.tower else AutoModelForCausalLM
    with torch.device("meta"):  # no numbers, only names
        names = " ".join(kind.from_config(hf["whole"]).state_dict())
    return {*names.replace(NESTED[0], family.text).replace(NESTED[1], family.tower).split()}


def check_models(config: Config) -> dict:
    """Look at all directories before a start. UserErrors, or `read_hf_config` of --model."""
    hf = read_hf_config(config.model)
    check_sizes(hf, config)
    heads = {HEAD} if config.command == "rm" else set()
    check_tensors(config.model, "--model", tensor_names(hf) | heads)
    if config.critic:
        check_critic(config, hf)
    for path in config.judge_models:
        setting = "--judge" if path in config.judge else "--cost-judge"
        read_family(path, setting)
        if config.device == "cpu":  # with CUDA SGLang has kernels for quantized weights
            check_tensors(path, setting)
    return hf


def check_critic(config: Config, actor: dict) -> None:
    """UserError unless --critic is a value model of the actor's tokens, and the sizes fit."""
    hf = read_hf_config(config.critic, "--critic")
    where = f"--critic {config.critic}"
    if HEAD not in check_tensors(config.critic, "--critic", tensor_names(hf) | {HEAD}):
        raise UserError(f"{where}: it has no {HEAD}, the head of a value or reward model")
    actors, own = (data.load_tokenizer(path).get_vocab() for path in (config.model, config.critic))
    if strange := actors.items() - own.items():
        raise UserError(f"{where}: {min(strange)[0]!r} isn't the token it is for --model")
    if (has := hf["vocab_size"]) < (needed := actor["vocab_size"]):
        raise UserError(f"{where}: it has {has} tokens, and --model has {needed}")
    if "vision" in actor and "vision" not in hf:
        raise UserError(f"{where}: it sees no images, and --model does")
    check_sizes(hf, config)


def build_stage(hf: dict, config: TransformerConfig, groups: ProcessGroupCollection) -> GPTModel:
    """This rank's stage, with random weights (collective over the pipeline group if embeddings are tied)."""
    stage = groups.pp.rank()
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    attention = layer.submodules.self_attention.submodules
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    attention.core_attention = PackedAttention
    layers = [layer] * get_num_layers_to_build(config, pp_rank=stage)
    sees = stage == 0 and "vision" in hf
    gpt = (VisionModel if sees else GPTModel)(
        config,
        TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm),
        vocab_size=hf["vocab_size"],
        max_sequence_length=hf["max_position_embeddings"],
        pre_process=stage == 0,
        post_process=stage == groups.pp.size() - 1,
        pg_collection=groups,
        share_embeddings_and_output_weights=hf["tie_word_embeddings"],
        position_embedding_type="none",  # PackedAttention has it
    )
    gpt.family = FAMILIES[hf["model_type"]]
    if sees:
        gpt.add_tower(hf["vision"], hf["reader"])
    if gpt.post_process:
        lm_head.leave_out_logits(gpt)
    return gpt


def overlaps(device: torch.device) -> bool:
    """Whether gradients are summed during the backward pass, and AdamW is one fused kernel. Not yet run."""
    return device.type == "cuda"  # torch's other AdamW takes 4 bytes a parameter of its shard more


def check_room(needed: int, who: str) -> None:
    """UserError with who holds what if the GPU lacks `needed` bytes for `who`. Not yet run on a GPU."""
    until = time.monotonic() + RELEASE_S
    while (free := torch.cuda.mem_get_info()[0]) < needed and time.monotonic() < until:
        time.sleep(0.1)
    total, own = torch.cuda.mem_get_info()[1], torch.cuda.memory_reserved()
    if needed > free:
        gib = [f"{size / 2**30:.1f}" for size in (needed, free, total, own, total - free - own)]
        raise UserError(
            "{} needs {} GiB to wake, and {} of {} GiB are free: this rank holds {} GiB, engines and others "
            "{} GiB; lower --mem-fraction, or spread the model over more ranks (--tp, --pp)".format(
                who, *gib
            )
        )
