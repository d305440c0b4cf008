"""Rows of a user's file, JSONL or Parquet, and the prompts in them. Errors name the file and the line."""

import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from config import UserError
from images.reader import IMAGE

Text = str | list[dict]  # plain text, or chat turns: {"role": ..., "content": ...}, both text
ROLES = ("system", "developer", "user", "assistant", "tool")  # a template may write any other, too
TURNS = f"a list of {{role, content}}, both text, of the roles {', '.join(ROLES)}"


def read_rows(path: Path, setting: str = "--data") -> list[tuple[int, dict]]:
    """Read (number from 1, row) of a .jsonl/.json (object a line) or .parquet file. UserError says where."""
    if not path.is_file():
        raise UserError(f"{setting} {path}: no such file")
    if path.suffix not in (".jsonl", ".json", ".parquet"):
        raise UserError(f"{setting} {path}: expected a .jsonl, .json or .parquet file")
    rows = _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)
    if not rows:
        raise UserError(f"{setting} {path}: the file holds no row")
    return rows


def _parquet_rows(path: Path) -> list[tuple[int, dict]]:
    import pyarrow.parquet
    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError

    try:
        # images: maybe more than the memory holds
        has_images = "images" in pyarrow.parquet.read_schema(path).names
        table = Dataset.from_parquet(str(path), keep_in_memory=not has_images)
    except (pyarrow.ArrowException, DatasetGenerationError, ValueError):
        raise UserError(f"--data {path}: not a Parquet file that can be read") from None
    if not has_images:
        return list(enumerate(table, 1))
    images = table.select_columns("images").with_format("arrow")  # as they are stored: not decoded

    def read(number: int) -> list:
        return images[number]["images"][0].as_py() or []

    texts = table.remove_columns("images")
    return [(n + 1, row | {"images": partial(read, n)}) for n, row in enumerate(texts)]


def _json_rows(path: Path) -> list[tuple[int, dict]]:
    # read line by line: the errors of datasets.load_dataset don't say which line is at fault
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (UnicodeDecodeError, json.JSONDecodeError) as error:
                raise UserError(f"{path}:{number}: not valid JSON in UTF-8: {error}") from None
            if not isinstance(row, dict):
                found = type(row).__name__
                raise UserError(f"{path}:{number}: expected a JSON object, found {found}")
            rows.append((number, row))
    return rows


def prompt_of(row: dict, where: str) -> Text:
    """The prompt of a row of `PromptFile`, with IMAGE for parts that are images. UserError says `where`."""
    prompt = read_turns(row.get("messages") or row.get("prompt"), where)
    if isinstance(prompt, list):
        prompt = [with_text(turn, where) for turn in prompt]
    if not (prompt and (isinstance(prompt, str) or is_chat(prompt))):
        raise UserError(f"{where}: needs `messages` ({TURNS}) or `prompt` (text, or such a list)")
    roles = [turn["role"] for turn in as_turns(prompt, "user")]
    if roles[-1] not in ("user", "tool") or "user" not in roles:
        example = ": that is an example for run.py sft" * (roles[-1] == "assistant")
        end = f"it ends with the {roles[-1]}'s turn{example}"
        raise UserError(f"{where}: {end}; a prompt ends with the user's")
    return with_tools(prompt, row, where)


def with_tools(prompt: Text, row: dict, where: str) -> Text:
    """Put a row's `tools` into its first turn, from where the chat template gets them. UserError."""
    tools = row.get("tools")
    if isinstance(prompt, str):
        if tools:
            raise UserError(f"{where}: `tools` go to the chat template, and its prompt is a text")
        return prompt
    tools = tools or prompt[0].get("tools")  # where some have them
    if not tools:
        return prompt
    read_functions(tools, "tools", where)
    return [prompt[0] | {"tools": tools}, *prompt[1:]]


def read_turns(turns: Any, where: str) -> Any:
    """Read the tool calls of chat turns; a turn that has some needs no content. UserError."""
    if not (isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)):
        return turns
    read = [dict(turn) for turn in turns]
    for turn in read:
        if calls := turn.pop("tool_calls", None):
            turn["tool_calls"] = read_functions(calls, "tool_calls", where)
            turn["content"] = turn.get("content") or ""
    return read


def read_functions(items: Any, field: str, where: str) -> list[dict]:
    """Read tools or tool calls; arguments may be JSON: templates take the object. UserError."""
    read = []
    for item in items if isinstance(items, list) else [None]:
        arguments = None
        match item:
            case {"function": {"name": str(name), **more}} if name.strip():
                given = more.get("arguments")
                arguments = {} if given in (None, "") else given
        if isinstance(arguments, str):
            with suppress(json.JSONDecodeError):
                arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            needed = "a list of {type: function, function: {name, ...}}, arguments an object"
            raise UserError(f"{where}: `{field}` is {needed}, not {str(items)[:60]!r}")
        read.append(item | {"function": item["function"] | {"arguments": arguments}})
    return read


def with_text(turn: Any, where: str) -> Any:
    """Make one text of a turn's content if it is a list of parts, of type text or image. UserError."""
    if not (isinstance(turn, dict) and isinstance(turn.get("content"), list)):
        return turn
    content = ""
    for part in turn["content"]:
        part = part if isinstance(part, dict) else {"type": part}
        # Parquet has all names
        match {name: value for name, value in part.items() if value is not None}:
            case {"type": "text", "text": str(text)}:
                content += text
            case {"type": "image", **others} if not others:
                content += IMAGE
            case other:
                needed = "only {type: text, text} and {type: image}, whose file stands in the row's `images`"
                raise UserError(f"{where}: a part {str(other)[:60]} of a content; {needed}")
    return turn | {"content": content}


def is_chat(turns: Any) -> bool:
    """Tell if `turns` is a list of {"role": one of ROLES, "content": text}."""
    if not (isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)):
        return False
    return all(t.get("role") in ROLES and isinstance(t.get("content"), str) for t in turns)


def as_turns(text: Text, role: str) -> list[dict]:
    """Chat turns; a text is one turn of `role`."""
    return [{"role": role, "content": text}] if isinstance(text, str) else text


def transcript(prompt: Text) -> str:
    """Write chat turns as text: the words of a lone one; of several, each behind its role."""
    turns = as_turns(prompt, "user")
    labelled = [f"{turn['role']}: {turn['content']}{turn.get('tool_calls', '')}" for turn in turns]
    return "\n".join(labelled) if len(turns) > 1 else turns[0]["content"]


def answer_key(answer: Any) -> str | None:
    """Read a row's `answer` as text, of a last `#### 72` 72. Columns with a gap hold floats: 56.0 is 56."""
    if answer is None or answer != answer:
        return None
    is_whole = isinstance(answer, float) and answer.is_integer()
    text = str(int(answer) if is_whole else answer).strip()
    last = text.rpartition("####")[2].strip()
    return text if "\n" in last else last
