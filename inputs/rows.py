"""Rows of a user's JSONL or Parquet file, and the prompts in them. Errors name the file and the line."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date, time
from decimal import Decimal
from functools import lru_cache, partial
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any
from unicodedata import normalize

from inputs.templates import IMAGE, VIDEO
from runtime.errors import UserError

PLACES = {"images": IMAGE, "videos": VIDEO}  # column with the files -> placeholder in the text
Text = str | list[dict]  # plain text, or chat turns: {"role": ..., "content": ...}, both text
ROLES = ("system", "developer", "user", "assistant", "tool")  # a template might accept any other
TURNS = f"a list of {{role, content}}, both text, of the roles {', '.join(ROLES)}"
TEXTS = ("messages", "prompt", "response", "completion")  # or chat turns
# columns that are of use without a rule
READ = {"answer", "question", "tools", "text", *TEXTS, *PLACES}
# turns written by JSON, or by str() of Python or NumPy
TURNS_AS_TEXT = re.compile(r"""(?s)\s*+(array\()?\[?\s*+\{.*["'](role|from)["']\s*+:""")
MASKS = ("weight", "train", "trainable", "loss_mask")  # a turn isn't learned if one is false or 0
UNREAD = {  # other trainers' columns -> where their contents go here
    "system": "a turn of the system is",
    "system_prompt": "a turn of the system is",
    "chat_template_kwargs": "--template NAME=VALUE is, for all rows",
    "image": "`images`, a list, is",
    "video": "`videos`, a list, is",
}


def read_rows(path: Path, setting: str = "--data", say=print) -> Iterator[tuple[int, dict]]:
    """Read a .jsonl, .json (one object per line) or .parquet file: (number from 1, row).

    A row has JSON values, without null columns, and for bytes of media a function that reads them. A number
    with more digits than a float's is a Decimal. Raises UserError if the file or a row can't be read, or if
    there is no row.
    """
    if not path.is_file():
        raise UserError(f"{setting} {path}: no such file")
    if path.suffix not in (".jsonl", ".json", ".parquet"):
        raise UserError(f"{setting} {path}: expected a .jsonl, .json or .parquet file")
    if path.suffix == ".parquet":
        rows = _parquet_rows(path, say)
    else:  # not datasets.load_dataset, whose errors don't name the line
        lines = enumerate(_lines(path, setting), 1)
        rows = ((number, _row(line, f"{path}:{number}")) for number, line in lines if line.strip())
    if (first := next(rows, None)) is None:
        raise UserError(f"{setting} {path}: the file holds no row")
    yield from chain([first], rows)


def _lines(path: Path, setting: str) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            for line in file:
                yield from line.splitlines()
    except OSError as error:
        raise UserError(f"{setting} {path}: {error.strerror}") from None


def _row(line: bytes, where: str) -> dict:
    """Read a line's JSON object, the answer with all its digits. Raises UserError as `_checked`."""
    try:
        row = _json(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON in UTF-8: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object, found {type(row).__name__}")
    answer = row.get("answer")
    if isinstance(answer, float) and 0 < abs(answer) < inf:
        row["answer"] = _as_float(json.loads(line, parse_float=Decimal)["answer"])
    return _checked(row, where)


def _checked(row: dict, where: str) -> dict:
    """Return a row's columns. Raises UserError if turns are stored as text, or for UNREAD columns."""
    for name in TEXTS:
        text = row.get(name)
        if not isinstance(text, str):
            continue
        if name == "messages" or (TURNS_AS_TEXT.match(text) and "}" in text):
            raise UserError(f"{where}: `{name}` must be a list of turns, not a text: {text[:40]!r}")
    for name in filter(row.get, UNREAD):
        raise UserError(f"{where}: `{name}` isn't read; {UNREAD[name]}")
    return without_nulls(row)


def _json(text: bytes | str) -> Any:
    """Read JSON. Raises ValueError or RecursionError if it is invalid or can't be encoded in UTF-8."""
    found = json.loads(text, object_pairs_hook=_object)
    json.dumps(found, ensure_ascii=False).encode()  # fails for lone surrogates such as "\ud83d"
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict:
    """Make a dict of a JSON object's fields. Raises ValueError if two have the same name."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a name appears twice in one object: {[name for name, _ in pairs]}")
    return found


def without_nulls(fields: dict) -> dict:
    return {name: value for name, value in fields.items() if value is not None}


def _as_float(value: Decimal) -> float | Decimal:
    """Return a number as a float, if that keeps all digits."""
    near = float(value)
    return near if Decimal(repr(near)) == value else value


def _parquet_rows(path: Path, say: Callable[[str], None]) -> Iterator[tuple[int, dict]]:
    """Read each row as if it were written in JSON."""
    import pyarrow.parquet
    from datasets.exceptions import DatasetGenerationError

    media = {}  # column -> its bytes, which may exceed the memory
    try:
        file = pyarrow.parquet.ParquetFile(path)
        kinds = {field.name: field.type for field in file.schema_arrow}
        if len(kinds) < len(file.schema_arrow):
            raise UserError(f"{path}: two columns have one name, of {', '.join(kinds)}")
        for name in PLACES:
            if re.match("(large_)?list<.*binary", str(kinds.get(name))):
                del kinds[name]
                media[name] = _media_column(path, name)
        table = file.read(columns=list(kinds))
    except (pyarrow.ArrowException, DatasetGenerationError, OSError):
        raise UserError(f"{path}: not a Parquet file that can be read") from None
    if "answer" in kinds and pyarrow.types.is_temporal(kinds["answer"]):
        raise UserError(f"{path}:1: `answer` is text or a number, not {kinds['answer']}")

    columns = {}
    for name in kinds:
        try:
            columns[name] = _cells(table[name], name, path)
        except UserError as error:
            if name in READ:
                raise
            say(f"{error}; rows go without it")
    for number in range(table.num_rows):
        row = {name: cells[number] for name, cells in columns.items()}
        row = _checked(row, f"{path}:{number + 1}")
        for name, column in media.items():
            if len(column[number][name][0].values or ()):
                row[name] = partial(_media, path, name, number)
        yield number + 1, row


@lru_cache(maxsize=8)
def _media_column(path: Path, name: str) -> Any:
    from datasets import Dataset

    return Dataset.from_parquet(str(path), columns=[name]).with_format("arrow")


def _media(path: Path, name: str, number: int) -> list:
    return _media_column(path, name)[number][name][0].as_py() or []


def _cells(column: Any, name: str, path: Path) -> list:
    """Read a column as if it were written in JSON. Raises UserError for a value that JSON lacks."""
    cells = []
    try:
        for value in column.to_pylist(maps_as_pydicts="strict"):
            cells.append(_plain(value, column.type))
    except (ValueError, OverflowError, KeyError, TypeError) as error:
        line = len(cells) + 1
        raise UserError(f"{path}:{line}: `{name}` ({column.type}) can't be read: {error}") from None
    return cells


def _plain(value: Any, kind: Any) -> Any:
    """Convert a Parquet value of an Arrow type. Raises ValueError if JSON lacks it.

    A struct's nulls are left out, because the file fills them in. 16- and 32-bit floats become what was
    written: 0.1, not 0.10000000149.
    """
    from pyarrow import BaseExtensionType, MapType

    if isinstance(kind, BaseExtensionType):
        kind = kind.storage_type
    match value:
        case None | bool() | int() | str():
            return value
        case list():
            return [_plain(each, kind.value_type) for each in value]
        case dict() if isinstance(kind, MapType):
            return {str(name): _plain(each, kind.item_type) for name, each in value.items()}
        case dict():
            fields = without_nulls(value)
            return {name: _plain(each, kind.field(name).type) for name, each in fields.items()}
        case float():
            is_rounded = str(kind) in ("float", "halffloat") and not value.is_integer()
            return float(str(kind.to_pandas_dtype()(value))) if is_rounded else value
        case bytes():
            return value.decode()
        case Decimal():
            return int(value) if value == int(value) else _as_float(value)
        case date() | time():
            return value.isoformat()
    raise ValueError(f"a value of the type {type(value).__name__}")


def prompt_of(row: dict, where: str, sees: bool) -> Text:
    """Return a row's prompt, with IMAGE and VIDEO in place of media. Raises UserError, naming `where`."""
    question = row.get("question")
    if isinstance(question, str) and question.strip() and not {"messages", "prompt"} & row.keys():
        row = row | {"messages": as_turns(question, "user")}  # as in GSM8K
    columns = (row.get("messages"), row.get("prompt"))
    messages, prompt = (read_turns(column, where, sees) for column in columns)
    if messages and prompt and as_turns(prompt, "user") != messages:
        raise UserError(f"{where}: `messages` and `prompt` differ; leave one out")
    prompt = messages or prompt
    if not (prompt and (isinstance(prompt, str) or is_chat(prompt))):
        raise UserError(
            f"{where}: needs `messages` ({TURNS}), `prompt` (text, or such a list) or `question` (text); "
            f"the row has {', '.join(row) or 'no column'}"
        )
    roles = [turn["role"] for turn in as_turns(prompt, "user")]
    if roles[-1] not in ("user", "tool") or "user" not in roles:
        raise UserError(
            f"{where}: it ends with the {roles[-1]}'s turn; a prompt ends with the user's "
            "(examples/sft.py takes examples)"
        )
    return with_tools(prompt, row, where)


def with_tools(prompt: Text, row: dict, where: str) -> Text:
    """Move a row's `tools` into its first turn for `render`. Raises UserError if they can't be used."""
    places = (row, *as_turns(prompt, "user"))  # some rows have them in a turn
    given = [place["tools"] for place in places if place.get("tools")]
    if not given:
        return prompt
    if isinstance(prompt, str):
        raise UserError(f"{where}: `tools` go to the chat template, and its prompt is a text")
    if len(given) > 1:
        raise UserError(f"{where}: it has `tools` in more than one place")
    read_functions(given[0], "tools", where)
    return [prompt[0] | {"tools": given[0]}, *prompt[1:]]


def read_turns(turns: Any, where: str, sees: bool = False) -> Any:
    """Read chat turns' contents (optional with tool calls). Raises UserError if a part isn't known."""
    if not (isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)):
        return turns
    read = [without_nulls(turn) for turn in turns]
    for turn in read:
        turn["content"] = read_content(turn.get("content"), where, sees)
        if calls := turn.pop("tool_calls", None):
            turn["tool_calls"] = read_functions(calls, "tool_calls", where)
            turn["content"] = turn["content"] or ""
    return read


def read_conversation(row: dict, where: str) -> tuple[Text, Text]:
    """Return a row's prompt and answer, both text or both turns. Raises UserError if one can't be used."""
    names = [name for name in ("messages", "response", "completion") if name in row]
    prompt = row.get("prompt") or []
    if len(names) != 1 or bool(prompt) == (names == ["messages"]):
        raise UserError(f"{where}: needs `messages`, or `prompt` and `response` or `completion`")
    if row.get("label") is False:
        raise UserError(f"{where}: its `label` excludes the answer: leave the row out")
    answer = row[names[0]]
    if isinstance(prompt, str) and isinstance(answer, str) and answer.strip():
        return prompt, answer
    before = read_turns(as_turns(prompt, "user"), where)
    turns = read_turns(as_turns(answer, "assistant"), where)
    if not (is_chat(before) and is_chat(turns)):
        raise UserError(f"{where}: a prompt and an answer are needed, each text or {TURNS}")
    if before and len(turns) != 1:
        raise UserError(f"{where}: `{names[0]}` isn't one turn, the answer to `prompt`")
    *before, last = before + turns
    if unlearned := [name for name in MASKS if last.get(name, 1) == 0]:
        raise UserError(f"{where}: its `{unlearned[0]}` excludes the answer: leave the row out")
    roles = [turn["role"] for turn in before]
    is_empty = not (last["content"].strip() or "tool_calls" in last)
    if last["role"] != "assistant" or roles[-1:] in ([], ["assistant"]) or is_empty:
        raise UserError(f"{where}: a conversation ends with one turn of the assistant, not empty")
    return with_tools(before, row, where), [last]


def read_functions(items: Any, field: str, where: str) -> list[dict]:
    """Read tools or tool calls, and parse JSON arguments. Raises UserError if one is of another form."""
    read = []
    for item in items if isinstance(items, list) else [None]:
        arguments = None
        match item:
            case {"function": {"name": str(name), **more}} if name.strip():
                given = more.get("arguments")
                arguments = {} if given in (None, "") else given
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                arguments = _json(arguments)
        if not isinstance(arguments, dict):
            raise UserError(
                f"{where}: `{field}` is a list of {{type: function, function: {{name, ...}}}}, "
                f"arguments an object, not {str(items)[:60]!r}"
            )
        function = without_nulls(item["function"]) | {"arguments": arguments}
        read.append(without_nulls(item) | {"function": function})
    return read


def read_content(content: Any, where: str, sees: bool) -> Any:
    """Join texts, and media if the model `sees`, into one text. Raises UserError for other parts."""
    if not isinstance(content, list):
        return content
    whole = ""
    for part in content:
        match without_nulls(part) if isinstance(part, dict) else {"type": part}:
            case {"type": "text", "text": str(text)}:
                whole += text
            case {"type": "image" | "video" as kind, **others} if sees and not others:
                whole += IMAGE if kind == "image" else VIDEO
            case other:
                if sees:
                    raise UserError(
                        f"{where}: a part {str(other)[:60]} of a content; only {{type: text, text}}, "
                        "{type: image} and {type: video}: files stand in the row"
                    )
                raise UserError(
                    f"{where}: a part {str(other)[:60]} of a content; only {{type: text, text}}"
                )
    return whole


def is_chat(turns: Any) -> bool:
    """Return whether `turns` is a list of {"role": one of ROLES, "content": text}."""
    if not (isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)):
        return False
    return all(t.get("role") in ROLES and isinstance(t.get("content"), str) for t in turns)


def as_turns(text: Text, role: str) -> list[dict]:
    """Return chat turns as they are, a text as one turn of `role`."""
    return [{"role": role, "content": text}] if isinstance(text, str) else text


def transcript(prompt: Text) -> str:
    """Write chat turns as text: one turn as its content only, several with their roles in front."""
    turns = as_turns(prompt, "user")
    labelled = [f"{turn['role']}: {turn['content']}{turn.get('tool_calls', '')}" for turn in turns]
    return "\n".join(labelled) if len(turns) > 1 else turns[0]["content"]


def answer_key(answer: Any, where: str) -> str | None:
    """Return `answer` as text: "... #### 72" is 72, 56.0 is 56. Raises UserError for other kinds."""
    if answer is None or answer != answer:
        return None
    text = ""
    if isinstance(answer, str):
        text = normalize("NFC", answer.strip())
    elif type(answer) in (int, float, Decimal) and abs(answer) != inf:
        whole, _, digits = f"{Decimal(str(answer or 0)):f}".partition(".")
        text = f"{whole}.{digits.rstrip('0')}".removesuffix(".")
    last = text.rpartition("####")[2].strip()
    if text and not last:
        raise UserError(f"{where}: nothing follows the last #### of `answer`, {answer!r:.60}")
    if not last:
        raise UserError(f"{where}: `answer` is text or a number, not {answer!r:.60}")
    return text if "\n" in last else last
