"""Prompts: the cursor, the built-in problems, a user's own file, and what is said about a file that can't be used."""

import json
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"}]


def characters(prompt):
    """Stands in for a tokenizer: the code of every character, chat turns joined by newlines."""
    text = prompt if isinstance(prompt, str) else "\n".join(turn["content"] for turn in prompt)
    return [ord(c) for c in text]


def text_of(prompt):
    return "".join(map(chr, prompt.tokens))


def jsonl(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def prompt_file(path, seed=0, held_out=200, room=1000):
    return data.PromptFile(path, characters, seed, held_out, room)


# ---------------------------------------------------------------- the cursor


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.floats(0, 1), st.booleans()), max_size=30))
def test_no_draw_is_lost_or_repeated(steps):
    """Each draw is used once or still waits in the buffer, whatever is put back, and also across a saved and loaded state."""
    prompts, used = data.Prompts(source=data.Addition(0, characters)), Counter()
    for count, unused, resumed in steps:
        draws = prompts.take(count)
        assert len(draws) == count
        back = draws[len(draws) - int(unused * len(draws)) :]
        prompts.put_back(back)
        used.update(draws[: len(draws) - len(back)])
        if resumed:
            state = json.loads(json.dumps(prompts.state()))
            prompts = data.Prompts(prompts.source)
            prompts.load_state(state)
    assert used + Counter(prompts.buffer) == Counter(range(prompts.cursor))


def test_what_was_put_back_comes_first():
    prompts = data.Prompts(source=data.Addition(0, characters))
    assert prompts.take(4) == [0, 1, 2, 3]
    prompts.put_back([1, 3])
    assert prompts.take(1) == [1]
    assert prompts.take(3) == [3, 4, 5]
    assert prompts.state() == {"cursor": 6, "buffer": []}


def test_a_saved_state_does_not_change_with_the_run():
    prompts = data.Prompts(source=data.Addition(0, characters))
    prompts.put_back(prompts.take(2))
    state, saved = prompts.state(), json.dumps(prompts.state())
    prompts.put_back(prompts.take(5))
    other = data.Prompts(prompts.source)
    other.load_state(json.loads(saved))
    assert other.take(3) == [0, 1, 2]
    assert state["cursor"] == 2


def test_a_group_is_one_prompt_with_numbered_answers():
    """Every field of data.py is filled, no other is."""
    source = data.Addition(3, characters)
    group = data.Prompts(source).group(7, 4)
    prompt = source.training(7)
    assert [(s.prompt_id, s.index) for s in group] == [(7, 0), (7, 1), (7, 2), (7, 3)]
    for sample in group:
        assert (sample.prompt, sample.question, sample.answer_key) == (prompt.tokens, prompt.question, prompt.answer_key)
        assert (sample.response, sample.finish, sample.verdict, sample.reward, sample.advantages) == ([], "", None, None, None)


# ---------------------------------------------------------------- the built-in task


def test_held_out_problems_are_never_drawn():
    source = data.Addition(0, characters)
    held_out = {prompt.question for prompt in source.held_out}
    questions = {source.training(draw).question for draw in range(20_000)}
    twins = {"{1}+{0}=".format(*question.removesuffix("=").split("+")) for question in held_out}
    assert not (held_out | twins) & questions
    assert len({tuple(sorted(problem)) for problem in data.HELD_OUT_PROBLEMS}) == len(held_out) == data.HELD_OUT
    assert len(questions) > 10_000


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), draw=st.integers(0, 10**9))
def test_a_problem_follows_from_seed_and_draw(seed, draw):
    """The same on every rank, whatever was drawn before; the key is the sum; one to six digits."""
    prompt = data.Addition(seed, characters).training(draw)
    assert prompt == data.Addition(seed, characters).training(draw)
    a, b = prompt.question.removesuffix("=").split("+")
    assert prompt.answer_key == str(int(a) + int(b)) and text_of(prompt) == prompt.question
    assert 1 <= min(len(a), len(b)) <= max(len(a), len(b)) <= 6
    assert (a, b) == (str(int(a)), str(int(b)))


def test_seeds_draw_other_problems_but_hold_out_the_same():
    first, second = data.Addition(0, characters), data.Addition(1, characters)
    assert first.held_out == second.held_out
    assert [first.training(i) for i in range(20)] != [second.training(i) for i in range(20)]


def test_lengths_occur_as_often_as_said():
    """The longer summand's digits, over 20,000 draws: within 2 points of the table; six in ten pairs or more are equally long."""
    rng = random.Random(0)
    problems = [data.random_problem(rng) for _ in range(20_000)]
    longest = Counter(max(len(str(a)), len(str(b))) for a, b in problems)
    for digits, weight in data.DIGITS.items():
        assert abs(longest[digits] / 20_000 - weight / sum(data.DIGITS.values())) < 0.02
    assert 0.6 < sum(len(str(a)) == len(str(b)) for a, b in problems) / 20_000 < 0.8


# ---------------------------------------------------------------- a user's own file


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 60), seed=st.integers(0, 5), held_out=st.integers(0, 10))
def test_every_epoch_is_a_permutation(tmp_path_factory, rows, seed, held_out):
    """Each row outside the held-out ones once an epoch, in orders that follow from the seed; a tenth is held out at most."""
    path = jsonl(tmp_path_factory.mktemp("data") / "rows.jsonl", [{"prompt": f"row {i}", "answer": i} for i in range(rows)])
    source = prompt_file(path, seed, held_out)
    aside = {text_of(prompt) for prompt in source.held_out}
    assert len(aside) == min(held_out, rows // 10)
    everything = {f"row {i}" for i in range(rows)}
    length = rows - len(aside)
    epochs = [[text_of(source.training(epoch * length + i)) for i in range(length)] for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == sorted(everything - aside)
    assert length < 10 or epochs[0] != epochs[1] != epochs[2]
    again = prompt_file(path, seed, held_out)  # drawn in any order: a prompt that was put back may be of the epoch before
    for draw in random.Random(seed).sample(range(3 * length), min(20, 3 * length)):
        assert text_of(again.training(draw)) == epochs[draw // length][draw % length]


def test_the_seed_decides_order_and_held_out_rows(tmp_path):
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": f"row {i}"} for i in range(100)])
    first, same, other = prompt_file(path, 0), prompt_file(path, 0), prompt_file(path, 1)
    assert [first.training(i) for i in range(90)] == [same.training(i) for i in range(90)]
    assert [first.training(i) for i in range(90)] != [other.training(i) for i in range(90)]
    assert first.held_out == same.held_out != other.held_out


ROWS = [
    {"messages": CHAT, "answer": "4"},
    {"messages": [{"role": "user", "content": "Twice 3?"}], "answer": " 6 "},
    {"messages": [{"role": "user", "content": "Say a word."}], "answer": None},
]


def check_rows(source):
    prompts = sorted((source.training(i) for i in range(3)), key=lambda prompt: prompt.question)
    assert [(p.question, p.answer_key) for p in prompts] == [("Say a word.", None), ("Twice 3?", "6"), ("What is 2+2?", "4")]
    assert text_of(prompts[2]) == "Be brief.\nWhat is 2+2?"


def test_jsonl(tmp_path):
    """Chat turns in `messages` or `prompt`; blank lines are skipped; the last user turn is the question; a number is a key too."""
    check_rows(prompt_file(jsonl(tmp_path / "a.jsonl", [ROWS[0], "", ROWS[1], ROWS[2]])))
    check_rows(prompt_file(jsonl(tmp_path / "a.json", [{"prompt": row["messages"], "answer": row["answer"]} for row in ROWS])))
    source = prompt_file(jsonl(tmp_path / "b.jsonl", [{"prompt": "7+5=", "answer": 12, "more": [1]}]))
    assert source.training(0) == data.Prompt(characters("7+5="), "7+5=", "12")
    turns = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "second"}]
    assert prompt_file(jsonl(tmp_path / "c.jsonl", [{"messages": turns}])).training(0).question == "second"


def test_parquet(tmp_path, monkeypatch):
    """The same rows from Parquet give the same prompts."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "rows.parquet")
    check_rows(prompt_file(tmp_path / "rows.parquet"))
    datasets.Dataset.from_list([{"prompt": "a", "answer": 1}, {"prompt": None, "answer": 2}]).to_parquet(tmp_path / "gap.parquet")
    with pytest.raises(ValueError, match=r"gap\.parquet:2: needs `messages`"):
        prompt_file(tmp_path / "gap.parquet")


GOOD = {"prompt": "good"}


@pytest.mark.parametrize(
    "rows,line,message",
    [
        ([GOOD, "{"], 2, "not valid JSON"),
        ([GOOD, "", "{'prompt': 'single quotes'}"], 3, "not valid JSON.* at column 2"),
        ([GOOD, "[1, 2]"], 2, "expected a JSON object .* found list"),
        (["3"], 1, "found int"),
        ([GOOD, {"text": "x"}], 2, "needs `messages`"),
        ([{"messages": []}], 1, "needs `messages`"),
        ([{"messages": ["x"]}], 1, "needs `messages`"),
        ([{"messages": [{"role": "user"}]}], 1, "needs `messages`"),
        ([{"prompt": 3}], 1, "needs `messages`"),
        ([GOOD, {"prompt": "x" * 21}], 2, "21 tokens, but --max-model-len less --max-new-tokens leaves room for 20"),
        pytest.param(
            [GOOD, {"messages": [{"role": "user", "content": None}]}], 2, "needs `messages`",
        ),
        pytest.param([GOOD, {"prompt": ""}], 2, "prompt"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named(tmp_path, rows, line, message):
    """File, line and what is wrong with it."""
    path = jsonl(tmp_path / "bad.jsonl", rows)
    with pytest.raises(ValueError, match=rf"bad\.jsonl:{line}: .*{message}"):
        prompt_file(path, room=20)


@pytest.mark.parametrize(
    "name,content,message",
    [
        ("missing.jsonl", None, "--data .*missing.jsonl: no such file"),
        ("empty.jsonl", b"", "--data .*empty.jsonl: the file holds no row"),
        ("blank.jsonl", b"\n \n", "holds no row"),
        ("a.csv", b"prompt\nx\n", "expected a .jsonl, .json or .parquet"),
        pytest.param("latin.jsonl", b'{"prompt": "caf\xe9"}\n', "latin.jsonl"),
        pytest.param("not.parquet", b"PAR1 no", "not.parquet"),
    ],
)
def test_a_bad_file_is_named(tmp_path, monkeypatch, name, content, message):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        prompt_file(tmp_path / name)


# ---------------------------------------------------------------- tokens


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """A model directory with a chat template, without weights."""
    from models import save_tokenizer

    return save_tokenizer(tmp_path_factory.mktemp("model"))


def test_chat_turns_go_through_the_template(chat_model):
    tokenizer = data.load_tokenizer(str(chat_model))
    tokens = data.encode(tokenizer, CHAT)
    turns = [f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in CHAT]
    assert tokenizer.decode(tokens) == "".join(turns) + "<|im_start|>assistant\n"
    assert data.decode(tokenizer, tokens) == "system\nBe brief.\nuser\nWhat is 2+2?\nassistant\n"
    assert data.decode(tokenizer, data.encode(tokenizer, "plain text, 7+5=12")) == "plain text, 7+5=12"


def test_a_tokenizer_without_a_template_takes_text_only(chat_model):
    tokenizer = data.load_tokenizer(str(chat_model))
    tokenizer.chat_template = None
    assert data.encode(tokenizer, "text")
    with pytest.raises(ValueError, match="has no chat template"):
        data.encode(tokenizer, CHAT)


def test_stop_tokens(chat_model, tmp_path):
    """The tokenizer's own and those of generation_config.json; none at all is an error."""
    tokenizer = data.load_tokenizer(str(chat_model))
    assert data.stop_tokens(str(tmp_path), tokenizer) == (tokenizer.eos_token_id,)
    for named, expected in ((5, {5}), ([5, 9], {5, 9}), (None, set())):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
        assert set(data.stop_tokens(str(tmp_path), tokenizer)) == expected | {tokenizer.eos_token_id}
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="names no end-of-sequence token"):
        data.stop_tokens(str(tmp_path), tokenizer)


@pytest.mark.parametrize("files", [{}, {"config.json": "{"}, {"tokenizer.json": "{", "config.json": "{}"}])
def test_a_directory_without_a_tokenizer_is_named(tmp_path, files):
    """One line, never a page."""
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"no tokenizer could be loaded from {tmp_path}: [^\n]*$"):
        data.load_tokenizer(str(tmp_path))
    with pytest.raises(ValueError, match="no tokenizer could be loaded from"):
        data.load_tokenizer(str(tmp_path / "missing"))
