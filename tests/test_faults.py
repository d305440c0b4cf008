"""Faults in a run: engines that die or hang, stops, updates that aren't finite.

On a virtual clock, then on real servers.
"""

import asyncio
import functools
import json
import shutil

import psutil
import pytest
from columns import timing_free
from fakes import PROBE_S, RESTART_S, FakeActor, FakeCritic, simulate
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_command import Run
from test_serving import check_prompts, check_tokens, served_by, to_text

LAYOUTS = [("full", 1), ("full", 2), ("full", 4), ("partial", 2), ("partial", 4)]


def strike(verb, role, rank):
    """An event: `die` or `hang` of the engines of a role, on one rank or on all (None)."""

    def event(servers, controllers):
        for server in servers:
            if server.role == role and rank in (None, server.rank):
                {"die": server.die, "hang": server.hang}[verb]()

    return event


def trained(controllers, step):
    """What a step trained on: prompts, answers, rewards."""
    return sorted(
        (s.prompt_id, s.index, to_text(s.response), s.reward)
        for each in served_by(controllers, step)
        for s in each.kept
    )


UNBROKEN = dict(steps=4, max_refill_waves=30, eval_every=3)


@functools.cache
def without_faults(mode, size):
    """The controllers of a run that nothing happens to."""
    return simulate(mode, size, **UNBROKEN)[0]


def check_as_unbroken(controllers):
    """It trained on the samples of a run without faults, saw the same accuracies, and every prompt and token
    is accounted for.
    """
    check_prompts(controllers)
    check_tokens(controllers)
    unbroken = without_faults("full", 1)
    for step in range(UNBROKEN["steps"]):
        assert (
            trained(controllers, step) == trained(unbroken, step) and len(trained(controllers, step)) == 8 * 4
        )
    assert all(c.report.accuracies == unbroken[0].report.accuracies for c in controllers)
    assert all(c.report.restarts == controllers[0].report.restarts for c in controllers)


def seconds_of(controllers, step, name="serve"):
    """Start and end of a step's span on rank 0."""
    return next(span for span in controllers[0].report.steps[step][3] if span.name == name)[2:4]


# ---------------------------------------------------------------- engines

FAULTS = st.tuples(
    st.floats(0.1, 30),
    st.sampled_from(["die", "hang"]),
    st.sampled_from(["rollout", "genrm"]),
    st.sampled_from([None, 0, 1, 2, 3]),
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(LAYOUTS), st.lists(FAULTS, min_size=1, max_size=2))
def test_a_run_with_faults_trains_on_the_same_samples(layout, faults):
    """Whichever engine dies or hangs, and whenever: awake, asleep, on its way, or while another one starts.
    """
    mode, size = layout
    events = [(seconds, strike(verb, role, rank)) for seconds, verb, role, rank in faults]
    controllers, _ = simulate(mode, size, events=events, **UNBROKEN)
    check_as_unbroken(controllers)


def middle_of_serving(mode, size, step):
    """A moment at which answers are written in a run without faults."""
    start, _ = seconds_of(without_faults(mode, size), step)
    return start + 0.35


@pytest.mark.parametrize("mode,size", LAYOUTS)
@pytest.mark.parametrize("verb,after_s", [("die", 0), ("hang", PROBE_S)])
def test_an_engine_lost_in_mid_wave(mode, size, verb, after_s):
    """What it owed is written by others, if there are any; it is started again and asked again in the next
    step.
    """
    moment = middle_of_serving(mode, size, 1)
    controllers, _ = simulate(mode, size, events=[(moment, strike(verb, "rollout", 0))], **UNBROKEN)
    check_as_unbroken(controllers)
    assert sum(controllers[0].report.restarts) == 1
    (note,) = [note for note in controllers[0].report.notes if "is started again" in note]
    assert (
        note
        == f"the rollout engine of rank 0 {'died' if verb == 'die' else 'gave no sign of life'}: it is started again"
    )
    (engine,) = [engine for engine in controllers[0].rollout.all_engines if engine.rank == 0]
    back = moment + after_s + RESTART_S
    asked = [(sent, version) for sent, version in engine.server.asked if sent > moment + after_s]
    assert asked and asked[0][0] >= back and {version for _, version in asked} == {*range(asked[0][1], 5)}
    if [mode, size] not in (
        ["full", 1],
        ["partial", 2],
    ):  # others were there: it sat out until all were pushed weights
        assert asked[0][1] > 1


@pytest.mark.parametrize("mode,size", LAYOUTS)
def test_all_rollout_engines_die(mode, size):
    """In the middle of a step they come back with the weights of that step, and it is finished."""
    moment = middle_of_serving(mode, size, 1)
    controllers, log = simulate(mode, size, events=[(moment, strike("die", "rollout", None))], **UNBROKEN)
    check_as_unbroken(controllers)
    engines = {engine.rank for engine in controllers[0].rollout.engines}
    assert controllers[0].report.restarts == [0, len(engines), 0, 0]
    assert log.count((0, "take", "actor")) == 1 + 4 + 1  # it woke once more, to push
    for engine in controllers[0].rollout.engines:
        asked = [version for sent, version in engine.server.asked if sent > moment]
        assert asked[0] == 1 and sorted(asked) == asked


@pytest.mark.parametrize("mode,size", LAYOUTS)
@pytest.mark.parametrize("role", ["rollout", "genrm"])
@pytest.mark.parametrize("verb", ["die", "hang"])
def test_an_engine_lost_asleep(mode, size, role, verb):
    """It is found when it is to wake, and started again then."""
    training, _ = seconds_of(without_faults(mode, size), 1, "train")
    rank = size - 1 if role == "genrm" else 0
    controllers, _ = simulate(mode, size, events=[(training + 0.1, strike(verb, role, rank))], **UNBROKEN)
    check_as_unbroken(controllers)
    assert sum(controllers[0].report.restarts) == 1
    assert (
        sum(
            f"the {role} engine of rank {rank} didn't answer: it is started again" == note
            for note in controllers[0].report.notes
        )
        == 1
    )


def test_a_judge_is_welcome_at_once():
    """One of two genrm engines dies: it is asked again in the same step, for its weights come from disk."""
    slow = dict(UNBROKEN, steps=1, prompts_per_step=16, rollout_ranks=2, meet_every_s=0.5)

    def slowly(servers):
        for server in servers:
            server.server.pace = 0.4

    unbroken, _ = simulate("partial", 4, **slow, prepare=slowly)
    start, end = seconds_of(unbroken, 0)
    controllers, _ = simulate(
        "partial", 4, **slow, prepare=slowly, events=[(start + 5, strike("die", "genrm", 3))]
    )
    assert trained(controllers, 0) == trained(unbroken, 0)
    (engine,) = [engine for engine in controllers[0].genrm.all_engines if engine.rank == 3]
    assert any(start + 5 + RESTART_S <= sent < end for sent, _ in engine.server.asked)


@pytest.mark.parametrize("mode,size", LAYOUTS)
@pytest.mark.parametrize("role", ["rollout", "genrm"])
def test_an_engine_that_never_starts_again_stops_every_rank(mode, size, role):
    """It fails a second and a third time as it starts; its log's end is shown."""
    moment, rank = middle_of_serving(mode, size, 1), size - 1 if role == "genrm" else 0

    def for_good(servers, controllers):
        for server in servers:
            server.starts = 0
        strike("die", role, rank)(servers, controllers)

    message = f"the {role} engine of rank {rank} failed 3 times in a row: it didn't start again: its log; the end of its log"
    controllers = []
    with pytest.raises(ValueError, match=message):
        simulate(mode, size, events=[(moment, for_good)], controllers=controllers, **UNBROKEN)
    assert len({len(c.report.steps) for c in controllers}) == 1  # other engines may finish steps meanwhile


@pytest.mark.parametrize("deaths,stops", [(1, False), (2, False), (3, True)])
def test_failures_are_forgiven_when_a_step_is_done(deaths, stops):
    """The only rollout engine dies once, twice or three times in every step, each time just after it was
    pushed weights.
    """
    left = []

    def die_again(c):
        if c.world.rank == 0:
            (engine,), end_step, wake = c.rollout.own, c.rollout.end_step, c.rollout.wake_kv_cache

            def again():
                left[:] = [deaths]
                return end_step()

            async def wake_and_die():
                await wake()
                if left and left[0]:
                    left[0] -= 1
                    asyncio.get_running_loop().call_later(0.2, engine.server.die)

            c.rollout.end_step, c.rollout.wake_kv_cache = again, wake_and_die

    if stops:
        with pytest.raises(
            ValueError, match="rollout engine of rank 0 failed 3 times in a row: it died; the end of its log"
        ):
            simulate("partial", 2, prepare_job=die_again, **UNBROKEN)
    else:
        controllers, _ = simulate("partial", 2, prepare_job=die_again, **UNBROKEN)
        check_as_unbroken(controllers)
        assert controllers[0].report.restarts == [0] + [deaths] * 3


# ---------------------------------------------------------------- stops


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(LAYOUTS), st.floats(0, 15), st.sampled_from([1.0, 1.5]), st.booleans(), st.integers(0, 3)
)
@example(("partial", 2), 0.0, 1.0, False, 0)
def test_a_stop_leaves_the_state_of_the_steps_start(layout, seconds, over_dispatch, partial_rollout, rank):
    """Asked of any rank at any time: all end at the same step, save once, and the prompts to come are those
    of an unbroken run.
    """
    mode, size = layout
    options = dict(UNBROKEN, over_dispatch=over_dispatch, partial_rollout=partial_rollout)

    def ask(servers, controllers):
        controllers[rank % size].stop.asked = 15

    controllers, _ = simulate(mode, size, events=[(seconds, ask)], **options)
    unbroken, _ = simulate(mode, size, **options)
    (done,) = {c.state.step for c in controllers}
    assert [c.stopping for c in controllers] == (
        [15] * size if done < 4 or controllers[0].stopping else [0] * size
    )
    if not controllers[0].stopping:
        return
    for c in controllers:
        ((step, cursor, buffer),) = c.checkpoints.saved
        assert step == done == c.placement.actor.version == len(c.report.steps)
        to_come = (buffer + list(range(cursor, 100)))[:50]
        report = c.report
        before = (
            report.buffers[done - 1] + list(range(report.cursors[done - 1], 100))
            if done
            else list(range(100))
        )
        assert to_come == before[:50]
    if over_dispatch == 1:
        assert all(trained(controllers, step) == trained(unbroken, step) for step in range(done))


def test_a_stop_while_every_engine_is_down():
    """Nobody waits for answers that will not be needed."""
    moment = middle_of_serving("partial", 2, 1)

    def ask(servers, controllers):
        controllers[1].stop.asked = 2

    controllers, _ = simulate(
        "partial", 2, events=[(moment, strike("die", "rollout", None)), (moment + 2, ask)], **UNBROKEN
    )
    assert [c.checkpoints.saved[0][0] for c in controllers] == [1, 1]


# ---------------------------------------------------------------- updates that aren't finite


@pytest.mark.parametrize("model,algorithm", [(FakeActor, "grpo"), (FakeCritic, "ppo")])
@pytest.mark.parametrize("skipped,steps_done", [({1, 2}, 4), ({0, 2, 3}, 4), ({1, 2, 3}, 3)])
def test_updates_in_a_row_that_are_not_finite_stop_the_run(
    monkeypatch, skipped, steps_done, model, algorithm
):
    """Three of them, the actor's or a critic's, with the samples of the last one in a file; fewer only cost
    their update.
    """
    update, settings = model.update, {**UNBROKEN, "algorithm": algorithm}

    async def sometimes(self, mini_batches):
        version = self.version
        return await update(self, mini_batches) | {f"{model.__name__}/not_finite": float(version in skipped)}

    monkeypatch.setattr(model, "update", sometimes)
    controllers = []
    if steps_done == 4:
        simulate("partial", 2, controllers=controllers, **settings)
    else:
        with pytest.raises(ValueError, match=r"--max-skips 3: .* in OUT/skipped_samples\.jsonl"):
            simulate("partial", 2, controllers=controllers, **settings)
        assert all(c.report.dumped == c.placement.actor.batches[-1] for c in controllers)
    assert [len(c.report.steps) for c in controllers] == [steps_done] * 2


# ---------------------------------------------------------------- real runs

SHORT = [
    "--steps",
    "5",
    "--prompts-per-step",
    "6",
    "--eval-every",
    "3",
    "--engine-probe-s",
    "8",
    "--save-every",
    "2",
]


def real_run(folder, port, *arguments, launch=()):
    return Run(folder, port, [*SHORT, *arguments], launch=launch)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What every other run of this seed must come to."""
    run = real_run(tmp_path_factory.mktemp("undisturbed") / "run", 24000).start().finish()
    assert run.status == 0, run.stderr + run.stdout
    return run


def what_it_came_to(run):
    """Of every step: the metrics that don't depend on timing."""
    return [timing_free(json.loads(line)) for line in (run.folder / "out" / "metrics.jsonl").open()]


def samples_of(run):
    return [json.loads(line) for line in (run.folder / "out" / "samples.jsonl").open()]


def check_as(run, undisturbed):
    assert run.status == 0, run.stderr + run.stdout
    run.check_nothing_is_left()
    assert what_it_came_to(run) == what_it_came_to(undisturbed) and samples_of(run) == samples_of(undisturbed)


def rows_done(count):
    """A condition for wait_for: so many steps are done."""

    def condition(run):
        metrics = run.folder / "out" / "metrics.jsonl"
        return metrics.is_file() and metrics.read_text().count("\n") >= count

    return condition


def ranks_of(run):
    """Children of torchrun: a rank's own child that writes a checkpoint has the same command line."""
    everything = list(run.processes())
    (launcher,) = [
        process.pid for process, command in everything if "torchrun" in command and " run.py " in command
    ]
    return [
        process
        for process in psutil.Process(launcher).children()
        if " run.py " in " ".join(process.cmdline())
    ]


def engine_of(run, role, name):
    """The processes called `name` of the only server of a role."""
    everything = list(run.processes())
    # rollout on rank 0, genrm on rank 1
    port = f"--port {run.port + 2 * (role == 'genrm') + (role == 'genrm')} "
    (server,) = [process for process, command in everything if "cpu.sglang" in command and port in command]
    return [
        process
        for process, command in everything
        if name in command and server.pid in (process.pid, process.ppid())
    ]


def test_a_real_run_loses_both_its_engines(tmp_path, undisturbed):
    """kill -9 of the rollout server's scheduler in one step, SIGSTOP of the genrm server in another: the same
    numbers in the end.
    """
    run = real_run(tmp_path / "run", 24020).start()
    try:
        run.wait_for(rows_done(1))
        (scheduler,) = engine_of(run, "rollout", "sglang::scheduler")
        scheduler.kill()
        run.wait_for(rows_done(3))
        (server,) = engine_of(run, "genrm", "cpu.sglang")
        server.suspend()
    finally:
        run.finish(600)
    check_as(run, undisturbed)
    assert "the rollout engine of rank 0" in run.stdout and "the genrm engine of rank 1" in run.stdout
    rows = [json.loads(line) for line in (run.folder / "out" / "metrics.jsonl").open()]
    assert sum(row["faults/engine_restarts"] for row in rows[:-1]) == 2


def test_a_real_run_is_stopped_and_goes_on(tmp_path, undisturbed):
    """SIGTERM to one rank: what is done is saved, all end well, and the command in the last line goes on to
    the same numbers.

    Ctrl-C is test_command.py's.
    """
    run = real_run(tmp_path / "run", 24040).start()
    try:
        run.wait_for(rows_done(2))
        ranks_of(run)[1].terminate()
    finally:
        run.finish(60)
    assert "Traceback" not in run.stderr + run.stdout
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("stopped after")]
    assert "of 5 steps; go on with: torchrun --nproc-per-node 2 run.py --out" in line
    assert run.status == 0
    run.check_nothing_is_left()
    done = len((run.folder / "out" / "metrics.jsonl").read_text().splitlines())
    again = real_run(tmp_path / "again", 24040)
    shutil.copytree(run.folder / "out", again.folder / "out")
    again.start().finish()
    assert f"step_{done}, after {done} steps" in again.stdout
    check_as(again, undisturbed)


def test_a_rank_that_dies_is_started_again_by_torchrun(tmp_path, undisturbed):
    """kill -9 of one rank after a save: torchrun starts all ranks again, and the run goes on by itself."""
    run = real_run(tmp_path / "run", 24080, launch=("--max-restarts", "1")).start()
    try:
        run.wait_for(lambda run: (run.folder / "out" / "checkpoints" / "step_2").is_dir())
        ranks_of(run)[1].kill()
    finally:
        run.finish(600)
    check_as(run, undisturbed)
    assert "step_2, after 2 steps" in run.stdout or "step_4, after 4 steps" in run.stdout
