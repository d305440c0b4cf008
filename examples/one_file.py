"""RLHF in one file, in plain torch and transformers: python examples/one_file.py [--show]

A policy learns to add. Asked `57+68=`, it writes `>125`, or its work first: `7+8+0=15;5+6+1=12;>125`. In each
step it writes 8 answers to each of 16 prompts. A judge, also a language model, rewards each with 0 or 1; it
isn't given the sum. An update makes answers above their group's mean likelier, the others less so (GRPO).
--show prints all answers. docs/one_file.md explains the terms, and maps each part to the rest of the project.
"""

import random
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

SEED, STEPS, PROMPTS, ANSWERS = 0, 40, 16, 8  # a prompt's 8 answers are a group
LONGEST_ANSWER, LONGEST_CRITIQUE = 72, 100  # in tokens; a token is a character
COLUMNS = 129  # tokens of the longest prompt plus its output

torch.set_num_threads(1)
models = Path(__file__).parent.parent / "demo" / "models" / "written"
policy = AutoModelForCausalLM.from_pretrained(models / "actor")
judge = AutoModelForCausalLM.from_pretrained(models / "judge")
tokenizer = AutoTokenizer.from_pretrained(models / "actor", padding_side="right")  # both models'


def random_problem(rng, excluded):
    """Draw two summands of 1 to 6 digits; at least six in ten pairs have the same length."""
    longer = rng.choices([1, 2, 3, 4, 5, 6], [3.0, 4.0, 4.0, 3.0, 2.5, 2.0])[0]
    shorter = longer if rng.random() < 0.6 else rng.randint(1, longer)
    a, b = (rng.randrange(10 ** (n - 1) if n > 1 else 0, 10**n) for n in (longer, shorter))
    pair = (a, b) if rng.random() < 0.5 else (b, a)
    return random_problem(rng, excluded) if frozenset(pair) in excluded else pair


held_out = {}  # {a, b} -> (a, b), because a + b and b + a are the same problem
rng = random.Random("held out")
while len(held_out) < 200:
    pair = random_problem(rng, held_out)
    held_out[frozenset(pair)] = pair


def final_answer(text):
    """Return what follows the last `>`, or None: `7+8+0=15;5+6+1=12;>125` -> `125`."""
    return text.rsplit(">", 1)[1][:12] if ">" in text else None


def gumbel_noise(seeds, position):
    """Return -log(-log(u)), with u in [0, 1] from MurmurHash3 of seed, position, token: [rows, vocab]."""
    seeds = np.array(seeds)[:, None]  # 63 bits
    state = np.zeros_like(seeds, np.uint32)
    for word in (seeds, seeds >> 32, np.array([position]), np.arange(policy.vocab_size)):
        word = word.astype(np.uint32) * 0xCC9E2D51  # 32 bits of it; products wrap around
        state = state ^ ((word << 15) | (word >> 17)) * 0x1B873593
        state = ((state << 13) | (state >> 19)) * 5 + 0xE6546B64
    state = state ^ 16  # the number of bytes hashed
    state = (state ^ (state >> 16)) * 0x85EBCA6B
    state = (state ^ (state >> 13)) * 0xC2B2AE35
    u = torch.from_numpy((state ^ (state >> 16)) / 0xFFFFFFFF)
    return -(-u.log()).clamp(min=2.0**-32).log()  # u = 1 would give infinity


@torch.no_grad()
def generate(model, prompts, limit, seeds=None):
    """Return tokens, whether the model wrote each, its log-probability, and texts (empty if cut off).

    Tensors are [rows, COLUMNS]; padding is on the right, so causal attention needs no mask. The largest of
    logits + Gumbel noise is a sample of softmax(logits). Without seeds the likeliest token is chosen.
    """
    inputs = tokenizer(prompts, return_tensors="pt", padding="max_length", max_length=COLUMNS)
    tokens = inputs["input_ids"]
    starts = inputs["attention_mask"].sum(1)  # lengths of the prompts
    written = torch.zeros(tokens.shape, dtype=torch.bool)
    logprobs = torch.zeros(tokens.shape)
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    cache = DynamicCache()  # keys and values of earlier columns
    for t in range(COLUMNS - 1):  # read column t, write column t + 1 of rows whose prompt is over
        logits = model(tokens[:, t : t + 1], past_key_values=cache).logits[:, 0]  # [rows, vocab]
        chosen = (logits + gumbel_noise(seeds, t) if seeds else logits).argmax(1)
        written[:, t + 1] = writes = (t + 1 >= starts) & ~ended  # [rows]
        tokens[:, t + 1] = chosen.where(writes, tokens[:, t + 1])
        logprobs[:, t + 1] = logits.log_softmax(1).gather(1, chosen[:, None])[:, 0] * writes
        ended |= (writes & (chosen == tokenizer.eos_token_id)) | (written.sum(1) == limit)
        if ended.all():
            break
    outputs = tokens * written  # 0 is padding
    finished = (outputs == tokenizer.eos_token_id).any(1, keepdim=True)
    texts = tokenizer.batch_decode(outputs * finished, skip_special_tokens=True)
    return tokens, written, logprobs, texts


def judged(questions, texts):
    """Return rewards, [rows], and critiques. The judge sees only an answer's final number, not its work."""
    finals = [final_answer(text) for text in texts]
    prompts = [f"{q}>{final}?" for q, final in zip(questions, finals, strict=True)]  # 57+68=>125?
    asked = sorted({p for p, final in zip(prompts, finals, strict=True) if final is not None})
    found = dict.fromkeys(prompts, (0.0, ""))  # 0 without a final answer
    if asked:
        *_, logprobs, critiques = generate(judge, asked, LONGEST_CRITIQUE)
        is_sure = logprobs.amin(1) > -0.36  # all probabilities above 0.698
        for prompt, critique, sure in zip(asked, critiques, is_sure, strict=True):
            accepted = critique.endswith("Y") and "x" not in critique  # x: a digit is wrong
            found[prompt] = (float(accepted and sure), critique)
    rewards, critiques = zip(*map(found.get, prompts), strict=True)
    return torch.tensor(rewards, dtype=torch.float64), critiques


optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
next_prompt = 0
for step in range(1, STEPS + 1):
    kept, all_rewards, missing = [], [], PROMPTS
    while missing:  # until 16 groups hold both rewards, 0 and 1: in all others the advantages are 0
        names = [(SEED, next_prompt + n, i) for n in range(missing) for i in range(ANSWERS)]
        next_prompt += missing
        rngs = [random.Random(f"problem {SEED} {number}") for _, number, _ in names]
        questions = ["{}+{}=".format(*random_problem(rng, held_out)) for rng in rngs]
        seeds = [int.from_bytes(sha256(repr(name).encode()).digest()[:8]) >> 1 for name in names]
        *tensors, texts = generate(policy, questions, LONGEST_ANSWER, seeds)
        rewards, critiques = judged(questions, texts)
        all_rewards.append(rewards)
        groups = rewards.view(-1, ANSWERS)
        std = groups.std(1, correction=0, keepdim=True)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (std + 1e-4)).flatten()
        teaches = (std > 0).expand_as(groups).flatten()  # [rows]
        kept.append([x[teaches] for x in (*tensors, advantages[:, None])])
        missing -= int(teaches.sum()) // ANSWERS
        if "--show" in sys.argv:
            for row in zip(questions, texts, critiques, advantages, strict=True):
                print("{:>14}{:44} {:54} {:+.2f}".format(*row))
    tokens, written, old_logprobs, advantages = (torch.cat(x) for x in zip(*kept, strict=True))
    # PPO's clipped loss; column t of the logits predicts column t + 1
    logits = policy(tokens[:, :-1]).logits  # [128, COLUMNS - 1, vocab]
    logprobs = logits.log_softmax(2).gather(2, tokens[:, 1:, None])[:, :, 0]
    ratio = (logprobs - old_logprobs[:, 1:]).exp()  # 1 at the first update; its gradient counts
    gains = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    loss = -gains[written[:, 1:]].mean()  # over all tokens of all answers
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    decay = 0.9 * max(0, step - 5) / max(1, STEPS - 5)  # after a warmup of 5 steps, to a tenth
    optimizer.param_groups[0]["lr"] = 5e-4 * min(step / 5, 1 - decay)
    optimizer.step()
    print(f"step {step:3d}/{STEPS}  reward {torch.cat(all_rewards).mean():.3f}  loss {loss:+.4f}")

*_, texts = generate(policy, [f"{a}+{b}=" for a, b in held_out.values()], LONGEST_ANSWER)
sums = [str(a + b) for a, b in held_out.values()]
accuracy = np.mean([final_answer(text) == right for text, right in zip(texts, sums, strict=True)])
print(f"accuracy {accuracy:.3f} on held-out prompts")
