"""The pretraining term of an update: `ptx_data` and `ptx_coef` of --algorithm."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from algorithms import Algorithm
from build import TERMS

if TYPE_CHECKING:
    from extras.ptx.term import Texts
    from inputs.tokenization import Tokenizer


def read(algorithm: Algorithm, tokenizer: Tokenizer, longest: int) -> Texts | None:
    if not algorithm.ptx_data:
        return None
    from extras.ptx import term  # imports Megatron, which takes seconds

    return term.Texts(term.read_texts(Path(algorithm.ptx_data), tokenizer, longest))


TERMS.append(read)
