"""Spans to seconds, occupancy, trace and figure; and the metrics of a step from hand-worked facts."""

import asyncio
import itertools
import json
import math
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import controller
import report
import timeline as tl
from rollout import Sample

# quarters are exact in binary, so brute force and busy() may be compared to the last bit
QUARTERS = st.integers(0, 40).map(lambda n: n / 4)
LENGTHS = st.integers(1, 20).map(lambda n: n / 4)
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
    assert tl.read_spans(tmp_path) == [*expected, tl.Span("genrm", 0, 3.0, 4.0, 2)]
    assert [path.name for path in tmp_path.iterdir()] == ["rank3.jsonl"]


def test_without_a_folder_nothing_is_written():
    line = tl.Timeline(0, lambda: 0.0)
    line.request("rollout", 0, 0.0, 1.0)
    assert len(line.take()) == 1 and line.spans == []


# ---------------------------------------------------------------- trace and figure

MIXED = [
    *spans_of([(0, 2), (1, 2)], "rollout", 0),
    *spans_of([(0.5, 1), (3, 0.5)], "genrm", 1),
    *[tl.Span(name, rank, 4.0, 5.0, 0) for name in ("train", "switch", "sync") for rank in (0, 1)],
    *[tl.Span("train", rank, 9.0, 9.5, 1) for rank in (0, 1)],
]


def test_the_trace_is_a_chrome_trace(tmp_path):
    """Complete events in microseconds with process, thread and arguments, and a name for every process and thread."""
    tl.write_trace(MIXED, tmp_path / "trace.json")
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
    tl.write_trace([], tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []


@pytest.mark.parametrize("spans", [MIXED, MIXED[:1], []], ids=["mixed", "one", "none"])
def test_the_figure_is_a_picture(tmp_path, spans):
    """A PNG that isn't blank, whatever there is to draw."""
    import matplotlib.image

    tl.draw([tl.Picture("a title", spans, 4)], tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    picture = matplotlib.image.imread(tmp_path / "timeline.png")
    assert picture.std() > 0 and picture.shape[1] > 1000


@pytest.mark.parametrize(
    "first,last,steps",
    [(-3, -1, {9, 10, 11}), (0, 0, {0}), (2, 4, {2, 3, 4}), (10, 99, {10, 11}), (-99, 1, {0, 1}), (5, 4, set()), (50, 60, set())],
)
def test_steps_of_a_run(first, last, steps):
    """Of 12 steps; the evaluation after the last belongs to none, and what has no colour isn't drawn."""
    spans = [tl.Span("train", 1, 10.0 * i + 5, 10.0 * i + 6, i) for i in range(12)]
    spans += [tl.Span("rollout", 1, 120.0, 121.0, 12), tl.Span("evaluate", 0, 0.0, 9.0, 3)]
    chosen = tl.of_steps(spans, first, last)
    assert {s.step for s in chosen} == steps and {s.name for s in chosen} <= {"train"}


def write_run(out, mode, spans):
    """What a run leaves for the figure."""
    (out / "spans").mkdir(parents=True)
    (out / "config.json").write_text(json.dumps({"mode": mode, "ranks": 2, "max_running_requests": 4}))
    for rank in (0, 1):
        (out / "spans" / f"rank{rank}.jsonl").write_text("".join(json.dumps(s) + "\n" for s in spans if s.rank == rank))


def test_two_runs_on_one_clock(tmp_path, monkeypatch):
    """Both runs start at 0, whenever they began, share the axis, and say which is which."""
    import matplotlib.axes
    import matplotlib.image

    bars = []
    plain = matplotlib.axes.Axes.barh

    def barh(self, y, width, left, **style):
        bars.append((self, left))
        return plain(self, y, width, left=left, **style)

    monkeypatch.setattr(matplotlib.axes.Axes, "barh", barh)
    write_run(tmp_path / "a", "full", MIXED)
    write_run(tmp_path / "b", "partial", [s._replace(start=s.start + 100, end=s.end + 100) for s in MIXED])
    figure, runs = tmp_path / "both.png", [str(tmp_path / "a"), str(tmp_path / "b")]
    monkeypatch.setattr("sys.argv", ["timeline.py", *runs, "--steps", "0", "1", "--figure", str(figure)])
    tl.main()
    top, bottom = dict.fromkeys(axes for axes, _ in bars)
    first, second = ([left for axes, left in bars if axes is row] for row in (top, bottom))
    assert min(first) == 0 and first == pytest.approx(second)
    assert top.get_shared_x_axes().joined(top, bottom) and top.get_position().y0 > bottom.get_position().y0
    assert [axes.get_title(loc="left") for axes in (top, bottom)] == [
        f"{tmp_path}/a: full colocation, 2 ranks", f"{tmp_path}/b: partial colocation, 2 ranks",
    ]  # fmt: skip
    assert matplotlib.image.imread(figure).shape[1] > 1000


@pytest.mark.parametrize("steps,message", [(("7", "9"), "has no steps 7 to 9"), (("0", "1"), "is not what a run left behind")])
def test_nothing_to_draw_is_said_in_one_line(tmp_path, monkeypatch, steps, message):
    run = tmp_path / "run"
    if steps[0] == "7":
        write_run(run, "full", MIXED)
    monkeypatch.setattr("sys.argv", ["timeline.py", str(run), "--steps", *steps, "--figure", str(tmp_path / "x.png")])
    with pytest.raises(SystemExit, match=message) as error:
        tl.main()
    assert "\n" not in str(error.value) and not (tmp_path / "x.png").exists()


def test_the_figure_starts_at_its_first_span(tmp_path, monkeypatch):
    """Of 12 steps the last three."""
    import matplotlib.axes

    bars = []
    monkeypatch.setattr(matplotlib.axes.Axes, "barh", lambda self, y, width, left, alpha, **style: bars.append((y, width, left, alpha)))
    spans = [tl.Span("rollout", 1, 10.0 * i, 10.0 * i + 4, i) for i in range(12)]
    spans += [tl.Span("train", 1, 10.0 * i + 5, 10.0 * i + 6, i) for i in range(12)]
    spans.append(tl.Span("rollout", 1, 120.0, 121.0, 12))  # the evaluation at the end belongs to no step
    tl.draw([tl.Picture("t", tl.of_steps(spans, -3, -1), 2)], tmp_path / "timeline.png")
    drawn = {(10.0 * i + offset, width) for i in range(3) for offset, width in ((0, 4.0), (5, 1.0))}
    assert {(left, width) for _, width, left, _ in bars} == drawn
    assert {y for y, *_ in bars} == {0}
    assert {alpha for *_, alpha in bars} == {1.0, 0.35 + 0.65 / 2}  # training; one request where two have room


# ---------------------------------------------------------------- the metrics of a step


def facts(**changes):
    """One controller's facts in which nothing happened."""
    names = ("truncated", "aborted", "filtered", "groups", "carried", "failed", "waves", "padded", "answers_keyed", "answers_wrong")
    nothing = dict.fromkeys((*names, "timeouts", "wrong_accepted", "dp_rank", "work"), 0)
    nothing |= {name: [] for name in ("kept_rewards", "rewards", "verdicts", "lengths", "latencies")}
    seconds = dict.fromkeys(("serve", "rollout", "genrm", "train", "switch", "sync"), 0.0)
    nothing |= {"seconds": seconds, "request_seconds": {"rollout": 0.0, "genrm": 0.0}}
    assert changes.keys() <= nothing.keys()
    return nothing | changes


FIRST = facts(
    verdicts=[True, False, True, False, False, False],
    kept_rewards=[1.0, 0.0, 1.0, 0.0], rewards=[1.0, 0.0, 1.0, 0.0, 0.0, 0.0], lengths=[10, 20, 30, 40, 50, 60], latencies=[0.1, 0.4],
    truncated=1, filtered=1, groups=3, carried=0, waves=2, padded=1, answers_keyed=6, answers_wrong=4, wrong_accepted=1, failed=0,
    timeouts=2, dp_rank=0, work=300,
    seconds=dict(serve=4.0, rollout=3.0, genrm=2.0, train=1.0, switch=0.5, sync=0.1), request_seconds=dict(rollout=12.0, genrm=1.0),
)  # fmt: skip
SECOND = facts(
    verdicts=[True, True, False, True, True],
    kept_rewards=[1.0, 1.0, 0.0, 1.0], rewards=[1.0, 1.0, 0.0, 1.0, 1.0], lengths=[10, 10, 10, 10, 10, 90], latencies=[0.2, 0.3],
    truncated=0, aborted=2, filtered=2, groups=5, carried=1, waves=2, padded=1, answers_keyed=4, answers_wrong=1, failed=1,
    dp_rank=1, work=100,
    seconds=dict(serve=3.9, rollout=3.5, genrm=1.0, train=1.5, switch=0.4, sync=0.3), request_seconds=dict(rollout=4.0, genrm=3.0),
)  # fmt: skip


def test_metrics_of_hand_worked_facts():
    """Two controllers; every number worked out by hand."""
    metrics = report.summarize([FIRST, SECOND], rollout_capacity=8, genrm_capacity=2)
    expected = {
        "reward/mean": 5 / 8, "reward/unfiltered_mean": 6 / 11, "reward/zero_std_frac": 3 / 8,
        "rollout/response_len_mean": 350 / 12, "rollout/response_len_max": 90, "rollout/tokens": 350, "rollout/truncated_frac": 1 / 12,
        "rollout/waves": 2, "rollout/aborted": 2, "rollout/padded_groups": 1, "rollout/carried_groups": 1,
        "rollout/correct_frac": 1 / 2,
        "genrm/accept_frac": 6 / 11, "genrm/failed": 1, "genrm/false_positive_frac": 1 / 5, "genrm/p50_s": 0.3, "genrm/p99_s": 0.4,
        "genrm/timeouts": 2, "balance/max_over_mean": 1.5, "occupancy/rollout": 16 / (8 * 4.0), "occupancy/genrm": 4 / (2 * 4.0),
        "time/serve_s": 4.0, "time/rollout_s": 3.5, "time/genrm_s": 2.0, "time/train_s": 1.5, "time/switch_s": 0.5, "time/sync_s": 0.3,
    }  # fmt: skip
    assert metrics == pytest.approx(expected)


def test_metrics_of_a_step_in_which_nothing_happened():
    """No division by zero; what only answer keys can tell is left out."""
    metrics = report.summarize([facts(), facts(dp_rank=1)], 4, 4)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["reward/mean"] == metrics["genrm/p99_s"] == metrics["occupancy/rollout"] == 0
    assert "genrm/false_positive_frac" not in metrics and "rollout/correct_frac" not in metrics
    assert report.summarize([facts(answers_keyed=3)], 4, 4)["genrm/false_positive_frac"] == 0


def test_ranks_of_one_model_parallel_group_count_once_in_the_balance():
    """Four ranks, tp 2: each data-parallel rank's tokens are reported by two ranks."""
    four = [facts(dp_rank=rank // 2, work=(100, 300)[rank // 2]) for rank in range(4)]
    assert report.summarize(four, 1, 1)["balance/max_over_mean"] == 1.5


def group_of(prompt_id, *rewards, **fields):
    judged = [dict(reward=reward, verdict=None if reward is None else reward == 1) for reward in rewards]
    return [
        Sample(prompt_id, i, [1, 2], "q", "5", response=[7] * (i + 1), finish="stop", **each, **fields) for i, each in enumerate(judged)
    ]


def facts_of(groups, kept, surplus=(), short=0, controllers=1):
    """local_facts of one controller that drew these groups."""
    served = controller.Served(waves=2)
    controller.fill(served, {group[0].prompt_id: group for group in groups}, set(kept), set(surplus), short, controllers)
    answers = {id(s): ("5" if s.index % 2 == 0 else "6") for group in groups for s in group}
    judge = SimpleNamespace(final_answer=lambda sample: answers[id(sample)], latencies=[0.5], timeouts=3)
    job = SimpleNamespace(judge=judge, actor=SimpleNamespace(dp_rank=1, cost=lambda tokens: 10 * tokens))
    spans = spans_of([(0, 2), (1, 2)]) + spans_of([(1, 1)], "genrm", 1) + spans_of([(0, 4)], "serve")
    for sample in served.kept:
        sample.advantages = [0.5] * len(sample.response)
    return report.local_facts(served, served.kept + served.padding, spans, job)


def test_local_facts_on_a_hand_worked_step():
    """Three groups: one kept, one carried, one filtered, which pads the batch and isn't trained on. Odd answers are wrong."""
    found = facts_of([group_of(4, 1.0, 0.0), group_of(5, 0.0, 1.0), group_of(6, 0.0, 0.0)], kept=[4], surplus=[5], short=1)
    found["seconds"] = {name: value for name, value in found["seconds"].items() if value}
    assert found == {
        "kept_rewards": [1.0, 0.0], "rewards": [1.0, 0.0, 0.0, 0.0, 0.0, 1.0], "lengths": [1, 2, 1, 2, 1, 2],
        "verdicts": [True, False, False, False, False, True],
        "truncated": 0, "aborted": 0, "filtered": 1, "groups": 3, "carried": 1, "waves": 2, "padded": 1,
        "answers_keyed": 6, "answers_wrong": 3, "wrong_accepted": 1, "failed": 0,
        "latencies": [0.5], "timeouts": 3, "dp_rank": 1, "work": 10 * (2 * 2 + 3),
        "seconds": {"serve": 4.0, "rollout": 3.0, "genrm": 1.0}, "request_seconds": {"rollout": 4.0, "genrm": 1.0},
    }  # fmt: skip


@pytest.mark.parametrize("kept", [[4], []])
def test_failed_judgements_are_counted(kept):
    """A sample without a verdict is dropped AND counted, in kept groups as in others; its tokens were generated, too."""
    found = facts_of([group_of(4, 1.0, 0.0, None)], kept=kept)
    assert found["failed"] == 1
    assert found["lengths"] == [1, 2, 3] and found["rewards"] == [1.0, 0.0]


# ---------------------------------------------------------------- what rank 0 writes


def test_a_report_writes_rows_samples_and_pictures(tmp_path):
    """One JSON object a step with everything measured before it, two whole groups' first samples, trace and picture at the end."""
    from tests.fakes import FakeWorld, VirtualClock

    (tmp_path / "spans").mkdir()
    config = SimpleNamespace(steps=1, answers_per_prompt=2)
    progress = SimpleNamespace(line=lambda text: None, step=lambda *args: None)
    loop = VirtualClock()
    line = tl.Timeline(0, loop.time, tmp_path / "spans")
    pool = SimpleNamespace(capacity=4, engines=[None] * 3)
    judge = SimpleNamespace(final_answer=lambda sample: "5", latencies=[], timeouts=0)
    job = SimpleNamespace(timeline=line, rollout=pool, genrm=pool, judge=judge, actor=SimpleNamespace(dp_rank=0))
    job.state = controller.State(groups_per_kept=1.25)
    written = report.Report(config, FakeWorld(0, 1, {}), tmp_path, progress, lambda tokens: "<b>*" * len(tokens))
    served = controller.Served(waves=1)
    controller.fill(served, {i: group_of(i, 1.0, 0.0, critique="c") for i in range(3)}, {0, 1, 2}, set(), 0, 1)

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
    assert (first["split/rollout_ranks"], first["rollout/groups_per_kept"], first["perf/tokens_per_s"]) == (3, 1.25, 9 / 4)
    assert last == {"step": 1, "eval/accuracy": 0.75}
    samples = [json.loads(row) for row in (tmp_path / "samples.jsonl").open()]
    keys = {"step", "prompt_id", "question", "answer_key", "response", "finish", "critique", "verdict", "reward"}
    assert [s["prompt_id"] for s in samples] == [0, 1] and all(s.keys() == keys for s in samples)
    assert samples[0]["response"] == "<b>*" and samples[0]["reward"] == 1.0
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (tmp_path / "timeline.png").stat().st_size > 1000
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
