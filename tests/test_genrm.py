"""The judge: what it is asked, how its text is read, and what becomes of a sample, over a small fake pool."""

import asyncio
import random
from types import SimpleNamespace

import pytest
from fakes import VirtualClock
from hypothesis import given, settings
from hypothesis import strategies as st

import genrm
from rollout import Answer, Sample

TEXT = st.text(alphabet="0123456789>#{}\\boxed \nx+=;:.YNverdict", max_size=40)


# ---------------------------------------------------------------- the addition format


@pytest.mark.parametrize(
    "text,answer",
    [
        ("7+8+0=15;5+6+1=12;>125", "125"),
        (">125", "125"),
        (">1>2>3", "3"),
        (">", ""),
        (">>", ""),
        ("125", None),
        ("", None),
        (">1234567890123", "123456789012"),
        (">12 3\n", "12 3\n"),
    ],
)
def test_addition_answer(text, answer):
    """What follows the last '>', 12 characters at most."""
    assert genrm.addition_answer(text) == answer


def test_addition_prompt():
    assert genrm.addition_prompt("57+68=", "125") == "57+68=>125?"


@pytest.mark.parametrize(
    "text,verdict",
    [
        ("7+8+0=15:5.5+6+1=12:2.1:1.Y", True),
        ("7+8+0=15:5.5+6+1=12:3x1:1.N", False),
        ("7+8+0=15:5.5+6+1=12:3x1:1.Y", False),  # contradicts its own critique
        ("7+8+0=15:5.5+6+1=12:2.1:1.N", False),
        ("Y", True),
        ("N", False),
        ("xY", False),
        ("", None),
        ("7+8+0=15:5.", None),
        ("Y ", None),
        ("YES", None),
        ("y", None),
        ("NY", True),
    ],
)
def test_addition_parse(text, verdict):
    """Y or N at the very end, anything else is no verdict."""
    assert genrm.addition_parse(text) is verdict


@given(TEXT)
def test_an_accept_never_contradicts_its_critique(text):
    """True needs a final Y and no flagged digit, False a final letter; nothing raises."""
    verdict = genrm.addition_parse(text)
    assert (verdict is None) == (not text.endswith(("Y", "N")))
    assert verdict is not True or (text.endswith("Y") and "x" not in text)


# ---------------------------------------------------------------- the chat format


@pytest.mark.parametrize(
    "text,answer",
    [
        (r"so \boxed{12}.", "12"),
        (r"\boxed{1} no: \boxed{ 2 } done", "2"),
        (r"\boxed{1}" + "\n#### 3", "1"),
        ("12 is it\n#### 12", "12"),
        ("#### 1\n#### 2\n", "2"),
        ("first\nlast line\n\n", "last line"),
        ("  7  ", "7"),
        ("", None),
        (" \n ", None),
        ("words ####", None),
        ("####\n\n7\n", "7"),
        (r"\boxed{12", r"\boxed{12"),
        pytest.param(r"\boxed{1} no: \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        pytest.param(r"$\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
    ],
)
def test_chat_answer(text, answer):
    """The last box, else what follows the last ####, else the last line."""
    assert genrm.chat_answer(text) == answer


@given(TEXT)
def test_chat_answer_is_a_part_of_the_text(text):
    """A part of the text, trimmed; None only where nothing is left to judge; nothing raises."""
    answer = genrm.chat_answer(text)
    assert answer is not None or not text.rsplit("####", 1)[-1].strip()
    assert answer is None or (answer == answer.strip() and answer in text)


def test_chat_prompt():
    """One user turn that holds question, answer and the instruction."""
    (turn,) = genrm.chat_prompt("What is {x}?", "a {brace}")
    assert turn["role"] == "user"
    for part in ("Question:\nWhat is {x}?", "Final answer:\na {brace}", "Verdict: correct"):
        assert part in turn["content"]


@pytest.mark.parametrize(
    "text,verdict",
    [
        ("3+4 is 7.\nVerdict: correct", True),
        ("3+4 is 7.\nVerdict: incorrect", False),
        ("VERDICT : **Correct**.", True),
        ("**Verdict:** incorrect", False),
        ("verdict:yes", True),
        ("Verdict: no", False),
        ("Verdict: correct\nVerdict: correct", True),
        ("Verdict: correct\nVerdict: incorrect", None),
        ("Verdict: correct, or Verdict: incorrect.", None),
        ("Verdict:", None),
        ("Verdict: maybe", None),
        ("Verdict: not correct", None),
        ("Verdict: nonsense", None),
        ("The answer is correct.", None),
        ("", None),
        ("Verdict:\n\ncorrect", True),
        pytest.param("**Verdict**: correct", True),
    ],
)
def test_chat_parse(text, verdict):
    """A `Verdict:` line in any case or Markdown; two that disagree are none."""
    assert genrm.chat_parse(text) is verdict


# ---------------------------------------------------------------- Judge


class Pool:
    """One engine. reply(prompt, number of the request) -> text, log-probability of its least likely token, finish."""

    def __init__(self, reply, delay=0.0):
        self.reply, self.delay, self.asked, self.flying, self.most = reply, delay, [], 0, 0

    def least_loaded(self):
        return self

    async def generate(self, prompt, n, sampling):
        self.asked.append(prompt)
        self.flying += 1
        self.most = max(self.most, self.flying)
        try:
            for index in range(n):
                text, logprob, finish = self.reply(prompt, len(self.asked))
                await asyncio.sleep(self.delay)
                yield Answer(index, list(text), [-0.01, logprob, -0.02], finish, [])
        finally:
            self.flying -= 1


def make_judge(name="addition", temperature=0.0, max_prompt_tokens=1000, **calls):
    """Tokens are characters; the prompt of a request is the text itself."""
    sampling = SimpleNamespace(temperature=temperature)
    calls = genrm.Calls(**calls)
    return genrm.Judge(genrm.FORMATS[name], lambda prompt: prompt, "".join, "".join, sampling, max_prompt_tokens, calls)


def sample(response, question="57+68=", finish="stop"):
    return Sample(0, 0, [], question, response=list(response), finish=finish)


def judge_all(judge, pool, samples):
    async def together():
        await asyncio.gather(*(judge.judge(each, pool) for each in samples))

    asyncio.run(together())


def accept(prompt, number):
    return "1:1.Y", -0.1, "stop"


def test_identical_pairs_are_asked_once():
    """Four samples at once, two pairs of question and answer: two requests; the working plays no part; a new step asks anew."""
    judge, pool = make_judge(), Pool(accept)
    samples = [sample(">125"), sample("7+8+0=15;5+6+1=12;>125"), sample(">125", "60+65="), sample(">125")]
    judge_all(judge, pool, samples)
    assert sorted(pool.asked) == ["57+68=>125?", "60+65=>125?"]
    assert all((s.verdict, s.reward, s.critique) == (True, 1.0, "1:1.Y") for s in samples)
    assert len(judge.latencies) == judge.parsed == 2 and judge.failed == 0
    judge.forget()
    assert judge.latencies == []
    judge_all(judge, pool, [sample(">125")])
    assert len(pool.asked) == judge.parsed == 3


def test_a_prompt_beyond_the_context_is_a_failed_judgement():
    """Counted and dropped; the engine, which would refuse it, is not asked."""
    judge, pool, too_long = make_judge(max_prompt_tokens=8), Pool(accept), sample(">125")
    judge_all(judge, pool, [too_long])
    assert (too_long.verdict, too_long.reward, judge.failed, pool.asked) == (None, None, 1, [])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=20))
def test_as_many_requests_as_pairs(pairs):
    """And every sample gets its own pair's verdict."""
    judge = make_judge()
    pool = Pool(lambda prompt, number: ("Y" if prompt[0] == prompt.split(">")[1][0] else "N", -0.1, "stop"))
    samples = [sample(f">{answer}", str(question)) for question, answer in pairs]
    judge_all(judge, pool, samples)
    assert sorted(pool.asked) == sorted(f"{q}>{a}?" for q, a in set(pairs))
    assert [s.reward for s in samples] == [float(q == a) for q, a in pairs]


def test_requests_are_in_flight_together():
    judge, pool = make_judge(), Pool(accept, delay=0.01)
    judge_all(judge, pool, [sample(f">{i}") for i in range(5)])
    assert pool.most == 5
    assert all(0.009 < seconds < 5 for seconds in judge.latencies)


@pytest.mark.parametrize("text,logprob,reward", [("Y", -0.35, 1.0), ("Y", -0.37, 0.0), ("N", -0.35, 0.0), ("N", -5.0, 0.0)])
def test_confidence_floor(text, logprob, reward):
    """An accept with one unlikely token counts as a reject; a reject stays one."""
    judge, judged = make_judge(), sample(">125")
    judge_all(judge, Pool(lambda prompt, number: (text, logprob, "stop")), [judged])
    assert (judged.reward, judged.verdict) == (reward, bool(reward)) and judge.parsed == 1


def test_the_chat_format_has_no_floor():
    judge, judged = make_judge("chat"), sample("It is 125", "57+68?")
    judge_all(judge, Pool(lambda prompt, number: ("Verdict: correct", -50.0, "stop")), [judged])
    assert judged.reward == 1.0


@pytest.mark.parametrize(
    "response,finish", [("125", "stop"), ("", "stop"), (">125", "length"), (">125", "abort"), ("7+8+0=15;", "length")]
)
def test_no_final_answer_is_0_without_a_request(response, finish):
    """Nothing after a '>', or an answer that was cut off."""
    judge, pool, judged = make_judge(), Pool(accept), sample(response, finish=finish)
    judge_all(judge, pool, [judged])
    assert (judged.verdict, judged.reward, judged.critique) == (False, 0.0, "no final answer")
    assert not pool.asked and (judge.parsed, judge.failed) == (0, 0)


@pytest.mark.parametrize("text,finish", [("1:1.", "stop"), ("1:1.Y", "length"), ("1:1.Y", "abort"), ("", "stop")])
def test_a_failed_verdict_is_no_reward(text, finish):
    """Never scored 0: verdict and reward stay None, counted once. A greedy judge isn't asked again, it would repeat itself."""
    judge, pool = make_judge(), Pool(lambda prompt, number: (text, -0.1, finish))
    samples = [sample(">125"), sample(">125")]
    judge_all(judge, pool, samples)
    assert [(s.verdict, s.reward, s.critique) for s in samples] == [(None, None, text)] * 2
    assert (judge.failed, judge.parsed, len(pool.asked)) == (1, 0, 1)


@pytest.mark.parametrize("retries,asked,reward", [(0, 1, None), (1, 2, None), (2, 3, 1.0), (5, 3, 1.0)])
def test_a_sampled_verdict_is_asked_for_again(retries, asked, reward):
    """1 + retries times, until one can be read; here the third can."""
    judge, pool = make_judge(temperature=1.0, retries=retries), Pool(lambda prompt, number: ("Y" if number == 3 else "?", -0.1, "stop"))
    judged = sample(">125")
    judge_all(judge, pool, [judged])
    assert (len(pool.asked), judged.reward) == (asked, reward)
    assert (judge.failed, judge.parsed) == ((1, 0) if reward is None else (0, 1))


# ---------------------------------------------------------------- several judgements, late ones, and how many at once


@pytest.mark.parametrize(
    "verdicts,mean,majority",
    [([], None, None), ([True], 1.0, 1.0), ([True, False], 0.5, 0.0), ([True, True, False, True], 0.75, 1.0), ([False] * 3, 0.0, 0.0)],
)
def test_combine(verdicts, mean, majority):
    assert (genrm.combine(verdicts, vote=False), genrm.combine(verdicts, vote=True)) == (mean, majority)


def numbered(*texts):
    """Replies in the order of the critiques, over all calls."""
    left = iter(texts)
    return lambda prompt, number: (next(left), -0.1, "stop")


@pytest.mark.parametrize("vote,reward", [(False, 0.75), (True, 1.0)])
def test_judgements_come_from_one_request(vote, reward):
    judge, pool, judged = make_judge(temperature=1.0, judgements=4, vote=vote), Pool(numbered("Y", "N", "Y", "Y")), sample(">125")
    judge_all(judge, pool, [judged])
    assert (judged.reward, judged.verdict, judged.critique) == (reward, True, "Y\nN\nY\nY")
    assert len(pool.asked) == 1 and (judge.parsed, judge.failed, len(judge.latencies)) == (4, 0, 4)


def test_only_the_missing_judgements_are_asked_for_again():
    """Two of four can't be read, then one of two, then none is left to ask: the three count."""
    judge, judged = make_judge(temperature=1.0, judgements=4, retries=1), sample(">125")
    pool = Pool(numbered("Y", "?", "N", "?", "N", "?"))
    judge_all(judge, pool, [judged])
    assert judged.reward == pytest.approx(1 / 3) and judged.verdict is False
    assert len(pool.asked) == 2 and (judge.parsed, judge.failed) == (3, 0)


class Slow(Pool):
    """Call number k takes delays[k] virtual seconds a critique."""

    def __init__(self, reply, *delays):
        super().__init__(reply)
        self.delays, self.starts = delays, []

    async def generate(self, prompt, n, sampling):
        self.delay = self.delays[len(self.asked)]
        self.starts.append(asyncio.get_running_loop().time())
        async for reply in super().generate(prompt, n, sampling):
            yield reply


def judge_on_virtual_clock(judge, pool, samples):
    with asyncio.Runner(loop_factory=VirtualClock) as runner:

        async def together():
            await asyncio.gather(*(judge.judge(each, pool) for each in samples))
            return asyncio.get_running_loop().time()

        return runner.run(together())


def test_a_late_call_is_given_up_and_made_again_after_a_pause():
    """60 s each for two calls that hang, pauses of 2.5 s and 5 s, then an answer in 2 s. Even a greedy judge is asked again."""
    judge, judged = make_judge(timeout_s=60.0, retries=2), sample(">125")
    pool = Slow(accept, 1e6, 1e6, 2.0)
    assert judge_on_virtual_clock(judge, pool, [judged]) == pytest.approx(129.5)
    assert pool.starts == pytest.approx([0.0, 62.5, 127.5]) and pool.flying == 0
    assert (judged.reward, judge.timeouts, judge.failed, judge.latencies) == (1.0, 2, 0, [2.0])


def test_a_judge_that_hangs_drops_its_sample_and_is_counted():
    judge, judged, pool = make_judge(timeout_s=60.0, retries=1), sample(">125"), Slow(accept, 1e6, 1e6)
    assert judge_on_virtual_clock(judge, pool, [judged]) == pytest.approx(122.5)  # no pause after the last
    assert (judged.reward, judged.verdict, judge.timeouts, judge.failed) == (None, None, 2, 1)
    judge.forget()
    assert judge.timeouts == 0


def test_what_came_in_time_counts():
    """Each critique takes 40 s of the 100: two of four come, and the two that miss are asked for again."""
    judge, judged = make_judge(temperature=1.0, judgements=4, timeout_s=100.0), sample(">125")
    pool = Slow(numbered("Y", "Y", "never", "N", "Y"), 40.0, 1.0)
    judge_on_virtual_clock(judge, pool, [judged])
    assert (judged.reward, judge.timeouts, judge.parsed) == (0.75, 1, 4)


@pytest.mark.parametrize("at_once,seconds", [(1, 6.0), (2, 3.0), (4, 2.0), (100, 1.0)])
def test_calls_at_once(at_once, seconds):
    """Six calls of 1 s each."""
    judge, pool = make_judge(at_once=at_once), Slow(accept, *[1.0] * 6)
    assert judge_on_virtual_clock(judge, pool, [sample(f">{i}") for i in range(6)]) == pytest.approx(seconds)
    assert pool.most == min(6, at_once)


def test_an_engine_that_breaks_stops_everyone():
    """The error reaches every sample that waits for the same verdict: none is scored."""

    def broken(prompt, number):
        raise ValueError("the genrm engine of rank 1 refused")

    judge, samples = make_judge(), [sample(">125"), sample(">125")]
    with pytest.raises(ValueError, match="refused"):
        judge_all(judge, Pool(broken), samples)
    assert [s.reward for s in samples] == [None, None]


def test_verdicts_do_not_depend_on_the_order_of_asking():
    rng = random.Random(0)
    samples = [sample(f">{rng.randint(0, 5)}", f"{rng.randint(0, 5)}+0=") for _ in range(40)]

    def truth(prompt, number):
        return ("Y" if prompt[0] == prompt.split(">")[1][0] else "N"), -0.1, "stop"

    judge_all(make_judge(), Pool(truth), samples)
    first = [s.reward for s in samples]
    backwards = [sample("".join(s.response), s.question) for s in samples][::-1]
    judge_all(make_judge(), Pool(truth), backwards)
    assert [s.reward for s in backwards][::-1] == first and 0 < sum(first) < 40
