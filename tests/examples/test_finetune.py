"""SFT and reward models against plain transformers + torch AdamW; the formats of rows."""

import asyncio
import copy
import json
import random
from collections import Counter
from dataclasses import replace
from itertools import chain
from statistics import fmean
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import rewards
from config import Config
from engines.engine import Answer
from examples import finetune
from examples.finetune import FinetuneConfig, parse_rm, parse_sft, read_examples
from examples.make_demo import models
from examples.make_demo.closing import close
from inputs import tokenization
from placement import make_placement
from runtime.errors import UserError
from sample import Sample
from tests.support.models import end_turns_with, save_model, save_tokenizer
from tests.support.plain import (
    LEARNING_RATES,
    VOCAB,
    copies,
    make_model,
    make_value_model,
    plain_logprobs,
    plain_steps,
)
from tests.support.rows import jsonl
from tests.workers.parallel import far, set_constants
from training.model import check_models

COMMANDS = ("sft", "rm")


def config_of(command: str, model_dir: str) -> FinetuneConfig:
    room = dict(max_model_len=48, max_tokens_per_micro_batch=48)
    room |= dict(max_new_tokens=8, judge_max_new_tokens=8)
    rates = dict(steps=4, lr=1e-3, lr_warmup_steps=2, lr_decay_to=0.5)
    rates |= dict(weight_decay=0.1, temperature=0.7)
    return FinetuneConfig(command=command, model=model_dir, **room | rates)


def make_examples(command: str, step: int, count: int) -> list[list[Sample]]:
    """Make ragged examples; the answers of a pair differ in length."""
    rng, examples = random.Random(f"{command} {step}"), []
    for _ in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))]
        example = []
        for index in range(1 if command == "sft" else 2):
            answer = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 14))]
            example.append(Sample(0, index, prompt, response=answer))
        if command == "rm":
            example = [replace(s, prompt=s.prompt + s.response, response=[0]) for s in example]
        examples.append(example)
    return examples


def plain_metrics(command: str, model, examples: list) -> dict:
    """Compute metrics by definition, one example after another, in float64; `loss` has a gradient."""
    if command == "sft":
        sums = [plain_logprobs(model, sample, 1.0)[0].double().sum() for (sample,) in examples]
        return {"loss": -sum(sums) / sum(len(sample.response) for (sample,) in examples)}
    scores = []
    for pair in examples:
        # as transformers pools: at the last token
        texts = [torch.tensor([sample.prompt]) for sample in pair]
        scores.append([model(text).logits[0, 0].double() for text in texts])
    losses = [torch.log1p(torch.exp(b - a)) for a, b in scores]
    return {
        "loss": sum(losses) / len(losses),
        "accuracy": fmean(float(a > b) for a, b in scores),
        "margin": fmean((a - b).item() for a, b in scores),
        "chosen": fmean(a.item() for a, _ in scores),
        "rejected": fmean(b.item() for _, b in scores),
    }


def plain_learning(command: str, model_dir: str) -> dict:
    kind = AutoModelForSequenceClassification if command == "rm" else AutoModelForCausalLM
    model = kind.from_pretrained(model_dir)
    batches = [make_examples(command, step, 7) for step in range(3)]
    held_out = make_examples(command, 9, 3)
    metrics = []

    def measured(examples: list) -> torch.Tensor:
        found = plain_metrics(command, model, examples)
        metrics.append(found | {"loss": found["loss"].item()})
        return found["loss"]

    measured(held_out)
    steps = plain_steps(model, batches, measured)
    for row, (_, norm), lr in zip(metrics[1:], steps, LEARNING_RATES, strict=False):
        row |= {"grad_norm": norm, "skipped": 0.0, "lr": lr}
    measured(held_out)
    known = {"model_dir": model_dir, "batches": batches, "held_out": held_out}
    return known | {"metrics": metrics, "weights": copies(model)}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_learns_as_the_plain_reference(command, tmp_path, single_rank, monkeypatch):
    """Metrics, gradients (their norm and the resulting weights) and held-out metrics must agree."""
    set_constants(monkeypatch.setattr)
    make, is_tied = (make_value_model, False) if command == "rm" else (make_model, True)
    reference = plain_learning(command, make(tmp_path / "model", "qwen3", tied=is_tied))
    learner = finetune.Learner(config_of(command, reference["model_dir"]))
    found = [learner.measure(reference["held_out"])]
    found += [learner.learn(batch) for batch in reference["batches"]]
    found.append(learner.measure(reference["held_out"]))
    for row, wanted in zip(found, reference["metrics"], strict=True):
        assert row == pytest.approx(wanted, rel=1e-5, abs=1e-5)
    assert far(dict(learner.trainer.named_weights()), reference["weights"]) < 5e-5
    close(learner.trainer)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict:
    """Make tokenizers: with a chat template, also without an end of turns; and the demo's, without one."""
    path = tmp_path_factory.mktemp("tokenizers")
    models.new_model(path / "text", 0)
    named = {"text": tokenization.load_tokenizer(str(path / "text"))}
    named["chat"] = tokenization.load_tokenizer(str(save_tokenizer(path / "chat")))
    named["endless"] = copy.deepcopy(named["chat"])
    named["endless"].chat_template = named["chat"].chat_template.replace("<|im_end|>", "")
    return named


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def decoded(tokenizer, example: list[Sample]) -> list[tuple[str, str]]:
    return [(tokenizer.decode(s.prompt), tokenizer.decode(s.response)) for s in example]


ASKED, ANSWERED = "<|im_start|>user\n3+4?<|im_end|>\n<|im_start|>assistant\n", "7<|im_end|>\n"


def test_text_rows(tokenizers):
    """The prompt must be what the rollout engine would see; the answer ends with the end of the sequence."""
    text, right, wrong = tokenizers["text"], ("<bos>3+4=", ">7<eos>"), ("<bos>3+4=", ">6<eos>")
    for name in ("response", "completion"):
        assert decoded(text, parse_sft({"prompt": "3+4=", name: ">7"}, text, "f:1")) == [right]
    row = {"prompt": "3+4=", "chosen": ">7", "rejected": ">6"}
    for sample, answer in zip(parse_rm(row, text, "f:1"), (right, wrong), strict=True):
        assert text.decode(sample.prompt) == "".join(answer) and len(sample.response) == 1


SYSTEM = {"role": "system", "content": "Be right."}
HISTORY = [SYSTEM, user("1+1?"), assistant("2")]
LEARNED = [user("3+4?"), assistant("7")]
PARTS = [{"type": "text", "text": "3+"}, {"type": "text", "text": "4?"}]
CHATS = [  # rows, and the turns before the question
    ({"messages": LEARNED}, []),
    ({"messages": [*HISTORY, *LEARNED]}, HISTORY),
    ({"prompt": HISTORY, "messages": LEARNED}, HISTORY),
    ({"prompt": [user("3+4?")], "response": "7"}, []),
    ({"prompt": "3+4?", "response": LEARNED}, []),
    ({"prompt": [user(PARTS)], "response": "7"}, []),
    ({"messages": [*HISTORY, user(PARTS), assistant([{"type": "text", "text": "7"}])]}, HISTORY),
]


@pytest.mark.parametrize("row,before", CHATS)
def test_chat_rows_for_sft(row, before, tokenizers):
    """All spellings must mean the same; other turns are context. transformers is the reference."""
    chat, turns = tokenizers["chat"], [*before, user("3+4?")]
    expected = chat.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert decoded(chat, parse_sft(row, chat, "f:1")) == [(expected, ANSWERED)]


WHOLE = [SYSTEM, user("3+4?"), assistant("7")]
OTHER = [SYSTEM, user("3+4?"), assistant("6")]
LED = [
    # as TRL documents them: the prompt apart, and as the beginning of both conversations
    {"prompt": WHOLE[:2], "chosen": WHOLE[2:], "rejected": OTHER[2:]},
    {"chosen": WHOLE, "rejected": OTHER},
    {"prompt": "", "chosen": WHOLE, "rejected": OTHER},
    # and conversations that repeat all of it, a part, or nothing
    {"prompt": [SYSTEM], "chosen": WHOLE[1:], "rejected": OTHER[1:]},
    {"prompt": WHOLE[:2], "chosen": WHOLE, "rejected": OTHER},
    {"prompt": WHOLE[:2], "chosen": WHOLE[1:], "rejected": "6"},
    {"prompt": "3+4?", "chosen": WHOLE, "rejected": OTHER},
]


@pytest.mark.parametrize("row", LED)
def test_a_prompt_leads_whole_conversations(row, tokenizers):
    """It must come once, whatever they repeat of it, as in plain transformers' template.

    A loss without the system turn would differ."""
    chat = tokenizers["chat"]
    before = chat.apply_chat_template(WHOLE[:2], tokenize=False, add_generation_prompt=True)
    expected = [(before, ANSWERED), (before, ANSWERED.replace("7", "6"))]
    whole = [chat.decode(sample.prompt) for sample in parse_rm(row, chat, "f:1")]
    assert whole == [question + answer for question, answer in expected]
    for name in ("completion", "messages") if row["chosen"][0]["role"] != "assistant" else ():
        learned = {name: row["chosen"]} | {"prompt": row.get("prompt")}
        assert decoded(chat, parse_sft(learned, chat, "f:1")) == expected[:1]
    without = parse_rm({"chosen": WHOLE[1:], "rejected": OTHER[1:]}, chat, "f:1")
    assert "Be right." in whole[0] and "Be right." not in chat.decode(without[0].prompt)


class ScoringPool:
    async def generate(self, requests, model):
        self.shown = requests[0].prompt
        yield Answer(0, [], [], "stop", [], score=0.0)


SEVERAL = [*HISTORY, user("3+4=")]


@pytest.mark.parametrize("kind,end", [("text", "<eos>"), ("chat", "<|im_end|>\n")])
@pytest.mark.parametrize("prompt", ["3+4=", "3+4=<|im_end|>!", [user("3+4=")], SEVERAL])
def test_what_a_reward_model_is_shown_in_a_run_is_what_it_learned(prompt, kind, end, tokenizers):
    """It must be equal token by token, with or without a template; only finished answers have an end."""
    tokenizer, pool = tokenizers[kind], ScoringPool()
    row = {"prompt": prompt, "chosen": ">7", "rejected": ">6"}
    learned = parse_rm(row, tokenizer, "f:1")[0].prompt
    named = dict(model="m", judge=("m",), judge_format=("score",), max_model_len=2000)
    [judge] = rewards.build(Config(**named), [], [tokenizer], "".join).judges
    asyncio.run(judge.judge(prompt, ">7", pool))
    assert pool.shown == learned and tokenizer.decode(learned).endswith(">7" + end)
    asyncio.run(judge.judge(prompt, ">7", pool, is_cut=True))
    assert tokenizer.decode(pool.shown) + end == tokenizer.decode(learned)
    has_system = "Be right.<|im_end|>" in tokenizer.decode(learned)
    assert kind == "text" or has_system == (prompt is SEVERAL)


PAIR = {"prompt": [user("3+4=")], "chosen": ">7", "rejected": ">6"}
CONTRADICTS = "`prompt` contradicts the beginning of the conversation"
NO_ANSWER = "a conversation ends with a turn of the assistant"
AS_TEXT = {"prompt": "3+4=", "response": "7"}
OTHER_PAIR = {"chosen": WHOLE, "rejected": OTHER}
BAD = {  # command, tokenizer -> rows, and the message about them
    "sft text": [
        ({"prompt": "3+4="}, "needs `messages`, or `prompt` and `response` or"),
        (AS_TEXT | {"response": 7}, "a prompt and an answer are needed"),
        (AS_TEXT | {"response": ""}, NO_ANSWER),
        (AS_TEXT | {"response": ">" + "7" * 48}, "tokens don't fit into --max"),
        (AS_TEXT | {"response": "7<eos>"}, "the answer ends with what ends"),
        (AS_TEXT | {"prompt": "3<eos>"}, "the prompt ends with what ends an"),
    ],
    "sft chat": [
        ({"messages": [user("3+4?")]}, NO_ANSWER),
        ({"messages": [user("?"), assistant("7<|im_end|>\n")]}, "the answer ends with"),
        ({"messages": [{"role": "human", "content": "?"}, assistant("7")]}, "the roles"),
        ({"messages": WHOLE, "completion": "8"}, "needs `messages`, or `prompt` and `response`"),
        ({"prompt": "3+4?", "messages": "7"}, "`messages` must be a list of turns"),
        ({"prompt": HISTORY, "completion": "7"}, "follows a turn of the assistant"),
        ({"prompt": HISTORY, "messages": WHOLE}, CONTRADICTS),
        ({"prompt": [user("Be right.")], "messages": WHOLE}, CONTRADICTS),
        ({"system": "Be right.", "messages": WHOLE[1:]}, "`system` isn't read; a turn"),
        ({"messages": [user([{"type": "image"}]), assistant("7")]}, "only {type: text, text}"),
    ],
    "rm text": [
        ({"prompt": "3+4=", "chosen": ">7"}, "needs `prompt`, `chosen` and `rejected`"),
        ({"prompt": "1", "chosen": "7" * 23, "rejected": "6" * 23}, "don't fit into"),
        ({"prompt": "1", "chosen": "7", "rejected": "7"}, "`rejected` are the same"),
    ],
    "rm chat": [
        (PAIR | {"prompt": 7}, "a prompt and an answer are needed, each text or"),
        ({"chosen": WHOLE, "rejected": WHOLE[1:]}, "differ before their last turns"),
        ({"prompt": SEVERAL[:1], "chosen": SEVERAL[1:], "rejected": "6"}, NO_ANSWER),
        ({"chosen": WHOLE, "rejected": WHOLE}, "are the same"),
        (OTHER_PAIR | {"prompt": "1+1?"}, CONTRADICTS),
    ],
    "rm endless": [(PAIR, "ends no answer with a special token")],
}


@pytest.mark.parametrize("how,row,message", [(how, *row) for how in BAD for row in BAD[how]])
def test_a_bad_row_is_named(how, row, message, tokenizers, tmp_path):
    command, tokenizer = how.split()
    good = {"prompt": "1+1=", "chosen": ">2", "rejected": ">3"}
    if command == "sft":
        good = {"messages": LEARNED} if tokenizer == "chat" else AS_TEXT
    path = jsonl(tmp_path / "rows.jsonl", [good, row])
    with pytest.raises(UserError) as caught:
        read_examples(path, tokenizers[tokenizer], config_of(command, "m"))
    said = str(caught.value)
    assert message in said and f"{path}:2: " in said and "\n" not in said


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_its_own_rates_and_few_settings(command, tmp_path):
    own = finetune.parse_command([command, "--model", "m"])
    assert (own.lr, own.lr_decay_to, own.out) == (1e-5, 0.1, f"runs/{command}")
    assert finetune.parse_command([command]).lr == 5e-4
    for refused in ("--judge j", "--mode full", "--eval-data d", "--max-new-tokens 2"):
        with pytest.raises(UserError, match=f"unrecognized arguments: {refused}"):
            finetune.parse_command([command, *refused.split()])
    if command == "sft":
        assert finetune.parse_command(["sft", "--lora", "8"]).lora == 8
    else:
        with pytest.raises(UserError, match=r"^--lora 8: a reward model learns all weights$"):
            finetune.parse_command(["rm", "--lora", "8"])
    with pytest.raises(UserError, match="tp 2 x pp 1 = 2 doesn't divide the 3 ranks"):
        make_placement(finetune.parse_command([command, "--tp", "2"]), 3)
    missing = finetune.parse_command([command, "--model", "nowhere", "--out", f"{tmp_path}/out"])
    with pytest.raises(UserError, match=r"^--model nowhere"):
        asyncio.run(finetune.prepare(missing, 0, print))
    assert not (tmp_path / "out").exists()


def test_what_a_start_refuses(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for arguments, message in (([], "the first word is sft or rm"), (["rm"], "start with: ")):
        with pytest.raises(UserError, match=message):
            finetune.start(arguments, None)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_improves_what_is_held_out_and_leaves_its_files(command, tmp_path, single_rank):
    models.new_model(tmp_path / "model", 0)
    end = end_turns_with(tmp_path / "model", "<unused59>")
    out, progress = tmp_path / "out", mock.MagicMock()
    given = f"{command} --model {tmp_path}/model --out {out} --max-tokens-per-micro-batch 1024"
    how = "--steps 8 --eval-every 5 --lr 3e-3 --batch-size 16"
    config = finetune.parse_command(f"{given} {how}".split())
    out.mkdir()
    asyncio.run(finetune.prepare(config, 0, progress.line))
    finetune.train(config, make_placement(config, 1), progress, rank=0)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(9))
    name = f"{command}/held_out_loss"
    held_out = {row["step"]: row[name] for row in rows if name in row}
    assert list(held_out) == [0, 5, 8] and held_out[8] < held_out[0] - 0.01
    names = (*finetune.TASKS[command].stats, "loss", "lr", "grad_norm", "skipped")
    assert {f"{command}/{name}" for name in names} | {"time/step_s"} <= rows[7].keys()
    assert command == "sft" or 0 <= rows[8][f"{command}/held_out_accuracy"] <= 1
    assert list((out / "tensorboard").iterdir())
    assert json.loads((out / "config.json").read_text())["command"] == command
    kind = AutoModelForSequenceClassification if command == "rm" else AutoModelForCausalLM
    assert kind.from_pretrained(out / "hf") and tokenization.load_tokenizer(str(out / "hf"))
    written = json.loads((out / "hf" / "generation_config.json").read_text())
    assert {*written["eos_token_id"]} == {2, end} and written["pad_token_id"] == 0


REPEATED = {  # command -> a prompt's rows
    "sft": [{"response": ">7"}, {"response": ">8"}],
    "rm": [
        {"chosen": ">7", "rejected": ">6"},
        {"chosen": [assistant(">7")], "rejected": [assistant(">5")]},
    ],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_prompt_is_learned_and_held_out(command, tmp_path, monkeypatch, single_rank):
    """It must not, however many rows have it: with other answers, as text or as turns."""
    model = str(save_model(tmp_path / "model"))
    rows = [{"prompt": f"{n}+0?"} | row for n in range(30) for row in REPEATED[command]]
    rows += [{"prompt": [user(f"{n}+0?")]} | REPEATED[command][0] for n in range(30)]
    path = jsonl(tmp_path / "rows.jsonl", rows)
    learner, progress = mock.MagicMock(), mock.MagicMock()
    monkeypatch.setattr(finetune, "Learner", lambda config: learner)
    monkeypatch.setattr(finetune, "set_padding", mock.Mock(return_value=""))
    learner.learn.return_value, learner.task = Counter(), finetune.TASKS[command]
    given = f"{command} --model {model} --data {path} --out {tmp_path} --steps 3 --batch-size 81"
    config = finetune.parse_command(given.split())
    finetune.train(config, make_placement(config, 1), progress, rank=1)
    learned = chain(*(call.args[0] for call in learner.learn.call_args_list))
    learned = {example[0].turns[0]["content"] for example in learned}
    measured = [example[0].turns[0]["content"] for example in learner.measure.call_args.args[0]]
    everything = {f"{n}+0?" for n in range(30)}
    assert len(measured) == len({*measured}) == 3 and learned == everything - {*measured}
    said = f"81 examples of {path}, 3 more are held out, 60 repeat a prompt"
    assert said in progress.line.call_args_list[0].args[0]


# the tokenizer's pad token, whether it has only one special token; then the token that pads
PADS = [("<|endoftext|>", False, "<|endoftext|>"), ("<|im_end|>", False, "<|im_start|>")]
PADS += [(None, False, "<|im_start|>"), ("<|im_end|>", True, None)]


@pytest.mark.parametrize("pad,is_alone,padded_with", PADS)
def test_transformers_scores_as_it_learned(tmp_path, single_rank, pad, is_alone, padded_with):
    """It must use the last token, even if the tokenizer pads with it, in batches padded on either side."""
    home = save_model(tmp_path / "model")
    tokenizer = tokenization.load_tokenizer(str(home))
    tokenizer.pad_token, tokenizer.chat_template = pad, None
    tokenizer.save_pretrained(home)
    (home / "chat_template.jinja").unlink()
    (home / "special_tokens_map.json").write_text(json.dumps({"pad_token": pad} if pad else {}))
    if is_alone:
        found = json.loads((home / "tokenizer.json").read_text())
        found["added_tokens"] = found["added_tokens"][2:]
        (home / "tokenizer.json").write_text(json.dumps(found))
    settings = json.loads((home / "config.json").read_text())
    (home / "config.json").write_text(json.dumps(settings | {"pad_token_id": None}))
    rows = [{"prompt": "1" * n, "chosen": "2" * n, "rejected": "3"} for n in range(1, 5)] * 8
    path = jsonl(tmp_path / "rows.jsonl", rows)
    given = f"rm --model {home} --data {path} --out {tmp_path}/out --steps 3"
    config = finetune.parse_command(f"{given} --lr 1e-3 --batch-size 8".split())
    (tmp_path / "out").mkdir()
    progress = mock.MagicMock()
    finetune.train(config, make_placement(config, 1), progress, rank=0)
    said = [call.args[0] for call in progress.line.call_args_list]
    exported = str(tmp_path / "out" / "hf")
    what = f"pads with {padded_with}, which ends no example"
    if padded_with is None:
        what = "has no token to pad with: let transformers read one text at a time"
    assert f"{exported} {what}" in said
    again = finetune.parse_command(f"rm --model {exported}".split())
    check_models(again, becomes_scalar=True)  # it may keep learning
    reader = finetune.Learner(again).trainer
    tokenizer = tokenization.load_tokenizer(exported)
    texts = [parse_rm(row, tokenizer, "f:1")[n % 2] for n, row in enumerate(rows[:4])]
    ours = list(chain(*reader.read_tokens([texts])))
    close(reader)
    theirs = AutoModelForSequenceClassification.from_pretrained(exported)
    assert tokenizer.pad_token == padded_with
    assert theirs.config.pad_token_id == tokenizer.pad_token_id
    batches = [{"input_ids": [text.prompt]} for text in texts]
    if padded_with:
        whole = {"input_ids": [text.prompt for text in texts]}
        batches = [tokenizer.pad(whole, padding_side=side) for side in ("left", "right")]
    found = []
    for batch in batches:
        columns = {name: torch.tensor(column) for name, column in batch.items()}
        with torch.no_grad():
            found += theirs(**columns).logits[:, 0].tolist()
    assert found == pytest.approx(ours * (len(found) // len(ours)), abs=1e-5)
    assert max(ours) - min(ours) > 1e-3
