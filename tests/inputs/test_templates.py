"""Checks of rendered chat templates: turns, tools, calls; settings for templates; their date."""

import json
from datetime import datetime
from functools import partial

import pytest

import build
import genrm
import rewards
from config import Config, parse_config
from engines.engine import Answer
from extras import scalar
from inputs import tokenization
from inputs.prompt_file import PromptFile
from inputs.rows import read_conversation
from inputs.templates import TODAY
from runtime.errors import UserError
from sample import Reply, Sample
from tests.support.models import TEMPLATE, save_tokenizer
from tests.support.rows import jsonl
from tests.support.templates import CODER, GEMMA, LLAMA3, MISTRAL, QWEN3


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture
def with_template(directory):
    """Return a function that gives the tokenizer a chat template, and perhaps special tokens."""

    def changed(template, special=()):
        tokenizer = tokenization.load_tokenizer(str(directory))
        tokenizer.chat_template = template
        tokenizer.add_special_tokens({"extra_special_tokens": [*special]})
        return tokenizer

    return changed


def turn(role, content, **more):
    return {"role": role, "content": content} | more


def call(name, arguments):
    return {"type": "function", "id": "call00001", "function": dict(name=name, arguments=arguments)}


def tool(name, **more):
    return {"type": "function", "function": {"name": name, "description": "Say it."} | more}


ASKED = turn("user", "What is 3+4?")
WEATHER = call("weather", {"city": 'Ulm "North"', "days": 2})
TOLD = turn("tool", '{"sun": "yes"}', name="weather", tool_call_id="call00001")


def prompts_of(tokenizer, tmp_path, *rows, **how):
    return PromptFile(jsonl(tmp_path / "rows.jsonl", rows), tokenizer, 4000, **how)


def calling(*calls):
    return turn("assistant", "", tool_calls=[*calls])


CALLED = calling(WEATHER)


def oracle(tokenizer, turns, **settings):
    """Return what transformers itself renders, with this date."""
    settings |= {"strftime_now": datetime(2024, 7, 26).strftime, "add_generation_prompt": True}
    return tokenizer.apply_chat_template(turns, **settings)["input_ids"]


THOUGHT = turn("assistant", "<think>\nOne\n</think>\n\nTwo.")
RENDERED = [
    (QWEN3, [turn("system", "Be brief."), ASKED, THOUGHT, turn("user", " And 2? \n")]),
    (QWEN3, [ASKED, CALLED, TOLD]),
    (LLAMA3, [turn("system", " Be brief.\n"), ASKED, CALLED, turn("tool", 'sun: "yes"\n\tor é')]),
    (MISTRAL, [turn("system", "user"), ASKED, turn("assistant", " 7 "), turn("user", "And 2?")]),
    (GEMMA, [turn("user", "  model\n"), turn("assistant", ""), turn("user", "~mark 0~")]),
    (CODER, [ASKED, turn("assistant", "I look.", tool_calls=[WEATHER, WEATHER]), TOLD]),
]


@pytest.mark.parametrize("template,turns", RENDERED)
def test_a_prompt_is_what_transformers_renders(with_template, tmp_path, template, turns):
    """Templates may strip, drop reasoning, move the system turn, and write JSON."""
    tokenizer = with_template(template)
    [prompt] = prompts_of(tokenizer, tmp_path, {"messages": turns})
    assert prompt.tokens == oracle(tokenizer, turns)


EACH = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
TOOLS = [tool("weather", parameters={"type": "object"}), tool("clock")]
WITH_TOOLS = {"messages": [ASKED], "tools": TOOLS}
LEFT_OUT = [
    (QWEN3, [turn("developer", "Be brief."), ASKED], "leaves out the developer's turn"),
    (QWEN3, [turn("developer", "user"), ASKED], "leaves out the developer's turn"),
    (EACH.replace("messages", "messages[:1]"), [ASKED, turn("user", "?")], "the user's turn"),
    (EACH.replace("m.content", "m.content[:9]"), [ASKED], "leaves out the user's turn"),
    (EACH.replace("messages", "messages[::2]"), [ASKED, TOLD, ASKED], "the tool's turn"),
    (EACH.replace("messages", "messages[-1:]"), [turn("user", "!"), ASKED], "the user's turn"),
    (EACH, [ASKED, CALLED, TOLD], "leaves out `tool_calls`"),
    (GEMMA, [turn("system", "Be brief."), ASKED], "refuses turns: System role not supported"),
    (EACH.replace("m.role", "m.at | length"), [ASKED | {"at": 3}], "refuses turns: .* no len"),
    (LLAMA3, WITH_TOOLS, "leaves out `tools`"),
    (QWEN3.replace("tool | tojson", "''"), WITH_TOOLS, "leaves out `tools`"),
]


@pytest.mark.parametrize("template,turns,message", LEFT_OUT)
def test_what_a_template_leaves_out_is_refused(with_template, tmp_path, template, turns, message):
    """File, line and role must be named when the rows are read, whatever else the prompt contains."""
    row = turns if isinstance(turns, dict) else {"messages": turns}
    with pytest.raises(UserError, match=rf"rows\.jsonl:2: the chat template in /\S+ .*{message}"):
        prompts_of(with_template(template), tmp_path, {"prompt": "What is 3+4?"}, row)


def learned(row: dict, tokenizer) -> tuple[list[int], list[int]]:
    """Return an example's prompt and response, as examples/sft.py reads them."""
    return tokenization.encode_pair(tokenizer, *read_conversation(row, "f:3"), "f:3")


def test_an_example_is_checked_as_a_prompt_is(with_template):
    """No turn may be left out, nor an answer's reasoning."""
    tokenizer = with_template(QWEN3)
    developer = [turn("developer", "Be brief."), ASKED, turn("assistant", "7")]
    with pytest.raises(UserError, match=r"f:3: .* leaves out the developer's turn"):
        learned({"messages": developer}, tokenizer)
    row = {"messages": [ASKED, THOUGHT]}
    _, response = learned(row, tokenizer)
    assert tokenizer.decode(response) == "<think>\nOne\n</think>\n\nTwo.<|im_end|>\n"
    for more in ({"reasoning_content": "3+4"}, {"function_call": {"name": "add"}}):
        with pytest.raises(UserError, match=r"f:3: .* leaves out the assistant's turn"):
            learned({"messages": [ASKED, turn("assistant", "7", **more)]}, tokenizer)
    dropping = with_template(QWEN3.replace("if loop.last", "if false"))
    with pytest.raises(UserError, match=r"f:3: .* leaves out the assistant's turn"):
        learned(row, dropping)


def test_tools_go_to_the_template(with_template, tmp_path):
    """Prompts' and examples' tools must be passed on as by transformers; a reward model sees them too."""
    tokenizer = with_template({"default": EACH, "tool_use": QWEN3})
    [prompt] = prompts_of(tokenizer, tmp_path, WITH_TOOLS)
    expected = oracle(tokenizer, [ASKED], tools=TOOLS)
    assert prompt.tokens == expected and prompt.question == ASKED["content"]
    row = {"prompt": [ASKED], "response": "7", "tools": TOOLS}
    tokens, response = learned(row, tokenizer)
    assert tokens == expected
    assert scalar.encode_exchange(tokenizer, prompt.turns, "7") == tokens + response
    for turns, answer in ((prompt.turns, "7"), ([ASKED], [CALLED])):
        with pytest.raises(UserError, match=r"f:1: .* has no chat template"):
            scalar.encode_exchange(with_template(None), turns, answer, where="f:1")
    _, response = learned({"messages": [ASKED, CALLED], "tools": TOOLS}, tokenizer)
    assert "<tool_call>" in tokenizer.decode(response)


ANSWERS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
SHOWING = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if IF %}{% for c in m.tool_calls %}{{ CALL }}"
SHOWING += "{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + ANSWERS
CALLS = {  # what a chat template does with arguments -> a call in it
    "joins": "c.function.name + c.function.arguments",
    "spells": "c.function.name ~ c.function.arguments",
    "writes": "c.function.name + c.function.arguments | tojson",
}
WHEN = [
    "m.tool_calls",
    "m.tool_calls and m.content is none",
    "m.tool_calls and m.content is string",
]
ARGUMENTS = '{"city": "Ulm \\"Nörd\\"", "days": [2, null]}'


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("arguments", [ARGUMENTS, json.loads(ARGUMENTS)])
@pytest.mark.parametrize("content", [None, ""])
def test_calls_have_the_form_that_a_template_reads(with_template, name, when, arguments, content):
    """Arguments are an object or a JSON text, and a call without content has none or an empty one."""
    called = turn("assistant", content, tool_calls=[call("weather", arguments)])
    template = SHOWING.replace("IF", when).replace("CALL", CALLS[name])
    tokenizer = with_template({"default": template, "tool_use": "{{ tools }}" + template})
    for named in ({}, {"tools": TOOLS}):
        _, response = learned({"messages": [ASKED, called]} | named, tokenizer)
        assert tokenizer.decode(response) == f"weather{ARGUMENTS}<|im_end|>\n"


TOOLS_ARE = r"`tools` is a list of \{type"
BAD_TURNS = [turn("assistant", "", tool_calls="weather")]
BAD_TURNS += [calling(call("weather", arguments)) for arguments in ([], "3", "{")]
BAD_TURNS += [calling(call(None, {}))]
BAD_TOOLS = [
    ({"tools": json.dumps(TOOLS)}, TOOLS_ARE),
    ({"tools": [{"name": "weather"}]}, TOOLS_ARE),
    ({"tools": TOOLS[0]}, TOOLS_ARE),
    ({"messages": [ASKED | {"tools": "weather"}]}, TOOLS_ARE),
    ({"messages": [ASKED | {"tools": TOOLS}, ASKED | {"tools": TOOLS}]}, "it has `tools` in more"),
    ({"prompt": "What?", "tools": TOOLS}, "`tools` go to the chat template"),
    ({"messages": [ASKED, turn("assistant", None, tool_calls=[])]}, "needs `messages`"),
    *[({"messages": [ASKED, each]}, "`tool_calls` is a list") for each in BAD_TURNS],
]


@pytest.mark.parametrize("row,message", BAD_TOOLS)
def test_tools_that_can_t_be_read_are_refused(with_template, tmp_path, row, message):
    row = {"prompt": [ASKED]} | row
    if "messages" in row:
        row = {"messages": [*row["messages"], TOLD]}
    with pytest.raises(UserError, match=r"rows\.jsonl:1: " + message):
        prompts_of(with_template(QWEN3), tmp_path, row)


def test_a_judges_template_is_checked_at_the_start(with_template, directory, monkeypatch):
    """It must be checked with its format's prompt, before any answer."""
    prompt = lambda question, answer: [turn("system", "Judge."), turn("user", question + answer)]  # noqa: E731
    monkeypatch.setitem(genrm.FORMATS, "own", genrm.JudgeFormat(genrm.chat_answer, prompt))
    config = Config(model="m", judge=(str(directory),), judge_format=("own",), max_model_len=2000)
    build = partial(rewards.build, config, [], decode="".join)
    build([with_template(QWEN3)])
    dropping = EACH.replace("messages", "messages if m.role != 'system'")
    for template, problem in ((GEMMA, "refuses turns"), (dropping, "leaves out the system's turn")):
        with pytest.raises(UserError, match=f"the chat template in {directory} {problem}"):
            build([with_template(template)])


@pytest.fixture
def loaded(directory, monkeypatch):
    """Return a function that loads the tokenizer as a run does, and returns the start's messages."""
    load = tokenization.load_tokenizer

    def loaded(template, *settings):
        def load_tokenizer(model):
            tokenizer = load(model)
            tokenizer.chat_template = template
            return tokenizer

        said = []
        monkeypatch.setattr(tokenization, "load_tokenizer", load_tokenizer)
        config = Config(steps=0, model=str(directory), template=settings)
        [tokenizer] = tokenization.load_tokenizers(config, said.append)
        return tokenizer, said

    return loaded


def test_the_date_in_a_prompt_is_always_the_same(directory, loaded):
    """It must be the default of Llama-3.2's template, which is printed, or the command line's."""
    assert datetime(2024, 7, 26) == TODAY
    date = f"{directory}: the date in its chat template is always 26 Jul 2024"
    another = f"{directory}: --template date_string=... sets another date"
    direct = EACH + "{{ strftime_now('Today Date: %Y-%m-%d') }}"
    for template, given, shown, expected in (
        (LLAMA3, [], "26 Jul 2024\n", [date, another]),
        (LLAMA3, ["date_string=1 May 2025"], "1 May 2025\n", []),
        (direct, [], "2024-07-26", [date]),
    ):
        tokenizer, said = loaded(template, *given)
        assert f"Today Date: {shown}" in tokenizer.decode(tokenization.encode(tokenizer, [ASKED]))
        assert said == expected


SHOWN = "{% if x is defined %}{{ x | tojson }}{% endif %}" + TEMPLATE
VALUES = r"""False|TRUE|None|true|-1.5|null|"true"|[1, {}]|1 May|é😀'"{%|NaN||a=b|"\u00e9\n\""""
TEMPLATES = [SHOWN, {"default": SHOWN, "tool_use": "{{ x }}"}, {"default": SHOWN, "tool_use": ""}]


@pytest.mark.parametrize("value", VALUES.split("|"))
def test_a_setting_is_read_as_json_else_as_text(directory, loaded, value):
    """It must be passed on exactly like a keyword of transformers, in each template of several."""
    try:
        python = {"NaN": '"NaN"', "False": "false", "TRUE": "true", "None": "null"}
        expected = json.loads(python.get(value, value))
    except json.JSONDecodeError:
        expected = value
    plain = tokenization.load_tokenizer(str(directory))
    for template in TEMPLATES:
        plain.chat_template = template
        tokenizer, _ = loaded(template, f"x={value}")
        assert tokenization.encode(tokenizer, [ASKED]) == oracle(plain, [ASKED], x=expected)


UNKNOWN = "role=x loop=1 messages=1 enable_thinkng=0 think=0 enable_thinking =1 enable-thinking=1"


@pytest.mark.parametrize("setting", UNKNOWN.split())
def test_a_setting_that_no_template_mentions_is_refused(loaded, setting):
    """A word in its text must not count as a mention."""
    with pytest.raises(UserError, match=f"^--template {setting}: no NAME=VALUE of what a"):
        loaded(QWEN3, "enable_thinking=true", setting)


@pytest.mark.parametrize("template", [None, "{{ x '"])
def test_nothing_is_set_of_no_template(loaded, template):
    with pytest.raises(UserError, match=r"^--template x=1: no NAME=VALUE"):
        loaded(template, "x=1")


ADDED = ["<think>", "<tool_call>", "</tool_response>", "[INST]", "<turn_end>", "answer", "\t\t"]
CONTROLS, END = ADDED[:5], "<turn_end>"


@pytest.fixture
def tagged(tmp_path):
    """Return a tokenizer with added tokens that aren't special; generation_config.json names an end."""
    tokenizer = tokenization.load_tokenizer(str(save_tokenizer(tmp_path)))
    tokenizer.add_tokens(ADDED)
    tokenizer.chat_template = TEMPLATE.replace("<|im_end|>", END)
    tokenizer.save_pretrained(tmp_path)
    ends = {"eos_token_id": [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END)]}
    (tmp_path / "generation_config.json").write_text(json.dumps(ends))
    return tokenization.load_tokenizer(str(tmp_path))


WRITTEN = {  # who wrote it -> what stays a token besides words and spaces
    "user": [],
    "tool": [],
    "system": CONTROLS[:-1],
    "assistant": CONTROLS[:-1],
}


@pytest.mark.parametrize("role", WRITTEN)
def test_what_controls_a_chat_is_nobodys_text(tagged, role):
    """A tool's or user's text has none of the added tokens but words and spaces; no turn ends by itself."""
    text = f"{' '.join(ADDED)} <|im_end|>"
    said = [ASKED, turn(role, text), ASKED]
    plain = tokenization.encode(tagged, [ASKED, turn(role, "?"), ASKED])
    tokens = tokenization.encode(tagged, said)
    found = {name for name in ADDED if tagged.convert_tokens_to_ids(name) in {*tokens} - {*plain}}
    assert found == {*WRITTEN[role], *ADDED[5:]}
    for name in (END, "<|im_end|>"):
        end = tagged.convert_tokens_to_ids(name)
        assert tokens.count(end) == plain.count(end)
    for reply in ([turn("user", text)], [turn("system", text), ASKED]):
        for prompt in ([], [ASKED]):
            tokens = tokenization.encode_reply(tagged, prompt, reply, "here")
            assert not {*tokens} & {*tagged.convert_tokens_to_ids(CONTROLS[:-1])}
    tokens = scalar.encode_exchange(tagged, [turn("user", "?"), turn(role, text), ASKED], text)
    assert not {*tokens} & {*tagged.convert_tokens_to_ids(CONTROLS[:-1])}


def test_what_ended_a_turn_is_no_part_of_its_text(tagged, tmp_path):
    """It is in `text`, which has all; other added tokens that the policy wrote stay in both."""
    given = ["--model", str(tmp_path), "--rule", "right", "--judge-format", "chat"]
    given += ["--max-model-len", "99", "--max-new-tokens", "9"]
    inputs = build.load_inputs(parse_config(given), [], print)
    written = "<think>Sum.</think><tool_call> 12"
    response = tagged(written + END, add_special_tokens=False)["input_ids"]
    sample = Sample(0, 0, [1], "3*4?", "12", response=response, finish="stop")
    assert inputs.rewards.final_answer(sample) == "<tool_call> 12"
    seen = rewards.seen_by_rules(sample, inputs.decode)
    assert (seen.text, seen.plain_text) == (written + END, written)
    sample.replies = [Reply(len(response), [1], [ASKED])]
    assert rewards.seen_by_rules(sample, inputs.decode).turns[1] == turn("assistant", written)
    config = Config(model="m", judge=(str(tmp_path),), judge_format=("chat",), max_model_len=2000)
    [judge] = rewards.build(config, [], [tagged], "".join).judges
    said = Answer(0, response, [], "stop", [])
    assert judge.format.read(judge, said).critique == written


SPELLED = "<think>Sum<|im_end|></think> 7"


def test_the_learned_turn_alone_spells_special_tokens(with_template):
    """`<think>` must be a token there, in chats and texts; in all other turns it is split."""
    tokenizer = with_template(TEMPLATE, ["<think>", "</think>"])
    begin, end, stop = tokenizer.convert_tokens_to_ids(["<think>", "</think>", "<|im_end|>"])
    prompt = [turn("user", SPELLED), turn("assistant", SPELLED), turn("user", SPELLED)]
    tokens, response = learned({"prompt": prompt, "response": SPELLED}, tokenizer)
    assert not {begin, end} & {*tokens} and tokens.count(stop) == 3
    special = [token for token in response if token in (begin, end, stop)]
    assert special == [begin, stop, end, stop]
