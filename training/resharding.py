"""Resharding: from the parts of the weights that ranks train to those that they generate with.

HybridFlow (arXiv 2409.19256), section 5. Training cuts the weights into p pipeline stages of t shards each,
an engine of t_g ranks into t_g parts (here p_g = 1). The ranks that train a part's p * t / t_g shards are a
micro-data-parallel group and gather among themselves. Whole tensors are pushed so far (t_g = 1): an engine of
several ranks cuts them itself.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor
from torch.distributed import ProcessGroup

from training.hf_weights import global_parameters, hf_names, is_tied_copy, join, unfuse


class Gathering:
    """Puts an engine's part of each tensor together. `received`: bytes that reached this rank the last time.

    near: the neighbours in a stage whose t / t_g shards make up a part, so all of them for whole tensors.
    With those of the other stages they are a micro-data-parallel group.
    """

    def __init__(self, gpt: GPTModel, near: ProcessGroup):
        self.gpt = gpt
        self.near = near
        self.received = 0

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the part of every tensor by its Hugging Face name (collective: micro-data-parallel group).

        A part is a slice of its rows, or of columns for Megatron's row-parallel matrices; norms are whole.
        Stages take turns to broadcast theirs, so that every rank yields every tensor, in the same order. The
        tensors may be views of the live weights: use or copy them before the next update.
        """
        self.received = 0
        for source in range(self.gpt.pg_collection.pp.size()):
            for name, part in self._parts_of_stage(source):
                tensors = unfuse(name, part, self.gpt.config)
                yield from zip(hf_names(name, self.gpt.family), tensors, strict=True)

    def _parts_of_stage(self, source: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the parts that the pipeline's rank `source` has, under Megatron's names."""
        gpt = self.gpt
        stages = gpt.pg_collection.pp
        own = {name: p for name, p in global_parameters(gpt) if not is_tied_copy(gpt, name)}
        is_source = source == stages.rank()
        listing = [[(name, self._shape(p)) for name, p in own.items()] if is_source else None]
        if stages.size() > 1:
            dist.broadcast_object_list(listing, group=stages, group_src=source)
        like = {"dtype": gpt.config.params_dtype, "device": next(gpt.parameters()).device}
        for name, shape in listing[0]:
            part = self._part(name, own[name]) if is_source else torch.empty(shape, **like)
            if stages.size() > 1:
                dist.broadcast(part, group=stages, group_src=source)
            if not is_source:
                self.received += part.nbytes
            yield name, part

    def _part(self, name: str, param: torch.nn.Parameter) -> Tensor:
        """A parameter's part (collective: `near`)."""
        if self.near.size() == 1 or not param.tensor_model_parallel:
            return param.detach()
        shards = [torch.empty_like(param) for _ in range(self.near.size())]
        dist.all_gather(shards, param.detach().contiguous(), group=self.near)
        self.received += sum(shard.nbytes for shard in shards) - param.nbytes
        return join(name, shards, param.partition_dim)

    def _shape(self, param: torch.nn.Parameter) -> list[int]:
        """Return the shape of what `_part` returns."""
        shape = list(param.shape)
        if param.tensor_model_parallel:
            shape[param.partition_dim] *= self.near.size()
        return shape
