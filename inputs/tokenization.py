"""Tokenizers, and the encoding of texts, chats and images."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from config import Config
from inputs.hf_directory import named_ends, readable, sees
from inputs.rows import Text, as_turns
from inputs.templates import IMAGE, apply_settings, break_tokens, map_texts, render
from runtime.errors import UserError
from runtime.hooks import needed

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedTokenizerBase as Tokenizer


Reader = Any  # reads images and clips for a model: see extras/images/reader.py
Media = dict[str, Callable[[], list]]  # IMAGE, VIDEO -> function that returns a row's files
Pair = tuple[list[int], list[int]]  # tokens of a prompt, and of its response with the end token
BEFORE = "\n.0a"  # characters that a text may follow, for encode_after


def load_tokenizer(model_dir: str) -> Tokenizer:
    """Load a directory's tokenizer without running any code of its own. Raises UserError if it can't."""
    from tokenizers.models import BPE
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    options = {"local_files_only": True, "trust_remote_code": False}
    with readable(f"no tokenizer could be loaded from {model_dir}"):
        tokenizer = AutoTokenizer.from_pretrained(model_dir, **options)
        if not isinstance(tokenizer.chat_template, str | dict | None):
            raise ValueError("its chat template isn't text")
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            model = tokenizer.backend_tokenizer.model
            if isinstance(model, BPE):
                model.dropout = None  # it encodes a text differently each time
    return tokenizer


def load_tokenizers(config: Config, say: Callable[[str], None]) -> list[Tokenizer]:
    """Load the policy's and judges' tokenizers. Raises UserError if one, or a --template setting, fails."""
    tokenizers = [load_tokenizer(model) for model in (config.model, *config.judge_models)]
    apply_settings(tokenizers, config.template, say)
    return tokenizers


def reader_of(model_dir: str, *sampling: float) -> Reader | None:
    """Return a model's reader, None if it only reads text. sampling: frames per second, most frames."""
    if not sees(model_dir):
        return None
    return needed("image_reader", model_dir)(model_dir, *sampling)


@lru_cache(maxsize=8)  # rendered once per model, not once per row
def end_of_turn(tokenizer: Tokenizer) -> int | None:
    """Return the special or end-of-sequence token that ends an answer in the chat template, or None."""
    if tokenizer.chat_template is None:
        return None
    turns = as_turns("Is it?", "user") + as_turns("yes", "assistant")
    try:
        text = render(tokenizer, turns, "a prompt", has_answer=True)
    except UserError:  # rows with plain text need no template
        return None
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    ends = special | named_ends(tokenizer.name_or_path)
    behind = tokenizer(text.rpartition("yes")[2], add_special_tokens=False)["input_ids"]
    return next((token for token in behind if token in ends), None)


def check_end(tokenizer: Tokenizer, text: str, where: str, name: str) -> None:
    """Raise UserError if a text, called `name`, ends with an end token: that is added later."""
    stop = {tokenizer.eos_token_id, end_of_turn(tokenizer)} - {None}
    if text.endswith(tuple(map(tokenizer.decode, stop))):
        raise UserError(f"{where}: the {name} ends with what ends an answer: {text[-20:]!r}")


def check_prompt(tokenizer: Tokenizer, prompt: Text, where: str) -> None:
    """Raise UserError, naming `where`, if no answer can follow the prompt or no answer could end."""
    end = end_of_turn(tokenizer)
    if isinstance(prompt, str):
        check_end(tokenizer, prompt, where, "prompt")
    elif end is None and tokenizer.chat_template is not None:
        render(tokenizer, prompt, where)  # raises UserError if the template is at fault
        path = tokenizer.name_or_path
        raise UserError(f"{where}: the chat template in {path} ends no answer with a special token")


def encode_prompt(
    tokenizer: Tokenizer, reader: Reader | None, prompt: Text, images=(), where="a prompt"
) -> list[int]:
    """Encode a prompt with its images. Raises UserError if there aren't as many as IMAGEs in the text."""
    if reader is None:
        return encode(tokenizer, prompt, where)
    image = "".join(tokenizer.convert_ids_to_tokens(reader.placeholder))
    tokens = encode(tokenizer, prompt, where, image=image)
    return reader.expanded(tokens, images, where)


def encode(
    tokenizer: Tokenizer, prompt: Text, where="a prompt", has_answer=False, image: str = IMAGE
) -> list[int]:
    """Encode text, or chat turns as rendered. Raises UserError if the chat template can't render them."""
    if isinstance(prompt, str):
        text = prompt.replace(IMAGE, image)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        framed = tokenizer(text)["input_ids"]
        # keep a BOS that the tokenizer adds, unless the text has it, but no EOS: an answer follows
        return framed[: framed.index(tokens[0])] + tokens if tokens else framed
    text = render(tokenizer, prompt, where, has_answer, image=image)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@lru_cache(maxsize=8)
def adds_space(tokenizer: Tokenizer) -> bool:
    """Return whether a space is put before the first text, as by SentencePiece."""
    first, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("x", "0x"))
    return after[-len(first) :] != first


def encode_after(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text that follows others, without a space before it. Their tokens stay as they are.

    Raises UserError if the tokenizer joins it with each character of BEFORE.
    """
    encode = partial(tokenizer, add_special_tokens=False)
    if not adds_space(tokenizer):
        return encode(text)["input_ids"]
    for character in BEFORE:
        before = encode(character)["input_ids"]
        both = encode(character + text)["input_ids"]
        if before and both[: len(before)] == before:
            return both[len(before) :]
    raise UserError(f"{tokenizer.name_or_path}: {text[:20]!r} can't follow another text")


def encode_pair(tokenizer: Tokenizer, prompt: Text, response: Text, where="a prompt") -> Pair:
    """Encode two texts, or two lists of turns. Raises UserError if they have no end or aren't adjacent."""
    start = encode(tokenizer, prompt, where)
    if isinstance(prompt, str):
        if tokenizer.eos_token_id is None:
            raise UserError(f"{where}: {tokenizer.name_or_path} has no end-of-sequence token")
        return start, [*encode_after(tokenizer, response), tokenizer.eos_token_id]
    text = render(tokenizer, prompt + response, where, has_answer=True, is_learned=True)
    both = tokenizer(text, add_special_tokens=False)["input_ids"]
    if both[: len(start)] != start or both == start:
        raise UserError(f"{where}: the chat template doesn't put the answer after its prompt")
    return start, both[len(start) :]


def encode_reply(
    tokenizer: Tokenizer, prompt: list[dict], reply: list[dict], where: str
) -> list[int]:
    """Encode what comes between two turns of the policy. Raises UserError if the template rewrites turns.

    prompt: the chat turns before the episode; empty if it was a text. A short answer stands in for the
    policy's own turns, which are never rendered or encoded again.
    """
    reply = map_texts(partial(break_tokens, tokenizer), reply)
    if not prompt:
        return encode_after(tokenizer, reply[-1]["content"])
    before = render(tokenizer, prompt, where, has_answer=True)
    text = render(tokenizer, [*prompt, *as_turns("yes", "assistant"), *reply], where)
    answer = text.find("yes", len(before))
    end = end_of_turn(tokenizer)
    # skip the prompt, which may be long
    tokens = tokenizer(text[answer:], add_special_tokens=False)["input_ids"]
    if not text.startswith(before) or answer < 0 or end not in tokens:
        raise UserError(
            f"{where}: the chat template in {tokenizer.name_or_path} rewrites earlier turns "
            "when others follow, so that no episode can go on"
        )
    return tokens[tokens.index(end) + 1 :]


@lru_cache(maxsize=8)  # a vocabulary is large
def longest_token(tokenizer: Tokenizer) -> int:
    """Return how many characters a token has at most."""
    return max(map(len, tokenizer.get_vocab()))


def decode(tokenizer: Tokenizer, tokens: list[int], special: bool = False, ends=()) -> str:
    """Decode tokens, with `special` ones or without them and without the one of `ends` at the end."""
    if tokens and tokens[-1] in ends and not special:
        tokens = tokens[:-1]
    return tokenizer.decode(tokens, skip_special_tokens=not special)


def ends_of(model_dir: str, tokenizer: Tokenizer) -> set[int]:
    """Return the tokens that end an answer: of sequence, of turn, in generation_config.json."""
    return ({tokenizer.eos_token_id, end_of_turn(tokenizer)} | named_ends(model_dir)) - {None}


def stop_tokens(
    model_dir: str, tokenizer: Tokenizer, reader: Reader | None = None, say=lambda line: None
) -> tuple[int, ...]:
    """Return all ids that end an answer, also those of images. Raises UserError without an end."""
    stop = ends_of(model_dir, tokenizer)
    if not stop:
        raise UserError(f"{model_dir} names no end-of-sequence token, so no answer could ever end")
    if (end := end_of_turn(tokenizer)) is not None:
        say(f"{model_dir}: its chat template ends an answer with {tokenizer.decode(end)}")
    return tuple(sorted({*stop, *(reader.stop_tokens if reader else ())}))
