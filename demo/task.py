"""The demo's task: `57+68=`, answered `>125` or, better, with the work shown: `7+8+0=15;5+6+1=12;>125`.

A vision model gets the numbers as a picture, with the question `<image>=`, or as a clip: `<video>=`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from genrm import FORMATS, JudgeFormat
from inputs.tokenization import Media, Reader
from runtime.hooks import needed
from sample import Image, Prompt

# digits of the longer summand -> relative frequency
DIGITS = {1: 3.0, 2: 4.0, 3: 4.0, 4: 3.0, 5: 2.5, 6: 2.0}
HELD_OUT = 200  # problems; they don't depend on the seed, so runs are compared on the same ones
HELD_OUT_KEY = "held out"  # key for their pictures and clips


def random_problem(rng: random.Random) -> tuple[int, int]:
    """Draw two summands of 1 to 6 digits; at least six in ten pairs have the same length."""
    longer = rng.choices(list(DIGITS), list(DIGITS.values()))[0]
    shorter = longer if rng.random() < 0.6 else rng.randint(1, longer)
    a, b = (rng.randrange(10 ** (n - 1) if n > 1 else 0, 10**n) for n in (longer, shorter))
    return (a, b) if rng.random() < 0.5 else (b, a)


def distinct_problems(count: int) -> dict[frozenset[int], tuple[int, int]]:
    """Draw problems, keyed by their summands: a + b and b + a count as the same."""
    rng = random.Random("held out")
    found = {}
    while len(found) < count:
        problem = random_problem(rng)
        found.setdefault(frozenset(problem), problem)
    return found


_HELD_OUT = distinct_problems(HELD_OUT)
HELD_OUT_PROBLEMS = list(_HELD_OUT.values())


def training_problem(rng: random.Random) -> tuple[int, int]:
    """Draw a problem; neither it nor its twin b + a is held out."""
    problem = random_problem(rng)
    while frozenset(problem) in _HELD_OUT:
        problem = random_problem(rng)
    return problem


class Shown(NamedTuple):
    """A problem as shown to a model: a text, and the files for its placeholders."""

    text: str
    media: Media

    def read(self, reader: Reader | None) -> tuple[str, tuple[Image, ...]]:
        """Return the text with an IMAGE for each image, and the images: a clip is several."""
        if reader is None:
            return self.text, ()
        return reader.fill(self.text, self.media, "a problem of the demo")


Show = Callable[[int, int, str], Shown]  # takes two summands, and a key that decides how they look


def written(a: int, b: int, key: str) -> Shown:
    return Shown(f"{a}+{b}=", {})


@dataclass
class Addition:
    """The problems as a data.Source: as text, or for a model with an image reader in the preset's form."""

    seed: int
    encode: Callable[..., list[int]]  # takes a text and the images in it
    reader: Reader | None = None
    preset: str = "images"

    def __post_init__(self):
        self._show: Show = written
        if self.reader:
            self._show = partial(needed("demo_media", f"--preset {self.preset}"), self.preset)
        self.held_out = HeldOut(self)

    def training(self, prompt_id: int) -> Prompt:
        key = f"problem {self.seed} {prompt_id}"
        return self.prompt(*training_problem(random.Random(key)), key)

    def prompt(self, a: int, b: int, key: str) -> Prompt:
        question, images = self._show(a, b, key).read(self.reader)
        return Prompt(self.encode(question, images), question, str(a + b), images)


@dataclass
class HeldOut(Sequence[Prompt]):
    """The held-out problems, each made when it is accessed."""

    source: Addition

    def __len__(self) -> int:
        return len(HELD_OUT_PROBLEMS)

    def __getitem__(self, number: int) -> Prompt:
        return self.source.prompt(*HELD_OUT_PROBLEMS[number], HELD_OUT_KEY)


def columns(a: int, b: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (digit of a, digit of b, carry in, their sum) from the right, padded with zeros."""
    carry = 0
    for position in range(max(len(str(a)), len(str(b)))):
        x = a // 10**position % 10
        y = b // 10**position % 10
        total = x + y + carry
        yield x, y, carry, total
        carry = total // 10


def shown_work(a: int, b: int) -> str:
    """Return the work of 57 + 68 as `7+8+0=15;5+6+1=12;>125`."""
    shown = (f"{x}+{y}+{carry}={total:02d};" for x, y, carry, total in columns(a, b))
    return "".join(shown) + f">{a + b}"


# ---------------------------------------------------------------- the judge: 57+68=>125? -> 7+8+0=15:5. ... Y


def addition_answer(text: str) -> str | None:
    """Return up to 12 characters after the last '>': `7+8+0=15;5+6+1=12;>125` -> `125`."""
    return text.rsplit(">", 1)[1][:12] if ">" in text else None


def addition_prompt(question: str, answer: str) -> str:
    """Return `57+68=>125?`, or `<image>=>125?` with a picture. The judge doesn't see the answer's work."""
    return f"{question}>{answer}?"


def addition_parse(text: str) -> bool | None:
    """Read the Y or N at the very end. A Y after an `x`, which flags a digit as wrong, is a rejection."""
    if text[-1:] not in ("Y", "N"):
        return None
    return text[-1] == "Y" and "x" not in text


CRITIC = JudgeFormat(addition_answer, addition_prompt, addition_parse, min_logprob=-0.36)
FORMATS["addition"] = CRITIC


def example_rows(seed: int, count: int = 2048) -> list[dict]:
    """Return examples for a warm start: problems with their answers, the work shown."""
    rng = random.Random(f"sft {seed}")
    problems = [training_problem(rng) for _ in range(count)]
    return [{"prompt": f"{a}+{b}=", "response": shown_work(a, b)} for a, b in problems]
