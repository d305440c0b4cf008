"""Numbers in text: the last one in an answer, and answer keys that are one plain number."""

import re
from decimal import Decimal

# thousands may be separated by commas, LaTeX's \, and {,}, or narrow spaces; 3/4 is one number
DIGITS = (
    r"((?:\d{1,3}(?:(?:\{?\\?,(?:\\!)?\}?|[_\u00a0\u2009\u202f])\d{3})+(?!\d)"
    r"|\d+|(?<![\w.])(?=\.\d))(?:\.\d+)?)"
    r"([eE][+-]?\d+)?(/[0-9]+)?"
)
# a minus after an operand is an operator, as in 10-3
NUMBER = re.compile(r"(?:(?<![\w)\]}%])(-)[\u2009\u202f]?)?\\?[$€£]?" + DIGITS)
# -¥5 isn't a key: NUMBER would lose the minus in an answer
KEY = re.compile(r"([+-]?[\u2009\u202f]?[$€£]?|[$€£¥₹][+-]?)" + DIGITS)
SIGNS = dict.fromkeys(map(ord, "−–‑－"), "-") | {ord("⁄"): "/"}  # lookalikes of minus and slash
SPELLED = {  # pattern -> plain characters
    r"(?<=\d)(?=\\[dt]?frac)": " ",  # 2\frac{1}{2} -> 2 1/2
    # \frac{3}{4}, \dfrac34 -> 3/4
    r"\\[dt]?frac ?(?:\{(-?[\d.,]+)\} ?\{(\d+)\}|(\d)(\d))": r"\1\3/\2\4",
    # 1.2 \times 10^{5} -> 1.2e5
    r"(?<=\d) ?(?:\\times|\\cdot|×|\*) ?10 ?\^ ?(?:\{([+-]?\d+)\}|([+-]?\d+))": r"e\1\2",
    r"(?<=\d) ?/ ?(?=\d)": "/",
}
MIXED = re.compile(r"\d[ \u202f]?$")  # what precedes the fraction of a mixed number


def number_answer(text: str) -> str | None:
    """Return the last number in normal form: -$1,234.50 is -1234.5, 7.0 is 7.

    None if there is none, or if it is a mixed number, 2 1/2.
    """
    text = plain(text)
    if not (found := [*NUMBER.finditer(text)]):
        return None
    before, digits, exponent, divisor = found[-1].groups("")
    if divisor and MIXED.search(text, 0, found[-1].start()):
        return None
    return normal(before, digits, exponent, divisor)


def plain(text: str) -> str:
    """Write signs, LaTeX's fractions and powers of ten in plain characters."""
    text = text.translate(SIGNS)
    for pattern, plainly in SPELLED.items():
        text = re.sub(pattern, plainly, text)
    return text


def number_key(text: str) -> str | None:
    """Return a key's number, which may follow a sign and a currency: -$1,234.50, 3/4, 1e-5. Else None."""
    found = KEY.fullmatch(plain(text).strip())
    return normal(*found.groups("")) if found else None


def normal(before: str, digits: str, exponent: str, divisor: str) -> str | None:
    """Return a number's normal form, None if its exponent is so large that it would fill pages."""
    if len(exponent) > 5:
        return None
    number = format(Decimal(re.sub(r"[^\d.]", "", digits) + exponent), "f")
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    number += divisor
    return f"-{number}" if "-" in before and number != "0" else number
