"""Random Hugging Face model directories: the shape of the demo model, without its training."""

from pathlib import Path

EOS = 1


def make_tiny_qwen3(directory, seed=0, kv_heads=4):
    """The path of a random Qwen3, 366k parameters, tied; the weights follow from the seed alone."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = dict(hidden_size=96, num_hidden_layers=3, num_attention_heads=4, head_dim=24)
    sizes |= dict(num_key_value_heads=kv_heads, intermediate_size=288, vocab_size=64)
    sizes |= dict(tie_word_embeddings=True, max_position_embeddings=2048)
    tokens = dict(bos_token_id=None, eos_token_id=EOS, pad_token_id=0)
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    config = Qwen3Config(**sizes, **tokens, rope_parameters=rope)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        # the default init gives nearly uniform logits: nothing would be told apart
        for weight in model.parameters():
            torch.nn.init.normal_(weight, mean=0.0 if weight.dim() > 1 else 1.0, std=0.15)
    Path(directory).mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    return str(directory)
