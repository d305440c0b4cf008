"""The demos' models before training, as Hugging Face directories, with one token per character."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from extras.images.drawing import CELL
from inputs.hf_directory import VISION_FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

ALPHABET = "0123456789+-=*,;:>?|#.() abcdefghijklmnopqrstuvwxyzYNQA\n"
VOCAB = 64
SPECIAL = ("<pad>", "<bos>", "<eos>")
# a model that sees also has these
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SHAPE = dict(hidden_size=96, intermediate_size=288, num_hidden_layers=3)
SHAPE |= dict(num_attention_heads=4, num_key_value_heads=4, head_dim=24)
MERGE = 2  # patches per side of a feature
MOST_CELLS = 16  # features per image
TOWER = dict(depth=2, hidden_size=64, intermediate_size=128, num_heads=4)
TOWER |= dict(num_position_embeddings=64, patch_size=CELL // MERGE, spatial_merge_size=MERGE)
TOWER |= dict(deepstack_visual_indexes=[0])


def text_model() -> PreTrainedModel:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**text_shape()))


def vision_model() -> PreTrainedModel:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    names = ("vision_start", "vision_end", "image", "video")
    ids = {f"{name}_token_id": number for number, name in enumerate(names, len(SPECIAL))}
    # rotation angles of a head's 12 pairs: 4 for frames, 4 for rows, 4 for columns
    rope = dict(rope_type="default", rope_theta=10000.0)
    rope |= dict(mrope_section=[4, 4, 4], mrope_interleaved=True)
    text = text_shape() | {"rope_parameters": rope}
    tower = TOWER | {"out_hidden_size": SHAPE["hidden_size"]}
    config = Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=True, **ids)
    return Qwen3VLForConditionalGeneration(config)


def text_shape() -> dict:
    ids = {f"{name}_token_id": number for number, name in enumerate(("pad", "bos", "eos"))}
    shape = SHAPE | ids | {"vocab_size": VOCAB, "max_position_embeddings": 256}
    return shape | {"tie_word_embeddings": True, "rms_norm_eps": 1e-6}


def new_model(path: Path, seed: int, build: Callable[[], PreTrainedModel] = text_model) -> None:
    """Write a freshly initialized model with its tokenizer and, if it sees, its processors."""
    torch.manual_seed(seed)
    model = build()
    with torch.no_grad():  # wider than transformers' 0.02, which suits large models
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                # True for matrices that write to the residual stream
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                fan_in = parameter[0].numel() * (2 * SHAPE["num_hidden_layers"] if writes else 1)
                is_table = name.endswith(("embed_tokens.weight", "pos_embed.weight"))
                parameter.normal_(0, 0.05 if is_table else 0.7 / fan_in**0.5)
    model.save_pretrained(path)
    sees = model.config.model_type in VISION_FAMILIES
    character_tokenizer(VISION if sees else ()).save_pretrained(path)
    if sees:
        write_processors(path)


def write_processors(path: Path) -> None:
    """Write image and video processors: transformers needs both to find either."""
    size = dict(shortest_edge=CELL**2, longest_edge=CELL**2 * MOST_CELLS)  # pixels
    settings = dict(patch_size=CELL // MERGE, merge_size=MERGE, temporal_patch_size=2, size=size)
    settings |= dict(image_mean=[0.5] * 3, image_std=[0.5] * 3, processor_class="Qwen3VLProcessor")
    settings |= dict(image_processor_type="Qwen2VLImageProcessor")
    settings |= dict(video_processor_type="Qwen3VLVideoProcessor")
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (path / name).write_text(json.dumps(settings))


def character_tokenizer(
    vision: tuple[str, ...] = (), alphabet: str = ALPHABET
) -> PreTrainedTokenizerFast:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {piece: i for i, piece in enumerate((*SPECIAL, *vision, *alphabet))}
    vocab |= {f"<unused{i}>": i for i in range(len(vocab), VOCAB)}
    letters = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    letters.decoder = decoders.Fuse()
    begin = [("<bos>", vocab["<bos>"])]
    letters.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=begin)
    letters.add_special_tokens(list(vision))  # one token each, not one per character
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    if vision:  # the names that Qwen-VL's processors use
        called = ("vision_bos_token", "vision_eos_token", "image_token", "video_token")
        names["extra_special_tokens"] = dict(zip(called, vision, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=letters, padding_side="left", **names)
