"""The last number of a text, and keys that are one number."""

from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from inputs.numbers import KEY, number_answer, number_key

NUMBERS = {  # text -> its last number
    "3 + 4 = 7": "7",
    "1,234,56": "56",
    "-$3": "-3",
    "\u22123": "-3",  # MINUS SIGN
    "- 3": "3",  # a list item
    "\u2212\u202f3": "-3",  # typeset, with a NARROW NO-BREAK SPACE
    "10-3": "3",  # an operator, or a range
    "(5)-3": "3",
    "3/4": "3/4",
    "6 / 8": "6/8",
    r"$\boxed{\frac{3}{4}}$": "3/4",
    r"-\dfrac{12}{5}": "-12/5",
    r"\frac34": "3/4",
    r"\frac{x}{4}": "4",
    "2 2/3": None,  # neither 2 nor 2/3
    r"2\frac{2}{3}": None,
    r"1.2 \times 10^{5}": "120000",
    "-3×10^-2 m": "-0.03",
    "3 * 10^2 = 300": "300",
    r"$\boxed{-\$18}$": "-18",
    "9" * 5000: "9" * 5000,  # int() takes 4300 digits
    "": None,
    "\u00bd": None,  # one half
    "-, $. and ./": None,
    "-0.0": "0",
    "007.50": "7.5",
    r"10,\!080": "10080",  # LaTeX
    "10{,}080": "10080",
    r"10\,080": "10080",
    "1_000": "1000",
    "1\u202f000": "1000",  # NARROW NO-BREAK SPACE
    "1e-5": "0.00001",
    "-1.5E3": "-1500",
    "1e\u22122 m": "0.01",
    "1e400": "1" + "0" * 400,
    "1e99999999999": None,
    "\uff11\uff12": "12",  # FULLWIDTH DIGITS
}


def test_the_last_number_of_a_text():
    """By hand: 3/4 is one number, neither 4 nor 0.75; of dates, times and powers the last counts."""
    assert {text: number_answer(text) for text in NUMBERS} == NUMBERS


KEYS = {text: text for text in ("3/4", "0", "7", "-3", "0.5")}  # text -> the only number in it
KEYS |= dict.fromkeys(("72", " 72\n", "+72", "72.0", "$72.00", "+£72", "072", "¥72", "7.2e1"), "72")
KEYS |= dict.fromkeys((r"10,\!080", "10{,}080", "10,080", "1.008e4"), "10080")
KEYS |= dict.fromkeys((r"\frac{3}{5}", r"\tfrac35", "3 / 5"), "3/5")
KEYS |= dict.fromkeys(
    ("-.5", "\u2212.5", "\u20130.50", "-5e-1", "-$0.5", "$-0.50", "₹-.5", "\u2212\u202f.5"), "-0.5"
)
NO_KEYS = r"""2024-01-05|1.234,50|3, 5|3 or 5|[3]|(3)|3-5|3=3|1:30|3x|3i|3!|3\pi|3^x|3^2|3²|3½|½
1 1/2|0x10|1'234|1 000|1,00,000|1.2.3|3 million|about 3|x = 3|three|1e99999999999|3 apples|3%|3cm|3 m²|3.|3$
$3$|\$3|3\%|3\text{ cm}|90^\circ|3 €|+-3|--3|$$3|$|-|- 3|-¥3|3/|3/4/5|""".replace("\n", "|").split(
    "|"
)


def test_a_key_is_one_plain_number():
    """A sign and a currency may precede it; a text with more, even only a unit, is no key."""
    assert {text: number_key(text) for text in KEYS} == KEYS
    assert {text: number_key(text) for text in NO_KEYS} == dict.fromkeys(NO_KEYS)


@given(st.from_regex(KEY, fullmatch=True))
def test_a_key_that_is_written_as_an_answer_is_right(text):
    assert number_key(text) in (None, number_answer(text))


# with a Decimal's exponent, without, with thousands separators, and as money
WRITTEN = ("{:f}", "{:e}", "{:E}", "{:,f}", "+{:f}", "${:,f}", "{:.3e}")
SENTENCES = ["{}", "It is {}.", "2 + 3: {}", "**{}**", "(-1, {})", "**Answer:** {}\n"]

NUMBER = st.decimals(-(10**40), 10**40, allow_nan=False)


@given(NUMBER, st.sampled_from(WRITTEN), st.sampled_from(SENTENCES))
def test_a_key_and_an_answer_agree_however_they_are_written(number, form, sentence):
    """They must be one text, without exponent, commas or trailing zeros; it reads as itself."""
    number = Decimal(f"{number:.3e}") if "3e" in form else number
    written = form.format(number)
    if "+" in form:
        written = written.replace("+-", "-")
    found = number_answer(written)
    assert number_key(written) == found == number_key(found)
    assert Decimal(found) == Decimal(number) and "E" not in found.upper() and "," not in found
    assert "." not in found or found[-1] != "0"
    others = [written.replace(",", r",\!"), written.replace("-", "\u2212")]
    others.append(sentence.format(written))
    assert {*map(number_answer, others)} == {found}
