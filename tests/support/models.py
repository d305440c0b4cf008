"""Small models as Hugging Face directories: a user's Qwen3 with a BPE tokenizer and a chat template, and an
untrained one of the demo's shape.
"""

from pathlib import Path

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = """You are a strict grader. Decide whether the final answer to the question is correct.
First work the question out yourself in a few sentences. Then write one last line: Verdict: correct, or
Verdict: incorrect.

Question:
What is 3+4? Answer with one number. What is 12 plus 7?
system user assistant Verdict: correct Verdict: incorrect

Final answer:
0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20"""

EOS = 1  # end of sequence of make_tiny_qwen3
SHAPE = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16)
SHAPE |= dict(num_attention_heads=4, num_key_value_heads=2, vocab_size=384)
SHAPE |= dict(max_position_embeddings=512, tie_word_embeddings=False, initializer_range=0.1)


def save_tokenizer(directory) -> Path:
    """Save a byte-level BPE tokenizer of 384 tokens trained on CORPUS; `<|im_end|>` ends answers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    how = dict(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    trainer = trainers.BpeTrainer(vocab_size=384, special_tokens=list(SPECIAL), **how)
    bpe.train_from_iterator(CORPUS.splitlines(keepends=True) * 4, trainer)
    how = dict(eos_token=SPECIAL[2], pad_token=SPECIAL[0], chat_template=TEMPLATE)
    PreTrainedTokenizerFast(tokenizer_object=bpe, **how).save_pretrained(directory)
    return Path(directory)


def save_model(directory) -> Path:
    """Save a random Qwen3 directory of 130k parameters."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(save_tokenizer(directory))
    ends = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, **ends, bos_token_id=None))
    model.save_pretrained(directory)
    return Path(directory)


def end_turns_with(directory, token) -> int:
    """Give the tokenizer a chat template that ends each turn with a special token; return its id."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"extra_special_tokens": [token]})
    tokenizer.chat_template = TEMPLATE.replace("<|im_end|>", token)
    tokenizer.save_pretrained(directory)
    return tokenizer.convert_tokens_to_ids(token)


def make_tiny_qwen3(directory, seed=0, kv_heads=4):
    """Make a random, tied Qwen3 of 366k parameters; the weights depend only on the seed. Return its path."""
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
        # the default init gives nearly uniform logits, which would hide differences
        for weight in model.parameters():
            torch.nn.init.normal_(weight, mean=0.0 if weight.dim() > 1 else 1.0, std=0.15)
    Path(directory).mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    return str(directory)
