"""The addition task's judge: what it is asked, and how its text is read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.addition import task

TEXT = st.text(alphabet="0123456789>xY N.:+=;", max_size=40)


@pytest.mark.parametrize(
    "text,answer",
    [
        ("7+8+0=15;5+6+1=12;>125", "125"),
        (">125", "125"),
        (">1>2>3", "3"),
        (">", ""),
        (">>", ""),
        ("125", None),
        ("", None),
        (">1234567890123", "123456789012"),
        (">12 3\n", "12 3\n"),
    ],
)
def test_addition_answer(text, answer):
    """What follows the last '>', 12 characters at most."""
    assert task.addition_answer(text) == answer


def test_addition_prompt():
    assert task.addition_prompt("57+68=", "125") == "57+68=>125?"


@pytest.mark.parametrize(
    "text,verdict",
    [
        ("7+8+0=15:5.5+6+1=12:2.1:1.Y", True),
        ("7+8+0=15:5.5+6+1=12:3x1:1.N", False),
        ("7+8+0=15:5.5+6+1=12:3x1:1.Y", False),  # contradicts its own critique
        ("7+8+0=15:5.5+6+1=12:2.1:1.N", False),
        ("Y", True),
        ("N", False),
        ("xY", False),
        ("", None),
        ("7+8+0=15:5.", None),
        ("Y ", None),
        ("YES", None),
        ("y", None),
        ("NY", True),
    ],
)
def test_addition_parse(text, verdict):
    """Y or N at the very end, anything else is no verdict."""
    assert task.addition_parse(text) is verdict


@given(TEXT)
def test_an_accept_never_contradicts_its_critique(text):
    """True needs a final Y and no flagged digit, False a final letter; nothing raises."""
    verdict = task.addition_parse(text)
    assert (verdict is None) == (not text.endswith(("Y", "N")))
    assert verdict is not True or (text.endswith("Y") and "x" not in text)
