"""Chat templates: settings, rendering, and a check that nothing important was left out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import lru_cache, partial
from itertools import product
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, TemplateError, meta

from inputs.hf_directory import named_ends
from runtime.errors import UserError

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedTokenizerBase as Tokenizer

# placeholders for an image and a clip in rows' texts, whatever the model's own tokens are
IMAGE = "<image>"
VIDEO = "<video>"
TODAY = datetime(2024, 7, 26)  # for templates that read the clock: Llama-3.2's default
PARSER = Environment(extensions=["jinja2.ext.loopcontrols"])  # as in transformers
MARKER = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # a tag only transformers knows
GIVEN = {"messages", "tools", "documents", "add_generation_prompt"}  # set by the program
OF_CALLS = (TypeError, ValueError, ArithmeticError, RecursionError)  # raised by a template's calls
TAG = re.compile(r"[^\w\s]")  # in <tool_call>, but not in added words and white space
NAMES = {"role", "content", "name", "id", "tool_call_id", "tool_calls"}  # not contents of a turn
# how a template may read a tool call: arguments as JSON text, no content as null
FORMS = [*product((False, True), repeat=2)]
CHECKED = ("system", "developer", "user", "tool")  # roles that a template may not leave out


def apply_settings(tokenizers: list[Tokenizer], given: tuple[str, ...], say: Callable) -> None:
    """Prepend --template's NAME=VALUE to all templates. Raises UserError if none mentions a NAME."""
    settings = dict(text.partition("=")[::2] for text in given)
    before = "".join(f"{{% set {name} = {literal(text)} +%}}" for name, text in settings.items())
    mentioned: set[str] = set()
    for tokenizer in tokenizers:
        templates = tokenizer.chat_template or {}
        if isinstance(templates, str):
            templates = {"default": templates}
        source = "".join(templates.values())
        if "strftime_now" in source and "date_string" not in settings:
            name = tokenizer.name_or_path
            say(f"{name}: the date in its chat template is always {TODAY:%d %b %Y}")
            if "date_string" in source:
                say(f"{name}: --template date_string=... sets another date")
        if templates and settings:
            with suppress(TemplateError):  # such a template renders nothing
                mentioned |= meta.find_undeclared_variables(PARSER.parse(MARKER.sub("", source)))
            tokenizer.chat_template = {name: before + text for name, text in templates.items()}
    for text in given:
        if "=" not in text or text.partition("=")[0] not in mentioned - GIVEN:
            raise UserError(f"--template {text}: no NAME=VALUE of what a chat template asks for")


def literal(text: str) -> str:
    """Return a setting's value as a template literal: JSON or a Python constant if it is one, else text."""
    if text.capitalize() in ("True", "False", "None"):
        return text.capitalize()
    with suppress(json.JSONDecodeError):
        text = json.loads(text, parse_constant=str)
    return repr(text)


@lru_cache(maxsize=16)  # looking up a tokenizer's tokens is slow
def broken_tokens(tokenizer: Tokenizer, keeps_tags: bool) -> dict[str, str]:
    """Map the spelling of each token that controls a chat to one that is text.

    These are special tokens, ends of answers, and, unless it `keeps_tags`, added ones such as <tool_call>.
    """
    names = {*tokenizer.all_special_tokens}
    names |= {tokenizer.decode([end]) for end in named_ends(tokenizer.name_or_path)}
    for token in tokenizer.added_tokens_decoder.values():
        if token.special or (TAG.search(token.content) and not keeps_tags):
            names.add(token.content)
    return {name: f"{name[0]} {name[1:]}" for name in filter(None, names)}


def break_tokens(tokenizer: Tokenizer, text: str, keeps_tags: bool = False) -> str:
    """Put a space into spelled-out tokens, `< |im_end|>`, so that a text can't end its own turn."""
    broken = broken_tokens(tokenizer, keeps_tags)
    while found := [name for name in broken if name in text and name not in broken[name]]:
        for name in found:
            text = text.replace(name, broken[name])
    return text


def render(
    tokenizer: Tokenizer, turns: list, where: str, has_answer=False, is_learned=False, image=IMAGE
) -> str:
    """Render chat turns and the first one's `tools`. Raises UserError if the template leaves something out.

    has_answer: the last turn is an answer. is_learned: it may spell out all tokens. In other turns of the
    assistant and of the system, added tokens that aren't special stay; in users' and tools', none does.
    image: replaces IMAGE, as in Qwen's templates.
    """
    name = tokenizer.name_or_path
    if tokenizer.chat_template is None:
        raise UserError(
            f"{where}: {name} has no chat template, which chat turns (such as a `question`) need"
        )

    def plain(turn: dict) -> dict:
        keeps_tags = turn["role"] not in ("user", "tool")
        broken = map_texts(partial(break_tokens, tokenizer, keeps_tags=keeps_tags), turn)
        return map_texts(lambda text: text.replace(IMAGE, image), broken)

    settings = {"add_generation_prompt": not has_answer, "strftime_now": TODAY.strftime}
    render_as = partial(tokenizer.apply_chat_template, tokenize=False, **settings)

    def apply(turns: list[dict], tools: list | None) -> str:
        if not any("tool_calls" in turn for turn in turns):
            return render_as(turns, tools=tools)
        form = form_of_calls(tokenizer, tools is not None)
        return render_as([with_calls(turn, *form) for turn in turns], tools=tools)

    try:
        broken = turns[:-1] if is_learned else turns
        turns = [*map(plain, broken), *map_texts(str, turns[len(broken) :])]
        tools = turns[0].pop("tools", None)
        text = apply(turns, tools=tools)
        lost = left_out(apply, turns, tools, is_learned)
    except (TemplateError, *OF_CALLS) as error:
        raise UserError(f"{where}: the chat template in {name} refuses turns: {error}") from None
    if lost:
        raise UserError(f"{where}: the chat template in {name} leaves out {lost}")
    return text


@lru_cache(maxsize=8)  # tried once per template, not once per row
def form_of_calls(tokenizer: Tokenizer, has_tools: bool) -> tuple[bool, bool]:
    """Return the first of FORMS in which the chat template shows a tool call's arguments, else the first."""
    arguments = {"place": "~here~"}
    look = {"type": "function", "id": "call00001", "function": {"name": "look"}}
    call = look | {"function": {"name": "look", "arguments": arguments}}
    asked = {"role": "user", "content": "Is it?"}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    settings = {"tools": [look] if has_tools else None, "strftime_now": TODAY.strftime}
    for form in FORMS:
        with suppress(TemplateError, *OF_CALLS):
            turns = [asked, with_calls(called, *form)]
            text = tokenizer.apply_chat_template(turns, tokenize=False, **settings)
            if "~here~" in text and str(arguments) not in text:  # which would be Python, not JSON
                return form
    return FORMS[0]


def with_calls(turn: dict, as_text: bool, as_null: bool) -> dict:
    """Return a turn with its tool calls, if it has any, in one of FORMS."""
    if "tool_calls" not in turn:
        return turn
    write = partial(json.dumps, ensure_ascii=False) if as_text else dict
    calls = []
    for call in turn["tool_calls"]:
        function = call["function"]
        arguments = write(function["arguments"])
        calls.append(call | {"function": function | {"arguments": arguments}})
    content = turn["content"] or (None if as_null else "")
    return turn | {"content": content, "tool_calls": calls}


def left_out(apply: Callable, turns: list[dict], tools: list | None, is_learned: bool) -> str:
    """Render marked texts; return what is left out of tools, calls, CHECKED roles, the last turn, or ""."""
    marks: dict[str, str] = {}  # mark -> what has it

    def mark(owner: str, text: str) -> str:
        if not text.strip():
            return text
        own = f"~mark {len(marks)}~"
        marks[own] = owner
        return text + own

    def named(items: list[dict], owner: str) -> list[dict]:
        functions = [item["function"] for item in items]
        marked = [each | {"name": mark(owner, each["name"])} for each in functions]
        return [item | {"function": each} for item, each in zip(items, marked, strict=True)]

    shown = []
    for number, turn in enumerate(turns, 1):
        mark_turn = partial(mark, f"the {turn['role']}'s turn")
        marked = dict(turn)
        if number == len(turns) and is_learned:
            for name in turn.keys() - NAMES:  # such as reasoning_content
                marked[name] = map_texts(mark_turn, turn[name])
            parts = re.split("(</?think>)", turn["content"])
            parts[::2] = map(mark_turn, parts[::2])
            marked["content"] = "".join(parts)
        elif number == len(turns) or turn["role"] in CHECKED:
            marked["content"] = mark_turn(turn["content"])
        if calls := turn.get("tool_calls"):
            marked["tool_calls"] = named(calls, "`tool_calls`")
        shown.append(marked)
    rendered = apply(shown, tools=named(tools or [], "`tools`") or None)
    return next((owner for own, owner in marks.items() if own not in rendered), "")


def map_texts(change: Callable[[str], str], value: Any) -> Any:
    """Apply `change` to every text in a JSON value, and to every name in its objects."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [map_texts(change, each) for each in value]
    if isinstance(value, dict):
        return {change(name): map_texts(change, each) for name, each in value.items()}
    return value
