"""A calculator: an environment that answers the policy, for sums too large for the model alone.

torchrun --nproc-per-node 2 run.py --preset tiny --model demo/models/calculator/actor \
    --data examples/my_sums.jsonl --environment examples/my_environment.py --judge-format addition --steps 10

A turn that ends with ? is a question, `73920415+80012377?`. The reply is the number, and the policy goes on.
Any other turn is the answer, `>153932792`. examples/make_demo/calculator.py made the model and the sums.
"""

import re
from math import prod

from extras.environment import Step


class Environment:
    """One episode: one problem."""

    def __init__(self, sample, *, seed):
        self.right = f">{sample.answer_key}"

    def step(self, text):
        """Answer a question, or end the episode with the reward: 1 for the right answer."""
        if not text.endswith("?"):
            return float(text == self.right)
        number = calculate(text[:-1])
        reply = "no" if number is None else str(number)
        return Step(reply, metrics={"refused_frac": float(reply == "no")})


def calculate(text):
    """Return 14 for `2+3*4`; None unless the text is numbers with + - * between. Never runs it as code."""
    if not re.fullmatch("[0-9]{1,15}([-+*][0-9]{1,15}){0,9}", text):
        return None
    terms = re.findall("([-+]?)([0-9*]+)", text)
    return sum(int(f"{sign}1") * prod(map(int, term.split("*"))) for sign, term in terms)
