"""Spans to seconds, occupancy, trace and figure; and the metrics of a step from hand-worked facts."""

import asyncio
import itertools
import json
import math
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import controller
import rollout
from config import Config
from engines.pool import RoleLoad
from placement import Plan
from reporting import timeline as tl
from reporting.metrics import Report, local_facts, summarize
from sample import Sample
from scheduling import dynamic_sampling
from scheduling.rebalance import Load

# quarters are exact in binary, so brute force and busy() may be compared to the last bit
QUARTERS = st.integers(0, 40).map(lambda n: n / 4)
LENGTHS = st.integers(1, 20).map(lambda n: n / 4)
RANKS = st.integers(0, 3)
INTERVALS = st.lists(st.tuples(QUARTERS, LENGTHS), max_size=12)


def spans_of(intervals, name="rollout", rank=0, step=0):
    return [tl.Span(name, rank, start, start + length, step) for start, length in intervals]


def in_flight(intervals, tick):
    """How many intervals cover the quarter of a second that begins at tick / 4."""
    return sum(start * 4 <= tick < (start + length) * 4 for start, length in intervals)


# ---------------------------------------------------------------- busy, seconds, lanes


def test_busy_on_hand_worked_spans():
    """Two overlap for one of three seconds; touching ones are one stretch or two; a gap parts them."""
    assert tl.busy([]) == []
    assert tl.busy(spans_of([(0, 2), (1, 2)])) == [(0, 3, 4 / 3)]
    assert tl.busy(spans_of([(1, 1), (4, 2)])) == [(1, 2, 1.0), (4, 6, 1.0)]
    assert tl.busy(spans_of([(0, 4), (1, 1), (2, 1)])) == [(0, 4, 1.5)]


@settings(deadline=None)
@given(INTERVALS)
def test_busy_against_a_sampler(intervals):
    """Stretches are disjoint and in order; they cover exactly the quarters with a span in flight; the work is the spans' own."""
    stretches = tl.busy(spans_of(intervals))
    for (_, end, _), (start, _, _) in itertools.pairwise(stretches):
        assert end <= start
    for start, end, flying in stretches:
        counts = [in_flight(intervals, tick) for tick in range(int(start * 4), int(end * 4))]
        assert min(counts) >= 1 and math.isclose(flying, sum(counts) / len(counts))
    assert sum(end - start for start, end, _ in stretches) * 4 == sum(in_flight(intervals, tick) > 0 for tick in range(100))
    assert math.isclose(sum((end - start) * flying for start, end, flying in stretches), sum(length for _, length in intervals))


@pytest.mark.parametrize("others", [[], [(1, 2)], [(5, 1)], [(7, 1)]])
def test_an_instant_adds_no_time(others):
    """A span of no length, as one below a microsecond becomes in its file, changes the seconds of nothing else."""
    stretches = tl.busy(spans_of([*others, (5, 0)]))
    assert sum(end - start for start, end, _ in stretches) == sum(length for _, length in others)
    assert all(flying >= 1 for _, _, flying in stretches)


@settings(deadline=None)
@given(INTERVALS, INTERVALS)
def test_seconds_of_one_name(rollout, genrm):
    """Wall-clock seconds with at least one span of that name open."""
    spans = spans_of(rollout) + spans_of(genrm, "genrm", rank=1)
    assert tl.seconds(spans, "rollout") == sum(in_flight(rollout, tick) > 0 for tick in range(100)) / 4
    assert tl.seconds(spans, "genrm") == sum(in_flight(genrm, tick) > 0 for tick in range(100)) / 4
    assert tl.seconds(spans, "train") == 0


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["rollout", "genrm"]), st.integers(0, 2), INTERVALS), max_size=6))
def test_lanes_against_a_sampler(groups):
    """One lane for each rank and name; requests of all controllers to one engine fall together."""
    spans = [span for name, rank, intervals in groups for span in spans_of(intervals, name, rank)]
    found = tl.lanes(spans)
    assert set(found) == {(span.rank, span.name) for span in spans} and list(found) == sorted(found)
    for (rank, name), stretches in found.items():
        mine = [(s.start, s.end - s.start) for s in spans if (s.rank, s.name) == (rank, name)]
        assert sum(end - start for start, end, _ in stretches) * 4 == sum(in_flight(mine, tick) > 0 for tick in range(100))


# ---------------------------------------------------------------- one controller's timeline


def test_a_timeline_on_a_clock(tmp_path):
    """Times count from `start`; a span is closed when its block raises, too; what is taken lies in the rank's file."""
    now, opened = [100.0], []
    line = tl.Timeline(3, lambda: now[0], tmp_path, lambda name, step: opened.append((name, step)))
    now[0] = 110.0
    line.start()
    assert line.now() == 0
    line.step = 2
    with line.span("serve"):
        now[0] = 112.5
        line.request("rollout", 1, 111.0, 112.0)
    with pytest.raises(KeyError), line.span("train"):
        now[0] = 113.0
        raise KeyError
    expected = [tl.Span("rollout", 1, 1.0, 2.0, 2), tl.Span("serve", 3, 0.0, 2.5, 2), tl.Span("train", 3, 2.5, 3.0, 2)]
    assert line.take() == expected and line.take() == []
    assert opened == [("serve", 2), ("train", 2)]
    line.request("genrm", 0, 113.0, 114.0)
    line.take()
    assert tl.read(tmp_path) == tl.Records([*expected, tl.Span("genrm", 0, 3.0, 4.0, 2)])
    assert [path.name for path in tmp_path.iterdir()] == ["rank3.jsonl"]


def test_without_a_folder_nothing_is_written():
    line = tl.Timeline(0, lambda: 0.0)
    line.request("rollout", 0, 0.0, 1.0)
    line.sample("decoding", 4, 0, 0, 0.0, 1.0)
    line.mark("wave", "wave 1")
    assert len(line.take()) == 1 and line.spans == line.samples == line.marks == []


def test_samples_and_marks_go_to_the_file_alone(tmp_path):
    """On the clock of the spans, with the step they belong to; `take` hands out spans only, and keeps nothing."""
    now = [100.0]
    line = tl.Timeline(1, lambda: now[0], tmp_path)
    now[0] = 110.0
    line.start()
    line.sample("queued", 7, 3, 2, 110.0, 110.5)
    line.sample("aborted", 7, 3, 2, 111.0, 111.0)
    now[0] = 112.0
    line.mark("weights", "v1")
    assert line.take() == [] and line.spans == line.samples == line.marks == []
    line.step = 1
    line.mark("split", "3|1")
    line.request("rollout", 2, 112.0, 113.0)
    assert line.take() == [tl.Span("rollout", 2, 2.0, 3.0, 1)]
    samples = [tl.SampleSpan("queued", 7, 3, 2, 0.0, 0.5, 0), tl.SampleSpan("aborted", 7, 3, 2, 1.0, 1.0, 0)]
    marks = [tl.Mark("weights", "v1", 1, 2.0, 0), tl.Mark("split", "3|1", 1, 2.0, 1)]
    assert tl.read(tmp_path) == tl.Records([tl.Span("rollout", 2, 2.0, 3.0, 1)], samples, marks)


@pytest.mark.parametrize("state,end", [("asleep", 1.0), ("done", 1.0), ("aborted", 1.0), ("decoding", -1.0)])
def test_an_answer_has_known_states(state, end):
    """Instants have no length, other states none below 0, and there are no states and kinds but those with a colour or a label."""
    line = tl.Timeline(0, lambda: 0.0)
    with pytest.raises(AssertionError, match=state):
        line.sample(state, 0, 0, 0, 0.0, end)
    with pytest.raises(AssertionError, match="lunch"):
        line.mark("lunch", "12")
    assert line.samples == line.marks == []


@settings(deadline=None)
@given(
    st.lists(st.builds(tl.Span, st.sampled_from(list(tl.COLORS)), RANKS, QUARTERS, QUARTERS, RANKS)),
    st.lists(st.builds(tl.SampleSpan, st.sampled_from(list(tl.STATES)), st.integers(-9, 9), RANKS, RANKS, QUARTERS, QUARTERS, RANKS)),
    st.lists(st.builds(tl.Mark, st.sampled_from(tl.MARKS), st.text(max_size=3), RANKS, QUARTERS, RANKS)),
)
def test_what_was_taken_can_be_read(spans, samples, marks):
    """Records of every kind, on two ranks and over two steps, come back as they were; two ranks that saw nothing do, too."""
    with tempfile.TemporaryDirectory() as folder:
        assert tl.read(Path(folder)) == tl.Records()
        for rank in (0, 1):
            line = tl.Timeline(rank, lambda: 0.0, Path(folder))
            line.take()
            line.spans, line.samples, line.marks = spans[rank::2], samples[rank::2], marks[rank::2]
            assert line.take() == spans[rank::2]
        whole = tl.Records(*(kind[::2] + kind[1::2] for kind in (spans, samples, marks)))
        assert tl.read(Path(folder)) == whole


# ---------------------------------------------------------------- trace

MIXED = [
    *spans_of([(0, 2), (1, 2)], "rollout", 0),
    *spans_of([(0.5, 1), (3, 0.5)], "genrm", 1),
    *[tl.Span(name, rank, 4.0, 5.0, 0) for name in ("train", "switch", "sync") for rank in (0, 1)],
    *[tl.Span("train", rank, 9.0, 9.5, 1) for rank in (0, 1)],
]


def test_the_trace_is_a_chrome_trace(tmp_path):
    """Complete events in microseconds with process, thread and arguments, and a name for every process and thread."""
    tl.write_trace(tl.Records([*MIXED, tl.Span("evaluate", 0, 0.0, 9.0, 0)]), tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["displayTimeUnit"] == "ms"
    events, names = ([e for e in trace["traceEvents"] if e["ph"] == ph] for ph in ("X", "M"))
    assert len(events) + len(names) == len(trace["traceEvents"])
    for event in events:
        assert event.keys() == {"name", "ph", "pid", "tid", "ts", "dur", "args"}
        assert event["dur"] > 0 and event["ts"] >= 0 and event["args"]["in_flight"] >= 1
    rollout = [e for e in events if e["name"] == "rollout"]
    assert [(e["pid"], e["ts"], e["dur"], e["args"]["in_flight"]) for e in rollout] == [(0, 0, 3e6, 1.33)]
    assert sorted((e["pid"], e["ts"], e["dur"]) for e in events if e["name"] == "genrm") == [(1, 0.5e6, 1e6), (1, 3e6, 0.5e6)]
    processes = {e["pid"]: e["args"]["name"] for e in names if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in names if e["name"] == "thread_name"}
    assert processes == {0: "rank 0", 1: "rank 1"}
    assert all(threads[e["pid"], e["tid"]] == e["name"] for e in events)


def test_an_empty_trace_loads(tmp_path):
    tl.write_trace(tl.Records(), tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []


LIFE = [  # of one answer: cut in step 0 on rank 0, which wrote it, written to its end in step 1 on rank 1, and judged on rank 2
    tl.SampleSpan("queued", 12, 3, 0, 0.0, 0.25, 0),
    tl.SampleSpan("decoding", 12, 3, 0, 0.25, 2.0, 0),
    tl.SampleSpan("aborted", 12, 3, 0, 2.0, 2.0, 0),
    tl.SampleSpan("queued", 12, 3, 1, 5.0, 5.0, 1),
    tl.SampleSpan("resumed", 12, 3, 1, 5.0, 6.5, 1),
    tl.SampleSpan("judging", 12, 3, 2, 6.5, 7.0, 1),
    tl.SampleSpan("done", 12, 3, 2, 7.0, 7.0, 1),
]


def events_of(records, path, phases):
    tl.write_trace(records, path)
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] in phases]


def test_an_answer_over_two_steps_in_the_trace(tmp_path):
    """One id through abort and resumption; each stretch on the engine that had it, and closed before the next opens."""
    events = events_of(tl.Records(samples=LIFE), tmp_path / "trace.json", "ben")
    assert {(e["id"], e["cat"]) for e in events} == {("12.3", "sample")}
    assert [(e["name"], e["ph"], e["pid"], e["ts"]) for e in sorted(events, key=lambda e: e["ts"])] == [
        ("queued", "b", 0, 0), ("queued", "e", 0, 250_000), ("decoding", "b", 0, 250_000), ("decoding", "e", 0, 2_000_000),
        ("aborted", "n", 0, 2_000_000),
        ("queued", "b", 1, 5_000_000), ("queued", "e", 1, 5_000_000), ("resumed", "b", 1, 5_000_000), ("resumed", "e", 1, 6_500_000),
        ("judging", "b", 2, 6_500_000), ("judging", "e", 2, 7_000_000), ("done", "n", 2, 7_000_000),
    ]  # fmt: skip
    assert [e["args"]["step"] for e in events if e["ph"] in "bn"] == [0, 0, 0, 1, 1, 1, 1]
    names = events_of(tl.Records(samples=LIFE), tmp_path / "trace.json", "M")
    assert {e["pid"] for e in names} == {0, 1, 2}


@settings(deadline=None)
@given(st.randoms(), st.lists(st.lists(st.tuples(st.sampled_from(list(tl.STATES)), st.integers(0, 3)), max_size=6), max_size=5))
def test_slices_of_an_answer_never_overlap_in_the_trace(rng, answers):
    """One b and one e a stretch, whatever the order of the ranks' files; read by time, each e closes the b before it."""
    samples = []
    for index, life in enumerate(answers):
        ends = list(itertools.accumulate((0 if state in tl.INSTANTS else length for state, length in life), initial=0))
        samples += [tl.SampleSpan(s, 5, index, 0, *times, 0) for (s, _), times in zip(life, itertools.pairwise(ends), strict=True)]
    shuffled = [s for s in samples if s.end > s.start]
    rng.shuffle(shuffled)  # instants and stretches of no length stay in order: they come from one rank's file
    with tempfile.TemporaryDirectory() as folder:
        records = tl.Records(samples=shuffled + [s for s in samples if s.end == s.start])
        events = events_of(records, Path(folder) / "trace.json", "ben")
    assert sum(e["ph"] == "n" for e in events) == sum(s.state in tl.INSTANTS for s in samples)
    assert sum(e["ph"] == "b" for e in events) == sum(s.state not in tl.INSTANTS for s in samples)
    for index in range(len(answers)):
        mine = sorted((e for e in events if e["id"] == f"5.{index}" and e["ph"] != "n"), key=lambda e: e["ts"])
        assert all((b["ph"], e["ph"], b["name"]) == ("b", "e", e["name"]) for b, e in zip(mine[::2], mine[1::2], strict=True))


def test_marks_in_the_trace(tmp_path):
    """An instant of its rank's process each, named by its kind."""
    marks = [tl.Mark("weights", "v3", 1, 0.5, 2), tl.Mark("wave", "wave 2", 0, 1.0, 2), tl.Mark("split", "3|1", 0, 2.0, 2)]
    events = events_of(tl.Records(marks=marks), tmp_path / "trace.json", "i")
    found = [(e["name"], e["pid"], e["ts"], e["s"]) for e in events]
    assert found == [("weights v3", 1, 500_000, "p"), ("wave 2", 0, 1_000_000, "p"), ("split 3|1", 0, 2_000_000, "p")]


# ---------------------------------------------------------------- the metrics of a step


ONE_EACH = {"rollout": 1, "genrm": 1}


def facts(**changes):
    """One controller's facts in which nothing happened."""
    names = ("truncated", "aborted", "filtered", "groups", "carried", "failed", "waves", "lacking", "answers_keyed", "answers_wrong")
    nothing = dict.fromkeys((*names, "timeouts", "wrong_accepted", "dp_rank", "work"), 0)
    nothing |= dict.fromkeys(("tokens", "tokens_trained", "tokens_filtered", "tokens_carried"), 0)
    nothing |= {name: [] for name in ("kept_rewards", "rewards", "costs", "verdicts", "lengths", "trained_lengths", "latencies")}
    seconds = dict.fromkeys(("serve", "rollout", "genrm", "train", "switch", "sync"), 0.0)
    nothing |= {"seconds": seconds, "request_seconds": {"rollout": 0.0, "genrm": 0.0}}
    assert changes.keys() <= nothing.keys()
    return nothing | changes


FIRST = facts(
    verdicts=[True, False, True, False, False, False], costs=[0.5, 1.0],
    kept_rewards=[1.0, 0.0, 1.0, 0.0], rewards=[1.0, 0.0, 1.0, 0.0, 0.0, 0.0], lengths=[10, 20, 30, 40, 50, 60], latencies=[0.1, 0.4],
    truncated=1, filtered=1, groups=3, carried=0, waves=2, lacking=1, answers_keyed=6, answers_wrong=4, wrong_accepted=1, failed=0,
    timeouts=2, dp_rank=0, work=300, tokens=200, tokens_trained=100, tokens_filtered=110, trained_lengths=[10, 20, 30, 40],
    seconds=dict(serve=4.0, rollout=3.0, genrm=2.0, train=1.0, switch=0.5, sync=0.1), request_seconds=dict(rollout=12.0, genrm=1.0),
)  # fmt: skip
SECOND = facts(
    verdicts=[True, True, False, True, True], costs=[0.0],
    kept_rewards=[1.0, 1.0, 0.0, 1.0], rewards=[1.0, 1.0, 0.0, 1.0, 1.0], lengths=[10, 10, 10, 10, 10, 90], latencies=[0.2, 0.3],
    truncated=0, aborted=2, filtered=2, groups=5, carried=1, waves=2, lacking=1, answers_keyed=4, answers_wrong=1, failed=1,
    dp_rank=1, work=100, tokens=160, tokens_trained=40, tokens_filtered=20, tokens_carried=90, trained_lengths=[10, 10, 10, 10],
    seconds=dict(serve=3.9, rollout=3.5, genrm=1.0, train=1.5, switch=0.4, sync=0.3), request_seconds=dict(rollout=4.0, genrm=3.0),
)  # fmt: skip


def test_metrics_of_hand_worked_facts():
    """Two controllers; every number worked out by hand."""
    metrics = summarize([FIRST, SECOND], {"rollout": 8, "genrm": 2})
    expected = {
        "cost/unfiltered_mean": 0.5, "reward/mean": 5 / 8, "reward/unfiltered_mean": 6 / 11, "reward/zero_std_frac": 3 / 8,
        "rollout/response_len_mean": 350 / 12, "rollout/response_len_max": 90, "rollout/trained_len_mean": 140 / 8,
        "rollout/tokens": 360, "rollout/tokens_trained": 140, "rollout/tokens_filtered": 130, "rollout/tokens_carried": 90,
        "rollout/truncated_frac": 1 / 12,
        "rollout/waves": 2, "rollout/aborted": 2, "rollout/lacking_groups": 1, "rollout/carried_groups": 1,
        "rollout/correct_frac": 1 / 2,
        "genrm/accept_frac": 6 / 11, "genrm/failed": 1, "genrm/false_positive_frac": 1 / 5, "genrm/p50_s": 0.3, "genrm/p99_s": 0.4,
        "genrm/timeouts": 2, "balance/max_over_mean": 1.5, "occupancy/rollout": 16 / (8 * 4.0), "occupancy/genrm": 4 / (2 * 4.0),
        "time/serve_s": 4.0, "time/rollout_s": 3.5, "time/genrm_s": 2.0, "time/train_s": 1.5, "time/switch_s": 0.5, "time/sync_s": 0.3,
    }  # fmt: skip
    assert metrics == pytest.approx(expected)


def test_metrics_of_a_step_in_which_nothing_happened():
    """No division by zero; what only answer keys can tell is left out."""
    metrics = summarize([facts(), facts(dp_rank=1)], ONE_EACH)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["reward/mean"] == metrics["genrm/p99_s"] == metrics["occupancy/rollout"] == 0
    assert "genrm/false_positive_frac" not in metrics and not {"rollout/correct_frac", "cost/unfiltered_mean"} & metrics.keys()
    assert not {"genrm/accept_frac", "genrm/false_positive_frac"} & summarize([facts(answers_keyed=3)], ONE_EACH).keys()
    assert summarize([facts(answers_keyed=3, verdicts=[True])], ONE_EACH)["genrm/false_positive_frac"] == 0


def test_ranks_of_one_model_parallel_group_count_once_in_the_balance():
    """Four ranks, tp 2: each data-parallel rank's tokens are reported by two ranks."""
    four = [facts(dp_rank=rank // 2, work=(100, 300)[rank // 2]) for rank in range(4)]
    assert summarize(four, ONE_EACH)["balance/max_over_mean"] == 1.5


def group_of(prompt_id, *rewards, **fields):
    judged = [dict(reward=reward, verdict=None if reward is None else reward == 1) for reward in rewards]
    return [
        Sample(prompt_id, i, [1, 2], "q", "5", response=[7] * (i + 1), finish="stop", **each, **fields) for i, each in enumerate(judged)
    ]


def served_of(job, groups, wanted):
    """What a step of one controller that drew these groups in this order comes to; two waves, 100 tokens written in it."""
    drawn = dynamic_sampling.Draws(wanted, in_order=True, wave_of={group[0].prompt_id: min(i, 1) for i, group in enumerate(groups)})
    drawn.learn({group[0].prompt_id: dynamic_sampling.is_informative(group) for group in groups})
    step = rollout.Step(job, drawn)
    step.groups = {group[0].prompt_id: group for group in groups}
    rollout.sort_out(step)
    step.served.tokens = 100
    return step.served


def facts_of(groups, wanted):
    """local_facts of one controller that drew these groups."""
    answers = {id(s): ("5" if s.index % 2 == 0 else "6") for group in groups for s in group}
    judge = SimpleNamespace(final_answer=lambda sample: answers[id(sample)], latencies=[0.5], timeouts=3)
    actor = SimpleNamespace(dp_rank=1, dp_size=1, cost=lambda tokens: 10 * tokens)
    groups_of = SimpleNamespace(put_back=lambda again, carried: None)
    job = SimpleNamespace(config=Config(), judge=judge, actor=actor, groups=groups_of)
    served = served_of(job, groups, wanted)
    spans = spans_of([(0, 2), (1, 2)]) + spans_of([(1, 1)], "genrm", 1) + spans_of([(0, 4)], "serve")
    for sample in served.kept:
        sample.advantages = [0.5] * len(sample.response)
    return local_facts(served, served.kept, spans, job)


def test_local_facts_on_a_hand_worked_step():
    """Three groups: one kept, one filtered, one carried, for one was enough; that one's answers don't count. Odd answers are wrong."""
    found = facts_of([group_of(6, 0.0, 0.0), group_of(4, 1.0, 0.0), group_of(5, 0.0, 1.0)], wanted=1)
    found["seconds"] = {name: value for name, value in found["seconds"].items() if value}
    assert found == {
        "kept_rewards": [1.0, 0.0], "rewards": [1.0, 0.0, 0.0, 0.0], "lengths": [1, 2, 1, 2],
        "verdicts": [True, False, False, False], "costs": [],
        "truncated": 0, "aborted": 0, "filtered": 1, "groups": 2, "carried": 1, "waves": 2, "lacking": 0,
        "tokens": 100, "tokens_trained": 3, "tokens_filtered": 3, "tokens_carried": 3, "trained_lengths": [1, 2],
        "answers_keyed": 4, "answers_wrong": 2, "wrong_accepted": 0, "failed": 0,
        "latencies": [0.5], "timeouts": 3, "dp_rank": 1, "work": 10 * (2 * 2 + 3),
        "seconds": {"serve": 4.0, "rollout": 3.0, "genrm": 1.0}, "request_seconds": {"rollout": 4.0, "genrm": 1.0},
    }  # fmt: skip


def test_a_short_batch_is_counted():
    """Two wanted, one found: the filtered group is no work, and its tokens stay filtered."""
    found = facts_of([group_of(6, 0.0, 0.0), group_of(4, 1.0, 0.0)], wanted=2)
    assert (found["lacking"], found["filtered"], found["work"]) == (1, 1, 10 * (2 * 2 + 3))
    assert (found["tokens_trained"], found["tokens_filtered"], found["tokens_carried"]) == (3, 3, 0)


@pytest.mark.parametrize("rewards", [(1.0, 0.0, None), (1.0, 1.0, None)])
def test_failed_judgements_are_counted(rewards):
    """A sample without a verdict is dropped AND counted, in kept groups as in filtered ones; its tokens were generated, too."""
    found = facts_of([group_of(4, *rewards)], wanted=1)
    assert found["failed"] == 1
    assert found["lengths"] == [1, 2, 3] and found["rewards"] == list(rewards[:2])


def test_an_answer_that_nobody_judged_yet_is_no_failure():
    """Its group was cut off, or comes again: only what a judge failed on counts."""
    found = facts_of([group_of(4, 1.0, 0.0), group_of(5, None, None)], wanted=1)
    assert (found["failed"], found["carried"], found["lengths"]) == (0, 1, [1, 2])


# ---------------------------------------------------------------- what rank 0 writes


def test_a_report_writes_rows_samples_and_pictures(tmp_path):
    """One JSON object a step with everything measured before it, two whole groups' first samples, trace and picture at the end."""
    from tests.fakes import FakeWorld, VirtualClock

    (tmp_path / "spans").mkdir()
    config = SimpleNamespace(steps=1, answers_per_prompt=2, max_running_requests=4)
    progress = SimpleNamespace(line=lambda text: None, step=lambda *args: None)
    loop = VirtualClock()
    line = tl.Timeline(0, loop.time, tmp_path / "spans")
    judge = SimpleNamespace(final_answer=lambda sample: "5", latencies=[], timeouts=0)
    actor = SimpleNamespace(dp_rank=0, dp_size=1, cost=lambda tokens: tokens)
    groups = SimpleNamespace(put_back=lambda again, carried: None)
    job = SimpleNamespace(config=Config(), timeline=line, judge=judge, actor=actor, groups=groups)
    work = RoleLoad(tokens=100, longest=40, prompt_tokens=50, cached_tokens=20, wakes=1)
    load = Load(Plan("partial", (0, 1, 2), (3,), (0, 1, 2, 3)), work, work, 1, 2.0, 0.25, 0.5)
    job.state = controller.State(groups_per_kept=1.25, history=[load])
    written = Report(config, FakeWorld(0, 1, {}), tmp_path, progress, lambda tokens: "<b>*" * len(tokens))
    served = served_of(job, [group_of(i, 1.0, 0.0, critique="c") for i in range(3)], wanted=3)

    async def one_step():
        written.accuracy(0, 0.25, line.now())
        with line.span("serve"):
            await asyncio.sleep(2.0)
        with line.span("train"):
            await asyncio.sleep(2.0)
        await written.step(0, served, served.kept, {"train/loss": 0.5}, job)
        written.accuracy(1, 0.75, line.now())

    loop.run_until_complete(one_step())
    loop.close()
    written.close(4, "title")
    first, last = [json.loads(row) for row in (tmp_path / "metrics.jsonl").open()]
    assert (first["step"], first["eval/accuracy"], first["train/loss"], first["time/step_s"]) == (0, 0.25, 0.5, 4.0)
    assert (first["split/rollout_ranks"], first["rollout/groups_per_kept"], first["perf/tokens_per_s"]) == (3, 1.25, 100 / 4)
    assert (first["time/swap_s"], first["split/swaps"], first["genrm/cache_hit_frac"], first["genrm/tokens"]) == (0.25, 2, 0.4, 100)
    assert last == {"step": 1, "eval/accuracy": 0.75}
    samples = [json.loads(row) for row in (tmp_path / "samples.jsonl").open()]
    keys = {"step", "prompt_id", "question", "answer_key", "response", "finish", "critique", "verdict", "reward", "cost"}
    assert [s["prompt_id"] for s in samples] == [0, 1] and all(s.keys() == keys for s in samples)
    assert samples[0]["response"] == "<b>*" and samples[0]["reward"] == 1.0
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (tmp_path / "timeline.png").stat().st_size > 1000
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
