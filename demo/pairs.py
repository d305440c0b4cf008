"""Examples for sft, rm, dpo: shown work, and beside it a wrong sum."""

import random

from demo.task import shown_work, training_problem


def example_rows(command: str, seed: int, count: int = 2048) -> list[dict]:
    """Make rows of shown work; in pairs (rm, dpo) with a wrong sum, blurted out or after the same work."""
    rng = random.Random(f"{command} {seed}")
    rows = []
    for _ in range(count):
        a, b = training_problem(rng)
        work = shown_work(a, b)
        row = {"prompt": f"{a}+{b}="}
        if command == "sft":
            rows.append(row | {"response": work})
            continue
        place = rng.randrange(len(str(a + b)))
        wrong = a + b + rng.choice([-1, 1]) * 10**place
        shown = work.rsplit(">", 1)[0] if rng.random() < 0.5 else ""
        rows.append(row | {"chosen": work, "rejected": f"{shown}>{wrong}"})
    return rows
