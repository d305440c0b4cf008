"""Warm start: the demo's two checkpoints, an actor with two habits and a judge, made by supervised steps.

The actor mostly blurts the answer out and sometimes shows the work: reinforcement learning has something to
find. The judge starts from it and learns to recompute every column and to compare it with the claimed digit.
Its negatives decide whether the reward can be hacked: random digits (else it reads the recomputed digit off
the claim), extra or lost digits, slipped carries, wrong answers of the actor itself. Both are cached by seed
and recipe, once the judge passes the gate on held-out problems: few false accepts and few false rejects.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import data
from actor import Actor, cross_entropy_loss
from config import Config
from recipes.addition import task
from recipes.addition.task import columns, shown_work, training_problem
from reporting.progress import Progress
from runtime.world import World
from training.trainer import ADAM_BETAS, CLIP_GRAD

if TYPE_CHECKING:
    from transformers import Qwen3Config

Pair = tuple[str, str]  # texts of a prompt and of the response to learn
Batches = Callable[[int], list[Pair]]  # of a step; the same on every rank
Problem = tuple[int, int, str]  # two summands, and an answer

ALPHABET = "0123456789+-=*,;:>?|#.() abcdefghijklmnopqrstuvwxyzYNQA\n"
SPECIAL = ("<pad>", "<bos>", "<eos>")
SHAPE = dict(hidden_size=96, intermediate_size=288, num_hidden_layers=3)
SHAPE |= dict(num_attention_heads=4, num_key_value_heads=4, head_dim=24)
RECIPE = dict(version=2, vocab=64, shape=SHAPE, adam_lr=2e-3, muon_lr=0.02)
RECIPE["actor"] = dict(steps=250, batch=128, blurt=0.6)  # blurt: part that only say the answer
# right and corrupted answers; the rest are the actor's own errors on `pool` problems
RECIPE["judge"] = dict(steps=500, batch=64, right=0.5, corrupted=0.3, pool=1024)
CACHE = Path.home() / ".cache" / "nanoyatt"
GATE = 0.03  # false accepts among wrong answers, and false rejects among right ones, at most


async def prepare(config: Config, world: World, progress: Progress) -> tuple[Path, Path]:
    """The demo's actor and judge, made if they aren't cached (collective). ValueError if the gate fails."""
    recipe = hashlib.sha256(json.dumps(RECIPE, sort_keys=True).encode()).hexdigest()[:8]
    home = CACHE / f"addition-{recipe}-seed{config.seed}"
    if not await world.broadcast((home / "judge" / "gate.json").is_file()):
        await world.run(make, config, world, home, progress)
    return home / "actor", home / "judge"


def make(config: Config, world: World, home: Path, progress: Progress) -> None:
    """Train both models and move them to `home` at once: a cache is complete or absent (collective)."""
    work = home.with_name(home.name + ".part")
    new, actor, judge = (work / name for name in ("new", "actor", "judge"))
    if world.rank == 0:
        shutil.rmtree(work, ignore_errors=True)
        new_model(new, config.seed)
    dist.barrier()
    train(config, world, new, actor, partial(demonstrations, config.seed), RECIPE["actor"]["steps"], progress)
    rng = random.Random(f"own answers {config.seed}")
    problems = [training_problem(rng) for _ in range(RECIPE["judge"]["pool"])]
    errors = [(a, b, answer) for a, b, answer in own_answers(actor, problems, world) if answer != str(a + b)]
    batches = partial(critiques, config.seed, errors)
    train(config, world, actor, judge, batches, RECIPE["judge"]["steps"], progress)
    progress.doing("warm start: checking the judge")
    rates = gate(work, world)
    if max(rates.values()) > GATE:
        raise ValueError(f"the judge failed its gate ({rates}, at most {GATE} each): try another --seed")
    if world.rank == 0:
        (judge / "gate.json").write_text(json.dumps(rates))
        shutil.rmtree(new)
        shutil.rmtree(home, ignore_errors=True)
        work.rename(home)
    dist.barrier()


def train(
    config: Config, world: World, start: Path, end: Path, batches: Batches, steps: int, progress: Progress
) -> None:
    """Supervised steps from the checkpoint `start` to `end` (collective)."""
    alone = dict(tp=1, pp=1, cp=1, sp=False, schedule="1f1b")
    config = dataclasses.replace(config, command="sft", dtype="float32", **alone)
    actor, tokenizer = MuonActor(config, str(start)), data.load_tokenizer(str(start))
    for step in range(steps):
        progress.doing(f"warm start: {end.name} {step + 1}/{steps}")
        # warm-up over 20 steps, full until half-way, then linear to 5 %
        scale = min(1.0, (step + 1) / 20) * max(0.05, min(1.0, 2.0 * (1 - step / steps)))
        mine = [data.encode_pair(tokenizer, *pair) for pair in batches(step)[world.rank :: world.size]]
        packed = [[mine[index] for index in chosen] for chosen in actor.pack(mine)]
        stats = actor.optimizer_step(packed, cross_entropy_loss, (), scale)
        assert not stats["skipped"], "the gradient isn't finite"
    actor.export(end)
    actor.close()


class MuonActor(Actor):
    """With Muon for the matrices inside the layers and AdamW for the rest: a quarter of its steps do."""

    shards_optimizer = False  # Muon orthogonalizes whole matrices

    def _build_optimizer(self, model_config) -> None:
        matrices, rest = [], []
        for name, parameter in self.chunks[0].named_parameters():
            (matrices if parameter.ndim == 2 and ".layers." in f".{name}" else rest).append(parameter)
        muon = torch.optim.Muon(matrices, lr=RECIPE["muon_lr"], momentum=0.95, weight_decay=0.0)
        adam = torch.optim.AdamW(rest, lr=RECIPE["adam_lr"], betas=ADAM_BETAS, weight_decay=0.0)
        self._optimizers = ((muon, RECIPE["muon_lr"]), (adam, RECIPE["adam_lr"]))

    def _apply_gradients(self, lr: float) -> float:
        """One step; `lr` scales both learning rates. Returns the gradients' norm before clipping."""
        parameters = self.parameters()
        for parameter in parameters:
            parameter.grad = parameter.main_grad  # where Megatron's DDP summed them
        norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP_GRAD)
        for optimizer, full_lr in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = full_lr * lr
            optimizer.step()
        return float(norm)


def model_config() -> Qwen3Config:
    from transformers import Qwen3Config

    ids = {f"{name}_token_id": number for number, name in enumerate(("pad", "bos", "eos"))}
    shape = SHAPE | ids | {"vocab_size": RECIPE["vocab"], "max_position_embeddings": 256}
    return Qwen3Config(**shape, tie_word_embeddings=True, rms_norm_eps=1e-6)


def new_model(path: Path, seed: int) -> None:
    """A freshly initialised Qwen3 with a character tokenizer, as a Hugging Face directory."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

    vocab = {piece: i for i, piece in enumerate((*SPECIAL, *ALPHABET))}
    vocab |= {f"<unused{i}>": i for i in range(len(vocab), RECIPE["vocab"])}
    characters = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    begin = [("<bos>", vocab["<bos>"])]
    characters.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=begin)
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, padding_side="left", **names)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(model_config())
    with torch.no_grad():  # wider than transformers' 0.02, which suits large models
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))  # to the residual stream
                depth = 2 * SHAPE["num_hidden_layers"] if writes else 1
                parameter.normal_(0, 0.05 if "embed" in name else 0.7 / (parameter.shape[1] * depth) ** 0.5)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def demonstrations(seed: int, step: int) -> list[Pair]:
    """Of problems, with the work shown or the answer blurted out."""
    rng, pairs = random.Random(f"demonstrations {seed} {step}"), []
    for _ in range(RECIPE["actor"]["batch"]):
        a, b = training_problem(rng)
        blurts = rng.random() < RECIPE["actor"]["blurt"]
        pairs.append((f"{a}+{b}=", f">{a + b}" if blurts else shown_work(a, b)))
    return pairs


def example_rows(command: str, seed: int, count: int = 2048) -> list[dict]:
    """Examples for sft, rm, dpo: shown work; in pairs a wrong answer, blurted out or after the same work."""
    rng, rows = random.Random(f"{command} {seed}"), []
    while len(rows) < count:
        a, b = training_problem(rng)
        work, wrong = shown_work(a, b), corrupted(rng, a, b)
        if command == "sft":
            rows.append({"prompt": f"{a}+{b}=", "response": work})
        elif wrong != str(a + b):
            shown = work.rsplit(">", 1)[0] if rng.random() < 0.5 else ""
            rows.append({"prompt": f"{a}+{b}=", "chosen": work, "rejected": f"{shown}>{wrong}"})
    return rows


def critique(a: int, b: int, answer: str) -> str:
    """57, 68, `135` -> `7+8+0=15:5.5+6+1=12:3x1:1.N`: columns, claimed digits and flags, carry, verdict."""
    if not answer.isdigit() or len(answer) > 10:
        return "N"
    claimed, columns_shown = answer[::-1], []
    for position, (x, y, carry, total) in enumerate(columns(a, b)):
        digit = claimed[position] if position < len(claimed) else "-"
        flag = "." if digit == str(total % 10) else "x"
        columns_shown.append(f"{x}+{y}+{carry}={total:02d}:{digit}{flag}")
    carry, rest = total // 10, claimed[len(columns_shown) :]
    text = "".join(columns_shown) + f"{carry}:{rest}" + ("." if rest == "1" * carry else "x")
    return text + ("N" if "x" in text else "Y")


def corrupted(rng: random.Random, a: int, b: int) -> str:
    """A wrong answer, usually: one of the slips below, or mostly random digits three times in ten."""
    digits = list(str(a + b))
    if rng.random() < 0.3:  # the claim then says nothing about the true digit: the judge can't copy it
        keep = rng.random() / 2
        digits = [digit if rng.random() < keep else str(rng.randrange(10)) for digit in digits]
        return "".join(["1" if digits[0] == "0" else digits[0], *digits[1:]])
    (kind,) = rng.choices(list(SLIPS), list(SLIPS.values()))
    return slip(kind, rng, a, b)


SLIPS = {  # kinds of wrong answers, and how often each
    "one digit off": 0.35, "random digits": 0.17, "digit added or lost": 0.14, "extra leading digits": 0.06,
    "swapped digits": 0.05, "lost carry": 0.09, "cut short": 0.08, "a summand": 0.02, "gibberish": 0.04,
}  # fmt: skip


def slip(kind: str, rng: random.Random, a: int, b: int) -> str:
    """An answer with a slip of this kind. Chance may make it right."""
    digits = list(str(a + b))
    match kind:
        case "one digit off":
            i = rng.randrange(len(digits))
            digits[i] = str((int(digits[i]) + rng.choice([1, 9])) % 10)
        case "random digits":
            for _ in range(rng.choice([1, 1, 1, 2, 3])):
                digits[rng.randrange(len(digits))] = str(rng.randrange(10))
        case "digit added or lost":
            i = rng.randrange(len(digits))
            digits[i : i + 1] = [digits[i], str(rng.randrange(10))] if rng.random() < 0.57 else []
        case "extra leading digits":
            extra = ["1", "1", "10", str(rng.randrange(1, 10)), str(rng.randrange(10, 100))]
            digits.insert(0, rng.choice(extra))
        case "swapped digits" if len(digits) > 1:
            i = rng.randrange(len(digits) - 1)
            digits[i], digits[i + 1] = digits[i + 1], digits[i]
        case "lost carry":
            digits, carry, lost = [], 0, rng.randrange(max(len(str(a)), len(str(b))))
            for position, (x, y, _, _) in enumerate(columns(a, b)):
                total = x + y + carry
                carry = 0 if position == lost else total // 10
                digits.insert(0, str(total % 10))
            digits[:0] = ["1"] * carry
        case "cut short":
            keep = rng.randrange(len(digits))
            digits = digits[:keep] if rng.random() < 0.5 else digits[len(digits) - keep :]
        case "a summand":
            return str(rng.choice([a, b]))
        case "gibberish":
            return "".join(rng.choice("0123456789;+=>") for _ in range(rng.randint(0, 10)))
    return "".join(digits)


def critiques(seed: int, pool: list[Problem], step: int) -> list[Pair]:
    """Of answers that are right, corrupted, or from `pool`, the actor's own errors."""
    rng, recipe, pairs = random.Random(f"critiques {seed} {step}"), RECIPE["judge"], []
    for _ in range(recipe["batch"]):
        kind, (a, b) = rng.random(), training_problem(rng)
        if kind < recipe["right"]:
            answer = str(a + b)
        elif kind < recipe["right"] + recipe["corrupted"]:
            answer = corrupted(rng, a, b)
        else:
            a, b, answer = rng.choice(pool)
        pairs.append((task.addition_prompt(f"{a}+{b}=", answer), critique(a, b, answer)))
    return pairs


def generate(model_dir: Path, prompts: list[str], max_new_tokens: int, world: World, **sampling) -> list[str]:
    """An answer to each prompt by transformers; "" if it was cut off. Ranks share the work (collective)."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = data.load_tokenizer(str(model_dir))
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, use_safetensors=True)
    mine = prompts[world.rank :: world.size]
    batch = tokenizer(mine, padding=True, padding_side="left", return_tensors="pt")
    torch.manual_seed(world.rank)
    with torch.inference_mode():
        tokens = model.generate(**batch, max_new_tokens=max_new_tokens, **sampling)
    end, texts = tokenizer.eos_token_id, [None] * world.size
    rows = tokens[:, batch["input_ids"].shape[1] :].tolist()
    answers = [data.decode(tokenizer, row[: row.index(end)] if end in row else []) for row in rows]
    dist.all_gather_object(texts, answers)
    return [texts[i % world.size][i // world.size] for i in range(len(prompts))]


def own_answers(actor: Path, problems: list[tuple[int, int]], world: World) -> list[Problem]:
    """Sampled from the warm-started actor: one as it likes, one with the work shown (collective)."""
    prompts = [f"{a}+{b}=" for a, b in problems]
    prompts += [f"{a}+{b}={shown_work(a, b)[0]}" for a, b in problems]  # what starts so isn't blurted out
    texts = generate(actor, prompts, 72, world, do_sample=True, temperature=1.0, top_k=0)
    answers = zip(problems * 2, map(task.addition_answer, texts), strict=True)
    return [(a, b, answer) for (a, b), answer in answers if answer is not None]


def gate(work: Path, world: World) -> dict[str, float]:
    """How often the judge errs on held-out problems: right, corrupted, the actor's answers (collective)."""
    rng, problems = random.Random("gate"), task.HELD_OUT_PROBLEMS
    items = own_answers(work / "actor", problems, world)
    items += [(a, b, answer) for a, b in problems for answer in (str(a + b), corrupted(rng, a, b))]
    prompts = [task.addition_prompt(f"{a}+{b}=", answer) for a, b, answer in items]
    texts = generate(work / "judge", prompts, 100, world, do_sample=False)
    right = [answer == str(a + b) for a, b, answer in items]
    pairs = [(task.addition_parse(text) is True, truth) for text, truth in zip(texts, right, strict=True)]
    false_accepts = [accepts for accepts, truth in pairs if not truth]
    false_rejects = [not accepts for accepts, truth in pairs if truth]
    return {"false_accepts": fmean(false_accepts), "false_rejects": fmean(false_rejects)}
