"""Tiny random models that see, as Hugging Face directories, and pictures for them."""

import io
import json
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image

from examples.make_demo.models import SPECIAL, VISION, VOCAB, character_tokenizer

PAD, BOS, EOS, START, END, IMAGE, VIDEO = range(len((*SPECIAL, *VISION)))
CLASSES = {
    "qwen3_vl": (transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration),
    "qwen2_5_vl": (transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration),
}
TEXT = dict(vocab_size=VOCAB, hidden_size=96, intermediate_size=288, max_position_embeddings=1024)
TEXT |= dict(num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6)
TEXT |= dict(tie_word_embeddings=True, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
ROPE = dict(rope_type="default", rope_theta=10000.0, mrope_section=[4, 4, 4])
TOWER = dict(depth=2, hidden_size=64, intermediate_size=128, num_heads=4, in_channels=3)
TOWER |= dict(temporal_patch_size=2, spatial_merge_size=2, out_hidden_size=96)
QWEN3_TEXT = dict(head_dim=24, rope_parameters=ROPE | dict(mrope_interleaved=True))
QWEN3_TOWER = dict(patch_size=16, num_position_embeddings=64, deepstack_visual_indexes=[0])
QWEN2_TOWER = dict(patch_size=14, window_size=112, fullatt_block_indexes=[1], tokens_per_second=2)
FAMILY = {  # settings of the text model and of the tower
    "qwen3_vl": (QWEN3_TEXT, QWEN3_TOWER),
    "qwen2_5_vl": (dict(rope_parameters=ROPE), QWEN2_TOWER),
}


def make_vision_model(path: Path, family: str, layers=4, seed=0, tied=True, **changes) -> str:
    """Make a directory with weights, tokenizer and image processor (up to 16 features). changes: tower."""
    torch.manual_seed(seed)
    text, tower = FAMILY[family]
    config_class, model_class = CLASSES[family]
    named = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START)
    named |= dict(vision_end_token_id=END, tie_word_embeddings=tied)
    text = TEXT | text | dict(num_hidden_layers=layers, tie_word_embeddings=tied)
    config = config_class(text_config=text, vision_config=TOWER | tower | changes, **named)
    model = model_class(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
            elif parameter.ndim == 1:  # norms
                parameter.normal_(1, 0.1)
            else:
                parameter.normal_(0, 0.02 if "patch_embed" in name else 0.05)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = EOS, PAD
    model.save_pretrained(path)
    character_tokenizer(VISION).save_pretrained(path)
    side = 2 * tower["patch_size"]
    size = dict(shortest_edge=side * side, longest_edge=side * side * 16)
    processor = dict(image_processor_type="Qwen2VLImageProcessor", size=size, merge_size=2)
    processor |= dict(patch_size=tower["patch_size"], temporal_patch_size=2)
    processor |= dict(image_mean=[0.5] * 3, image_std=[0.5] * 3)
    processor |= dict(processor_class=config_class.__name__.replace("Config", "Processor"))
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    video = processor | dict(video_processor_type="Qwen2VLVideoProcessor")
    (path / "video_preprocessor_config.json").write_text(json.dumps(video))
    return str(path)


def encoded_picture(width: int, height: int, seed: int = 0, kind: str = "PNG", **options) -> bytes:
    """Return noise as an image file's bytes."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()
