"""`pytest -n 2` runs the tests in two streams; --no-loadscope-reorder starts with real engines.

Hypothesis draws the same examples every time; HYPOTHESIS_PROFILE=fresh draws others. tests/ is a package, so
pytest puts the project's root on sys.path, and every import names its module from there.
"""

import asyncio
import gc
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

import extras
from tests.support.patience import LIMIT_S

for number in (signal.SIGHUP, signal.SIGINT):
    # nohup or & ignores it, and programs under test would inherit that
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)
extras.load()

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
hypothesis.settings.register_profile("fresh", print_blob=True, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

ENGINES = "test_command test_engine test_episode_runs test_forks test_image_engine"
ENGINES += " test_shard_runs test_machines test_one_file test_runs test_security test_walkthrough"

# The other slow files come first, so that both streams end at about the same time: those with runs of
# their own, then those that wait for engines, then those that fork ranks from one process, then by seconds
LONG = (
    "test_extras test_extra_runs test_examples test_rounding test_world "
    "test_lora test_apart test_executor test_checkpoint test_layouts test_teacher "
    "test_episode_training test_image_training test_shutdown test_user_rules test_actor "
    "test_faults test_placements test_memory test_sft test_plans test_simulation "
    "test_controller test_chaos test_cuda_path test_rollout test_decoder test_dry_run "
    "test_background_writer test_clips test_critic test_determinism test_gpu test_papers_measured"
)


def file_of(nodeid: str) -> str:
    return Path(nodeid.split("::")[0]).stem


def has_engines(nodeid: str) -> bool:
    return file_of(nodeid) in ENGINES.split()


def turn_of(nodeid: str) -> int:
    """Return the sort key of a test's file."""
    first = [None, *LONG.split()]
    name = None if has_engines(nodeid) else file_of(nodeid)
    return first.index(name) if name in first else len(first)


class TwoStreams(LoadScopeScheduling):
    """One stream runs the tests with real engines; the other runs all other files while engines compute.

    Two engine tests at once would wait for each other. The stream that finishes first takes the next file.
    """

    def _split_scope(self, nodeid: str) -> str:
        return "engines" if has_engines(nodeid) else nodeid.split("::")[0]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items) -> None:
    """Sort the slowest tests to the front."""
    items.sort(key=lambda item: turn_of(item.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Freeze what tests import: collecting it as garbage would take a sixth of the whole time."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


def pytest_addoption(parser) -> None:
    what = "run the tests of a GPU on the CPU, with small sizes"
    parser.addoption("--dry", action="store_true", help=what)


def pytest_configure(config) -> None:
    config.addinivalue_line("markers", "slow: runs in `make test-all`, not in `make test`")
    config.addinivalue_line("markers", "long: runs only in `make test-long`")
    config.addinivalue_line("markers", "gpu(part): needs a CUDA device; see test_gpu.py")


def pytest_unconfigure() -> None:
    """End the processes from which tests forked, and remove their folder."""
    from runtime import rendezvous
    from tests.workers import start

    start.close()
    rendezvous.close()


def pytest_terminal_summary(terminalreporter, config) -> None:
    """Print a table after `-m gpu`: each check with its figures or the reason why it was skipped."""
    if not config.option.markexpr.startswith("gpu"):
        return
    import torch

    from tests.support import gpu_report

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = map(torch.cuda.get_device_name, range(count))
    device = f"{', '.join(names) or 'no CUDA device'}; torch {torch.__version__}"
    table, failures = ["dry, on the CPU" if config.option.dry else device], []
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            what = report.nodeid.split("::test_")[-1].replace("_", " ")
            facts = [f"{name} {value}" for name, value in report.user_properties]
            facts += [report.longrepr[2]] if outcome == "skipped" else []
            failures += [(what, report.longreprtext)] if report.failed else []
            table.append(f"{what:60} | {outcome:7} | {', '.join(facts)}")
    terminalreporter.section(table[0])
    terminalreporter.write_line("\n".join(table[1:]))
    logs = sorted(config._tmp_path_factory.getbasetemp().rglob("*.log"))
    terminalreporter.line(f"to attach to a report: {gpu_report.write(table, failures, logs)}")


@pytest.fixture(scope="module")
def run():
    """Run coroutines on one event loop: an engine's HTTP session belongs to the loop that made it."""
    with asyncio.Runner() as runner:
        yield lambda coroutine: runner.run(asyncio.wait_for(coroutine, LIMIT_S))


@pytest.fixture
def single_rank(monkeypatch):
    """Make a process group of one rank and remove Megatron's groups afterwards."""
    import torch.distributed as dist

    monkeypatch.setenv("WORLD_SIZE", "1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield SimpleNamespace(rank=0, size=1)
    dist.destroy_process_group()
    gc.collect()


@pytest.fixture
def constants(monkeypatch):
    from tests.workers.parallel import set_constants

    set_constants(monkeypatch.setattr)


@pytest.fixture
def build():
    """Build trainers of a single rank from (kind, config, directory), after closing those built before."""
    import torch.distributed as dist

    from examples.make_demo.closing import close

    trainers = []

    def take_down() -> None:
        while trainers:
            close(trainers.pop())
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()

    def make(*wanted) -> list:
        take_down()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for kind, config, model_dir in wanted:
            trainers.append(kind(config, model_dir))
        return trainers

    yield make
    take_down()


def pytest_xdist_make_scheduler(config, log) -> TwoStreams:
    return TwoStreams(config, log)
