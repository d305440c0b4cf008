"""Resharding: from weights as they are sharded for training to whole ones for generation.

HybridFlow (arXiv 2409.19256), section 5, with t_g = p_g = 1: the ranks of a model replica form its
micro-data-parallel group and gather whole tensors. An engine with several ranks then shards them itself.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from training.hf_weights import global_parameters, hf_names, is_tied_copy, join, unfuse


class Gathering:
    """Gathers whole tensors. `received`: the bytes that this rank received the last time.

    tp: the group that joins its shards, by default all tensor-parallel ranks.
    """

    def __init__(self, gpt: GPTModel, tp: ProcessGroup | None = None):
        self.gpt = gpt
        self.tp = tp or gpt.pg_collection.tp
        self.received = 0

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor with its Hugging Face name, in the same order on every rank.

        Collective: a copy's ranks. The tensors may be views of the live weights: use or copy
        them before the next update.
        """
        for names, tensors in self.parts():
            yield from zip(names, tensors, strict=True)

    def parts(self) -> Iterator[tuple[list[str], list[Tensor]]]:
        """Yield the names and tensors in each of Megatron's (collective: a copy's ranks)."""
        gpt = self.gpt
        own = {name: p for name, p in global_parameters(gpt) if not is_tied_copy(gpt, name)}
        for name, whole in self.wholes(own, gpt.config.params_dtype):
            yield hf_names(name, gpt.family), unfuse(name, whole, gpt.config)

    def wholes(self, own: dict[str, Parameter], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield all stages' tensors under Megatron's names (collective: a copy's ranks). own: this stage's.

        The stages take turns: each broadcasts the list of its names and shapes, then tensor after tensor.
        """
        self.received = 0
        stages = self.gpt.pg_collection.pp
        for source in range(stages.size()):
            is_source = source == stages.rank()
            names = [(name, self._shape(p)) for name, p in own.items()] if is_source else None
            box = [names]
            if stages.size() > 1:
                dist.broadcast_object_list(box, group=stages, group_src=source)
            like = {"dtype": dtype, "device": next(self.gpt.parameters()).device}
            for name, shape in box[0]:
                whole = self._whole(name, own[name]) if is_source else torch.empty(shape, **like)
                if stages.size() > 1:
                    dist.broadcast(whole, group=stages, group_src=source)
                if not is_source:
                    self.received += whole.nbytes
                yield name, whole

    def _whole(self, name: str, param: Parameter) -> Tensor:
        """Join the shards of a parameter, merged with its adapter if it has one (collective: tp group)."""
        tp = self.tp
        own = param.detach()
        if name in self.gpt.adapters:
            own = self.gpt.adapters[name].merged(own)
        if tp.size() == 1 or not param.tensor_model_parallel:
            return own
        shards = [torch.empty_like(own) for _ in range(tp.size())]
        dist.all_gather(shards, own.contiguous(), group=tp)
        self.received += sum(shard.nbytes for shard in shards) - param.nbytes
        return join(name, shards, param.partition_dim)

    def _shape(self, param: Parameter) -> list[int]:
        """Return the shape of what `_whole` returns."""
        shape = list(param.shape)
        if param.tensor_model_parallel:
            shape[param.partition_dim] *= self.tp.size()
        return shape
