"""The demo's texts, without training: shown work, critiques, slips, the character tokenizer, batches."""

import random
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data
from config import parse_config
from recipes.addition import critiques, models, task, warmstart

SUMMAND = st.integers(0, 6).flatmap(lambda digits: st.integers(0, max(0, 10**digits - 1)))
DIGITS = st.text(alphabet="0123456789", max_size=12)
CONFIG = parse_config([])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "new"
    models.new_model(path, 0)
    return str(path)


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return data.load_tokenizer(model_dir)


# ---------------------------------------------------------------- shown work


@pytest.mark.parametrize(
    "a,b,work",
    [
        (57, 68, "7+8+0=15;5+6+1=12;>125"),
        (0, 0, "0+0+0=00;>0"),
        (9, 1, "9+1+0=10;>10"),
        (5, 123, "5+3+0=08;0+2+0=02;0+1+0=01;>128"),
        (999, 1, "9+1+0=10;9+0+1=10;9+0+1=10;>1000"),
    ],
)
def test_shown_work(a, b, work):
    assert task.shown_work(a, b) == work


@settings(deadline=None)
@given(SUMMAND, SUMMAND)
def test_shown_work_adds_up(a, b):
    """Each column's sum is right, its carry is the next one's, the digits are the answer's; it fits."""
    text = task.shown_work(a, b)
    *steps, last = text.split(";")
    assert last == f">{a + b}" == ">" + task.addition_answer(text)
    carry, digits = 0, ""
    for position, step in enumerate(steps):
        left, total = step.split("=")
        x, y, carried = map(int, left.split("+"))
        assert (x, y, carried) == (a // 10**position % 10, b // 10**position % 10, carry)
        assert int(total) == x + y + carried and len(total) == 2
        carry, digits = int(total) // 10, total[1] + digits
    assert int(f"{carry}{digits}") == a + b
    assert len(text) + 1 <= CONFIG.max_new_tokens  # one token a character, and the end


# ---------------------------------------------------------------- critiques


@pytest.mark.parametrize(
    "a,b,answer,text",
    [
        (57, 68, "125", "7+8+0=15:5.5+6+1=12:2.1:1.Y"),
        (57, 68, "135", "7+8+0=15:5.5+6+1=12:3x1:1.N"),
        (57, 68, "25", "7+8+0=15:5.5+6+1=12:2.1:xN"),
        (57, 68, "5", "7+8+0=15:5.5+6+1=12:-x1:xN"),
        (57, 68, "1125", "7+8+0=15:5.5+6+1=12:2.1:11xN"),
        (12, 5, "17", "2+5+0=07:7.1+0+0=01:1.0:.Y"),
        (12, 5, "017", "2+5+0=07:7.1+0+0=01:1.0:0xN"),
        (12, 5, "", "N"),
        (12, 5, "1a", "N"),
        (12, 5, "12345678901", "N"),
    ],
)
def test_critique(a, b, answer, text):
    assert critiques.critique(a, b, answer) == text


@settings(deadline=None, max_examples=400)
@given(a=SUMMAND, b=SUMMAND, answer=DIGITS | st.text(max_size=12), honest=st.booleans())
def test_the_verdict_is_the_truth(a, b, answer, honest):
    """Y for the sum as Python writes it and nothing else; a wrong digit is flagged; it fits."""
    answer = str(a + b) if honest else answer
    text = critiques.critique(a, b, answer)
    assert text.endswith("Y") == (answer == str(a + b))
    assert task.addition_parse(text) is (answer == str(a + b))
    assert text == "N" or ("x" in text) == text.endswith("N")
    assert len(text) + 1 <= CONFIG.judge_max_new_tokens
    assert (
        len(task.addition_prompt(f"{a}+{b}=", answer)) + 1 + CONFIG.judge_max_new_tokens
        <= CONFIG.max_model_len
    )


@settings(deadline=None)
@given(a=SUMMAND, b=SUMMAND, answer=st.text(alphabet="0123456789", min_size=1, max_size=10))
def test_the_critique_recomputes_before_it_looks(a, b, answer):
    """What is left of the claimed digits in each column doesn't depend on the claim."""
    width = len("7+8+0=15")

    def recomputed(text):
        columns = max(len(str(a)), len(str(b)))
        return [text[i * (width + 3) :][:width] for i in range(columns)]

    assert recomputed(critiques.critique(a, b, answer)) == recomputed(
        critiques.critique(a, b, str(a + b))
    )


# ---------------------------------------------------------------- slips


@settings(deadline=None)
@given(a=SUMMAND, b=SUMMAND, seed=st.integers(0, 10**6))
def test_slips_are_short_and_writable(a, b, seed):
    """Every slip, on any problem: characters that the tokenizer has, short enough for the judge."""
    for kind in critiques.SLIPS:
        answer = critiques.slip(kind, random.Random(seed), a, b)
        assert len(answer) <= 12 and set(answer) <= set(models.ALPHABET)
    answer = critiques.corrupted(random.Random(seed), a, b)
    assert len(answer) <= 12 and set(answer) <= set(models.ALPHABET)


def test_slip_weights_are_a_whole():
    assert sum(critiques.SLIPS.values()) == pytest.approx(1)


MISSES = (
    1.0,
    0.85,
    0.9,
    1.0,
    0.6,
    0.2,
    0.9,
    0.8,
    0.99,
)  # a carry can only be lost where there is one


@pytest.mark.parametrize("kind,wrong", list(zip(critiques.SLIPS, MISSES, strict=True)))
def test_slips_are_mostly_wrong(kind, wrong):
    """On at least this part of 2,000 training problems a slip misses the sum."""
    rng = random.Random(0)
    problems = [task.training_problem(rng) for _ in range(2000)]
    missed = [critiques.slip(kind, rng, a, b) != str(a + b) for a, b in problems]
    assert sum(missed) / 2000 >= wrong


def test_corrupted_answers_are_mostly_wrong_and_of_every_kind():
    rng = random.Random(0)
    problems = [task.training_problem(rng) for _ in range(5000)]
    answers = [(a, b, critiques.corrupted(rng, a, b)) for a, b in problems]
    wrong = [(a, b, answer) for a, b, answer in answers if answer != str(a + b)]
    assert 0.9 < len(wrong) / 5000 < 1
    lengths = [len(answer) - len(str(a + b)) for a, b, answer in wrong]
    assert (
        all(lengths.count(off) / len(wrong) > 0.01 for off in (-2, -1, 1, 2))
        and lengths.count(0) / len(wrong) > 0.5
    )
    assert any(not answer.isdigit() for _, _, answer in wrong)
    long = [(str(a + b), answer) for a, b, answer in wrong if len(answer) == len(str(a + b)) > 3]
    shared = [sum(x == y for x, y in zip(*pair, strict=True)) / len(pair[0]) for pair in long]
    assert (
        sum(part < 0.3 for part in shared) / len(shared) > 0.1
    )  # a claim that says nothing about the sum


@pytest.mark.parametrize(
    "slip,a,b,answers",
    [
        ("one digit off", 4, 3, {"6", "8"}),
        ("one digit off", 0, 9, {"0", "8"}),
        ("swapped digits", 10, 2, {"21"}),
        ("lost carry", 57, 68, {"115", "25"}),
        ("cut short", 57, 68, {"", "1", "12", "5", "25"}),
        ("a summand", 57, 68, {"57", "68"}),
    ],
)
def test_slips_by_hand(slip, a, b, answers):
    """All that can come of a problem."""
    assert {critiques.slip(slip, random.Random(seed), a, b) for seed in range(100)} == answers


# ---------------------------------------------------------------- tokenizer and model


@settings(deadline=None)
@given(text=st.text(alphabet=models.ALPHABET, max_size=80))
def test_the_tokenizer_gives_the_text_back(tokenizer, text):
    """One token a character, behind <bos>; special tokens stay out of the text."""
    tokens = data.encode(tokenizer, text)
    assert len(tokens) == len(text) + 1 and tokens[0] == tokenizer.bos_token_id
    assert data.decode(tokenizer, tokens) == text
    prompt, response = data.encode_pair(tokenizer, text, text)
    assert prompt == tokens and response == [*tokens[1:], tokenizer.eos_token_id]
    assert max(tokens) < models.VOCAB


def test_every_character_has_a_token_of_its_own(tokenizer):
    tokens = tokenizer(models.ALPHABET, add_special_tokens=False)["input_ids"]
    assert len(set(tokens)) == len(set(models.ALPHABET))
    assert data.stop_tokens("nowhere", tokenizer) == (tokenizer.eos_token_id,)


def test_prompt_and_response_meet_as_they_will_in_the_run(tokenizer):
    """The tokens that an engine is asked with and those of a demonstration are one text's tokens."""
    prompt, response = data.encode_pair(tokenizer, *warmstart.demonstrations(0, 0)[0])
    text = data.decode(tokenizer, prompt + response)
    assert [*data.encode(tokenizer, text), tokenizer.eos_token_id] == prompt + response


def test_the_model_follows_from_the_seed(model_dir, tmp_path):
    """366k parameters in a plain Hugging Face directory; the same seed gives the same bytes."""
    from safetensors.torch import load_file

    models.new_model(tmp_path / "again", 0)
    models.new_model(tmp_path / "other", 1)
    first, again, other = (
        load_file(f"{path}/model.safetensors")
        for path in (model_dir, tmp_path / "again", tmp_path / "other")
    )
    assert sum(tensor.numel() for tensor in first.values()) == pytest.approx(366_000, rel=0.01)
    assert all((first[name] == again[name]).all() for name in first)
    assert any((first[name] != other[name]).any() for name in first)


# ---------------------------------------------------------------- batches


def test_demonstrations_are_right_and_mostly_blurted():
    """The same on every rank; no held-out problem; each answer is the sum."""
    batch = partial(warmstart.demonstrations, 0)
    assert batch(3) == batch(3) != batch(4)
    texts = [pair for step in range(8) for pair in batch(step)]
    held_out = {f"{a}+{b}=" for a, b in task.HELD_OUT_PROBLEMS}
    for question, response in texts:
        a, b = map(int, question.removesuffix("=").split("+"))
        assert response in (f">{a + b}", task.shown_work(a, b)) and question not in held_out
    blurted = sum(response.startswith(">") for _, response in texts) / len(texts)
    assert abs(blurted - warmstart.RECIPE["actor"]["blurt"]) < 0.05


def test_critiques_are_right_and_of_three_kinds():
    """The same on every rank; verdicts are the truth; half of the claims are right, a fifth of the pool."""
    pool = [(1, 1, "3"), (2, 2, "5")]
    batch = partial(warmstart.critiques, 0, pool)
    assert batch(3) == batch(3) != batch(4)
    items = [pair for step in range(20) for pair in batch(step)]
    right = 0
    for asked, written in items:
        question, answer = asked.removesuffix("?").split("=>", 1)
        a, b = map(int, question.split("+"))
        assert written == critiques.critique(a, b, answer)
        right += written.endswith("Y")
    assert 0.47 < right / len(items) < 0.57  # a corrupted answer may come out right
    assert abs(sum(asked in ("1+1=>3?", "2+2=>5?") for asked, _ in items) / len(items) - 0.2) < 0.03


class Alone:
    """A world of one."""

    async def broadcast(self, value):
        return value

    async def run(self, function, *args):
        return function(*args)


def test_a_cached_recipe_is_not_made_again(tmp_path, monkeypatch):
    """Found by seed and recipe, and only when it is whole: the gate's file is its last."""
    import asyncio

    made = []
    monkeypatch.setattr(warmstart, "CACHE", tmp_path)
    monkeypatch.setattr(
        warmstart, "make", lambda config, world, home, progress, demo: made.append(home)
    )

    def prepare(seed):
        return asyncio.run(
            warmstart.prepare(SimpleNamespace(seed=seed, preset="tiny"), Alone(), None)
        )

    actor, judge = prepare(0)
    assert (
        (actor.name, judge.name) == ("actor", "judge")
        and actor.parent == judge.parent == made[0]
        and made[0].parent == tmp_path
    )
    judge.mkdir(parents=True)
    assert prepare(0) == (actor, judge) and len(made) == 2
    (judge / "gate.json").write_text("{}")
    assert prepare(0) == (actor, judge) and len(made) == 2
    assert prepare(1)[0] != actor and len(made) == 3
    monkeypatch.setitem(warmstart.RECIPE, "muon_lr", 0.03)
    assert prepare(0)[0] != actor and len(made) == 4
