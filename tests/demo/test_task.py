"""The demo's problems, answers and slips, its judge's format, and the project's models."""

from hashlib import sha256

from hypothesis import given, settings
from hypothesis import strategies as st

from config import DEMO_MODELS, parse_config
from demo import task
from genrm import FORMATS
from inputs import tokenization
from runtime import atomic_files

SUMMAND = st.integers(0, 6).flatmap(lambda digits: st.integers(0, max(0, 10**digits - 1)))
CHARACTERS = "0123456789+-=*,;:>?|#.() abcdefghijklmnopqrstuvwxyzYNQA\n"  # the models' characters
ANSWERS = {"7+8+0=15;>125": "125", ">1>2>3": "3", ">": "", "125": None}
ANSWERS |= {">1234567890123": "123456789012"}
VERDICTS = {"7:5.1:1.Y": True, "7:3x1:1.N": False, "7:3x1:1.Y": False, "N": False, "NY": True}
VERDICTS |= {"": None, "7+8+0=15:5.": None, "Y ": None, "YES": None}
ACTORS = [str(DEMO_MODELS / name / "actor") for name in ("written", "drawn")]
TOKENIZERS = st.sampled_from([tokenization.load_tokenizer(actor) for actor in ACTORS])


def characters(prompt, images=()):
    """Stand in for a tokenizer: return the code of every character."""
    return [ord(c) for c in prompt]


def test_held_out_problems_are_never_drawn():
    """Neither they nor their twins may be, with any seed."""
    source = task.Addition(0, characters)
    held_out = {prompt.question for prompt in source.held_out}
    questions = {source.training(draw).question for draw in range(20_000)}
    twins = {"{1}+{0}=".format(*question.removesuffix("=").split("+")) for question in held_out}
    assert not (held_out | twins) & questions and len(questions) > 10_000
    distinct = {tuple(sorted(problem)) for problem in task.HELD_OUT_PROBLEMS}
    assert len(distinct) == len(held_out) == task.HELD_OUT
    assert list(task.Addition(1, characters).held_out) == list(source.held_out)


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), draw=st.integers(0, 10**9))
def test_a_problem_follows_from_seed_and_draw(seed, draw):
    """It must be the same on every rank, whatever was drawn before; the key is the sum; one to six digits."""
    prompt = task.Addition(seed, characters).training(draw)
    assert prompt == task.Addition(seed, characters).training(draw)
    assert prompt != task.Addition(seed + 1, characters).training(draw)
    a, b = prompt.question.removesuffix("=").split("+")
    assert prompt.answer_key == str(int(a) + int(b))
    assert prompt.tokens == characters(prompt.question)
    assert 1 <= min(len(a), len(b)) <= max(len(a), len(b)) <= 6


@settings(deadline=None)
@given(SUMMAND, SUMMAND)
def test_shown_work_adds_up(a, b):
    """Each column's sum must be right, its carry the next one's, and the digits the answer's; it fits."""
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
    assert int(f"{carry}{digits}") == a + b and len(steps) == max(len(str(a)), len(str(b)))
    assert len(text) + 1 <= parse_config([]).max_new_tokens  # one token per character, and the end


def test_answers_and_verdicts_by_hand():
    """An answer follows the last mark; a verdict is the last letter, unless its critique contradicts it."""
    assert {text: task.addition_answer(text) for text in ANSWERS} == ANSWERS
    assert {text: task.addition_parse(text) for text in VERDICTS} == VERDICTS


def test_how_the_judges_are_asked():
    """A critic must see only the final answer, and one that it is unsure of is a reject."""
    critic = FORMATS["addition"]
    assert critic.parse is task.addition_parse and critic.min_logprob == -0.36
    assert critic.prompt("57+68=", "125") == "57+68=>125?"
    assert critic.final_answer("7+8+0=15;>7") == "7"


def test_the_models_are_the_ones_that_were_made():
    """Every file must have its checksum, and there may be no others."""
    lines = (DEMO_MODELS / atomic_files.CHECKSUMS).read_text().splitlines()
    written = {name: checksum for checksum, name in (line.split("  ") for line in lines)}
    found = {}
    for path in DEMO_MODELS.rglob("*.*"):
        found[str(path.relative_to(DEMO_MODELS))] = sha256(path.read_bytes()).hexdigest()
    assert found == written


@settings(deadline=None)
@given(st.text(alphabet=CHARACTERS, max_size=80), TOKENIZERS)
def test_the_tokenizers_give_a_text_back(text, tokenizer):
    """There must be one token per character after <bos>; special tokens stay out of the text."""
    tokens = tokenization.encode(tokenizer, text)
    assert len(tokens) == len(text) + 1 and tokens[0] == tokenizer.bos_token_id
    assert tokenization.decode(tokenizer, tokens) == text
    prompt, response = tokenization.encode_pair(tokenizer, text, text)
    assert prompt == tokens and response == [*tokens[1:], tokenizer.eos_token_id]
