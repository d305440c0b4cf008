"""The program that made the demo's models, demo/models: an actor with two habits, and a judge.

    torchrun --nproc-per-node 2 examples/make_demo/warmstart.py written runs/models     3 minutes, 2 cores
    torchrun --nproc-per-node 2 examples/make_demo/warmstart.py drawn runs/models       3.5 minutes
    torchrun --nproc-per-node 2 examples/make_demo/warmstart.py filmed runs/models      7 minutes, from drawn

Both are trained with supervised steps. The actor mostly blurts out the answer and sometimes shows its work,
which leaves something for reinforcement learning to find. The judge starts from the actor and learns to
recompute every column and compare it with the claimed digit. It must pass a gate on held-out problems: few
false accepts, few false rejects.

To compare the files with the project's: cd runs/models && sha256sum --ignore-missing -c
../../demo/models/SHA256SUMS. Another processor, torch version or number of ranks may give different files.
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
from safetensors.torch import load_file, save_file

from actor import Actor
from config import Config, parse_config
from demo import task
from demo.task import shown_work, training_problem
from examples.make_demo.closing import close
from examples.make_demo.models import VISION, character_tokenizer, new_model
from examples.make_demo.slips import corrupted
from examples.make_demo.texts import DEMOS, Answer, Demo, Example, critiques, demonstrations, judged
from extras.images.reader import ImageReader
from inputs import tokenization
from inputs.tokenization import reader_of
from reporting.progress import Progress
from runtime import rendezvous
from runtime.world import World
from training import trainer
from training.packing import Sequence

Batches = Callable[[int], list[Example]]  # step -> its batch, the same on every rank
ADAM_LR = 2e-3
MUON_LR = 0.02
GATE = 0.03  # most false accepts among wrong answers, and most false rejects among right ones


def main() -> None:
    name, folder = sys.argv[1:]
    config = parse_config(["--device", "cpu"])
    world = rendezvous.join(config)
    progress = Progress(0, world.rank == 0)
    make(config, world, Path(folder, name), progress, DEMOS[name])
    progress.close()
    world.close()
    rendezvous.close()


def make(config: Config, world: World, home: Path, progress: Progress, demo: Demo) -> None:
    """Train both models into `home` (collective: all ranks). Raises ValueError if the gate fails."""
    start = home / "start"
    actor = home / "actor"
    judge = home / "judge"
    first_actor = start / "actor" if demo.start else start
    first_judge = start / "judge" if demo.start else actor
    if world.rank == 0:
        shutil.rmtree(home, ignore_errors=True)
        if demo.start:
            for first in (first_actor, first_judge):
                shutil.copytree(demo.start / first.name, first)
                character_tokenizer(VISION, demo.alphabet).save_pretrained(first)
        else:
            new_model(start, config.seed, demo.build)
    dist.barrier()
    batches = partial(demonstrations, config.seed, demo=demo)
    train(config, world, first_actor, actor, batches, demo.actor_steps, progress)
    shorten(actor, demo, world)
    key = f"own answers {config.seed}"
    rng = random.Random(key)
    problems = [training_problem(rng) for _ in range(demo.pool)]
    answers = own_answers(demo, actor, problems, key, world)
    errors = [answer for answer in answers if answer.text != str(answer.a + answer.b)]
    batches = partial(critiques, config.seed, errors, demo=demo)
    train(config, world, first_judge, judge, batches, demo.judge_steps, progress)
    shorten(judge, demo, world)
    progress.doing("warm start: checking the judge")
    rates = gate(demo, home, world)
    if max(rates.values()) > GATE:
        limits = f"({rates}, at most {GATE} each)"
        raise ValueError(f"the judge failed its gate {limits}: try another seed")
    if world.rank == 0:
        (judge / "gate.json").write_text(json.dumps(rates))
        shutil.rmtree(start)
    dist.barrier()


def shorten(model_dir: Path, demo: Demo, world: World) -> None:
    """Convert a model's file to the demo's dtype (collective: all ranks)."""
    if world.rank == 0 and demo.dtype != torch.float32:
        path = model_dir / "model.safetensors"
        weights = {name: tensor.to(demo.dtype) for name, tensor in load_file(path).items()}
        save_file(weights, path, metadata={"format": "pt"})
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
    """Train the checkpoint `start` with supervised steps and write `end` (collective: all ranks)."""
    alone = dict(tp=1, pp=1, sp=False, schedule="1f1b")
    config = dataclasses.replace(config, command="sft", dtype="float32", **alone)
    actor = MuonActor(config, str(start))
    tokenizer = tokenization.load_tokenizer(str(start))
    reader = reader_of(str(start))
    for step in range(steps):
        progress.doing(f"warm start: {end.name} {step + 1}/{steps}")
        # warm-up over 20 steps, full until half-way, then linear to 5 %
        scale = min(1.0, (step + 1) / 20) * max(0.05, min(1.0, 2.0 * (1 - step / steps)))
        examples = batches(step)[world.rank :: world.size]
        mine = [encode(example, tokenizer, reader) for example in examples]
        packed = []
        for chosen in actor.pack(mine):
            packed.append([mine[index] for index in chosen])
        stats = actor.run_step(packed, actor.cross_entropy_loss, (), scale)
        assert not stats["skipped"], "the gradient isn't finite"
    actor.export(end)
    close(actor)


class MuonActor(Actor):
    """An actor with Muon for matrices in layers and AdamW for the rest: a quarter of the steps is enough."""

    def _build_optimizer(self, model_config) -> None:
        """Keep the model unsharded: Muon orthogonalizes whole matrices."""
        flags = dict(use_distributed_optimizer=False, grad_reduce_in_fp32=True)
        settings = trainer.DistributedDataParallelConfig(**flags)
        parts = (model_config, settings, self.module)
        self.ddp = trainer.DistributedDataParallel(*parts, pg_collection=self.groups)
        self.module = self.ddp
        matrices = []
        rest = []
        for name, parameter in self.gpt.named_parameters():
            inside = any(part in f".{name}" for part in (".layers.", ".blocks.", "merger"))
            (matrices if parameter.ndim == 2 and inside else rest).append(parameter)
        muon = torch.optim.Muon(matrices, lr=MUON_LR, momentum=0.95, weight_decay=0.0)
        adam = torch.optim.AdamW(rest, lr=ADAM_LR, betas=trainer.ADAM_BETAS, weight_decay=0.0)
        self._optimizers = ((muon, MUON_LR), (adam, ADAM_LR))

    def _apply_gradients(self, lr: float) -> float:
        """Make a step; `lr` scales both learning rates. Return the gradients' norm before clipping."""
        parameters = list(self.gpt.parameters())
        for parameter in parameters:
            parameter.grad = parameter.main_grad  # where Megatron's DDP summed them
        norm = torch.nn.utils.clip_grad_norm_(parameters, trainer.CLIP_GRAD)
        for optimizer, full_lr in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = full_lr * lr
            optimizer.step()
        return float(norm)


def encode(
    example: Example, tokenizer: tokenization.Tokenizer, reader: ImageReader | None
) -> Sequence:
    """Return the tokens and images of an example, as the model reads it."""
    text, images = example.prompt.read(reader)
    prompt = tokenization.encode_prompt(tokenizer, reader, text, images)
    _, response = tokenization.encode_pair(tokenizer, "", example.response)
    return Sequence(prompt, response, images)


def generate(model_dir: Path, examples: list[Example], world: World, **sampling) -> list[str]:
    """Generate an answer per prompt with transformers; "" if cut off (collective: all ranks)."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    tokenizer = tokenization.load_tokenizer(str(model_dir))
    reader = reader_of(str(model_dir))
    kind = AutoModelForImageTextToText if reader else AutoModelForCausalLM
    model = kind.from_pretrained(model_dir, dtype=torch.float32, use_safetensors=True)
    mine = [encode(each, tokenizer, reader) for each in examples[world.rank :: world.size]]
    rows = {"input_ids": [sequence.prompt for sequence in mine]}
    batch = tokenizer.pad(rows, padding_side="left", return_tensors="pt")
    if reader:
        images = [image for sequence in mine for image in sequence.images]
        batch["pixel_values"], batch["image_grid_thw"] = reader.pixels(images)
        batch["mm_token_type_ids"] = (batch["input_ids"] == reader.image_token).int()
    stop = list(tokenization.stop_tokens(str(model_dir), tokenizer, reader))
    torch.manual_seed(world.rank)
    with torch.inference_mode():
        tokens = model.generate(**batch, eos_token_id=stop, **sampling)
    end = tokenizer.eos_token_id
    rows = tokens[:, batch["input_ids"].shape[1] :].tolist()
    answers = [
        tokenization.decode(tokenizer, row[: row.index(end)]) if end in row else "" for row in rows
    ]
    texts = [None] * world.size
    dist.all_gather_object(texts, answers)
    return [texts[i % world.size][i // world.size] for i in range(len(examples))]


def own_answers(demo: Demo, actor: Path, problems: list, key: str, world: World) -> list[Answer]:
    """Sample two answers per problem: one freely, one with the work shown (collective: all ranks)."""
    prompts = []
    for is_worked in (False, True):  # an answer that begins like the work isn't blurted out
        for a, b in problems:
            shown = demo.show(a, b, key)
            start = shown_work(a, b)[0] if is_worked else ""
            prompts.append(Example(shown._replace(text=shown.text + start), ""))
    sampling = dict(max_new_tokens=72, do_sample=True, temperature=1.0, top_k=0)
    texts = generate(actor, prompts, world, **sampling)
    answers = zip(problems * 2, map(task.addition_answer, texts), strict=True)
    return [Answer(a, b, answer) for (a, b), answer in answers if answer is not None]


def gate(demo: Demo, home: Path, world: World) -> dict[str, float]:
    """Return the judge's error rates: right, corrupted, own answers (collective: all ranks)."""
    rng = random.Random("gate")
    answers = own_answers(demo, home / "actor", task.HELD_OUT_PROBLEMS, task.HELD_OUT_KEY, world)
    for a, b in task.HELD_OUT_PROBLEMS:
        answers += [Answer(a, b, str(a + b)), Answer(a, b, corrupted(rng, a, b))]
    examples = [judged(demo, *answer, task.HELD_OUT_KEY) for answer in answers]
    texts = generate(home / "judge", examples, world, max_new_tokens=100, do_sample=False)
    accepts = [task.addition_parse(text) is True for text in texts]
    truths = [task.addition_parse(example.response) for example in examples]
    pairs = list(zip(accepts, truths, strict=True))
    false_accepts = [accepted for accepted, is_right in pairs if not is_right]
    false_rejects = [not accepted for accepted, is_right in pairs if is_right]
    return {"false_accepts": fmean(false_accepts), "false_rejects": fmean(false_rejects)}


if __name__ == "__main__":
    main()
