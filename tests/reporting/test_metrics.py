"""The metrics of a step from hand-made facts, and rank 0's files."""

import asyncio
import contextlib
import html
import json
import math
import re
import threading
from types import SimpleNamespace

import pytest
from PIL import Image
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html

from config import Config
from reporting.metrics import (
    TEXTS,
    Facts,
    MetricsWriter,
    Report,
    local_facts,
    serving_metrics,
    summarize,
)
from runtime import timeline as tl
from runtime.errors import RunLost
from sample import Sample
from scheduling.measured import RequestStats, Split, StepStats
from state import Environment, RolloutBatch, State
from tests.runtime.test_atomic_files import full_disk
from tests.support.columns import numbers
from tests.support.fakes import FakeWorld, VirtualClock

MEANS = """reward/mean reward/unfiltered_mean reward/zero_std_frac rollout/response_len_mean
    rollout/trained_len_mean rollout/truncated_frac rollout/correct_frac genrm/accept_frac
    genrm/false_positive_frac genrm/failed_frac cost/unfiltered_mean"""
SUMS = """rollout/tokens rollout/prompt_tokens rollout/tokens_trained rollout/tokens_filtered
    rollout/tokens_carried rollout/moved rollout/aborted rollout/carried_groups genrm/failed"""
MAXIMA = ("rollout/response_len_max", "time/serve_s", "time/rollout_s", "time/train_s")
FIELDS = "step prompt_id question answer_key response finish critique verdict reward cost"


def columns(text: str) -> dict[str, list[float]]:
    """Read `name=number,number` words."""
    words = (word.split("=") for word in text.split())
    return {name: [float(number) for number in row.split(",") if number] for name, row in words}


def facts(means=None, sums=None, maxima=None, latencies=()):
    means = {name: [] for name in MEANS.split()} | (means or {})
    sums = dict.fromkeys(SUMS.split(), 0) | (sums or {})
    maxima = dict.fromkeys(MAXIMA, 0.0) | (maxima or {})
    return Facts(means, sums, maxima, list(latencies), {})


FIRST_MEANS = columns("""
    reward/mean=1,0,1,0 reward/unfiltered_mean=1,0,1,0,0,0 reward/zero_std_frac=0,0,1
    rollout/response_len_mean=10,20,30,40,50,60 rollout/trained_len_mean=10,20,30,40
    rollout/truncated_frac=1,0,0,0,0,0 rollout/correct_frac=0,0,0,0,1,1
    genrm/accept_frac=1,0,1,0,0,0 genrm/false_positive_frac=1,0,0,0
    genrm/failed_frac=0,0,0,0,0,0 cost/unfiltered_mean=0.5,1""")
FIRST_SUMS = {"rollout/tokens": 200, "rollout/tokens_trained": 100, "rollout/tokens_filtered": 110}
FIRST_MAXIMA = dict(zip(MAXIMA, (60.0, 4.0, 3.0, 1.0), strict=True))
FIRST = facts(FIRST_MEANS, FIRST_SUMS, FIRST_MAXIMA, [0.1, 0.4])
SECOND_MEANS = columns("""
    reward/mean=1,1,0,1 reward/unfiltered_mean=1,1,0,1,1 reward/zero_std_frac=0,0,0,1,1
    rollout/response_len_mean=10,10,10,10,10,90 rollout/trained_len_mean=10,10,10,10
    rollout/truncated_frac=0,0,0,0,0,0 rollout/correct_frac=0,1,1,1
    genrm/accept_frac=1,1,0,1,1 genrm/false_positive_frac=0
    genrm/failed_frac=0,0,0,0,0,1 cost/unfiltered_mean=0""")
SECOND_SUMS = dict(zip(SUMS.split(), (160, 12, 40, 20, 90, 3, 2, 1, 1), strict=True))
SECOND_MAXIMA = dict(zip(MAXIMA, (90.0, 3.9, 3.5, 1.5), strict=True))
SECOND = facts(SECOND_MEANS, SECOND_SUMS, SECOND_MAXIMA, [0.2, 0.3])


def test_metrics_of_hand_worked_facts():
    expected = numbers("""
        cost/unfiltered_mean=1/2 reward/mean=5/8 reward/unfiltered_mean=6/11
        reward/zero_std_frac=3/8 rollout/response_len_mean=350/12 rollout/response_len_max=90
        rollout/trained_len_mean=140/8 rollout/tokens=360 rollout/tokens_trained=140
        rollout/prompt_tokens=12
        rollout/tokens_filtered=130 rollout/tokens_carried=90 rollout/truncated_frac=1/12
        rollout/moved=3 rollout/aborted=2 rollout/carried_groups=1 rollout/correct_frac=1/2
        genrm/accept_frac=6/11 genrm/failed=1 genrm/false_positive_frac=1/5 genrm/p50_s=0.3
        genrm/failed_frac=1/12
        genrm/p99_s=0.4 time/serve_s=4 time/rollout_s=3.5
        time/train_s=1.5""")
    assert summarize([FIRST, SECOND]) == pytest.approx(expected)


def test_metrics_of_a_step_in_which_nothing_happened():
    """Nothing may be divided by zero; metrics that need judges, answer keys or costs are left out."""
    metrics = summarize([facts(), facts()])
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["reward/mean"] == metrics["genrm/p99_s"] == 0
    optional = {"rollout/correct_frac", "cost/unfiltered_mean"}
    optional |= {"genrm/accept_frac", "genrm/false_positive_frac"}
    assert not optional & metrics.keys()
    keyed, judged = {"rollout/correct_frac": [1, 1, 1]}, {"genrm/accept_frac": [True]}
    assert optional & summarize([facts(keyed)]).keys() == {"rollout/correct_frac"}
    assert optional & summarize([facts(judged)]).keys() == {"genrm/accept_frac"}
    no_wrong_answer = summarize([facts(keyed | judged)])
    assert no_wrong_answer["genrm/false_positive_frac"] == 0


def test_metrics_of_serving_by_hand():
    """Three rollout engines of two ranks each and one of genrm decode two answers each."""
    rollout = RequestStats(tokens=90, request_s=9.0, prompt_tokens=50, cached_tokens=20, wakes=1)
    genrm = RequestStats(tokens=100, longest=40, request_s=3.0, wakes=2)
    config = Config(rollout_tp=2, max_running_requests=2)
    seconds = dict(serve_s=2.0, swap_s=0.25)
    stats = StepStats(Split("partial", 6, 1), rollout, genrm, 1, **seconds)
    expected = numbers("""
        time/swap_s=0.25 split/swaps=3 split/rollout_ranks=6 split/tail=0 genrm/tokens=100
        genrm/response_len_max=40 rollout/cache_hit_frac=2/5
        genrm/cache_hit_frac=0 occupancy/rollout=9/12 occupancy/genrm=3/4""")
    assert serving_metrics(stats, config) == expected
    alone = StepStats(Split("partial", 6, 0), rollout, RequestStats(), 1, 0.0, 0.0)
    assert serving_metrics(alone, config)["occupancy/genrm"] == 0  # there is no engine


def group_of(prompt_id, *rewards, **fields):
    fields |= dict(question="q", answer_key="5", finish="stop")
    rows = enumerate(rewards)
    group = [Sample(prompt_id, i, [1, 2], reward=reward, **fields) for i, reward in rows]
    for sample in group:
        sample.response = [7] * (sample.index + 1)
        sample.verdict = None if sample.reward is None else sample.reward == 1
    return group


def controller_of(timeline=None):
    """Make a controller by which odd answers are wrong and a token takes 10 multiply-adds."""
    final_answer = lambda sample: "5" if sample.index % 2 == 0 else "6"  # noqa: E731
    rewards = SimpleNamespace(final_answer=final_answer)
    actor = SimpleNamespace(dp_rank=1, holds=True, macs=lambda tokens: 10 * tokens)
    devices = SimpleNamespace(actor=actor, received_bytes=2_500_000)
    c = SimpleNamespace(
        rewards=rewards, devices=devices, timeline=timeline, environment=Environment()
    )
    c.state, c.config = State(step=1), Config(judge_format=("chat",))
    c.said = []
    decode = lambda tokens: "x" * 90 + "\n3 + 4 = 5\x1b"  # noqa: E731
    c.report = SimpleNamespace(note=c.said.append, decode=decode)
    return c


def batch_of(kept, filtered=(), carried=()):
    """Make a batch of these groups: a sample without a reward is dropped."""
    samples = [sample for group in kept for sample in group]
    judged = [sample for sample in samples if sample.reward is not None]
    batch = RolloutBatch(kept=judged, filtered=list(filtered), carried=list(carried))
    batch.dropped = [sample for sample in samples if sample.reward is None]
    batch.waves, batch.tokens, batch.latencies, batch.groups_per_kept = 2, 100, [0.5], 1.25
    return batch


def spans_of(name, *intervals, rank=0):
    return [tl.Event("span", name, rank, at, at + length, 0) for at, length in intervals]


def test_local_facts_on_a_hand_worked_step():
    """One group is kept, one filtered, one carried; the carried one's answers must not count."""
    batch = batch_of([group_of(4, 1.0, 0.0)], [group_of(6, 0.0, 0.0)], [group_of(5, 0.0, 1.0)])
    events = spans_of("rollout", (0, 2), (1, 2)) + spans_of("genrm", (1, 1), rank=1)
    events += spans_of("serve", (0, 4))
    found = local_facts(controller_of(), batch, batch.kept, events)
    assert (
        found.means
        | columns("""
        reward/mean=1,0 reward/unfiltered_mean=1,0,0,0 reward/zero_std_frac=0,1
        rollout/response_len_mean=1,2,1,2 rollout/trained_len_mean=1,2
        rollout/truncated_frac=0,0,0,0 rollout/correct_frac=0,0,1,1 genrm/accept_frac=1,0,0,0
        genrm/false_positive_frac=0,0 genrm/failed_frac=0,0,0,0 cost/unfiltered_mean=""")
        == found.means
    )
    sums = dict(zip(SUMS.split(), (100, 8, 3, 3, 3, 0, 0, 1, 0), strict=True))
    assert found.sums | sums == found.sums
    assert {name: value for name, value in found.maxima.items() if value} == numbers("""
        time/serve_s=4 time/rollout_s=3 time/genrm_s=1 rollout/response_len_max=2
        rollout/waves=2 sync/received_mb=2.5""")
    assert found.latencies == [0.5]


EQUAL = {  # name -> the fraction, rewards of kept groups, rewards of filtered groups
    "none is filtered": (2 / 3, [(0.0, 0.0), (1.0, 1.0, 1.0), (0.5, 0.25)], []),
    "some are filtered": (2 / 3, [(0.0, 1.0), (0.0, 0.0)], [(1.0, 1.0)]),
    "filtered for what they lack": (1 / 2, [], [(0.0, 1.0), (1.0, 1.0)]),
    "one isn't judged": (2 / 3, [(1.0, None), (1.0, 0.0, None)], [(None, 1.0)]),
    "no answer is judged": (1.0, [(1.0, 1.0)], [(1.0, 1.0), (None, None)]),
    "one answer a prompt": (1.0, [(1.0,), (0.0,)], []),
}


@pytest.mark.parametrize("name", EQUAL)
def test_groups_of_equal_rewards_count_whatever_is_filtered(name):
    part, kept, filtered = EQUAL[name]
    groups = [group_of(number, *rewards) for number, rewards in enumerate([*kept, *filtered])]
    batch = batch_of(groups[: len(kept)], groups[len(kept) :], [group_of(9, 0.0, 0.0)])
    found = local_facts(controller_of(), batch, batch.kept, [])
    assert summarize([found])["reward/zero_std_frac"] == pytest.approx(part)


def test_the_greedy_answer_is_one_of_its_group():
    """Rewards that all equal it must teach as little as with any other baseline."""
    groups = [group_of(1, 0.0, 0.0, 1.0), group_of(2, 1.0, 1.0, 1.0)]
    batch = batch_of(groups)
    batch.dropped = [batch.kept.pop(place) for place in (5, 2)]
    found = local_facts(controller_of(), batch, batch.kept, [])
    assert found.means["reward/zero_std_frac"] == [False, True]


@pytest.mark.parametrize("kept", [True, False])
def test_failed_judgements_are_counted(kept):
    """A sample without a verdict must be dropped AND counted, in kept groups and in filtered ones."""
    group = group_of(4, 1.0, 0.0, None, None)
    group[3].finish = "lost"  # its episode
    batch = batch_of([group]) if kept else batch_of([], [group])
    found = local_facts(controller_of(), batch, batch.kept, [])
    assert sorted(found.means["genrm/failed_frac"]) == [False, False, False, True]
    assert found.sums["genrm/failed"] == 1 and found.means["reward/unfiltered_mean"] == [1.0, 0.0]
    assert found.means["rollout/response_len_mean"] == [1, 2, 3, 4]
    assert found.sums["rollout/tokens_filtered"] == (7 if kept else 10)


@pytest.mark.parametrize("step, right, key", [(1, 0, "5"), (2, 0, "5"), (1, 1, "5"), (1, 0, None)])
def test_a_line_says_what_an_answer_looks_like_if_none_is_right(step, right, key):
    """Only after the first step, if all of a rank's answers with a key are wrong; printable, cut to 60."""
    c = controller_of()
    c.state.step = step
    group = group_of(4, 1.0, 0.0, 0.0, 0.0)
    for sample in group:
        sample.index, sample.answer_key = 1, key
    group[3].index -= right
    local_facts(c, batch_of([group]), group, [])
    by = "none of 4 answers is right by --judge-format chat; one ends in "
    end = "x" * 49 + r"\n3 + 4 = 5\x1b"
    line = f"{by}'{end}', and its key is '5'; formats: chat, number, harm"
    assert [each[: len(line)] for each in c.said] == [line] * ((step, right, key) == (1, 0, "5"))
    local_facts(c, batch_of([]), [], [])
    assert len(c.said) <= 1


def scalars_in(out, name):
    """Return step -> value, as TensorBoard would show them."""
    board = EventAccumulator(str(out / "tensorboard")).Reload()
    return {event.step: event.value for event in board.Scalars(name)}


def samples_shown(out):
    """Return step -> the texts in its samples, as TensorBoard's page shows them."""
    board = plugin_event_accumulator.EventAccumulator(str(out / "tensorboard")).Reload()
    pages = {}
    for event in board.Tensors("samples/text_summary"):
        page = markdown_to_safe_html(event.tensor_proto.string_val[0])
        pages[event.step] = texts_shown(page)
    return pages


def texts_shown(page):
    blocks = re.findall(r"<pre><code>(.*?)\n</code></pre>", page, re.DOTALL)
    return list(map(html.unescape, blocks))


def rows_in(out, name="metrics"):
    return [json.loads(row) for row in (out / f"{name}.jsonl").open()]


def test_a_writer_of_metrics(tmp_path):
    """A step is a row with sorted names, six digits and unchanged text; TensorBoard has numbers and samples.

    Resuming at a step must drop both from there on."""
    writer = MetricsWriter(tmp_path)
    first = {"b/loss": 0.123456789, "lr": 5.55e-7, "tokens": 12345678.0, "a/reason": "3|1: why"}
    writer.write(0, first, "    a")
    writer.write(3, {"b/loss": 2.0}, "    b")
    # before `close`: a row is safe once written
    assert scalars_in(tmp_path, "b/loss") == {0: pytest.approx(0.123457), 3: 2}
    assert scalars_in(tmp_path, "tokens") == {0: 12345678}
    with pytest.raises(KeyError):
        scalars_in(tmp_path, "a/reason")
    writer.close()
    rounded = {"b/loss": 0.123457, "lr": 5.55e-7, "tokens": 12345678}
    rows = rows_in(tmp_path)
    assert rows == [{"step": 0, "a/reason": "3|1: why"} | rounded, {"step": 3, "b/loss": 2.0}]
    assert list(rows[0]) == ["step", "a/reason", "b/loss", "lr", "tokens"]
    writer = MetricsWriter(tmp_path, purge_step=2)
    writer.write(2, {"b/loss": 9.0}, "    c")
    writer.close()
    assert scalars_in(tmp_path, "b/loss") == {0: pytest.approx(0.123457), 2: 9}
    assert samples_shown(tmp_path) == {0: ["a"], 2: ["c"]}


@pytest.mark.parametrize("room, name", [(0, "metrics.jsonl"), (60, "tensorboard")])
def test_a_row_that_cannot_be_written_ends_the_run(tmp_path, monkeypatch, room, name):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # TensorBoard's thread reports
    writer = MetricsWriter(tmp_path)
    with full_disk(room), pytest.raises(RunLost, match=f"{name} can't be written: File too large"):
        writer.write(0, {"x": 0.0})


def report_in(out, world, progress=None, log_samples=2):
    progress = progress or SimpleNamespace(line=lambda text: None, step=lambda *_: None)
    sizes = dict(answers_per_prompt=2, prompts_per_step=4, max_running_requests=4)
    config = Config(steps=1, eval_samples=2, log_samples=log_samples, **sizes)
    return Report(config, world, out, progress, lambda tokens: "<b>*" * len(tokens), prompts=5)


@pytest.mark.parametrize("is_full, log_samples", [(False, 5), (True, 2), (True, 0)])
def test_a_report_writes_rows_and_samples(tmp_path, monkeypatch, is_full, log_samples):
    """A step must be an object; TensorBoard gets as many samples as requested, the first of each group; the
    picture comes at the end. is_full: the disk has only room for rows, and the picture costs a line."""
    (tmp_path / "spans").mkdir()
    run = {"placement": "colocate", "mode": "partial", "ranks": 1, "max_running_requests": 4}
    (tmp_path / "config.json").write_text(json.dumps(run))
    loop, lines = VirtualClock(), []
    c = controller_of(tl.Timeline(0, loop.time, tmp_path / "spans"))
    work = RequestStats(tokens=100, longest=40, prompt_tokens=50, cached_tokens=20, wakes=1)
    history = [StepStats(Split("partial", 3, 1), work, work, 1, 2.0, 0.25)]
    c.state = State(history=history)
    c.checkpoints = SimpleNamespace(saving=None)

    async def at_once(work):
        work()

    loop.run_in_executor = lambda _, work: loop.create_task(at_once(work))
    progress = SimpleNamespace(line=lines.append, step=lambda *_: None)
    report = report_in(tmp_path, FakeWorld(0, 1, {}), progress, log_samples)
    batch = batch_of([group_of(i, 1.0, 0.0, critique="c") for i in range(3)])
    batch.missing_groups = 1

    async def one_step():
        report.evaluation(0, [(True, 1), *[(False, 0)] * 3], [], 0, c.timeline.now())
        with c.timeline.span("serve"):
            await asyncio.sleep(2.0)
        with c.timeline.span("train"):
            await asyncio.sleep(2.0)
        await report.step(c, 0, batch, batch.kept, {"train/loss": 0.5})
        report.evaluation(1, [*[(True, 0)] * 3, (False, 0)], [], 1, c.timeline.now())
        await report.written()

    loop.run_until_complete(one_step())
    with full_disk(), pytest.raises(RunLost):  # after spans, which have no folder now
        c.timeline.folder = None
        loop.run_until_complete(one_step())
    read = lambda *_: (tmp_path / "metrics.jsonl").read_text().index("0.75")  # noqa: E731
    monkeypatch.setattr(tl, "read", lambda *a, real=tl.read: read() and real(*a))
    with full_disk(10_000) if is_full else contextlib.nullcontext():
        report.close()  # its last row comes first: a run that is killed as it draws has it
    assert ("timeline.png could not be written: [Errno 27] File too large" in lines[-1]) == is_full
    first, last = rows_in(tmp_path)
    expected = numbers("""
        step=0 eval/accuracy=0.25 eval/pass@1=0.125 eval/pass@2=0.25
        train/loss=0.5 time/step_s=4 time/serve_s=2
        split/rollout_ranks=3 rollout/groups_per_kept=1.25 rollout/lacking_groups=1
        perf/tokens_per_s=25 perf/prompt_and_answer_tokens_per_s=28""")
    assert {name: first[name] for name in expected} == expected
    last_expected = {"step": 1, "eval/accuracy": 0.75, "eval/pass@1": 0, "eval/pass@2": 0}
    assert last == last_expected | {"eval/lost_frac": 0.2}
    assert "steps: eval/accuracy 0.250  eval/pass@1 0.125  eval/pass@2 0.250 on" in lines[0]
    assert "step 1: 1 of 4 groups are missing after 2 waves" in lines[1]
    (served,) = rows_in(tmp_path, "history")
    assert served.pop("step") == 0 and StepStats.of_json(served) == history[0]
    samples = rows_in(tmp_path, "samples")
    asked = [(0, 1.0), (1, 1.0), (2, 1.0), (0, 0.0), (1, 0.0)][:log_samples]
    assert [(s["prompt_id"], s["reward"]) for s in samples] == asked
    assert all(list(s) == FIELDS.split() for s in samples)
    assert {s["response"] for s in samples[:2]} <= {"<b>*"}
    if log_samples:
        texts = [s[name] for s in samples for name in TEXTS]
        assert samples_shown(tmp_path) == {0: texts}
    if not is_full:
        board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        (shown,) = board.Images("timeline")
        with Image.open(tmp_path / "timeline.png") as picture:
            assert (shown.step, shown.width, shown.height) == (1, *picture.size)


def test_an_episode_has_each_turn_s_reward_and_metrics(tmp_path):
    """Other answers have no such columns."""
    report = report_in(tmp_path, FakeWorld(0, 1, {}))
    plain, played = group_of(4, 1.0, 0.5)
    played.earned, played.noted = [0.25, 0.5], [{}, {"hints": 2.0}]
    stats = StepStats(Split("partial", 1, 1), RequestStats(), RequestStats(), 1, 0.0, 0.0)
    report._write(0, {}, stats, [(plain, {}), (played, {})])
    first, second = rows_in(tmp_path, "samples")
    assert "earned" not in first and "noted" not in first
    assert (second["earned"], second["noted"]) == (played.earned, played.noted)


def test_other_ranks_write_nothing_but_their_skipped_samples(tmp_path):
    """They must write whole samples with their text, a line each, from any rank."""
    report = report_in(tmp_path, SimpleNamespace(rank=1, size=2))
    report.close()
    assert not list(tmp_path.iterdir())
    path = report.dump(group_of(4, 1.0, 0.0))
    report.dump(group_of(5, None))
    rows = [json.loads(row) for row in path.open()]
    found = [(row["prompt_id"], row["text"], row["reward"]) for row in rows]
    assert found == [(4, "<b>*", 1.0), (4, "<b>*<b>*", 0.0), (5, "<b>*", None)]
