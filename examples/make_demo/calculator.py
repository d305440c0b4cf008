"""The program that made demo/models/calculator and examples/my_sums.jsonl: sums that need a calculator.

    torchrun --nproc-per-node 2 examples/make_demo/calculator.py runs/models        1.5 minutes, 2 cores
    python examples/make_demo/calculator.py > examples/my_sums.jsonl

It starts from the demo's actor. Four times in five the new model guesses: `73920415+80012377=` ->
`>153870092`. Otherwise it asks a calculator, `73920415+80012377?`, and then repeats the reply: `>153932792`.
This leaves something for reinforcement learning to find. The model must pass a gate on unseen sums: when it
asks, its answer has to be right.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch.distributed as dist

from config import DEMO_MODELS, parse_config
from demo.task import Shown
from examples.make_demo import warmstart
from examples.make_demo.texts import Example
from reporting.progress import Progress
from runtime import rendezvous
from runtime.world import World

DIGITS = (7, 10)  # digits of a summand
COPIED = (1, 12)  # digits of the numbers from which the model learns to copy
BATCH = {"guess": 40, "question": 10, "begun question": 40, "answer": 60}
STEPS = 400
ROWS = 1500  # rows of examples/my_sums.jsonl
GATE_ROWS = 400
GATE = 0.95  # least fraction of right answers when the model asks


def main() -> None:
    if len(sys.argv) == 1:
        for a, b in problems("rows", ROWS):
            print(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}))
        return
    config = parse_config(["--device", "cpu"])
    world = rendezvous.join(config)
    progress = Progress(0, world.rank == 0)
    home = Path(sys.argv[1], "calculator")
    actor = home / "actor"
    if world.rank == 0:
        shutil.rmtree(home, ignore_errors=True)
    dist.barrier()
    start = DEMO_MODELS / "written" / "actor"
    batches = partial(lessons, config.seed)
    warmstart.train(config, world, start, actor, batches, STEPS, progress)
    progress.doing("warm start: checking the actor")
    rates = gate(actor, world)
    if rates["right"] < GATE:
        raise ValueError(f"the actor failed its gate ({rates}, at least {GATE} right)")
    if world.rank == 0:
        (actor / "gate.json").write_text(json.dumps(rates))
    progress.close()
    world.close()
    rendezvous.close()


def problems(key: str, count: int) -> list[tuple[int, int]]:
    rng = random.Random(f"calculator {key}")
    return [(number(rng, *DIGITS), number(rng, *DIGITS)) for _ in range(count)]


def number(rng: random.Random, fewest: int, most: int) -> int:
    """Draw a number with `fewest` to `most` digits."""
    digits = rng.randint(fewest, most)
    return rng.randrange(10 ** (digits - 1), 10**digits)


def lessons(seed: int, step: int) -> list[Example]:
    """Return a step's batch."""
    rng = random.Random(f"calculator {seed} {step}")
    return [lesson(rng, kind) for kind, count in BATCH.items() for _ in range(count)]


def lesson(rng: random.Random, kind: str) -> Example:
    """Draw an example of one of BATCH's kinds. Only the first two decide how often the model asks."""
    digits = DIGITS if kind in ("guess", "question") else COPIED
    a = number(rng, *digits)
    b = number(rng, *digits)
    prompt = f"{a}+{b}="
    question = f"{a}+{b}?"
    if kind == "guess":
        return example(prompt, f">{a + b}")
    if kind == "question":
        return example(prompt, question)
    if kind == "begun question":
        return example(prompt + question[0], question[1:])
    reply = number(rng, *COPIED)  # not the sum: the model must repeat it, not compute it
    return example(f"{prompt}{question}<eos>{reply}", f">{reply}")


def example(prompt: str, response: str = "") -> Example:
    return Example(Shown(prompt, {}), response)


def gate(actor: Path, world: World) -> dict[str, float]:
    """Return what part of unseen sums it asks about, and gets right if it asks (collective: all ranks)."""
    sums = problems("gate", GATE_ROWS)
    sampling = dict(max_new_tokens=40, do_sample=True, temperature=1.0, top_k=0)
    generate = partial(warmstart.generate, actor, world=world, **sampling)
    prompts = [f"{a}+{b}=" for a, b in sums]
    asks = [turn for turn in generate(list(map(example, prompts))) if turn.endswith("?")]
    begun = [prompt + prompt[0] for prompt in prompts]  # an answer that begins with a digit asks
    turns = generate(list(map(example, begun)))
    asked = [prompt + turn for prompt, turn in zip(begun, turns, strict=True)]
    replied = [f"{text}<eos>{a + b}" for text, (a, b) in zip(asked, sums, strict=True)]
    answers = generate(list(map(example, replied)))
    right = 0
    for (a, b), text, answer in zip(sums, asked, answers, strict=True):
        right += text == f"{a}+{b}={a}+{b}?" and answer == f">{a + b}"
    return {"asks": len(asks) / len(sums), "right": right / len(sums)}


if __name__ == "__main__":
    main()
