"""Warm start: a demo's two checkpoints, an actor with two habits and a judge, made by supervised steps.

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

import torch
import torch.distributed as dist

import data
from actor import Actor, cross_entropy_loss
from config import Config
from images.reader import reader_of
from recipes.addition import task
from recipes.addition.critiques import corrupted, critique
from recipes.addition.demos import RECIPE, WRITTEN, Demo, demo_of
from recipes.addition.models import new_model
from recipes.addition.task import shown_work, training_problem
from reporting.progress import Progress
from runtime.world import World
from training.packing import Sequence
from training.trainer import ADAM_BETAS, CLIP_GRAD

Example = tuple[str, str, *tuple[bytes, ...]]  # a prompt's text, the response to learn, the prompt's pictures
Batches = Callable[[int], list[Example]]  # of a step; the same on every rank
Problem = tuple[int, int, str]  # two summands, and an answer

CACHE = Path.home() / ".cache" / "nanoyatt"
GATE = 0.03  # false accepts among wrong answers, and false rejects among right ones, at most


async def prepare(config: Config, world: World, progress: Progress) -> tuple[Path, Path]:
    """The demo's actor and judge, made if they aren't cached (collective). ValueError if the gate fails."""
    demo = demo_of(config)
    recipe = hashlib.sha256(json.dumps(demo.recipe, sort_keys=True).encode()).hexdigest()[:8]
    home = CACHE / f"{demo.name}-{recipe}-seed{config.seed}"
    if not await world.broadcast((home / "judge" / "gate.json").is_file()):
        await world.run(make, config, world, home, progress, demo)
    return home / "actor", home / "judge"


def make(config: Config, world: World, home: Path, progress: Progress, demo: Demo) -> None:
    """Train both models and move them to `home` at once: a cache is complete or absent (collective)."""
    work = home.with_name(home.name + ".part")
    new, actor, judge = (work / name for name in ("new", "actor", "judge"))
    if world.rank == 0:
        shutil.rmtree(work, ignore_errors=True)
        new_model(new, config.seed, demo.build)
    dist.barrier()
    learned = partial(demonstrations, config.seed, demo=demo)
    train(config, world, new, actor, learned, demo.recipe["actor"]["steps"], progress)
    key = f"own answers {config.seed}"
    rng, count = random.Random(key), demo.recipe["judge"]["pool"]
    answers = own_answers(demo, actor, [training_problem(rng) for _ in range(count)], key, world)
    errors = [(a, b, answer) for a, b, answer in answers if answer != str(a + b)]
    learned = partial(critiques, config.seed, errors, demo=demo)
    train(config, world, actor, judge, learned, demo.recipe["judge"]["steps"], progress)
    progress.doing("warm start: checking the judge")
    rates = gate(demo, work, world)
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
    actor, encode = MuonActor(config, str(start)), encoder(start)
    for step in range(steps):
        progress.doing(f"warm start: {end.name} {step + 1}/{steps}")
        # warm-up over 20 steps, full until half-way, then linear to 5 %
        scale = min(1.0, (step + 1) / 20) * max(0.05, min(1.0, 2.0 * (1 - step / steps)))
        mine = [encode(*example) for example in batches(step)[world.rank :: world.size]]
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
            inside = any(part in f".{name}" for part in (".layers.", ".blocks.", "merger"))
            (matrices if parameter.ndim == 2 and inside else rest).append(parameter)
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


def demonstrations(seed: int, step: int, demo: Demo = WRITTEN) -> list[Example]:
    """Of problems, with the work shown or the answer blurted out."""
    key, recipe, examples = f"demonstrations {seed} {step}", demo.recipe["actor"], []
    rng = random.Random(key)
    for _ in range(recipe["batch"]):
        a, b = training_problem(rng)
        response = f">{a + b}" if rng.random() < recipe["blurt"] else shown_work(a, b)
        question, *pictures = demo.show(a, b, key)
        examples.append((question, response, *pictures))
    return examples


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


def critiques(seed: int, pool: list[Problem], step: int, demo: Demo = WRITTEN) -> list[Example]:
    """Of answers that are right, corrupted, or from `pool`, the actor's own errors."""
    key, recipe, examples = f"critiques {seed} {step}", demo.recipe["judge"], []
    rng = random.Random(key)
    for _ in range(recipe["batch"]):
        kind, (a, b) = rng.random(), training_problem(rng)
        if kind < recipe["right"]:
            answer = str(a + b)
        elif kind < recipe["right"] + recipe["corrupted"]:
            answer = corrupted(rng, a, b)
        else:
            a, b, answer = rng.choice(pool)
        prompt, *pictures = judged(demo, a, b, answer, key)
        examples.append((prompt, critique(a, b, answer), *pictures))
    return examples


def judged(demo: Demo, a: int, b: int, answer: str, key: str) -> task.Shown:
    """The judge's prompt, and the pictures in it."""
    question, *pictures = demo.show(a, b, key)
    return task.addition_prompt(question, answer), *pictures


def encoder(model_dir: Path) -> Callable[..., Sequence]:
    """Of an example, as the model reads it."""
    tokenizer, reader = data.load_tokenizer(str(model_dir)), reader_of(str(model_dir))

    def encode(prompt: str, response: str, *pictures: bytes) -> Sequence:
        images = tuple(reader.read(partial(bytes, png), "a drawing") for png in pictures)
        _, answer = data.encode_pair(tokenizer, "", response)
        return Sequence(data.encode_prompt(tokenizer, reader, prompt, images), answer, images)

    return encode


def generate(model_dir: Path, prompts: list[task.Shown], world: World, **sampling) -> list[str]:
    """An answer to each prompt by transformers; "" if it was cut off. Ranks share the work (collective)."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer, reader = data.load_tokenizer(str(model_dir)), reader_of(str(model_dir))
    kind = AutoModelForImageTextToText if reader else AutoModelForCausalLM
    model = kind.from_pretrained(model_dir, dtype=torch.float32, use_safetensors=True)
    encode, end = encoder(model_dir), tokenizer.eos_token_id
    mine = [encode(prompt, "", *pictures) for prompt, *pictures in prompts[world.rank :: world.size]]
    rows = {"input_ids": [sequence.prompt for sequence in mine]}
    batch = tokenizer.pad(rows, padding_side="left", return_tensors="pt")
    if reader:
        seen = reader.pixels([image for sequence in mine for image in sequence.images])
        batch |= dict(zip(("pixel_values", "image_grid_thw"), seen, strict=True))
        batch["mm_token_type_ids"] = (batch["input_ids"] == reader.image_token).int()
    stop = list(data.stop_tokens(str(model_dir), tokenizer, reader))
    torch.manual_seed(world.rank)
    with torch.inference_mode():
        tokens = model.generate(**batch, eos_token_id=stop, **sampling)
    texts = [None] * world.size
    rows = tokens[:, batch["input_ids"].shape[1] :].tolist()
    answers = [data.decode(tokenizer, row[: row.index(end)] if end in row else []) for row in rows]
    dist.all_gather_object(texts, answers)
    return [texts[i % world.size][i // world.size] for i in range(len(prompts))]


def own_answers(
    demo: Demo, actor: Path, problems: list[tuple[int, int]], key: str, world: World
) -> list[Problem]:
    """Sampled from the warm-started actor: one as it likes, one with the work shown (collective)."""
    prompts = []
    for is_worked in (False, True):  # what starts as the work does isn't blurted out
        for a, b in problems:
            question, *pictures = demo.show(a, b, key)
            start = shown_work(a, b)[0] if is_worked else ""
            prompts.append((question + start, *pictures))
    texts = generate(actor, prompts, world, max_new_tokens=72, do_sample=True, temperature=1.0, top_k=0)
    answers = zip(problems * 2, map(task.addition_answer, texts), strict=True)
    return [(a, b, answer) for (a, b), answer in answers if answer is not None]


def gate(demo: Demo, work: Path, world: World) -> dict[str, float]:
    """How often the judge errs on held-out problems: right, corrupted, the actor's answers (collective)."""
    rng, problems = random.Random("gate"), task.HELD_OUT_PROBLEMS
    items = own_answers(demo, work / "actor", problems, task.HELD_OUT_KEY, world)
    items += [(a, b, answer) for a, b in problems for answer in (str(a + b), corrupted(rng, a, b))]
    prompts = [judged(demo, *item, task.HELD_OUT_KEY) for item in items]
    texts = generate(work / "judge", prompts, world, max_new_tokens=100, do_sample=False)
    right = [answer == str(a + b) for a, b, answer in items]
    pairs = [(task.addition_parse(text) is True, truth) for text, truth in zip(texts, right, strict=True)]
    false_accepts = [accepts for accepts, truth in pairs if not truth]
    false_rejects = [not accepts for accepts, truth in pairs if truth]
    return {"false_accepts": fmean(false_accepts), "false_rejects": fmean(false_rejects)}
