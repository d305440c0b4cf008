"""The program that made the demo's models, recipes/addition/models: an actor with two habits, and a judge.

    torchrun --nproc-per-node 2 examples/make_demo/warmstart.py written runs/models     3 minutes, 2 cores
    torchrun --nproc-per-node 2 examples/make_demo/warmstart.py drawn runs/models       3.5 minutes

Supervised steps make them. The actor mostly blurts the answer out and sometimes shows the work: reinforcement
learning has something to find. The judge starts from it and learns to recompute every column and to compare
it with the claimed digit. It has to pass a gate on held-out problems: few false accepts, few false rejects.

Last it says whether the files are the project's, by their SHA-256. Another processor, another torch or
another number of ranks may make other last digits.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

import data
from actor import Actor
from config import DEMO_MODELS, Config, parse_config
from examples.make_demo.demos import ADAM_LR, DEMOS, MUON_LR, Demo
from examples.make_demo.models import new_model
from examples.make_demo.texts import Example, Problem, critiques, demonstrations, judged
from images.reader import reader_of
from recipes.addition import task
from recipes.addition.pairs import corrupted
from recipes.addition.task import shown_work, training_problem
from reporting.progress import Progress
from runtime import rendezvous
from runtime.atomic_files import CHECKSUMS, sha256
from runtime.world import World
from training.packing import Sequence
from training.trainer import (
    ADAM_BETAS,
    CLIP_GRAD,
    DistributedDataParallel,
    DistributedDataParallelConfig,
)

Batches = Callable[[int], list[Example]]  # of a step; the same on every rank

GATE = 0.03  # false accepts among wrong answers, and false rejects among right ones, at most


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    config = parse_config(["--device", "cpu"])
    world = rendezvous.join(config)
    progress = Progress(0, world.rank == 0)
    make(config, world, folder / name, progress, DEMOS[name])
    progress.line(compare(folder, name))
    progress.close()
    world.close()
    rendezvous.close()


def compare(folder: Path, name: str) -> str:
    """Which files of a demo are other ones than the project's."""
    lines = (DEMO_MODELS / CHECKSUMS).read_text().splitlines()
    shipped = {path: checksum for checksum, _, path in (line.partition("  ") for line in lines)}
    made = [path for path in shipped if path.startswith(f"{name}/")]
    others = [path for path in made if sha256(folder / path) != shipped[path]]
    if others:
        return f"{folder}: other than the project's are {', '.join(others)}"
    return f"{folder}: all {len(made)} files of {name} are the project's"


def make(config: Config, world: World, home: Path, progress: Progress, demo: Demo) -> None:
    """Train both models, to `home` (collective). ValueError if the judge fails its gate."""
    new, actor, judge = (home / name for name in ("new", "actor", "judge"))
    if world.rank == 0:
        shutil.rmtree(home, ignore_errors=True)
        new_model(new, config.seed, demo.build)
    dist.barrier()
    learned = partial(demonstrations, config.seed, demo=demo)
    train(config, world, new, actor, learned, demo.actor["steps"], progress)
    key = f"own answers {config.seed}"
    rng, count = random.Random(key), demo.judge["pool"]
    answers = own_answers(demo, actor, [training_problem(rng) for _ in range(count)], key, world)
    errors = [(a, b, answer) for a, b, answer in answers if answer != str(a + b)]
    learned = partial(critiques, config.seed, errors, demo=demo)
    train(config, world, actor, judge, learned, demo.judge["steps"], progress)
    progress.doing("warm start: checking the judge")
    rates = gate(demo, home, world)
    if max(rates.values()) > GATE:
        raise ValueError(
            f"the judge failed its gate ({rates}, at most {GATE} each): try another seed"
        )
    if world.rank == 0:
        (judge / "gate.json").write_text(json.dumps(rates))
        shutil.rmtree(new)
    dist.barrier()


def train(
    config: Config,
    world: World,
    start: Path,
    end: Path,
    batches: Batches,
    steps: int,
    progress: Progress,
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
        stats = actor.optimizer_step(packed, actor.cross_entropy_loss, (), scale)
        assert not stats["skipped"], "the gradient isn't finite"
    actor.export(end)
    actor.close()


class MuonActor(Actor):
    """With Muon for the matrices inside the layers and AdamW for the rest: a quarter of its steps do."""

    def _wrapped(self, gpt) -> DistributedDataParallel:
        """Unsharded: Muon orthogonalizes whole matrices."""
        settings = DistributedDataParallelConfig(
            use_distributed_optimizer=False, grad_reduce_in_fp32=True
        )
        return DistributedDataParallel(gpt.config, settings, gpt, pg_collection=self.groups)

    def _build_optimizer(self, model_config) -> None:
        matrices, rest = [], []
        for name, parameter in self.gpt.named_parameters():
            inside = any(part in f".{name}" for part in (".layers.", ".blocks.", "merger"))
            (matrices if parameter.ndim == 2 and inside else rest).append(parameter)
        muon = torch.optim.Muon(matrices, lr=MUON_LR, momentum=0.95, weight_decay=0.0)
        adam = torch.optim.AdamW(rest, lr=ADAM_LR, betas=ADAM_BETAS, weight_decay=0.0)
        self._optimizers = ((muon, MUON_LR), (adam, ADAM_LR))

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
    mine = [
        encode(prompt, "", *pictures) for prompt, *pictures in prompts[world.rank :: world.size]
    ]
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
    texts = generate(
        actor, prompts, world, max_new_tokens=72, do_sample=True, temperature=1.0, top_k=0
    )
    answers = zip(problems * 2, map(task.addition_answer, texts), strict=True)
    return [(a, b, answer) for (a, b), answer in answers if answer is not None]


def gate(demo: Demo, home: Path, world: World) -> dict[str, float]:
    """How often the judge errs on held-out problems: right, corrupted, the actor's answers (collective)."""
    rng, problems = random.Random("gate"), task.HELD_OUT_PROBLEMS
    items = own_answers(demo, home / "actor", problems, task.HELD_OUT_KEY, world)
    items += [(a, b, answer) for a, b in problems for answer in (str(a + b), corrupted(rng, a, b))]
    prompts = [judged(demo, *item, task.HELD_OUT_KEY) for item in items]
    texts = generate(home / "judge", prompts, world, max_new_tokens=100, do_sample=False)
    right = [answer == str(a + b) for a, b, answer in items]
    pairs = [
        (task.addition_parse(text) is True, truth) for text, truth in zip(texts, right, strict=True)
    ]
    false_accepts = [accepts for accepts, truth in pairs if not truth]
    false_rejects = [not accepts for accepts, truth in pairs if truth]
    return {"false_accepts": fmean(false_accepts), "false_rejects": fmean(false_rejects)}


if __name__ == "__main__":
    main()
