"""What the demo's actor and judge learn: demonstrations, and critiques of right and wrong answers.

The judge's negatives decide whether the reward can be hacked: random digits (else it reads the recomputed
digit off the claim), extra or lost digits, slipped carries, wrong answers of the actor itself.
"""

from __future__ import annotations

import random

from examples.make_demo.demos import WRITTEN, Demo
from recipes.addition import task
from recipes.addition.pairs import corrupted
from recipes.addition.task import columns, shown_work, training_problem

# a prompt's text, the response to learn, the prompt's pictures
Example = tuple[str, str, *tuple[bytes, ...]]
Problem = tuple[int, int, str]  # two summands, and an answer


def demonstrations(seed: int, step: int, demo: Demo = WRITTEN) -> list[Example]:
    """The batch of a step: problems, with the work shown or the answer blurted out."""
    key, recipe, examples = f"demonstrations {seed} {step}", demo.actor, []
    rng = random.Random(key)
    for _ in range(recipe["batch"]):
        a, b = training_problem(rng)
        response = f">{a + b}" if rng.random() < recipe["blurt"] else shown_work(a, b)
        question, *pictures = demo.show(a, b, key)
        examples.append((question, response, *pictures))
    return examples


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


def critiques(seed: int, pool: list[Problem], step: int, demo: Demo = WRITTEN) -> list[Example]:
    """The batch of a step: answers that are right, corrupted, or from `pool`, the actor's own errors."""
    key, recipe, examples = f"critiques {seed} {step}", demo.judge, []
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
