"""Episodes of chats: prompt, turns and replies must be what the model's template makes of the whole chat, and
sampled tokens are never rendered or encoded again. Templates are stand-ins of published ones."""

import copy
import re
from contextlib import suppress
from itertools import chain, count
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config import Config
from extras import users
from extras.environment import episodes as user_episodes
from extras.environment import read_step
from inputs import tokenization
from inputs.rows import as_turns
from runtime.errors import UserError
from sample import Sample
from tests import ROOT
from tests.inputs.test_templates import oracle, tool, turn
from tests.support.models import save_tokenizer
from tests.support.templates import CODER, LLAMA3, MISTRAL, QWEN3, QWEN25

# its replies are in the row
FILE = """
class Environment:
    def __init__(self, sample, *, seed):
        self.replies = sample.row["replies"]

    def step(self, text):
        return self.replies.pop(0) if self.replies else None
"""
TEMPLATES = {"Qwen3": QWEN3, "Llama 3": LLAMA3, "Qwen2.5": QWEN25, "Qwen3-Coder": CODER}
WITH_TOOLS = ("Qwen3", "Qwen2.5")
ASKED = turn("user", "What is 3+4?")
SYSTEM = turn("system", "You are a strict grader.")
TOOLS = [tool("weather", parameters={"type": "object"})]
PAGE = ROOT / "docs" / "environments.md"
END = "<|im_end|>"
NUMBERS = count()  # numbers of episodes


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def chats(directory, tmp_path_factory, run):
    """Return for a template a player of its chats, one each, as in a run."""
    path = tmp_path_factory.mktemp("environment") / "replies.py"
    path.write_text(FILE)
    config = Config(environment=str(path), max_new_tokens=2000)
    made = {}

    def chats(template: str, *given: str) -> SimpleNamespace:
        if (template, *given) not in made:
            tokenizer = tokenization.load_tokenizer(str(directory))
            tokenizer.chat_template = template
            tokenization.apply_settings([tokenizer], given, lambda line: None)
            stop = tokenizer.convert_tokens_to_ids(["<|endoftext|>", END])
            episodes = user_episodes.build(config, tokenizer, stop)
            made[template, *given] = SimpleNamespace(tokenizer=tokenizer, episodes=episodes)
        return made[template, *given]

    yield lambda *given: Chats(chats(*given), run)
    for each in made.values():
        with suppress(UserError):  # ignore a refused step
            run(each.episodes.close())


class Chats:
    def __init__(self, made, run):
        self.tokenizer, self.episodes, self.run = made.tokenizer, made.episodes, run

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def play(self, prompt: list[dict], turns: list[list[int]], replies: list, end=END) -> Sample:
        """Play an episode: the policy's turns have these tokens, and the last one gets no reply.

        Check after each step that all earlier tokens are still at the front.
        """
        sample = Sample(0, next(NUMBERS), tokenization.encode(self.tokenizer, prompt))
        sample.turns, sample.row = prompt, {"replies": copy.deepcopy(replies)}
        for number, tokens in enumerate(turns):
            sample.response = sample.response + tokens + self.encode(end)
            sample.finish, before = "turn", sample.tokens
            self.run(self.episodes.answer(sample))
            assert sample.tokens[: len(before)] == before
            assert sample.finish == ("" if number < len(replies) else "stop")
        return sample

    def say(self, prompt: list[dict], turns: list[str], replies: list, **how) -> Sample:
        return self.play(prompt, [self.encode(text) for text in turns], replies, **how)


def chat_of(prompt: list[dict], turns: list[str], replies: list) -> list[dict]:
    """Return all turns of a chat."""
    chat = [*prompt]
    for number, text in enumerate(turns):
        chat.append(turn("assistant", text))
        reply = as_turns(replies[number], "user") if number < len(replies) else []
        chat += reply if isinstance(reply, list) else [reply]
    return chat


def next_prompt(chats: Chats, sample: Sample) -> list[int]:
    """Return the policy's last prompt: all before its last turn."""
    return sample.tokens[: len(sample.prompt) + sample.begun - len(sample.last_turn)]


TOLD = turn("tool", "sun: yes")
REPLIES = {
    "of the user": ["No.", turn("user", "And 2?")],
    "of a tool": [TOLD],
    "of several turns": [[TOLD, turn("tool", "rain: no")], [TOLD, turn("user", "So?")]],
    "empty": [""],
    "of several lines": ["\nNo.\n\n7?\n", "  7 "],
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", REPLIES)
@pytest.mark.parametrize("prompt", [[ASKED], [SYSTEM, ASKED, turn("assistant", "7"), ASKED]])
def test_an_episode_is_what_transformers_renders(chats, name, kind, prompt):
    """All prompts of the policy must match the whole chat's; its last turn ends as the template ends it."""
    own, replies = chats(TEMPLATES[name]), REPLIES[kind]
    turns = ["12 plus 7", "7.\n\nVerdict: correct", "14"][: len(replies) + 1]
    for number in range(1, len(replies) + 1):
        sample = own.say(prompt, turns[: number + 1], replies[:number])
        chat = chat_of(prompt, turns[:number], replies[:number])
        assert next_prompt(own, sample) == oracle(own.tokenizer, chat)
        assert sample.tokens == next_prompt(own, sample) + own.encode(turns[number] + END)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_tools_stand_in_the_prompt_once(chats, name):
    own = chats(TEMPLATES[name])
    sample = own.say([ASKED | {"tools": TOOLS}], ["7", "8"], [TOLD])
    chat = chat_of([ASKED], ["7"], [TOLD])
    assert next_prompt(own, sample) == oracle(own.tokenizer, chat, tools=TOOLS)
    assert own.tokenizer.decode(sample.tokens).count("# Tools") == 1


WORDS = st.sampled_from(["7", "12+7", " ", "\n", "Verdict", "é", "<", "|", "im_end", "~mark 0~"])
TEXTS = st.lists(WORDS, max_size=5).map("".join)
SPELLED = st.lists(WORDS | st.sampled_from([END, "<|im_start|>", "<|endoftext|>"]), max_size=5)
SPELLED = SPELLED.map("".join)
TURN = st.builds(turn, st.sampled_from(["user", "tool"]), SPELLED)
REPLY = SPELLED | TURN | st.lists(TURN, min_size=1, max_size=3)
# a model's first and last characters aren't white space, which a template may strip
SAID = TEXTS.map(str.strip).filter(bool)
PROMPTS = st.tuples(
    st.sampled_from([[], [SYSTEM]]),
    st.sampled_from([[], [ASKED, turn("assistant", "7")]]),
    SAID.map(lambda text: [turn("user", text)]),
).map(lambda parts: [*chain(*parts)])


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(TEMPLATES)), PROMPTS, st.lists(st.tuples(SAID, REPLY), min_size=1), SAID
)
def test_any_chat_is_what_its_template_renders(chats, name, prompt, pairs, last):
    """Special tokens in a reply must be text; no turn of the policy is read twice or left out."""
    own, (turns, replies) = chats(TEMPLATES[name]), zip(*pairs, strict=True)
    sample = own.say(prompt, [*turns, last], [*replies])
    chat = chat_of(prompt, [*turns], [*replies])
    assert next_prompt(own, sample) == tokenization.encode(own.tokenizer, chat)
    assert own.tokenizer.decode(sample.last_turn) == last + END


def test_sampled_tokens_are_never_encoded_again(chats):
    """Digits sampled one by one must stay, though the tokenizer has tokens of two with the same text."""
    own = chats(QWEN25)
    tokens = [token for digit in "Verdict: 12" for token in own.encode(digit)]
    assert tokens != own.encode("Verdict: 12")
    sample = own.play([ASKED], [tokens, tokens], ["No."])
    whole = tokenization.encode(own.tokenizer, chat_of([ASKED], ["Verdict: 12"], ["No."]))
    found = next_prompt(own, sample)
    assert found != whole and own.tokenizer.decode(found) == own.tokenizer.decode(whole)
    assert sample.response == [*tokens, *own.encode(END)] * 2
    assert sample.tokens[len(sample.prompt) :][: len(tokens)] == tokens


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_turn_that_ended_otherwise_gets_the_templates_end(chats, name):
    """Another end token must stay because it was sampled; what follows is the same as after any turn."""
    own = chats(TEMPLATES[name])
    other = own.say([ASKED], ["7", "8"], ["No."], end="<|endoftext|>")
    usual = own.say([ASKED], ["7", "8"], ["No."])
    assert other.replies[0].tokens == own.encode(END) + usual.replies[0].tokens
    text = own.tokenizer.decode(other.tokens)
    assert f"7<|endoftext|>{END}" in text and text.endswith("8<|endoftext|>")


THOUGHT = "<think>\nHm.\n</think>\n\n7"


def test_reasoning_stays_as_it_was_sampled(chats):
    """Qwen3's template drops it from earlier turns, but it must stay, and no answer appears twice."""
    own = chats(QWEN3)
    sample = own.say([ASKED], [THOUGHT, THOUGHT], ["No."])
    assert own.tokenizer.decode(sample.tokens).count(THOUGHT + END) == 2
    chat = chat_of([ASKED], [THOUGHT], ["No."])
    assert "Hm." not in own.tokenizer.decode(oracle(own.tokenizer, chat))


def test_a_template_that_asks_for_no_reasoning_asks_each_time(chats):
    own = chats(QWEN3, "enable_thinking=false")
    sample = own.say([ASKED], ["7", "8"], ["No."])
    asks = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert own.tokenizer.decode(sample.prompt).endswith(asks)
    assert own.tokenizer.decode(sample.replies[0].tokens).endswith(f"No.{END}\n{asks}")


def checked(own: Chats, *prompts: list[dict]) -> list[str]:
    """Return the messages that the start prints about them."""
    said = []
    check = user_episodes.chat_check("--environment e.py", own.tokenizer, said.append)
    for number, prompt in enumerate(prompts, 1):
        check(prompt, f"rows.jsonl:{number}")
    return said


def test_a_template_that_rewrites_earlier_turns_is_refused(chats, directory):
    """Mistral's template moves the system turn to the last user turn; one line must name the row."""
    own = chats(MISTRAL)
    with pytest.raises(UserError) as error:
        checked(own, [ASKED], [SYSTEM, ASKED])
    assert str(error.value) == (
        f"rows.jsonl:2: the chat template in {directory} rewrites earlier turns when others follow, "
        "so that no episode can go on"
    )
    assert checked(own, [ASKED], [ASKED, turn("assistant", "7"), ASKED]) == []


def test_a_template_that_leaves_out_reasoning_is_named_once(chats):
    prompts = [[ASKED], [SYSTEM, ASKED], [ASKED], [SYSTEM, ASKED, turn("assistant", "7"), ASKED]]
    [line] = checked(chats(QWEN3), *prompts)
    kept = "earlier turns keep it as it was sampled"
    assert line == f"--environment e.py: the chat template leaves out earlier reasoning; {kept}"
    for template in (LLAMA3, QWEN25, CODER):
        assert checked(chats(template), *prompts) == []


def test_a_text_is_answered_by_text(chats):
    """A text has no template's words, and special tokens stay text; tools are refused."""
    own = chats(QWEN25)

    def say(reply) -> Sample:
        sample = Sample(
            0, next(NUMBERS), own.encode("3+4="), response=own.encode(f"8{END}"), finish="turn"
        )
        sample.row = {"replies": [reply]}
        own.run(own.episodes.answer(sample))
        return sample

    assert say("3+4=").replies[0].tokens == own.encode("3+4=")
    assert say(f"3{END}4=").replies[0].tokens == own.encode("3< |im_end|>4=")
    for reply in (TOLD, [turn("user", "3+4="), turn("user", "5+6=")]):
        role = reply["role"] if isinstance(reply, dict) else "user"
        with pytest.raises(
            UserError, match=f"a reply to a prompt of text is text, not the {role}'s"
        ):
            say(reply)


def test_the_example_of_the_page_plays(tmp_path):
    [example] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "guess.py").write_text(example)
    kind = users.module_of(tmp_path / "guess.py").Environment
    played, low, high, found = kind(None, seed=3), 1, 99, []
    while not found or not isinstance(found[-1], float):
        middle = (low + high) // 2
        found.append(played.step(f"Is it {middle}?"))
        low, high = (middle + 1, high) if found[-1] == "Higher." else (low, middle - 1)
    assert found[-1] == 1.0 and {*found[:-1]} <= {"Higher.", "Lower."}
    lost = kind(None, seed=3)
    steps = [read_step(lost.step("I don't know.")) for _ in range(6)]
    assert [step.done for step in steps] == [False] * 5 + [True]
    assert steps[0].metrics == {"unread": 1} and steps[0].reward == -0.1
