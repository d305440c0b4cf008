"""The pretraining term: its texts, its tokens, and their weight by hand. test_actor.py has the update."""

import json
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import build
from config import Config
from extras import ptx
from extras.ptx import choose, read_texts, text_loss
from runtime.errors import UserError
from tests.support.rows import jsonl
from training import model

TEXTS = [([1], [number]) for number in range(7)]


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 5))
def test_every_text_once_an_epoch_whatever_the_ranks(size, ranks, start):
    """A step's texts must be the same on any number of ranks, whatever the steps before."""
    alone = [choose(TEXTS, number, size, 3, 0, 1) for number in range(start, start + 7)]
    for number, whole in enumerate(alone, start):
        shares = [choose(TEXTS, number, size, 3, rank, ranks) for rank in range(ranks)]
        assert len(whole) == size
        assert sorted(text for share in shares for text in share) == sorted(whole)
    if start == 0:
        drawn = [text for whole in alone for text in whole]
        assert all(sorted(drawn[at : at + 7]) == TEXTS for at in range(0, len(drawn), 7))


def test_the_loss_of_texts_by_hand():
    """It must not change the divisor, which is the policy's: the loss already has its weight."""
    logprobs = torch.tensor([-5.0, -3.0], requires_grad=True)
    loss = partial(text_loss, lambda batch, output: output, 2 / 3)
    total, divisor, stats = loss(None, logprobs)
    total.backward()
    assert logprobs.grad.tolist() == pytest.approx([-2 / 3, -2 / 3]) and divisor == 0
    expected = {"loss": 16 / 3, "divisor": 0, "ptx": 8.0, "ptx_tokens": 2}
    assert {name: value.item() for name, value in stats.items()} == pytest.approx(expected)


class Characters:
    """A tokenizer of characters, with a start token."""

    chat_template, eos_token_id = None, 0

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [1] * add_special_tokens + [ord(c) for c in text]}


def test_rows_of_both_kinds(tmp_path):
    path = tmp_path / "texts.jsonl"
    rows = [{"text": "abc"}, {"prompt": "a", "response": "bc"}, {"text": "a" * 9}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    a, b, c = map(ord, "abc")
    expected = [([1], [a, b, c]), ([1, a], [b, c, 0]), ([1], [a] * 5)]
    assert read_texts(path, Characters(), 6) == expected


BAD = [{}, {"text": ""}, {"response": "a"}, {"prompt": "", "response": "a"}]


@pytest.mark.parametrize("row", BAD)
def test_a_row_that_can_t_be_used_is_named(tmp_path, row):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "fine"}\n' + json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=r"texts\.jsonl:2: needs `text`, or `prompt` and `resp"):
        read_texts(path, Characters(), 6)


def test_a_tokenizer_that_ends_no_text_is_refused_where_a_row_needs_it(tmp_path):
    path = jsonl(tmp_path / "texts.jsonl", [{"text": "fine"}, {"prompt": "a", "response": "b"}])
    endless = Characters()
    endless.eos_token_id = endless.name_or_path = None
    with pytest.raises(UserError, match=r"texts\.jsonl:2: None has no end-of-sequence token"):
        read_texts(path, endless, 6)


def test_texts_are_cut_to_what_a_micro_batch_takes(monkeypatch):
    """Otherwise, if the model's context is longer, a step that draws a long text would end the run."""
    texts = ("grpo", "ptx_data=x.jsonl", "ptx_coef=0.1")
    config = Config(model="m", rule=("right",), judge_format=("chat",), algorithm=texts)
    monkeypatch.setattr(build.server, "context_length", lambda *_: 32768)
    elsewhere = [
        (model, "check_models"),
        (build, "task"),
        (build, "data"),
        (build, "tokenization"),
    ]
    for where, name in [*elsewhere, (build.rewards, "build")]:
        monkeypatch.setattr(where, name, mock.MagicMock())
    build.tokenization.load_tokenizers.return_value = [None, None]
    build.data.READERS = 1
    monkeypatch.setattr(ptx, "read_texts", lambda path, tokenizer, longest: longest)
    [term] = build.load_inputs(config, [], print).terms
    assert term.texts == config.max_tokens_per_micro_batch == 8192
