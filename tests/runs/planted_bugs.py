"""Measures what each test file finds: plants bugs, one after another, in a copy of the project.

    python tests/runs/planted_bugs.py                  every bug: does the expected file find it?
    python tests/runs/planted_bugs.py --all            every bug: all files that find it (hours)
    python tests/runs/planted_bugs.py --module scheduling --files scheduling/test_balance.py --all

tests/planted/MODULE.toml lists the bugs of a root file or a room, one for each promise that it keeps. A bug
replaces `old`, which occurs once in `file`, with `new`. A file finds a bug if one of its tests fails. The
exit status is 1 if a bug is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLANTED = ROOT / "tests" / "planted"
DEFAULT_TIER = "not slow and not long and not gpu"
NO_TESTS = 5  # pytest's exit status


@dataclass(frozen=True)
class Bug:
    """A small mistake in one file of the product."""

    module: str  # root file or room: the name of its list
    name: str
    file: str
    old: str
    new: str
    found_by: str  # a test file of the default tier that finds it, from tests/ on

    def planted(self) -> str:
        """Return the file's text with the bug. Raises AssertionError unless the place is there once."""
        text = (ROOT / self.file).read_text()
        count = text.count(self.old)
        assert count == 1, f"{self.name}: `{self.old}` stands {count} times in {self.file}"
        return text.replace(self.old, self.new)


def read_bugs() -> list[Bug]:
    """Return all planted bugs, in the order of their lists."""
    lists = {path.stem: tomllib.loads(path.read_text()) for path in sorted(PLANTED.glob("*.toml"))}
    return [Bug(module, name, **row) for module in lists for name, row in lists[module].items()]


def copy_project(to: Path) -> None:
    """Copy every file that git tracks or would add, in its current state."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, to / name)


def finds(project: Path, test_file: str, timeout_s: float) -> bool:
    """Return True if a test of a file fails. A test that doesn't end in time has also found the bug."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    command += ["-m", DEFAULT_TIER, f"tests/{test_file}"]
    settings = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    how = dict(cwd=project, env=settings, start_new_session=True)
    quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with subprocess.Popen(command, **how, **quiet) as process:
        try:
            return process.wait(timeout_s) not in (0, NO_TESTS)
        except subprocess.TimeoutExpired:
            return True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # includes what the tests left running


def finders(bug: Bug, files: list[str], timeout_s: float) -> Iterator[str]:
    """Return the test files that find a bug."""
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder)
        copy_project(project)
        (project / bug.file).write_text(bug.planted())
        for file in files:
            if finds(project, file, timeout_s):
                yield file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--module", nargs="+", help="lists of bugs; default: all")
    parser.add_argument("--bug", nargs="+", help="names of bugs; default: all")
    parser.add_argument("--files", nargs="+", help="with --all: test files; default: all")
    parser.add_argument("--all", action="store_true", help="run all files, not only `found_by`")
    parser.add_argument("--jobs", type=int, default=1, help="bugs at a time")
    parser.add_argument("--timeout-s", type=float, default=600, help="limit for one test file")
    arguments = parser.parse_args()
    bugs = [bug for bug in read_bugs() if bug.module in (arguments.module or [bug.module])]
    bugs = [bug for bug in bugs if bug.name in (arguments.bug or [bug.name])]
    found = (ROOT / "tests").rglob("test_*.py")
    files = arguments.files or sorted(str(path.relative_to(ROOT / "tests")) for path in found)
    missed = 0

    def look(bug: Bug) -> tuple[Bug, list[str]]:
        asked = files if arguments.all else [bug.found_by]
        return bug, list(finders(bug, asked, arguments.timeout_s))

    with ThreadPoolExecutor(arguments.jobs) as pool:
        for bug, found in pool.map(look, bugs):
            missed += not found
            print(f"{bug.module}.{bug.name:40} {' '.join(found) or 'MISSED'}", flush=True)
    print(f"{len(bugs)} bugs, {missed} missed")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
