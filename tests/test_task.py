"""The demo's task: its problems, and how its judge is spoken to."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genrm import FORMATS
from recipes.addition import task

TEXT = st.text(alphabet="0123456789>#{}\\boxed \nx+=;:.YNverdict", max_size=40)


def characters(prompt, images=()):
    """Stands in for a tokenizer: the code of every character."""
    return [ord(c) for c in prompt]


# ---------------------------------------------------------------- the problems


def test_held_out_problems_are_never_drawn():
    source = task.Addition(0, characters)
    held_out = {prompt.question for prompt in source.held_out}
    questions = {source.training(draw).question for draw in range(20_000)}
    twins = {"{1}+{0}=".format(*question.removesuffix("=").split("+")) for question in held_out}
    assert not (held_out | twins) & questions
    distinct = {tuple(sorted(problem)) for problem in task.HELD_OUT_PROBLEMS}
    assert len(distinct) == len(held_out) == task.HELD_OUT
    assert len(questions) > 10_000


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), draw=st.integers(0, 10**9))
def test_a_problem_follows_from_seed_and_draw(seed, draw):
    """The same on every rank, whatever was drawn before; the key is the sum; one to six digits."""
    prompt = task.Addition(seed, characters).training(draw)
    assert prompt == task.Addition(seed, characters).training(draw)
    a, b = prompt.question.removesuffix("=").split("+")
    assert prompt.answer_key == str(int(a) + int(b)) and prompt.tokens == characters(
        prompt.question
    )
    assert 1 <= min(len(a), len(b)) <= max(len(a), len(b)) <= 6
    assert (a, b) == (str(int(a)), str(int(b)))


def test_seeds_draw_other_problems_but_hold_out_the_same():
    first, second = task.Addition(0, characters), task.Addition(1, characters)
    assert first.held_out == second.held_out
    assert [first.training(i) for i in range(20)] != [second.training(i) for i in range(20)]


def test_lengths_occur_as_often_as_said():
    """The longer summand's digits, within 2 points of the table; six in ten pairs or more are as long."""
    rng = random.Random(0)
    problems = [task.random_problem(rng) for _ in range(20_000)]
    longest = Counter(max(len(str(a)), len(str(b))) for a, b in problems)
    for digits, weight in task.DIGITS.items():
        assert abs(longest[digits] / 20_000 - weight / sum(task.DIGITS.values())) < 0.02
    assert 0.6 < sum(len(str(a)) == len(str(b)) for a, b in problems) / 20_000 < 0.8


# ---------------------------------------------------------------- the judge's format


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


def test_the_rows_are_known_to_the_judges():
    assert (
        FORMATS["addition"].parse is task.addition_parse
        and FORMATS["addition"].final_answer(">7") == "7"
    )
    assert FORMATS["addition_score"].scores and FORMATS["addition_score"].final_answer(">7") == "7"
