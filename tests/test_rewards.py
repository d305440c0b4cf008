"""Rules and Safe-RLHF: what a rule sees and says, the mixture, what fails; lambda by hand and in the real loop under fakes."""

import asyncio
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fakes import simulate, to_text
from hypothesis import example, given
from hypothesis import strategies as st

import rewards
from algorithms import ALGORITHMS, lagrangian, multiplier_of, set_advantages, signals_of, update_multiplier
from config import Config, parse_config
from sample import Sample
from scheduling.dynamic_sampling import is_informative

HALF = "def reward(sample):\n    return 0.5 if len(sample.text) % 2 else 0.0\n"


def write(tmp_path, text, name="mine.py"):
    """A user's file."""
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def kept(jobs, steps=3):
    """Every sample that was trained on, once."""
    return [s for job in jobs if job.actor.is_head for step in range(steps) for s in job.report.steps[step][1].kept]


def served(jobs, steps=3):
    return [job.report.steps[step][1] for job in jobs for step in range(steps)]


def costly(costs, **fields):
    """Samples of one prompt."""
    values = {"reward": [0.0], "cost": [0.0]}
    return [Sample(0, i, [1], response=[2], logprobs=[-1.0], reward=0.0, cost=c, values=values, **fields) for i, c in enumerate(costs)]


# ---------------------------------------------------------------------------------------------------------------- rules


def test_a_rule_sees_the_question_the_text_the_final_answer_and_the_key(tmp_path):
    """All judged while others are written; the reward is the weighted mean of the judges' and the rule's."""
    rule = write(
        tmp_path,
        "seen = []\n"
        "def score(sample):\n"
        "    seen.append((sample.question, sample.text, sample.answer, sample.answer_key, sample.reward))\n"
        "    return float(sample.answer == sample.answer_key)\n",
    )
    jobs, _ = simulate("partial", 2, rule=(f"{rule}:score", "length:100"), reward_weights=(1.0, 2.0, 1.0))
    samples = kept(jobs)
    assert samples
    for sample in samples:
        right = float(to_text(sample.response).split(">")[1] == sample.answer_key)
        assert sample.reward == pytest.approx((3 * right + len(sample.response) / 100) / 4)
        assert sample.verdict == (right == 1.0), "the verdict is the judges'"
        assert sample.cost is None and f"--rule {rule}:score: {right}" in sample.critique
    seen = [row for job in jobs for row in job.rules.rewards[0].function.__globals__["seen"]]
    assert all(reward is None and text.endswith(f">{answer}") for _, text, answer, _, reward in seen)


def test_without_rules_nothing_is_touched():
    """The judges' reward, critique and verdict stay the very objects that they are."""
    sample = Sample(0, 0, [1], critique="c", verdict=True, reward=0.1 + 0.2)
    before = dict(vars(sample))
    rules = rewards.Rules()
    rules.mix(sample, [])
    assert vars(sample) == before and sample.reward is before["reward"]


@pytest.mark.parametrize("mode", ["full", "partial", "auto"])
def test_rules_alone_reward_where_there_is_no_judge(tmp_path, mode):
    """Rollout has all ranks in every mode, and nothing takes turns; a run that goes on from a checkpoint equals the unbroken one."""
    more = dict(judge=(), rule=("right", "length:100"), cost_rule=("length:50",), reward_weights=(0.9, 0.1), steps=4)
    jobs, _ = simulate(mode, 2, save_every=2, out=tmp_path, **more)
    samples = kept(jobs, 4)
    assert len(samples) == 4 * 8 * 4
    for sample in samples:
        right = to_text(sample.response).endswith(f">{sample.answer_key}")
        assert sample.reward == pytest.approx(0.9 * right + 0.001 * len(sample.response)) and sample.verdict is None
        assert sample.cost == len(sample.response) / 50
    for job in jobs:
        assert job.plan.split == "2|0" and job.genrm.all_engines == [] and [e.rank for e in job.rollout.engines] == [0, 1]
        assert "genrm" not in {span.name for *_, spans in job.report.steps for span in spans}
    again, _ = simulate(mode, 2, resumed=tmp_path / "checkpoints" / "step_2", **more)
    for step in (2, 3):
        whole, resumed = ({(s.prompt_id, s.index): s.reward for s in kept_of(*run)} for run in ((jobs, step), (again, step - 2)))
        assert whole == resumed


@given(
    st.lists(st.tuples(st.floats(-5, 5), st.floats(0, 3)), min_size=1, max_size=4),
    st.lists(st.floats(-5, 5), max_size=3), st.floats(-5, 5), st.floats(0.1, 3),
)  # fmt: skip
def test_the_mixture_is_the_weighted_mean_and_the_cost_the_sum(rules, costs, judged, judges_weight):
    rule = lambda title: rewards.Rule(title, lambda sample: 0.0)  # noqa: E731
    weights = (judges_weight, *(weight for _, weight in rules))
    mixed = rewards.Rules(tuple(rule(f"r{i}") for i in range(len(rules))), tuple(rule(f"c{i}") for i in range(len(costs))), weights)
    sample = Sample(0, 0, [1], reward=judged)
    mixed.mix(sample, [said for said, _ in rules] + costs)
    expected = (judges_weight * judged + sum(said * weight for said, weight in rules)) / sum(weights)
    assert sample.reward == pytest.approx(expected, abs=1e-8)
    assert sample.cost == (pytest.approx(sum(costs), abs=1e-9) if costs else None)
    judged = Sample(0, 0, [1], reward=judged, cost=0.75)  # by a judge of costs
    mixed.mix(judged, [said for said, _ in rules] + costs)
    assert judged.cost == pytest.approx(0.75 + sum(costs), abs=1e-9)


@pytest.mark.parametrize(
    "text, wrong",
    [
        ("def reward(sample):\n    return 1 / 0\n", r"--rule .*mine\.py \(.*mine\.py:2\): ZeroDivisionError: division by zero$"),
        ("def reward(sample):\n    helper()\ndef helper():\n    raise ValueError('two\\nlines')\n", r"py:4\): ValueError: two lines$"),
        ("async def reward(sample):\n    return sample.nothing\n", r"mine\.py:2\): AttributeError"),
        ("def reward(sample):\n    pass\n", r"returned None: a finite number is needed$"),
        ("def reward(sample):\n    return float('inf')\n", r"returned inf: a finite number is needed$"),
        ("def reward(sample):\n    return 'high'\n", r"returned 'high': a finite number is needed$"),
        ("import nothing_of_this_name\n", r"mine\.py:1\): ModuleNotFoundError"),
        ("x = 1\n\ndef reward(sample:\n", r"mine\.py:3\): SyntaxError"),
        ("def other(sample):\n    return 1.0\n", r"has no function reward\(sample\)$"),
    ],
)
def test_an_error_of_the_user_s_is_one_line_that_says_where(tmp_path, text, wrong):
    with pytest.raises(ValueError, match=wrong) as caught:
        simulate("partial", 2, steps=1, rule=(write(tmp_path, text),))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spec", ["nothing.py", "nothing", "length", "length:0", "length:x", "right:1", "forbidden", "a.txt:b"])
def test_a_rule_that_isn_t_there_is_refused(spec):
    with pytest.raises(ValueError, match=f"^--rule {spec}: "):
        rewards.load("--rule", spec)


def test_the_rules_that_are_there():
    sample = rewards.TextSample(0, 0, [1], response=[2] * 10, answer_key="12", text="3+9=12;>12", answer="12")
    cut_off = rewards.TextSample(0, 0, [1], question="3+9=", answer_key="12", text=">", answer=None)
    say = lambda spec, sample: rewards.load("--cost-rule", spec).function(sample)  # noqa: E731
    assert say("right", sample) == 1.0 and say("right", cut_off) == 0.0
    with pytest.raises(ValueError, match="no `answer` beside the prompt '3\\+9='"):
        say("right", replace(cut_off, answer_key=None))
    assert say("length:40", sample) == 0.25 and say("forbidden:9", sample) == 1.0 and say("forbidden:8", sample) == 0.0


def test_a_file_s_default_function_goes_by_the_option(tmp_path):
    path = write(tmp_path, "def reward(sample):\n    return 1.0\n\ndef cost(sample):\n    return 2.0\n")
    assert [rewards.load(option, path).function(None) for option in ("--rule", "--cost-rule")] == [1.0, 2.0]


OUTAGE = """
import asyncio
calls = {}
async def reward(sample):
    await asyncio.sleep(0.2)
    key = sample.prompt_id, sample.index, sample.text
    calls[key] = calls.get(key, 0) + 1
    if sample.index == 2:
        raise ConnectionError("never there")
    if sample.index == 1 and calls[key] < 3:
        raise TimeoutError
    return float(len(sample.text))
"""


@pytest.mark.parametrize("mode", ["full", "partial"])
def test_a_rule_that_can_t_be_reached_is_asked_again_then_the_sample_is_dropped_and_counted(tmp_path, mode):
    """Never scored 0; the others of the group train, those that were asked again among them."""
    jobs, _ = simulate(mode, 2, steps=2, rule=(write(tmp_path, OUTAGE),))
    samples = kept(jobs, 2)
    dropped = [sample for each in served(jobs, 2) for sample in each.dropped]
    assert {sample.index for sample in samples} == {0, 1, 3} and {sample.index for sample in dropped} == {2}
    assert all(sample.reward is None and sample.verdict is None for sample in dropped)
    assert all(sample.reward == pytest.approx((sample.verdict + len(sample.response)) / 2) for sample in samples)
    calls = jobs[0].rules.rewards[0].function.__globals__["calls"]
    assert {index: count for (_, index, _), count in calls.items()} == {0: 1, 1: 3, 2: 3, 3: 1}


def test_a_rule_that_never_can_be_reached_stops_the_run(tmp_path):
    path = write(tmp_path, "def reward(sample):\n    raise ConnectionError\n")
    with pytest.raises(ValueError, match="couldn't be asked about any of the first 5 answers"):
        simulate("partial", 2, rule=(path,), max_judge_failures=5)


def test_an_answer_that_is_given_up_while_its_rule_is_asked_keeps_no_half_a_reward(tmp_path):
    """It comes again with its tokens, and is judged by all sources then."""
    slow = "import asyncio\nasync def reward(sample):\n    await asyncio.sleep(sample.prompt_id % 5)\n    return 1.0 + sample.index\n"
    more = dict(over_dispatch=2.0, partial_rollout=True, steps=5, answers_per_prompt=3)
    jobs, _ = simulate("partial", 2, rule=(write(tmp_path, slow),), **more)
    carried = [sample for each in served(jobs, 5) for group in each.carried for sample in group]
    assert any(sample.finish == "stop" and sample.reward is None for sample in carried), "none was given up"
    assert all(sample.reward == (sample.verdict + 1.0 + sample.index) / 2 for sample in kept(jobs, 5))
    assert all(not job.rules._calls for job in jobs)


@pytest.mark.parametrize("judged, said", [(None, [1.0, 2.0]), (1.0, [None, 2.0]), (1.0, [1.0, None])])
def test_a_sample_that_is_dropped_has_no_cost_either(judged, said):
    """A part of one would be taken for all of it."""
    rule = rewards.Rule("r", lambda sample: 0.0)
    sample = Sample(0, 0, [1], verdict=judged and True, reward=judged, cost=judged)
    rewards.Rules((rule,), (rule,)).mix(sample, said)
    assert (sample.reward, sample.cost, sample.verdict) == (None, None, None)


def test_a_rule_is_not_asked_again_after_it_was_given_up():
    """It couldn't be reached, and pauses before it would be asked again: that is ended, too."""
    calls = []

    async def down(sample):
        calls.append(sample)
        raise ConnectionError

    async def give_up():
        rules = rewards.Rules((rewards.Rule("down", down),))
        asked = asyncio.create_task(rules.ask(Sample(0, 0, [1])))
        await asyncio.sleep(0.01)
        await rules.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asked, 1)

    asyncio.run(give_up())
    assert len(calls) == 1


def test_what_isn_t_needed_any_more_isn_t_waited_for(tmp_path):
    """A rule that takes 100 s on some prompts: the others make the batch, and its calls are given up with their groups."""
    slow = "import asyncio\nasync def reward(sample):\n    await asyncio.sleep(100 * (sample.prompt_id % 4 == 3))\n    return 1.0\n"
    jobs, _ = simulate("partial", 2, rule=(write(tmp_path, slow),), prompts_per_step=4, over_dispatch=4.0, steps=1)
    assert jobs[0].timeline.now() < 100 and all(not job.rules._calls for job in jobs)
    assert kept(jobs, 1) and all(sample.prompt_id % 4 != 3 for sample in kept(jobs, 1))


# ---------------------------------------------------------------------------------------------------------------- Safe-RLHF


def test_the_combined_advantage_by_hand():
    """lambda 3: (1 - 3 * 0.2) / 4 and (0 + 3 * 0.4) / 4; without a multiplier the reward's alone."""
    advantages = {"reward": [1.0, 0.0], "cost": [0.2, -0.4]}
    assert lagrangian(advantages, 3.0) == pytest.approx([0.1, 0.3])
    assert lagrangian(advantages, 0.0) == advantages["reward"]


def constraint(**changes):
    return SimpleNamespace(**vars(Config()) | {"algorithm": "safe_rlhf", "cost_limit": 0.2, "lagrange_init": 0.5} | changes)


def test_a_step_of_the_multiplier_by_hand():
    """Mean cost 0.6 over two ranks, 0.4 over the limit: ln(lambda) += 0.1 * 0.5 * 0.4; then with a mean of 0 it falls."""
    config, state = constraint(), SimpleNamespace(log_multiplier=0.0)
    parts = [signals_of(costly([0.4]), config), {"reward": {}, "cost": {1: {0: 0.8, 3: 0.6}}}]
    got = update_multiplier(state, parts, config)
    assert state.log_multiplier == pytest.approx(0.02)
    assert got == pytest.approx({"cost/mean": 0.6, "cost/multiplier": 0.5 * math.exp(0.02), "cost/violation": 0.4})
    update_multiplier(state, [{"cost": {1: {0: 0.0}}}], config)
    assert state.log_multiplier == pytest.approx(0.02 - 0.1 * 0.5 * math.exp(0.02) * 0.2)
    assert update_multiplier(state, [{"reward": {1: {0: 0.0}}}], config) == {}


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=12), st.integers(1, 4), st.floats(0, 5), st.floats(-1, 1))
@example([1e16, 1.0, -1e16], 2, 1.0, 0.0)  # added in another order, floats would give another sum
def test_the_multiplier_is_the_same_on_any_split_and_goes_the_right_way(costs, ranks, init, limit):
    config = constraint(lagrange_init=init, cost_limit=limit)
    results = []
    for parts in ([costs], [costs[rank::ranks] for rank in range(ranks)]):
        state = SimpleNamespace(log_multiplier=0.3)
        before = multiplier_of(state, config)
        update_multiplier(state, [{"cost": {rank: dict(enumerate(part))}} for rank, part in enumerate(parts)], config)
        results.append(state.log_multiplier)
        after, broken = multiplier_of(state, config), math.fsum(costs) / len(costs) > limit
        assert after >= 0 and (after >= before if broken else after <= before)
    assert results[0] == results[1]


def test_the_multiplier_settles_where_the_constraint_is_met():
    """A policy whose cost falls with lambda, as 1 / (1 + lambda): at a limit of 0.25, lambda comes to 3 and stays."""
    config, state, seen = constraint(cost_limit=0.25, lagrange_lr=0.3), SimpleNamespace(log_multiplier=0.0), []
    for _ in range(200):
        mean = 1 / (1 + multiplier_of(state, config))
        seen.append(update_multiplier(state, [{"cost": {0: {0: mean}}}], config)["cost/multiplier"])
    assert seen == sorted(seen) and seen[-1] == pytest.approx(3.0, rel=0.02)
    for limit in (0.25, 1.0):  # where it starts from doesn't matter
        state.log_multiplier, config.cost_limit = 4.0, limit
        for _ in range(400):
            update_multiplier(state, [{"cost": {0: {0: 1 / (1 + multiplier_of(state, config))}}}], config)
        assert multiplier_of(state, config) == pytest.approx(1 / limit - 1, abs=0.1)


def test_a_large_multiplier_stops_at_100_and_finds_back():
    """A constraint that can't be met for a while, then one step of slack: lambda falls by e, not to nothing."""
    config, state = constraint(cost_limit=0.0, lagrange_lr=1.0), SimpleNamespace(log_multiplier=0.0)
    for _ in range(50):
        update_multiplier(state, [{"cost": {0: {0: 1.0}}}], config)
    assert multiplier_of(state, config) == pytest.approx(100)
    update_multiplier(state, [{"cost": {0: {0: -1.0}}}], config)
    assert multiplier_of(state, config) == pytest.approx(100 / math.e)


@pytest.mark.parametrize("mode,size,tp", [("full", 1, 1), ("full", 4, 2), ("partial", 2, 1)])
def test_safe_rlhf_in_the_real_loop(mode, size, tp):
    """Two critics, by name; lambda from all samples of the step, the same on every controller; nothing is filtered."""
    jobs, _ = simulate(mode, size, tp=tp, algorithm="safe_rlhf", cost_limit=0.1, lagrange_lr=0.5)
    assert len({job.state.log_multiplier for job in jobs}) == 1
    assert not any(each.filtered for each in served(jobs))
    log_multiplier = 0.0
    for step in range(3):
        samples = kept_of(jobs, step)
        assert len(samples) == 32 and all(sample.cost == len(sample.response) / 50 for sample in samples)
        mean = math.fsum(sample.cost for sample in samples) / len(samples)
        log_multiplier += 0.5 * math.exp(log_multiplier) * (mean - 0.1)
        for sample in samples:
            assert sample.returns["reward"] == pytest.approx([sample.reward] * len(sample.response))
            assert sample.returns["cost"] == pytest.approx([sample.cost] * len(sample.response))
    assert jobs[0].state.log_multiplier == pytest.approx(log_multiplier) and log_multiplier > 0
    for job in jobs:
        assert [critic.name for critic in job.critics] == ["reward", "cost"] and all(critic.version == 3 for critic in job.critics)
    easy, _ = simulate(mode, size, tp=tp, algorithm="safe_rlhf", cost_limit=5.0)
    assert easy[0].state.log_multiplier < 0
    off, _ = simulate(mode, size, tp=tp, algorithm="safe_rlhf", cost_limit=0.1, lagrange_init=0.0)
    ppo, _ = simulate(mode, size, tp=tp, algorithm="ppo")
    advantages = [{(s.prompt_id, s.index): s.advantages for s in kept_of(run, 2)} for run in (off, ppo)]
    assert advantages[0] == advantages[1], "with lambda 0 it is PPO"
    assert multiplier_of(off[0].state, off[0].config) == 0


def kept_of(jobs, step):
    """What was trained on, as the ranks that train have it."""
    samples = {(s.prompt_id, s.index): s for job in jobs for s in job.report.steps[step][2]}
    return list(samples.values())


@pytest.mark.parametrize("sizes", [(2, 2), (2, 4)])
def test_resume_is_exact(tmp_path, sizes):
    """Lambda goes on from where it was saved, and so does all that follows from it, also on other ranks."""
    more = dict(algorithm="safe_rlhf", cost_limit=0.1, lagrange_lr=0.5, steps=4, save_every=2, out=tmp_path)
    whole, _ = simulate("full", sizes[0], **more)
    again, _ = simulate("full", sizes[1], resumed=tmp_path / "checkpoints" / "step_2", **more | {"save_every": 0})
    assert again[0].state.log_multiplier == whole[0].state.log_multiplier != 0.0
    after = [{(s.prompt_id, s.index): s.advantages for s in kept_of(jobs, -1)} for jobs in (whole, again)]
    assert after[0].keys() == after[1].keys()
    assert all(after[0][key] == pytest.approx(after[1][key]) for key in after[0])


def test_a_checkpoint_of_before_there_was_a_multiplier_can_be_read(tmp_path):
    simulate("full", 1, steps=2, save_every=2, out=tmp_path)
    common = tmp_path / "checkpoints" / "step_2" / "common.json"
    common.write_text(common.read_text().replace('"log_multiplier"', '"something_else"'))
    again, _ = simulate("full", 1, steps=3, out=tmp_path, resumed=common.parent)
    assert again[0].state.step == 3 and again[0].state.log_multiplier == 0.0


def test_the_kl_comes_off_once_whatever_lambda_is():
    """Off the reward and onto the cost: (r - kl - lambda (c + kl)) / (1 + lambda) = (r - lambda c) / (1 + lambda) - kl."""
    config = constraint(kl_coef=0.1, kl_in="reward", kl_estimator="k1")
    for multiplier in (0.0, 1.0, 9.0):
        (sample,) = costly([0.5], reference_logprobs=[-3.0])
        set_advantages([sample], [signals_of([sample], config)], config, multiplier)
        assert sample.advantages == pytest.approx([-multiplier * 0.5 / (1 + multiplier) - 0.1 * 2.0])
        assert sample.returns == {"reward": pytest.approx([-0.2]), "cost": pytest.approx([0.7])}


# ---------------------------------------------------------------------------------------------------------------- what is filtered


def test_only_a_group_s_own_baseline_needs_different_rewards():
    """Rows whose advantages come from the group replace groups of equal rewards; the others train on them."""
    assert {name for name, row in ALGORITHMS.items() if not row.filters} == {"reinforce++", "ppo", "safe_rlhf"}
    group = [Sample(0, index, [1], reward=1.0) for index in range(3)]
    assert not is_informative(group) and is_informative(group, filters=False)
    group[0].reward = 0.0
    assert is_informative(group) and is_informative(group, filters=False)
    for sample in group:
        sample.reward = None
    assert not is_informative(group) and not is_informative(group, filters=False)


# ---------------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "arguments, wrong",
    [
        ("--algorithm safe_rlhf", "--algorithm safe_rlhf needs a --cost-rule"),
        ("--rule right --reward-weights 1", "--reward-weights 1.0: one for the judges and one for each --rule is needed, so 2"),
        ("--rule right --reward-weights 1 -1", "--reward-weights 1.0 -1.0: finite numbers are needed"),
        ("--rule right --reward-weights 0 0", "--reward-weights 0.0 0.0: finite numbers are needed"),
        ("--algorithm safe_rlhf --cost-rule right --cost-limit nan", "--cost-limit nan: a finite number is needed"),
        ("--lagrange-lr -1", "--lagrange-lr -1.0: at least 0 is needed"),
    ],
)
def test_settings_that_can_t_work_are_one_line(arguments, wrong):
    with pytest.raises(ValueError, match=wrong):
        parse_config(arguments.split())
