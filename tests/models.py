"""A user's own models, small enough for tests: Qwen3 with a BPE tokenizer, a chat template, and a judge."""

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

SHAPE = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16)
SHAPE |= dict(num_attention_heads=4, num_key_value_heads=2, vocab_size=384)
SHAPE |= dict(max_position_embeddings=512, tie_word_embeddings=False, initializer_range=0.1)


def save_tokenizer(directory) -> Path:
    """A byte-level BPE tokenizer of 384 tokens trained on CORPUS; `<|im_end|>` ends an answer, as in Qwen."""
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


def save_model(directory, answers=None, steps=0, seed=0) -> Path:
    """A Qwen3 directory of 130k parameters, random or taught for some seconds.

    answers(rng) -> (chat messages, the answer to them), one example to be taught.
    """
    import random

    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(save_tokenizer(directory))
    ends = dict(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, **ends, bos_token_id=None))
    rng, pad = random.Random(seed), torch.nn.utils.rnn.pad_sequence
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(steps):
        inputs, labels = [], []
        for messages, answer in (answers(rng) for _ in range(16)):
            how = dict(add_generation_prompt=True, return_dict=True)
            prompt = tokenizer.apply_chat_template(messages, **how)["input_ids"]
            response = [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
            inputs.append(torch.tensor(prompt + response))
            labels.append(torch.tensor([-100] * len(prompt) + response))
        inputs = pad(inputs, batch_first=True, padding_value=tokenizer.pad_token_id)
        labels = pad(labels, batch_first=True, padding_value=-100)
        # padding comes last: causality alone hides it
        model(input_ids=inputs, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    return Path(directory)


def question(a: int, b: int) -> str:
    return f"What is {a}+{b}? Answer with one number."


def any_digit(rng):
    """What the actor is taught: some digit, whatever the question."""
    asked = {"role": "user", "content": question(rng.randrange(24), rng.randrange(10))}
    return [asked], str(rng.randrange(10))


def verdict_on(answer: str) -> str:
    return "correct" if answer >= "5" else "incorrect"


def verdict(rng):
    """What the judge is taught: large digits are correct, whatever the question."""
    import genrm

    asked, answer = question(rng.randrange(24), rng.randrange(10)), str(rng.randrange(10))
    return genrm.chat_prompt(asked, answer), f"Large or not?\nVerdict: {verdict_on(answer)}"
