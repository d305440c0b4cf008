"""Models with vision: transformers' image tower in front of Megatron-Core's layers.

The tower turns an image's patches into features, which replace the hidden states of image tokens. Qwen3-VL's
tower also takes features from lower layers, which are added to the output of the text model's first layers
(DeepStack, arXiv 2406.04334).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, chain, groupby
from typing import TYPE_CHECKING, Self

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor
from transformers import AutoModel, PretrainedConfig

from extras.images.tokens import positions
from inputs.tokenization import Reader
from sample import Image
from scheduling.balance import packed_length
from training.packing import NO_FEATURE, NO_TARGET, MicroBatch, Sequence

if TYPE_CHECKING:
    from training.packing import Packing


def image_macs(hf: dict) -> Callable[[list[int]], int]:
    """Return a function: prompt -> the tower's multiply-adds for its images, with windows taken as full."""
    vision = hf["vision"]
    image_token = hf["reader"].image_token
    with torch.device("meta"):  # no data, only shapes
        tower = AutoModel.from_config(vision)
    patches = vision.spatial_merge_size**2  # per feature
    each = 0  # multiply-adds per feature
    for name, parameter in tower.named_parameters():
        if parameter.ndim > 1 and "pos_embed" not in name:
            each += parameter.numel() * (1 if "merger" in name else patches)
    facts = vision.to_dict()
    whole = len(facts.get("fullatt_block_indexes", range(vision.depth)))  # full-attention blocks
    in_window = (facts.get("window_size", 0) // vision.patch_size) ** 2
    each += (vision.depth - whole) * patches * in_window * 2 * vision.hidden_size
    pairs = whole * 2 * vision.hidden_size * patches**2

    def macs(prompt: list[int]) -> int:
        images = (len(list(run)) for token, run in groupby(prompt) if token == image_token)
        return sum(each * features + pairs * features**2 for features in images)

    return macs


def with_images(batch: MicroBatch, sequences: list[Sequence], taken: Tensor) -> MicroBatch:
    """Add images, their tokens' features, and three-axis positions. taken: see packing.keys_of."""
    images = dict.fromkeys(chain(*(sequence.images for sequence in sequences)))
    ends = accumulate(image.features for image in images)
    ranges = (range(end - image.features, end) for image, end in zip(images, ends, strict=True))
    features = dict(zip(images, ranges, strict=True))
    axes = []
    places = []
    for sequence in sequences:
        length = packed_length(len(sequence.tokens))
        # a response contains only text
        tokens = (sequence.prompt + [NO_TARGET] * length)[:length]
        axes += positions(tokens, sequence.images)
        left = chain(*(features[image] for image in sequence.images))
        markers = {image.token for image in sequence.images}
        places += [next(left) if token in markers else NO_FEATURE for token in tokens]
    columns = torch.tensor([*zip(*axes, strict=True), places])[:, taken]
    return replace(batch, positions=columns[:3], places=columns[3], images=tuple(images))


class VisionModel(GPTModel):
    """The first stage of a model with vision. Each tensor-parallel rank has the whole tower."""

    macs_of_images = staticmethod(image_macs)

    @staticmethod
    def deep_layers(vision: PretrainedConfig) -> int:
        """Return the number of layers after which features are added."""
        return len(vision.to_dict().get("deepstack_visual_indexes", ()))

    def add_tower(self, vision: PretrainedConfig, reader: Reader) -> None:
        """Add the tower that config.json describes, with random weights."""
        self.reader = reader
        self.visual = AutoModel.from_config(vision, dtype=self.config.params_dtype)
        for parameter in self.visual.parameters():
            parameter.tensor_model_parallel = False
            # a rank's gradient comes from its own tokens only; this makes Megatron sum over the ranks
            parameter.sequence_parallel = self.config.sequence_parallel
        if self.config.recompute_granularity:
            self.visual.main_input_name = "hidden_states"  # avoids a warning
            self.visual.gradient_checkpointing_enable()
        for layer in self.decoder.layers[: self.deep_layers(vision)]:
            layer.register_forward_hook(self._deepen, with_kwargs=True)

    def forward(self, tokens: Tensor, positions, mask, *, packed_seq_params: Packing) -> Tensor:
        """Run Megatron's forward pass. Layers get their features as `context`, which recomputation keeps."""
        batch = packed_seq_params.batch
        pixels, grids = self._pixels(batch.images)
        seen = self.visual(pixels, grid_thw=grids)
        hidden = self.embedding(tokens, None)  # [T, 1, hidden]; sequence parallelism divides T
        hidden = self._put(hidden, seen.pooler_output, batch, adds=False)
        deep = seen.get("deepstack_features")
        context = torch.stack(deep) if deep else None  # [layers, features, hidden]
        block = {"packed_seq_params": packed_seq_params, "extra_block_kwargs": {"context": context}}
        return super().forward(tokens, positions, mask, hidden, **block)

    def _pixels(self, images: tuple[Image, ...]) -> tuple[Tensor, Tensor]:
        """Return pixels, a blank image's if there are none: DDP waits for gradients of all parameters."""
        vision = self.visual.config
        if images:
            pixels, grids = self.reader.pixels(list(images))
        else:
            side = vision.spatial_merge_size
            numbers = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
            pixels = torch.zeros(side**2, numbers)
            grids = torch.tensor([[1, side, side]])
        like = self.embedding.word_embeddings.weight
        return pixels.to(like), grids.to(like.device)

    def _put(self, hidden: Tensor, features: Tensor, batch: MicroBatch, adds: bool) -> Tensor:
        """Replace the image tokens' hidden states with features, or add the features to them."""
        places = batch.places
        if places is None:
            places = torch.full_like(batch.tokens[0], NO_FEATURE)
        if self.config.sequence_parallel:
            tensor = self.pg_collection.tp
            places = places.chunk(tensor.size())[tensor.rank()]
        chosen = places != NO_FEATURE
        shown = features[places[chosen]][:, None].to(hidden.dtype)
        return hidden.index_put((chosen,), shown, accumulate=adds)

    def _deepen(self, layer, args: tuple, options: dict, output: tuple[Tensor, Tensor]) -> tuple:
        """Add the next features to a layer's output. Returns it and the remaining features."""
        hidden, context = output
        hidden = self._put(hidden, context[0], options["packed_seq_params"].batch, adds=True)
        return hidden, context[1:] if len(context) > 1 else None

    def bfloat16(self) -> Self:
        """Round all but the tower's rotary frequencies, which engines keep in float32; for Float16Module."""
        rotary = self.visual.rotary_pos_emb
        frequencies = rotary.inv_freq
        super().bfloat16()
        rotary.inv_freq = frequencies
        return self
