"""The demos and what their models learn: demonstrations, and critiques of right and wrong answers.

The judge's negatives decide whether the reward can be hacked: random digits (otherwise the judge copies the
claimed digit instead of recomputing it), extra or lost digits, lost carries, the actor's own wrong answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from config import DEMO_MODELS
from demo import task
from demo.task import Shown, columns, shown_work, training_problem
from examples.make_demo.models import ALPHABET, text_model, vision_model
from examples.make_demo.slips import corrupted
from extras.images import drawing

BLURTED = 0.6  # fraction of the demonstrations that are only the answer
RIGHT = 0.5  # fraction of right answers among those that the judge learns from
CORRUPTED = 0.3  # fraction of corrupted ones; the rest are the actor's own errors


class Demo(NamedTuple):
    """A pair of models for the problems (written, drawn or filmed) and how to make it."""

    show: task.Show
    build: Callable  # see models.py
    actor_steps: int
    actor_batch: int
    judge_steps: int
    judge_batch: int
    pool: int  # problems that the actor answers for the judge to learn from
    start: Path | None = None  # folder of an actor and a judge to start from; None: new models
    alphabet: str = ALPHABET
    dtype: torch.dtype = torch.float32  # the files' dtype


WRITTEN = Demo(task.written, text_model, 250, 128, judge_steps=500, judge_batch=64, pool=1024)
DRAWN = Demo(
    partial(drawing.shown, "images"),
    vision_model,
    220,
    64,
    judge_steps=300,
    judge_batch=64,
    pool=512,
)
FILMED = Demo(
    partial(drawing.shown, "video"),
    vision_model,
    100,
    64,
    judge_steps=150,
    judge_batch=64,
    pool=512,
)
# the times in a clip's text begin with `<`; float16 halves the files
FILMED = FILMED._replace(start=DEMO_MODELS / "drawn", alphabet=ALPHABET + "<", dtype=torch.float16)
DEMOS = {"written": WRITTEN, "drawn": DRAWN, "filmed": FILMED}


class Example(NamedTuple):
    """A prompt as it is shown, and the response to learn."""

    prompt: Shown
    response: str


class Answer(NamedTuple):
    """An answer to a problem, right or wrong."""

    a: int
    b: int
    text: str


def demonstrations(seed: int, step: int, demo: Demo = WRITTEN) -> list[Example]:
    """Return a step's batch: problems with the work shown or only the answer."""
    key = f"demonstrations {seed} {step}"
    rng = random.Random(key)
    examples = []
    for _ in range(demo.actor_batch):
        a, b = training_problem(rng)
        response = f">{a + b}" if rng.random() < BLURTED else shown_work(a, b)
        examples.append(Example(demo.show(a, b, key), response))
    return examples


def critique(a: int, b: int, answer: str) -> str:
    """57, 68, `135` -> `7+8+0=15:5.5+6+1=12:3x1:1.N`: columns, claimed digits and flags, carry, verdict."""
    if not answer.isdigit() or len(answer) > 10:
        return "N"
    claimed = answer[::-1]
    text = ""
    for position, (x, y, carry, total) in enumerate(columns(a, b)):
        digit = claimed[position] if position < len(claimed) else "-"
        flag = "." if digit == str(total % 10) else "x"
        text += f"{x}+{y}+{carry}={total:02d}:{digit}{flag}"
    carry = total // 10
    rest = claimed[position + 1 :]
    text += f"{carry}:{rest}" + ("." if rest == "1" * carry else "x")
    return text + ("N" if "x" in text else "Y")


def critiques(seed: int, errors: list[Answer], step: int, demo: Demo = WRITTEN) -> list[Example]:
    """Return a step's batch: critiques of answers that are right, corrupted, or from the actor's `errors`."""
    key = f"critiques {seed} {step}"
    rng = random.Random(key)
    examples = []
    for _ in range(demo.judge_batch):
        kind = rng.random()
        a, b = training_problem(rng)
        if kind < RIGHT:
            answer = str(a + b)
        elif kind < RIGHT + CORRUPTED:
            answer = corrupted(rng, a, b)
        else:
            a, b, answer = rng.choice(errors)
        examples.append(judged(demo, a, b, answer, key))
    return examples


def judged(demo: Demo, a: int, b: int, answer: str, key: str) -> Example:
    """Return the judge's prompt, and the critique to write."""
    shown = demo.show(a, b, key)
    prompt = shown._replace(text=task.addition_prompt(shown.text, answer))
    return Example(prompt, critique(a, b, answer))
