"""Wrong answers with the slips that people make. The judge learns from them and is measured on them."""

import random

from demo.task import columns


def corrupted(rng: random.Random, a: int, b: int) -> str:
    """Make an answer that is usually wrong: three times in ten mostly random digits, else one of SLIPS."""
    digits = list(str(a + b))
    # the claimed digit then doesn't reveal the true one, so the judge can't copy it
    if rng.random() < 0.3:
        keep = rng.random() / 2
        digits = [digit if rng.random() < keep else str(rng.randrange(10)) for digit in digits]
        return "".join(["1" if digits[0] == "0" else digits[0], *digits[1:]])
    (kind,) = rng.choices(list(SLIPS), list(SLIPS.values()))
    return slip(kind, rng, a, b)


SLIPS = {  # kind of wrong answer -> its probability
    "one digit off": 0.35,
    "random digits": 0.17,
    "digit added or lost": 0.14,
    "extra leading digits": 0.06,
    "swapped digits": 0.05,
    "lost carry": 0.09,
    "cut short": 0.08,
    "a summand": 0.02,
    "gibberish": 0.04,
}


def slip(kind: str, rng: random.Random, a: int, b: int) -> str:
    """Make an answer with a slip of this kind. Chance may make it right."""
    digits = list(str(a + b))
    match kind:
        case "one digit off":
            i = rng.randrange(len(digits))
            digits[i] = str((int(digits[i]) + rng.choice([1, 9])) % 10)
        case "random digits":
            for _ in range(rng.choice([1, 1, 1, 2, 3])):
                digits[rng.randrange(len(digits))] = str(rng.randrange(10))
        case "digit added or lost":
            i = rng.randrange(len(digits))
            digits[i : i + 1] = [digits[i], str(rng.randrange(10))] if rng.random() < 0.57 else []
        case "extra leading digits":
            extra = ["1", "1", "10", str(rng.randrange(1, 10)), str(rng.randrange(10, 100))]
            digits.insert(0, rng.choice(extra))
        case "swapped digits" if len(digits) > 1:
            i = rng.randrange(len(digits) - 1)
            digits[i], digits[i + 1] = digits[i + 1], digits[i]
        case "lost carry":
            digits = []
            carry = 0
            lost = rng.randrange(max(len(str(a)), len(str(b))))
            for position, (x, y, _, _) in enumerate(columns(a, b)):
                total = x + y + carry
                carry = 0 if position == lost else total // 10
                digits.insert(0, str(total % 10))
            digits[:0] = ["1"] * carry
        case "cut short":
            keep = rng.randrange(len(digits))
            digits = digits[:keep] if rng.random() < 0.5 else digits[len(digits) - keep :]
        case "a summand":
            return str(rng.choice([a, b]))
        case "gibberish":
            return "".join(rng.choice("0123456789;+=>") for _ in range(rng.randint(0, 10)))
    return "".join(digits)
