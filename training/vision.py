"""Models that see: the image tower, transformers' own, in front of Megatron-Core's layers.

A tower turns an image's patches into features, which stand in the prompt in the place of image tokens.
Qwen3-VL's makes more of them, from its own lower layers, which are added behind the first layers (DeepStack,
arXiv 2406.04334).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from images.reader import ImageReader
from images.tokens import Image
from training.packing import NO_FEATURE, MicroBatch

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass
class Packing(PackedSeqParams):
    """What every layer knows of a micro-batch, made once. Megatron's own layers read `qkv_format` alone."""

    batch: MicroBatch | None = None
    rope: tuple[Tensor, Tensor] | None = None  # cosines and sines, [tokens, 1, dim]


def deep_features(vision: PretrainedConfig | None) -> int:
    """Behind how many layers features are added."""
    return len(vision.to_dict().get("deepstack_visual_indexes", ())) if vision else 0


def image_cost(hf: dict) -> Callable[[list[int]], int]:
    """Of a prompt: multiply-adds of the tower's forward pass over its images, which are runs of image tokens.

    Attention's windows count as full.
    """
    from transformers import AutoModel

    vision, image_token = hf["vision"], hf["reader"].image_token
    with torch.device("meta"):  # no numbers, only shapes
        tower = AutoModel.from_config(vision)
    named, facts = dict(tower.named_parameters()), vision.to_dict()
    sizes = {name: p.numel() for name, p in named.items() if p.ndim > 1 and "pos_embed" not in name}
    patches = vision.spatial_merge_size**2  # of a feature, which mergers make
    each = sum(size * (1 if "merger" in name else patches) for name, size in sizes.items())
    # blocks that see all of an image
    whole = len(facts.get("fullatt_block_indexes", range(vision.depth)))
    in_window = (facts.get("window_size", 0) // vision.patch_size) ** 2
    each += (vision.depth - whole) * patches * in_window * 2 * vision.hidden_size
    pairs = whole * 2 * vision.hidden_size * patches**2

    def cost(prompt: list[int]) -> int:
        images = (len(list(run)) for token, run in groupby(prompt) if token == image_token)
        return sum(each * features + pairs * features**2 for features in images)

    return cost


class VisionModel(GPTModel):
    """The first stage of a model that sees. Each tensor-parallel rank has the whole tower."""

    def add_tower(self, vision: PretrainedConfig, reader: ImageReader) -> None:
        """As config.json describes it, with random weights."""
        from transformers import AutoModel

        self.reader = reader
        self.visual = AutoModel.from_config(vision, dtype=self.config.params_dtype)
        for parameter in self.visual.parameters():
            parameter.tensor_model_parallel = False
            # then a rank goes back from its part of the tokens alone, and Megatron sums what each finds
            parameter.sequence_parallel = self.config.sequence_parallel
        if self.config.recompute_granularity:
            self.visual.main_input_name = "hidden_states"  # else it warns
            self.visual.gradient_checkpointing_enable()
        for layer in self.decoder.layers[: deep_features(vision)]:
            layer.register_forward_hook(self._deepen, with_kwargs=True)

    def forward(
        self, tokens: Tensor, positions: None, mask: None, *, packed_seq_params: Packing
    ) -> Tensor:
        """As Megatron's. Features for the layers travel as its `context`, which recomputation hands on."""
        batch = packed_seq_params.batch
        pixels, grids = self._pixels(batch.images)
        seen = self.visual(pixels, grid_thw=grids)
        # [T, 1, hidden], with sequence parallelism a part of T
        hidden = self.embedding(tokens, None)
        hidden = self._put(hidden, seen.pooler_output, batch, adds=False)
        deep = seen.get("deepstack_features")
        context = torch.stack(deep) if deep else None  # [layers, features, hidden]
        block = {"packed_seq_params": packed_seq_params, "extra_block_kwargs": {"context": context}}
        return super().forward(tokens, positions, mask, hidden, **block)

    def _pixels(self, images: tuple[Image, ...]) -> tuple[Tensor, Tensor]:
        """As ImageReader. A blank image without any: DDP waits for the gradients of all parameters."""
        vision = self.visual.config
        if images:
            pixels, grids = self.reader.pixels(list(images))
        else:
            side, colours = vision.spatial_merge_size, vision.in_channels
            numbers = colours * vision.temporal_patch_size * vision.patch_size**2
            pixels, grids = torch.zeros(side**2, numbers), torch.tensor([[1, side, side]])
        like = self.embedding.word_embeddings.weight
        return pixels.to(like), grids.to(like.device)

    def _put(self, hidden: Tensor, features: Tensor, batch: MicroBatch, adds: bool) -> Tensor:
        """Features in the place of the image tokens' hidden states, or added to them."""
        places = (
            torch.full_like(batch.tokens[0], NO_FEATURE) if batch.places is None else batch.places
        )
        if self.config.sequence_parallel:
            tensor = self.pg_collection.tp
            places = places.chunk(tensor.size())[tensor.rank()]
        chosen = places != NO_FEATURE
        shown = features[places[chosen]][:, None].to(hidden.dtype)
        return hidden.index_put((chosen,), shown, accumulate=adds)

    def _deepen(self, layer, args: tuple, options: dict, output: tuple[Tensor, Tensor]) -> tuple:
        """A layer's output with the next features in it, and those that are left."""
        hidden, context = output
        hidden = self._put(hidden, context[0], options["packed_seq_params"].batch, adds=True)
        return hidden, context[1:] if len(context) > 1 else None

    def bfloat16(self) -> VisionModel:
        """As Float16Module asks. The tower's rotary frequencies stay in float32, as engines have them."""
        rotary = self.visual.rotary_pos_emb
        frequencies = rotary.inv_freq
        super().bfloat16()
        rotary.inv_freq = frequencies
        return self
