"""Warm start: makes the demo's two Hugging Face checkpoints, an actor with two habits and a judge, by supervised steps of actor.py.

The actor sees demonstrations of both habits: most blurt the answer out, some show the work. So it can work a
sum out but mostly doesn't, and reinforcement learning has something to find. The judge starts from the actor
and learns to recompute every column and to compare it with the claimed digit. Its negatives decide whether
the reward can be hacked: answers whose digits are all random (else it reads the recomputed digit off the
claim), extra or lost digits, slipped carries, and wrong answers of the warm-started actor itself, which is
made to show its work for half of them: what is left to be fooled with once training has taught it to.

Checkpoints are cached under ~/.cache/nanoyatt by seed and recipe. Training begins only if the judge passes
the gate on held-out problems: few false accepts AND few false rejects.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

import data
import genrm
from actor import Actor

ALPHABET = "0123456789+-=*,;:>?|#.() abcdefghijklmnopqrstuvwxyzYNQA\n"
SPECIAL = ("<pad>", "<bos>", "<eos>")
SHAPE = dict(hidden_size=96, intermediate_size=288, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, head_dim=24)
RECIPE = dict(
    version=2,
    vocab=64,
    shape=SHAPE,
    actor=dict(steps=250, batch=128, blurt=0.6),  # blurt: part of the demonstrations that give the answer straight away
    judge=dict(steps=500, batch=64, right=0.5, corrupted=0.3, pool=1024),  # the rest: the actor's errors on `pool` problems
    adam_lr=2e-3,
    muon_lr=0.02,
)
GATE = 0.03  # false accepts among wrong answers, and false rejects among right ones, at most


def cache_root() -> Path:
    """Where checkpoints are kept."""
    return Path.home() / ".cache" / "nanoyatt"


async def prepare(config, world, progress) -> tuple[Path, Path]:
    """The demo's actor and judge directories for this seed, made if they aren't cached (collective).

    Raises ValueError if the judge doesn't pass the gate.
    """
    recipe = hashlib.sha256(json.dumps(RECIPE, sort_keys=True).encode()).hexdigest()[:8]
    home = cache_root() / f"addition-{recipe}-seed{config.seed}"
    cached = await world.broadcast((home / "judge" / "gate.json").is_file())
    if not cached:
        await world.run(make, config, world, home, progress)
    return home / "actor", home / "judge"


def make(config, world, home: Path, progress) -> None:
    """Train both models and move them to `home` at once, so that a cache is whole or absent (collective)."""
    work = home.with_name(home.name + ".part")
    if world.rank == 0:
        shutil.rmtree(work, ignore_errors=True)
        new_model(work / "new", config.seed)
    dist.barrier()
    tokenizer = data.load_tokenizer(str(work / "new"))
    train(config, world, work / "new", work / "actor", demonstrations(config.seed), RECIPE["actor"], "actor", progress)
    pool = own_errors(work / "actor", tokenizer, config.seed, world)
    train(config, world, work / "actor", work / "judge", critiques(config.seed, pool), RECIPE["judge"], "judge", progress)
    progress.doing("warm start: checking the judge")
    rates = gate(work, tokenizer, world)
    if max(rates.values()) > GATE:
        raise ValueError(f"the demo's judge didn't pass its gate ({rates}, at most {GATE} each): try another --seed")
    if world.rank == 0:
        (work / "judge" / "gate.json").write_text(json.dumps(rates))
        shutil.rmtree(work / "new")
        shutil.rmtree(home, ignore_errors=True)
        work.rename(home)
    dist.barrier()


def train(config, world, start: Path, end: Path, batches, recipe: dict, name: str, progress) -> None:
    """Supervised steps from the checkpoint `start` to `end` (collective). batches(step) -> its (prompt, response) texts."""
    settings = SimpleNamespace(**dataclasses.asdict(config) | dict(tp=1, pp=1, cp=1, sp=False, dtype="float32"))
    actor, tokenizer = MuonActor(settings, str(start)), data.load_tokenizer(str(start))
    for step in range(recipe["steps"]):
        progress.doing(f"warm start: {name} {step + 1}/{recipe['steps']}")
        # warm-up over 20 steps, full until half-way, then linear to 5 %
        scale = min(1.0, (step + 1) / 20) * max(0.05, min(1.0, 2.0 * (1 - step / recipe["steps"])))
        actor.supervised(tokenize(tokenizer, batches(step)[world.rank :: world.size]), scale)
    actor.export(end)
    actor.close()


def tokenize(tokenizer, pairs: list[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
    """(prompt, response) texts as tokens; a response ends with the end-of-sequence token."""
    prompts, responses = zip(*pairs, strict=True)
    responses = tokenizer(list(responses), add_special_tokens=False)["input_ids"]
    prompts = tokenizer(list(prompts))["input_ids"]
    return [(prompt, [*response, tokenizer.eos_token_id]) for prompt, response in zip(prompts, responses, strict=True)]


class MuonActor(Actor):
    """The actor with Muon for the matrices inside the layers and AdamW for the rest: learns the task in a quarter of AdamW's steps."""

    shards_optimizer = False  # Muon orthogonalizes whole matrices

    def _build_optimizer(self, model_config) -> None:
        parameters = dict(self.ddp.module.named_parameters())
        inside = {name for name, parameter in parameters.items() if parameter.ndim == 2 and ".layers." in f".{name}"}
        matrices = [parameter for name, parameter in parameters.items() if name in inside]
        rest = [parameter for name, parameter in parameters.items() if name not in inside]
        muon = torch.optim.Muon(matrices, lr=RECIPE["muon_lr"], momentum=0.95, weight_decay=0.0)
        adam = torch.optim.AdamW(rest, lr=RECIPE["adam_lr"], betas=(0.9, 0.95), weight_decay=0.0)
        self._parameters, self._optimizers = list(parameters.values()), ((muon, RECIPE["muon_lr"]), (adam, RECIPE["adam_lr"]))

    def _optimizer_step(self, lr: float) -> float:
        """One step; `lr` scales both learning rates. Returns the gradients' norm before clipping."""
        for parameter in self._parameters:
            parameter.grad = parameter.main_grad  # where Megatron's DDP summed them
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.config.clip_grad)
        for optimizer, full_lr in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = full_lr * lr
            optimizer.step()
        return float(norm)


# ---------------------------------------------------------------- the model before training


def new_model(path: Path, seed: int) -> None:
    """A freshly initialised Qwen3 with a character tokenizer, as a Hugging Face directory."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocab = {piece: i for i, piece in enumerate((*SPECIAL, *ALPHABET))}
    vocab |= {f"<unused{i}>": i for i in range(len(vocab), RECIPE["vocab"])}
    pad, bos, eos = (vocab[piece] for piece in SPECIAL)
    characters = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    characters.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, padding_side="left", **names)
    ids = dict(pad_token_id=pad, bos_token_id=bos, eos_token_id=eos)
    torch.manual_seed(seed)
    shape = dict(vocab_size=RECIPE["vocab"], max_position_embeddings=256, tie_word_embeddings=True, rms_norm_eps=1e-6, **SHAPE)
    model = Qwen3ForCausalLM(Qwen3Config(**shape, **ids))
    with torch.no_grad():  # wider than transformers' 0.02, which suits large models
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                fan_in = parameter.shape[1]
                depth = 2 * SHAPE["num_hidden_layers"] if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                parameter.normal_(0, 0.05 if "embed" in name else 0.7 / (fan_in * depth) ** 0.5)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


# ---------------------------------------------------------------- what the actor is shown


def columns(a: int, b: int):
    """Digit pairs of a + b from the right: (digit of a, digit of b, carry in, their sum), padded with zeros."""
    carry = 0
    for position in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**position % 10, b // 10**position % 10
        total = x + y + carry
        yield x, y, carry, total
        carry = total // 10


def shown_work(a: int, b: int) -> str:
    """57 + 68 -> `7+8+0=15;5+6+1=12;>125`."""
    return "".join(f"{x}+{y}+{carry}={total:02d};" for x, y, carry, total in columns(a, b)) + f">{a + b}"


def demonstrations(seed: int):
    """step -> a batch of demonstrations, mostly blurted answers; the same on every rank."""

    def batch(step: int):
        rng = random.Random(f"demonstrations {seed} {step}")
        pairs = []
        for _ in range(RECIPE["actor"]["batch"]):
            a, b = data.training_problem(rng)
            text = f">{a + b}" if rng.random() < RECIPE["actor"]["blurt"] else shown_work(a, b)
            pairs.append((f"{a}+{b}=", text))
        return pairs

    return batch


# ---------------------------------------------------------------- what the judge is shown


def critique(a: int, b: int, answer: str) -> str:
    """57, 68, `135` -> `7+8+0=15:5.5+6+1=12:3x1:1.N`: every column recomputed, the claimed digit copied and flagged, the verdict."""
    if not answer.isdigit() or len(answer) > 10:
        return "N"
    claimed, written, right, last = answer[::-1], [], True, (0, 0, 0, 0)
    for position, last in enumerate(columns(a, b)):
        x, y, carry, total = last
        digit = claimed[position] if position < len(claimed) else "-"
        right &= digit == str(total % 10)
        written.append(f"{x}+{y}+{carry}={total:02d}:{digit}" + (".x"[digit != str(total % 10)]))
    overflow, rest = last[3] // 10, claimed[len(written) :]
    matches = rest == ("1" if overflow else "")
    written.append(f"{overflow}:{rest}" + ("." if matches else "x"))
    return "".join(written) + ("Y" if right and matches else "N")


def corrupted(rng: random.Random, a: int, b: int) -> str:
    """A wrong answer, usually: one of the slips below, or mostly random digits three times in ten."""
    digits = list(str(a + b))
    if rng.random() < 0.3:  # the claim then says nothing about the true digit, so that the judge can't copy it
        keep = rng.random() / 2
        digits = [digit if rng.random() < keep else str(rng.randrange(10)) for digit in digits]
        return "".join(["1" if digits[0] == "0" else digits[0], *digits[1:]])
    (slip,) = rng.choices([slip for slip, _ in SLIPS], [weight for _, weight in SLIPS])
    return slip(rng, digits, a, b)


def one_digit_off(rng, digits, a, b):
    """One digit up or down by one."""
    i = rng.randrange(len(digits))
    digits[i] = str((int(digits[i]) + rng.choice([1, 9])) % 10)
    return "".join(digits)


def random_digits(rng, digits, a, b):
    """One to three digits at random."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        digits[rng.randrange(len(digits))] = str(rng.randrange(10))
    return "".join(digits)


def digit_added_or_lost(rng, digits, a, b):
    """A digit too many or too few."""
    i = rng.randrange(len(digits))
    digits[i : i + 1] = [digits[i], str(rng.randrange(10))] if rng.random() < 0.57 else []
    return "".join(digits)


def extra_leading_digits(rng, digits, a, b):
    """More columns than there are."""
    return rng.choice(["1", "1", "10", str(rng.randrange(1, 10)), str(rng.randrange(10, 100))]) + "".join(digits)


def swapped_digits(rng, digits, a, b):
    """Two neighbours change places."""
    if len(digits) > 1:
        i = rng.randrange(len(digits) - 1)
        digits[i], digits[i + 1] = digits[i + 1], digits[i]
    return "".join(digits)


def lost_carry(rng, digits, a, b):
    """A carry is forgotten in one column."""
    places, carry, forgotten = [], 0, rng.randrange(max(len(str(a)), len(str(b))))
    for position, (x, y, _, _) in enumerate(columns(a, b)):
        total = x + y + carry
        carry = 0 if position == forgotten else total // 10
        places.append(str(total % 10))
    return ("1" if carry else "") + "".join(places[::-1])


def cut_short(rng, digits, a, b):
    """Only the first digits, or only the last: columns too few."""
    keep = rng.randrange(len(digits))
    return "".join(digits[:keep] if rng.random() < 0.5 else digits[len(digits) - keep :])


def a_summand(rng, digits, a, b):
    """One of the numbers that were to be added."""
    return str(rng.choice([a, b]))


def gibberish(rng, digits, a, b):
    """No number at all."""
    return "".join(rng.choice("0123456789;+=>") for _ in range(rng.randint(0, 10)))


SLIPS = (  # and how often each
    (one_digit_off, 0.35),
    (random_digits, 0.17),
    (digit_added_or_lost, 0.14),
    (extra_leading_digits, 0.06),
    (swapped_digits, 0.05),
    (lost_carry, 0.09),
    (cut_short, 0.08),
    (a_summand, 0.02),
    (gibberish, 0.04),
)


def critiques(seed: int, pool: list[tuple[int, int, str]]):
    """step -> a batch of judge prompts and critiques: right, corrupted, and from `pool`, the actor's own errors."""
    recipe = RECIPE["judge"]

    def batch(step: int):
        rng = random.Random(f"critiques {seed} {step}")
        pairs = []
        for _ in range(recipe["batch"]):
            kind = rng.random()
            a, b = data.training_problem(rng)
            if kind < recipe["right"]:
                answer = str(a + b)
            elif kind < recipe["right"] + recipe["corrupted"]:
                answer = corrupted(rng, a, b)
            else:
                a, b, answer = rng.choice(pool)
            pairs.append((judge_prompt(a, b, answer), critique(a, b, answer)))
        return pairs

    return batch


def judge_prompt(a: int, b: int, answer: str) -> str:
    """What the judge will be asked in the run, too."""
    return genrm.addition_prompt(f"{a}+{b}=", answer)


# ---------------------------------------------------------------- samples of the actor, and the gate


def generate(model_dir: Path, tokenizer, prompts: list[str], max_new_tokens: int, sample: bool, world) -> list[str]:
    """One answer to each prompt by transformers, this rank's part of the work; "" if it was cut off (collective)."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, use_safetensors=True)
    batch = tokenizer(prompts[world.rank :: world.size], padding=True, padding_side="left", return_tensors="pt")
    settings = dict(do_sample=True, temperature=1.0, top_k=0) if sample else dict(do_sample=False)
    torch.manual_seed(world.rank)
    with torch.inference_mode():
        tokens = model.generate(**batch, max_new_tokens=max_new_tokens, **settings)[:, batch["input_ids"].shape[1] :].tolist()
    ended = [row[: row.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in row else [] for row in tokens]
    texts = [None] * world.size
    dist.all_gather_object(texts, [data.decode(tokenizer, row) for row in ended])
    return [texts[i % world.size][i // world.size] for i in range(len(prompts))]


def own_answers(actor: Path, tokenizer, problems: list[tuple[int, int]], world) -> list[tuple[int, int, str]]:
    """(a, b, final answer) sampled from the warm-started actor: one as it likes, one with the work shown (collective)."""
    prompts = [f"{a}+{b}=" for a, b in problems]
    prompts += [f"{a}+{b}={shown_work(a, b)[0]}" for a, b in problems]  # an answer that starts with a digit isn't blurted out
    answers = [genrm.addition_answer(text) for text in generate(actor, tokenizer, prompts, 72, True, world)]
    return [(a, b, answer) for (a, b), answer in zip(problems * 2, answers, strict=True) if answer is not None]


def own_errors(actor: Path, tokenizer, seed: int, world) -> list[tuple[int, int, str]]:
    """The wrong ones among the actor's own answers to training problems (collective)."""
    rng = random.Random(f"own answers {seed}")
    problems = [data.training_problem(rng) for _ in range(RECIPE["judge"]["pool"])]
    return [(a, b, answer) for a, b, answer in own_answers(actor, tokenizer, problems, world) if answer != str(a + b)]


def gate(work: Path, tokenizer, world) -> dict[str, float]:
    """How often the judge errs on held-out problems: a right answer to each, a corrupted one, the actor's own (collective)."""
    rng = random.Random("gate")
    items = own_answers(work / "actor", tokenizer, data.HELD_OUT_PROBLEMS, world)
    items += [(a, b, answer) for a, b in data.HELD_OUT_PROBLEMS for answer in (str(a + b), corrupted(rng, a, b))]
    texts = generate(work / "judge", tokenizer, [judge_prompt(*item) for item in items], 100, False, world)
    right = [answer == str(a + b) for a, b, answer in items]
    accepted = [genrm.addition_parse(text) is True for text in texts]
    false_accepts = sum(yes and not truth for yes, truth in zip(accepted, right, strict=True))
    false_rejects = sum(truth and not yes for yes, truth in zip(accepted, right, strict=True))
    return {"false_accepts": false_accepts / (len(right) - sum(right)), "false_rejects": false_rejects / sum(right)}
