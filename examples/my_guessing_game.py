"""A guessing game: seq -f '{"prompt": "game %g: "}' 500 > game.jsonl, and --environment of this file."""

import random
import re

from extras.environment import Step


class Environment:
    def __init__(self, sample, *, seed):  # all answers of a group have the same seed
        self.number = random.Random(seed).randrange(100)
        self.missed_by = 100

    def step(self, text):  # a guess is the last number of the turn; a hint costs a little
        guesses = re.findall("[0-9]{1,9}", text)
        if not guesses:
            return None
        guess = int(guesses[-1])
        self.missed_by = abs(guess - self.number)
        hint = "lower" if guess > self.number else "higher"
        return Step(hint, reward=-0.02, done=guess == self.number)

    def score(self):  # also if --max-new-tokens ended the episode
        return 1.0 - min(self.missed_by, 100) / 100
