"""An endless random order of rows, with some prompts held out."""

import json
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Any

from inputs.rows import Text, as_turns


class Shuffled:
    """Rows without end, reshuffled every epoch; at most a tenth are held out. The seed decides everything.

    prompts: one per row, by default the rows; a prompt is held out with all its rows, and one of them
    measures it. keyless: numbers of rows that can't measure.
    """

    def __init__(self, rows: Sequence, seed: int, held_out=0, name="epoch", prompts=(), keyless=()):
        prompts = prompts or (rows if held_out else range(len(rows)))
        counts = Counter(prompts)
        room = len(rows) // 10
        aside = {}  # prompt -> number of the row that measures
        for number in _shuffled(len(rows), f"held out {seed}"):
            prompt = prompts[number]
            fits = len(aside) < held_out and counts[prompt] <= room
            if fits and number not in keyless and prompt not in aside:
                aside[prompt] = number
                room -= counts[prompt]
        self.held_out = list(aside.values())  # numbers of rows
        self.repeats = len(rows) - len(counts)
        self.rows = rows
        self._others = array("q", [n for n, prompt in enumerate(prompts) if prompt not in aside])
        self.count = len(self._others)  # per epoch
        self._name = f"{name} {seed}"

    def training(self, number: int) -> Any:
        epoch, position = divmod(number, self.count)
        order = _shuffled(self.count, f"{self._name} {epoch}")
        return self.rows[self._others[order[position]]]


@lru_cache(maxsize=8)  # a carried prompt may be from the previous epoch
def _shuffled(count: int, seed: str) -> array:
    order = array("q", range(count))
    random.Random(seed).shuffle(order)
    return order


def identities(prompts: Iterable[Text], files: Callable = lambda number: ()) -> list[bytes]:
    """Digest each prompt with its `files(number)`, which are only read if other prompts have equal turns."""
    turns = (json.dumps(as_turns(prompt, "user"), sort_keys=True) for prompt in prompts)
    found = [sha256(text.encode()).digest() for text in turns]
    counts = Counter(found)
    for number, text in enumerate(found):
        media = files(number) if counts[text] > 1 else ()
        if parts := [file if isinstance(file, bytes) else file.resolve() for file in media]:
            found[number] = sha256(repr((text, parts)).encode()).digest()
    return found
