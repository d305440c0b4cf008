"""Builds a Megatron-Core GPTModel from a Hugging Face config: dense Qwen2, Qwen3, Llama and Qwen-VL.

hf_weights.py loads its weights. RMSNorm and attention are our own: without Transformer Engine and Apex,
Megatron's refuse sequence parallelism and packed sequences, respectively.
"""

from collections.abc import Callable
from itertools import groupby

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import transformer_block
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from config import Config
from inputs import tokenization
from inputs.hf_directory import (
    FAMILIES,
    HEAD,
    check_tensors,
    has_weights,
    named_ends,
    read_model_config,
    readable,
    tensor_files,
)
from runtime.errors import UserError
from runtime.hooks import needed
from scheduling.balance import Prefix
from scheduling.layout import Placement
from training import lm_head
from training.hf_weights import HFWeights
from training.packing import MicroBatch, Packing

OUTPUT = "lm_head.weight"
SPLIT_BY_TP = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
# the only llama3 factors that Megatron supports
LLAMA3_ROPE = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, marked so that sequence parallelism sums its gradient over tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel
        self.weight.tensor_model_parallel = False

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda or x.dtype != torch.float32:
            return super().forward(x)
        return NormOnCPU.apply(x, self.weight, self.eps)


class NormOnCPU(torch.autograd.Function):
    """y = w x / rms(x), in a third of the time of torch's own on a CPU, forward and backward."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = x * inverse
        ctx.save_for_backward(normed, inverse, weight)
        return normed * weight

    @staticmethod
    def backward(ctx, slope: Tensor) -> tuple[Tensor, Tensor, None]:
        """dx = (w dy - n mean(w dy n)) / rms(x), dw = sum(dy n), with n = x / rms(x)."""
        normed, inverse, weight = ctx.saved_tensors
        product = slope * normed
        mean = (product @ weight)[..., None].div_(-len(weight))
        of_x = (slope * weight).addcmul_(normed, mean).mul_(inverse)
        return of_x, product.flatten(0, -2).sum(0), None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [tokens, heads, dim] by position, in float32 and rounded once, as engines do."""
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


# on CUDA a single kernel, compiled for all shapes at the first call
rotate_at_once = torch.compile(rotate, dynamic=True) if torch.cuda.is_available() else rotate


class PackedAttention(MegatronModule):
    """Rotary embedding, then causal attention within each sequence of a packed micro-batch."""

    def __init__(self, config: TransformerConfig, softmax_scale=None, **unused):
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(self, query, key, value, mask, *, packed_seq_params: Packing, **unused) -> Tensor:
        """Return [tokens, heads, dim]; key and value are [tokens, kv heads, dim]."""
        batch = packed_seq_params.batch
        query = rotate_at_once(query, *packed_seq_params.rope)
        key = rotate_at_once(key, *packed_seq_params.rope)
        if batch.keys is not None:
            key = key.index_select(0, batch.keys)
            value = value.index_select(0, batch.keys)
        takes_flash = query.is_cuda and query.dtype != torch.float32
        attend = attend_at_once if takes_flash else attend_by_length
        return attend(query, key, value, batch, self.scale)


def attend_at_once(query, key, value, batch: MicroBatch, scale: float | None) -> Tensor:
    """Attend within all pieces in one call: 16-bit FlashAttention on CUDA."""
    longest = [max(sizes) for sizes in zip(*batch.lengths, strict=True)]
    # window: all earlier keys, no later ones; a piece's last query is aligned with its last key
    options = {"window_size": (-1, 0), "scale": scale, "enable_gqa": query.size(1) != key.size(1)}
    return varlen_attn(query, key, value, *batch.starts, *longest, **options)


def attend_by_length(query, key, value, batch: MicroBatch, scale: float | None) -> Tensor:
    """Attend with one call per run of equal lengths, which packing.py makes adjacent."""
    runs = [(*lengths, len(list(pieces))) for lengths, pieces in groupby(batch.lengths)]
    sizes = [count * seen for _, seen, count in runs]
    queries = query.split([count * length for length, _, count in runs])
    outputs = []
    for run, *parts in zip(runs, queries, key.split(sizes), value.split(sizes), strict=True):
        length, seen, count = run
        q, k, v = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in parts)
        options = {"scale": scale, "enable_gqa": q.size(1) != k.size(1)}
        if length == seen:
            options["is_causal"] = True
        else:  # is_causal would align the first query with the first key
            ones = torch.ones(length, seen, dtype=torch.bool, device=q.device)
            options["attn_mask"] = ones.tril(seen - length)
        output = F.scaled_dot_product_attention(q, k, v, **options)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


def read_hf_config(model_dir: str, setting: str = "--model", learns: bool = True) -> dict:
    """Return config.json with transformers' defaults. Raises UserError if it is unsupported here."""
    found = read_model_config(model_dir, setting)
    where = f"{setting} {model_dir}"
    model_type = found.get("model_type")
    if str(model_type) not in FAMILIES:
        raise UserError(
            f"{where}: model_type {model_type!r} is not supported, only {', '.join(FAMILIES)}"
        )
    # SGLang searches the directory's code for a class that it lacks, and fails without a name
    named = found.get("architectures")
    writes = FAMILIES[model_type].architecture
    scores = f"{model_type.capitalize()}ForSequenceClassification"
    if named not in ([writes], [scores]):
        raise UserError(f"{where}: architectures {named} are not {writes} or {scores}")
    with readable(f"{where}: config.json"):
        whole = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
        # also for a tower; config.json may name kernels from a hub
        whole._attn_implementation = "sdpa"
        hf = whole.get_text_config().to_dict()
        rope = hf["rope_parameters"]
        kind = rope["rope_type"]
    hf |= {"model_type": model_type, "tie_word_embeddings": whole.tie_word_embeddings}
    hf["whole"] = whole
    if FAMILIES[model_type].tower:
        stage = needed("vision_stage", where)
        hf |= {
            "vision": whole.vision_config,
            "reader": tokenization.reader_of(model_dir),
            "stage": stage,
        }
    unsupported = {
        "hidden_act other than silu": hf["hidden_act"] != "silu",
        "quantized weights": bool((hf | whole.to_dict()).get("quantization_config")),
        "sliding-window attention": hf.get("use_sliding_window", False),
        "attention_bias": hf.get("attention_bias", False),
        "mlp_bias": hf.get("mlp_bias", False),
        f"rope_type {kind!r}": kind not in ("default", "llama3"),
        "other llama3 rope factors": kind == "llama3" and not LLAMA3_ROPE.items() <= rope.items(),
    }
    reasons = ", ".join(reason for reason, is_asked in unsupported.items() if is_asked)
    if learns and reasons:
        raise UserError(f"{where}: config.json asks for what is not supported: {reasons}")
    return hf


def transformer_config(hf: dict, config: Config) -> TransformerConfig:
    """Describe the model to Megatron. Raises UserError if the parallel sizes don't divide it."""
    check_sizes(hf, config)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
    again = config.recomputed(hf["num_hidden_layers"] // config.pp)  # the stage's first layers
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
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,  # divide once, after all micro-batches
        variable_seq_lengths=True,  # micro-batches differ in length
        moe_token_dispatcher_type="alltoall",  # required for variable lengths
        cuda_graph_scope=[],  # none; the default is a deprecated way to say so
        use_cpu_initialization=not torch.cuda.is_available(),
        recompute_granularity="full" if again else None,
        recompute_method="block",
        recompute_num_layers=again,
        # SwiGLU compiled by torch, which keeps 2 copies instead of 4 for the backward pass
        bias_activation_fusion=torch.cuda.is_available(),
        **FAMILIES[hf["model_type"]].layers,
    )


def rotary_frequencies(hf: dict, config: TransformerConfig) -> Tensor:
    """Return rotary radians per token, [axes, dim / 2]; 0 where another axis rotates the pair.

    Images have three axes: frame, row, column (Qwen2-VL, arXiv 2409.12191, section 2.1).
    """
    rope = hf["rope_parameters"]
    options = dict(rotary_percent=1.0, rotary_base=rope["rope_theta"], use_cpu_initialization=True)
    options["rope_scaling"] = rope["rope_type"] == "llama3"
    options["rope_scaling_factor"] = rope.get("factor", 1.0)
    frequencies = RotaryEmbedding(config.kv_channels, **options).inv_freq
    pairs = range(len(frequencies))
    sections = rope.get("mrope_section", [len(pairs)])  # pairs per axis
    axis_of = [axis for axis, size in enumerate(sections) for _ in range(size)]
    if rope.get("mrope_interleaved"):
        axis_of = [pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in pairs]
    axis_of = torch.tensor(axis_of)
    return torch.stack([frequencies.where(axis_of == axis, 0) for axis in range(len(sections))])


def forward_macs(hf: dict, tokens: int) -> int:
    """Return a forward pass's multiply-adds: every matrix once per token, plus causal attention."""
    hidden = hf["hidden_size"]
    layers = hf["num_hidden_layers"]
    heads = hf["num_attention_heads"]
    dim = hf.get("head_dim") or hidden // heads
    projections = hidden * dim * 2 * (heads + hf["num_key_value_heads"])
    mlp = 3 * hidden * hf["intermediate_size"]
    matrices = layers * (projections + mlp) + hidden * hf["vocab_size"]
    attention = layers * heads * dim  # scores and weighted values, half of each masked
    return tokens * matrices + tokens**2 * attention


def image_macs(hf: dict) -> Callable[[list[int]], int]:
    """Return a function that maps a prompt to a forward pass's multiply-adds for its images."""
    if "vision" not in hf:
        return lambda prompt: 0
    return hf["stage"].macs_of_images(hf)


def prefix_of(hf: dict, images: Callable[[list[int]], int], prompt: list[int]) -> Prefix:
    """Return the prefix that a prompt's answers share: all but its last token. images: see `image_macs`."""
    tokens = len(prompt) - 1
    return Prefix(tokens, forward_macs(hf, tokens) + images(prompt))


def check_sizes(hf: dict, config: Config, setting: str = "--model") -> None:
    """Raise UserError if the tensor-parallel or pipeline-parallel size doesn't divide the model."""
    cuts = [("tp", name) for name in SPLIT_BY_TP] + [("pp", "num_hidden_layers")]
    for flag, name in cuts:
        size = vars(config)[flag]
        if hf[name] % size:
            raise UserError(f"--{flag} {size} does not divide {name} = {hf[name]} of {setting}")
    layers = hf["num_hidden_layers"] // config.pp
    deep = hf["stage"].deep_layers(hf["vision"]) if "vision" in hf else 0
    if layers < deep:
        raise UserError(
            f"--pp {config.pp} leaves {layers} layers a stage: "
            f"images enter the first {deep} of {setting}"
        )


def tensor_shapes(hf: dict) -> dict[str, list[int]]:
    """Return the shapes of a directory's tensors, including the output layer even if it is tied."""
    family = FAMILIES[hf["model_type"]]
    kind = AutoModelForImageTextToText if family.tower else AutoModelForCausalLM
    with torch.device("meta"):  # no data, only shapes
        tensors = kind.from_config(hf["whole"]).state_dict()
    shapes = {}
    for name, tensor in tensors.items():  # transformers uses qwen3_vl's names
        name = name.replace("model.language_model.", family.text)
        shapes[name.replace("model.visual.", family.tower)] = list(tensor.shape)
    return shapes


def check_directory(
    model_dir: str, setting: str, hf: dict, scores: bool, device="cpu", plans=False
) -> None:
    """Raise UserError unless a model is complete, and engine, trainer and transformers agree on it.

    hf: its config. scores: it ends in a scalar HEAD. device: its engine's, if it never learns. plans: for
    --dry-run, which may come before the download of the weights.
    """
    where = f"{setting} {model_dir}"
    ids = tokenization.load_tokenizer(model_dir).get_vocab().values()
    tokens = 1 + max(*ids, *named_ends(model_dir), hf.get("pad_token_id") or 0)
    if tokens > hf["vocab_size"]:
        raise UserError(
            f"{where}: its tokenizer (or an id in its JSON) has {tokens} tokens, "
            f"its embeddings {hf['vocab_size']} rows"
        )
    if device == "cuda" and "quantization_config" in hf["whole"].to_dict():
        return  # SGLang has kernels for it, with other tensor names
    with readable(f"{where}: config.json"):
        shapes = tensor_shapes(hf)
    if scores:
        shapes[HEAD] = [1, hf["hidden_size"]]
    is_tied = hf["tie_word_embeddings"] and not scores
    optional = {OUTPUT} if is_tied or scores else set()
    if plans and not has_weights(model_dir):
        return
    files = tensor_files(model_dir, setting)
    check_tensors(files, where, shapes, optional)
    if is_tied and OUTPUT in files:
        weights = HFWeights(model_dir)
        embedding = f"{FAMILIES[hf['model_type']].text}embed_tokens.weight"
        if not torch.equal(weights[OUTPUT], weights[embedding]):
            raise UserError(f"{where}: {OUTPUT} isn't {embedding}, but config.json ties them")


def check_context(where: str, hf: dict, config: Config) -> None:
    """Raise UserError if --max-model-len is more than an engine of the model accepts."""
    rope = hf["rope_parameters"]
    factor = 1 if "original_max_position_embeddings" in rope else rope.get("factor", 1)
    limit = int(hf["max_position_embeddings"] * factor)
    if config.max_model_len > limit:
        raise UserError(
            f"{where}: --max-model-len {config.max_model_len} is above its limit, {limit}"
        )


def check_ends(where: str, model_dir: str, hf: dict) -> None:
    """Raise UserError if SGLang would end answers at a text: it also reads config.json's eos_token_id.

    transformers has defaults for it, which may mean something else in this vocabulary.
    """
    tokenizer = tokenization.load_tokenizer(model_dir)
    known = tokenization.ends_of(model_dir, tokenizer) | {*tokenizer.added_tokens_decoder}
    named = hf["whole"].to_dict().get("eos_token_id")
    ends = {*(named if isinstance(named, list) else [named])} - {None, -1, *known}
    if ends:
        raise UserError(
            f"{where}: config.json: answers would end at its eos_token_id {min(ends)}, "
            f"which is the text {tokenizer.decode([min(ends)])!r}"
        )


def check_models(config: Config, placement: Placement, formats=()) -> None:
    """Raise UserError if a directory of the policy or a judge can't be used. formats: the judges'."""
    hf = read_hf_config(config.model)
    for shape in placement.shapes.values():
        check_sizes(hf, shape.sized(config))
    check_directory(config.model, "--model", hf, scores=False, plans=config.dry_run)
    check_context(f"--model {config.model}", hf, config)
    check_ends(f"--model {config.model}", config.model, hf)
    for path, judge_format in zip(config.judge_models, formats, strict=False):
        setting = "--judge" if path in config.judge else "--cost-judge"
        judge = read_hf_config(path, setting, learns=False)
        how = dict(device=config.device, plans=config.dry_run)
        check_directory(path, setting, judge, judge_format.is_scalar, **how)
        check_context(f"{setting} {path}", judge, config)
        if not judge_format.is_scalar:
            check_ends(f"{setting} {path}", path, judge)


def check_reads_policy(config: Config, path: str, setting: str, hf: dict, policy: dict) -> None:
    """Raise UserError unless --model's ids mean the same to a model (ends by any name), and its sizes fit."""
    where = f"{setting} {path}"
    directories = (config.model, path)
    policys, own = tokenizers = [tokenization.load_tokenizer(each) for each in directories]
    ends, others = map(tokenization.ends_of, directories, tokenizers)
    strange = policys.get_vocab().items() - own.get_vocab().items()
    if strange := [token for token, number in strange if number not in ends & others]:
        raise UserError(f"{where}: {min(strange)!r} isn't the token it is for --model")
    if hf["vocab_size"] < policy["vocab_size"]:
        raise UserError(f"{where}: it has fewer tokens than --model, {policy['vocab_size']}")
    if "vision" in policy and "vision" not in hf:
        raise UserError(f"{where}: it sees no images, and --model does")
    check_sizes(hf, config, setting)


def build_stage(hf: dict, config: TransformerConfig, groups: ProcessGroupCollection) -> GPTModel:
    """Build this rank's stage with random weights (collective: pipeline, if embeddings are tied)."""
    stage = groups.pp.rank()
    layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    attention = layer.submodules.self_attention.submodules
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    attention.core_attention = PackedAttention
    layers = [layer] * transformer_block.get_num_layers_to_build(config, pp_rank=stage)
    kind = GPTModel
    if sees := stage == 0 and "vision" in hf:
        kind = hf["stage"]
    gpt = kind(
        config,
        transformer_block.TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm),
        vocab_size=hf["vocab_size"],
        max_sequence_length=hf["max_position_embeddings"],
        pre_process=stage == 0,
        post_process=stage == groups.pp.size() - 1,
        pg_collection=groups,
        share_embeddings_and_output_weights=hf["tie_word_embeddings"],
        position_embedding_type="none",  # PackedAttention does it
    )
    gpt.family = FAMILIES[hf["model_type"]]
    gpt.adapters = {}  # see extras/lora.py
    if sees:
        gpt.add_tower(hf["vision"], hf["reader"])
    if gpt.post_process:
        lm_head.leave_out_logits(gpt)
    return gpt
