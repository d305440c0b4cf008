"""The demo's task: `57+68=`, answered `>125` or, better, with the work shown: `7+8+0=15;5+6+1=12;>125`.

For a model that sees the numbers are drawn: the question is `<image>=`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

from data import Prompt
from genrm import FORMATS, JudgeFormat
from images.reader import IMAGE, ImageReader
from recipes.addition.drawing import picture

Shown = tuple[str, *tuple[bytes, ...]]  # a text, and the pictures in it
Show = Callable[[int, int, str], Shown]  # of two summands, and what decides the look of a picture

# digits of the longer summand: relative frequency
DIGITS = {1: 3.0, 2: 4.0, 3: 4.0, 4: 3.0, 5: 2.5, 6: 2.0}
HELD_OUT = 200  # problems; independent of the seed, so that runs are compared on the same ones
HELD_OUT_KEY = "held out"  # of their pictures


def random_problem(rng: random.Random) -> tuple[int, int]:
    """Two summands of 1 to 6 digits; six in ten have the same length."""
    longer = rng.choices(list(DIGITS), list(DIGITS.values()))[0]
    shorter = longer if rng.random() < 0.6 else rng.randint(1, longer)
    a, b = (rng.randrange(10 ** (n - 1) if n > 1 else 0, 10**n) for n in (longer, shorter))
    return (a, b) if rng.random() < 0.5 else (b, a)


def distinct_problems(count: int) -> list[tuple[int, int]]:
    """Problems of which no two are the same sum, either way round."""
    rng, found = random.Random("held out"), {}
    while len(found) < count:
        a, b = random_problem(rng)
        found.setdefault((min(a, b), max(a, b)), (a, b))
    return list(found.values())


HELD_OUT_PROBLEMS = distinct_problems(HELD_OUT)
_HELD_OUT_SUMS = frozenset((min(problem), max(problem)) for problem in HELD_OUT_PROBLEMS)


def training_problem(rng: random.Random) -> tuple[int, int]:
    """A problem that isn't held out, nor its twin b + a."""
    while True:
        a, b = random_problem(rng)
        if (min(a, b), max(a, b)) not in _HELD_OUT_SUMS:
            return a, b


def written(a: int, b: int, key: str) -> Shown:
    return (f"{a}+{b}=",)


def drawn(a: int, b: int, key: str) -> Shown:
    return f"{IMAGE}=", picture(a, b, key)


class Addition:
    """The problems as a data.Source, drawn if the model has a reader of images."""

    def __init__(
        self, seed: int, encode: Callable[..., list[int]], reader: ImageReader | None = None
    ):
        """encode: of a text and the images in it."""
        self._seed, self._encode, self._reader = seed, encode, reader
        self.held_out = [self._prompt(*problem, HELD_OUT_KEY) for problem in HELD_OUT_PROBLEMS]

    def training(self, prompt_id: int) -> Prompt:
        key = f"problem {self._seed} {prompt_id}"
        return self._prompt(*training_problem(random.Random(key)), key)

    def _prompt(self, a: int, b: int, key: str) -> Prompt:
        question, *pictures = (drawn if self._reader else written)(a, b, key)
        images = tuple(self._reader.read(partial(bytes, png), "a drawing") for png in pictures)
        return Prompt(self._encode(question, images), question, str(a + b), lambda: images)


def columns(a: int, b: int) -> Iterator[tuple[int, int, int, int]]:
    """(digit of a, digit of b, carry in, their sum) from the right, padded with zeros."""
    carry = 0
    for position in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**position % 10, b // 10**position % 10
        total = x + y + carry
        yield x, y, carry, total
        carry = total // 10


def shown_work(a: int, b: int) -> str:
    """57 + 68 -> `7+8+0=15;5+6+1=12;>125`."""
    shown = (f"{x}+{y}+{carry}={total:02d};" for x, y, carry, total in columns(a, b))
    return "".join(shown) + f">{a + b}"


# ---------------------------------------------------------------- the judge: 57+68=>125? -> 7+8+0=15:5. ... Y


def addition_answer(text: str) -> str | None:
    """What follows the last '>', up to 12 characters: `7+8+0=15;5+6+1=12;>125` -> `125`."""
    return text.rsplit(">", 1)[1][:12] if ">" in text else None


def addition_prompt(question: str, answer: str) -> str:
    """`57+68=` and `125` -> `57+68=>125?`. The judge sees the final answer only, not the working.

    A judge of drawn numbers has the picture, too: `<image>=>125?`.
    """
    return f"{question}>{answer}?"


def addition_parse(text: str) -> bool | None:
    """Y or N at the very end. A Y after an `x`, a digit that the judge flagged as wrong, is a reject."""
    if text[-1:] not in ("Y", "N"):
        return None
    return text[-1] == "Y" and "x" not in text


FORMATS["addition"] = JudgeFormat(
    addition_answer, addition_prompt, addition_parse, min_logprob=-0.36
)
FORMATS["addition_score"] = JudgeFormat(addition_answer, None, full_response=True, scores=True)
