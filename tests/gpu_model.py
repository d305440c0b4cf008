"""A random Qwen3 for checks on a device, and the size of each check there and, in a dry run, on a CPU."""

from pathlib import Path
from typing import NamedTuple

WIDTHS = dict(hidden_size=1536, intermediate_size=4608, num_hidden_layers=16)
WIDTHS |= dict(num_attention_heads=12, num_key_value_heads=4, vocab_size=32768)
SMALL = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=2)
SMALL |= dict(num_key_value_heads=2, vocab_size=512)


class Sizes(NamedTuple):
    """The sizes of checks, in tokens and numbers of answers."""

    prompt: int
    answer: int
    answers: int  # answers in the batch that is trained on and compared
    sequence: int  # tokens of a sequence in a timed training pass
    micro_batch: int
    widths: dict[str, int]


SIZES = {
    "cuda": Sizes(64, 256, 64, 2048, 16384, WIDTHS),  # 541 million parameters
    "cpu": Sizes(16, 24, 8, 64, 128, SMALL),
}


def make_model(directory: Path, widths: dict[str, int]) -> None:
    """Write a model in bfloat16 with heads of 128. Its answers are neither certain nor uniform."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = dict(head_dim=128, tie_word_embeddings=False, max_position_embeddings=4096)
    tokens = dict(bos_token_id=None, eos_token_id=1, pad_token_id=0)
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    config = Qwen3Config(**widths, **sizes, **tokens, rope_parameters=rope)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
        torch.nn.init.normal_(model.lm_head.weight, std=1.5 * widths["hidden_size"] ** -0.5)
    model.to(torch.bfloat16).save_pretrained(directory)
