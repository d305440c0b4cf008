"""The project without an extra: a copy with the extra's row in extras/__init__.py and its files removed.

    python tests/runs/without_extras.py [NAME ...]      does the copy work? default: for each extra
    python tests/runs/without_extras.py --all           without any: the core

Every module is imported, and --dry-run and a step of the demo run. Pytest collects the core's test files; the
core passes the default tier except for tests that need extras, and makes the same samples as the whole.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from extras import EXTRAS
from tests.runs.planted_bugs import DEFAULT_TIER, copy_project
from tests.support.launched import free_ports
from tests.support.patience import run_process

AROUND = ("tests", "reproduce", "examples")  # outside the product
IN_A_SERVER = re.compile(r"^(from|import) sglang", re.MULTILINE)
IMPORT = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"


class Copy:
    """A copy of the project without some extras. modules: the names of the removed ones."""

    def __init__(self, folder: Path, names: Iterable[str]):
        self.folder = folder
        self.names = tuple(names)
        copy_project(folder)
        self.modules = set()
        for name in self.names:
            for gone in map(folder.joinpath, EXTRAS[name].files.split()):
                for path in [gone, *gone.rglob("*.py")]:
                    self.modules.add(module_of(path.relative_to(folder)))
                shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
        index = folder / "extras/__init__.py"
        index.write_text(without_rows(index.read_text(), self.names))

    def python(self, *command: object, **how) -> CompletedProcess[str]:
        settings = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ""}
        return run_process(
            sys.executable, *command, cwd=self.folder, env=os.environ | settings, **how
        )

    def check_imports(self) -> None:
        """Check that every module of the product can be imported; what imports SGLang needs a server."""
        names = []
        for path in self.folder.rglob("*.py"):
            own = path.relative_to(self.folder)
            if own.parts[0] not in AROUND and not IN_A_SERVER.search(path.read_text()):
                names.append(module_of(own))
        done(self.python("-c", IMPORT, *sorted(names)))

    def all_test_files(self) -> list[str]:
        paths = self.folder.glob("tests/**/test_*.py")
        return sorted(str(path.relative_to(self.folder)) for path in paths)

    def test_files(self) -> list[str]:
        """Return the test files that import no removed module, neither directly nor through others."""
        known = dict.fromkeys(self.modules, False)

        def is_whole(module: str) -> bool:
            if module not in known:
                known[module] = True  # while its imports are followed: files may import each other
                path = self.folder / (module.replace(".", "/") + ".py")
                if module.partition(".")[0] in AROUND and path.is_file():
                    known[module] = all(map(is_whole, imports_of(path)))
            return known[module]

        return [file for file in self.all_test_files() if is_whole(module_of(Path(file)))]

    def check_collects(self) -> None:
        """Check that pytest collects those files."""
        files = self.test_files()
        done(self.python("-m", "pytest", "--collect-only", "-p", "no:cacheprovider", *files))

    def samples(self, *arguments: object) -> bytes:
        """Run the demo; return its samples.jsonl."""
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", 2, "--standalone", "run.py")
        done(self.python(*torchrun, "--port", free_ports(), "--out", out, *arguments))
        return (out / "samples.jsonl").read_bytes()

    def check_tests(self) -> dict[str, int]:
        """Check that the default tier passes or ends with an extra's refusal. Return counts."""
        plugin = self.folder / "tests/asked_for_extras.py"
        plugin.write_text(PLUGIN.format(modules=sorted(self.modules)))
        settings = ("-q", "-n", 2, "-p", "tests.asked_for_extras", "-p", "no:cacheprovider")
        ran = self.python("-m", "pytest", *settings, "-m", DEFAULT_TIER, *self.test_files())
        done(ran)
        return {name: int(count) for count, name in re.findall(r"(\d+) (\w+)", ran.stdout[-200:])}


# a test that needs an extra is skipped: a module or file is gone, or a setting is refused
PLUGIN = """
import re
import pytest

NAMES = "|".join(map(re.escape, {modules!r}))
FILES = NAMES.replace(".", "/")
PARTS = [name.rpartition(".") for name in {modules!r}]
FROM = "|".join(f"cannot import name '{{name}}' from '{{room}}'" for room, _, name in PARTS)
GONE = re.compile(
    rf"No module named '({{NAMES}})'|{{FROM}}|No such file or directory: .*/({{FILES}})\\.py"
)
ASKED = re.compile(
    r"needs an extra with the hook|no extra has the row|unrecognized arguments: --|timeline\\.png|"
    r"--(mode|placement|schedule|judge-format) [^\\n]*: [^\\n]*(choose|unknown)|"
    r"(mode|placement|schedule|format) [\\w-]+ is unknown|no rule moves the split"
)

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if report.outcome != "failed":
        return
    if GONE.search(report.longreprtext) or ASKED.search(report.longreprtext):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, f"asks for an extra: {{call.excinfo.value}}")
"""


def module_of(path: Path) -> str:
    return str(path.with_suffix("")).replace("/", ".").removesuffix(".__init__")


def imports_of(path: Path) -> set[str]:
    """Return the modules that a file imports when it is imported itself, without those for types."""
    names = set()
    waiting = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        waiting += ast.iter_child_nodes(node)
    return names


def without_rows(text: str, names: Iterable[str]) -> str:
    """Return extras/__init__.py without some rows and the comment above each."""
    [table] = [
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXTRAS"
    ]
    lines = text.splitlines(keepends=True)
    for key, value in reversed([*zip(table.keys, table.values, strict=True)]):
        if key.value in names:
            first = key.lineno - 1
            while lines[first - 1].lstrip().startswith("#"):
                first -= 1
            del lines[first : value.end_lineno]
    return "".join(lines)


def done(ran: CompletedProcess[str]) -> None:
    assert ran.returncode == 0, f"{ran.args[1:4]}\n{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}"


def check_without(name: str, folder: Path) -> str:
    """Raise AssertionError if the project doesn't work without an extra. Return what was checked."""
    copy = Copy(folder, [name])
    copy.check_imports()
    if name != "dry run":
        done(copy.python("run.py", "--dry-run"))
    copy.samples("--steps", 1)
    gone = {*copy.all_test_files()} - {*copy.test_files()}
    return f"the demo runs; with it go {', '.join(sorted(gone))}"


def check_core(folder: Path) -> str:
    """Raise AssertionError if the core makes other samples than the whole. Return what was checked."""
    copy = Copy(folder / "core", EXTRAS)
    whole = Copy(folder / "whole", [])
    copy.check_imports()
    copy.check_collects()
    for mode in ("full", "partial"):
        expected = whole.samples("--mode", mode, "--steps", 6)
        assert copy.samples("--mode", mode, "--steps", 6) == expected, mode
    return "the same samples in full and partial mode"


def check_tests_of_core(folder: Path) -> str:
    """Raise AssertionError if the core fails a test of the default tier. Return their counts."""
    return str(Copy(folder / "core", EXTRAS).check_tests())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(EXTRAS))
    parser.add_argument("--all", action="store_true")
    given = parser.parse_args()
    checks = {name: partial(check_without, name) for name in given.names}
    if given.all:
        checks = {"the core": check_core, "its tests": check_tests_of_core}
    status = 0
    for name, check in checks.items():
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = check(Path(folder))
            except AssertionError as error:
                found = f"FAILED: {error}"
                status = 1
            print(f"{name}: {found}", flush=True)
    sys.exit(status)
