"""A warm start (SFT) against plain transformers + torch AdamW; the forms of rows; how a run ends."""

import asyncio
import contextlib
import copy
import json
import random
import signal
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from config import parse_settings
from examples import sft
from examples.make_demo import models
from examples.make_demo.closing import close
from examples.sft import SftConfig, read_examples
from inputs import tokenization
from placement import make_placement
from runtime.errors import UserError
from runtime.shutdown import Stop
from runtime.world import World
from sample import Sample
from tests import ROOT
from tests.support.launched import Run, rows_done
from tests.support.models import save_tokenizer
from tests.support.plain import (
    LEARNING_RATES,
    VOCAB,
    copies,
    make_model,
    plain_logprobs,
    plain_steps,
)
from tests.support.rows import jsonl
from tests.workers.parallel import far, set_constants
from training.packing import Sequence

ACTOR = ROOT / "demo" / "models" / "written" / "actor"
ROOM = dict(max_model_len=128, max_tokens_per_micro_batch=128)
ROOM |= dict(max_new_tokens=8, judge_max_new_tokens=8)


def make_examples(step: int, count: int) -> list[Sequence]:
    """Make ragged examples."""
    rng = random.Random(f"sft {step}")
    examples = []
    for _ in range(count):
        texts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, most))] for most in (8, 14)]
        examples.append(Sequence(*texts))
    return examples


def plain_loss(model, examples: list[Sequence]) -> torch.Tensor:
    """Compute the mean over tokens by definition, one example after another, in float64."""
    samples = [Sample(0, 0, example.prompt, response=example.response) for example in examples]
    sums = [plain_logprobs(model, sample, 1.0)[0].double().sum() for sample in samples]
    return -sum(sums) / sum(len(example.response) for example in examples)


def test_it_learns_as_the_plain_reference(tmp_path, single_rank, monkeypatch):
    """Losses, gradients (their norm and the resulting weights) and held-out losses must agree."""
    set_constants(monkeypatch.setattr)
    model_dir = make_model(tmp_path / "model", "qwen3", tied=True)
    batches = [make_examples(step, 7) for step in range(3)]
    aside = make_examples(9, 3)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    losses = [plain_loss(model, aside).item()]

    def measured(examples: list) -> torch.Tensor:
        loss = plain_loss(model, examples)
        losses.append(loss.item())
        return loss

    norms = [norm for _, norm in plain_steps(model, batches, measured)]
    losses.append(plain_loss(model, aside).item())
    rates = dict(steps=4, lr=1e-3, lr_warmup_steps=2, lr_decay_to=0.5, weight_decay=0.1)
    config = SftConfig(command="sft", model=model_dir, temperature=0.7, **ROOM, **rates)
    actor = sft.Actor(config, model_dir)
    found = [sft.measure(actor, aside)]
    steps = [sft.learn(actor, batch) for batch in batches]
    found += [step["loss"] for step in steps] + [sft.measure(actor, aside)]
    assert found == pytest.approx(losses, rel=1e-5, abs=1e-5)
    assert [step["grad_norm"] for step in steps] == pytest.approx(norms, rel=1e-5, abs=1e-5)
    assert [step["lr"] for step in steps] == pytest.approx(LEARNING_RATES[:3])
    assert far(dict(actor.named_weights()), copies(model)) < 5e-5
    close(actor)


@pytest.fixture(scope="module")
def homes(tmp_path_factory) -> dict:
    """Make models' tokenizers: with a chat template, also without an end of turns; and the demo's."""
    path = tmp_path_factory.mktemp("tokenizers")
    models.new_model(path / "text", 0)
    chat = tokenization.load_tokenizer(str(save_tokenizer(path / "chat")))
    endless = copy.deepcopy(chat)
    endless.chat_template = chat.chat_template.replace("<|im_end|>", "")
    endless.save_pretrained(path / "endless")
    for name in ("chat", "endless"):
        (path / name / "config.json").write_text('{"max_position_embeddings": 256}')
    return {name: str(path / name) for name in ("text", "chat", "endless")}


def read(home: str, path, rows: list[dict], **changes):
    config = SftConfig(command="sft", model=home, data=str(jsonl(path, rows)), **ROOM | changes)
    return read_examples(config, print)[0]


def user(text) -> dict:
    return {"role": "user", "content": text}


def assistant(text) -> dict:
    return {"role": "assistant", "content": text}


PARTS = [{"type": "text", "text": "3+"}, {"type": "text", "text": "4?"}]
SYSTEM = {"role": "system", "content": "Be right."}
HISTORY = [SYSTEM, user("1+1?"), assistant("2")]
WHOLE = [*HISTORY, user("3+4?"), assistant("7")]
FIRST = [user("3+4?"), assistant("7")]
CHATS = [  # rows that mean the same, and the turns before the last question
    ({"messages": FIRST}, []),
    ({"prompt": FIRST[:1], "completion": FIRST[1:]}, []),
    ({"prompt": FIRST[:1], "response": "7"}, []),
    ({"prompt": "3+4?", "response": FIRST[1:]}, []),
    ({"prompt": [user(PARTS)], "response": "7"}, []),
    ({"messages": WHOLE}, HISTORY),
    ({"prompt": WHOLE[:-1], "completion": WHOLE[-1:]}, HISTORY),
]


@pytest.mark.parametrize("row,before", CHATS)
def test_chat_rows(row, before, homes, tmp_path):
    """Other turns are context. transformers is the reference."""
    chat = tokenization.load_tokenizer(homes["chat"])
    turns = [*before, user("3+4?")]
    expected = chat.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    [example] = read(homes["chat"], tmp_path / "rows.jsonl", [row]).rows
    assert chat.decode(example.prompt) == expected
    assert chat.decode(example.response) == "7<|im_end|>\n"


@pytest.mark.parametrize("name", ["response", "completion"])
def test_text_rows(name, homes, tmp_path):
    """The prompt must be what the rollout engine would see; the answer ends with the end of the sequence."""
    text = tokenization.load_tokenizer(homes["text"])
    [example] = read(homes["text"], tmp_path / "rows.jsonl", [{"prompt": "3+4=", name: ">7"}]).rows
    assert text.decode(example.prompt) == "<bos>3+4="
    assert text.decode(example.response) == ">7<eos>"


NEEDS = "needs `messages`, or `prompt` and `response` or `completion`"
ENDS = "a conversation ends with one turn of the assistant, not empty"
AS_TEXT = {"prompt": "3+4=", "response": "7"}
BAD = {  # tokenizer -> rows, and the message about them
    "text": [
        ({"prompt": "3+4="}, NEEDS),
        ({"response": "7"}, NEEDS),
        (AS_TEXT | {"completion": "7"}, NEEDS),
        (AS_TEXT | {"response": 7}, "a prompt and an answer are needed, each text or"),
        (AS_TEXT | {"response": " "}, ENDS),
        (AS_TEXT | {"response": ">" + "7" * 128}, "tokens exceed --max-tokens-per-micro-batch"),
        (AS_TEXT | {"response": "7<eos>"}, "the answer ends with what ends an answer"),
        (AS_TEXT | {"prompt": "3<eos>"}, "the prompt ends with what ends an answer"),
        (AS_TEXT | {"label": False}, "its `label` excludes the answer"),
        (AS_TEXT | {"images": ["a.png"]}, "it has images, but sft learns only from texts"),
    ],
    "chat": [
        ({"messages": [user("3+4?")]}, ENDS),
        ({"messages": [assistant("7")]}, ENDS),
        ({"messages": [user("3+4?"), assistant(""), assistant("7")]}, ENDS),
        ({"messages": [user("?"), assistant("7<|im_end|>\n")]}, "the answer ends with what"),
        ({"messages": [{"role": "human", "content": "?"}, assistant("7")]}, "each text or"),
        ({"messages": [user("?"), assistant("7") | {"weight": 0}]}, "its `weight` excludes the"),
        ({"messages": [user("?"), assistant("7") | {"train": False}]}, "its `train` excludes"),
        ({"messages": WHOLE, "prompt": "3+4?"}, NEEDS),
        ({"prompt": HISTORY[:1], "completion": WHOLE}, "`completion` isn't one turn"),
        ({"prompt": HISTORY, "completion": "7"}, ENDS),
        ({"prompt": "3+4?", "messages": "7"}, "`messages` must be a list of turns"),
        ({"system": "Be right.", "messages": FIRST}, "`system` isn't read; a turn"),
        ({"messages": [user([{"type": "image"}]), assistant("7")]}, "only {type: text, text}"),
    ],
    "endless": [({"messages": FIRST}, "ends no answer with a special token")],
}


@pytest.mark.parametrize("name,row,message", [(name, *row) for name in BAD for row in BAD[name]])
def test_a_bad_row_is_named(name, row, message, homes, tmp_path):
    path = tmp_path / "rows.jsonl"
    good = [] if name == "endless" else [AS_TEXT if name == "text" else {"messages": FIRST}]
    with pytest.raises(UserError) as caught:
        read(homes[name], path, [*good, row])
    said = str(caught.value)
    assert message in said and f"{path}:{len(good) + 1}: " in said and "\n" not in said


def test_a_row_that_the_model_cannot_read_whole_is_named(homes, tmp_path):
    rows = [AS_TEXT, AS_TEXT | {"response": ">" + "7" * 256}]
    message = rf"rows\.jsonl:2: 263 tokens, but {homes['text']} reads 256"
    with pytest.raises(UserError, match=message):
        read(homes["text"], tmp_path / "rows.jsonl", rows, max_tokens_per_micro_batch=999)


def test_no_prompt_is_learned_and_held_out(homes, tmp_path, capsys):
    """It must not, however many rows have it: with other answers, as text or as turns."""
    rows = [{"prompt": f"{n}+0?", "response": f">{n + m}"} for n in range(30) for m in range(2)]
    rows += [{"prompt": [user(f"{n}+0?")], "response": ">0"} for n in range(30)]
    order = read(homes["chat"], tmp_path / "rows.jsonl", rows)
    chat = tokenization.load_tokenizer(homes["chat"])

    def questions(examples) -> set[str]:
        texts = [chat.decode(example.prompt) for example in examples]
        return {text.partition("+0?")[0].rpartition("\n")[2] for text in texts}

    aside = [order.rows[number] for number in order.held_out]
    learned = [order.training(number) for number in range(order.count)]
    assert len(aside) == len(questions(aside)) == 3
    assert questions(learned) == {str(n) for n in range(30)} - questions(aside)
    assert "sft: 81 examples, 3 more held out, 60 repeat a prompt" in capsys.readouterr().out


def test_it_has_its_own_rates_and_few_settings():
    def parse(*words: str) -> SftConfig:
        return parse_settings(SftConfig, [*words], "", sft.GROUPS, sft.DEFAULTS)

    own = parse("--model", "m")
    assert (own.lr, own.lr_decay_to, own.out, own.lora) == (1e-5, 0.1, "runs/sft", 0)
    assert parse().lr == 5e-4 and parse("--lora", "8").lora == 8
    for refused in ("--judge j", "--mode full", "--eval-data d", "--max-new-tokens 2"):
        with pytest.raises(UserError, match=f"unrecognized arguments: {refused}"):
            parse(*refused.split())
    with pytest.raises(UserError, match="tp 2 x pp 1 = 2 doesn't divide the 3 ranks"):
        make_placement(parse("--tp", "2"), 3)


@pytest.mark.parametrize("ends", ["by itself", "by a signal", "by its time"])
def test_a_run_leaves_the_weights_of_the_step_it_reached(ends, tmp_path, monkeypatch, single_rank):
    """It must name the step; what is held out is measured at the start, and at the end of a whole run."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    models.new_model(tmp_path / "model", 0)
    out = tmp_path / "out"
    given = (
        f"--model {tmp_path}/model --out {out} --steps 5 --eval-every 3 --lr 3e-3 --batch-size 16"
    )
    given += " --time-limit-s 0.001" * (ends == "by its time")
    config = parse_settings(SftConfig, given.split(), "", sft.GROUPS, sft.DEFAULTS)
    world = World("cpu", 60.0)

    @contextlib.asynccontextmanager
    async def joined(config):
        yield world, mock.MagicMock()

    monkeypatch.setattr(sft.run, "joined", joined)
    stop = Stop(asked=signal.SIGTERM if ends == "by a signal" else 0)
    line = asyncio.run(sft.train(config, make_placement(config, 1), stop))
    world.close()
    reached = 5 if ends == "by itself" else 1
    assert line == f"{out}/hf has the weights after {reached} of 5 steps"
    rows = [json.loads(row) for row in (out / "metrics.jsonl").read_text().splitlines()]
    aside = {row["step"]: row["sft/held_out_loss"] for row in rows if "sft/held_out_loss" in row}
    assert list(aside) == ([0, 3, 5] if reached == 5 else [0])
    assert reached == 1 or aside[5] < aside[0] - 0.01
    assert {"sft/loss", "sft/lr", "sft/grad_norm", "sft/skipped", "step"} <= rows[0].keys()
    assert AutoModelForCausalLM.from_pretrained(out / "hf")
    assert tokenization.load_tokenizer(str(out / "hf")) and list((out / "tensorboard").iterdir())


class SftRun(Run):
    program = "examples/sft.py"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "--time-limit-s"])
def test_a_stopped_run_leaves_the_weights_of_its_step(how, tmp_path):
    """It must name the step, and have the weights that a run of as many steps ends with."""
    rates = ("--lr-warmup-steps", "0", "--lr-decay-to", "1", "--eval-every", "1000")
    if how == "--time-limit-s":  # it is over before the first step, which is made
        run = SftRun(tmp_path, *rates, "--steps", "1000", how, "0.001").ended()
    else:
        run = SftRun(tmp_path, *rates, "--steps", "1000")
        number = signal.Signals[how]
        run.struck((rows_done(2), lambda run: run.launcher().send_signal(number)))
    reached = len(run.rows())
    line = f"{run.out}/hf has the weights after {reached} of 1000 steps"
    assert line in run.stderr + run.stdout
    run.check_nothing_is_left()
    whole = SftRun(tmp_path / "whole", *rates, "--steps", reached).ended()
    weights, others = (each.out / "hf" / "model.safetensors" for each in (run, whole))
    assert weights.read_bytes() == others.read_bytes()
    held_out = [row["sft/held_out_loss"] for row in whole.rows() if "sft/held_out_loss" in row]
    assert len(held_out) == 2 and held_out[1] < held_out[0]


@pytest.mark.slow
def test_a_bad_row_ends_a_run_before_an_earlier_one_is_moved(tmp_path):
    out = tmp_path / "out"
    (out / "hf").mkdir(parents=True)
    path = jsonl(tmp_path / "rows.jsonl", [AS_TEXT, {"prompt": "3+4="}])
    run = SftRun(tmp_path, "--model", ACTOR, "--data", path, out=out).start().finish()
    run.check_one_line(f"{path}:2: needs `messages`")
    assert (out / "hf").is_dir() and not (tmp_path / "out-1").exists()
