"""Serving under fakes on a virtual clock: what is cut off and comes again, where every token goes, and bad engines and judges."""

import asyncio
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from fakes import simulate, write_answer, write_verdict
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import rollout
from engines.engine import Answer
from sample import Sample
from scheduling.dynamic_sampling import MOST_CUTS, Draws


def served_by(controllers, step):
    """What a step came to on every rank."""
    return [c.report.steps[step][1] for c in controllers]


def groups_of(served):
    """The groups of one rank's step by how they ended: {fate: {prompt_id: samples}}."""
    kept = {}
    for sample in served.kept + served.dropped:
        kept.setdefault(sample.prompt_id, []).append(sample)
    others = {"filtered": served.filtered, "carried": served.carried}
    return {"kept": kept} | {fate: {group[0].prompt_id: group for group in groups} for fate, groups in others.items()}


def tokens_of(groups):
    return sum(len(sample.response) for group in groups for sample in group)


def at_random_paces(seed):
    """Engines that differ up to tenfold in speed."""
    rng = random.Random(seed)

    def prepare(servers):
        for server in servers:
            server.server.pace = 0.005 * 10 ** rng.random()

    return prepare


# ---------------------------------------------------------------- nothing is lost


def check_prompts(controllers):
    """Every draw was trained on, filtered, or waits in the buffer: exactly one of them, and no controller disagrees."""
    done = Counter()
    for step in range(controllers[0].config.steps):
        fates = Counter()
        for served in served_by(controllers, step):
            ended = groups_of(served)
            fates += Counter([draw for groups in ended.values() for draw in groups])
            done += Counter([*ended["kept"], *ended["filtered"]])
        assert set(fates.values()) <= {1}, "a prompt was served twice in one step"
        assert len({tuple(c.report.buffers[step]) for c in controllers}) == 1
    assert done + Counter(controllers[0].prompts.buffer) == Counter(range(controllers[0].prompts.cursor))


def check_tokens(controllers):
    """Tokens written are tokens trained on, filtered or held, or else thrown away with what comes again."""
    written = trained = filtered = thrown = 0
    for step in range(controllers[0].config.steps):
        for served in served_by(controllers, step):
            written += served.tokens
            trained += tokens_of([served.kept])
            filtered += tokens_of([served.dropped, *served.filtered])
            thrown += tokens_of(served.carried)
    held = sum(tokens_of(c.groups._written.values()) for c in controllers)
    last = sum(tokens_of(served.carried) for served in served_by(controllers, controllers[0].config.steps - 1))
    if controllers[0].config.partial_rollout:
        assert written == trained + filtered + held
    else:
        assert held == 0 and written == trained + filtered + thrown >= last


def check_continued(controllers):
    """What a prompt's answers had when it was cut off is how they begin when it is served again, by the controller that holds it."""
    begun = {}
    for step in range(controllers[0].config.steps):
        for rank, served in enumerate(served_by(controllers, step)):
            for group in (group for groups in groups_of(served).values() for group in groups.values()):
                for sample in group:
                    holder, *before = begun.pop((sample.prompt_id, sample.index), (rank, [], [], []))
                    now = (sample.response, sample.logprobs, sample.versions)
                    assert holder == rank and all(new[: len(old)] == old for old, new in zip(before, now, strict=True))
                    assert before[0] or set(sample.versions) <= {*range(step, controllers[0].config.steps)}
        for rank, c in enumerate(controllers):
            begun |= {key: (rank, *facts) for key, facts in c.report.carried[step].items()}


def check_come_first(controllers):
    """What waited in the buffer is dealt first in the next step."""
    for step in range(controllers[0].config.steps - 1):
        served = [draw for each in served_by(controllers, step + 1) for groups in groups_of(each).values() for draw in groups]
        first = controllers[0].report.buffers[step][: controllers[0].config.prompts_per_step]
        assert set(first) <= set(served)


@settings(max_examples=80, deadline=None)
@given(
    mode=st.sampled_from(["full", "partial", "auto"]),
    size=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2]),
    over_dispatch=st.sampled_from([1.0, 1.25, 2.0, 4.0]),
    partial_rollout=st.booleans(),
    refills=st.integers(0, 3),
    meet_every_s=st.sampled_from([0.01, 0.05, 0.5]),
    seed=st.integers(0, 10**6),
)
def test_nothing_is_lost(mode, size, tp, over_dispatch, partial_rollout, refills, meet_every_s, seed):
    """No prompt, no token, whatever is cut off; and a sleeping engine is never asked (the fakes assert it)."""
    assume(size % tp == 0 and (size > 1 or mode != "partial"))
    controllers, _ = simulate(
        mode, size, tp=tp, over_dispatch=over_dispatch, partial_rollout=partial_rollout, max_refill_waves=refills,
        meet_every_s=meet_every_s, steps=5, rebalance=mode == "partial", prepare=at_random_paces(seed),
    )  # fmt: skip
    check_prompts(controllers)
    check_tokens(controllers)
    check_come_first(controllers)
    if partial_rollout:
        check_continued(controllers)


def test_a_judgement_is_not_begun_once_the_step_is_closed():
    """An answer that became whole in the moment in which its group is cut off: a call now would outlive the step."""
    asked = []

    class Judge:
        async def judge(self, sample, pool):
            asked.append(sample)

    async def close_before_it_begins():
        step = rollout.Step(SimpleNamespace(judge=Judge()), Draws(1, in_order=False))
        judging = asyncio.create_task(rollout.judge_one(step, Sample(0, 0, [1])))
        step.closed = True
        await judging

    asyncio.run(close_before_it_begins())
    assert not asked


@pytest.mark.parametrize("partial_rollout", [True, False])
def test_a_cut_off_prompt_comes_first(partial_rollout):
    """With what was written for it, or with empty samples; which weights wrote each token is known."""
    controllers, _ = simulate("partial", 4, over_dispatch=4.0, partial_rollout=partial_rollout, steps=6, eval_every=100)
    check_come_first(controllers)
    versions = [set(s.versions) for step in range(6) for each in served_by(controllers, step) for s in each.kept]
    assert any(len(wrote) > 1 for wrote in versions) == partial_rollout
    resumed = [s for c in controllers for step in range(6) for s in c.report.steps[step][1].kept if s.versions[0] < step]
    assert bool(resumed) == partial_rollout
    assert any(c.report.carried[step] for c in controllers for step in range(6))


# ---------------------------------------------------------------- the tail


def one_in_ten(prompt, index, sampling, long=7):
    """Answers of 10 tokens, of prompt 7 (or `long`) of 100; every group has both rewards."""
    question, begun = "".join(map(chr, prompt)).split("=")
    draw = question.split("+")[0]
    text = ("#" * (98 if int(draw) == long else 8) + ">" + str(index % 2))[len(begun) :]
    return Answer(index, [ord(c) for c in text], [-0.5] * len(text), "stop", [])


def parity(prompt, index, sampling):
    """A judge that accepts `1`."""
    text = "Y" if to_text(prompt).rstrip("?")[-1] == "1" else "N"
    return Answer(0, [ord(text)], [-0.1], "stop", [])


def to_text(tokens):
    return "".join(map(chr, tokens))


def serving_seconds(controllers, step):
    """Of each rank."""
    return [s.end - s.start for c in controllers for s in c.report.steps[step][3] if s.name == "serve"]


@pytest.mark.parametrize(
    "mode,size,over_dispatch,seconds",
    [
        # 0.1 s for genrm to wake, 100 tokens of 0.01 s, a verdict of one token
        ("partial", 2, 1.0, 0.1 + 1.0 + 0.01),
        # 10 tokens and a verdict; controllers meet 0.05 s after the first of theirs ended, at the latest
        ("partial", 2, 1.25, 0.1 + 0.1 + 0.01),
        ("partial", 4, 1.25, 0.1 + 0.1 + 0.01),
        # 100 tokens, rollout sleeps (0.1 s) and genrm wakes (0.1 s), a verdict
        ("full", 2, 1.0, 1.0 + 0.1 + 0.1 + 0.01),
        ("full", 2, 1.25, 0.1 + 0.1 + 0.1 + 0.01),
    ],
)
def test_over_dispatch_cuts_the_tail(mode, size, over_dispatch, seconds):
    """One of eight prompts has answers ten times as long: the default waits for it, 10 prompts for 8 do not. Worked out by hand."""
    controllers, _ = simulate(mode, size, write=one_in_ten, verdict=parity, over_dispatch=over_dispatch, steps=1, eval_every=100)
    assert all(seconds - 1e-9 <= taken <= seconds + 2 * controllers[0].config.meet_every_s for taken in serving_seconds(controllers, 0))
    kept = {s.prompt_id for served in served_by(controllers, 0) for s in served.kept}
    assert len(kept) == 8 and (7 in kept) == (over_dispatch == 1) and (7 in controllers[0].prompts.buffer) == (over_dispatch > 1)


@pytest.mark.parametrize("mode,size", [("partial", 2), ("full", 2), ("partial", 4)])
@pytest.mark.parametrize("partial_rollout", [True, False])
def test_the_longest_prompt_is_trained_on_in_the_end(mode, size, partial_rollout):
    """Cut off in every step, it is waited for after MOST_CUTS of them; what was written is continued, or it begins anew."""
    settings = dict(over_dispatch=1.25, partial_rollout=partial_rollout, steps=MOST_CUTS + 1, eval_every=100)
    controllers, _ = simulate(mode, size, write=one_in_ten, verdict=parity, **settings)
    steps = [step for step in range(MOST_CUTS + 1) for served in served_by(controllers, step) for s in served.kept if s.prompt_id == 7]
    assert steps == [MOST_CUTS] * 4
    whole = [s for served in served_by(controllers, MOST_CUTS) for s in served.kept if s.prompt_id == 7]
    assert all(len(s.response) == 100 and (len(set(s.versions)) > 1) == partial_rollout for s in whole)
    check_tokens(controllers)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([("full", 1), ("full", 4), ("partial", 2), ("partial", 4), ("auto", 4)]), st.booleans())
def test_the_default_batch_does_not_depend_on_timing(seed, layout, rebalance):
    """Which prompts a step trains on, and their answers, whatever the engines' speed, the mode and the number of ranks."""
    mode, size = layout
    runs = [
        simulate("full", 1, steps=4, max_refill_waves=30)[0],
        simulate(mode, size, steps=4, max_refill_waves=30, rebalance=rebalance, prepare=at_random_paces(seed))[0],
    ]
    for step in range(4):
        first, second = (
            sorted((s.prompt_id, s.index, to_text(s.response), s.reward) for each in served_by(controllers, step) for s in each.kept)
            for controllers in runs
        )
        assert first == second and len({prompt_id for prompt_id, *_ in first}) == 8


# ---------------------------------------------------------------- bad engines


def only(role, rank, **changes):
    """Change one engine, or with rank None all of a role."""

    def prepare(servers):
        for server in servers:
            if server.role == role and rank in (None, server.rank):
                for name, value in changes.items():
                    setattr(server.server, name, value)

    return prepare


def requests(controllers, role):
    """Requests that each engine got, by rank."""
    pools = [{"rollout": c.rollout, "genrm": c.genrm}[role] for c in controllers]
    return {engine.rank: engine.server.requests for engine in pools[0].all_engines}


def test_a_slow_engine_gets_fewer_requests():
    """Ten times slower: what it was asked at first bounds the step, and the prompts that are drawn later go to the others."""
    settings = dict(rollout_ranks=3, steps=3, eval_every=100, max_refill_waves=30)
    slow, _ = simulate("partial", 4, **settings, prepare=only("rollout", 2, pace=0.1))
    check_prompts(slow)
    asked = requests(slow, "rollout")
    assert asked[2] < 0.8 * min(asked[0], asked[1])
    for step in range(3):
        assert max(serving_seconds(slow, step)) < 2 * 10 * 0.7  # an answer has up to 65 tokens; a refill may still go there


@pytest.mark.parametrize("mode,size,rank", [("full", 2, 1), ("partial", 4, 0), ("auto", 4, 1)])
def test_an_engine_that_hangs_is_cut_off(mode, size, rank):
    """Its groups are written elsewhere after request_timeout_s, and it is asked no more until the plan changes."""
    controllers, _ = simulate(mode, size, steps=3, eval_every=100, prepare=only("rollout", rank, pace=1e9, is_deaf=True))
    check_prompts(controllers)
    assert max(serving_seconds(controllers, 0)) < 50.0 + 5
    if mode == "full":
        assert max(serving_seconds(controllers, 1)) < 5
        first_step = [sent for engine in controllers[0].rollout.all_engines if engine.rank == rank for sent, _ in engine.server.asked]
        assert max(first_step) < 50


@pytest.mark.parametrize("mode,size", [("full", 2), ("partial", 2), ("full", 4)])
def test_engines_that_all_hang_stop_the_run(mode, size):
    """With one sentence that names the setting; three engines, or three times the same one, are late."""
    with pytest.raises(ValueError, match=r"3 engines, at last the rollout engine of rank \d, were later than --request-timeout-s"):
        simulate(mode, size, eval_every=100, prepare=only("rollout", None, pace=1e9, is_deaf=True))


@pytest.mark.parametrize("mode,size", [("full", 2), ("partial", 4)])
@pytest.mark.parametrize("part", [0, 0.5])
def test_answers_that_an_engine_aborts_are_continued(mode, size, part):
    """All answers are aborted once, in the queue or half written, by nobody's wish: they go on where they were, in the same step."""
    aborted = set()

    def abort_once(prompt, index, sampling):
        answer, question = write_answer(prompt, index, sampling), to_text(prompt).split("=")[0]
        if (question, index) in aborted or to_text(prompt)[-1] != "=":
            return answer
        aborted.add((question, index))
        tokens = answer.tokens[: int(part * len(answer.tokens))]
        return Answer(index, tokens, answer.logprobs[: len(tokens)], "abort", [])

    controllers, _ = simulate(mode, size, steps=2, eval_every=100, write=abort_once)
    check_prompts(controllers)
    check_tokens(controllers)
    for step in range(2):
        assert sum(len(served.kept) for served in served_by(controllers, step)) == 8 * 4 and sum(s.aborted for s in served_by(controllers, step))
        assert all(s.finish == "stop" for served in served_by(controllers, step) for s in served.kept)


# ---------------------------------------------------------------- bad judges, and prompts that teach nothing


@pytest.mark.parametrize("mode,size", [("full", 2), ("partial", 2), ("partial", 4)])
def test_garbage_of_a_judge_is_dropped(mode, size):
    """For about one pair in twenty: those samples are neither scored nor trained on, the rest of their groups is; all is counted."""

    def varied(prompt, index, sampling):
        wrong_by = random.Random(f"{to_text(prompt)} {index}").choice([0, 0, 1, 2, 3])
        text = f">{int(to_text(prompt).split('+')[0]) + wrong_by}"
        return Answer(index, [ord(c) for c in text], [-0.5] * len(text), "stop", [])

    def garbage(prompt, index, sampling):
        unreadable = random.Random(to_text(prompt)).random() < 0.05
        return Answer(0, [ord("?")], [-0.1], "stop", []) if unreadable else write_verdict(prompt, index, sampling)

    controllers, _ = simulate(mode, size, write=varied, verdict=garbage, steps=6, max_judge_failures=1000)
    check_prompts(controllers)
    check_tokens(controllers)
    dropped = [s for step in range(6) for served in served_by(controllers, step) for s in served.dropped]
    kept = [s for step in range(6) for served in served_by(controllers, step) for s in served.kept]
    assert dropped and all(s.reward is None for s in dropped) and not any(s.reward is None for s in kept)
    assert sum(sum(c.judge.failed) for c in controllers) > 0


@pytest.mark.parametrize("mode,size", [("full", 2), ("partial", 4)])
def test_a_judge_that_hangs_costs_its_samples_not_the_run(mode, size):
    """One of two judges' engines hangs: its calls go to the other once they were late, and every answer has its reward."""
    settings = dict(steps=2, eval_every=100, rollout_ranks=0 if mode == "full" else 2)
    controllers, _ = simulate(mode, size, **settings, prepare=only("genrm", size - 1, pace=1e9, is_deaf=True))
    check_prompts(controllers)
    samples = [s for step in range(2) for served in served_by(controllers, step) for s in served.kept + served.dropped]
    assert samples and all(s.reward is not None for s in samples) and max(serving_seconds(controllers, 0)) < 2 * 20.0 + 10


def test_judges_that_all_hang_stop_the_run():
    """Two calls of 20 s each for every answer, then the setting is named: no verdict ever came."""
    with pytest.raises(ValueError, match=r"none of the first .* answers got a verdict .*later than --judge-timeout-s"):
        simulate("partial", 2, prepare=only("genrm", None, pace=1e9, is_deaf=True))


def always_right(prompt, index, sampling):
    question, begun = to_text(prompt).split("=")
    text = (" " * random.Random(question).randint(0, 60) + ">" + question.split("+")[0])[len(begun) :]
    return Answer(index, [ord(c) for c in text], [-0.5] * len(text), "stop", [])


@pytest.mark.parametrize("mode,size", [("full", 2), ("partial", 2), ("partial", 4), ("auto", 4)])
@pytest.mark.parametrize("over_dispatch", [1.0, 2.0])
def test_prompts_that_teach_nothing_do_not_hang_the_run(mode, size, over_dispatch):
    """No group ever has two rewards: waves end, the batch is empty, groups_per_kept stays at most 10, and the run goes on."""
    controllers, _ = simulate(mode, size, write=always_right, over_dispatch=over_dispatch, steps=12)
    check_prompts(controllers)
    for c in controllers:
        assert c.placement.actor.version == 12 and 5 < c.state.groups_per_kept <= 10 and c.state.empty_steps == 12
    for step in range(12):
        served = served_by(controllers, step)
        assert not any(each.kept for each in served) and all(each.lacking == 8 and each.waves == 4 for each in served)


@pytest.mark.parametrize("mode,size", [("full", 2), ("partial", 4)])
def test_enough_empty_steps_stop_every_rank(mode, size):
    """After --max-empty-steps in a row, with the setting's name; every rank has done as many steps."""
    controllers = []
    with pytest.raises(ValueError, match="--max-empty-steps 3: no prompt of so many steps"):
        simulate(mode, size, write=always_right, max_empty_steps=3, steps=12, controllers=controllers)
    assert [len(c.report.steps) for c in controllers] == [3] * size
