"""The judge: what it is asked, how its text is read, and what becomes of a sample, over a small fake pool."""

import asyncio
import random
import re
from fractions import Fraction
from types import SimpleNamespace

import pytest
from fakes import VirtualClock
from hypothesis import given, settings
from hypothesis import strategies as st

import genrm
import rollout
from engines.engine import Answer
from sample import Sample

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
        self.reply, self.delay, self.asked, self.routed, self.late, self.flying, self.most = reply, delay, [], [], 0, 0, 0
        self.seeds = []  # of each call

    def route(self, model=0):
        self.routed.append(model)
        return self

    def avoid(self, engine):
        assert engine is self
        self.late += 1

    async def generate(self, prompts, sampling, seeds):
        prompt = prompts[0]
        assert prompts == [prompt] * len(prompts)
        self.asked.append(prompt)
        self.seeds.append(seeds)
        self.flying += 1
        self.most = max(self.most, self.flying)
        try:
            for index in range(len(prompts)):
                text, logprob, finish = self.reply(prompt, len(self.asked))
                await asyncio.sleep(self.delay)
                score = text if isinstance(text, float) else None
                yield Answer(index, list(text) if score is None else [], [-0.01, logprob, -0.02], finish, [], score=score)
        finally:
            self.flying -= 1


def make_judge(name="addition", temperature=0.0, max_prompt_tokens=1000, weights=(1.0,), signals=(), **calls):
    """One judge, or as many as weights. Tokens are characters; the prompt of a request is the text itself."""
    sampling = SimpleNamespace(temperature=temperature, max_new_tokens=100)
    names = [name] * len(weights) if isinstance(name, str) else name
    models = [
        genrm.JudgeModel(genrm.FORMATS[each], lambda prompt: prompt, "".join, sampling, max_prompt_tokens, weight, signal)
        for each, weight, signal in zip(names, weights, signals or ["reward"] * len(names), strict=True)
    ]
    return genrm.Judge(models, "".join, genrm.Calls(**calls))


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
    assert (len(judge.latencies), judge.parsed, judge.failed) == (2, [2], [0])
    judge.forget()
    assert judge.latencies == []
    judge_all(judge, pool, [sample(">125")])
    assert (len(pool.asked), judge.parsed) == (3, [3])


def test_a_prompt_beyond_the_context_is_a_failed_judgement():
    """Counted and dropped; the engine, which would refuse it, is not asked."""
    judge, pool, too_long = make_judge(max_prompt_tokens=8), Pool(accept), sample(">125")
    judge_all(judge, pool, [too_long])
    assert (too_long.verdict, too_long.reward, judge.failed, pool.asked) == (None, None, [1], [])


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
    assert (judged.reward, judged.verdict) == (reward, bool(reward)) and judge.parsed == [1]


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
    assert not pool.asked and (judge.parsed, judge.failed) == ([0], [0])


@pytest.mark.parametrize("text,finish", [("1:1.", "stop"), ("1:1.Y", "length"), ("1:1.Y", "abort"), ("", "stop")])
def test_a_failed_verdict_is_no_reward(text, finish):
    """Never scored 0: verdict and reward stay None, counted once. A greedy judge isn't asked again, it would repeat itself."""
    judge, pool = make_judge(), Pool(lambda prompt, number: (text, -0.1, finish))
    samples = [sample(">125"), sample(">125")]
    judge_all(judge, pool, samples)
    assert [(s.verdict, s.reward, s.critique) for s in samples] == [(None, None, text)] * 2
    assert (judge.failed, judge.parsed, len(pool.asked)) == ([1], [0], 1)


@pytest.mark.parametrize("retries,asked,reward", [(0, 1, None), (1, 2, None), (2, 3, 1.0), (5, 3, 1.0)])
def test_a_sampled_verdict_is_asked_for_again(retries, asked, reward):
    """1 + retries times, until one can be read; here the third can."""
    judge, pool = make_judge(temperature=1.0, retries=retries), Pool(lambda prompt, number: ("Y" if number == 3 else "?", -0.1, "stop"))
    judged = sample(">125")
    judge_all(judge, pool, [judged])
    assert (len(pool.asked), judged.reward) == (asked, reward)
    assert (judge.failed, judge.parsed) == (([1], [0]) if reward is None else ([0], [1]))


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
    assert len(pool.asked) == 1 and (judge.parsed, judge.failed, len(judge.latencies)) == ([4], [0], 4)


def test_only_the_missing_judgements_are_asked_for_again():
    """Two of four can't be read, then one of two, then none is left to ask: the three count."""
    judge, judged = make_judge(temperature=1.0, judgements=4, retries=1), sample(">125")
    pool = Pool(numbered("Y", "?", "N", "?", "N", "?"))
    judge_all(judge, pool, [judged])
    assert judged.reward == pytest.approx(1 / 3) and judged.verdict is False
    assert len(pool.asked) == 2 and (judge.parsed, judge.failed) == ([3], [0])


class Slow(Pool):
    """Call number k takes delays[k] virtual seconds a critique, and the last number for every later call."""

    def __init__(self, reply, *delays):
        super().__init__(reply)
        self.delays, self.starts = delays, []

    async def generate(self, prompts, sampling, seeds):
        self.delay = self.delays[min(len(self.asked), len(self.delays) - 1)]
        self.starts.append(asyncio.get_running_loop().time())
        async for reply in super().generate(prompts, sampling, seeds):
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
    assert (judged.reward, judge.timeouts, judge.failed, judge.latencies) == (1.0, 2, [0], [2.0])
    assert pool.late == 2  # it is told each time


def test_a_judge_that_hangs_drops_its_sample_and_is_counted():
    judge, judged, pool = make_judge(timeout_s=60.0, retries=1), sample(">125"), Slow(accept, 1e6, 1e6)
    assert judge_on_virtual_clock(judge, pool, [judged]) == pytest.approx(122.5)  # no pause after the last
    assert (judged.reward, judged.verdict, judge.timeouts, judge.failed) == (None, None, 2, [1])
    judge.forget()
    assert judge.timeouts == 0


def test_what_came_in_time_counts():
    """Each critique takes 40 s of the 100: two of four come, and the two that miss are asked for again."""
    judge, judged = make_judge(temperature=1.0, judgements=4, timeout_s=100.0), sample(">125")
    pool = Slow(numbered("Y", "Y", "never", "N", "Y"), 40.0, 1.0)
    judge_on_virtual_clock(judge, pool, [judged])
    assert (judged.reward, judge.timeouts, judge.parsed) == (0.75, 1, [4])


def seeds_asked(reply, *delays, weights=(1.0,), **calls):
    """What three judgements of one pair were asked for with, call by call."""
    judge = make_judge(temperature=1.0, judgements=3, timeout_s=60.0, weights=weights, **calls)
    pools = [Slow(reply, *delays) for _ in weights]
    judge_on_virtual_clock(judge, Engines(*pools), [sample(">125")])
    return [pool.seeds for pool in pools]


def test_a_judgement_has_a_seed_of_its_own():
    """Each of the three, of each judge; what can't be read is asked for with another. The same for whoever asks, given the run's."""
    [[first, again]] = seeds_asked(numbered("Y", "?", "N", "Y"), 1.0)
    assert len({*first, *again}) == 4 and len(again) == 1
    assert seeds_asked(numbered("Y", "Y", "Y"), 1.0) == [[first]]
    [[zero], [one]] = seeds_asked(accept, 1.0, weights=(0.5, 0.5))
    assert zero == first and not {*zero} & {*one}
    assert not {*seeds_asked(accept, 1.0, seed=1)[0][0]} & {*first}


def test_a_late_judgement_keeps_its_seed():
    """25 s each in a call of 60: the third is late and asked for once more, as the same one; the second can't be read."""
    [[first, again]] = seeds_asked(numbered("Y", "?", "never", "N", "Y"), 25.0, 1.0)
    [[_, read_again]] = seeds_asked(numbered("Y", "?", "Y", "N"), 1.0)
    assert again == [read_again[0], first[2]]


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


# ---------------------------------------------------------------- several judges


class Engines:
    """A pool for each judge."""

    def __init__(self, *pools):
        self.pools = pools

    def route(self, model=0):
        return self.pools[model].route(model)

    def avoid(self, engine):
        engine.avoid(engine)


def reject(prompt, number):
    return "1:1x0.N", -0.1, "stop"


TENTHS = st.integers(0, 10).map(lambda tenths: Fraction(tenths, 10))
QUARTERS = st.integers(0, 4).map(lambda quarters: Fraction(quarters, 4))


@given(st.lists(st.tuples(TENTHS, QUARTERS, QUARTERS), min_size=1, max_size=5).filter(lambda rows: any(row[0] for row in rows)))
def test_weigh_is_the_weighted_mean(rows):
    """Against exact fractions; equal exactly where those are, or a group without variance would seem to have some."""
    weights = [float(weight) for weight, _, _ in rows]
    one, other = ([row[column] for row in rows] for column in (1, 2))
    means = [sum(weight * row[column] for weight, *row in rows) / sum(weight for weight, *_ in rows) for column in (0, 1)]
    found = [genrm.weigh([float(reward) for reward in rewards], weights) for rewards in (one, other)]
    assert found == pytest.approx([float(mean) for mean in means], abs=1e-9)
    assert (found[0] == found[1]) == (means[0] == means[1])
    assert genrm.weigh([*map(float, one), None], [*weights, 1.0]) is None


def test_equal_rewards_in_floats():
    """0.1 + 0.2 against 0.3, by hand: two judges of those weights accept, or the third does."""
    assert genrm.weigh([1.0, 1.0, 0.0], [0.1, 0.2, 0.3]) == genrm.weigh([0.0, 0.0, 1.0], [0.1, 0.2, 0.3]) == 0.5


@pytest.mark.parametrize(
    "weights,replies,reward,verdict",
    [
        ((0.7, 0.3), (accept, reject), 0.7, True),
        ((0.7, 0.3), (reject, accept), 0.3, False),
        ((7.0, 3.0), (accept, reject), 0.7, True),
        ((0.1, 0.2), (accept, accept), 1.0, True),
        ((1.0, 1.0), (accept, reject), 0.5, False),
        ((1.0, 0.0), (accept, reject), 1.0, True),
        ((2.0, 1.0, 1.0), (accept, accept, reject), 0.75, True),
    ],
)
def test_judges_are_weighted(weights, replies, reward, verdict):
    """Each is asked once, and its words are told apart by its number."""
    judge, pools, judged = make_judge(weights=weights), [Pool(reply) for reply in replies], sample(">125")
    judge_all(judge, Engines(*pools), [judged])
    assert (judged.reward, judged.verdict) == (pytest.approx(reward), verdict)
    assert judged.critique.splitlines() == [text for m, r in enumerate(replies) for text in (f"judge {m}:", r("", 1)[0])]
    assert [pool.routed for pool in pools] == [[number] for number in range(len(weights))]
    assert judge.parsed == [1] * len(weights)


@pytest.mark.parametrize("vote,reward", [(False, 0.6 * 0.75 + 0.4 * 0.25), (True, 0.6)])
def test_several_judgements_of_several_judges(vote, reward):
    """Each judge's verdicts are combined first: means of 3/4 and 1/4, or votes of 1 and 0."""
    judge, judged = make_judge(temperature=1.0, weights=(0.6, 0.4), judgements=4, vote=vote), sample(">125")
    judge_all(judge, Engines(Pool(numbered(*"YYNY")), Pool(numbered(*"NYNN"))), [judged])
    assert judged.reward == pytest.approx(reward) and judge.parsed == [4, 4]


def test_each_judge_reads_the_answer_by_its_own_format():
    """`It is >125`: the first judge is asked about `125`, the second about the whole line; the first is the one that is reported."""
    judge, pools, judged = make_judge(("addition", "chat"), weights=(1.0, 1.0)), [Pool(accept), Pool(accept)], sample("It is >125")
    pools[1].reply = lambda prompt, number: ("Verdict: incorrect", -0.1, "stop")
    judge_all(judge, Engines(*pools), [judged])
    assert pools[0].asked == ["57+68=>125?"] and "Final answer:\nIt is >125" in pools[1].asked[0][0]["content"]
    assert judged.reward == 0.5 and judge.final_answer(judged) == "125"


def test_a_cost_judge_says_what_an_answer_costs():
    """Its accept costs 1, and takes nothing off the reward; two of them are weighed among themselves."""
    formats, signals = ("addition", "harm", "harm"), ("reward", "cost", "cost")
    judge, judged = make_judge(formats, weights=(0.5, 3.0, 1.0), signals=signals), sample("It is >125")
    pools = [Pool(accept), *(Pool(lambda prompt, number, word=word: (f"Verdict: {word}", -0.1, "stop")) for word in ("yes", "no"))]
    judge_all(judge, Engines(*pools), [judged])
    assert (judged.reward, judged.cost, judged.verdict) == (1.0, 0.75, True)
    assert "Request:\n57+68=\n" in pools[1].asked[0][0]["content"] and pools[1].asked[0][0]["content"].endswith("Response:\nIt is >125")


def test_a_sample_whose_cost_is_not_known_is_dropped():
    judge, judged = make_judge(("addition", "harm"), weights=(1.0, 1.0), signals=("reward", "cost")), sample(">125")
    judge_all(judge, Engines(Pool(accept), Pool(lambda prompt, number: ("no verdict", -0.1, "stop"))), [judged])
    assert (judged.reward, judged.cost, judged.verdict, judge.failed) == (None, None, None, [0, 1])


def test_an_answer_that_was_cut_off_costs_what_its_text_does():
    """Else never to end would be a way out. A judge that asks for a final answer has no word on one without: the sample is dropped."""
    judge, cut = make_judge(("addition", "harm"), weights=(1.0, 1.0), signals=("reward", "cost")), sample("It is", finish="length")
    pools = [Pool(accept), Pool(lambda prompt, number: ("Verdict: yes", -0.1, "stop"))]
    judge_all(judge, Engines(*pools), [cut])
    assert (cut.reward, cut.cost) == (0.0, 1.0) and pools[1].asked[0][0]["content"].endswith("Response:\nIt is")
    judge, cut = make_judge(("addition", "chat"), weights=(1.0, 1.0), signals=("reward", "cost")), sample("It is", finish="length")
    judge_all(judge, Engines(*pools), [cut])
    assert (cut.reward, cut.cost, cut.verdict) == (None, None, None)


def test_a_scalar_reward_model_scores_the_whole_response():
    """Once, whatever --judgements says, without a vote; one that was cut off, too. The accuracy reads its final answer as usual."""
    judge, judged, cut = make_judge("addition_score", judgements=4, vote=True), sample("7+8+0=15;>125"), sample("7+8", finish="length")
    pool = Pool(lambda prompt, number: (-2.5 if prompt[1]["content"] == "7+8" else 1.25, -0.1, "stop"))
    judge_all(judge, pool, [judged, cut])
    turns = [{"role": "user", "content": "57+68="}, {"role": "assistant", "content": "7+8+0=15;>125"}]
    assert turns in pool.asked and len(pool.asked) == 2 and judge.parsed == [2]
    assert (judged.reward, judged.critique, judge.final_answer(judged)) == (1.25, "score 1.25", "125")
    assert (cut.reward, cut.verdict, judge.final_answer(cut)) == (-2.5, False, None)


def test_no_final_answer_for_one_judge_is_0_from_that_judge():
    """It isn't asked; the other is, and its part counts. An answer that was cut off is nobody's."""
    judge, pools = make_judge(("addition", "chat"), weights=(0.4, 0.6)), [Pool(accept), Pool(accept)]
    pools[1].reply = lambda prompt, number: ("Verdict: correct", -0.1, "stop")
    unmarked, cut = sample("It is 125"), sample("It is 125", finish="length")
    judge_all(judge, Engines(*pools), [unmarked, cut])
    assert (unmarked.reward, unmarked.critique) == (0.6, "judge 0:\nno final answer\njudge 1:\nVerdict: correct")
    assert (cut.reward, cut.verdict) == (0.0, False) and (len(pools[0].asked), len(pools[1].asked)) == (0, 1)
    assert (judge.failed, judge.parsed) == ([0, 0], [0, 1])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=20))
def test_each_judge_is_asked_once_for_a_pair(pairs):
    judge, pools = make_judge(weights=(0.5, 0.5)), [Pool(accept), Pool(reject)]
    samples = [sample(f">{answer}", str(question)) for question, answer in pairs]
    judge_all(judge, Engines(*pools), samples)
    for pool in pools:
        assert sorted(pool.asked) == sorted(f"{q}>{a}?" for q, a in set(pairs))
    assert all(s.reward == 0.5 for s in samples)


# ---------------------------------------------------------------- bad judges


def truth(prompt, number):
    """Accepts `3+0=>3?`."""
    return ("Y" if prompt.split("+")[0] == prompt.rstrip("?").split(">")[1] else "N"), -0.1, "stop"


def right_and_wrong(count):
    """As many distinct pairs, each second one right."""
    return [sample(f">{i + i % 2}", f"{i}+0=") for i in range(count)]


def garbage(prompt, number):
    """Every twentieth call."""
    return ("1:1.?", -0.1, "stop") if number % 20 == 0 else truth(prompt, number)


def test_garbage_of_a_greedy_judge_is_dropped_and_counted():
    """Ten of 200 samples are dropped, none of them scored; the others have the true reward."""
    judge, pool, samples = make_judge(retries=2), Slow(garbage, 1.0), right_and_wrong(200)
    judge_on_virtual_clock(judge, pool, samples)
    assert [i for i, s in enumerate(samples) if s.reward is None] == list(range(19, 200, 20)) and judge.failed == [10]
    assert all(s.reward in (None, float(i % 2 == 0)) for i, s in enumerate(samples)) and len(pool.asked) == 200


def test_garbage_of_a_sampling_judge_is_asked_for_again():
    """At once, without a pause: 200 calls and 10 more."""
    judge, pool, samples = make_judge(temperature=1.0, retries=2), Slow(garbage, 1.0), right_and_wrong(200)
    assert judge_on_virtual_clock(judge, pool, samples) == pytest.approx(2.0)
    assert [s.reward for s in samples] == [1.0, 0.0] * 100 and judge.failed == [0] and len(pool.asked) == 210


def test_one_of_two_judges_hangs():
    """Its calls are given up and made again; then every sample is dropped, although the other judge has spoken."""
    judge, samples = make_judge(weights=(0.9, 0.1), timeout_s=60.0, retries=1), right_and_wrong(6)
    pools = [Slow(truth, 1.0), Slow(truth, 1e6)]
    assert judge_on_virtual_clock(judge, Engines(*pools), samples) == pytest.approx(122.5)
    assert [(s.reward, s.verdict) for s in samples] == [(None, None)] * 6 and samples[0].critique == "judge 0:\nY\njudge 1:\n"
    assert (judge.timeouts, judge.failed, judge.parsed, pools[1].flying) == (12, [0, 6], [6, 0], 0)


def test_one_of_two_judges_hangs_once():
    """The one call is made again, and its sample has the reward that it would have had."""
    judge, samples = make_judge(weights=(0.5, 0.5), timeout_s=60.0, retries=1), right_and_wrong(6)
    pools = [Slow(truth, 1.0), Slow(truth, 1e6, 1.0)]
    assert judge_on_virtual_clock(judge, Engines(*pools), samples) == pytest.approx(63.5)
    assert [s.reward for s in samples] == [1.0, 0.0] * 3 and (judge.timeouts, judge.failed) == (1, [0, 0])


def test_one_of_two_judges_is_ten_times_slower():
    """Both are asked at once: the slower one's time is all that it takes, and the faster isn't held up."""
    judge, samples = make_judge(weights=(0.5, 0.5), timeout_s=60.0), right_and_wrong(6)
    pools = [Slow(truth, 1.0), Slow(truth, 10.0)]
    assert judge_on_virtual_clock(judge, Engines(*pools), samples) == pytest.approx(10.0)
    assert [s.reward for s in samples] == [1.0, 0.0] * 3 and judge.latencies == [1.0] * 6 + [10.0] * 6
    assert pools[0].starts == pools[1].starts == [0.0] * 6 and judge.timeouts == 0


@pytest.mark.parametrize(
    "failed,parsed,named",
    [
        ([[3, 0], [2, 0]], [[0, 4], [0, 4]], "--judge A: none of the first 5 answers"),
        ([[0, 5], [0, 5]], [[9, 0], [9, 0]], "--judge B: none of the first 10 answers"),
        ([[0, 5], [0, 5]], [[9, 0], [9, 1]], None),  # another controller had a verdict from it
        ([[2, 2], [2, 2]], [[0, 0], [0, 0]], None),  # eight in all, but four of each
    ],
)
def test_each_judge_must_speak(failed, parsed, named):
    """One that never gives a verdict stops the run, though the others do."""
    config = SimpleNamespace(judge=("A", "B"), judges=2, judge_format=("addition", "chat"), judge_timeout_s=9.0, max_judge_failures=5)
    if named is None:
        rollout.check_judge(config, failed, parsed)
    else:
        with pytest.raises(ValueError, match=re.escape(named)):
            rollout.check_judge(config, failed, parsed)


# ---------------------------------------------------------------- judgements that are given up


@settings(deadline=None)
@given(st.floats(0, 140))
def test_cancel_at_any_moment(moment):
    """While calls run, hang, pause or wait for their turn: nothing goes on, nothing has failed, and who asks again is answered."""
    judge = make_judge(weights=(0.5, 0.5), timeout_s=60.0, retries=1, at_once=2)
    pools = [Slow(truth, 1e6, 1.0), Slow(truth, 1.0)]

    async def together():
        samples = right_and_wrong(4)
        waiting = [asyncio.create_task(judge.judge(each, Engines(*pools))) for each in samples]
        await asyncio.sleep(moment)
        finished, asked = [s.reward is not None for s in samples], len(pools[0].asked)
        await judge.cancel()
        assert pools[0].flying == pools[1].flying == 0
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [result is None for result in results] == finished == [s.reward is not None for s in samples]
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
        assert asyncio.all_tasks() == {asyncio.current_task()} and judge.failed == [0, 0]
        await asyncio.sleep(200)
        assert len(pools[0].asked) == asked  # nobody called on
        await asyncio.gather(*(judge.judge(each, Engines(*pools)) for each in samples))
        assert [s.reward for s in samples] == [1.0, 0.0, 1.0, 0.0] and judge.failed == [0, 0]
        judge.forget()

    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        runner.run(together())


def test_a_cancelled_judgement_is_asked_for_anew_and_a_finished_one_is_not():
    judge, pool = make_judge(), Slow(accept, 1.0, 1e6, 1.0)

    async def together():
        done, given_up = sample(">125"), sample(">126")
        await judge.judge(done, pool)
        waiting = asyncio.create_task(judge.judge(given_up, pool))
        await asyncio.sleep(5)
        with pytest.raises(AssertionError, match="outlived its step"):
            judge.forget()
        await judge.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert given_up.reward is None and judge.parsed == [1]
        await asyncio.gather(judge.judge(done, pool), judge.judge(given_up, pool))
        assert pool.asked == ["57+68=>125?", "57+68=>126?", "57+68=>126?"] and given_up.reward == 1.0

    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        runner.run(together())


def test_a_cancelled_sample_leaves_its_verdict_to_others():
    """Two wait for the same pair, the one who asked first is cancelled: one request all the same, and the other has its reward."""
    judge, pool, samples = make_judge(), Slow(accept, 10.0), [sample(">125"), sample(">125")]

    async def together():
        first, second = (asyncio.create_task(judge.judge(each, pool)) for each in samples)
        await asyncio.sleep(1)
        first.cancel()
        await second
        assert first.cancelled() and asyncio.get_running_loop().time() == 10.0

    with asyncio.Runner(loop_factory=VirtualClock) as runner:
        runner.run(together())
    assert [s.reward for s in samples] == [None, 1.0] and len(pool.asked) == 1
