"""Numbers in texts: the last one of an answer, and an answer key that is one plain number."""

import re
from decimal import Decimal

# commas stand between thousands, also as \, and {,} of LaTeX and narrow spaces; 3/4 is one number
DIGITS = (
    r"((?:\d{1,3}(?:(?:\{?\\?,(?:\\!)?\}?|[_\u00a0\u2009\u202f])\d{3})+(?!\d)"
    r"|\d+|(?<![\w.])(?=\.\d))(?:\.\d+)?)"
    r"([eE][+-]?\d+)?(/[0-9]+)?"
)
# a minus behind an operand is an operator, as in 10-3
NUMBER = re.compile(r"(?:(?<![\w)\]}%])(-))?\\?[$€£]?" + DIGITS)
# -¥5 is none: an answer's minus would be lost
KEY = re.compile(r"([+-]?[$€£]?|[$€£¥₹][+-]?)" + DIGITS)
SIGNS = dict.fromkeys(map(ord, "−–‑－"), "-") | {ord("⁄"): "/"}  # written for a minus, for a slash


def number_answer(text: str) -> str | None:
    """The last number, in digits that are the same however it is written: -$1,234.50 is -1234.5, 7.0 is 7."""
    found = NUMBER.findall(text.translate(SIGNS))
    return normal(*found[-1]) if found else None


def number_key(text: str) -> str | None:
    """Read a key that is one plain number, maybe behind a sign and a currency: -$1,234.50, 3/4, 1e-5."""
    found = KEY.fullmatch(text.translate(SIGNS).strip())
    return normal(*found.groups("")) if found else None


def normal(before: str, digits: str, exponent: str, divisor: str) -> str | None:
    """Write the parts of a number in one way. None for an exponent that would fill pages with zeros."""
    if len(exponent) > 5:
        return None
    number = format(Decimal(re.sub(r"[^\d.]", "", digits) + exponent), "f")
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    number += divisor
    return f"-{number}" if "-" in before and number != "0" else number
